/* Whole trees: listing, removing, and copying where a rename cannot move one. Links
 * are never followed. */
#include "aether.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEPTH_MAX 512 /* one descriptor a level */

static int remove_in(int parent, const char *name, int depth)
{
    if (!unlinkat(parent, name, 0))
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return -1;
    int dir = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = dir >= 0 && depth < DEPTH_MAX ? fdopendir(dir) : NULL;
    if (!d) {
        if (dir >= 0)
            close(dir);
        return -1;
    }
    int failed = 0;
    for (struct dirent *e; !failed && (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            failed = remove_in(dir, e->d_name, depth + 1);
    int err = errno;
    closedir(d);
    errno = err;
    return failed ? -1 : unlinkat(parent, name, AT_REMOVEDIR);
}

int tree_remove(const char *path)
{
    return remove_in(AT_FDCWD, path, 0);
}

static int copy_file(int from, const char *name, int to, const char *as, const struct stat *st)
{
    int in = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    int out = openat(to, as, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    int failed = in < 0 || out < 0;
    ssize_t k = 1;
    while (!failed && k > 0)
        if ((k = sendfile(out, in, NULL, 1 << 20)) < 0)
            failed = 1;
    if (!failed)
        failed = (geteuid() == 0 && fchown(out, st->st_uid, st->st_gid)) ||
                 fchmod(out, st->st_mode & 07777);
    int err = errno;
    if (in >= 0)
        close(in);
    if (out >= 0)
        close(out);
    errno = err;
    return failed ? -1 : 0;
}

static int copy_in(int from, const char *name, int to, const char *as, int depth);

static int copy_dir(int from, const char *name, int to, const char *as, const struct stat *st,
                    int depth)
{
    if (depth == DEPTH_MAX) {
        errno = ELOOP;
        return -1;
    }
    if (mkdirat(to, as, 0700))
        return -1;
    int src = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int dst = openat(to, as, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = src >= 0 ? fdopendir(src) : NULL;
    int failed = !d || dst < 0;
    for (struct dirent *e; !failed && (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            failed = copy_in(src, e->d_name, dst, e->d_name, depth + 1);
    if (!failed)
        failed = (geteuid() == 0 && fchown(dst, st->st_uid, st->st_gid)) ||
                 fchmod(dst, st->st_mode & 07777);
    int err = errno;
    if (d)
        closedir(d);
    else if (src >= 0)
        close(src);
    if (dst >= 0)
        close(dst);
    errno = err;
    return failed ? -1 : 0;
}

static int copy_in(int from, const char *name, int to, const char *as, int depth)
{
    struct stat st;
    char target[PATH_MAX];
    if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW))
        return -1;
    if (S_ISDIR(st.st_mode)) {
        if (copy_dir(from, name, to, as, &st, depth))
            return -1;
    } else if (S_ISLNK(st.st_mode)) {
        ssize_t k = readlinkat(from, name, target, sizeof target - 1);
        if (k < 0)
            return -1;
        target[k] = 0;
        if (symlinkat(target, to, as))
            return -1;
        if (geteuid() == 0 && fchownat(to, as, st.st_uid, st.st_gid, AT_SYMLINK_NOFOLLOW))
            return -1;
    } else if (S_ISREG(st.st_mode)) {
        if (copy_file(from, name, to, as, &st))
            return -1;
    } else if (mknodat(to, as, st.st_mode, st.st_rdev)) {
        return -1;
    }
    struct timespec times[2] = {st.st_atim, st.st_mtim};
    utimensat(to, as, times, AT_SYMLINK_NOFOLLOW);
    return 0;
}

int tree_copy(const char *src, const char *dst)
{
    return copy_in(AT_FDCWD, src, AT_FDCWD, dst, 0);
}

struct listing { struct buf out; char name[PATH_MAX]; };

/* One directory's entries, named from the root of the listing; with `recursive` each
 * directory's own follow it. */
static void list_in(int dir, size_t len, bool recursive, int depth, struct listing *l)
{
    struct stat st;
    DIR *d = dir >= 0 && depth < DEPTH_MAX ? fdopendir(dir) : NULL;
    if (!d)
        file_fail(l->name, dir >= 0 && depth == DEPTH_MAX ? ELOOP : errno);
    for (struct dirent *e; (e = readdir(d));) {
        char target[PATH_MAX];
        size_t k = strlen(e->d_name);
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        if (fstatat(dir, e->d_name, &st, AT_SYMLINK_NOFOLLOW))
            continue; /* gone meanwhile */
        if (len + k + 2 > sizeof l->name)
            file_fail(l->name, ENAMETOOLONG);
        memcpy(l->name + len, e->d_name, k + 1);
        ssize_t n = S_ISLNK(st.st_mode) ? readlinkat(dir, e->d_name, target, PATH_MAX - 1) : -1;
        if (n >= 0)
            target[n] = 0;
        put_info(&l->out, l->name, &st, n >= 0 ? target : NULL);
        put_field(&l->out, T_CONTENT, NULL, 0);
        say(&l->out, COPY_SIZE / 4);
        if (!recursive || !S_ISDIR(st.st_mode))
            continue;
        int below = openat(dir, e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (below < 0 && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP))
            continue;
        l->name[len + k] = '/';
        l->name[len + k + 1] = 0;
        list_in(below, len + k + 1, recursive, depth + 1, l);
    }
    closedir(d);
}

void tree_list(const char *path, bool recursive)
{
    static struct listing l;
    struct stat st;
    int dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK);
    if (dir < 0 || fstat(dir, &st))
        file_fail(path, errno);
    list_in(dir, 0, recursive, 0, &l);
    say(&l.out, 0);
    file_done(path, &st, NULL);
}
