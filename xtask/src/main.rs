//! Set-up and checks for this repository, run as `cargo xtask COMMAND`.
//!
//! Every command installs the tools that it lacks, prints each external command before it runs it,
//! and names the one that failed. It depends on next to nothing, so that it compiles in seconds.

use std::process::ExitCode;

use anyhow::{Result, bail};

mod aarch64;
mod adapters;
mod arrows;
mod artifact_cache;
mod book;
mod chart;
mod clients;
mod columns;
mod command;
mod conformance;
mod demo;
mod deploy;
mod e2b_suite;
mod extism;
mod feature_lines;
mod fuzz;
mod groups;
mod guests;
mod host;
mod inspector;
mod kube;
mod layers;
mod miri;
mod names;
mod node;
mod packages;
mod portable;
mod programs;
mod promises;
mod prose;
mod python;
mod registry;
mod release;
mod rivals;
mod signatures;
mod soak;
mod sources;
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
  aarch64 [--short | --check | --package NAME…] [--pages 4k|16k] [FILTER…]
                         Cross-compile the tests of the engine and of the command and run them on arm64 Linux, in an
                         emulated machine with Debian's kernel. --short runs those of the lowest layers, --package those of crates/NAME;
                         --check compiles only. --pages 16k boots a kernel that afresh refuses. A FILTER is a part of
                         the names of the tests that run.
  book                   Check the pages and links of the documentation, and build the book with mdbook into
                         target/book.
  chart                  Render the Helm chart by Helm's engine, and decode each object strictly as its type of
                         Kubernetes. Compiles a Go program, which takes some minutes at first.
  conformance [--source REPOSITORY] [CALL…]
                         Run the Linux Test Project's cases for the served system calls, as guests and natively,
                         and write the table in docs/linux-calls.md. Fetches and builds the project's sources,
                         which takes a quarter of an hour or more.
  conformance --gvisor [--source REPOSITORY] [BINARY…]
                         Run gVisor's tests of system calls, as guests and natively, and write the table in
                         docs/gvisor-tests.md. Builds the tests first, which takes about an hour.
  demo                   Build the JavaScript guest and `afresh-bench`, and show the main job:
                         a call plants a secret, the next call finds no trace of it, and the cost is measured.
  e2b-suite [--source PREFIX] [--server PROGRAM] [SUITE…]
                         Run E2B's own integration suites against `afresh serve` with its published clients, and
                         write the counts in docs/e2b-suite.md. Fetches the suites with git and some hundred MB of
                         packages. SUITE: sandboxes, templates or code-interpreter.
  fuzz [--seconds N] [TARGET…]
                         Build the fuzz targets and run each for N seconds (20). A crash fails the command; the
                         input is kept and its path printed.
  guests [--only NAME]   Build the guests (installing compilers and targets that are missing)
                         into target/guests. Guests with unchanged inputs are skipped.
                         NAME: component, js, quickjs, sieve or vm; may be repeated.
  kube [FILTER…]         Build, lint and test the Kubernetes controller in kubernetes/, which is outside of the
                         workspace, with a real kube-apiserver and etcd. Builds them from the Go module proxy at first,
                         which takes a quarter of an hour or more. A FILTER is a part of the names of the tests.
  lint                   Compile every test, and run clippy and rustdoc.
  miri                   Run the engine's bookkeeping in Miri, over a simulated kernel. Installs the nightly
                         toolchain if it is missing.
  node [--release]       Put the npm package together in target/node, and test it with the host's Node and with
                         Node 18 and 22 from npm. --release builds the archive that is published, into
                         target/node/published.
  soak [--seconds N] [--first SEED] [--seed SEED]
                         Compare warm guests with plain wasmtime for N seconds (60): the specification's tests,
                         then random modules with state. A difference fails the command; the seed and its module
                         are kept and printed. --seed runs one seed.
  soak --server [--seconds N]
                         Keep three servers under load for N seconds (60) while guests trap, exceed their time
                         limit and grow, and hosts are drained and killed.
  soak --fleet [--seconds N]
                         Check the history of sandboxes for N seconds (1800) in a fleet of three hosts and three
                         NATS servers, under pauses, partitions, lost answers and restarts.
  soak --pager [--kills N]
                         Kill N pagers (10000) at some moment each while a VM reads its memory. No page of zeros
                         may appear in place of content, and no VM may wait.
  registry-guests        Build guests/registry with componentize-js, componentize-py, AssemblyScript, Go and TinyGo,
                         and install CPython with numpy and pandas as a module. Downloads hundreds of MB and takes
                         some minutes.
  programs [--command FILE] [--runs N] [--install] [--short] [--only NAME]…
                         Run what people run (git, make, npm, PostgreSQL and others), natively and as a guest, and
                         compare output and exit status. Prints a table with wall times, writes it to
                         target/programs/results.json and docs/linux-programs.md, and fails where a program fails that
                         is not listed with a reason. --install adds missing programs by apt; without it they are
                         skipped. --short runs those of a bare Debian, as `test` does.
  portable [--check]     Compile the library with Wasm guests for macOS and Windows, and test it here over the backend
                         for these systems. --check compiles only.
  prose                  Check the text: sentences with a marker of translated English, of which a file has at most
                         3 %, names, signatures, columns, import circles and conditional lines. Takes seconds.
  release [--profile PROFILE | --command FILE] [--target TARGET] [--only KIND,…] [--try]
                         Build the packages of a release into target/release-archives: archive, deb, rpm,
                         static-archive, image, wheel, musl-wheel, npm and c-library, with checksums and a list of
                         components. --command packages a command that was built before. --try installs each package
                         in a clean Debian root and uses it there; this needs root. --target
                         aarch64-unknown-linux-gnu builds archive and deb for arm64 into
                         target/release-archives-aarch64, and tries the archive in the emulated machine of
                         `cargo xtask aarch64`.
  rivals [--only NAME]…  Install the programs that benchmarks compare afresh with into target/rivals: gvisor and eryx
                         (Debian's and PyPI's), fuzz (LibAFL, AFL++ and libpng) and wago. Downloads some hundred MB
                         and compiles for some minutes. A rival that cannot be installed is reported, and is
                         a failure if --only names it.
  test [--cache] [--retry] [--within MINUTES]
                         Check format, lints and documentation, build the guests and the test servers, run
                         all tests, including those of the Python and npm packages, fuzz, run Miri, package every
                         crate and check the dependencies. The last line is `N passed, N failed, N skipped`.
                         --cache stores third-party artifacts in the user's cache folder, for the next checkout.
                         --retry runs failed tests again and reports those that pass as flaky.
                         --within ends a slow build after two thirds of MINUTES and runs the groups of tests that
                         were built, and omits later steps that would exceed MINUTES.
  cpython                Test the language `python` and the adapters of the Python package with the full CPython
                         guest. Downloads 100 MB or more and compiles for some minutes.
  adapters [--lock] [frameworks|rollouts|inspector]…
                         Test the Jupyter kernel, the adapters to agent frameworks and `afresh mcp` with the
                         published packages. Downloads some hundred MB. --lock looks for versions of all
                         packages anew and writes the lock files.
  wasi-testsuite [FOLDER]
                         Run the public test suite of WASI preview 1 over a file tree in memory and over a
                         directory. Fetches it with git unless FOLDER has it.
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
        Some(("aarch64", rest)) => aarch64::main(rest),
        Some(("book", rest)) => book::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("chart", rest)) => chart::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("conformance", rest)) => conformance::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("demo", rest)) => demo::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("e2b-suite", rest)) => e2b_suite::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("fuzz", rest)) => fuzz::main(rest),
        Some(("guests", rest)) => guests::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("kube", rest)) => kube::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("lint", rest)) => test::lint(rest),
        Some(("miri", rest)) => miri::main(rest),
        Some(("portable", rest)) => portable::main(rest),
        Some(("node", rest)) => node::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("programs", rest)) => programs::main(rest),
        Some(("prose", rest)) => prose::main(rest),
        Some(("soak", rest)) => soak::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("registry-guests", rest)) => registry::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("release", rest)) => release::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("rivals", rest)) => rivals::main(rest),
        Some(("test", rest)) => test::main(rest),
        Some(("wasi-testsuite", rest)) => wasi::main(rest).map(|()| ExitCode::SUCCESS),
        Some(("wheel", rest)) => python::wheel(rest).map(|()| ExitCode::SUCCESS),
        Some(("cpython", rest)) => python::cpython(rest).map(|()| ExitCode::SUCCESS),
        Some(("adapters", rest)) => adapters::command(rest).map(|()| ExitCode::SUCCESS),
        Some(("help" | "--help" | "-h", _)) => {
            print!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        Some((other, _)) => bail!("unknown command {other:?}\n\n{USAGE}"),
        None => bail!("no command given\n\n{USAGE}"),
    }
}
