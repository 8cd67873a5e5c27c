//! Turns of sessions that are saved in this directory as in a remote (`file://`): a journal is a
//! directory there, and each turn is a file.
//!
//! Promises: an append to a closed session fails. The turns and the frame that closes them are
//! removed together, when all of them are old. May break it: a writer that was silent for longer,
//! and appends without a look for the name of its session.

use std::fs::{self, Metadata};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use afresh_sys::crash::point;

use crate::Sha256;
use crate::disk::temporary::{parent, sync_dir, write_synced};
use crate::turn::{CLOSING_LEN, closing_frame, turn_name};

/// The least age at which turns are removed when no name leads to them.
pub(crate) const TURN_GRACE: Duration = Duration::from_secs(48 * 3600);
/// Attempts to close a journal whose writer appends at the same time.
const ATTEMPTS: usize = 100;

/// Removed files, and the bytes that they had.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RemovedTurns {
    pub(crate) files: usize,
    pub(crate) bytes: u64,
}

/// Removes the turns of the journal `dir`, unless one of them is young: that keeps the others. A
/// collection through a `file://` address may remove them at the same time.
pub(crate) fn remove_old_turns(dir: &Path) -> io::Result<RemovedTurns> {
    match remove_present(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(RemovedTurns::default()),
        removed => removed,
    }
}

fn remove_present(dir: &Path) -> io::Result<RemovedTurns> {
    let now = SystemTime::now();
    // A time in the future is young.
    let is_old = |meta: &Metadata| {
        let age = meta.modified().ok().and_then(|time| now.duration_since(time).ok());
        age.is_some_and(|age| age >= TURN_GRACE)
    };
    let mut removed = RemovedTurns::default();
    if !is_old(&fs::metadata(dir)?) {
        return Ok(removed);
    }
    for entry in fs::read_dir(dir)? {
        let meta = entry?.metadata()?;
        if !is_old(&meta) {
            return Ok(RemovedTurns::default());
        }
        removed.files += 1;
        removed.bytes += meta.len();
    }
    point();
    fs::remove_dir_all(dir)?;
    Ok(removed)
}

/// Closes the journal `dir` of the manifest `base`, which may have no turn yet: a frame takes the
/// place of the next turn. Readers of the directory `blobs` may read it.
pub(crate) fn close_turns(dir: &Path, base: Sha256, blobs: &Path) -> io::Result<()> {
    // Without a turn there is no directory yet.
    fs::create_dir_all(dir)?;
    for _ in 0..ATTEMPTS {
        let turns = count_turns(dir)?;
        let path = |number: usize| dir.join(turn_name(number));
        let last = turns.checked_sub(1).map(|last| fs::metadata(path(last))).transpose()?;
        if last.is_some_and(|last| last.len() == CLOSING_LEN) {
            return Ok(());
        }
        let frame = write_synced(parent(dir), &closing_frame(&base, turns), blobs)?;
        point();
        match frame.persist_noclobber(path(turns)) {
            Ok(_) => return sync_dir(dir).and_then(|()| sync_dir(parent(dir))),
            // A turn is there by now.
            Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error.error),
        }
    }
    Err(io::Error::other("its writer appends turns all the time; try again"))
}

/// The turns in a journal, with the frame that closes it.
fn count_turns(dir: &Path) -> io::Result<usize> {
    let mut turns = 0;
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let name = name.as_encoded_bytes();
        // Files that are being written have longer names.
        turns += usize::from(name.len() == 8 && name.iter().all(u8::is_ascii_digit));
    }
    Ok(turns)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG_AGO: Duration = Duration::from_secs(49 * 3600);

    fn age(path: &Path) {
        fs::File::open(path).unwrap().set_modified(SystemTime::now() - LONG_AGO).unwrap();
    }

    #[test]
    fn a_closed_journal_refuses_the_next_turn_and_is_closed_once() {
        let root = tempfile::tempdir().unwrap();
        let (dir, base) = (root.path().join("journal"), Sha256::of(b"manifest"));
        close_turns(&dir, base, root.path()).unwrap();
        assert_eq!(fs::read(dir.join("00000000")).unwrap(), closing_frame(&base, 0));
        close_turns(&dir, base, root.path()).unwrap();
        assert_eq!(count_turns(&dir).unwrap(), 1);
        let other = root.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::write(other.join("00000000"), [1; 200]).unwrap();
        fs::write(other.join("00000001#1"), [1; 100]).unwrap();
        close_turns(&other, base, root.path()).unwrap();
        assert_eq!(fs::read(other.join("00000001")).unwrap(), closing_frame(&base, 1));
    }

    #[test]
    fn turns_are_removed_when_all_of_them_are_old() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("journal");
        fs::create_dir(&dir).unwrap();
        for name in ["00000000", "00000001"] {
            fs::write(dir.join(name), [1; 10]).unwrap();
        }
        assert_eq!(remove_old_turns(&dir).unwrap(), RemovedTurns::default());
        age(&dir.join("00000000"));
        age(&dir);
        assert_eq!(remove_old_turns(&dir).unwrap(), RemovedTurns::default());
        age(&dir.join("00000001"));
        assert_eq!(remove_old_turns(&dir).unwrap(), RemovedTurns { files: 2, bytes: 20 });
        // Another collection has removed them.
        assert_eq!(remove_old_turns(&dir).unwrap(), RemovedTurns::default());
        assert!(!dir.exists());
    }
}
