/* Attacks the stub: leaves it in a state in which the commands of the next reset are interrupted or
 * get false answers.
 *
 * The guest returns by the stub's own `rt_sigreturn` into any instruction of the stub, with any
 * flags and registers, and with a frame in the control area that shows a call which waits. If the
 * sentry takes that for a guest at rest, it sends the next reset to code that never runs it. "look"
 * shows the traces of the last call.
 *
 * Breakpoints are no attack: only `ptrace` and performance events set DR7, and the filter refuses
 * both.
 *
 * Requests: "look", "plant TEXT", "flags BITS", "interrupt", "frame SIGNAL SIZE PLACE GIVEN",
 * "length" of the stub's code, or "attack OFFSET FLAGS MASK STACK CALL ENTRY KEYS PENDING SECRET":
 * see `attack`. */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#define STUB 0x700000000000UL
#define CONTROL 0x700000010000UL
#define SIGNAL_STACK (CONTROL + 0x8000)
#define END (CONTROL + 0xc000)
/* Words of `struct sigcontext`, behind the return address, flags, link and stack of a frame. */
enum { R8, R9, R10, R11, R12, R13, R14, R15, RDI, RSI, RBP, RBX, RDX, RAX, RCX, RSP, RIP, FLAGS, SELECTORS, VECTORS = 23, MASK = 32 };
#define REGISTERS 6

static char secret[4096], in[512], out[8192];
static struct pollfd input = {0, POLLIN, 0};
static char stack[1 << 16] __attribute__((aligned(64)));
static long forged[64] __attribute__((aligned(64)));
/* Many pages, so that some resets take more than one batch of commands. */
static char pages[1200][4096];

static const unsigned char *find(const char *bytes, int len) {
    const unsigned char *last = 0;
    for (const unsigned char *at = (void *)STUB; at < (unsigned char *)STUB + 4096 - len; at++)
        if (!memcmp(at, bytes, len)) last = at;
    return last;
}

/* Where the kernel put the frame of the last call that trapped: the one whose stack is the stub's.
 * An older frame, of a processor state with another size, is below. */
static long *frame(void) {
    long *last = 0;
    for (long *at = (void *)SIGNAL_STACK; at < (long *)(END - 512); at++)
        if (at[2] == SIGNAL_STACK && at[4] == 0x4000 && at[0] >> 40 == 0 && at[REGISTERS + RIP - 1] >> 40 == 0 &&
            (unsigned short)at[REGISTERS + SELECTORS - 1] == 0x33)
            last = at - 1;
    return last;
}

/* Writes the page of the secret. A reset copies back pages that are often written, which takes no
 * system call. */
static void plant(const char *text) {
    strcpy(secret, text);
    for (int i = 0; i < 1200; i++) strcpy(pages[i], text);
}

/* The parts of the frame that "frame" forges: the signal, the size of the state of the vector
 * registers, its distance from the end of the control area, if it is moved, and the state for the
 * return from a handler. */
static long signal_shown, size_shown, place_shown, state_given;
#define LEGACY_SIZE 464

static void forge(long *last, long *shown) {
    char *state = (char *)shown[VECTORS];
    if (place_shown) state = (char *)END - place_shown;
    shown[VECTORS] = (long)state;
    unsigned sizes[2] = {0x46505853, size_shown};
    if (state + LEGACY_SIZE + sizeof sizes <= (char *)END) memcpy(state + LEGACY_SIZE, sizes, sizeof sizes);
    int *info = (int *)(last + REGISTERS + MASK + 1);
    info[0] = signal_shown;
    if (signal_shown == SIGSYS) { /* A return from a handler, with a frame in the guest's own memory. */
        shown[RAX] = SYS_rt_sigreturn;
        shown[RSP] = (long)stack + 8;
        ((long *)stack)[REGISTERS + VECTORS] = state_given ? (long)pages : 0;
    }
}

static void ignore(int signal) { (void)signal; }

/* Returns from a frame that blocks the interrupt, and runs until the sentry has sent one. The next
 * return that allows it is interrupted at its first instruction. */
__attribute__((noinline)) static void leave_interrupt_pending(const unsigned char *returns) {
    struct itimerval soon = {{0, 0}, {0, 1000}};
    long *frame = forged + REGISTERS, *top = forged + 1;
    signal(SIGALRM, ignore);
    setitimer(ITIMER_REAL, &soon, 0);
    memset(forged, 0, sizeof forged);
    forged[1] = 6, forged[3] = SIGNAL_STACK, forged[5] = 0x4000;
    frame[FLAGS] = 0x202, frame[SELECTORS] = 0x33 | 0x2bL << 48, frame[MASK] = 1L << (SIGURG - 1);
    __asm__ volatile(
        "mov %%rsp, 120(%0)\n mov %%rbp, 80(%0)\n lea 1f(%%rip), %%rbx\n mov %%rbx, 128(%0)\n"
        "mov %1, %%rsp\n jmp *%2\n 1:"
        : "+a"(frame), "+d"(top), "+c"(returns)
        :
        : "rbx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc");
    for (volatile int spins = 0; spins < 6000000; spins++) continue;
}

static void attack(char *arguments) {
    unsigned offset, call, where, entry, keys, pending;
    long flags, mask;
    int parsed = 0;
    sscanf(arguments, "%u %lx %lx %u %u %u %u %u %n", &offset, &flags, &mask, &where, &call, &entry, &keys, &pending, &parsed);
    plant(arguments + parsed);
    write(1, "attacks\n", 8);
    /* A call that traps leaves a frame. */
    syscall(SYS_sched_yield);
    long *last = frame();
    if (!last) _exit(3);
    long fs, gs;
    __asm__ volatile("rdfsbase %0\n rdgsbase %1" : "=r"(fs), "=r"(gs));
    /* The frame shows a call that waits for input. */
    long *shown = last + REGISTERS;
    static long set[16];
    set[0] = 1;
    long calls[][5] = {{SYS_poll, (long)&input, 1, -1}, {SYS_read, 0, (long)in, 256}, {SYS_ppoll, (long)&input, 1, 0, 0}, {SYS_select, 1, (long)set, 0, 0}, {SYS_pause}};
    long *waits = calls[call % 5];
    shown[RAX] = waits[0], shown[RDI] = waits[1], shown[RSI] = waits[2], shown[RDX] = waits[3], shown[R10] = waits[4];
    if (signal_shown) forge(last, shown);
    /* The frame to return from. */
    const unsigned char *asks = find("\xb8\x6e\x00\x00\x00\x0f\x05", 7), *returns = find("\xb8\x0f\x00\x00\x00\x0f\x05", 7);
    if (!asks || !returns) _exit(4);
    if (pending) leave_interrupt_pending(returns);
    long target = offset ? STUB + offset % 4096 : (long)asks + 5;
    long registers[33] = {0};
    long stacks[] = {(long)stack + 32768, (long)last, (long)last + 3, SIGNAL_STACK + 64, (long)stack + 7, 8, END - 8};
    registers[RDI] = fs, registers[RSI] = gs, registers[RDX] = (long)last, registers[RAX] = 110, registers[RBX] = CONTROL;
    registers[RSP] = stacks[where % 7], registers[RIP] = target, registers[FLAGS] = flags | 0x202, registers[SELECTORS] = 0x33 | 0x2bL << 48;
    registers[MASK] = mask;
    forged[0] = 0, forged[1] = 6, forged[2] = 0, forged[3] = SIGNAL_STACK, forged[4] = 0, forged[5] = 0x4000;
    memcpy(forged + REGISTERS, registers, sizeof registers);
    if (keys) __asm__ volatile("wrpkru" ::"a"(keys), "c"(0), "d"(0));
    switch (entry % 3) {
    case 0: /* By the stub's return. */
        __asm__ volatile("mov %0, %%rsp\n jmp *%1" ::"r"(forged + 1), "r"(returns) : "memory");
    case 1: /* By a jump, with these flags. */
        __asm__ volatile("mov %0, %%rsp\n push %1\n popf\n jmp *%2" ::"r"(stacks[where % 7]), "r"(flags & ~0x100L), "r"(target), "D"(fs), "S"(gs), "d"(last), "a"(110L) : "memory", "r10");
    case 2: /* By a return from a frame at the very end of the control area. */
        memcpy((void *)(END - 360), forged, 360);
        __asm__ volatile("mov %0, %%rsp\n jmp *%1" ::"r"(END - 352), "r"(returns) : "memory");
    }
}

/* The sender in the frame of the interrupt: the code and the PID of its `siginfo_t`. */
static volatile int interrupts, code, sender;

static void answer(int signal) { _exit(signal); }

static void ring(int signal) {
    for (int *at = (void *)SIGNAL_STACK; at < (int *)(END - 128); at++)
        if (at[0] == SIGURG && at[1] == 0 && at[2] <= 0) code = at[2], sender = at[4], interrupts++;
}

int main(void) {
    setvbuf(stdout, 0, _IONBF, 0);
    memset(pages, 1, sizeof pages);
    for (;;) {
        poll(&input, 1, -1);
        long n = read(0, in, sizeof in - 1);
        if (n <= 0) return 0;
        in[n] = 0;
        if (!strncmp(in, "attack ", 7)) attack(in + 7);
        if (!strncmp(in, "frame ", 6)) {
            sscanf(in + 6, "%ld %ld %ld %ld", &signal_shown, &size_shown, &place_shown, &state_given);
            signal(SIGSEGV, answer);
            attack("0 0 0 0 0 0 0 0 SECRET");
        }
        if (!strncmp(in, "plant ", 6)) plant(in + 6);
        if (!strncmp(in, "flags ", 6)) { /* Two that `rt_sigreturn` does not set. */
            long flags = strtol(in + 6, 0, 16), before;
            __asm__ volatile("pushf\n pop %0" : "=r"(before));
            write(1, out, sprintf(out, "flags: %lx\n", before & 0x204000));
            __asm__ volatile("push %0\n popf" ::"r"(before | flags) : "cc");
            continue;
        }
        if (!strncmp(in, "interrupt", 9)) {
            struct itimerval soon = {{0, 0}, {0, 10000}};
            signal(SIGALRM, ring);
            interrupts = 0;
            setitimer(ITIMER_REAL, &soon, 0);
            while (!interrupts) continue;
            write(1, out, sprintf(out, "code %d sender %d\n", code, sender));
            continue;
        }
        if (!strncmp(in, "length", 6)) {
            int len = 4096;
            while (len && !((char *)STUB)[len - 1]) len--;
            write(1, out, sprintf(out, "%d\n", len));
            continue;
        }
        int left = 0;
        for (int i = 0; i < 1200; i++) left += pages[i][0] != 1;
        write(1, out, sprintf(out, "left: %s %d\n", secret, left));
    }
}
