// Segments of shared memory by keys and numbers. "round" runs all checks. Its answer is "ok" and a
// counter that a child increments, or the failure.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *failed;
#define CHECK(what) do { if (!(what) && !failed) failed = #what; } while (0)
#define FAILS(call, error) CHECK((call) == -1 && errno == (error))
#define KEY 67

static int standing;
static int *counter;

static struct shmid_ds told(int id) {
    struct shmid_ds told = {0};
    CHECK(!shmctl(id, IPC_STAT, &told));
    return told;
}

static void round_trip(void) {
    // The one that was there before is found by its key, and never made twice.
    CHECK(shmget(KEY, 0, 0) == standing && shmget(KEY, 56, IPC_CREAT | 0600) == standing);
    FAILS(shmget(KEY, 56, IPC_CREAT | IPC_EXCL | 0600), EEXIST);
    FAILS(shmget(KEY, 1 << 20, 0), EINVAL);
    FAILS(shmget(KEY + 1, 56, 0600), ENOENT);
    CHECK(told(standing).shm_nattch == 1 && told(standing).shm_segsz == 56);

    int own = shmget(IPC_PRIVATE, 9000, 0600);
    CHECK(own >= 0 && own != standing);
    CHECK(told(own).shm_nattch == 0 && told(own).shm_cpid == getpid() && told(own).shm_perm.__key == 0);
    char *bytes = shmat(own, 0, 0);
    CHECK(bytes != (char *)-1 && !bytes[8999]);
    strcpy(bytes + 4090, "by the parent");
    int child = fork();
    if (!child) {
        if (strcmp(bytes + 4090, "by the parent") || told(own).shm_nattch != 2) _exit(1);
        strcpy(bytes + 8000, "by the child");
        ++*counter;
        // By its number, where another process had it.
        if (shmdt(bytes) || shmat(own, 0, SHM_RDONLY) == (void *)-1) _exit(2);
        _exit(failed ? 3 : 0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(!strcmp(bytes + 8000, "by the child") && told(own).shm_nattch == 1);

    // A removed segment exists until its last user detaches it.
    CHECK(!shmctl(own, IPC_RMID, 0) && told(own).shm_perm.mode & SHM_DEST);
    CHECK(!shmdt(bytes));
    FAILS(shmctl(own, IPC_STAT, &(struct shmid_ds){0}), EINVAL);
    FAILS(shmdt(bytes), EINVAL);
    FAILS((long)shmat(own, 0, 0), EINVAL);
    int idle = shmget(KEY + 2, 4096, IPC_CREAT | 0400);
    // A user with all rights has them over this one, too.
    CHECK(!geteuid() || (shmat(idle, 0, 0) == (void *)-1 && errno == EACCES));
    CHECK(!shmctl(idle, IPC_RMID, 0));
    FAILS(shmget(KEY + 2, 0, 0), ENOENT);
}

int main(void) {
    standing = shmget(KEY, 56, IPC_CREAT | IPC_EXCL | 0600);
    counter = shmat(standing, 0, 0);
    if (standing < 0 || counter == (void *)-1) return 1;
    *counter = 40;
    char line[16];
    while (fgets(line, sizeof line, stdin)) {
        failed = 0;
        round_trip();
        if (failed) printf("%s: %s\n", failed, strerror(errno));
        else printf("ok %d\n", *counter);
        fflush(stdout);
    }
    return 0;
}
