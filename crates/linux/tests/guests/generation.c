/* Watches /dev/afresh/generation in every way. The answer to a request has the generations that it
 * saw. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static int device;
static volatile uint64_t *page;
static volatile int signals, signalled_descriptor, signal_code;
static volatile uint64_t page_in_handler;

static void heed(int number, siginfo_t *info, void *context) {
    signals++;
    signalled_descriptor = info->si_fd, signal_code = info->si_code;
    page_in_handler = *page;
}

static int readable(void) {
    struct pollfd asked = {device, POLLIN, 0};
    return poll(&asked, 1, 0) == 1 ? asked.revents : 0;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static uint64_t seen_by_thread;
static int wakes;

static void *watch(void *unused) {
    for (;;) {
        struct pollfd asked = {device, POLLIN, 0};
        uint64_t value;
        if (poll(&asked, 1, -1) != 1 || read(device, &value, 8) != 8) abort();
        pthread_mutex_lock(&lock);
        seen_by_thread = value, wakes++;
        pthread_cond_signal(&changed);
        pthread_mutex_unlock(&lock);
    }
}

static int failed(long result) { return result == -1 ? errno : 0; }

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "single";
    char line[256];
    uint64_t value;
    device = open("/dev/afresh/generation", O_RDONLY | O_CLOEXEC);
    if (device < 0) return 1;
    page = mmap(0, 4096, PROT_READ, MAP_SHARED, device, 0);
    if (page == MAP_FAILED) return 2;
    if (!strcmp(mode, "threads")) {
        pthread_t thread;
        pthread_create(&thread, 0, watch, 0);
        while (fgets(line, sizeof line, stdin)) {
            pthread_mutex_lock(&lock);
            while (!wakes) pthread_cond_wait(&changed, &lock);
            printf("%d %016lx %016lx\n", wakes, seen_by_thread, *page);
            pthread_mutex_unlock(&lock);
            fflush(stdout);
        }
        return 0;
    }
    if (!strcmp(mode, "processes")) {
        int pipes[2];
        pipe(pipes);
        if (fork() == 0) {
            for (;;) {
                struct pollfd asked = {device, POLLIN, 0};
                if (poll(&asked, 1, -1) != 1 || read(device, &value, 8) != 8) abort();
                uint64_t both[2] = {value, *page};
                write(pipes[1], both, sizeof both);
            }
        }
        while (fgets(line, sizeof line, stdin)) {
            uint64_t both[2];
            if (read(pipes[0], both, sizeof both) != sizeof both) abort();
            printf("%016lx %016lx %016lx\n", both[0], both[1], *page);
            fflush(stdout);
        }
        return 0;
    }
    struct sigaction action = {.sa_sigaction = heed, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGUSR1, &action, 0);
    fcntl(device, F_SETOWN, getpid()), fcntl(device, F_SETSIG, SIGUSR1);
    fcntl(device, F_SETFL, fcntl(device, F_GETFL) | O_ASYNC);
    if (fcntl(device, F_GETOWN) != getpid() || fcntl(device, F_GETSIG) != SIGUSR1) return 3;
    if (!(fcntl(device, F_GETFL) & O_ASYNC)) return 4;
    int set = epoll_create1(0);
    struct epoll_event event = {EPOLLIN | EPOLLET, {.fd = device}}, found;
    if (epoll_ctl(set, EPOLL_CTL_ADD, device, &event)) return 5;
    if (readable()) return 6; /* The first generation was there when it was opened. */
    while (fgets(line, sizeof line, stdin)) {
        if (!strcmp(line, "misuse\n")) {
            char few[4];
            printf("%d", failed(read(device, few, 4)));
            printf(" %d", failed(open("/dev/afresh/generation", O_RDWR)));
            printf(" %d", failed((long)mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, device, 0)));
            printf(" %d", failed((long)mmap(0, 8192, PROT_READ, MAP_SHARED, device, 0)));
            printf(" %d", failed(mprotect((void *)page, 4096, PROT_READ | PROT_WRITE)));
            printf(" %d", failed(fcntl(device, F_SETOWN, 12345)));
            printf(" %d", failed(fcntl(device, F_SETSIG, 65)));
            /* MAP_DROPPABLE: without it the C library makes the system call getrandom. */
            printf(" %d\n", failed((long)mmap(0, 4096, PROT_READ | PROT_WRITE, 8 | MAP_ANONYMOUS, -1, 0)));
            fflush(stdout);
            continue;
        }
        int before = readable(), edges = epoll_wait(set, &found, 1, 0), again = epoll_wait(set, &found, 1, 0);
        uint64_t shown = *page, placed;
        if (read(device, &value, 8) != 8 || pread(device, &placed, 8, 0) != 8) abort();
        int own = signalled_descriptor == device && signal_code == POLL_IN && page_in_handler == value;
        printf("%d %d %d %d %d %d %016lx %016lx %016lx\n", signals, own, before, edges, again, readable(), value, placed, shown);
        fflush(stdout);
    }
    return 0;
}
