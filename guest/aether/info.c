/* What is said of a file: its kind, size, owner, times. */
#include "aether.h"

#include <sys/stat.h>

static char type_of(mode_t m)
{
    return S_ISREG(m) ? 'f' : S_ISDIR(m) ? 'd' : S_ISLNK(m) ? 'l' : S_ISFIFO(m) ? 'p'
         : S_ISSOCK(m) ? 's' : S_ISCHR(m) ? 'c' : 'b';
}

uint64_t ns_of(struct timespec t)
{
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

void put_info(struct buf *b, const char *name, const struct stat *st, const char *target)
{
    char type[2] = {type_of(st->st_mode), 0};
    put_str(b, T_NAME, name);
    put_str(b, T_TYPE, type);
    put_u64(b, T_SIZE, (uint64_t)st->st_size);
    put_u64(b, T_FMODE, st->st_mode & 07777);
    put_u64(b, T_UID, st->st_uid);
    put_u64(b, T_GID, st->st_gid);
    put_u64(b, T_MTIME_NS, ns_of(st->st_mtim));
    put_u64(b, T_CTIME_NS, ns_of(st->st_ctim));
    put_u64(b, T_INO, st->st_ino);
    put_u64(b, T_NLINK, st->st_nlink);
    if (target)
        put_str(b, T_TARGET, target);
}
