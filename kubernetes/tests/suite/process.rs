//! Programs that tests start.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long a test waits for anything.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// A program that ends with its test.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(command: &mut Command, log: &Path) -> Self {
        let log = File::create(log).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        Self(command.spawn().unwrap())
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port that is free at the moment.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The program in a variable, or the reason of its absence.
pub(crate) fn program(variable: &str) -> Result<PathBuf, String> {
    match std::env::var_os(variable) {
        Some(path) if Path::new(&path).is_file() => Ok(path.into()),
        Some(path) => Err(format!("{variable} names no file: {}", path.display())),
        None => Err(format!("{variable} is not set; `cargo xtask kube` sets it")),
    }
}

/// Waits until something is there.
pub(crate) async fn wait_for<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let found = tokio::time::timeout(WAIT_TIMEOUT, found).await;
    found.unwrap_or_else(|_| panic!("{what} did not happen in {} s", WAIT_TIMEOUT.as_secs()))
}
