/* Adds up the bytes of its inputs. The answer is eight little-endian words: the sum, the calls, a
 * value that the host function `seen(u64) -> u64` returned for the sum, a word of the heap, and the
 * first byte of each region.
 *
 * State of each kind takes part in the answer: variables with and without initial values, the heap,
 * the number of a host function, and regions. `crates/vm/tests/golden` holds a snapshot of it. */
#define AFRESH_IMPLEMENTATION
#include "afresh.h"

static uint64_t calls, sum = 1000;
static int64_t seen;
static uint64_t *kept;
static uint64_t answer[8];

void afresh_init(void) {
    seen = afresh_find("seen");
    kept = calloc(1024, sizeof *kept);
    kept[1023] = 7;
}

int64_t afresh_call(const uint8_t *input, size_t len) {
    const struct afresh_boot *boot = afresh_boot_info();
    for (size_t i = 0; i < len; i++)
        sum += input[i];
    calls += 1;
    kept[1023] *= 3;
    answer[0] = sum;
    answer[1] = calls;
    if (afresh_host(seen, &sum, sizeof sum, &answer[2], sizeof answer[2]) != sizeof answer[2])
        afresh_panic("the host function `seen` failed");
    answer[3] = kept[1023];
    for (uint32_t i = 0; i < boot->region_count && i < 4; i++) {
        uint8_t *region = (uint8_t *)boot->regions[i].address;
        if (boot->regions[i].kind == 3)
            continue;
        if (boot->regions[i].kind == 0)
            region[0] += 1;
        answer[4 + i] = region[0];
    }
    afresh_output(answer, sizeof answer);
    return 0;
}
