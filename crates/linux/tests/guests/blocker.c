/* Child processes that block the host's interrupt, and wait in a call that the kernel keeps.
 *
 * A child returns by the stub's own `rt_sigreturn` from a frame with its own mask. The request
 * "block" makes the children; any other request is answered. */
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "processor.h"

#define CHILDREN 40

static long forged[FRAME_WORDS] __attribute__((aligned(64)));
static char stack[1 << 16] __attribute__((aligned(64)));
static int ready[2], never[2];

static void waits(void) {
    char byte;
    write(ready[1], "r", 1);
    for (;;) syscall(SYS_read, never[0], &byte, 1);
}

static void block(void) {
    const unsigned char *returns = last_return();
    if (!returns) _exit(4);
    begin_frame(forged);
    forged[STACK_] = SIGNAL_STACK, forged[STACK_LEN_] = 0x4000;
    forged[POINTER_STACK] = ((long)stack + sizeof stack - 64 & -16) - (CALL_LEN == 1 ? 8 : 0);
    forged[POINTER] = (long)waits;
    forged[MASK_] = 1L << 22;
    jump_on(returns, RETURNS_ON(forged));
}

int main(void) {
    char in[64], byte;
    pipe(ready), pipe(never);
    for (;;) {
        long n = read(0, in, sizeof in);
        if (n <= 0) return 0;
        if (in[0] == 'b')
            for (int i = 0; i < CHILDREN; i++) {
                if (fork() == 0) block();
                read(ready[0], &byte, 1);
            }
        write(1, "ready\n", 6);
    }
}
