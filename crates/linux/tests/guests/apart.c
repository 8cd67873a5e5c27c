// Processes that part: from a stop of their tracer's, and from a queue. It reads a line for each, and
// answers "held" to "look" once it has one of them.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void stays(void) { for (;;) pause(); }

// A tracee of a stopped process that continues before its tracer resumes it.
static int seized(void) {
    int status;
    pid_t child = fork();
    if (child == 0) stays();
    if (ptrace(PTRACE_SEIZE, child, 0, 0) || kill(child, SIGSTOP)) return 0;
    if (waitpid(child, &status, __WALL) != child) return 0;
    if (ptrace(PTRACE_CONT, child, 0, SIGSTOP) || waitpid(child, &status, __WALL) != child) return 0;
    return status >> 8 == (SIGSTOP | 0x80 << 8) && kill(child, SIGCONT) == 0;
}

// A notice of a queue that another process has closed.
static int queue(void) {
    static char cookie[32];
    struct mq_attr attributes = {0, 4, 64};
    struct sigevent event = {0};
    int open = syscall(SYS_mq_open, "apart", O_RDWR | O_CREAT, 0600, &attributes);
    event.sigev_notify = SIGEV_THREAD;
    event.sigev_signo = socket(AF_NETLINK, SOCK_RAW, 0);
    event.sigev_value.sival_ptr = cookie;
    if (syscall(SYS_mq_notify, open, &event) || syscall(SYS_mq_unlink, "apart")) return 0;
    if (syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0) == 0) { close(open); stays(); }
    while (fcntl(open, F_GETFD) >= 0) sched_yield();
    return 1;
}

int main(void) {
    char line[32];
    const char *held = "none";
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        int done = !strcmp(line, "seized") ? seized() : !strcmp(line, "queue") ? queue() : 0;
        if (done) held = "held";
        puts(strcmp(line, "look") ? done ? "done" : strerror(errno) : held);
        fflush(stdout);
    }
}
