/* Counts words: passes the number of words of the input to the host function `seen(u64) -> u64`.
 * The answer is the sum of that number and the result, in decimal. */
#define AFRESH_IMPLEMENTATION
#include "afresh.h"

static int64_t seen;
static uint64_t calls;

void afresh_init(void) {
    seen = afresh_find("seen");
    afresh_log(AFRESH_INFO, "words is ready");
}

int64_t afresh_call(const uint8_t *input, size_t len) {
    uint64_t words = 0, answer = 0;
    int inside = 0;
    for (size_t i = 0; i < len; i++) {
        int space = input[i] == ' ' || input[i] == '\n' || input[i] == '\t';
        words += !space && !inside;
        inside = !space;
    }
    if (++calls > 1)
        afresh_panic("a call left something behind");
    if (seen >= 0 && afresh_host(seen, &words, sizeof words, &answer, sizeof answer) == sizeof answer)
        words += answer;
    char *text = malloc(24);
    char *end = text + 24, *start = end;
    do
        *--start = (char)('0' + words % 10);
    while (words /= 10);
    afresh_output(start, (size_t)(end - start));
    return 0;
}
