/* Sessions: shells whose directory, variables and functions live on between
 * commands.
 *
 * A command's text is put into a memory file which the shell sources; nothing is
 * typed. Exit codes come back on a socket that is closed while a command's text
 * runs, and only messages whose sender is the shell itself (SCM_CREDENTIALS) count.
 * Commands queue in order. How one is ended while its shell lives on is in leave.c;
 * where a shell ended, the next command finds a fresh one and its result says so. So it
 * does where the policy became another one: a shell keeps the filter it began with. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define SESSION_IDLE_NS 1000000ull /* all a finished command wrote is in the pipe already */

struct session sessions[SESSIONS_MAX];

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* Ends what is left of the shell; the slot stays for the commands that wait. */
static void shell_drop(struct session *s)
{
    cg_leaf_kill(s->at.leaf, s->at.pid);
    close_fd(&s->ctl_fd);
    close_fd(&s->text_fd);
    close_fd(&s->state_fd);
    close_fd(&s->out_fd);
    close_fd(&s->err_fd);
    free(s->before.p);
    free(s->told.p);
    s->before = s->told = (struct pids){0};
    place_spoil(&s->at);
    if (s->started)
        place_leave(&s->at);
    s->started = s->dead = s->orphan = false;
}

static struct session *find(const char *name)
{
    struct session *room = NULL;
    for (int i = 0; i < SESSIONS_MAX; i++) {
        if (sessions[i].used && !strcmp(sessions[i].name, name))
            return &sessions[i];
        if (!sessions[i].used && !room)
            room = &sessions[i];
    }
    if (room) {
        memset(room, 0, sizeof *room);
        room->ctl_fd = room->text_fd = room->state_fd = room->out_fd = room->err_fd = -1;
        room->at.leaf = -1;
        room->used = true;
        snprintf(room->name, sizeof room->name, "%s", name);
    }
    return room;
}

static int shell_fds(struct session *s, struct launch *l)
{
    int out[2] = {-1, -1}, err[2] = {-1, -1}, ctl[2] = {-1, -1}, state[2] = {-1, -1}, on = 1;
    char path[64];
    if (pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC) || pipe2(ctl, O_CLOEXEC) ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, state))
        return -1;
    setsockopt(state[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
    set_nonblock(out[0]);
    set_nonblock(err[0]);
    set_nonblock(state[0]);
    s->out_fd = out[0];
    s->err_fd = err[0];
    s->ctl_fd = ctl[1];
    s->state_fd = state[0];
    s->text_fd = memfd_create("command", MFD_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", s->text_fd);
    l->fds[L_TEXT] = open(path, O_RDONLY | O_CLOEXEC);
    l->fds[L_OUT] = out[1];
    l->fds[L_ERR] = err[1];
    l->fds[L_CONTROL] = ctl[0];
    l->fds[L_STATUS] = state[1];
    return l->fds[L_TEXT] < 0 ? -1 : 0;
}

static int shell_start(struct session *s, const struct buf *spec)
{
    struct launch l = {.kind = K_SHELL, .fds = NO_FDS};
    launch_spec(&l, spec->p, spec->len);
    if (shell_fds(s, &l) || launch(&l, &s->at))
        return -1;
    struct reader r = {spec->p, spec->p + spec->len};
    char *user = spec_str(&r, T_USER);
    snprintf(s->user, sizeof s->user, "%s", user ? user : "root");
    free(user);
    s->started = true;
    s->policy = policy_number;
    return 0;
}

/* A shell that already died is no failure to tell it: its death is the answer. One that
 * something stopped would never read it. */
static bool tell(const struct session *s, const char *line)
{
    ssize_t k = write(s->ctl_fd, line, strlen(line));
    if (s->at.pid > 1)
        kill(s->at.pid, SIGCONT);
    return k == (ssize_t)strlen(line) || (k < 0 && errno == EPIPE);
}

static int begin(struct session *s, struct op *op)
{
    struct reader r = {op->in.p, op->in.p + op->in.len};
    op->session_fresh = !s->started;
    if (!s->started && shell_start(s, &op->in)) {
        shell_drop(s);
        return -1;
    }
    char *text = spec_str(&r, T_SHELL);
    size_t n = text ? strlen(text) : 0;
    bool ok = text && !ftruncate(s->text_fd, 0) && pwrite(s->text_fd, text, n, 0) == (ssize_t)n;
    free(text);
    buf_free(&op->in);
    session_begins(s);
    if (!ok || !tell(s, op->merge ? "m\n" : "g\n"))
        return -1;
    s->current = op;
    op->out[0].fd = fcntl(s->out_fd, F_DUPFD_CLOEXEC, 3);
    op->out[1].fd = fcntl(s->err_fd, F_DUPFD_CLOEXEC, 3);
    op->started = now_ns();
    op->oom_before = cg_oom_kills();
    if (op->timeout)
        op->deadline = op->started + op->timeout;
    return 0;
}

/* A command whose turn it is. One that finds a shell of another policy waits for its end. */
static int turn(struct session *s, struct op *op)
{
    if (s->started && s->policy != policy_number) {
        session_end(s);
        if (!s->dead)
            return 0;
        shell_drop(s);
    }
    return begin(s, op);
}

static int refuse(struct op *op, const char *field, const char *message)
{
    op_refuse(op->id, "invalid_request", field, message);
    return 1;
}

int session_exec(struct op *op, const uint8_t *p, size_t n)
{
    struct reader r = {p, p + n};
    char *name = spec_str(&r, T_SESSION), *user = spec_str(&r, T_USER);
    char *text = spec_str(&r, T_SHELL);
    struct session *s = NULL;
    int failed = 0;
    if (!text || spec_u64(&r, T_STDIN, 0))
        failed = refuse(op, "session", "a session takes shell text and no input");
    else if (!name || !*name || strlen(name) > 64 || (user && strlen(user) > 64))
        failed = refuse(op, "session", "a session's name has 1 to 64 bytes");
    else if (!(s = find(name)))
        failed = refuse(op, "session", "too many sessions in this sandbox");
    else if (s->started && strcmp(s->user, user ? user : "root"))
        failed = refuse(op, "user", "the session belongs to another user");
    else if (!buf_add(&op->in, p, n))
        failed = -1;
    free(name);
    free(user);
    free(text);
    if (failed)
        return failed;
    op->session = s;
    return s->current ? 0 : turn(s, op);
}

bool session_queued(const struct op *op)
{
    return op->session->current != op;
}

bool session_tree_gone(const struct op *op)
{
    struct session *s = op->session;
    if (s->current != op)
        return true;
    if (!s->dead && s->leave_end)
        return session_left(s);
    if (cg_leaf_empty(s->at.leaf))
        return true;
    cg_leaf_kill(s->at.leaf, s->at.pid);
    return false;
}

static void next_command(struct session *s)
{
    struct op *next = NULL;
    for (int i = 0; i < ops_top; i++) {
        struct op *op = &ops[i];
        if (op->used && op->session == s && !op->done && !op->reaped && op->in.p &&
            (!next || op->id < next->id))
            next = op;
    }
    if (next && turn(s, next)) {
        put_error(&next->report, "unavailable", "session", 0, "the session's shell cannot start");
        op_exited(next, 0);
    } else if (!next && !s->started) {
        s->used = false;
    }
}

void session_op_over(struct op *op)
{
    struct session *s = op->session;
    if (s->current != op)
        return;
    s->current = NULL;
    if (s->dead)
        shell_drop(s);
    op->session = NULL;
    next_command(s);
}

/* The shell is gone. Where it was killed before it took the command, that may be tried
 * again: nothing of it ran. */
static void shell_lost(struct session *s, int status)
{
    struct op *op = s->current;
    char byte;
    bool began = s->in_text ||
                 (s->state_fd >= 0 && recv(s->state_fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0);
    if (!op->killing && !began && WIFSIGNALED(status))
        put_error(&op->report, "unavailable", NULL, ECHILD,
                  "the session's shell was killed before it took the command");
    op_exited(op, status);
}

void session_end(struct session *s)
{
    s->leave_end = 0;
    cg_leaf_kill(s->at.leaf, s->at.pid);
    if (s->at.pid)
        return; /* its death comes by session_reaped */
    s->dead = true;
    if (s->current && !s->current->reaped)
        shell_lost(s, SIGKILL);
}

void session_settle(struct session *s)
{
    bool claimed = place_claimed(&s->at), unread = !claimed && place_unread(&s->at);
    s->orphan = s->orphan && !claimed && !unread;
    if (unread)
        session_end(s);
}

bool session_launched(uint32_t slot, int32_t pid)
{
    for (int i = 0; i < SESSIONS_MAX; i++) {
        struct session *s = &sessions[i];
        if (!s->used || s->at.slot != slot || s->dead || !s->started)
            continue;
        if (pid > 0) {
            s->at.pid = pid;
            if (s->current && s->current->killing)
                session_end(s);
        } else {
            session_end(s);
        }
        return true;
    }
    return false;
}

void session_reaped(const struct end *end)
{
    for (int i = 0; i < SESSIONS_MAX; i++) {
        struct session *s = &sessions[i];
        if (!s->used || s->at.pid != end->pid)
            continue;
        session_state(s); /* a code or a failure that came before the end */
        s->dead = true;
        struct op *op = s->current;
        if (!op) {
            shell_drop(s);
            next_command(s);
        } else {
            cg_leaf_kill(s->at.leaf, end->pid);
            op->session_ended = true;
            if (!op->reaped)
                shell_lost(s, end->status);
        }
        return;
    }
}

static void on_state(struct session *s, const char *text, size_t n)
{
    struct op *op = s->current;
    if (*text == 'z')
        s->swept = true;
    if (!op || op->reaped)
        return;
    if (text[0] == T_CODE) {
        buf_add(&op->report, text, n);
        return;
    }
    if (*text == 'b') {
        s->in_text = true;
        return;
    }
    bool left = *text == 'i'; /* in the middle of the text, because it was told to */
    char *end;
    text += left;
    long code = strtol(text, &end, 10);
    if (end == text || *end != '\n')
        return;
    op_exited(op, op->killing ? SIGKILL : left ? SIGINT : (int)(code & 255) << 8);
    op->drain_idle = now_ns() + SESSION_IDLE_NS;
}

void session_state(struct session *s)
{
    for (;;) {
        union { char raw[CMSG_SPACE(sizeof(struct ucred))]; struct cmsghdr align; } control;
        char text[1025];
        struct iovec io = {text, sizeof text - 1};
        struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control.raw,
                           .msg_controllen = sizeof control.raw};
        if (!s->at.pid)
            launcher_news();
        if (!s->at.pid || s->state_fd < 0)
            return; /* the launcher's answer is on its way */
        ssize_t k = recvmsg(s->state_fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (k < 0 && errno != EINTR)
            return;
        if (k == 0) { /* the shell closed it: it is ending */
            close_fd(&s->state_fd);
            return;
        }
        struct ucred who = {0};
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS)
            memcpy(&who, CMSG_DATA(c), sizeof who);
        text[k > 0 ? k : 0] = 0;
        if (k > 0 && who.pid == s->at.pid)
            on_state(s, text, (size_t)k);
    }
}
