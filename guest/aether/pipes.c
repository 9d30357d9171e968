/* What connects an operation with its process: input, output, its report. */
#include "aether.h"

#include <fcntl.h>
#include <unistd.h>

#define FILE_PIPE (256 << 10)
#define DRAIN_READS 3 /* of a stream at once; the loop takes what is more */

static int pipe_for(struct outstream *s, int *write_end, bool big)
{
    int p[2];
    if (pipe2(p, O_CLOEXEC))
        return -1;
    if (big)
        fcntl(p[0], F_SETPIPE_SZ, FILE_PIPE);
    fcntl(p[0], F_SETFL, O_RDONLY | O_NONBLOCK); /* the command's end stays as it is */
    s->fd = p[0];
    *write_end = p[1];
    return 0;
}

static int input_for(struct op *op, int *read_end)
{
    int in[2];
    if (pipe2(in, O_CLOEXEC))
        return -1;
    if (op->file)
        fcntl(in[1], F_SETPIPE_SZ, FILE_PIPE);
    set_nonblock(in[1]);
    op->in_fd = in[1];
    *read_end = in[0];
    return 0;
}

/* What a file operation has to say is its answer; a command's few words go the way of the
 * claim. */
static int report_for(struct op *op, int *write_end)
{
    int status[2];
    if (pipe2(status, O_CLOEXEC))
        return -1;
    set_nonblock(status[0]);
    op->status_fd = status[0];
    *write_end = status[1];
    return 0;
}

int op_pipes(struct op *op, const uint8_t *p, size_t n, int kind, bool with_stdin)
{
    struct launch l = {.kind = (uint32_t)kind, .fds = NO_FDS};
    launch_spec(&l, p, n);
    bool ok = op->rows ? !pty_fds(op, &l, with_stdin)
                       : !pipe_for(&op->out[0], &l.fds[L_OUT], op->file);
    if (ok && !op->rows && with_stdin)
        ok = !input_for(op, &l.fds[L_IN]);
    if (ok && op->rows)
        ; /* one terminal for all */
    else if (ok && op->merge)
        l.fds[L_ERR] = l.fds[L_OUT];
    else if (ok)
        ok = !pipe_for(&op->out[1], &l.fds[L_ERR], false);
    if (ok && op->file)
        ok = !report_for(op, &l.fds[L_STATUS]);
    l.incomplete = !ok;
    l.lends_output = ok && kind == K_EXEC && !op->rows;
    if (l.lends_output) {
        op->lent[0] = l.fds[L_OUT];
        op->lent[1] = op->merge ? -1 : l.fds[L_ERR];
    }
    if (launch(&l, &op->at))
        return -1;
    op->sent = true;
    return 0;
}

/* While a process runs the agent has its output open too: its pipes are closed before it
 * has ended, and would only wake the agent up once more. */
void op_close_lent(struct op *op)
{
    for (int k = 0; k < 2; k++) {
        if (op->lent[k] >= 0)
            close(op->lent[k]);
        op->lent[k] = -1;
    }
}

/* Reads what is there, which after a process's end is mostly all; whether anything was. */
bool op_drain(struct op *op)
{
    bool any = false;
    for (int k = 0; k < 2; k++) {
        struct outstream *s = &op->out[k];
        uint64_t before = s->total - 1;
        for (int i = 0; i < DRAIN_READS && s->fd >= 0 && s->total != before; i++) {
            before = s->total;
            op_read(op, k);
            any |= s->total != before;
        }
    }
    return any;
}
