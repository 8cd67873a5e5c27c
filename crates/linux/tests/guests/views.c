// Several views of files in memory: two writable ones in one process, the end of a file, growth,
// holes, mremap. The answer to a line is "ok" and a counter that was 40 when the program became
// warm, or the failure.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define P 4096L
static const char *failed;
#define CHECK(what) do { if (!(what) && !failed) failed = #what; } while (0)

static sigjmp_buf back;
static volatile int code;

static void on_bus(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    code = info->si_code;
    siglongjmp(back, 1);
}

// Whether a touch raises SIGBUS, for bytes beyond the end of a file.
static int is_beyond(volatile char *at) {
    code = 0;
    if (sigsetjmp(back, 1)) return code == BUS_ADRERR;
    (void)*at;
    return 0;
}

static int file(const char *name, char fill, long size) {
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    char page[P];
    memset(page, fill, P);
    for (long at = 0; at < size; at += P) CHECK(pwrite(fd, page, size - at < P ? size - at : P, at) > 0);
    return fd;
}

static char *view(int fd, long pages, int protection, long from) {
    char *at = mmap(0, pages * P, protection, MAP_SHARED, fd, from * P);
    CHECK(at != MAP_FAILED);
    return at;
}

static void two_views(void) {
    int fd = file("/tmp/two", 'a', 4 * P);
    char *one = view(fd, 4, 3, 0), *two = view(fd, 2, 3, 1), *three = view(fd, 4, 1, 0), byte;
    if (failed) return;
    one[P] = 'b', two[P] = 'c';
    CHECK(two[0] == 'b' && one[2 * P] == 'c' && three[P] == 'b' && three[2 * P] == 'c');
    CHECK(pread(fd, &byte, 1, 2 * P) == 1 && byte == 'c');
    CHECK(pwrite(fd, "d", 1, P) == 1 && one[P] == 'd' && two[0] == 'd' && three[P] == 'd');
    if (!fork()) {
        one[3 * P] = 'e';
        _exit(three[P] != 'd');
    }
    int status;
    CHECK(wait(&status) > 0 && status == 0 && three[3 * P] == 'e');
    CHECK(!munmap(one, 4 * P) && !munmap(three, 4 * P) && two[P] == 'c');
    CHECK(!munmap(two, 2 * P) && pread(fd, &byte, 1, 3 * P) == 1 && byte == 'e');
    close(fd);
}

static void ends(void) {
    int fd = file("/tmp/ends", 'a', P + 10);
    char *at = view(fd, 4, 3, 0);
    if (failed) return;
    CHECK(at[P] == 'a' && at[P + 10] == 0 && is_beyond(at + 2 * P) && is_beyond(at + 3 * P));
    // It grows under its mapping, and shrinks.
    CHECK(!ftruncate(fd, 4 * P) && at[2 * P] == 0);
    at[3 * P] = 'z';
    CHECK(pwrite(fd, "y", 1, 2 * P) == 1 && at[2 * P] == 'y' && at[3 * P] == 'z');
    CHECK(!ftruncate(fd, P) && at[0] == 'a' && is_beyond(at + P) && is_beyond(at + 3 * P));
    CHECK(!ftruncate(fd, 4 * P) && at[3 * P] == 0);
    munmap(at, 4 * P), close(fd);
}

static void holes(void) {
    int fd = file("/tmp/holes", 'a', 3 * P);
    char *writable = view(fd, 3, 3, 0), *readable = view(fd, 3, 1, 0);
    if (failed) return;
    writable[2 * P] = 'b';
    CHECK(!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, P, P));
    CHECK(writable[P] == 0 && readable[P] == 0 && readable[0] == 'a' && readable[2 * P] == 'b');
    CHECK(!fallocate(fd, FALLOC_FL_ZERO_RANGE, 2 * P, P) && readable[2 * P] == 0);
    munmap(writable, 3 * P), munmap(readable, 3 * P), close(fd);
}

static void moves(void) {
    int fd = file("/tmp/moves", 'a', 8 * P);
    char *one = view(fd, 2, 3, 0), byte;
    if (failed) return;
    char *again = mremap(one, 0, 2 * P, MREMAP_MAYMOVE);
    CHECK(again != MAP_FAILED && again != one);
    if (failed) return;
    again[0] = 'b';
    CHECK(one[0] == 'b');
    char *kept = mremap(one, 2 * P, 2 * P, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
    CHECK(kept != MAP_FAILED);
    if (failed) return;
    kept[P] = 'c';
    CHECK(one[P] == 'c' && again[P] == 'c');
    char *grown = mremap(kept, 2 * P, 8 * P, MREMAP_MAYMOVE);
    CHECK(grown != MAP_FAILED);
    if (failed) return;
    grown[7 * P] = 'd';
    CHECK(grown[P] == 'c' && pread(fd, &byte, 1, 7 * P) == 1 && byte == 'd');
    char *private = mmap(0, P, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mremap(private, 0, P, MREMAP_MAYMOVE) == MAP_FAILED && errno == EINVAL);
    munmap(one, 2 * P), munmap(again, 2 * P), munmap(grown, 8 * P), munmap(private, P), close(fd);
}

// A mapping that is only read, until its file changes, or it may be written.
static void readers(void) {
    int fd = file("/tmp/readers", 'a', 2 * P);
    char *reader = view(fd, 2, 1, 0);
    if (failed) return;
    CHECK(reader[P] == 'a');
    if (!fork()) {
        CHECK(pwrite(fd, "b", 1, P) == 1 && reader[P] == 'b' && reader[0] == 'a');
        _exit(failed != 0);
    }
    int status;
    CHECK(wait(&status) > 0 && status == 0 && reader[P] == 'b');
    CHECK(!mprotect(reader, P, 3));
    if (failed) return;
    reader[0] = 'c';
    char byte;
    CHECK(pread(fd, &byte, 1, 0) == 1 && byte == 'c');
    munmap(reader, 2 * P), close(fd);
}

int main(void) {
    struct sigaction action = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO};
    sigaction(SIGBUS, &action, 0);
    int fd = file("/tmp/warm", 0, 3 * P);
    volatile int *counter = (int *)view(fd, 3, 3, 0), *same = (int *)view(fd, 1, 3, 0);
    char *reader = view(fd, 3, 1, 0);
    *counter = 40;
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        two_views(), ends(), holes(), moves(), readers();
        ++*same;
        CHECK(*counter == *(int *)reader);
        CHECK(pwrite(fd, "x", 1, 2 * P) == 1 && reader[2 * P] == 'x');
        if (failed) printf("%s\n", failed);
        else printf("ok %d\n", *counter);
        fflush(stdout);
    }
    return 0;
}
