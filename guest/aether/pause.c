/* The commands' clock. It stands still while the edge has frozen the sandbox: no time
 * limit runs out and no terminal is hung up meanwhile, and what a command took is what
 * it ran. The agent itself is never frozen. */
#include "aether.h"

uint64_t paused_at; /* 0: the clock runs */

void ops_pause(void)
{
    if (!paused_at)
        paused_at = now_ns();
}

/* Moves every moment that lies before or after the pause by its length. */
void ops_resume(void)
{
    uint64_t now = now_ns();
    for (int i = 0; i < OPS_MAX && paused_at; i++) {
        struct op *op = &ops[i];
        if (!op->used || op->done)
            continue;
        uint64_t stood = now - (op->started > paused_at ? op->started : paused_at);
        if (!op->reaped)
            op->started += stood;
        if (op->drain_idle && !op->reaped) /* its last output */
            op->drain_idle += stood;
        if (op->deadline)
            op->deadline += stood;
        if (op->hangup_at)
            op->hangup_at += stood;
    }
    paused_at = 0;
}

/* How long an operation has run. */
uint64_t op_ran(const struct op *op, uint64_t now)
{
    if (paused_at)
        now = op->started > paused_at ? op->started : paused_at;
    return now - op->started;
}
