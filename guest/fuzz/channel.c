/* Fuzzes the agent in one process: its real loop, decoder and dispatcher over a socket
 * pair, with everything that makes processes replaced by the input itself.
 *
 * An input is a row of steps: u8 kind, u16 length, that many bytes. A step is what the
 * edge sends, what a command writes, a command's end, an answer of the launcher, a new
 * connection, or time that passes. Time is the input's, so a run can be repeated.
 * After each input nothing of it may be left: operations, descriptors, memory.
 */
#include "../aether/aether.h"

#define main agent_main
#define poll(fds, n, ms) real_poll(fds, n, 0)
static int real_poll(struct pollfd *fds, nfds_t n, int ms);
#include "../aether/main.c"
#undef main
#undef poll

#include <dirent.h>
#include <sys/socket.h>
#include <time.h>

#define CHILDREN_MAX 64
#define STEPS_MAX 200
#define SPEC_MAX (64 << 10)

struct child { bool used, known; uint32_t slot; pid_t pid; int fds[L_FDS]; };

static struct child children[CHILDREN_MAX];
static uint32_t slots;
static uint64_t clock_ns;
static int edge_fd = -1;
static struct buf heard;
static bool reads;

int launcher_fd = -1;
pid_t launcher_pid = -1;

static void must(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "broken: %s\n", what);
        abort();
    }
}

static int real_poll(struct pollfd *fds, nfds_t n, int ms)
{
    return poll(fds, n, ms);
}

/* ---- what the agent thinks it has: a clock, signals, processes ---- */
int fuzz_clock(clockid_t which, struct timespec *t)
{
    (void)which;
    t->tv_sec = (time_t)(clock_ns / 1000000000u);
    t->tv_nsec = (long)(clock_ns % 1000000000u);
    return 0;
}

int fuzz_kill(pid_t pid, int sig)
{
    for (int i = 0; i < CHILDREN_MAX; i++)
        if (children[i].used && children[i].pid && (pid == children[i].pid || pid == -children[i].pid))
            return 0;
    must(pid > 1 || pid < -1, "a signal to everybody");
    (void)sig;
    errno = ESRCH;
    return -1;
}

int launcher_start(void) { return 0; }
void launcher_news(void) {}
void launcher_claims(void) {}
void nests_clear(void) {}
void nests_tell(void) {}
int nest_fd(int i) { (void)i; return -1; }
bool spare_reaped(pid_t pid) { (void)pid; return false; }
bool spare_is(pid_t pid) { (void)pid; return false; }
void launch_reaped(const struct end *end) { op_reaped(end); }
uint64_t spares_refill(uint64_t now, bool at_once) { (void)now, (void)at_once; return UINT64_MAX; }
bool place_unread(const struct place *at) { return at->slot % 7 == 3; }
bool place_claimed(const struct place *at) { (void)at; return false; }

void place_report(const struct place *at, struct buf *report)
{
    if (at->slot % 5 == 2)
        put_error(report, "internal", "user", 0, "it did not begin");
}
int root_fd(void) { return -1; }
int root_enter(int fd) { (void)fd; return -1; }
int send_fds(int sock, uint32_t number, const int *fds, int count)
{
    (void)sock, (void)number, (void)fds, (void)count;
    return -1;
}

void place_spoil(const struct place *at) { (void)at; }
bool place_held(const struct place *at) { return at->leaf >= 0; }

void place_leave(struct place *at)
{
    memset(at, 0, sizeof *at);
    at->leaf = -1;
}

void launch_spec(struct launch *l, const uint8_t *p, size_t n)
{
    struct reader r = {p, p + n};
    free(spec_str(&r, T_CWD)); /* as the child does */
    l->fds[L_SPEC] = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static void child_close(struct child *c)
{
    for (int i = 0; i < L_FDS; i++)
        if (c->fds[i] >= 0)
            close(c->fds[i]);
    memset(c, 0, sizeof *c);
}

int launch(struct launch *l, struct place *where)
{
    struct child *c = NULL;
    for (int i = 0; i < CHILDREN_MAX && !c; i++)
        if (!children[i].used)
            c = &children[i];
    bool failed = !c;
    failed |= l->incomplete || l->fds[L_OUT] < 0 || l->fds[L_ERR] < 0;
    memset(where, 0, sizeof *where);
    where->leaf = -1;
    for (int i = L_OUT; i <= L_ERR; i++)
        if (l->lends_output)
            l->fds[i] = fcntl(l->fds[i], F_DUPFD_CLOEXEC, 3);
    if (failed) {
        for (int i = 0; i < L_FDS; i++)
            if (l->fds[i] >= 0)
                close(l->fds[i]);
        return -1;
    }
    c->used = true;
    c->slot = where->slot = ++slots;
    memcpy(c->fds, l->fds, sizeof c->fds);
    for (int i = 0; i < L_FDS; i++)
        if (c->fds[i] >= 0)
            set_nonblock(c->fds[i]);
    return 0;
}

/* ---- the edge's side: everything the agent says must be well formed ---- */
static void listen_to(const uint8_t *p, uint8_t type, size_t n)
{
    struct reader r = {p, p + n};
    struct field f;
    int k = 1;
    if (type == M_DATA) {
        must(n >= 1 && n <= CHUNK + 1 && (p[0] == S_STDOUT || p[0] == S_STDERR), "DATA");
    } else if (type == M_CREDIT) {
        must(n == 5 && p[0] == S_STDIN && get_u32(p + 1) <= WINDOW, "CREDIT");
    } else if (type == M_HELLO) {
        must(n > 4 && !memcmp(p, "DSEC", 4), "HELLO");
    } else {
        must(type >= M_RESULT && type <= M_LISTING, "a type of the agent");
        while ((k = next_field(&r, &f)) > 0)
            continue;
        /* what a command's own process reports goes through as it is */
        must(!k || type == M_RESULT || type == M_ERROR, "fields");
    }
}

static void edge_reads(void)
{
    static uint8_t piece[64 << 10];
    ssize_t k;
    size_t at = 0;
    while (edge_fd >= 0 && (k = recv(edge_fd, piece, sizeof piece, MSG_DONTWAIT)) > 0)
        buf_add(&heard, piece, (size_t)k);
    while (heard.len - at >= 4) {
        uint32_t n = get_u32(heard.p + at);
        must(n >= 5 && n <= FRAME_MAX, "a frame's length");
        if (heard.len - at - 4 < n)
            break;
        listen_to(heard.p + at + 9, heard.p[at + 4], n - 5);
        at += 4 + n;
    }
    buf_cut(&heard, at);
}

static void edge_leaves(void)
{
    if (edge_fd >= 0)
        close(edge_fd);
    edge_fd = -1;
    buf_free(&heard);
}

static void edge_connects(void)
{
    int pair[2];
    edge_leaves();
    channel_close();
    must(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), "a socket pair");
    conn_fd = pair[0];
    edge_fd = pair[1];
    reads = true;
}

static void edge_says(const uint8_t *p, size_t n, int fds)
{
    union { char raw[CMSG_SPACE(4 * sizeof(int))]; struct cmsghdr align; } control;
    struct iovec io = {(void *)p, n};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1};
    int given[4];
    if (edge_fd < 0 || !n)
        return;
    for (int i = 0; i < fds; i++)
        given[i] = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (fds) {
        m.msg_control = control.raw;
        m.msg_controllen = CMSG_SPACE((size_t)fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN((size_t)fds * sizeof(int));
        memcpy(CMSG_DATA(c), given, (size_t)fds * sizeof(int));
    }
    if (sendmsg(edge_fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {}
    for (int i = 0; i < fds; i++)
        close(given[i]);
}

/* ---- steps ---- */
static struct child *chosen(uint8_t which)
{
    struct child *c = &children[which % CHILDREN_MAX];
    return c->used ? c : &children[which % 4].used ? &children[which % 4] : c;
}

static void child_writes(const uint8_t *p, size_t n)
{
    static const int ends[] = {L_OUT, L_ERR, L_STATUS, L_OUT};
    if (n < 2)
        return;
    struct child *c = chosen(p[0]);
    int fd = c->used ? c->fds[ends[p[1] % 4]] : -1;
    char taken[256];
    if (fd >= 0 && write(fd, p + 2, n - 2) < 0) {}
    for (int i = 0; i < (p[1] & 4 ? 400 : 0) && fd >= 0; i++)
        if (write(fd, p + 2, n - 2) < 0)
            break;
    if (c->used && p[1] & 8 && read(c->fds[L_IN], taken, sizeof taken) < 0) {}
    if (c->used && p[1] & 16 && fd >= 0) {
        close(fd);
        c->fds[ends[p[1] % 4]] = -1;
    }
}

static void launcher_answers(const uint8_t *p, size_t n)
{
    struct child *c = n ? chosen(p[0]) : NULL;
    if (!c || !c->used || c->known)
        return;
    c->known = true;
    c->pid = n > 1 && p[1] % 8 == 0 ? 0 : (pid_t)(1000000 + c->slot);
    uint32_t slot = c->slot;
    pid_t pid = c->pid;
    if (!pid)
        child_close(c);
    op_launched(slot, pid ? pid : -EAGAIN);
}

static void child_ends(const uint8_t *p, size_t n)
{
    struct child *c = n ? chosen(p[0]) : NULL;
    if (!c || !c->used || !c->pid)
        return;
    pid_t pid = c->pid;
    child_close(c);
    int status = n > 1 ? p[1] % 2 ? p[1] / 2 : p[1] << 8 : 0;
    launch_reaped(&(struct end){pid, status, n < 3 || p[2] % 4});
}

static void step(uint8_t kind, const uint8_t *p, size_t n)
{
    switch (kind % 10) {
    case 0: case 1: case 2: edge_says(p, n, 0); break;
    case 3: edge_says(p, n, n ? p[n - 1] % 5 : 0); break;
    case 4: child_writes(p, n); break;
    case 5: child_ends(p, n); break;
    case 6: launcher_answers(p, n); break;
    case 7: edge_connects(); break;
    case 8: clock_ns += 1ull << (n ? p[0] % 40 : 20); break;
    case 9: reads = !reads; break;
    }
    turn(-1);
    must(conn_out.len <= OUT_STOP + FRAME_MAX, "answers wait within bounds");
    if (reads)
        edge_reads();
}

static void clean_up(void)
{
    edge_leaves();
    channel_close();
    channel_rest();
    for (int i = 0; i < CHILDREN_MAX; i++)
        if (children[i].used)
            child_close(&children[i]);
    for (int i = 0; i < SESSIONS_MAX; i++)
        sessions[i].current = NULL;
    for (int i = 0; i < OPS_MAX; i++)
        if (ops[i].used)
            op_free(&ops[i]);
    for (int i = 0; i < SESSIONS_MAX; i++) {
        struct session *s = &sessions[i];
        int *fds[] = {&s->ctl_fd, &s->text_fd, &s->state_fd, &s->out_fd, &s->err_fd};
        for (int k = 0; s->used && k < 5; k++)
            if (*fds[k] >= 0)
                close(*fds[k]);
        memset(s, 0, sizeof *s);
        s->state_fd = -1;
    }
    cg_set(NULL, 0, 0, false, false);
    if (listen_fd >= 0)
        close(listen_fd);
    listen_fd = -1;
    set_up = false;
    next_id = 1;
}

static int descriptors(bool shown)
{
    char path[300], target[300];
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    for (struct dirent *e; d && (e = readdir(d)); n++) {
        snprintf(path, sizeof path, "/proc/self/fd/%s", e->d_name);
        ssize_t k = shown ? readlink(path, target, sizeof target) : 0;
        if (k > 0)
            fprintf(stderr, "%s %.*s\n", e->d_name, (int)k, target);
    }
    if (d)
        closedir(d);
    return n;
}

/* What the agent opens once and keeps: where commands without input read from. */
static void settle_in(void)
{
    struct op op = {.status_fd = -1, .in_fd = -1, .tty_fd = -1};
    struct child *c = &children[0];
    must(!op_pipes(&op, NULL, 0, K_EXEC, false) && c->used, "a first command");
    child_close(c);
    close(op.status_fd);
    close(op.out[0].fd);
    close(op.out[1].fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    static int before;
    if (!before) {
        signal(SIGPIPE, SIG_IGN);
        clean_up();
        settle_in();
        before = descriptors(false);
    }
    clock_ns = 1000000000u;
    edge_connects();
    for (int steps = 0; n >= 3 && steps < STEPS_MAX; steps++) {
        size_t size = p[1] | (size_t)p[2] << 8;
        uint8_t kind = p[0];
        p += 3, n -= 3;
        if (size > n)
            size = n;
        step(kind, p, size);
        p += size, n -= size;
    }
    clean_up();
    if (descriptors(false) != before) {
        descriptors(true);
        must(false, "no descriptor is left");
    }
    return 0;
}
