/* Signals that are read from descriptors, timers that send them, limits. Each request checks itself
 * and reports its failure. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(that) do { if (!(that)) { char text[200]; write(1, text, sprintf(text, "line %d: %s, errno %d\n", __LINE__, #that, errno)); return; } } while (0)

static volatile int came, value, code, overrun;
static int held = -1;

static void note(int signal, siginfo_t *info, void *context) {
    came++, value = info->si_value.sival_int, code = info->si_code, overrun = info->si_overrun;
}

static void handle(int signal, int flags) {
    struct sigaction action = {.sa_sigaction = note, .sa_flags = SA_SIGINFO | flags};
    sigaction(signal, &action, 0);
}

static sigset_t set(int one, int other) {
    sigset_t set;
    sigemptyset(&set), sigaddset(&set, one);
    if (other) sigaddset(&set, other);
    return set;
}

static int ready(int fd, int millis) {
    struct pollfd poll_ = {fd, POLLIN};
    return poll(&poll_, 1, millis);
}

static void once(void) {
    struct sigaction now;
    came = 0, handle(SIGUSR1, SA_RESETHAND);
    raise(SIGUSR1);
    sigaction(SIGUSR1, 0, &now);
    CHECK(came == 1 && now.sa_handler == SIG_DFL);
    sigset_t usr = set(SIGUSR1, 0);
    handle(SIGUSR1, SA_NODEFER);
    sigprocmask(SIG_BLOCK, &usr, 0);
    raise(SIGUSR1);
    siginfo_t info;
    struct timespec soon = {0, 5000000};
    CHECK(sigtimedwait(&usr, &info, &soon) == SIGUSR1 && info.si_pid == getpid() && came == 1);
    CHECK(sigtimedwait(&usr, &info, &soon) == -1 && errno == EAGAIN);
    write(1, "once\n", 5);
}

static void reads(void) {
    sigset_t both = set(SIGUSR1, SIGRTMIN);
    sigprocmask(SIG_BLOCK, &both, 0);
    int fd = signalfd(-1, &both, SFD_NONBLOCK | SFD_CLOEXEC);
    struct signalfd_siginfo told[3];
    CHECK(fd >= 0 && ready(fd, 0) == 0 && read(fd, told, sizeof told) == -1 && errno == EAGAIN);
    union sigval with = {.sival_int = 77};
    CHECK(sigqueue(getpid(), SIGRTMIN, with) == 0 && sigqueue(getpid(), SIGRTMIN, with) == 0 && raise(SIGUSR1) == 0);
    CHECK(ready(fd, 0) == 1 && read(fd, told, 100) == -1 && errno == EINVAL);
    CHECK(read(fd, told, sizeof told) == sizeof told);
    CHECK(told[0].ssi_signo == SIGUSR1 && told[0].ssi_pid == getpid() && told[0].ssi_uid == getuid());
    CHECK(told[1].ssi_signo == SIGRTMIN && told[1].ssi_int == 77 && told[1].ssi_code == SI_QUEUE && told[2].ssi_int == 77);
    CHECK(ready(fd, 0) == 0);
    /* Another set; edges of it; a child's end, for which it waits. */
    sigset_t child = set(SIGCHLD, 0);
    sigprocmask(SIG_BLOCK, &child, 0);
    CHECK(signalfd(fd, &child, 0) == fd);
    int epoll = epoll_create1(0);
    struct epoll_event event = {EPOLLIN | EPOLLET, {.fd = fd}};
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0 && epoll_wait(epoll, &event, 1, 0) == 0);
    pid_t pid = fork();
    if (pid == 0) _exit(9);
    CHECK(epoll_wait(epoll, &event, 1, 10000) == 1 && epoll_wait(epoll, &event, 1, 0) == 0);
    CHECK(read(fd, told, sizeof told) == sizeof *told && told[0].ssi_pid == pid && told[0].ssi_status == 9);
    CHECK(waitpid(pid, 0, 0) == pid);
    fcntl(fd, F_SETFL, 0);
    if ((pid = fork()) == 0) usleep(3000), _exit(1);
    CHECK(read(fd, told, sizeof told) == sizeof *told && told[0].ssi_signo == SIGCHLD && told[0].ssi_code == CLD_EXITED);
    write(1, "read\n", 5);
}

static timer_t timer(int notify, int signal, int with) {
    struct sigevent event = {.sigev_notify = notify, .sigev_signo = signal, .sigev_value.sival_int = with};
    timer_t id = (timer_t)-1;
    timer_create(CLOCK_MONOTONIC, &event, &id);
    return id;
}

static void timers(void) {
    came = 0, handle(SIGRTMIN + 1, 0);
    timer_t id = timer(SIGEV_SIGNAL, SIGRTMIN + 1, 5);
    struct itimerspec once = {{0, 0}, {0, 100000000}}, none = {{0, 0}, {0, 0}}, old;
    CHECK(timer_settime(id, 0, &once, 0) == 0 && timer_gettime(id, &old) == 0 && old.it_value.tv_nsec > 0);
    CHECK(usleep(1000000) == -1 && errno == EINTR && came == 1 && value == 5 && code == SI_TIMER && overrun == 0);
    CHECK(timer_gettime(id, &old) == 0 && old.it_value.tv_sec == 0 && old.it_value.tv_nsec == 0);
    /* While it spins, and how often it ran out while it was blocked. */
    struct itimerspec often = {{0, 2000000}, {0, 2000000}};
    CHECK(timer_settime(id, 0, &often, 0) == 0);
    while (came < 4) {}
    sigset_t real = set(SIGRTMIN + 1, 0);
    sigprocmask(SIG_BLOCK, &real, 0);
    struct timespec while_ = {0, 20000000};
    while (nanosleep(&while_, &while_)) {}
    siginfo_t info;
    CHECK(sigwaitinfo(&real, &info) == SIGRTMIN + 1 && info.si_overrun >= 5 && info.si_value.sival_int == 5);
    CHECK(timer_settime(id, 0, &none, &old) == 0 && old.it_interval.tv_nsec == 2000000);
    while (sigtimedwait(&real, &info, &(struct timespec){0, 0}) > 0) {}
    /* At a time of the day; one without a notification; one without an event. */
    struct timespec now;
    timer_t day, alarm_;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 1};
    CHECK(timer_create(CLOCK_REALTIME, &event, &day) == 0 && clock_gettime(CLOCK_REALTIME, &now) == 0);
    struct itimerspec then = {{0, 0}, now};
    CHECK(timer_settime(day, TIMER_ABSTIME, &then, 0) == 0 && sigwaitinfo(&real, &info) == SIGRTMIN + 1 && info.si_code == SI_TIMER);
    timer_t quiet = timer(SIGEV_NONE, 0, 0);
    CHECK(timer_settime(quiet, 0, &often, 0) == 0 && usleep(5000) == 0 && timer_gettime(quiet, &old) == 0);
    CHECK(old.it_value.tv_nsec > 0 && old.it_value.tv_nsec <= 2000000 && timer_getoverrun(quiet) == 0);
    CHECK(timer_create(CLOCK_MONOTONIC, 0, &alarm_) == 0);
    came = 0, handle(SIGALRM, 0);
    struct itimerspec later = {{0, 0}, {0, 200000000}};
    CHECK(timer_settime(alarm_, 0, &later, 0) == 0 && usleep(10000000) == -1 && came == 1);
    /* A child has none. */
    pid_t pid = fork();
    int status;
    if (pid == 0) _exit(timer_delete(quiet) == -1 && errno == EINVAL ? 3 : 4);
    CHECK(waitpid(pid, &status, 0) == pid && WEXITSTATUS(status) == 3);
    CHECK(timer_delete(quiet) == 0 && timer_delete(day) == 0 && timer_delete(alarm_) == 0 && timer_delete(id) == 0);
    CHECK(syscall(SYS_timer_delete, 3) == -1 && errno == EINVAL && syscall(SYS_timer_create, 99, 0, &id) == -1 && errno == EINVAL);
    CHECK(timer_create(CLOCK_MONOTONIC, &(struct sigevent){.sigev_signo = 65}, &id) == -1 && errno == EINVAL);
    write(1, "timers\n", 7);
}

static volatile int called;
static void call(union sigval with) { called += with.sival_int; }

static void threads(void) {
    struct sigevent event = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = call, .sigev_value.sival_int = 6};
    struct itimerspec once = {{0, 0}, {0, 1000000}};
    timer_t id;
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &id) == 0 && timer_settime(id, 0, &once, 0) == 0);
    for (int i = 0; i < 1000 && !called; i++) usleep(1000);
    CHECK(called == 6 && timer_delete(id) == 0);
    write(1, "threads\n", 8);
}

static void limits(void) {
    struct rlimit was, few = {5, 1024}, now;
    CHECK(getrlimit(RLIMIT_NOFILE, &was) == 0 && was.rlim_cur == 1024 && setrlimit(RLIMIT_NOFILE, &few) == 0);
    CHECK(dup2(1, 5) == -1 && errno == EBADF && fcntl(1, F_DUPFD, 5) == -1 && errno == EINVAL);
    int one = dup(1), other = dup(1);
    CHECK(one == 3 && other == 4 && dup(1) == -1 && errno == EMFILE && open("/dev/null", O_RDONLY) == -1 && errno == EMFILE);
    /* Its own may be raised again, and only so far. */
    CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){6, 5}) == -1 && errno == EINVAL);
    CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){6, 1025}) == -1 && errno == EPERM);
    CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){6, 100}) == 0 && dup(1) == 5 && dup(1) == -1);
    CHECK(setrlimit(RLIMIT_CPU, &(struct rlimit){10, RLIM_INFINITY}) == 0 && getrlimit(RLIMIT_CPU, &now) == 0 && now.rlim_cur == 10);
    /* Children inherit it, and may get another. */
    pid_t pid = fork();
    int status;
    if (pid == 0) {
        pause();
    }
    CHECK(prlimit(pid, RLIMIT_NOFILE, &(struct rlimit){50, 60}, &now) == 0 && now.rlim_cur == 6 && now.rlim_max == 100);
    CHECK(prlimit(pid, RLIMIT_NOFILE, 0, &now) == 0 && now.rlim_cur == 50 && getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur == 6);
    kill(pid, 9), waitpid(pid, 0, 0);
    CHECK(prlimit(pid, RLIMIT_NOFILE, 0, &now) == -1 && errno == ESRCH && getrlimit(99, &now) == -1 && errno == EINVAL);
    write(1, "limits\n", 7);
}

/* Signals come to a thread whose only calls change its memory map. */
static void maps(void) {
    char *at = mmap(0, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *top = sbrk(0);
    struct itimerval soon = {{0, 0}, {0, 2000}};
    struct timespec begin, now;
    handle(SIGALRM, 0);
    for (int sender = 0; sender < 2; sender++)
        for (int kind = 0; kind < 4; kind++) {
            came = 0;
            pid_t parent = getpid(), pid = sender ? fork() : 0;
            if (sender && pid == 0) usleep(2000), _exit(kill(parent, SIGALRM));
            if (!sender) setitimer(ITIMER_REAL, &soon, 0);
            clock_gettime(CLOCK_MONOTONIC, &begin);
            do {
                if (kind == 0) mmap(at, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
                if (kind == 1) mprotect(at, 4096, PROT_READ), mprotect(at, 4096, PROT_READ | PROT_WRITE);
                if (kind == 2) madvise(at, 4096, MADV_DONTNEED);
                if (kind == 3) syscall(SYS_brk, top + 8192), syscall(SYS_brk, top);
                clock_gettime(CLOCK_MONOTONIC, &now);
            } while (!came && now.tv_sec < begin.tv_sec + 20);
            CHECK(came == 1);
            if (sender) waitpid(pid, 0, 0);
        }
    write(1, "maps\n", 5);
}

/* Signals with a forged sender are refused for other processes. */
static void others(void) {
    sigset_t usr = set(SIGUSR1, 0);
    sigprocmask(SIG_BLOCK, &usr, 0);
    pid_t parent = getpid(), pid = fork();
    int status;
    if (pid == 0) {
        siginfo_t info;
        sigwaitinfo(&usr, &info);
        if (info.si_pid != parent || info.si_value.sival_int != 8 || info.si_code != SI_QUEUE) _exit(1);
        sigwaitinfo(&usr, &info);
        _exit(info.si_pid == parent ? 2 : 3);
    }
    siginfo_t info = {.si_code = SI_USER};
    CHECK(syscall(SYS_rt_sigqueueinfo, pid, SIGUSR1, &info) == -1 && errno == EPERM);
    CHECK(sigqueue(pid, SIGUSR1, (union sigval){.sival_int = 8}) == 0);
    usleep(2000);
    CHECK(tgkill(pid, pid, SIGUSR1) == 0 && tgkill(parent, pid, 0) == -1 && errno == ESRCH);
    CHECK(waitpid(pid, &status, 0) == pid && WEXITSTATUS(status) == 2);
    write(1, "others\n", 7);
}

static int usr_fd = -1;
static pid_t kept;

static void hold(void) {
    sigset_t usr = set(SIGUSR1, 0);
    sigprocmask(SIG_BLOCK, &usr, 0);
    usr_fd = signalfd(-1, &usr, SFD_NONBLOCK);
    raise(SIGUSR1);
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR2};
    syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &held);
    struct itimerspec late = {{0, 0}, {3600, 0}}, old;
    syscall(SYS_timer_settime, held, 0, &late, &old);
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){64, 64});
    if ((kept = fork()) == 0) pause();
    write(1, "held\n", 5);
}

static void look(void) {
    char text[200];
    struct itimerspec left = {0};
    struct rlimit own, child = {0};
    sigset_t pending;
    syscall(SYS_timer_gettime, held, &left);
    getrlimit(RLIMIT_NOFILE, &own);
    if (kept) prlimit(kept, RLIMIT_NOFILE, 0, &child);
    sigpending(&pending);
    write(1, text, sprintf(text, "timer %d left %d pending %d ready %d files %d child %d\n", held, left.it_value.tv_sec > 3000,
        sigismember(&pending, SIGUSR1), usr_fd >= 0 && ready(usr_fd, 0), (int)own.rlim_cur, (int)child.rlim_cur));
}

int main(void) {
    char in[100];
    for (;;) {
        long n = read(0, in, sizeof in - 1);
        if (n <= 0) return 0;
        in[n] = 0;
        if (!strcmp(in, "once\n")) once();
        else if (!strcmp(in, "read\n")) reads();
        else if (!strcmp(in, "timers\n")) timers();
        else if (!strcmp(in, "threads\n")) threads();
        else if (!strcmp(in, "limits\n")) limits();
        else if (!strcmp(in, "others\n")) others();
        else if (!strcmp(in, "maps\n")) maps();
        else if (!strcmp(in, "hold\n")) hold();
        else look();
    }
}
