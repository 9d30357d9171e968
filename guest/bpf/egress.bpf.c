/* The way out of sandboxes: attached to the group above all of them.
 *
 * A connection is judged where it is made, so that what is denied fails at once and is
 * known with its process. What is allowed is not sent out: it is turned to the gate, which
 * listens inside the sandbox's own network namespace and connects outside in its stead.
 * A namespace has no interface but its loopback one: a packet that none of this saw (raw,
 * of a socket made elsewhere) has nowhere to go, and neither has anything when these
 * programs are gone. A namespace is known by its cookie. One that is registered but has
 * no policy reaches nothing.
 *
 * What is allowed pays for a few look-ups and a note of where it was to go, under a number
 * that the connection carries to the gate as its mark; counts are for what is denied.
 *
 * Denials are counted exactly, per destination and per sandbox. Events are a sample of
 * them, bounded: for each destination the 1st, 2nd, 4th, 8th … and so many a second.
 */
#include "dsec_bpf.h"

#define GATE4 htonl(0xc0000008) /* 192.0.0.8 */
#define GATE6 {htonl(0xfd647365), htonl(0x63000000), 0, htonl(1)} /* fd64:7365:6300::1 */
#define GATE_PORT 1
#define DNS_PORT 53
#define PORT_RULES 8
#define NO_POLICY 0xffff
#define DEFAULT_RULE 0
#define EVENT_NS 5000000ull /* one token; */
#define EVENT_BURST 400     /* most that are saved up */
#define ORIGINS 65536    /* connections between being made and accepted, of all sandboxes */
#define SOL_SOCKET 1
#define SO_MARK 36
#define TCP 6
#define UDP 17

enum { CONNECT = 1, SEND };

struct sandbox { __u64 denied, untold, tokens, refilled; };
struct host { __u32 policy; __u8 bytes[16]; };
struct address { __u32 length; struct host host; };
struct port_rule { __u16 low, high; __u8 allow, pad; __u16 rule; };
struct ports { __u32 count, pad; struct port_rule rules[PORT_RULES]; };
struct origin { __u8 bytes[16]; __u64 netns; __u32 mark, pid; __u16 port, pad[3]; };
struct denial { __u64 netns; __u8 bytes[16]; __u16 port; __u8 protocol, action; __u32 rule; };
struct times { __u64 count, first, last; };
struct event {
    __u64 at, netns;
    __u32 pid, uid;
    struct denial what;
    char comm[16];
};

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, 16384);
    __type(key, __u64);
    __type(value, struct sandbox);
} sandboxes SEC(".maps"); /* counts, looked at when something is denied */

/* Rules about blocks, of all policies in one trie, told apart by the number that comes first: a map of
 * maps would make every change wait for the kernel's readers, some ten milliseconds. */
struct {
    __uint(type, BPF_MAP_TYPE_LPM_TRIE);
    __uint(max_entries, 262144);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct address);
    __type(value, struct ports);
} rules SEC(".maps");

/* What is about one address alone, which most rules are: as quick however many there are. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, 262144);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct host);
    __type(value, struct ports);
} hosts SEC(".maps");

/* Whose a namespace is, and which policy is in force: other rules are made under another
 * number, then that changes. 0: a sandbox without one. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, 16384);
    __type(key, __u64);
    __type(value, __u32);
} policies SEC(".maps");

/* By the mark, modulo the size: a table that evicts would cost more than all the rest. The
 * gate looks whether what it finds is of its sandbox and of this mark, and judges again. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, ORIGINS);
    __type(key, __u32);
    __type(value, struct origin);
} origins SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, 32768);
    __type(key, struct denial);
    __type(value, struct times);
} denials SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, 1 << 18);
} events SEC(".maps");

inline_always int may_tell(struct sandbox *s, __u64 now)
{
    __u64 more = (now - s->refilled) / EVENT_NS;
    if (more) {
        __u64 sum = s->tokens + more;
        s->tokens = sum > EVENT_BURST ? EVENT_BURST : sum;
        s->refilled = now;
    }
    if (!s->tokens)
        return 0;
    s->tokens--;
    return 1;
}

inline_always void deny(struct denial *what)
{
    __u64 now = ktime_ns(), n = 1;
    struct sandbox *s = map_lookup(&sandboxes, &what->netns);
    if (!s)
        return; /* it is just ending */
    __sync_fetch_and_add(&s->denied, 1);
    struct times *t = map_lookup(&denials, what);
    if (t) {
        n = __sync_fetch_and_add(&t->count, 1) + 1;
        t->last = now;
    } else {
        struct times first = {1, now, now};
        map_update(&denials, what, &first, BPF_ANY);
    }
    if (n & (n - 1))
        return;
    struct event *e = may_tell(s, now) ? ring_reserve(&events, sizeof *e, 0) : 0;
    if (!e) {
        __sync_fetch_and_add(&s->untold, 1);
        return;
    }
    e->at = now;
    e->netns = what->netns;
    e->pid = current_pid_tgid() >> 32;
    e->uid = (__u32)current_uid_gid();
    e->what = *what;
    current_comm(e->comm, sizeof e->comm);
    ring_submit(e, 0);
}

/* Loopback and "here": the sandbox's own namespace, whatever it does there. */
inline_always int inside(const __u8 *a)
{
    const __u32 *w = (const __u32 *)a;
    if (w[0] || w[1])
        return 0;
    if (w[2] == htonl(0xffff))
        return a[12] == 127 || !w[3];
    return !w[2] && (!w[3] || w[3] == htonl(1));
}

inline_always int is_resolver(const __u8 *a, __u16 port)
{
    const __u32 *w = (const __u32 *)a;
    return port == DNS_PORT && !w[0] && !w[1] && w[2] == htonl(0xffff) && w[3] == GATE4;
}

/* 1: allowed. `some`: whether any port of the address is. */
inline_always int judge(__u32 policy, const __u8 *a, __u16 port, __u32 *rule, int *some)
{
    struct address key = {.length = 32 + 128, .host = {.policy = policy}};
    int verdict = 0, met = 0;
    *rule = policy ? DEFAULT_RULE : NO_POLICY;
    if (!policy)
        return 0;
    __builtin_memcpy(key.host.bytes, a, 16);
    struct ports *p = map_lookup(&hosts, &key.host);
    if (!p)
        p = map_lookup(&rules, &key);
    if (!p)
        return 0;
#pragma unroll
    for (int i = 0; i < PORT_RULES; i++) {
        if (i >= p->count)
            break;
        struct port_rule *r = &p->rules[i];
        *some |= r->allow;
        if (!met && port >= r->low && port <= r->high) {
            *rule = r->rule;
            verdict = r->allow;
            met = 1;
        }
    }
    return verdict;
}

/* 0: the kernel did not take the mark, and the gate would not know the connection. */
inline_always int turn_to_gate(struct bpf_sock_addr *ctx, const struct denial *to, int v6)
{
    const __u32 gate6[4] = GATE6;
    const __u32 *w = (const __u32 *)to->bytes;
    int real6 = v6 && !(!w[0] && !w[1] && w[2] == htonl(0xffff));
    __u32 mark = (__u32)socket_cookie(ctx), slot;
    if (!mark)
        mark = 1;
    slot = mark % ORIGINS;
    struct origin *o = map_lookup(&origins, &slot);
    if (!o || set_option(ctx, SOL_SOCKET, SO_MARK, &mark, sizeof mark))
        return 0;
    __builtin_memcpy(o->bytes, to->bytes, 16);
    o->netns = to->netns;
    o->mark = mark;
    o->pid = current_pid_tgid() >> 32;
    o->port = to->port;
    if (!v6) {
        ctx->user_ip4 = GATE4;
    } else if (real6) {
        ctx->user_ip6[0] = gate6[0];
        ctx->user_ip6[1] = gate6[1];
        ctx->user_ip6[2] = gate6[2];
        ctx->user_ip6[3] = gate6[3];
    } else {
        ctx->user_ip6[3] = GATE4;
    }
    ctx->user_port = htons(GATE_PORT);
    return 1;
}

inline_always int way_out(struct bpf_sock_addr *ctx, int v6, __u8 action)
{
    struct denial what = {.action = action};
    __u32 *w = (__u32 *)what.bytes;
    __u32 rule = 0;
    int some = 0;
    if (v6) {
        w[0] = ctx->user_ip6[0];
        w[1] = ctx->user_ip6[1];
        w[2] = ctx->user_ip6[2];
        w[3] = ctx->user_ip6[3];
    } else {
        w[2] = htonl(0xffff);
        w[3] = ctx->user_ip4;
    }
    what.port = htons((__u16)ctx->user_port);
    if (inside(what.bytes) || is_resolver(what.bytes, what.port))
        return 1;
    what.netns = netns_cookie(ctx);
    __u32 *policy = map_lookup(&policies, &what.netns);
    if (!policy)
        return 1; /* nothing of ours, or without a way out: there is no interface */
    what.protocol = (__u8)ctx->protocol;
    int allowed = judge(*policy, what.bytes, what.port, &rule, &some);
    if (allowed && what.protocol == TCP && action == CONNECT)
        return turn_to_gate(ctx, &what, v6);
    /* C libraries connect datagram sockets to sort addresses: that is no attempt */
    if (some && what.protocol == UDP && action == CONNECT)
        return 0;
    what.rule = rule;
    deny(&what);
    return 0;
}

SEC("cgroup/connect4") int out_connect4(struct bpf_sock_addr *ctx) { return way_out(ctx, 0, CONNECT); }
SEC("cgroup/connect6") int out_connect6(struct bpf_sock_addr *ctx) { return way_out(ctx, 1, CONNECT); }
SEC("cgroup/sendmsg4") int out_sendmsg4(struct bpf_sock_addr *ctx) { return way_out(ctx, 0, SEND); }
SEC("cgroup/sendmsg6") int out_sendmsg6(struct bpf_sock_addr *ctx) { return way_out(ctx, 1, SEND); }

char LICENSE[] SEC("license") = "GPL";
