/* attach PIDFD ROOTFD [HOSTNAME [GUARD…]]: gives a warm shell its root.
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
#include <unistd.h>

#define NEWROOT "/newroot"
#define EXIT_IMAGE 2  /* the image is at fault: no other node would do better, */
#define EXIT_POLICY 3 /* or what is to be protected in it */
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

static int rewrite(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0 || fchmod(fd, 0644))
        fail("the shell's %s cannot be written", path);
    return fd;
}

/* The engine's own files, in the shell's root, before the image's root is there. */
static void name_host(const char *name)
{
    struct utsname own;
    if (name && sethostname(name, strlen(name)))
        fail("cannot set the host name");
    if (uname(&own))
        fail("cannot read the host name");
    int fd = rewrite("/etc/hosts"); /* with its own name: many programs look that up */
    dprintf(fd, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    dprintf(fd, "127.0.1.1\t%s\n", own.nodename);
    close(fd);
    fd = rewrite("/etc/resolv.conf"); /* the engine's is the node's own */
    dprintf(fd, "nameserver %s\noptions timeout:5 attempts:2\n", RESOLVER);
    close(fd);
    if (!name)
        return;
    fd = rewrite("/etc/hostname");
    dprintf(fd, "%s\n", name);
    close(fd);
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

int main(int argc, char **argv)
{
    if (argc < 3) {
        fputs("usage: attach PIDFD ROOTFD [HOSTNAME [GUARD...]]\n", stderr);
        return 2;
    }
    int pidfd = atoi(argv[1]), mount_fd = atoi(argv[2]);
    const char *hostname = argc > 3 && *argv[3] ? argv[3] : NULL;
    int decoy = argc > 4 ? decoy_take(argv + 4) : -1;
    umask(0);
    if (setns(pidfd, CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS))
        fail("cannot enter the shell's namespaces");
    loopback_up();
    name_host(hostname);
    if (syscall(SYS_move_mount, mount_fd, "", AT_FDCWD, NEWROOT, MOVE_MOUNT_F_EMPTY_PATH))
        fail("cannot place the new root");
    int root = open(NEWROOT, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0 || fchdir(root))
        fail("cannot enter the new root");
    carry_over(root);
    if (decoy >= 0)
        decoy_put(root, decoy);
    if (argc > 4)
        guard(root, argv + 4);
    if (syscall(SYS_pivot_root, ".", "."))
        fail("cannot change the root");
    if (umount2(".", MNT_DETACH))
        fail("cannot drop the shell's own root");
    return 0;
}
