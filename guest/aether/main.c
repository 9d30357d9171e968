/* The agent's start and its loop. As PID 1 it reaps everything; it takes no orders
 * from inside: signals are ignored, its memory and descriptors cannot be read. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define FIXED (4 + NESTS)
#define POLL_MAX (FIXED + OPS_MAX * 4 + SESSIONS_MAX * 2)
#define FORKED_ONLY 0x40 /* PF_FORKNOEXEC, in a process's flags until its execve */

static struct pollfd polled[POLL_MAX];
static struct { struct op *op; struct session *session; int what; } who[POLL_MAX];

void fatal(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fputs("aether: ", stderr);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    exit(70);
}

static int children_fd(void)
{
    sigset_t all, chld;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGABRT);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigemptyset(&chld);
    sigaddset(&chld, SIGCHLD);
    return signalfd(-1, &chld, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* Whether a process had begun what it was cloned for: another program, or work on files.
 * What it is told by is there until it is reaped. Where it cannot be told: it had. */
bool has_begun(pid_t pid)
{
    char path[32], text[512], *at;
    unsigned flags = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t k = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[k > 0 ? k : 0] = 0;
    if (!(at = strrchr(text, ')')) || strstr(text, "(" FILE_NAME ")"))
        return true;
    sscanf(at + 1, " %*c %*d %*d %*d %*d %*d %u", &flags);
    return !(flags & FORKED_ONLY);
}

/* Takes the stop of a process; nothing of ours is stopped from inside. */
static void let_go_on(pid_t pid)
{
    siginfo_t si;
    waitid(P_PID, pid, &si, WSTOPPED | WNOHANG);
    if (pid == launcher_pid || spare_is(pid) || op_is_unbegun(pid))
        kill(pid, SIGCONT);
}

static bool next_end(struct end *end)
{
    for (;;) {
        siginfo_t si = {0};
        if (waitid(P_ALL, 0, &si, WEXITED | WSTOPPED | WNOHANG | WNOWAIT) || si.si_pid <= 0)
            return false;
        end->pid = si.si_pid;
        if (si.si_code == CLD_STOPPED) {
            let_go_on(si.si_pid);
            continue;
        }
        end->begun = si.si_code == CLD_EXITED || has_begun(si.si_pid);
        return waitpid(si.si_pid, &end->status, 0) == si.si_pid;
    }
}

static void reap(int fd)
{
    struct signalfd_siginfo si[8];
    bool any = false;
    struct end end;
    if (read(fd, si, sizeof si) < 0) {}
    launcher_claims(); /* so that a dead child is known by its pid where possible */
    while (next_end(&end)) {
        any = true;
        if (end.pid != launcher_pid && !spare_reaped(end.pid))
            launch_reaped(&end);
    }
    if (any)
        cg_sweep_leaves();
}

static int add(int n, int fd, short events, struct op *op, int what)
{
    if (n >= POLL_MAX)
        return n;
    polled[n] = (struct pollfd){fd, events, 0};
    who[n].op = op;
    who[n].session = NULL;
    who[n].what = what;
    return n + 1;
}

static int add_session(int n, int fd, struct session *s, int what)
{
    int after = add(n, fd, POLLIN, NULL, what);
    if (after > n)
        who[n].session = s;
    return after;
}

static int gather(uint64_t now, uint64_t *due, bool *claims)
{
    int n = FIXED;
    bool room = conn_out.len < OUT_HIGH;
    *due = UINT64_MAX;
    *claims = false;
    for (int i = 0; i < ops_top; i++) {
        struct op *op = &ops[i];
        if (!op->used || op->done)
            continue;
        uint64_t d = op->dial.on ? dial_next_due(op) : op_next_due(op, now);
        if (d < *due)
            *due = d;
        for (int k = 0; k < 2; k++) {
            struct outstream *s = &op->out[k];
            bool wanted = op->attached ? s->credit && room : !op->rows || op->hung_up;
            if (s->fd >= 0 && (s->retain ? stream_room(s) > 0 : wanted))
                n = add(n, s->fd, POLLIN, op, k);
        }
        if (op->dial.fd >= 0)
            n = add(n, op->dial.fd, op->dial.accepts ? POLLIN : POLLOUT, op, 5);
        if (op->status_fd >= 0)
            n = add(n, op->status_fd, POLLIN, op, 2);
        if (op->in_fd >= 0 && op->in.len)
            n = add(n, op->in_fd, POLLOUT, op, 3);
        if (op->orphan)
            n = add(n, op->at.sock, POLLIN, op, 6);
        *claims |= op_awaits_process(op);
    }
    for (int i = 0; i < SESSIONS_MAX; i++) {
        struct session *s = &sessions[i];
        if (s->used && s->state_fd >= 0)
            n = add_session(n, s->state_fd, s, 4);
        if (s->used && s->orphan)
            n = add_session(n, s->at.sock, s, 7);
    }
    return n;
}

static void serve(int n)
{
    for (int i = FIXED; i < n; i++) {
        if (!polled[i].revents)
            continue;
        struct op *op = who[i].op;
        int fd = polled[i].fd;
        if (who[i].what < 2 && op->used && op->out[who[i].what].fd == fd)
            op_read(op, who[i].what);
        else if (who[i].what == 2 && op->used && op->status_fd == fd)
            op_read_report(op);
        else if (who[i].what == 3 && op->used && op->in_fd == fd)
            op_write_stdin(op);
        else if (who[i].what == 5 && op->used && op->dial.fd == fd)
            op->dial.accepts ? dial_came(op) : dial_answered(op);
        else if (who[i].what == 6 && op->used && op->orphan && op->at.sock == fd)
            op_settle(op);
        else if (who[i].what == 7 && who[i].session->orphan && who[i].session->at.sock == fd)
            session_settle(who[i].session);
        else if (who[i].what == 4 && who[i].session->state_fd == fd)
            session_state(who[i].session);
    }
}

static int wait_ms(uint64_t due, uint64_t now)
{
    if (due == UINT64_MAX)
        return -1;
    if (due <= now)
        return 0;
    uint64_t ms = (due - now + 999999) / 1000000;
    return ms > 60000 ? 60000 : (int)ms;
}

static void turn(int chld)
{
    static uint64_t refill_due = UINT64_MAX;
    uint64_t due, now = now_ns();
    bool claims, news = false;
    int n = gather(now, &due, &claims);
    if (refill_due < due)
        due = refill_due;
    polled[0] = (struct pollfd){listen_fd, POLLIN, 0};
    polled[1] = (struct pollfd){
        conn_fd, (short)((channel_full() ? 0 : POLLIN) | (conn_out.len ? POLLOUT : 0)), 0};
    polled[2] = (struct pollfd){chld, POLLIN, 0};
    polled[3] = (struct pollfd){launcher_fd, POLLIN, 0};
    for (int i = 0; i < NESTS; i++) /* their end is told by a signal */
        polled[4 + i] = (struct pollfd){claims ? nest_fd(i) : -1, POLLIN, 0};
    if (poll(polled, (nfds_t)n, wait_ms(due, now)) < 0 && errno != EINTR)
        fatal("poll: %s", strerror(errno));
    serve(n);
    for (int i = 3; i < FIXED; i++)
        news |= polled[i].revents != 0;
    if (news)
        launcher_news();
    if (polled[2].revents)
        reap(chld);
    if (polled[0].revents)
        channel_accept();
    else if (conn_fd >= 0 && polled[1].revents & (POLLHUP | POLLERR) && channel_full())
        channel_close(); /* nobody is there to take what is full */
    else if (conn_fd >= 0 && polled[1].revents & (POLLIN | POLLHUP | POLLERR))
        channel_read();
    now = now_ns();
    bool busy = false;
    for (int i = 0; i < ops_top; i++) {
        if (ops[i].used && ops[i].dial.on)
            dial_tick(&ops[i], now);
        else if (ops[i].used)
            op_tick(&ops[i], now);
        if (ops[i].used)
            op_pump(&ops[i]);
        busy |= ops[i].used;
    }
    if (conn_fd >= 0 && conn_out.len)
        channel_write();
    channel_go_on();
    if (!busy)
        channel_rest();
    ops_leave();
    refill_due = spares_refill(now_ns(), finished_now);
    finished_now = false;
}

/* What was used once is given back, instead of being kept for the next large output. */
static void keep_little(void)
{
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, KEEP_CAP);
    mallopt(M_TRIM_THRESHOLD, KEEP_CAP);
#endif
}

int main(int argc, char **argv)
{
    static char name[128];
    if (argc < 2)
        fatal("usage: aether SOCKET [GENERATION]");
    if (argc > 2)
        snprintf(name, sizeof name, "%s", argv[2]);
    generation = name;
    keep_little();
    prctl(PR_SET_DUMPABLE, 0);
    /* Who has all of a process's ids may set its limits (prlimit), whatever else it may
     * not do; a saved group that nobody has as well as ours keeps root inside from that. */
    if (setresgid((gid_t)-1, (gid_t)-1, GUARD_GID)) {}
    for (int i = 0; i < SESSIONS_MAX; i++)
        sessions[i].state_fd = -1;
    int chld = children_fd();
    if (chld < 0 || channel_listen(argv[1]))
        fatal("cannot listen on %s: %s", argv[1], strerror(errno));
    for (int i = 1; i < argc; i++)
        memset(argv[i], 0, strlen(argv[i]));
    for (;;)
        turn(chld);
}
