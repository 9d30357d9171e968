/* connects ROUNDS EACH  OFF_GROUP OFF_ADDRESS OFF_PORT  ON_GROUP ON_ADDRESS ON_PORT
 *
 * Connects over TCP from one control group and from another, EACH times in turn, ROUNDS times
 * over, and prints nanoseconds of a connect, accepted or refused: medians of all rounds' medians
 * of both, the median of the rounds' differences, the shortest of both. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static int by_value(const void *a, const void *b)
{
    long x = *(const long *)a, y = *(const long *)b;
    return x < y ? -1 : x > y;
}

static long median(long *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, by_value);
    return values[n / 2];
}

static void enter(const char *group)
{
    char path[512];
    snprintf(path, sizeof path, "%s/cgroup.procs", group);
    int fd = open(path, O_WRONLY);
    if (fd < 0 || write(fd, "0", 1) != 1) {
        perror(path);
        exit(1);
    }
    close(fd);
}

static long one(const struct sockaddr_in *to)
{
    struct timespec a, b;
    struct linger abort_it = {1, 0};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &abort_it, sizeof abort_it);
    clock_gettime(CLOCK_MONOTONIC, &a);
    int failed = connect(fd, (const void *)to, sizeof *to);
    clock_gettime(CLOCK_MONOTONIC, &b);
    if (failed && errno != ECONNREFUSED) {
        perror("connect");
        exit(1);
    }
    close(fd);
    return (b.tv_sec - a.tv_sec) * 1000000000L + b.tv_nsec - a.tv_nsec;
}

int main(int argc, char **argv)
{
    if (argc != 9)
        return 2;
    int rounds = atoi(argv[1]), each = atoi(argv[2]);
    long *took = calloc((size_t)each, sizeof *took), least[2] = {0, 0};
    long *medians[3];
    struct sockaddr_in to[2];
    for (int i = 0; i < 3; i++)
        medians[i] = calloc((size_t)rounds, sizeof **medians);
    for (int on = 0; on < 2; on++) {
        char **given = argv + 3 + 3 * on;
        to[on] = (struct sockaddr_in){.sin_family = AF_INET};
        to[on].sin_port = htons((unsigned short)atoi(given[2]));
        inet_pton(AF_INET, given[1], &to[on].sin_addr);
    }
    for (int r = -1; r < rounds; r++) { /* one to warm */
        for (int turn = 0; turn < 2; turn++) {
            int on = (turn + r) & 1;
            enter(argv[3 + 3 * on]);
            for (int i = 0; i < each; i++)
                took[i] = one(&to[on]);
            long middle = median(took, each);
            if (r < 0)
                continue;
            medians[on][r] = middle;
            if (!least[on] || took[0] < least[on])
                least[on] = took[0];
        }
        if (r >= 0)
            medians[2][r] = medians[1][r] - medians[0][r];
    }
    printf("%ld %ld %ld %ld %ld\n", median(medians[0], rounds), median(medians[1], rounds),
           median(medians[2], rounds), least[0], least[1]);
    return 0;
}
