/* What the agent keeps ready so that a command starts at once: nests, each with a
 * child that waits for its command. A nest is used again when a command left nothing
 * behind in its leaf; otherwise the leaf stays with what lives on in it and a new nest
 * is made. More commands at once than nests get a child and a leaf of their own. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ENDS_MAX 256

/* A process asked for: `slot` names it until its pid is known. */
struct child { bool used; int sock; struct place at; };
struct nest { bool used, busy, broken; struct child root, next; };

static struct nest nests[NESTS];
static int wanted = NESTS_FEW; /* nests, */
static uint64_t needed_at;     /* all of them, last */
static uint32_t serial;
static uint64_t last_launch;
static struct end ends[ENDS_MAX]; /* the last ones: some are of processes not told of yet */
static uint32_t ends_count;

int nest_fd(int i)
{
    return nests[i].used ? nests[i].root.sock : -1;
}

static int ask(int via, struct child *c, uint32_t kind, int leaf)
{
    int pair[2];
    if (via < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
        return -1;
    c->at.slot = (++serial & ~NEST_BIT) | kind;
    c->at.pid = 0;
    c->sock = pair[0];
    set_nonblock(c->sock);
    int root = root_fd();
    int failed = root < 0 || send_fds(via, c->at.slot, (int[]){pair[1], leaf, root}, 3);
    close(root);
    close(pair[1]);
    if (failed) {
        close(c->sock);
        return -1;
    }
    c->used = true;
    return 0;
}

/* A child of the launcher with a leaf of its own. */
static int ask_with_leaf(struct child *c, uint32_t kind)
{
    memset(c, 0, sizeof *c);
    c->at.leaf = cg_leaf_open(c->at.leaf_name, sizeof c->at.leaf_name);
    if (!ask(launcher_fd, c, kind, c->at.leaf))
        return 0;
    cg_leaf_drop(c->at.leaf, c->at.leaf_name);
    return -1;
}

static void child_drop(struct child *c)
{
    if (c->used)
        close(c->sock);
    c->used = false;
}

static void nest_retire(struct nest *n)
{
    child_drop(&n->next); /* both end when they read the end of their sockets; */
    child_drop(&n->root); /* what a command left in the leaf lives on */
    cg_leaf_drop(n->root.at.leaf, n->root.at.leaf_name);
    memset(n, 0, sizeof *n);
}

/* Ends every nest that no command is in; for a new launcher. */
void nests_clear(void)
{
    for (int i = 0; i < NESTS; i++) {
        nests[i].broken = true;
        if (nests[i].used && !nests[i].busy)
            nest_retire(&nests[i]);
    }
}

static struct nest *nest_ready(void)
{
    struct nest *best = NULL;
    for (int i = 0; i < NESTS; i++) {
        struct nest *n = &nests[i];
        if (n->used && !n->busy && !n->broken && n->next.used &&
            (!best || (n->next.at.pid && !best->next.at.pid)))
            best = n;
    }
    return best;
}

static int into_nest(struct nest *n, const struct launch *l, struct place *where)
{
    if (send_launch(n->next.sock, l)) { /* it was killed from inside */
        nest_retire(n);
        return -1;
    }
    n->next.used = false;
    *where = n->root.at;
    where->sock = n->next.sock;
    where->slot = n->next.at.slot;
    where->pid = n->next.at.pid;
    where->nest = (int)(n - nests) + 1;
    n->busy = true;
    if (where->nest == wanted)
        needed_at = now_ns();
    return 0;
}

static int hand_over(const struct launch *l, struct place *where)
{
    struct nest *n;
    while ((n = nest_ready()))
        if (!into_nest(n, l, where))
            return 0;
    if (wanted < NESTS)
        wanted++;
    needed_at = now_ns();
    for (int tries = 0; tries < 2; tries++) {
        struct child c;
        if (ask_with_leaf(&c, 0)) {
            launcher_news();
            if (launcher_fd < 0 && launcher_start())
                return -1;
            continue;
        }
        *where = c.at;
        where->sock = c.sock;
        if (!send_launch(c.sock, l))
            return 0;
        child_drop(&c);
        cg_leaf_kill(c.at.leaf, 0);
        cg_leaf_drop(c.at.leaf, c.at.leaf_name);
    }
    return -1;
}

int launch(struct launch *l, struct place *where)
{
    int failed = 0;
    l->fds[L_ROOT] = root_fd();
    policy_fds(l);
    for (int i = 0; i <= L_ROOT; i++)
        failed |= l->fds[i] < 0 && !(i == L_SPEC && l->spec);
    if (!failed)
        failed = hand_over(l, where);
    for (int i = 0; i < L_FDS; i++)
        if (l->fds[i] >= 0)
            close(l->fds[i]);
    last_launch = now_ns();
    return failed;
}

/* The command is over: its nest is free again, or its leaf goes. */
void place_leave(struct place *at)
{
    if (at->nest) {
        struct nest *n = &nests[at->nest - 1];
        n->busy = false;
        if (n->broken || !cg_leaf_holds_only(n->root.at.leaf, n->root.at.pid))
            nest_retire(n);
    } else {
        cg_leaf_drop(at->leaf, at->leaf_name);
    }
    if (at->sock > 0)
        close(at->sock);
    memset(at, 0, sizeof *at);
    at->leaf = -1;
}

/* Everything in its leaf was killed, and a nest with it, dead already or not. */
void place_spoil(const struct place *at)
{
    if (at->nest)
        nests[at->nest - 1].broken = true;
}

/* Whether the process died before it took its command: what it had not read resets
 * the connection, and one that had says so at once. */
bool place_unread(const struct place *at)
{
    char byte;
    if (at->sock <= 0)
        return false;
    ssize_t k = recv(at->sock, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    return !k || (k < 0 && errno == ECONNRESET);
}

/* The last nest goes when so many were not needed for a while; when to look again. */
static uint64_t expire(uint64_t now)
{
    struct nest *last = &nests[wanted - 1];
    if (wanted <= NESTS_FEW || last->busy)
        return UINT64_MAX;
    if (now >= needed_at + NEST_IDLE_NS) {
        if (last->used)
            nest_retire(last);
        wanted--;
        needed_at = now;
    }
    return needed_at + NEST_IDLE_NS;
}

/* Makes what is missing; returns when it wants to be asked again. */
uint64_t spares_refill(uint64_t now, bool at_once)
{
    uint64_t due = expire(now);
    for (int i = 0; i < wanted && launcher_fd >= 0; i++) {
        struct nest *n = &nests[i];
        if (n->busy || (n->used && n->next.used))
            continue;
        if (!at_once && now < last_launch + SPARE_QUIET_NS)
            return last_launch + SPARE_QUIET_NS;
        if (!n->used) {
            memset(n, 0, sizeof *n);
            if (ask_with_leaf(&n->root, NEST_BIT))
                return due;
            n->used = true;
        }
        if (ask(n->root.sock, &n->next, 0, -1))
            nest_retire(n);
    }
    return due;
}

static struct nest *nest_of(pid_t pid)
{
    for (int i = 0; i < NESTS; i++) {
        struct nest *n = &nests[i];
        if (n->used && (n->root.at.pid == pid || (n->next.used && n->next.at.pid == pid)))
            return n;
    }
    return NULL;
}

bool spare_is(pid_t pid)
{
    return nest_of(pid) != NULL;
}

bool spare_reaped(pid_t pid)
{
    struct nest *n = nest_of(pid);
    if (!n)
        return false;
    n->broken = true;
    if (!n->busy)
        nest_retire(n);
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

static struct child *waiting(uint32_t slot, struct nest **of)
{
    for (int i = 0; i < NESTS; i++) {
        struct nest *n = *of = &nests[i];
        if (n->used && n->root.at.slot == slot)
            return &n->root;
        if (n->used && n->next.used && n->next.at.slot == slot)
            return &n->next;
    }
    return NULL;
}

static void answered(const struct reply *r)
{
    struct nest *n;
    struct child *c = waiting(r->number, &n);
    bool dead = r->pid > 0 && kill(r->pid, 0) && errno == ESRCH;
    if (c)
        c->at.pid = r->pid;
    if (c && (r->pid <= 0 || dead)) {
        n->broken = true;
        if (!n->busy)
            nest_retire(n);
    }
    if (c || r->number & NEST_BIT)
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
    if (at->sock <= 0 ||
        recv(at->sock, &r.pid, sizeof r.pid, MSG_DONTWAIT | MSG_PEEK) != sizeof r.pid)
        return false;
    answered(&r);
    return true;
}

/* Takes what has been answered; false when the other side is gone. */
static bool take_answers(int fd)
{
    struct reply r;
    ssize_t k;
    while ((k = recv(fd, &r, sizeof r, MSG_DONTWAIT)) == sizeof r)
        answered(&r);
    return k < 0 && (errno == EAGAIN || errno == EINTR);
}

/* What the launcher and the nests say; what a dead one had not answered has failed. */
void launcher_news(void)
{
    for (int i = 0; i < NESTS; i++) {
        int fd = nest_fd(i);
        if (fd < 0 || take_answers(fd) || nest_fd(i) != fd)
            continue;
        nests[i].broken = true;
        if (nests[i].busy)
            op_lost(nests[i].root.at.leaf);
        else
            nest_retire(&nests[i]);
    }
    if (launcher_fd < 0 || take_answers(launcher_fd))
        return;
    close(launcher_fd);
    launcher_fd = -1;
    nests_clear();
    op_lost(-1);
    launcher_start();
}
