//! Real servers on loopback: started for one test, killed at its end.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use afresh_store::remote::{Remote, RetryPolicy};
use rustix::process::{Signal, set_parent_process_death_signal};
use tempfile::TempDir;

use crate::support::listening::listens;

const ACCESS: &str = "afresh-test";
const SECRET: &str = "not-a-secret";
const BUCKET: &str = "bucket";

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    S3,
    Registry,
}

pub(crate) const KINDS: [Kind; 2] = [Kind::S3, Kind::Registry];

impl Kind {
    /// What `cargo xtask test` sets where it could install the server.
    fn variable(self) -> &'static str {
        match self {
            Self::S3 => "AFRESH_TEST_VERSITYGW",
            Self::Registry => "AFRESH_TEST_REGISTRY",
        }
    }
}

/// A server that runs.
pub(crate) struct Server {
    pub(crate) kind: Kind,
    pub(crate) address: SocketAddr,
    child: Child,
    dir: TempDir,
    more: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Server {
    /// Starts a server, or says that it is missing.
    pub(crate) fn start(kind: Kind) -> Option<Self> {
        Self::start_with(kind, "")
    }

    /// As [`Server::start`], with more lines for a registry's configuration.
    pub(crate) fn start_with(kind: Kind, more: &str) -> Option<Self> {
        if std::env::var_os(kind.variable()).is_none() {
            println!(
                "SKIPPED: {} does not name a server; `cargo xtask test` installs it where there is \
                 Go",
                kind.variable()
            );
            return None;
        }
        // Another process may take the port before the server does.
        for _ in 0..5 {
            let dir = tempfile::tempdir().unwrap();
            let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
            let child = spawn(kind, address, &dir, more);
            let mut server = Self { kind, address, child, dir, more: more.to_owned() };
            if server.answers() {
                return Some(server);
            }
        }
        panic!("the server {kind:?} does not start");
    }

    /// Waits until it takes connections; `false` when it ended.
    fn answers(&mut self) -> bool {
        listens(&mut self.child, self.address, Duration::from_secs(120))
    }

    pub(crate) fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Starts it again, with the data it had.
    pub(crate) fn start_again(&mut self) {
        self.kill();
        self.child = spawn(self.kind, self.address, &self.dir, &self.more);
        assert!(self.answers());
    }

    /// The remote at `address`, which is the server's or that of a proxy before it.
    pub(crate) fn remote(&self, address: SocketAddr, retry: RetryPolicy) -> Remote {
        let (url, options) = self.url(address);
        let options: Vec<_> = options.iter().map(|(key, value)| (*key, value.as_str())).collect();
        Remote::open_with(&url, retry, &options).unwrap()
    }

    /// Address and options of the remote.
    pub(crate) fn url(&self, address: SocketAddr) -> (String, Vec<(&'static str, String)>) {
        match self.kind {
            Kind::Registry => (format!("oci://{address}/team/guest"), Vec::new()),
            Kind::S3 => (
                format!("s3://{BUCKET}/team/guest"),
                vec![
                    ("aws_endpoint", format!("http://{address}")),
                    ("aws_access_key_id", ACCESS.to_owned()),
                    ("aws_secret_access_key", SECRET.to_owned()),
                    ("aws_region", "us-east-1".to_owned()),
                ],
            ),
        }
    }

    /// The folder of an S3 server in which the objects of its bucket are files.
    pub(crate) fn bucket(&self) -> std::path::PathBuf {
        self.dir.path().join("data").join(BUCKET)
    }

    /// The folder of the objects of the remote.
    pub(crate) fn folder(&self) -> std::path::PathBuf {
        self.bucket().join("team/guest")
    }

    /// Bytes of the files that hold the server's blobs.
    pub(crate) fn stored(&self) -> u64 {
        fn size(dir: &std::path::Path) -> u64 {
            let entries = fs::read_dir(dir).unwrap().flatten();
            entries
                .map(|entry| match entry.metadata() {
                    Ok(meta) if meta.is_dir() => size(&entry.path()),
                    Ok(meta) => meta.len(),
                    Err(_) => 0,
                })
                .sum()
        }
        size(&self.dir.path().join("data"))
    }
}

fn spawn(kind: Kind, address: SocketAddr, dir: &TempDir, more: &str) -> Child {
    let mut command = Command::new(std::env::var_os(kind.variable()).unwrap());
    let data = dir.path().join("data");
    match kind {
        Kind::S3 => {
            // A directory is a bucket.
            fs::create_dir_all(data.join(BUCKET)).unwrap();
            command
                .args(["--access", ACCESS, "--secret", SECRET, "--port"])
                .arg(address.to_string())
                .args(["--quiet", "--keep-alive", "posix"])
                .arg(&data);
        }
        Kind::Registry => {
            fs::create_dir_all(&data).unwrap();
            let file = dir.path().join("registry.yml");
            let text = format!(
                "version: 0.1\nlog:\n  level: error\n  accesslog:\n    disabled: true\nstorage:\n  \
                 filesystem:\n    rootdirectory: {}\nhttp:\n  addr: {address}\n{more}",
                data.display()
            );
            fs::write(&file, text).unwrap();
            command.arg("serve").arg(file).env("OTEL_TRACES_EXPORTER", "none");
        }
    }
    command.current_dir(dir.path()).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(fs::File::create(dir.path().join("stderr")).unwrap());
    // SAFETY: between fork and exec the closure makes one system call, and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            // Should the test be killed, the server goes with it.
            Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
        });
    }
    command.spawn().unwrap()
}

/// RetryPolicy that ends soon.
pub(crate) fn retry() -> RetryPolicy {
    RetryPolicy {
        attempts: 4,
        timeout: Duration::from_secs(120),
        pause: Duration::from_millis(10),
        outage: Duration::ZERO,
    }
}
