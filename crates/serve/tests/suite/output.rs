//! Standard output and error of guests in the server's log.

use std::fmt::Debug;
use std::sync::{Mutex, OnceLock, PoisonError};

use afresh::wasm::Mode;
use afresh_serve::GuestConfig;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::common::{Running, TEST_TIMEOUT, built, client, config, run, scratch, serve, write};

/// A module that writes each request as a line to standard output, and as half a line to standard
/// error. It answers with the request. Its warm-up writes a line, too.
const PRINTER: &str = r#"(module
    (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
    (memory (export "memory") 3)
    (data (i32.const 16) "\nno warming\n")
    (func $print (param $fd i32) (param $at i32) (param $len i32)
        (i32.store (i32.const 0) (local.get $at))
        (i32.store (i32.const 4) (local.get $len))
        (if (call $write (local.get $fd) (i32.const 0) (i32.const 1) (i32.const 8)) (then unreachable)))
    (func (export "warm") (call $print (i32.const 1) (i32.const 20) (i32.const 8)))
    (func (export "afresh_buffer") (param i32) (result i32) (i32.const 65536))
    (func (export "handle") (param $n i32) (result i64)
        (call $print (i32.const 1) (i32.const 65536) (local.get $n))
        (call $print (i32.const 1) (i32.const 16) (i32.const 1))
        (call $print (i32.const 2) (i32.const 17) (i32.const 3))
        (call $print (i32.const 2) (i32.const 65536) (local.get $n))
        (i64.or (i64.shl (i64.const 65536) (i64.const 32)) (i64.extend_i32_u (local.get $n)))))"#;

/// A line of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Line {
    guest: String,
    stream: String,
    request: String,
    message: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "guest" => value.clone_into(&mut self.guest),
            "stream" => value.clone_into(&mut self.stream),
            "request.id" => value.clone_into(&mut self.request),
            "message" => value.clone_into(&mut self.message),
            other => panic!("{other} = {value}"),
        }
    }
}

/// The lines of all guests of this process.
static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

struct Log;

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "afresh_serve::guest"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Logs from now on.
fn log() {
    static SET: OnceLock<()> = OnceLock::new();
    SET.get_or_init(|| tracing::subscriber::set_global_default(Log).unwrap());
}

/// The lines of a guest, in order: stream, request and message.
fn lines(guest: &str) -> Vec<(String, String, String)> {
    let all = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let own = all.iter().filter(|line| line.guest == guest).cloned();
    own.map(|line| (line.stream, line.request, line.message)).collect()
}

/// As [`lines`], once there are so many: a guest may end after its answer.
async fn wait_for_lines(guest: &str, count: usize) -> Vec<(String, String, String)> {
    let until = tokio::time::Instant::now() + TEST_TIMEOUT;
    loop {
        let found = lines(guest);
        if found.len() >= count || tokio::time::Instant::now() > until {
            return found;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

fn line(stream: &str, request: &str, message: &str) -> (String, String, String) {
    (stream.to_owned(), request.to_owned(), message.to_owned())
}

/// Sends a request with this ID and body, and returns the answer.
async fn ask(server: &Running, path: &str, id: &str, body: &str) -> String {
    let request = client().post(server.url(path)).header("x-request-id", id);
    let response = request.body(body.to_owned()).send().await.unwrap();
    assert_eq!(response.status().as_u16(), 200);
    response.text().await.unwrap()
}

#[test]
fn a_modules_output_is_logged_with_its_request() {
    log();
    let dir = scratch();
    run(async {
        for (mode, reuse) in [(Mode::Reset, 1), (Mode::Fresh, 1), (Mode::Fresh, 2)] {
            let mut guest = GuestConfig::new(write(dir.path(), "printer.wasm", PRINTER));
            guest.name = format!("printer {mode:?} {reuse}");
            guest.open = guest.open.warm(afresh::Call::text("warm", [] as [&str; 0]));
            guest.wasm.mode = mode;
            guest.max_instance_reuse_count = reuse;
            guest.idle_instance_timeout = TEST_TIMEOUT;
            let name = guest.name.clone();
            let server = serve(config([guest])).await;
            for (id, body) in [("one", "a"), ("two", "b"), ("three", "c")] {
                assert_eq!(ask(&server, "/", id, body).await, body);
            }
            let expected = [
                line("stdout", "", "warming"),
                line("stdout", "one", "a"),
                line("stderr", "one", "no a"),
                line("stdout", "two", "b"),
                line("stderr", "two", "no b"),
                line("stdout", "three", "c"),
                line("stderr", "three", "no c"),
            ];
            assert_eq!(lines(&name), expected, "{name}");
            server.end().await;
        }
    });
}

#[test]
fn a_module_that_writes_without_end_logs_no_more_than_its_limit() {
    log();
    let dir = scratch();
    run(async {
        let mut guest = GuestConfig::new(write(dir.path(), "printer.wasm", PRINTER));
        guest.name = "flood".to_owned();
        let server = serve(config([guest])).await;
        let body = "x".repeat(60_000);
        assert_eq!(ask(&server, "/", "one", &body).await, body);
        let found = lines("flood");
        let bytes: usize = found.iter().map(|(_, _, message)| message.len()).sum();
        assert!(bytes < (64 << 10) + 200 && found.len() < 20, "{bytes} bytes, {}", found.len());
        assert!(found.iter().all(|(_, _, message)| message.len() <= 4 << 10));
        assert!(found[found.len() - 1].2.contains("is not logged"), "{:?}", found[found.len() - 1]);
        // The limit begins anew with the next request.
        assert_eq!(ask(&server, "/", "two", "y").await, "y");
        let found = lines("flood");
        assert_eq!(
            found[found.len() - 2..],
            [line("stdout", "two", "y"), line("stderr", "two", "no y")]
        );
        server.end().await;
    });
}

#[test]
fn the_output_of_a_component_is_logged_with_its_request() {
    log();
    let Some(file) = built("http.wasm") else { return };
    run(async {
        let mut guest = GuestConfig::new(file);
        guest.name = "handler".to_owned();
        let server = serve(config([guest])).await;
        assert_eq!(ask(&server, "/print?a%1bb", "one", "").await, "printed\n");
        let expected = [line("stdout", "one", "a%1bb"), line("stderr", "one", "no a%1bb")];
        assert_eq!(wait_for_lines("handler", 2).await, expected);
        server.end().await;
    });
}

/// A Linux program that this host has, or a line that says why not.
#[cfg(linux_guests)]
async fn serve_program(
    name: &str,
    program: &str,
    arguments: &'static [&'static str],
) -> Option<Running> {
    let paths = ["/usr/bin", "/bin", "/usr/local/bin"].map(|dir| format!("{dir}/{program}"));
    let Some(path) = paths.into_iter().find(|path| std::path::Path::new(path).exists()) else {
        println!("SKIPPED: no {program}");
        return None;
    };
    let mut guest = GuestConfig::new(path);
    guest.name = name.to_owned();
    guest.timeout = TEST_TIMEOUT;
    guest.open = guest.open.linux(move |program| {
        let program = program.time_limit(TEST_TIMEOUT).start_limit(TEST_TIMEOUT);
        arguments.iter().fold(program, |program, argument| program.arg(argument))
    });
    match afresh_serve::Server::bind(config([guest])).await {
        Ok(server) => {
            let (addr, admin, handle) = (server.addr(), server.admin(), server.handle());
            Some(Running { addr, admin, handle, task: tokio::spawn(server.run()) })
        }
        Err(error) => {
            let text = format!("{error:?}");
            assert!(text.contains("this host"), "{text}");
            println!("SKIPPED: {text}");
            None
        }
    }
}

#[cfg(linux_guests)]
#[test]
fn the_errors_of_a_linux_program_are_logged_and_its_output_is_the_answer() {
    const SCRIPT: &str = "while read line; do echo \"yes $line\"; echo \"no $line\" >&2; done";
    log();
    run(async {
        let Some(server) = serve_program("shell", "sh", &["-c", SCRIPT]).await else { return };
        for id in ["one", "two"] {
            assert_eq!(ask(&server, "/", id, "a\n").await, "yes a\n");
        }
        let expected = [line("stderr", "one", "no a"), line("stderr", "two", "no a")];
        assert_eq!(lines("shell"), expected);
        server.end().await;
    });
}

#[cfg(linux_guests)]
#[test]
fn the_output_of_a_linux_server_is_logged_and_is_not_part_of_its_answer() {
    const SERVER: &str = r#"
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        print("asked for", self.path, flush=True)
        self.send_response(200); self.send_header("Content-Length", "3"); self.end_headers(); self.wfile.write(b"yes")
        print("answered", flush=True)
    def log_message(self, form, *values): print(form % values, file=sys.stderr)
http.server.HTTPServer(("127.0.0.1", 8000), Answer).serve_forever()
"#;
    log();
    run(async {
        let Some(server) = serve_program("python", "python3", &["-c", SERVER]).await else {
            return;
        };
        assert_eq!(ask(&server, "/there", "one", "").await, "yes");
        let found = lines("python");
        assert!(found.contains(&line("stdout", "one", "asked for /there")), "{found:?}");
        assert!(
            found.contains(&line("stderr", "one", "\"POST /there HTTP/1.1\" 200 -")),
            "{found:?}"
        );
        server.end().await;
    });
}
