// Reads and writes of more bytes than the sentry moves at a time. Prints the native results.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#define MIB (1l << 20)
#define LEN (40 * MIB + 123)

static int excess;
static void count(int number) { excess++; }

static char *memory(long len) { return mmap(0, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }

static void show(const char *what, long result) { printf("%s %ld %d\n", what, result, result < 0 ? errno : 0); }

int main(int argc, char **arguments) {
  char *from = memory(LEN + 4096), *to = memory(LEN + 4096);
  for (long i = 0; i < LEN / 4; i++) ((uint32_t *)from)[i] = i * 2654435761u;
  int file = open(arguments[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
  show("write", write(file, from, LEN));
  show("at", lseek(file, 0, SEEK_CUR));
  lseek(file, 0, SEEK_SET);
  show("read", read(file, to, LEN + 4096));
  show("same", !memcmp(from, to, LEN));
  show("end", read(file, to, LEN));
  memset(to, 0, LEN);
  show("pread", pread(file, to, LEN - 5, 5));
  show("same", !memcmp(from + 5, to, LEN - 5));
  struct iovec parts[4] = {{from, 13 * MIB}, {from + 13 * MIB, 0}, {from + 13 * MIB, 20 * MIB + 1}, {from + 33 * MIB + 1, LEN - 33 * MIB - 1}};
  show("pwritev", pwritev(file, parts, 4, 7));
  for (int i = 0; i < 4; i++) parts[i].iov_base = to + ((char *)parts[i].iov_base - from);
  memset(to, 0, LEN);
  show("preadv", preadv(file, parts, 4, 7));
  show("same", !memcmp(from, to, LEN));
  // Memory that ends in the second part, and at its start.
  mprotect(from + 16 * MIB, 4096, PROT_NONE);
  show("cut", pwrite(file, from + 3 * MIB + 100, 30 * MIB, 0));
  show("cut", pwrite(file, from + 8 * MIB, 30 * MIB, 0));
  show("fault", pwrite(file, from + 16 * MIB, 30 * MIB, 0));
  mprotect(to + 16 * MIB, 4096, PROT_READ);
  show("into", pread(file, to + 8 * MIB, 30 * MIB, 0));
  show("into", pread(file, to + 16 * MIB, 30 * MIB, 0));
  mprotect(to + 16 * MIB, 4096, PROT_READ | PROT_WRITE);
  mprotect(from + 16 * MIB, 4096, PROT_READ | PROT_WRITE);
  // A limit of the size that is the end of a part.
  signal(SIGXFSZ, count);
  struct rlimit limit = {16 * MIB, 16 * MIB};
  setrlimit(RLIMIT_FSIZE, &limit);
  ftruncate(file, 0);
  lseek(file, 0, SEEK_SET);
  show("limited", write(file, from, LEN));
  show("excess", excess);
  show("limited", write(file, from, LEN));
  show("excess", excess);
  int zero = open("/dev/zero", O_RDWR), null = open("/dev/null", O_RDWR), full = open("/dev/full", O_RDWR), random = open("/dev/urandom", O_RDONLY);
  memset(to, 1, LEN);
  show("zero", read(zero, to, LEN));
  show("same", to[0] == 0 && !memcmp(to, to + 1, LEN - 1));
  show("zero", write(zero, from, LEN));
  show("null", write(null, from, LEN));
  show("null", write(null, (void *)8, LEN));
  show("null", read(null, to, LEN));
  show("full", write(full, from, LEN));
  show("random", read(random, to, 20 * MIB));
  show("random", getrandom(to, 20 * MIB, 0));
  show("random", to[20 * MIB - 1] | to[20 * MIB - 2] | to[20 * MIB - 3] | to[20 * MIB - 4] ? 1 : 0);
  return 0;
}
