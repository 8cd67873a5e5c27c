// Shared memory at its limits: a program that requests more than its limit. Each line of input
// names a part.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1L << 20)
#define PAGE 4096L
// Bytes that a part takes at a time, and the number of times.
#define STEP (8 * MIB)
#define ROUNDS 64

static int sparse(const char *path, long size) {
    int file = open(path, O_RDWR | O_CREAT, 0600);
    return ftruncate(file, size) ? -1 : file;
}

static char *share(int file, long len, long offset) {
    int flags = file < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
    return mmap(0, len, PROT_READ | PROT_WRITE, flags, file, offset);
}

// A window that moves over a file. One page of the file stays mapped.
static int windows(void) {
    int file = sparse("/tmp/window", ROUNDS * STEP), round = 0;
    share(file, PAGE, 0);
    for (; round < ROUNDS; ++round) {
        char *window = share(file, STEP, round * STEP);
        if (window == MAP_FAILED) break;
        memset(window, 1, STEP);
        munmap(window, STEP);
    }
    return round;
}

// Anonymous memory. One page of it stays mapped.
static int remnants(void) {
    int round = 0;
    for (; round < ROUNDS; ++round) {
        char *memory = share(-1, STEP, 0);
        if (memory == MAP_FAILED) break;
        memset(memory, 1, STEP);
        munmap(memory + PAGE, STEP - PAGE);
    }
    return round;
}

// The same by processes that end.
static int heirs(void) {
    int file = sparse("/tmp/heirs", ROUNDS * STEP), round = 0, status;
    share(file, PAGE, 0);
    for (; round < ROUNDS; ++round) {
        if (!fork()) {
            char *window = share(file, STEP, round * STEP);
            if (window == MAP_FAILED) _exit(1);
            memset(window, 1, STEP);
            _exit(0);
        }
        if (wait(&status) < 0 || status) break;
    }
    return round;
}

// Files that are written through mappings only, beyond the limit of storage.
static int files(void) {
    int list[ROUNDS], round = 0;
    for (int n = 0; n < ROUNDS; ++n) {
        char path[64];
        sprintf(path, "/tmp/file-%d", n);
        list[n] = sparse(path, STEP);
    }
    for (; round < ROUNDS; ++round) {
        char *memory = share(list[round], STEP, 0);
        if (memory == MAP_FAILED) break;
        memset(memory, 1, STEP);
        munmap(memory, STEP);
    }
    return round;
}

// The same with segments.
static int segments(void) {
    int list[ROUNDS], round = 0;
    for (int n = 0; n < ROUNDS; ++n) list[n] = shmget(IPC_PRIVATE, STEP, 0600);
    for (; round < ROUNDS; ++round) {
        char *memory = shmat(list[round], 0, 0);
        if (memory == (void *)-1) break;
        memset(memory, 1, STEP);
        shmdt(memory);
    }
    return round;
}

// Memory that is mapped and not touched is free again afterwards.
static int untouched(void) {
    int file = sparse("/tmp/untouched", ROUNDS * STEP), round = 0;
    share(file, PAGE, 0);
    for (; round < ROUNDS; ++round) {
        char *window = share(file, STEP, round * STEP);
        if (window == MAP_FAILED) break;
        window[0] = 1;
        munmap(window, STEP);
    }
    return round;
}

// A mapped file that becomes huge and small again.
static int huge(void) {
    int file = sparse("/tmp/huge", PAGE);
    char *memory = share(file, PAGE, 0);
    strcpy(memory, "first");
    int grown = !ftruncate(file, 1L << 50), byte = pwrite(file, "x", 1, 1L << 49) == 1;
    char *far = share(file, PAGE, 1L << 49);
    int seen = far != MAP_FAILED && *far == 'x';
    int punched = !fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, PAGE, 1L << 50);
    seen = seen && punched && *far == 0;
    int cut = !ftruncate(file, 10) && !strcmp(memory, "first");
    return grown && byte && seen && cut;
}

// Data that was written through a mapping is not a hole.
static int holes(void) {
    int file = sparse("/tmp/holes", 64 * PAGE);
    share(file, 64 * PAGE, 0)[9 * PAGE] = 1;
    return lseek(file, 0, SEEK_DATA) == 9 * PAGE && lseek(file, 9 * PAGE, SEEK_HOLE) == 10 * PAGE;
}

// A file of more bytes than the memory limit leaves. A page of it is mapped for reading. Writes to
// it need memory.
static int late(void) {
    static char part[MIB];
    char byte = 0;
    int file = open("/tmp/late", O_RDWR | O_CREAT, 0600), reader = open("/tmp/late", O_RDONLY);
    memset(part, 'a', MIB);
    for (int n = 0; n < 40; ++n) write(file, part, MIB);
    char *seen = mmap(0, PAGE, PROT_READ, MAP_SHARED, file, 0);
    if (seen == MAP_FAILED || *seen != 'a') return 2;
    // A refused call changes nothing.
    if (pwrite(file, "b", 1, 0) != -1 || errno != ENOMEM) return 3;
    if (pread(file, &byte, 1, 0) != 1 || byte != 'a' || *seen != 'a') return 4;
    if (ftruncate(file, 39 * MIB) != -1 || errno != ENOMEM || lseek(file, 0, SEEK_END) != 40 * MIB) return 5;
    if (truncate("/tmp/late", 39 * MIB) != -1 || errno != ENOMEM) return 6;
    if (pwrite(reader, "b", 1, 0) != -1 || errno != EBADF) return 7;
    // Another file is changed, and this one is emptied.
    if (open("/tmp/other", O_RDWR | O_CREAT | O_TRUNC, 0600) < 0 || truncate("/tmp/other", 10)) return 8;
    if (open("/tmp/late", O_RDWR | O_TRUNC) < 0 || pwrite(file, "c", 1, 0) != 1 || *seen != 'c') return 9;
    // The bytes that a call adds need memory as well.
    int more = sparse("/tmp/more", PAGE);
    if (mmap(0, PAGE, PROT_READ, MAP_SHARED, more, 0) == MAP_FAILED) return 10;
    while (mmap(0, MIB / 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED) {}
    if (pwrite(more, part, MIB, PAGE) != -1 || errno != ENOMEM || lseek(more, 0, SEEK_END) != PAGE) return 11;
    return 1;
}

// Memory that two processes share, of more than half of the limit.
static int common(void) {
    static char *memory;
    if (memory) return ++*memory;
    memory = share(-1, 5 * STEP, 0);
    if (memory == MAP_FAILED) return 0;
    *memory = 7;
    if (!fork()) for (;;) pause();
    return *memory;
}

// A file of another step of storage, which is written through a mapping.
static int grown;
static int grow(void) {
    char path[64];
    sprintf(path, "/tmp/grown-%d", grown++);
    char *memory = share(sparse(path, STEP + STEP / 4), STEP + STEP / 4, 0);
    if (memory == MAP_FAILED) return 0;
    memset(memory, 1, STEP + STEP / 4);
    return !munmap(memory, STEP + STEP / 4);
}

static int shrink(void) {
    int gone = 1;
    while (grown) {
        char path[64];
        sprintf(path, "/tmp/grown-%d", --grown);
        gone &= !truncate(path, 0);
    }
    return gone;
}

// Mappings of a page, each a file of the host. The files are freed.
static int many(void) {
    static char *pages[1 << 16];
    int count = 0, again = 0;
    while ((pages[count] = share(-1, PAGE, 0)) != MAP_FAILED) *pages[count] = 1, count++;
    if (errno != ENOMEM) return -2;
    // A file that is mapped for reading is not changed then, because that would take one more.
    int file = sparse("/tmp/many", PAGE);
    char *seen = mmap(0, PAGE, PROT_READ, MAP_SHARED, file, 0);
    if (seen == MAP_FAILED || pwrite(file, "b", 1, 0) != -1 || errno != ENOMEM || *seen) return -3;
    if (open("/tmp/many", O_RDWR | O_TRUNC) != -1 || errno != ENOMEM || open("/tmp/few", O_RDWR | O_TRUNC | O_CREAT, 0600) < 0) return -6;
    while (again < count) munmap(pages[again++], PAGE);
    if (pwrite(file, "b", 1, 0) != 1 || *seen != 'b') return -4;
    for (again = 0; again < count - 1; again++) if ((pages[again] = share(-1, PAGE, 0)) == MAP_FAILED) return -5;
    return count;
}

// Shared memory where the host has a limit of files of 64 MiB.
static int large(void) {
    char byte = 0;
    if (share(-1, 80 * MIB, 0) != MAP_FAILED || errno != ENOMEM) return 2;
    int file = sparse("/tmp/large", 80 * MIB), small = sparse("/tmp/small", 2 * PAGE);
    // A file that is not shared is no file of the host.
    if (pwrite(file, "a", 1, 90 * MIB) != 1) return 3;
    if (share(file, PAGE, 0) != MAP_FAILED || errno != ENOMEM) return 4;
    char *seen = mmap(0, PAGE, PROT_READ, MAP_SHARED, file, 0), *memory = share(small, 2 * PAGE, 0);
    if (seen == MAP_FAILED || pwrite(file, "a", 1, 0) != -1 || errno != EFBIG || *seen) return 5;
    if (memory == MAP_FAILED || ftruncate(small, 80 * MIB) != -1 || errno != EFBIG) return 6;
    if (pwrite(small, "a", 1, 80 * MIB) != -1 || errno != EFBIG) return 7;
    if (fallocate(small, 0, 0, 80 * MIB) != -1 || errno != EFBIG) return 8;
    if (truncate("/tmp/small", 65 * MIB) != -1 || errno != EFBIG) return 9;
    if (pwrite(small, "abc", 3, 64 * MIB - 2) != 2 || pwrite(small, "a", 1, 64 * MIB) != -1 || errno != EFBIG) return 10;
    if (ftruncate(small, 64 * MIB - 1) || ftruncate(small, 64 * MIB) || pread(small, &byte, 1, 64 * MIB - 2) != 1 || byte != 'a') return 11;
    memset(memory, 'x', 2 * PAGE);
    if (pread(small, &byte, 1, 2 * PAGE - 1) != 1 || byte != 'x') return 12;
    return 1;
}

int main(void) {
    char line[64];
    setvbuf(stdout, 0, _IONBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        int done = -1;
        switch (line[0] << 8 | line[1]) {
        case 'w' << 8 | 'i': done = windows(); break;
        case 'r' << 8 | 'e': done = remnants(); break;
        case 'h' << 8 | 'e': done = heirs(); break;
        case 'f' << 8 | 'i': done = files(); break;
        case 's' << 8 | 'e': done = segments(); break;
        case 'u' << 8 | 'n': done = untouched(); break;
        case 'h' << 8 | 'u': done = huge(); break;
        case 'h' << 8 | 'o': done = holes(); break;
        case 'l' << 8 | 'a': done = late(); break;
        case 'c' << 8 | 'o': done = common(); break;
        case 'g' << 8 | 'r': done = grow(); break;
        case 's' << 8 | 'h': done = shrink(); break;
        case 'm' << 8 | 'a': done = many(); break;
        case 'l' << 8 | 'g': done = large(); break;
        }
        printf("%d\n", done);
    }
}
