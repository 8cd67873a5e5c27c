// Sockets and named queues of messages. With an argument it prints what each call does, which is
// the same on Linux itself; without one it answers lines: "hold" sends a message with credentials
// and one to a queue, and "look" receives them.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static void say(const char *what, long value) {
    if (value < 0) printf("%s: %s\n", what, strerrorname_np(errno));
    else printf("%s: %ld\n", what, value);
}
static long get(int s, int level, int name) {
    int value = -1;
    socklen_t len = sizeof value;
    return getsockopt(s, level, name, &value, &len) ? -1 : value;
}
static long set(int s, int level, int name, int value) { return setsockopt(s, level, name, &value, sizeof value); }
static long ready(int s) {
    struct pollfd p = {s, POLLIN | POLLOUT | POLLRDHUP, 0};
    poll(&p, 1, 0);
    return p.revents;
}
static struct sockaddr_in four(const char *ip, int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, ip, &a.sin_addr);
    return a;
}
static struct sockaddr_in6 six(const char *ip, int port) {
    struct sockaddr_in6 a = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    inet_pton(AF_INET6, ip, &a.sin6_addr);
    return a;
}
static int port(int s) {
    struct sockaddr_in6 a;
    socklen_t len = sizeof a;
    getsockname(s, (void *)&a, &len);
    return ntohs(a.sin6_port);
}
static void named(const char *what, int s, int (*get)(int, struct sockaddr *, socklen_t *)) {
    struct sockaddr_storage a;
    char text[64] = "";
    socklen_t len = sizeof a;
    if (get(s, (void *)&a, &len)) printf("%s: %s\n", what, strerrorname_np(errno));
    else if (a.ss_family == AF_UNIX) printf("%s: %u bytes\n", what, len);
    else printf("%s: %s\n", what, inet_ntop(a.ss_family, a.ss_family == AF_INET ? (void *)&((struct sockaddr_in *)&a)->sin_addr : (void *)&((struct sockaddr_in6 *)&a)->sin6_addr, text, sizeof text));
}

// Sends bytes with descriptors or credentials.
static long tell(int s, const char *text, int fd, struct ucred *credentials) {
    char control[64] __attribute__((aligned(8))) = {0};
    struct iovec piece = {(void *)text, strlen(text)};
    struct msghdr m = {.msg_iov = &piece, .msg_iovlen = 1};
    struct cmsghdr *c = (void *)control;
    if (fd >= 0 || credentials) {
        size_t len = credentials ? sizeof *credentials : sizeof fd;
        *c = (struct cmsghdr){CMSG_LEN(len), SOL_SOCKET, credentials ? SCM_CREDENTIALS : SCM_RIGHTS};
        memcpy(CMSG_DATA(c), credentials ? (void *)credentials : (void *)&fd, len);
        m.msg_control = control, m.msg_controllen = CMSG_SPACE(len);
    }
    return sendmsg(s, &m, 0);
}
// Receives, and prints everything that came.
static void hear(const char *what, int s, size_t room, size_t control, int flags) {
    char bytes[64] = {0}, data[128] __attribute__((aligned(8)));
    struct iovec piece = {bytes, room};
    struct msghdr m = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control ? data : 0, .msg_controllen = control};
    long n = recvmsg(s, &m, flags | MSG_DONTWAIT);
    if (n < 0) { printf("%s: %s\n", what, strerrorname_np(errno)); return; }
    printf("%s: %ld %s flags %x control %zu", what, n, bytes, m.msg_flags, m.msg_controllen);
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
        printf(" [%d %zu", c->cmsg_type, c->cmsg_len);
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS && c->cmsg_len == CMSG_LEN(sizeof(struct ucred))) {
            struct ucred *u = (void *)CMSG_DATA(c);
            printf(" %s", u->pid == getpid() && u->uid == getuid() ? "own" : u->pid ? "another's" : "nobody's");
        } else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            for (unsigned i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / 4; i++) close(((int *)CMSG_DATA(c))[i]);
        }
        printf("]");
    }
    puts("");
}

static void credentials(int type) {
    int p[2], on = 1;
    struct ucred own = {getpid(), getuid(), getgid()}, other = {getppid(), getuid() + 1, getgid()};
    socketpair(AF_UNIX, type, 0, p);
    say("plain", write(p[0], "one", 3));
    hear("without asking", p[1], 9, 100, 0);
    say("before", write(p[0], "two", 3));
    set(p[1], SOL_SOCKET, SO_PASSCRED, 1);
    say("after", write(p[0], "three", 5));
    hear("nobody's", p[1], 9, 100, 0), hear("own", p[1], 9, 100, 0);
    say("explicit", tell(p[0], "four", -1, &own));
    hear("peek", p[1], 9, 100, MSG_PEEK), hear("cut", p[1], 9, 20, 0);
    say("with a descriptor", tell(p[0], "five", 0, 0));
    hear("peek at it", p[1], 9, 100, MSG_PEEK), hear("both", p[1], 9, 100, MSG_CMSG_CLOEXEC);
    tell(p[0], "six", 0, 0), hear("room for credentials", p[1], 9, 32, 0);
    tell(p[0], "seven", 0, 0), hear("no room", p[1], 9, 0, 0);
    tell(p[0], "eight", 0, 0), hear("no bytes", p[1], 0, 100, 0), hear("the bytes", p[1], 9, 100, 0);
    say("another's", getuid() ? tell(p[0], "x", -1, &other) : (errno = EPERM, -1));
    int child = fork();
    if (!child) _exit(write(p[0], "child", 5) != 5);
    waitpid(child, 0, 0), write(p[0], "own", 3);
    hear("a child's", p[1], 20, 100, 0), hear("and own", p[1], 20, 100, 0);
    say("one's credentials", recv(p[1], (char[4]){0}, 4, MSG_DONTWAIT));
    close(p[0]), close(p[1]);
}

static void shutdowns(int type) {
    int p[2];
    char b[16];
    socketpair(AF_UNIX, type, 0, p);
    say("idle", ready(p[0])), say("no data", recv(p[0], b, 0, MSG_DONTWAIT));
    write(p[0], "abc", 3);
    say("shut down for reading", shutdown(p[1], SHUT_RD)), say("ready", ready(p[1]));
    say("what it holds", recv(p[1], b, 9, MSG_DONTWAIT)), say("peer writes", send(p[0], "x", 1, MSG_NOSIGNAL));
    say("peer ready", ready(p[0]));
    say("shut down for writing", shutdown(p[1], SHUT_WR)), say("own write", send(p[1], "x", 1, MSG_NOSIGNAL));
    say("ready", ready(p[1])), say("peer ready", ready(p[0]));
    close(p[1]), say("after its end", ready(p[0]));
    say("write", send(p[0], "x", 1, MSG_NOSIGNAL)), close(p[0]);
    socketpair(AF_UNIX, type, 0, p), write(p[0], "unread", 6), close(p[1]);
    say("read of one that was closed with data", recv(p[0], b, 9, MSG_DONTWAIT)), say("again", recv(p[0], b, 9, MSG_DONTWAIT)), close(p[0]);
    socketpair(AF_UNIX, type, 0, p), write(p[0], "unread", 6), shutdown(p[1], SHUT_RDWR), close(p[1]);
    say("the same after a shutdown", recv(p[0], b, 9, MSG_DONTWAIT)), close(p[0]);
    int s = socket(AF_UNIX, type, 0);
    say("new", ready(s)), say("read", read(s, b, 1)), say("write", send(s, "x", 1, MSG_NOSIGNAL)), say("shutdown", shutdown(s, SHUT_RDWR)), close(s);
    socketpair(AF_UNIX, type, 0, p);
    struct sockaddr_un a = {AF_UNIX, "/nowhere"};
    say("to a name", sendto(p[0], "x", 1, MSG_NOSIGNAL, (void *)&a, sizeof a)), say("unknown option", get(p[0], SOL_SOCKET, -1)), say("unknown level", get(p[0], IPPROTO_TCP, 1));
    say("bind of another family", bind(p[0], (void *)&(struct sockaddr_in){AF_INET}, sizeof(struct sockaddr_in))), close(p[0]), close(p[1]);
}

static void listeners(void) {
    int l = socket(AF_INET, SOCK_STREAM, 0), c = socket(AF_INET, SOCK_STREAM, 0), d;
    struct sockaddr_in any = four("0.0.0.0", 0), own;
    char b[8];
    bind(l, (void *)&any, sizeof any), listen(l, 5), own = four("127.0.0.1", port(l));
    say("connect", connect(c, (void *)&own, sizeof own)), d = accept(l, 0, 0);
    named("own name of the accepted one", d, getsockname), named("its peer", c, getpeername);
    say("keep-alive", get(c, IPPROTO_TCP, TCP_KEEPIDLE)), say("interval", get(c, IPPROTO_TCP, TCP_KEEPINTVL)), say("probes", get(c, IPPROTO_TCP, TCP_KEEPCNT));
    say("0", set(c, IPPROTO_TCP, TCP_KEEPIDLE, 0)), say("too long", set(c, IPPROTO_TCP, TCP_KEEPINTVL, 40000)), say("linger", get(c, IPPROTO_TCP, TCP_LINGER2));
    say("set", set(c, IPPROTO_TCP, TCP_LINGER2, 500)), say("is", get(c, IPPROTO_TCP, TCP_LINGER2)), say("quick", get(c, IPPROTO_TCP, TCP_QUICKACK)), say("user timeout", set(c, IPPROTO_TCP, TCP_USER_TIMEOUT, -1));
    say("congestion", setsockopt(c, IPPROTO_TCP, TCP_CONGESTION, "nothing", 7)), say("multicast", get(c, IPPROTO_IP, IP_MULTICAST_TTL)), say("unknown", set(c, IPPROTO_TCP, 999, 1));
    struct tcp_info info;
    socklen_t len = sizeof info;
    getsockopt(c, IPPROTO_TCP, TCP_INFO, &info, &len), say("state", info.tcpi_state), say("has a window", info.tcpi_snd_cwnd > 0 && info.tcpi_rto > 0);
    write(c, "data", 4), poll(&(struct pollfd){d, POLLIN}, 1, 1000), say("peek and drop", recv(d, b, 2, MSG_PEEK | MSG_TRUNC)), say("all", recv(d, b, 8, 0));
    close(c), close(d), c = socket(AF_INET, SOCK_STREAM, 0);
    say("waiting", connect(c, (void *)&own, sizeof own)), say("shutdown", shutdown(l, SHUT_RD)), poll(&(struct pollfd){c, POLLIN}, 1, 1000);
    say("reset", recv(c, b, 1, MSG_DONTWAIT)), say("accept", accept(l, 0, 0)), close(c), c = socket(AF_INET, SOCK_STREAM, 0), say("refused", connect(c, (void *)&own, sizeof own));
    say("listens again", listen(l, 5)), own.sin_port = htons(port(l)), close(c), c = socket(AF_INET, SOCK_STREAM, 0), say("connect", connect(c, (void *)&own, sizeof own)), close(c), close(l);
    c = socket(AF_INET, SOCK_STREAM, 0), say("unconnected write", send(c, "x", 1, MSG_NOSIGNAL)), say("read", recv(c, b, 1, 0)), close(c);
}

static void families(int type) {
    int all = socket(AF_INET6, type, 0), s = socket(AF_INET, type, 0), t = socket(AF_INET, type, 0);
    struct sockaddr_in6 any = six("::", 0);
    say("any", bind(all, (void *)&any, sizeof any));
    struct sockaddr_in a = four("127.0.0.1", port(all)), b;
    say("the port of both", bind(s, (void *)&a, sizeof a)), say("only, too late", set(all, IPPROTO_IPV6, IPV6_V6ONLY, 1)), close(all);
    all = socket(AF_INET6, type, 0), set(all, IPPROTO_IPV6, IPV6_V6ONLY, 1), bind(all, (void *)&any, sizeof any), a.sin_port = htons(port(all));
    say("beside one of the newer protocol", bind(s, (void *)&a, sizeof a)), close(all), close(s);
    s = socket(AF_INET, type, 0), a = four("127.0.0.1", 0), say("own address", bind(s, (void *)&a, sizeof a)), b = four("127.0.0.2", port(s)), say("another", bind(t, (void *)&b, sizeof b)), close(t);
    t = socket(AF_INET, type, 0), b = four("0.0.0.0", port(s)), say("any of the same port", bind(t, (void *)&b, sizeof b)), close(t);
    t = socket(AF_INET, type, 0), set(t, SOL_SOCKET, SO_REUSEPORT, 1), say("one of both shares it", bind(t, (void *)&b, sizeof b)), close(t), close(s);
    if (type == SOCK_STREAM) {
        all = socket(AF_INET6, type, 0), bind(all, (void *)&any, sizeof any), listen(all, 5), s = socket(AF_INET, type, 0), a = four("127.0.0.1", port(all));
        say("from the older protocol", connect(s, (void *)&a, sizeof a)), t = accept(all, 0, 0), named("its peer", t, getpeername), named("its own", t, getsockname), close(s), close(t), close(all);
        s = socket(AF_INET, type, 0), a = four("127.0.0.1", 0), bind(s, (void *)&a, sizeof a), a.sin_port = htons(port(s));
        say("to itself", connect(s, (void *)&a, sizeof a)), write(s, "echo", 4), say("what it sent", recv(s, (char[8]){0}, 8, 0)), close(s);
    } else {
        all = socket(AF_INET6, type, 0), bind(all, (void *)&any, sizeof any), s = socket(AF_INET, type, 0), a = four("127.0.0.1", port(all)), say("sent", sendto(s, "x", 1, 0, (void *)&a, sizeof a));
        struct sockaddr_in6 from = {0};
        socklen_t len = sizeof from;
        char text[64];
        recvfrom(all, text, 1, 0, (void *)&from, &len), printf("from %s\n", inet_ntop(AF_INET6, &from.sin6_addr, text, sizeof text)), close(all);
        say("shutdown", shutdown(s, SHUT_RD)), connect(s, (void *)&a, sizeof a), named("own", s, getsockname), say("shutdown", shutdown(s, SHUT_RDWR)), say("ready", ready(s)), say("send", send(s, "x", 1, MSG_NOSIGNAL)), close(s);
        s = socket(AF_INET, type, 0), a = four("127.0.0.1", 0), bind(s, (void *)&a, sizeof a), a.sin_port = htons(port(s)), set(s, IPPROTO_IP, IP_PKTINFO, 1), set(s, IPPROTO_IP, IP_RECVTTL, 1), set(s, IPPROTO_IP, IP_RECVTOS, 1);
        t = socket(AF_INET, type, 0), set(t, IPPROTO_IP, IP_TTL, 9), set(t, IPPROTO_IP, IP_TOS, 8), sendto(t, "about", 5, 0, (void *)&a, sizeof a), hear("about a packet", s, 9, 128, 0), say("to port 0", (a.sin_port = 0, sendto(t, "x", 1, 0, (void *)&a, sizeof a))), close(s), close(t);
    }
}

static volatile int rang;
static void ring(int signal, siginfo_t *info, void *context) { rang = info->si_value.sival_int * 100 + (info->si_code == SI_MESGQ) * 10 + (info->si_pid == getpid()); }

static void queues(void) {
    char b[8192], name[32];
    unsigned priority;
    sprintf(name, "/q%d", getpid());
    struct mq_attr a = {.mq_maxmsg = 2, .mq_msgsize = 16};
    mqd_t q = mq_open(name, O_RDWR | O_CREAT | O_NONBLOCK, 0600, &a), r;
    say("opened", q >= 0), say("once", mq_open(name, O_RDWR | O_CREAT | O_EXCL, 0600, 0)), say("unknown", mq_open("/none", O_RDWR)), say("too many", mq_open("/many", O_RDWR | O_CREAT, 0600, &(struct mq_attr){.mq_maxmsg = 100, .mq_msgsize = 8}));
    say("empty", mq_receive(q, b, sizeof b, &priority)), say("short", mq_receive(q, b, 8, &priority));
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1, .sigev_value.sival_int = 7};
    struct sigaction action = {.sa_sigaction = ring, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR1, &action, 0), say("asked", mq_notify(q, &event)), say("twice", mq_notify(q, &event));
    say("low", mq_send(q, "low", 3, 1)), say("rang", rang), rang = 0, say("high", mq_send(q, "high", 4, 9)), say("again", rang), say("full", mq_send(q, "x", 1, 0)), say("long", mq_send(q, b, 17, 0)), say("priority", mq_send(q, b, 1, 32768));
    struct timespec past = {1, 0};
    mq_getattr(q, &a), printf("%ld %ld %ld %ld\n", a.mq_flags & O_NONBLOCK, a.mq_maxmsg, a.mq_msgsize, a.mq_curmsgs);
    struct pollfd p = {q, POLLIN | POLLOUT};
    poll(&p, 1, 0), say("ready", p.revents), r = mq_open(name, O_RDONLY), say("not to be written", mq_send(r, "x", 1, 0));
    for (int i = 0; i < 2; i++) { long n = mq_receive(r, b, sizeof b, &priority); printf("%ld %.*s %u\n", n, (int)n, b, priority); }
    say("late", mq_timedreceive(r, b, sizeof b, 0, &past));
    int child = fork();
    if (!child) usleep(20000), _exit(mq_send(q, "child", 5, 3) != 0);
    say("from a child", mq_receive(r, b, sizeof b, &priority)), waitpid(child, 0, 0);
    say("removed", mq_unlink(name)), say("still there", mq_send(q, "x", 1, 0)), say("but nameless", mq_open(name, O_RDWR)), mq_close(q), mq_close(r), say("closed", mq_send(q, "x", 1, 0)), say("again", mq_unlink(name));
}

int main(int count, char **words) {
    setvbuf(stdout, 0, _IOLBF, 0), signal(SIGPIPE, SIG_IGN);
    if (count > 1) {
        for (int type = SOCK_STREAM; type <= SOCK_SEQPACKET; type += type == SOCK_STREAM ? 1 : 3) printf("type %d\n", type), credentials(type), type == SOCK_DGRAM ? (void)0 : shutdowns(type);
        listeners(), families(SOCK_STREAM), families(SOCK_DGRAM), queues();
        return 0;
    }
    int p[2];
    char line[32], b[8192];
    struct mq_attr a = {.mq_maxmsg = 2, .mq_msgsize = 16};
    socketpair(AF_UNIX, SOCK_STREAM, 0, p), set(p[1], SOL_SOCKET, SO_PASSCRED, 1);
    mqd_t q = mq_open("/held", O_RDWR | O_CREAT | O_NONBLOCK, 0600, &a);
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "hold", 4)) {
            write(p[0], "sent", 4), mq_send(q, "queued", 6, 5), puts("held");
        } else {
            unsigned priority = 0;
            long n = mq_receive(q, b, sizeof b, &priority);
            printf("%s %u ", n < 0 ? "nothing" : (b[n] = 0, b), priority), hear("and", p[1], 9, 100, 0);
        }
    }
}
