// Processes that part: from a stop of their tracer's, from a queue, from shared descriptors, and
// from borrowed memory. It reads a line for each, and answers "held" to "look" once it has one of
// them.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define ALL_DESCRIPTORS (1 << 18)
#define SAYS 100

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

// Processes with shared descriptors that make copies of them, as `how` says. Returns whether the
// limit for all processes holds.
static int copies(int how) {
    struct rlimit limit = {1 << 16, 1 << 16};
    setrlimit(RLIMIT_NOFILE, &limit);
    int ends[2], count = 0, copied = 0, each = 50000;
    pipe(ends);
    while (count < each && dup(0) >= 0) count++;
    pid_t all[8];
    int go[2];
    pipe(go);
    for (int i = 0; i < 8; i++) {
        all[i] = syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0);
        if (all[i] == 0) {
            char answer;
            read(go[0], &answer, 1);
            long made = how == 0 ? unshare(CLONE_FILES) : how == 1 ? syscall(SYS_close_range, 1 << 30, 1 << 30, 2) : execl("/proc/self/exe", "apart", "waits", NULL);
            answer = made == 0 ? 'y' : errno == ENFILE ? 'n' : '?';
            write(ends[1], &answer, 1);
            stays();
        }
    }
    for (int i = 0; i < 8; i++) {
        char answer = 'y';
        write(go[1], "g", 1);
        if (how < 2 || (i + 1) * each + count > ALL_DESCRIPTORS - 1000) read(ends[0], &answer, 1);
        if (answer == '?') return 0;
        copied += answer == 'y';
    }
    for (int i = 0; i < 8; i++) kill(all[i], SIGKILL), waitpid(all[i], NULL, 0);
    syscall(SYS_close_range, 3, ~0U, 0);
    return (copied + 1) * each <= ALL_DESCRIPTORS && copied > 1;
}

static char stack[1 << 16];
static volatile int rests;

// Leaves borrowed memory once its owner waits: for another program, or by its end.
static int leaves(void *runs) {
    pid_t own = getpid();
    write(SAYS, &own, sizeof own);
    while (!rests) sched_yield();
    for (int i = 0; i < 100; i++) sched_yield();
    if (runs) execl("/proc/self/exe", "apart", "says", NULL);
    _exit(0);
}

// An owner of memory that sleeps, or is stopped in its vfork, after its borrower has left.
static int borrower(int runs, int vforks) {
    int ends[2];
    pid_t child;
    char said;
    pipe(ends);
    dup2(ends[1], SAYS);
    if (fork() == 0) {
        void *how = runs ? &child : NULL;
        rests = vforks;
        if (!vforks) clone(leaves, stack + sizeof stack - 64, CLONE_VM | CLONE_PARENT | SIGCHLD, how);
        else if (vfork() == 0) kill(getppid(), SIGSTOP), leaves(how);
        rests = 1;
        stays();
    }
    if (read(ends[0], &child, sizeof child) != sizeof child) return 0;
    if (runs) return read(ends[0], &said, 1) == 1;
    struct pollfd ended = {syscall(SYS_pidfd_open, child, 0), POLLIN};
    return ended.fd >= 0 && poll(&ended, 1, -1) == 1;
}

int main(int argc, char **argv) {
    char line[32];
    const char *held = "none";
    if (argc > 1 && !strcmp(argv[1], "says")) write(SAYS, "x", 1);
    if (argc > 1) stays();
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        int done = !strcmp(line, "seized") ? seized() : !strcmp(line, "queue") ? queue() : 0;
        if (!strcmp(line, "copies")) done = copies(0) && copies(1) && copies(2);
        if (!strncmp(line, "borrower", 8)) done = borrower(!!strstr(line, "runs"), !!strstr(line, "vfork"));
        if (done) held = "held";
        puts(strcmp(line, "look") ? done ? "done" : strerror(errno) : held);
        fflush(stdout);
    }
}
