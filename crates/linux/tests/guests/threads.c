/* Threads, signals, timers and pipes: executes a line of input and answers with the result. Linked
 * statically with the C library's threads. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#ifdef __aarch64__
#include <arm_neon.h>
typedef float64x2_t Vector;
#define VECTOR_OF vdupq_n_f64
#define VECTOR_TO vst1q_f64
#define IN_VECTOR "+w"
#else
#include <immintrin.h>
typedef __m128d Vector;
#define VECTOR_OF _mm_set1_pd
#define VECTOR_TO _mm_storeu_pd
#define IN_VECTOR "+x"
#endif
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turn = PTHREAD_COND_INITIALIZER;
static long shared, wanted, done_by_worker;
static __thread long local = 7;
static volatile sig_atomic_t rang, faults;
static volatile int stop;
static int pipes[2], set, event, timer;
static sigjmp_buf back;

/* A worker thread that stays: it takes a number and returns its double. */
static void *worker(void *_) {
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!wanted) pthread_cond_wait(&turn, &lock);
        done_by_worker = wanted * 2, wanted = 0, local++;
        pthread_cond_broadcast(&turn);
    }
}

static long ask_worker(long n) {
    pthread_mutex_lock(&lock);
    wanted = n;
    pthread_cond_broadcast(&turn);
    while (wanted) pthread_cond_wait(&turn, &lock);
    pthread_mutex_unlock(&lock);
    return done_by_worker;
}

static void *adds(void *count) {
    for (long i = 0; i < (long)count; i++) {
        pthread_mutex_lock(&lock);
        long was = shared;
        if (i % 64 == 0) sched_yield();
        shared = was + 1;
        pthread_mutex_unlock(&lock);
    }
    return (void *)local++;
}

/* Spins on a flag that only another thread sets, with state in vector registers and its own base.
 */
static void *spins(void *mark) {
    Vector kept = VECTOR_OF((double)(long)mark);
    long own = local = (long)mark;
    while (!stop) __asm__ volatile("" : IN_VECTOR(kept));
    double out[2];
    VECTOR_TO(out, kept);
    return (void *)(long)(out[0] == (double)(long)mark && out[1] == out[0] && own == local);
}

static void *idles(void *_) {
    for (;;) pause();
}

static void note(int signal) { rang += signal; }
static void info(int signal, siginfo_t *info, void *context) {
    rang += info->si_value.sival_int + (info->si_pid == getpid());
    (void)context;
}
static void fault(int signal, siginfo_t *info, void *context) {
    faults += signal * 1000 + ((long)info->si_addr == 8);
    siglongjmp(back, 1);
}
/* Steps over the instruction that failed: the frame that it returns through is changed. */
static void step(int signal, siginfo_t *info, void *context) {
    ucontext_t *c = context;
#ifdef __aarch64__
    c->uc_mcontext.pc += 4;
    c->uc_mcontext.regs[0] = 4711;
#else
    c->uc_mcontext.gregs[REG_RIP] += 2;
    c->uc_mcontext.gregs[REG_RAX] = 4711;
#endif
    faults += signal;
}

static int sent(int how, int signal) {
    rang = 0;
    sigset_t mask, old;
    sigemptyset(&mask), sigaddset(&mask, signal), pthread_sigmask(SIG_BLOCK, &mask, &old);
    how ? pthread_kill(pthread_self(), signal) : kill(getpid(), signal);
    int early = rang;
    sigset_t pending;
    sigpending(&pending);
    pthread_sigmask(SIG_SETMASK, &old, 0);
    return early == 0 && sigismember(&pending, signal) && rang == signal;
}

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void *writes(void *_) {
    static char block[200000];
    for (int i = 0; i < (int)sizeof block; i++) block[i] = i * 7;
    long n = write(pipes[1], block, sizeof block);
    return (void *)n;
}

static void look(char *out) {
    struct itimerval alarm_;
    struct itimerspec left;
    sigset_t mask;
    struct epoll_event events[8];
    stack_t stack;
    char bytes[64] = {0};
    uint64_t count = 0;
    getitimer(ITIMER_REAL, &alarm_), timerfd_gettime(timer, &left), sigprocmask(0, 0, &mask), sigaltstack(0, &stack);
    int ready = epoll_wait(set, events, 8, 0), held = read(pipes[0], bytes, 63);
    if (read(event, &count, 8) != 8) count = 0;
    sprintf(out, "shared %ld worker %ld local %ld rang %d alarm %d timer %d mask %d stack %d ready %d pipe %d %s count %d next fd %d thread %ld\n",
            shared, ask_worker(21), local, (int)rang, alarm_.it_value.tv_sec > 0, left.it_value.tv_sec > 0, sigismember(&mask, SIGUSR2),
            stack.ss_flags, ready, held, bytes, (int)count, dup(0), syscall(SYS_gettid));
}

static void dirty(void) {
    shared += 1000, local = 99, rang = 5, ask_worker(3);
    struct itimerval alarm_ = {.it_value = {.tv_sec = 3000}};
    setitimer(ITIMER_REAL, &alarm_, 0);
    struct itimerspec later = {.it_value = {.tv_sec = 4000}};
    timerfd_settime(timer, 0, &later, 0);
    sigset_t mask;
    sigemptyset(&mask), sigaddset(&mask, SIGUSR2), sigprocmask(SIG_BLOCK, &mask, 0), kill(getpid(), SIGUSR2);
    static char stack[65536];
    sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, 0);
    write(pipes[1], "dirty", 5), write(event, &(uint64_t){6}, 8);
    epoll_ctl(set, EPOLL_CTL_ADD, event, &(struct epoll_event){.events = EPOLLIN});
    int more[2];
    pipe(more), socketpair(AF_UNIX, SOCK_STREAM, 0, more);
    pthread_t t;
    pthread_create(&t, 0, idles, 0), pthread_create(&t, 0, idles, 0);
}

int main(void) {
    static char in[4096], out[4096];
    pthread_t t[16];
    void *result;
    pipe2(pipes, O_NONBLOCK), event = eventfd(0, EFD_NONBLOCK), timer = timerfd_create(CLOCK_MONOTONIC, 0), set = epoll_create1(0);
    epoll_ctl(set, EPOLL_CTL_ADD, pipes[0], &(struct epoll_event){.events = EPOLLIN, .data.fd = pipes[0]});
    sigset_t all;
    sigfillset(&all), pthread_sigmask(SIG_BLOCK, &all, 0);
    pthread_create(&t[0], 0, worker, 0);
    pthread_sigmask(SIG_UNBLOCK, &all, 0);
    for (;;) {
        long n = read(0, in, sizeof in - 1), ok = 0;
        if (n <= 0) return 0;
        in[n] = 0;
        if (!strncmp(in, "look", 4)) {
            look(out);
        } else if (!strncmp(in, "dirty", 5)) {
            dirty();
            strcpy(out, "done\n");
        } else if (!strncmp(in, "count", 5)) {
            for (int i = 0; i < 8; i++) pthread_create(&t[i], 0, adds, (void *)2000L);
            for (int i = 0; i < 8; i++) pthread_join(t[i], &result), ok += (long)result == 7;
            sprintf(out, "%ld %ld\n", shared, ok);
        } else if (!strncmp(in, "spin", 4)) {
            stop = 0;
            for (int i = 0; i < 4; i++) pthread_create(&t[i], 0, spins, (void *)(long)(100 + i));
            usleep(30000);
            stop = 1;
            for (int i = 0; i < 4; i++) pthread_join(t[i], &result), ok += (long)result;
            sprintf(out, "%ld\n", ok);
        } else if (!strncmp(in, "signals", 7)) {
            signal(SIGUSR1, note), signal(SIGRTMIN, note);
            ok += sent(0, SIGUSR1) + sent(1, SIGUSR1) + sent(0, SIGRTMIN);
            struct sigaction action = {.sa_sigaction = info, .sa_flags = SA_SIGINFO | SA_RESETHAND};
            sigaction(SIGUSR2, &action, 0), rang = 0;
            sigqueue(getpid(), SIGUSR2, (union sigval){.sival_int = 41});
            ok += rang == 42, sigaction(SIGUSR2, 0, &action), ok += action.sa_handler == SIG_DFL;
            /* Waiting for one, and being interrupted by one. */
            sigset_t some;
            sigemptyset(&some), sigaddset(&some, SIGUSR1), sigprocmask(SIG_BLOCK, &some, 0);
            raise(SIGUSR1), ok += sigwaitinfo(&some, 0) == SIGUSR1;
            ok += sigtimedwait(&some, 0, &(struct timespec){.tv_nsec = 1000000}) == -1 && errno == EAGAIN;
            sigprocmask(SIG_UNBLOCK, &some, 0);
            sigaction(SIGALRM, &(struct sigaction){.sa_handler = note}, 0), rang = 0;
            /* Repeatedly, because the first may arrive before the wait has begun. */
            struct itimerval often = {.it_value = {.tv_usec = 3000}, .it_interval = {.tv_usec = 20000}};
            setitimer(ITIMER_REAL, &often, 0);
            char byte;
            int wait[2];
            pipe(wait);
            ok += read(wait[0], &byte, 1) == -1 && errno == EINTR && rang >= SIGALRM;
            struct timespec left = {0};
            ok += nanosleep(&(struct timespec){.tv_sec = 100}, &left) == -1 && left.tv_sec > 50;
            setitimer(ITIMER_REAL, &(struct itimerval){0}, 0);
            setitimer(ITIMER_REAL, &(struct itimerval){.it_value = {.tv_usec = 2000}, .it_interval = {.tv_usec = 2000}}, 0), rang = 0;
            while (rang < 3 * SIGALRM) __asm__ volatile("");
            setitimer(ITIMER_REAL, &(struct itimerval){0}, 0);
            /* A timer that expires before the thread continues: its handler may run before the call
             * returns. */
            rang = 0, setitimer(ITIMER_REAL, &(struct itimerval){.it_value = {.tv_usec = 1}}, 0);
            while (rang < SIGALRM) __asm__ volatile("");
            /* SIGPIPE, ignored and not. */
            close(wait[0]), signal(SIGPIPE, note), rang = 0;
            ok += write(wait[1], "x", 1) == -1 && errno == EPIPE && rang == SIGPIPE;
            sprintf(out, "%ld\n", ok);
        } else if (!strncmp(in, "faults", 6)) {
            static char stack[65536];
            sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, 0), faults = 0;
            sigaction(SIGSEGV, &(struct sigaction){.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER}, 0);
            for (int i = 0; i < 3; i++)
                if (!sigsetjmp(back, 1)) *(volatile int *)8 = 1;
            sigaction(SIGILL, &(struct sigaction){.sa_sigaction = step, .sa_flags = SA_SIGINFO}, 0);
            sigaction(SIGFPE, &(struct sigaction){.sa_sigaction = step, .sa_flags = SA_SIGINFO}, 0);
            long value = 0;
            Vector kept = VECTOR_OF(1.5);
#ifdef __aarch64__
            /* A division by 0 has a result. */
            register long first __asm__("x0") = 0;
            __asm__ volatile("udf #0" : "+r"(first), IN_VECTOR(kept));
            ok = first, first = 0;
            __asm__ volatile("udf #0\n udf #0" : "+r"(first), IN_VECTOR(kept));
            value = first;
#else
            __asm__ volatile("ud2" : "=a"(value), "+x"(kept));
            ok = value;
            __asm__ volatile("div %%ecx" : "+a"(value) : "c"(0), "d"(0));
#endif
            double out_[2];
            VECTOR_TO(out_, kept);
            sprintf(out, "%d %ld %ld %d\n", (int)faults, ok, value, out_[0] == 1.5);
        } else if (!strncmp(in, "pipe", 4)) {
            fcntl(pipes[1], F_SETFL, 0);
            pthread_create(&t[0], 0, writes, 0);
            static char block[4000];
            struct pollfd p = {.fd = pipes[0], .events = POLLIN};
            long sum = 0, got = 0;
            while (got < 200000 && poll(&p, 1, 5000) == 1) {
                long part = read(pipes[0], block, sizeof block);
                for (long i = 0; i < part; i++, got++) sum += block[i] == (char)(got * 7);
            }
            pthread_join(t[0], &result);
            long before = now();
            p.fd = event, ok = poll(&p, 1, 20) == 0 && now() - before >= 20000000;
            timerfd_settime(timer, 0, &(struct itimerspec){.it_value = {.tv_nsec = 5000000}}, 0);
            uint64_t times = 0;
            read(timer, &times, 8);
            sprintf(out, "%ld %ld %ld %ld %ld\n", got, sum, (long)result, ok, (long)times);
        } else if (!strncmp(in, "many", 4)) {
            int made = 0, error;
            pthread_attr_t small;
            pthread_attr_init(&small), pthread_attr_setstacksize(&small, 131072);
            while (!(error = pthread_create(&t[0], &small, idles, 0)) && made < 100000) made++;
            sprintf(out, "%d %d\n", made > 1000 && made < 5000, error == EAGAIN);
        } else if (!strncmp(in, "forever", 7)) {
            for (int i = 0; i < 4; i++) pthread_create(&t[i], 0, spins, (void *)1L);
            for (;;) sched_yield();
        } else if (!strncmp(in, "asleep", 6)) {
            pthread_create(&t[0], 0, idles, 0);
            sleep(1000);
        } else if (!strncmp(in, "stuck", 5)) {
            pthread_mutex_lock(&lock), pthread_mutex_lock(&lock);
        } else if (!strncmp(in, "die", 3)) {
            kill(getpid(), atoi(in + 4));
            strcpy(out, "alive\n");
        } else if (!strncmp(in, "every", 5)) { /* Every signal, handled, to itself, from two threads. */
            for (int i = 1; i < 65; i++) signal(i, note);
            rang = 0, stop = 0;
            pthread_create(&t[0], 0, spins, (void *)1L);
            for (int round = 0; round < 20; round++)
                for (int i = 1; i < 65; i++)
                    if (i != SIGKILL && i != SIGSTOP && i != 32 && i != 33) kill(getpid(), i), syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), i);
            stop = 1, pthread_join(t[0], &result);
            sprintf(out, "%d\n", rang > 0 && (long)result);
        } else if (!strncmp(in, "forge", 5)) { /* A return from no signal, through a frame of noise. */
            static unsigned long frame[4096] __attribute__((aligned(64)));
            srand(atoi(in + 6));
            for (int i = 0; i < 4096; i++) frame[i] = atoi(in + 6) % 3 ? (unsigned long)rand() << 32 ^ rand() * 7919UL : -1UL;
            if (atoi(in + 6) % 2) frame[1024 + 5 + 23] = (unsigned long)(frame + 2048), frame[1024 + 5 + 15] = (unsigned long)(frame + 1000), frame[1024 + 5 + 16] = (unsigned long)main;
#ifdef __aarch64__
            __asm__ volatile("mov sp, %0\n mov x8, 139\n svc #0" ::"r"(frame + 1024) : "memory");
#else
            __asm__ volatile("mov %0, %%rsp\n mov $15, %%eax\n syscall" ::"r"(frame + 1024) : "memory");
#endif
        } else if (!strncmp(in, "thread ends", 11)) { /* The first thread ends, another answers. */
            stop = 0;
            syscall(SYS_exit, 0);
        }
        write(1, out, strlen(out));
    }
}
