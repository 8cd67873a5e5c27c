//! Real servers on loopback: nats-server with a separate store directory, an S3 gateway, and a
//! proxy that can drop traffic.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};
use tempfile::TempDir;

use super::listening::listens;

/// Far longer than anything takes on a busy host.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Has a program end with this test, however that ends.
pub(crate) fn with_us(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec the closure makes one system call, and allocates nothing.
    unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?)) }
}

fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// A program that `cargo xtask test` could install, by its variable.
fn program(variable: &str) -> Option<std::ffi::OsString> {
    let program = std::env::var_os(variable);
    if program.is_none() {
        println!(
            "SKIPPED: {variable} does not name a server; `cargo xtask test` installs it where there is Go"
        );
    }
    program
}

/// All files below a directory.
fn files(dir: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// A nats-server.
pub(crate) struct Nats {
    child: Child,
    pub(crate) address: SocketAddr,
    dir: TempDir,
    /// The arguments that make it part of a cluster.
    cluster: Vec<String>,
    /// The directory of its configuration.
    file: Option<TempDir>,
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Nats {
    pub(crate) fn start() -> Option<Self> {
        program("AFRESH_TEST_NATS_SERVER")?;
        (0..5)
            .find_map(|_| Self::start_with(Vec::new()))
            .or_else(|| panic!("no nats-server starts"))
    }

    /// Starts a server with a configuration file, whose text may name the directory `DIR`.
    pub(crate) fn start_with_file(text: &str) -> Option<Self> {
        program("AFRESH_TEST_NATS_SERVER")?;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nats.conf");
        fs::write(&file, text.replace("DIR", &dir.path().display().to_string())).unwrap();
        let arguments = vec!["-c".to_owned(), file.display().to_string()];
        let start = |_| Self::start_in(tempfile::tempdir().unwrap(), arguments.clone());
        let mut server = (0..5).find_map(start).expect("a nats-server starts with the file");
        server.file = Some(dir);
        Some(server)
    }

    /// Whether any file of its store contains these bytes.
    pub(crate) fn stores(&self, bytes: &[u8]) -> bool {
        files(&self.dir.path().join("store")).iter().any(|file| {
            let content = fs::read(file).unwrap_or_default();
            content.windows(bytes.len()).any(|part| part == bytes)
        })
    }

    /// Starts a cluster of three servers. They do not advertise each other: a client reaches the
    /// addresses that it was given.
    pub(crate) fn start_cluster() -> Option<Vec<Self>> {
        program("AFRESH_TEST_NATS_SERVER")?;
        for _ in 0..5 {
            // Bound together, so that they differ.
            let bound: Vec<TcpListener> =
                (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
            let routes: Vec<String> =
                bound.iter().map(|one| format!("nats://{}", one.local_addr().unwrap())).collect();
            drop(bound);
            let member = |(number, own): (usize, &String)| {
                let name = format!("n{number}");
                let arguments = ["--name", &name, "--cluster_name", "tests", "--no_advertise"];
                let mut arguments = arguments.map(str::to_owned).to_vec();
                arguments.extend([
                    "--cluster".into(),
                    own.clone(),
                    "--routes".into(),
                    routes.join(","),
                ]);
                Self::start_with(arguments)
            };
            let servers: Option<Vec<Self>> = routes.iter().enumerate().map(member).collect();
            if servers.is_some() {
                return servers;
            }
        }
        panic!("no cluster of nats-server starts");
    }

    fn start_with(cluster: Vec<String>) -> Option<Self> {
        Self::start_in(tempfile::tempdir().unwrap(), cluster)
    }

    fn start_in(dir: TempDir, cluster: Vec<String>) -> Option<Self> {
        let address = free();
        let mut child = Self::spawn(address, dir.path(), &cluster);
        let started = listens(&mut child, address, TEST_TIMEOUT);
        let server = Self { child, address, dir, cluster, file: None };
        started.then_some(server)
    }

    fn spawn(address: SocketAddr, dir: &Path, cluster: &[String]) -> Child {
        let mut command = Command::new(program("AFRESH_TEST_NATS_SERVER").unwrap());
        command
            .args(["-a", "127.0.0.1", "-p", &address.port().to_string(), "-js", "-sd"])
            .arg(dir.join("store"))
            .args(cluster)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.join("stderr")).unwrap());
        with_us(&mut command).spawn().unwrap()
    }

    /// Ends it as a crash would.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Starts it again with its store directory.
    pub(crate) fn start_again(&mut self) {
        self.child = Self::spawn(self.address, self.dir.path(), &self.cluster);
        assert!(listens(&mut self.child, self.address, TEST_TIMEOUT));
    }
}

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
            let (dir, address) = (tempfile::tempdir().unwrap(), free());
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
        for file in files(&self.dir.path().join(place)) {
            let file = fs::File::options().append(true).open(file).unwrap();
            file.set_modified(long_ago).unwrap();
        }
    }

    /// The files of its objects.
    pub(crate) fn names(&self) -> std::collections::BTreeSet<std::path::PathBuf> {
        let place = if self.address.is_some() { "data/bucket" } else { "shared" };
        files(&self.dir.path().join(place)).into_iter().collect()
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
