// Promises of Linux that programs rely on: a word on standard input names some of them. The answer
// is "ok" or the failure.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <linux/openat2.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

static const char *failed;
#define CHECK(what) do { if (!(what) && !failed) failed = #what; } while (0)
#define FAILS(number, call) (errno = 0, (call) == -1 && errno == (number))

static char page[8192], other[8192];

static int file_of(const char *name, char byte) {
    unlink(name);
    int file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    memset(page, byte, sizeof page);
    CHECK(write(file, page, sizeof page) == sizeof page);
    return file;
}

/* Shared mappings follow the files, however those are written, and the other way around. */
static void shared(void) {
    int one = file_of("/tmp/one", 'A'), two = file_of("/tmp/two", 'B'), pipes[2];
    int reader = open("/tmp/one", O_RDONLY);
    volatile char *seen = mmap(0, 8192, PROT_READ, MAP_SHARED, reader, 0);
    CHECK(seen != MAP_FAILED && seen[0] == 'A' && seen[8191] == 'A');
    CHECK(pwrite(one, "x", 1, 4096) == 1 && seen[4096] == 'x' && seen[4097] == 'A');
    CHECK(lseek(one, 0, SEEK_SET) == 0 && write(one, memset(page, 'C', 8192), 8192) == 8192 && seen[0] == 'C' && seen[8191] == 'C');
    if (!fork()) _exit(pwrite(one, "child", 5, 0) != 5);
    int status;
    CHECK(wait(&status) > 0 && status == 0 && !memcmp((char *)seen, "child", 5));
    munmap((void *)seen, 8192);
    char *mapped = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, one, 0);
    loff_t from = 0, to = 0;
    CHECK(copy_file_range(two, &from, one, &to, 4096, 0) == 4096 && mapped[0] == 'B');
    memset(mapped, 'D', 4096), from = to = 0;
    CHECK(copy_file_range(one, &from, two, &to, 4096, 0) == 4096 && pread(two, other, 1, 0) == 1 && other[0] == 'D');
    memset(mapped, 'E', 4096);
    off_t offset = 0;
    CHECK(lseek(two, 0, SEEK_SET) == 0 && sendfile(two, one, &offset, 4096) == 4096 && pread(two, other, 1, 0) == 1 && other[0] == 'E');
    CHECK(pwrite(two, "F", 1, 0) == 1 && lseek(one, 0, SEEK_SET) == 0 && (offset = 0, sendfile(one, two, &offset, 100)) == 100 && mapped[0] == 'F' && mapped[1] == 'E');
    struct iovec piece = {memset(page, 'G', 4096), 4096};
    CHECK(pwritev2(one, &piece, 1, 0, 0) == 4096 && mapped[0] == 'G');
    memset(mapped, 'H', 4096), piece.iov_base = other;
    CHECK(preadv2(one, &piece, 1, 0, 0) == 4096 && other[4095] == 'H');
    CHECK(!pipe(pipes) && write(pipes[1], memset(page, 'I', 4096), 4096) == 4096);
    to = 0;
    CHECK(splice(pipes[0], 0, one, &to, 4096, 0) == 4096 && to == 4096 && mapped[0] == 'I');
    memset(mapped, 'J', 4096), from = 0;
    CHECK(splice(one, &from, pipes[1], 0, 4096, 0) == 4096 && read(pipes[0], other, 4096) == 4096 && other[4095] == 'J');
    /* It replaces nothing, with any other flags. */
    char *kept = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    kept[0] = 'k';
    CHECK(mmap(kept, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED && errno == EEXIST && kept[0] == 'k');
    munmap(mapped, 4096), munmap(kept, 4096);
    close(one), close(two), close(reader), close(pipes[0]), close(pipes[1]);
}

/* A number that is no call ends no process. */
static void numbers(void) {
    CHECK(FAILS(ENOSYS, syscall(-1)) && FAILS(ENOSYS, syscall(0x40000027)) && FAILS(ENOSYS, syscall(100000)));
#ifdef __x86_64__
    int status;
    if (!fork()) {
        long result;
        __asm__ volatile("int $0x80" : "=a"(result) : "a"(20L) : "memory");
        _exit(7);
    }
    CHECK(wait(&status) > 0 && (WIFSIGNALED(status) || WEXITSTATUS(status) == 7));
#endif
}

static volatile int depth, traps;
static volatile float zero;

static void on_signal(int signal) {
#ifdef __x86_64__
    traps = _mm_getcsr() & 0x1f80;
#endif
    volatile float result = 1 / zero; /* It would trap with the interrupted thread's settings. */
}

static char stack[16384];

/* Leaves room for `raise`, and for no frame of any processor. */
static void deeper(int signal) {
    char here;
    volatile char *rest = __builtin_alloca(&here - stack - 1024);
    rest[0] = depth++;
    raise(SIGUSR1);
}

/* A handler begins with the settings of a new program, and an alternate stack ends at its end. */
static void handlers(void) {
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGUSR1, &action, 0);
#ifdef __x86_64__
    unsigned before = _mm_getcsr();
    _mm_setcsr(before & ~0x1f80u);
    raise(SIGUSR1);
    CHECK(traps == 0x1f80 && (_mm_getcsr() & 0x1f80) == 0);
    _mm_setcsr(before);
#endif
    int status;
    if (!fork()) {
        stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
        struct sigaction nested = {.sa_handler = deeper, .sa_flags = SA_ONSTACK | SA_NODEFER};
        sigaltstack(&alternate, 0), sigaction(SIGUSR1, &nested, 0);
        alarm(20);
        raise(SIGUSR1);
        _exit(1);
    }
    CHECK(wait(&status) > 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    signal(SIGUSR1, SIG_DFL);
}

static volatile int ticks, rung, stops;

static void *tick(void *none) {
    struct timespec pause = {0, 1000000};
    for (int n = 0; n < 5; n++) nanosleep(&pause, 0), ticks++;
    return 0;
}

static void ring(int signal) { rung++; }

/* Calls without pause leave time for other threads, and for signals. */
static void fair(void) {
    pthread_t thread;
    signal(SIGALRM, ring);
    struct itimerval soon = {{0, 0}, {0, 20000}};
    CHECK(!pthread_create(&thread, 0, tick, 0) && !setitimer(ITIMER_REAL, &soon, 0));
    long calls = 0;
    while ((ticks < 5 || !rung) && calls < 20000000) syscall(SYS_getppid), calls++;
    CHECK(ticks == 5 && rung == 1);
    pthread_join(thread, 0);
    signal(SIGALRM, SIG_DFL);
}

static pthread_mutex_t *mutex;

static void *leave(void *none) { pthread_mutex_lock(mutex); return 0; }

/* A robust mutex survives its holder: a thread, a process that exits, and one that is killed while
 * others wait. */
static void robust(void) {
    mutex = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    CHECK(!pthread_mutex_init(mutex, &attributes));
    pthread_t thread;
    CHECK(!pthread_create(&thread, 0, leave, 0) && !pthread_join(thread, 0));
    CHECK(pthread_mutex_lock(mutex) == EOWNERDEAD && !pthread_mutex_consistent(mutex) && !pthread_mutex_unlock(mutex));
    for (int killed = 0; killed < 2; killed++) {
        int ready[2];
        char byte;
        CHECK(!pipe(ready));
        int child = fork();
        if (!child) {
            pthread_mutex_lock(mutex);
            CHECK(write(ready[1], "x", 1) == 1);
            usleep(20000);
            if (!killed) _exit(0);
            kill(getpid(), SIGKILL);
        }
        CHECK(read(ready[0], &byte, 1) == 1);
        CHECK(pthread_mutex_lock(mutex) == EOWNERDEAD && !pthread_mutex_consistent(mutex) && !pthread_mutex_unlock(mutex));
        CHECK(waitpid(child, 0, 0) == child);
        close(ready[0]), close(ready[1]);
    }
    void *head;
    size_t len;
    CHECK(!syscall(SYS_get_robust_list, 0, &head, &len) && head && len == 24);
    munmap(mutex, 4096);
}

static void connection(int *pair) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!bind(listener, (void *)&address, len) && !listen(listener, 1) && !getsockname(listener, (void *)&address, &len));
    pair[0] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!connect(pair[0], (void *)&address, len));
    pair[1] = accept(listener, 0, 0);
    close(listener);
}

static void send_descriptor(int socket, int descriptor, int len) {
    struct iovec piece = {page, len};
    char control[CMSG_SPACE(4)] = {0};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(4);
    memcpy(CMSG_DATA(header), &descriptor, 4);
    CHECK(sendmsg(socket, &message, 0) == len);
}

/* Resets, ends and hang-ups of connections, and default values of options. */
static void sockets(void) {
    int pair[2], error;
    char byte;
    socklen_t len = sizeof error;
    connection(pair);
    CHECK(send(pair[0], "x", 1, 0) == 1 && !close(pair[1]) && FAILS(ECONNRESET, recv(pair[0], &byte, 1, 0)) && recv(pair[0], &byte, 1, 0) == 0);
    close(pair[0]);
    connection(pair);
    struct linger linger = {1, 0};
    CHECK(!setsockopt(pair[1], SOL_SOCKET, SO_LINGER, &linger, sizeof linger) && !close(pair[1]));
    CHECK(!getsockopt(pair[0], SOL_SOCKET, SO_ERROR, &error, &len) && error == ECONNRESET);
    CHECK(!getsockopt(pair[0], SOL_SOCKET, SO_ERROR, &error, &len) && error == 0);
    close(pair[0]);
    connection(pair);
    CHECK(send(pair[0], "0123", 4, 0) == 4 && !shutdown(pair[1], SHUT_RD) && recv(pair[1], other, 9, 0) == 4 && recv(pair[1], other, 9, 0) == 0);
    CHECK(send(pair[0], "more", 4, MSG_NOSIGNAL) == 4);
    memset(other, 0, 4);
    CHECK(send(pair[1], "drop", 4, 0) == 4 && !ioctl(pair[1], TIOCOUTQ, &error) && recv(pair[0], other, 4, MSG_TRUNC) == 4 && !other[0]);
    len = 40;
    CHECK(!getsockopt(pair[0], IPPROTO_IP, IP_OPTIONS, other, &len) && len == 0);
    len = sizeof(struct tcp_info);
    CHECK(!getsockopt(pair[0], IPPROTO_TCP, TCP_INFO, other, &len) && len >= 100 && other[0] == TCP_ESTABLISHED);
    len = 16;
    CHECK(FAILS(ENOPROTOOPT, getsockopt(pair[0], SOL_SOCKET, 31, other, &len)));
    close(pair[0]), close(pair[1]);
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair) && send(pair[1], "y", 1, 0) == 1 && !close(pair[0]) && FAILS(ECONNRESET, recv(pair[1], &byte, 1, 0)));
    struct pollfd hang = {pair[1], 0, 0};
    CHECK(poll(&hang, 1, 1000) == 1 && hang.revents == POLLHUP);
    close(pair[1]);
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair) && !shutdown(pair[0], SHUT_RD) && FAILS(EPIPE, send(pair[1], "z", 1, MSG_NOSIGNAL)));
    close(pair[0]), close(pair[1]);
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) && !shutdown(pair[0], SHUT_RD) && FAILS(EPIPE, send(pair[1], "z", 1, MSG_NOSIGNAL)));
    close(pair[0]), close(pair[1]);
    /* Time limits below zero wait not at all. */
    struct timeval past = {-1, 0};
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair) && !setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &past, sizeof past) && FAILS(EAGAIN, recv(pair[0], &byte, 1, 0)));
    close(pair[0]), close(pair[1]);
    /* A sender without room waits for its time limit. */
    struct timeval short_wait = {0, 20000};
    CHECK(!socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) && !setsockopt(pair[0], SOL_SOCKET, SO_SNDTIMEO, &short_wait, sizeof short_wait));
    int sent = 0;
    while (sent < 100000 && send(pair[0], page, 1000, 0) == 1000) sent++;
    CHECK(sent && sent < 100000 && errno == EAGAIN);
    close(pair[0]), close(pair[1]);
    /* A message that finds no place is lost with its descriptors, and so are descriptors that find
     * none. */
    int kinds[] = {SOCK_DGRAM, SOCK_SEQPACKET, SOCK_STREAM}, pipes[2];
    for (int kind = 0; kind < 3; kind++) {
        CHECK(!socketpair(AF_UNIX, kinds[kind], 0, pair) && !pipe(pipes));
        send_descriptor(pair[0], pipes[1], 10);
        close(pipes[1]);
        char control[64];
        struct iovec piece = {kind == 2 ? (void *)other : (void *)8, 100};
        struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = kind == 2 ? (void *)8 : control, .msg_controllen = sizeof control};
        if (kind < 2) CHECK(FAILS(EFAULT, recvmsg(pair[1], &message, 0)));
        else CHECK(recvmsg(pair[1], &message, 0) == 10 && message.msg_flags == MSG_CTRUNC && message.msg_controllen == 0);
        struct pollfd ended = {pipes[0], POLLIN, 0};
        CHECK(poll(&ended, 1, 0) == 1 && (ended.revents & POLLHUP));
        close(pair[0]), close(pair[1]), close(pipes[0]);
    }
}

static int openat2_(int at, const char *path, unsigned long flags, unsigned long resolve) {
    struct open_how how = {.flags = flags, .resolve = resolve};
    return syscall(SYS_openat2, at, path, &how, sizeof how);
}

/* Ports that several bind, a listener that is shut down, and the list of interfaces. */
static void network(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof address;
    int on = 1, one = socket(AF_INET, SOCK_STREAM, 0), two = socket(AF_INET, SOCK_STREAM, 0), three = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!setsockopt(one, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on) && !setsockopt(two, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on));
    CHECK(!bind(one, (void *)&address, len) && !getsockname(one, (void *)&address, &len));
    CHECK(!bind(two, (void *)&address, len) && FAILS(EADDRINUSE, bind(three, (void *)&address, len)));
    CHECK(!listen(one, 1) && !shutdown(one, SHUT_RD) && FAILS(EINVAL, accept(one, 0, 0)));
    struct ifreq request = {.ifr_name = "lo"};
    CHECK(!ioctl(three, SIOCGIFADDR, &request) && ((struct sockaddr_in *)&request.ifr_addr)->sin_addr.s_addr == htonl(INADDR_LOOPBACK));
    CHECK(!ioctl(three, SIOCGIFINDEX, &request) && request.ifr_ifindex == 1 && !ioctl(three, SIOCGIFFLAGS, &request) && (request.ifr_flags & IFF_LOOPBACK));
    strcpy(request.ifr_name, "none");
    CHECK(FAILS(ENODEV, ioctl(three, SIOCGIFADDR, &request)));
    close(one), close(two), close(three);
    struct sockaddr_nl own = {.nl_family = AF_NETLINK};
    struct { struct nlmsghdr head; struct ifaddrmsg body; } asks = {{.nlmsg_len = sizeof asks, .nlmsg_type = RTM_GETADDR, .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP, .nlmsg_seq = 5}};
    int net = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE), found = 0;
    CHECK(net >= 0 && !bind(net, (void *)&own, sizeof own) && (len = sizeof own, !getsockname(net, (void *)&own, &len)) && own.nl_pid);
    CHECK(send(net, &asks, sizeof asks, 0) == sizeof asks);
    for (int done = 0; !done && !failed;) {
        int bytes = recv(net, other, sizeof other, 0);
        CHECK(bytes > 0);
        for (struct nlmsghdr *head = (void *)other; !failed && NLMSG_OK(head, bytes); head = NLMSG_NEXT(head, bytes)) {
            CHECK(head->nlmsg_seq == 5 && head->nlmsg_pid == own.nl_pid);
            done |= head->nlmsg_type == NLMSG_DONE, found += head->nlmsg_type == RTM_NEWADDR;
        }
    }
    CHECK(found >= 1);
    close(net);
}

/* Memory, files and times that follow their requests. */
static void limits(void) {
    char *much = mmap(0, 10L << 30, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(much != MAP_FAILED && !mprotect(much + 4096, 4096, PROT_READ | PROT_WRITE) && (much[4096] = 1));
    munmap(much, 10L << 30);
    int file = file_of("/tmp/limits", 'z'), status;
    char *mapped = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(!fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) && mapped[0] == 0 && mapped[4096] == 'z');
    munmap(mapped, 8192);
    struct timeval left = {1, 0};
    int pipes[2];
    fd_set set;
    FD_ZERO(&set);
    CHECK(!pipe(pipes) && write(pipes[1], "x", 1) == 1);
    FD_SET(pipes[0], &set);
    CHECK(select(pipes[0] + 1, &set, 0, 0, &left) == 1 && left.tv_sec == 0 && left.tv_usec > 0);
    struct rlimit size = {4096, 4096};
    signal(SIGXFSZ, SIG_IGN);
    CHECK(!setrlimit(RLIMIT_FSIZE, &size) && lseek(file, 0, SEEK_SET) == 0 && write(file, page, 8192) == 4096 && FAILS(EFBIG, write(file, page, 1)) && FAILS(EFBIG, ftruncate(file, 9000)));
    if (!fork()) {
        signal(SIGXFSZ, SIG_DFL);
        _exit(write(file, page, 1));
    }
    CHECK(wait(&status) > 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ);
    close(file), close(pipes[0]), close(pipes[1]);
}

/* Arguments of mmap that are refused, and limits of the address space. */
static void memory(void) {
    const int ours = MAP_PRIVATE | MAP_ANONYMOUS, both = PROT_READ | PROT_WRITE;
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    CHECK(!setrlimit(RLIMIT_DATA, &limit) && !getrlimit(RLIMIT_AS, &limit) && limit.rlim_max == RLIM_INFINITY);
    CHECK(mmap(0, 4096, both, MAP_SHARED | ours, -1, 0) == MAP_FAILED && errno == EINVAL);
    CHECK(mmap(0, (size_t)-4095, both, ours, -1, 0) == MAP_FAILED && errno == ENOMEM);
    CHECK(mmap(0, 0, both, ours, -1, 0) == MAP_FAILED && errno == EINVAL);
    char *one = mmap(0, 4096, both, ours, -1, 0);
    CHECK(FAILS(ENOMEM, mprotect(one, (size_t)-1, PROT_READ)));
    int named = open("/tmp", O_PATH);
    CHECK(mmap(0, 4096, PROT_READ, MAP_PRIVATE, named, 0) == MAP_FAILED && errno == EBADF);
    CHECK(FAILS(EBADF, fchown(named, -1, -1)) && FAILS(EINVAL, access("/tmp", 8)));
    char *end = sbrk(0);
    limit.rlim_cur = 4096;
    CHECK(!setrlimit(RLIMIT_DATA, &limit) && FAILS(ENOMEM, brk(end + 8192)) && sbrk(0) == end);
    CHECK(mmap(0, 4096, both, ours, -1, 0) == MAP_FAILED && errno == ENOMEM);
    CHECK(mmap(0, 4096, PROT_READ, ours, -1, 0) != MAP_FAILED);
    limit.rlim_cur = RLIM_INFINITY;
    CHECK(!setrlimit(RLIMIT_DATA, &limit) && !brk(end + 8192));
    limit.rlim_cur = 64 << 20;
    CHECK(!setrlimit(RLIMIT_AS, &limit) && mmap(0, 64 << 20, PROT_NONE, ours, -1, 0) == MAP_FAILED && errno == ENOMEM);
    CHECK(mremap(one, 4096, 64 << 20, MREMAP_MAYMOVE) == MAP_FAILED && errno == ENOMEM);
    CHECK(!munmap(one, 4096) && mmap(0, 4096, both, ours, -1, 0) != MAP_FAILED);
}

/* Calls that answered ENOSYS. */
static void calls(void) {
    CHECK(nice(3) == 3 && getpriority(PRIO_PROCESS, 0) == 3 && FAILS(EACCES, setpriority(PRIO_PROCESS, 0, -5)));
    int status;
    if (!fork()) _exit(getpriority(PRIO_PROCESS, 0));
    CHECK(wait(&status) > 0 && WEXITSTATUS(status) == 3);
    struct sched_param parameters = {0};
    cpu_set_t set;
    // The vDSO shows the host's CPU, so the set comes from the sentry.
    CHECK(!sched_getaffinity(0, sizeof set, &set) && CPU_COUNT(&set) == 1);
    CHECK(sched_getscheduler(0) == SCHED_OTHER && !sched_setscheduler(0, SCHED_BATCH, &parameters) && sched_getscheduler(0) == SCHED_BATCH);
    CHECK(!sched_setaffinity(0, sizeof set, &set));
    CPU_ZERO(&set);
    CHECK(FAILS(EINVAL, sched_setaffinity(0, sizeof set, &set)));
    CHECK(sched_get_priority_max(SCHED_FIFO) == 99 && sched_get_priority_min(SCHED_OTHER) == 0 && FAILS(EINVAL, sched_get_priority_max(99)));
    CHECK(!syscall(SYS_ioprio_set, 1, 0, 3 << 13) && syscall(SYS_ioprio_get, 1, 0) == 3 << 13);
    char *memory = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned char present[2] = {0};
    CHECK(!mlock(memory, 8192) && !munlock(memory, 8192) && !mlockall(MCL_CURRENT) && !munlockall() && !mincore(memory, 8192, present) && present[1] == 1);
    munmap(memory, 8192);
    CHECK(FAILS(ENOMEM, mlock(memory, 8192)) && FAILS(ENOMEM, mincore(memory, 8192, present)) && FAILS(EINVAL, mlockall(0)));
    CHECK(syscall(SYS_membarrier, 0, 0) > 0 && FAILS(EPERM, syscall(SYS_membarrier, 8, 0)) && !syscall(SYS_membarrier, 16, 0) && !syscall(SYS_membarrier, 8, 0));
    int file = file_of("/tmp/calls", 'q'), pipes[2], more[2];
    CHECK(!readahead(file, 0, 100) && !syncfs(file));
    CHECK(!pipe(pipes) && !pipe(more) && write(pipes[1], "hello", 5) == 5 && tee(pipes[0], more[1], 9, 0) == 5 && read(pipes[0], other, 9) == 5 && read(more[0], other, 9) == 5 && !memcmp(other, "hello", 5));
    struct iovec piece = {"there", 5};
    CHECK(vmsplice(pipes[1], &piece, 1, 0) == 5 && splice(pipes[0], 0, more[1], 0, 100, 0) == 5 && read(more[0], other, 9) == 5 && !memcmp(other, "there", 5));
    CHECK(FAILS(EAGAIN, splice(pipes[0], 0, more[1], 0, 100, SPLICE_F_NONBLOCK)) && FAILS(EINVAL, splice(file, 0, file, 0, 100, 0)));
    mkdir("/tmp/top", 0700), unlink("/tmp/top/out"), symlink("/tmp/calls", "/tmp/top/out");
    int top = open("/tmp/top", O_PATH | O_DIRECTORY), in = openat(top, "in", O_CREAT | O_RDWR, 0600);
    CHECK(top >= 0 && in >= 0 && FAILS(EXDEV, openat2_(top, "../calls", O_RDONLY, RESOLVE_BENEATH)) && FAILS(EXDEV, openat2_(top, "out", O_RDONLY, RESOLVE_BENEATH)));
    CHECK(FAILS(ELOOP, openat2_(top, "out", O_RDONLY, RESOLVE_NO_SYMLINKS)) && FAILS(ENOENT, openat2_(top, "out", O_RDONLY, RESOLVE_IN_ROOT)));
    int found = openat2_(top, "in", O_RDONLY | O_CLOEXEC, RESOLVE_BENEATH), rooted = openat2_(top, "/in", O_RDONLY, RESOLVE_IN_ROOT);
    CHECK(found >= 0 && rooted >= 0 && FAILS(EINVAL, openat2_(top, "in", 1L << 40, 0)) && FAILS(EINVAL, openat2_(top, "in", O_RDONLY, 1 << 20)));
    struct { struct open_how how; long tail; } longer = {{.flags = O_RDONLY}, 1};
    CHECK(FAILS(E2BIG, syscall(SYS_openat2, top, "in", &longer, sizeof longer)) && FAILS(EINVAL, syscall(SYS_openat2, top, "in", &longer, 8)));
    int program = open("/bin/sh", O_RDONLY | O_CLOEXEC);
    if (program >= 0) {
        char *arguments[] = {"sh", "-c", "exit 9", 0}, *none[] = {0};
        if (!fork()) syscall(SYS_execveat, program, "", arguments, none, AT_EMPTY_PATH), _exit(1);
        CHECK(wait(&status) > 0 && WEXITSTATUS(status) == 9);
    }
    close(file), close(top), close(in), close(found), close(rooted), close(program);
    close(pipes[0]), close(pipes[1]), close(more[0]), close(more[1]);
}

int main(void) {
    char line[64];
    struct { const char *name; void (*check)(void); } kinds[] = {
        {"shared", shared}, {"numbers", numbers}, {"handlers", handlers}, {"fair", fair}, {"robust", robust}, {"sockets", sockets}, {"network", network}, {"limits", limits}, {"memory", memory}, {"calls", calls},
    };
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        /* The settings of a process do not change others. */
        int child = fork();
        if (child) {
            waitpid(child, 0, 0);
            continue;
        }
        failed = "no such kind";
        for (unsigned n = 0; n < sizeof kinds / sizeof *kinds; n++)
            if (!strcmp(line, kinds[n].name)) failed = 0, kinds[n].check();
        printf("%s\n", failed ? failed : "ok");
        fflush(stdout);
        _exit(0);
    }
}
