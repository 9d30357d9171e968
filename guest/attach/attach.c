/* attach PIDFD: readies a warm shell, says so by a byte that is 0, waits, and gives the shell
 * its root. To begin a program takes longer than what this one does, so it is begun ahead.
 *
 * What it waits for comes by its input, a socket, and is all that comes until the end of
 * that: the root's descriptor and words, each with a 0 at its end, HOSTNAME (empty: as it is)
 * and GUARDs. Where no root comes nobody needs it any more.
 *
 * Enters the shell's mount, network and UTS namespaces, brings its loopback up, puts the composed root, a detached
 * mount that the edge made, at /newroot, carries the shell's /proc, /dev, /sys and
 * the engine's /etc files over (with all that is mounted below them: what the
 * engine masks stays masked), makes it the root of every process there and drops
 * the old one, and with it the agent's socket folder. A GUARD says what is laid over a
 * path of the new root, see guard.c and decoy.c. Errors go to stderr.
 *
 * The image is untrusted and the process is root in the host's namespaces of
 * everything but mounts, so nothing of the new root is resolved through a link.
 */
#include "attach.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <net/if.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#define NEWROOT "/newroot"
#define EXIT_IMAGE 2  /* the image is at fault: no other node would do better, */
#define EXIT_POLICY 3 /* or what is to be protected in it */
#define WORDS_MAX (4u << 20) /* bytes */
#define RESOLVER "192.0.0.8" /* the edge's, where there is a way out; else nobody */

void fail(const char *fmt, ...)
{
    int err = errno;
    va_list ap;
    va_start(ap, fmt);
    fputs("attach: ", stderr);
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, ": %s\n", strerror(err));
    va_end(ap);
    exit(!strncmp(fmt, "the image's ", 12)     ? EXIT_IMAGE
         : !strncmp(fmt, "the policy's ", 13) ? EXIT_POLICY
                                              : 1);
}

static int open_inside(int root, const char *path, int flags, mode_t mode)
{
    struct open_how how = {
        .flags = (unsigned)(flags | O_CLOEXEC | O_NOFOLLOW), .mode = mode,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

/* A directory to mount on, made where the image has none. */
static int directory(int root, const char *name)
{
    if (mkdirat(root, name, 0755) && errno != EEXIST)
        fail("the image's /%s cannot be made", name);
    int fd = open_inside(root, name, O_PATH | O_DIRECTORY, 0);
    if (fd < 0)
        fail("the image's /%s is not a directory", name);
    return fd;
}

/* A file to mount on; what the image has there instead of a file gives way. */
static int plain_file(int dir, const char *name)
{
    struct stat st;
    if (!fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) && !S_ISREG(st.st_mode) &&
        unlinkat(dir, name, S_ISDIR(st.st_mode) ? AT_REMOVEDIR : 0))
        fail("the image's /etc/%s is not a file", name);
    int fd = open_inside(dir, name, O_RDONLY | O_CREAT | O_NONBLOCK, 0644);
    if (fd < 0)
        fail("the image's /etc/%s cannot be made", name);
    close(fd);
    return open_inside(dir, name, O_PATH, 0);
}

static int take(const char *path)
{
    return (int)syscall(SYS_open_tree, AT_FDCWD, path,
                        OPEN_TREE_CLONE | AT_RECURSIVE | OPEN_TREE_CLOEXEC);
}

void put(int tree, int at, const char *what)
{
    if (syscall(SYS_move_mount, tree, "", at, "",
                MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH))
        fail("cannot carry %s over", what);
    close(tree);
    close(at);
}

static void carry_over(int root)
{
    static const char *const dirs[] = {"proc", "dev", "sys"};
    static const char *const files[] = {"resolv.conf", "hosts", "hostname"};
    int tree[6];
    char path[64];
    for (int i = 0; i < 6; i++) {
        snprintf(path, sizeof path, i < 3 ? "/%s" : "/etc/%s", i < 3 ? dirs[i] : files[i - 3]);
        tree[i] = take(path);
        if (tree[i] < 0 && i < 3)
            fail("cannot take %s of the shell", path);
    }
    for (int i = 0; i < 3; i++)
        put(tree[i], directory(root, dirs[i]), dirs[i]);
    int etc = directory(root, "etc");
    close(etc);
    if ((etc = open_inside(root, "etc", O_RDONLY | O_DIRECTORY, 0)) < 0)
        fail("the image's /etc cannot be opened");
    for (int i = 0; i < 3; i++)
        if (tree[3 + i] >= 0)
            put(tree[3 + i], plain_file(etc, files[i]), files[i]);
    close(etc);
}

/* One of the engine's own files, in the shell's root. What it begins with as it should stays:
 * to cut a file costs more than all else here, so it is done while nobody waits. */
static void rewrite(const char *path, const char *text)
{
    char has[512];
    size_t want = strlen(text);
    int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
    ssize_t size = fd < 0 || fchmod(fd, 0644) ? -1 : pread(fd, has, sizeof has, 0);
    if (size > 0 && ((size_t)size > want || memcmp(has, text, (size_t)size)))
        size = ftruncate(fd, 0);
    if (size < 0 || pwrite(fd, text + size, want - (size_t)size, size) != (ssize_t)want - size)
        fail("the shell's %s cannot be written", path);
    close(fd);
}

/* The engine's files, before the image's root is there; without a name what is the same for
 * all names. */
static void name_host(const char *name)
{
    char text[256];
    snprintf(text, sizeof text, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
             "%s%s%s", name ? "127.0.1.1\t" : "", name ? name : "", name ? "\n" : "");
    rewrite("/etc/hosts", text); /* with its own name: many programs look that up */
    rewrite("/etc/resolv.conf", "nameserver " RESOLVER "\noptions timeout:5 attempts:2\n");
    snprintf(text, sizeof text, "%s%s", name ? name : "", name ? "\n" : "");
    rewrite("/etc/hostname", text); /* the engine's are the node's own */
}

/* Some engines leave a shell's network namespace as the kernel made it. */
static void loopback_up(void)
{
    struct ifreq r = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCGIFFLAGS, &r))
        fail("the shell has no loopback interface");
    int is_up = r.ifr_flags & IFF_UP;
    r.ifr_flags |= IFF_UP;
    if (!is_up && ioctl(fd, SIOCSIFFLAGS, &r)) /* it would wait for whoever changes another */
        fail("the loopback interface cannot be brought up");
    close(fd);
}

static void enter(int pidfd)
{
    umask(0);
    if (setns(pidfd, CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS))
        fail("cannot enter the shell's namespaces");
    loopback_up();
}

/* In a process of its own, so that this one stays where what is on the node can be taken. */
static void ready(int pidfd)
{
    int status;
    pid_t pid = fork();
    if (!pid) {
        enter(pidfd);
        name_host(NULL);
        _exit(0);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        fail("cannot ready the shell");
    if (status)
        exit(1); /* it has said why */
    if (write(STDOUT_FILENO, "", 1) != 1)
        exit(0);
}

/* The bytes of one piece, or 0; its descriptor replaces a missing one. */
static size_t piece(char *at, size_t room, int *fd)
{
    union { char raw[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control;
    struct iovec io = {at, room};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control.raw,
                       .msg_controllen = sizeof control.raw};
    ssize_t n;
    do
        n = recvmsg(STDIN_FILENO, &m, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;
    if (c && c->cmsg_type == SCM_RIGHTS && *fd < 0)
        memcpy(fd, CMSG_DATA(c), sizeof *fd);
    return n > 0 ? (size_t)n : 0;
}

/* The words that come, NULL behind the last; NULL where there is nothing to do. */
static char **words_of(int *root)
{
    size_t size = 0, room = 0, count = 0, n;
    char *text = NULL;
    do {
        if (room - size < 4096 && (room += 65536) && !(text = realloc(text, room)))
            fail("no room for what is to be done");
        n = piece(text + size, room - size, root);
        size += n;
    } while (n && size <= WORDS_MAX);
    if (*root < 0)
        return NULL;
    if (!size || n || text[size - 1])
        fail("what is to be done does not end");
    for (size_t i = 0; i < size; i++)
        count += !text[i];
    char **words = calloc(count + 1, sizeof *words);
    if (!words)
        fail("no room for what is to be done");
    for (size_t i = 0; i < count; text += strlen(text) + 1)
        words[i++] = text;
    return words;
}

static void attach(int pidfd, int mount_fd, const char *hostname, char **guards)
{
    struct utsname own;
    int decoy = decoy_take(guards);
    enter(pidfd);
    if (*hostname && sethostname(hostname, strlen(hostname)))
        fail("cannot set the host name");
    if (uname(&own))
        fail("cannot read the host name");
    name_host(own.nodename);
    if (syscall(SYS_move_mount, mount_fd, "", AT_FDCWD, NEWROOT, MOVE_MOUNT_F_EMPTY_PATH))
        fail("cannot place the new root");
    int root = open(NEWROOT, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0 || fchdir(root))
        fail("cannot enter the new root");
    carry_over(root);
    if (decoy >= 0)
        decoy_put(root, decoy);
    guard(root, guards);
    if (syscall(SYS_pivot_root, ".", "."))
        fail("cannot change the root");
    if (umount2(".", MNT_DETACH))
        fail("cannot drop the shell's own root");
}

int main(int argc, char **argv)
{
    int root = -1;
    if (argc != 2) {
        fputs("usage: attach PIDFD\n", stderr);
        return 2;
    }
    int pidfd = atoi(argv[1]);
    ready(pidfd);
    char **words = words_of(&root);
    if (words)
        attach(pidfd, root, words[0], words + 1);
    return 0;
}
