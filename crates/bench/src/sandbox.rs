//! Sandboxes as agents have them, by the Python package: from a new one to its first command, ten
//! commands, forks that have all answered, a figure, the turn of a coding agent and a call by MCP;
//! with `pydantic-monty` and `sandlock` where the Python has them.
//!
//! A program in Python measures, because the package is what its users call.

use std::path::Path;
use std::process::Command;

use crate::foreign_rows;
use crate::row::{Options, Sink};

const PROGRAM: &str = include_str!("sandbox.py");
/// Further measures of a row: processor time, memory (PSS), and the pages that were written.
const MEASURES: [&str; 4] = ["cpu_us", "pss_kib", "written_kib", "pss_by_written"];

/// Runs the cases with a Python that has the package, and a command of afresh for `afresh mcp`.
///
/// # Errors
/// A Python without the package, a wrong answer, or a rival that fails.
pub fn all(
    python: &Path,
    afresh: &Path,
    options: &Options,
    is_quick: bool,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let (rounds, forks) = if is_quick { (20, 100) } else { (100, 1000) };
    let mut command = Command::new(python);
    command.args(["-c", PROGRAM, "--rounds", &rounds.to_string(), "--forks", &forks.to_string()]);
    command.arg("--afresh").arg(std::path::absolute(afresh)?);
    command.args(["--filter", options.filter.as_deref().unwrap_or_default()]);
    foreign_rows::run(command, "sandbox", &MEASURES, options, sink)
}
