/* The few kernel structures that our programs look into. Only the fields named here are
 * used, and the loader finds them in whatever kernel it meets. */
#ifndef DSEC_KERNEL_H
#define DSEC_KERNEL_H

#include <linux/types.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct super_block {
    __u32 s_dev;
};
struct inode {
    unsigned long i_ino;
    struct super_block *i_sb;
};
struct dentry {
    struct dentry *d_parent;
    struct inode *d_inode;
};
struct path {
    struct dentry *dentry;
};
struct file {
    struct path f_path;
    unsigned int f_mode;
};
struct mm_struct {
    unsigned long arg_start;
    unsigned long arg_end;
};
struct task_struct {
    struct mm_struct *mm;
};
#pragma clang attribute pop

#endif
