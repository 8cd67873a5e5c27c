// Leases of files: which are given, and what an open that conflicts waits for. It prints results,
// which are the same on Linux itself.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void say(const char *what, long value) {
    if (value < 0) printf("%s: %s\n", what, strerrorname_np(errno));
    else printf("%s: %ld\n", what, value);
}

static char path[] = "/tmp/leaseXXXXXX";
static volatile int *shared;
static int held;

// Gives the lease up after a while, so that the other process waits.
static void released(int signal) {
    (void)signal;
    struct timespec pause = {0, 50000000};
    shared[0]++, nanosleep(&pause, 0), shared[1]++, fcntl(held, F_SETLEASE, F_UNLCK);
}

static void downgraded(int signal) {
    (void)signal;
    shared[0]++, fcntl(held, F_SETLEASE, F_RDLCK);
}

static void conflict(const char *what, int kind, void (*handler)(int), int flags) {
    int ready[2];
    pipe(ready), shared[0] = shared[1] = 0, fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct sigaction action = {.sa_handler = handler};
        sigaction(SIGIO, &action, 0), held = open(path, O_RDONLY);
        write(ready[1], fcntl(held, F_SETLEASE, kind) == 0 ? "y" : "n", 1);
        while (!shared[2]) usleep(1000);
        _exit(fcntl(held, F_GETLEASE));
    }
    char byte;
    int status;
    read(ready[0], &byte, 1), printf("%s: %c\n", what, byte);
    int file = open(path, flags);
    say("open", file < 0 ? -1 : 0);
    // An open that does not wait returns before the holder runs.
    if (file >= 0) printf("notified %d, released %d\n", shared[0], shared[1]);
    shared[2] = 1, kill(child, SIGIO), waitpid(child, &status, 0), shared[2] = 0, printf("kind %d\n", WEXITSTATUS(status));
    close(file), close(ready[0]), close(ready[1]);
}

static void counted(int signal) { (void)signal, shared[0]++; }

static void late(int signal) { (void)signal, _exit(0); }

// An open that conflicts with a lease of its own process: it waits on after the handler.
static void conflict_with_itself(void) {
    shared[0] = 0, fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct sigaction action = {.sa_handler = counted, .sa_flags = SA_RESTART};
        sigaction(SIGIO, &action, 0), action.sa_handler = late, sigaction(SIGALRM, &action, 0);
        held = open(path, O_RDWR);
        if (fcntl(held, F_SETLEASE, F_WRLCK)) _exit(1);
        alarm(1), open(path, O_RDONLY), _exit(2);
    }
    int status;
    waitpid(child, &status, 0), printf("own open: notified %d, status %d\n", shared[0], status);
}

int main(void) {
    shared = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int both = mkstemp(path);
    say("kind at first", fcntl(both, F_GETLEASE)), say("read lease of a writer", fcntl(both, F_SETLEASE, F_RDLCK)), say("no lease to give up", fcntl(both, F_SETLEASE, F_UNLCK));
    say("write lease", fcntl(both, F_SETLEASE, F_WRLCK)), say("kind", fcntl(both, F_GETLEASE)), say("of a copy", fcntl(dup(both), F_GETLEASE)), say("unknown", fcntl(both, F_SETLEASE, 9));
    say("given up", fcntl(both, F_SETLEASE, F_UNLCK)), say("kind then", fcntl(both, F_GETLEASE));
    int reader = open(path, O_RDONLY);
    say("write lease beside a reader", fcntl(both, F_SETLEASE, F_WRLCK)), say("read lease beside a writer", fcntl(reader, F_SETLEASE, F_RDLCK));
    int folder = open("/tmp", O_RDONLY), pipes[2];
    pipe(pipes), say("of a pipe", fcntl(pipes[0], F_SETLEASE, F_RDLCK));
    (void)folder;
    for (int n = 3; n < 20; n++) close(n);
    reader = open(path, O_RDONLY);
    int other = open(path, O_RDONLY);
    say("two read leases", fcntl(reader, F_SETLEASE, F_RDLCK)), say("the other", fcntl(other, F_SETLEASE, F_RDLCK)), say("to write", fcntl(other, F_SETLEASE, F_WRLCK));
    struct flock lock = {.l_type = F_RDLCK};
    say("a lock beside", fcntl(reader, F_SETLK, &lock)), close(reader), say("the other stays", fcntl(other, F_GETLEASE)), close(other);
    conflict("reader against a writer", F_WRLCK, released, O_RDONLY);
    conflict("reader against a writer that stays a reader", F_WRLCK, downgraded, O_RDONLY);
    conflict("writer against a reader", F_RDLCK, released, O_WRONLY);
    conflict("reader beside a reader", F_RDLCK, released, O_RDONLY);
    conflict("one that does not wait", F_RDLCK, released, O_WRONLY | O_NONBLOCK);
    conflict_with_itself();
    int last = open(path, O_RDWR);
    say("a lease after all", fcntl(last, F_SETLEASE, F_WRLCK)), unlink(path);
}
