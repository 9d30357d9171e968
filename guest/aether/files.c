/* File operations: each in a child of its own that has become the user, so that
 * paths are resolved with that user's rights inside the sandbox's root and a device
 * or a dead file system stalls nobody else. Content goes over stdin and stdout. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#define LINK_MAX_HOPS 40
#define SOURCE_SIZE 128

static int status_out;
char unfinished[PATH_MAX];

void file_fail(const char *path, int err)
{
    struct buf b = {0};
    const char *code = err == ENOENT || err == ENOTDIR ? "not_found"
                     : err == EACCES || err == EPERM || err == EROFS ? "forbidden"
                     : err == ESTALE ? "conflict"
                     : err == TOO_MANY ? "quota_exceeded"
                     : err == NO_NOTIFY ? "unsupported"
                     : "invalid_request";
    if (*unfinished)
        unlink(unfinished);
    const char *why = err == NOT_REGULAR ? "not a regular file"
                    : err == TOO_MANY ? "more directories than can be watched"
                    : err == NO_NOTIFY ? "nothing can be watched here"
                    : err == ESTALE ? "it changed meanwhile"
                    : strerror(err);
    put_error(&b, code, "path", err < 0 ? 0 : err, "%.512s: %s", path, why);
    put_str(&b, T_PATH, path);
    if (err == NOT_REGULAR)
        put_str(&b, T_ERRNO, "ENOTREG");
    write_all(status_out, b.p, b.len);
    _exit(1);
}

static void on_term(int sig)
{
    (void)sig;
    if (*unfinished)
        unlink(unfinished);
    _exit(3);
}

void say(struct buf *b, size_t most)
{
    if (b->len <= most)
        return;
    if (write_all(1, b->p, b->len) < 0)
        _exit(2); /* nobody reads any more */
    b->len = 0;
}

void file_done(const char *path, const struct stat *st, const char *target)
{
    struct buf b = {0};
    put_info(&b, path, st, target);
    if (write_all(status_out, b.p, b.len) < 0)
        _exit(1);
    _exit(0);
}

static int open_regular(const char *path, int flags, struct stat *st)
{
    int fd = open(path, flags | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        file_fail(path, errno == ENXIO ? NOT_REGULAR : errno);
    if (fstat(fd, st))
        file_fail(path, errno);
    if (S_ISDIR(st->st_mode))
        file_fail(path, EISDIR);
    if (!S_ISREG(st->st_mode))
        file_fail(path, NOT_REGULAR);
    return fd;
}

/* What tells a file from another one, and from itself before a change. */
static void source_of(char text[SOURCE_SIZE], const struct stat *st)
{
    snprintf(text, SOURCE_SIZE, "%llx.%llx.%llx.%llx.%llx", (unsigned long long)st->st_dev,
             (unsigned long long)st->st_ino, (unsigned long long)st->st_size,
             (unsigned long long)ns_of(st->st_mtim), (unsigned long long)ns_of(st->st_ctim));
}

/* The first field of the output says which file it is; with `source` it must be that. */
static void do_read(const char *path, uint64_t offset, uint64_t length, const char *source)
{
    struct stat st;
    struct buf head = {0};
    char is[SOURCE_SIZE];
    char *piece = malloc(COPY_SIZE);
    /* what must not be opened at all (a device's open may act) is found out first */
    if (!stat(path, &st) && !S_ISREG(st.st_mode))
        file_fail(path, S_ISDIR(st.st_mode) ? EISDIR : NOT_REGULAR);
    int fd = open_regular(path, O_RDONLY, &st);
    source_of(is, &st);
    if (source && strcmp(source, is))
        file_fail(path, ESTALE);
    put_str(&head, T_SOURCE, is);
    say(&head, 0);
    if (!piece || (offset && lseek(fd, (off_t)offset, SEEK_SET) < 0))
        file_fail(path, piece ? errno : ENOMEM);
    while (length) {
        ssize_t k = read(fd, piece, length < COPY_SIZE ? (size_t)length : COPY_SIZE);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            file_fail(path, errno);
        if (!k)
            break;
        if (write_all(1, piece, (size_t)k) < 0)
            _exit(2);
        length -= (uint64_t)k;
    }
    file_done(path, &st, NULL);
}

void make_parents(const char *path)
{
    char p[PATH_MAX];
    snprintf(p, sizeof p, "%s", path);
    for (char *at = p + 1; (at = strchr(at, '/')); at++) {
        *at = 0;
        if (mkdir(p, 0755) && errno != EEXIST)
            file_fail(p, errno);
        *at = '/';
    }
}

/* Follows links of the last component, so that the file behind a link is replaced
 * and not the link; a link whose target is missing names the file to be made. */
static void follow(char path[PATH_MAX], const char *given)
{
    char link[PATH_MAX];
    for (int hops = 0;; hops++) {
        ssize_t k = readlink(path, link, sizeof link - 1);
        if (k < 0)
            return;
        if (hops == LINK_MAX_HOPS)
            file_fail(given, ELOOP);
        link[k] = 0;
        char *slash = strrchr(path, '/');
        size_t dir = link[0] == '/' || !slash ? 0 : (size_t)(slash - path) + 1;
        if (dir + (size_t)k >= PATH_MAX)
            file_fail(given, ENAMETOOLONG);
        memcpy(path + dir, link, (size_t)k + 1);
    }
}

static bool all_zero(const char *p, size_t n)
{
    return !p[0] && !memcmp(p, p + 1, n - 1);
}

/* With `sparse`, pieces of zeros become holes. */
static uint64_t copy_in(int fd, const char *path, bool sparse)
{
    char *piece = malloc(COPY_SIZE);
    uint64_t sum = 0;
    bool hole = false;
    for (;;) {
        ssize_t k = read(0, piece, COPY_SIZE);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0 || !piece)
            file_fail(path, piece ? errno : ENOMEM);
        if (!k && hole && ftruncate(fd, (off_t)sum))
            file_fail(path, errno);
        if (!k)
            return sum;
        hole = sparse && all_zero(piece, (size_t)k);
        if (hole ? lseek(fd, k, SEEK_CUR) < 0 : write_all(fd, piece, (size_t)k) < 0)
            file_fail(path, errno);
        sum += (uint64_t)k;
    }
}

static void do_append(const char *path, mode_t mode)
{
    struct stat st, after;
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_CLOEXEC | O_NOCTTY, mode);
    if (fd >= 0)
        close(fd);
    fd = open_regular(path, O_WRONLY | O_APPEND, &st);
    uint64_t n = copy_in(fd, path, false);
    if (fstat(fd, &after))
        file_fail(path, errno);
    if ((uint64_t)after.st_size < (uint64_t)st.st_size + n)
        file_fail(path, EIO);
    if (close(fd))
        file_fail(path, errno);
    file_done(path, &after, NULL);
}

/* Where a new file cannot take the old one's place (a mount point, or a folder that is
 * not the user's), the old one gets the content, once all of it is here. */
static void write_in_place(int from, const char *path, uint64_t mode)
{
    struct stat st;
    int fd = open_regular(path, O_WRONLY | O_TRUNC, &st);
    off_t at = 0;
    ssize_t k;
    while ((k = sendfile(fd, from, &at, 1 << 20)) > 0)
        ;
    if (k < 0 || (mode != UINT64_MAX && fchmod(fd, (mode_t)mode)) || fstat(fd, &st))
        file_fail(path, errno);
    if (st.st_size != at)
        file_fail(path, EIO);
    if (close(fd))
        file_fail(path, errno);
    if (*unfinished)
        unlink(unfinished);
    *unfinished = 0;
    file_done(path, &st, NULL);
}

static void write_from_elsewhere(const char *path, uint64_t mode)
{
    snprintf(unfinished, sizeof unfinished, "/tmp/.dsec-%d.tmp", getpid());
    int fd = open(unfinished, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    int err = errno;
    if (fd >= 0)
        unlink(unfinished);
    *unfinished = 0;
    if (fd < 0)
        file_fail(path, err);
    copy_in(fd, path, false);
    write_in_place(fd, path, mode);
}

int set_time(int fd, uint64_t time_ns)
{
    struct timespec t[2] = {{0, UTIME_OMIT},
                            {(time_t)(time_ns / 1000000000ull), (long)(time_ns % 1000000000ull)}};
    return time_ns == UINT64_MAX ? 0 : futimens(fd, t);
}

static void do_write(const char *given, uint64_t mode, bool append, bool sparse, uint64_t time_ns)
{
    char path[PATH_MAX];
    struct stat old, st;
    snprintf(path, sizeof path, "%s", given);
    make_parents(path);
    follow(path, given);
    bool exists = !lstat(path, &old);
    if (exists && !S_ISREG(old.st_mode))
        file_fail(given, S_ISDIR(old.st_mode) ? EISDIR : NOT_REGULAR);
    if (exists && access(path, W_OK))
        file_fail(given, errno);
    if (append) {
        do_append(path, mode == UINT64_MAX ? 0644 : (mode_t)mode);
        return;
    }
    size_t dir = (size_t)(strrchr(path, '/') - path) + 1;
    if (snprintf(unfinished, sizeof unfinished, "%.*s.dsec-%d.tmp", (int)dir, path, getpid()) >=
        PATH_MAX)
        file_fail(given, ENAMETOOLONG);
    int fd = open(unfinished, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) {
        *unfinished = 0;
        if (exists && (errno == EACCES || errno == EPERM || errno == EROFS))
            write_from_elsewhere(path, mode);
        file_fail(given, errno);
    }
    uint64_t n = copy_in(fd, given, sparse);
    mode_t bits = mode != UINT64_MAX ? (mode_t)mode : exists ? old.st_mode & 07777 : 0644;
    if (exists && geteuid() == 0 && fchown(fd, old.st_uid, old.st_gid))
        file_fail(given, errno);
    if (fchmod(fd, bits) || set_time(fd, time_ns) || fstat(fd, &st))
        file_fail(given, errno);
    if ((uint64_t)st.st_size != n)
        file_fail(given, EIO);
    if (rename(unfinished, path)) {
        if (errno == EBUSY && exists)
            write_in_place(fd, path, mode);
        file_fail(given, errno);
    }
    *unfinished = 0;
    if (close(fd))
        file_fail(given, errno);
    file_done(given, &st, NULL);
}

static void do_stat(const char *path)
{
    struct stat st;
    char target[PATH_MAX];
    if (lstat(path, &st))
        file_fail(path, errno);
    ssize_t k = S_ISLNK(st.st_mode) ? readlink(path, target, sizeof target - 1) : -1;
    if (k >= 0)
        target[k] = 0;
    file_done(path, &st, k >= 0 ? target : NULL);
}

static void do_mkdir(const char *path, mode_t mode, bool parents)
{
    struct stat st;
    if (parents)
        make_parents(path);
    if (mkdir(path, mode)) {
        int err = errno;
        if (err != EEXIST || !parents || stat(path, &st) || !S_ISDIR(st.st_mode))
            file_fail(path, err);
    } else if (chmod(path, mode)) { /* the umask does not take part */
        file_fail(path, errno);
    }
    do_stat(path);
}

static void do_remove(const char *path, bool recursive)
{
    struct stat st;
    if (lstat(path, &st))
        file_fail(path, errno);
    if (!S_ISDIR(st.st_mode) ? unlink(path) : recursive ? tree_remove(path) : rmdir(path))
        file_fail(path, errno);
    file_done(path, &st, NULL);
}

static void do_move(const char *src, const char *dst)
{
    if (rename(src, dst)) {
        if (errno != EXDEV) /* a directory of a lower layer answers EXDEV */
            file_fail(src, errno);
        if (tree_copy(src, dst) || tree_remove(src))
            file_fail(src, errno);
    }
    do_stat(dst);
}

void file_main(const struct launch *l, const struct reader *spec)
{
    char *path = spec_str(spec, T_PATH), *dst = spec_str(spec, T_DST);
    uint64_t mode = spec_u64(spec, T_MODE, UINT64_MAX);
    bool recursive = spec_u64(spec, T_RECURSIVE, 0);
    status_out = l->fds[L_STATUS];
    signal(SIGTERM, on_term);
    if (!path || path[0] != '/' || strlen(path) >= PATH_MAX - 64)
        child_fail(status_out, "invalid_request", "path", 0, "the path is not absolute or too long");
    switch (spec_u64(spec, T_FOP, 0)) {
    case F_READ:
        do_read(path, spec_u64(spec, T_OFFSET, 0), spec_u64(spec, T_LENGTH, UINT64_MAX),
                spec_str(spec, T_SOURCE));
        break;
    case F_WRITE:
        do_write(path, mode, spec_u64(spec, T_APPEND, 0), spec_u64(spec, T_SPARSE, 0),
                 spec_u64(spec, T_TIME_NS, UINT64_MAX));
        break;
    case F_STAT: do_stat(path); break;
    case F_LIST: tree_list(path, recursive); break;
    case F_PACK: bundle_out(path, spec_u64(spec, T_LENGTH, UINT64_MAX)); break;
    case F_UNPACK: bundle_in(path); break;
    case F_WATCH: watch_tree(path, recursive); break;
    case F_MKDIR:
        do_mkdir(path, mode == UINT64_MAX ? 0755 : (mode_t)mode, spec_u64(spec, T_PARENTS, 1));
        break;
    case F_REMOVE: do_remove(path, recursive); break;
    case F_MOVE:
        if (!dst || dst[0] != '/')
            child_fail(status_out, "invalid_request", "dst", 0, "the path is not absolute");
        do_move(path, dst);
        break;
    }
    child_fail(status_out, "invalid_request", "fop", 0, "unknown file operation");
}
