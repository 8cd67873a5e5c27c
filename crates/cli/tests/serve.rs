//! `afresh serve` as a program: what it says, what signals mean to it, and what a file with several guests does.

#![cfg(feature = "serve")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

const LONG: Duration = Duration::from_secs(120);

/// A module that answers whatever comes in with these words.
fn parrot(dir: &Path, name: &str, words: &str) {
    let text = format!(
        r#"(module
            (memory (export "memory") 2)
            (data (i32.const 16) "{words}")
            (func (export "afresh_buffer") (param i32) (result i32) (i32.const 65536))
            (func (export "handle") (param i32) (result i64)
                (i64.or (i64.shl (i64.const 16) (i64.const 32)) (i64.const {}))))"#,
        words.len()
    );
    let part = dir.join("part");
    std::fs::write(&part, wat::parse_str(text).unwrap()).unwrap();
    std::fs::rename(part, dir.join(name)).unwrap();
}

/// A server in a process of its own, which is killed if the test fails.
struct Serving {
    child: Child,
    addr: String,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Serving {
    fn begin(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
            .args(["-o", "json", "serve", "--addr", "127.0.0.1:0"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: serde_json::Value = serde_json::from_str(&line).expect("it says where it serves");
        Self { child, addr: said["addr"].as_str().unwrap().to_owned() }
    }

    fn ask(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.addr).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

#[test]
fn a_server_renews_its_guests_and_ends_when_it_is_told_to() {
    let dir = tempfile::tempdir().unwrap();
    parrot(dir.path(), "one.wasm", "the first");
    parrot(dir.path(), "two.wasm", "another");
    let file = dir.path().join("serve.toml");
    let guests =
        "[[guest]]\nguest = \"one.wasm\"\n[[guest]]\nguest = \"two.wasm\"\nroute = \"/two\"\n";
    std::fs::write(&file, guests).unwrap();
    let mut serving = Serving::begin(&["--config", file.to_str().unwrap()]);
    assert!(serving.ask("/").ends_with("\r\n\r\nthe first"));
    assert!(serving.ask("/two").ends_with("\r\n\r\nanother"));
    assert!(serving.ask("/readyz").starts_with("HTTP/1.1 200"));
    parrot(dir.path(), "one.wasm", "the second");
    serving.signal(Signal::HUP);
    let begun = Instant::now();
    while !serving.ask("/").ends_with("\r\n\r\nthe second") {
        assert!(begun.elapsed() < LONG, "the guests were never renewed");
        std::thread::sleep(Duration::from_millis(20));
    }
    serving.signal(Signal::TERM);
    assert!(serving.child.wait().unwrap().success());
}

#[test]
fn guests_of_the_command_line_have_routes_and_wrong_usage_is_told() {
    let dir = tempfile::tempdir().unwrap();
    parrot(dir.path(), "one.wasm", "one");
    let guest = dir.path().join("one.wasm");
    let routed = format!("/a={}", guest.display());
    let serving = Serving::begin(&[&routed, "--max-body", "1"]);
    assert!(serving.ask("/a/b").ends_with("\r\n\r\none"));
    assert!(serving.ask("/b").starts_with("HTTP/1.1 404"));
    drop(serving);
    for (arguments, said) in [
        (&["serve"][..], "GUEST"),
        (&["serve", "--stdio", "--addr", "127.0.0.1:0", "x.wasm"], "cannot be used with"),
        (&["serve", "nothing.wasm"], "nothing.wasm"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_afresh")).args(arguments).output().unwrap();
        assert!(!output.status.success());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains(said), "{arguments:?}: {error}");
    }
}

#[test]
#[cfg(feature = "linux")]
fn a_linux_program_answers_each_request_from_the_state_in_which_it_first_waited() {
    let sed = ["--linux", "sed", "--", "-u", "="];
    // What this host lacks for Linux programs is said by the tests that are about them.
    let run = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["run", "--input", "x"])
        .args(sed)
        .output()
        .unwrap();
    if !run.status.success() {
        println!("SKIPPED: {}", String::from_utf8_lossy(&run.stderr).trim());
        return;
    }
    let serving = Serving::begin(&sed);
    for line in ["one", "two", "three"] {
        let mut stream = TcpStream::connect(&serving.addr).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let length = line.len() + 1;
        let head = "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length";
        write!(stream, "{head}: {length}\r\n\r\n{line}\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with(&format!("\r\n\r\n1\n{line}\n")), "{answer}");
    }
}

/// A server of HTTP that remembers what it was asked, and says how often that was.
#[cfg(feature = "linux")]
const SERVER: &str = "\
import http.server
asked = []
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(201); self.send_header('X-Asked', str(len(asked))); self.end_headers()
        self.wfile.write(self.path.encode())
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(('127.0.0.1', 5000), Answer).serve_forever()
";

#[test]
#[cfg(feature = "linux")]
fn a_linux_server_is_asked_through_its_port_and_forgets_each_time() {
    let ask = "import sys; print(sys.executable); print(sys.base_prefix)";
    let Ok(python) = Command::new("python3").args(["-c", ask]).output() else {
        println!("SKIPPED: no python3");
        return;
    };
    let said = String::from_utf8_lossy(&python.stdout).into_owned();
    let Some((python, prefix)) = said.trim().split_once('\n') else {
        println!("SKIPPED: python3 does not say where it is");
        return;
    };
    let guest = ["--linux", "--dir", prefix, python, "--", "-c", SERVER];
    let verified = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["verify", "-n", "2", "--input", "GET / HTTP/1.0\r\n\r\n"])
        .args(guest)
        .output()
        .unwrap();
    if !verified.status.success() {
        let said = String::from_utf8_lossy(&verified.stderr).into_owned();
        assert!(said.contains("cannot run Linux guests"), "{said}");
        println!("SKIPPED: {}", said.trim());
        return;
    }
    let serving = Serving::begin(&guest);
    for path in ["/one", "/two?x=y", "/three"] {
        let answer = serving.ask(path);
        assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
        assert!(answer.to_ascii_lowercase().contains("\r\nx-asked: 1\r\n"), "{answer}");
        assert!(answer.ends_with(&format!("\r\n\r\n{path}")), "{answer}");
    }
}
