// Memory that processes share: anonymous, of a file, and through /dev/shm. Futexes across
// processes. "round" runs all checks. Its answer is "ok" or the failure.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *failed;
#define CHECK(what) do { if (!(what) && !failed) failed = #what; } while (0)

static int wait_for(int *word, int value) {
    while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == value)
        if (syscall(SYS_futex, word, FUTEX_WAIT, value, NULL, NULL, 0) && errno != EAGAIN) return -1;
    return 0;
}

static void tell(int *word, int value) {
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void leave(int *word, int code) {
    tell(word, code);
    _exit(code);
}

static int *standing;

static void round_trip(void) {
    char byte[8] = "";
    int file = open("/tmp/shared", O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(!ftruncate(file, 10000));
    int *words = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char *named = mmap(0, 12288, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    char *reads = mmap(0, 4096, PROT_READ, MAP_SHARED, open("/tmp/other", O_RDWR | O_CREAT, 0600), 0);
    int *own = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(words != MAP_FAILED && named != MAP_FAILED && reads != MAP_FAILED && own != MAP_FAILED);
    char *again = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(again != MAP_FAILED);
    if (again != MAP_FAILED) {
        strcpy(again + 100, "twice");
        CHECK(!strcmp(named + 100, "twice") && !munmap(again, 4096));
    }
    int child = fork();
    if (!child) {
        *own = 1;
        if (wait_for(words, 0) || *words != 5 || strcmp(named + 9000, "parent")) leave(words + 100, 2);
        strcpy(named + 4090, "across pages");
        munmap(reads, 4096);
        int other = open("/tmp/other", O_RDWR);
        char *writes = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, other, 0);
        if (ftruncate(other, 100)) leave(words + 100, 3);
        strcpy(writes, "read only");
        int memory = memfd_create("x", 0);
        if (ftruncate(memory, 4096)) leave(words + 100, 4);
        ++*standing;
        tell(words + 100, 7);
        _exit(wait_for(words, 5) ? 5 : 6);
    }
    strcpy(named + 9000, "parent");
    tell(words, 5);
    CHECK(!wait_for(words + 100, 0) && words[100] == 7);
    if (failed) printf("%d ", words[100]);
    CHECK(!strcmp(named + 4090, "across pages") && *own == 0);
    CHECK(pread(file, byte, 6, 4090) == 6 && !memcmp(byte, "across", 6));
    CHECK(pwrite(file, "inside", 6, 0) == 6 && !memcmp(named, "inside", 6));
    CHECK(!strcmp(reads, "read only"));
    int status;
    tell(words, 9);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 6);
    named[1] = 'X';
    CHECK(!msync(named, 4096, MS_SYNC) && !munmap(named, 12288));
    CHECK(pread(file, byte, 6, 0) == 6 && !memcmp(byte, "iXside", 6));
    struct stat told;
    CHECK(!fstat(file, &told) && told.st_size == 10000);
    CHECK(!unlink("/tmp/shared") && !unlink("/tmp/other"));
}

int main(void) {
    char line[64];
    standing = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    *standing = 40;
    setvbuf(stdout, 0, _IONBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        failed = 0;
        ++*standing;
        round_trip();
        printf("%s %d\n", failed ? failed : "ok", *standing);
    }
}
