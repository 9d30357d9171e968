/* What the launcher and the nests say, and what the end of a process says of them: which
 * process a command got, that one is gone, why a command did not begin. */
#include "nest.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ENDS_MAX 256

static struct end ends[ENDS_MAX]; /* the last ones: some are of processes not told of yet */
static uint32_t ends_count;

/* Where it is said which process a command got; -1 where nothing is awaited. */
int nest_fd(int i)
{
    return nests[i].unclaimed && !nests[i].gone ? nests[i].root.sock : -1;
}

/* Whether nobody took the command, or will: what a process of its own had not read resets
 * the connection, and one that had says so at once; a nest's child does so too. */
bool place_unread(const struct place *at)
{
    char byte;
    if (at->nest)
        return !at->pid && nests[at->nest - 1].gone;
    if (at->sock <= 0)
        return false;
    ssize_t k = recv(at->sock, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    return !k || (k < 0 && errno == ECONNRESET);
}

static struct nest *nest_of(pid_t pid)
{
    for (int i = 0; i < NESTS; i++) {
        struct nest *n = &nests[i];
        if (n->used && n->root.at.pid == pid)
            return n;
    }
    return NULL;
}

bool spare_is(pid_t pid)
{
    return nest_of(pid) != NULL;
}

static void nest_news(struct nest *n);

bool spare_reaped(pid_t pid)
{
    struct nest *n = nest_of(pid);
    if (!n)
        return false;
    n->broken = true;
    if (!n->busy)
        nest_retire(n);
    else if (n->unclaimed)
        nest_news(n); /* a child that lives tells of itself */
    return true;
}

/* A child's end; it is remembered, for it may be known by its pid only later. */
void launch_reaped(const struct end *end)
{
    ends[ends_count++ % ENDS_MAX] = *end;
    op_reaped(end);
}

static const struct end *end_of(pid_t pid)
{
    for (uint32_t i = 1; i <= ENDS_MAX && i <= ends_count; i++)
        if (ends[(ends_count - i) % ENDS_MAX].pid == pid)
            return &ends[(ends_count - i) % ENDS_MAX];
    return NULL;
}

static struct nest *asked_for(uint32_t slot)
{
    for (int i = 0; i < NESTS; i++)
        if (nests[i].used && nests[i].root.at.slot == slot)
            return &nests[i];
    return NULL;
}

static void answered(const struct reply *r)
{
    struct nest *n = asked_for(r->number);
    bool dead = r->pid > 0 && kill(r->pid, 0) && errno == ESRCH;
    if (n)
        n->root.at.pid = r->pid;
    if (n && (r->pid <= 0 || dead)) {
        n->broken = true;
        if (!n->busy)
            nest_retire(n);
    }
    if (n || r->number & NEST_BIT)
        return;
    const struct end *end = dead ? end_of(r->pid) : NULL;
    op_launched(r->number, dead && !end ? -ESRCH : r->pid);
    if (end)
        op_reaped(end);
}

/* Whether a process says that it took the command, where nobody else can tell its pid. */
bool place_claimed(const struct place *at)
{
    struct reply r = {at->slot, 0};
    if (at->nest || at->sock <= 0 ||
        recv(at->sock, &r, sizeof r, MSG_DONTWAIT | MSG_PEEK) != sizeof r)
        return false;
    answered(&r);
    return true;
}

/* Takes what has been answered; false when the other side is gone. What it had not read
 * when it went resets the connection once; what it said before is still there. */
static bool take_answers(int fd)
{
    struct reply r;
    for (;;) {
        ssize_t k = recv(fd, &r, sizeof r, MSG_DONTWAIT);
        if (k == sizeof r) {
            asked--;
            answered(&r);
        } else if (k >= 0 || errno != ECONNRESET)
            return k < 0 && (errno == EAGAIN || errno == EINTR);
    }
}

/* What a nest says: the process of its command. */
static bool take_claims(struct nest *n)
{
    struct reply r;
    ssize_t k;
    int fd = n->root.sock;
    do {
        k = recv(fd, &r, sizeof r, MSG_DONTWAIT | MSG_TRUNC);
        if (k == sizeof r && r.number == n->unclaimed) { /* it may be said twice */
            n->unclaimed = 0;
            answered(&r);
            return true;
        }
    } while (k >= (ssize_t)sizeof r || (k < 0 && errno == ECONNRESET));
    return k < 0 && (errno == EAGAIN || errno == EINTR);
}

/* What the child of a command has to say, which exited with CHILD_FAILED. */
void place_report(const struct place *at, struct buf *report)
{
    int sock = at->nest ? nests[at->nest - 1].root.sock : at->sock;
    uint8_t text[2048];
    ssize_t k;
    while (sock > 0 && ((k = recv(sock, text, sizeof text, MSG_DONTWAIT)) > 0 ||
                        (k < 0 && errno == ECONNRESET)))
        if (k > (ssize_t)sizeof(struct reply)) /* what is as short as that is a claim */
            buf_add(report, text, (size_t)k);
}

static void nest_news(struct nest *n)
{
    if (take_claims(n))
        return;
    n->broken = n->gone = true;
    if (n->busy)
        op_lost(n->root.at.leaf);
    else
        nest_retire(n);
}

static void launcher_answers(void)
{
    if (launcher_fd < 0 || take_answers(launcher_fd))
        return;
    close(launcher_fd);
    launcher_fd = -1;
    nests_clear();
    op_lost(-1);
    launcher_start();
}

/* What is awaited only: so that a process is known before its end. */
void launcher_claims(void)
{
    for (int i = 0; i < NESTS; i++)
        if (nest_fd(i) >= 0)
            nest_news(&nests[i]);
    if (asked)
        launcher_answers();
}

/* What the launcher and the nests say; what a dead one had not answered has failed. */
void launcher_news(void)
{
    for (int i = 0; i < NESTS; i++)
        if (nest_fd(i) >= 0)
            nest_news(&nests[i]);
    launcher_answers();
}
