//! Linux programs: how they are opened, with their grants and limits.

use std::path::PathBuf;
use std::time::Duration;

use afresh::linux::{NetGrant, Program};
use afresh_interpreter::{Language, ProgramGrants};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Maximum time that the Python half gives: later moments do not fit into all clocks.
const MAX_TIME: Duration = Duration::from_secs(1_000_000_000);

/// The grants and limits of a Linux program, as the Python half gives them.
#[derive(Clone, Default, FromPyObject)]
#[pyo3(from_item_all)]
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
    /// Maximum seconds of the warm-up.
    start: Option<f64>,
}

/// A duration that the Python half gives in seconds.
pub(crate) fn seconds(seconds: f64, what: &str) -> PyResult<Duration> {
    let refused =
        |why: String| PyValueError::new_err(format!("{what} of {seconds} s is invalid: {why}"));
    if seconds > MAX_TIME.as_secs_f64() {
        return Err(refused(format!("give at most {} s", MAX_TIME.as_secs())));
    }
    let length = Duration::try_from_secs_f64(seconds).ok().filter(|length| !length.is_zero());
    length.ok_or_else(|| refused("give seconds above 0".to_owned()))
}

/// The time limit of one call, if it has one.
pub(crate) fn call_timeout(timeout: Option<f64>) -> PyResult<Option<Duration>> {
    timeout.map(|timeout| seconds(timeout, "a timeout")).transpose()
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
    ) -> PyResult<impl Fn(Program) -> Program + Clone + Send + Sync + 'static> {
        let grant = |text: &String| {
            text.parse::<NetGrant>().map_err(|error| PyValueError::new_err(error.to_string()))
        };
        let reaches = self.net.iter().map(grant).collect::<PyResult<Vec<_>>>()?;
        let start = self.start.map(|start| seconds(start, "a setup_timeout")).transpose()?;
        let Self { env, dirs, cwd, memory, storage, .. } = self.clone();
        let grants = ProgramGrants { env, dirs, net: reaches, cwd, memory, storage, start };
        Ok(grants.shape(language))
    }
}

/// The language of this name, if Linux programs evaluate it.
pub(crate) fn language(name: &str) -> PyResult<&'static Language> {
    let unknown = || {
        PyValueError::new_err(format!(
            "no Linux program is known that evaluates {name:?}; 'python' is the language of `python3`"
        ))
    };
    let language = Language::named(name).map_err(|_| unknown())?;
    language.program(Program::new("/")).map(|_| language).ok_or_else(unknown)
}
