//! `afresh serve` as a program: its output, its signals, and a file with several guests.

#![cfg(feature = "serve")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// A module that answers every request with these words.
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

/// A server in a separate process, which is killed if the test fails.
struct RunningServer {
    child: Child,
    addr: String,
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl RunningServer {
    fn begin(arguments: &[&str]) -> Self {
        Self::begin_as(arguments, |_| {})
    }

    fn begin_as(arguments: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        command
            .args(["-o", "json", "serve", "--addr", "127.0.0.1:0"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: serde_json::Value = serde_json::from_str(&line).expect("it says where it serves");
        Self { child, addr: said["addr"].as_str().unwrap().to_owned() }
    }

    fn ask(&self, path: &str) -> String {
        self.ask_with(path, "")
    }

    /// Asks with further lines in the head.
    fn ask_with(&self, path: &str, lines: &str) -> String {
        let mut stream = TcpStream::connect(&self.addr).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{lines}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

#[test]
fn a_server_reloads_its_guests_and_ends_on_request() {
    let dir = tempfile::tempdir().unwrap();
    parrot(dir.path(), "one.wasm", "the first");
    parrot(dir.path(), "two.wasm", "another");
    let file = dir.path().join("serve.toml");
    let guests =
        "[[guest]]\nguest = \"one.wasm\"\n[[guest]]\nguest = \"two.wasm\"\nroute = \"/two\"\n";
    std::fs::write(&file, guests).unwrap();
    let mut serving = RunningServer::begin(&["--config", file.to_str().unwrap()]);
    assert!(serving.ask("/").ends_with("\r\n\r\nthe first"));
    assert!(serving.ask("/two").ends_with("\r\n\r\nanother"));
    assert!(serving.ask("/readyz").starts_with("HTTP/1.1 200"));
    parrot(dir.path(), "one.wasm", "the second");
    serving.signal(Signal::HUP);
    let begun = Instant::now();
    while !serving.ask("/").ends_with("\r\n\r\nthe second") {
        assert!(begun.elapsed() < TEST_TIMEOUT, "the guests were never renewed");
        std::thread::sleep(Duration::from_millis(20));
    }
    serving.signal(Signal::TERM);
    assert!(serving.child.wait().unwrap().success());
}

#[test]
fn a_reload_of_a_faulty_file_is_counted_and_recorded_in_the_new_audit_log() {
    let dir = tempfile::tempdir().unwrap();
    parrot(dir.path(), "one.wasm", "the first");
    let (file, log) = (dir.path().join("serve.toml"), dir.path().join("audit.log"));
    let config = "audit = \"audit.log\"\n[[guest]]\nguest = \"one.wasm\"\n";
    std::fs::write(&file, config).unwrap();
    let serving = RunningServer::begin(&["--config", file.to_str().unwrap()]);
    std::fs::rename(&log, dir.path().join("audit.log.1")).unwrap();
    std::fs::write(&file, format!("{config}timeouts = 3\n")).unwrap();
    serving.signal(Signal::HUP);
    let begun = Instant::now();
    while !serving.ask("/metrics").contains("afresh_failed_reloads_total 1\n") {
        assert!(begun.elapsed() < TEST_TIMEOUT, "the reload was not counted");
        std::thread::sleep(Duration::from_millis(20));
    }
    loop {
        // The writer creates the file, and writes the line a moment after it is counted.
        let recorded = std::fs::read_to_string(&log).unwrap_or_default();
        if recorded.contains("\"reload\"") && recorded.contains("\"failed\"") {
            break;
        }
        assert!(begun.elapsed() < TEST_TIMEOUT, "the reload was not recorded: {recorded}");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(serving.ask("/").ends_with("\r\n\r\nthe first"));
}

#[test]
fn a_server_ends_on_request_during_a_reload() {
    let dir = tempfile::tempdir().unwrap();
    parrot(dir.path(), "one.wasm", "the first");
    let endless = r#"(module (func (export "warm") (loop (br 0))))"#;
    std::fs::write(dir.path().join("two.wasm"), wat::parse_str(endless).unwrap()).unwrap();
    let (file, log) = (dir.path().join("serve.toml"), dir.path().join("audit.log"));
    let config = "audit = \"audit.log\"\n[[guest]]\nguest = \"one.wasm\"\n";
    std::fs::write(&file, config).unwrap();
    let mut serving = RunningServer::begin(&["--config", file.to_str().unwrap()]);
    std::fs::rename(&log, dir.path().join("audit.log.1")).unwrap();
    let second = "[[guest]]\nguest = \"two.wasm\"\nroute = \"/two\"\nwarm = [\"warm\"]\n";
    std::fs::write(&file, format!("{config}{second}timeout = \"3600s\"\n")).unwrap();
    serving.signal(Signal::HUP);
    let begun = Instant::now();
    // A reload begins with it.
    while !log.exists() {
        assert!(begun.elapsed() < TEST_TIMEOUT, "the reload never began");
        std::thread::sleep(Duration::from_millis(20));
    }
    // It does not end.
    let metrics = serving.ask("/metrics");
    for counter in ["afresh_failed_reloads_total 0\n", "afresh_reloads_total 0\n"] {
        assert!(metrics.contains(counter), "{metrics}");
    }
    assert!(serving.ask("/").ends_with("\r\n\r\nthe first"));
    // A second one waits for the first.
    serving.signal(Signal::HUP);
    serving.signal(Signal::TERM);
    let begun = Instant::now();
    let ended = loop {
        if let Some(ended) = serving.child.try_wait().unwrap() {
            break ended;
        }
        assert!(begun.elapsed() < TEST_TIMEOUT, "the server waits for the reload");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(ended.success());
}

#[test]
fn guests_of_the_command_line_have_routes_and_wrong_usage_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    parrot(dir.path(), "one.wasm", "one");
    let guest = dir.path().join("one.wasm");
    let routed = format!("/a={}", guest.display());
    let serving = RunningServer::begin(&[&routed, "--max-body", "1"]);
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
#[cfg(linux_guests)]
fn a_linux_program_answers_each_request_from_the_state_in_which_it_first_waited() {
    let sed = ["--linux", "sed", "--", "-u", "="];
    // The tests of Linux programs report the host's missing features.
    let run = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["run", "--input", "x"])
        .args(sed)
        .output()
        .unwrap();
    if !run.status.success() {
        println!("SKIPPED: {}", String::from_utf8_lossy(&run.stderr).trim());
        return;
    }
    let serving = RunningServer::begin(&sed);
    for line in ["one", "two", "three"] {
        let mut stream = TcpStream::connect(&serving.addr).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        let length = line.len() + 1;
        let head = "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length";
        write!(stream, "{head}: {length}\r\n\r\n{line}\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with(&format!("\r\n\r\n1\n{line}\n")), "{answer}");
    }
}

/// An HTTP server that remembers its requests, and reports their number.
#[cfg(linux_guests)]
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
#[cfg(linux_guests)]
fn a_linux_server_is_asked_through_its_port_and_forgets_each_time() {
    let ask = "import sys; print(sys.executable); print(sys.base_prefix)";
    let Ok(python) = Command::new("python3").args(["-c", ask]).output() else {
        println!("SKIPPED: no python3");
        return;
    };
    let said = String::from_utf8_lossy(&python.stdout).into_owned();
    let Some((python, prefix)) = said.trim().split_once('\n') else {
        println!("SKIPPED: python3 does not report its path");
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
    // Without a request there is no answer, and that is reported.
    for (input, said) in [(None, true), (Some("GET / HTTP/1.0\r\n\r\n"), false)] {
        let mut run = Command::new(env!("CARGO_BIN_EXE_afresh"));
        run.args(["run", "--timeout", "60000"])
            .args(input.map(|input| ["--input", input]).iter().flatten());
        let output = run.args(guest).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(error.contains("listens on a port, and the request is empty"), said, "{error}");
    }
    let serving = RunningServer::begin(&guest);
    for path in ["/one", "/two?x=y", "/three"] {
        let answer = serving.ask(path);
        assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
        assert!(answer.to_ascii_lowercase().contains("\r\nx-asked: 1\r\n"), "{answer}");
        assert!(answer.ends_with(&format!("\r\n\r\n{path}")), "{answer}");
    }
}

/// A collector of traces that hands on each request, head and body.
#[cfg(feature = "otel")]
fn collector() -> (String, std::sync::mpsc::Receiver<(String, serde_json::Value)>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let from = head.len();
                if stream.read_line(&mut head).unwrap() == 0 || head.ends_with("\r\n\r\n") {
                    break;
                }
                let line = head[from..].to_ascii_lowercase();
                if let Some(said) = line.strip_prefix("content-length:") {
                    length = said.trim().parse().unwrap();
                }
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).unwrap();
            let body = serde_json::from_slice(&body).expect("the body is JSON");
            // Before the answer: the server may end once it has that.
            if sender.send((head.to_ascii_lowercase(), body)).is_err() {
                return;
            }
            let said = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
            stream.get_mut().write_all(said).unwrap();
        }
    });
    (url, receiver)
}

/// A text field of `hex` hexadecimal characters, or of any number of decimal ones.
#[cfg(feature = "otel")]
fn digits(json: &serde_json::Value, field: &str, hex: Option<usize>) -> String {
    let text = json[field].as_str().unwrap_or_else(|| panic!("{field} of {json} is not text"));
    let fits = match hex {
        Some(length) => {
            let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
            text.len() == length && text.bytes().all(hex)
        }
        None => text.bytes().all(|b| b.is_ascii_digit()),
    };
    assert!(fits, "{field} of {json}");
    text.to_owned()
}

/// The value of an attribute, as text; its type must be `kind`.
#[cfg(feature = "otel")]
fn attribute(json: &serde_json::Value, name: &str, kind: &str) -> Option<String> {
    let all = json["attributes"].as_array().unwrap();
    let found = all.iter().find(|attribute| attribute["key"] == name)?;
    Some(found["value"][kind].as_str().unwrap_or_else(|| panic!("{found}")).to_owned())
}

#[test]
#[cfg(feature = "otel")]
fn traces_go_to_a_collector_as_the_specification_has_them() {
    let dir = tempfile::tempdir().unwrap();
    parrot(dir.path(), "one.wasm", "one");
    let guest = format!("/a={}", dir.path().join("one.wasm").display());
    let (url, collected) = collector();
    let mut serving = RunningServer::begin_as(&[&guest], |command| {
        command
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", url)
            .env("OTEL_EXPORTER_OTLP_HEADERS", "x-key=open%20sesame")
            .env("OTEL_SERVICE_NAME", "shop")
            .env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test");
    });
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let lines = format!(
        "traceparent: 00-{trace}-00f067aa0ba902b7-01\r\ntracestate: a=b\r\nx-request-id: mine-1\r\n"
    );
    assert!(serving.ask_with("/a/b?key=sesame", &lines).ends_with("one"));
    assert!(serving.ask("/b").starts_with("HTTP/1.1 404"));
    assert!(serving.ask("/metrics").contains("afresh_spans_dropped_total{reason=\"full\"} 0"));
    serving.signal(Signal::TERM);
    assert!(serving.child.wait().unwrap().success());

    let mut spans = Vec::new();
    while let Ok((head, body)) = collected.try_recv() {
        assert!(head.starts_with("post /v1/traces http/1.1"), "{head}");
        assert!(head.contains("content-type: application/json"), "{head}");
        assert!(head.contains("x-key: open sesame"), "{head}");
        assert!(!body.to_string().contains("sesame"), "{body}");
        let [of] = &body["resourceSpans"].as_array().unwrap()[..] else { panic!("{body}") };
        let resource = &of["resource"];
        assert_eq!(attribute(resource, "service.name", "stringValue").unwrap(), "shop");
        let place = "deployment.environment.name";
        assert_eq!(attribute(resource, place, "stringValue").unwrap(), "test");
        let [scope] = &of["scopeSpans"].as_array().unwrap()[..] else { panic!("{body}") };
        spans.extend(scope["spans"].as_array().unwrap().iter().cloned());
    }
    let known = [
        "traceId",
        "spanId",
        "parentSpanId",
        "traceState",
        "flags",
        "name",
        "kind",
        "startTimeUnixNano",
        "endTimeUnixNano",
        "attributes",
        "events",
        "status",
    ];
    for span in &spans {
        for field in span.as_object().unwrap().keys() {
            assert!(known.contains(&field.as_str()), "{field}");
        }
        digits(span, "traceId", Some(32));
        digits(span, "spanId", Some(16));
        let nanoseconds = |field| digits(span, field, None).parse::<u64>().unwrap();
        let (start, end) = (nanoseconds("startTimeUnixNano"), nanoseconds("endTimeUnixNano"));
        assert!(start <= end && start > 1_700_000_000_000_000_000, "{span}");
        assert!(span["flags"].is_u64() && span["status"]["code"].is_u64(), "{span}");
    }
    let named = |name: &str| {
        let found = spans.iter().find(|span| span["name"] == name);
        found.unwrap_or_else(|| panic!("no span {name}: {spans:?}"))
    };
    let asked = named("GET /a");
    assert_eq!((asked["traceId"].as_str(), asked["kind"].as_u64()), (Some(trace), Some(2)));
    assert_eq!(asked["parentSpanId"], "00f067aa0ba902b7");
    assert_eq!((&asked["traceState"], asked["flags"].as_u64()), (&"a=b".into(), Some(0x301)));
    for (name, kind, value) in [
        ("request.id", "stringValue", "mine-1"),
        ("http.request.method", "stringValue", "GET"),
        ("http.route", "stringValue", "/a"),
        ("url.path", "stringValue", "/a/b"),
        ("http.response.status_code", "intValue", "200"),
    ] {
        assert_eq!(attribute(asked, name, kind).as_deref(), Some(value), "{name}");
    }
    assert_eq!(attribute(asked, "traceparent", "stringValue"), None);
    let call = named("call");
    assert_eq!((call["traceId"].as_str(), call["kind"].as_u64()), (Some(trace), Some(1)));
    assert_eq!(call["parentSpanId"], asked["spanId"]);
    // A request that came with no trace begins one.
    let lost = spans.iter().find(|span| {
        let status = attribute(span, "http.response.status_code", "intValue");
        status.as_deref() == Some("404")
    });
    let lost = lost.expect("every request has a span");
    assert!(lost["traceId"] != trace && lost.get("parentSpanId").is_none(), "{lost}");
}

#[test]
#[cfg(feature = "otel")]
fn a_collector_that_is_away_is_said_once_and_a_wrong_setting_is_named() {
    let dir = tempfile::tempdir().unwrap();
    parrot(dir.path(), "one.wasm", "one");
    let guest = dir.path().join("one.wasm");
    let errors = dir.path().join("errors");
    let mut serving = RunningServer::begin_as(&[guest.to_str().unwrap()], |command| {
        command
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:sesame@127.0.0.1:1")
            .env("OTEL_BSP_SCHEDULE_DELAY", "1")
            .env("OTEL_BSP_MAX_QUEUE_SIZE", "4")
            .stderr(std::fs::File::create(&errors).unwrap());
    });
    let begun = Instant::now();
    let full = |text: &str| {
        let line = text.lines().find(|line| line.contains("dropped_total{reason=\"full\"}"));
        line.is_some_and(|line| !line.ends_with(" 0"))
    };
    while !full(&serving.ask("/metrics")) {
        assert!(serving.ask("/").ends_with("one"));
        assert!(begun.elapsed() < TEST_TIMEOUT, "nothing was ever dropped");
    }
    serving.signal(Signal::TERM);
    assert!(serving.child.wait().unwrap().success());
    let said = std::fs::read_to_string(&errors).unwrap();
    assert_eq!(said.matches("traces are not accepted").count(), 1, "{said}");
    assert!(!said.contains("sesame"), "{said}");

    let output = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["serve", "--addr", "127.0.0.1:0", guest.to_str().unwrap()])
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", "sesame")
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("OTEL_EXPORTER_OTLP_ENDPOINT") && !error.contains("sesame"), "{error}");
}

#[test]
fn a_check_lists_every_fault_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    parrot(dir.path(), "one.wasm", "one");
    let file = dir.path().join("serve.toml");
    let check = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        let output = command.args(["serve", "--check"]).arg(&file).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, said) = check("[[guest]]\nguest = \"one.wasm\"\n");
    assert!(code == Some(0) && said.ends_with("no faults\n"), "{said}");
    let two =
        "[[guest]]\nguest = \"one.wasm\"\nroute = \"one\"\n[[guest]]\n  guest = \"two.wasm\"\n";
    let (code, said) = check(two);
    assert_eq!((code, said.lines().count()), (Some(1), 2), "{said}");
    assert!(said.contains("serve.toml:3:1: `one` is not a route"), "{said}");
    assert!(said.contains("serve.toml:5:3: the guest"), "{said}");
    let (code, said) = check("grace = \"1h\"\n");
    assert!(code == Some(1) && said.contains("serve.toml:1:9: "), "{said}");
}
