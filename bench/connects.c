/* connects ADDRESS PORT N: prints the median of N connects over TCP, in nanoseconds. */
#include <arpa/inet.h>
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

int main(int argc, char **argv)
{
    int n = argc > 3 ? atoi(argv[3]) : 0;
    long *took = calloc((size_t)n + 1, sizeof *took);
    struct linger abort_it = {1, 0};
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(argv[2]))};
    inet_pton(AF_INET, argv[1], &to.sin_addr);
    for (int i = 0; i < n; i++) {
        struct timespec a, b;
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &abort_it, sizeof abort_it);
        clock_gettime(CLOCK_MONOTONIC, &a);
        if (connect(fd, (void *)&to, sizeof to)) {
            perror("connect");
            return 1;
        }
        clock_gettime(CLOCK_MONOTONIC, &b);
        close(fd);
        took[i] = (b.tv_sec - a.tv_sec) * 1000000000L + b.tv_nsec - a.tv_nsec;
    }
    qsort(took, (size_t)n, sizeof *took, by_value);
    printf("%ld\n", took[n / 2]);
    return 0;
}
