/* Copies its input to its output, and exits with the number of bytes. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    return 99;
}

int main(int argc, char **argv) {
    /* Memory by every function of a C library. */
    char *heap = malloc(100), *large = malloc(1 << 20), *more = sbrk(1 << 16);
    if (!heap || !large || more == (void *)-1) return fail("memory");
    memset(large, 1, 1 << 20);
    large = realloc(large, 8 << 20);
    for (int i = 0; i < 1 << 20; i++)
        if (large[i] != 1) return fail("realloc lost bytes");
    char *map = mmap(0, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return fail("mmap");
    map[5000] = 7;
    if (madvise(map, 1 << 16, MADV_DONTNEED) || map[5000]) return fail("madvise");
    if (mprotect(map, 4096, PROT_READ) || munmap(map, 1 << 16)) return fail("mprotect");
    char *top = sbrk(8192);
    top[5000] = 1;
    if (sbrk(-8192) == (void *)-1 || write(1, top + 5000, 1) != -1 || errno != EFAULT) return fail("below the break");
    if (sbrk(8192) != top || top[5000]) return fail("the break");
    free(heap);
    free(large);
    /* Files: its own, and those of the host that were granted. */
    int file = open("/tmp/file", O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || write(file, "hello", 5) != 5 || lseek(file, 1, SEEK_SET) != 1) return fail("file");
    char bytes[16] = {0};
    if (read(file, bytes, 16) != 4 || strcmp(bytes, "ello")) return fail("what was written");
    struct stat stat_;
    if (fstat(file, &stat_) || stat_.st_size != 5 || !S_ISREG(stat_.st_mode)) return fail("fstat");
    if (rename("/tmp/file", "/tmp/other") || !access("/tmp/file", F_OK)) return fail("rename");
    if (open("/etc/shadow", O_RDONLY) >= 0 || errno != ENOENT) return fail("/etc/shadow is there");
    if (open("/usr/new", O_WRONLY | O_CREAT, 0644) < 0) return fail("a new file above the host's");
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now) || now.tv_sec < 1700000000) return fail("clock");
    pid_t child = fork();
    if (child == 0) _exit(getpid() > 2 && getppid() == 2 ? 7 : 8);
    int status = 0;
    if (getpid() != 2 || waitpid(child, &status, 0) != child || status != 7 << 8) return fail("fork");
    printf("%d %s %s\n", argc, argv[argc - 1], getenv("COLOUR"));
    fflush(stdout);
    long n, sum = 0;
    static char buffer[1000];
    while ((n = read(0, buffer, sizeof buffer)) > 0) {
        if (write(1, buffer, n) != n) return fail("write");
        sum += n;
    }
    return (int)sum;
}
