//! `cargo xtask aarch64`: the tests of the engine and of the command on arm64 Linux.
//!
//! The tests are cross-compiled, and run in an emulated machine (`qemu-system-aarch64`) with
//! Debian's kernel: emulation of a single program has no userfaultfd. The compiler, the emulator
//! and the kernel are installed or downloaded if they are missing. The last line is
//! `N passed, N failed, N skipped`, as after `cargo xtask test`.

mod archive;
mod cross;
mod debian_root;
mod guest_code;
mod guest_programs;
mod machine;
mod package_trial;
mod packages;
mod test_run;
mod trial;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::{cargo, describe, run};
use crate::tally::Tally;
use crate::{guests, host};
use cross::{Pages, folder};
use machine::Machine;
use test_run::{TestProgram, TestRun};

pub(crate) use cross::{LINKER, TARGET, compiler};
pub(crate) use guest_code::{GuestCompiler, compile_guests};
pub(crate) use package_trial::{try_npm, try_wheel};
pub(crate) use trial::try_archive;

/// The packages whose tests run, in this order, and whether `--short` has them. Those of the Wasm
/// guests take minutes to compile and longer to run: `--package wasm`.
const PACKAGES: [(&str, bool); 10] = [
    ("sys", true),
    ("frames", true),
    ("pool", true),
    ("memory", true),
    ("arena", false),
    ("snapshot", false),
    ("store", false),
    ("pager", false),
    ("linux", false),
    ("cli", false),
];

const USAGE: &str =
    "usage: cargo xtask aarch64 [--short | --check | --package NAME…] [--pages 4k|16k] [FILTER…]";

#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    short: bool,
    check: bool,
    /// The packages to test in place of [`PACKAGES`].
    packages: Vec<String>,
    pages: Pages,
    /// Parts of names: only such tests run.
    filters: Vec<String>,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self::default();
        let mut arguments = arguments.iter().map(String::as_str);
        while let Some(argument) = arguments.next() {
            match argument {
                "--short" => options.short = true,
                "--check" => options.check = true,
                "--package" => {
                    let name = arguments.next().context(USAGE)?;
                    if !host::repository().join("crates").join(name).is_dir() {
                        bail!("there is no package crates/{name}; {USAGE}");
                    }
                    options.packages.push(name.to_owned());
                }
                "--pages" => {
                    options.pages = match arguments.next() {
                        Some("4k") => Pages::Small,
                        Some("16k") => Pages::Large,
                        Some(other) => bail!("no kernel with pages of {other:?}; {USAGE}"),
                        None => bail!(USAGE),
                    };
                }
                option if option.starts_with('-') => bail!("unknown option {option:?}; {USAGE}"),
                filter => options.filters.push(filter.to_owned()),
            }
        }
        let choices = [options.short, options.check, !options.packages.is_empty()];
        if choices.iter().filter(|set| **set).count() > 1 {
            bail!("--short, --check and --package exclude each other; {USAGE}");
        }
        Ok(options)
    }

    /// The packages to test.
    fn packages(&self) -> Vec<&str> {
        if self.pages == Pages::Large {
            return vec!["sys"];
        }
        if !self.packages.is_empty() {
            return self.packages.iter().map(String::as_str).collect();
        }
        let chosen = |(name, short)| (short || !self.short).then_some(name);
        PACKAGES.into_iter().filter_map(chosen).collect()
    }
}

/// `cargo xtask aarch64`
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode> {
    let options = Options::parse(arguments)?;
    compiler()?;
    if options.check {
        return check().map(|()| ExitCode::SUCCESS);
    }
    let start = Instant::now();
    let tests = tests(&options)?;
    println!("{} test programs: {:.0} s", tests.programs.len(), start.elapsed().as_secs_f64());
    let mut tally = Tally::default();
    let start = Instant::now();
    let result = tests.run(Machine::new(options.pages)?, &mut tally);
    println!("\nthe machine ran for {:.0} s", start.elapsed().as_secs_f64());
    for line in &tally.skips {
        println!("{line}");
    }
    if !tally.output.is_empty() {
        println!("\nthe output of failed tests:\n{}\n", tally.output.join("\n"));
    }
    for name in &tally.failures {
        println!("failed test: {name}");
    }
    if let Err(error) = &result {
        println!("{error:#}");
        tally.failed = tally.failed.max(1);
    }
    println!("{}", tally.line());
    let good = tally.failed == 0 && tally.passed > 0;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Cargo for arm64, with a separate target folder. Crates of others without own settings, which
/// are most of the command, are not optimised: compiling takes longer than these tests.
fn cross(command: &str) -> Command {
    let mut cargo = cargo();
    cargo
        .current_dir(host::repository())
        .args([command, "--locked", "--target", TARGET])
        .args(["--config", "profile.dev.package.\"*\".opt-level=0"])
        .env("CARGO_TARGET_DIR", folder())
        .env(LINKER.0, LINKER.1)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    cargo
}

/// Compiles the packages without their tests, and runs nothing.
fn check() -> Result<()> {
    let mut engine = cross("check");
    for (name, _) in PACKAGES {
        engine.args(["--package", &format!("afresh-{name}")]);
    }
    run(&mut engine)
}

/// Compiles the test programs and the commands that they run. Models of interleavings are the same
/// on every processor, and left out.
fn tests(options: &Options) -> Result<TestRun> {
    let mut command = cross("test");
    command.args(["--no-run", "--all-features", "--tests"]);
    command.arg("--message-format=json-render-diagnostics");
    for name in options.packages() {
        command.args(["--package", &format!("afresh-{name}")]);
    }
    println!("$ {}", describe(&command));
    let built =
        command.stderr(std::process::Stdio::inherit()).output().context("cannot run cargo")?;
    if !built.status.success() {
        bail!("`{}` failed: {}", describe(&command), built.status);
    }
    let text = String::from_utf8(built.stdout).context("cargo's messages are UTF-8")?;
    let messages = || text.lines().filter_map(|line| serde_json::from_str(line).ok());
    let mut programs: Vec<TestProgram> = messages().filter_map(|it| program(&it)).collect();
    let order: BTreeMap<_, _> =
        options.packages().into_iter().enumerate().map(|(at, name)| (name, at)).collect();
    programs.retain(|program| !program.test.ends_with("_model"));
    if options.pages == Pages::Large {
        programs.retain(|program| program.test == "page_size");
    }
    programs.sort_by_key(|program| {
        (order.get(program.package.as_str()).copied(), program.test.clone())
    });
    let commands: Vec<PathBuf> = messages().filter_map(|it| executable(&it, false)).collect();
    let mut files = Vec::new();
    if !commands.is_empty() {
        let guest = guests::named("js")?;
        guests::build(guest)?;
        files.push(guests::path(guest));
    }
    Ok(TestRun { programs, commands, files, filters: options.filters.clone() })
}

/// The test program that a message of cargo is about.
fn program(message: &Value) -> Option<TestProgram> {
    let file = executable(message, true)?;
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let folder = manifest.parent()?;
    Some(TestProgram {
        package: folder.file_name()?.to_str()?.to_owned(),
        test: message["target"]["name"].as_str()?.to_owned(),
        folder: folder.to_owned(),
        file,
    })
}

/// The executable that a message of cargo is about, if it is a test program or another one.
fn executable(message: &Value, of_tests: bool) -> Option<PathBuf> {
    let is_test = message["profile"]["test"].as_bool()?;
    (is_test == of_tests).then(|| message["executable"].as_str().map(PathBuf::from))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_about_a_test_program_names_it_and_others_do_not() {
        let line = r#"{"reason":"compiler-artifact","manifest_path":"/a/crates/sys/Cargo.toml",
            "target":{"name":"kernel"},"profile":{"test":true},"executable":"/a/target/kernel-1"}"#;
        let message = |line: &str| serde_json::from_str(line).expect("it is JSON");
        let found = program(&message(line)).expect("it is one");
        assert_eq!((found.package.as_str(), found.test.as_str()), ("sys", "kernel"));
        assert_eq!(found.folder, Path::new("/a/crates/sys"));
        let other = message(&line.replace("true", "false"));
        assert!(program(&other).is_none());
        assert_eq!(executable(&other, false), Some("/a/target/kernel-1".into()));
        assert!(program(&message(&line.replace("\"/a/target/kernel-1\"", "null"))).is_none());
        assert!(program(&message("{}")).is_none());
    }

    #[test]
    fn wrong_arguments_are_refused() {
        let parse = |words: &[&str]| {
            Options::parse(&words.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(parse(&["--pages", "16k"]).expect("it is known").packages(), ["sys"]);
        for wrong in [
            &["--pages", "64k"][..],
            &["--pages"],
            &["--package", "no"],
            &["--short", "--check"],
            &["--x"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
