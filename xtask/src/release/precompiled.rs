//! The guests of the Python and the npm package, compiled when the package is made.
//!
//! Compiling the JavaScript guest takes more than a second of one core, which the first
//! `warm("js")` on a host would wait for. The code runs on every x86-64 processor since 2013, or on
//! every arm64 processor; another one compiles for itself. It is trusted as the native library of
//! the package, which compiled it, and wasmtime refuses code of another version of itself. A
//! package for arm64 compiles in the emulated machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::installation::{copy, create};
use super::origin::time;
use crate::command::run;
use crate::host;

/// The folder of compiled guests, in that of the guests.
const FOLDER: &str = "precompiled";

/// The function of the Python package that fills a folder with compiled guests.
pub(super) const COMPILE: &str =
    "import sys; from afresh import _languages; _languages.precompile(sys.argv[1])";

/// Adds a folder of compiled guests to the guests of a package; `compile` fills it.
pub(crate) fn add_to(guests: &Path, compile: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let folder = guests.join(FOLDER);
    compile(&folder)?;
    let mut kinds = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        kinds.push(path.extension().unwrap_or_default().to_string_lossy().into_owned());
    }
    kinds.sort();
    ensure!(kinds == ["cwasm", "prepared"], "{} has {kinds:?}", folder.display());
    // Caches are private to their user, and packages are for all.
    run(Command::new("chmod").arg("-R").arg("u=rwX,go=rX").arg(folder))
}

/// Adds the compiled guests to a wheel for this host's C library, whose native half compiles them.
pub(crate) fn into_wheel(python: &Path, wheel: &Path) -> Result<()> {
    into_wheel_by(python, wheel, |package, folder| {
        let mut compile = Command::new(python);
        compile.current_dir(package).env("PYTHONDONTWRITEBYTECODE", "1");
        run(compile.arg("-c").arg(COMPILE).arg(folder))
    })
}

/// Adds the guests that `compile` makes to a wheel. It gets the unpacked package, and the folder
/// for them.
pub(super) fn into_wheel_by(
    python: &Path,
    wheel: &Path,
    compile: impl FnOnce(&Path, &Path) -> Result<()>,
) -> Result<()> {
    repack(python, wheel, |guests, kept| {
        add_to(guests, |folder| compile(&guests.join("../.."), folder))?;
        if kept.exists() {
            std::fs::remove_dir_all(kept)?;
        }
        copy_files(&guests.join(FOLDER), kept)
    })
}

/// Adds the guests that the last wheel compiled to one for another C library: their code is the
/// same.
pub(super) fn into_other_wheel(python: &Path, wheel: &Path) -> Result<()> {
    repack(python, wheel, |guests, kept| add_to(guests, |folder| copy_files(kept, folder)))
}

/// Changes a wheel. `change` gets the folder of its guests, and the one that stores compiled guests
/// between wheels.
fn repack(
    python: &Path,
    wheel: &Path,
    change: impl FnOnce(&Path, &Path) -> Result<()>,
) -> Result<()> {
    let scratch = host::target_folder().join("python/wheel");
    let kept = host::target_folder().join("python").join(FOLDER);
    if scratch.exists() {
        std::fs::remove_dir_all(&scratch)?;
    }
    let mut unpack = Command::new(python);
    unpack.args(["-m", "wheel", "unpack"]).arg(wheel).arg("--dest").arg(&scratch);
    run(&mut unpack)?;
    let unpacked = only_entry(&scratch)?;
    change(&unpacked.join("afresh/guests"), &kept)?;
    let folder = wheel.parent().context("a wheel is in a folder")?;
    std::fs::remove_file(wheel).with_context(|| wheel.display().to_string())?;
    let mut pack = Command::new(python);
    pack.env("SOURCE_DATE_EPOCH", time()?).args(["-m", "wheel", "pack"]).arg(&unpacked);
    run(pack.arg("--dest-dir").arg(folder))?;
    ensure!(wheel.is_file(), "`wheel pack` did not write {}", wheel.display());
    std::fs::remove_dir_all(&scratch).with_context(|| scratch.display().to_string())
}

fn copy_files(from: &Path, to: &Path) -> Result<()> {
    create(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

/// The entry of a folder that has one.
fn only_entry(folder: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut entries = entries.collect::<Result<Vec<_>>>()?;
    ensure!(entries.len() == 1, "{} has {} entries", folder.display(), entries.len());
    entries.pop().context("it has an entry")
}
