//! The client of E2B that sandboxes are tested with, unmodified, from Python's package index.
//!
//! It is installed once into `target/tools`, under its version. Without Python, or without the index, its
//! test is skipped, loudly.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::command::find;
use crate::host;
use crate::tools::wait;

/// The versions that the tests were written against.
const PACKAGES: [&str; 2] = ["e2b-code-interpreter==2.11.5", "e2b==2.63.0"];
/// Where the test looks for a Python that has it.
const VARIABLE: &str = "AFRESH_TEST_E2B";
const LIMIT: Duration = Duration::from_secs(5 * 60);

fn folder() -> PathBuf {
    host::target_folder().join("tools").join(PACKAGES[0].replace("==", "-"))
}

/// Written once everything is there.
fn installed() -> PathBuf {
    folder().join("installed")
}

/// The installation under way.
pub(crate) struct Installing {
    begun: Instant,
    child: Result<Option<Child>>,
}

/// Begins to install the client, if it is missing, in the background.
pub(crate) fn install() -> Installing {
    Installing { begun: Instant::now(), child: begin() }
}

fn begin() -> Result<Option<Child>> {
    // Who sets the variable brings a Python of their own.
    if std::env::var_os(VARIABLE).is_some() || installed().is_file() {
        return Ok(None);
    }
    if find("python3").is_none() {
        bail!("there is no python3 to run it with");
    }
    let script = "python3 -m venv --clear \"$1\" && shift && \
         \"$0/bin/python\" -m pip install --quiet --disable-pip-version-check \"$@\" && touch \"$0/installed\"";
    println!("$ pip install {} (in the background)", PACKAGES.join(" "));
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(folder()).arg(folder()).args(PACKAGES);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().map(Some).context("cannot run sh")
}

impl Installing {
    /// Waits for the installation and tells `command` where the client is; `missing` hears why it is not.
    pub(crate) fn finish(self, command: &mut Command, mut missing: impl FnMut(&str)) {
        let result = self.child.and_then(|child| match child {
            Some(child) => wait(child, self.begun + LIMIT, "pip install"),
            None => Ok(()),
        });
        match result {
            Ok(()) if std::env::var_os(VARIABLE).is_some() => {}
            Ok(()) if installed().is_file() => {
                command.env(VARIABLE, folder().join("bin/python"));
            }
            Ok(()) => missing("SKIPPED: the test with the client of E2B: pip left nothing"),
            Err(error) => {
                missing(&format!("SKIPPED: the test with the client of E2B: {error:#}"));
            }
        }
    }
}
