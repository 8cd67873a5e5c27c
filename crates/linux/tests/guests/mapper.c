/* Changes its memory map, or that of a child that it forks. A request is a line "WHO OP A B C", and
 * a line answers it. It is built without a C library's buffering, so that nothing else changes. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096
#define SLOTS 6
#define CHILDREN 4
static struct { char *at; long pages, shared, readonly; } slots[SLOTS];
/* Files whose parts are mapped. */
static int file;
static char *heap;
static long heap_pages;
/* The first is the program itself. */
static struct { int to, from, id; } children[CHILDREN];

static uint64_t mix(uint64_t sum, uint64_t word) {
    return (sum ^ word) * 0x100000001b3;
}

/* The word that fills a page, or one that no page has. */
static uint64_t word(const char *page) {
    const uint64_t *words = (const uint64_t *)page;
    for (int i = 1; i < PAGE / 8; i++)
        if (words[i] != words[0]) return ~0ul;
    return words[0];
}

static void fill(char *page, uint64_t word) {
    for (int i = 0; i < PAGE / 8; i++) ((uint64_t *)page)[i] = word;
}

static uint64_t sum(void) {
    uint64_t all = 0xcbf29ce484222325;
    for (int i = 0; i < SLOTS; i++) {
        all = mix(mix(mix(all, slots[i].pages), slots[i].shared), slots[i].readonly);
        for (long page = 0; page < slots[i].pages; page++) all = mix(all, word(slots[i].at + page * PAGE));
    }
    all = mix(all, heap_pages);
    for (long page = 0; page < heap_pages; page++) all = mix(all, word(heap + page * PAGE));
    return all;
}

static void serve(int from, int to);

static int spawn(int number) {
    int down[2], up[2];
    if (pipe(down) || pipe(up)) return 0;
    int id = fork();
    if (id < 0) return 0;
    if (id == 0) {
        close(down[1]), close(up[0]);
        serve(down[0], up[1]);
        _exit(0);
    }
    close(down[0]), close(up[1]);
    children[number].to = down[1], children[number].from = up[0], children[number].id = id;
    return 1;
}

/* 0 if a call failed. */
static uint64_t act(char what, long a, long b, long c) {
    int rw = PROT_READ | PROT_WRITE;
    switch (what) {
    case 'm':
    case 'M':
        if (slots[a].at) munmap(slots[a].at, slots[a].pages * PAGE);
        slots[a].shared = what == 'M', slots[a].pages = b, slots[a].readonly = 0;
        slots[a].at = mmap(0, b * PAGE, rw, MAP_ANONYMOUS | (what == 'M' ? MAP_SHARED : MAP_PRIVATE), -1, 0);
        return slots[a].at != MAP_FAILED;
    case 'F':
        if (slots[a].at) munmap(slots[a].at, slots[a].pages * PAGE);
        slots[a].shared = slots[a].readonly = 0, slots[a].pages = b;
        slots[a].at = mmap(0, b * PAGE, rw, MAP_PRIVATE, file, c * PAGE);
        return slots[a].at != MAP_FAILED;
    case 'X': {
        static char page[PAGE];
        fill(page, c);
        return pwrite(file, page, PAGE, b * PAGE) == PAGE;
    }
    case 't': { /* A shorter one. */
        int failed = munmap(slots[a].at + b * PAGE, (slots[a].pages - b) * PAGE);
        slots[a].pages = b;
        if (!b) memset(&slots[a], 0, sizeof slots[a]);
        return !failed;
    }
    case 'r':
        slots[a].at = mremap(slots[a].at, slots[a].pages * PAGE, b * PAGE, MREMAP_MAYMOVE);
        slots[a].pages = b;
        return slots[a].at != MAP_FAILED;
    case 'w': fill(slots[a].at + b * PAGE, c); return 1;
    case 'p': slots[a].readonly = b; return !mprotect(slots[a].at, slots[a].pages * PAGE, b ? PROT_READ : rw);
    case 'd': return !madvise(slots[a].at + b * PAGE, PAGE, MADV_DONTNEED);
    case 'b':
        if (brk(heap + a * PAGE)) return 0;
        heap_pages = a;
        return 1;
    case 'W': fill(heap + b * PAGE, c); return 1;
    case 'f': return spawn(a);
    case 'k':
        kill(children[a].id, SIGKILL), close(children[a].to), close(children[a].from);
        return waitpid(children[a].id, 0, 0) == children[a].id;
    case 's': return sum();
    }
    return 0;
}

static void serve(int from, int to) {
    static char line[256];
    for (;;) {
        long length = read(from, line, sizeof line - 1), who, a = 0, b = 0, c = 0;
        char what;
        if (length <= 0) return;
        line[length] = 0;
        if (sscanf(line, "%ld %c %ld %ld %ld", &who, &what, &a, &b, &c) < 2) return;
        if (who) {
            line[0] = '0';
            write(children[who].to, line, length);
            length = read(children[who].from, line, sizeof line);
        } else {
            length = sprintf(line, "%lu\n", act(what, a, b, c));
        }
        write(to, line, length > 0 ? length : 0);
    }
}

int main(void) {
    heap = (char *)(((uintptr_t)sbrk(0) + PAGE - 1) & -PAGE);
    brk(heap);
    file = memfd_create("shown", 0);
    ftruncate(file, 2 * 24 * PAGE);
    serve(0, 1);
}
