/* What the agent keeps ready so that a command starts at once: nests. A nest is used again
 * when a command left nothing behind in its leaf; otherwise the leaf stays with what lives
 * on in it and a new nest is made. More commands at once than nests get a child and a leaf
 * of their own. */
#include "nest.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

struct nest nests[NESTS];
static int wanted = NESTS_FEW; /* nests, */
static uint64_t needed_at;     /* all of them, last */
static uint32_t serial;
int asked; /* of the launcher, and not answered */
static uint64_t last_launch;

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

void nest_retire(struct nest *n)
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

/* The root, and what a command without input reads. */
static int give_root(struct launch *l)
{
    if (l->fds[L_ROOT] < 0)
        l->fds[L_ROOT] = root_fd();
    if (l->fds[L_NULL] < 0)
        l->fds[L_NULL] = fcntl(null_fd(), F_DUPFD_CLOEXEC, 3);
    return l->fds[L_ROOT] < 0 || l->fds[L_NULL] < 0 ? -1 : 0;
}

/* A nest is told of the root once: what it was born with may be the one before. */
static int tell_root(struct nest *n, struct launch *l)
{
    struct stat st;
    if (n->root_last)
        return 0;
    if (stat("/", &st))
        return -1;
    n->root_last = root_is_last(&st);
    if (n->root_ino == st.st_ino && n->root_dev == st.st_dev)
        return 0;
    n->root_dev = st.st_dev;
    n->root_ino = st.st_ino;
    return give_root(l);
}

static void policy_drop(struct launch *l)
{
    for (int i = L_POLICY; i <= L_ASK; i++) {
        if (l->fds[i] >= 0)
            close(l->fds[i]);
        l->fds[i] = -1;
    }
}

/* A nest is told of the policy once: it makes nothing any more when there is another. */
static int tell_policy(struct nest *n, struct launch *l)
{
    policy_drop(l);
    if (n->policy == policy_sent)
        return 0;
    n->policy = policy_sent;
    return policy_fds(l);
}

/* Before it has a command to make, so that none waits for that. */
static void tell_early(struct nest *n)
{
    if (n->policy == policy_sent)
        return;
    struct launch l = {.kind = K_POLICY, .fds = NO_FDS};
    if (tell_policy(n, &l) || send_launch(n->root.sock, 0, &l))
        nest_retire(n);
    policy_drop(&l);
}

/* Those that took another policy are of no use any more. The first that a command would go
 * to is told at once, the others with their first command. */
void nests_tell(void)
{
    for (int i = 0; i < NESTS; i++) {
        struct nest *n = &nests[i];
        if (!n->used || !n->policy || n->policy == policy_sent)
            continue;
        n->broken = true;
        if (!n->busy)
            nest_retire(n);
    }
    struct nest *first = policy_sent ? nest_ready() : NULL;
    if (first)
        tell_early(first);
}

static int into_nest(struct nest *n, struct launch *l, struct place *where)
{
    uint32_t slot = ++serial & ~NEST_BIT;
    if (tell_root(n, l) || tell_policy(n, l) || send_launch(n->root.sock, slot, l)) {
        nest_retire(n); /* it was killed from inside */
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
    policy_drop(l);
    if (policy_fds(l))
        return -1;
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
        if (!give_root(l) && !send_launch(c.sock, c.at.slot, l))
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
    int failed = l->incomplete || (l->fds[L_SPEC] < 0 && !l->spec);
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
        tell_early(n);
    }
    return due;
}
