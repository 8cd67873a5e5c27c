//! Copies from one descriptor to another without a way through memory: `sendfile` and `copy_file_range`.

use rustix::io::Errno;

use super::table::Open;
use super::transfer_calls::check_offset;
use super::{Outcome, Person, Served, copy_out, word_in};
use crate::platform::Process;

/// Bytes that are copied by one call, at most: it may always do less than it was asked to.
const MOST: u64 = 1 << 20;

impl Person {
    pub(super) fn send_file(
        &mut self,
        process: &mut Process,
        to: u64,
        from: u64,
        offset: u64,
        len: u64,
    ) -> Served {
        self.state.table.get(to)?;
        let start = self.copied_from(process, from, offset)?;
        let bytes = self.file_bytes(from, start, len)?;
        let outcome = self.put(to, &bytes, None)?;
        self.copied(process, outcome, &[(from, offset, start)])
    }

    pub(super) fn copy_range(&mut self, process: &mut Process, a: &[u64; 6]) -> Served {
        let [from, from_offset, to, to_offset, len, flags] = *a;
        if flags != 0 {
            return Err(Errno::INVAL.into());
        }
        let start = self.copied_from(process, from, from_offset)?;
        let target = self.copied_from(process, to, to_offset)?;
        let description = self.state.table.get(to)?;
        if description.flags & libc::O_APPEND as u32 != 0 {
            return Err(Errno::BADF.into());
        }
        // A file may be copied within itself, but not onto itself.
        let len = len.min(MOST);
        let same = match (&self.state.table.get(from)?.open, &description.open) {
            (Open::File(one), Open::File(other)) => one.node == other.node,
            _ => false,
        };
        if same && start < target.saturating_add(len) && target < start.saturating_add(len) {
            return Err(Errno::INVAL.into());
        }
        let bytes = self.file_bytes(from, start, len)?;
        let outcome = self.put(to, &bytes, Some(target))?;
        self.copied(process, outcome, &[(from, from_offset, start), (to, to_offset, target)])
    }

    /// Where a copy begins in a file: at what `offset` points to, or where the file stands.
    fn copied_from(&self, process: &Process, descriptor: u64, offset: u64) -> Served<u64> {
        let Open::File(open) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        let start = if offset == 0 { open.offset } else { word_in(process, offset)? };
        check_offset(start)?;
        Ok(start)
    }

    fn file_bytes(&self, descriptor: u64, start: u64, len: u64) -> Served<Vec<u8>> {
        let description = self.state.table.get(descriptor)?;
        if !description.reads() {
            return Err(Errno::BADF.into());
        }
        self.bytes_at(description, start, len.min(MOST))
    }

    /// Tells how far a copy has come: where `offset` points to, or by where the file stands then.
    fn copied(
        &mut self,
        process: &mut Process,
        outcome: Outcome,
        files: &[(u64, u64, u64)],
    ) -> Served {
        if let Outcome::Value(len) = outcome {
            for &(descriptor, offset, start) in files {
                if offset != 0 {
                    copy_out(process, offset, &(start + len).to_le_bytes())?;
                } else if let Open::File(open) = &mut self.change().table.get_mut(descriptor)?.open
                {
                    open.offset = start + len;
                }
            }
        }
        Ok(outcome)
    }
}
