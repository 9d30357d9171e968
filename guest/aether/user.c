/* Users of the sandbox's own /etc/passwd and /etc/group. No name service: a static
 * binary must not load modules of the image, and the files are the image's. */
#include "aether.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DB_MAX (4u << 20) /* bytes of a passwd or group file */

static char *slurp(const char *path)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return NULL;
    char *text = NULL;
    if (!fstat(fd, &st) && S_ISREG(st.st_mode) && (uint64_t)st.st_size <= DB_MAX &&
        (text = malloc((size_t)st.st_size + 1))) {
        ssize_t k = read(fd, text, (size_t)st.st_size);
        text[k > 0 ? k : 0] = 0;
    }
    close(fd);
    return text;
}

/* Splits a line at ':' in place; returns the number of parts. */
static int split(char *line, char *part[], int max)
{
    int n = 0;
    for (char *at = line; n < max; at++) {
        part[n++] = at;
        at = strchr(at, ':');
        if (!at)
            break;
        *at = 0;
    }
    return n;
}

static bool number(const char *s, unsigned *v)
{
    char *end;
    if (!isdigit((unsigned char)*s))
        return false;
    errno = 0;
    unsigned long n = strtoul(s, &end, 10);
    *v = (unsigned)n;
    return !*end && !errno && n < 0xffffffffu;
}

static bool find_passwd(const char *want, bool by_id, unsigned id, struct user *u)
{
    char *text = slurp("/etc/passwd"), *save = NULL, *p[7];
    bool found = false;
    for (char *line = text ? strtok_r(text, "\n", &save) : NULL; line && !found;
         line = strtok_r(NULL, "\n", &save)) {
        unsigned uid, gid;
        if (split(line, p, 7) < 6 || !number(p[2], &uid) || !number(p[3], &gid))
            continue;
        if (by_id ? uid != id : strcmp(p[0], want) != 0)
            continue;
        u->uid = uid;
        u->gid = gid;
        snprintf(u->name, sizeof u->name, "%s", p[0]);
        snprintf(u->home, sizeof u->home, "%s", *p[5] ? p[5] : "/");
        found = true;
    }
    free(text);
    return found;
}

static bool listed(const char *members, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = members; (at = strstr(at, name)); at += n)
        if ((at == members || at[-1] == ',') && (!at[n] || at[n] == ','))
            return true;
    return false;
}

/* Adds the supplementary groups of u; a group named `primary` becomes its gid. */
static bool find_groups(const char *primary, struct user *u)
{
    char *text = slurp("/etc/group"), *save = NULL, *p[4];
    bool found = false;
    for (char *line = text ? strtok_r(text, "\n", &save) : NULL; line;
         line = strtok_r(NULL, "\n", &save)) {
        unsigned gid;
        int n = split(line, p, 4);
        if (n < 3 || !number(p[2], &gid))
            continue;
        if (primary && !strcmp(p[0], primary)) {
            u->gid = gid;
            found = true;
        }
        if (n == 4 && *u->name && listed(p[3], u->name) && u->ngroups < 64)
            u->groups[u->ngroups++] = gid;
    }
    free(text);
    return found;
}

static int look_up(const char *want, struct user *u)
{
    char name[128], *group;
    unsigned id, gid;
    memset(u, 0, sizeof *u);
    strcpy(u->home, "/");
    if (strlen(want) >= sizeof name)
        return ESRCH;
    strcpy(name, want);
    if ((group = strchr(name, ':')))
        *group++ = 0;
    bool by_id = number(name, &id);
    if (!find_passwd(name, by_id, id, u)) {
        bool root = !strcmp(name, "root") || (by_id && id == 0);
        if (!root && !by_id)
            return ESRCH;
        u->uid = root ? 0 : id;
        u->gid = 0;
        snprintf(u->name, sizeof u->name, "%s", root ? "root" : name);
        strcpy(u->home, root ? "/root" : "/");
    }
    bool named = find_groups(group && !number(group, &gid) ? group : NULL, u);
    if (group && number(group, &gid))
        u->gid = gid;
    else if (group && !named)
        return ESRCH;
    return 0;
}

/* Which state of the two files it was found in. */
static void databases(struct stat at[2])
{
    memset(at, 0, 2 * sizeof *at);
    if (stat("/etc/passwd", &at[0]) || stat("/etc/group", &at[1])) {}
}

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec &&
           a->st_ctim.tv_sec == b->st_ctim.tv_sec && a->st_ctim.tv_nsec == b->st_ctim.tv_nsec;
}

/* 0, or an errno. A nest makes many commands of the same user: as long as the files are as
 * they were, the last answer is good. */
int user_find(const char *want, struct user *u)
{
    static struct { char want[128]; struct stat at[2]; struct user user; bool known; } last;
    struct stat at[2];
    databases(at);
    if (!last.known || strcmp(want, last.want) || !same_file(&at[0], &last.at[0]) ||
        !same_file(&at[1], &last.at[1])) {
        int err = look_up(want, &last.user);
        last.known = !err && strlen(want) < sizeof last.want;
        if (err)
            return err;
        snprintf(last.want, sizeof last.want, "%s", want);
        memcpy(last.at, at, sizeof at);
    }
    *u = last.user;
    return 0;
}

int user_become(const struct user *u)
{
    gid_t groups[65], have[65];
    int n = u->ngroups;
    memcpy(groups, u->groups, sizeof(gid_t) * (size_t)n);
    if (!n)
        groups[n++] = u->gid;
    bool same = getgroups(65, have) == n && !memcmp(have, groups, sizeof(gid_t) * (size_t)n);
    if ((!same && setgroups((size_t)n, groups)) || setresgid(u->gid, u->gid, u->gid) ||
        setresuid(u->uid, u->uid, u->uid))
        return errno;
    return 0;
}
