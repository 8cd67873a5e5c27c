// Standard streams that are pipes. Results go to standard error.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

static void shows(const char *name, long result) {
	fprintf(stderr, "%s %ld %s\n", name, result < 0 ? -1 : result,
	        result < 0 ? strerrorname_np(errno) : "");
}

static void polls(const char *name, int fd) {
	struct pollfd polled = {fd, POLLIN, 0};
	poll(&polled, 1, -1);
	shows(name, polled.revents);
}

int main(void) {
	int ends[2], len = -1;
	char one[8] = "", two[8] = "", bytes[64] = "";
	pipe(ends);
	polls("poll", 0);
	shows("FIONREAD", ioctl(0, FIONREAD, &len));
	shows("bytes", len);
	shows("F_GETPIPE_SZ", fcntl(0, F_GETPIPE_SZ));
	shows("F_SETPIPE_SZ", fcntl(0, F_SETPIPE_SZ, 65536));
	shows("F_GETPIPE_SZ", fcntl(1, F_GETPIPE_SZ));
	shows("F_SETPIPE_SZ", fcntl(1, F_SETPIPE_SZ, -1));
	shows("F_SETOWN", fcntl(0, F_SETOWN, getpid()));
	shows("F_SETSIG", fcntl(1, F_SETSIG, 0));
	struct iovec parts[3] = {{one, 2}, {0, 0}, {two, 3}};
	shows("readv", readv(0, parts, 3));
	fprintf(stderr, "%s %s\n", one, two);
	parts[2].iov_base = (void *)8;
	shows("readv to a bad piece", readv(0, parts, 3));
	fprintf(stderr, "%s\n", one);
	parts[0].iov_base = (void *)8;
	shows("readv to bad pieces", readv(0, parts, 3));
	ioctl(0, FIONREAD, &len);
	shows("bytes", len);
	shows("tee", tee(0, ends[1], 4, 0));
	shows("read", read(ends[0], bytes, 64));
	fprintf(stderr, "%s\n", bytes);
	shows("splice", splice(0, 0, ends[1], 0, 6, 0));
	memset(bytes, 0, 64);
	shows("read", read(ends[0], bytes, 64));
	fprintf(stderr, "%s\n", bytes);
	loff_t offset = 0;
	shows("splice at an offset", splice(0, &offset, ends[1], 0, 6, 0));
	shows("splice to output", splice(0, 0, 1, 0, 3, 0));
	shows("tee to output", tee(0, 1, 3, 0));
	shows("write", write(ends[1], "piped", 5));
	shows("splice from a pipe", splice(ends[0], 0, 1, 0, 5, 0));
	parts[0].iov_base = "vm", parts[0].iov_len = 2;
	shows("vmsplice", vmsplice(1, parts, 1, 0));
	parts[0].iov_base = one;
	shows("vmsplice from input", vmsplice(0, parts, 1, 0));
	fprintf(stderr, "%s\n", one);
	memset(bytes, 0, 64);
	shows("read", read(0, bytes, 64));
	fprintf(stderr, "%s\n", bytes);
	polls("poll", 0);
	shows("splice at the end", splice(0, 0, ends[1], 0, 6, 0));
	shows("read at the end", read(0, bytes, 64));
	ioctl(0, FIONREAD, &len);
	shows("bytes", len);
	return 0;
}
