// Random system calls on all kinds of kernel objects. Each line of input is a seed and a number of
// calls; the answer is how many of them succeeded.
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
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <netinet/in.h>
#include <time.h>
#include <unistd.h>

#define P 4096L
#define ARENA ((char *)0x200000000)
#define PAGES 48
// Descriptors that calls use. Lower ones are the streams.
#define FIRST 8
#define LAST 40

static unsigned long state;

static unsigned long below(unsigned long bound) {
    state = state * 6364136223846793005UL + 1;
    return (state >> 33) % bound;
}

static int fd(void) { return FIRST + below(LAST - FIRST); }
static char *page(void) { return ARENA + below(PAGES) * P; }
static long length(void) { return (1 + below(8)) * P; }
static int protection(void) { return below(4); }

// Moves a new descriptor into the range of those that calls use.
static long keep(int made) {
    if (made < 0) return -1;
    int to = fd();
    dup2(made, to);
    if (made != to) close(made);
    return to;
}

static const char *name(void) {
    static char path[32];
    sprintf(path, "/tmp/%lu", below(6));
    return path;
}

static long map(int shared) {
    int flags = MAP_FIXED | (shared ? MAP_SHARED : MAP_PRIVATE), from = below(2) ? fd() : -1;
    if (from < 0) flags |= MAP_ANONYMOUS;
    return (long)mmap(page(), length(), protection(), flags, from, below(4) * P) == -1 ? -1 : 0;
}

static long lock(void) {
    struct flock lock = {below(3), SEEK_SET, below(64), 1 + below(8), 0};
    return fcntl(fd(), below(2) ? F_SETLK : F_OFD_SETLK, &lock);
}

static long message(void) {
    union { struct cmsghdr head; char bytes[CMSG_SPACE(sizeof(int))]; } control = {0};
    struct iovec vector = {"text", 1 + below(4)};
    struct msghdr sent = {0, 0, &vector, 1, &control, sizeof control, 0};
    control.head = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    *(int *)CMSG_DATA(&control.head) = fd();
    if (below(2)) sent.msg_control = 0, sent.msg_controllen = 0;
    return sendmsg(fd(), &sent, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static long pair(int kind) {
    int pair[2];
    long made = kind < 0 ? pipe(pair) : socketpair(AF_UNIX, kind, 0, pair);
    if (made == 0) keep(pair[0]), keep(pair[1]);
    return made;
}

static long listener(void) {
    struct sockaddr_in address = {AF_INET, htons(4000 + below(4)), {htonl(INADDR_LOOPBACK)}};
    int made = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(made, (struct sockaddr *)&address, sizeof address) || listen(made, 3)) return close(made), -1;
    return keep(made);
}

static long caller(void) {
    struct sockaddr_in address = {AF_INET, htons(4000 + below(4)), {htonl(INADDR_LOOPBACK)}};
    int made = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    connect(made, (struct sockaddr *)&address, sizeof address);
    return keep(made);
}

static long watch(void) {
    struct epoll_event event = {below(64) | (below(2) ? EPOLLET : 0)};
    return epoll_ctl(fd(), 1 + below(3), fd(), &event);
}

// A child that stays, ends, or uses the memory of its parent.
static long child(void) {
    static int living;
    int kind = below(4);
    if (kind == 0 && living < 3) {
        ++living;
        if (fork() == 0) for (;;) pause();
        return 0;
    }
    if (kind < 3) {
        if (fork() == 0) _exit(below(9));
        return below(2) ? waitpid(-1, 0, WNOHANG) : 0;
    }
    int id = vfork();
    if (id == 0) _exit(0);
    return waitpid(id, 0, 0);
}

static long timer(void) {
    static timer_t timers[4];
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + below(4)};
    struct itimerspec length = {{below(2), 1}, {below(3), 0}};
    timer_t *timer = &timers[below(4)];
    switch (below(3)) {
    case 0: return timer_create(CLOCK_MONOTONIC, &event, timer);
    case 1: return timer_settime(*timer, 0, &length, 0);
    default: return timer_delete(*timer);
    }
}

static long semaphores(void) {
    int set = semget(1 + below(3), 3, IPC_CREAT | 0600);
    struct sembuf operation = {below(3), (short)below(5) - 2, IPC_NOWAIT | (below(2) ? SEM_UNDO : 0)};
    return below(8) ? semop(set, &operation, 1) : semctl(set, 0, IPC_RMID);
}

static long messages(void) {
    struct { long kind; char text[64]; } message = {1 + below(3)};
    int queue = msgget(1 + below(3), IPC_CREAT | 0600);
    switch (below(8)) {
    case 0: return msgctl(queue, IPC_RMID, 0);
    case 1: return msgrcv(queue, &message, 64, 0, IPC_NOWAIT);
    default: return msgsnd(queue, &message, below(64), IPC_NOWAIT);
    }
}

static long queue(void) {
    struct mq_attr attributes = {0, 3, 16};
    char name[8], text[16] = {0};
    sprintf(name, "/%lu", below(3));
    switch (below(4)) {
    case 0: return keep(mq_open(name, O_RDWR | O_CREAT | O_NONBLOCK, 0600, &attributes));
    case 1: return mq_unlink(name);
    case 2: return mq_send(fd(), text, below(16), below(4));
    default: return mq_receive(fd(), text, 16, 0);
    }
}

static long segment(void) {
    int id = shmget(1 + below(3), length(), IPC_CREAT | 0600);
    switch (below(4)) {
    case 0: return shmctl(id, IPC_RMID, 0);
    case 1: return shmdt(page());
    default: return shmat(id, page(), SHM_REMAP) == (void *)-1 ? -1 : 0;
    }
}

static long one(void) {
    char bytes[256] = {0};
    struct rlimit limit = {below(100), 100 + below(100)};
    struct itimerspec length_of = {{below(2), 0}, {below(2), 9}};
    sigset_t set;
    switch (below(47)) {
    case 0 ... 3: return map(0);
    case 4 ... 6: return map(1);
    case 7: return munmap(page(), length());
    case 8 ... 9: return mprotect(page(), length(), protection());
    case 10: return mremap(page(), length(), length(), MREMAP_MAYMOVE) == MAP_FAILED ? -1 : 0;
    case 11: return mremap(page(), P, P, MREMAP_MAYMOVE | MREMAP_FIXED | (below(2) ? MREMAP_DONTUNMAP : 0), page()) == MAP_FAILED ? -1 : 0;
    case 12: return syscall(SYS_brk, syscall(SYS_brk, 0) + (long)(below(5) - 2) * P) > 0 ? 0 : -1;
    case 13: return madvise(page(), length(), below(2) ? MADV_DONTNEED : MADV_FREE);
    case 14 ... 15: return keep(open(name(), O_RDWR | O_CREAT | (below(2) ? O_TRUNC : 0), 0600));
    case 16: return ftruncate(fd(), below(5) * P + below(2));
    case 17: return write(fd(), "0123456789abcdef", 8 + below(8));
    case 18: return below(2) ? unlink(name()) : rename(name(), "/tmp/5");
    case 19: return lseek(fd(), below(1 << 20), SEEK_SET);
    case 20: return lock();
    case 21: return flock(fd(), LOCK_NB | (below(2) ? LOCK_EX : LOCK_UN));
    case 22: return close(fd());
    case 23: return dup2(fd(), fd());
    case 24: return pair(-1);
    case 25: return pair(below(2) ? SOCK_STREAM : SOCK_DGRAM);
    case 26: return message();
    case 27: return recv(fd(), bytes, below(64), MSG_DONTWAIT);
    case 28: return below(2) ? listener() : keep(accept4(fd(), 0, 0, SOCK_NONBLOCK));
    case 29: return caller();
    case 30: return keep(eventfd(below(3), EFD_NONBLOCK));
    case 31: return keep(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)), timerfd_settime(fd(), 0, &length_of, 0);
    case 32: return keep(epoll_create1(0));
    case 33 ... 34: return watch();
    case 35: return below(2) ? keep(inotify_init1(IN_NONBLOCK)) : inotify_add_watch(fd(), "/tmp", IN_ALL_EVENTS);
    case 36: return child();
    case 37: return timer();
    case 38: return semaphores();
    case 39: return messages();
    case 40: return queue();
    case 41: return segment();
    case 43: return below(2) ? keep(memfd_create("m", MFD_ALLOW_SEALING)) : fcntl(fd(), F_ADD_SEALS, 1 << below(5));
    case 44: return below(2) ? keep(open("/dev/ptmx", O_RDWR | O_NOCTTY)) : keep(ioctl(fd(), TIOCGPTPEER, O_RDWR | O_NOCTTY));
    case 45: return below(2) ? mkfifo("/tmp/fifo", 0600) : keep(open("/tmp/fifo", O_RDWR | O_NONBLOCK));
    case 42: return setrlimit(below(2) ? RLIMIT_CORE : RLIMIT_STACK, &limit), sigqueue(getpid(), SIGRTMIN + below(4), (union sigval){1});
    default:
        sigemptyset(&set), sigaddset(&set, SIGRTMIN);
        umask(below(0777));
        return below(2) ? keep(signalfd(-1, &set, SFD_NONBLOCK)) : keep(syscall(SYS_pidfd_open, getpid(), 0));
    }
}

int main(void) {
    char line[64];
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, 0);
    fcntl(0, F_SETFL, 0);
    setvbuf(stdin, 0, _IONBF, 0);
    setvbuf(stdout, 0, _IONBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        unsigned long count = 0, done = 0;
        sscanf(line, "%lu %lu", &state, &count);
        while (count-- > 0) done += one() >= 0;
        printf("%lu\n", done);
    }
}
