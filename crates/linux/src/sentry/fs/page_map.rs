//! `/proc/<process>/pagemap`: an entry of 8 bytes for each page of the address space.
//!
//! Promises: no entry has a frame number, as for all processes without privileges. All mapped
//! memory counts as present.

use rustix::io::Errno;

use crate::platform::GUEST;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::layout::PAGE;

const ENTRY_LEN: u64 = 8;
const PRESENT: u64 = 1 << 63;
/// A page of a file, or shared.
const FILE: u64 = 1 << 61;

impl Kernel {
    /// Entries of the pages of a process, from an offset on.
    pub(in crate::sentry) fn page_map(
        &self,
        id: u32,
        offset: u64,
        len: u64,
    ) -> Result<Vec<u8>, Errno> {
        if !offset.is_multiple_of(ENTRY_LEN) || !len.is_multiple_of(ENTRY_LEN) {
            return Err(Errno::INVAL);
        }
        let memory = self.processes.info(id).ok_or(Errno::SRCH)?.memory;
        let layout = self.layout_of(memory).ok_or(Errno::SRCH)?;
        let first = (offset / ENTRY_LEN).min(GUEST.end / PAGE);
        let count = (len / ENTRY_LEN).min(GUEST.end / PAGE - first);
        let mut entries = vec![[0; ENTRY_LEN as usize]; count as usize];
        for (part, mapping) in layout.parts(&(first * PAGE..(first + count) * PAGE)) {
            if mapping.reserved {
                continue;
            }
            let kind = if mapping.share.or(mapping.origin).is_some() { FILE } else { 0 };
            let pages = part.start / PAGE - first..part.end / PAGE - first;
            entries[pages.start as usize..pages.end as usize].fill((PRESENT | kind).to_le_bytes());
        }
        Ok(entries.as_flattened().to_vec())
    }
}
