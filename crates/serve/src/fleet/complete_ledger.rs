//! The ledger of the last backup that had every entry.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Keeps the ledger of the last backup that had every entry, while later ones lack some.
pub(super) fn keep_complete(file: &Path, is_whole: bool) -> std::io::Result<()> {
    let kept = file.with_extension("whole");
    let result = match is_whole {
        true => fs::remove_file(&kept),
        false if kept.exists() => Ok(()),
        false => fs::copy(file, &kept).map(drop),
    };
    match result {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_whole_ledger_stays_beside_later_ones_that_lack_entries() {
        let dir = tempfile::tempdir().unwrap();
        let (file, kept) = (dir.path().join("ledger.jsonl"), dir.path().join("ledger.whole"));
        fs::write(&file, "whole").unwrap();
        keep_complete(&file, false).unwrap();
        fs::write(&file, "part").unwrap();
        keep_complete(&file, false).unwrap();
        assert_eq!(fs::read_to_string(&kept).unwrap(), "whole");
        keep_complete(&file, true).unwrap();
        assert!(!kept.exists());
    }
}
