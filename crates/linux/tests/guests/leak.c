// Loses memory. LeakSanitizer looks for it at the end, in a process that shares the memory of this
// one and traces its threads.
#include <stdlib.h>

int main(void) {
    char *volatile lost = malloc(100);
    lost = 0;
    return lost != 0;
}
