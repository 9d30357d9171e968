/* The workload's cgroups. The edge hands over descriptors; nothing is looked up by
 * path, because no cgroup file system that can be written exists in the sandbox. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LINGER_MAX 512

int cg_v2 = -1, cg_v1[16], cg_v1_count, cg_oom = -1;
static char lingering[LINGER_MAX][32];
static int lingering_count;

void cg_set(const int *fds, int n, int v1_count, bool has_v2, bool has_oom)
{
    int i = 0;
    while (cg_v1_count)
        close(cg_v1[--cg_v1_count]);
    if (cg_v2 >= 0)
        close(cg_v2);
    if (cg_oom >= 0)
        close(cg_oom);
    cg_v2 = cg_oom = -1;
    while (cg_v1_count < v1_count && i < n)
        cg_v1[cg_v1_count++] = fds[i++];
    if (has_v2 && i < n)
        cg_v2 = fds[i++];
    if (has_oom && i < n)
        cg_oom = fds[i++];
    while (i < n)
        close(fds[i++]);
}

static int write_at(int dir, const char *name, const char *text)
{
    int fd = openat(dir, name, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t k = write(fd, text, strlen(text));
    int err = errno;
    close(fd);
    errno = err;
    return k < 0 ? -1 : 0;
}

static ssize_t read_at(int dir, const char *name, char *text, size_t size)
{
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t k = read(fd, text, size - 1);
    close(fd);
    text[k > 0 ? k : 0] = 0;
    return k;
}

/* Moves the calling process in; only the launcher does this, once. */
void cg_join(void)
{
    for (int i = 0; i < cg_v1_count; i++)
        if (write(cg_v1[i], "0", 1) < 0)
            fatal("launcher: cannot join a cgroup: %s", strerror(errno));
    if (cg_v2 >= 0 && write_at(cg_v2, "cgroup.procs", "0"))
        fatal("launcher: cannot join the unified cgroup: %s", strerror(errno));
}

int cg_leaf_open(char *name, size_t size)
{
    static uint64_t serial;
    name[0] = 0;
    if (cg_v2 < 0)
        return -1;
    snprintf(name, size, "c%llu", (unsigned long long)++serial);
    if (mkdirat(cg_v2, name, 0755) && errno != EEXIST) {
        name[0] = 0;
        return -1;
    }
    return openat(cg_v2, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int cg_leaf_enter(int leaf)
{
    return write_at(leaf, "cgroup.procs", "0");
}

static int by_number(const void *a, const void *b)
{
    pid_t x = *(const pid_t *)a, y = *(const pid_t *)b;
    return (x > y) - (x < y);
}

/* The processes in a leaf, to be freed; none where memory runs out. */
struct pids cg_leaf_procs(int leaf)
{
    struct pids list = {0};
    char text[4096], *end;
    long pid = 0;
    bool inside = false;
    ssize_t k;
    int fd = leaf < 0 ? -1 : openat(leaf, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && (k = read(fd, text, sizeof text)) > 0) {
        pid_t *more = realloc(list.p, (list.n + (size_t)k / 2 + 1) * sizeof *more);
        if (!more)
            break;
        list.p = more;
        for (end = text; end < text + k; end++) {
            if (*end >= '0' && *end <= '9') {
                pid = pid * 10 + (*end - '0');
                inside = true;
            } else if (inside) {
                list.p[list.n++] = (pid_t)pid;
                pid = 0;
                inside = false;
            }
        }
    }
    if (fd >= 0)
        close(fd);
    if (list.n)
        qsort(list.p, list.n, sizeof *list.p, by_number);
    return list;
}

/* For kernels whose cgroups have no cgroup.kill: freeze so that nothing forks,
 * kill everyone, thaw. */
static void kill_one_by_one(int leaf)
{
    write_at(leaf, "cgroup.freeze", "1");
    struct pids list = cg_leaf_procs(leaf);
    for (size_t i = 0; i < list.n; i++)
        if (list.p[i] > 1)
            kill(list.p[i], SIGKILL);
    free(list.p);
    write_at(leaf, "cgroup.freeze", "0");
}

void cg_leaf_kill(int leaf, pid_t pgid)
{
    if (leaf >= 0 && write_at(leaf, "cgroup.kill", "1"))
        kill_one_by_one(leaf);
    if (leaf < 0 && pgid > 1) {
        kill(-pgid, SIGKILL);
        kill(pgid, SIGKILL);
    }
}

bool cg_leaf_empty(int leaf)
{
    char text[256];
    if (leaf < 0)
        return true;
    if (read_at(leaf, "cgroup.events", text, sizeof text) <= 0)
        return true;
    return strstr(text, "populated 0") != NULL;
}

/* The list of a leaf's processes, for cg_holds_only. */
int cg_leaf_list(int leaf)
{
    return leaf < 0 ? -1 : openat(leaf, "cgroup.procs", O_RDONLY | O_CLOEXEC);
}

bool cg_holds_only(int list, pid_t pid)
{
    char text[64], want[24];
    if (list < 0 || pid <= 1)
        return false;
    int n = snprintf(want, sizeof want, "%d\n", pid);
    return pread(list, text, sizeof text, 0) == n && !memcmp(text, want, (size_t)n);
}

void cg_leaf_drop(int leaf, const char *name)
{
    if (leaf >= 0)
        close(leaf);
    if (!name[0] || cg_v2 < 0 || !unlinkat(cg_v2, name, AT_REMOVEDIR))
        return;
    if (lingering_count < LINGER_MAX) /* background children live on in it */
        snprintf(lingering[lingering_count++], sizeof lingering[0], "%s", name);
}

void cg_sweep_leaves(void)
{
    for (int i = 0; i < lingering_count;) {
        if (unlinkat(cg_v2, lingering[i], AT_REMOVEDIR) && errno == EBUSY)
            i++;
        else
            memmove(lingering[i], lingering[--lingering_count], sizeof lingering[0]);
    }
}

uint64_t cg_oom_kills(void)
{
    char text[1024], *at;
    if (cg_oom < 0)
        return 0;
    ssize_t k = pread(cg_oom, text, sizeof text - 1, 0);
    text[k > 0 ? k : 0] = 0;
    at = strstr(text, "oom_kill ");
    return at ? strtoull(at + 9, NULL, 10) : 0;
}
