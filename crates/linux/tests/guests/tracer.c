// A program that traces its children, one part for each argument. It prints "ok" at its end.
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(x) do { if (!(x)) { printf("line %d: %s (errno %d)\n", __LINE__, #x, errno); fflush(stdout); _exit(1); } } while (0)

static int status;

static int wait_for(pid_t child) {
    CHECK(waitpid(child, &status, __WALL) == child);
    return status;
}

static pid_t traced(void (*work)(void)) {
    pid_t child = fork();
    if (child == 0) {
        CHECK(ptrace(PTRACE_TRACEME, 0, 0, 0) == 0);
        raise(SIGSTOP);
        work();
        _exit(0);
    }
    CHECK(wait_for(child) >> 8 == SIGSTOP);
    return child;
}

static volatile long value = 7;
static volatile int handled;
static void handler(int signal) { handled = signal; }

static void call_twice(void) { syscall(SYS_getppid); syscall(SYS_getuid); }

// Each call stops twice, with its number and its result, which the tracer may change.
static void calls(void) {
    pid_t child = traced(call_twice);
    struct user_regs_struct regs;
    struct __ptrace_syscall_info info;
    CHECK(ptrace(PTRACE_SETOPTIONS, child, 0, PTRACE_O_TRACESYSGOOD) == 0);
    int changed = 0, skipped = 0;
    for (;;) {
        CHECK(ptrace(PTRACE_SYSCALL, child, 0, 0) == 0);
        if (WIFEXITED(wait_for(child))) break;
        CHECK(status >> 8 == (SIGTRAP | 0x80));
        CHECK(ptrace(PTRACE_GETREGS, child, 0, &regs) == 0);
        CHECK(ptrace(PTRACE_GET_SYSCALL_INFO, child, sizeof info, &info) > 0);
        if (info.op == PTRACE_SYSCALL_INFO_ENTRY) {
            CHECK(info.entry.nr == regs.orig_rax && regs.rax == (unsigned long)-ENOSYS);
            if (regs.orig_rax == SYS_getuid) {
                regs.orig_rax = -1; regs.rax = 4321; skipped = 1;
                CHECK(ptrace(PTRACE_SETREGS, child, 0, &regs) == 0);
            }
        } else {
            CHECK(info.op == PTRACE_SYSCALL_INFO_EXIT && info.exit.rval == (long)regs.rax);
            if (regs.orig_rax == SYS_getppid) { CHECK(regs.rax == getpid()); changed = 1; }
            if (skipped == 1) { CHECK(regs.rax == 4321); skipped = 2; }
        }
    }
    CHECK(changed && skipped == 2 && WEXITSTATUS(status) == 0);
}

static void wait_for_change(void) {
    signal(SIGUSR1, handler);
    raise(SIGUSR2);
    if (handled != SIGUSR1) _exit(3);
    if (value != 9) _exit(4);
    raise(SIGTERM);
}

// A signal is seen first, and is changed, dropped or delivered.
static void signals(void) {
    pid_t child = traced(wait_for_change);
    siginfo_t info;
    CHECK(ptrace(PTRACE_PEEKDATA, child, &value, 0) == 7);
    CHECK(ptrace(PTRACE_POKEDATA, child, &value, 9) == 0);
    CHECK(value == 7);
    CHECK(ptrace(PTRACE_CONT, child, 0, 0) == 0);
    CHECK(wait_for(child) >> 8 == SIGUSR2);
    CHECK(ptrace(PTRACE_GETSIGINFO, child, 0, &info) == 0 && info.si_signo == SIGUSR2 && info.si_pid == child);
    CHECK(ptrace(PTRACE_CONT, child, 0, SIGUSR1) == 0);
    CHECK(wait_for(child) >> 8 == SIGTERM);
    CHECK(ptrace(PTRACE_CONT, child, 0, SIGTERM) == 0);
    CHECK(WIFSIGNALED(wait_for(child)) && WTERMSIG(status) == SIGTERM);
}

static long add(long a, long b) { return a + b; }
static long (*volatile adds)(long, long) = add;
static void call_function(void) { _exit(adds(20, 3)); }

// A breakpoint in text that is only executable, and single steps from it.
static void steps(void) {
    pid_t child = traced(call_function);
    struct user_regs_struct regs;
    long text = ptrace(PTRACE_PEEKTEXT, child, add, 0);
    CHECK(text == *(long *)add);
    CHECK(ptrace(PTRACE_POKETEXT, child, add, (text & ~0xffL) | 0xcc) == 0);
    CHECK(ptrace(PTRACE_PEEKTEXT, child, add, 0) == ((text & ~0xffL) | 0xcc) && *(long *)add == text);
    CHECK(ptrace(PTRACE_CONT, child, 0, 0) == 0);
    CHECK(wait_for(child) >> 8 == SIGTRAP);
    CHECK(ptrace(PTRACE_GETREGS, child, 0, &regs) == 0);
    CHECK(regs.rip == (unsigned long)add + 1 && regs.rdi == 20 && regs.rsi == 3);
    CHECK(ptrace(PTRACE_POKETEXT, child, add, text) == 0);
    regs.rip--; regs.rsi = 22;
    CHECK(ptrace(PTRACE_SETREGS, child, 0, &regs) == 0);
    unsigned long last = regs.rip;
    for (int i = 0; i < 3; i++) {
        CHECK(ptrace(PTRACE_SINGLESTEP, child, 0, 0) == 0);
        CHECK(wait_for(child) >> 8 == SIGTRAP);
        CHECK(ptrace(PTRACE_GETREGS, child, 0, &regs) == 0);
        CHECK(regs.rip != last && !(regs.eflags & 0x100));
        last = regs.rip;
    }
    struct user_fpregs_struct floats;
    CHECK(ptrace(PTRACE_GETFPREGS, child, 0, &floats) == 0 && floats.mxcsr == 0x1f80);
    floats.mxcsr = -1;
    CHECK(ptrace(PTRACE_SETFPREGS, child, 0, &floats) == -1 && errno == EINVAL);
    char area[16384];
    struct iovec set = { area, sizeof area };
    CHECK(ptrace(PTRACE_GETREGSET, child, NT_X86_XSTATE, &set) == 0 && set.iov_len >= 576);
    CHECK(ptrace(PTRACE_SETREGSET, child, NT_X86_XSTATE, &set) == 0);
    memset(area + 520, -1, 8);
    CHECK(ptrace(PTRACE_SETREGSET, child, NT_X86_XSTATE, &set) == -1 && errno == EINVAL);
    set = (struct iovec){ &regs, sizeof regs };
    CHECK(ptrace(PTRACE_GETREGSET, child, NT_PRSTATUS, &set) == 0 && regs.rip == last);
    // No base or flag that the thread could not have by itself.
    struct user_regs_struct odd = regs;
    odd.fs_base = 1UL << 63;
    CHECK(ptrace(PTRACE_SETREGS, child, 0, &odd) == -1 && errno == EIO);
    odd = regs; odd.cs = 0x10;
    CHECK(ptrace(PTRACE_SETREGS, child, 0, &odd) == -1 && errno == EIO);
    odd = regs; odd.eflags |= 0x3000;
    CHECK(ptrace(PTRACE_SETREGS, child, 0, &odd) == 0);
    CHECK(ptrace(PTRACE_GETREGS, child, 0, &odd) == 0 && !(odd.eflags & 0x3000) && odd.cs == 0x33);
    CHECK(ptrace(PTRACE_CONT, child, 0, 0) == 0);
    CHECK(WIFEXITED(wait_for(child)) && WEXITSTATUS(status) == 42);
}

static void sleeper(void) { for (;;) pause(); }

// A process that is attached to, interrupted, and let go.
static void attaches(void) {
    pid_t child = fork();
    if (child == 0) sleeper();
    char name[64], text[4096];
    CHECK(ptrace(PTRACE_ATTACH, getpid(), 0, 0) == -1 && errno == EPERM);
    CHECK(ptrace(PTRACE_CONT, child, 0, 0) == -1 && errno == ESRCH);
    CHECK(ptrace(PTRACE_ATTACH, child, 0, 0) == 0);
    CHECK(ptrace(PTRACE_ATTACH, child, 0, 0) == -1 && errno == EPERM);
    CHECK(wait_for(child) >> 8 == SIGSTOP);
    sprintf(name, "/proc/%d/status", child);
    int file = open(name, O_RDONLY);
    text[read(file, text, sizeof text - 1)] = 0; close(file);
    sprintf(name, "TracerPid:\t%d\n", getpid());
    CHECK(strstr(text, name) && strstr(text, "State:\tt (tracing stop)"));
    CHECK(ptrace(PTRACE_DETACH, child, 0, 0) == 0);
    CHECK(ptrace(PTRACE_SEIZE, child, 0, PTRACE_O_EXITKILL) == 0);
    CHECK(waitpid(child, &status, WNOHANG) == 0);
    usleep(10000);
    CHECK(ptrace(PTRACE_INTERRUPT, child, 0, 0) == 0);
    CHECK(wait_for(child) >> 8 == (SIGTRAP | PTRACE_EVENT_STOP << 8));
    struct user_regs_struct regs;
    CHECK(ptrace(PTRACE_GETREGS, child, 0, &regs) == 0 && regs.orig_rax == SYS_pause);
    CHECK(ptrace(PTRACE_CONT, child, 0, 0) == 0);
    // A stop of its process, which it leaves by SIGCONT.
    kill(child, SIGSTOP);
    CHECK(wait_for(child) >> 8 == SIGSTOP);
    CHECK(ptrace(PTRACE_CONT, child, 0, SIGSTOP) == 0);
    CHECK(wait_for(child) >> 8 == (SIGSTOP | PTRACE_EVENT_STOP << 8));
    CHECK(ptrace(PTRACE_LISTEN, child, 0, 0) == 0);
    CHECK(waitpid(child, &status, WNOHANG) == 0);
    kill(child, SIGCONT);
    CHECK(wait_for(child) >> 8 == (SIGTRAP | PTRACE_EVENT_STOP << 8));
    CHECK(ptrace(PTRACE_CONT, child, 0, 0) == 0);
    CHECK(wait_for(child) >> 8 == SIGCONT);
    CHECK(ptrace(PTRACE_DETACH, child, 0, 0) == 0);
    kill(child, SIGKILL);
    CHECK(WIFSIGNALED(wait_for(child)));
    // The tracees of a tracer that ends.
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    pid_t tracer = fork();
    if (tracer == 0) {
        child = fork();
        if (child == 0) sleeper();
        CHECK(ptrace(PTRACE_SEIZE, child, 0, PTRACE_O_EXITKILL) == 0);
        write(pipes[1], &child, sizeof child);
        _exit(0);
    }
    CHECK(read(pipes[0], &child, sizeof child) == sizeof child);
    CHECK(wait_for(tracer) == 0);
    for (int i = 0; kill(child, 0) == 0; i++) { CHECK(i < 100000); usleep(100); }
}

static void fork_and_run(void) {
    pid_t child = fork();
    if (child == 0) { char *args[] = { "/proc/self/exe", "nothing", 0 }; execv(args[0], args); _exit(9); }
    waitpid(child, 0, 0);
}

// Children of a tracee are traced, and the programs that they run are seen.
static void families(void) {
    pid_t child = traced(fork_and_run), other = 0;
    unsigned long message;
    int execs = 0, forks = 0, exits = 0, ends = 0;
    CHECK(ptrace(PTRACE_SETOPTIONS, child, 0, PTRACE_O_TRACEFORK | PTRACE_O_TRACEEXEC | PTRACE_O_TRACEEXIT) == 0);
    CHECK(ptrace(PTRACE_CONT, child, 0, 0) == 0);
    while (ends < 2) {
        pid_t who = waitpid(-1, &status, __WALL);
        CHECK(who > 0);
        int signal = 0;
        if (WIFEXITED(status)) { ends += who == child || who == other; continue; }
        CHECK(WIFSTOPPED(status));
        switch (status >> 16) {
        case PTRACE_EVENT_FORK:
            CHECK(ptrace(PTRACE_GETEVENTMSG, who, 0, &message) == 0);
            other = message; forks++; break;
        case PTRACE_EVENT_EXEC: CHECK(who != child); execs++; break;
        case PTRACE_EVENT_EXIT: exits++; break;
        default: if (WSTOPSIG(status) != SIGSTOP) signal = WSTOPSIG(status);
        }
        CHECK(ptrace(PTRACE_CONT, who, 0, signal) == 0);
    }
    CHECK(forks == 1 && execs == 1 && exits == 2);
}

// Whether the maps of a process have a line that begins with this one.
static int has_map(pid_t child, void *start, size_t len, const char *protection) {
    char name[64], line[256], wanted[64];
    sprintf(name, "/proc/%d/maps", child);
    sprintf(wanted, "%08lx-%08lx %s", (long)start, (long)start + len, protection);
    FILE *maps = fopen(name, "r");
    int found = 0;
    while (fgets(line, sizeof line, maps)) found |= strncmp(line, wanted, strlen(wanted)) == 0;
    fclose(maps);
    return found;
}

// Memory through a file in /proc, in both directions and also where the process may not write.
static void memory(void) {
    char *parted = mmap(0, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(parted, 4096, PROT_WRITE);
    pid_t child = traced(sleeper);
    char name[64];
    long word = 0;
    char *closed = mmap(0, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    sprintf(name, "/proc/%d/mem", child);
    int file = open(name, O_RDWR);
    CHECK(file >= 0);
    CHECK(ptrace(PTRACE_POKEDATA, child, parted + 4092, -1L) == 0);
    CHECK(ptrace(PTRACE_PEEKDATA, child, parted + 4092, 0) == -1L && errno == 0);
    CHECK(has_map(child, parted, 4096, "-w-p") && has_map(child, parted + 4096, 4096, "r--p"));
    CHECK(pread(file, &word, 8, (off_t)&value) == 8 && word == 7);
    word = 11;
    CHECK(pwrite(file, &word, 8, (off_t)&value) == 8 && value == 7);
    CHECK(ptrace(PTRACE_PEEKDATA, child, &value, 0) == 11);
    CHECK(pwrite(file, "\xcc", 1, (off_t)add) == 1);
    CHECK((ptrace(PTRACE_PEEKTEXT, child, add, 0) & 0xff) == 0xcc && *(unsigned char *)add != 0xcc);
    CHECK(pread(file, &word, 8, 16) == -1 && errno == EIO);
    CHECK(lseek(file, (off_t)&value, SEEK_SET) == (off_t)&value && read(file, &word, 8) == 8 && word == 11);
    CHECK(read(file, &word, 0) == 0);
    kill(child, SIGKILL);
    CHECK(WIFSIGNALED(wait_for(child)));
    CHECK(pread(file, &word, 8, (off_t)&value) <= 0);
}

// For tests that freeze it: a stopped tracee, asked before and after.
static void frozen(void) {
    pid_t child = traced(call_function);
    char line[16];
    for (int i = 0; read(0, line, sizeof line) > 0; i++) {
        struct user_regs_struct regs;
        CHECK(ptrace(PTRACE_GETREGS, child, 0, &regs) == 0);
        printf("%d %ld\n", i, ptrace(PTRACE_PEEKDATA, child, &value, 0));
        fflush(stdout);
        CHECK(ptrace(PTRACE_POKEDATA, child, &value, 100 + i) == 0);
    }
}

int main(int argc, char **argv) {
    struct { const char *name; void (*run)(void); } parts[] = {
        { "calls", calls }, { "signals", signals }, { "steps", steps }, { "attaches", attaches },
        { "families", families }, { "memory", memory }, { "frozen", frozen },
    };
    for (int i = 0; i < sizeof parts / sizeof *parts; i++)
        if (argc > 1 && strcmp(argv[1], parts[i].name) == 0) { parts[i].run(); puts("ok"); }
    return 0;
}
