//! `cargo xtask programs`: real programs, natively and as guests, with the same output.
//!
//! Each case is a script (`case.rs`). It runs natively and by `afresh exec`, in turns, and must
//! print the same and end with the same status. The command prints a table with wall times, and
//! writes `target/programs/results.json`. It fails where a program fails that has no known reason,
//! or passes though it has one.
//!
//! A case whose programs are missing is skipped, and named. `--install` adds them by apt. A run of
//! all cases, with none skipped but images of registries that cannot be reached, also writes the
//! table of `docs/linux-programs.md`.

mod builds;
mod case;
mod images;
mod languages;
mod report;
mod servers;
mod session;
mod tools;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use self::case::ProgramCase;
use self::report::{Row, Verdict};
use self::session::{RunEnd, Session, difference};
use crate::command::{cargo, run};
use crate::host;

const USAGE: &str =
    "usage: cargo xtask programs [--command FILE] [--runs N] [--install] [--short] [--only NAME]…";
/// Runs of each case, natively and as a guest.
const RUNS: usize = 3;

/// All cases, in the order of the table.
fn cases() -> impl Iterator<Item = &'static ProgramCase> {
    [tools::TOOLS, builds::BUILDS, languages::LANGUAGES, servers::SERVERS, images::IMAGES]
        .into_iter()
        .flatten()
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    command: Option<PathBuf>,
    runs: Option<usize>,
    install: bool,
    short: bool,
    only: Vec<String>,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self::default();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument}: {USAGE}"));
            match argument.as_str() {
                "--command" => options.command = Some(std::path::absolute(value()?)?),
                "--runs" => {
                    let runs = value()?.parse().ok().filter(|runs| *runs > 0);
                    options.runs = Some(runs.with_context(|| format!("--runs: {USAGE}"))?);
                }
                "--install" => options.install = true,
                "--short" => options.short = true,
                "--only" => options.only.push(value()?.clone()),
                other => bail!("unknown argument {other:?}; {USAGE}"),
            }
        }
        if let Some(name) =
            options.only.iter().find(|name| !cases().any(|case| case.name == **name))
        {
            let names: Vec<_> = cases().map(|case| case.name).collect();
            bail!("no program {name:?}; there are: {}", names.join("; "));
        }
        Ok(options)
    }

    fn includes(&self, case: &ProgramCase) -> bool {
        (!self.short || case.short)
            && (self.only.is_empty() || self.only.iter().any(|name| name == case.name))
    }
}

/// `cargo xtask programs`
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode> {
    let options = Options::parse(arguments)?;
    let command = match &options.command {
        Some(command) => command.clone(),
        None => build()?,
    };
    let session = Session::new(command)?;
    let chosen: Vec<_> = cases().filter(|case| options.includes(case)).collect();
    if options.install {
        install(&session, &chosen)?;
    }
    let rows = run_all(&session, &chosen, options.runs.unwrap_or(RUNS));
    print!("\n{}", report::table(&rows));
    report::write_json(&rows)?;
    let whole = options.only.is_empty()
        && !options.short
        && rows.iter().all(|row| row.verdict != Verdict::Skipped || row.case.image.is_some());
    if whole {
        report::write_page(&rows)?;
    }
    println!("{}", report::summary(&rows));
    let good = rows.iter().all(|row| row.is_expected());
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The cases of a bare Debian, once each, with the command that the tests have built. `line` gets a
/// line for each case, in the form of `cargo test`.
pub(crate) fn short(mut line: impl FnMut(&str)) -> Result<()> {
    let command = host::target_folder().join("debug/afresh");
    if !command.is_file() {
        bail!(
            "{} is missing: `cargo build -p afresh-cli --all-features` makes it",
            command.display()
        );
    }
    let session = Session::new(command)?;
    let chosen: Vec<_> = cases().filter(|case| case.short).collect();
    let rows = run_all(&session, &chosen, 1);
    let (mut passed, mut failed) = (0, 0);
    for row in &rows {
        match row.verdict {
            Verdict::Skipped => {
                line(&format!("SKIPPED: programs: {}: {}", row.case.name, row.reason))
            }
            _ if row.is_expected() => passed += 1,
            _ => {
                failed += 1;
                line(&format!("test programs {} ... FAILED", row.case.name));
            }
        }
    }
    let result = if failed == 0 { "ok" } else { "FAILED" };
    line(&format!("test result: {result}. {passed} passed; {failed} failed"));
    if failed > 0 {
        bail!("{failed} programs failed");
    }
    Ok(())
}

/// Builds the command, optimized: its times are compared with native ones.
fn build() -> Result<PathBuf> {
    run(cargo().current_dir(host::repository()).args([
        "build",
        "--release",
        "--locked",
        "-p",
        "afresh-cli",
        "--all-features",
    ]))?;
    Ok(host::target_folder().join("release/afresh"))
}

/// Installs the packages of the cases whose programs are missing.
fn install(session: &Session, chosen: &[&ProgramCase]) -> Result<()> {
    let lacking = chosen.iter().filter(|case| session.missing(case).is_some());
    let mut packages: Vec<_> = lacking.flat_map(|case| case.packages).copied().collect();
    packages.sort_unstable();
    packages.dedup();
    if packages.is_empty() { Ok(()) } else { host::apt_install(&packages) }
}

fn run_all(session: &Session, chosen: &[&'static ProgramCase], runs: usize) -> Vec<Row> {
    let mut rows = Vec::new();
    for case in chosen {
        let row = run_case(session, case, runs).unwrap_or_else(|error| Row {
            reason: format!("{error:#}"),
            ..Row::new(case, Verdict::Failed)
        });
        println!("{}", row.line());
        rows.push(row);
    }
    rows
}

fn run_case(session: &Session, case: &'static ProgramCase, runs: usize) -> Result<Row> {
    if let Some(reason) = session.missing(case) {
        return Ok(Row { reason, ..Row::new(case, Verdict::Skipped) });
    }
    session.prepare(case)?;
    let mut row = Row::new(case, Verdict::Passed);
    for _ in 0..runs {
        let expected = match case.image {
            Some(image) => RunEnd { output: image.output.into(), status: Ok(0) },
            None => {
                let native = session.native(case)?;
                if native.ending.status != Ok(0) {
                    bail!("it fails natively: {:?}, {}", native.ending.status, native.message);
                }
                row.native.push(native.seconds);
                native.ending
            }
        };
        let guest = session.guest(case)?;
        row.guest.push(guest.seconds);
        if let Some(reason) = difference(&expected, &guest) {
            return Ok(Row { verdict: Verdict::Failed, reason, ..row });
        }
    }
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_a_name_of_its_own_and_a_short_one_needs_no_network() {
        let mut names: Vec<_> = cases().map(|case| case.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        for case in cases() {
            assert!(!case.about.is_empty() && !case.script.is_empty(), "{}", case.name);
            assert!(
                !case.short || case.prepare.is_empty() && case.image.is_none(),
                "{}",
                case.name
            );
        }
    }

    #[test]
    fn options_are_read_and_faults_are_named() {
        let parse = |words: &[&str]| {
            Options::parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
        };
        let options = parse(&["--only", "git", "--runs", "1"]).expect("good options");
        assert_eq!((options.only, options.runs), (vec!["git".to_owned()], Some(1)));
        for (words, why) in [
            (&["--only", "x"][..], "no program"),
            (&["--runs", "0"], "--runs"),
            (&["-x"], "unknown"),
        ] {
            assert!(parse(words).expect_err("bad").to_string().contains(why), "{words:?}");
        }
    }
}
