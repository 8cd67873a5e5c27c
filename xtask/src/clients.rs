//! The clients that servers are tested with, unmodified: those of E2B in Python and JavaScript, and
//! the Python SDK of the Model Context Protocol.
//!
//! Each is installed once into `target/tools`, under its version. Without the language, or without
//! the index, its test is skipped, loudly.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::command::find;
use crate::tools::{self, wait};

/// A client.
struct Client {
    /// The packages that it is, in the versions that the tests were written against.
    packages: &'static [&'static str],
    /// Where the test looks for it.
    variable: &'static str,
    /// The required programs.
    needs: &'static [&'static str],
    /// Installs the packages, which follow as arguments, in the folder `$0`.
    script: &'static str,
    /// The path in that folder that the variable names.
    place: &'static str,
}

const CLIENTS: [Client; 3] = [
    Client {
        packages: &["e2b-code-interpreter==2.11.5", "e2b==2.63.0"],
        variable: "AFRESH_TEST_E2B",
        needs: &["python3"],
        script: tools::PIP,
        place: "bin/python",
    },
    Client {
        packages: &["@e2b/code-interpreter@2.8.0", "e2b@2.51.0"],
        variable: "AFRESH_TEST_E2B_JS",
        needs: &["node", "npm"],
        script: "rm -rf \"$0\" && mkdir -p \"$0\" && \
            npm install --silent --no-audit --no-fund --ignore-scripts --prefix \"$0\" \"$@\"",
        place: "node_modules",
    },
    Client {
        packages: &["mcp==2.3.0"],
        variable: "AFRESH_TEST_MCP",
        needs: &["python3"],
        script: tools::PIP,
        place: "bin/python",
    },
];

const LIMIT: Duration = Duration::from_secs(5 * 60);

impl Client {
    fn folder(&self) -> PathBuf {
        tools::of_registry(self.packages[0])
    }

    /// Written once everything is there.
    fn installed(&self) -> PathBuf {
        self.folder().join("installed")
    }

    fn begin(&self) -> Result<Option<Child>> {
        // A caller that sets the variable brings a client.
        if std::env::var_os(self.variable).is_some() || self.installed().is_file() {
            return Ok(None);
        }
        if let Some(missing) = self.needs.iter().find(|program| find(program).is_none()) {
            bail!("there is no {missing}");
        }
        println!("$ install {} (in the background)", self.packages.join(" "));
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{} && touch \"$0/installed\"", self.script));
        command.arg(self.folder()).args(self.packages);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().map(Some).context("cannot run sh")
    }

    /// Waits for the installation; whether the client is in its folder.
    fn finish(&self, begun: Instant, child: Result<Option<Child>>) -> Result<bool> {
        if let Some(child) = child? {
            wait(child, begun + LIMIT, self.packages[0])?;
        }
        if std::env::var_os(self.variable).is_some() {
            return Ok(false);
        }
        if !self.installed().is_file() {
            bail!("nothing was installed");
        }
        Ok(true)
    }
}

/// The installations under way.
pub(crate) struct ClientInstallation {
    begun: Instant,
    children: Vec<(Client, Result<Option<Child>>)>,
}

/// Begins to install the clients that are missing, in the background.
pub(crate) fn install() -> ClientInstallation {
    let begin = |client: Client| {
        let child = client.begin();
        (client, child)
    };
    ClientInstallation { begun: Instant::now(), children: CLIENTS.into_iter().map(begin).collect() }
}

impl ClientInstallation {
    /// Waits for the installations and passes the paths of the clients to `command`; `missing`
    /// receives the reason if one is missing.
    pub(crate) fn finish(self, command: &mut Command, mut missing: impl FnMut(&str)) {
        for (client, child) in self.children {
            match client.finish(self.begun, child) {
                Ok(true) => {
                    command.env(client.variable, client.folder().join(client.place));
                }
                Ok(false) => {}
                Err(error) => {
                    let what = client.packages[0];
                    missing(&format!("SKIPPED: the test with the client {what}: {error:#}"));
                }
            }
        }
    }
}
