/* SETUP: what the edge hands over before anything runs, the workload's control groups and
 * the socket to listen on. */
#include "aether.h"

#include <sys/socket.h>
#include <unistd.h>

bool set_up;

/* The socket we listened on was made in here and would be listed in /proc/net/unix; one
 * that the edge made is not. */
static bool listen_on(int fd)
{
    int on = 0;
    socklen_t n = sizeof on;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &on, &n) || !on)
        return false;
    if (listen_fd >= 0)
        close(listen_fd);
    set_nonblock(fd);
    listen_fd = fd;
    return true;
}

/* Takes the descriptors. */
void setup_message(uint32_t id, const uint8_t *p, size_t n, const int *fds, int count)
{
    struct reader r = {p, p + n};
    struct field f;
    uint64_t v1 = 0, v2 = 0, oom = 0, listener = 0;
    while (next_field(&r, &f) > 0) {
        if (f.tag == T_V1_COUNT)
            v1 = field_u64(&f);
        if (f.tag == T_HAS_V2)
            v2 = field_u64(&f);
        if (f.tag == T_HAS_OOM)
            oom = field_u64(&f);
        if (f.tag == T_HAS_LISTENER)
            listener = field_u64(&f);
    }
    bool right = v1 <= 16 && v1 + !!v2 + !!oom + !!listener == (uint64_t)count;
    if (right && listener && (right = listen_on(fds[count - 1])))
        count--;
    if (!right) {
        op_refuse(id, "invalid_request", "fds", "the descriptors do not match the message");
        while (count)
            close(fds[--count]);
        return;
    }
    cg_set(fds, count, (int)v1, v2, oom);
    set_up = !launcher_start();
    if (!set_up)
        op_refuse(id, "internal", NULL, "the launcher cannot join the workload's cgroups");
    else
        send_frame(M_OK, id, NULL, 0);
}
