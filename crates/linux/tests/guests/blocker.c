/* Child processes that block the host's interrupt, and wait in a call that the kernel keeps.
 *
 * A child returns by the stub's own `rt_sigreturn` from a frame with its own mask. The request
 * "block" makes the children; any other request is answered. */
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STUB 0x700000000000UL
#define SIGNAL_STACK 0x700000018000UL
/* Words of `struct sigcontext`, behind the return address, flags, link and stack of a frame. */
enum { RSP = 15, RIP, FLAGS, SELECTORS, MASK = 32, REGISTERS = 6 };
#define CHILDREN 40

static long forged[64] __attribute__((aligned(64)));
static char stack[1 << 16] __attribute__((aligned(64)));
static int ready[2], never[2];

static void waits(void) {
    char byte;
    write(ready[1], "r", 1);
    for (;;) syscall(SYS_read, never[0], &byte, 1);
}

static void block(void) {
    const char *returns = 0;
    for (const char *at = (void *)STUB; at < (char *)STUB + 4089; at++)
        if (!memcmp(at, "\xb8\x0f\x00\x00\x00\x0f\x05", 7)) returns = at;
    if (!returns) _exit(4);
    forged[1] = 6, forged[3] = SIGNAL_STACK, forged[5] = 0x4000;
    long *registers = forged + REGISTERS;
    registers[RSP] = (long)stack + sizeof stack - 72, registers[RIP] = (long)waits;
    registers[FLAGS] = 0x202, registers[SELECTORS] = 0x33 | 0x2bL << 48;
    registers[MASK] = 1L << 22;
    __asm__ volatile("mov %0, %%rsp\n jmp *%1" ::"r"(forged + 1), "r"(returns) : "memory");
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
