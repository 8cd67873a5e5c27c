//! Scripts that print the same in a guest as on the kernel itself.

use std::process::Command;
use std::time::Duration;

use crate::common;

const LIMIT: Duration = Duration::from_secs(100);

/// Runs a script of Python in a guest and on the kernel, behind `wrapper`; both print the same.
/// `expected` is a part of that. A host without the wrapper's rights only runs the guest.
fn prints_the_same(script: &str, wrapper: &[&str], expected: &str) {
    let Some(program) = common::python() else { return };
    let waiting = format!("input()\n{script}\nsys.stdout.flush()\nwhile input(): pass\n");
    let program = program.arg("/app.py").file("/app.py", waiting);
    let Some(warm) = common::here(program.time_limit(LIMIT).start_limit(LIMIT).warm()) else {
        return;
    };
    let answer = warm.instance().call(b"go\n").unwrap();
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains(expected), "{answer}");
    let command = [wrapper, &["python3", "-c", script]].concat();
    let native = Command::new(command[0]).args(&command[1..]).output().unwrap();
    let error = String::from_utf8_lossy(&native.stderr);
    if !wrapper.is_empty() && !native.status.success() {
        return println!("SKIPPED: {wrapper:?}: {error}");
    }
    assert!(native.status.success(), "{error}");
    assert_eq!(answer, String::from_utf8_lossy(&native.stdout), "the guest, and the kernel");
}

const START: &str = r#"
import ctypes, errno, mmap, os, socket, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def result(work, *args):
    try: return work(*args)
    except OSError as e: return errno.errorcode[e.errno]
def read(path):
    with open(path, "rb") as file: return file.read()
def write(path, data):
    fd = os.open(path, os.O_WRONLY)
    try: return os.write(fd, data)
    finally: os.close(fd)
"#;

const NAMES: &str = r#"
own = "/proc/self/comm"
for text in (b"short", b"a line\n", b"a name that is too long", b"zero\0behind", b"sixteen bytes ok", b"x"):
    print(text, result(write, own, text), read(own), oct(os.stat(own).st_mode))
ids, started, end = [], threading.Event(), threading.Event()
def wait(): ids.append(threading.get_native_id()); started.set(); end.wait()
thread = threading.Thread(target=wait); thread.start(); started.wait()
path = f"/proc/self/task/{ids[0]}/comm"
held = os.open(path, os.O_RDWR)
print(result(write, path, b"other"), read(path), read(own), os.pread(held, 3, 0), os.pread(held, 9, 3), os.write(held, b"held"), os.write(held, b"more"), read(path))
end.set(); thread.join()
while os.path.exists(path): pass
print(result(write, path, b"gone"), result(os.write, held, b"gone"), result(os.pread, held, 9, 0))
parent = os.getpid(); sys.stdout.flush(); child = os.fork()
if child == 0:
    os._exit(0 if (result(write, f"/proc/{parent}/comm", b"stolen"), read(f"/proc/{parent}/comm")) == ("EINVAL", b"x\n") else 1)
print(os.waitpid(child, 0)[1], read(own))
"#;

#[test]
fn names_of_threads_are_written_as_on_linux() {
    prints_the_same(&[START, NAMES].concat(), &[], r"b'short' 5 b'short\n' 0o100644");
}

const MEMORY: &str = r#"
PAGE = 4096
memory = mmap.mmap(-1, 3 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory)); memory[:5] = b"first"
file, only = os.open("/proc/self/mem", os.O_RDWR), os.open("/proc/self/mem", os.O_RDONLY)
print(os.pread(file, 5, at), os.pwrite(file, b"other", at + PAGE - 2), memory[PAGE - 4:PAGE + 4])
print(os.lseek(file, at, 0) == at, os.read(file, 3), os.write(file, b"XY"), memory[:6])
libc.munmap(ctypes.c_void_p(at + 2 * PAGE), ctypes.c_size_t(PAGE))
print(len(os.pread(file, PAGE, at + PAGE + 4000)), os.pwrite(file, bytes(PAGE), at + PAGE + 4000))
for work in (os.pread, os.pwrite): print(*(result(work, file, 8 if work == os.pread else b"x", place) for place in (at + 2 * PAGE, 16)))
parts = [bytearray(2), bytearray(3)]
print(os.preadv(file, parts, at), parts, os.pwritev(file, [b"a", b"bc"], at + 1), memory[:6])
print(result(os.pwrite, only, b"x", at), oct(os.stat("/proc/self/mem").st_mode), os.stat("/proc/self/mem").st_size, os.pread(file, 0, at))
print(result(os.open, "/proc/self/mem", os.O_RDONLY | os.O_DIRECTORY), "mem" in os.listdir("/proc/self"))
"#;

#[test]
fn memory_is_read_and_written_through_its_file_as_on_linux() {
    prints_the_same(&[START, MEMORY].concat(), &[], "b'first' 5 b");
}

const ROUTES: &str = r#"
def ask(kind, flags, body):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as s:
        s.bind((0, 0)); s.settimeout(20)
        s.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 7, 0) + body)
        found = []
        while True:
            data = s.recv(1 << 16)
            while data:
                size, kind, flags, sequence, port = struct.unpack_from("=IHHII", data)
                body, data = data[16:size], data[(size + 3) & ~3:]
                if kind == 3: return found
                if kind == 2: return errno.errorcode.get(-struct.unpack_from("=i", body)[0], "none")
                found.append((kind, body))
                if not flags & 2: return found
def attributes(data):
    found = {}
    while len(data) >= 4:
        size, kind = struct.unpack_from("=HH", data)
        found[kind], data = data[4:size], data[(size + 3) & ~3:]
    return found
def show(found, wanted):
    if isinstance(found, str): return print(found)
    for kind, body in found:
        held = attributes(body[12:])
        print(kind, body[:8].hex(), *(f"{one}={held[one].hex()}" for one in wanted if one in held))
ROUTE, RULE = (15, 1, 6, 7, 4), (15, 14, 21, 6)
for family in (2, 10):
    head = bytes([family]) + bytes(11)
    show(ask(26, 0x301, head), ROUTE)
    show(ask(34, 0x301, head), RULE)
    for flags in (0x101, 0x201): show(ask(26, flags, head), ROUTE)
def to(address): return struct.pack("=HH", 4 + len(address), 1) + address
for address in (bytes([127, 0, 0, 1]), bytes([127, 9, 9, 9]), bytes([10, 0, 0, 1])):
    show(ask(26, 1, bytes([2, 32]) + bytes(10) + to(address)), ROUTE)
show(ask(26, 1, bytes([10, 128]) + bytes(10) + to(bytes(14) + b"\1\1")), ROUTE)
def link(index, *name): return struct.pack("=BxHiII", 0, 0, index, 0, 0) + b"".join(struct.pack("=HH", 4 + len(n), 3) + n + bytes(-len(n) % 4) for n in name)
for request in (link(1), link(99), link(0, b"lo\0"), link(0, b"none\0")):
    found = ask(18, 1, request)
    print(found if isinstance(found, str) else [attributes(body[16:])[3] for _, body in found])
# Requests for nothing, for a family without lookup, and for a broadcast; the last attribute counts.
print(ask(18, 1, bytes(16)), ask(18, 1, bytes(4)), ask(18, 1, link(-1)), ask(18, 1, link(-1, b"none\0")))
for family in (0, 5): print(ask(26, 1, bytes([family, 32]) + bytes(10) + to(bytes([127, 0, 0, 1]))))
show(ask(26, 1, bytes([2, 32]) + bytes(10) + to(bytes([127, 255, 255, 255]))), ROUTE)
show(ask(26, 1, bytes([2, 32]) + bytes(10) + to(bytes([10, 0, 0, 1])) + to(bytes([127, 9, 9, 9]))), ROUTE)
print(ask(18, 1, link(0, b"lo\0", b"none\0")), len(ask(18, 1, link(0, b"none\0", b"lo\0"))))
for size in (None, 50000):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as s:
        if size: s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        room = (2 * size if size else 212992) - 32
        print(s.send(bytes(room)), result(s.send, bytes(room + 1)))
# A request that changes something, one without an answer, and an acknowledgement.
for kind, flags in ((16, 5), (24, 5), (18, 4), (1, 5)): print(ask(kind, flags, link(1)))
"#;

#[test]
fn routes_rules_and_links_are_answered_as_on_linux() {
    // Natively in a new network namespace, without capabilities.
    let alone = "ip link set lo up && sleep 1 && \
                 exec setpriv --inh-caps=-all --bounding-set=-all \"$@\"";
    let wrapper = ["unshare", "--map-root-user", "--net", "sh", "-c", alone, "sh"];
    prints_the_same(&[START, ROUTES].concat(), &wrapper, "24 020800");
}
