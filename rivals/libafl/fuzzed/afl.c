// The target under AFL++: in its persistent mode if PERSISTENT is defined, else a fork for each
// input. Inputs arrive in shared memory, and the target is warm before the first one.
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

void target_warm(size_t mib);
void target_run(const uint8_t *input, size_t len);

__AFL_FUZZ_INIT();

int main(int count, char **arguments) {
    target_warm(count > 1 ? strtoul(arguments[1], 0, 10) : 0);
    __AFL_INIT();
    const uint8_t *input = __AFL_FUZZ_TESTCASE_BUF;
#ifdef PERSISTENT
    while (__AFL_LOOP(10000))
#endif
        target_run(input, __AFL_FUZZ_TESTCASE_LEN);
    return 0;
}
