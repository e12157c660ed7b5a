/* The system calls of a lock with nothing around them.
 *
 *     floor keep|ephemeral PATH
 *
 * Reads a number of loops per line from standard input and answers each with the seconds they took.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void once(const char *path, int keep) {
    struct stat mine, named;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) || fstat(fd, &mine) || stat(path, &named)) exit(1);
    if (!keep && unlink(path)) exit(1);
    close(fd);
}

int main(int argc, char **argv) {
    char line[64];
    if (argc != 3) return 2;
    int keep = !strcmp(argv[1], "keep");
    while (fgets(line, sizeof line, stdin)) {
        long loops = atol(line);
        double begin = now();
        for (long i = 0; i < loops; i++) once(argv[2], keep);
        printf("%.9f\n", now() - begin);
        fflush(stdout);
    }
    return 0;
}
