/* One forbidden thing, tried: `attempt WHAT [ADDRESS PORT]` prints "ok" or the error's name. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/if_packet.h>
#include <linux/io_uring.h>
#include <netinet/ip.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define SWAPEXT 0xC0C0586Du

static const char *address;
static int port;

static long ioctl_on(unsigned long request)
{
    char room[256] = {0};
    int fd = open("/tmp", O_RDONLY | O_DIRECTORY);
    return syscall(SYS_ioctl, fd, request, room);
}

/* What a project quota counts a file for: taken off by either interface, or no longer given
 * to what is made in a folder. */
static long relabelled(const char *how)
{
    struct { __u32 size; __u32 rest[8]; } old = {0};
    struct { __u64 flags; __u32 rest[4]; } new = {0};
    int fd = open(address, O_RDONLY | O_CLOEXEC), flags = 0;
    if (!strcmp(how, "flags"))
        return syscall(SYS_ioctl, fd, FS_IOC_SETFLAGS, &flags);
    if (!strcmp(how, "setattr"))
        return syscall(469, fd, "", &new, sizeof new, AT_EMPTY_PATH);
    return syscall(SYS_ioctl, fd, FS_IOC_FSSETXATTR, &old);
}

static long traced(void)
{
    pid_t pid = fork();
    if (!pid) {
        pause();
        _exit(0);
    }
    long r = ptrace(PTRACE_ATTACH, pid, 0, 0);
    int err = errno;
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    errno = err;
    return r;
}

static long forked(void)
{
    long pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (!pid)
        _exit(0);
    return pid < 0 ? pid : waitpid((pid_t)pid, NULL, 0);
}

static long cloned(void)
{
    long pid = syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (!pid)
        _exit(0);
    return pid;
}

static socklen_t target(struct sockaddr_storage *s, int mapped)
{
    struct sockaddr_in *four = (void *)s;
    struct sockaddr_in6 *six = (void *)s;
    char text[64];
    memset(s, 0, sizeof *s);
    if (!mapped && inet_pton(AF_INET, address, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons((unsigned short)port);
        return sizeof *four;
    }
    snprintf(text, sizeof text, "%s%s", mapped ? "::ffff:" : "", address);
    inet_pton(AF_INET6, text, &six->sin6_addr);
    six->sin6_family = AF_INET6;
    six->sin6_port = htons((unsigned short)port);
    return sizeof *six;
}

static long stream(int mapped, int protocol)
{
    struct sockaddr_storage s;
    struct timeval t = {3, 0};
    socklen_t n = target(&s, mapped);
    int fd = socket(s.ss_family, SOCK_STREAM, protocol);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
    return fd < 0 ? fd : connect(fd, (void *)&s, n);
}

static long fast_open(void)
{
    struct sockaddr_storage s;
    socklen_t n = target(&s, 0);
    int fd = socket(s.ss_family, SOCK_STREAM, 0);
    return sendto(fd, "x", 1, MSG_FASTOPEN, (void *)&s, n);
}

static long datagram(int connects)
{
    struct sockaddr_storage s;
    socklen_t n = target(&s, 0);
    int fd = socket(s.ss_family, SOCK_DGRAM, 0);
    if (connects)
        return connect(fd, (void *)&s, n) ? -1 : send(fd, "x", 1, 0);
    return sendto(fd, "x", 1, 0, (void *)&s, n);
}

static long raw(void)
{
    struct sockaddr_storage s;
    socklen_t n = target(&s, 0);
    int fd = socket(AF_INET, SOCK_RAW, IPPROTO_ICMP);
    return fd < 0 ? fd : sendto(fd, "\x08\0\xf7\xff\0\0\0\0", 8, 0, (void *)&s, n);
}

static long called(void)
{
    struct sockaddr_un s = {.sun_family = AF_UNIX};
    snprintf(s.sun_path, sizeof s.sun_path, "%s", address);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    return connect(fd, (void *)&s, sizeof s);
}

/* Many connections, as a scan of ports or a loop that does not give up: `port` times. */
static long flood(int scan)
{
    int times = port, denied = 0;
    for (port = 1; port <= times; port++) {
        struct sockaddr_storage s;
        int was = port;
        port = scan ? port : 9999;
        socklen_t n = target(&s, 0);
        port = was;
        int fd = socket(s.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0);
        denied += connect(fd, (void *)&s, n) && errno == EPERM;
        close(fd);
    }
    printf("%d ", denied);
    return 0;
}

static long many_calls(int times)
{
    for (int i = 0; i < times; i++)
        if (!ptrace(PTRACE_TRACEME, 0, 0, 0))
            return -1;
    return 0;
}

static long attempt(const char *what)
{
    char room[256] = {0};
    struct io_uring_params params = {0};
    if (!strcmp(what, "ptrace")) return traced();
    if (!strcmp(what, "traceme")) return ptrace(PTRACE_TRACEME, 0, 0, 0);
    if (!strcmp(what, "peek")) return syscall(SYS_process_vm_readv, getppid(), room, 0, room, 0, 0);
    if (!strcmp(what, "userns")) return unshare(CLONE_NEWUSER);
    if (!strcmp(what, "userns-clone")) return cloned();
    if (!strcmp(what, "mount")) return mount("none", "/tmp", "tmpfs", 0, "");
    if (!strcmp(what, "fsopen")) return syscall(SYS_fsopen, "tmpfs", 0);
    if (!strcmp(what, "bpf")) return syscall(SYS_bpf, 5, room, 64);
    if (!strcmp(what, "io_uring")) return syscall(SYS_io_uring_setup, 4, &params);
    if (!strcmp(what, "userfaultfd")) return syscall(SYS_userfaultfd, 1);
    if (!strcmp(what, "keyring")) return syscall(SYS_keyctl, 0, -3, 0);
    if (!strcmp(what, "packet")) return socket(AF_PACKET, SOCK_RAW, htons(0x800));
    if (!strcmp(what, "vsock")) return socket(40, SOCK_STREAM, 0);
    if (!strcmp(what, "alg")) return socket(38, SOCK_SEQPACKET, 0);
    if (!strcmp(what, "swapext")) return ioctl_on(SWAPEXT);
    if (!strcmp(what, "swapext-high")) return ioctl_on((1ul << 32) | SWAPEXT);
    if (!strcmp(what, "ioctl-plain")) return ioctl_on(0x5401);
    if (!strcmp(what, "relabel")) return relabelled("xattr");
    if (!strcmp(what, "relabel-flags")) return relabelled("flags");
    if (!strcmp(what, "relabel-setattr")) return relabelled("setattr");
    if (!strcmp(what, "fork")) return forked();
    if (!strcmp(what, "unix")) return called();
    if (!strcmp(what, "tcp")) return stream(0, 0);
    if (!strcmp(what, "mapped")) return stream(1, 0);
    if (!strcmp(what, "mptcp")) return stream(0, 262);
    if (!strcmp(what, "fast-open")) return fast_open();
    if (!strcmp(what, "udp")) return datagram(0);
    if (!strcmp(what, "udp-connect")) return datagram(1);
    if (!strcmp(what, "icmp")) return raw();
    if (!strcmp(what, "scan")) return flood(1);
    if (!strcmp(what, "flood")) return flood(0);
    if (!strcmp(what, "calls")) return many_calls(port);
    fprintf(stderr, "attempt: unknown: %s\n", what);
    exit(2);
}

int main(int argc, char **argv)
{
    address = argc > 2 ? argv[2] : "";
    port = argc > 3 ? atoi(argv[3]) : 0;
    long r = attempt(argv[1]);
    puts(r < 0 ? strerrorname_np(errno) : "ok");
    return 0;
}
