/* A decoy: what looks like the platform's own folder, in a place where nothing of the
 * platform is. Who opens or calls what is in it is told, by the edge, whose files these
 * are. A GUARD `d/FOLDER` names them on the host; they are taken before the sandbox's
 * namespace is entered and laid read-only over /run/dsec of the new root.
 */
#include "attach.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int decoy_take(char **rules)
{
    for (; *rules; rules++) {
        if (strncmp(*rules, "d/", 2))
            continue;
        int tree = (int)syscall(SYS_open_tree, AT_FDCWD, *rules + 1,
                                OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_SYMLINK_NOFOLLOW);
        struct mount_attr attr = {
            .attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC,
        };
        if (tree < 0 || syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attr, sizeof attr))
            fail("cannot take the decoy");
        return tree;
    }
    return -1;
}

/* An image whose /run is no folder, or that has a link there, does without. */
static int folder(int at, const char *name)
{
    struct open_how how = {
        .flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS,
    };
    if (mkdirat(at, name, 0755) && errno != EEXIST)
        return -1;
    return (int)syscall(SYS_openat2, at, name, &how, sizeof how);
}

void decoy_put(int root, int tree)
{
    int run = folder(root, "run");
    int at = run < 0 ? -1 : folder(run, "dsec");
    if (run >= 0)
        close(run);
    if (at < 0)
        close(tree);
    else
        put(tree, at, "the decoy");
}
