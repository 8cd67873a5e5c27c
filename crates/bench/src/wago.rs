//! wago as a rival of the table `wasm`: a new instance for each call, by a program in Go that
//! `cargo xtask rivals` builds of `rivals/wago`. It times itself.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use tempfile::NamedTempFile;

use crate::rival_process::RivalProcess;

/// Name in the rows.
pub(crate) const STRATEGY: &str = "wago/instance";
/// Where `cargo xtask rivals` installs the program, below its folder.
const PLACE: &str = "wago/wago";

/// Maximum time for compiling a module and calling it once.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// The program, of the folder `rivals`.
///
/// # Errors
/// When it is not installed.
pub fn find(rivals: &Path) -> anyhow::Result<PathBuf> {
    let program = rivals.join(PLACE);
    let missing = || format!("no {}; `cargo xtask rivals --only wago`", program.display());
    anyhow::ensure!(program.is_file(), missing());
    Ok(program)
}

/// A module that wago has compiled.
pub(crate) struct Wago {
    process: RivalProcess,
    function: String,
    /// The process has read it. It is removed in the end.
    _module: NamedTempFile,
}

impl Wago {
    /// Compiles `wasm` with `program`, and calls `function` once.
    ///
    /// # Errors
    /// When wago refuses the module.
    pub(crate) fn start(program: &Path, wasm: &[u8], function: &str) -> anyhow::Result<Self> {
        let module = NamedTempFile::new().context("a file for the module")?;
        std::fs::write(module.path(), wasm)?;
        let mut command = Command::new(program);
        command.arg(module.path());
        let process = RivalProcess::start(command, &format!("{function} 1"), START_TIMEOUT)?;
        Ok(Self { process, function: function.to_owned(), _module: module })
    }

    /// Time of `count` calls.
    ///
    /// # Errors
    /// When the program fails.
    pub(crate) fn calls(&mut self, count: u64) -> anyhow::Result<Duration> {
        self.process.time(&format!("{} {count}", self.function))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn wago_is_called_with_the_export_and_left_out_where_it_is_missing() {
        let rivals = tempfile::tempdir().unwrap();
        let failed = |error: anyhow::Error| error.to_string();
        let error = find(rivals.path()).map_err(failed).unwrap_err();
        assert!(error.contains("cargo xtask rivals --only wago"), "{error}");
        let program = rivals.path().join(PLACE);
        std::fs::create_dir_all(program.parent().unwrap()).unwrap();
        // Stands for the program: it answers the size of the module times the count.
        let script = "#!/bin/sh\nsize=$(wc -c < \"$1\")\nwhile read export count; do\n\
                      [ $export = empty ] || exit 1\necho $((size * count))\ndone\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = find(rivals.path()).unwrap();
        let mut wago = Wago::start(&program, b"1234567", "empty").unwrap();
        assert_eq!(wago.calls(3).unwrap(), Duration::from_nanos(21));
        assert!(Wago::start(&program, b"", "other").is_err());
    }
}
