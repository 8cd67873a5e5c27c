//! Linux programs: how they are opened, with their grants and limits.

use std::path::PathBuf;
use std::time::Duration;

use afresh::linux::{NetGrant, Program};
use afresh_interpreter::{Language, ProgramGrants};
use serde::Deserialize;

use crate::error::Failure;

/// The grants and limits of a Linux program.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct ProgramOptions {
    /// Environment variables.
    env: Vec<(String, String)>,
    /// Absolute host paths that it may read.
    dirs: Vec<PathBuf>,
    /// Servers that it may connect to, and rules for requests as JSON.
    net: Vec<String>,
    /// The directory that it starts in.
    cwd: Option<PathBuf>,
    /// Maximum bytes that it may map.
    memory: u64,
    /// Maximum bytes of files that it may write.
    storage: u64,
    /// Maximum milliseconds of the warm-up.
    start: Option<f64>,
}

/// A time that JavaScript gives in milliseconds.
pub(crate) fn milliseconds(given: f64, what: &str) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(given / 1e3).map_err(|_| {
        Failure::argument(format!("{what} of {given} ms is invalid: give milliseconds above 0"))
    })
}

impl ProgramOptions {
    /// Whether a guest is given servers, and cannot connect to them.
    pub(crate) fn has_useless_net(&self, guest: &afresh::Guest) -> bool {
        !self.net.is_empty() && guest.kind() != afresh::Kind::Program
    }

    /// A function that shapes programs; `language` makes them evaluate code.
    pub(crate) fn shape(
        &self,
        language: Option<&'static Language>,
    ) -> Result<impl Fn(Program) -> Program + Clone + Send + Sync + 'static, Failure> {
        let grant = |text: &String| {
            text.parse::<NetGrant>().map_err(|error| Failure::argument(error.to_string()))
        };
        let reaches = self.net.iter().map(grant).collect::<Result<Vec<_>, _>>()?;
        let start = self.start.map(|start| milliseconds(start, "a setupTimeoutMs")).transpose()?;
        let Self { env, dirs, cwd, memory, storage, .. } = self.clone();
        let grants = ProgramGrants { env, dirs, net: reaches, cwd, memory, storage, start };
        Ok(grants.shape(language))
    }
}
