/* The processes that make commands: the launcher, nests, and what they clone.
 *
 * The launcher lives in the workload's cgroups; everything of the sandbox descends from
 * it, cloned as a child of the agent (CLONE_PARENT). So no command pays for entering
 * the v1 cgroups. Every command also needs a leaf of its own in the v2 tree, by which
 * its whole tree can be killed. Entering one waits for an RCU grace period, 8 ms on a
 * quiet machine, and container engines' seccomp profiles refuse clone3, which would
 * avoid it. Hence *nests*: a process that has entered a leaf once and clones, there,
 * one command after the other. What the agent keeps ready of them is in spares.c.
 *
 * A nest makes what will execute a program as vfork does: the child borrows its memory
 * until then, which costs a third of a copy (docs/adr/0031).
 */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define JOIN_MAX_MS 5000
#define BIRTH_STACK (8u << 20) /* as much as the longest arguments take, twice; most is never touched */

int launcher_fd = -1;
pid_t launcher_pid;
static struct stat first_root;

struct head { uint32_t number, present, kind; };

/* Sends what a message is about, descriptors (-1: absent, told by a mask) and bytes. */
static int send_message(int sock, struct head head, const int *fds, int count, const uint8_t *p,
                        size_t size)
{
    union { char raw[CMSG_SPACE(L_FDS * sizeof(int))]; struct cmsghdr align; } control;
    int present[L_FDS];
    size_t n = 0;
    for (int i = 0; i < count; i++)
        if (fds[i] >= 0) {
            head.present |= 1u << i;
            present[n++] = fds[i];
        }
    struct iovec io[2] = {{&head, sizeof head}, {(void *)(uintptr_t)p, size}};
    struct msghdr m = {.msg_iov = io, .msg_iovlen = 2, .msg_control = control.raw,
                       .msg_controllen = CMSG_SPACE(n * sizeof(int))};
    memset(&control, 0, sizeof control);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(c), present, n * sizeof(int));
    return sendmsg(sock, &m, MSG_NOSIGNAL) == (ssize_t)(sizeof head + size) ? 0 : -1;
}

int send_fds(int sock, uint32_t number, const int *fds, int count)
{
    return send_message(sock, (struct head){number, 0, 0}, fds, count, NULL, 0);
}

int send_launch(int sock, uint32_t number, const struct launch *l)
{
    struct head head = {number, 0, l->kind};
    return send_message(sock, head, l->fds, L_FDS, l->spec, l->spec_len);
}

/* The number of bytes behind the head, or -1: the agent is gone. */
static ssize_t recv_message(int sock, struct head *head, int *fds, int count, uint8_t *p,
                            size_t size)
{
    union { char raw[CMSG_SPACE(L_FDS * sizeof(int))]; struct cmsghdr align; } control;
    struct iovec io[2] = {{head, sizeof *head}, {p, size}};
    struct msghdr m = {.msg_iov = io, .msg_iovlen = 2, .msg_control = control.raw,
                       .msg_controllen = sizeof control.raw};
    ssize_t k;
    do
        k = recvmsg(sock, &m, MSG_CMSG_CLOEXEC);
    while (k < 0 && errno == EINTR);
    if (k < (ssize_t)sizeof *head)
        return -1;
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    size_t n = c ? (c->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0, at = 0;
    for (int i = 0; i < count; i++) {
        fds[i] = -1;
        if (head->present & 1u << i && at < n)
            memcpy(&fds[i], CMSG_DATA(c) + at++ * sizeof(int), sizeof(int));
    }
    return k - (ssize_t)sizeof *head;
}

/* The sandbox's root as the agent has it. A process that was being cloned in the moment
 * the shell got its root kept the old one; so every process is told before it acts. */
int root_fd(void)
{
    return open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
}

/* The warm shell's root is replaced once, by the sandbox's: whether this is that one. */
bool root_is_last(const struct stat *root)
{
    return root->st_ino != first_root.st_ino || root->st_dev != first_root.st_dev;
}

/* What a command reads that has no input; it stays open. */
int null_fd(void)
{
    static int fd = -1;
    if (fd < 0)
        fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return fd;
}

int root_enter(int fd)
{
    int failed = fchdir(fd) || chroot(".");
    close(fd);
    return failed ? -1 : 0;
}

/* Commands, and the nests they are made in, die before the launcher when memory runs out.
 * Of these the kernel takes what is largest, and nothing is smaller than a nest. */
static void be_first_to_go(void)
{
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (write(fd, "300", 3) < 0) {}
        close(fd);
    }
}

static int answer(int sock, uint32_t number, int32_t pid)
{
    struct reply r = {number, pid};
    return send(sock, &r, sizeof r, MSG_NOSIGNAL) == sizeof r ? 0 : -1;
}

static int nothing = -1; /* /dev/null of the agent, told with the root */

static void launch_close(struct launch *l)
{
    for (int i = 0; i < L_FDS; i++) {
        if (l->fds[i] >= 0 && l->fds[i] != nothing)
            close(l->fds[i]);
        l->fds[i] = -1;
    }
}

/* The next request for a command; false: the agent is gone. */
static bool take_request(int sock, struct launch *l, uint32_t *number)
{
    static uint8_t spec[SPEC_INLINE];
    struct head head;
    ssize_t n = recv_message(sock, &head, l->fds, L_FDS, spec, sizeof spec);
    if (n < 0)
        return false;
    *number = head.number;
    l->kind = head.kind;
    l->spec = spec;
    l->spec_len = (size_t)n;
    if (l->fds[L_ROOT] >= 0 && root_enter(l->fds[L_ROOT]))
        l->misplaced = errno;
    l->fds[L_ROOT] = -1;
    if (l->fds[L_NULL] >= 0) {
        close(nothing);
        nothing = l->fds[L_NULL];
    }
    if (l->fds[L_IN] < 0)
        l->fds[L_IN] = nothing;
    l->fds[L_NULL] = -1;
    return true;
}

/* What a command's child has to say goes the way of the claim. */
static void reports_to(struct command *c, int sock)
{
    if (c->l.kind == K_EXEC)
        c->l.fds[L_STATUS] = sock;
}

static void wait_for_command(int sock, int failed) __attribute__((noreturn));
static void wait_for_command(int sock, int failed)
{
    struct launch l = {.misplaced = failed};
    struct command c;
    uint32_t number;
    be_first_to_go();
    if (!take_request(sock, &l, &number))
        _exit(0);
    answer(sock, number, getpid()); /* whoever should have told it may be dead */
    command_read(&c, &l);
    policy_read(&c.policy, &l);
    reports_to(&c, sock);
    command_begin(&c);
}

struct birth { struct command c; int sock; uint32_t number; volatile bool told; };

static int born(void *of)
{
    struct birth *b = of;
    /* first, because the nest may die, and then nobody else knows it */
    b->told = !answer(b->sock, b->number, getpid());
    /* a session of its own costs a group of the scheduler, made and thrown away: what has a
     * terminal needs one */
    if (b->c.l.kind == K_SHELL || spec_u64(&b->c.spec, T_ROWS, 0))
        setsid();
    else
        setpgid(0, 0);
    command_begin(&b->c);
}

#ifdef __SANITIZE_ADDRESS__
#define BORROWS false /* its checker knows no second stack */
#else
#define BORROWS true
#endif

/* What executes a program borrows the nest's memory until then, and runs on a stack of its
 * own; a file operation gets a copy. */
static pid_t bear(struct birth *b)
{
    static char *stack;
    if (b->c.l.kind == K_FILE || !BORROWS) {
        pid_t pid = (pid_t)syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0);
        if (!pid)
            born(b);
        return pid;
    }
    if (!stack) { /* with a page below it that nothing may touch */
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK;
        char *p = mmap(NULL, BIRTH_STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (p == MAP_FAILED || mprotect(p, 4096, PROT_NONE))
            return -1;
        stack = p + BIRTH_STACK;
    }
    return clone(born, stack, CLONE_PARENT | CLONE_VM | CLONE_VFORK | SIGCHLD, b);
}

/* What a nest does: one command after the other until the agent closes. */
static void serve_commands(int sock) __attribute__((noreturn));
static void serve_commands(int sock)
{
    struct policy policy = {0};
    be_first_to_go();
    for (;;) {
        struct launch l = {0};
        struct birth b = {.sock = sock};
        if (!take_request(sock, &l, &b.number))
            break;
        policy_take(&policy, &l);
        if (l.kind == K_POLICY)
            continue;
        command_read(&b.c, &l);
        b.c.policy = policy;
        reports_to(&b.c, sock);
        pid_t pid = bear(&b);
        if (!b.told) {
            answer(sock, b.number, pid < 0 ? -errno : pid);
            kill(getppid(), SIGCHLD); /* the agent looks for answers when a process ends */
        }
        command_free(&b.c);
        launch_close(&l);
        if (policy.failed)
            break; /* another nest has another try */
    }
    _exit(0);
}

/* A cloned process: a nest, or a command to be. `leaf` is given where it must enter one. */
static void cloned(uint32_t number, int sock, int leaf) __attribute__((noreturn));
static void cloned(uint32_t number, int sock, int leaf)
{
    int failed = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setsid();
    if (leaf >= 0) {
        failed = cg_leaf_enter(leaf) ? errno : 0;
        close(leaf);
    }
    if (!(number & NEST_BIT))
        wait_for_command(sock, failed);
    if (failed)
        _exit(1);
    serve_commands(sock);
}

/* What the launcher does: a clone for each request until the agent closes. */
static void serve_clones(int sock) __attribute__((noreturn));
static void serve_clones(int sock)
{
    int fds[3];
    struct head head;
    while (!recv_message(sock, &head, fds, 3, NULL, 0)) {
        if (root_enter(fds[2]))
            break;
        pid_t pid = (pid_t)syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0);
        if (pid == 0) {
            close(sock);
            cloned(head.number, fds[0], fds[1]);
        }
        int failed = answer(sock, head.number, pid < 0 ? -errno : pid);
        for (int i = 0; i < 2; i++)
            if (fds[i] >= 0)
                close(fds[i]);
        if (failed)
            break;
    }
    _exit(0);
}

/* Closes all of the agent's descriptors but one: a copy of the connection here would
 * keep it open when the agent closes it. */
static int keep_only(int sock)
{
    if (sock != 3) {
        dup3(sock, 3, O_CLOEXEC);
        close(sock);
    }
    if (syscall(SYS_close_range, 4, ~0u, 0))
        for (int fd = 4; fd < 4096; fd++)
            close(fd);
    return 3;
}

/* Starts the launcher and waits until it has joined; replaces one that runs. */
int launcher_start(void)
{
    int pair[2];
    char ready = 0;
    if (!first_root.st_ino && stat("/", &first_root))
        return -1;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
        return -1;
    if (launcher_fd >= 0) {
        close(launcher_fd); /* the old one ends when it reads the end of its socket, */
        op_lost(-1);        /* and nobody hears what it had not answered */
    }
    launcher_fd = -1;
    nests_clear();
    pid_t pid = fork();
    if (pid == 0) {
        close(pair[0]);
        cg_join();
        int sock = keep_only(pair[1]);
        if (send(sock, "r", 1, MSG_NOSIGNAL) != 1)
            _exit(1);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGPIPE, SIG_DFL); /* what commands begin with */
        umask(022);
        if (setgroups(1, (gid_t[]){0})) {}
        serve_clones(sock);
    }
    close(pair[1]);
    struct pollfd p = {pair[0], POLLIN, 0};
    if (pid < 0 || poll(&p, 1, JOIN_MAX_MS) != 1 || recv(pair[0], &ready, 1, 0) != 1) {
        close(pair[0]);
        if (pid > 0)
            kill(pid, SIGKILL);
        return -1;
    }
    set_nonblock(pair[0]);
    launcher_fd = pair[0];
    launcher_pid = pid;
    return 0;
}

/* Gives the spec along: in the message itself, or as a memory file. `p` lives on until
 * the launch. */
void launch_spec(struct launch *l, const uint8_t *p, size_t n)
{
    if (n <= SPEC_INLINE) {
        l->spec = p;
        l->spec_len = n;
        return;
    }
    int fd = memfd_create("spec", MFD_CLOEXEC);
    if (fd >= 0 && write_all(fd, p, n) < 0) {
        close(fd);
        fd = -1;
    }
    l->fds[L_SPEC] = fd;
}
