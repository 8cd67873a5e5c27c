//! Real servers on loopback: an S3 gateway, and a proxy that can drop traffic.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tempfile::TempDir;

use super::listening::listens;
use super::nats_server::{files_below, free_address, program, with_us};
use super::samples::kib_below;

/// Far longer than anything takes on a busy host.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// The store of a fleet: an S3 server if available, else a directory.
pub(crate) struct FleetStore {
    child: Option<Child>,
    address: Option<SocketAddr>,
    dir: TempDir,
}

impl Drop for FleetStore {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            child.wait().unwrap();
        }
    }
}

impl FleetStore {
    pub(crate) fn start() -> Self {
        let Some(program) = program("AFRESH_TEST_VERSITYGW") else {
            return Self { child: None, address: None, dir: tempfile::tempdir().unwrap() };
        };
        for _ in 0..5 {
            let (dir, address) = (tempfile::tempdir().unwrap(), free_address());
            let data = dir.path().join("data");
            fs::create_dir_all(data.join("bucket")).unwrap();
            let mut command = Command::new(&program);
            command
                .args(["--access", "afresh-test", "--secret", "not-a-secret", "--port"])
                .arg(address.to_string())
                .args(["--quiet", "--keep-alive", "posix"])
                .arg(&data)
                .current_dir(dir.path())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(fs::File::create(dir.path().join("stderr")).unwrap());
            let mut child = with_us(&mut command).spawn().unwrap();
            if listens(&mut child, address, TEST_TIMEOUT) {
                return Self { child: Some(child), address: Some(address), dir };
            }
        }
        panic!("the S3 server does not start");
    }

    /// Makes everything in it older than any grace.
    pub(crate) fn age(&self) {
        let long_ago = std::time::SystemTime::now() - Duration::from_secs(72 * 3600);
        let place = if self.address.is_some() { "data" } else { "shared" };
        for file in files_below(&self.dir.path().join(place)) {
            let file = fs::File::options().append(true).open(file).unwrap();
            file.set_modified(long_ago).unwrap();
        }
    }

    /// The files of its objects.
    pub(crate) fn names(&self) -> std::collections::BTreeSet<std::path::PathBuf> {
        let place = if self.address.is_some() { "data/bucket" } else { "shared" };
        files_below(&self.dir.path().join(place)).into_iter().collect()
    }

    /// KiB of its objects.
    pub(crate) fn kib(&self) -> u64 {
        let place = if self.address.is_some() { "data" } else { "shared" };
        kib_below(&self.dir.path().join(place))
    }

    /// The S3 server, if it is used.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Passes a host the address.
    pub(crate) fn tell(&self, command: &mut Command) {
        self.name(command.arg("--store"));
    }

    /// Adds its name and its address.
    pub(crate) fn name(&self, command: &mut Command) {
        let Some(address) = self.address else {
            command.arg(format!("file://{}", self.dir.path().join("shared").display()));
            return;
        };
        command
            .arg("s3://bucket/fleet")
            .env("AWS_ENDPOINT", format!("http://{address}"))
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_ACCESS_KEY_ID", "afresh-test")
            .env("AWS_SECRET_ACCESS_KEY", "not-a-secret")
            .env("AWS_REGION", "us-east-1");
    }
}

/// Passes connections on, or swallows the bytes of one direction or of both: a network that drops
/// packets.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    swallows: Arc<LostDirections>,
}

/// The directions in which bytes are lost.
#[derive(Default)]
struct LostDirections {
    requests: AtomicBool,
    answers: AtomicBool,
}

impl LostDirections {
    fn any(&self) -> bool {
        self.requests.load(Ordering::SeqCst) || self.answers.load(Ordering::SeqCst)
    }
}

impl Proxy {
    pub(crate) fn before(server: SocketAddr) -> Self {
        Self::at("127.0.0.1", server)
    }

    /// As [`Proxy::before`], at this address of the machine.
    pub(crate) fn at(address: &str, server: SocketAddr) -> Self {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let swallows = Arc::new(LostDirections::default());
        let shared = swallows.clone();
        // Its threads end with the test.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = shared.clone();
                std::thread::spawn(move || {
                    let Ok(server) = TcpStream::connect(server) else { return };
                    let (one, two) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                    let there = shared.clone();
                    std::thread::spawn(move || pass(one, server, &there, &there.requests));
                    pass(two, client, &shared, &shared.answers);
                });
            }
        });
        Self { address, swallows }
    }

    pub(crate) fn swallow(&self, swallows: bool) {
        self.swallow_requests(swallows);
        self.swallow_answers(swallows);
    }

    /// Loses the bytes towards the server.
    pub(crate) fn swallow_requests(&self, swallows: bool) {
        self.swallows.requests.store(swallows, Ordering::SeqCst);
    }

    /// Loses the bytes of the server: it does its work, and its client learns nothing.
    pub(crate) fn swallow_answers(&self, swallows: bool) {
        self.swallows.answers.store(swallows, Ordering::SeqCst);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, all: &LostDirections, own: &AtomicBool) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        // Dropped data stays lost, as on a connection that was cut for long.
        if own.load(Ordering::SeqCst) {
            while all.any() {
                std::thread::sleep(Duration::from_millis(10));
            }
            break;
        }
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
    let _ = from.shutdown(std::net::Shutdown::Both);
}
