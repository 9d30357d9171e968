/* How an operation runs and ends: output, time limit, death of its tree,
 * the drain after the direct child's exit, the result. Pipes are in pipes.c. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t finished;
bool finished_now; /* an operation ended in this turn: a moment to make spares */

/* The launcher's answer for a command that was sent before its process had a pid. */
void op_launched(uint32_t slot, int32_t pid)
{
    struct op *op = NULL;
    for (int i = 0; i < ops_top && !op; i++)
        if (ops[i].used && ops[i].sent && ops[i].at.slot == slot)
            op = &ops[i];
    if (!op) {
        if (!session_launched(slot, pid) && pid > 1)
            kill(pid, SIGKILL); /* nobody waits for it any more */
    } else if (pid <= 0) {
        put_error(&op->report, pid == -EAGAIN ? "capacity_exhausted" : "unavailable",
                  pid == -EAGAIN ? "pids" : NULL, -pid, "no process can be created: %s",
                  strerror(-pid));
        op->failed = true;
        op_exited(op, 0);
    } else {
        op->at.pid = pid;
        op_send_signals(op);
        if (op->killing)
            op_kill(op);
    }
}

static bool by_memory(const struct op *op)
{
    bool killed = (WIFSIGNALED(op->status) && WTERMSIG(op->status) == SIGKILL) ||
                  (WIFEXITED(op->status) && WEXITSTATUS(op->status) == 137);
    return killed && !op->timed_out && !op->cancelled && cg_oom_kills() > op->oom_before;
}

/* Until its process is known, a signal to it or to its session waits for that. */
bool op_awaits_process(const struct op *op)
{
    const struct place *at = op->session ? &op->session->at : &op->at;
    return !op->done && !at->pid && place_held(at) &&
           (op->session || op->killing || op->waiting_count);
}

/* It may be tried again: nothing of it ran. */
static void not_begun(struct op *op)
{
    put_error(&op->report, "unavailable", NULL, ECHILD,
              "the process was killed before the command began");
    op->failed = true;
}

void op_reaped(const struct end *end)
{
    for (int i = 0; i < ops_top; i++) {
        struct op *op = &ops[i];
        if (!op->used || op->session || op->at.pid != end->pid || op->reaped)
            continue;
        op_exited(op, end->status);
        op_drain(op);
        if (!op->killing && (place_unread(&op->at) || (!end->begun && !by_memory(op))))
            not_begun(op);
        return;
    }
    session_reaped(end);
}

void op_exited(struct op *op, int status)
{
    uint64_t now = now_ns();
    op->reaped = true;
    op->status = status;
    op->duration = op_ran(op, now);
    op->drain_idle = now + DRAIN_IDLE_NS;
    op->drain_end = now + DRAIN_MAX_NS;
    if (op->in_fd >= 0)
        close(op->in_fd);
    op->in_fd = -1;
    op->in.len = 0;
    if (op->tty_fd >= 0)
        close(op->tty_fd);
    op->tty_fd = -1;
    op_close_lent(op);
}

void op_kill(struct op *op)
{
    if (op->done)
        return;
    if (op->dial.on) {
        dial_abort(op);
        return;
    }
    if (!op->killing)
        op->kill_end = now_ns() + KILL_MAX_NS;
    op->killing = true;
    if (op->file) { /* it removes its unfinished file; told when its process is known */
        if (op->at.pid > 1 && !op->reaped)
            kill(op->at.pid, SIGTERM);
    } else if (op->session && session_queued(op)) {
        op_exited(op, SIGKILL);
    } else if (op->session) {
        session_leave(op->session);
    } else {
        place_spoil(&op->at);
        cg_leaf_kill(op->at.leaf, op->at.pid);
    }
}

static bool lost_with(const struct place *at, int leaf)
{
    return !at->pid && (leaf < 0 ? !at->nest : at->leaf == leaf);
}

/* Where the process died that was to tell of a command's child, the child itself says that
 * it took the command, or is dead without that. */
void op_settle(struct op *op)
{
    if (place_claimed(&op->at)) {
        op->orphan = false;
    } else if (place_unread(&op->at)) {
        op->orphan = false;
        if (!op->killing)
            not_begun(op);
        op_exited(op, SIGKILL);
    }
}

/* The process that was to make commands died (-1: the launcher). */
void op_lost(int leaf)
{
    for (int i = 0; i < ops_top; i++) {
        struct op *op = &ops[i];
        if (!op->used || !op->sent || op->reaped || op->session || !lost_with(&op->at, leaf))
            continue;
        op->orphan = true;
        op_settle(op);
    }
    for (int i = 0; i < SESSIONS_MAX; i++) {
        struct session *s = &sessions[i];
        if (s->used && s->started && !s->dead && lost_with(&s->at, leaf)) {
            s->orphan = true;
            session_settle(s);
        }
    }
}

void op_read(struct op *op, int which)
{
    static uint8_t scratch[CHUNK]; /* more than a pipe holds; files move in pieces of this */
    struct outstream *s = &op->out[which];
    size_t most = s->retain ? stream_room(s) : op->attached ? s->credit : CHUNK;
    if (most > sizeof scratch)
        most = sizeof scratch;
    if (!most || (!s->retain && conn_out.len >= OUT_HIGH))
        return;
    bool through = !s->retain && op->attached;
    uint8_t *to = through ? data_room(most) : scratch;
    if (!to)
        return;
    ssize_t k = read(s->fd, to, most);
    if (k < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (k <= 0) {
        if (op->dial.on)
            dial_output_end(op, k ? errno : 0);
        close(s->fd);
        s->fd = -1;
        return;
    }
    op->drain_idle = now_ns() + DRAIN_IDLE_NS;
    if (op->dial.on)
        dial_ack(s->fd);
    if (s->retain) {
        stream_push(s, scratch, (size_t)k);
    } else {
        s->total += (uint64_t)k;
        if (through) {
            s->credit -= (uint32_t)k;
            data_written(op->id, (uint8_t)(which + 1), (size_t)k);
        }
    }
}

void op_read_report(struct op *op)
{
    uint8_t text[4096];
    while (op->status_fd >= 0) {
        ssize_t k = read(op->status_fd, text, sizeof text);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0 && errno == EAGAIN)
            return;
        if (k > 0 && op->report.len + (size_t)k <= STATUS_MAX) {
            buf_add(&op->report, text, (size_t)k);
            continue;
        }
        close(op->status_fd);
        op->status_fd = -1;
    }
}

static void result_of_command(struct op *op)
{
    struct buf *b = &op->result;
    int sig = WIFSIGNALED(op->status) ? WTERMSIG(op->status) : 0;
    if (!op->timed_out)
        put_u64(b, T_EXIT_CODE, (uint64_t)(sig ? 128 + sig : WEXITSTATUS(op->status)));
    if (sig)
        put_u64(b, T_SIGNAL_NO, (uint64_t)sig);
    put_u64(b, T_TIMED_OUT, op->timed_out);
    put_u64(b, T_OOM, by_memory(op));
    put_u64(b, T_DROPPED_OUT, op->out[0].dropped);
    put_u64(b, T_DROPPED_ERR, op->out[1].dropped);
    put_u64(b, T_TOTAL_OUT, op->out[0].total);
    put_u64(b, T_TOTAL_ERR, op->out[1].total);
    put_u64(b, T_DURATION_NS, op->duration);
    if (op->session_fresh)
        put_u64(b, T_SESSION_FRESH, 1);
    if (op->session_ended)
        put_u64(b, T_SESSION_ENDED, 1);
}

static void forget_oldest(void)
{
    struct op *oldest = NULL;
    int count = 0;
    for (int i = 0; i < ops_top; i++) {
        if (!ops[i].used || !ops[i].done)
            continue;
        count++;
        if (!oldest || ops[i].finished_seq < oldest->finished_seq)
            oldest = &ops[i];
    }
    if (count > FINISHED_MAX && oldest)
        op_free(oldest);
}

static void file_op_ended(struct op *op)
{
    int sig = WIFSIGNALED(op->status) ? WTERMSIG(op->status) : 0;
    if (op->cancelled)
        put_error(&op->report, "unavailable", NULL, 0, "the file operation was cancelled");
    else if (sig == SIGKILL) /* by the limit or by the workload: never the node's fault */
        put_error(&op->report, "quota_exceeded", "memory_limit_mb", 0,
                  "the file operation was killed: the sandbox is out of memory, "
                  "or something in it killed it");
    else
        put_error(&op->report, "internal", NULL, 0, "the file operation was ended by signal %d", sig);
}

static void op_finish(struct op *op)
{
    op_read_report(op);
    if (op->session)
        session_op_over(op);
    else if (op->sent && WIFEXITED(op->status) && WEXITSTATUS(op->status) == CHILD_FAILED)
        place_report(&op->at, &op->report);
    if (op->file && !op->report.len)
        file_op_ended(op);
    if (op->report.len) {
        op->failed = op->report.p[0] == T_CODE;
        buf_add(&op->result, op->report.p, op->report.len);
    } else {
        result_of_command(op);
    }
    buf_free(&op->report);
    for (int i = 0; i < 2; i++) {
        if (op->out[i].fd >= 0)
            close(op->out[i].fd);
        op->out[i].fd = -1;
    }
    op->done = true;
    finished_now = true;
    op->finished_seq = ++finished;
    if (op->file && !op->attached && (!op->stays || op->hung_up))
        op_free(op);
    else
        forget_oldest();
}

void op_tick(struct op *op, uint64_t now)
{
    if (op->done)
        return;
    if (!op->killing && !op->reaped && !paused_at && now >= op_limit(op)) {
        op->timed_out = true;
        op_kill(op);
    }
    hangup_tick(op, now);
    session_tick(op, now);
    op_send_signals(op);
    bool tree_gone = true;
    if (op->killing && op->session) {
        tree_gone = session_tree_gone(op) || now >= op->kill_end;
    } else if (op->killing && !op->file) {
        tree_gone = cg_leaf_empty(op->at.leaf) || now >= op->kill_end;
        if (!tree_gone)
            cg_leaf_kill(op->at.leaf, op->at.pid);
        if (now >= op->kill_end && !op->reaped)
            op_exited(op, SIGKILL);
    } else if (op->killing && now >= op->kill_end && !op->reaped) {
        if (op->at.pid > 1) {
            kill(op->at.pid, SIGKILL); /* it was stopped, or it hangs */
        } else {
            place_spoil(&op->at);
            cg_leaf_kill(op->at.leaf, 0);
            op_exited(op, SIGKILL);
        }
    }
    if (!op->reaped)
        return;
    bool ended = op->out[0].fd < 0 && op->out[1].fd < 0;
    if (pty_waits(op) || op_waits(op, now)) {
        op->drain_idle = now + DRAIN_IDLE_NS;
        op->drain_end = now + DRAIN_MAX_NS;
    } else if (!ended && !op->file) {
        /* quiet is what was looked at: room may be there only since this turn began */
        bool due = now >= op->drain_end || now >= op->drain_idle;
        ended = due && (!op_drain(op) || now >= op->drain_end);
    }
    if (ended && tree_gone)
        op_finish(op);
}

uint64_t op_next_due(const struct op *op, uint64_t now)
{
    uint64_t due = UINT64_MAX;
    if (op->done)
        return due;
    if (op->killing || (op->waiting_count && op->at.pid))
        return now + SOON_NS;
    if (!op->reaped && !paused_at)
        due = op_limit(op);
    if (op->hangup_at && op->hangup_at < due && !paused_at)
        due = op->hangup_at;
    if (op->session && op->session->interrupt_at && op->session->interrupt_at < due)
        due = op->session->interrupt_at;
    if (op->reaped && !op->file && !pty_waits(op) && !op_waits(op, now)) {
        uint64_t end = op->drain_idle < op->drain_end ? op->drain_idle : op->drain_end;
        if (end < due)
            due = end;
    }
    return due;
}

void op_pump(struct op *op)
{
    if (!op->attached || !channel_ready())
        return;
    bool all = true;
    for (int i = 0; i < 2 && !op->file; i++) {
        struct outstream *s = &op->out[i];
        const uint8_t *p;
        size_t n;
        while ((n = stream_peek(s, op->done, &p))) {
            if (n > s->credit)
                n = s->credit;
            if (!n || conn_out.len >= OUT_HIGH) {
                all = false;
                break;
            }
            send_data(op->id, (uint8_t)(i + 1), p, n);
            stream_sent(s, n);
        }
    }
    if (op->done && all && !op->result_sent) {
        op->result_sent = true;
        send_frame(op->failed ? M_ERROR : M_RESULT, op->id, op->result.p, op->result.len);
    }
}
