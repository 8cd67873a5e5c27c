//! Servers: a request goes in through a connection of its own, and each finds the server as it was warmed.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use crate::common;

use std::process::Command;
use std::time::Duration;

use afresh_linux::{Frozen, Instance, Program, Warm};
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

/// Each call finds the server as it was; a line of calls finds what the last left; a thawed one is the same.
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

    let mut line = Branch::<Instance>::sow(&Tree::new(), warm.home(), warm.state());
    assert_eq!(body(&line.guest_mut().unwrap().call(GET).unwrap()), one);
    let served = line.snapshot().unwrap();
    let mut fork = line.fork(served).unwrap();
    assert_eq!(body(&line.guest_mut().unwrap().call(GET).unwrap()), two);
    assert_eq!(body(&fork.guest_mut().unwrap().call(GET).unwrap()), two);
    line.restore(served).unwrap();
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
