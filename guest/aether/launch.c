/* The launcher and its spares.
 *
 * The launcher is a process that lives in the workload's cgroups; it clones children
 * for the agent (CLONE_PARENT), so no command pays for entering the v1 cgroups. Every
 * child also needs a leaf cgroup of its own, by which its whole tree can be killed.
 * Entering one costs an RCU grace period of milliseconds on a quiet machine (and
 * container engines' seccomp profiles refuse clone3, which would avoid it), so a few
 * children are made ahead of time: a spare sits in its leaf and waits for a command.
 * When the workload kills the launcher (a plain process of the sandbox), the agent
 * starts another one. */
#include "aether.h"

#include <errno.h>
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
#define EARLY_MAX 256

int launcher_fd = -1;
pid_t launcher_pid;

struct reply { uint32_t slot; int32_t pid; };
struct spare { bool used; int sock; struct place at; };

static struct spare spares[SPARES];
static uint32_t serial;
static uint64_t last_launch;
static int pending; /* children asked for without an answer yet */
static struct { pid_t pid; int status; } early[EARLY_MAX]; /* dead before their answer */
static int early_count;

/* Sends a number and descriptors (-1: absent, told by the mask). */
static int send_fds(int sock, uint32_t number, const int *fds, int count)
{
    union { char raw[CMSG_SPACE(L_FDS * sizeof(int))]; struct cmsghdr align; } control;
    uint32_t head[2] = {number, 0};
    int present[L_FDS];
    size_t n = 0;
    for (int i = 0; i < count; i++)
        if (fds[i] >= 0) {
            head[1] |= 1u << i;
            present[n++] = fds[i];
        }
    struct iovec io = {head, sizeof head};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control.raw,
                       .msg_controllen = CMSG_SPACE(n * sizeof(int))};
    memset(&control, 0, sizeof control);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(c), present, n * sizeof(int));
    return sendmsg(sock, &m, MSG_NOSIGNAL) == sizeof head ? 0 : -1;
}

static int recv_fds(int sock, uint32_t *number, int *fds, int count)
{
    union { char raw[CMSG_SPACE(L_FDS * sizeof(int))]; struct cmsghdr align; } control;
    uint32_t head[2];
    struct iovec io = {head, sizeof head};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control.raw,
                       .msg_controllen = sizeof control.raw};
    ssize_t k;
    do
        k = recvmsg(sock, &m, MSG_CMSG_CLOEXEC);
    while (k < 0 && errno == EINTR);
    if (k != sizeof head)
        return -1; /* the agent is gone */
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    size_t n = c ? (c->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0, at = 0;
    *number = head[0];
    for (int i = 0; i < count; i++) {
        fds[i] = -1;
        if (head[1] & 1u << i && at < n)
            memcpy(&fds[i], CMSG_DATA(c) + at++ * sizeof(int), sizeof(int));
    }
    return 0;
}

static void spare_main(int sock, int leaf) __attribute__((noreturn));
static void spare_main(int sock, int leaf)
{
    struct launch l;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setsid();
    bool inside = leaf < 0 || !cg_leaf_enter(leaf);
    int err = errno;
    if (recv_fds(sock, &l.kind, l.fds, L_FDS))
        _exit(0);
    close(sock);
    if (leaf >= 0)
        close(leaf);
    if (!inside)
        child_fail(l.fds[L_STATUS], "unavailable", NULL, err, "cannot enter the command's cgroup");
    child_main(&l);
}

static void launcher_main(int fd) __attribute__((noreturn));
static void launcher_main(int fd)
{
    int fds[2];
    struct reply r;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (!recv_fds(fd, &r.slot, fds, 2)) {
        pid_t pid = (pid_t)syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0);
        if (pid == 0) {
            close(fd);
            spare_main(fds[0], fds[1]);
        }
        r.pid = pid < 0 ? -errno : pid;
        for (int i = 0; i < 2; i++)
            if (fds[i] >= 0)
                close(fds[i]);
        if (send(fd, &r, sizeof r, MSG_NOSIGNAL) < 0)
            break;
    }
    _exit(0);
}

/* Starts the launcher and waits until it has joined; replaces one that runs. */
int launcher_start(void)
{
    int pair[2];
    char ready = 0;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
        return -1;
    if (launcher_fd >= 0)
        close(launcher_fd); /* the old one ends when it reads the end of its socket */
    launcher_fd = -1;
    pid_t pid = fork();
    if (pid == 0) {
        close(pair[0]);
        cg_join();
        if (send(pair[1], "r", 1, MSG_NOSIGNAL) != 1)
            _exit(1);
        launcher_main(pair[1]);
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

static int spare_make(struct spare *sp)
{
    int pair[2];
    if (launcher_fd < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
        return -1;
    memset(sp, 0, sizeof *sp);
    sp->at.leaf = cg_leaf_open(sp->at.leaf_name, sizeof sp->at.leaf_name);
    sp->at.slot = ++serial;
    sp->sock = pair[0];
    int failed = send_fds(launcher_fd, sp->at.slot, (int[]){pair[1], sp->at.leaf}, 2);
    close(pair[1]);
    if (failed) {
        close(sp->sock);
        cg_leaf_drop(sp->at.leaf, sp->at.leaf_name);
        return -1;
    }
    pending++;
    sp->used = true;
    return 0;
}

static void spare_drop(struct spare *sp)
{
    close(sp->sock);
    cg_leaf_kill(sp->at.leaf, sp->at.pid);
    cg_leaf_drop(sp->at.leaf, sp->at.leaf_name);
    sp->used = false;
}

/* Gives the command to the oldest spare, or to a child made for it. */
static int hand_over(const struct launch *l, struct place *where)
{
    for (int tries = 0; tries < SPARES + 2; tries++) {
        struct spare made = {0}, *sp = NULL;
        for (int i = 0; i < SPARES; i++)
            if (spares[i].used && (!sp || spares[i].at.slot < sp->at.slot))
                sp = &spares[i];
        if (!sp && spare_make(sp = &made)) {
            launcher_news();
            if (launcher_fd < 0 && launcher_start())
                return -1;
            continue;
        }
        if (send_fds(sp->sock, l->kind, l->fds, L_FDS)) {
            spare_drop(sp); /* it was killed from inside */
            continue;
        }
        close(sp->sock);
        *where = sp->at;
        sp->used = false;
        return 0;
    }
    return -1;
}

int launch(struct launch *l, struct place *where)
{
    int failed = 0;
    for (int i = 0; i <= L_STATUS; i++)
        failed |= l->fds[i] < 0;
    if (!failed)
        failed = hand_over(l, where);
    for (int i = 0; i < L_FDS; i++)
        if (l->fds[i] >= 0)
            close(l->fds[i]);
    last_launch = now_ns();
    return failed;
}

/* Makes one missing spare; returns when it wants to be asked again. */
uint64_t spares_refill(uint64_t now, bool at_once)
{
    if (launcher_fd < 0)
        return UINT64_MAX;
    for (int i = 0; i < SPARES; i++) {
        if (spares[i].used)
            continue;
        if (!at_once && now < last_launch + SPARE_QUIET_NS)
            return last_launch + SPARE_QUIET_NS;
        if (spare_make(&spares[i]))
            return UINT64_MAX;
    }
    return UINT64_MAX;
}

bool spare_reaped(pid_t pid)
{
    for (int i = 0; i < SPARES; i++)
        if (spares[i].used && spares[i].at.pid == pid) {
            spare_drop(&spares[i]);
            return true;
        }
    return false;
}

/* A child's end; one whose pid is not known yet is remembered for its answer. */
void launch_reaped(pid_t pid, int status)
{
    if (pending) {
        if (early_count == EARLY_MAX)
            memmove(early, early + 1, sizeof early[0] * (size_t)--early_count);
        early[early_count].pid = pid;
        early[early_count++].status = status;
    }
    op_reaped(pid, status);
}

static void answered(const struct reply *r)
{
    struct spare *sp = NULL;
    for (int i = 0; i < SPARES; i++)
        if (spares[i].used && spares[i].at.slot == r->slot)
            sp = &spares[i];
    bool dead = r->pid > 0 && kill(r->pid, 0) && errno == ESRCH;
    if (sp && (r->pid <= 0 || dead))
        spare_drop(sp);
    else if (sp)
        sp->at.pid = r->pid;
    else
        op_launched(r->slot, r->pid);
    for (int i = early_count; dead && !sp && i-- > 0;)
        if (early[i].pid == r->pid) {
            op_reaped(r->pid, early[i].status);
            break;
        }
    if (--pending <= 0)
        pending = early_count = 0;
}

/* Takes the launcher's answers; when it died, what it had not answered has failed. */
void launcher_news(void)
{
    struct reply r;
    ssize_t k = -1;
    errno = EAGAIN;
    while (launcher_fd >= 0 && (k = recv(launcher_fd, &r, sizeof r, 0)) == sizeof r)
        answered(&r);
    if (launcher_fd < 0 || (k < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    close(launcher_fd);
    launcher_fd = -1;
    pending = early_count = 0;
    for (int i = 0; i < SPARES; i++)
        if (spares[i].used && !spares[i].at.pid)
            spare_drop(&spares[i]);
    ops_lost_launcher();
    launcher_start();
}

int spec_memfd(const uint8_t *p, size_t n)
{
    int fd = memfd_create("spec", MFD_CLOEXEC);
    if (fd >= 0 && write_all(fd, p, n) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}
