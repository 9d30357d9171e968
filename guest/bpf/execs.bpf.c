/* Programs of some names that sandboxes execute, with their arguments.
 *
 * Told when a program has taken its process over, once, so its arguments are those that it
 * will read; nobody waits. Other programs cost a comparison of their name, system calls
 * nothing.
 */
#include "kernel.h"
#include "sandboxes.h"

#define NAME 16
#define ARGUMENTS 1024  /* bytes of them; what is beyond is not told */

static long (*read_user)(void *to, __u32 size, const void *from) =
    (void *)BPF_FUNC_probe_read_user;

struct event {
    __u64 group;
    __u32 pid, uid, size, pad;
    char name[NAME];
    char arguments[ARGUMENTS];
};

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, 64);
    __type(key, char[NAME]);
    __type(value, __u32);
} programs SEC(".maps"); /* names of programs, as of processes */

struct {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, 1 << 18);
} events SEC(".maps");

SEC("tp_btf/sched_process_exec") int on_exec(unsigned long long *ctx)
{
    char name[NAME] = {0};
    current_comm(name, sizeof name);
    if (!map_lookup(&programs, name))
        return 0;
    __u64 group = sandbox();
    if (!group)
        return 0;
    struct event *e = ring_reserve(&events, sizeof *e, 0);
    if (!e) {
        count(group); /* lost */
        return 0;
    }
    struct mm_struct *mm = ((struct task_struct *)ctx[0])->mm;
    __u64 start = mm->arg_start, size = mm->arg_end - start;
    if (size > ARGUMENTS)
        size = ARGUMENTS;
    asm volatile("" : "+r"(size));
    if (size > ARGUMENTS || read_user(e->arguments, size, (const void *)start))
        size = 0;
    e->group = group;
    e->size = size;
    e->pid = current_pid_tgid() >> 32;
    e->uid = (__u32)current_uid_gid();
    e->pad = 0;
    __builtin_memcpy(e->name, name, NAME);
    ring_submit(e, 0);
    return 0;
}

char LICENSE[] SEC("license") = "GPL";
