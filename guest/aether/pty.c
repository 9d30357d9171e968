/* A command on a terminal: its pseudo-terminal, its size, its end of input, hang-up.
 *
 * The agent opens the pair in the sandbox's own devpts and keeps the master; the
 * command gets the other end as its controlling terminal. What is shown on a terminal
 * is passed on, not kept: its writer waits for a slow reader, as on any terminal. An
 * edge that is gone for HANGUP_NS is a line that was hung up: the tree is killed. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <termios.h>
#include <unistd.h>

#define DEVPTS_MAGIC 0x1cd1
#define PTMX_MAJOR 5
#define PTMX_MINOR 2

/* The master, opened in the sandbox's devpts and nowhere else: what the workload put
 * in its place is not followed and cannot hold the agent up. */
static int master_open(void)
{
    struct statfs fs;
    struct stat st;
    int dir = open("/dev/pts", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), fd = -1;
    if (dir >= 0 && !fstatfs(dir, &fs) && fs.f_type == DEVPTS_MAGIC)
        fd = openat(dir, "ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (dir >= 0)
        close(dir);
    if (fd >= 0 && (fstat(fd, &st) || st.st_rdev != makedev(PTMX_MAJOR, PTMX_MINOR))) {
        close(fd);
        return -1;
    }
    return fd;
}

static bool set_size(int fd, uint32_t rows, uint32_t cols)
{
    struct winsize size = {.ws_row = (uint16_t)rows, .ws_col = (uint16_t)cols};
    return !ioctl(fd, TIOCSWINSZ, &size);
}

/* Input, output and errors of the command on one terminal of the wanted size. */
int pty_fds(struct op *op, struct launch *l, bool with_stdin)
{
    int unlock = 0, master = master_open();
    if (master < 0 || ioctl(master, TIOCSPTLCK, &unlock) || !set_size(master, op->rows, op->cols)) {
        if (master >= 0)
            close(master);
        return -1;
    }
    op->out[0].fd = master;
    op->tty_fd = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    for (int i = L_IN; i <= L_ERR; i++)
        l->fds[i] = fcntl(op->tty_fd, F_DUPFD_CLOEXEC, 3);
    if (with_stdin)
        op->in_fd = fcntl(master, F_DUPFD_CLOEXEC, 3);
    return op->tty_fd < 0 ? -1 : 0;
}

/* In the child: the terminal becomes the session's own, and the user's. A session that has
 * none gets the one that it opens: the ioctl may be one that the policy denies. */
void pty_take(const struct user *u)
{
    int tty = open("/proc/self/fd/0", O_RDWR | O_CLOEXEC);
    if (tty < 0)
        ioctl(0, TIOCSCTTY, 0);
    else
        close(tty);
    if (fchown(0, u->uid, (gid_t)-1)) {} /* rights on it are open already */
}

void pty_resize(struct op *op, const uint8_t *p, size_t n)
{
    if (n != 4 || !op->rows || op->reaped || op->out[0].fd < 0)
        return;
    uint32_t rows = p[0] | (uint32_t)p[1] << 8, cols = p[2] | (uint32_t)p[3] << 8;
    if (rows && cols)
        set_size(op->out[0].fd, rows, cols);
}

/* End of input is typed: the terminal's end-of-file character, twice where a line was
 * begun, because the first one then only ends that line. */
void pty_input_end(struct op *op)
{
    struct termios t;
    uint8_t eof[2] = {4, 4};
    if (!op->rows || op->in_fd < 0)
        return;
    if (!tcgetattr(op->in_fd, &t) && t.c_cc[VEOF] != _POSIX_VDISABLE)
        eof[0] = eof[1] = t.c_cc[VEOF];
    if (write(op->in_fd, eof, op->mid_line ? 2 : 1) < 0) {} /* it reads no more */
}

/* Whether output waits for the edge: nothing of it may be thrown away then. */
bool pty_waits(const struct op *op)
{
    const struct outstream *s = &op->out[0];
    if (!op->rows || s->fd < 0 || op->hung_up)
        return false;
    return !op->attached || !s->credit || conn_out.len >= OUT_HIGH;
}

/* As above, of a command whose output has no budget; not for ever without an edge. */
bool op_waits(const struct op *op, uint64_t now)
{
    bool full = false;
    for (int i = 0; i < 2; i++)
        full |= op->out[i].fd >= 0 && op->out[i].slides && !stream_room(&op->out[i]);
    return full && (op->attached || now < op->started + op->duration + HANGUP_NS);
}

/* Signals wait until the command itself is there to get them. */
bool op_has_begun(const struct op *op)
{
    return op->at.pid > 1 && has_begun(op->at.pid);
}

/* Whether it is a command that has not executed its program yet, or a file operation. */
bool op_is_unbegun(pid_t pid)
{
    for (int i = 0; i < OPS_MAX; i++)
        if (ops[i].used && !ops[i].session && ops[i].at.pid == pid && !ops[i].reaped)
            return ops[i].file || !has_begun(pid);
    return false;
}

void op_send_signals(struct op *op)
{
    if (!op->waiting_count || op->reaped || !op_has_begun(op))
        return;
    for (int i = 0; i < op->waiting_count; i++)
        if (kill(-op->at.pid, op->waiting[i]))
            kill(op->at.pid, op->waiting[i]);
    op->waiting_count = 0;
}
