/* What changes below a directory, as the kernel tells it: one record (CHANGE NAME and
 * what is there now) a change, in order. A directory that appears is watched and then
 * read, so that nothing in it is missed; what both told is told once. */
#include "aether.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#define WATCHED_MAX 8192 /* directories of one watch */
#define SEEN_MAX 16384   /* names told from reading a directory; a power of two */
#define RECENT 64        /* told changes with which a further one may be the same */
#define SETTLE_MS 10     /* changes of one file within this time are told as one */
#define EVENTS (IN_CREATE | IN_DELETE | IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | \
                IN_ONLYDIR | IN_DONT_FOLLOW | IN_EXCL_UNLINK)

struct watched { int wd; char *name; }; /* "" is the top, else a name with '/' behind it */

static struct watched dirs[WATCHED_MAX]; /* by wd, which the kernel counts up */
static int dirs_count, notify;
static bool deep;
static const char *top;
static struct buf out;
static uint64_t seen[SEEN_MAX];
static int seen_count;
static struct { uint64_t hash; char kind; struct stat st; } recent[RECENT]; /* in `out` */
static unsigned recent_count;

static uint64_t hash_of(const char *dir, const char *name)
{
    uint64_t h = 1469598103934665603ull;
    for (; *dir; dir++)
        h = (h ^ (uint8_t)*dir) * 1099511628211ull;
    for (; *name; name++)
        h = (h ^ (uint8_t)*name) * 1099511628211ull;
    return h ? h : 1;
}

static uint64_t *seen_at(uint64_t hash)
{
    size_t at = hash & (SEEN_MAX - 1);
    while (seen[at] && seen[at] != hash)
        at = (at + 1) & (SEEN_MAX - 1);
    return &seen[at];
}

static void seen_clear(void)
{
    if (seen_count)
        memset(seen, 0, sizeof seen);
    seen_count = 0;
}

static void seen_add(uint64_t hash)
{
    if (seen_count >= SEEN_MAX / 2)
        seen_clear(); /* at worst something is told twice */
    uint64_t *at = seen_at(hash);
    seen_count += !*at;
    *at = hash;
}

static bool same(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mode == b->st_mode &&
           a->st_ctim.tv_sec == b->st_ctim.tv_sec && a->st_ctim.tv_nsec == b->st_ctim.tv_nsec;
}

/* Whether the change says no more than one that is about to be sent. */
static bool is_told(uint64_t hash, char kind, const struct stat *st)
{
    unsigned n = recent_count < RECENT ? recent_count : RECENT;
    for (unsigned i = 1; i <= n; i++) {
        unsigned at = (recent_count - i) % RECENT;
        if (recent[at].hash == hash)
            return kind == 'm' ? recent[at].kind != 'd' && same(&recent[at].st, st)
                               : recent[at].kind == kind;
    }
    return false;
}

static void tell_all(void)
{
    say(&out, 0);
    recent_count = 0;
}

static void tell(char kind, const char *dir, const char *name)
{
    struct stat st = {0};
    char path[PATH_MAX], full[PATH_MAX], target[PATH_MAX], text[2] = {kind, 0};
    uint64_t hash = hash_of(dir, name);
    if (snprintf(path, sizeof path, "%s%s", dir, name) >= PATH_MAX ||
        snprintf(full, sizeof full, "%s/%s", top, path) >= PATH_MAX)
        return;
    bool there = *name && kind != 'd' && !lstat(full, &st);
    if ((kind == 'm' && !there) || is_told(hash, kind, &st))
        return; /* its end is told next, or it says nothing new */
    if (out.len > COPY_SIZE)
        tell_all();
    unsigned at = recent_count++ % RECENT;
    recent[at].hash = hash;
    recent[at].kind = kind;
    recent[at].st = st;
    put_str(&out, T_CHANGE, text);
    if (!there) {
        put_str(&out, T_NAME, path);
    } else {
        ssize_t k = S_ISLNK(st.st_mode) ? readlink(full, target, sizeof target - 1) : -1;
        if (k >= 0)
            target[k] = 0;
        put_info(&out, path, &st, k >= 0 ? target : NULL);
    }
    put_field(&out, T_CONTENT, NULL, 0);
}

static int find_wd(int wd)
{
    int low = 0, high = dirs_count;
    while (low < high) {
        int mid = (low + high) / 2;
        if (dirs[mid].wd < wd)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static void forget(int at)
{
    free(dirs[at].name);
    memmove(dirs + at, dirs + at + 1, (size_t)(dirs_count - at - 1) * sizeof *dirs);
    dirs_count--;
}

/* A directory that went elsewhere: nothing below it is this watch's any more. */
static void forget_below(const char *dir, const char *name)
{
    char prefix[PATH_MAX];
    int n = snprintf(prefix, sizeof prefix, "%s%s/", dir, name);
    for (int i = dirs_count - 1; i >= 0; i--)
        if (!strncmp(dirs[i].name, prefix, (size_t)n)) {
            inotify_rm_watch(notify, dirs[i].wd);
            forget(i);
        }
}

static int remember(int wd, const char *dir)
{
    int at = find_wd(wd);
    if (at < dirs_count && dirs[at].wd == wd) {
        free(dirs[at].name); /* known by another name so far */
    } else {
        memmove(dirs + at + 1, dirs + at, (size_t)(dirs_count - at) * sizeof *dirs);
        dirs_count++;
    }
    dirs[at].wd = wd;
    dirs[at].name = strdup(dir);
    return dirs[at].name ? 0 : -1;
}

/* Watches a directory (a name with '/' behind it, or "") and, below it, all others.
 * With `telling` what is found is new. */
static void watch(const char *dir, bool telling)
{
    char full[PATH_MAX], below[PATH_MAX];
    if (snprintf(full, sizeof full, "%s/%s", top, dir) >= PATH_MAX)
        return;
    if (dirs_count == WATCHED_MAX)
        file_fail(full, TOO_MANY);
    uint32_t what = *dir ? EVENTS : (EVENTS | IN_MOVE_SELF) & ~(uint32_t)IN_DONT_FOLLOW;
    int wd = inotify_add_watch(notify, full, what);
    if (wd < 0 && *dir && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == EACCES))
        return; /* gone meanwhile, exchanged, or not to be seen */
    if (wd < 0 || remember(wd, dir))
        file_fail(full, wd >= 0 ? ENOMEM : errno == ENOSPC ? TOO_MANY : errno);
    if (!deep && !telling)
        return;
    DIR *d = opendir(full);
    for (struct dirent *e; d && (e = readdir(d));) {
        struct stat st;
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        if (telling) {
            tell('c', dir, e->d_name);
            seen_add(hash_of(dir, e->d_name));
        }
        bool is_dir = e->d_type == DT_DIR ||
                      (e->d_type == DT_UNKNOWN &&
                       !fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) && S_ISDIR(st.st_mode));
        if (deep && is_dir && snprintf(below, sizeof below, "%s%s/", dir, e->d_name) < PATH_MAX)
            watch(below, telling);
    }
    if (d)
        closedir(d);
}

static void on_event(const struct inotify_event *e)
{
    char dir[PATH_MAX], below[PATH_MAX];
    if (e->mask & IN_Q_OVERFLOW) { /* new directories may be among what was lost */
        tell('o', "", "");
        watch("", false);
        return;
    }
    int at = find_wd(e->wd);
    if (at == dirs_count || dirs[at].wd != e->wd)
        return;
    snprintf(dir, sizeof dir, "%s", dirs[at].name);
    if (!*dir && e->mask & (IN_IGNORED | IN_UNMOUNT | IN_MOVE_SELF)) {
        tell_all();
        file_fail(top, ENOENT);
    }
    if (e->mask & (IN_IGNORED | IN_UNMOUNT)) {
        forget(at);
        return;
    }
    if (!e->len)
        return; /* about the directory itself: its parent's event tells it */
    uint64_t hash = hash_of(dir, e->name);
    uint64_t *known = seen_at(hash);
    if (e->mask & (IN_CREATE | IN_MOVED_TO)) {
        if (*known)
            return; /* told when the directory was read */
        tell('c', dir, e->name);
        if (deep && e->mask & IN_ISDIR && snprintf(below, PATH_MAX, "%s%s/", dir, e->name) < PATH_MAX)
            watch(below, true);
    } else if (e->mask & (IN_DELETE | IN_MOVED_FROM)) {
        if (*known)
            *known = 2; /* free for what comes by this name later, its place stays taken */
        if (deep && e->mask & IN_ISDIR && e->mask & IN_MOVED_FROM)
            forget_below(dir, e->name);
        tell('d', dir, e->name);
    } else if (!(e->mask & IN_ISDIR) || e->mask & IN_ATTRIB) {
        tell('m', dir, e->name);
    }
}

void watch_tree(const char *path, bool recursive)
{
    static char events[64 << 10] __attribute__((aligned(8)));
    top = path;
    deep = recursive;
    notify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (notify < 0)
        file_fail(path, NO_NOTIFY); /* the kernel has a number of them for each user */
    watch("", false);
    tell('b', "", ""); /* it begins: from here on nothing is missed */
    for (;;) {
        tell_all();
        seen_clear();
        struct pollfd p[2] = {{notify, POLLIN, 0}, {1, 0, 0}};
        if (poll(p, 2, -1) < 0 && errno != EINTR)
            file_fail(path, errno);
        if (p[1].revents)
            _exit(2); /* nobody listens any more */
        usleep(SETTLE_MS * 1000);
        for (ssize_t n; (n = read(notify, events, sizeof events)) > 0;) {
            for (char *at = events; at < events + n;) {
                const struct inotify_event *e = (const void *)at;
                on_event(e);
                at += sizeof *e + e->len;
            }
        }
    }
}
