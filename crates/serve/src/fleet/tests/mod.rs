//! Hosts of a fleet in this process, over a real nats-server.

mod access;
mod body_memory;
mod catalog;
mod creation_keys;
mod joining;
#[path = "../../../../store/tests/suite/support/listening.rs"]
mod listening;
mod mixed;
mod recording;
mod refusals;
mod sealed;
mod sweep;

use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;

use super::{Fleet, FleetConfig};

/// Far longer than a server needs to start on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Longer than a test, so that no host of a busy machine loses its lease.
const LEASE: Duration = Duration::from_secs(300);

/// Writes the configuration of a server, and returns the arguments that name it.
fn arguments(dir: &Path, config: Option<&str>) -> Vec<OsString> {
    let Some(config) = config else { return Vec::new() };
    let file = dir.join("nats.conf");
    std::fs::write(&file, config).unwrap();
    vec!["-c".into(), file.into()]
}

/// A nats-server with JetStream.
struct NatsServer {
    child: Child,
    address: SocketAddr,
    _dir: TempDir,
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl NatsServer {
    /// `None` where no server is installed.
    fn start() -> Option<Self> {
        Self::start_with(None)
    }

    /// Starts one with this configuration.
    fn start_with(config: Option<&str>) -> Option<Self> {
        let Some(program) = std::env::var_os("AFRESH_TEST_NATS_SERVER") else {
            println!(
                "SKIPPED: AFRESH_TEST_NATS_SERVER does not name a server; `cargo xtask test` installs it where there \
                 is Go"
            );
            return None;
        };
        (0..5)
            .find_map(|_| {
                let dir = tempfile::tempdir().unwrap();
                let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
                let mut child = Command::new(&program)
                    .args(["-a", "127.0.0.1", "-p", &address.port().to_string(), "-js", "-sd"])
                    .arg(dir.path())
                    .args(arguments(dir.path(), config))
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .unwrap();
                let started = listening::listens(&mut child, address, START_TIMEOUT);
                let server = Self { child, address, _dir: dir };
                started.then_some(server)
            })
            .or_else(|| panic!("no nats-server starts"))
    }

    fn config(&self) -> FleetConfig {
        let mut config = FleetConfig::new(format!("nats://{}", self.address));
        config.lease = LEASE;
        config
    }

    async fn host(&self) -> Arc<Fleet> {
        Fleet::join(&self.config()).await.unwrap()
    }
}
