// A guest whose second thread has made a child by vfork that has not called execve yet. The child
// uses its parent's memory, waits for a byte, counts, and waits again. At the end of a line `exec`
// it runs another program.
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int orders[2], answers[2];
static volatile int counted;

static void *lend(void *none) {
    if (vfork() == 0) {
        char order;
        while (read(orders[0], &order, 1) == 1) {
            if (order == 'e') {
                dup2(answers[1], 1);
                execl("/bin/sh", "sh", "-c", "echo sh; while read line; do :; done", (char *)0);
                _exit(127);
            }
            counted++;
            write(answers[1], "counted\n", 8);
        }
        _exit(0);
    }
    for (;;) pause();
}

int main(void) {
    char line[64], answer[64];
    pthread_t thread;
    pipe(orders), pipe(answers);
    pthread_create(&thread, 0, lend, 0);
    while (fgets(line, sizeof line, stdin)) {
        write(orders[1], line, 1);
        long length = read(answers[0], answer, sizeof answer - 1);
        answer[length < 0 ? 0 : length] = 0;
        printf("%d %s", counted, answer);
        fflush(stdout);
    }
    return 0;
}
