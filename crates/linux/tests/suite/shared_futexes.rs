//! Futexes in shared memory: any mapping of a word, in any process, is the same futex.

use crate::common::states::assert_answers;

const SCRIPT: &str = r#"
import ctypes, errno, mmap, multiprocessing, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
WAIT, WAKE, REQUEUE, PRIVATE = 0, 1, 3, 128
fd = os.memfd_create("m"); os.ftruncate(fd, 4096)
one, other = mmap.mmap(fd, 4096), mmap.mmap(fd, 4096)
def word(view, offset): return ctypes.addressof(ctypes.c_int.from_buffer(view, offset))
class Time(ctypes.Structure): _fields_ = [("seconds", ctypes.c_long), ("nanos", ctypes.c_long)]
def futex(address, operation, value, fourth=None, second=None):
    return libc.syscall(ctypes.c_long(202), ctypes.c_void_p(address), operation, value, fourth, ctypes.c_void_p(second), 0)
def await_sleep(thread):
    """Returns once a thread sleeps that had several turns."""
    looks = 0
    while looks < 4:
        time.sleep(0.005)
        state = open(f"/proc/self/task/{thread.native_id}/stat").read().rsplit(")", 1)[1].split()[0]
        looks = looks + 1 if state == "S" else 0
def waiter(address, ended, flags=0):
    """A thread that waits for 20 seconds at most, and its answer."""
    def wait(): ended.append(futex(address, WAIT | flags, 0, ctypes.byref(Time(20, 0))))
    thread = threading.Thread(target=wait); thread.start()
    await_sleep(thread)
    return thread
def wakes_in_child(address):
    if (child := os.fork()) == 0: os._exit(futex(address, WAKE, 1))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def alias():
    ended = []; thread = waiter(word(one, 0), ended)
    woken = futex(word(other, 0), WAKE, 1)
    thread.join(); return [woken, ended]
def unplaced():
    ended = []; thread = waiter(word(one, 256), ended, PRIVATE)
    woken = futex(word(one, 256), WAKE, 1)
    thread.join(); return [woken, ended]
def fork():
    ended = []; thread = waiter(word(one, 64), ended)
    woken = wakes_in_child(word(one, 64))
    thread.join(); return [woken, ended]
def requeue():
    ended = []; thread = waiter(word(one, 128), ended)
    moved = futex(word(other, 128), REQUEUE, 0, ctypes.c_void_p(1), word(one, 192))
    woken = wakes_in_child(word(other, 192))
    thread.join(); return [moved, woken, ended]
def semaphore():
    context = multiprocessing.get_context("fork"); semaphore, got = context.Semaphore(0), []
    thread = threading.Thread(target=lambda: got.append(semaphore.acquire(timeout=20))); thread.start()
    await_sleep(thread)
    child = context.Process(target=semaphore.release); child.start(); child.join(); thread.join()
    return got
for line in sys.stdin:
    print(globals()[line.strip()](), flush=True)
"#;

#[test]
fn waiters_in_shared_memory_are_woken_by_any_mapping_and_process() {
    assert_answers(
        SCRIPT,
        &[
            ("alias", "[1, [0]]"),
            ("fork", "[1, [0]]"),
            ("requeue", "[1, 1, [0]]"),
            ("semaphore", "[True]"),
        ],
    );
}

/// Earlier versions noted no place of a wait in the only process of a guest, as of a private one.
#[test]
fn waiters_without_a_place_in_shared_memory_are_woken_by_their_address() {
    assert_answers(SCRIPT, &[("unplaced", "[1, [0]]")]);
}
