//! Pages of private mappings that are beyond the end of their file.
//!
//! Promises: an access to such a page fails as in Linux: `SIGBUS` for an instruction, `EFAULT` for
//! a system call. The page takes no memory. May break it: a file that grows or shrinks after it was
//! mapped, which private mappings do not follow.

use std::ops::Range;

use rustix::io::Errno;

use crate::sentry::mm::file_backing::FileBacking;
use crate::sentry::mm::layout::{Layout, Mapping, PAGE};
use crate::sentry::mm::stub_calls::{Change, Content, protect_call};

impl Mapping {
    /// Whether it is beyond the end of the file that it maps: a private mapping of a file that is
    /// not accessible.
    pub(in crate::sentry) fn is_beyond(&self) -> bool {
        self.file && self.reserved && self.share.is_none()
    }
}

impl Layout {
    /// The pages of a mapping at `range` that have no byte of its file: all after the first `len`
    /// bytes.
    fn pages_beyond(range: &Range<u64>, len: u64) -> Range<u64> {
        let len = len.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        range.start.saturating_add(len).min(range.end)..range.end
    }

    /// Maps a file of `size` bytes privately at `range`, which begins as `origin` of it. A failure
    /// changes nothing.
    pub(in crate::sentry) fn map_file(
        &mut self,
        range: Range<u64>,
        protection: u64,
        content: Option<Content>,
        origin: FileBacking,
        size: u64,
    ) -> Result<(u64, Change), Errno> {
        let len = range.end - range.start;
        let beyond = Self::pages_beyond(&range, size.saturating_sub(origin.offset(range.start)));
        // There may be room for the mapping, but not for its pages beyond the end.
        let before = (!beyond.is_empty()).then(|| self.clone());
        let (start, mut change) = self.map(Some(range.start), false, len, protection, content)?;
        self.originate(range, origin);
        if let Some(before) = before {
            self.close_beyond(beyond, &mut change).inspect_err(|_| *self = before)?;
        }
        Ok((start, change))
    }

    /// Makes a part of the mapping that was just made inaccessible, because it is beyond the end of
    /// its file.
    fn close_beyond(&mut self, range: Range<u64>, change: &mut Change) -> Result<(), Errno> {
        if range.is_empty() {
            return Ok(());
        }
        let parts = self.parts(&range);
        let close = |layout: &mut Self| {
            for (part, mapping) in &parts {
                let new = Mapping { end: part.end, protection: 0, reserved: true, ..*mapping };
                layout.place(part.clone(), new);
            }
        };
        self.check_change(&[&range], self.growth(&range, parts.len()), close)?;
        self.afford(range.end - range.start, true)?;
        close(self);
        change.after.push(protect_call(range.start, range.end - range.start, 0));
        Ok(())
    }

    /// Whether an address is mapped, and beyond the end of its file.
    pub(in crate::sentry) fn is_beyond(&self, address: u64) -> bool {
        let Some(end) = address.checked_add(1) else { return false };
        self.parts(&(address..end)).iter().any(|(_, mapping)| mapping.is_beyond())
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Time, Tree};

    use super::*;
    use crate::sentry::mm::layout::MAX_ALL_MAPPINGS;

    #[test]
    fn a_mapping_without_room_for_its_pages_beyond_the_end_changes_nothing() {
        let mut tree = Tree::new(Budget::default());
        let node = tree.create_unnamed(0o600, Time::default()).unwrap();
        let (mut layout, at) = (Layout::new(1 << 30), 1 << 20);
        layout.map(Some(at), false, 2 * PAGE, 3, None).unwrap();
        layout.share(at..at + 2 * PAGE, FileBacking::new(node, at, 0));
        // All mappings that there may be.
        layout.set_elsewhere(0, MAX_ALL_MAPPINGS - 1);
        let before = layout.clone();
        let range = at..at + 2 * PAGE;
        let origin = FileBacking::new(node, at, 0);
        let mapped = layout.map_file(range, 3, None, origin, PAGE).map(drop);
        assert_eq!((mapped, layout == before), (Err(Errno::NOMEM), true));
    }
}
