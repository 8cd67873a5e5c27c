//! Set-up and checks for this repository, run as `cargo xtask COMMAND`.
//!
//! Every command installs the tools that it lacks, prints each external command before it runs it,
//! and names the one that failed. It depends on next to nothing, so that it compiles in seconds.

use std::process::ExitCode;

use anyhow::{Result, bail};

mod book;
mod clients;
mod command;
mod conformance;
mod demo;
mod deploy;
mod extism;
mod fuzz;
mod guests;
mod host;
mod miri;
mod names;
mod packages;
mod prose;
mod python;
mod registry;
mod release;
mod soak;
mod stamp;
mod tally;
mod test;
mod tools;
mod units;
mod vm;
mod wasi;
mod wasm;

const USAGE: &str = "\
Usage: cargo xtask COMMAND

Commands:
  book                   Check the pages and links of the documentation, and build the book with mdbook into
                         target/book.
  conformance [--source REPOSITORY] [CALL…]
                         Run the Linux Test Project's cases for the calls that Linux guests are served, as guests
                         and without us, and write the table in docs/linux-calls.md: fetches and builds
                         the project's sources, for a quarter of an hour and more.
  demo                   Build the JavaScript guest and `afresh-bench`, and show the main job:
                         a call plants a secret, the next finds nothing of it; and what that costs.
  fuzz [--seconds N] [TARGET…]
                         Build the fuzz targets and run each for a time, 20 s unless said otherwise;
                         a crash fails, and the input that did it is kept and named.
  guests [--only NAME]   Build the guests (installing compilers and targets that are missing)
                         into target/guests; those whose inputs did not change are skipped.
                         NAME: component, js, quickjs, sieve or vm; may be repeated.
  lint                   Compile every test, and hold clippy and rustdoc against what was compiled.
  miri                   Run the engine's bookkeeping in Miri, over a pretend kernel; installs the nightly
                         toolchain where it is missing.
  soak [--seconds N] [--first SEED] [--seed SEED]
                         Hold warm guests against plain wasmtime: the specification's tests, then random
                         modules with state until the time is up, 60 s unless said otherwise. A seed that
                         differs fails, is kept with its module and named; --seed runs it alone.
  soak --server [--seconds N]
                         Keep three servers under load, 60 s unless said otherwise, while guests trap, run over
                         their time and grow, and hosts are drained and killed.
  soak --fleet [--seconds N]
                         Check the history of sandboxes in a fleet of three hosts and three NATS servers under
                         pauses, partitions, lost answers and restarts, 1800 s unless said otherwise.
  registry-guests        Build what componentize-js, componentize-py, AssemblyScript, Go and TinyGo make of
                         guests/registry, and install CPython with numpy and pandas as a module: downloads
                         hundreds of MB, and takes some minutes.
  prose [--lower]        Count sentences that read as translated, and refuse more of them than before;
                         --lower writes lower numbers to xtask/prose/baseline.txt.
  release [TARGET]       Build the archive of the command that a release has, into
                         target/release-archives.
  test [--retry] [--within MINUTES]
                         Check format, lints and documentation, build the guests and the test servers, run
                         all tests, the Python package's too, fuzz, run Miri, package every crate, and check
                         the dependencies; ends with a line `N passed, N failed, N skipped`.
                         --retry runs failed tests once more and names those that pass as flaky;
                         --within leaves out the last steps where they would not fit.
  cpython                Test the Python package's language `python` with the CPython that it is, and
                         its adapters: downloads 100 MB and more, and compiles for some minutes
  wasi-testsuite [FOLDER]
                         Run the public test suite of WASI preview 1 over a file tree in memory and over a
                         directory; fetches it by git unless a folder has it.
  wheel                  Build the wheel of the Python package that is published, into
                         target/python/published.
";

fn main() -> ExitCode {
    if let Some(folder) = units::wrapped() {
        let Err(error) = units::wrap(&folder);
        eprintln!("xtask: {error:#}");
        return ExitCode::FAILURE;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &[String]) -> Result<ExitCode> {
    match arguments.split_first().map(|(name, rest)| (name.as_str(), rest)) {
        Some(("book", rest)) => book::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("conformance", rest)) => conformance::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("demo", rest)) => demo::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("fuzz", rest)) => fuzz::main(rest),
        Some(("guests", rest)) => guests::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("lint", rest)) => test::lint(rest),
        Some(("miri", rest)) => miri::main(rest),
        Some(("prose", rest)) => prose::main(rest),
        Some(("soak", rest)) => soak::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("registry-guests", rest)) => registry::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("release", rest)) => release::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("test", rest)) => test::main(rest),
        Some(("wasi-testsuite", rest)) => wasi::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("wheel", rest)) => python::wheel(rest).map(|()| ExitCode::SUCCESS),
        Some(("cpython", rest)) => python::cpython(rest).map(|()| ExitCode::SUCCESS),
        Some(("help" | "--help" | "-h", _)) => {
            print!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        Some((other, _)) => bail!("unknown command {other:?}\n\n{USAGE}"),
        None => bail!("no command given\n\n{USAGE}"),
    }
}
