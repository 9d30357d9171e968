/* What a command gives up before it is executed: system calls, by a seccomp filter, and
 * limits of its own, and what an AppArmor profile denies. The edge sends it, the agent keeps
 * it for commands to come, and the child applies it to itself as the last thing before
 * execve: what runs already keeps what it has. The filter alone a nest takes itself, once,
 * before it makes a command: making a filter and its listener costs as much as a small
 * command does, and what a nest makes inherits both (docs/adr/0078). A nest never changes
 * its filter; it is replaced.
 *
 * A filter comes in two forms: one whose denials are answered by the edge, which so
 * learns of each, and one that fails them by itself, for when no edge listens. Where the
 * listener goes away later the kernel fails what would have been asked.
 */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FILTER_MAX 1024 /* instructions: what the stack of a child holds, many times over */

#define PROFILE_MAX 128  /* bytes of a profile's name */

static int kept = -1, asks = -1;

uint64_t policy_number, policy_sent;
static uint64_t messages;

static void replace(int *held, int fd)
{
    if (*held >= 0)
        close(*held);
    *held = fd;
}

static bool well_formed(const uint8_t *p, size_t n, uint64_t *has_ask)
{
    struct reader r = {p, p + n};
    struct field f;
    int k;
    while ((k = next_field(&r, &f)) > 0) {
        bool filter = f.tag == T_FILTER || f.tag == T_FILTER_ASK;
        if (filter && (!f.n || f.n % sizeof(struct sock_filter) ||
                       f.n / sizeof(struct sock_filter) > FILTER_MAX))
            return false;
        if (f.tag == T_PROFILE && f.n && f.n <= PROFILE_MAX)
            continue;
        if (!filter && ((f.tag != T_OPEN_FILES && f.tag != T_FILE_SIZE && f.tag != T_HAS_ASK) ||
                        f.n != 8))
            return false;
        if (f.tag == T_HAS_ASK)
            *has_ask = field_u64(&f);
    }
    return !k;
}

/* Whether the policy in force says just that: an edge sends it again where something else
 * of its own changed, and when it is new. */
static bool says(const uint8_t *p, size_t n)
{
    uint8_t piece[4096];
    struct stat st;
    if (kept < 0 || fstat(kept, &st) || (size_t)st.st_size != n)
        return kept < 0 && !n;
    for (size_t at = 0; at < n;) {
        ssize_t k = pread(kept, piece, sizeof piece, (off_t)at);
        if (k <= 0 || memcmp(piece, p + at, (size_t)k))
            return false;
        at += (size_t)k;
    }
    return true;
}

/* Takes the descriptors. Replaces the policy as a whole, or leaves it as it was. */
void policy_message(uint32_t id, const uint8_t *p, size_t n, const int *fds, int count)
{
    uint64_t has_ask = 0;
    int fd = -1;
    bool good = well_formed(p, n, &has_ask) && count == !!has_ask;
    if (good)
        fd = memfd_create("policy", MFD_CLOEXEC);
    if (good && !n) { /* none: not even an empty one */
        policy_number += !says(p, n);
        replace(&kept, -1);
        replace(&asks, -1);
        policy_sent = 0;
        nests_tell();
        if (fd >= 0)
            close(fd);
        send_frame(M_OK, id, NULL, 0);
        return;
    }
    if (fd < 0 || write_all(fd, p, n) < 0) {
        for (int i = 0; i < count; i++)
            close(fds[i]);
        if (fd >= 0)
            close(fd);
        op_refuse(id, good ? "internal" : "invalid_request", "policy",
                  good ? "no room for the policy" : "the policy is malformed");
        return;
    }
    policy_number += !says(p, n);
    replace(&kept, fd);
    replace(&asks, has_ask ? fds[0] : -1);
    if (has_ask)
        set_nonblock(asks);
    policy_sent = ++messages;
    send_frame(M_OK, id, NULL, 0);
    nests_tell();
}

int policy_fds(struct launch *l)
{
    l->fds[L_POLICY] = kept < 0 ? -1 : fcntl(kept, F_DUPFD_CLOEXEC, 3);
    l->fds[L_ASK] = asks < 0 ? -1 : fcntl(asks, F_DUPFD_CLOEXEC, 3);
    return kept >= 0 && l->fds[L_POLICY] < 0 ? -1 : 0; /* nothing runs without its policy */
}

static bool find(const struct reader *policy, uint8_t tag, struct field *f)
{
    struct reader r = *policy;
    while (next_field(&r, f) > 0)
        if (f->tag == tag)
            return true;
    return false;
}

static int limit(const struct reader *policy, uint8_t tag, int resource)
{
    struct field f;
    struct rlimit now;
    if (!find(policy, tag, &f))
        return 0;
    if (getrlimit((__rlimit_resource_t)resource, &now))
        return -1;
    rlim_t most = field_u64(&f) < now.rlim_max ? field_u64(&f) : now.rlim_max;
    return setrlimit((__rlimit_resource_t)resource, &(struct rlimit){most, most});
}

static int filter(const struct field *f, unsigned flags)
{
    struct sock_fprog program = {
        .len = (unsigned short)(f->n / sizeof(struct sock_filter)),
        .filter = (struct sock_filter *)(uintptr_t)f->v,
    };
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
}

/* From the execve on. No engine is asked: where the kernel cannot, this fails. */
static int confine(const struct field *name)
{
    char text[PROFILE_MAX + 8];
    int n = snprintf(text, sizeof text, "exec %.*s", (int)name->n, (const char *)name->v);
    int fd = open("/proc/thread-self/attr/apparmor/exec", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t k = write(fd, text, (size_t)n);
    close(fd);
    return k == n ? 0 : -1;
}

/* Whether somebody holds the other end. */
static bool listened(int fd)
{
    struct pollfd p = {fd, POLLOUT, 0};
    return fd >= 0 && poll(&p, 1, 0) == 1 && !(p.revents & (POLLHUP | POLLERR));
}

/* The filter on this process: the form that asks, where somebody listens. */
static void take_filter(struct policy *p, const struct launch *l)
{
    struct field f, copy;
    int listener;
    if (!find(&p->text, T_FILTER, &f))
        return;
    uint64_t aligned[(size_t)f.n / sizeof(uint64_t)]; /* a field begins at any byte */
    memcpy(aligned, f.v, f.n);
    f.v = (const uint8_t *)aligned;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) {
        p->failed = errno;
    } else if (find(&p->text, T_FILTER_ASK, &copy) && copy.n == f.n && listened(l->fds[L_ASK])) {
        memcpy(aligned, copy.v, f.n);
        listener = filter(&f, SECCOMP_FILTER_FLAG_NEW_LISTENER);
        p->failed = listener < 0 ? errno : 0;
        if (listener >= 0 && send_fds(l->fds[L_ASK], (uint32_t)getpid(), &listener, 1))
            errno = 0; /* it was the last to listen: what would be asked fails */
        close(listener);
    } else {
        p->failed = filter(&f, 0) ? errno : 0;
    }
    p->filtered = !p->failed;
}

void policy_read(struct policy *p, const struct launch *l)
{
    p->given = l->fds[L_POLICY] >= 0;
    if (p->given)
        p->text = mapped(l->fds[L_POLICY]);
}

/* In a nest, with the first message that brings one; a command has no use for its descriptors. */
void policy_take(struct policy *p, struct launch *l)
{
    if (l->fds[L_POLICY] < 0)
        return;
    policy_read(p, l);
    if (p->text.p)
        take_filter(p, l);
    close(l->fds[L_POLICY]);
    if (l->fds[L_ASK] >= 0)
        close(l->fds[L_ASK]);
    l->fds[L_POLICY] = l->fds[L_ASK] = -1;
}

/* The child may share its memory with the nest that bore it: nothing is left behind. */
void policy_apply(const struct launch *l, const struct policy *given)
{
    struct policy p = *given;
    int status = l->fds[L_STATUS];
    struct field f;
    if (!p.given)
        return;
    if (!p.text.p)
        child_fail(status, "policy_denied", "policy", 0, "the policy cannot be read");
    if (limit(&p.text, T_OPEN_FILES, RLIMIT_NOFILE) || limit(&p.text, T_FILE_SIZE, RLIMIT_FSIZE))
        child_fail(status, "policy_denied", "policy.resources", errno, "a limit cannot be set");
    if (find(&p.text, T_PROFILE, &f) && confine(&f))
        child_fail(status, "policy_denied", "policy", errno, "the AppArmor profile does not apply");
    if (!p.filtered && !p.failed)
        take_filter(&p, l);
    if (p.failed)
        child_fail(status, "policy_denied", "policy.processes", p.failed,
                   "system calls cannot be filtered: %s", strerror(p.failed));
}
