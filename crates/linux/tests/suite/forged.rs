//! Snapshots from strangers: a state of every kind, changed at random, is refused or runs within
//! its isolation. None of it stops or breaks its reader.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use afresh_linux::{Frozen, Warm};
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};

use crate::common::{here, python};

/// Holds something of each kind that a guest can have.
const SCRIPT: &str = r#"
import ctypes, fcntl, mmap, os, pty, resource, select, signal, socket, sys, tempfile, threading, time
libc = ctypes.CDLL(None, use_errno=True)
held = []
r, w = os.pipe(); os.write(w, b"in a pipe"); held += [r, w]
a, b = socket.socketpair(); socket.send_fds(a, [b"sent"], [r, w]); a.send(b"more")
c, d = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); c.send(b"one"); socket.send_fds(c, [b"two"], [w])
server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
waiting = socket.create_connection(server.getsockname()); waiting.send(b"hello")
mail = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); mail.bind(("127.0.0.1", 0)); mail.sendto(b"note", mail.getsockname())
event = os.eventfd(3); inner = select.epoll(); inner.register(event, select.EPOLLIN | select.EPOLLET)
outer = select.epoll(); outer.register(inner.fileno()); outer.register(b.fileno()); inner.poll(0)
timer = libc.timerfd_create(1, 0); alarm = (ctypes.c_long * 4)(0, 0, 1000, 0); libc.timerfd_settime(timer, 0, alarm, None)
signal.signal(signal.SIGUSR1, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 1000, 1000)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); os.kill(os.getpid(), signal.SIGUSR2)
mask = ctypes.c_ulong(1 << 11); signals = libc.signalfd(-1, ctypes.byref(mask), 0)
lock = threading.Lock(); lock.acquire()
for work in (lambda: lock.acquire(), lambda: time.sleep(1e6), lambda: os.read(os.pipe()[0], 1), lambda: signal.sigwait([signal.SIGHUP])):
    threading.Thread(target=work, daemon=True).start()
file = tempfile.TemporaryFile(); file.write(b"x" * 9000); file.flush(); fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX, 10, 5)
shared = mmap.mmap(file.fileno(), 8192); shared[0] = 7; anonymous = mmap.mmap(-1, 8192); anonymous[0] = 9
memory = os.memfd_create("m"); os.ftruncate(memory, 5000)
libc.shmat.restype = ctypes.c_void_p; segment = libc.shmget(67, 9000, 0o1600); libc.shmat(segment, None, 0)
os.chown(file.fileno(), 33, 44); os.setgroups([4, 5])
child, master = pty.fork()
if child == 0:
    os.setresgid(44, 44, 44); os.setresuid(33, 33, 0)
    while True: time.sleep(1000)
process = os.pidfd_open(child); folder = os.open("/proc/self/fd", os.O_RDONLY); null = os.open("/dev/null", os.O_RDWR)
gone = os.open("/tmp/gone", os.O_CREAT | os.O_RDWR); os.write(gone, b"gone"); os.unlink("/tmp/gone")
os.mkdir("/tmp/in"); os.chdir("/tmp/in"); os.symlink("nowhere", "link"); os.umask(0o27)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
os.mkfifo("/tmp/full"); fifo = os.open("/tmp/full", os.O_RDWR); os.write(fifo, b"bytes"); fcntl.fcntl(fifo, fcntl.F_SETPIPE_SZ, 1 << 17)
os.mkfifo("/tmp/wait"); threading.Thread(target=os.open, args=("/tmp/wait", os.O_RDONLY), daemon=True).start()
os.write(master, b"line\nhalf a li"); m, s = pty.openpty(); os.write(s, b"shown"); p, s = pty.openpty(); os.close(s)
seq, uence = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); socket.send_fds(seq, [b"packet"], [w]); seq.setsockopt(1, 20, bytes([1] + [0] * 15))
mail.sendto(b"corked", socket.MSG_MORE, mail.getsockname())
sealed = os.memfd_create("s", os.MFD_ALLOW_SEALING); fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
signal.signal(signal.SIGPROF, lambda *_: None); signal.setitimer(signal.ITIMER_PROF, 1000, 7); resource.setrlimit(resource.RLIMIT_CPU, (1000, 2000))
watched = libc.inotify_init(); libc.inotify_add_watch(watched, b"/tmp", 0xfff); open("/tmp/seen", "w").close()
libc.prctl(1, 15, 0, 0, 0); libc.prctl(36, 1, 0, 0, 0)
queue = libc.mq_open(b"/queue", os.O_CREAT | os.O_RDWR, 0o600, None); libc.mq_send(queue, b"first", 5, 3); libc.mq_send(queue, b"", 0, 7)
class Message(ctypes.Structure): _fields_ = [("type", ctypes.c_long), ("text", ctypes.c_char * 9)]
for kind in (3, 5): libc.msgsnd(libc.msgget(9, 0o1600), ctypes.byref(Message(kind, b"message")), 7, 0)
large = os.open("/tmp/large", os.O_CREAT | os.O_RDWR); os.ftruncate(large, 1 << 45); window = mmap.mmap(large, 8192, offset=1 << 44); window[9] = 9
def stir():
    # In any state.
    for work in (lambda: os.write(master, b"x\x7f\x15y\t\n"), lambda: os.write(s, b"\t\x08\r\n"), lambda: os.set_blocking(m, False), lambda: os.read(m, 99),
        lambda: os.set_blocking(fifo, False), lambda: os.read(fifo, 3), lambda: uence.recv(99, socket.MSG_DONTWAIT), lambda: outer.poll(0), lambda: d.recv(99, socket.MSG_DONTWAIT),
        lambda: mail.recv(99, socket.MSG_DONTWAIT), lambda: os.times(), lambda: os.listdir(folder), lambda: server.setblocking(False), lambda: server.accept()[0].recv(2)):
        try: work()
        except OSError: pass
for line in sys.stdin:
    stir()
    print(len(os.listdir("/proc/self/fd")), b.recv(2, socket.MSG_PEEK), shared[0], anonymous[0], flush=True)
"#;

/// Default number of tried states; `AFRESH_FORGED` changes it.
const DEFAULT_STATES: usize = 250;

#[test]
fn a_forged_state_is_refused_or_runs_within_its_isolation() {
    let Some(program) = python() else { return };
    let limit = Duration::from_millis(300);
    let program = program.arg("/app.py").file("/app.py", SCRIPT).time_limit(limit).user(0, 0);
    let Some(warm) = here(program.warm()) else { return };
    let frozen = warm.freeze().unwrap();
    let expected = warm.instance().call(b"look\n").unwrap();
    let open = |bytes: &[u8]| {
        let frozen = Frozen::from_parts(frozen.memory().clone(), bytes).unwrap();
        let warm = Warm::thaw(&frozen, &program)?;
        let mut instance = warm.instance();
        let answer = instance.call(b"look\n");
        // After a refusal, and after a reset.
        let _ = instance.call_pristine(b"look\n");
        let _ = instance.freeze();
        Ok::<_, afresh_linux::ThawError>(answer)
    };
    assert_eq!(open(&frozen.bytes().unwrap()).unwrap().unwrap(), expected);
    let tries = std::env::var("AFRESH_FORGED").ok().and_then(|tries| tries.parse().ok());
    let mut seed = [7; 32];
    if tries.is_some() {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos();
        seed[..16].copy_from_slice(&now.to_le_bytes());
    }
    let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let (mut refused, mut ran) = (0, 0);
    for _ in 0..tries.unwrap_or(DEFAULT_STATES) {
        let mut bytes = frozen.bytes().unwrap();
        let changes: Vec<_> = (0..1 + random.next_u32() % 3)
            .map(|_| {
                let at = random.next_u64() as usize % bytes.len();
                // Small numbers and bits often have another meaning; large ones are out of range.
                let new = match random.next_u32() % 4 {
                    0 => vec![bytes[at] ^ 1 << (random.next_u32() % 8)],
                    1 => vec![bytes[at].wrapping_add(1)],
                    2 => vec![random.next_u32() as u8],
                    _ => [&[0xff; 9][..], &[1]].concat(),
                };
                bytes.splice(at..=at, new.clone());
                (at, new)
            })
            .collect();
        let started = Instant::now();
        let opened = catch_unwind(AssertUnwindSafe(|| open(&bytes)));
        match opened.unwrap_or_else(|_| panic!("it panics with {changes:?}")) {
            Ok(_) => ran += 1,
            Err(_) => refused += 1,
        }
        assert!(started.elapsed() < Duration::from_secs(120), "it hangs with {changes:?}");
    }
    println!("{refused} refused, {ran} ran");
    assert!(refused > 0 && ran > 0, "{refused} refused, {ran} ran");
    // No other guest is affected.
    assert_eq!(warm.instance().call(b"look\n").unwrap(), expected);
}
