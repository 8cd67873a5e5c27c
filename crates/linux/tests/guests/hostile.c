/* Tries to escape. Each mode is one attempt, and the test checks its effects on the host.
 * It makes system calls by instruction, from its own code and from the stub's. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "processor.h"

/* Jumps to the nth system call instruction of the stub with these registers. It does not come back.
 */
static void from_stub(int nth, long n, long a, long b, long c, long d) {
    const unsigned char *call = in_stub(nth, is_call);
    if (call) jump_with(call, n, a, b, c, d);
    write(1, "no such place\n", 14);
}

static const char marker[] = "/tmp/afresh-hostile-marker";

/* In the image, and never touched. */
static char initial[64 << 12];

int main(void) {
    memset(initial, 1, sizeof initial);
    static char in[256], out[256];
    for (;;) {
        long n = read(0, in, sizeof in - 1);
        if (n <= 0) return 0;
        in[n] = 0;
        int mode = 0, nth = 0;
        sscanf(in, "%d %d", &mode, &nth);
        long made = 0;
        switch (mode) {
        case 0: /* Every number, from the guest's own code, except memory calls and exits. */
            for (long i = 0; i < 600; i++) {
                switch (i) {
                case SYS_read: case SYS_readv: case SYS_exit: case SYS_exit_group: case SYS_brk: case SYS_mmap: case SYS_munmap:
                case SYS_mremap: case SYS_mprotect: case SYS_kill: case SYS_tkill: case SYS_tgkill: case SYS_arch_prctl:
                case SYS_write: case SYS_writev: case SYS_pwrite64: case SYS_nanosleep: case SYS_clock_nanosleep: case SYS_close_range: case SYS_close:
                case SYS_rt_sigreturn: case SYS_pause: case SYS_rt_sigsuspend: case SYS_ppoll: case SYS_select: case SYS_pselect6:
                    continue; /* These wait without an end, or do not return. */
                case 335: case 336: continue; /* uretprobe, uprobe: see mode 17 */
                }
                made += raw(i, (long)marker, O_CREAT | O_RDWR, 0600, 0, 0, 0) >= 0;
                made += raw(i, 0, 0, 0, 0, 0, 0) >= 0;
                made += raw(i, -1, -1, -1, -1, -1, -1) >= 0;
            }
            break;
        case 1: {
            long arguments[4], number = open_from(arguments, marker, O_CREAT | O_RDWR, 0600);
            from_stub(nth, number, arguments[0], arguments[1], arguments[2], arguments[3]);
            break;
        }
        case 2: from_stub(nth, SYS_kill, raw(SYS_getppid, 0, 0, 0, 0, 0, 0), 9, 0, 0); break;
        case 3: from_stub(nth, SYS_mmap, 0x10000000, 4096, 7, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED); break;
        case 4: from_stub(nth, FORK, 0, 0, 0); break;
        case 23: from_stub(nth, SYS_clone, CLONE_PARENT | CLONE_PARENT_SETTID | SIGCHLD, 0, 0, 0); break; /* The command that forks. */
        case 5: from_stub(nth, SYS_getppid, 0, 0, 0, 0); break; /* A request with an invalid frame. */
        case 6: { /* The loop of the stub, with commands from the guest. */
            long *orders = (void *)CONTROL;
            orders[0] = 1, orders[1] = 0, orders[2] = 1, orders[5] = 0, orders[6] = CONTROL;
            orders[8] = open_from(orders + 9, marker, O_CREAT | O_RDWR, 0600);
            jump_with(in_stub(0, is_loop), 0, 0, 0, 0, 0);
            break;
        }
        case 7: /* Over the stub, its memory, the image. */
            made += (char *)mmap((void *)STUB, 4096, 7, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == (char *)STUB;
            made += munmap((void *)STUB, 1 << 20) == 0;
            made += mprotect((void *)STUB, 4096, 7) == 0;
            made += mprotect((void *)0x710000000000UL, 4096, 3) == 0;
            made += mmap((void *)0x710000000000UL, 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
            made += mremap((void *)STUB, 4096, 8192, MREMAP_MAYMOVE) != MAP_FAILED;
            made += mprotect((void *)0x700000100000UL, 4096, 3) == 0;
            made += munmap((void *)0x700000100000UL, 4096) == 0;
            made += sbrk(0x600000000000) != (void *)-1;
            break;
        case 8: *(volatile char *)STUB = 1; break;
        case 9: *(volatile char *)0x710000000000UL = 1; break;
        case 10: /* Another architecture's calls. */
#ifdef __x86_64__
            __asm__ volatile("int $0x80" : "=a"(made) : "a"(5), "b"(0), "c"(0), "d"(0));
#endif
            break;
        case 11: made = raw(SYS_openat | 0x40000000, -100, (long)marker, O_CREAT | O_RDWR, 0600, 0, 0) >= 0; break;
        case 12: { /* A frame with the signal blocked and the stack elsewhere, through the stub's own return. */
            static long frame[FRAME_WORDS] __attribute__((aligned(64)));
            memset(frame, 0, sizeof frame);
            static char stack[4096];
            begin_frame(frame);
            frame[STACK_] = (long)stack, frame[STACK_LEN_] = sizeof stack;
            frame[POINTER_STACK] = (long)(stack + 2048), frame[POINTER] = (long)raw;
            frame[ARGUMENT] = SYS_brk; /* The call of raw. */
            frame[MASK_] = nth == 1 ? -1 : 0;
            if (nth == 2) frame[STACK_] = (long)initial, frame[STACK_LEN_] = sizeof initial; /* The kernel should write there. */
            jump_on(last_return(), RETURNS_ON(frame));
            break;
        }
        case 13: { /* As many maps, files and descriptors as there are. */
            for (int i = 0; i < 5000; i++) made += mmap(0, 4096, i & 1 ? 1 : 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
            char *all = mmap(0, 64 << 20, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            for (int i = 0; i < 8000; i++) munmap(all + 8192L * i, 4096);
            for (int i = 0; i < 3000; i++) open("/dev/null", O_RDONLY);
            int file = open("/tmp/full", O_CREAT | O_RDWR, 0600);
            static char block[1 << 20];
            while (write(file, block, sizeof block) > 0);
            ftruncate(file, 1L << 60);
            lseek(file, 1L << 60, SEEK_SET), write(file, block, 1);
            break;
        }
        case 14: /* Pointers to unmapped memory, or to memory of the sentry. */
            for (long i = 0; i < 340; i++)
                switch (i) {
                case SYS_read: case SYS_exit: case SYS_exit_group: case SYS_kill: case SYS_tkill: case SYS_tgkill: case SYS_brk:
                case SYS_arch_prctl: case SYS_munmap: case SYS_mmap: case SYS_mprotect: case SYS_close_range: case SYS_mremap: case 335: case 336: continue;
                default:
                    raw(i, 1, -8, 8, -8, -8, -8), raw(i, 2, 8, 8, 8, 8, 8), raw(i, -8, -8, -1, -1, 0, 0);
                    raw(i, 0, STUB, 4096, STUB, STUB, 0), raw(i, 1, 0x710000000000, 4096, 0x710000000000, 8, 0);
                }
            break;
        case 15: made = raw(SYS_arch_prctl, 0x1002, 1L << 62, 0, 0, 0, 0) == 0; break;
        case 16: raw(SYS_mprotect, (long)in & -4096, 1 << 30, 0, 0, 0, 0), raw(SYS_munmap, 0x10000, STUB - 0x10000, 0, 0, 0, 0); break;
        case 21: /* Works, and has its process killed. */
            for (volatile long work = 0; work < 100000000; work++);
            from_stub(nth, FORK, 0, 0, 0);
            break;
        case 17: raw(335, 0, 0, 0, 0, 0, 0), raw(336, 0, 0, 0, 0, 0, 0); break; /* These pass every filter of the kernel. */
        case 18: *(volatile char *)0x700000100000UL = 1; break; /* The data of the vDSO. */
        case 19: { /* A request by a jump with the direction flag set, in the frame of an earlier call. */
            raw(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
            write(1, "0\n", 2);
            for (long *at = (void *)SIGNAL_STACK; at < (long *)(CONTROL + 0xc000 - 512); at++)
                if (is_frame(at)) {
#ifdef __aarch64__
                    at[NUMBER] = SYS_read, at[ARGUMENT] = 0, at[ARGUMENT + 1] = (long)in, at[ARGUMENT + 2] = 64;
                    jump_on((void *)STUB, at);
#else
                    at[5 + 13] = SYS_read, at[5 + 8] = 0, at[5 + 9] = (long)in, at[5 + 12] = 64;
                    __asm__ volatile("mov %0, %%rsp\n std\n jmp *%1" ::"r"(at - 1), "r"(STUB) : "memory");
#endif
                }
            break;
        }
        case 20: { /* A return from a frame in memory that was never touched. */
            jump_on(last_return(), (void *)(0x710000000000UL + 4096L * nth));
            break;
        }
        case 22: { /* A fork, from a forged frame, by a request after which the processor interrupts the stub. */
            raw(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
#ifdef __aarch64__
            raw(SYS_kill, raw(SYS_getpid, 0, 0, 0, 0, 0, 0), nth ? SIGTRAP : SIGILL, 0, 0, 0, 0); /* No program traps its own steps. */
#else
            for (long *at = (void *)(CONTROL + 0x8000); at < (long *)(CONTROL + 0xc000 - 512); at++)
                if (at[0] == 7 && at[1] == 0 && at[2] == CONTROL + 0x8000 && at[4] == 0x4000) {
                    static long frame[200] __attribute__((aligned(64)));
                    memset(frame, 0, sizeof frame);
                    at[5 + 13] = SYS_fork;
                    const unsigned char *code = (void *)STUB;
                    int last = 0, first = 0;
                    for (int i = 0; i < 4095; i++)
                        if (code[i] == 0xb8 && code[i + 1] == 15) last = i;
                    for (int i = 4094; i >= 0; i--)
                        if (code[i] == 0x0f && code[i + 1] == 0x05) first = i;
                    frame[0] = 6, frame[2] = SIGNAL_STACK, frame[4] = 0x4000;
                    frame[5 + 12] = frame[5 + 15] = (long)(at - 1), frame[5 + 13] = SYS_getppid;
                    frame[5 + 16] = (long)STUB + first, frame[5 + 17] = 0x302, frame[5 + 18] = 0x33 | 0x2bL << 48;
                    frame[5 + 32] = nth ? -1 : 0; /* Signals blocked: the trap ends it. Else it enters the handler. */
                    __asm__ volatile("mov %0, %%rsp\n jmp *%1" ::"r"(frame), "r"(code + last) : "memory");
                }
#endif
            break;
        }
        case 24: /* Forks without an end. */
            for (;;) {
                int child = fork();
                if (child == 0) _exit(0);
                waitpid(child, 0, 0);
            }
        case 25: { /* Leaves children: one that was forked, and new programs. Counts those that run. */
            int quiet[2];
            pipe(quiet);
            for (volatile int i = 0; i < 4; i++) {
                int child = i ? vfork() : fork();
                if (child) {
                    made += child > 0;
                    continue;
                }
                dup2(quiet[0], 0);
                if (i) execl("/bin/cat", "cat", (char *)0);
                else read(0, in, 1);
                _exit(1);
            }
            while (waitpid(-1, 0, WNOHANG) > 0) made--;
            break;
        }
        default: made = -1;
        }
        n = sprintf(out, "%ld\n", made);
        write(1, out, n);
    }
}
