/* The table of operations and what the edge may ask of one: starting, input,
 * signals, listing, attaching again. How a command runs and ends is in exec.c. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct op ops[OPS_MAX];
int ops_top; /* those from here on were never used, or not for long */
uint32_t next_id = 1;

struct op *op_by_id(uint32_t id)
{
    for (int i = 0; i < ops_top; i++)
        if (ops[i].used && ops[i].id == id)
            return &ops[i];
    return NULL;
}

static struct op *op_new(uint32_t id)
{
    for (int i = 0; i < OPS_MAX; i++) {
        if (ops[i].used)
            continue;
        struct op *op = &ops[i];
        if (i >= ops_top)
            ops_top = i + 1;
        memset(op, 0, sizeof *op);
        op->used = op->attached = true;
        op->id = id;
        op->in_fd = op->status_fd = op->at.leaf = op->out[0].fd = op->out[1].fd = -1;
        op->tty_fd = op->dial.fd = op->lent[0] = op->lent[1] = -1;
        op->started = now_ns();
        if (id >= next_id)
            next_id = id + 1;
        return op;
    }
    return NULL;
}

void op_free(struct op *op)
{
    stream_free(&op->out[0]);
    stream_free(&op->out[1]);
    if (op->in_fd >= 0)
        close(op->in_fd);
    if (op->status_fd >= 0)
        close(op->status_fd);
    if (op->tty_fd >= 0)
        close(op->tty_fd);
    if (op->dial.fd >= 0)
        close(op->dial.fd);
    op_close_lent(op);
    if (place_held(&op->at))
        place_leave(&op->at);
    buf_free(&op->in);
    buf_free(&op->report);
    buf_free(&op->result);
    free(op->key);
    memset(op, 0, sizeof *op);
    while (ops_top && !ops[ops_top - 1].used)
        ops_top--;
}

void op_refuse(uint32_t id, const char *code, const char *field, const char *message)
{
    struct buf b = {0};
    put_error(&b, code, field, 0, "%s", message);
    send_frame(M_ERROR, id, b.p, b.len);
    buf_free(&b);
}

struct wish { uint64_t limit, timeout, idle; bool merge, input, session; int commands; };

static uint32_t size_of(const struct field *f)
{
    uint64_t n = field_u64(f);
    return n > 65535 ? 0 : (uint32_t)n;
}

/* Checks every field before anything is created; NULL or the name of the bad one. */
static const char *check(const uint8_t *p, size_t n, struct wish *w, struct op *op)
{
    struct reader r = {p, p + n};
    struct field f;
    int k;
    while ((k = next_field(&r, &f)) > 0) {
        bool text = f.tag < T_TIMEOUT_NS || f.tag == T_SESSION || f.tag == T_PATH ||
                    f.tag == T_DST || f.tag == T_SOURCE;
        if (text && memchr(f.v, 0, f.n))
            return f.tag == T_ENV ? "env" : f.tag == T_CWD ? "cwd" : f.tag == T_USER ? "user"
                 : f.tag == T_PATH || f.tag == T_DST ? "path" : "argv";
        if (f.tag == T_ARGV && f.n >= ARG_MAX_BYTES)
            return "argv";
        if (f.tag == T_ENV && (f.n >= ARG_MAX_BYTES || !memchr(f.v, '=', f.n) || f.v[0] == '='))
            return "env";
        if (!text && f.n != 8)
            return "spec";
        if (f.tag == T_KEY && f.n > KEY_MAX)
            return "key";
        switch (f.tag) {
        case T_KEY: free(op->key); op->key = field_str(&f); break;
        case T_ARGV: w->commands |= 1; break;
        case T_SHELL: w->commands |= 2; break;
        case T_TIMEOUT_NS: w->timeout = field_u64(&f); break;
        case T_IDLE_NS: w->idle = field_u64(&f); break;
        case T_LIMIT: w->limit = field_u64(&f); break;
        case T_MERGE: w->merge = field_u64(&f); break;
        case T_STDIN: w->input = field_u64(&f); break;
        case T_SESSION: w->session = true; break;
        case T_ROWS: op->rows = size_of(&f); break;
        case T_COLS: op->cols = size_of(&f); break;
        case T_CWD: case T_ENV: case T_USER: break;
        default:
            if (f.tag < T_FOP || f.tag > T_TIME_NS)
                return "spec";
        }
    }
    return k < 0 ? "spec" : NULL;
}

/* A new operation; NULL where it was refused. */
struct op *op_admit(uint32_t id)
{
    struct op *op = NULL;
    if (!set_up) /* nothing ever runs outside the workload's groups */
        op_refuse(id, "unavailable", NULL, "the agent was not set up");
    else if (!id)
        op_refuse(id, "invalid_request", "op_id", "an operation has an id that is not 0");
    else if (op_by_id(id))
        op_refuse(id, "conflict", "op_id", "the operation id is in use");
    else if (!(op = op_new(id)))
        op_refuse(id, "capacity_exhausted", NULL, "too many operations in this sandbox");
    return op;
}

void op_start(uint32_t id, const uint8_t *p, size_t n, bool file)
{
    struct wish w = {.limit = 10u << 20};
    struct op *op = op_admit(id);
    if (!op)
        return;
    const char *bad = check(p, n, &w, op);
    if (!bad && !file && w.commands != 1 && w.commands != 2)
        bad = "argv";
    if (!bad && (!op->rows != !op->cols || (op->rows && (file || w.session))))
        bad = "pty";
    if (bad) {
        op_refuse(id, "invalid_request", bad,
                  "the value is malformed, holds a NUL byte or is larger than 128 KiB");
        op_free(op);
        return;
    }
    op->file = file;
    op->stays = file && op->key; /* an edge that comes back goes on with its input */
    op->merge = w.merge;
    op->oom_before = cg_oom_kills();
    op->timeout = w.timeout < TIMEOUT_MAX_NS ? w.timeout : TIMEOUT_MAX_NS;
    op->idle = w.idle;
    if (w.timeout && !w.session) /* in a session: once its turn has come */
        op->deadline = op->started + op->timeout;
    stream_init(&op->out[0], -1, !file && !op->rows, w.limit);
    stream_init(&op->out[1], -1, !file, w.limit);
    int failed = w.session ? session_exec(op, p, n)
                           : op_pipes(op, p, n, file ? K_FILE : K_EXEC, w.input || file);
    if (failed) {
        if (failed != 1 && op->rows && op->tty_fd < 0)
            op_refuse(id, "unsupported", "pty", "the sandbox has no terminals");
        else if (failed != 1) /* 1: already answered */
            op_refuse(id, "unavailable", NULL, "the command cannot be launched");
        op_free(op);
    }
}

/* When its time is over: since it began, or without output. A terminal that waits for
 * its reader is not silent. */
uint64_t op_limit(const struct op *op)
{
    uint64_t end = op->deadline ? op->deadline : UINT64_MAX;
    if (!op->idle || pty_waits(op) || (op->session && session_queued(op)))
        return end;
    uint64_t last = op->drain_idle > op->started ? op->drain_idle - DRAIN_IDLE_NS : op->started;
    return last + op->idle < end ? last + op->idle : end;
}

static void too_much_input(struct op *op)
{
    op->cancelled = true; /* the edge exceeded its credit */
    op_kill(op);
}

/* Input for the process; how much it took, or will never take. */
static size_t pour(struct op *op, const uint8_t *p, size_t n)
{
    size_t at = 0;
    while (at < n) {
        ssize_t k = write(op->in_fd, p + at, n - at);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0 && errno == EAGAIN)
            break;
        if (k <= 0) { /* EPIPE: nobody reads any more */
            op->dial.err = errno;
            op->in_eof = true;
            return n;
        }
        at += (size_t)k;
    }
    return at;
}

static void poured(struct op *op, size_t n)
{
    uint8_t c[5] = {S_STDIN, (uint8_t)n, (uint8_t)(n >> 8), (uint8_t)(n >> 16), (uint8_t)(n >> 24)};
    if (n && op->attached) /* an edge that attaches is told of all the room at once */
        send_frame(M_CREDIT, op->id, c, sizeof c);
    if (op->in_eof && !op->in.len) {
        pty_input_end(op);
        if (op->dial.on)
            shutdown(op->in_fd, SHUT_WR);
        close(op->in_fd);
        op->in_fd = -1;
    }
}

void op_input(struct op *op, const uint8_t *p, size_t n)
{
    uint8_t credit[5] = {S_STDIN, (uint8_t)n, (uint8_t)(n >> 8), (uint8_t)(n >> 16), (uint8_t)(n >> 24)};
    if (op->in_fd < 0) { /* the command no longer reads: taken and thrown away */
        send_frame(M_CREDIT, op->id, credit, sizeof credit);
        return;
    }
    if (op->in_eof || op->in.len + n > WINDOW) {
        too_much_input(op);
        return;
    }
    size_t taken = op->in.len ? 0 : pour(op, p, n);
    if (!buf_add(&op->in, p + taken, n - taken)) {
        too_much_input(op);
        return;
    }
    op->in_total += n;
    if (n)
        op->mid_line = p[n - 1] != '\n';
    poured(op, taken);
}

void op_write_stdin(struct op *op)
{
    size_t taken = pour(op, op->in.p, op->in.len);
    buf_cut(&op->in, taken);
    poured(op, taken);
}

void op_input_end(struct op *op)
{
    op->in_eof = true;
    if (op->in_fd >= 0)
        op_write_stdin(op);
}

void op_signal(struct op *op, int sig)
{
    if (sig == SIGKILL) {
        op->cancelled = true;
        op_kill(op);
    } else if (op->session) {
        if (sig == SIGINT && !op->reaped && session_queued(op))
            op_exited(op, SIGINT); /* its turn will not come */
        else if (sig && !op->reaped && !session_queued(op))
            session_signal(op->session, sig);
    } else if (sig && !op->reaped && !op->file && !op_has_begun(op)) {
        if (op->waiting_count < SIGNALS_MAX)
            op->waiting[op->waiting_count++] = (uint8_t)sig;
    } else if (op->at.pid > 1 && !op->reaped && sig) {
        if (kill(-op->at.pid, sig))
            kill(op->at.pid, sig);
    }
}

void op_rewind(struct op *op)
{
    op->attached = true;
    op->result_sent = false;
    stream_rewind(&op->out[0]);
    stream_rewind(&op->out[1]);
    if (op->in_fd < 0)
        return;
    size_t room = WINDOW - op->in.len;
    uint8_t c[5] = {S_STDIN, (uint8_t)room, (uint8_t)(room >> 8), (uint8_t)(room >> 16), (uint8_t)(room >> 24)};
    send_frame(M_CREDIT, op->id, c, sizeof c);
}

void ops_disconnected(void)
{
    for (int i = 0; i < ops_top; i++) {
        struct op *op = &ops[i];
        if (!op->used)
            continue;
        op->attached = false;
        op->result_sent = false;
        if (op->dial.on && !op->done)
            dial_abort(op);
        if (op->stays)
            continue;
        if ((op->file || op->dial.on) && op->done) {
            op_free(op);
        } else if (op->file) {
            op->cancelled = true; /* before its stdin ends, which would commit a write */
            op_kill(op);
        }
    }
}

/* What only a client can go on with ends when none came back in time. */
void hangup_tick(struct op *op, uint64_t now)
{
    if (!op->rows && !op->stays)
        return;
    if (op->attached) {
        op->hangup_at = 0;
    } else if (!op->hangup_at) {
        op->hangup_at = now + HANGUP_NS;
    } else if (now >= op->hangup_at && !op->hung_up && !paused_at) {
        op->hung_up = true;
        op->cancelled = true;
        op_kill(op);
    }
}

/* Gives up the places of finished commands: done after their answers were sent. */
void ops_leave(void)
{
    for (int i = 0; i < ops_top; i++)
        if (ops[i].used && ops[i].done && place_held(&ops[i].at))
            place_leave(&ops[i].at);
}

void ops_list(struct buf *b)
{
    for (int i = 0; i < ops_top; i++) {
        if (!ops[i].used || (ops[i].file && !ops[i].stays) || ops[i].dial.on)
            continue;
        put_u64(b, T_OP_ID, ops[i].id);
        put_str(b, T_KEY, ops[i].key ? ops[i].key : "");
        put_str(b, T_STATE, ops[i].done ? "done" : "running");
        put_u64(b, T_TAKEN, ops[i].in_total);
        put_u64(b, T_ROWS, ops[i].rows);
        put_u64(b, T_BASE_OUT, ops[i].out[0].base);
        put_u64(b, T_BASE_ERR, ops[i].out[1].base);
    }
}
