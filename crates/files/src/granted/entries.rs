//! The entries of a granted directory, a buffer at a time, whatever the number of files in it.

use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{AtFlags, RawDir, SeekFrom, statat};

use super::{CountedFd, HostHandle, refused, whole};
use crate::error::Refused;
use crate::host_values::{HostEntry, HostKind, HostStat};

/// Bytes of entries that one call reads.
const ENTRY_BUFFER_LEN: usize = 32 << 10;

/// A directory that is being read. Its kernel position is set before each read.
#[derive(Debug)]
pub(super) struct EntryReader(Mutex<CountedFd>);

impl HostHandle {
    /// The next entries of a directory from a position on, `.` and `..` among them: as many as fit
    /// in a buffer, none at the end. 0 is the beginning, and each entry has the position after it.
    ///
    /// # Errors
    /// [`Refused::NotDirectory`]; [`Refused::Invalid`] for a position that the file system does not
    /// have; the host's errors.
    pub fn entries(&mut self, from: u64) -> Result<Vec<HostEntry>, Refused> {
        if from > i64::MAX as u64 {
            return Err(Refused::Invalid);
        }
        let reader = match &self.reader {
            Some(reader) => reader,
            None => self.reader.insert(Arc::new(EntryReader(Mutex::new(self.readable()?)))),
        };
        reader.read(from)
    }
}

impl EntryReader {
    fn read(&self, from: u64) -> Result<Vec<HostEntry>, Refused> {
        let fd = &*self.0.lock().unwrap_or_else(PoisonError::into_inner);
        whole(|| rustix::fs::seek(fd, SeekFrom::Start(from))).map_err(refused)?;
        let mut buffer = Vec::with_capacity(ENTRY_BUFFER_LEN);
        let mut raw = RawDir::new(fd, buffer.spare_capacity_mut());
        let mut entries = Vec::new();
        while entries.is_empty() || !raw.is_buffer_empty() {
            let Some(entry) = raw.next() else { break };
            let entry = entry.map_err(refused)?;
            let name = entry.file_name().to_bytes().to_vec();
            let mut kind = HostKind::from(entry.file_type());
            if kind == HostKind::Unknown {
                // It may have been removed meanwhile.
                let stat = statat(fd, &name[..], AtFlags::SYMLINK_NOFOLLOW);
                kind = stat.map_or(kind, |stat| HostStat::from(stat).kind);
            }
            let inode = if name == b".." { 0 } else { entry.ino() };
            entries.push(HostEntry { next: entry.next_entry_cookie(), name, inode, kind });
        }
        Ok(entries)
    }
}
