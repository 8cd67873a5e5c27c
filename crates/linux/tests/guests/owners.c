// Signals to owners of open files, waits for several futexes, and processes that share parts. It
// prints results, which are the same on Linux itself.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void say(const char *what, long value) {
    if (value < 0) printf("%s: %s\n", what, strerrorname_np(errno));
    else printf("%s: %ld\n", what, value);
}

// The signals of a set that are pending, each with its code, descriptor and band.
static void pending(const char *what) {
    sigset_t set;
    siginfo_t info;
    struct timespec none = {0, 0};
    sigemptyset(&set), sigaddset(&set, SIGIO), sigaddset(&set, SIGRTMIN);
    int signal, count = 0;
    while ((signal = sigtimedwait(&set, &info, &none)) > 0) {
        if (signal == SIGIO) printf("%s: SIGIO %d\n", what, info.si_code);
        else printf("%s: %d %d %ld\n", what, info.si_code, info.si_fd, info.si_band);
        count++;
    }
    if (!count) printf("%s: nothing\n", what);
}

static void owners(void) {
    struct f_owner_ex owner = {F_OWNER_TID, 0};
    int ends[2];
    pipe(ends);
    say("no owner", fcntl(ends[0], F_GETOWN));
    say("no process", fcntl(ends[0], F_SETOWN, 12345678));
    say("process", fcntl(ends[0], F_SETOWN, getpid()));
    fcntl(ends[0], F_GETOWN_EX, &owner);
    printf("%d %d\n", owner.type, owner.pid == getpid());
    owner = (struct f_owner_ex){F_OWNER_PGRP, getpgrp()};
    say("group", fcntl(ends[0], F_SETOWN_EX, &owner));
    owner = (struct f_owner_ex){7, 0};
    say("no kind", fcntl(ends[0], F_SETOWN_EX, &owner));
    owner = (struct f_owner_ex){F_OWNER_TID, gettid()};
    say("thread", fcntl(ends[0], F_SETOWN_EX, &owner));
    printf("%d\n", syscall(SYS_fcntl, ends[0], F_GETOWN) == gettid());
    say("no signal", fcntl(ends[0], F_SETSIG, 65));
    say("signal", fcntl(ends[0], F_SETSIG, SIGRTMIN));
    printf("%d\n", fcntl(ends[0], F_GETSIG) == SIGRTMIN);
    int file = open("/dev/null", O_RDWR), on = 1;
    say("null", ioctl(file, FIOASYNC, &on));
    say("null", fcntl(file, F_SETFL, O_ASYNC));
    printf("%d\n", (fcntl(file, F_GETFL) & O_ASYNC) != 0);
    close(ends[0]), close(ends[1]), close(file);
}

static void signals(void) {
    int ends[2], on = 1, off = 0;
    char bytes[70000];
    pipe2(ends, O_NONBLOCK);
    for (int n = 0; n < 2; n++) {
        fcntl(ends[n], F_SETOWN, getpid()), fcntl(ends[n], F_SETSIG, SIGRTMIN);
        fcntl(ends[n], F_SETFL, O_ASYNC | O_NONBLOCK);
    }
    write(ends[1], "one", 3), pending("written");
    read(ends[0], bytes, 3), pending("read");
    write(ends[1], bytes, 65536), pending("full");
    read(ends[0], bytes, sizeof bytes), pending("empty");
    close(ends[1]), pending("closed"), close(ends[0]);
    int pair[2];
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    ioctl(pair[1], FIOASYNC, &on);
    write(pair[0], "x", 1), pending("without an owner");
    pid_t own = getpid();
    ioctl(pair[1], FIOSETOWN, &own);
    write(pair[0], "x", 1), pending("with an owner");
    ioctl(pair[1], FIOASYNC, &off);
    write(pair[0], "x", 1), pending("off");
    ioctl(pair[1], FIOASYNC, &on), fcntl(pair[1], F_SETSIG, SIGRTMIN);
    fflush(stdout);
    if (fork() == 0) _exit(write(pair[0], "x", 1));
    wait(0), pending("by a child");
    close(pair[0]), close(pair[1]);
}

static void directories(void) {
    char path[] = "/tmp/ownersXXXXXX", name[64], other[64];
    mkdtemp(path), snprintf(name, 64, "%s/one", path), snprintf(other, 64, "%s/two", path);
    int directory = open(path, O_RDONLY), file = open("/dev/null", O_RDONLY);
    say("no directory", fcntl(file, F_NOTIFY, DN_CREATE));
    fcntl(directory, F_SETSIG, SIGRTMIN);
    say("once", fcntl(directory, F_NOTIFY, DN_CREATE));
    close(open(name, O_CREAT | O_RDWR, 0600)), pending("created");
    close(open(other, O_CREAT | O_RDWR, 0600)), pending("created again");
    unsigned all = DN_CREATE | DN_DELETE | DN_RENAME | DN_MODIFY | DN_ATTRIB | DN_MULTISHOT;
    say("always", fcntl(directory, F_NOTIFY, all));
    chmod(name, 0640), pending("mode");
    int opened = open(name, O_RDWR);
    write(opened, "x", 1), pending("written");
    unlink(other), pending("removed");
    say("never", fcntl(directory, F_NOTIFY, 0));
    unlink(name), pending("removed");
    int watch = inotify_init1(IN_NONBLOCK);
    char events[512];
    inotify_add_watch(watch, path, IN_MODIFY), write(opened, "x", 1);
    say("of a removed file", read(watch, events, sizeof events));
    inotify_add_watch(watch, path, IN_MODIFY | IN_EXCL_UNLINK), write(opened, "x", 1);
    say("of a named file", read(watch, events, sizeof events));
    close(watch), close(opened), close(directory), rmdir(path);
}

static uint32_t words[3];

static void *waker(void *word) {
    while (syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0) == 0) usleep(1000);
    return 0;
}

static long waitv(struct futex_waitv *list, unsigned count, struct timespec *until) {
    return syscall(SYS_futex_waitv, list, count, 0, until, CLOCK_MONOTONIC);
}

static void futexes(void) {
    struct futex_waitv list[3] = {};
    for (int n = 0; n < 3; n++) {
        list[n].uaddr = (uintptr_t)&words[n];
        list[n].flags = FUTEX_32 | FUTEX_PRIVATE_FLAG;
    }
    struct timespec until;
    pthread_t thread;
    clock_gettime(CLOCK_MONOTONIC, &until);
    say("time over", waitv(list, 3, &until));
    say("none", waitv(list, 0, 0));
    say("too many", waitv(list, 129, 0));
    words[1] = 1, say("another value", waitv(list, 3, 0)), words[1] = 0;
    list[2].__reserved = 1, say("reserved", waitv(list, 3, 0)), list[2].__reserved = 0;
    pthread_create(&thread, 0, waker, &words[2]);
    say("woken", waitv(list, 3, 0)), pthread_join(thread, 0);
    pthread_create(&thread, 0, waker, &words[0]);
    say("woken", waitv(list, 3, 0)), pthread_join(thread, 0);
}

static volatile int seen;
static int first, second;

static int sharer(void *arg) {
    (void)arg;
    seen = 1, close(first), second = open("/dev/null", O_RDONLY), chdir("/tmp");
    signal(SIGUSR1, SIG_IGN);
    while (seen != 2) sched_yield();
    return 7;
}

static int sleeper(void *word) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, 0, 0, 0, 0);
    return 8;
}

// Private futexes are those of a memory, which processes may share.
static void futexes_between_processes(char *stack) {
    int status;
    pid_t child = clone(sleeper, stack, CLONE_VM | SIGCHLD, words);
    while (syscall(SYS_futex, words, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0) == 0) usleep(1000);
    waitpid(child, &status, 0), say("woken by a process", WEXITSTATUS(status));
    child = clone(sleeper, stack, CLONE_VM | SIGCHLD, words);
    while (syscall(SYS_futex, words, FUTEX_REQUEUE_PRIVATE, 0, 1L, words + 1, 0) == 0) usleep(1000);
    say("at the first word", syscall(SYS_futex, words, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0));
    say("at another word", syscall(SYS_futex, words + 1, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0));
    waitpid(child, &status, 0), say("woken there", WEXITSTATUS(status));
}

static void sharing(void) {
    char *stack = malloc(1 << 16), at[64];
    int status;
    chdir("/"), first = open("/dev/null", O_RDONLY);
    int flags = CLONE_VM | CLONE_FILES | CLONE_FS | CLONE_SIGHAND | SIGCHLD;
    pid_t child = clone(sharer, stack + (1 << 16), flags, 0);
    while (seen != 1 || second == 0) sched_yield();
    say("same memory", syscall(SYS_kcmp, getpid(), child, 1, 0, 0));
    say("same descriptors", syscall(SYS_kcmp, getpid(), child, 2, 0, 0));
    say("closed", fcntl(first, F_GETFD));
    say("opened", fcntl(second, F_GETFD) >= 0);
    while (strcmp(getcwd(at, sizeof at), "/tmp")) sched_yield();
    printf("%s\n", at);
    while (raise(SIGUSR1) || seen != 1) {}
    seen = 2, waitpid(child, &status, 0);
    say("status", WEXITSTATUS(status));
    futexes_between_processes(stack + (1 << 16));
    if (syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0) == 0)
        _exit(close_range(second, second, CLOSE_RANGE_UNSHARE) != 0);
    wait(&status), say("unshared", WEXITSTATUS(status)), say("open", fcntl(second, F_GETFD));
    if (syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0) == 0) _exit(close(second) != 0);
    wait(&status), say("shared", WEXITSTATUS(status)), say("closed", fcntl(second, F_GETFD));
    errno = 0, say("handlers without memory", clone(sharer, stack + (1 << 16), CLONE_SIGHAND, 0));
    signal(SIGUSR1, SIG_DFL), free(stack);
}

static void processes(void) {
    int status, ends[2];
    char byte = 0;
    pipe(ends);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) pause();
    int pidfd = syscall(SYS_pidfd_open, child, 0);
    say("flags", syscall(SYS_pidfd_getfd, pidfd, ends[1], 1));
    say("no descriptor", syscall(SYS_pidfd_getfd, pidfd, 99, 0));
    int got = syscall(SYS_pidfd_getfd, pidfd, ends[1], 0);
    say("close on exec", fcntl(got, F_GETFD)), close(ends[1]);
    say("write", write(got, "x", 1)), say("read", read(ends[0], &byte, 1));
    kill(child, SIGKILL), waitpid(child, &status, 0);
    say("ended", syscall(SYS_pidfd_getfd, pidfd, 0, 0));
    say("init's group", getpgid(1) >= 0);
    prctl(PR_SET_TIMERSLACK, 70000);
    if (fork() == 0) {
        prctl(PR_SET_TIMERSLACK, 5), prctl(PR_SET_TIMERSLACK, 0);
        _exit(prctl(PR_GET_TIMERSLACK) == 70000);
    }
    wait(&status), say("slack", WEXITSTATUS(status));
    struct rlimit none = {0, 0};
    fflush(stdout);
    if (fork() == 0) {
        sigset_t set;
        sigfillset(&set), sigprocmask(SIG_BLOCK, &set, 0), setrlimit(RLIMIT_SIGPENDING, &none);
        say("no room", syscall(SYS_tgkill, getpid(), gettid(), SIGRTMIN));
        say("no queue", syscall(SYS_tgkill, getpid(), gettid(), SIGUSR1));
        fflush(stdout), _exit(0);
    }
    wait(0), close(got), close(ends[0]), close(pidfd);
}

static int ready(int fd) {
    struct pollfd polled = {fd, POLLIN, 0};
    return poll(&polled, 1, 0);
}

static void corks(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
    int on = 1, off = 0;
    char bytes[99];
    bind(listener, (void *)&address, len), listen(listener, 1);
    getsockname(listener, (void *)&address, &len), connect(client, (void *)&address, len);
    int server = accept(listener, 0, 0);
    say("more", send(client, "one", 3, MSG_MORE)), say("ready", ready(server));
    say("rest", send(client, "two", 3, 0)), say("read", read(server, bytes, 99));
    setsockopt(client, IPPROTO_TCP, TCP_CORK, &on, sizeof on);
    write(client, "one", 3), say("corked", ready(server));
    setsockopt(client, IPPROTO_TCP, TCP_CORK, &off, sizeof off);
    say("read", read(server, bytes, 99));
    send(client, "last", 4, MSG_MORE), close(client), say("closed", read(server, bytes, 99));
    close(server), close(listener);
}

static void edges(void) {
    int ends[2], set = epoll_create1(0);
    struct epoll_event event = {EPOLLIN | EPOLLET, {}}, found[2];
    char bytes[4096];
    pipe2(ends, O_NONBLOCK), fcntl(ends[1], F_SETPIPE_SZ, 4096);
    epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event);
    event.events = EPOLLOUT | EPOLLET, epoll_ctl(set, EPOLL_CTL_ADD, ends[1], &event);
    write(ends[1], bytes, 4096), say("full", epoll_wait(set, found, 2, 0));
    read(ends[0], bytes, 2048), say("half", epoll_wait(set, found, 2, 0));
    read(ends[0], bytes, 2048), say("empty", epoll_wait(set, found, 2, 0));
    write(ends[1], bytes, 1), epoll_wait(set, found, 2, 0), write(ends[1], bytes, 1);
    say("another byte", epoll_wait(set, found, 2, 0)), close(ends[1]);
    say("closed", epoll_wait(set, found, 2, 0)), close(ends[0]), close(set);
}

int main(void) {
    sigset_t set;
    sigemptyset(&set), sigaddset(&set, SIGIO), sigaddset(&set, SIGRTMIN);
    sigprocmask(SIG_BLOCK, &set, 0);
    owners(), signals(), directories(), futexes(), sharing(), processes(), corks(), edges();
    return 0;
}
