// Signals of open files (O_ASYNC), each beside hundreds of others: after every event it prints the
// descriptors that have sent one, which are the same on Linux itself.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OTHERS = 400, MAX = 1024 };
static sigset_t set;
static const char *names[MAX];

// Prints which files have sent signals: that they can be read, and that they can be written.
static void sent(const char *event) {
    int in[MAX] = {0}, out[MAX] = {0};
    siginfo_t info;
    struct timespec none = {0, 0};
    while (sigtimedwait(&set, &info, &none) > 0)
        if (info.si_fd >= 0 && info.si_fd < MAX) (info.si_code == POLL_OUT ? out : in)[info.si_fd] = 1;
    printf("%s:", event);
    for (int fd = 0; fd < MAX; fd++) {
        if (in[fd]) printf(" %s", names[fd] ? names[fd] : "another");
        if (out[fd]) printf(" %s+", names[fd] ? names[fd] : "another");
    }
    puts("");
}

static int with_signals(int fd, const char *name) {
    names[fd] = name;
    fcntl(fd, F_SETOWN, getpid()), fcntl(fd, F_SETSIG, SIGRTMIN);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_ASYNC | O_NONBLOCK);
    return fd;
}

static void closed(int fd) { close(fd), names[fd] = NULL; }

static void others(void) {
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    for (int n = 0; n < OTHERS; n += 2) {
        int ends[2], listener = socket(AF_INET, SOCK_STREAM, 0);
        bind(listener, (void *)&any, sizeof any), listen(listener, 1), with_signals(listener, 0);
        pipe(ends), with_signals(ends[0], 0);
    }
}

static void pipes(void) {
    int ends[2], second;
    char bytes[70000];
    pipe(ends), with_signals(ends[0], "reader"), with_signals(ends[1], "writer");
    sent("new"), write(ends[1], "x", 1), sent("written");
    write(ends[1], "x", 1), sent("written again"), read(ends[0], bytes, 2), sent("read");
    second = dup(ends[1]), write(second, bytes, 65536), sent("full");
    fflush(stdout);
    if (fork() == 0) _exit(read(ends[0], bytes, 65536) != 65536);
    wait(0), sent("read by a child"), close(second), closed(ends[1]), sent("closed"), closed(ends[0]);
}

static void connections(int family) {
    struct sockaddr_storage address = {.ss_family = family};
    socklen_t len = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(sa_family_t);
    if (family == AF_INET) ((struct sockaddr_in *)&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(family, SOCK_STREAM, 0);
    bind(listener, (void *)&address, len), listen(listener, 3), with_signals(listener, "listener");
    len = sizeof address, getsockname(listener, (void *)&address, &len);
    sent("listens");
    int clients[2];
    for (int n = 0; n < 2; n++) {
        clients[n] = socket(family, SOCK_STREAM, 0);
        connect(clients[n], (void *)&address, len), sent("connected");
    }
    int server = accept(listener, 0, 0);
    sent("accepted"), with_signals(server, "server"), write(clients[0], "x", 1), sent("sent");
    int another = accept(listener, 0, 0);
    sent("accepted"), with_signals(another, "second"), write(clients[1], "x", 1), sent("sent");
    fflush(stdout);
    if (fork() == 0) _exit(write(clients[0], "y", 1) != 1);
    wait(0), sent("sent by a child");
    shutdown(clients[1], SHUT_WR), sent("shut down");
    fcntl(server, F_SETFL, 0), write(clients[0], "x", 1), sent("off");
    close(clients[0]), close(clients[1]), closed(server), closed(another), sent("closed");
    int late = socket(family, SOCK_STREAM, 0);
    connect(late, (void *)&address, len), sent("connected"), closed(listener), close(late);
}

static void datagrams(void) {
    int pair[2];
    socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
    with_signals(pair[0], "datagrams"), sent("new");
    send(pair[1], "x", 1, 0), sent("sent"), send(pair[1], "x", 1, 0), sent("sent again");
    closed(pair[0]), close(pair[1]);
}

static void watches(void) {
    char path[] = "/tmp/asyncXXXXXX", name[64];
    mkdtemp(path), snprintf(name, 64, "%s/one", path);
    int watch = with_signals(inotify_init1(0), "watch");
    inotify_add_watch(watch, path, IN_CREATE | IN_DELETE), sent("watched");
    close(open(name, O_CREAT | O_RDWR, 0600)), sent("created");
    unlink(name), sent("removed"), closed(watch), rmdir(path);
}

static void terminals(void) {
    int master, slave;
    if (openpty(&master, &slave, 0, 0, 0)) return;
    with_signals(slave, "terminal"), sent("new"), write(master, "x\n", 2);
    struct pollfd readable = {slave, POLLIN};
    poll(&readable, 1, 10000), sent("written"), closed(slave), close(master);
}

int main(void) {
    sigemptyset(&set), sigaddset(&set, SIGRTMIN), sigaddset(&set, SIGIO), sigprocmask(SIG_BLOCK, &set, 0);
    for (int round = 0; round < 2; round++) {
        pipes(), connections(AF_INET), connections(AF_UNIX), datagrams(), watches(), terminals();
        if (round == 0) others(), sent("others");
    }
    return 0;
}
