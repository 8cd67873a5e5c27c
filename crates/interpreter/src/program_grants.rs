//! The grants and limits of a Linux program that the Python or Node package opens.

use std::path::PathBuf;
use std::time::Duration;

use afresh::linux::{NetGrant, Program};

use crate::Language;

/// Maximum time that background work continues after a call is answered, and maximum time of a
/// separate slice.
const SLICE: Duration = Duration::from_millis(50);

/// Maximum time until a call notices that it has to end.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The grants and limits of a Linux program.
#[derive(Clone, Debug)]
pub struct ProgramGrants {
    /// Environment variables.
    pub env: Vec<(String, String)>,
    /// Absolute host paths that it may read.
    pub dirs: Vec<PathBuf>,
    /// Servers that it may connect to.
    pub net: Vec<NetGrant>,
    /// The directory that it starts in.
    pub cwd: Option<PathBuf>,
    /// Maximum bytes that it may map.
    pub memory: u64,
    /// Maximum bytes of files that it may write.
    pub storage: u64,
    /// Maximum time of the warm-up.
    pub start: Option<Duration>,
}

impl ProgramGrants {
    /// A function that shapes programs; `language` makes them evaluate code. The caller's watch
    /// ends calls, and its listener bounds their output.
    pub fn shape(
        self,
        language: Option<&'static Language>,
    ) -> impl Fn(Program) -> Program + Clone + Send + Sync + 'static {
        move |program| {
            let mut program = program
                .time_limit(Duration::MAX)
                .output_limit(usize::MAX)
                .slice(SLICE)
                .poll_interval(POLL_INTERVAL)
                .memory_limit(self.memory)
                .storage_limit(self.storage);
            if let Some(language) = language {
                program = language.program(program.clone()).unwrap_or(program);
            }
            if let Some(start) = self.start {
                program = program.start_limit(start);
            }
            if let Some(cwd) = &self.cwd {
                program = program.directory(cwd);
            }
            program = self.dirs.iter().fold(program, Program::grant);
            program =
                self.env.iter().fold(program, |program, (name, value)| program.env(name, value));
            self.net.iter().cloned().fold(program, Program::reach)
        }
    }
}
