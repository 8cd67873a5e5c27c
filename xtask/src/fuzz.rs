//! `cargo xtask fuzz`: every fuzz target for a bounded time, on the stable toolchain, or with
//! AddressSanitizer if a nightly one is installed.
//!
//! libFuzzer comes with the crate `libfuzzer-sys`, built by the host's C++ compiler; its guidance
//! comes from an LLVM pass that stable compilers have too. The seeds are made of the golden
//! snapshots. A target that crashes, hangs, or takes too much memory fails, and the input that did
//! it is kept and named.

mod seeds;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};

use crate::command::{cargo, output, run, succeeds};
use crate::host;
use seeds::seeds;

const USAGE: &str = "usage: cargo xtask fuzz [--seconds N] [TARGET…]";

/// Default seconds for each target.
pub(crate) const SECONDS: u32 = 20;
/// Seconds for each target in `cargo xtask test`: enough for the seeds and inputs near them.
const IN_TESTS: u32 = 5;

/// Every target, which is a binary in `fuzz/fuzz_targets`.
const TARGETS: [&str; 22] = [
    "page_layer",
    "layout",
    "archive",
    "snapshot",
    "turn",
    "journal",
    "vmm_handshake",
    "program",
    "cbor",
    "objects",
    "json",
    "e2b",
    "agent",
    "dns",
    "egress",
    "oci",
    "image_archive",
    "tree",
    "warm_state",
    "rewrite",
    "http",
    "elf",
];

/// Instrumentation for the fuzzer: edges that ran, and operands of comparisons.
const FLAGS: &str = "--cfg fuzzing -Ccodegen-units=1 -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";

/// The additional flags of AddressSanitizer: only nightly compilers have it.
const SANITIZER: &str = " -Zsanitizer=address";
/// The targets handle faults themselves, and end with the resources they began with.
const SANITIZER_OPTIONS: &str =
    "handle_segv=0:handle_sigbus=0:allow_user_segv_handler=1:detect_leaks=0";

/// Memory that a target may use, in MiB.
const MEMORY: u32 = 1024;
/// Seconds that one input may take.
const TIMEOUT: u32 = 10;

/// `cargo xtask fuzz`
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode> {
    let mut seconds = SECONDS;
    let mut targets = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        if argument == "--seconds" {
            let number = arguments.next().and_then(|n| n.parse().ok()).filter(|n| *n > 0);
            seconds = number.with_context(|| format!("--seconds needs a number; {USAGE}"))?;
        } else if let Some(target) = TARGETS.iter().find(|target| *target == argument) {
            targets.push(*target);
        } else {
            bail!("unknown target {argument:?}; known are {}; {USAGE}", TARGETS.join(", "));
        }
    }
    if targets.is_empty() {
        targets.extend(TARGETS);
    }
    host::cxx_compiler()?;
    let nightly = Toolchain::Nightly;
    let toolchain = if nightly.is_there() { nightly } else { Toolchain::Stable };
    match toolchain {
        Toolchain::Nightly => println!("fuzz: with AddressSanitizer, by the nightly toolchain"),
        Toolchain::Stable => {
            println!("fuzz: without AddressSanitizer; `rustup install nightly` has it")
        }
    }
    fuzz(&targets, seconds, toolchain).map(|()| ExitCode::SUCCESS)
}

/// Every target, for [`IN_TESTS`], with the toolchain of everything else. The compiler is there.
pub(crate) fn all() -> Result<()> {
    fuzz(&TARGETS, IN_TESTS, Toolchain::Stable)
}

/// The toolchain for the targets.
#[derive(Clone, Copy, PartialEq)]
enum Toolchain {
    /// The workspace's own.
    Stable,
    /// Nightly, for AddressSanitizer.
    Nightly,
}

impl Toolchain {
    fn is_there(self) -> bool {
        self == Self::Stable
            || succeeds(Command::new("rustup").args(["run", "nightly", "rustc", "-V"]))
    }
}

/// Builds the targets and runs as many of them at a time as there are processors.
fn fuzz(targets: &[&str], seconds: u32, toolchain: Toolchain) -> Result<()> {
    let programs = build(toolchain)?;
    let scratch = Scratch::new()?;
    let seeds = seeds(&host::repository().join("crates/store/tests/golden"))?;
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    let at_a_time = std::thread::available_parallelism().map_or(1, usize::from).min(targets.len());
    std::thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let seeds = seeds.get(target).map_or(&[][..], Vec::as_slice);
                    match one(target, &programs.join(target), &scratch.0, seeds, seconds) {
                        Ok(line) => println!("fuzz {target}: {line}"),
                        Err(error) => {
                            println!("fuzz {target}: FAILED: {error:#}");
                            let mut failures = failures.lock().unwrap_or_else(|e| e.into_inner());
                            failures.push(format!("{target}: {error:#}"));
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_else(|e| e.into_inner());
    if failures.is_empty() { Ok(()) } else { bail!("fuzzing found: {}", failures.join("; ")) }
}

/// Builds every target; returns the folder with the programs.
fn build(toolchain: Toolchain) -> Result<PathBuf> {
    // With a target named, the flags reach no build script.
    let version = output(Command::new("rustc").arg("-vV"))?;
    let triple = version.lines().find_map(|line| line.strip_prefix("host: "));
    let triple = triple.context("rustc does not report its host")?;
    let mut command = cargo();
    let (mut folder, mut flags) = (host::target_folder().join("fuzz"), FLAGS.to_owned());
    if toolchain == Toolchain::Nightly {
        folder = folder.join("address");
        flags += SANITIZER;
        command = Command::new("rustup");
        command.args(["run", "nightly", "cargo"]);
        // The variables of this program's own start are for another toolchain.
        for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
            command.env_remove(name);
        }
    }
    command
        .current_dir(host::repository().join("fuzz"))
        .args(["build", "--release", "--locked", "--bins", "--target", triple])
        .env("CARGO_TARGET_DIR", &folder)
        .env("RUSTFLAGS", flags)
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    run(&mut command).context("cannot build the fuzz targets")?;
    Ok(folder.join(triple).join("release"))
}

/// A folder for files of targets, in memory if the host has such a place: they write small files by
/// the thousand, and make each durable.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        let name = format!("afresh-fuzz-{}", std::process::id());
        for parent in [PathBuf::from("/dev/shm"), std::env::temp_dir()] {
            let folder = parent.join(&name);
            if fs::create_dir(&folder).is_ok() {
                return Ok(Self(folder));
            }
        }
        bail!("cannot make a folder in {}", std::env::temp_dir().display())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The remains are only untidy.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs one target; returns what it reached.
fn one(
    target: &str,
    program: &Path,
    scratch: &Path,
    seeds: &[Vec<u8>],
    seconds: u32,
) -> Result<String> {
    let corpus = scratch.join(target).join("corpus");
    let temporary = scratch.join(target).join("tmp");
    let kept = host::target_folder().join("fuzz/artifacts").join(target);
    for folder in [&corpus, &temporary, &kept] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let mut files = Vec::new();
    for (number, seed) in seeds.iter().enumerate() {
        let file = corpus.join(format!("seed-{number}"));
        fs::write(&file, seed).context("cannot write a seed")?;
        files.push(file);
    }
    let log = kept.join("log");
    let ask = |what: &dyn Fn(&mut Command)| -> Result<String> {
        let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new(program);
        command
            .arg(format!("-rss_limit_mb={MEMORY}"))
            .arg(format!("-timeout={TIMEOUT}"))
            .arg(format!("-artifact_prefix={}/", kept.display()))
            .env("TMPDIR", &temporary)
            .env("ASAN_OPTIONS", SANITIZER_OPTIONS)
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("cannot share the log")?)
            .stderr(file);
        what(&mut command);
        let status =
            command.status().with_context(|| format!("cannot run {}", program.display()))?;
        let said = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
        let said = String::from_utf8_lossy(&said).into_owned();
        if !status.success() {
            let input = said.lines().find_map(|line| line.split_once("Test unit written to "));
            let input =
                input.map_or(String::new(), |(_, path)| format!("; the input is in {path}"));
            bail!("{status}{input}; what was said is in {}", log.display());
        }
        Ok(said)
    };
    // A target that refuses its seeds never gets beyond the first check of its code.
    ask(&|command| {
        command.args(&files).env("AFRESH_FUZZ_SEEDS", "1");
    })
    .context("with nothing but the seeds")?;
    let said = ask(&|command| {
        command.arg(format!("-max_total_time={seconds}")).arg(&corpus);
    })?;
    reached(&said)
        .with_context(|| format!("the fuzzer did not report its coverage: {}", log.display()))
}

/// Edges reached by the seeds and at the end, and how many inputs that took.
fn reached(said: &str) -> Option<String> {
    let cov = |word: &str| {
        let line = said.lines().rfind(|line| line.split_whitespace().nth(1) == Some(word))?;
        let cov = line.split_once("cov: ")?.1.split_whitespace().next()?;
        Some((line.split_whitespace().next()?.trim_start_matches('#'), cov))
    };
    let ((_, first), (runs, last)) = (cov("INITED")?, cov("DONE")?);
    Some(format!("{runs} inputs, {first} edges reached by the seeds, {last} at the end"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_a_source_an_entry_and_seeds_that_are_short() -> Result<()> {
        let folder = host::repository().join("fuzz");
        let manifest = fs::read_to_string(folder.join("Cargo.toml"))?;
        let seeds = seeds(&host::repository().join("crates/store/tests/golden"))?;
        for target in TARGETS {
            assert!(folder.join("fuzz_targets").join(target).with_extension("rs").is_file());
            assert!(manifest.contains(&format!("name = \"{target}\"")), "{target}");
            assert!(!seeds[target].is_empty(), "{target}");
            assert!(seeds[target].iter().all(|seed| seed.len() < 16 << 10), "{target}");
        }
        assert_eq!(fs::read_dir(folder.join("fuzz_targets"))?.count(), TARGETS.len());
        assert_eq!(seeds["layout"].len(), 3);
        let layout = String::from_utf8_lossy(&seeds["layout"][0]);
        assert!(["$C", "$c", "$M", "$m"].iter().all(|mark| layout.contains(mark)), "{layout}");
        Ok(())
    }

    #[test]
    fn coverage_is_read_from_the_output_of_the_fuzzer() {
        let said =
            "INFO: x\n#3\tINITED cov: 37 ft: 37 corp: 1/1b\n#9\tDONE   cov: 52 ft: 60\nDone 9";
        let line = reached(said).expect("both lines are there");
        assert_eq!(line, "9 inputs, 37 edges reached by the seeds, 52 at the end");
        assert_eq!(reached("#3\tINITED cov: 37"), None);
    }
}
