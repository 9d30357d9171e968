/* Paths of a root that are protected: what is laid over them before anything runs there.
 *
 * A rule is a letter and a path. r: a tree that is read-only; p: a file that stays as it
 * is; h: what is there is hidden; x: what is not to be executed. In upper case the path may
 * be missing. The sandbox has no CAP_SYS_ADMIN: it cannot take a mount away.
 *
 * A mount holds its own place, not those above it: who renames a folder above moves the
 * mount along and puts something else in its place. So every folder above is made a mount
 * too, which cannot be renamed, and so is every link on the way: a link can be a mount of
 * itself.
 */
#include "attach.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef AT_RECURSIVE
#define AT_RECURSIVE 0x8000
#endif
#ifndef STATX_ATTR_MOUNT_ROOT
#define STATX_ATTR_MOUNT_ROOT 0x2000
#endif
#define PINNED_MAX 256
#define LINKS_MAX 40
#define PATH_BYTES 4096
#define FIND_TRIES 10000

struct paths { char *at[PINNED_MAX]; int count; };

static struct paths pinned; /* folders and links that are mounts, */
static struct paths whole;  /* and trees that are read-only as a whole: nothing moves in them */

/* The kernel refuses a way that goes up while anything anywhere is renamed or mounted, and says
 * that it is to be tried again. */
static int find(int root, const char *path, unsigned long long flags, int how_resolve)
{
    struct open_how how = {
        .flags = O_PATH | O_CLOEXEC | flags,
        .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | (unsigned)how_resolve,
    };
    int fd, tries = 0;
    do
        fd = (int)syscall(SYS_openat2, root, path[1] ? path + 1 : ".", &how, sizeof how);
    while (fd < 0 && errno == EAGAIN && ++tries < FIND_TRIES);
    return fd;
}

static int tree_of(int at, const char *path)
{
    int tree = (int)syscall(SYS_open_tree, at, "",
                            AT_EMPTY_PATH | AT_RECURSIVE | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (tree < 0)
        fail("cannot take %s", path);
    return tree;
}

static void restrict_to(int tree, unsigned long long attributes, int flags, const char *path)
{
    struct mount_attr attr = {.attr_set = attributes};
    if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | flags, &attr, sizeof attr))
        fail("cannot restrict %s", path);
}

static int empty_folder(const char *path)
{
    int fs = (int)syscall(SYS_fsopen, "tmpfs", FSOPEN_CLOEXEC);
    if (fs < 0 || syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, "mode", "0555", 0) ||
        syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0))
        fail("there is nothing to hide %s with", path);
    int tree = (int)syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    if (tree < 0)
        fail("there is nothing to hide %s with", path);
    close(fs);
    return tree;
}

/* In the shell's own root, which nobody in the sandbox sees; one for all: each cover is a
 * mount of its own, by which who opens it is known. A device file would not do: the kernel
 * tells nobody of its opening. */
static int empty_file(const char *path)
{
    static int file = -1;
    if (file < 0)
        file = open("/nothing", O_RDONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0444);
    if (file < 0)
        fail("there is nothing to hide %s with", path);
    return file;
}

/* An empty folder, or an empty file for what is no folder. */
static int nothing(const struct stat *st, const char *path)
{
    int tree = S_ISDIR(st->st_mode) ? empty_folder(path) : tree_of(empty_file(path), path);
    restrict_to(tree, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, path);
    return tree;
}

static bool is_mount(int at)
{
    struct statx st;
    return !statx(at, "", AT_EMPTY_PATH, 0, &st) && st.stx_attributes & STATX_ATTR_MOUNT_ROOT;
}

static bool remember(struct paths *in, const char *path)
{
    if (in->count == PINNED_MAX || !(in->at[in->count] = strdup(path)))
        return false;
    in->count++;
    return true;
}

static bool is_whole(const char *path)
{
    for (int i = 0; i < whole.count; i++) {
        size_t n = strlen(whole.at[i]);
        if (!strncmp(whole.at[i], path, n) && (!path[n] || path[n] == '/'))
            return true;
    }
    return false;
}

/* Makes a folder or a link a mount of itself, once; one that is a mount, say /proc with all
 * that the engine laid over it, is held already. Takes the descriptor. */
static void pin(int at, const char *path)
{
    bool held = is_whole(path) || is_mount(at);
    for (int i = 0; i < pinned.count && !held; i++)
        held = !strcmp(pinned.at[i], path);
    if (held) {
        close(at);
        return;
    }
    if (!remember(&pinned, path))
        fail("too much leads to what is protected");
    put(tree_of(at, path), at, path);
}

/* Puts where a link leads before what is left of a path; true where that begins at /. */
static bool follow(int at, const char *link, char *left)
{
    char to[PATH_BYTES], rest[PATH_BYTES];
    ssize_t n = readlinkat(at, "", to, sizeof to - 1);
    if (n <= 0)
        fail("cannot read %s", link);
    to[n] = 0;
    strcpy(rest, left);
    if (snprintf(left, PATH_BYTES, "%s/%s", to, rest) >= PATH_BYTES) {
        errno = ENAMETOOLONG;
        fail("the policy's %s leads too far", link);
    }
    return *to == '/';
}

static void up(char *path)
{
    char *last = strrchr(path, '/');
    if (last)
        *last = 0;
}

/* Takes the next name off what is left, onto a path; false where there is none. */
static bool next_name(char *path, char *left)
{
    char *name = left + strspn(left, "/");
    size_t n = strcspn(name, "/"), had = strlen(path);
    if (!n)
        return false;
    if (n == 2 && !strncmp(name, "..", 2)) {
        up(path);
    } else if (n != 1 || *name != '.') {
        if (had + n + 2 > PATH_BYTES) {
            errno = ENAMETOOLONG;
            fail("the policy's %s is too long", path);
        }
        path[had] = '/';
        memcpy(path + had + 1, name, n);
        path[had + 1 + n] = 0;
    }
    memmove(left, name + n, strlen(name + n) + 1);
    return true;
}

/* Holds what leads to a path, links as well as the folders above; `real` becomes the path
 * without links. True where there were some. */
static bool hold_way(int root, const char *path, char *real)
{
    char left[PATH_BYTES];
    int links = 0;
    *real = 0;
    snprintf(left, sizeof left, "%s", path);
    while (next_name(real, left)) {
        struct stat st;
        if (!*real)
            continue;
        int at = find(root, real, O_NOFOLLOW, RESOLVE_NO_SYMLINKS);
        if (at < 0 || fstat(at, &st))
            fail("cannot hold %s", real);
        if (S_ISLNK(st.st_mode)) {
            if (++links > LINKS_MAX)
                fail("the policy's %s leads nowhere", path);
            bool from_root = follow(at, real, left);
            pin(at, real);
            if (from_root)
                *real = 0;
            else
                up(real);
        } else if (left[strspn(left, "/")]) {
            pin(at, real);
        } else {
            close(at);
        }
    }
    return links;
}

/* True where the way led over links. */
static bool lay(int root, const char *rule)
{
    char kind = (char)tolower((unsigned char)rule[0]), real[PATH_BYTES];
    const char *path = rule + 1;
    struct stat st;
    int at = find(root, path, 0, 0);
    if (at < 0 && (errno == ENOENT || errno == ENOTDIR) && isupper((unsigned char)rule[0]))
        return false;
    if (at < 0 || fstat(at, &st))
        fail("the policy's %s is not there", path);
    if (kind == 'h' && path[1]) {
        put(nothing(&st, path), at, path);
        return false;
    }
    close(at);
    bool linked = hold_way(root, path, real);
    if (!*real) {
        if (kind != 'r')
            fail("the policy's / can only be read-only");
        restrict_to(root, MOUNT_ATTR_RDONLY, 0, path);
        return false;
    }
    if (kind != 'x' && is_whole(real))
        return linked;
    if ((at = find(root, real, 0, RESOLVE_NO_SYMLINKS)) < 0) /* as it is now, below what holds it */
        fail("the policy's %s is not there", path);
    int tree = tree_of(at, path);
    restrict_to(tree, kind == 'x' ? MOUNT_ATTR_NOEXEC : MOUNT_ATTR_RDONLY, AT_RECURSIVE, path);
    put(tree, at, path);
    if (kind != 'x')
        remember(&whole, real); /* one that finds no room costs a mount more */
    return linked;
}

/* Links by which a merged system's programs are found and loaded: who swaps one of them has
 * swapped what the others lead to. */
static void hold_system(int root)
{
    static const char *const names[] = {"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct stat st;
        int at = find(root, names[i], O_NOFOLLOW, 0);
        if (at < 0)
            continue;
        if (!fstat(at, &st) && S_ISLNK(st.st_mode))
            pin(at, names[i]);
        else
            close(at);
    }
}

void guard(int root, char **rules)
{
    bool linked = false;
    for (; *rules; rules++) {
        if ((*rules)[0] == 'd')
            continue; /* decoy.c's */
        if (!strchr("rphxRPHX", (*rules)[0]) || (*rules)[1] != '/')
            fail("not a rule: %s", *rules);
        linked |= lay(root, *rules);
    }
    if (linked)
        hold_system(root);
}
