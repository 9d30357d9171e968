/* What the agent keeps ready so that a command starts at once: nests. A nest is used again
 * when a command left nothing behind in its leaf; otherwise the leaf stays with what lives
 * on in it and a new nest is made. More commands at once than nests get a child and a leaf
 * of their own. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define ENDS_MAX 256

/* A process asked for: `slot` names it until its pid is known. */
struct child { bool used; int sock; struct place at; };
struct nest {
    bool used, busy, broken;
    bool gone;                 /* nothing more will be heard of it */
    uint32_t unclaimed;        /* slot of its command, until its process is known; 0: none */
    int procs;                 /* cgroup.procs of its leaf */
    dev_t root_dev; ino_t root_ino; /* the root that it was told of */
    struct child root;
};

static struct nest nests[NESTS];
static int wanted = NESTS_FEW; /* nests, */
static uint64_t needed_at;     /* all of them, last */
static uint32_t serial;
static int asked; /* of the launcher, and not answered */
static uint64_t last_launch;
static struct end ends[ENDS_MAX]; /* the last ones: some are of processes not told of yet */
static uint32_t ends_count;

int nest_fd(int i)
{
    return nests[i].used && !nests[i].gone ? nests[i].root.sock : -1;
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
    if (!ask(launcher_fd, c, kind, c->at.leaf)) {
        asked++;
        return 0;
    }
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
    child_drop(&n->root); /* it ends when it reads that; what a command left lives on */
    if (n->procs >= 0)
        close(n->procs);
    cg_leaf_drop(n->root.at.leaf, n->root.at.leaf_name);
    memset(n, 0, sizeof *n);
}

/* Ends every nest that no command is in; for a new launcher. */
void nests_clear(void)
{
    asked = 0;
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
        if (n->used && !n->busy && !n->broken &&
            (!best || (n->root.at.pid && !best->root.at.pid)))
            best = n;
    }
    return best;
}

/* A nest is told of the root once: what it was born with may be the one before. */
static int tell_root(struct nest *n, struct launch *l)
{
    struct stat st;
    if (stat("/", &st))
        return -1;
    if (n->root_ino == st.st_ino && n->root_dev == st.st_dev)
        return 0;
    l->fds[L_ROOT] = root_fd();
    n->root_dev = st.st_dev;
    n->root_ino = st.st_ino;
    return l->fds[L_ROOT] < 0 ? -1 : 0;
}

static int into_nest(struct nest *n, struct launch *l, struct place *where)
{
    uint32_t slot = ++serial & ~NEST_BIT;
    if (tell_root(n, l) || send_launch(n->root.sock, slot, l)) { /* it was killed from inside */
        nest_retire(n);
        return -1;
    }
    *where = n->root.at;
    where->sock = -1;
    where->slot = n->unclaimed = slot;
    where->pid = 0;
    where->nest = (int)(n - nests) + 1;
    n->busy = true;
    if (where->nest == wanted)
        needed_at = now_ns();
    return 0;
}

static int hand_over(struct launch *l, struct place *where)
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
        if (l->fds[L_ROOT] < 0)
            l->fds[L_ROOT] = root_fd();
        if (!send_launch(c.sock, c.at.slot, l))
            return 0;
        child_drop(&c);
        cg_leaf_kill(c.at.leaf, 0);
        cg_leaf_drop(c.at.leaf, c.at.leaf_name);
    }
    return -1;
}

static void launched(struct launch *l)
{
    for (int i = 0; i < L_FDS; i++) {
        bool again = i == L_ERR && l->fds[L_ERR] == l->fds[L_OUT];
        if (l->fds[i] >= 0 && !again && !(l->lends_output && (i == L_OUT || i == L_ERR)))
            close(l->fds[i]);
    }
    last_launch = now_ns();
}

int launch(struct launch *l, struct place *where)
{
    int failed = policy_fds(l);
    for (int i = 0; i < L_ROOT; i++)
        failed |= l->fds[i] < 0 && !(i == L_SPEC && l->spec);
    if (!failed)
        failed = hand_over(l, where);
    launched(l);
    return failed;
}

bool place_held(const struct place *at)
{
    return at->nest || at->leaf >= 0 || at->sock > 0;
}

/* The command is over: its nest is free again, or its leaf goes. */
void place_leave(struct place *at)
{
    if (at->nest) {
        struct nest *n = &nests[at->nest - 1];
        n->busy = false;
        n->unclaimed = 0;
        if (n->procs < 0)
            n->procs = cg_leaf_list(n->root.at.leaf);
        if (n->broken || !cg_holds_only(n->procs, n->root.at.pid))
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
        if (n->used)
            continue;
        if (!at_once && now < last_launch + SPARE_QUIET_NS)
            return last_launch + SPARE_QUIET_NS;
        memset(n, 0, sizeof *n);
        n->procs = -1;
        if (ask_with_leaf(&n->root, NEST_BIT))
            return due;
        n->used = true;
    }
    return due;
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
    while ((k = recv(fd, &r, sizeof r, MSG_DONTWAIT)) == sizeof r ||
           (k < 0 && errno == ECONNRESET))
        if (k > 0 && r.number == n->unclaimed) { /* it may be said twice */
            n->unclaimed = 0;
            answered(&r);
        }
    return k < 0 && (errno == EAGAIN || errno == EINTR);
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
        if (nests[i].unclaimed && nest_fd(i) >= 0)
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
