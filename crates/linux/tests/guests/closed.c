// Calls that wait while another thread closes their descriptor or replaces its file.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int one, two;
static volatile int waiter;
static char buffer[1 << 20];

static void shows(const char *name, long result) {
	printf("%s %ld %s\n", name, result < 0 ? -1 : result, result < 0 ? strerrorname_np(errno) : "");
	fflush(stdout);
}

static void *reads(void *_) {
	char bytes[9] = "";
	waiter = gettid();
	shows("read", read(one, bytes, 8));
	printf("%s\n", bytes);
	return 0;
}

static void *reads_parts(void *_) {
	char bytes[9] = "";
	struct iovec parts[2] = {{bytes, 1}, {bytes + 1, 1}};
	waiter = gettid();
	shows("readv", readv(one, parts, 2));
	return 0;
}

static void *receives(void *_) {
	char bytes[9] = "";
	struct iovec part = {bytes, 8};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
	waiter = gettid();
	shows("recvmsg", recvmsg(one, &message, 0));
	return 0;
}

static void *writes(void *_) {
	waiter = gettid();
	shows("write", write(one, buffer, sizeof buffer));
	return 0;
}

static void *accepts(void *_) {
	waiter = gettid();
	shows("accept", accept(one, 0, 0) > 0);
	return 0;
}

static void *polls(void *_) {
	struct pollfd polled = {one, POLLIN, 0};
	waiter = gettid();
	shows("poll", poll(&polled, 1, -1));
	shows("events", polled.revents);
	return 0;
}

static void *selects(void *_) {
	fd_set set;
	FD_ZERO(&set);
	FD_SET(one, &set);
	waiter = gettid();
	shows("select", select(one + 1, &set, 0, 0, 0));
	return 0;
}

static void *waits(void *_) {
	struct epoll_event event;
	waiter = gettid();
	shows("epoll_wait", epoll_wait(one, &event, 1, -1));
	return 0;
}

static void *locks(void *_) {
	waiter = gettid();
	shows("flock", flock(one, LOCK_EX));
	return 0;
}

static void *splices(void *_) {
	waiter = gettid();
	shows("splice", splice(one, 0, two, 0, 8, 0));
	return 0;
}

static void *takes(void *_) {
	char bytes[8];
	waiter = gettid();
	shows("mq_receive", mq_receive(one, bytes, sizeof bytes, 0));
	return 0;
}

// Starts a thread, and waits until it waits.
static pthread_t start(void *(*work)(void *)) {
	pthread_t thread;
	char name[64], line[512];
	waiter = 0;
	pthread_create(&thread, 0, work, 0);
	for (;;) {
		usleep(1000);
		if (!waiter)
			continue;
		sprintf(name, "/proc/self/task/%d/stat", waiter);
		FILE *stat = fopen(name, "r");
		char *found = stat && fgets(line, sizeof line, stat) ? strrchr(line, ')') : 0;
		if (stat)
			fclose(stat);
		if (found && found[2] == 'S')
			break;
	}
	usleep(20000);
	return thread;
}

static int other_pipe(void) {
	int ends[2];
	pipe(ends);
	write(ends[1], "WRONG", 5);
	return ends[0];
}

static void ignored(int _) {}

int main(void) {
	int ends[2], back[2];
	pthread_t thread;
	signal(SIGPIPE, SIG_IGN);

	pipe(ends);
	one = ends[0];
	thread = start(reads);
	close(ends[0]);
	shows("to a reader", write(ends[1], "y", 1));
	pthread_join(thread, 0);
	shows("to none", write(ends[1], "y", 1));
	close(ends[1]);

	pipe(ends);
	one = ends[0];
	thread = start(reads);
	int other = other_pipe();
	shows("dup2", dup2(other, one) == one);
	shows("to a replaced reader", write(ends[1], "mine", 4));
	pthread_join(thread, 0);
	char bytes[9] = "";
	shows("other", read(one, bytes, 8));
	printf("%s\n", bytes);
	close(one), close(other), close(ends[1]);

	pipe(ends);
	one = ends[0];
	thread = start(reads_parts);
	syscall(SYS_close_range, one, one, 0);
	shows("to a reader of parts", write(ends[1], "yz", 2));
	pthread_join(thread, 0);
	close(ends[1]);

	socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
	one = ends[0];
	thread = start(receives);
	close(one);
	shows("to a receiver", send(ends[1], "abc", 3, 0));
	pthread_join(thread, 0);
	shows("at the end", read(ends[1], bytes, 1));
	close(ends[1]);

	pipe(ends);
	one = ends[1];
	thread = start(writes);
	close(one);
	long taken = 0, got;
	while ((got = read(ends[0], buffer, sizeof buffer)) > 0)
		taken += got;
	shows("taken", taken);
	pthread_join(thread, 0);
	close(ends[0]);

	struct sockaddr_in address = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}};
	socklen_t length = sizeof address;
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	bind(listener, (struct sockaddr *)&address, length);
	listen(listener, 5);
	getsockname(listener, (struct sockaddr *)&address, &length);
	one = listener;
	thread = start(accepts);
	close(listener);
	int client = socket(AF_INET, SOCK_STREAM, 0);
	shows("connect", connect(client, (struct sockaddr *)&address, length));
	pthread_join(thread, 0);
	int late = socket(AF_INET, SOCK_STREAM, 0);
	shows("connect late", connect(late, (struct sockaddr *)&address, length));
	close(client), close(late);

	pipe(ends);
	one = ends[0];
	thread = start(polls);
	close(one);
	shows("to a poll", write(ends[1], "y", 1));
	pthread_join(thread, 0);
	close(ends[1]);

	pipe(ends);
	one = ends[0];
	thread = start(selects);
	close(one);
	shows("to a select", write(ends[1], "y", 1));
	pthread_join(thread, 0);
	close(ends[1]);

	pipe(ends);
	one = epoll_create1(0);
	struct epoll_event event = {EPOLLIN};
	epoll_ctl(one, EPOLL_CTL_ADD, ends[0], &event);
	thread = start(waits);
	close(one);
	shows("to a set", write(ends[1], "y", 1));
	pthread_join(thread, 0);
	close(ends[0]), close(ends[1]);

	int file = open("/tmp/closed-lock", O_CREAT | O_RDWR, 0600);
	int again = open("/tmp/closed-lock", O_RDWR);
	unlink("/tmp/closed-lock");
	flock(file, LOCK_EX);
	one = again;
	thread = start(locks);
	close(again);
	flock(file, LOCK_UN);
	pthread_join(thread, 0);
	// The lock has ended with its last descriptor.
	shows("flock again", flock(file, LOCK_EX | LOCK_NB));
	close(file);

	pipe(ends), pipe(back);
	one = ends[0], two = back[1];
	thread = start(splices);
	close(one), close(two);
	shows("to a splice", write(ends[1], "spliced", 7));
	pthread_join(thread, 0);
	memset(bytes, 0, sizeof bytes);
	shows("spliced", read(back[0], bytes, 8));
	shows("spliced end", read(back[0], bytes, 8));
	close(ends[1]), close(back[0]);

	struct mq_attr attributes = {.mq_maxmsg = 2, .mq_msgsize = 8};
	mq_unlink("/closed-queue");
	mqd_t queue = mq_open("/closed-queue", O_CREAT | O_RDWR, 0600, &attributes);
	mqd_t sender = mq_open("/closed-queue", O_WRONLY);
	mq_unlink("/closed-queue");
	one = queue;
	thread = start(takes);
	close(queue);
	shows("mq_send", mq_send(sender, "abcd", 4, 0));
	pthread_join(thread, 0);
	close(sender);

	// A call that a handler ends or restarts has lost its file.
	struct sigaction action = {.sa_handler = ignored};
	sigaction(SIGUSR1, &action, 0);
	action.sa_flags = SA_RESTART;
	sigaction(SIGUSR2, &action, 0);
	pipe(ends);
	one = ends[0];
	thread = start(reads);
	close(one);
	pthread_kill(thread, SIGUSR1);
	pthread_join(thread, 0);
	shows("to an ended read", write(ends[1], "y", 1));
	close(ends[1]);
	pipe(ends);
	one = ends[0];
	thread = start(reads);
	close(one);
	pthread_kill(thread, SIGUSR2);
	pthread_join(thread, 0);
	shows("to a restarted read", write(ends[1], "y", 1));
	close(ends[1]);
	return 0;
}
