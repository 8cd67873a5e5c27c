//! `cargo xtask test`: all checks of the project, in one run.
//!
//! Every step runs, also after a failed one, so one run finds all failures; the first is named and
//! the exit status is 1. The tests are built first: clippy and rustdoc work over the result.
//!
//! The last line is `N passed, N failed, N skipped`. Passed and failed are summed over the result
//! lines of cargo test; a failed step without a failed test counts as one. Skipped counts ignored
//! tests and every `SKIPPED:` line: a test that lacks something of the host prints one, and passes.
//! The output of passed tests is left out otherwise; that of failed tests is repeated at the end.
//!
//! `--retry` runs failed tests once more, alone, or all tests if a signal ended a test program. If
//! all pass, the run passes and names the flaky ones. `--within MINUTES` ends the build after two
//! thirds of that time and runs the groups of tests that were built, leaves out each later step
//! that would not fit, and counts all of these as skipped. `--cache` stores third-party artifacts
//! in the user's cache folder, for the next checkout.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::artifact_cache::ArtifactCache;
use crate::command::{cargo, find, run, run_tests};
use crate::groups::BuiltGroups;
use crate::tally::Tally;
use crate::units::Units;
use crate::{
    arrows, book, clients, columns, deploy, feature_lines, fuzz, guests, host, miri, names, node,
    packages, programs, prose, python, signatures, tools,
};

/// The arguments of cargo for the tests.
const ALL: [&str; 4] = ["test", "--workspace", "--all-features", "--locked"];
/// The step whose failures are counted by the tests themselves.
pub(crate) const TESTS: &str = "tests";
const PYTHON: &str = "python";
/// A test program without output for this time hangs: the longest tests take two minutes on a busy
/// host.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(8 * 60);
/// The time of a step on a slow host, for `--within`.
const SLOW_PROGRAMS: Duration = Duration::from_secs(4 * 60);
const SLOW_PYTHON: Duration = Duration::from_secs(8 * 60);
const SLOW_NODE: Duration = Duration::from_secs(5 * 60);
const SLOW_FUZZING: Duration = Duration::from_secs(12 * 60);
const SLOW_MIRI: Duration = Duration::from_secs(6 * 60);
const SLOW_PACKAGES: Duration = Duration::from_secs(4 * 60);

const USAGE: &str = "usage: cargo xtask test [--cache] [--retry] [--within MINUTES]";

/// The options of `cargo xtask test`.
#[derive(Debug, Default)]
struct Options {
    cache: bool,
    retry: bool,
    within: Option<Duration>,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self::default();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--cache" => options.cache = true,
                "--retry" => options.retry = true,
                "--within" => {
                    let minutes = arguments.next().context(USAGE)?;
                    let minutes: u64 = minutes.parse().context(USAGE)?;
                    options.within = Some(Duration::from_secs(60 * minutes));
                }
                other => bail!("unknown argument {other:?}; {USAGE}"),
            }
        }
        Ok(options)
    }
}

/// `cargo xtask test`
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode> {
    let options = Options::parse(arguments)?;
    let start = Instant::now();
    let mut steps = Steps::default();
    let mut tally = Tally::default();
    let tools = tools::install();
    let clients = clients::install();

    steps.run("format", || {
        host::rust_component("rustfmt", "fmt")?;
        run(cargo().current_dir(host::repository()).args(["fmt", "--all", "--check"]))
    });
    let deadline = options.within.map(|limit| start + limit * 2 / 3);
    let cache = if options.cache { ArtifactCache::of_user() } else { None };
    let built = compile_and_lint(&mut steps, cache.as_ref(), deadline);
    for group in built.missing() {
        tally.skip(&format!("SKIPPED: {group}: not built in two thirds of the time of --within"));
    }
    steps.run("guests", guests::all);
    steps.run(TESTS, || {
        let targets = built.targets().context("no group of tests was built")?;
        let mut test = cargo();
        test.current_dir(host::repository()).args(ALL).arg("--no-fail-fast").args(&targets);
        tools.finish(&mut test, |line| tally.skip(line));
        clients.finish(&mut test, |line| tally.skip(line));
        let variables: Vec<_> =
            test.get_envs().map(|(k, v)| (k.to_owned(), v.map(ToOwned::to_owned))).collect();
        // The output of passed tests is read for `SKIPPED:` lines.
        test.args(["--", "--show-output"]);
        let (result, signalled) = run_tests(&mut test, OUTPUT_TIMEOUT, |line| tally.read(line));
        let is_whole = !signalled.is_empty();
        tally.signalled = signalled;
        if result.is_ok() || !options.retry || tally.failures.is_empty() && !is_whole {
            return result;
        }
        let mut again = cargo();
        again.current_dir(host::repository()).args(ALL).arg("--no-fail-fast").args(&targets);
        again.envs(variables.into_iter().filter_map(|(name, value)| Some((name, value?))));
        if is_whole {
            println!("== tests: a signal ended a test program; all run once more");
        } else {
            println!("== tests: the failed ones run once more");
            again.args(["--", "--exact"]).args(&tally.failures);
        }
        let mut second = Tally::default();
        let (passed, _) = run_tests(&mut again, OUTPUT_TIMEOUT, |line| second.read(line));
        if passed.is_ok() && tally.add_second_run(&second) { Ok(()) } else { result }
    });
    let fits = |tally: &mut Tally, step: &str, time| {
        let why = if built.units.is_none() {
            "it uses what was not built"
        } else if options.within.is_some_and(|limit| start.elapsed() + time > limit) {
            "it would not fit in the time of --within"
        } else {
            return true;
        };
        tally.skip(&format!("SKIPPED: {step}: {why}"));
        false
    };
    steps.run("programs", || {
        if !fits(&mut tally, "programs", SLOW_PROGRAMS) {
            return Ok(());
        }
        programs::short(|line| {
            println!("{line}");
            tally.count(line);
        })
    });
    steps.run(PYTHON, || {
        if !fits(&mut tally, PYTHON, SLOW_PYTHON) {
            return Ok(());
        }
        // Skipped tests are reported where they occur.
        python::test(|line| {
            if line.starts_with("SKIPPED:") {
                println!("{line}");
            }
            tally.count(line);
        })
    });
    steps.run("node", || {
        if !fits(&mut tally, "node", SLOW_NODE) {
            return Ok(());
        }
        node::test(|line| {
            println!("{line}");
            tally.count(line);
        })
    });
    steps.run("fuzzing", || {
        if !fits(&mut tally, "fuzzing", SLOW_FUZZING) {
            return Ok(());
        }
        if let Err(error) = host::cxx_compiler() {
            tally.skip(&format!("SKIPPED: fuzzing: {error:#}"));
            return Ok(());
        }
        fuzz::all()
    });
    steps.run("miri", || {
        if !fits(&mut tally, "Miri", SLOW_MIRI) {
            return Ok(());
        }
        if let Err(error) = miri::install() {
            tally.skip(&format!("SKIPPED: Miri: {error:#}"));
            return Ok(());
        }
        miri::all()
    });
    steps.run("packages", || match fits(&mut tally, "packages", SLOW_PACKAGES) {
        true => packages::all(),
        false => Ok(()),
    });
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
    if !tally.output.is_empty() {
        println!("\nthe output of failed tests:\n{}\n", tally.output.join("\n"));
    }
    for name in &tally.flaky {
        println!("FLAKY: {name} failed, and passed when it was run again");
    }
    for name in &tally.failures {
        println!("failed test: {name}");
    }
    // Near the end: CI keeps the end of a long log, and backtraces are long.
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
    compile_and_lint(&mut steps, None, None);
    Ok(if steps.first_failure().is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Compiles the tests, with third-party artifacts of the cache if there is one, and runs lints and
/// documentation on the results.
fn compile_and_lint(
    steps: &mut Steps,
    cache: Option<&ArtifactCache>,
    deadline: Option<Instant>,
) -> BuiltGroups {
    let mut built = BuiltGroups::default();
    steps.run("build", || {
        host::c_compiler()?;
        if let Some(cache) = cache {
            report("restored", cache.restore());
        }
        built.build(&ALL, deadline)?;
        if let (Some(cache), Some(units)) = (cache, &built.units) {
            report("stored", cache.save(units.third_party()));
        }
        Ok(())
    });
    let of = |look: fn(&Units) -> Result<()>| match &built.units {
        Some(units) => look(units),
        // The skipped groups are named.
        None if built.is_cut => Ok(()),
        None => bail!("nothing was built that it could work over"),
    };
    steps.run("clippy", || {
        host::rust_component("clippy", "clippy")?;
        of(Units::clippy)
    });
    steps.run("names", names::check);
    steps.run("signatures", signatures::check);
    steps.run("prose", prose::check);
    steps.run("columns", columns::check);
    steps.run("arrows", arrows::check);
    steps.run("feature lines", feature_lines::check);
    steps.run("book", book::check);
    steps.run("deploy", deploy::check);
    steps.run("parts", || of(parts));
    steps.run("documentation", || of(Units::document));
    built
}

/// Prints what became of the cache, which a build does not need.
fn report(what: &str, artifacts: Result<usize>) {
    match artifacts {
        Ok(number) => println!("{what} {number} third-party artifacts"),
        Err(error) => println!("no third-party artifacts were {what}: {error:#}"),
    }
}

/// The parts of the front crate that users compile alone.
const PARTS: [&str; 4] = ["arena", "linux", "snapshots", "vm"];

/// Wasm's part and the command with it alone, over the dependencies of the tests, which are not
/// compiled a second time with fewer features: those of `snapshots` are there in full.
const WASM: [(&str, &str); 3] = [
    ("afresh", "wasm,remote,seal"),
    ("afresh-cli", "wasm,remote,seal"),
    ("afresh-cli", "serve,linux"),
];

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
pub(crate) struct Steps {
    pub(crate) done: Vec<(&'static str, f64, Option<String>)>,
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

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut silent = Tally::default();
        silent.passed = 3;
        silent.count_steps(&steps);
        assert_eq!(silent.line(), "3 passed, 2 failed, 0 skipped");
        let mut counted = Tally::default();
        (counted.passed, counted.failed) = (3, 4);
        counted.count_steps(&steps);
        assert_eq!(counted.line(), "3 passed, 5 failed, 0 skipped");
    }
}
