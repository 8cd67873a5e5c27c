/* Answers a line with its findings. A line "dirty" changes state of every kind. It is built without
 * a C library's buffering, so each request is one read and one write. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define SIZE (1 << 16)

/* The rounding of numbers, and registers beside those that a signal frame holds. arm64 has none of
 * the latter. */
#ifdef __aarch64__
static unsigned long rounding_mode(void) {
    unsigned long control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control & 0xc00000;
}
static void round_to_zero(void) { __asm__ volatile("msr fpcr, %0" ::"r"(0xc00000UL)); }
static void set_base(unsigned long base) { (void)base; }
static unsigned long base_(void) { return 0x42000; }
static void set_segment(unsigned segment) { (void)segment; }
static unsigned segment_(void) { return 0; }
#else
#include <immintrin.h>
static unsigned long rounding_mode(void) { return _mm_getcsr() & 0x6000; }
static void round_to_zero(void) { _mm_setcsr(_mm_getcsr() | 0x6000); }
static void set_base(unsigned long base) { __asm__ volatile("wrgsbase %0" ::"r"(base)); }
static unsigned long base_(void) {
    unsigned long base;
    __asm__ volatile("rdgsbase %0" : "=r"(base));
    return base;
}
static void set_segment(unsigned segment) { __asm__ volatile("mov %0, %%es" ::"r"(segment)); }
static unsigned segment_(void) {
    unsigned segment;
    __asm__ volatile("mov %%es, %0" : "=r"(segment));
    return segment;
}
#endif

static int data = 42;
static int zero[1000];
static const char text[] = "constant";
static __thread int local = 5;
static char *heap, *map, *shut, *left;
static int file, stream[2], mail[2];
static unsigned long calls;

static int ready(int fd) {
    struct pollfd poll_ = {fd, POLLIN};
    return poll(&poll_, 1, 0);
}

/* A message with the file's descriptor. */
static void give(int to) {
    char byte = 'x', control[CMSG_SPACE(sizeof file)] = {0};
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET, rights->cmsg_type = SCM_RIGHTS, rights->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(rights), &file, sizeof file);
    sendmsg(to, &message, 0);
}

static void look(char *out, char *stack) {
    char where[256] = "?", name[32] = "?", bytes[64] = {0};
    struct sigaction action;
    sigset_t mask;
    sigaction(SIGUSR1, 0, &action);
    sigprocmask(0, 0, &mask);
    prctl(PR_GET_NAME, name);
    pread(file, bytes, 63, 0);
    unsigned long rounding = rounding_mode(), far_ = base_();
    unsigned segment = segment_();
    struct rlimit files;
    struct itimerspec left_ = {0};
    getrlimit(RLIMIT_NOFILE, &files);
    long timer = syscall(SYS_timer_gettime, 0, &left_);
    mode_t old = umask(0);
    umask(old);
    sprintf(out,
            "calls %lu data %d zero %d local %d heap %s map %d stack %d brk %d env %s cwd %s file %s at %ld "
            "made %d new fd %d gone %d host %d usr1 %d mask %d name %s rounding %lu gs %lx es %x umask %o protected %d left %d sent %d %d timer %ld files %d named %d\n",
            ++calls, data, zero[777], local, heap, map[12345], stack[100], sbrk(0) != heap + 0 ? (int)((long)sbrk(0) & 0xffff) : 0,
            getenv("CANARY"), getcwd(where, 256), bytes, (long)lseek(file, 0, SEEK_CUR), access("/tmp/made", F_OK) == 0,
            fcntl(file + 1, F_GETFD), access("/usr/bin/env", F_OK) == 0, open("/usr/bin/env", O_WRONLY | O_CREAT | O_EXCL, 0600) >= 0,
            action.sa_handler != SIG_DFL, sigismember(&mask, SIGUSR2), name, rounding, far_, segment, (unsigned)old,
            access("/proc/self", F_OK) == 0, left ? left[0] + left[(1 << 20) - 1] : 0,
            ready(stream[1]), ready(mail[1]), timer, (int)files.rlim_cur, access("/tmp/named", F_OK) == 0);
}

static void dirty(char *stack) {
    data = 1, zero[777] = 2, local = 3, calls += 100;
    strcpy(heap, "dirty");
    map[12345] = 4, stack[100] = 5;
    sbrk(1 << 20);
    memset((char *)sbrk(0) - 1000, 6, 1000);
    putenv("CANARY=dirty");
    mkdir("/tmp/directory", 0700), chdir("/tmp/directory");
    pwrite(file, "dirty", 5, 0), lseek(file, 3, SEEK_SET);
    close(open("/tmp/made", O_CREAT | O_WRONLY, 0600));
    dup(file), open("/dev/null", O_RDONLY);
    unlink("/usr/bin/env");
    signal(SIGUSR1, SIG_IGN);
    sigset_t mask;
    sigemptyset(&mask), sigaddset(&mask, SIGUSR2), sigprocmask(SIG_BLOCK, &mask, 0);
    prctl(PR_SET_NAME, "dirty");
    /* Descriptors of each kind, data in flight, a timer without handler, a limit, a local name. */
    give(stream[0]), give(mail[0]);
    signalfd(-1, &mask, 0), syscall(SYS_pidfd_open, getpid(), 0), open("/proc/self/fd", O_RDONLY | O_DIRECTORY);
    struct sockaddr_un name = {AF_UNIX, "/tmp/named"};
    bind(socket(AF_UNIX, SOCK_DGRAM, 0), (struct sockaddr *)&name, sizeof name);
    struct sigevent nobody = {.sigev_notify = SIGEV_NONE};
    struct itimerspec late = {{0, 0}, {3600, 0}};
    int id;
    syscall(SYS_timer_create, CLOCK_MONOTONIC, &nobody, &id), syscall(SYS_timer_settime, id, 0, &late, 0);
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){100, 200});
    round_to_zero();
    set_base(0x1234000UL);
    set_segment(0x2b);
    umask(077);
    /* Mappings: one new, one half unmapped, one with another protection, one emptied, one moved. */
    left = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(left, 7, 1 << 20);
    munmap(map + SIZE / 2, 8192);
    mprotect(map + SIZE / 4, 4096, PROT_READ);
    madvise(map + SIZE / 4 + 8192, 8192, MADV_DONTNEED);
    mprotect(shut, 4096, PROT_READ | PROT_WRITE), shut[1] = 9;
    mprotect((void *)((unsigned long)text & -4096UL), 4096, PROT_READ | PROT_WRITE | PROT_EXEC), *(char *)text = 'C';
    mremap(map, 4096, 1 << 18, MREMAP_MAYMOVE);
    /* All of the stack, and all other memory that the stub leaves writable. */
    char deep[1 << 20];
    memset(deep, 8, sizeof deep);
    __asm__ volatile("" ::"r"(deep) : "memory");
    memset((char *)0x700000010000UL, 0xee, 4096);
    memset((char *)0x700000017000UL, 0xee, 8192);
}

int main(void) {
    static char in[4096], out[4096];
    char stack[4096] = {0};
    heap = malloc(100), strcpy(heap, "clean");
    map = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    shut = mmap(0, SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(map, 11, SIZE);
    setenv("CANARY", "clean", 1);
    mkdir("/tmp/clean", 0700), chdir("/tmp/clean");
    socketpair(AF_UNIX, SOCK_STREAM, 0, stream), socketpair(AF_UNIX, SOCK_DGRAM, 0, mail);
    file = open("/tmp/file", O_CREAT | O_RDWR, 0600), write(file, "clean", 5);
    set_base(0x42000UL);
    for (;;) {
        long n = read(0, in, sizeof in - 1);
        if (n <= 0) return 0;
        in[n] = 0;
        if (!strncmp(in, "dirty", 5)) {
            dirty(stack);
            write(1, "done\n", 5);
        } else if (!strncmp(in, "where", 5)) {
            char at[32];
            data = 123;
            write(1, at, sprintf(at, "%lu", (unsigned long)&data));
        } else if (!strncmp(in, "reserve", 7)) {
            /* Memory that was not touched yet. */
            left = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            write(1, "done\n", 5);
        } else if (!strncmp(in, "poke", 4)) {
            /* Only writes, also where an earlier call changed the map. */
            for (int i = 0; i < SIZE; i += 512) map[i] = 99;
            memset(stack, 98, sizeof stack), data = 97, heap[0] = 'D';
            write(1, "done\n", 5);
        } else if (!strncmp(in, "scribble", 8)) {
            /* State that earlier calls must not change. */
            data = 97, heap[0] = 'D', map[12345] = 99;
            if (left) left[0] = 3;
            memset(stack, 98, sizeof stack), memset(map + SIZE - 8192, 55, 8192);
            memset((char *)sbrk(4096) - 512, 5, 512);
            write(1, "done\n", 5);
        } else if (!strncmp(in, "exit", 4)) {
            dirty(stack);
            return 7;
        } else if (!strncmp(in, "abort", 5)) {
            dirty(stack);
            abort();
        } else if (!strncmp(in, "crash", 5)) {
            dirty(stack);
            *(volatile int *)8 = 1;
        } else if (!strncmp(in, "loop", 4)) {
            dirty(stack);
            for (;;) __asm__ volatile("");
        } else if (!strncmp(in, "spin", 4)) {
            dirty(stack);
            for (;;) syscall(SYS_getppid), write(2, "x", 1);
        } else if (!strncmp(in, "sleep", 5)) {
            dirty(stack);
            sleep(1000);
        } else if (!strncmp(in, "wait", 4)) {
            syscall(SYS_futex, &data, 0, data, 0, 0, 0);
        } else if (!strncmp(in, "flood", 5)) {
            for (;;) write(1, out, sizeof out);
        } else if (!strncmp(in, "heavy", 5)) {
            char *much = malloc(40 << 20);
            memset(much, 1, 40 << 20);
            write(1, "heavy\n", 6);
        } else {
            look(out, stack);
            write(1, out, strlen(out));
        }
    }
}
