// Tries to change a file, of two pages of the letter a, by mappings of a descriptor for reading.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096 };

static char *map(int file, int protection, int flags) {
  return mmap(NULL, 2 * PAGE, protection, flags, file, 0);
}

int main(int count, char **words) {
  if (count < 2) return 2;
  int file = open(words[1], O_RDONLY);
  char *written = map(file, PROT_READ | PROT_WRITE, MAP_PRIVATE);
  char *read = map(file, PROT_READ, MAP_PRIVATE);
  if (written == MAP_FAILED || read == MAP_FAILED) return 3;
  written[0] = 'b';
  if (fork() == 0) {
    written[1] = 'b';
    _exit(written[0] == 'b' && written[PAGE] == 'a' ? 0 : 1);
  }
  int status = -1;
  wait(&status);
  printf("child %d %c%c\n", status, written[0], written[1]);

  char *shared = map(file, PROT_READ | PROT_WRITE, MAP_SHARED);
  printf("shared %d\n", shared == MAP_FAILED ? errno : 0);
  shared = map(file, PROT_READ, MAP_SHARED);
  if (shared == MAP_FAILED) return 4;
  if (mprotect(shared, PAGE, PROT_READ | PROT_WRITE) == 0) shared[6] = 'c';

  struct iovec from = {"c", 1}, to = {read + 1, 1};
  printf("process_vm_writev %zd\n", process_vm_writev(getpid(), &from, 1, &to, 1, 0));
  int memory = open("/proc/self/mem", O_RDWR);
  if (memory >= 0) (void)!pwrite(memory, "c", 1, (off_t)(long)(read + 2));
  char name[80];
  sprintf(name, "/proc/self/map_files/%lx-%lx", (long)read, (long)read + 2 * PAGE);
  int mapped = open(name, O_RDWR);
  if (mapped >= 0) (void)!pwrite(mapped, "c", 1, 3);
  char *place = mmap(NULL, 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char *moved = mremap(read, 2 * PAGE, 2 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
  if (moved == MAP_FAILED || mprotect(moved, PAGE, PROT_READ | PROT_WRITE)) return 5;
  moved[4] = 'b';
  printf("moved %c%c%c\n", moved[0], moved[4], moved[PAGE]);
  for (int other = 3; other < 64; other++) (void)!pwrite(other, "c", 1, 5);

  // The file of the guest changes, and that of the host does not.
  int writes = open(words[1], O_RDWR);
  if (pwrite(writes, "d", 1, PAGE) != 1) return 6;
  char now = 0;
  if (pread(file, &now, 1, PAGE) != 1) return 7;
  char *later = map(file, PROT_READ, MAP_PRIVATE);
  printf("after a write %c%c%c\n", now, later[PAGE], later[0]);
  return 0;
}
