// Rare uses of system calls, from the Linux Test Project. Each request names one. The answer is
// "ok" or the failure.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static char found[256];
#define CHECK(what) do { if (!(what) && !*found) sprintf(found, "%s (errno %d)", #what, errno); } while (0)
#define FAILS(call, error) do { errno = 0; CHECK((call) == -1 && errno == (error)); } while (0)

static volatile int handled;
static void handler(int number) { handled = handled * 100 + number; }

// A handler whose stack cannot be written is a fault, which another handler takes on another stack.
static void stacks(void) {
    static char stack[65536] __attribute__((aligned(4096)));
    struct sigaction on_it = {.sa_handler = handler, .sa_flags = SA_ONSTACK}, plain = {.sa_handler = handler};
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    sigaltstack(&alternate, 0), sigaction(SIGHUP, &on_it, 0), sigaction(SIGSEGV, &plain, 0);
    mprotect(stack, sizeof stack, PROT_READ);
    raise(SIGHUP);
    CHECK(handled == SIGSEGV);
    mprotect(stack, sizeof stack, PROT_READ | PROT_WRITE);
    raise(SIGHUP);
    CHECK(handled == SIGSEGV * 100 + SIGHUP);
}

#ifdef __x86_64__
// Single steps last across the returns of their handler, until the flag is cleared.
static volatile int stepped;
static void on_step(int number) { stepped++; }
static void steps(void) {
    struct sigaction action = {.sa_handler = on_step};
    sigaction(SIGTRAP, &action, 0);
    __asm__ volatile("sub $256, %%rsp; pushfq; orq $0x100, (%%rsp); popfq; nop; nop; nop; pushfq; andq $-257, (%%rsp); popfq; nop; nop; add $256, %%rsp" : : : "memory", "cc");
    CHECK(stepped == 6);
}
#else
static void steps(void) {}
#endif

// Memory that may be written may be read, by the kernel, too.
static void written(void) {
    int pipes[2], status;
    char byte[4];
    char *own = mmap(0, 4096, PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int *shared = mmap(0, 4096, PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    strcpy(own, "abc");
    CHECK(!pipe(pipes) && write(pipes[1], own, 4) == 4 && read(pipes[0], byte, 4) == 4 && !strcmp(byte, "abc"));
    if (!fork()) _exit((*shared = 5) - 5);
    CHECK(wait(&status) > 0 && !status && *shared == 5);
    CHECK(write(pipes[1], own, 4) == 4 && !ioctl(pipes[1], FIONREAD, &status) && status == 4);
}

// A stopped child does not run, its parent is notified, and the child is continued or killed.
static void stops(void) {
    int status, pipes[2];
    char byte;
    siginfo_t info;
    CHECK(!pipe(pipes));
    pid_t child = fork();
    if (!child) {
        raise(SIGSTOP);
        write(pipes[1], "1", 1);
        for (;;) getppid();
    }
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    CHECK(waitpid(child, &status, WUNTRACED | WNOHANG) == 0 && !ioctl(pipes[0], FIONREAD, &status) && status == 0);
    CHECK(!kill(child, SIGCONT) && waitpid(child, &status, WCONTINUED) == child && WIFCONTINUED(status));
    CHECK(read(pipes[0], &byte, 1) == 1);
    CHECK(!kill(child, SIGTSTP) && !waitid(P_PID, child, &info, WSTOPPED | WNOWAIT));
    CHECK(info.si_code == CLD_STOPPED && info.si_status == SIGTSTP && info.si_pid == child);
    CHECK(!kill(child, SIGTERM) && waitpid(child, &status, WNOHANG) == 0);
    CHECK(!kill(child, SIGCONT) && waitpid(child, &status, 0) == child && WTERMSIG(status) == SIGTERM);
    if (!(child = fork())) for (;;) pause();
    CHECK(!kill(child, SIGSTOP) && waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    CHECK(!kill(child, SIGKILL) && waitpid(child, &status, 0) == child && WTERMSIG(status) == SIGKILL);
    // Both signals arrive before the first is handled: the process ends without a stop.
    if (!(child = fork())) for (;;) pause();
    CHECK(!kill(child, SIGSTOP) && !kill(child, SIGKILL));
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

// A stopped process that is orphaned gets SIGHUP and SIGCONT.
static void orphans(void) {
    int status, pipes[2];
    char byte;
    CHECK(!pipe(pipes));
    pid_t leader = fork();
    if (!leader) {
        setsid();
        pid_t job = fork();
        if (!job) {
            setpgid(0, 0);
            raise(SIGSTOP);
            for (;;) pause();
        }
        CHECK(waitpid(job, &status, WUNTRACED) == job && WIFSTOPPED(status));
        _exit(7);
    }
    CHECK(waitpid(leader, &status, 0) == leader && WEXITSTATUS(status) == 7);
    CHECK(!close(pipes[1]) && read(pipes[0], &byte, 1) == 0 && !close(pipes[0]));
}

// One call transfers many bytes of a file.
static void much(void) {
    enum { LEN = 5 << 20 };
    char *bytes = mmap(0, 2 * LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int file = open("/tmp/much", O_RDWR | O_CREAT, 0600);
    memset(bytes, 7, LEN);
    CHECK(write(file, bytes, LEN) == LEN && pread(file, bytes + LEN, LEN, 0) == LEN && !memcmp(bytes, bytes + LEN, LEN));
    CHECK(pread(file, bytes, 2 * LEN, 10) == LEN - 10 && pread(file, bytes, LEN, LEN) == 0 && pread(file, bytes, LEN, 2 * LEN) == 0);
    CHECK(!close(file) && !unlink("/tmp/much"));
}

static void errors(void) {
    int pipes[2], sockets[2], len = -1;
    struct iovec bad = {found, -1};
    char link[8];
    CHECK(!pipe(pipes) && !socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
    int file = open("/tmp/odd", O_RDWR | O_CREAT, 0600), named = open("/tmp/odd", O_PATH);
    FAILS(syscall(SYS_dup3, 999, 999, 0), EINVAL);
    FAILS(posix_fadvise(pipes[0], 0, 0, 0) ? (errno = ESPIPE, -1) : 0, ESPIPE);
    FAILS(fdatasync(pipes[1]), EINVAL);
    FAILS(fchmod(named, 0600), EBADF);
    FAILS(open("", O_RDONLY), ENOENT);
    FAILS(fchmodat(file, "", 0600, 0), ENOENT);
    FAILS(readlink("/proc/self/exe", link, 0), EINVAL);
    FAILS(readv(file, &bad, 1), EINVAL);
    FAILS(syscall(SYS_preadv, file, &bad, 1, -1, -1), EINVAL);
    FAILS(syscall(SYS_getrandom, link, 8, 0xffff), EINVAL);
    FAILS(syscall(SYS_getrusage, -2, found + 100), EINVAL);
    FAILS(syscall(SYS_gettimeofday, 0, (void *)8), EFAULT);
    FAILS(getpeername(sockets[0], (void *)found, (void *)&len), EINVAL);
    FAILS(setsockopt(sockets[0], 500, 1, &len, 4), EOPNOTSUPP);
    FAILS(setsockopt(socket(AF_INET, SOCK_STREAM, 0), 500, 1, &len, 4), ENOPROTOOPT);
    FAILS(recv(sockets[0], link, 1, MSG_OOB), EINVAL);
    FAILS(shutdown(socket(AF_INET, SOCK_STREAM, 0), 9), EINVAL);
    FAILS(syscall(SYS_tkill, -1, SIGTERM), EINVAL);
    FAILS(waitpid(-1, 0, -1), EINVAL);
    FAILS(syscall(SYS_statx, AT_FDCWD, "/tmp", -1, 0, found), EINVAL);
    FAILS(syscall(SYS_clock_nanosleep, CLOCK_THREAD_CPUTIME_ID, 0, found, 0), EOPNOTSUPP);
    CHECK(!unlink("/tmp/odd"));
}

int main(void) {
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        *found = 0;
        if (!strcmp(line, "stacks\n")) stacks();
        if (!strcmp(line, "steps\n")) steps();
        if (*line == 'w') written();
        if (*line == 'e') errors();
        if (*line == 'h') stops();
        if (*line == 'm') much();
        if (*line == 'o') orphans();
        printf("%s\n", *found ? found : "ok");
        fflush(stdout);
    }
}
