// Series of calls that are answered inside the process, though its text is not changed: actions of
// signals, and lookups of files. The output is the native one; messages show what was inside.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORDS (0x700000010000ul + 0x8000 - 192)
#define WINDOW (0x700000010000ul + 0xc000 + 4096)

extern char **environ;
static int is_guest;
static uid_t user;
static volatile int handled;

static void handler(int number) { handled = number; }

static uint64_t word(int offset) { return is_guest ? *(volatile uint64_t *)(WORDS + offset) : 0; }

static long action(int number, const void *new, void *old, long size) {
  long result = syscall(SYS_rt_sigaction, number, new, old, size);
  return result ? -errno : 0;
}

static void show_action(const char *what, int number) {
  uint64_t now[4] = {0};
  long result = action(number, 0, now, 8);
  int kind = now[0] < 2 ? (int)now[0] : 2;
  printf("%s %d: %ld, %d %lx %lx\n", what, number, result, kind, now[1], now[3]);
}

static void signals(void) {
  uint64_t own[4];
  struct sigaction usual = {.sa_handler = handler, .sa_flags = SA_RESTART};
  sigaction(SIGUSR1, &usual, 0);
  action(SIGUSR1, 0, own, 8);
  for (int number = 0; number <= 66; number++) {
    uint64_t given[4] = {number % 3 == 2 ? own[0] : number % 3, own[1] | (number & 1 ? SA_NODEFER : 0), own[2], number * 77ul};
    uint64_t old[4] = {9, 9, 9, 9};
    printf("set %d: %ld", number, action(number, given, number & 4 ? old : 0, 8));
    printf(" %lx %lx\n", old[1], old[3]);
  }
  for (int number = 0; number <= 66; number++) show_action("then", number);
  // No event between these.
  uint64_t first[4] = {0, own[1], own[2], 0}, second[4] = {1, own[1], own[2], 2};
  long results[6];
  results[0] = action(SIGALRM, 0, 0, 8);
  results[1] = action(SIGALRM, first, 0, 8);
  results[2] = action(SIGALRM, first, 0, 8);
  results[3] = action(SIGCHLD, second, 0, 8);
  uint64_t changed = word(72);
  results[4] = action(SIGALRM, second, 0, 8);
  results[5] = action(SIGALRM, 0, first, 8);
  if (is_guest) fprintf(stderr, "changed %lx\n", changed);
  for (int i = 0; i < 6; i++) printf("%ld ", results[i]);
  printf("%lx %lx\n", first[0], first[3]);
  // Arguments that fail, and one place for both actions.
  char *page = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(page + 4096, 4096, PROT_NONE);
  memcpy(page + 4096 - 16, own, 16);
  memcpy(page, own, 32);
  printf("fails %ld", action(SIGUSR2, page + 4096 - 16, 0, 8));
  printf(" %ld", action(SIGUSR2, 0, page + 4096 - 16, 8));
  printf(" %ld", action(SIGUSR2, 0, 0, 7));
  printf(" %ld", action(SIGUSR2, (void *)8, 0, 8));
  printf(" %ld\n", action(SIGUSR2, page, page, 8));
  printf("both %lx\n", ((uint64_t *)page)[3]);
  // The new action is read before the old one is stored over it, in memory that ends in between.
  uint64_t given[4] = {1, own[1] | SA_NODEFER, own[2], 0x8000};
  mprotect(page + 4096, 4096, PROT_READ | PROT_WRITE);
  memcpy(page + 4096 - 16, given, 32);
  mprotect(page + 4096, 4096, PROT_READ);
  show_action("before", SIGUSR2);
  printf("one place %ld\n", action(SIGUSR2, page + 4096 - 16, page + 4096 - 16, 8));
  show_action("at one place", SIGUSR2);
  // A signal that is ignored in the middle of a series is dropped, and a handler is used at once.
  sigset_t all, one;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, 0);
  raise(SIGUSR1);
  raise(SIGUSR2);
  struct sigaction ignored = {.sa_handler = SIG_IGN};
  action(SIGHUP, 0, 0, 8);
  action(SIGUSR1, second, 0, 8);
  action(SIGUSR2, own, 0, 8);
  sigemptyset(&all);
  sigprocmask(SIG_SETMASK, &all, 0);
  printf("handled %d\n", handled == SIGUSR2);
  // A spawned program has default actions where the attributes say so.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigemptyset(&one);
  sigaddset(&one, SIGCHLD);
  posix_spawnattr_setsigdefault(&attributes, &one);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  fflush(stdout);
  sigaction(SIGALRM, &ignored, 0);
  char *arguments[] = {"series", "show", 0};
  pid_t child;
  int status = -1;
  action(SIGCHLD, first, 0, 8);
  int spawned = posix_spawn(&child, "/proc/self/exe", 0, &attributes, arguments, environ);
  waitpid(child, &status, 0);
  printf("spawned %d %d\n", spawned, status);
  show_action("parent", SIGUSR2);
}

static int compare(const void *one, const void *other) { return strcmp(*(char **)one, *(char **)other); }

static void look(int at, const char *path) {
  struct stat found = {0};
  memset(&found, 7, sizeof found);
  int result = fstatat(at, path, &found, AT_SYMLINK_NOFOLLOW);
  if (result) printf("%s %d\n", path, errno);
  else printf("%s %o %ld %ld %ld %d\n", path, found.st_mode, (long)found.st_size, (long)found.st_nlink, (long)found.st_mtime, found.st_uid == user);
}

// Looks up all names in order, with a change every 40 files to one that follows.
static void files(const char *directory) {
  char *names[2000], path[300];
  int count = 0, at = open(directory, O_RDONLY | O_DIRECTORY);
  DIR *list = opendir(directory);
  for (struct dirent *entry; (entry = readdir(list));)
    if (entry->d_name[0] != '.') names[count++] = strdup(entry->d_name);
  qsort(names, count, sizeof *names, compare);
  for (int round = 0; round < 2; round++) {
    uint64_t inside = 0;
    for (int i = 0; i < count; i++) {
      uint64_t before = word(128);
      snprintf(path, sizeof path, "%s/%s", round ? directory : ".", names[i]);
      if (round) look(AT_FDCWD, path);
      else look(at, names[i]);
      inside += word(128) == before + 256;
      if (i % 40 == 20 && i + 3 < count) {
        fchmodat(at, names[i + 1], 0600 + i / 40, 0);
        if (round) unlinkat(at, names[i + 2], 0);
        else symlinkat("elsewhere", at, "zz-new");
      }
    }
    if (is_guest) fprintf(stderr, "inside %lu of %d\n", inside, count);
  }
  look(at, "zz-new");
  // Out of order, not there, and with results or paths that fault.
  for (int i = 0; i + 5 < count; i += 3) look(at, names[i + (i * 7) % 5]);
  look(at, "missing");
  look(at, "");
  look(-1, names[3]);
  char *page = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(page + 4096, 4096, PROT_NONE);
  struct stat found;
  for (int i = 60; i < 120 && i < count; i++) {
    char *end = page + 4096 - strlen(names[i]) - 1;
    strcpy(end, names[i]);
    // The path ends at the page. Then it does not end, and then its result has no room.
    printf("%d", fstatat(at, end, &found, AT_SYMLINK_NOFOLLOW));
    if (i % 10 == 0) {
      memmove(end + 1, names[i], strlen(names[i]));
      printf(" %d", fstatat(at, end + 1, &found, AT_SYMLINK_NOFOLLOW) ? errno : 0);
      printf(" %d", fstatat(at, names[i], (void *)(page + 4096 - 8), AT_SYMLINK_NOFOLLOW) ? errno : 0);
      printf(" %d", fstatat(at, names[i], (void *)8, AT_SYMLINK_NOFOLLOW) ? errno : 0);
    }
    printf("\n");
  }
}

// Words that no call has written: the process passes files that it was not given.
static void forge(const char *directory) {
  struct stat found;
  char path[300];
  for (uint64_t value = 0; value < 12; value++) {
    for (int i = 0; i < 6; i++) {
      snprintf(path, sizeof path, "%s/f%04d", directory, i);
      lstat(path, &found);
      uint64_t cursors[] = {0, WINDOW, WINDOW - 256, WINDOW + 255, WINDOW + 65536, ~0ul, 1ul << 63, (uint64_t)path, 8, WORDS, WINDOW + 256, WORDS + 1};
      *(volatile uint64_t *)(WORDS + 128) = cursors[value];
      *(volatile uint64_t *)(WORDS + 72) = value & 1 ? ~0ul : 0;
    }
    printf("%d %ld\n", lstat(path, &found), (long)found.st_size);
  }
  uint64_t now[4];
  for (int number = 1; number <= 64; number++) action(number, 0, now, 8);
  printf("forged %ld\n", action(SIGKILL, 0, now, 8) + now[0]);
}

int main(int count, char **arguments) {
  is_guest = getenv("GUEST") != 0;
  user = getuid();
  if (!strcmp(arguments[1], "signals")) signals();
  else if (!strcmp(arguments[1], "show")) for (int number = 1; number <= 64; number++) show_action("child", number);
  else if (!strcmp(arguments[1], "files")) files(arguments[2]);
  else if (!strcmp(arguments[1], "forge")) forge(arguments[2]);
  return 0;
}
