/* aether: PID 1 of a sandbox. Shared types of its parts.
 *
 * Two processes: the *agent* (PID 1, outside the workload's limits) speaks the
 * protocol and reaps; the *launcher* (inside the workload's cgroups) clones every
 * command as a child of the agent, so that no command pays for a migration
 * between cgroups. Wire format: ../PROTOCOL.md.
 */
#ifndef AETHER_H
#define AETHER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>

#define PROTO_VERSION 1u
#define FRAME_MAX (16u << 20)       /* bytes of one frame behind its length */
#define WINDOW (256u << 10)         /* initial credit of every stream, bytes */
#define CHUNK (128u << 10)          /* largest DATA frame sent, bytes */
#define OUT_HIGH (1u << 20)         /* no new DATA frame above this much unsent output */
#define OUT_STOP (4u << 20)         /* no request is taken above this much unsent output */
#define KEY_MAX 256u                /* bytes of an operation's key */
#define KEEP_CAP (256u << 10)       /* at rest, an empty buffer larger than this is given back */
#define OPS_MAX 256                 /* operations running or not yet acknowledged */
#define FINISHED_MAX 64             /* finished operations kept until acknowledged */
#define RETAIN_TOTAL_MAX (128u << 20) /* output kept over all operations, bytes */
#define SLIDE_MAX (16u << 20)       /* kept of one stream that has no budget, bytes */
#define SLIDE_KEEP (6u << 20)       /* of it, what was taken: an edge holds less unconfirmed */
#define TAIL_MAX (1u << 20)         /* most of a budget that is kept for the tail, bytes */
#define STATUS_MAX (64u << 10)      /* report of one child, bytes */
#define DRAIN_IDLE_NS 5000000ull    /* quiet time that ends the drain after exit */
#define DRAIN_MAX_NS 2000000000ull  /* the drain ends then at the latest */
#define SOON_NS 1000000ull          /* what nobody tells is looked at again after it */
#define KILL_MAX_NS 5000000000ull   /* a killed tree is reported gone or not by then */
#define HANGUP_NS 60000000000ull    /* without an edge, terminals and writes are ended */
#define SIGNALS_MAX 32              /* signals that wait for the command's beginning */
#define SESSIONS_MAX 32
#define TIMEOUT_MAX_NS (1ull << 62)
#define GUARD_GID 0x7ffffffeu       /* saved group of the agent and of what it keeps ready */
#define NESTS 6                     /* most that are kept ready for the next commands, */
#define NESTS_FEW 2                 /* and as many while no more are needed at once */
#define NEST_IDLE_NS 10000000000ull /* one of the others that was not needed for so long goes */
#define SPARE_QUIET_NS 1000000ull   /* no refill this soon after a launch */
#define CHILD_FAILED 125            /* exit code of a child that reports why it did not begin */
#define ARG_MAX_BYTES 131072u       /* kernel bound of one argument or variable */
#define SPEC_INLINE 3072            /* a longer spec goes through a memory file, bytes */

enum msg {
    M_HELLO = 1, M_SETUP, M_EXEC, M_DATA, M_EOF, M_CREDIT, M_SIGNAL, M_KILL,
    M_LIST, M_ATTACH, M_ACK, M_FILE, M_RESIZE, M_DIAL, M_POLICY,
    M_PAUSE = 18, M_RESUME,
    M_RESULT = 20, M_ERROR, M_OK, M_LISTING,
};

enum tag {
    T_KEY = 1, T_ARGV, T_SHELL, T_CWD, T_ENV, T_USER, T_TIMEOUT_NS, T_LIMIT, T_MERGE,
    T_STDIN, T_SESSION, T_ROWS, T_COLS, T_PORT, T_WAIT_NS, T_IDLE_NS, T_ACCEPT,
    T_FOP = 20, T_PATH, T_DST, T_OFFSET, T_LENGTH, T_MODE, T_APPEND, T_RECURSIVE, T_PARENTS,
    T_SOURCE, T_SPARSE, T_TIME_NS,
    T_CODE = 40, T_MESSAGE, T_FIELD, T_ERRNO,
    T_EXIT_CODE = 50, T_SIGNAL_NO, T_TIMED_OUT, T_OOM, T_DROPPED_OUT, T_DROPPED_ERR,
    T_TOTAL_OUT, T_TOTAL_ERR, T_DURATION_NS, T_SESSION_FRESH, T_SESSION_ENDED,
    T_CHANGE = 68, T_CONTENT,
    T_NAME = 70, T_TYPE, T_SIZE, T_FMODE, T_UID, T_GID, T_MTIME_NS, T_TARGET, T_INO, T_NLINK,
    T_VERSION = 80, T_GENERATION, T_NEXT_ID, T_V1_COUNT, T_HAS_V2, T_HAS_OOM,
    T_HAS_LISTENER,
    T_OP_ID = 90, T_STATE, T_TAKEN, T_BASE_OUT, T_BASE_ERR, T_CTIME_NS,
    T_FILTER = 100, T_FILTER_ASK, T_OPEN_FILES, T_FILE_SIZE, T_HAS_ASK,
    T_PROFILE,
};

enum fop {
    F_READ = 1, F_WRITE, F_STAT, F_LIST, F_MKDIR, F_REMOVE, F_MOVE, F_PACK, F_UNPACK, F_WATCH,
};
enum stream { S_STDIN = 0, S_STDOUT = 1, S_STDERR = 2 };

/* ---- wire.c: growing buffers and fields (u8 tag, u32 length, bytes) ---- */
struct buf { uint8_t *p; size_t len, cap; };
struct reader { const uint8_t *p, *end; };
struct field { uint8_t tag; const uint8_t *v; uint32_t n; };
struct pids { pid_t *p; size_t n; }; /* ascending */

bool buf_room(struct buf *b, size_t more);
bool buf_add(struct buf *b, const void *p, size_t n);
void buf_free(struct buf *b);
void buf_cut(struct buf *b, size_t n); /* drops the first n bytes */
void put_field(struct buf *b, uint8_t tag, const void *v, size_t n);
void put_str(struct buf *b, uint8_t tag, const char *s);
void put_u64(struct buf *b, uint8_t tag, uint64_t v);
int next_field(struct reader *r, struct field *f); /* 1 field, 0 end, -1 malformed */
uint64_t field_u64(const struct field *f);
char *field_str(const struct field *f); /* malloc'd; NULL when it holds a NUL byte */
uint32_t get_u32(const uint8_t *p);
void put_error(struct buf *b, const char *code, const char *field, int err, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
uint64_t now_ns(void);
void set_nonblock(int fd);
ssize_t write_all(int fd, const void *p, size_t n);

/* ---- stream.c: output of one stream with its budget and its credit ---- */
struct outstream {
    int fd;                          /* read end of the pipe, -1 when ended */
    bool retain;                     /* false: passed on under credit only (files) */
    bool slides;                     /* no budget: what was taken makes room, or the writer waits */
    uint64_t base;                   /* bytes that made room, before the head */
    uint8_t *head; size_t head_len, head_cap, head_max, head_sent;
    uint8_t *tail; size_t tail_at, tail_len, tail_cap, tail_max, tail_sent;
    uint64_t total, dropped;
    uint32_t credit;
};
void stream_init(struct outstream *s, int fd, bool retain, uint64_t limit);
void stream_push(struct outstream *s, const uint8_t *p, size_t n);
size_t stream_peek(struct outstream *s, bool ended, const uint8_t **p);
void stream_sent(struct outstream *s, size_t n);
void stream_rewind(struct outstream *s);
size_t stream_room(const struct outstream *s);
void stream_free(struct outstream *s);

/* ---- cgroup.c: the workload's cgroups, handed over as descriptors ---- */
extern int cg_v2, cg_v1[16], cg_v1_count, cg_oom;
void cg_set(const int *fds, int n, int v1_count, bool has_v2, bool has_oom);
void cg_join(void);
int cg_leaf_open(char *name, size_t size); /* directory of a new leaf, -1 without v2 */
int cg_leaf_enter(int leaf);
void cg_leaf_kill(int leaf, pid_t pgid);
bool cg_leaf_empty(int leaf);
struct pids cg_leaf_procs(int leaf);
int cg_leaf_list(int leaf);
bool cg_holds_only(int list, pid_t pid);
void cg_leaf_drop(int leaf, const char *name);
void cg_sweep_leaves(void);
uint64_t cg_oom_kills(void);

/* ---- launch.c: the launcher and nests; spares.c: what is kept ready; answers.c: what
 * they say ---- */
#define FILE_NAME "file operation"  /* a process that has begun one */
enum kind { K_EXEC = 1, K_FILE, K_SHELL, K_POLICY /* none: a nest is told of it */ };
enum {
    L_SPEC, L_IN, L_OUT, L_ERR, L_STATUS, L_ROOT, L_CONTROL, L_TEXT, L_POLICY, L_ASK, L_NULL, L_FDS
};
#define NO_FDS {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}
#define NEST_BIT 0x80000000u
struct launch {
    uint32_t kind;
    int fds[L_FDS];
    const uint8_t *spec; size_t spec_len;
    bool lends_output;               /* L_OUT and L_ERR stay open here */
    bool incomplete;                 /* a descriptor could not be made */
    int misplaced;                   /* errno: it could not enter its cgroup or its root */
};
struct place { uint32_t slot; pid_t pid; int leaf, nest, sock; char leaf_name[32]; };
struct reply { uint32_t number; int32_t pid; };
struct end { pid_t pid; int status; bool begun; }; /* of a process; begun: what it was for */
extern int launcher_fd;
extern pid_t launcher_pid;
int launcher_start(void);
int send_fds(int sock, uint32_t number, const int *fds, int count);
int send_launch(int sock, uint32_t number, const struct launch *l);
int launch(struct launch *l, struct place *where); /* closes the descriptors of l */
bool place_held(const struct place *at);
void place_leave(struct place *at);
void place_spoil(const struct place *at);
bool place_unread(const struct place *at);
bool place_claimed(const struct place *at);
void place_report(const struct place *at, struct buf *report);
void launcher_news(void);
void launcher_claims(void);
void nests_clear(void);
int nest_fd(int i);
bool spare_reaped(pid_t pid);
bool spare_is(pid_t pid);
void launch_reaped(const struct end *end);
uint64_t spares_refill(uint64_t now, bool at_once);
void nests_tell(void);               /* another policy is in force */
int null_fd(void);
int root_fd(void);
bool root_is_last(const struct stat *root);
int root_enter(int fd);
void launch_spec(struct launch *l, const uint8_t *p, size_t n);

/* ---- child.c, user.c: between clone and execve ---- */
struct user { uid_t uid; gid_t gid; gid_t groups[64]; int ngroups; char name[64], home[256]; };
int user_find(const char *want, struct user *u); /* 0, or errno (ESRCH: no such user) */
int user_become(const struct user *u);
struct policy {                      /* of a process that makes commands, or of one command */
    bool given, filtered;            /* filtered: this process is, and all that it makes */
    int failed;                      /* errno: calls cannot be filtered */
    struct reader text;
};
struct command {                     /* read in a nest, begun in its child */
    struct launch l;
    struct reader spec;
    struct policy policy;
    struct user user;
    char *user_name, *cwd, **argv, **env, *text;
    int script;                      /* memory file with a long script */
    int user_error;
};
void command_read(struct command *c, const struct launch *l);
void command_begin(struct command *c) __attribute__((noreturn));
void command_free(struct command *c);
struct reader mapped(int fd);
void child_fail(int status_fd, const char *code, const char *field, int err, const char *fmt, ...)
    __attribute__((noreturn, format(printf, 5, 6)));
char *spec_str(const struct reader *r, uint8_t tag);
uint64_t spec_u64(const struct reader *r, uint8_t tag, uint64_t otherwise);

/* ---- files.c, info.c, bundle.c, watch.c: what the child of a file operation does ---- */
#define COPY_SIZE (256u << 10)
#define NOT_REGULAR (-1) /* reported as ENOTREG, which the kernel has no number for */
#define TOO_MANY (-2)    /* directories to watch */
#define NO_NOTIFY (-3)   /* no inotify to be had */
void file_main(const struct launch *l, const struct reader *spec) __attribute__((noreturn));
void file_fail(const char *path, int err) __attribute__((noreturn));
void file_done(const char *path, const struct stat *st, const char *target)
    __attribute__((noreturn));
void make_parents(const char *path);
uint64_t ns_of(struct timespec t);
int set_time(int fd, uint64_t time_ns); /* UINT64_MAX: as it is */
void put_info(struct buf *b, const char *name, const struct stat *st, const char *target);
void say(struct buf *b, size_t most); /* to stdout, once it holds more than that */
extern char unfinished[];             /* removed when the operation fails or is ended */
void tree_list(const char *path, bool recursive) __attribute__((noreturn));
void bundle_out(const char *path, bool contents) __attribute__((noreturn));
void bundle_in(const char *path) __attribute__((noreturn));
void watch_tree(const char *path, bool recursive) __attribute__((noreturn));
int tree_remove(const char *path);
int tree_copy(const char *src, const char *dst);

/* ---- ops.c, exec.c: operations ---- */
struct session;
struct dial {                        /* a connection to a port of the sandbox, or from within */
    bool on, connected, v6, accepts;
    int fd;                          /* while it connects; the listener, where it accepts */
    uint16_t port;
    int err;                         /* of the first address; then what broke it */
    uint64_t wait_end, again, pause;
};
struct op {
    bool used, attached, done, file, stays, merge, sent, killing, timed_out, cancelled, reaped, failed;
    bool orphan;                     /* nobody will tell of its process, but itself */
    uint32_t id;
    char *key;
    struct place at;                 /* its process and its leaf cgroup */
    int status;
    int in_fd, status_fd;
    int lent[2];                     /* write ends of its output, until its process ends */
    struct outstream out[2];
    struct buf in, report, result;   /* unsent stdin, the child's report, the final frame */
    bool in_eof, result_sent;
    uint64_t started, timeout, idle, deadline, drain_idle, drain_end, kill_end, oom_before, duration;
    uint64_t finished_seq;
    struct session *session;
    struct dial dial;
    bool session_fresh, session_ended;
    uint32_t rows, cols;             /* of its terminal; 0: it has none */
    int tty_fd;                      /* the command's end, so that the line stays up */
    bool mid_line, hung_up;          /* input typed so far ends inside a line */
    uint64_t hangup_at, in_total;    /* bytes of input that came */
    uint8_t waiting[SIGNALS_MAX];
    int waiting_count;
};
extern struct op ops[OPS_MAX];
extern int ops_top;
extern uint32_t next_id;
extern bool finished_now;
struct op *op_by_id(uint32_t id);
struct op *op_admit(uint32_t id);
void op_free(struct op *op);
void op_start(uint32_t id, const uint8_t *p, size_t n, bool file);
int op_pipes(struct op *op, const uint8_t *p, size_t n, int kind, bool with_stdin);
void op_launched(uint32_t slot, int32_t pid);
void op_reaped(const struct end *end);
void op_exited(struct op *op, int status);
void op_kill(struct op *op);
void op_tick(struct op *op, uint64_t now);
uint64_t op_next_due(const struct op *op, uint64_t now);
void op_read(struct op *op, int which);
void op_read_report(struct op *op);
void op_write_stdin(struct op *op);
void op_pump(struct op *op);
bool op_awaits_process(const struct op *op);
void op_close_lent(struct op *op);
bool op_drain(struct op *op);
void op_refuse(uint32_t id, const char *code, const char *field, const char *message);
void op_input(struct op *op, const uint8_t *p, size_t n);
void op_input_end(struct op *op);
void op_signal(struct op *op, int sig);
void op_rewind(struct op *op);
void op_send_signals(struct op *op);
uint64_t op_limit(const struct op *op);
bool op_has_begun(const struct op *op);
bool has_begun(pid_t pid);
void op_lost(int leaf);
void op_settle(struct op *op);
void ops_leave(void);
bool op_is_unbegun(pid_t pid);
bool op_waits(const struct op *op, uint64_t now);
void ops_disconnected(void);
void ops_list(struct buf *b);
void hangup_tick(struct op *op, uint64_t now);

/* ---- pause.c: the commands' clock ---- */
extern uint64_t paused_at;
void ops_pause(void);
void ops_resume(void);
uint64_t op_ran(const struct op *op, uint64_t now);

/* ---- policy.c: what a command gives up before it is executed ---- */
extern uint64_t policy_number;      /* of the policy in force: another one, another number */
extern uint64_t policy_sent;        /* as well, of the message that it came by; 0: there is none */
void policy_message(uint32_t id, const uint8_t *p, size_t n, const int *fds, int count);
int policy_fds(struct launch *l);    /* sets both of l, -1 where there is none */
void policy_take(struct policy *p, struct launch *l); /* of a nest, once */
void policy_read(struct policy *p, const struct launch *l);
void policy_apply(const struct launch *l, const struct policy *p);

/* ---- dial.c: connections to ports ---- */
void dial_start(uint32_t id, const uint8_t *p, size_t n);
void dial_answered(struct op *op);
void dial_came(struct op *op);
void dial_ack(int fd);
void dial_output_end(struct op *op, int err);
void dial_abort(struct op *op);
void dial_tick(struct op *op, uint64_t now);
uint64_t dial_next_due(const struct op *op);

/* ---- pty.c: commands on a terminal ---- */
int pty_fds(struct op *op, struct launch *l, bool with_stdin);
void pty_take(const struct user *u);
void pty_resize(struct op *op, const uint8_t *p, size_t n);
void pty_input_end(struct op *op);
bool pty_waits(const struct op *op);

/* ---- session.c: shells that live on between commands ---- */
struct session {
    bool used, started, dead, orphan;
    char name[65], user[65];
    uint64_t policy;                 /* its number, when the shell began */
    struct place at;
    int ctl_fd, text_fd, state_fd;   /* go lines, the command's text, exit codes */
    int out_fd, err_fd;
    struct op *current;
    struct pids before, told;        /* there before the command; got its interrupt */
    bool in_text;                    /* the shell said that it begins */
    bool sweeping, swept;            /* it was told to reap; it did */
    uint64_t interrupt_at;           /* when an interrupt is repeated; 0: there is none */
    uint64_t leave_end;              /* the shell has left its text by then, or goes */
};
extern struct session sessions[SESSIONS_MAX];
int session_exec(struct op *op, const uint8_t *p, size_t n);
bool session_launched(uint32_t slot, int32_t pid);
void session_reaped(const struct end *end);
void session_state(struct session *s);
void session_op_over(struct op *op);
bool session_tree_gone(const struct op *op);
bool session_queued(const struct op *op);
void session_end(struct session *s);
void session_settle(struct session *s);

/* ---- leave.c: ending a session's command, not its shell ---- */
#define LEAVE_SIGNAL 64              /* makes the shell leave the text it runs */
void session_begins(struct session *s);
void session_leave(struct session *s);
bool session_left(struct session *s);
void session_signal(struct session *s, int sig);
void session_tick(const struct op *op, uint64_t now);

/* ---- setup.c: what the edge hands over ---- */
extern bool set_up;                  /* SETUP succeeded once */
void setup_message(uint32_t id, const uint8_t *p, size_t n, const int *fds, int count);

/* ---- channel.c: the one connection ---- */
extern int listen_fd, conn_fd;
extern struct buf conn_out;
extern const char *generation;
int channel_listen(const char *path);
void channel_accept(void);
void channel_read(void);
void channel_write(void);
void channel_close(void);
void channel_go_on(void);            /* takes requests that waited for room in the output */
void channel_rest(void);             /* nothing runs: large buffers are given back */
bool channel_full(void);
bool channel_ready(void);            /* HELLO was exchanged */
void send_frame(uint8_t type, uint32_t id, const void *p, size_t n);
void send_data(uint32_t id, uint8_t stream, const void *p, size_t n);
uint8_t *data_room(size_t n);
void data_written(uint32_t id, uint8_t stream, size_t n);
void fatal(const char *fmt, ...) __attribute__((noreturn, format(printf, 1, 2)));

#endif
