//! `fuzz`: the time of an execution of a fuzz target, by the executor of `rivals/libafl` over a
//! warm Linux program, by LibAFL's fork server, and by AFL++ with its fork server and in its
//! persistent mode.
//!
//! The program in `rivals/libafl` measures, because LibAFL is large and not a dependency of this
//! workspace.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::ensure;

use crate::foreign_rows;
use crate::row::{Options, Sink};

/// Name of the table.
const TABLE: &str = "fuzz";
/// Where `cargo xtask rivals` installs the program, below its folder.
const PLACE: &str = "fuzz/release/afresh-rival-libafl";

/// The program, of the folder `rivals`.
///
/// # Errors
/// When it is not installed.
pub fn find(rivals: &Path) -> anyhow::Result<PathBuf> {
    let program = rivals.join(PLACE);
    ensure!(program.is_file(), "no {}; `cargo xtask rivals --only fuzz`", program.display());
    Ok(program)
}

/// Runs the program.
///
/// # Errors
/// When it fails, or prints something else than rows.
pub fn all(
    program: &Path,
    is_quick: bool,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let (seconds, rounds) = if is_quick { ("1", "2") } else { ("2", "5") };
    let mut command = Command::new(program);
    command.args(["--json", "--seconds", seconds, "--rounds", rounds]);
    foreign_rows::run(command, TABLE, &[], options, sink)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_the_command_that_installs_it() {
        let rivals = tempfile::tempdir().unwrap();
        let error = find(rivals.path()).unwrap_err();
        assert!(error.to_string().contains("cargo xtask rivals --only fuzz"), "{error}");
    }
}
