//! The sentry's work and memory for a guest are bounded, for every request.

use std::time::Duration;

use crate::common;

const SCRIPT: &str = r#"
import ctypes, errno, os, resource, select, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def error(work):
    try: work()
    except OSError as e: return errno.errorcode[e.errno]
def nested():
    # Each set contains all sets of the level below: the ways to the last level are the product of all levels.
    levels = [[select.epoll() for _ in range(30)] for _ in range(4)]
    told = set()
    for above, below in zip(levels, levels[1:]):
        for one in above:
            for two in below: told.add(error(lambda: one.register(two, select.EPOLLIN)))
    levels[0][0].poll(0)
    return sorted(str(one) for one in told)
def doubled():
    # Each set contains the next one through many descriptors.
    sets, event = [select.epoll() for _ in range(5)], os.eventfd(0)
    for above, below in zip(sets, sets[1:]):
        for _ in range(150): above.register(os.dup(below.fileno()), select.EPOLLIN)
    sets[-1].register(event, select.EPOLLIN)
    before = sets[0].poll(0)
    os.eventfd_write(event, 1)
    return [len(before), len(sets[0].poll(0))]
def wide():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16))
    inner, outer, event = select.epoll(), select.epoll(), os.eventfd(1)
    for _ in range(17000): inner.register(os.dup(event), select.EPOLLIN)
    return [error(lambda: outer.register(inner, select.EPOLLIN)), len(outer.poll(0))]
def looped():
    a, b = select.epoll(), select.epoll()
    a.register(b, select.EPOLLIN)
    back = error(lambda: b.register(a, select.EPOLLIN))
    levels = [select.epoll()]
    for _ in range(8):
        levels.append(select.epoll())
        deep = error(lambda: levels[-1].register(levels[-2], select.EPOLLIN))
        if deep: break
    return [back, deep]
def watched():
    made = []
    while (one := libc.inotify_init()) >= 0: made.append(one)
    why = errno.errorcode[ctypes.get_errno()]
    libc.inotify_add_watch(made[0], b"/tmp", 0xfff)
    for n in range(5000): open(f"/tmp/{n:0200}", "w").close(); os.unlink(f"/tmp/{n:0200}")
    read = 0
    os.set_blocking(made[0], False)
    while True:
        try: read += len(os.read(made[0], 1 << 16))
        except BlockingIOError: break
    for one in made: os.close(one)
    return [len(made), why, read < 1 << 20]
number = 5000
def unserved():
    global number
    for number in range(number, number + 100000): libc.syscall(ctypes.c_long(number))
def sparse():
    head = b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, 0x400000, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    part = struct.pack("<IIQQQQQQ", 1, 7, 0, 0x400000, 0, 1 << 30, (1 << 30) + 4096, 4096)
    with open("/tmp/sparse", "wb") as file: file.write(head + part); file.truncate(1 << 30)
    os.chmod("/tmp/sparse", 0o700)
    child = os.fork()
    if child == 0:
        try: os.execv("/tmp/sparse", ["sparse"])
        finally: os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
def channels():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16))
    ends, held = [], 0
    while True:
        try: ends.append(os.pipe())
        except OSError as e:
            why = errno.errorcode[e.errno]
            break
    for _, end in ends:
        os.set_blocking(end, False)
        try:
            while True: held += os.write(end, bytes(1 << 16))
        except BlockingIOError: pass
    sockets = error(lambda: [socket.socketpair() for _ in range(4096)])
    for pair in ends:
        for end in pair: os.close(end)
    # All are free again.
    again = os.pipe()
    return [len(ends), why, held, sockets]
def selects():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16))
    event, failed = os.eventfd(0), []
    threading.stack_size(64 << 10)
    bits = bytearray(1 << 13)
    for _ in range(40000): n = os.dup(event); bits[n >> 3] |= 1 << (n & 7)
    wanted = ctypes.byref(ctypes.c_char.from_buffer(bits))
    def wait():
        if libc.select(n + 1, wanted, None, None, None) < 0: failed.append(errno.errorcode[ctypes.get_errno()])
    for _ in range(10): threading.Thread(target=wait, daemon=True).start()
    while len(failed) < 4: time.sleep(0.01)
    return failed
def pairs():
    # A pair of sockets takes two channels, or none.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 14, 1 << 14))
    kept = [os.pipe() for _ in range(4095)]
    return [error(socket.socketpair), error(os.pipe), error(os.pipe)]
def peeked():
    a, b = socket.socketpair(); a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20); a.setblocking(False)
    sent, room = a.send(bytes(4 << 20)), ctypes.create_string_buffer(4 << 20)
    vector = ctypes.create_string_buffer(struct.pack("=QQ", ctypes.addressof(room), len(room)))
    head = struct.pack("=QIIQQQQIIII", 0, 0, 0, ctypes.addressof(vector), 1, 0, 0, 0, 0, 0, 0)
    count = libc.recvmmsg(b.fileno(), ctypes.create_string_buffer(head * 64), 64, socket.MSG_PEEK, None)
    return [sent >= 1 << 20, (8 << 20) <= sent * count < (8 << 20) + sent]
def partly():
    # The second half of a write cannot be read: its length is that of the bytes that arrive.
    import mmap
    memory = mmap.mmap(-1, 1 << 20); start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.munmap(ctypes.c_void_p(start + (1 << 19)), 1 << 19) == 0
    def transfer(read, write):
        came = []
        def drain():
            while part := os.read(read, 1 << 16): came.append(len(part))
        reader = threading.Thread(target=drain); reader.start()
        sent = libc.write(write, ctypes.c_void_p(start), 1 << 20); os.close(write); reader.join()
        return (1 << 18) < sent == sum(came) <= 1 << 19
    return [transfer(*os.pipe()), transfer(*(end.detach() for end in socket.socketpair()))]
for line in sys.stdin:
    print(globals()[line.strip()](), flush=True)
"#;

#[test]
fn the_sentry_bounds_what_it_keeps_for_a_guest() {
    let Some(program) = common::python() else { return };
    let limit = Duration::from_secs(60);
    let program =
        program.arg("/app.py").file("/app.py", SCRIPT).time_limit(limit).memory_limit(256 << 20);
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    for (request, answer) in [
        ("nested", "['None']"),
        ("partly", "[True, True]"),
        ("doubled", "[0, 150]"),
        ("wide", "[None, 1]"),
        ("looped", "['ELOOP', 'ELOOP']"),
        ("watched", "[64, 'EMFILE', True]"),
        ("unserved", "None"),
        // 1024 of 64 KiB, and then pages.
        ("channels", "[4096, 'EMFILE', 79691776, 'ENFILE']"),
        ("pairs", "['ENFILE', None, 'EMFILE']"),
        ("peeked", "[True, True]"),
        ("sparse", "True"),
        // 6 of 40,000 each.
        ("selects", "['ENOMEM', 'ENOMEM', 'ENOMEM', 'ENOMEM']"),
    ] {
        let said = instance.call_pristine(format!("{request}\n").as_bytes()).unwrap();
        assert_eq!(String::from_utf8_lossy(&said).trim_end(), answer, "{request}");
    }
    instance.reset();
    for _ in 0..3 {
        // Each time others.
        instance.call(b"unserved\n").unwrap();
        assert_eq!(instance.stats().unserved.len(), 1024);
    }
}

const WAITS: &str = r#"
import os, sys, threading, time
def spin():
    while True: pass
def threads():
    for _ in range(3): threading.Thread(target=spin, daemon=True).start()
    spin()
def sleep(): time.sleep(600)
def child():
    if os.fork() == 0: spin()
    os.wait()
for line in sys.stdin:
    word = line.strip()
    if word == "echo": print("echo", flush=True)
    else: globals()[word]()
"#;

#[test]
fn a_caller_ends_a_call_that_writes_nothing() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", WAITS).request("echo\n");
    let Some(warm) = common::here(program.warm()) else { return };
    for wait in ["spin", "sleep", "threads", "child"] {
        let mut instance = warm.instance();
        let mut asked = 0;
        // The caller lets the call run on twice.
        let ended = instance.call_streaming(format!("{wait}\n").as_bytes(), move |_, piece| {
            asked += u32::from(piece.is_empty());
            asked < 3
        });
        assert!(
            matches!(
                ended,
                Err(afresh_linux::CallError::Ended { end: afresh_linux::End::Unheard, .. })
            ),
            "{wait}: {ended:?}"
        );
        instance.reset();
        assert_eq!(instance.call(b"echo\n").unwrap(), b"echo\n", "{wait}");
    }
}

const WAITERS: &str = r#"
import _thread, ctypes, os, resource, select, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16))
threading.stack_size(64 << 10); sys.setswitchinterval(1000)
# Every set has a descriptor of signals, whose state is another one for each thread.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
mask = ctypes.c_ulong(1 << 11); signals = libc.signalfd(-1, ctypes.byref(mask), 0)
event, sets = os.eventfd(0), [select.epoll(), select.epoll()]
for one in sets: one.register(signals, select.EPOLLIN)
for _ in range(20000):
    copy = os.dup(event)
    for one in sets: one.register(copy, select.EPOLLIN)
class Polled(ctypes.Structure): _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]
polled = (Polled * 1024)(*[Polled(sets[n % 2].fileno(), 1, 0) for n in range(1024)])
for line in sys.stdin:
    if line == "echo\n": print("echo", flush=True)
    else:
        for _ in range(200): _thread.start_new_thread(libc.poll, (polled, 1024, -1))
        while True: time.sleep(0.0001)
"#;

/// Each thread waits for 40,000 interests, and names their sets 512 times each.
#[test]
fn a_call_ends_at_its_limit_though_many_threads_wait_for_large_sets() {
    let Some(program) = common::python() else { return };
    let (limit, minutes) = (Duration::from_secs(1), Duration::from_secs(120));
    let program = program.arg("/app.py").file("/app.py", WAITERS).request("echo\n");
    let program = program.time_limit(limit).start_limit(minutes).memory_limit(256 << 20);
    let Some(warm) = common::here(program.warm()) else { return };
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut instance = warm.instance();
        let ended = instance.call(b"wait\n").unwrap_err().to_string();
        instance.reset();
        let _ = sender.send((ended, instance.call(b"echo\n").unwrap()));
    });
    // One question about input took minutes.
    let (ended, answer) = receiver.recv_timeout(minutes).expect("the call never ends");
    assert!(ended.contains("time"), "{ended}");
    assert_eq!(answer, b"echo\n");
}

/// Each list has more entries than are followed. A list is followed within milliseconds, and all of
/// them within seconds.
#[test]
fn a_caller_is_polled_while_a_process_with_long_robust_lists_ends() {
    let Some(path) = common::compiled("robust.c", &["-static", "-pthread"]) else { return };
    let minutes = common::limit(300);
    let program = afresh_linux::Program::new(path).time_limit(minutes).start_limit(minutes);
    let program = program.poll_interval(Duration::from_millis(1));
    let Some(warm) = common::here(program.warm()) else { return };
    let (sender, pieces) = std::sync::mpsc::channel();
    let mut instance = warm.instance();
    let answer = instance.call_streaming(b"end\n", move |_, piece| {
        sender.send(String::from_utf8_lossy(piece).into_owned()).is_ok()
    });
    answer.unwrap();
    let pieces: Vec<String> = pieces.try_iter().collect();
    let between = pieces.split(|piece| piece == "ends\n").nth(1).unwrap();
    let polls = between.iter().take_while(|piece| *piece != "ended\n").count();
    assert!(between.contains(&"ended\n".to_owned()), "{pieces:?}");
    assert!(polls > 20, "{polls}");
}
