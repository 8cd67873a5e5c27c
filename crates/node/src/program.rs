//! Linux programs: how they are opened, with their grants and limits.

use std::path::PathBuf;
use std::time::Duration;

use afresh::linux::{Destination, Program};
use afresh_interpreter::Language;
use serde::Deserialize;

use crate::error::Failure;

/// Maximum time that background work continues after a call is answered, and maximum time of a separate slice.
const SLICE: Duration = Duration::from_millis(50);

/// Maximum time until a call notices that it has to end.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The grants and limits of a Linux program.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct ProgramOptions {
    /// Environment variables.
    env: Vec<(String, String)>,
    /// Absolute host paths that it may read.
    dirs: Vec<PathBuf>,
    /// Servers that it may connect to.
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
    /// A function that shapes programs; `language` makes them evaluate code.
    pub(crate) fn shape(
        &self,
        language: Option<&'static Language>,
    ) -> Result<impl Fn(Program) -> Program + Clone + Send + Sync + 'static, Failure> {
        let destination = |text: &String| {
            text.parse::<Destination>().map_err(|error| Failure::argument(error.to_string()))
        };
        let reaches = self.net.iter().map(destination).collect::<Result<Vec<_>, _>>()?;
        let start = self.start.map(|start| milliseconds(start, "a setupTimeoutMs")).transpose()?;
        let own = self.clone();
        Ok(move |program: Program| {
            let mut program = program
                // The watch of each call ends it, at its own limit.
                .time_limit(Duration::MAX)
                // The call's state bounds the output that is kept.
                .output_limit(usize::MAX)
                .slice(SLICE)
                .poll_interval(POLL_INTERVAL)
                .memory_limit(own.memory)
                .storage_limit(own.storage);
            if let Some(language) = language {
                program = language.program(program.clone()).unwrap_or(program);
            }
            if let Some(start) = start {
                program = program.start_limit(start);
            }
            if let Some(cwd) = &own.cwd {
                program = program.directory(cwd);
            }
            program = own.dirs.iter().fold(program, Program::grant);
            program =
                own.env.iter().fold(program, |program, (name, value)| program.env(name, value));
            reaches.iter().cloned().fold(program, Program::reach)
        })
    }
}
