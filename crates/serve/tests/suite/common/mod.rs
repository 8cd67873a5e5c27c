//! A server for tests, guests for it, and a client that is controlled byte by byte.

#![allow(dead_code, reason = "without features some of it is unused")]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use afresh_serve::{Config, GuestConfig, Handle, Server};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// Far longer than anything takes on a busy host.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(300);

/// A module with the byte interface. It keeps a name; `warm` makes it "warm". A request is kept as
/// the name and answered with the name of before, so every pristine answer is `warm`; `!spin` never
/// returns, `!trap` traps, and `!grow` grows the memory by as much as it gets.
pub(crate) const KEEPER: &str = r#"(module
    (memory (export "memory") 3)
    (data (i32.const 16) "warm")
    (global $length (mut i32) (i32.const 0))
    (func (export "warm") (global.set $length (i32.const 4)))
    (func (export "afresh_buffer") (param i32) (result i32)
        (if (result i32) (i32.gt_u (local.get 0) (i32.const 60000))
            (then (i32.const 0)) (else (i32.const 65536))))
    (func (export "handle") (param $n i32) (result i64)
        (local $first i32) (local $answer i32)
        (local.set $first (i32.load (i32.const 65536)))
        (if (i32.eq (local.get $first) (i32.const 0x69707321)) (then (loop (br 0))))
        (if (i32.eq (local.get $first) (i32.const 0x61727421)) (then unreachable))
        (if (i32.eq (local.get $first) (i32.const 0x6f726721))
            (then (loop $more
                (i32.store8 (i32.sub (i32.mul (memory.size) (i32.const 65536)) (i32.const 1)) (i32.const 1))
                (br_if $more (i32.ne (memory.grow (i32.const 1)) (i32.const -1))))))
        (local.set $answer (global.get $length))
        (memory.copy (i32.const 131072) (i32.const 16) (global.get $length))
        (memory.copy (i32.const 16) (i32.const 65536) (local.get $n))
        (global.set $length (local.get $n))
        (i64.or (i64.shl (i64.const 131072) (i64.const 32)) (i64.extend_i32_u (local.get $answer)))))"#;

/// A module that answers every request with these words.
pub(crate) fn parrot(words: &str) -> String {
    format!(
        r#"(module
            (memory (export "memory") 2)
            (data (i32.const 16) "{words}")
            (func (export "afresh_buffer") (param i32) (result i32) (i32.const 65536))
            (func (export "handle") (param i32) (result i64)
                (i64.or (i64.shl (i64.const 16) (i64.const 32)) (i64.const {}))))"#,
        words.len()
    )
}

/// A directory for files of guests.
pub(crate) fn scratch() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// Writes a guest's file atomically, as an exchange of one should.
pub(crate) fn write(dir: &Path, name: &str, text: &str) -> String {
    let (path, part) = (dir.join(name), dir.join("part"));
    std::fs::write(&part, wat::parse_str(text).unwrap()).unwrap();
    std::fs::rename(part, &path).unwrap();
    path.to_str().unwrap().to_owned()
}

/// The keeper, warm, under `/`.
pub(crate) fn keeper(dir: &Path) -> GuestConfig {
    let mut guest = GuestConfig::new(write(dir, "keeper.wasm", KEEPER));
    guest.open = guest.open.warm(afresh::Call::text("warm", [] as [&str; 0]));
    guest.timeout = TEST_TIMEOUT;
    guest
}

/// A guest that `cargo xtask guests` builds.
pub(crate) fn built(name: &str) -> Option<String> {
    built_by(name, "guests")
}

/// A guest that this command of xtask builds.
pub(crate) fn built_by(name: &str, command: &str) -> Option<String> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/guests").join(name);
    if path.is_file() {
        return Some(path.to_str().unwrap().to_owned());
    }
    println!("SKIPPED: {} is not built; `cargo xtask {command}` builds it", path.display());
    None
}

/// A configuration with a free port.
pub(crate) fn config(guests: impl IntoIterator<Item = GuestConfig>) -> Config {
    let mut config = Config::default();
    config.addr.set_port(0);
    config.guests.extend(guests);
    config
}

/// A server that runs in a task.
pub(crate) struct Running {
    pub(crate) addr: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) handle: Handle,
    pub(crate) task: JoinHandle<bool>,
}

pub(crate) async fn serve(config: Config) -> Running {
    let server = Server::bind(config).await.unwrap();
    let (addr, admin, handle) = (server.addr(), server.admin(), server.handle());
    Running { addr, admin, handle, task: tokio::spawn(server.run()) }
}

impl Running {
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    /// The response of an operation of the server itself.
    pub(crate) fn operations(&self, path: &str) -> String {
        format!("http://{}{path}", self.admin)
    }

    /// Ends the server, which must be over soon.
    pub(crate) async fn end(self) {
        self.handle.shutdown();
        assert!(tokio::time::timeout(TEST_TIMEOUT, self.task).await.expect("it ends").unwrap());
    }
}

/// Runs a test, which must end by itself.
pub(crate) fn run(test: impl Future<Output = ()>) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime
        .block_on(async { tokio::time::timeout(TEST_TIMEOUT * 2, test).await.expect("it hangs") });
    runtime.shutdown_background();
}

pub(crate) fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().timeout(TEST_TIMEOUT).build().unwrap()
}

/// Status and text of an answer.
pub(crate) async fn post(
    client: &reqwest::Client,
    url: &str,
    body: impl Into<reqwest::Body>,
) -> (u16, String) {
    let response = client.post(url).body(body).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

pub(crate) async fn get(client: &reqwest::Client, url: &str) -> (u16, String) {
    let response = client.get(url).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

/// Sends bytes as they are, and reads until the other side closes.
pub(crate) async fn raw(addr: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    // A server that refuses may close before it has read all.
    let reading = stream.read_to_end(&mut answer);
    let _ = tokio::time::timeout(TEST_TIMEOUT, reading).await.expect("it closes");
    String::from_utf8_lossy(&answer).into_owned()
}
