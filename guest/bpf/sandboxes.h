/* Whose a process is: by its control group, or one above it. */
#ifndef DSEC_SANDBOXES_H
#define DSEC_SANDBOXES_H

#include "dsec_bpf.h"

#define GROUPS 8        /* control groups above */

static __u64 (*ancestor_group)(int level) = (void *)BPF_FUNC_get_current_ancestor_cgroup_id;

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, 16384);
    __type(key, __u64);
    __type(value, __u64);
} sandboxes SEC(".maps"); /* control group → a count, of what the program says */

inline_always __u64 sandbox(void)
{
    for (int level = 1; level <= GROUPS; level++) {
        __u64 group = ancestor_group(level);
        if (!group)
            break;
        if (map_lookup(&sandboxes, &group))
            return group;
    }
    return 0;
}

inline_always void count(__u64 group)
{
    __u64 *counted = map_lookup(&sandboxes, &group);
    if (counted)
        __sync_fetch_and_add(counted, 1);
}

#endif
