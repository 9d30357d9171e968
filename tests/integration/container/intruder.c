/* What a process inside a sandbox may try on its agent; prints a line for each attempt
 * that succeeded, and "tried N" at the end. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/kcmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static int tried;

static void attempt(int pid, const char *what, int succeeded)
{
    tried++;
    if (succeeded)
        printf("%d %s\n", pid, what);
}

static void files_of(int pid)
{
    static const char *const files[] = {
        "environ", "mem", "maps", "smaps", "auxv", "pagemap", "stack", "syscall", "io",
        "personality", "numa_maps",
    };
    static const char *const links[] = {"exe", "cwd", "root", "ns/mnt", "ns/pid", "ns/user"};
    char path[128], text[256];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", pid, files[i]);
        int fd = open(path, O_RDONLY);
        attempt(pid, files[i], fd >= 0 && read(fd, text, 1) > 0);
        if (fd >= 0)
            close(fd);
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", pid, links[i]);
        attempt(pid, links[i], readlink(path, text, sizeof text) > 0);
        int fd = open(path, O_RDONLY | O_NONBLOCK);
        attempt(pid, links[i], fd >= 0);
        if (fd >= 0)
            close(fd);
    }
    snprintf(path, sizeof path, "/proc/%d/mem", pid);
    int fd = open(path, O_RDWR);
    attempt(pid, "mem for writing", fd >= 0);
    if (fd >= 0)
        close(fd);
}

/* The numbers of descriptors are no secret, what is behind them is. */
static void descriptors_of(int pid)
{
    static const char *const folders[] = {"fd", "fdinfo", "map_files", "task"};
    char path[384], text[256];
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", pid, folders[i]);
        DIR *dir = opendir(path);
        for (struct dirent *e; dir && (e = readdir(dir));) {
            if (e->d_name[0] == '.')
                continue;
            snprintf(path, sizeof path, "/proc/%d/%s/%s%s", pid, folders[i], e->d_name,
                     i == 3 ? "/environ" : "");
            int fd = open(path, O_RDONLY | O_NONBLOCK);
            attempt(pid, folders[i], fd >= 0 && (i != 3 || read(fd, text, 1) > 0));
            attempt(pid, folders[i], readlink(path, text, sizeof text) > 0);
            if (fd >= 0)
                close(fd);
        }
        if (dir)
            closedir(dir);
    }
}

static void calls_on(int pid)
{
    char byte;
    struct iovec mine = {&byte, 1}, theirs = {(void *)0x400000, 1};
    struct rlimit limit = {0, 0};
    attempt(pid, "ptrace attach", !ptrace(PTRACE_ATTACH, pid, 0, 0));
    attempt(pid, "ptrace seize", !ptrace(PTRACE_SEIZE, pid, 0, 0));
    attempt(pid, "process_vm_readv", process_vm_readv(pid, &mine, 1, &theirs, 1, 0) > 0);
    attempt(pid, "process_vm_writev", process_vm_writev(pid, &mine, 1, &theirs, 1, 0) > 0);
    attempt(pid, "kcmp", syscall(SYS_kcmp, pid, getpid(), KCMP_VM, 0, 0) >= 0);
    attempt(pid, "prlimit nofile", !prlimit(pid, RLIMIT_NOFILE, &limit, NULL));
    attempt(pid, "prlimit cpu", !prlimit(pid, RLIMIT_CPU, &limit, NULL));
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    for (int fd = 0; pidfd >= 0 && fd < 32; fd++)
        attempt(pid, "pidfd_getfd", syscall(SYS_pidfd_getfd, pidfd, fd, 0) >= 0);
    if (pidfd >= 0)
        close(pidfd);
}

static int is_agent(int pid)
{
    char path[64], name[32] = "";
    snprintf(path, sizeof path, "/proc/%d/comm", pid);
    FILE *f = fopen(path, "r");
    if (f) {
        if (!fgets(name, sizeof name, f))
            name[0] = 0;
        fclose(f);
    }
    return !strcmp(name, "aether\n");
}

int main(void)
{
    int agents = 0;
    DIR *proc = opendir("/proc");
    for (struct dirent *e; proc && (e = readdir(proc));) {
        int pid = atoi(e->d_name);
        if (!isdigit((unsigned char)e->d_name[0]) || !is_agent(pid))
            continue;
        agents++;
        files_of(pid);
        descriptors_of(pid);
        calls_on(pid);
    }
    for (int round = 0; round < 3; round++)
        for (int sig = 1; sig <= 64; sig++)
            kill(1, sig);
    if (agents < 2)
        printf("only %d processes of the agent found\n", agents);
    printf("tried %s\n", tried > 100 ? "enough" : "too little");
    return 0;
}
