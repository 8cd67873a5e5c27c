//! Connections to the outside: only granted servers are reached, by name; no connection outlives
//! the state that it was made in.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use afresh_linux::{CallError, Instance, NetGrant, Program, Warm};
use afresh_snapshot::{Branch, Tree};

use crate::common::{here, python};

const SCRIPT: &str = r#"
import asyncio, os, socket, sys
kept = None

def connect(host, port):
    return socket.create_connection((host, int(port)), timeout=20)

def everything(s):
    out = b""
    while piece := s.recv(1 << 16):
        out += piece
    return out

def ask(host, port, text):
    with connect(host, port) as s:
        s.sendall(text.encode())
        s.shutdown(socket.SHUT_WR)
        return everything(s)

async def one(host, port, text):
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(text.encode())
    writer.write_eof()
    out = await reader.read()
    writer.close()
    return out.decode()

async def many(host, port, count):
    answers = await asyncio.gather(*(one(host, port, f"n{i}") for i in range(int(count))))
    return sum(answer == f"<n{i}>" for i, answer in enumerate(answers))

def answer(word, *rest):
    global kept
    if word == "ask":
        return ask(*rest).decode()
    if word == "big":
        text = "0123456789" * (int(rest[2]) // 10)
        out = ask(*rest[:2], text).decode()
        return len(out), out == f"<{text}>"
    if word == "many":
        return asyncio.run(many(*rest))
    if word == "name":
        return socket.gethostbyname(rest[0])
    if word == "lookup":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((rest[0], 53))
            s.send(b"\1\2\1\0\0\1\0\0\0\0\0\0\6server\4test\0\0\1\0\1")
            data, back = s.recvfrom(500)
            assert back == (rest[0], 53)
            return socket.inet_ntoa(data[-4:])
    if word == "keep":
        kept = connect(*rest)
        return kept.getpeername()[1]
    if word == "use":
        if kept is None:
            return "none"
        kept.sendall(rest[0].encode() + b"\n")
        return kept.recv(100).decode() or "closed"
    if word == "nothing":
        return ""
    if word == "exit":
        os._exit(0)

if len(sys.argv) > 1:
    kept = connect(*sys.argv[1:])
for line in sys.stdin:
    try:
        print(answer(*line.split()), flush=True)
    except OSError as error:
        print(type(error).__name__, error.errno, flush=True)
"#;

/// A server that echoes its whole input between brackets, or line by line.
struct Server {
    port: u16,
    open: Arc<AtomicUsize>,
}

impl Server {
    fn start(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (open, serve) = (Arc::new(AtomicUsize::new(0)), Arc::new(serve));
        let counted = open.clone();
        // It ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (serve, counted) = (serve.clone(), counted.clone());
                std::thread::spawn(move || {
                    counted.fetch_add(1, Ordering::SeqCst);
                    serve(stream);
                    counted.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { port, open }
    }

    /// Answers all input until the other side has no more.
    fn of_wholes() -> Self {
        Self::start(|mut stream| {
            let mut bytes = Vec::new();
            if stream.read_to_end(&mut bytes).is_ok() {
                let answer = [&b"<"[..], &bytes, b">"].concat();
                let _ = stream.write_all(&answer);
                let _ = stream.shutdown(Shutdown::Both);
            }
        })
    }

    /// Answers each line at once.
    fn of_lines() -> Self {
        Self::start(|mut stream| {
            let mut buffer = [0; 100];
            while let Ok(len @ 1..) = stream.read(&mut buffer) {
                if stream.write_all(&[b"got ", &buffer[..len]].concat()).is_err() {
                    return;
                }
            }
        })
    }

    fn wait_for(&self, open: usize) {
        let started = Instant::now();
        while self.open.load(Ordering::SeqCst) != open {
            assert!(started.elapsed() < Duration::from_secs(120), "connections stay open");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn program(granted: &[String]) -> Option<Program> {
    let program = python()?.arg("/app.py").file("/app.py", SCRIPT);
    let reach = |program: Program, text: &String| program.reach(text.parse::<NetGrant>().unwrap());
    Some(granted.iter().fold(program, reach))
}

fn ask(instance: &mut Instance, line: &str) -> String {
    let answer = instance.call(format!("{line}\n").as_bytes()).unwrap();
    String::from_utf8(answer).unwrap().trim_end().to_owned()
}

#[test]
fn a_guest_reaches_what_is_granted_by_name_and_nothing_else() {
    let server = Server::of_wholes();
    let granted = [format!("Server.test:7=127.0.0.1:{}", server.port), "198.51.100.1:9".to_owned()];
    let Some(program) = program(&granted) else { return };
    let Some(warm) = here(program.warm()) else { return };
    let mut instance = warm.instance();
    for _ in 0..2 {
        assert_eq!(ask(&mut instance, "ask server.TEST 7 hello"), "<hello>");
        assert_eq!(ask(&mut instance, "big server.test 7 3000000"), "(3000002, True)");
        assert_eq!(ask(&mut instance, "many server.test 7 100"), "100");
        // At another port, under another name, by an address: not there.
        assert_eq!(ask(&mut instance, "ask server.test 8 x"), "OSError 101");
        assert!(ask(&mut instance, "ask other.test 7 x").starts_with("gaierror"));
        assert!(ask(&mut instance, "ask test 7 x").starts_with("gaierror"));
        assert_eq!(ask(&mut instance, "ask 198.51.100.2 9 x"), "OSError 101");
        assert_eq!(ask(&mut instance, "name localhost"), "127.0.0.1");
        // Every DNS server gives the same answer.
        assert_eq!(ask(&mut instance, "lookup 192.0.2.53"), ask(&mut instance, "lookup 127.0.0.1"));
        // The guest's own loopback is its own.
        let own = format!("ask 127.0.0.1 {} x", server.port);
        assert_eq!(ask(&mut instance, &own), "ConnectionRefusedError 111");
        instance.reset();
    }
    instance.verify().unwrap();
    // Without grants there are no servers.
    let Some(alone) = self::program(&[]) else { return };
    let mut alone = alone.warm().unwrap().instance();
    assert!(ask(&mut alone, "ask server.test 7 hello").starts_with("gaierror"));
    assert_eq!(ask(&mut alone, "ask 198.18.0.1 7 hello"), "OSError 101");
    assert_eq!(ask(&mut alone, "name localhost"), "127.0.0.1");
}

#[test]
fn no_connection_outlives_its_state() {
    let server = Server::of_lines();
    let granted = [format!("server.test:7=127.0.0.1:{}", server.port)];
    let Some(program) = program(&granted) else { return };
    let Some(warm) = here(program.warm()) else { return };
    let mut instance = warm.instance();
    for _ in 0..3 {
        assert_eq!(ask(&mut instance, "use early"), "none");
        assert_eq!(ask(&mut instance, "keep server.test 7"), "7");
        assert_eq!(ask(&mut instance, "use one"), "got one");
        server.wait_for(1);
        // A call without output does not wait for a server without pending data.
        assert_eq!(ask(&mut instance, "nothing"), "");
        assert_eq!(ask(&mut instance, "use two"), "got two");
        instance.reset();
        // They are closed now, and not by the next call.
        server.wait_for(0);
        assert_eq!(ask(&mut instance, "use late"), "none");
        instance.reset();
    }
    assert_eq!(ask(&mut instance, "keep server.test 7"), "7");
    server.wait_for(1);
    // The end of the program closes all that it left open.
    instance.call(b"exit\n").unwrap_err();
    server.wait_for(0);
    instance.reset();
    // A fork of a state with a connection finds it closed; the original keeps it.
    assert_eq!(ask(&mut instance, "keep server.test 7"), "7");
    let frozen = instance.freeze().unwrap();
    assert_eq!(ask(&mut instance, "use still"), "got still");
    let mut thawed = Warm::thaw(&frozen, &program).unwrap().instance();
    for _ in 0..2 {
        let found = ask(&mut thawed, "use mine");
        assert!(
            ["closed", "BrokenPipeError 32", "ConnectionResetError 104"].contains(&&*found),
            "{found}"
        );
        assert_eq!(ask(&mut thawed, "keep server.test 7"), "7");
        assert_eq!(ask(&mut thawed, "use again"), "got again");
        thawed.reset();
    }
    thawed.verify().unwrap();
    // A snapshot brings the names that it knows, and no grants.
    let mut stranger = Warm::thaw(&frozen, &python().unwrap()).unwrap().instance();
    assert_eq!(ask(&mut stranger, "keep 198.18.0.1 7"), "OSError 101");
    assert!(ask(&mut stranger, "keep server.test 7").starts_with("gaierror"));
    assert_eq!(ask(&mut instance, "use ever"), "got ever");
    drop((instance, thawed, stranger));
    server.wait_for(0);
}

/// Storing a state in another form does not affect the guest that it was taken from.
#[test]
fn a_checkpoint_that_is_stored_anew_cuts_no_connection() {
    let server = Server::of_lines();
    let granted = [format!("server.test:7=127.0.0.1:{}", server.port)];
    let Some(program) = program(&granted) else { return };
    let Some(warm) = here(program.warm()) else { return };
    // Each is stored anew.
    let mut line = Branch::<Instance>::from_state(&Tree::with_budget(1), warm.home(), warm.state());
    for round in 0..3 {
        let instance = line.guest_mut().unwrap();
        assert_eq!(ask(instance, "keep server.test 7"), "7", "round {round}");
        let generation = instance.generation();
        let kept = line.checkpoint().unwrap();
        let instance = line.guest_mut().unwrap();
        assert_eq!(instance.generation(), generation, "round {round}");
        assert_eq!(ask(instance, "use still"), "got still", "round {round}");
        line.rollback(kept).unwrap();
        let instance = line.guest_mut().unwrap();
        assert_ne!(instance.generation(), generation, "round {round}");
        assert_ne!(ask(instance, "use mine"), "got mine", "round {round}");
        instance.verify().unwrap();
    }
}

#[test]
fn connections_made_before_the_freeze_are_closed() {
    let server = Server::of_lines();
    let granted = [format!("server.test:7=127.0.0.1:{}", server.port)];
    let Some(program) = program(&granted) else { return };
    let Some(warm) = here(program.arg("server.test").arg("7").warm()) else { return };
    server.wait_for(0);
    let mut instance = warm.instance();
    for _ in 0..2 {
        let found = ask(&mut instance, "use it");
        assert!(["closed", "BrokenPipeError 32"].contains(&&*found), "{found}");
        assert_eq!(ask(&mut instance, "keep server.test 7"), "7");
        assert_eq!(ask(&mut instance, "use it"), "got it");
        instance.reset();
    }
}

#[test]
fn dead_or_silent_servers_take_no_more_than_the_time_limit() {
    let silent = Server::start(|mut stream| {
        // Until the other side closes.
        let _ = stream.read_to_end(&mut Vec::new());
        std::thread::sleep(Duration::from_secs(60));
    });
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let granted = [
        format!("silent.test:7=127.0.0.1:{}", silent.port),
        format!("gone.test:7=127.0.0.1:{closed}"),
        "near.invalid:7".to_owned(),
        "localhost.localdomain:7=127.0.0.1:1".to_owned(),
    ];
    let Some(program) = program(&granted) else { return };
    let Some(warm) = here(program.time_limit(Duration::from_secs(2)).warm()) else { return };
    let mut instance = warm.instance();
    assert_eq!(ask(&mut instance, "ask gone.test 7 x"), "ConnectionRefusedError 111");
    let found = ask(&mut instance, "ask near.invalid 7 x");
    assert!(found.starts_with("OSError"), "{found}");
    let late = instance.call(b"ask silent.test 7 x\n");
    assert!(matches!(late, Err(CallError::Late { .. })), "{late:?}");
    instance.reset();
    assert_eq!(ask(&mut instance, "ask gone.test 7 x"), "ConnectionRefusedError 111");
    instance.verify().unwrap();
}
