//! Servers: a request arrives on a new connection, and each finds the server as it was warmed.

use crate::common;

use std::process::Command;
use std::time::Duration;

use afresh_linux::{Frozen, Instance, OutputStream, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_snapshot::{Branch, Tree};
use afresh_store::Store;

const GET: &[u8] = b"GET /there HTTP/1.1\r\nHost: localhost\r\n\r\n";
const LIMIT: Duration = Duration::from_secs(200);

fn limited(program: Program) -> Program {
    program.time_limit(LIMIT).start_limit(LIMIT)
}

/// The body of an answer, whose first line must be that of a success.
fn body(answer: &[u8]) -> String {
    let text = String::from_utf8_lossy(answer);
    assert!(text.starts_with("HTTP/1."), "{text}");
    assert_eq!(text.get(9..12), Some("200"), "{text}");
    text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap()
}

/// Each call starts from the server's warm state; in a row of calls each starts from the state of
/// the last; a thawed guest behaves the same.
fn serves_afresh(program: &Program, warm: &Warm, one: &str, two: &str) {
    let mut instance = warm.instance();
    for round in 0..5 {
        assert_eq!(body(&instance.call_pristine(GET).unwrap()), one, "round {round}");
        instance.verify().unwrap();
    }
    instance.reset();
    assert_eq!(body(&instance.call(GET).unwrap()), one);
    assert_eq!(body(&instance.call(GET).unwrap()), two);
    assert_eq!(instance.stats().processes, 1);

    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    assert_eq!(body(&line.guest_mut().unwrap().call(GET).unwrap()), one);
    let served = line.checkpoint().unwrap();
    let mut fork = line.fork(served).unwrap();
    assert_eq!(body(&line.guest_mut().unwrap().call(GET).unwrap()), two);
    assert_eq!(body(&fork.guest_mut().unwrap().call(GET).unwrap()), two);
    line.rollback(served).unwrap();
    assert_eq!(body(&line.guest_mut().unwrap().call(GET).unwrap()), two);

    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    warm.freeze().unwrap().save(&store, "warm", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("warm").unwrap(), &Options::default()).unwrap();
    let mut thawed = Warm::thaw(&frozen, program).unwrap().instance();
    for _ in 0..2 {
        assert_eq!(body(&thawed.call_pristine(GET).unwrap()), one);
        thawed.verify().unwrap();
    }
}

const THREADING: &str = r#"
import http.server, time
served = []
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        served.append(self.path)
        time.sleep(0.002)
        body = f"{len(served)} {self.path}".encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Answer).serve_forever()
"#;

#[test]
fn a_threading_python_server_serves_each_request_as_its_first() {
    let Some(program) = common::python() else { return };
    let program = limited(program.arg("/app.py").file("/app.py", THREADING)).request(GET);
    let Some(warm) = common::here(program.warm()) else { return };
    serves_afresh(&program, &warm, "2 /there", "3 /there");
}

const ASYNCIO: &str = r#"
import asyncio
served = 0
async def answer(reader, writer):
    global served
    path = (await reader.readline()).split()[1]
    while (await reader.readline()).strip(): pass
    served += 1
    await asyncio.sleep(0.003)
    body = b"%d %s" % (served, path)
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % len(body))
    await writer.drain(); await asyncio.sleep(0.001)
    writer.write(body + b"\r\n0\r\n\r\n"); await writer.drain(); writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 8000)
    await server.serve_forever()
asyncio.run(main())
"#;

#[test]
fn an_asyncio_server_serves_each_request_as_its_first() {
    let Some(program) = common::python() else { return };
    let program = limited(program.arg("/app.py").file("/app.py", ASYNCIO));
    let Some(warm) = common::here(program.warm()) else { return };
    serves_afresh(&program, &warm, "8\r\n1 /there\r\n0\r\n\r\n", "8\r\n2 /there\r\n0\r\n\r\n");
}

const PRINTING: &str = r#"
import asyncio, sys
async def answer(reader, writer):
    print("output", flush=True)
    print("error", file=sys.stderr, flush=True)
    while (await reader.readline()).strip(): pass
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
    await writer.drain(); writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 8000)
    await server.serve_forever()
asyncio.run(main())
"#;

/// The answer is what the server writes to the connection. Its standard output is logged, and so
/// are its errors.
#[test]
fn the_output_of_a_server_is_logged_and_is_not_part_of_its_answer() {
    let Some(program) = common::python() else { return };
    let program = limited(program.arg("/app.py").file("/app.py", PRINTING));
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    assert_eq!(body(&instance.call_pristine(GET).unwrap()), "hi");
    let (sender, receiver) = std::sync::mpsc::channel();
    instance.reset();
    let log = move |channel, piece: &[u8]| sender.send((channel, piece.to_vec())).unwrap();
    assert_eq!(body(&instance.call_logged(GET, log).unwrap()), "hi");
    let logged: Vec<_> = receiver.iter().collect();
    let of = |channel| {
        let pieces = logged.iter().filter(|(from, _)| *from == channel);
        pieces.flat_map(|(_, piece)| piece.clone()).collect::<Vec<u8>>()
    };
    assert_eq!(of(OutputStream::Output), b"output\n");
    assert_eq!(of(OutputStream::Error), b"error\n");
    instance.verify().unwrap();
}

const NODE: &str = r#"
let served = 0;
require('http').createServer(async (request, response) => {
  served++;
  await new Promise(done => setTimeout(done, 2));
  require('crypto').randomBytes(16, () => response.end(`${served} ${request.url}`));
}).listen(3000);
"#;

#[test]
fn node_serves_each_request_as_its_first() {
    let path = "/usr/bin/node";
    match Command::new(path).arg("--version").output() {
        Ok(out) if out.status.success() => {}
        _ => {
            println!("SKIPPED: no {path}");
            return;
        }
    }
    let program = limited(Program::new(path).arg("/app.js").file("/app.js", NODE))
        .memory_limit(64 << 30)
        .request("GET /warm");
    let Some(warm) = common::here(program.warm()) else { return };
    serves_afresh(&program, &warm, "2 /there", "3 /there");
}

const ECHO: &str = r#"
import sys, socket, threading
listener = socket.create_server(("127.0.0.1", 8000))
def serve():
    while True:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(100_000):
                connection.sendall(data.upper())
threading.Thread(target=serve, daemon=True).start()
for line in sys.stdin: print("line", line, end="", flush=True)
"#;

#[test]
fn the_host_connects_to_listeners_during_calls() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", ECHO).request("warm\n");
    let Some(warm) = common::here(program.warm()) else { return };
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let guest = line.guest_mut().unwrap();
    assert_eq!(guest.dial(8001).unwrap(), None);
    let dialed = guest.dial(8000).unwrap().unwrap();
    let quiet = |_, _: &[u8]| true;
    // More than there is room for, both ways.
    let text = "hello ".repeat(50_000);
    let (mut sent, mut got) = (0, Vec::new());
    for _ in 0..100 {
        let through = guest.exchange(dialed, &text.as_bytes()[sent..], 10_000).unwrap();
        sent += through.taken;
        assert!(through.given.len() <= 10_000 && !through.ended);
        got.extend(through.given);
        guest.proceed(quiet).unwrap();
    }
    assert_eq!(sent, text.len());
    assert!(got == text.to_uppercase().as_bytes());
    // Calls continue at the same time, and a state with an open connection is kept.
    assert_eq!(guest.call(b"one\n").unwrap(), b"line one\n");
    guest.exchange(dialed, b"more", 0).unwrap();
    guest.proceed(quiet).unwrap();
    let open = line.checkpoint().unwrap();
    let mut fork = line.fork(open).unwrap();
    let guest = line.guest_mut().unwrap();
    assert_eq!(guest.exchange(dialed, b"", 100).unwrap().given, b"MORE");
    guest.hang_up(dialed, false).unwrap();
    guest.proceed(quiet).unwrap();
    assert!(guest.exchange(dialed, b"", 100).unwrap().ended);
    // A caller that continues from it elsewhere hangs up foreign connections, and the server is
    // free for the next.
    let guest = fork.guest_mut().unwrap();
    guest.close_other_connections(&[]).unwrap();
    let next = guest.dial(8000).unwrap().unwrap();
    guest.exchange(next, b"next", 0).unwrap();
    guest.proceed(quiet).unwrap();
    assert_eq!(guest.exchange(next, b"", 100).unwrap().given, b"NEXT");
    assert!(guest.exchange(dialed, b"lost", 100).unwrap().ended);
    guest.close_other_connections(&[next]).unwrap();
    assert_eq!(guest.call(b"two\n").unwrap(), b"line two\n");
    line.rollback(open).unwrap();
    assert_eq!(line.guest_mut().unwrap().exchange(dialed, b"", 100).unwrap().given, b"MORE");
}

const STARTS_A_SERVER: &str = r#"
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", 8000))
if os.fork() == 0:
    while True: server.accept()[0].sendall(b"served")
server.close()
time.sleep(0.3)
for line in sys.stdin:
    print(socket.create_connection(("127.0.0.1", 8000)).recv(9).decode(), line.strip(), flush=True)
"#;

#[test]
fn a_program_that_waits_for_its_own_server_is_called_by_its_input() {
    let Some(program) = common::python() else { return };
    let program = limited(program.arg("-c").arg(STARTS_A_SERVER));
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    for _ in 0..2 {
        assert_eq!(instance.call_pristine(b"one\n").unwrap(), b"served one\n");
    }
}
