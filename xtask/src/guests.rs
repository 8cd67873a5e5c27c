//! Building the guests: the Wasm modules and components that tests, benchmarks and the
//! demonstration run.
//!
//! Each is a crate of the workspace in `guests/`, and becomes `target/guests/NAME.wasm`. One whose
//! inputs did not change since it was built is skipped. The micro-VM's guests are built by
//! [`crate::vm`].

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, output, run};
use crate::extism;
use crate::host::{self, WasiCompiler};
use crate::stamp;
use crate::vm;
use crate::wasm::{self, Kind};

/// The exports of a guest that handles bytes.
const BYTES: &[&str] =
    &["memory", "_initialize", "warm", "afresh_buffer", "handle", "afresh_reseed"];

/// The exports of one that evaluates code.
const EVALUATES: &[&str] =
    &["memory", "_initialize", "warm", "afresh_buffer", "evaluate", "afresh_reseed"];

/// A guest and how to build it.
#[derive(Debug)]
pub(crate) struct Guest {
    /// Its folder in `guests/`, and the name of its file.
    pub(crate) name: &'static str,
    pub(crate) target: &'static str,
    kind: Kind,
    /// Functions and memories that it must export.
    exports: &'static [&'static str],
    needs: GuestNeeds,
}

/// Requirements of a guest in addition to Rust.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GuestNeeds {
    Nothing,
    /// Parts of it are written in C.
    C,
    /// It runs over Extism's kernel.
    Kernel,
}

/// Every guest, the quickest to build first.
pub(crate) const ALL: &[Guest] = &[
    Guest {
        name: "sieve",
        target: "wasm32-unknown-unknown",
        kind: Kind::Module,
        exports: &["memory", "warm", "dirty", "trap", "recurse", "spin", "grow", "secret_read"],
        needs: GuestNeeds::Nothing,
    },
    Guest {
        name: "component",
        target: "wasm32-wasip2",
        kind: Kind::Component,
        exports: &["warm", "deposit", "search", "fill", "digest"],
        needs: GuestNeeds::Nothing,
    },
    Guest {
        name: "files",
        target: "wasm32-wasip2",
        kind: Kind::Component,
        exports: &[],
        needs: GuestNeeds::Nothing,
    },
    Guest {
        name: "http",
        target: "wasm32-wasip2",
        kind: Kind::Component,
        exports: &["wasi:http/incoming-handler@0.2.12"],
        needs: GuestNeeds::Nothing,
    },
    Guest {
        name: "extism",
        target: "wasm32-unknown-unknown",
        kind: Kind::Module,
        exports: &["memory", "warm", "handle", "plant", "probe"],
        needs: GuestNeeds::Kernel,
    },
    Guest {
        name: "turns",
        target: "wasm32-wasip1",
        kind: Kind::Module,
        exports: &["memory", "_initialize", "turn", "host_alloc"],
        needs: GuestNeeds::Nothing,
    },
    Guest {
        name: "js",
        target: "wasm32-wasip1",
        kind: Kind::Module,
        exports: BYTES,
        needs: GuestNeeds::C,
    },
    Guest {
        name: "quickjs",
        target: "wasm32-wasip1",
        kind: Kind::Module,
        exports: EVALUATES,
        needs: GuestNeeds::C,
    },
];

/// `cargo xtask guests [--only NAME]...`
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let mut names = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--only" => {
                names.push(arguments.next().context("--only needs a guest's name")?.as_str());
            }
            other => match other.strip_prefix("--only=") {
                Some(name) => names.push(name),
                None => {
                    bail!("unknown argument {other:?}; usage: cargo xtask guests [--only NAME]")
                }
            },
        }
    }
    if names.is_empty() {
        return all();
    }
    let micro_vm = names.contains(&vm::NAME);
    names.retain(|name| *name != vm::NAME);
    let chosen = names.into_iter().map(named).collect::<Result<Vec<_>>>()?;
    chosen.into_iter().try_for_each(build)?;
    if micro_vm { vm::build() } else { Ok(()) }
}

/// Builds everything that a test, a benchmark or the demonstration runs.
pub(crate) fn all() -> Result<()> {
    ALL.iter().try_for_each(build)?;
    vm::build()
}

/// The guest of this name.
pub(crate) fn named(name: &str) -> Result<&'static Guest> {
    let known =
        || ALL.iter().map(|guest| guest.name).chain([vm::NAME]).collect::<Vec<_>>().join(", ");
    ALL.iter()
        .find(|guest| guest.name == name)
        .with_context(|| format!("there is no guest {name:?}; the guests are {}", known()))
}

/// The path of the built guest.
pub(crate) fn path(guest: &Guest) -> PathBuf {
    folder().join(guest.name).with_extension("wasm")
}

/// Builds the guest, unless it is there and its inputs are unchanged, and checks the result.
pub(crate) fn build(guest: &Guest) -> Result<()> {
    if guest.needs == GuestNeeds::Kernel {
        extism::kernel()?;
    }
    let start = Instant::now();
    let file = path(guest);
    let digest = inputs(guest)?;
    if stamp::is_current(&file, &digest) {
        println!("guest {}: unchanged, {}", guest.name, describe(&file)?);
        return Ok(());
    }

    host::rust_target(guest.target)?;
    let mut command = cargo();
    command.current_dir(host::repository());
    command.args(["build", "--release", "--locked", "--manifest-path", "guests/Cargo.toml"]);
    command.args(["--target", guest.target, "--package"]).arg(package(guest));
    command.arg("--target-dir").arg(folder().join("build"));
    if guest.needs == GuestNeeds::C {
        WasiCompiler::find_or_install()?.configure(&mut command);
    }
    run(&mut command).with_context(|| format!("cannot build the guest {}", guest.name))?;

    let built = folder()
        .join("build")
        .join(guest.target)
        .join("release")
        .join(package(guest).replace('-', "_"))
        .with_extension("wasm");
    let bytes = fs::read(&built).with_context(|| format!("cannot read {}", built.display()))?;
    wasm::check(&bytes, guest.kind, guest.exports)
        .with_context(|| format!("the guest {} did not build as expected", guest.name))?;
    // A reader of the old file keeps it whole.
    let fresh = file.with_extension("wasm.new");
    fs::write(&fresh, &bytes).with_context(|| format!("cannot write {}", fresh.display()))?;
    fs::rename(&fresh, &file).with_context(|| format!("cannot write {}", file.display()))?;
    stamp::record(&file, &digest)?;
    let took = start.elapsed().as_secs_f64();
    println!("guest {}: built in {took:.1} s, {}", guest.name, describe(&file)?);
    Ok(())
}

/// All inputs of the build.
fn inputs(guest: &Guest) -> Result<String> {
    let guests = host::repository().join("guests");
    let inputs = ["Cargo.toml", "Cargo.lock", "abi", guest.name].map(|name| guests.join(name));
    let rustc = output(Command::new("rustc").arg("-vV"))?;
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    stamp::digest(&inputs, &[guest.target, &rustc, &flags])
}

fn package(guest: &Guest) -> String {
    format!("afresh-guest-{}", guest.name)
}

fn folder() -> PathBuf {
    host::repository().join("target/guests")
}

fn describe(file: &PathBuf) -> Result<String> {
    let size = fs::metadata(file).with_context(|| format!("cannot read {}", file.display()))?.len();
    let shown = file.strip_prefix(host::repository()).unwrap_or(file);
    Ok(format!("{:.2} MiB: {}", size as f64 / (1 << 20) as f64, shown.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_guest_has_a_crate_of_the_expected_name() -> Result<()> {
        for guest in ALL {
            let manifest = host::repository().join("guests").join(guest.name).join("Cargo.toml");
            let text = fs::read_to_string(&manifest)
                .with_context(|| format!("cannot read {}", manifest.display()))?;
            assert!(text.contains(&format!("name = \"{}\"", package(guest))), "{}", guest.name);
        }
        Ok(())
    }

    #[test]
    fn unknown_names_and_arguments_are_refused_with_the_known_ones() {
        let error = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            format!("{:#}", main(&words).expect_err("must be refused"))
        };
        assert!(
            error(&["--only", "cobol"])
                .contains("sieve, component, files, http, extism, turns, js, quickjs, vm")
        );
        assert!(error(&["--only"]).contains("needs a guest's name"));
        assert!(error(&["--fast"]).contains("--fast"));
    }
}
