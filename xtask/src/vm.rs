//! Building the sample guests of the micro-VM: static executables for the host's own processor.
//!
//! They are a separate workspace, `guests/vm`, because they need other linker arguments. The tests
//! of `afresh-vm` build them too; both builds share a folder, so that the second finds nothing left
//! to do. The finished executables are copied to `target/guests/vm/NAME`.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, run};
use crate::host;

/// Their name for `--only`.
pub(crate) const NAME: &str = "vm";

/// The samples that must come out.
const SAMPLES: &[&str] = &["crash", "dirty", "hash", "json", "spin", "taint", "zlib"];

/// Builds the samples, where the host's processor is one that the micro-VM supports.
pub(crate) fn build() -> Result<()> {
    if !cfg!(target_arch = "x86_64") {
        println!("SKIPPED: micro-VM guests are for x86_64");
        return Ok(());
    }
    host::c_compiler()?;
    let target = host::target_folder().join("tmp/guests-vm");
    let mut command = cargo();
    // Set here, not by --target-dir and --manifest-path: the folder's own cargo configuration
    // counts, and flags meant for the host's crates must not reach a guest.
    command
        .args(["build", "--release", "--locked"])
        .current_dir(host::repository().join("guests/vm"))
        .env("CARGO_TARGET_DIR", &target)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    run(&mut command).context("cannot build the micro-VM guests")?;

    let folder = folder();
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for name in SAMPLES {
        let built = target.join("release").join(name);
        let bytes = fs::read(&built).with_context(|| format!("cannot read {}", built.display()))?;
        if !bytes.starts_with(b"\x7fELF") {
            bail!("the micro-VM guest {name} did not build as expected: not an ELF file");
        }
        // A reader of the old file keeps it whole.
        let (fresh, file) = (folder.join(format!("{name}.new")), folder.join(name));
        fs::write(&fresh, &bytes).with_context(|| format!("cannot write {}", fresh.display()))?;
        fs::rename(&fresh, &file).with_context(|| format!("cannot write {}", file.display()))?;
    }
    println!("guests of the micro-VM: {} in target/guests/vm", SAMPLES.join(", "));
    Ok(())
}

fn folder() -> PathBuf {
    host::repository().join("target/guests").join(NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_that_must_come_out_has_a_source() {
        let sources = host::repository().join("guests/vm/samples/src/bin");
        for name in SAMPLES {
            assert!(sources.join(name).with_extension("rs").is_file(), "{name}");
        }
    }
}
