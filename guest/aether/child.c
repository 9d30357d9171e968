/* A command between its request and its execve. What it needs is read from its spec by
 * command_read, in the process that makes it; command_begin is the child's, which belongs
 * to the command, may borrow its maker's memory, and so leaves there what it found. It
 * reports what goes wrong to whoever is told of it. */
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
#define FDS_BELOW 20 /* numbers that a child may give away */

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
    buf_free(&b);
    _exit(CHILD_FAILED);
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

/* A shell string; a long one goes into a memory file. */
static char **shell_argv(struct command *c)
{
    char **argv = calloc(4, sizeof *argv);
    c->text = spec_str(&c->spec, T_SHELL);
    size_t n = c->text ? strlen(c->text) : 0;
    if (!argv || !c->text) {
        free(argv);
        return NULL;
    }
    argv[0] = "/bin/sh";
    argv[1] = "-c";
    argv[2] = c->text;
    if (n < ARG_MAX_BYTES)
        return argv;
    argv[1] = "/proc/self/fd/9";
    argv[2] = NULL;
    c->script = memfd_create("script", MFD_CLOEXEC);
    if (c->script >= 0 && write_all(c->script, c->text, n) < 0) {
        close(c->script);
        c->script = -1;
    }
    return argv;
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

static char **session_argv(void)
{
    char **argv = calloc(6, sizeof *argv);
    bool bash = !access("/bin/bash", X_OK);
    if (!argv)
        return NULL;
    argv[0] = bash ? "/bin/bash" : "/bin/sh";
    argv[1] = bash ? "--norc" : "-c";
    argv[2] = bash ? "--noprofile" : sh_session;
    argv[3] = bash ? "-c" : NULL;
    argv[4] = bash ? bash_session : NULL;
    return argv;
}

static void keep_session(const struct launch *l, bool bash)
{
    keep_as(l->fds[L_CONTROL], bash ? 250 : 7); /* a plain sh takes one digit only */
    keep_as(l->fds[L_STATUS], bash ? 251 : 8);
    keep_as(l->fds[L_TEXT], 252);
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

/* Where in PATH the search for a program may begin: a name that is not there is asked for,
 * because a failed execve costs many times that (before Linux 6.8 a whole address space). */
static const char *first_in_path(const char *program)
{
    char name[PATH_MAX];
    size_t n = strlen(program);
    const char *at = getenv("PATH"), *end;
    if (!at || !n || strchr(program, '/'))
        return at;
    for (;; at = end + 1) {
        end = strchrnul(at, ':');
        size_t k = (size_t)(end - at);
        if (!*end || k + n + 2 > sizeof name)
            return at;
        memcpy(name, at, k);
        if (k)
            name[k++] = '/';
        memcpy(name + k, program, n + 1);
        if (!access(name, F_OK) || errno != ENOENT)
            return at;
    }
}

/* As execvp does it, which would look for PATH in what it gives the program. */
static void execute(char **argv, char **env, const char *path)
{
    size_t n = path ? strlen(path) : 0;
    char line[n + sizeof "PATH="], *only[] = {line, NULL};
    memcpy(line, "PATH=", 5);
    memcpy(line + 5, path ? path : "", n + 1);
    if (path)
        environ = only;
    execvpe(argv[0], argv, env);
    environ = env;
}

static void run(struct command *c) __attribute__((noreturn));
static void run(struct command *c)
{
    const struct launch *l = &c->l;
    int status = l->fds[L_STATUS];
    if (spec_u64(&c->spec, T_ROWS, 0))
        pty_take(&c->user);
    int err = user_become(&c->user);
    if (err)
        child_fail(status, "internal", "user", err, "cannot become user %s", c->user_name);
    const char *cwd = c->cwd && *c->cwd ? c->cwd : "/";
    if (chdir(cwd))
        child_fail(status, "invalid_request", "cwd", errno, "cannot enter %s: %s", cwd,
                   strerror(errno));
    if (!c->argv || !c->argv[0] || !c->env)
        child_fail(status, "invalid_request", "argv", 0, "there is no command");
    if (l->kind == K_SHELL)
        keep_session(l, !strcmp(c->argv[0], "/bin/bash"));
    if (c->text && !c->argv[2] && c->script < 0)
        child_fail(status, "internal", NULL, 0, "no room for the script");
    keep_as(c->script, SCRIPT_FD);
    environ = c->env;
    const char *path = first_in_path(c->argv[0]);
    policy_apply(l, &c->policy);
    prctl(PR_SET_PDEATHSIG, 0);
    execute(c->argv, c->env, path);
    if ((l->kind == K_SHELL || c->text) && (errno == ENOENT || errno == ENOTDIR))
        child_fail(status, "unsupported", "shell", errno, "the sandbox has no shell: %s: %s",
                   c->argv[0], strerror(errno));
    report_execve(status, c->argv, errno);
    _exit(126);
}

static int out_of_the_way(int fd, int least)
{
    return fd >= 0 && fd < least ? fcntl(fd, F_DUPFD_CLOEXEC, least) : fd;
}

/* Whatever of the agent and the launcher is open besides must not be usable: execve closes
 * it, and what executes nothing, or gives descriptors numbers of its own, does so here. */
static void settle_fds(struct command *c)
{
    bool plain = c->l.kind == K_EXEC && c->script < 0;
    int least = plain ? 3 : FDS_BELOW;
    for (int i = 0; i < L_FDS; i++)
        c->l.fds[i] = out_of_the_way(c->l.fds[i], least);
    c->script = out_of_the_way(c->script, least);
    for (int i = 0; i < 3; i++)
        if (dup2(c->l.fds[L_IN + i], i) < 0)
            _exit(CHILD_FAILED);
    if (!plain)
        syscall(SYS_close_range, 3, FDS_BELOW - 1, 0);
}

struct reader mapped(int fd)
{
    struct stat st;
    const uint8_t *p = NULL;
    if (fstat(fd, &st) || !st.st_size)
        return (struct reader){0};
    p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    return p == MAP_FAILED ? (struct reader){0} : (struct reader){p, p + st.st_size};
}

void command_read(struct command *c, const struct launch *l)
{
    size_t argc = 0;
    memset(c, 0, sizeof *c);
    c->l = *l;
    c->script = -1;
    c->spec = l->fds[L_SPEC] < 0 ? (struct reader){l->spec, l->spec + l->spec_len}
                                 : mapped(l->fds[L_SPEC]);
    c->user_name = spec_str(&c->spec, T_USER);
    c->user_error = user_find(c->user_name ? c->user_name : "root", &c->user);
    if (l->kind == K_FILE || c->user_error)
        return;
    c->cwd = spec_str(&c->spec, T_CWD);
    c->env = build_env(&c->spec, &c->user);
    if (l->kind == K_SHELL) {
        c->argv = session_argv();
        return;
    }
    c->argv = collect(&c->spec, T_ARGV, 0, &argc);
    if (!argc) {
        free(c->argv);
        c->argv = shell_argv(c);
    }
}

static void list_free(char **list)
{
    for (char **at = list; at && *at; at++)
        free(*at);
    free(list);
}

void command_free(struct command *c)
{
    static char *none[] = {NULL};
    environ = none; /* a child set it in this memory */
    if (c->l.kind == K_EXEC && !c->text)
        list_free(c->argv);
    else
        free(c->argv);
    list_free(c->env);
    free(c->text);
    free(c->cwd);
    free(c->user_name);
    if (c->script >= 0)
        close(c->script);
    if (c->l.spec != c->spec.p && c->spec.p)
        munmap((void *)(uintptr_t)c->spec.p, (size_t)(c->spec.end - c->spec.p));
}

void command_begin(struct command *given)
{
    struct command c = *given;
    sigset_t none;
    sigemptyset(&none);
    if (c.l.kind == K_FILE)
        signal(SIGPIPE, SIG_IGN);
    sigprocmask(SIG_SETMASK, &none, NULL);
    settle_fds(&c);
    int status = c.l.fds[L_STATUS];
    const char *name = c.user_name ? c.user_name : "root";
    if (c.l.misplaced)
        child_fail(status, "unavailable", NULL, c.l.misplaced,
                   "cannot enter the command's cgroup or root");
    if (!c.spec.p)
        child_fail(status, "internal", NULL, 0, "cannot read the spec");
    if (c.user_error)
        child_fail(status, "invalid_request", "user", 0, "no user %s in the sandbox", name);
    if (c.l.kind != K_FILE)
        run(&c);
    int err = user_become(&c.user);
    if (err)
        child_fail(status, "internal", "user", err, "cannot become user %s", name);
    prctl(PR_SET_NAME, FILE_NAME);
    file_main(&c.l, &c.spec);
}
