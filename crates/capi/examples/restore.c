/* Restores a snapshot lazily and prints the sum of its bytes: restore STORE NAME [STRATEGY] */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <sys/mman.h>

#include "afresh.h"

static int fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, afresh_last_error());
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: restore STORE NAME [STRATEGY]\n");
        return 2;
    }
    afresh_snapshot *snapshot = NULL;
    if (afresh_open(argv[1], argv[2], &snapshot) != 0) return fail("open");

    size_t bytes = afresh_bytes(snapshot);
    unsigned char *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    afresh_restore *restore = NULL;
    if (afresh_map(snapshot, memory, argc > 3 ? argv[3] : NULL, &restore) != 0) return fail("map");
    afresh_snapshot_close(snapshot);

    /* The memory can be used at once; pages come when they are touched. */
    unsigned long sum = 0;
    for (size_t at = 0; at < bytes; at++) sum += memory[at];

    if (afresh_wait(restore, 10000) != 0) return fail("wait");
    afresh_status status;
    if (afresh_status_of(restore, &status) != 0) return fail("status");
    afresh_restore_close(restore);
    printf("%zu %lu %d\n", bytes, sum, status.done);
    return munmap(memory, bytes);
}
