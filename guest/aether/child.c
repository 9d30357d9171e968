/* The child between clone and execve: it belongs to the command, reads its own spec
 * and reports what goes wrong on the status pipe. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SCRIPT_FD 9 /* where a long script is found */

extern char **environ;

void child_fail(int status_fd, const char *code, const char *field, int err, const char *fmt, ...)
{
    struct buf b = {0};
    char text[768];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    put_error(&b, code, field, err, "%s", text);
    if (b.p)
        write_all(status_fd, b.p, b.len);
    _exit(125);
}

char *spec_str(const struct reader *r, uint8_t tag)
{
    struct reader at = *r;
    struct field f;
    while (next_field(&at, &f) > 0)
        if (f.tag == tag)
            return field_str(&f);
    return NULL;
}

uint64_t spec_u64(const struct reader *r, uint8_t tag, uint64_t otherwise)
{
    struct reader at = *r;
    struct field f;
    while (next_field(&at, &f) > 0)
        if (f.tag == tag)
            return field_u64(&f);
    return otherwise;
}

static char **collect(const struct reader *r, uint8_t tag, size_t extra, size_t *count)
{
    struct reader at = *r;
    struct field f;
    size_t n = 0;
    while (next_field(&at, &f) > 0)
        n += f.tag == tag;
    char **list = calloc(n + extra + 1, sizeof *list);
    *count = 0;
    at = *r;
    while (list && next_field(&at, &f) > 0)
        if (f.tag == tag)
            list[(*count)++] = field_str(&f);
    return list;
}

static void env_default(char **env, size_t *n, const char *name, const char *value)
{
    size_t k = strlen(name);
    for (size_t i = 0; i < *n; i++)
        if (env[i] && !strncmp(env[i], name, k) && env[i][k] == '=')
            return;
    if (asprintf(&env[*n], "%s=%s", name, value) > 0)
        (*n)++;
}

static char **build_env(const struct reader *spec, const struct user *u)
{
    size_t n;
    char **env = collect(spec, T_ENV, 8, &n);
    if (!env)
        return NULL;
    env_default(env, &n, "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    env_default(env, &n, "HOME", u->home);
    env_default(env, &n, "USER", u->name);
    env_default(env, &n, "LOGNAME", u->name);
    if (spec_u64(spec, T_ROWS, 0)) {
        env_default(env, &n, "TERM", "xterm-256color");
    } else {
        env_default(env, &n, "TERM", "dumb");
        env_default(env, &n, "PAGER", "cat");
    }
    env_default(env, &n, "LANG", "C.UTF-8");
    return env;
}

/* Descriptors the shell finds: the script is read-only and opened afresh, so that
 * its offset is its own. */
static void keep_as(int fd, int at)
{
    if (fd == at)
        fcntl(fd, F_SETFD, 0);
    else if (fd >= 0)
        dup2(fd, at);
}

static char **shell_argv(const struct reader *spec, int status)
{
    struct reader at = *spec;
    struct field f;
    char **argv = calloc(4, sizeof *argv);
    argv[0] = "/bin/sh";
    while (next_field(&at, &f) > 0) {
        if (f.tag != T_SHELL)
            continue;
        char *text = field_str(&f);
        if (!text)
            child_fail(status, "invalid_request", "shell", 0, "the command holds a NUL byte");
        if (f.n < ARG_MAX_BYTES) {
            argv[1] = "-c";
            argv[2] = text;
            return argv;
        }
        int fd = memfd_create("script", 0);
        if (fd < 0 || write_all(fd, text, f.n) < 0)
            child_fail(status, "internal", NULL, errno, "no room for the script");
        keep_as(fd, SCRIPT_FD);
        if (fd != SCRIPT_FD)
            close(fd);
        argv[1] = "/proc/self/fd/9";
        return argv;
    }
    return NULL;
}

/* What a session's shell runs: it waits for a line, says "b", sources the text, says
 * the code. LEAVE_SIGNAL makes it leave the text, from inside whatever functions and
 * loops, and say so: bash by "return" before every further command (what extdebug does
 * for status 2), others by an expansion error, which `command` catches; only while
 * _dsec_in is set. INT does the same: bash sends it to itself when a substitution died
 * of it. For "r" it reaps what was killed and says "z". The channels are closed for the
 * text, or out of reach of what scripts number. */
#define SESSION(begin, ctl, status, leave, after) \
    "trap 'case $_dsec_in in 1) _dsec_in= _dsec_left=i; " leave ";; esac' INT 64; " \
    "while :; do " \
    "while ! { IFS= command read -r _dsec_how <&" ctl "; } 2>/dev/null; do :; done; " \
    "{ case $_dsec_how in r) command jobs >/dev/null; command echo z >&" status "; " \
    "continue;; esac; } 2>/dev/null; " \
    "{ _dsec_code= _dsec_left=; command echo b >&" status "; } 2>/dev/null; " \
    begin "eval '{ _dsec_in=1; } 2>/dev/null; case $_dsec_how in " \
    "m) . /proc/self/fd/252 " ctl "<&- " status ">&- 2>&1;; " \
    "*) . /proc/self/fd/252 " ctl "<&- " status ">&-;; esac; " \
    "{ _dsec_code=$? _dsec_in=; } 2>/dev/null'; " \
    "{ _dsec_code=${_dsec_code:-$?} _dsec_in=; " after \
    "command echo $_dsec_left$_dsec_code >&" status "; } 2>/dev/null; done"

static char *bash_session = SESSION(
    "", "250", "251",
    "set -T; shopt -s extdebug; "
    "trap \"[ \\${#BASH_SOURCE[@]} -eq 0 ] || [ 1 -eq x ] 2>/dev/null\" DEBUG",
    "case $_dsec_left in i) trap - DEBUG; shopt -u extdebug; set +T;; esac; ");

static char *sh_session =
    SESSION("command ", "7", "8", "{ : ${_dsec_none?}; } 2>/dev/null", "");

static char **session_argv(const struct launch *l)
{
    char **argv = calloc(6, sizeof *argv);
    bool bash = !access("/bin/bash", X_OK);
    keep_as(l->fds[L_CONTROL], bash ? 250 : 7); /* a plain sh takes one digit only */
    keep_as(l->fds[L_STATUS], bash ? 251 : 8);
    keep_as(l->fds[L_TEXT], 252);
    argv[0] = bash ? "/bin/bash" : "/bin/sh";
    argv[1] = bash ? "--norc" : "-c";
    argv[2] = bash ? "--noprofile" : sh_session;
    argv[3] = bash ? "-c" : NULL;
    argv[4] = bash ? bash_session : NULL;
    return argv;
}

static void report_execve(int status, char **argv, int err)
{
    if (err == E2BIG)
        child_fail(status, "invalid_request", "env", err,
                   "arguments and environment are larger than the kernel takes");
    const char *why = err == ENOENT ? "not found" : strerror(err);
    dprintf(2, "sh: %s: %s\n", argv[0], why);
    _exit(err == ENOENT || err == ENOTDIR ? 127 : 126);
}

static void run(const struct launch *l, const struct reader *spec, const struct user *u,
                const char *user_name) __attribute__((noreturn));
static void run(const struct launch *l, const struct reader *spec, const struct user *u,
                const char *user_name)
{
    int status = l->fds[L_STATUS];
    char *cwd = spec_str(spec, T_CWD);
    size_t argc;
    char **argv = collect(spec, T_ARGV, 0, &argc);
    char **env = build_env(spec, u);
    if (spec_u64(spec, T_ROWS, 0))
        pty_take(u);
    int err = user_become(u);
    if (err)
        child_fail(status, "internal", "user", err, "cannot become user %s", user_name);
    if (chdir(cwd && *cwd ? cwd : "/"))
        child_fail(status, "invalid_request", "cwd", errno, "cannot enter %s: %s",
                   cwd ? cwd : "/", strerror(errno));
    if (l->kind == K_SHELL)
        argv = session_argv(l);
    else if (!argc)
        argv = shell_argv(spec, status);
    if (!argv || !argv[0] || !env)
        child_fail(status, "invalid_request", "argv", 0, "there is no command");
    environ = env;
    policy_apply(l);
    prctl(PR_SET_PDEATHSIG, 0);
    execvp(argv[0], argv);
    if ((l->kind == K_SHELL || !argc) && (errno == ENOENT || errno == ENOTDIR))
        child_fail(status, "unsupported", "shell", errno, "the sandbox has no shell: %s: %s",
                   argv[0], strerror(errno));
    report_execve(status, argv, errno);
    _exit(126);
}

static void settle_fds(struct launch *l)
{
    for (int i = 0; i < L_FDS; i++) /* out of the way of what is placed below */
        if (l->fds[i] >= 0 && l->fds[i] < 20)
            l->fds[i] = fcntl(l->fds[i], F_DUPFD_CLOEXEC, 20);
    for (int i = 0; i < 3; i++)
        if (dup2(l->fds[L_IN + i], i) < 0)
            _exit(125);
    /* whatever of the agent and the launcher is open besides must not be usable */
    syscall(SYS_close_range, 3, 19, 0);
}

struct reader mapped(int fd, int status)
{
    struct stat st;
    const uint8_t *p = NULL;
    if (fstat(fd, &st))
        _exit(125);
    if (st.st_size &&
        (p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)
        child_fail(status, "internal", NULL, errno, "cannot read the spec");
    return (struct reader){p, p + st.st_size};
}

void child_main(const struct launch *given)
{
    struct launch l = *given;
    struct user u;
    sigset_t none;
    sigemptyset(&none);
    signal(SIGPIPE, l.kind == K_FILE ? SIG_IGN : SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
    settle_fds(&l);
    umask(022);
    int status = l.fds[L_STATUS];
    struct reader spec = l.fds[L_SPEC] < 0 ? (struct reader){l.spec, l.spec + l.spec_len}
                                           : mapped(l.fds[L_SPEC], status);
    char *name = spec_str(&spec, T_USER);
    if (!name)
        name = "root";
    int err = user_find(name, &u);
    if (err)
        child_fail(status, "invalid_request", "user", 0, "no user %s in the sandbox", name);
    if (l.kind != K_FILE)
        run(&l, &spec, &u, name);
    if ((err = user_become(&u)))
        child_fail(status, "internal", "user", err, "cannot become user %s", name);
    prctl(PR_SET_NAME, FILE_NAME);
    file_main(&l, &spec);
}
