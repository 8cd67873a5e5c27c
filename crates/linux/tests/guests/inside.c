// Calls that are answered inside the process, and attacks on the code and the data that do so.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <termios.h>
#include <ucontext.h>
#include <unistd.h>
#include <unwind.h>

#define INSIDE 0x700000001000ul
#define WORDS (0x700000010000ul + 0x8000 - 192)
#define ANSWERS (0x700000010000ul + 0xc000 + 1024)

static int file;
static uint64_t seed = 9;
static uint64_t next(uint64_t below) {
  seed = seed * 6364136223846793005ul + 1;
  return (seed >> 33) % below;
}

// Whether getpid answers inside: the kernel stores the flags in r11, and this code always the same.
__attribute__((noinline)) static int asks(void) {
  uint64_t flags;
  __asm__ volatile("mov %%rsp, %%rbx; sub $256, %%rsp; and $-16, %%rsp; stc; call getpid; mov %%rbx, %%rsp; mov %%r11, %0" : "=r"(flags) : : "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "memory", "cc");
  return !(flags & 1);
}

static void ids(void) {
  int wrong = 0;
  for (int i = 0; i < 100; i++) {
    wrong += getpid() != syscall(SYS_getpid);
    wrong += getppid() != syscall(SYS_getppid);
    wrong += gettid() != syscall(SYS_gettid);
    wrong += getuid() != syscall(SYS_getuid) || geteuid() != syscall(SYS_geteuid);
    wrong += getgid() != syscall(SYS_getgid) || getegid() != syscall(SYS_getegid);
    wrong += getpgrp() != syscall(SYS_getpgrp);
  }
  int child = fork();
  if (!child) _exit(getpid() == syscall(SYS_getpid) && getppid() == syscall(SYS_getppid) && asks() ? 0 : 1);
  int status;
  waitpid(child, &status, 0);
  printf("inside %d wrong %d child %d\n", asks(), wrong, status);
}

// The call as libc makes it, and by the function that is never changed.
static long both(int raw, long number, long a, long b, long c) {
  if (raw) return syscall(number, a, b, c);
  switch (number) {
    case SYS_lseek: return lseek(a, b, c);
    case SYS_read: return read(a, (void *)b, c);
    case SYS_fstat: return fstat(a, (void *)b);
    case SYS_ioctl: return ioctl(a, b, c);
  }
  abort();
}

static void model(int rounds) {
  struct stat now, then;
  uint64_t at = lseek(file, 0, SEEK_CUR), size;
  fstat(file, &then);
  size = then.st_size;
  int copy = dup(file), bad = 0;
  char buffer[64];
  for (int i = 0; i < rounds && !bad; i++) {
    int raw = next(3) == 0, which = next(4) ? file : copy;
    switch (next(7)) {
      case 0: at = next(2 * size); bad |= both(raw, SYS_lseek, which, at, SEEK_SET) != at; break;
      case 1: { long by = (long)next(size) - (long)(size / 2); long to = both(raw, SYS_lseek, which, by, SEEK_CUR);
        if ((long)at + by < 0) bad |= to != -1 || errno != EINVAL; else bad |= to != (long)(at += by); break; }
      case 2: at = size + next(9); bad |= both(raw, SYS_lseek, which, at - size, SEEK_END) != at; break;
      case 3: { long got = both(raw, SYS_read, which, (long)buffer, sizeof buffer);
        long want = at >= size ? 0 : size - at < sizeof buffer ? size - at : sizeof buffer;
        bad |= got != want; for (long j = 0; j < got; j++) bad |= buffer[j] != (char)((at + j) * 7); at += want; break; }
      case 4: memset(&now, 1, sizeof now); bad |= both(raw, SYS_fstat, which, (long)&now, 0) || memcmp(&now, &then, sizeof now); break;
      case 5: { struct termios t; bad |= both(raw, SYS_ioctl, which, TCGETS, (long)&t) != -1 || errno != ENOTTY; break; }
      case 6: bad |= lseek(which, -1, SEEK_SET) != -1 || errno != EINVAL || lseek(which, 0, 77) != -1 || errno != EINVAL; break;
    }
    if (bad) printf("round %d of %d: %lu ", i, raw, at);
  }
  close(copy);
  // What is not as it was.
  bad |= fchmod(file, 0640) || fstat(file, &now) || (now.st_mode & 0777) != 0640;
  bad |= fchmod(file, 0600) || fstat(file, &now) || (now.st_mode & 0777) != 0600;
  bad |= fstat(file, (void *)8) != -1 || errno != EFAULT || read(file, (void *)8, 8) > 0;
  bad |= fstat(1234, &now) != -1 || errno != EBADF || lseek(77, 0, 0) != -1 || errno != EBADF;
  lseek(file, 0, SEEK_SET);
  int other = open("/data", O_RDONLY);
  char first;
  read(other, &first, 1);
  bad |= lseek(other, 0, SEEK_CUR) != 1 || lseek(file, 0, SEEK_CUR) != 0;
  lseek(other, 9, SEEK_SET);
  int moved = dup2(other, file);
  bad |= lseek(moved, 0, SEEK_CUR) != 9;
  close(other);
  bad |= lseek(other, 0, SEEK_CUR) != -1 || errno != EBADF;
  lseek(file, 20, SEEK_SET);
  int child = fork();
  if (!child) { int ok = lseek(file, 5, SEEK_CUR) == 25; fstat(file, &now); _exit(!ok || lseek(file, 0, SEEK_CUR) != 25); }
  int status;
  waitpid(child, &status, 0);
  bad |= status != 0 || lseek(file, 0, SEEK_CUR) != 25;
  struct sigaction action;
  for (int s = 1; s < 32; s++) { memset(&action, 1, sizeof action); bad |= sigaction(s, 0, &action) || action.sa_handler != SIG_DFL; }
  signal(SIGUSR1, SIG_IGN);
  bad |= sigaction(SIGUSR1, 0, &action) || action.sa_handler != SIG_IGN;
  signal(SIGUSR1, SIG_DFL);
  bad |= sigaction(SIGUSR1, 0, &action) || action.sa_handler != SIG_DFL || sigaction(0, 0, &action) != -1 || sigaction(65, 0, &action) != -1;
  printf("model %s\n", bad ? "differs" : "holds");
}

static uint64_t trail[2];
static void on_step(int s, siginfo_t *i, void *c) {
  greg_t *g = ((ucontext_t *)c)->uc_mcontext.gregs;
  if (!trail[0]) trail[0] = g[REG_RIP], trail[1] = g[REG_RAX];
  g[REG_EFL] &= ~0x100;
}
// Steps to an address, as an instruction of the site does, and reports where the trap is seen.
__attribute__((noinline)) static void step(uint64_t to, uint64_t rax, uint64_t rcx, uint64_t function) {
  trail[0] = 0;
  uint64_t result = rax;
  __asm__ volatile("mov %%rsp, %%rbx; sub $256, %%rsp; and $-16, %%rsp; lea 1f(%%rip), %%r10; push %%r10; mov %1, %%r11; pushfq; orq $0x100, (%%rsp); popfq; jmp *%%r11; 1: mov %%rbx, %%rsp"
                   : "+a"(result) : "r"(to), "c"(rcx), "D"(file), "S"(0), "d"(1) : "rbx", "r8", "r9", "r10", "r11", "memory", "cc");
  printf("%lu %lu %d; ", trail[0] - function, trail[1], result == syscall(SYS_getpid));
}
static void steps(void) {
  struct sigaction action = {.sa_sigaction = on_step, .sa_flags = SA_SIGINFO};
  sigaction(SIGTRAP, &action, 0);
  uint64_t site = (uint64_t)getpid, trampoline = site + 5 + *(int *)(site + 1);
  step(trampoline, 0, 0, site);
  step(trampoline + 5, 39, 0, site);
  step(trampoline + 12, 39, site + 5, site);
  step(INSIDE, 39, site + 5, site);
  step(INSIDE + 10, 39, site + 5, site);
  printf("\n");
}

// Single steps through calls, whose handler does not end them.
static volatile int walked;
static void on_walk(int s) { walked++; }
static void walk(void) {
  struct sigaction action = {.sa_handler = on_walk};
  sigaction(SIGTRAP, &action, 0);
  lseek(file, 0, SEEK_SET);
  walked = 0;
  char bytes[2] = {1, 1};
  __asm__ volatile("sub $256, %%rsp; pushfq; orq $0x100, (%%rsp); popfq; add $256, %%rsp" : : : "memory", "cc");
  long got = read(file, bytes, 1), next = read(file, bytes + 1, 1), at = lseek(file, 0, SEEK_CUR), id = getpid();
  __asm__ volatile("sub $256, %%rsp; pushfq; andq $-257, (%%rsp); popfq; add $256, %%rsp" : : : "memory", "cc");
  printf("walked %d wrong %d\n", walked > 30, got != 1 || next != 1 || at != 2 || id != syscall(SYS_getpid) || bytes[0] != 0 || bytes[1] != 7);
}

static int depth, found;
static uint64_t outer;
static _Unwind_Reason_Code frame(struct _Unwind_Context *context, void *unused) {
  depth++;
  found |= _Unwind_GetIP(context) >= outer && _Unwind_GetIP(context) < outer + 4096;
  return depth < 40 ? _URC_NO_REASON : _URC_END_OF_STACK;
}
static volatile int alarms, lost, elsewhere;
static void on_alarm(int s, siginfo_t *i, void *c) {
  alarms++;
  uint64_t at = ((ucontext_t *)c)->uc_mcontext.gregs[REG_RIP];
  elsewhere += at >= INSIDE && at < INSIDE + 4096;
  depth = found = 0;
  _Unwind_Backtrace(frame, 0);
  lost += !found;
  struct stat now;
  elsewhere += fstat(file, &now) || getpid() != syscall(SYS_getpid);
  lseek(file, 1, SEEK_CUR);
}
// Moves the offset while a handler does so, too.
__attribute__((noinline)) static void race(int wanted) {
  struct sigaction action = {.sa_sigaction = on_alarm, .sa_flags = SA_SIGINFO | SA_RESTART};
  sigaction(SIGALRM, &action, 0);
  outer = (uint64_t)race;
  struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
  alarms = lost = elsewhere = 0;
  lseek(file, 0, SEEK_SET);
  long moved = 0;
  struct stat now;
  setitimer(ITIMER_REAL, &often, 0);
  while (alarms < wanted) { lseek(file, 1, SEEK_CUR); moved++; if (moved % 16 == 0) fstat(file, &now); }
  setitimer(ITIMER_REAL, &never, 0);
  long at = lseek(file, 0, SEEK_CUR);
  printf("race %s, lost %d, elsewhere %d\n", at == moved + alarms ? "exact" : "wrong", lost, elsewhere);
}

// Compares actions and the mask with those that the sentry reports, after random changes. Counts
// questions that were answered inside: the sentry takes a moved offset over.
static void actions(int rounds) {
  volatile uint64_t *words = (void *)WORDS;
  int wrong = 0, inside = 0;
  for (int round = 0; round < rounds; round++) {
    int changed = 1 + next(64);
    uint64_t given[4] = {next(2) ? next(3) : next(~0u) << 20, next(~0u), next(~0u), next(~0u)}, mask = next(~0u), seen;
    long set = syscall(SYS_rt_sigaction, changed, given, 0, 8);
    wrong += set != (changed == SIGKILL || changed == SIGSTOP ? -1 : 0);
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &mask, 0, 8);
    lseek(file, 0, SEEK_CUR);
    lseek(file, round % 50, SEEK_SET);
    // The default action is set inside.
    struct sigaction standard = {.sa_handler = SIG_DFL};
    for (int n = 0; round % 2 && n < 5; n++) {
      int s = 1 + next(31);
      if (s != SIGKILL && s != SIGSTOP) wrong += sigaction(s, &standard, 0) != 0;
    }
    int set_inside = words[file % 8] == 1 + round % 50;
    sigset_t blocked;
    struct sigaction found[65];
    int result[65];
    for (int s = 0; s < 65; s++) result[s] = sigaction(s, 0, &found[s]);
    sigprocmask(SIG_BLOCK, 0, &blocked);
    inside += round % 2 ? set_inside : words[file % 8] == 1 + round % 50;
    syscall(SYS_rt_sigprocmask, SIG_BLOCK, 0, &seen, 8);
    wrong += *(uint64_t *)&blocked != seen;
    for (int s = 0; s < 65; s++) {
      if (s == 0 || s == 32 || s == 33) { wrong += result[s] != -1; continue; }
      uint64_t raw[4];
      wrong += result[s] || syscall(SYS_rt_sigaction, s, 0, raw, 8);
      wrong += raw[0] != (uint64_t)found[s].sa_handler || (int)raw[1] != found[s].sa_flags || raw[2] != (uint64_t)found[s].sa_restorer || raw[3] != *(uint64_t *)&found[s].sa_mask;
    }
    wrong += sigprocmask(0, 0, (void *)8) != -1 || errno != EFAULT;
  }
  printf("actions wrong %d inside %d\n", wrong, inside == rounds);
}

// Closes two watched files in each order.
static void closing_order(void) {
  int wrong = 0;
  for (int round = 0; round < 20; round++) {
    int first = open("/data", O_CREAT | O_RDONLY, 0600), other = open("/other", O_CREAT | O_RDONLY, 0600);
    lseek(first, 1, SEEK_SET);
    lseek(other, 1, SEEK_SET);
    int watches = inotify_init1(IN_NONBLOCK);
    int marks[2] = {inotify_add_watch(watches, "/data", IN_CLOSE), inotify_add_watch(watches, "/other", IN_CLOSE)};
    int turned = round % 2;
    wrong += close(turned ? other : first) || close(turned ? first : other);
    struct inotify_event events[2] = {{0}};
    wrong += read(watches, events, sizeof events) != sizeof events;
    wrong += events[0].wd != marks[turned] || events[1].wd != marks[!turned];
    close(watches);
  }
  printf("order wrong %d\n", wrong);
}

static sigjmp_buf back;
static void on_fault(int s) { siglongjmp(back, s); }
static void catch_all(void) {
  static char stack[1 << 16];
  stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
  sigaltstack(&alternate, 0);
  for (int s = 1; s < 32; s++)
    if (s == SIGSEGV || s == SIGILL || s == SIGBUS || s == SIGTRAP || s == SIGFPE) { struct sigaction a = {.sa_handler = on_fault, .sa_flags = SA_ONSTACK | SA_NODEFER}; sigaction(s, &a, 0); }
}

// Jumps to an offset of the code inside, with registers of a kind.
static void jump(long offset, int kind, int flags) {
  uint64_t *words = (void *)WORDS;
  uint64_t to = INSIDE + offset;
  static char page[8192] __attribute__((aligned(4096)));
  uint64_t values[] = {0, (uint64_t)page, ANSWERS, WORDS, INSIDE, (uint64_t)getpid + 5, -1ul, 0x700000000000, next(~0u)};
  for (int i = 0; i < 8; i++) words[i] = values[next(9)];
  words[8] = kind & 8 ? values[next(9)] : 0;
  words[9] = kind & 1 ? (uint64_t)getpid + 5 : values[next(9)];
  words[10] = kind & 2 ? 39 : values[next(9)];
  for (int i = 11; i < 14; i++) words[i] = values[next(9)];
  volatile uint64_t rdi = kind & 4 ? file : values[next(9)], rsi = values[next(9)], rdx = values[next(9)], rcx = kind & 1 ? (uint64_t)getpid + 5 : values[next(9)], r11 = values[next(9)], rax = kind & 2 ? 39 : values[next(9)];
  int signal = sigsetjmp(back, 1);
  if (signal) return;
  alarm(1);
  __asm__ volatile("sub $4096, %%rsp; and $-16, %%rsp; lea 1f(%%rip), %%r10; push %%r10; mov %6, %%r10; push %%r10; mov %0, %%rdi; mov %1, %%rsi; mov %2, %%rdx; mov %3, %%rcx; mov %4, %%r11; mov %5, %%rax; xor %%r10d, %%r10d; cmpl $0, %7; je 2f; pushfq; orq $0x100, (%%rsp); popfq; 2: ret; 1: ud2"
                   : : "m"(rdi), "m"(rsi), "m"(rdx), "m"(rcx), "m"(r11), "m"(rax), "r"(to), "r"(flags) : "memory", "rax", "rcx", "rdi", "rsi", "rdx", "r10", "r11", "cc");
}

#define WINDOW (0x700000010000ul + 0xc000 + 4096)
static char whole[1 << 16], part[1 << 16];
// Reads a file of the host in pieces of some size, inside and by the sentry. Counts pieces that
// differ, and calls that were answered inside.
static void contents(const char *path, int seeds) {
  int wrong = 0, inside = 0;
  int raw = open(path, O_RDONLY);
  long size = syscall(SYS_pread64, raw, whole, sizeof whole, 0);
  syscall(SYS_close, raw);
  for (int round = 0; round < seeds; round++) {
    int other = open(path, O_RDONLY);
    long at = 0, got;
    wrong += memcmp((char *)WINDOW, whole, size) != 0;
    do {
      long want = 1 + next(round % 3 ? 200 : size);
      char *to = part + next(4096);
      memset(part, 1, sizeof part);
      got = read(other, to, want);
      // The sentry takes the offset over when it next serves a call.
      inside += got > 0 && ((volatile uint64_t *)WORDS)[other % 8] == at + got + 1;
      long left = size - at;
      wrong += got != (want < left ? want : left) || memcmp(to, whole + at, got) || to[got] != 1 || (to > part && to[-1] != 1);
      at += got;
      if (next(4) == 0) { at = next(size); lseek(other, at, SEEK_SET); }
    } while (got > 0 && inside < 4000);
    wrong += syscall(SYS_lseek, other, 0, SEEK_CUR) != at;
    // Bad buffers: the sentry answers.
    lseek(other, 0, SEEK_SET);
    wrong += read(other, (void *)8, 8) != -1 || errno != EFAULT || read(other, (void *)-4, 100) != -1 || errno != EFAULT;
    wrong += read(other, (void *)WINDOW, 8) != -1 || errno != EFAULT || read(other, part, 0) != 0;
    wrong += syscall(SYS_lseek, other, 0, SEEK_CUR) != 0;
    int copy = dup(other);
    wrong += read(other, part, 10) != 10 || close(other) || read(copy, part, 10) != 10 || memcmp(part, whole + 10, 10);
    wrong += close(copy);
  }
  printf("contents wrong %d inside %d\n", wrong, inside > seeds);
}

// Closes descriptors inside, and looks at what that leaves.
static void closes(void) {
  int wrong = 0;
  for (int i = 0; i < 50; i++) {
    int first = open("/data", O_RDONLY), second = open("/data", O_RDONLY);
    wrong += lseek(first, 5, SEEK_SET) != 5 || close(first) || close(first) != -1 || errno != EBADF;
    wrong += lseek(first, 0, SEEK_CUR) != -1 || errno != EBADF || read(first, part, 1) != -1 || errno != EBADF;
    struct stat now;
    wrong += fstat(first, &now) != -1 || errno != EBADF;
    // The lowest number is free at once.
    wrong += open("/data", O_RDONLY) != first || lseek(first, 0, SEEK_CUR) != 0;
    // An offset that was set before stays with the description.
    int copy = dup(second);
    wrong += lseek(second, 7, SEEK_SET) != 7 || close(second) || lseek(copy, 0, SEEK_CUR) != 7;
    // A lock of the process goes with any descriptor of the file.
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET}, seen = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    wrong += fcntl(copy, F_SETLK, &lock);
    wrong += close(first);
    int child = fork(), status;
    if (!child) _exit(fcntl(copy, F_GETLK, &seen) || seen.l_type != F_UNLCK);
    waitpid(child, &status, 0);
    wrong += status || close(copy);
    wrong += syscall(SYS_close, first) != -1 || syscall(SYS_close, second) != -1 || syscall(SYS_close, copy) != -1;
  }
  printf("closes wrong %d\n", wrong);
}

// Reads a file while a timer interrupts, so that copies are made anew.
static volatile int ticks;
static void on_tick(int s) { ticks++; }
static void interrupted(const char *path, int wanted) {
  struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_RESTART};
  sigaction(SIGALRM, &action, 0);
  struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
  int other = open(path, O_RDONLY), wrong = 0;
  long size = syscall(SYS_pread64, other, whole, sizeof whole, 0);
  syscall(SYS_close, other);
  other = open(path, O_RDONLY);
  ticks = 0;
  setitimer(ITIMER_REAL, &often, 0);
  while (ticks < wanted) {
    part[size - 1] = 0;
    wrong += lseek(other, 0, SEEK_SET) || read(other, part, sizeof part) != size || memcmp(part, whole, size);
  }
  setitimer(ITIMER_REAL, &never, 0);
  wrong += lseek(other, 0, SEEK_CUR) != size || close(other);
  printf("interrupted wrong %d\n", wrong);
}

int main(void) {
  setbuf(stdout, 0);
  static char line[256], bytes[1000];
  for (int i = 0; i < 1000; i++) bytes[i] = i * 7;
  int made = open("/data", O_CREAT | O_RDWR, 0600);
  write(made, bytes, sizeof bytes);
  close(made);
  file = open("/data", O_RDONLY);
  lseek(file, 3, SEEK_SET);
  for (;;) {
    int got = 0;
    while (got < 255 && read(0, line + got, 1) == 1 && line[got] != '\n') got++;
    line[got] = 0;
    char word[32] = "";
    long a = 0, b = 0, c = 0;
    char path[100] = "";
    sscanf(line, "%31s %ld %ld %ld", word, &a, &b, &c);
    sscanf(line, "%31s %ld %99s", word, &a, path);
    seed = a * 31 + b * 7 + c + 1;
    if (!strcmp(word, "ids")) ids();
    else if (!strcmp(word, "inside")) printf("inside %d\n", asks());
    else if (!strcmp(word, "model")) model(a);
    else if (!strcmp(word, "at")) printf("at %ld\n", (long)lseek(file, 0, SEEK_CUR));
    else if (!strcmp(word, "move")) { for (int i = 0; i < a; i++) lseek(file, 1, SEEK_CUR); printf("moved\n"); }
    else if (!strcmp(word, "step")) steps();
    else if (!strcmp(word, "walk")) walk();
    else if (!strcmp(word, "contents")) contents(path, a);
    else if (!strcmp(word, "interrupted")) interrupted(path, a);
    else if (!strcmp(word, "closes")) closes();
    else if (!strcmp(word, "order")) closing_order();
    else if (!strcmp(word, "actions")) actions(a);
    else if (!strcmp(word, "hold") || !strcmp(word, "held")) {
      static int held;
      char text[6] = "";
      if (*path) held = open(path, O_RDONLY);
      lseek(held, 0, SEEK_SET);
      read(held, text, 5);
      printf("held %s\n", text);
    }
    else if (!strcmp(word, "poll")) {
      // No call reaches the sentry here.
      char text[6] = "";
      int seen = open(path, O_RDONLY);
      do lseek(seen, 0, SEEK_SET), read(seen, text, 5);
      while (!strcmp(text, "first"));
      printf("polled %s\n", text);
    }
    else if (!strcmp(word, "window")) { int kept = 0; for (int i = 0; i < 1 << 16; i++) kept |= ((char *)WINDOW)[i]; printf("window %d\n", kept != 0); }
    else if (!strcmp(word, "race")) race(a);
    else if (!strcmp(word, "look")) {
      uint64_t *words = (void *)WORDS, *answers = (void *)ANSWERS, left = 0;
      for (int i = 0; i < 11; i++) left |= words[i];
      // Numbers of this process alone, and the descriptors that it uses itself.
      printf("left %lu at %ld\n", left, syscall(SYS_lseek, file, 0, SEEK_CUR));
    }
    else if (!strcmp(word, "secret")) { int other = open("/data", O_RDONLY); struct stat now; fstat(other, &now); lseek(other, 77, SEEK_SET); uint64_t found = 0; for (int i = 0; i < 200; i++) found |= ((uint64_t *)ANSWERS)[i] == now.st_ino; printf("kept %lu\n", found); }
    else if (!strcmp(word, "find")) { uint64_t found = 0; for (int i = 16; i < 200; i++) found |= ((uint64_t *)ANSWERS)[i]; printf("found %d\n", found != 0); }
    else if (!strcmp(word, "text")) {
      unsigned char *at = (void *)getpid, *page = (void *)((uint64_t)at & -4096);
      unsigned char was = *at;
      if (was != 0xe9) abort();
      mprotect(page, 4096, PROT_READ | PROT_WRITE | PROT_EXEC);
      int now = *at, good = getpid() == syscall(SYS_getpid);
      mprotect(page, 4096, PROT_READ | PROT_EXEC);
      good &= getpid() == syscall(SYS_getpid) && !asks() && lseek(file, 0, SEEK_CUR) == 3;
      unsigned char *other = (void *)gettid;
      good &= *other == 0xb8 && !madvise((void *)((uint64_t)other & -4096), 4096, MADV_DONTNEED) && gettid() == syscall(SYS_gettid);
      // All of it.
      mprotect((void *)0x401000, 0x98000, PROT_READ | PROT_WRITE | PROT_EXEC);
      good &= *other == 0xb8 && gettid() == syscall(SYS_gettid) && read(file, &was, 1) == 1 && lseek(file, 0, SEEK_CUR) == 4;
      printf("text %d %x %d\n", was, now, good);
    }
    else if (!strcmp(word, "forge")) {
      catch_all();
      volatile uint64_t *words = (void *)WORDS;
      lseek(file, 0, SEEK_CUR);
      for (int i = 0; i < 8; i++) words[i] = a;
      // Places without a descriptor.
      words[8] = ~(1ul << file % 8);
      long at = syscall(SYS_lseek, file, 0, SEEK_CUR);
      int wrote = 0;
      if (!sigsetjmp(back, 1)) { *(volatile uint64_t *)ANSWERS = 1; wrote = 1; }
      printf("forged %ld wrote %d\n", at, wrote);
    }
    else if (!strcmp(word, "jump")) { catch_all(); jump(a, b, c); printf("jumped\n"); }
    else printf("what? %s\n", line);
  }
}
