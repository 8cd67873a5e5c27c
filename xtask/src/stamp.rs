//! Stamps: whether something was built from the inputs as they are now.
//!
//! A stamp is a digest of paths and contents of all input files, kept in a file next to the output.
//! It notices every change of an input, also one that keeps the file's time. It does not notice a
//! change of the output.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The digest of the files and folders `inputs` and of the words `also`.
pub(crate) fn digest(inputs: &[PathBuf], also: &[&str]) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    also.hash(&mut hasher);
    for input in inputs {
        add(input, &mut hasher)?;
    }
    Ok(format!("{:016x}", hasher.finish()))
}

fn add(path: &Path, hasher: &mut DefaultHasher) -> Result<()> {
    path.hash(hasher);
    if path.is_dir() {
        let list = || -> std::io::Result<Vec<PathBuf>> {
            fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect()
        };
        let mut entries = list().with_context(|| format!("cannot list {}", path.display()))?;
        entries.sort();
        entries.iter().try_for_each(|entry| add(entry, hasher))
    } else {
        let content = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        content.hash(hasher);
        Ok(())
    }
}

/// Whether `output` exists and was built from inputs of this digest.
pub(crate) fn is_current(output: &Path, digest: &str) -> bool {
    output.is_file() && fs::read_to_string(stamp_of(output)).is_ok_and(|found| found == digest)
}

/// Notes that `output` was built from inputs of this digest.
pub(crate) fn record(output: &Path, digest: &str) -> Result<()> {
    let stamp = stamp_of(output);
    fs::write(&stamp, digest).with_context(|| format!("cannot write {}", stamp.display()))
}

fn stamp_of(output: &Path) -> PathBuf {
    output.with_extension("stamp")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_stale_after_a_changed_an_added_and_a_removed_input() -> Result<()> {
        let folder = std::env::temp_dir().join(format!("xtask-stamp-{}", std::process::id()));
        let inputs = [folder.join("inputs")];
        fs::create_dir_all(inputs[0].join("inner"))?;
        fs::write(inputs[0].join("inner/a"), "one")?;
        let output = folder.join("built.wasm");
        let first = digest(&inputs, &["compiler 1"])?;
        record(&output, &first)?;
        assert!(!is_current(&output, &first), "no output yet");
        fs::write(&output, "built")?;
        assert!(is_current(&output, &first));
        assert!(!is_current(&output, &digest(&inputs, &["compiler 2"])?), "other compiler");
        fs::write(inputs[0].join("inner/a"), "two")?;
        assert!(!is_current(&output, &digest(&inputs, &["compiler 1"])?), "changed input");
        fs::write(inputs[0].join("inner/a"), "one")?;
        assert!(is_current(&output, &digest(&inputs, &["compiler 1"])?), "changed back");
        fs::write(inputs[0].join("b"), "")?;
        assert!(!is_current(&output, &digest(&inputs, &["compiler 1"])?), "added input");
        fs::remove_file(inputs[0].join("b"))?;
        fs::remove_file(inputs[0].join("inner/a"))?;
        assert!(!is_current(&output, &digest(&inputs, &["compiler 1"])?), "removed input");
        fs::remove_dir_all(&folder)?;
        Ok(())
    }
}
