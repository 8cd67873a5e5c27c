// Calls that write their results beyond the end of a file that is mapped: they fail, and the
// process survives. The answer to "calls", "full" and "half", which is a part of "full", is "ok" or
// the calls that did not fail. The answer to "where" is the address that "full" used, and that to
// "=ADDRESS" the byte there, or "gone". After a number the next line is read to a bad address.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/times.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define P 4096L
static char answer[4096];
#define FAULTS(name, ...) do { \
        errno = 0; \
        long done = syscall(__VA_ARGS__); \
        if (done != -1 || errno != EFAULT) \
            sprintf(answer + strlen(answer), name "=%ld/%d ", done, errno); \
    } while (0)
#define IS(what) do { if (!(what)) strcat(answer, #what " "); } while (0)

static char *file, *past, *kept;
static sigjmp_buf fault;
static const char constant[P] = "constant";

static void calls(void) {
    char bytes[64];
    int pipes[2], locals[2], packets[2], descriptor = open("/tmp/file", O_RDWR), folder = open("/tmp", O_RDONLY);
    pipe(pipes), socketpair(AF_UNIX, SOCK_STREAM, 0, locals), socketpair(AF_UNIX, SOCK_DGRAM, 0, packets);
    write(pipes[1], "pipe", 4), write(locals[1], "local", 5);
    symlink("target", "/tmp/link");
    struct iovec vector = {past, 8};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    FAULTS("read", SYS_read, descriptor, past, 8);
    FAULTS("pread", SYS_pread64, descriptor, past, 8, 0);
    FAULTS("readv", SYS_readv, descriptor, &vector, 1);
    FAULTS("preadv", SYS_preadv, descriptor, &vector, 1, 0, 0);
    FAULTS("pipe", SYS_read, pipes[0], past, 8);
    FAULTS("recvfrom", SYS_recvfrom, locals[0], past, 8, 0, 0, 0);
    FAULTS("recvmsg", SYS_recvmsg, locals[0], &message, 0);
    FAULTS("getdents64", SYS_getdents64, folder, past, P);
    FAULTS("readlink", SYS_readlinkat, AT_FDCWD, "/tmp/link", past, 64);
    FAULTS("getcwd", SYS_getcwd, past, 64);
    FAULTS("getrandom", SYS_getrandom, past, 8, 0);
    FAULTS("uname", SYS_uname, past);
    FAULTS("fstat", SYS_fstat, descriptor, past);
    FAULTS("statx", SYS_statx, descriptor, "", AT_EMPTY_PATH, STATX_ALL, past);
    FAULTS("clock_gettime", SYS_clock_gettime, CLOCK_MONOTONIC, past);
    FAULTS("getrusage", SYS_getrusage, RUSAGE_SELF, past);
    FAULTS("sysinfo", SYS_sysinfo, past);
    FAULTS("times", SYS_times, past);
    FAULTS("pipe2", SYS_pipe2, past, 0);
    FAULTS("socketpair", SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, past);
    FAULTS("getsockname", SYS_getsockname, locals[0], past, past + 64);
    FAULTS("sigaction", SYS_rt_sigaction, 10, 0, past, 8);
    FAULTS("poll", SYS_ppoll, past, 1, &(struct timespec){0}, 0, 8);
    // Nothing was taken, and no descriptor was left.
    int free = dup(0);
    IS(free == packets[1] + 1);
    IS(read(pipes[0], bytes, 8) == 4 && read(locals[0], bytes, 8) == 5);
    IS(lseek(descriptor, 0, SEEK_CUR) == 0 && read(folder, bytes, 0) <= 0);
    IS(syscall(SYS_getdents64, folder, file, P) > 0);
    unlink("/tmp/link");
    for (int n = 3; n < 32; ++n) close(n);
}

// A mapping without room for its page beyond the end leaves the earlier one unchanged.
static int fill(void) {
    int kind = MAP_PRIVATE | MAP_ANONYMOUS, descriptor = open("/tmp/file", O_RDWR);
    kept = mmap(0, 2 * P, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    // Each page is another mapping, up to the last that there may be.
    char *all = mmap(0, 60000 * P, PROT_NONE, kind, -1, 0);
    for (long n = 0; mprotect(all + n * P, P, n % 2 ? PROT_READ : PROT_WRITE) == 0; ++n) {}
    IS(mmap(kept, 2 * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, descriptor, 0) == MAP_FAILED && errno == ENOMEM);
    munmap(all, 60000 * P);
    kept[0] = 'h';
    return descriptor;
}

static void full(void) {
    int descriptor = fill();
    IS(read(descriptor, kept + P, 8) == 8);
    if (fork() == 0) kept[0] = 'k', _exit(0);
    wait(0);
    IS(kept[0] == 'k' && kept[P] == 'a');
    // It is shared, so its bytes stay.
    IS(madvise(kept, 2 * P, MADV_DONTNEED) == 0 && kept[0] == 'k' && kept[P] == 'a');
    close(descriptor);
}

static void faulted(int signal) {
    siglongjmp(fault, signal);
}

static void look(const volatile char *at) {
    if (sigsetjmp(fault, 1)) strcpy(answer, "gone\n");
    else sprintf(answer, "%d\n", *at);
}

int main(void) {
    signal(SIGSEGV, faulted);
    char page[P];
    memset(page, 'a', P);
    int descriptor = open("/tmp/file", O_RDWR | O_CREAT, 0600);
    write(descriptor, page, P);
    file = mmap(0, 2 * P, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0), past = file + P;
    close(descriptor);
    char *places[] = {past, past - 2, 0, (char *)constant, file};
    for (;;) {
        char line[64];
        ssize_t length = read(0, line, sizeof line - 1);
        if (length <= 0) return 0;
        line[length] = 0;
        answer[0] = 0;
        if (*line == 'c') {
            calls();
            strcat(answer, *answer ? "\n" : "ok\n");
        } else if (*line == 'f') {
            full();
            strcat(answer, *answer ? "\n" : "ok\n");
        } else if (*line == 'h') {
            close(fill());
            strcat(answer, *answer ? "\n" : "ok\n");
        } else if (*line == 'w') {
            sprintf(answer, "%lx\n", (long)kept);
        } else if (*line == '=') {
            look((char *)strtol(line + 1, 0, 16));
        } else if (*line >= '0' && *line <= '4') {
            write(1, "next\n", 5);
            errno = 0;
            length = read(0, places[*line - '0'], 32);
            if (length > 0) {
                sprintf(answer, "read %.*s", (int)length, file);
            } else {
                int error = errno;
                length = read(0, line, sizeof line - 1);
                sprintf(answer, "%d %.*s", error, (int)length, line);
            }
        }
        write(1, answer, strlen(answer));
    }
}
