//! Sockets with packet boundaries, options that are returned and limits that hold, and credentials
//! of the peer.

use crate::common;

use std::time::Duration;

use common::states::{in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const SOCKETS: &str = r#"
import array, errno, os, select, socket, struct, sys, threading
from socket import AF_INET, AF_UNIX, SOCK_DGRAM, SOCK_SEQPACKET, SOCK_STREAM, SOL_SOCKET

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, e
    else: assert False, "it works"

def packets():
    a, b = socket.socketpair(AF_UNIX, SOCK_SEQPACKET)
    assert a.getsockopt(SOL_SOCKET, socket.SO_TYPE) == SOCK_SEQPACKET
    a.send(b"one"); a.send(b""); a.send(b"three"); os.write(a.fileno(), b"four")
    assert select.select([b], [], [], 0)[0]
    assert b.recv(99) == b"one" and b.recv(99) == b"" and b.recvmsg(2)[::2] == (b"th", socket.MSG_TRUNC) and os.read(b.fileno(), 99) == b"four"
    b.setblocking(False); fails(errno.EAGAIN, b.recv, 1); b.setblocking(True)
    socket.send_fds(a, [b"gift"], [0]); data, fds, _, _ = socket.recv_fds(b, 9, 1); assert data == b"gift" and len(fds) == 1; os.close(fds[0])
    fails(errno.EMSGSIZE, a.send, b"x" * 300_000)
    # Sending to a full socket waits.
    a.setblocking(False); sent = 0
    try:
        while a.send(b"x" * 1000): sent += 1
    except BlockingIOError: pass
    assert 30 < sent < 100 and not select.select([], [a], [], 0)[1]
    a.setblocking(True); got = []
    thread = threading.Thread(target=lambda: [got.append(b.recv(2000)) for _ in range(sent + 1)]); thread.start()
    a.send(b"last"); thread.join(); assert got[-1] == b"last" and set(map(len, got[:-1])) == {1000}
    a.send(b"end"); a.close(); assert b.recv(9) == b"end" and b.recv(9) == b"" and select.select([b], [], [], 0)[0]
    fails(errno.EPIPE, b.send, b"x"); b.close()
    # By name; a stream does not reach it.
    with socket.socket(AF_UNIX, SOCK_SEQPACKET) as s, socket.socket(AF_UNIX, SOCK_SEQPACKET) as c, socket.socket(AF_UNIX) as other:
        s.bind("\0packets"); s.listen(); fails(errno.ECONNREFUSED, other.connect, "\0packets"); c.connect("\0packets")
        d, _ = s.accept(); c.send(b"ab"); c.send(b"c"); assert d.recv(9) == b"ab" and d.recv(9) == b"c"; d.send(b"back"); assert c.recv(9) == b"back"; d.close()
    with socket.socket(AF_UNIX, SOCK_SEQPACKET) as s, socket.socket(AF_UNIX) as other:
        s.bind("/tmp/s"); s.listen(); fails(errno.EPROTOTYPE, other.connect, "/tmp/s"); os.unlink("/tmp/s")
    fails(errno.ESOCKTNOSUPPORT, socket.socket, AF_INET, SOCK_SEQPACKET); fails(errno.EINVAL, socket.socket, AF_INET, 99)

def names():
    # Names that are no file's, given and made.
    with socket.socket(AF_UNIX) as s, socket.socket(AF_UNIX) as t, socket.socket(AF_UNIX) as c:
        s.bind("\0hello"); s.listen(); fails(errno.EADDRINUSE, t.bind, "\0hello"); assert s.getsockname() == b"\0hello"
        t.bind(""); t.listen(); assert len(t.getsockname()) == 6 and t.getsockname()[0] == 0
        c.connect(t.getsockname()); assert c.getpeername() == t.getsockname(); fails(errno.ECONNREFUSED, socket.socket(AF_UNIX).connect, "\0nobody")

def peers():
    peer = lambda s: struct.unpack("3i", s.getsockopt(SOL_SOCKET, socket.SO_PEERCRED, 12))
    me = (os.getpid(), os.getuid(), os.getgid())
    a, b = socket.socketpair(); assert peer(a) == peer(b) == me
    with socket.socket(AF_UNIX) as s:
        assert peer(s) == (0, -1, -1)
        s.bind("\0peer"); s.listen()
        if (pid := os.fork()) == 0:
            c = socket.socket(AF_UNIX); c.connect("\0peer"); assert peer(c) == me; c.recv(1); os._exit(0)
        d, _ = s.accept(); assert peer(d) == (pid, *me[1:])
        # With everything that is received, where that is asked for.
        d.send(b"x"); os.waitpid(pid, 0); d.close()
    b.setsockopt(SOL_SOCKET, socket.SO_PASSCRED, 1); socket.send_fds(a, [b"x"], [0])
    data, told, flags, _ = b.recvmsg(9, 100)
    assert [kind for _, kind, _ in told] == [2, socket.SCM_RIGHTS] and struct.unpack("3i", told[0][2]) == me and not flags, told
    os.close(array.array("i", told[1][2])[0]); a.close(); b.close()
    with socket.create_server(("127.0.0.1", 0)) as s: assert peer(s) == (0, -1, -1)

def options():
    with socket.socket(AF_INET) as s:
        get = lambda name, level=SOL_SOCKET: s.getsockopt(level, name)
        def put(name, value, level=SOL_SOCKET): s.setsockopt(level, name, value); return get(name, level)
        assert get(socket.SO_REUSEADDR) == 0 == get(socket.TCP_NODELAY, socket.IPPROTO_TCP) and get(socket.SO_ERROR) == 0
        assert put(socket.SO_REUSEADDR, 7) == 1 and put(socket.TCP_NODELAY, 1, socket.IPPROTO_TCP) == 1 and put(socket.SO_KEEPALIVE, 1) == 1
        assert put(socket.SO_SNDBUF, 50_000) == 100_000 and put(socket.IP_TTL, 9, socket.IPPROTO_IP) == 9
        s.setsockopt(SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 5)); assert s.getsockopt(SOL_SOCKET, socket.SO_LINGER, 8) == struct.pack("ii", 1, 5)
        for name in (socket.SO_TYPE, socket.SO_ERROR, socket.SO_ACCEPTCONN): fails(errno.ENOPROTOOPT, put, name, 1)
        # An accepted socket has the listener's options, which also last through a connect.
        s.bind(("127.0.0.1", 0)); s.listen(); assert get(socket.SO_ACCEPTCONN) == 1
        with socket.socket(AF_INET) as c:
            c.setsockopt(SOL_SOCKET, socket.SO_KEEPALIVE, 1); c.connect(s.getsockname()); d, _ = s.accept()
            assert c.getsockopt(SOL_SOCKET, socket.SO_KEEPALIVE) == 1 == d.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY); d.close()
    a, b = socket.socketpair()
    limit = lambda s, name, micros: s.setsockopt(SOL_SOCKET, name, struct.pack("qq", 0, micros))
    limit(b, socket.SO_RCVTIMEO, 20_000); fails(errno.EAGAIN, b.recv, 1); fails(errno.EAGAIN, os.read, b.fileno(), 1)
    limit(a, socket.SO_SNDTIMEO, 20_000)
    assert 0 < a.send(b"x" * 900_000) < 900_000, "as much as went in time"
    fails(errno.EAGAIN, a.send, b"x"); fails(errno.EDOM, limit, a, socket.SO_SNDTIMEO, 1_000_000)
    with socket.socket(AF_UNIX) as s: s.bind(""); s.listen(); limit(s, socket.SO_RCVTIMEO, 10_000); fails(errno.EAGAIN, s.accept)
    a.close(); b.close()

def whole():
    a, b = socket.socketpair()
    def feed():
        for part in (b"ab", b"cde", b"f", b"rest"): a.send(part); os.sched_yield()
    thread = threading.Thread(target=feed); thread.start()
    into, behind = bytearray(4), bytearray(2)
    assert b.recvmsg_into([into, behind], 0, socket.MSG_WAITALL)[0] == 6 and (into, behind) == (b"abcd", b"ef")
    thread.join(); assert b.recv(9, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == b"rest"
    fails(errno.EAGAIN, b.recv, 9, socket.MSG_WAITALL | socket.MSG_DONTWAIT)
    a.send(b"short"); a.close(); assert b.recv(9, socket.MSG_WAITALL) == b"short", "no more comes"; b.close()
    a, b = socket.socketpair(); socket.send_fds(a, [b"with"], [0]); a.send(b"behind")
    data, fds, _, _ = socket.recv_fds(b, 9, 1, socket.MSG_WAITALL); assert data == b"with" and len(fds) == 1; os.close(fds[0]); a.close(); b.close()
    # A datagram of several pieces.
    with socket.socket(AF_INET, SOCK_DGRAM) as s, socket.socket(AF_INET, SOCK_DGRAM) as c:
        s.bind(("127.0.0.1", 0)); c.connect(s.getsockname())
        assert c.send(b"one ", socket.MSG_MORE) == 4 and c.send(b"two", socket.MSG_MORE) == 3 and not select.select([s], [], [], 0)[0]
        assert c.send(b"!") == 1 and s.recv(99) == b"one two!"; c.send(b"next"); assert s.recv(99) == b"next"
        c.send(b"x" * 60_000, socket.MSG_MORE); fails(errno.EMSGSIZE, c.send, b"x" * 6_000)

def early():
    # A connection beyond the backlog that is accepted before an earlier one without data is established.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as s, socket.socket() as c, socket.socket() as d:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 500); c.connect(s.getsockname())
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 0); d.setblocking(False); d.connect_ex(s.getsockname())
        e, _ = s.accept(); assert select.select([], [d], [], 9)[1]; d.send(b"x"); assert e.recv(9) == b"x"; e.close()

held = socket.socketpair(AF_UNIX, SOCK_SEQPACKET)
for line in sys.stdin:
    match line.strip():
        case "all": packets(); names(); peers(); options(); whole(); early(); print("done", flush=True)
        case "hold":
            with open("/tmp/f", "w+") as file: file.write("sent"); file.flush(); socket.send_fds(held[0], [b"with"], [file.fileno()])
            held[0].send(b""); held[0].send(b"last"); held[1].setsockopt(SOL_SOCKET, socket.SO_RCVBUF, 5000)
            server, callers = socket.create_server(("127.0.0.1", 0), backlog=0), [socket.socket() for _ in range(2)]
            for caller in callers: caller.setblocking(False); caller.connect_ex(server.getsockname())
            print("held", flush=True)
        case "look":
            held[1].setblocking(False)
            try: data, fds, _, _ = socket.recv_fds(held[1], 9, 1)
            except BlockingIOError: print("nothing", flush=True); continue
            accepted = [server.accept()[0] for _ in callers]; select.select([], callers[1:], [], 9); callers[1].send(b"late")
            print(data, os.pread(fds[0], 9, 0), held[1].recv(9), held[1].recv(9), held[1].getsockopt(SOL_SOCKET, socket.SO_RCVBUF), accepted[1].recv(9), flush=True)
"#;

#[test]
fn packets_options_and_peers_are_as_in_linux_in_every_state() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", SOCKETS);
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    pristine(&warm, "all", "done");
    let held = "b'with' b'sent' b'' b'last' 10000 b'late'";
    in_every_state(&program, &warm, "hold", ["look", held, "nothing"]);
}
