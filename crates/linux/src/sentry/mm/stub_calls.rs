//! Orders for the stub that put a change of the layout into effect.

use std::ops::Range;
use std::sync::Arc;

use crate::file_cache::MappedRange;
use crate::sentry::mm::file_part::{FilePart, MAX_WHOLE};
use crate::shared_memory_file::SharedFile;

/// A call for the stub to make: number and arguments.
pub(crate) type StubCall = [u64; 7];

/// The initial content of a mapping, followed by zeros.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// Bytes, which are copied into it.
    Bytes(Vec<u8>),
    /// Bytes of a file, which are copied into it in pieces.
    Copied(FilePart),
    /// Bytes of a file, so many in whole pages, which it shows with this protection.
    Shown(MappedRange, u64, u64),
    /// The memory of a live file from an offset on, so many bytes with this protection.
    Shared(Arc<SharedFile>, u64, u64, u64),
}

/// Orders that put a change of the layout into effect.
#[derive(Clone, Debug, Default)]
pub(crate) struct Change {
    /// Calls to make first.
    pub(crate) before: Vec<StubCall>,
    /// The initial content of a mapping from an address on.
    pub(crate) content: Option<(u64, Content)>,
    /// Bytes to write to addresses then.
    pub(crate) fill: Vec<(u64, Vec<u8>)>,
    /// Copies to make then: to, from, length.
    pub(crate) copies: Vec<[u64; 3]>,
    /// Calls to make last.
    pub(crate) after: Vec<StubCall>,
}

impl Change {
    /// Whether nothing changes.
    pub(crate) fn is_empty(&self) -> bool {
        let Self { before, content, fill, copies, after } = self;
        let fills = content.is_some() || !fill.is_empty();
        before.is_empty() && !fills && copies.is_empty() && after.is_empty()
    }

    /// Whether it copies so much memory that its call has to look at its deadline meanwhile.
    pub(crate) fn is_large(&self) -> bool {
        let copied = self.copies.iter().map(|[.., len]| *len).sum::<u64>();
        copied > MAX_WHOLE || matches!(self.content, Some((_, Content::Copied(_))))
    }

    /// The addresses that it maps, unmaps, fills or protects. They may overlap.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let orders = self.before.iter().chain(&self.after);
        let content = self.content.iter().map(|(start, content)| {
            let len = match content {
                Content::Bytes(bytes) => bytes.len() as u64,
                Content::Copied(part) => part.len(),
                Content::Shown(_, len, _) | Content::Shared(_, _, len, _) => *len,
            };
            *start..start + len
        });
        orders.map(|order| order[1]..order[1] + order[2]).chain(content)
    }
}

/// `mmap` of private anonymous memory at exactly this place.
pub(crate) fn map_call(start: u64, len: u64, protection: u64) -> StubCall {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    [libc::SYS_mmap as u64, start, len, protection, flags as u64, u64::MAX, 0]
}

pub(crate) fn unmap_call(start: u64, len: u64) -> StubCall {
    [libc::SYS_munmap as u64, start, len, 0, 0, 0, 0]
}

pub(crate) fn protect_call(start: u64, len: u64, protection: u64) -> StubCall {
    [libc::SYS_mprotect as u64, start, len, protection, 0, 0, 0]
}
