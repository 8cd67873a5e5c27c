//! A server that stops and returns: guests wait for its pages, and continue.
//!
//! The server is a second process of this program, which serves the files of a store by the S3 or
//! OCI registry protocol.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{PAGE, options, page_of};
use afresh_pager::{LazyImage, Options, SnapshotSource};
use afresh_store::remote::{Remote, RetryPolicy};
use afresh_store::{MemoryPages, Store};
use rustix::process::{Signal, set_parent_process_death_signal};

/// Set in the server: address, directory, and how many requests it refuses first.
const SERVE: &str = "AFRESH_OUTAGE_SERVE";
const PAGES: usize = 600;
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// The main function of the server. Does nothing among the tests.
#[test]
fn serve() {
    let Ok(told) = std::env::var(SERVE) else { return };
    let (address, rest) = told.split_once(' ').unwrap();
    let (busy, dir) = rest.split_once(' ').unwrap();
    let busy = Arc::new(std::sync::atomic::AtomicI64::new(busy.parse().unwrap()));
    let address: SocketAddr = address.parse().unwrap();
    let end = Instant::now() + TEST_TIMEOUT;
    // Connections of the server before may be lingering.
    let listener = loop {
        match TcpListener::bind(address) {
            Ok(listener) => break listener,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    for client in listener.incoming().flatten() {
        let (dir, busy) = (PathBuf::from(dir), busy.clone());
        std::thread::spawn(move || while answer(&client, &dir, &busy).is_some() {});
    }
}

/// Answers one request; `None` when the client has disconnected.
fn answer(mut client: &TcpStream, dir: &Path, busy: &std::sync::atomic::AtomicI64) -> Option<()> {
    let mut reader = BufReader::new(client);
    let (mut request, mut range, mut line) = (String::new(), None, String::new());
    reader.read_line(&mut request).ok().filter(|n| *n > 0)?;
    loop {
        line.clear();
        reader
            .read_line(&mut line)
            .ok()
            .filter(|n| *n > 2)
            .or_else(|| (line == "\r\n").then_some(0))?;
        if line == "\r\n" {
            break;
        }
        if let Some(bytes) = line.to_lowercase().strip_prefix("range: bytes=") {
            let (from, to) = bytes.trim().split_once('-')?;
            range = Some(from.parse::<usize>().ok()?..to.parse::<usize>().ok()? + 1);
        }
    }
    let mut say = |head: String, body: &[u8]| {
        let length = body.len();
        let head = format!("HTTP/1.1 {head}Content-Length: {length}\r\n\r\n");
        let body = if request.starts_with("HEAD") { &[][..] } else { body };
        client.write_all(&[head.as_bytes(), body].concat()).ok()
    };
    if busy.fetch_sub(1, std::sync::atomic::Ordering::Relaxed) > 0 {
        return say("503 Service Unavailable\r\nRetry-After: 1\r\n".to_owned(), b"");
    }
    // `/bucket/warm/index.json`, `/bucket/warm/blobs/sha256/…`, `/v2/warm/blobs/sha256:…`,
    // `/v2/warm/manifests/a`.
    let path = request.split_whitespace().nth(1)?.split('?').next()?;
    let name = path.split_once("/warm/")?.1;
    let file = match name.split_once("sha256:").or_else(|| name.split_once("sha256/")) {
        Some((_, hex)) => dir.join("blobs/sha256").join(hex),
        None if name.starts_with("manifests/") => {
            let id = Store::open(dir).ok()?.resolve("a").ok()?;
            dir.join("blobs/sha256").join(id.hex())
        }
        None => dir.join(name),
    };
    let Ok(bytes) = fs::read(file) else { return say("404 Not Found\r\n".to_owned(), b"") };
    let stamp = "ETag: \"1\"\r\nLast-Modified: Sat, 01 Jan 2000 00:00:00 GMT\r\n";
    match range {
        None => say(format!("200 OK\r\n{stamp}"), &bytes),
        Some(range) => {
            let (from, to) = (range.start, range.end.min(bytes.len()));
            let of = format!("Content-Range: bytes {from}-{}/{}\r\n", to - 1, bytes.len());
            say(format!("206 Partial Content\r\n{stamp}{of}"), bytes.get(from..to)?)
        }
    }
}

/// A server process; ends with the test.
struct Server {
    child: Child,
    address: SocketAddr,
    dir: PathBuf,
}

impl Server {
    fn start(dir: &Path) -> Self {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let child = spawn(address, dir, 0);
        let server = Self { child, address, dir: dir.to_owned() };
        server.answers();
        server
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Starts it again; it refuses `busy` requests before it serves.
    fn start_again(&mut self, busy: usize) {
        self.child = spawn(self.address, &self.dir, busy);
        self.answers();
    }

    fn answers(&self) {
        let end = Instant::now() + TEST_TIMEOUT;
        while TcpStream::connect(self.address).is_err() {
            assert!(Instant::now() < end, "the server does not start");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The remotes that the server plays.
    fn remotes(&self, retry: RetryPolicy) -> Vec<Remote> {
        let endpoint = format!("http://{}", self.address);
        let s3 = [
            ("aws_endpoint", endpoint.as_str()),
            ("aws_access_key_id", "a"),
            ("aws_secret_access_key", "b"),
            ("aws_region", "us-east-1"),
        ];
        vec![
            Remote::open_with("s3://bucket/warm", retry, &s3).unwrap(),
            Remote::open(&format!("oci://{}/warm", self.address), retry).unwrap(),
        ]
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(address: SocketAddr, dir: &Path, busy: usize) -> Child {
    let mut command = afresh_sys::test_command("outage::serve");
    command
        .env(SERVE, format!("{address} {busy} {}", dir.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    // SAFETY: between fork and exec the closure makes one system call, and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            // Should the test be killed, the server goes with it.
            Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
        });
    }
    command.spawn().unwrap()
}

/// A store with a snapshot `a`, and its memory.
fn saved(dir: &Path) -> Vec<u8> {
    let memory: Vec<u8> = (0..PAGES as u32).flat_map(page_of).collect();
    let store = Store::create(dir).unwrap();
    store.save("a", &MemoryPages(memory.clone()), &options()).unwrap();
    memory
}

#[test]
fn a_guest_lives_once_its_server_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let memory = saved(dir.path());
    let mut server = Server::start(dir.path());
    for remote in server.remotes(RetryPolicy::default()) {
        let snapshot = remote.load("a").unwrap();
        let options = Options { background: false, ..Options::default() };
        let image = LazyImage::start(Arc::new(SnapshotSource::new(snapshot)), &options).unwrap();
        let mut page = vec![0; PAGE];
        let check = |n: usize, page: &mut Vec<u8>| {
            let run = afresh_sys::PageRange::new(n, 1);
            image.image().resolve(run).unwrap();
            image.image().read(n * PAGE, page);
            assert!(*page == memory[n * PAGE..][..PAGE], "page {n}");
        };
        check(3, &mut page);
        server.kill();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let mut page = vec![0; PAGE];
                check(500, &mut page);
            });
            // Four times as long as all of the attempts that are made for anything else.
            std::thread::sleep(Duration::from_millis(1500));
            assert!(!waiting.is_finished(), "nobody could have answered {remote:?}");
            server.start_again(2);
            waiting.join().unwrap();
        });
        image.wait(TEST_TIMEOUT).unwrap();
        assert!(image.image().is_complete());
    }
}

#[test]
fn a_server_that_stays_away_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let mut server = Server::start(dir.path());
    let retry = RetryPolicy { outage: Duration::from_millis(700), ..RetryPolicy::default() };
    let opened: Vec<_> =
        server.remotes(retry).iter().map(|remote| remote.load("a").unwrap()).collect();
    server.kill();
    for snapshot in opened {
        let start = Instant::now();
        let error = snapshot.read(500, &mut vec![0; PAGE]).unwrap_err().to_string();
        assert!(error.contains("refused"), "{error}");
        assert!(start.elapsed() < TEST_TIMEOUT);
    }
}
