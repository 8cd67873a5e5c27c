//! `cargo xtask adapters`: the Jupyter kernel, the adapters to agent frameworks and `afresh mcp`,
//! with the published packages.
//!
//! Each environment has a list of wanted packages, `crates/python/tests/locks/NAME.in`. A lock file
//! has the versions and hashes of all packages that those need: pip needs more than nine minutes to
//! find such a set. `cargo xtask adapters --lock` writes the lock files anew.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::command::{run, run_watched, succeeds};
use crate::python::Sums;
use crate::{host, inspector, python};

const USAGE: &str = "usage: cargo xtask adapters [--lock] [frameworks|rollouts|inspector]…";
/// The installer of packages, which also writes lock files.
const UV: &str = "uv==0.13.9";
/// Maximum time without output from a test.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// Packages that fit into one environment, and the tests that need them.
struct Environment {
    name: &'static str,
    tests: &'static [&'static str],
}

const ENVIRONMENTS: [Environment; 2] = [
    Environment {
        name: "frameworks",
        tests: &["tests/test_kernel.py", "tests/test_adapters.py", "--pyargs", "afresh.kernel"],
    },
    // `verifiers` needs an older `mcp` and `openai` than the frameworks.
    Environment { name: "rollouts", tests: &["tests/test_rollouts.py", "tests/test_verifiers.py"] },
];

impl Environment {
    fn list(&self, ending: &str) -> PathBuf {
        python::package().join("tests/locks").join(self.name).with_extension(ending)
    }

    /// Writes the lock file.
    fn lock(&self, uv: &Path) -> Result<()> {
        let mut compile = Command::new(uv);
        compile.args(["pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]);
        compile.args(["--generate-hashes", "--no-annotate", "--no-header", "--upgrade"]);
        run(compile.arg(self.list("in")).arg("--output-file").arg(self.list("lock")))
    }

    /// An interpreter with the packages.
    fn install(&self, base: &Path, uv: &Path) -> Result<PathBuf> {
        let folder = host::target_folder().join(format!("python/environment-{}", self.name));
        let inside = folder.join("bin/python");
        if !succeeds(Command::new(&inside).args(["-c", "import pip"])) {
            run(Command::new(base).args(["-m", "venv", "--clear"]).arg(&folder))?;
        }
        let mut install = Command::new(uv);
        install.args(["pip", "install", "--quiet", "--require-hashes", "--no-deps", "--python"]);
        run(install.arg(&inside).arg("--requirement").arg(self.list("lock")))?;
        Ok(inside)
    }
}

pub(crate) fn command(arguments: &[String]) -> Result<()> {
    let (mut lock, mut wanted) = (false, Vec::new());
    for argument in arguments {
        match argument.as_str() {
            "--lock" => lock = true,
            "inspector" => wanted.push("inspector"),
            name => match ENVIRONMENTS.iter().find(|one| one.name == name) {
                Some(environment) => wanted.push(environment.name),
                None => bail!("unknown argument {name:?}; {USAGE}"),
            },
        }
    }
    let is_wanted = |name: &str| wanted.is_empty() || wanted.contains(&name);
    let base = python::interpreter().context("the tests need a python3 of 3.11 or newer")?;
    let uv = python::tools(&base, "uv", &[UV])?.with_file_name("uv");
    if lock {
        let chosen = ENVIRONMENTS.iter().filter(|one| is_wanted(one.name));
        return chosen.into_iter().try_for_each(|environment| environment.lock(&uv));
    }
    let (mut counts, mut failures) = (Sums::default(), Vec::new());
    for environment in ENVIRONMENTS.iter().filter(|one| is_wanted(one.name)) {
        let inside = environment.install(&base, &uv)?;
        python::install(&inside, &host::target_folder().join("python"))?;
        let mut tests = Command::new(&inside);
        tests.current_dir(python::package()).args(["-m", "pytest", "-rs"]).args(environment.tests);
        let ran = run_watched(&mut tests, OUTPUT_TIMEOUT, |line| {
            counts.add(line);
            true
        });
        failures.extend(ran.err().map(|error| format!("{}: {error:#}", environment.name)));
    }
    if is_wanted("inspector") {
        match inspector::test() {
            Ok(calls) => counts.passed += calls,
            Err(error) => {
                counts.failed += 1;
                failures.push(format!("inspector: {error:#}"));
            }
        }
    }
    let Sums { passed, failed, skipped } = counts;
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if !failures.is_empty() {
        bail!("{}", failures.join("\n"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wanted_package_is_locked_in_its_version_with_hashes() -> Result<()> {
        for environment in &ENVIRONMENTS {
            let lock = std::fs::read_to_string(environment.list("lock"))?;
            for wanted in std::fs::read_to_string(environment.list("in"))?.lines() {
                let line = format!("{wanted} \\\n    --hash=sha256:");
                assert!(lock.contains(&line), "{}: {wanted}", environment.name);
            }
        }
        Ok(())
    }
}
