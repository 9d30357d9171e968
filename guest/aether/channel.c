/* The one connection to the edge: listening, framing, credit. A new connection
 * takes the place of the old one; operations go on either way. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define FDS_MAX 20
#define DATA_HEAD 10 /* before the bytes of a DATA frame */

int listen_fd = -1, conn_fd = -1;
struct buf conn_out;
const char *generation = "";
static struct buf conn_in;
static bool greeted;
static int passed[FDS_MAX], passed_count;

int channel_listen(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || strlen(path) >= sizeof a.sun_path)
        return -1;
    strcpy(a.sun_path, path);
    unlink(path);
    mode_t old = umask(0177);
    int failed = bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 8);
    umask(old);
    if (failed)
        return -1;
    listen_fd = fd;
    return 0;
}

bool channel_ready(void)
{
    return conn_fd >= 0 && greeted;
}

static void drop_passed(void)
{
    while (passed_count)
        close(passed[--passed_count]);
}

void channel_close(void)
{
    if (conn_fd >= 0) {
        shutdown(conn_fd, SHUT_RDWR);
        close(conn_fd);
    }
    conn_fd = -1;
    greeted = false;
    buf_free(&conn_in);
    buf_free(&conn_out);
    drop_passed();
    ops_disconnected();
}

/* A peer inside the sandbox has a process id here; the edge, outside, shows as 0. */
static bool peer_is_outside(int fd)
{
    struct ucred who;
    socklen_t n = sizeof who;
    if (getpid() != 1)
        return true; /* not in a namespace of its own: a development run */
    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) && who.pid == 0 && who.uid == 0;
}

void channel_accept(void)
{
    int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    if (!peer_is_outside(fd)) {
        close(fd);
        return;
    }
    channel_close();
    int size = 1 << 20;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    conn_fd = fd;
}

static void frame_head(uint8_t head[9], uint8_t type, uint32_t id, size_t n)
{
    uint32_t len = (uint32_t)n + 5;
    for (int i = 0; i < 4; i++) {
        head[i] = (uint8_t)(len >> (8 * i));
        head[5 + i] = (uint8_t)(id >> (8 * i));
    }
    head[4] = type;
}

void send_frame(uint8_t type, uint32_t id, const void *p, size_t n)
{
    uint8_t head[9];
    if (conn_fd < 0)
        return;
    frame_head(head, type, id, n);
    if (!buf_room(&conn_out, n + sizeof head))
        return;
    buf_add(&conn_out, head, sizeof head);
    buf_add(&conn_out, p, n);
}

void send_data(uint32_t id, uint8_t stream, const void *p, size_t n)
{
    uint8_t head[9];
    if (conn_fd < 0)
        return;
    frame_head(head, M_DATA, id, n + 1);
    if (!buf_room(&conn_out, n + 1 + sizeof head))
        return;
    buf_add(&conn_out, head, sizeof head);
    buf_add(&conn_out, &stream, 1);
    buf_add(&conn_out, p, n);
}

/* Where the bytes of a DATA frame, at most n of them, may be written in place; NULL where
 * there is no room. */
uint8_t *data_room(size_t n)
{
    return buf_room(&conn_out, n + DATA_HEAD) ? conn_out.p + conn_out.len + DATA_HEAD : NULL;
}

void data_written(uint32_t id, uint8_t stream, size_t n)
{
    uint8_t *head = conn_out.p + conn_out.len;
    frame_head(head, M_DATA, id, n + 1);
    head[DATA_HEAD - 1] = stream;
    conn_out.len += n + DATA_HEAD;
}

void channel_write(void)
{
    size_t at = 0;
    while (conn_fd >= 0 && at < conn_out.len) {
        ssize_t k = send(conn_fd, conn_out.p + at, conn_out.len - at, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0 && errno != EAGAIN) {
            channel_close();
            return;
        }
        if (k <= 0)
            break;
        at += (size_t)k;
    }
    buf_cut(&conn_out, at);
}

static void say_hello(void)
{
    struct buf b = {0};
    buf_add(&b, "DSEC", 4);
    put_u64(&b, T_VERSION, PROTO_VERSION);
    put_str(&b, T_GENERATION, generation);
    put_u64(&b, T_NEXT_ID, next_id);
    send_frame(M_HELLO, 0, b.p, b.len);
    buf_free(&b);
}

static bool on_hello(const uint8_t *p, size_t n)
{
    struct field f;
    uint64_t version = 0;
    if (n < 4 || memcmp(p, "DSEC", 4))
        return false;
    struct reader r = {p + 4, p + n};
    while (next_field(&r, &f) > 0)
        if (f.tag == T_VERSION)
            version = field_u64(&f);
    say_hello();
    if (version != PROTO_VERSION) {
        op_refuse(0, "unsupported", "version", "unknown protocol version");
        channel_write();
        return false;
    }
    greeted = true;
    return true;
}

static void on_list(uint32_t id)
{
    struct buf b = {0};
    ops_list(&b);
    send_frame(M_LISTING, id, b.p, b.len);
    buf_free(&b);
}

static void on_credit(struct op *op, const uint8_t *p, size_t n)
{
    if (n != 5 || (p[0] != S_STDOUT && p[0] != S_STDERR))
        return;
    struct outstream *s = &op->out[p[0] - 1];
    uint64_t sum = (uint64_t)s->credit + get_u32(p + 1);
    s->credit = sum > (1u << 30) ? 1u << 30 : (uint32_t)sum;
}

static void on_op_message(struct op *op, uint8_t type, const uint8_t *p, size_t n)
{
    switch (type) {
    case M_DATA:
        if (n >= 1 && p[0] == S_STDIN)
            op_input(op, p + 1, n - 1);
        break;
    case M_EOF: op_input_end(op); break;
    case M_CREDIT: on_credit(op, p, n); break;
    case M_SIGNAL:
        if (n == 1 && p[0] < 65)
            op_signal(op, p[0]);
        break;
    case M_KILL:
        op->cancelled = true;
        op_kill(op);
        break;
    case M_ATTACH: op_rewind(op); break;
    case M_RESIZE: pty_resize(op, p, n); break;
    case M_ACK:
        if (op->done)
            op_free(op);
        break;
    }
}

static bool on_frame(uint8_t type, uint32_t id, const uint8_t *p, size_t n)
{
    if (!greeted)
        return type == M_HELLO && on_hello(p, n);
    if (type == M_SETUP) {
        setup_message(id, p, n, passed, passed_count);
        passed_count = 0;
    } else if (type == M_EXEC || type == M_FILE) {
        op_start(id, p, n, type == M_FILE);
    } else if (type == M_DIAL) {
        dial_start(id, p, n);
    } else if (type == M_POLICY) {
        policy_message(id, p, n, passed, passed_count);
        passed_count = 0;
    } else if (type == M_LIST) {
        on_list(id);
    } else if (type == M_PAUSE || type == M_RESUME) {
        type == M_PAUSE ? ops_pause() : ops_resume();
        send_frame(M_OK, id, NULL, 0);
    } else if ((type >= M_DATA && type <= M_ACK) || type == M_RESIZE) {
        struct op *op = op_by_id(id);
        if (op)
            on_op_message(op, type, p, n);
        else if (type == M_ATTACH)
            op_refuse(id, "not_found", "op_id", "no such operation");
    } else {
        return false;
    }
    return true;
}

static void take_fds(struct msghdr *m)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (passed_count < FDS_MAX)
                passed[passed_count++] = fd;
            else
                close(fd);
        }
    }
}

bool channel_full(void)
{
    return conn_out.len >= OUT_STOP;
}

/* Handles the whole frames of conn_in, as long as there is room for answers; false when
 * the peer broke the protocol. */
static bool take_frames(void)
{
    size_t at = 0;
    int fd = conn_fd;
    while (conn_in.len - at >= 4 && !channel_full()) {
        const uint8_t *p = conn_in.p + at;
        uint32_t n = get_u32(p);
        if (n < 5 || n > FRAME_MAX)
            return false;
        if (conn_in.len - at - 4 < n)
            break;
        if (!on_frame(p[4], get_u32(p + 5), p + 9, n - 5))
            return false;
        if (conn_fd != fd || !conn_in.p) /* closed meanwhile */
            return true;
        at += 4 + (size_t)n;
    }
    buf_cut(&conn_in, at);
    return true;
}

static void take_or_close(void)
{
    if (!take_frames()) {
        channel_write();
        channel_close();
    }
}

void channel_go_on(void)
{
    if (conn_fd >= 0 && conn_in.len && !channel_full())
        take_or_close();
}

void channel_rest(void)
{
    if (!conn_in.len && conn_in.cap > KEEP_CAP)
        buf_free(&conn_in);
    if (!conn_out.len && conn_out.cap > KEEP_CAP)
        buf_free(&conn_out);
}

void channel_read(void)
{
    for (int rounds = 0; rounds < 8 && conn_fd >= 0 && !channel_full(); rounds++) {
        union { char raw[CMSG_SPACE(FDS_MAX * sizeof(int))]; struct cmsghdr align; } control;
        if (!buf_room(&conn_in, CHUNK)) {
            channel_close();
            return;
        }
        struct iovec io = {conn_in.p + conn_in.len, conn_in.cap - conn_in.len};
        struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control.raw,
                           .msg_controllen = sizeof control.raw};
        ssize_t k = recvmsg(conn_fd, &m, MSG_CMSG_CLOEXEC);
        if (k < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (k <= 0) {
            channel_close();
            return;
        }
        take_fds(&m);
        conn_in.len += (size_t)k;
        bool all = (size_t)k < io.iov_len;
        take_or_close();
        if (all)
            return;
    }
}
