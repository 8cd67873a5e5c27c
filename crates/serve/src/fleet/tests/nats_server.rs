//! A nats-server with JetStream on loopback, for the tests of this crate and of the command.
//!
//! Promises: it ends with the process of the test, however that ends, and it has the port that its
//! address names.

#![allow(dead_code, reason = "each of the two test binaries uses a part")]

use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};
use tempfile::TempDir;

use super::listening::listens;

/// Far longer than a server needs to start on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Starts, in case another process takes the port in between.
const MAX_STARTS: usize = 5;

/// Ends the program with this test, however that ends.
pub(crate) fn with_us(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec the closure makes one system call, and allocates nothing.
    unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?)) }
}

/// An address without a listener.
pub(crate) fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// A program that `cargo xtask test` could install, by its variable.
pub(crate) fn program(variable: &str) -> Option<OsString> {
    let program = std::env::var_os(variable);
    if program.is_none() {
        println!(
            "SKIPPED: {variable} does not name a server; `cargo xtask test` installs it where there is Go"
        );
    }
    program
}

/// All files below a directory.
pub(crate) fn files_below(dir: &Path) -> Vec<PathBuf> {
    // A directory can be removed meanwhile.
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

/// The server.
pub(crate) struct NatsServer {
    child: Child,
    pub(crate) address: SocketAddr,
    dir: TempDir,
    /// The arguments of a configuration file or of a cluster.
    arguments: Vec<OsString>,
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
    }
}

impl NatsServer {
    /// Starts a server; `None` where none is installed.
    pub(crate) fn start() -> Option<Self> {
        Self::start_with(None)
    }

    /// Starts a server with the text of a configuration file, in which `DIR` means the directory
    /// of the server.
    pub(crate) fn start_with(config: Option<&str>) -> Option<Self> {
        program("AFRESH_TEST_NATS_SERVER")?;
        let start = |_| {
            let dir = tempfile::tempdir().unwrap();
            let arguments = config.map(|text| {
                let file = dir.path().join("nats.conf");
                let text = text.replace("DIR", &dir.path().display().to_string());
                std::fs::write(&file, text).unwrap();
                vec!["-c".into(), file.into()]
            });
            Self::start_in(dir, arguments.unwrap_or_default())
        };
        (0..MAX_STARTS).find_map(start).or_else(|| panic!("no nats-server starts"))
    }

    /// Starts a cluster of three servers. They do not advertise each other: a client reaches the
    /// addresses that it was given.
    pub(crate) fn start_cluster() -> Option<Vec<Self>> {
        program("AFRESH_TEST_NATS_SERVER")?;
        for _ in 0..MAX_STARTS {
            // Bound together, so that they differ.
            let bound: Vec<TcpListener> =
                (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
            let routes: Vec<String> =
                bound.iter().map(|one| format!("nats://{}", one.local_addr().unwrap())).collect();
            drop(bound);
            let member = |(number, own): (usize, &String)| {
                let name = format!("n{number}");
                let arguments = ["--name", &name, "--cluster_name", "tests", "--no_advertise"];
                let routes = ["--cluster", own, "--routes", &routes.join(",")];
                let arguments = arguments.iter().chain(&routes).map(OsString::from).collect();
                Self::start_in(tempfile::tempdir().unwrap(), arguments)
            };
            let servers: Option<Vec<Self>> = routes.iter().enumerate().map(member).collect();
            if servers.is_some() {
                return servers;
            }
        }
        panic!("no cluster of nats-server starts");
    }

    fn start_in(dir: TempDir, arguments: Vec<OsString>) -> Option<Self> {
        let address = free_address();
        let mut child = Self::spawn(address, dir.path(), &arguments);
        let started = listens(&mut child, address, START_TIMEOUT);
        let server = Self { child, address, dir, arguments };
        started.then_some(server)
    }

    fn spawn(address: SocketAddr, dir: &Path, arguments: &[OsString]) -> Child {
        let mut command = Command::new(program("AFRESH_TEST_NATS_SERVER").unwrap());
        command
            .args(["-a", "127.0.0.1", "-p", &address.port().to_string(), "-js", "-sd"])
            .arg(dir.join("store"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(dir.join("stderr")).unwrap());
        with_us(&mut command).spawn().unwrap()
    }

    /// Whether any file of its store contains these bytes.
    pub(crate) fn stores(&self, bytes: &[u8]) -> bool {
        files_below(&self.dir.path().join("store")).iter().any(|file| {
            let content = std::fs::read(file).unwrap_or_default();
            content.windows(bytes.len()).any(|part| part == bytes)
        })
    }

    /// Its directory.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Ends it as a crash would.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Starts it again with its store directory.
    pub(crate) fn start_again(&mut self) {
        self.child = Self::spawn(self.address, self.dir.path(), &self.arguments);
        assert!(listens(&mut self.child, self.address, START_TIMEOUT));
    }
}
