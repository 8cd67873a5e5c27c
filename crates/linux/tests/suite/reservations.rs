//! Addresses that a guest reserves, and sparse memory: neither takes memory or room in an image,
//! both are in every state, and touched parts of sparse memory count towards the limit.

use std::time::Duration;

use crate::common;
use common::states::{in_every_state, pristine};

use afresh_linux::Program;

const LIMIT: Duration = Duration::from_secs(100);

const SCRIPT: &str = r#"
import ctypes, mmap, os, select, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
PRIVATE, FIXED, NORESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x10, 0x4000
T, G, M = 1 << 40, 1 << 30, 1 << 20

def map(size, protection, flags=0, at=None):
    address = libc.mmap(at, size, protection, PRIVATE | flags, -1, 0)
    return None if address in (None, 2**64 - 1) else address
def byte(address): return ctypes.c_ubyte.from_address(address)
def used(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
def apart(work):
    sys.stdout.flush(); child = os.fork()
    if child == 0:
        code = 1
        try: work(); code = 0
        finally: os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def reserve():
    # Many terabytes, also near the end of the addresses, and small parts that become accessible.
    parts = [map(size, 0, NORESERVE) for size in (8 * T, 64 * T, 16 * T)]
    assert all(parts) and not map(64 * T, 0)
    for at in parts:
        assert libc.mprotect(at + 3 * T, 2 * M, 3) == 0 and map(M, 3, FIXED, at + 5 * T) == at + 5 * T
        byte(at + 3 * T).value, byte(at + 5 * T + M - 1).value = 7, 8
        assert libc.mprotect(at, T, 3) != 0
    def child(): assert [byte(at + 3 * T).value for at in parts] == [7] * 3; byte(parts[0] + 3 * T).value = 9
    assert apart(child) == 0 and byte(parts[0] + 3 * T).value == 7
    moved = libc.mremap(parts[0], T, 2 * T, 1); assert moved and libc.munmap(moved, 2 * T) == 0
    for at, size in zip(parts, (8 * T, 64 * T, 16 * T)): assert libc.munmap(at, size) == 0

def sparse():
    size, before = 14 * T, resident()
    at = map(size, 3, NORESERVE); assert at
    for place in range(0, size, T // 2): byte(at + place).value = place // (T // 2) + 1
    assert [byte(at + place).value for place in range(0, size, T // 2)] == list(range(1, 29)) and byte(at + M).value == 0
    assert before <= resident() < before + 28 * 64 * 1024 + 8 * M
    assert any(line.startswith(f"{at:08x}-") and " rw-p " in line for line in open("/proc/self/maps"))
    # Calls touch it like instructions.
    for place, (read, write) in enumerate([os.pipe(), [one.detach() for one in socket.socketpair()]]):
        at2 = at + T + (place + 1) * G
        os.write(write, b"0123456789"); assert libc.read(read, ctypes.c_void_p(at2 + 65530), 10) == 10
        assert libc.write(write, ctypes.c_void_p(at2 + 65530), 10) == 10 and os.read(read, 20) == b"0123456789"
        os.write(write, b"abc"); vector = struct.pack("4Q", at2 + 9 * M, 1, at2 + 11 * M, 5); assert libc.readv(read, vector, 2) == 3
        assert (byte(at2 + 9 * M).value, byte(at2 + 11 * M + 1).value) == (97, 99)
        assert libc.write(write, ctypes.c_void_p(at2 + 20 * M), 3) == 3 and os.read(read, 9) == bytes(3)
    assert libc.clock_gettime(0, ctypes.c_void_p(at + T + 8 * G)) == 0 and ctypes.c_long.from_address(at + T + 8 * G).value > 10**9
    assert libc.getcwd(ctypes.c_void_p(at + T + 9 * G), 100) and byte(at + T + 9 * G).value == ord("/")
    def child(): byte(at + 5 * T).value = 200; byte(at + 7 * G).value = 1; assert byte(at + T // 2).value == 2
    assert apart(child) == 0 and byte(at + 5 * T).value == 11 and byte(at + 7 * G).value == 0
    # A protection applies to all of it; memory that is discarded is zero.
    assert libc.mprotect(at + 8 * T, T, 1) == 0 and byte(at + 8 * T + 5 * M).value == 0
    def write(): byte(at + 8 * T + 6 * M).value = 1
    assert apart(write) == -signal.SIGSEGV
    assert libc.madvise(at, size, 4) == 0 and byte(at + 9 * T).value == 0
    # Growing blocks: most of 64 MiB take few faults, and all of it is there.
    for place in range(0, 64 * M, 4096): byte(at + 3 * T + place).value = 5
    assert all(byte(at + 3 * T + place).value == 5 for place in range(0, 64 * M, 4096))
    moved = libc.mremap(at + 12 * T + M, G, 2 * T, 1); assert moved; byte(moved + T + T // 2).value = 3
    assert libc.munmap(moved, 2 * T) == 0 and libc.munmap(at, size) == 0

def once():
    # A call that takes effect has a place for its result, also where blocks end, so that it happens once.
    start = map(T, 3, NORESERVE)
    def place(number): return ctypes.c_void_p(start + number * G + 65534)
    def descriptors(): return len(os.listdir("/proc/self/fd"))
    before = descriptors()
    assert libc.pipe(place(1)) == 0 and libc.socketpair(1, 1, 0, place(2)) == 0 and descriptors() == before + 4
    child = os.fork()
    if child == 0: os._exit(3)
    assert libc.wait4(-1, place(3), 0, place(4)) == child and byte(place(3).value + 1).value == 3
    listener = socket.socket(socket.AF_UNIX); listener.bind("/tmp/once"); listener.listen()
    clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for client in clients: client.connect("/tmp/once")
    # The first bytes of an argument may be accessible before the call.
    byte(place(11).value).value = 0
    for address in (place(5), place(11)): assert libc.accept(listener.fileno(), address, place(6)) > 0
    listener.setblocking(False); listener.accept(); os.unlink("/tmp/once")
    try: listener.accept(); assert False
    except BlockingIOError: pass
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for text in (b"one", b"two"): left.send(text)
    vector = ctypes.create_string_buffer(struct.pack("2Q", place(7).value, 8))
    header = struct.pack("QI4xQQQQi4x", place(8).value, 110, ctypes.addressof(vector), 1, place(9).value, 64, 0)
    assert libc.recvmsg(right.fileno(), header, 0) == 3 and right.recv(9) == b"two"
    assert ctypes.string_at(place(7), 3) == b"one"
    poll = select.epoll(); poll.register(right, select.EPOLLIN | select.EPOLLET); left.send(b"x")
    assert [libc.epoll_wait(poll.fileno(), place(10), 4, 0) for _ in range(2)] == [1, 0]
    assert libc.munmap(start, T) == 0

def limited():
    # Touched memory counts: beyond the limit the touch fails, and other memory stays usable.
    at, touched = map(8 * T, 3, NORESERVE), 0
    def fill():
        for place in range(0, G, 4096): byte(at + place).value = 1
    assert apart(fill) == -signal.SIGBUS
    for place in range(0, 100 * M, 4096): byte(at + place).value = 1
    assert map(G, 3) is None; assert libc.munmap(at, 8 * T) == 0
    assert map(G, 0) and not map(M * 600, 3)

kept = None
for line in sys.stdin:
    match line.strip():
        case "all": reserve(); sparse(); once(); limited(); print("done", flush=True)
        case "hold":
            kept = [map(20 * T, 0), map(20 * T, 3, NORESERVE)]
            assert libc.mprotect(kept[0] + T, M, 3) == 0
            for place in range(10): byte(kept[0] + T + place * 4096).value = byte(kept[1] + place * T).value = 3 + place
            print("held", flush=True)
        case "look":
            if kept:
                found = [byte(kept[0] + T + place * 4096).value for place in range(12)] + [byte(kept[1] + place * T).value for place in range(12)]
                for place in range(12): byte(kept[1] + place * T + G).value = byte(kept[0] + T + place * 4096).value = 77
                assert libc.mprotect(kept[0] + 2 * T, M, 3) == 0 and byte(kept[0] + 2 * T).value == 0; byte(kept[0] + 2 * T).value = 99
            print(found if kept else None, flush=True)
"#;

fn program() -> Option<Program> {
    let program = common::python()?.arg("/app.py").file("/app.py", SCRIPT);
    Some(program.memory_limit(512 << 20).time_limit(LIMIT).start_limit(LIMIT))
}

#[test]
fn reserved_and_sparse_memory_is_bounded_by_the_addresses_alone() {
    let Some(program) = program() else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    pristine(&warm, "all", "done");
}

#[test]
fn reserved_and_sparse_memory_is_in_every_state() {
    let Some(program) = program() else { return };
    let Some(warm) = common::here(program.clone().warm()) else { return };
    let values = "3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0";
    let held = format!("[{values}, {values}]");
    in_every_state(&program, &warm, "hold", ["look", &held, "None"]);
}
