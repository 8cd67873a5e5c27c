// Asynchronous I/O by `io_submit`. It prints results, which are the same on Linux itself.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static void say(const char *what, long value) {
    if (value < 0) printf("%s: %s\n", what, strerrorname_np(errno));
    else printf("%s: %ld\n", what, value);
}

static aio_context_t context;

static long submit(struct iocb *operation) { return syscall(SYS_io_submit, context, 1, &operation); }

static void results(const char *what, long least, long most, struct timespec *limit) {
    struct io_event events[8];
    long count = syscall(SYS_io_getevents, context, least, most, events, limit);
    say(what, count);
    for (long n = 0; n < count; n++) printf("  %lld %lld %lld\n", events[n].data, events[n].res, events[n].res2);
}

static void *late(void *argument) {
    struct timespec pause = {0, 50000000};
    nanosleep(&pause, 0), submit(argument);
    return 0;
}

static void handled(int signal) { (void)signal; }

int main(void) {
    char path[] = "/tmp/aioXXXXXX", text[8192], back[8192] = {0};
    int file = mkstemp(path), reader = open(path, O_RDONLY), event = eventfd(0, EFD_NONBLOCK);
    struct timespec none = {0}, soon = {0, 20000000};
    memset(text, 'x', sizeof text), unlink(path);
    say("no context", syscall(SYS_io_setup, 0, &context)), context = 1, say("a used one", syscall(SYS_io_setup, 4, &context)), context = 0;
    say("far too many", syscall(SYS_io_setup, -1, &context)), say("nowhere", syscall(SYS_io_setup, 4, (void *)8)), say("context", syscall(SYS_io_setup, 4, &context)), printf("%d\n", context != 0 && context % 4096 == 0);
    struct iocb write = {.aio_data = 11, .aio_lio_opcode = IOCB_CMD_PWRITE, .aio_fildes = file, .aio_buf = (uintptr_t)text, .aio_nbytes = sizeof text};
    struct iocb read = {.aio_data = 12, .aio_lio_opcode = IOCB_CMD_PREAD, .aio_fildes = reader, .aio_buf = (uintptr_t)back, .aio_nbytes = sizeof back, .aio_offset = 4096, .aio_flags = IOCB_FLAG_RESFD, .aio_resfd = event};
    say("write", submit(&write)), results("written", 1, 8, 0);
    say("read", submit(&read)), results("done", 1, 8, 0), printf("%d\n", memcmp(text, back, 4096));
    uint64_t count = 0;
    say("event", (syscall(SYS_read, event, &count, 8))), printf("%lu\n", count);
    struct iovec pieces[] = {{text, 3}, {text, 5}};
    struct iocb vector = {.aio_data = 13, .aio_lio_opcode = IOCB_CMD_PWRITEV, .aio_fildes = file, .aio_buf = (uintptr_t)pieces, .aio_nbytes = 2, .aio_offset = 9000};
    struct iocb sync = {.aio_data = 14, .aio_lio_opcode = IOCB_CMD_FSYNC, .aio_fildes = file};
    struct iocb *both[] = {&vector, &sync}, *bad[] = {&vector, 0};
    say("two", syscall(SYS_io_submit, context, 2, both)), results("both", 2, 8, 0);
    say("a bad one behind", syscall(SYS_io_submit, context, 2, bad)), results("one", 1, 8, 0);
    struct iocb wrong = write;
    wrong.aio_fildes = reader, say("not writable", submit(&wrong)), wrong = read, wrong.aio_fildes = -1, say("no descriptor", submit(&wrong));
    wrong = read, wrong.aio_reserved2 = 1, say("reserved", submit(&wrong)), wrong = read, wrong.aio_lio_opcode = 99, say("unknown", submit(&wrong));
    wrong = read, wrong.aio_resfd = file, say("no eventfd", submit(&wrong)), wrong = sync, wrong.aio_nbytes = 1, say("sync of bytes", submit(&wrong));
    say("no operation", syscall(SYS_io_submit, context, 1, bad + 1)), say("no list", syscall(SYS_io_submit, context, 1, (void *)8)), say("none", syscall(SYS_io_submit, context, 0, both)), say("below none", syscall(SYS_io_submit, context, -1L, both));
    say("no such context", syscall(SYS_io_submit, context + 4096 * 64, 1, both)), say("context 0", syscall(SYS_io_destroy, 0));
    results("nothing yet", 0, 8, &none), results("in time", 1, 8, &soon), results("less than none", -1, 8, &none), results("too many", 9, 8, &none);
    pthread_t thread;
    pthread_create(&thread, 0, late, &write), results("of a thread", 1, 8, 0), pthread_join(thread, 0);
    struct sigaction action = {.sa_handler = handled};
    struct itimerspec at = {.it_value.tv_nsec = 20000000};
    timer_t timer;
    sigaction(SIGALRM, &action, 0), timer_create(CLOCK_MONOTONIC, 0, &timer), timer_settime(timer, 0, &at, 0), results("with a signal", 1, 8, 0);
    struct io_event ended;
    say("cancel", syscall(SYS_io_cancel, context, &write, &ended)), say("cancel nothing", syscall(SYS_io_cancel, context, (void *)8, &ended));
    say("pgetevents", syscall(SYS_io_pgetevents, context, 0, 1, &ended, &none, 0));
    say("destroy", syscall(SYS_io_destroy, context)), say("again", syscall(SYS_io_destroy, context)), results("of none", 0, 1, &none);
}
