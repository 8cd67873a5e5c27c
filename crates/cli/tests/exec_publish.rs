//! `afresh exec --publish`: ports of the host that lead to servers within a program.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, ErrorKind, Lines, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Time for an answer on a busy host.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// A running program, which ends with this.
struct Program {
    child: Child,
    /// The addresses that it printed.
    addresses: Vec<SocketAddr>,
    output: Lines<BufReader<ChildStdout>>,
}

impl Program {
    fn start(ports: &[u16], arguments: &[impl AsRef<OsStr>]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        command.arg("exec");
        for port in ports {
            command.arg("--publish").arg(format!("0:{port}"));
        }
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut address = || {
            let line = lines.next().unwrap().unwrap();
            let found = line.split_whitespace().nth(1).and_then(|word| word.parse().ok());
            found.unwrap_or_else(|| panic!("no address: {line}"))
        };
        let addresses = ports.iter().map(|_| address()).collect();
        // Otherwise the program waits for a reader.
        std::thread::spawn(move || lines.for_each(drop));
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, addresses, output }
    }

    /// Waits for the line that a server prints once it listens.
    fn listens(mut self) -> Self {
        self.output.next().expect("the server ended").unwrap();
        self
    }

    fn connect(&self, at: usize) -> TcpStream {
        let stream = TcpStream::connect(self.addresses[at]).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        stream
    }

    fn end(mut self) -> Option<i32> {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether this host runs guests, and has these programs.
fn can_run(programs: &[&str]) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let has = |name: &str| std::env::split_paths(&folders).any(|dir| dir.join(name).is_file());
    if let Some(missing) = programs.iter().find(|name| !has(name)) {
        println!("SKIPPED: no {missing}");
        return false;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
    !common::lacks_guests(&command.args(["exec", "--", "true"]).output().unwrap())
}

/// The body of a response.
fn body(mut stream: TcpStream, path: &str) -> Vec<u8> {
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|part| part == b"\r\n\r\n").unwrap() + 4;
    answer.split_off(end)
}

#[test]
fn clients_of_the_host_reach_a_published_server() {
    if !can_run(&["python3"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // More than any buffer on the way holds.
    let big: Vec<u8> = (0..5 << 20).map(|at: u32| (at % 251) as u8).collect();
    std::fs::write(folder.path().join("big"), &big).unwrap();
    std::fs::write(folder.path().join("small"), "content").unwrap();
    let path = folder.path().to_str().unwrap();
    let server = ["--dir", path, "-w", path, "--", "python3", "-um", "http.server", "8000"];
    let program = Program::start(&[8000], &server).listens();
    assert_eq!(body(program.connect(0), "/small"), b"content");
    std::thread::scope(|threads| {
        for _ in 0..8 {
            threads.spawn(|| assert!(body(program.connect(0), "/big") == big));
        }
    });
    if can_run(&["curl"]) {
        let url = format!("http://{}/small", program.addresses[0]);
        let got = Command::new("curl").args(["-sS", "--noproxy", "*", &url]).output().unwrap();
        assert_eq!(got.stdout, b"content", "{}", String::from_utf8_lossy(&got.stderr));
    }
    assert_eq!(program.end(), Some(143));
}

#[test]
fn both_directions_of_a_connection_end_by_themselves() {
    if !can_run(&["python3"]) {
        return;
    }
    // Answers with the length of the whole request, once that has ended; then serves nothing more.
    let server = "import socket
listener = socket.create_server(('', 7000))
print('listens', flush=True)
for _ in range(2):
    peer, address = listener.accept()
    total = 0
    while data := peer.recv(65536):
        total += len(data)
    peer.sendall(f'{total} {address[0]}'.encode())
    peer.close()
listener.close()
import time
time.sleep(1000)
";
    let program = Program::start(&[7000, 7001], &["--", "python3", "-c", server]).listens();
    for count in [0, 3 << 20] {
        let mut stream = program.connect(0);
        stream.write_all(&vec![b'x'; count]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, format!("{count} 127.0.0.1"));
    }
    // The second port never had a listener, and the first has none any more.
    let early = program.connect(1).read(&mut [0; 8]).unwrap_err();
    assert_eq!(early.kind(), ErrorKind::ConnectionReset);
    let begun = Instant::now();
    loop {
        match program.connect(0).read(&mut [0; 8]) {
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            // It was still in the backlog of the listener.
            other => assert!(begun.elapsed() < TEST_TIMEOUT, "{other:?}"),
        }
    }
    assert_eq!(program.end(), Some(143));
}

#[test]
fn a_published_port_has_one_publisher() {
    if !can_run(&["sleep", "true"]) {
        return;
    }
    // The program listens nowhere.
    let program = Program::start(&[8000], &["--", "sleep", "1000"]);
    let address = program.addresses[0];
    assert_eq!(TcpListener::bind(address).unwrap_err().kind(), ErrorKind::AddrInUse);
    let mut second = Command::new(env!("CARGO_BIN_EXE_afresh"));
    second.args(["exec", "--publish", &format!("{}:8000", address.port()), "--", "true"]);
    let ended = second.output().unwrap();
    let err = String::from_utf8_lossy(&ended.stderr);
    let advice = format!("cannot take {address}; give another HOST-PORT, or 0");
    assert!(!ended.status.success() && err.contains(&advice), "{err}");
    drop(program);
    assert!(second.output().unwrap().status.success());
}

#[test]
fn idle_clients_take_half_of_the_connections_of_a_guest() {
    if !can_run(&["python3"]) {
        return;
    }
    let server = "import socket, threading
listener = socket.create_server(('', 7000))
print('listens', flush=True)
def serve(peer):
    peer.sendall(b'x')
    peer.recv(1)
    peer.close()
while True:
    threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()
";
    let program = Program::start(&[7000], &["--", "python3", "-c", server]).listens();
    let admitted = || {
        let mut stream = program.connect(0);
        match stream.read(&mut [0; 1]) {
            Ok(1) => Some(stream),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => None,
            other => panic!("{other:?}"),
        }
    };
    let mut clients: Vec<_> = (0..128).map(|_| admitted().unwrap()).collect();
    assert!(admitted().is_none());
    clients.pop();
    let begun = Instant::now();
    // The guest closes its side first.
    while admitted().is_none() {
        assert!(begun.elapsed() < TEST_TIMEOUT, "the place of a closed connection stays taken");
    }
}

#[test]
fn a_port_that_cannot_be_published_is_named() {
    if !can_run(&["true"]) {
        return;
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    for (given, why) in [
        (format!("{port}:80"), format!("cannot take 127.0.0.1:{port}; give another HOST-PORT")),
        ("80".to_owned(), "HOST-PORT:PORT".to_owned()),
        ("1:70000".to_owned(), "no number of a port".to_owned()),
        ("1:0".to_owned(), "port 0".to_owned()),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        let ended = command.args(["exec", "--publish", &given, "--", "true"]).output().unwrap();
        let err = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && err.contains(&why), "{given}: {err}");
    }
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
    let [first, second] = [80, 81].map(|port| format!("--publish={free}:{port}"));
    let ended = command.args(["exec", &first, &second, "--", "true"]).output().unwrap();
    let err = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && err.contains(&format!("{free} is already published")));
}
