//! `cargo xtask test`: everything that guards the project, in one run.
//!
//! Every step runs, also after one failed, so that one run shows all failures; the first failure is named and sets
//! the exit status. The tests are built first: clippy and rustdoc work over what that has compiled.
//!
//! The last line is `N passed, N failed, N skipped`. Passed and failed are summed over the result lines of cargo
//! test; a step that failed without a failed test counts as one. Skipped counts tests that are ignored, and every
//! `SKIPPED:` line: a test that lacks something of the host prints one, and passes. So gaps in the tests of a host
//! are never silent. No other output of passing tests is shown, and the output of failing ones is shown once more at
//! the end.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::command::{cargo, find, run, run_watched};
use crate::units::{self, Units};
use crate::{e2b, fuzz, guests, host, miri, packages, prose, python, tools};

/// The arguments of cargo for the tests.
const ALL: [&str; 4] = ["test", "--workspace", "--all-features", "--locked"];
/// The step whose failures are counted by the tests themselves.
const TESTS: &str = "tests";
const PYTHON: &str = "python";
/// A test program without output for this long hangs: the longest tests take two minutes on a busy host.
const SILENCE: Duration = Duration::from_secs(8 * 60);

/// `cargo xtask test`
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode> {
    if let Some(argument) = arguments.first() {
        bail!("unknown argument {argument:?}; usage: cargo xtask test");
    }
    let start = Instant::now();
    let mut steps = Steps::default();
    let mut tally = Tally::default();
    let tools = tools::install();
    let client = e2b::install();

    steps.run("format", || {
        host::rust_component("rustfmt", "fmt")?;
        run(cargo().current_dir(host::repository()).args(["fmt", "--all", "--check"]))
    });
    compile_and_lint(&mut steps);
    steps.run("guests", guests::all);
    steps.run(TESTS, || {
        let mut test = cargo();
        test.current_dir(host::repository())
            .args(ALL)
            .arg("--no-fail-fast")
            // The output of passing tests is requested too: it may report that they skipped something.
            .args(["--", "--show-output"]);
        tools.finish(&mut test, |line| tally.skip(line));
        client.finish(&mut test, |line| tally.skip(line));
        run_watched(&mut test, SILENCE, |line| tally.hear(line))
    });
    steps.run(PYTHON, || {
        // Skipped tests are reported where they occur.
        python::test(|line| {
            if line.starts_with("SKIPPED:") {
                println!("{line}");
            }
            tally.note(line);
        })
    });
    steps.run("fuzzing", || {
        if let Err(error) = host::cxx_compiler() {
            tally.skip(&format!("SKIPPED: fuzzing: {error:#}"));
            return Ok(());
        }
        fuzz::all()
    });
    steps.run("miri", || {
        if let Err(error) = miri::install() {
            tally.skip(&format!("SKIPPED: Miri: {error:#}"));
            return Ok(());
        }
        miri::all()
    });
    steps.run("packages", packages::all);
    steps.run("dependencies", || dependencies(&mut tally));

    tally.count_steps(&steps);

    println!("\n== summary ({:.0} s)", start.elapsed().as_secs_f64());
    for (name, seconds, error) in &steps.done {
        let how = if error.is_none() { "ok" } else { "FAILED" };
        println!("{how:<6} {seconds:>6.1} s  {name}");
    }
    for line in &tally.skips {
        println!("{line}");
    }
    if !tally.said.is_empty() {
        println!("\nwhat failed tests said:\n{}\n", tally.said.join("\n"));
    }
    for name in &tally.failures {
        println!("failed test: {name}");
    }
    // Last, for of a long log the end is kept, and backtraces are long.
    for line in &tally.panics {
        println!("{line}");
    }
    if let Some((name, error)) = steps.first_failure() {
        println!("the first failure is in step {name}: {error}");
    }
    println!("{}", tally.line());
    let good = tally.failed == 0 && tally.passed > 0;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// `cargo xtask lint`
pub(crate) fn lint(arguments: &[String]) -> Result<ExitCode> {
    if let Some(argument) = arguments.first() {
        bail!("unknown argument {argument:?}; usage: cargo xtask lint");
    }
    let mut steps = Steps::default();
    compile_and_lint(&mut steps);
    Ok(if steps.first_failure().is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Compiles all tests, then runs lints and documentation on the results.
fn compile_and_lint(steps: &mut Steps) {
    let mut units = None;
    steps.run("build", || {
        host::c_compiler()?;
        units = Some(units::build(&ALL)?);
        Ok(())
    });
    let of = |look: fn(&Units) -> Result<()>| match &units {
        Some(units) => look(units),
        None => bail!("nothing was built that it could work over"),
    };
    steps.run("clippy", || {
        host::rust_component("clippy", "clippy")?;
        of(Units::clippy)
    });
    steps.run("prose", prose::check);
    steps.run("parts", || of(parts));
    steps.run("documentation", || of(Units::document));
}

/// The parts of the front crate that users compile alone.
const PARTS: [&str; 4] = ["arena", "linux", "snapshots", "vm"];

/// Wasm's part and the command with it alone, over the dependencies of the tests, which are not compiled a second time
/// with fewer features: those of `snapshots` are there in full.
const WASM: [(&str, &str); 2] =
    [("afresh", "wasm,remote,seal"), ("afresh-cli", "wasm,remote,seal")];

/// Checks that each part compiles alone, without warnings.
fn parts(units: &Units) -> Result<()> {
    for features in PARTS {
        run(cargo().current_dir(host::repository()).args([
            "clippy",
            "--locked",
            "--package",
            "afresh",
            "--no-default-features",
            "--features",
            features,
            "--",
            "-D",
            "warnings",
        ]))?;
    }
    WASM.into_iter().try_for_each(|(package, features)| units.part(package, features))
}

/// Checks licences, sources and advisories of everything that is linked, where that is possible.
fn dependencies(tally: &mut Tally) -> Result<()> {
    if find("cargo-deny").is_none() {
        tally.skip(
            "SKIPPED: dependencies not checked: cargo-deny is missing; \
             `cargo install cargo-deny --locked` adds it",
        );
        return Ok(());
    }
    let deny = |arguments: &[&str]| {
        let mut command = cargo();
        command.current_dir(host::repository()).args(["deny", "--all-features"]).args(arguments);
        run(&mut command)
    };
    deny(&["check", "bans", "licenses", "sources"])?;
    if let Err(error) = deny(&["fetch", "db"]) {
        tally.skip(&format!("SKIPPED: advisories not checked: {error:#}"));
        return Ok(());
    }
    deny(&["check", "advisories"])
}

/// The steps that ran: name, seconds, and the error if it failed.
#[derive(Debug, Default)]
struct Steps {
    done: Vec<(&'static str, f64, Option<String>)>,
}

impl Steps {
    fn first_failure(&self) -> Option<(&str, &str)> {
        self.done.iter().find_map(|(name, _, error)| Some((*name, error.as_deref()?)))
    }

    fn run(&mut self, name: &'static str, step: impl FnOnce() -> Result<()>) {
        println!("\n== {name}");
        let start = Instant::now();
        let error = step().err().map(|error| format!("{error:#}"));
        let seconds = start.elapsed().as_secs_f64();
        match &error {
            None => println!("== {name}: ok, {seconds:.1} s"),
            Some(error) => println!("== {name}: FAILED after {seconds:.1} s: {error}"),
        }
        self.done.push((name, seconds, error));
    }
}

/// The output of the test harnesses.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    ignored: u64,
    /// The `SKIPPED:` lines, each kind once.
    skips: Vec<String>,
    /// The number of skipped tests.
    skipped: u64,
    /// Names of the tests that failed.
    failures: Vec<String>,
    /// What they said.
    said: Vec<String>,
    /// The message of each panic among them, without backtraces.
    panics: Vec<String>,
    /// Whether the message of a panic is being printed.
    panicking: bool,
    /// The number of kept lines.
    told: usize,
    /// The source of the lines that a test program repeats.
    repeating: Repeating,
}

/// A test program repeats its tests' output at its end: first that of the good ones, then of the others.
#[derive(Debug, Default, PartialEq, Eq)]
enum Repeating {
    #[default]
    Nothing,
    Good,
    Failed,
}

/// Maximum lines kept from the failing tests of one run.
const KEPT: usize = 400;

/// Lines kept of the words of one panic.
const WORDS: usize = 40;

impl Tally {
    /// Takes note of one line that cargo test printed.
    fn note(&mut self, line: &str) {
        if let Some(counts) = line.strip_prefix("test result: ") {
            // "ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s"
            let (_, counts) = counts.split_once(". ").unwrap_or(("", counts));
            for part in counts.split(';') {
                let Some((number, what)) = part.trim().split_once(' ') else { continue };
                let Ok(number) = number.parse::<u64>() else { continue };
                match what {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    "ignored" => self.ignored += number,
                    _ => {}
                }
            }
        } else if let Some(name) =
            line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED"))
        {
            self.failures.push(name.to_owned());
        } else if line.trim_start().starts_with("SKIPPED:") {
            self.skipped += 1;
            if !self.skips.iter().any(|known| known == line.trim()) {
                self.skips.push(line.trim().to_owned());
            }
        }
    }

    /// Records one line of output from cargo test, and returns whether to show it.
    fn hear(&mut self, line: &str) -> bool {
        self.note(line);
        match line {
            "successes:" => self.repeating = Repeating::Good,
            "failures:" => self.repeating = Repeating::Failed,
            _ if line.starts_with("test result: ") => self.repeating = Repeating::Nothing,
            _ => {}
        }
        if self.repeating == Repeating::Failed && self.said.len() < KEPT {
            self.said.push(line.to_owned());
            if line.starts_with("thread '") && line.contains(" panicked at ") {
                self.panicking = true;
                self.told = 0;
            } else if ["stack backtrace:", "failures:"].contains(&line)
                || line.starts_with("note: ")
                || line.starts_with("---- ")
            {
                self.panicking = false;
            }
            // A message may contain empty lines, which are left out.
            if self.panicking && !line.is_empty() && self.told < WORDS {
                self.told += 1;
                self.panics.push(line.to_owned());
            }
        }
        self.repeating != Repeating::Good || line.trim_start().starts_with("SKIPPED:")
    }

    /// Adds the failures without a result line: those of other steps, and of a test program that was killed before it
    /// could report.
    fn count_steps(&mut self, steps: &Steps) {
        let told = self.failed > 0;
        let untold = |(name, _, error): &&(&str, f64, Option<String>)| {
            error.is_some() && !(*name == TESTS && told)
        };
        self.failed += steps.done.iter().filter(untold).count() as u64;
    }

    /// Says that something of this program's own was skipped.
    fn skip(&mut self, line: &str) {
        println!("{line}");
        self.note(line);
    }

    fn line(&self) -> String {
        let skipped = self.ignored + self.skipped;
        format!("{} passed, {} failed, {skipped} skipped", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_summed_and_skips_counted_and_failures_named() {
        let mut tally = Tally::default();
        for line in [
            "running 2 tests",
            "test slot::tests::a_reset_brings_back ... ok",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s",
            "test it_holds ... FAILED",
            "---- it_needs_kvm stdout ----",
            "SKIPPED: /dev/kvm is missing",
            "SKIPPED: /dev/kvm is missing",
            "SKIPPED: uffd: forbidden",
            "this line only mentions SKIPPED: x",
            "test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 2.00s",
        ] {
            tally.note(line);
        }
        assert_eq!(tally.line(), "15 passed, 1 failed, 4 skipped");
        assert_eq!(tally.skips, ["SKIPPED: /dev/kvm is missing", "SKIPPED: uffd: forbidden"]);
        assert_eq!(tally.failures, ["it_holds"]);
    }

    #[test]
    fn what_passing_tests_print_is_not_shown_and_what_failing_ones_say_is_kept() {
        let mut tally = Tally::default();
        let lines = [
            "running 3 tests",
            "test one ... ok",
            "test two ... FAILED",
            "successes:",
            "---- one stdout ----",
            "SKIPPED: /dev/kvm is missing",
            "seed 1",
            "failures:",
            "---- two stdout ----",
            "it is 3",
            "thread 'two' (7) panicked at tests/two.rs:3:5:",
            "",
            "called `Result::unwrap()` on an `Err` value: Closed",
            "stack backtrace:",
            "   0: rust_begin_unwind",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0s",
        ];
        let shown: Vec<&str> = lines.into_iter().filter(|line| tally.hear(line)).collect();
        let mut expected = lines.to_vec();
        expected.retain(|line| !["successes:", "---- one stdout ----", "seed 1"].contains(line));
        assert_eq!(shown, expected);
        assert_eq!(tally.said, lines[7..15]);
        assert_eq!(tally.panics, [lines[10], lines[12]]);
        assert_eq!(tally.line(), "1 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn a_failed_step_is_kept_with_its_reason_and_the_next_one_still_runs() {
        let mut steps = Steps::default();
        steps.run("first", || bail!("no such thing"));
        steps.run("second", || Ok(()));
        let found: Vec<_> =
            steps.done.iter().map(|(name, _, error)| (*name, error.as_deref())).collect();
        assert_eq!(found, [("first", Some("no such thing")), ("second", None)]);
    }

    #[test]
    fn a_run_in_which_anything_failed_never_ends_with_zero_failed() {
        let mut steps = Steps::default();
        steps.run("lints", || bail!("unused"));
        steps.run(TESTS, || bail!("killed by a signal"));
        let mut silent = Tally { passed: 3, ..Tally::default() };
        silent.count_steps(&steps);
        assert_eq!(silent.line(), "3 passed, 2 failed, 0 skipped");
        let mut told = Tally { passed: 3, failed: 4, ..Tally::default() };
        told.count_steps(&steps);
        assert_eq!(told.line(), "3 passed, 5 failed, 0 skipped");
    }
}
