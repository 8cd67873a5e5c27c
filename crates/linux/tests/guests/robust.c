/* A child with many threads, whose robust lists are long, ends. It is announced before and after.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 500
#define ENTRIES 4096

struct head { void *next; long offset; void *pending; };
/* One list for all, beside the words of its mutexes. */
static struct entry { struct entry *next; long word; } list[ENTRIES];
static struct head heads[THREADS];
static pthread_barrier_t set;

static void *hold(void *head) {
    syscall(SYS_set_robust_list, head, sizeof(struct head));
    pthread_barrier_wait(&set);
    for (;;) pause();
}

static void child(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes), pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN);
    pthread_barrier_init(&set, 0, THREADS + 1);
    for (int i = 0; i < ENTRIES; i++) list[i].next = &list[(i + 1) % ENTRIES];
    for (int i = 0; i < THREADS; i++) {
        heads[i] = (struct head){list, 8, 0};
        if (pthread_create(&thread, &attributes, hold, heads + i)) _exit(2);
    }
    pthread_barrier_wait(&set);
    write(1, "ends\n", 5);
    _exit(7);
}

int main(void) {
    char in[64];
    int status;
    for (;;) {
        if (read(0, in, sizeof in) <= 0) return 0;
        pid_t pid = fork();
        if (pid == 0) child();
        waitpid(pid, &status, 0);
        write(1, WEXITSTATUS(status) == 7 ? "ended\n" : "wrong\n", 6);
    }
}
