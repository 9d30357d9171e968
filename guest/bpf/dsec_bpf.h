/* The few helpers and map macros that our programs use, so that they build from the
 * kernel's UAPI headers alone. Numbers are those of <linux/bpf.h>. */
#ifndef DSEC_BPF_H
#define DSEC_BPF_H

#include <linux/bpf.h>
#include <linux/types.h>

#define SEC(name) __attribute__((section(name), used))
#define inline_always static inline __attribute__((always_inline))
#define __uint(name, value) int (*name)[value]
#define __type(name, value) typeof(value) *name
#define htons(x) ((__u16)__builtin_bswap16(x))
#define htonl(x) ((__u32)__builtin_bswap32(x))

static void *(*map_lookup)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static long (*map_update)(void *map, const void *key, const void *value, __u64 flags) =
    (void *)BPF_FUNC_map_update_elem;
static __u64 (*ktime_ns)(void) = (void *)BPF_FUNC_ktime_get_ns;
static __u64 (*current_pid_tgid)(void) = (void *)BPF_FUNC_get_current_pid_tgid;
static __u64 (*current_uid_gid)(void) = (void *)BPF_FUNC_get_current_uid_gid;
static long (*current_comm)(void *buf, __u32 size) = (void *)BPF_FUNC_get_current_comm;
static __u64 (*netns_cookie)(void *ctx) = (void *)BPF_FUNC_get_netns_cookie;
static __u64 (*socket_cookie)(void *ctx) = (void *)BPF_FUNC_get_socket_cookie;
static long (*set_option)(void *ctx, int level, int name, void *value, int size) =
    (void *)BPF_FUNC_setsockopt;
static void *(*ring_reserve)(void *ring, __u64 size, __u64 flags) =
    (void *)BPF_FUNC_ringbuf_reserve;
static void (*ring_submit)(void *data, __u64 flags) = (void *)BPF_FUNC_ringbuf_submit;

#endif
