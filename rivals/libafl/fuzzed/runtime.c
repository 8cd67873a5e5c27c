// The runtime of the target: it counts the target's edges in a map, as AFL does. Under AFL's fork
// server protocol (which LibAFL speaks) it forks for each input, once the target is warm. Alone it
// reads inputs from descriptor 0, each behind its length. The answer to an empty input is the
// address of the map.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAP = 8192, INPUT = 1 << 16, CONTROL = 198, STATUS = 199, HELLO = 0x41464c01, MAP_SIZE = 1, SHARED_INPUT = 2 };

void target_warm(size_t mib);
void target_run(const uint8_t *input, size_t len);

static uint8_t own[MAP] __attribute__((aligned(4096)));
static uint8_t *map = own;
static uint32_t last;

void __sanitizer_cov_trace_pc(void) {
    uint64_t here = (uint64_t)__builtin_return_address(0) * 0x9e3779b97f4a7c15u >> 40;
    map[(here ^ last) % MAP]++;
    last = here >> 1;
}

static int take(int *word) { return read(CONTROL, word, 4) == 4; }
static int say(int word) { return write(STATUS, &word, 4) == 4; }

static int serve_forks(void) {
    const char *id = getenv("__AFL_SHM_FUZZ_ID");
    if (!id) return 1;
    uint8_t *input = shmat(atoi(id), 0, 0);
    map = shmat(atoi(getenv("__AFL_SHM_ID")), 0, 0);
    int word, status;
    if (input == (void *)-1 || map == (void *)-1) return 2;
    if (!say(HELLO) || !take(&word) || word != (int)~HELLO) return 3;
    if (!say(MAP_SIZE | SHARED_INPUT) || !say(MAP) || !say(HELLO)) return 4;
    while (take(&word)) {
        pid_t child = fork();
        if (child < 0) return 5;
        if (!child) {
            uint32_t len;
            memcpy(&len, input, 4);
            close(CONTROL);
            close(STATUS);
            last = 0;
            memset(map, 0, MAP);
            target_run(input + 4, len);
            _exit(0);
        }
        if (!say(child) || waitpid(child, &status, 0) != child || !say(status)) return 6;
    }
    return 0;
}

static void all(uint8_t *to, size_t len) {
    for (size_t done = 0; done < len;) {
        ssize_t got = read(0, to + done, len - done);
        if (got <= 0) _exit(0);
        done += got;
    }
}

int main(int count, char **arguments) {
    static uint8_t input[INPUT + 4];
    target_warm(count > 1 ? strtoul(arguments[1], 0, 10) : 0);
    memset(map, 0, MAP);
    last = 0;
    if (getenv("__AFL_SHM_ID")) return serve_forks();
    // The changes of an input stay: the executor restores the program at this point.
    for (;;) {
        // Length and bytes mostly come in one piece, which saves a call.
        ssize_t got = read(0, input, sizeof input);
        uint32_t len;
        if (got <= 0) return 0;
        if (got < 4) all(input + got, 4 - got), got = 4;
        memcpy(&len, input, 4);
        if (len > INPUT) return 7;
        if ((size_t)got < len + 4) all(input + got, len + 4 - got);
        if (len) {
            target_run(input + 4, len);
        } else {
            printf("%zu %d\n", (size_t)map, MAP);
            fflush(stdout);
        }
    }
}
