/* Protected paths, where the kernel takes LSM programs: on top of the mounts that hold them.
 *
 * A path is protected as what it is, the inode, so no other name, link, root or mount of it
 * is a way around: every hook looks at the object and at all folders above it, up to the
 * root of its file system. Whom it is about is known by the control group, or one above it.
 */
#include "kernel.h"
#include "sandboxes.h"

#define EPERM 1
#define FMODE_WRITE 2
#define LEVELS 32       /* folders above; what lies deeper is as its 32nd */
#define DENY_READ 1
#define DENY_WRITE 2

struct place { __u64 group, inode; __u32 device, pad; };
struct event {
    __u64 group, inode;
    __u32 device, pid, uid, denied;
    char comm[16];
};

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, 262144);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct place);
    __type(value, __u32);
} protections SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, 1 << 18);
} events SEC(".maps");

inline_always int deny(const struct place *at, __u32 denied)
{
    count(at->group);
    struct event *e = ring_reserve(&events, sizeof *e, 0);
    if (!e)
        return -EPERM;
    e->group = at->group;
    e->inode = at->inode;
    e->device = at->device;
    e->denied = denied;
    e->pid = current_pid_tgid() >> 32;
    e->uid = (__u32)current_uid_gid();
    current_comm(e->comm, sizeof e->comm);
    ring_submit(e, 0);
    return -EPERM;
}

inline_always int judge(struct dentry *d, __u32 wanted)
{
    struct place at = {.group = sandbox()};
    if (!at.group)
        return 0;
    for (int i = 0; i < LEVELS; i++) {
        struct inode *inode = d->d_inode;
        if (inode) {
            at.inode = inode->i_ino;
            at.device = inode->i_sb->s_dev;
            __u32 *denied = map_lookup(&protections, &at);
            if (denied && *denied & wanted)
                return deny(&at, *denied & wanted);
        }
        struct dentry *above = d->d_parent;
        if (above == d)
            break;
        d = above;
    }
    return 0;
}

#define HOOK(name) SEC("lsm/" #name) int on_##name(unsigned long long *ctx)
#define DENTRY(n) ((struct dentry *)ctx[n])
#define PATH(n) (((struct path *)ctx[n])->dentry)

HOOK(file_open)
{
    struct file *file = (struct file *)ctx[0];
    return judge(file->f_path.dentry, file->f_mode & FMODE_WRITE ? DENY_WRITE : DENY_READ);
}

HOOK(path_truncate) { return judge(PATH(0), DENY_WRITE); }
HOOK(path_chmod) { return judge(PATH(0), DENY_WRITE); }
HOOK(path_chown) { return judge(PATH(0), DENY_WRITE); }
HOOK(path_mknod) { return judge(PATH(0), DENY_WRITE); }
HOOK(path_mkdir) { return judge(PATH(0), DENY_WRITE); }
HOOK(path_symlink) { return judge(PATH(0), DENY_WRITE); }
HOOK(path_unlink) { return judge(DENTRY(1), DENY_WRITE); }
HOOK(path_rmdir) { return judge(DENTRY(1), DENY_WRITE); }

HOOK(path_link)
{
    int failed = judge(DENTRY(0), DENY_WRITE);
    return failed ? failed : judge(PATH(1), DENY_WRITE);
}

HOOK(path_rename)
{
    int failed = judge(DENTRY(1), DENY_WRITE);
    if (!failed)
        failed = judge(PATH(2), DENY_WRITE);
    return failed ? failed : judge(DENTRY(3), DENY_WRITE);
}

char LICENSE[] SEC("license") = "GPL";
