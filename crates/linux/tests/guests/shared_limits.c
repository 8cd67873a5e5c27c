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

// Writes to a file of which a page is written through a mapping. Their bytes need memory.
static int appended(void) {
    static char part[MIB];
    int file = sparse("/tmp/appended", PAGE), round = 0;
    if (share(file, PAGE, 0) == MAP_FAILED) return -1;
    memset(part, 'a', MIB);
    while (round < ROUNDS && pwrite(file, part, MIB, PAGE + round * MIB) == MIB) ++round;
    if (errno != ENOMEM) return -2;
    // Bytes that have their memory can be written, and a file that is cut gives its memory back.
    if (pwrite(file, part, MIB, PAGE) != MIB || ftruncate(file, PAGE)) return -3;
    return pwrite(file, part, MIB, PAGE) == MIB ? round : -4;
}

// A file that grows and is cut again and again.
static int cut(void) {
    static char part[MIB];
    int file = sparse("/tmp/cut", PAGE), round = 0;
    if (share(file, PAGE, 0) == MAP_FAILED) return -1;
    memset(part, 'a', MIB);
    for (; round < ROUNDS; ++round) {
        for (int n = 0; n < 8; ++n) if (write(file, part, MIB) != MIB) return round;
        if (ftruncate(file, PAGE) || lseek(file, 0, SEEK_SET)) return -2;
    }
    return round;
}

// Memory that the file has as well counts once.
static int once(void) {
    int file = sparse("/tmp/once", 5 * STEP);
    char *memory = share(file, 5 * STEP, 0);
    if (memory == MAP_FAILED) return -1;
    memset(memory, 1, 5 * STEP);
    if (lseek(file, 0, SEEK_HOLE) != 5 * STEP || share(file, PAGE, 0) == MAP_FAILED) return -2;
    return mmap(0, STEP, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
}

static unsigned long drawn = 7;
static long draw(long below) {
    drawn = drawn * 6364136223846793005UL + 1;
    return (long)(drawn >> 33) % below;
}

// Random writes through a mapping and by calls, against a plain array.
#define SPAN (8 * PAGE)
static int modelled(void) {
    static char model[SPAN], bytes[SPAN];
    long size = SPAN / 2;
    int file = sparse("/tmp/modelled", size);
    char *memory = share(file, SPAN, 0);
    if (memory == MAP_FAILED) return -1;
    memset(model + size, 0, SPAN - size);
    for (int n = 1; n < 4000; ++n) {
        long at = draw(SPAN), len = 1 + draw(2 * PAGE), most = SPAN - at < len ? SPAN - at : len;
        switch (draw(8)) {
        case 0: case 1: case 2:
            for (; len > 0 && at < size; at += 99, len -= 99) memory[at] = model[at] = (char)n;
            // The rest of the last page is no part of the file.
            if (size % PAGE) memory[size] = 'z';
            break;
        case 3: case 4:
            memset(bytes, n, most), memset(model + at, n, most);
            if (pwrite(file, bytes, most, at) != most) return 2;
            if (at + most > size) size = at + most;
            break;
        case 5:
            if (draw(2) ? ftruncate(file, at) : truncate("/tmp/modelled", at)) return 3;
            memset(model + at, 0, SPAN - at), size = at;
            break;
        case 6:
            if (fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, most)) return 4;
            memset(model + at, 0, most);
            break;
        default:
            most = at > size ? 0 : size - at < most ? size - at : most;
            if (pread(file, bytes, SPAN - at < len ? SPAN - at : len, at) != most) return 5;
            if (memcmp(bytes, model + at, most)) return 6;
            char *private = mmap(0, PAGE, PROT_READ, MAP_PRIVATE, file, at / PAGE * PAGE);
            if (at < size && *private != model[at / PAGE * PAGE]) return 7;
            munmap(private, PAGE);
        }
        if (memcmp(memory, model, size)) return 8;
    }
    return 1;
}

// A file of a layer is cut while it is mapped: the bytes of the mapping stay.
static int layered(char *line) {
    char *path = strchr(line, '/');
    if (!path) return -1;
    path[strcspn(path, "\n")] = 0;
    int file = open(path, O_RDWR);
    char *memory = share(file, SPAN, 0);
    if (memory == MAP_FAILED) return -2;
    memory[0] = memory[3 * PAGE] = 'x';
    for (int pages = 6; pages >= 4; pages -= 2) {
        if (pages == 6 ? ftruncate(file, pages * PAGE - 9) : truncate(path, pages * PAGE)) return -3;
        if (memory[0] != 'x' || memory[3 * PAGE] != 'x') return 2;
        if (memory[1] != 'l' || memory[PAGE] != 'l') return 3;
    }
    if (ftruncate(file, SPAN) || memory[4 * PAGE] || memory[5 * PAGE]) return 4;
    char byte;
    if (pread(file, &byte, 1, 3 * PAGE) != 1 || byte != 'x') return 5;
    return 1;
}

int main(void) {
    char line[512];
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
        case 'a' << 8 | 'p': done = appended(); break;
        case 'c' << 8 | 'u': done = cut(); break;
        case 'o' << 8 | 'n': done = once(); break;
        case 'm' << 8 | 'o': done = modelled(); break;
        case 'l' << 8 | 'y': done = layered(line); break;
        }
        printf("%d\n", done);
    }
}
