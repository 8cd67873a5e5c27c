//! Memory of other processes of a guest, and memory that is locked.

use crate::common;

use std::time::Duration;

use common::states::{in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const MEMORY: &str = r#"
import ctypes, errno, mmap, os, resource, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
PAGE, LOCKED, UNDUMPABLE = 4096, 0x2000, (4, 0)

def call(name, *args):
    value = getattr(libc, name)(*args)
    if value == -1: raise OSError(ctypes.get_errno(), name)
    return value

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, (e, errno.errorcode[number])
    else: assert False, "it works"

class Piece(ctypes.Structure): _fields_ = [("at", ctypes.c_void_p), ("len", ctypes.c_size_t)]
def pieces(*list): return (Piece * len(list))(*[Piece(at, len) for at, len in list])
libc.process_vm_readv.restype = libc.process_vm_writev.restype = ctypes.c_ssize_t
def move(name, id, local, remote): return call(name, id, pieces(*local), len(local), pieces(*remote), len(remote), 0)
def address(memory): return ctypes.addressof(ctypes.c_char.from_buffer(memory))

def child(work):
    r, w = os.pipe(); back, go = os.pipe(); sys.stdout.flush(); id = os.fork()
    if id == 0:
        os.close(go)
        try: work(); os.write(w, b"x"); os.read(back, 1); os._exit(0)
        finally: os._exit(1)
    os.close(w); os.close(back); assert os.read(r, 1) == b"x"; os.close(r)
    return id, go

def end(id, go): os.close(go); assert os.waitpid(id, 0)[1] == 0

def peers():
    own, shared = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), mmap.mmap(-1, PAGE)
    own[:5] = b"first"; shared[:5] = b"seen "; at, both, out = address(own), address(shared), ctypes.create_string_buffer(1 << 16)
    def change(): own[:5] = b"other"; shared[:5] = b"same "
    id, go = child(change); to = ctypes.addressof(out)
    # In pieces of different lengths, as far as both sides have room.
    assert move("process_vm_readv", id, [(to, 2), (to + 2, 100)], [(at, 3), (at + 3, 2), (both, 4)]) == 9 and out.raw[:9] == b"othersame" and own[:5] == b"first"
    assert move("process_vm_writev", id, [(to, 4)], [(at + PAGE - 2, 8)]) == 4 and move("process_vm_readv", id, [(to + 16, 6)], [(at + PAGE - 3, 6)]) == 6 and out.raw[16:22] == b"\0othe\0" and own[PAGE - 2:PAGE + 2] == bytes(4)
    # A page that is not there ends a copy, and is an error where it is the first.
    fails(errno.EFAULT, move, "process_vm_readv", id, [(to, 8)], [(16, 8)]); assert move("process_vm_readv", id, [(to, PAGE + 8)], [(at, 8), (16, PAGE)]) == 8
    fails(errno.EFAULT, move, "process_vm_writev", id, [(to, 8)], [(ctypes.cast(libc.getpid, ctypes.c_void_p).value, 8)])
    large = mmap.mmap(-1, 20 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); assert move("process_vm_readv", os.getpid(), [(address(large), 20 << 20)], [(address(large), 20 << 20)]) == 20 << 20
    end(id, go); fails(errno.ESRCH, move, "process_vm_readv", id, [(to, 1)], [(at, 1)])
    # Processes that hide, and a namespace without rights outside.
    id, go = child(lambda: call("prctl", *UNDUMPABLE, 0, 0, 0)); fails(errno.EPERM, move, "process_vm_readv", id, [(to, 1)], [(at, 1)]); end(id, go)
    parent = os.getpid()
    def leave(): call("unshare", 0x10000000); fails(errno.EPERM, move, "process_vm_readv", parent, [(to, 1)], [(at, 1)])
    id, go = child(leave); assert move("process_vm_readv", id, [(to, 5)], [(at, 5)]) == 5; end(id, go)

def locked(): return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmLck:")))

def locks():
    m = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); at = address(m)
    void = ctypes.c_void_p; mlock = lambda at, len: call("mlock", void(at), ctypes.c_size_t(len)); munlock = lambda at, len: call("munlock", void(at), ctypes.c_size_t(len))
    mlock(at + 5000, 1); assert locked() == 4; fails(errno.EBUSY, call, "msync", void(at + PAGE), PAGE, 2 | 4); call("msync", void(at), PAGE, 2 | 4); fails(errno.EINVAL, call, "madvise", void(at), 2 * PAGE, 4)
    fails(errno.ENOMEM, mlock, 16, 1); id, go = child(lambda: locked() == 0 or os._exit(1)); end(id, go)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (2 * PAGE, resource.RLIM_INFINITY)); mlock(at, 2 * PAGE); fails(errno.ENOMEM, mlock, at, 3 * PAGE); munlock(at, PAGE); assert locked() == 4
    fails(errno.EAGAIN, mmap.mmap, -1, 2 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | LOCKED); one = mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | LOCKED); assert locked() == 8; one.close()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, resource.RLIM_INFINITY)); fails(errno.EPERM, mlock, at, 1); fails(errno.EPERM, call, "mlockall", 2); call("munlockall"); assert locked() == 0
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)); call("mlockall", 3); before = locked(); one = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); assert before > 100 and locked() >= before + 4; call("munlockall"); assert locked() == 0
    fails(errno.EINVAL, call, "mlockall", 4)

kept = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for line in sys.stdin:
    match line.strip():
        case "all": peers(); locks(); print("done", flush=True)
        case "hold": call("mlock", ctypes.c_void_p(address(kept) + PAGE), ctypes.c_size_t(PAGE)); print("held", flush=True)
        case "look": print(locked(), flush=True)
"#;

#[test]
fn processes_reach_each_others_memory_and_locked_memory_is_in_every_state() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", MEMORY);
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    pristine(&warm, "all", "done");
    in_every_state(&program, &warm, "hold", ["look", "4", "0"]);
}

const ENDLESS: &str = r#"
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
class Piece(ctypes.Structure): _fields_ = [("at", ctypes.c_void_p), ("len", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(64 << 20)
many = (Piece * 31)(*[Piece(ctypes.addressof(buffer), 64 << 20) for _ in range(31)])
for line in sys.stdin:
    while True: libc.process_vm_readv(os.getpid(), many, 31, many, 31, 0)
"#;

/// A call copies up to 2 GiB, and a guest makes such calls without end.
#[test]
fn a_copy_ends_at_the_deadline_of_its_call() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", ENDLESS).start_limit(LIMIT);
    let program = program.time_limit(Duration::from_millis(300));
    let Some(warm) = common::here(program.warm()) else { return };
    let error = warm.instance().call(b"go\n").unwrap_err().to_string();
    assert!(error.contains("time"), "{error}");
}

const MAPPINGS: &str = r#"
import ctypes, errno, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
PAGE, READ, WRITE, PRIVATE, ANONYMOUS, NOREPLACE = 4096, 1, 2, 2, 0x20, 0x100000
void, size = ctypes.c_void_p, ctypes.c_size_t

def call(name, *args):
    value = getattr(libc, name)(*args)
    if value in (-1, (1 << 64) - 1): raise OSError(ctypes.get_errno(), name)
    return value
def map(at, len, protection, flags=PRIVATE | ANONYMOUS, fd=-1, offset=0): return call("mmap", void(at), size(len), protection, flags, fd, ctypes.c_long(offset))
def unmap(at, len): call("munmap", void(at), size(len))
def protect(at): call("mprotect", void(at), size(PAGE), READ)
def fails(work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == errno.ENOMEM, e; return True
def is_mapped(at): return any(int(start, 16) <= at < int(end, 16) for start, end in (line.split()[0].split("-") for line in open("/proc/self/maps")))

def limits():
    with open("/tmp/two", "wb") as file: file.write(bytes(2 * PAGE))
    two = os.open("/tmp/two", os.O_RDWR)
    whole = map(0, 31000 * PAGE, READ | WRITE); beside = map(0, 8 * PAGE, READ | WRITE)
    unmap(beside + 2 * PAGE, 6 * PAGE)
    # A part of a file, whose next part merges with it and has a page beyond the end.
    part = map(beside + 3 * PAGE, PAGE, READ, PRIVATE | NOREPLACE, two)
    at = whole + PAGE
    while not fails(protect, at): at += 2 * PAGE
    # One more fits, or none.
    fails(protect, whole + 30999 * PAGE)
    lock = lambda: call("mlock", void(whole + 20 * PAGE), size(PAGE))
    assert not fails(lock), "a whole mapping"
    middle = at + 500 * PAGE
    assert fails(lambda: call("mlock", void(middle), size(PAGE)))
    for locks in (4, 0):
        if locks: call("mlockall", locks >> 1)
        # It would merge with its neighbour, were it not locked.
        assert bool(fails(map, beside + 2 * PAGE, PAGE, READ | WRITE, PRIVATE | ANONYMOUS | NOREPLACE)) == bool(locks), locks
        assert is_mapped(beside + 2 * PAGE) != bool(locks)
        if locks:
            # With room for one: the part of a file and its pages beyond the end are two.
            unmap(whole, PAGE)
            assert fails(map, part + PAGE, 2 * PAGE, READ, PRIVATE | NOREPLACE, two, PAGE)
            assert not is_mapped(part + PAGE)
            call("munlockall")
    map(part + PAGE, 2 * PAGE, READ, PRIVATE | NOREPLACE, two, PAGE)

for line in sys.stdin:
    limits(); print("done", flush=True)
"#;

/// A locked mapping merges with none that is not, so that a mapping at the limit may be refused
/// because it is locked. Then nothing is mapped.
#[test]
fn a_locked_mapping_beyond_the_limit_of_mappings_changes_nothing() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", MAPPINGS).memory_limit(512 << 20);
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    for _ in 0..2 {
        let answer = instance.call_pristine(b"all\n").unwrap();
        assert_eq!(String::from_utf8_lossy(&answer), "done\n");
        instance.freeze().unwrap();
    }
}

const PEERS: &str = r#"
import ctypes, mmap, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
class Piece(ctypes.Structure): _fields_ = [("at", ctypes.c_void_p), ("len", ctypes.c_size_t)]
memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
many = (Piece * 31)(*[Piece(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 64 << 20) for _ in range(31)])
child = os.fork()
if child == 0:
    while True: time.sleep(1000)
for line in sys.stdin:
    if line == "copy\n": libc.process_vm_readv(child, many, 31, many, 31, 0)
    print(line.strip(), flush=True)
"#;

/// One call copies 2 GiB. Its caller stops it, and both processes are whole afterwards.
#[test]
fn a_caller_ends_a_copy_between_processes() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", PEERS).request("echo\n");
    let program = program.time_limit(LIMIT).start_limit(LIMIT).memory_limit(512 << 20);
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    for _ in 0..2 {
        let answered = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let seen = answered.clone();
        let ended = instance.call_streaming(b"copy\n", move |_, piece| {
            seen.fetch_or(!piece.is_empty(), std::sync::atomic::Ordering::Relaxed);
            false
        });
        let unheard = afresh_linux::End::Unheard;
        assert!(
            matches!(&ended, Err(afresh_linux::CallError::Ended { end, .. }) if *end == unheard),
            "{ended:?}"
        );
        let answered = answered.load(std::sync::atomic::Ordering::Relaxed);
        assert!(!answered, "the copy was stopped before it ended");
        instance.reset();
        assert_eq!(instance.call(b"echo\n").unwrap(), b"echo\n");
    }
}
