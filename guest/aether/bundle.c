/* Many small files in one operation. A bundle is a row of entries; an entry is a row of
 * fields (NAME TYPE FMODE MTIME_NS TARGET …) that ends with CONTENT. Names are relative
 * to the operation's directory, and cannot lead out of it. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PACKED_MAX (1u << 20) /* bytes of one file in a bundle */

struct entry { char name[PATH_MAX], target[PATH_MAX]; char type; uint64_t mode, time_ns; };

static uint8_t in[COPY_SIZE]; /* of stdin, between in_at and in_end */
static size_t in_at, in_end;

static const char *top; /* the directory of the operation */

static void fail_at(const char *name, int err) __attribute__((noreturn));
static void fail_at(const char *name, int err)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", strcmp(top, "/") ? top : "", name);
    file_fail(path, err);
}

static bool is_inside(const char *name)
{
    if (!*name || *name == '/')
        return false;
    for (const char *at = name; at; at = strchr(at, '/')) {
        at += *at == '/';
        if (at[0] == '.' && at[1] == '.' && (!at[2] || at[2] == '/'))
            return false;
    }
    return true;
}

/* Up to n bytes of stdin; 0 at its end. */
static size_t take_some(const uint8_t **p, size_t n)
{
    while (in_at == in_end) {
        ssize_t k = read(0, in, sizeof in);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            file_fail(top, errno);
        if (!k)
            return 0;
        in_at = 0;
        in_end = (size_t)k;
    }
    if (n > in_end - in_at)
        n = in_end - in_at;
    *p = in + in_at;
    in_at += n;
    return n;
}

static bool take(void *to, size_t n, bool may_end)
{
    uint8_t *at = to;
    const uint8_t *p;
    for (size_t left = n; left;) {
        size_t k = take_some(&p, left);
        if (!k && left == n && may_end)
            return false;
        if (!k)
            file_fail(top, EBADMSG);
        memcpy(at, p, k);
        at += k;
        left -= k;
    }
    return true;
}

/* ---- out of the sandbox ---- */

static void pack_one(struct buf *out, const char *name)
{
    struct stat st;
    if (!is_inside(name))
        fail_at(name, EINVAL);
    if (lstat(name, &st))
        fail_at(name, errno);
    if (!S_ISREG(st.st_mode)) /* a device must not even be opened */
        fail_at(name, S_ISDIR(st.st_mode) ? EISDIR : NOT_REGULAR);
    int fd = open(name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0 || fstat(fd, &st))
        fail_at(name, errno);
    if (!S_ISREG(st.st_mode) || st.st_size > PACKED_MAX) /* exchanged, or it has grown */
        fail_at(name, ESTALE);
    put_info(out, name, &st, NULL);
    size_t left = (size_t)st.st_size;
    uint8_t head[5] = {T_CONTENT, (uint8_t)left, (uint8_t)(left >> 8), (uint8_t)(left >> 16), 0};
    buf_add(out, head, sizeof head);
    if (!buf_room(out, left))
        fail_at(name, ENOMEM);
    while (left) {
        ssize_t k = read(fd, out->p + out->len, left);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            fail_at(name, k ? errno : ESTALE);
        out->len += (size_t)k;
        left -= (size_t)k;
    }
    close(fd);
    say(out, COPY_SIZE);
}

/* What there is by a name, without its content; nothing where it cannot be seen. */
static void facts_of(struct buf *out, const char *name)
{
    struct stat st;
    char target[PATH_MAX];
    if (!is_inside(name))
        fail_at(name, EINVAL);
    if (lstat(name, &st))
        return;
    ssize_t k = S_ISLNK(st.st_mode) ? readlink(name, target, sizeof target - 1) : -1;
    if (k >= 0)
        target[k] = 0;
    put_info(out, name, &st, k >= 0 ? target : NULL);
    put_field(out, T_CONTENT, NULL, 0);
    say(out, COPY_SIZE);
}

/* The files whose names are on stdin, each ended by a zero byte. */
void bundle_out(const char *path, bool contents)
{
    struct buf out = {0};
    struct stat st;
    char name[PATH_MAX];
    size_t n = 0;
    top = path;
    if (chdir(path) || stat(".", &st))
        file_fail(path, errno);
    while (take(name + n, 1, true)) {
        if (!name[n]) {
            (contents ? pack_one : facts_of)(&out, name);
            n = 0;
        } else if (++n == sizeof name) {
            file_fail(path, ENAMETOOLONG);
        }
    }
    if (n)
        file_fail(path, EBADMSG);
    say(&out, 0);
    file_done(path, &st, NULL);
}

/* ---- into the sandbox ---- */

/* A name beside `name` that nobody has. */
static void beside(const char *name)
{
    static unsigned count;
    const char *slash = strrchr(name, '/');
    int dir = slash ? (int)(slash - name) + 1 : 0;
    snprintf(unfinished, PATH_MAX, "%.*s.dsec-%d-%u.tmp", dir, name, getpid(), count++);
}

static void refuse_special(const char *name)
{
    struct stat st;
    if (!lstat(name, &st) && !S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode))
        fail_at(name, S_ISDIR(st.st_mode) ? EISDIR : NOT_REGULAR);
}

static void put_in_place(const char *name)
{
    if (rename(unfinished, name))
        fail_at(name, errno);
    unlink(unfinished); /* still there where both were names of one file already */
    *unfinished = 0;
}

static void unpack_file(const struct entry *e, uint32_t size)
{
    const uint8_t *p;
    struct stat st;
    beside(e->name);
    int fd = open(unfinished, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) {
        int err = errno;
        *unfinished = 0;
        fail_at(e->name, err);
    }
    for (uint32_t left = size; left;) {
        size_t k = take_some(&p, left);
        if (!k)
            fail_at(e->name, EBADMSG);
        if (write_all(fd, p, k) < 0)
            fail_at(e->name, errno);
        left -= (uint32_t)k;
    }
    if (fchmod(fd, (mode_t)e->mode & 07777) || set_time(fd, e->time_ns) || fstat(fd, &st))
        fail_at(e->name, errno);
    if (st.st_size != size)
        fail_at(e->name, EIO);
    if (close(fd))
        fail_at(e->name, errno);
    put_in_place(e->name);
}

static void unpack_link(const struct entry *e)
{
    beside(e->name);
    int failed = e->type == 'l' ? symlink(e->target, unfinished)
                                : linkat(AT_FDCWD, e->target, AT_FDCWD, unfinished, 0);
    if (failed) {
        int err = errno;
        *unfinished = 0;
        fail_at(e->name, err);
    }
    put_in_place(e->name);
}

static void unpack_dir(const struct entry *e)
{
    struct stat st;
    if (mkdir(e->name, 0700) && errno != EEXIST)
        fail_at(e->name, errno);
    if (stat(e->name, &st))
        fail_at(e->name, errno);
    if (!S_ISDIR(st.st_mode))
        fail_at(e->name, ENOTDIR);
    if ((st.st_mode & 07777) != (e->mode & 07777) && chmod(e->name, (mode_t)e->mode & 07777))
        fail_at(e->name, errno);
}

static void text_field(char to[PATH_MAX], uint32_t n)
{
    if (n >= PATH_MAX - 64)
        file_fail(top, ENAMETOOLONG);
    take(to, n, false);
    to[n] = 0;
    if (strlen(to) != n)
        file_fail(top, EBADMSG);
}

/* The fields of the next entry up to its content; false at the end of the bundle. */
static bool next_entry(struct entry *e, uint32_t *size)
{
    uint8_t head[5], raw[8];
    memset(e, 0, sizeof *e);
    e->time_ns = UINT64_MAX;
    for (bool first = true; take(head, sizeof head, first); first = false) {
        struct field f = {head[0], raw, get_u32(head + 1)};
        if (f.tag == T_CONTENT) {
            *size = f.n;
            return true;
        }
        if (f.tag == T_NAME || f.tag == T_TARGET) {
            text_field(f.tag == T_NAME ? e->name : e->target, f.n);
            continue;
        }
        if (f.n > sizeof raw)
            file_fail(top, EBADMSG);
        take(raw, f.n, false);
        if (f.tag == T_TYPE && f.n == 1)
            e->type = (char)raw[0];
        else if (f.tag == T_FMODE)
            e->mode = field_u64(&f);
        else if (f.tag == T_MTIME_NS)
            e->time_ns = field_u64(&f);
    }
    return false;
}

void bundle_in(const char *path)
{
    static struct entry e;
    struct stat st;
    uint32_t size;
    top = path;
    make_parents(path);
    if (mkdir(path, 0755) && errno != EEXIST)
        file_fail(path, errno);
    if (chdir(path) || stat(".", &st))
        file_fail(path, errno);
    while (next_entry(&e, &size)) {
        if (!is_inside(e.name) || (e.type == 'h' && !is_inside(e.target)))
            fail_at(e.name, EINVAL);
        if (size && e.type != 'f')
            fail_at(e.name, EBADMSG);
        if (e.type != 'd')
            refuse_special(e.name);
        switch (e.type) {
        case 'f': unpack_file(&e, size); break;
        case 'l': case 'h': unpack_link(&e); break;
        case 'd': unpack_dir(&e); break;
        default: fail_at(e.name, NOT_REGULAR);
        }
    }
    file_done(path, &st, NULL);
}
