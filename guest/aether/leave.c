/* Ending the command of a session, not its shell: what the command started is killed,
 * and the shell is told to leave the text it runs (how it does so is in child.c).
 *
 * A shell's processes share one leaf. Those that were there before the command began
 * are kept, with what they started since: background work of earlier commands. The
 * rest is the command's, whatever process group or session it went to. A shell that
 * does not leave its text in time (it has another handler, or stands in one long
 * builtin) goes with everything in its leaf. */
#include "aether.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LEAVE_MAX_NS 3000000000ull /* a busy node may give it no turn for long */
#define INTERRUPT_AGAIN_NS 10000000ull
#define YOUNG_NS 50000000ull
#define ANCESTORS_MAX 64
#define STAT_PARENT 4
#define STAT_BEGAN 22

static bool holds(const struct pids *list, pid_t pid)
{
    size_t low = 0, high = list->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (list->p[middle] == pid)
            return true;
        if (list->p[middle] < pid)
            low = middle + 1;
        else
            high = middle;
    }
    return false;
}

static void drop(struct pids *list)
{
    free(list->p);
    *list = (struct pids){0};
}

/* A number of /proc/PID/stat, counted from 1; 0 where there is none. */
static uint64_t stat_of(pid_t pid, int number)
{
    char path[32], text[1024], *at;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t k = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[k > 0 ? k : 0] = 0;
    at = strrchr(text, ')'); /* the second; names may hold anything */
    for (int i = 2; at && i < number; i++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

static pid_t parent_of(pid_t pid)
{
    return (pid_t)stat_of(pid, STAT_PARENT);
}

/* Perhaps not yet executed: a copy of the shell, which swallows an interrupt. */
static bool is_young(pid_t pid)
{
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    uint64_t now = (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
    return now < stat_of(pid, STAT_BEGAN) * (1000000000ull / (uint64_t)sysconf(_SC_CLK_TCK)) + YOUNG_NS;
}

/* Whether a process of the leaf is the command's: not the shell, not there before, nor
 * below what was. */
static bool is_commands(const struct session *s, pid_t pid)
{
    for (int i = 0; i < ANCESTORS_MAX && pid > 1; i++) {
        if (pid == s->at.pid)
            return i > 0;
        if (holds(&s->before, pid))
            return false;
        pid = parent_of(pid);
    }
    return true;
}

/* The command's processes, all found before any of them is sent a signal. */
static struct pids commands(const struct session *s)
{
    struct pids list = cg_leaf_procs(s->at.leaf);
    size_t n = 0;
    for (size_t i = 0; i < list.n; i++)
        if (is_commands(s, list.p[i]))
            list.p[n++] = list.p[i];
    list.n = n;
    return list;
}

static size_t send_all(const struct session *s, int sig)
{
    struct pids list = commands(s);
    for (size_t i = 0; i < list.n; i++)
        kill(list.p[i], sig);
    free(list.p);
    return list.n;
}

/* Only a shell that runs a text: one that waits for it would be disturbed. */
static void tell_shell(struct session *s)
{
    session_state(s);
    if (s->in_text && s->at.pid > 1 && !s->current->reaped)
        kill(s->at.pid, LEAVE_SIGNAL);
}

void session_begins(struct session *s)
{
    drop(&s->before);
    drop(&s->told);
    s->before = cg_leaf_procs(s->at.leaf);
    s->interrupt_at = s->leave_end = 0;
    s->in_text = s->sweeping = s->swept = false;
}

/* The command is to end at once, with all that it started. */
void session_leave(struct session *s)
{
    if (s->at.leaf < 0 || s->at.pid <= 1 || s->dead) {
        session_end(s);
        return;
    }
    s->leave_end = now_ns() + LEAVE_MAX_NS;
    session_left(s);
}

/* Whether it has; asked again and again until then. */
bool session_left(struct session *s)
{
    size_t rest = send_all(s, SIGKILL);
    bool shell_left = s->current->reaped;
    if (shell_left && !rest && !s->sweeping) /* its dead children are its own to reap */
        s->sweeping = write(s->ctl_fd, "r\n", 2) == 2;
    if (shell_left && !rest && s->swept)
        return true;
    if (now_ns() >= s->leave_end)
        session_end(s);
    else if (!shell_left)
        tell_shell(s);
    return false;
}

/* An interrupt as from a keyboard: the command's processes get it and the shell leaves
 * its text when the one that it waits for has ended. What the shell starts before it
 * has heard of that gets the interrupt too. */
static void interrupt(struct session *s, bool again)
{
    struct pids list = commands(s);
    for (size_t i = 0; i < list.n; i++) {
        pid_t pid = list.p[i];
        bool direct = parent_of(pid) == s->at.pid;
        if (!again || (direct && (!holds(&s->told, pid) || is_young(pid))))
            kill(pid, SIGINT);
    }
    drop(&s->told);
    s->told = list;
    s->interrupt_at = now_ns() + INTERRUPT_AGAIN_NS;
    tell_shell(s);
}

/* A signal to the processes of the running command. */
void session_signal(struct session *s, int sig)
{
    if (sig == SIGINT)
        interrupt(s, false);
    else
        send_all(s, sig);
}

/* Repeats an interrupt until it has had its effect. */
void session_tick(const struct op *op, uint64_t now)
{
    struct session *s = op->session;
    if (!s || s->current != op || !s->interrupt_at)
        return;
    if (op->reaped)
        s->interrupt_at = 0;
    else if (now >= s->interrupt_at)
        interrupt(s, true);
}
