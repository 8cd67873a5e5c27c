//! `afresh exec --publish`: ports of the host that lead to servers within a program.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Time for a server to start on a busy host.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// A running program, which ends with this.
struct Program {
    child: Child,
    /// The addresses that it printed.
    addresses: Vec<SocketAddr>,
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
        Self { child, addresses }
    }

    /// Connects once the program listens.
    fn connect(&self, at: usize) -> TcpStream {
        let begun = Instant::now();
        loop {
            match TcpStream::connect(self.addresses[at]) {
                Ok(stream) => return stream,
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                Err(error) => panic!("{error}"),
            }
            assert!(begun.elapsed() < START_TIMEOUT, "the program does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
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
    let server = ["--dir", path, "-w", path, "--", "python3", "-m", "http.server", "8000"];
    let program = Program::start(&[8000], &server);
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
    let program = Program::start(&[7000, 7001], &["--", "python3", "-c", server]);
    for count in [0, 3 << 20] {
        let mut stream = program.connect(0);
        stream.write_all(&vec![b'x'; count]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, format!("{count} 127.0.0.1"));
    }
    // The second port never had a listener, and the first has none any more.
    let refused = TcpStream::connect(program.addresses[1]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    let begun = Instant::now();
    loop {
        let mut late = TcpStream::connect(program.addresses[0]).unwrap();
        late.set_read_timeout(Some(START_TIMEOUT)).unwrap();
        match late.read(&mut [0; 8]) {
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            // It was still in the backlog of the listener.
            other => assert!(begun.elapsed() < START_TIMEOUT, "{other:?}"),
        }
    }
    assert_eq!(program.end(), Some(143));
}

#[test]
fn a_port_that_cannot_be_published_is_named() {
    if !can_run(&["true"]) {
        return;
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    for (given, why) in [
        (format!("{port}:80"), format!("cannot take 127.0.0.1:{port}")),
        ("80".to_owned(), "HOST-PORT:PORT".to_owned()),
        ("1:70000".to_owned(), "no number of a port".to_owned()),
        ("1:0".to_owned(), "port 0".to_owned()),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        let ended = command.args(["exec", "--publish", &given, "--", "true"]).output().unwrap();
        let err = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && err.contains(&why), "{given}: {err}");
    }
}
