/* A program that takes a flock in a tight loop, and one that waits for it in the kernel.
 *
 *   flock_loop PATH loop HELD GAP    hold for HELD microseconds, pause for GAP, for ever; prints "ready" first
 *   flock_loop PATH wait             for every line on stdin: take it, release it, print how many seconds that took
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void spin(double seconds) {
    double end = now() + seconds;
    while (now() < end) {
    }
}

int main(int count, char **words) {
    char line[16];
    if (count < 3) return 2;
    int fd = open(words[1], O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) return 1;
    if (!strcmp(words[2], "loop")) {
        double held = atof(words[3]) / 1e6, gap = atof(words[4]) / 1e6;
        puts("ready");
        fflush(stdout);
        for (;;) {
            flock(fd, LOCK_EX);
            spin(held);
            flock(fd, LOCK_UN);
            spin(gap);
        }
    }
    while (fgets(line, sizeof line, stdin)) {
        double began = now();
        flock(fd, LOCK_EX);
        double took = now() - began;
        flock(fd, LOCK_UN);
        printf("%.9f\n", took);
        fflush(stdout);
    }
    return 0;
}
