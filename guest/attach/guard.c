/* Paths of a root that are protected: what is laid over them before anything runs there.
 *
 * A rule is a letter and a path. r: a tree that is read-only; p: a file that stays as it
 * is; h: what is there is hidden; x: what is not to be executed. In upper case the path may
 * be missing. The sandbox has no CAP_SYS_ADMIN: it cannot take a mount away.
 *
 * A mount holds its own place, not those above it: who renames a folder above moves the
 * mount along and puts something else in its place. So every folder above is made a mount
 * too, which cannot be renamed. A link can be no mount: one in / (as /bin often is) is held
 * by making / itself read-only and every folder in it a writable mount; a link further
 * down is refused.
 */
#include "attach.h"

#include <ctype.h>
#include <dirent.h>
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

static char *pinned[PINNED_MAX];
static int pinned_count;

static int find(int root, const char *path, unsigned long long flags, int how_resolve)
{
    struct open_how how = {
        .flags = O_PATH | O_CLOEXEC | flags,
        .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | (unsigned)how_resolve,
    };
    return (int)syscall(SYS_openat2, root, path[1] ? path + 1 : ".", &how, sizeof how);
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

/* Makes a folder a mount of itself, once; one that is a mount, say /proc with all that the
 * engine laid over it, is held already. */
static void pin(int root, const char *path)
{
    for (int i = 0; i < pinned_count; i++)
        if (!strcmp(pinned[i], path))
            return;
    if (pinned_count == PINNED_MAX || !(pinned[pinned_count++] = strdup(path)))
        fail("too many folders above what is protected");
    int at = find(root, path, O_DIRECTORY, RESOLVE_NO_SYMLINKS);
    if (at < 0)
        fail("cannot hold %s", path);
    if (is_mount(at))
        close(at);
    else
        put(tree_of(at, path), at, path);
}

/* Holds the folders above; true where the path begins with a link in /. */
static bool hold_above(int root, const char *path)
{
    char above[4096];
    for (const char *end = strchr(path + 1, '/'); end; end = strchr(end + 1, '/')) {
        struct stat st;
        snprintf(above, sizeof above, "%.*s", (int)(end - path), path);
        int at = find(root, above, O_NOFOLLOW, 0);
        if (at < 0 || fstat(at, &st))
            fail("cannot hold %s", above);
        close(at);
        if (S_ISLNK(st.st_mode)) {
            if (strchr(above + 1, '/'))
                fail("the policy's %s is a link: name what it leads to", above);
            return true;
        }
        pin(root, above);
    }
    return false;
}

/* Whether the path itself is a link; one that is not in / is refused. */
static bool is_link(int root, const char *path)
{
    struct stat st;
    int at = find(root, path, O_NOFOLLOW, 0);
    if (at < 0 || fstat(at, &st))
        fail("cannot look at %s", path);
    close(at);
    if (S_ISLNK(st.st_mode) && strchr(path + 1, '/'))
        fail("the policy's %s is a link: name what it leads to", path);
    return S_ISLNK(st.st_mode);
}

/* True where / must be held too. */
static bool lay(int root, const char *rule)
{
    char kind = (char)tolower((unsigned char)rule[0]);
    const char *path = rule + 1;
    bool hold_root = false;
    struct stat st;
    int at = find(root, path, 0, 0);
    if (at < 0 && (errno == ENOENT || errno == ENOTDIR) && isupper((unsigned char)rule[0]))
        return false;
    if (at < 0 || fstat(at, &st))
        fail("the policy's %s is not there", path);
    if (!path[1]) {
        if (kind != 'r')
            fail("the policy's / can only be read-only");
        restrict_to(root, MOUNT_ATTR_RDONLY, 0, path);
        close(at);
        return false;
    }
    if (kind == 'h') {
        put(nothing(&st, path), at, path);
        return false;
    }
    hold_root = hold_above(root, path);
    hold_root |= is_link(root, path);
    close(at);
    if ((at = find(root, path, 0, 0)) < 0) /* as it is now, below what holds it */
        fail("the policy's %s is not there", path);
    int tree = tree_of(at, path);
    restrict_to(tree, kind == 'x' ? MOUNT_ATTR_NOEXEC : MOUNT_ATTR_RDONLY, AT_RECURSIVE, path);
    put(tree, at, path);
    return hold_root;
}

/* / gets and loses no entries; folders in it stay writable where they were. */
static void hold_entries(int root)
{
    DIR *dir = fdopendir(openat(root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    struct dirent *e;
    char path[264];
    if (!dir)
        fail("the image's / cannot be read");
    while ((e = readdir(dir))) {
        struct stat st;
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") ||
            fstatat(root, e->d_name, &st, AT_SYMLINK_NOFOLLOW) || !S_ISDIR(st.st_mode))
            continue;
        snprintf(path, sizeof path, "/%s", e->d_name);
        pin(root, path);
    }
    closedir(dir);
    restrict_to(root, MOUNT_ATTR_RDONLY, 0, "/");
}

void guard(int root, char **rules)
{
    bool hold_root = false;
    for (; *rules; rules++) {
        if ((*rules)[0] == 'd')
            continue; /* decoy.c's */
        if (!strchr("rphxRPHX", (*rules)[0]) || (*rules)[1] != '/')
            fail("not a rule: %s", *rules);
        hold_root |= lay(root, *rules);
    }
    if (hold_root)
        hold_entries(root);
}
