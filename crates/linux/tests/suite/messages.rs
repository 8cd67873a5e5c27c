//! Descriptors that are sent over sockets, and datagrams: they arrive once and whole, and those on
//! their way are part of every state.

use crate::common;

use std::time::Duration;

use afresh_linux::{Frozen, Instance, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_snapshot::{Branch, Tree};
use afresh_store::Store;

const LIMIT: Duration = Duration::from_secs(100);

const MESSAGES: &str = r#"
import asyncio, ctypes, errno, multiprocessing, multiprocessing.connection, os, select, socket, stat, sys, tempfile, threading, time
from multiprocessing import reduction

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, e
    else: assert False, "it works"

def rights():
    a, b = socket.socketpair()
    r, w = os.pipe()
    a.send(b"before")
    assert socket.send_fds(a, [b"with"], [w]) == 4
    a.send(b"behind")
    os.close(w)
    # It is open while it is on its way; what comes before is read with it, what comes behind is not.
    assert not select.select([r], [], [], 0)[0]
    data, fds, flags, _ = socket.recv_fds(b, 100, 5)
    assert data == b"beforewith" and len(fds) == 1 and not flags & socket.MSG_CTRUNC, (data, fds, flags)
    os.write(fds[0], b"through"); os.close(fds[0])
    assert os.read(r, 100) == b"through" and os.read(r, 100) == b"" and b.recv(100) == b"behind"
    os.close(r)
    # Who does not ask gets none, and neither does who has no room; both are closed.
    for receive in (lambda: b.recv(9), lambda: b.recvmsg(9), lambda: os.read(b.fileno(), 9)):
        r, w = os.pipe()
        socket.send_fds(a, [b"x"], [w]); os.close(w)
        receive()
        assert os.read(r, 1) == b"", "nobody can write it any more"
        os.close(r)
    first = os.open("/dev/null", os.O_RDONLY)
    socket.send_fds(a, [b"x"], [first, first, first])
    _, fds, flags, _ = socket.recv_fds(b, 9, 2)
    assert len(fds) == 2 and flags & socket.MSG_CTRUNC, (fds, flags)
    for fd in fds + [first]: os.close(fd)
    # Closed with descriptors in flight.
    r, w = os.pipe()
    socket.send_fds(a, [b"x"], [w, b.fileno()]); os.close(w)
    fails(errno.EBADF, socket.send_fds, a, [b"x"], [999])
    a.close(); b.close()
    os.close(r)
    # To another process, and through the library's own function.
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        fd = reduction.recv_handle(multiprocessing.connection.Connection(theirs.detach()))
        os.write(fd, b"child"); os._exit(0)
    r, w = os.pipe()
    reduction.send_handle(multiprocessing.connection.Connection(ours.detach()), w, pid)
    os.close(w); theirs.close()
    assert os.read(r, 100) == b"child"
    os.waitpid(pid, 0); os.close(r)

def local():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    assert a.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_DGRAM
    a.send(b"one"); a.send(b""); a.send(b"three")
    assert b.recv(100) == b"one" and b.recv(100) == b"" and b.recv(2) == b"th"
    b.setblocking(False); fails(errno.EAGAIN, b.recv, 1); b.setblocking(True)
    fd = os.open("/dev/null", os.O_RDONLY)
    socket.send_fds(a, [b"gift"], [fd]); os.close(fd)
    data, fds, _, _ = socket.recv_fds(b, 100, 1)
    assert data == b"gift" and os.readlink(f"/proc/self/fd/{fds[0]}") == "/dev/null"
    os.close(fds[0])
    # Bounded: who sends waits until there is room.
    a.setblocking(False)
    sent = 0
    try:
        while True: a.send(b"x" * 1000); sent += 1
    except BlockingIOError: pass
    assert 30 < sent < 100 and not select.select([], [a], [], 0)[1], sent
    fails(errno.EMSGSIZE, a.send, b"x" * 300000)
    a.setblocking(True)
    reader = threading.Thread(target=lambda: [b.recv(2000) for _ in range(sent + 1)])
    reader.start(); a.send(b"y"); reader.join()
    b.close(); fails(errno.ECONNREFUSED, a.send, b"x"); a.close()
    # By name, which is in a directory.
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "s")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as c:
            s.bind(path); c.bind(os.path.join(d, "c"))
            assert stat.S_ISSOCK(os.stat(path).st_mode) and sorted(os.listdir(d)) == ["c", "s"]
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as again: fails(errno.EADDRINUSE, again.bind, path)
            fails(errno.ENXIO, open, path)
            c.sendto(b"hello", path)
            assert s.recvfrom(100) == (b"hello", os.path.join(d, "c"))
            fails(errno.ENOTCONN, c.send, b"x"); c.connect(path); c.send(b"x"); assert s.recv(9) == b"x"
            os.unlink(path); fails(errno.ENOENT, c.sendto, b"x", path)
    with multiprocessing.connection.Listener(family="AF_UNIX") as listener:
        client = threading.Thread(target=lambda: multiprocessing.connection.Client(listener.address).send([1, 2]))
        client.start()
        with listener.accept() as connection: assert connection.recv() == [1, 2]
        client.join()

def internet():
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as s, socket.socket(family, socket.SOCK_DGRAM) as c:
            s.bind((host, 0))
            to = s.getsockname()
            with socket.socket(family, socket.SOCK_STREAM) as other: other.bind(to)
            c.sendto(b"ping", to)
            data, back = s.recvfrom(100)
            assert data == b"ping" and back[:2] == (host, c.getsockname()[1]), (data, back)
            s.sendto(b"pong", back)
            assert c.recv(100) == b"pong"
            c.connect(to); c.send(b"again"); assert len(s.recv(2, socket.MSG_PEEK | socket.MSG_TRUNC)) == 5
            assert s.recvmsg(2)[::2] == (b"ag", socket.MSG_TRUNC)
            # A connected socket does not receive from strangers.
            with socket.socket(family, socket.SOCK_DGRAM) as stranger: stranger.sendto(b"boo", c.getsockname())
            assert not select.select([c], [], [], 0)[0] and c.getpeername() == to
            fails(errno.EMSGSIZE, c.send, b"x" * 70000)
            for _ in range(1000): c.send(b"x" * 1000)
            s.setblocking(False)
            got = 0
            try:
                while s.recv(2000): got += 1
            except BlockingIOError: pass
            assert 30 < got < 100, got
            s.close(); c.send(b"x")
            assert select.select([c], [], [], 0)[0]; fails(errno.ECONNREFUSED, c.recv, 1); c.send(b"x")
            assert c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
            fails(errno.ENETUNREACH, c.sendto, b"x", ("1.2.3.4" if family == socket.AF_INET else "2001:db8::1", 54))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fails(errno.EDESTADDRREQ, s.send, b"x"); fails(errno.EOPNOTSUPP, s.listen)

def families():
    with socket.socket(socket.AF_INET6) as six, socket.socket() as four, socket.socket() as again:
        six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        six.bind(("::1", 0)); six.listen()
        port = six.getsockname()[1]
        fails(errno.ECONNREFUSED, socket.create_connection, ("127.0.0.1", port))
        four.bind(("127.0.0.1", port)); four.listen()
        fails(errno.EADDRINUSE, again.bind, ("127.0.0.1", port))
        for s, host in ((six, "::1"), (four, "127.0.0.1")):
            with socket.create_connection((host, port)):
                assert select.select([six, four], [], [], 0)[0] == [s]
                s.accept()[0].close()

def copies():
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as other:
        text = bytes(range(256)) * 4000
        one.write(text); one.flush()
        a, b = socket.socketpair()
        parts = []
        reader = threading.Thread(target=lambda: [parts.append(piece) for piece in iter(lambda: b.recv(65536), b"")])
        reader.start()
        sent = 0
        while sent < len(text): sent += os.sendfile(a.fileno(), one.fileno(), sent, 10**9)
        a.close(); reader.join(); b.close()
        assert b"".join(parts) == text and os.sendfile(other.fileno(), one.fileno(), len(text), 9) == 0
        assert os.lseek(one.fileno(), 0, 1) == len(text), "where it stands is not moved"
        os.lseek(one.fileno(), 100, 0)
        assert os.sendfile(other.fileno(), one.fileno(), None, 50) == 50 and os.lseek(one.fileno(), 0, 1) == 150
        assert os.copy_file_range(one.fileno(), other.fileno(), 1000, 5, 10) == 1000 and os.lseek(other.fileno(), 0, 1) == 50
        assert os.copy_file_range(one.fileno(), other.fileno(), 10) == 10 and os.lseek(one.fileno(), 0, 1) == 160
        assert os.pread(other.fileno(), 2000, 0) == text[100:110] + text[5:45] + text[150:160] + text[55:1005]
        fails(errno.EINVAL, os.copy_file_range, one.fileno(), one.fileno(), 10, 0, 5)
        r, w = os.pipe()
        fails(errno.EINVAL, os.sendfile, w, r, None, 5)
        fails(errno.EBADF, os.sendfile, os.open("/dev/null", os.O_RDONLY), one.fileno(), 0, 5)
        os.close(r); os.close(w)

class Echo(asyncio.DatagramProtocol):
    def connection_made(self, transport): self.transport = transport
    def datagram_received(self, data, address): self.transport.sendto(data.upper(), address)

class Asks(asyncio.DatagramProtocol):
    def __init__(self): self.answer = asyncio.get_running_loop().create_future()
    def datagram_received(self, data, address): self.answer.set_result(data)

async def tasks():
    loop = asyncio.get_running_loop()
    server, _ = await loop.create_datagram_endpoint(Echo, local_addr=("127.0.0.1", 0))
    client, asks = await loop.create_datagram_endpoint(Asks, remote_addr=server.get_extra_info("sockname"))
    client.sendto(b"hello")
    assert await asks.answer == b"HELLO"
    client.close(); server.close()

class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_char_p), ("len", ctypes.c_size_t)]
class Message(ctypes.Structure):
    _fields_ = [("name", ctypes.c_void_p), ("name_len", ctypes.c_uint), ("vector", ctypes.POINTER(Vector)), ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p), ("control_len", ctypes.c_size_t), ("flags", ctypes.c_int), ("pad", ctypes.c_int), ("told", ctypes.c_uint)]

def several():
    libc = ctypes.CDLL(None, use_errno=True)
    def call(work, socket, texts, flags, timeout=None):
        vectors = [Vector(text, len(text)) for text in texts]
        messages = (Message * len(texts))(*(Message(None, 0, ctypes.pointer(v), 1) for v in vectors))
        count = work(socket.fileno(), messages, len(texts), flags, *(() if work == libc.sendmmsg else (timeout,)))
        return (count, [m.told for m in messages[:max(count, 0)]]) if count >= 0 else ctypes.get_errno()
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    texts = [b"one", b"", b"three"]
    assert call(libc.sendmmsg, a, texts, 0) == (3, [3, 0, 5])
    room = [b"." * 10 for _ in range(9)]
    assert call(libc.recvmmsg, b, room[:2], 0) == (2, [3, 0])
    assert call(libc.recvmmsg, b, room, socket.MSG_DONTWAIT) == (1, [5])
    assert call(libc.recvmmsg, b, room, socket.MSG_DONTWAIT) == errno.EAGAIN
    # All of them are waited for, or only the first.
    sender = threading.Thread(target=lambda: [(time.sleep(0.01), a.send(b"late")) for _ in range(3)])
    sender.start(); assert call(libc.recvmmsg, b, room[:3], 0) == (3, [4, 4, 4]); sender.join()
    sender = threading.Thread(target=lambda: (time.sleep(0.01), a.send(b"late")))
    sender.start(); assert call(libc.recvmmsg, b, room, 0x10000) == (1, [4]); sender.join()
    # As many as there is room for.
    a.setblocking(False)
    sent, told = call(libc.sendmmsg, a, [b"x" * 1000] * 200, 0)
    assert 30 < sent < 100 and told == [1000] * sent, sent
    assert call(libc.sendmmsg, a, [b"x" * 1000] * 200, 0) == errno.EAGAIN
    a.close(); b.close()

def square(n): return n * n

held = socket.socketpair()
mail = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for line in sys.stdin:
    if line == "hold\n":
        with open("/tmp/sent", "w+") as file:
            file.write("what was sent"); file.flush(); file.seek(0)
            socket.send_fds(held[0], [b"held"], [file.fileno()])
            socket.send_fds(mail[0], [b"mail"], [file.fileno()])
        os.unlink("/tmp/sent")
    elif line == "take\n":
        out = []
        for end in (held[1], mail[1]):
            if not select.select([end], [], [], 0)[0]: out.append(None); continue
            data, fds, _, _ = socket.recv_fds(end, 100, 1)
            out.append((data, os.pread(fds[0], 100, 0)))
        print(out, flush=True)
        continue
    else:
        rights(); local(); internet(); families(); several(); copies(); asyncio.run(tasks())
        with multiprocessing.get_context("fork").Pool(2) as pool: assert pool.map(square, range(9)) == [n * n for n in range(9)]
    print("done", flush=True)
"#;

const TAKEN: &str = "[(b'held', b'what was sent'), (b'mail', b'what was sent')]\n";

fn program() -> Option<Program> {
    let program = common::python()?.arg("/app.py").file("/app.py", MESSAGES);
    Some(program.env("PATH", "/usr/bin:/bin").time_limit(LIMIT).start_limit(LIMIT))
}

fn ask(instance: &mut Instance, request: &str) -> String {
    let answer = instance.call(request.as_bytes()).unwrap_or_else(|e| panic!("{request:?}: {e}"));
    String::from_utf8(answer).unwrap()
}

#[test]
fn descriptors_and_datagrams_arrive_and_nothing_is_left() {
    let Some(program) = program() else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    for _ in 0..2 {
        instance.reset();
        assert_eq!(ask(&mut instance, "all\n"), "done\n");
        instance.verify().unwrap();
        assert_eq!(ask(&mut instance, "hold\n"), "done\n");
        instance.verify().unwrap();
        assert_eq!(ask(&mut instance, "take\n"), "[None, None]\n");
    }
    assert_eq!(instance.stats().processes, 1);
}

#[test]
fn messages_in_flight_are_part_of_every_state() {
    let Some(program) = program() else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let root = line.at();
    assert_eq!(ask(line.guest_mut().unwrap(), "hold\n"), "done\n");
    let sent = line.checkpoint().unwrap();
    let mut fork = line.fork(sent).unwrap();
    for _ in 0..2 {
        line.rollback(sent).unwrap();
        line.guest_mut().unwrap().verify().unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), "take\n"), TAKEN);
        assert_eq!(ask(line.guest_mut().unwrap(), "take\n"), "[None, None]\n");
        line.rollback(root).unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), "take\n"), "[None, None]\n");
    }
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    let frozen = fork.guest_mut().unwrap().freeze().unwrap();
    frozen.save(&store, "sent", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("sent").unwrap(), &Options::default()).unwrap();
    let mut thawed = Warm::thaw(&frozen, &program).unwrap().instance();
    assert_eq!(ask(&mut thawed, "take\n"), TAKEN);
    thawed.verify().unwrap();
    assert_eq!(ask(fork.guest_mut().unwrap(), "take\n"), TAKEN);
}
