/* Connections to what listens in the sandbox: TCP ports of its loopback interface; and
 * those that begin inside, at ports of that interface where the agent listens.
 *
 * The agent is in the sandbox's network namespace and in no other, so there is nothing
 * else that it could reach, and who comes is always of the sandbox. A connection is an operation without a process: its input
 * and output move under credit only, each direction ends by itself. One that breaks off
 * is reset, so that the other end never takes a part for the whole. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECT_NS 10000000000ull /* where the edge says nothing */
#define PAUSE_NS 2000000ull      /* before the second try; doubles */
#define PAUSE_MAX_NS 50000000ull
#define LISTENERS_MAX 16
#define BACKLOG 64
#define SOCKET_BUFFER (128 << 10) /* of each direction, in the kernel, which doubles it */

static void settle(int fd)
{
    int on = 1, size = SOCKET_BUFFER;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
}

/* Begins to connect to 127.0.0.1 or ::1; 0 or errno. */
static int begin(struct dial *d)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(d->port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(d->port),
                              .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    const void *to = d->v6 ? (const void *)&v6 : &v4;
    int fd = socket(d->v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errno;
    settle(fd);
    if (connect(fd, to, d->v6 ? sizeof v6 : sizeof v4) && errno != EINPROGRESS) {
        int err = errno;
        close(fd);
        return err;
    }
    d->fd = fd;
    return 0;
}

/* A connect without a listener can meet itself, where its own port is the one it asks for. */
static bool is_itself(int fd)
{
    struct sockaddr_in6 own, peer; /* the port is in the same place for both families */
    socklen_t n = sizeof own, m = sizeof peer;
    return !getsockname(fd, (void *)&own, &n) && !getpeername(fd, (void *)&peer, &m) &&
           own.sin6_port == peer.sin6_port;
}

static void drop(int *fd, bool reset)
{
    struct linger at_once = {1, 0};
    if (*fd < 0)
        return;
    if (reset)
        setsockopt(*fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    close(*fd);
    *fd = -1;
}

static void finish(struct op *op)
{
    op->done = true;
    drop(&op->dial.fd, false);
    drop(&op->in_fd, false);
    drop(&op->out[0].fd, false);
    put_u64(&op->result, T_TOTAL_OUT, op->out[0].total);
    put_u64(&op->result, T_TAKEN, op->in_total);
}

static void fail(struct op *op, const char *code, int err, const char *what)
{
    put_error(&op->result, code, "port", err, "port %u: %s", op->dial.port, what);
    op->failed = true;
    finish(op);
}

/* The agent's listeners. One that was opened stays: connections wait in it while no edge
 * is there to take them. */
static struct { uint16_t port; int fd; } listeners[LISTENERS_MAX];

static int listener(uint16_t port, int *err)
{
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_port = htons(port),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int i = 0, on = 1;
    while (i < LISTENERS_MAX && listeners[i].port && listeners[i].port != port)
        i++;
    if (i == LISTENERS_MAX) {
        *err = EMFILE;
        return -1;
    }
    if (listeners[i].port)
        return listeners[i].fd;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd < 0 || bind(fd, (void *)&own, sizeof own) || listen(fd, BACKLOG)) {
        *err = errno;
        if (fd >= 0)
            close(fd);
        return -1;
    }
    listeners[i].port = port;
    listeners[i].fd = fd;
    return fd;
}

/* Waits for a connection from within. */
static void await_one(struct op *op)
{
    int err = 0, fd = listener(op->dial.port, &err);
    if (fd >= 0 && (op->dial.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)) < 0)
        err = errno;
    if (!err)
        return;
    if (err == EADDRINUSE || err == EACCES)
        fail(op, "conflict", err, "another listens there");
    else
        fail(op, "capacity_exhausted", err, "no room for another listener");
}

static void fail_to_connect(struct op *op, int err)
{
    if (err == ETIMEDOUT)
        fail(op, "deadline_exceeded", err, "what listens there takes no connection");
    else if (err == EMFILE || err == ENFILE || err == ENOMEM || err == ENOBUFS)
        fail(op, "capacity_exhausted", err, "no room for another connection");
    else
        fail(op, "not_found", ECONNREFUSED, "nothing in the sandbox listens there");
}

/* Tries one address after the other; where none takes it, again later. */
static void next(struct op *op, int err)
{
    struct dial *d = &op->dial;
    while (err) {
        if (d->v6)
            break;
        d->err = err;
        d->v6 = true;
        err = begin(d);
    }
    if (!err)
        return;
    uint64_t now = now_ns();
    if (now >= d->wait_end) {
        fail_to_connect(op, d->err);
        return;
    }
    d->again = now + d->pause < d->wait_end ? now + d->pause : d->wait_end;
    d->pause = d->pause * 2 < PAUSE_MAX_NS ? d->pause * 2 : PAUSE_MAX_NS;
}

static void attempt(struct op *op)
{
    op->dial.again = 0;
    op->dial.v6 = false;
    next(op, begin(&op->dial));
}

static const char *check(const uint8_t *p, size_t n, struct op *op)
{
    struct reader r = {p, p + n};
    struct field f;
    uint64_t port = 0, wait = 0;
    int k;
    while ((k = next_field(&r, &f)) > 0) {
        if (f.n != 8)
            return "spec";
        switch (f.tag) {
        case T_PORT: port = field_u64(&f); break;
        case T_WAIT_NS: wait = field_u64(&f); break;
        case T_TIMEOUT_NS: op->timeout = field_u64(&f); break;
        case T_ACCEPT: op->dial.accepts = field_u64(&f) != 0; break;
        default: return "spec";
        }
    }
    op->dial.port = (uint16_t)port;
    op->dial.wait_end = op->started + wait;
    op->deadline = op->dial.wait_end + (op->timeout ? op->timeout : CONNECT_NS);
    return k < 0 ? "spec" : port && port < 65536 ? NULL : "port";
}

void dial_start(uint32_t id, const uint8_t *p, size_t n)
{
    struct op *op = op_admit(id);
    if (!op)
        return;
    op->dial.on = true;
    op->dial.pause = PAUSE_NS;
    const char *bad = check(p, n, op);
    if (bad) {
        op_refuse(id, "invalid_request", bad, "the value is malformed or no port");
        op_free(op);
        return;
    }
    if (op->dial.accepts)
        await_one(op);
    else
        attempt(op);
}

static void connected(struct op *op, int fd, int twin)
{
    dial_ack(fd);
    op->dial.connected = true;
    op->dial.err = 0;
    stream_init(&op->out[0], fd, false, 0);
    op->in_fd = twin;
    send_frame(M_OK, op->id, NULL, 0);
}

/* The connecting socket is writable: it is connected or has failed. */
void dial_answered(struct op *op)
{
    struct dial *d = &op->dial;
    int err = 0;
    socklen_t n = sizeof err;
    if (getsockopt(d->fd, SOL_SOCKET, SO_ERROR, &err, &n))
        err = errno;
    if (!err && is_itself(d->fd))
        err = ECONNREFUSED;
    int fd = d->fd, twin = err ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (!err && twin < 0)
        err = errno;
    d->fd = -1;
    if (err) {
        drop(&fd, true); /* so that its port is free at once */
        next(op, err);
        return;
    }
    connected(op, fd, twin);
}

/* Somebody inside connected to the listener; another operation may have taken it. */
void dial_came(struct op *op)
{
    int fd = accept4(op->dial.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
            fail(op, "capacity_exhausted", errno, "no room for another connection");
        return;
    }
    int twin = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (twin < 0) {
        drop(&fd, true);
        return;
    }
    drop(&op->dial.fd, false);
    settle(fd);
    connected(op, fd, twin);
}

/* Acknowledges what came at once: a peer that answers in two writes, as many do, would
 * wait 40 ms between them. The kernel forgets this wish, so it follows every read. */
void dial_ack(int fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &on, sizeof on);
}

void dial_output_end(struct op *op, int err)
{
    if (!err) {
        send_frame(M_EOF, op->id, NULL, 0);
        return;
    }
    op->dial.err = err;
    op->in.len = 0;
    drop(&op->in_fd, false);
}

void dial_abort(struct op *op)
{
    bool whole = op->in_eof && op->in_fd < 0 && !op->dial.err;
    drop(&op->dial.fd, !op->dial.accepts); /* a listener is shared, its options too */
    drop(&op->in_fd, false);
    drop(&op->out[0].fd, !whole); /* what was sent and ended still arrives */
    fail(op, "conflict", ECONNABORTED, "the connection was given up");
}

void dial_tick(struct op *op, uint64_t now)
{
    struct dial *d = &op->dial;
    if (op->done)
        return;
    if (d->connected) {
        if (op->out[0].fd >= 0 || op->in_fd >= 0)
            return;
        if (d->err)
            fail(op, "conflict", ECONNRESET, "the connection was reset in the sandbox");
        else
            finish(op);
    } else if (d->accepts) {
        return;
    } else if (d->fd >= 0 && now >= op->deadline) {
        fail_to_connect(op, ETIMEDOUT);
    } else if (d->fd < 0 && now >= d->again) {
        attempt(op);
    }
}

uint64_t dial_next_due(const struct op *op)
{
    if (op->dial.connected || op->dial.accepts)
        return UINT64_MAX;
    return op->dial.fd >= 0 ? op->deadline : op->dial.again;
}
