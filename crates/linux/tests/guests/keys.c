// Keys and keyrings of the kernel. It prints "ok" at its end.
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(x) do { if (!(x)) { printf("line %d: %s (errno %d)\n", __LINE__, #x, errno); fflush(stdout); _exit(1); } } while (0)
#define FAILS(number, x) do { errno = 0; CHECK((x) == -1 && errno == number); } while (0)

enum { THREAD = -1, PROCESS = -2, SESSION = -3, USER = -4 };
static long add(const char *type, const char *name, const void *payload, size_t len, int ring) {
    return syscall(SYS_add_key, type, name, payload, len, ring);
}
static long ctl(int op, long a, long b, long c, long d) { return syscall(SYS_keyctl, op, a, b, c, d); }
static long request(const char *type, const char *name, const char *info, int ring) {
    return syscall(SYS_request_key, type, name, info, ring);
}

int main(void) {
    char text[256];
    long session = ctl(1, 0, 0, 0, 0);
    CHECK(session > 0);
    long key = add("user", "one", "secret", 6, SESSION);
    CHECK(key > 0 && ctl(11, key, (long)text, sizeof text, 0) == 6 && memcmp(text, "secret", 6) == 0);
    CHECK(request("user", "one", 0, 0) == key);
    CHECK(add("user", "one", "other", 5, SESSION) == key && ctl(11, key, (long)text, 3, 0) == 5);
    CHECK(ctl(6, key, (long)text, sizeof text, 0) > 0 && strncmp(text, "user;", 5) == 0 && strstr(text, ";3f010000;one"));
    // A key that nobody reads, and types that do not exist.
    long logon = add("logon", "a:b", "x", 1, SESSION);
    FAILS(EOPNOTSUPP, ctl(11, logon, (long)text, sizeof text, 0));
    FAILS(EINVAL, add("logon", "ab", "x", 1, SESSION));
    FAILS(ENODEV, add("rxrpc", "ab", "x", 1, SESSION));
    FAILS(EPERM, add(".user", "ab", "x", 1, SESSION));
    FAILS(EFAULT, add("user", "ab", 0, 8, SESSION));
    // Keyrings within each other, but not in a circle.
    long outer = add("keyring", "outer", 0, 0, SESSION), inner = add("keyring", "inner", 0, 0, outer);
    CHECK(outer > 0 && inner > 0);
    FAILS(EDEADLK, ctl(8, outer, inner, 0, 0));
    FAILS(EDEADLK, ctl(8, outer, outer, 0, 0));
    long deep = add("user", "deep", "d", 1, inner);
    CHECK(ctl(10, SESSION, (long)"user", (long)"deep", 0) == deep);
    CHECK(ctl(9, inner, outer, 0, 0) == 0);
    FAILS(ENOKEY, ctl(10, SESSION, (long)"user", (long)"deep", 0));
    // Linux forgets it a moment later.
    CHECK(ctl(11, deep, 0, 0, 0) == -1 && (errno == ENOKEY || errno == EACCES));
    // A child has the session, but not the keyring of the process.
    long own = add("user", "own", "o", 1, PROCESS);
    CHECK(own > 0);
    pid_t child = fork();
    if (child == 0) {
        CHECK(request("user", "one", 0, 0) == key);
        FAILS(ENOKEY, request("user", "own", 0, 0));
        FAILS(EACCES, ctl(11, own, 0, 0, 0));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    // Revoked, invalid, timed and negative keys.
    CHECK(ctl(3, key, 0, 0, 0) == 0);
    FAILS(EKEYREVOKED, ctl(11, key, 0, 0, 0));
    FAILS(ENOKEY, request("user", "one", 0, 0));
    long invalid = add("user", "gone", "x", 1, SESSION);
    CHECK(ctl(21, invalid, 0, 0, 0) == 0);
    CHECK(ctl(11, invalid, 0, 0, 0) == -1 && (errno == ENOKEY || errno == EACCES));
    FAILS(ENOKEY, request("user", "asked", 0, 0));
    FAILS(ENOKEY, request("user", "asked", "information", SESSION));
    FAILS(ENOKEY, request("user", "asked", 0, 0));
    CHECK(add("user", "asked", "answer", 6, SESSION) == request("user", "asked", 0, 0));
    // Permissions.
    long hidden = add("user", "hidden", "x", 1, SESSION);
    CHECK(ctl(5, hidden, 0x01000000, 0, 0) == 0);
    FAILS(EACCES, ctl(11, hidden, 0, 0, 0));
    FAILS(EINVAL, ctl(5, hidden, 0x40000000, 0, 0));
    // The quota of a user.
    int made = 0;
    for (; made < 300; made++) {
        sprintf(text, "many%d", made);
        if (add("user", text, "x", 1, SESSION) < 0) break;
    }
    CHECK(errno == EDQUOT && made > 150 && made < 200);
    CHECK(ctl(7, SESSION, 0, 0, 0) == 0);
    CHECK(add("user", "again", "x", 1, SESSION) > 0);
    char *large = calloc(1, 32768);
    FAILS(EDQUOT, add("user", "large", large, 32767, SESSION));
    FAILS(EINVAL, add("user", "large", large, 32768, SESSION));
    FILE *keys = fopen("/proc/keys", "r");
    CHECK(keys && fgets(text, sizeof text, keys) && strstr(text, "perm"));
    puts("ok");
    return 0;
}
