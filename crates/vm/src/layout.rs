//! The layout of guest-physical memory, which is also guest-virtual memory: every mapped page has
//! the same address in both.
//!
//! ```text
//! 0            0x40000                                     + memory
//! | not mapped | program | guard | stack | input | guard | heap | extra regions, gaps | system |
//! ```
//!
//! Promises: spans are page-aligned, ordered and disjoint; the system span (descriptors, entry
//! code, boot page, page tables) is not writable by the guest. May break it: nothing in the
//! configuration; sizes that do not fit are errors.

use crate::abi::{BootRegion, MAX_REGIONS};
use crate::{PAGE, elf::Program};

/// Guest address of the program and of the main memory: a multiple of 64 pages, so that words of
/// the dirty log are words of our own sets.
pub(crate) const BASE: u64 = 0x40000;
/// The largest guest-physical space, in bytes: 16 GiB.
const MAX_SPACE: u64 = 16 << 30;
/// The smallest and largest main memory, in bytes.
const MEMORY: std::ops::RangeInclusive<u64> = 256 << 10..=4 << 30;

/// A configuration that cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The memory's size is outside the supported range.
    #[error("memory of {0} bytes is outside 256 KiB to 4 GiB")]
    Memory(u64),
    /// Program, stack and input buffer do not fit.
    #[error("memory of {memory} bytes is too small; program, stack and input need {needed}")]
    TooSmall {
        /// The requested size.
        memory: u64,
        /// The minimum size.
        needed: u64,
    },
    /// A size is zero or not a multiple of the page size.
    #[error("the {what} of {bytes} bytes is not a positive multiple of 4096")]
    Unaligned {
        /// Which size.
        what: &'static str,
        /// Its value.
        bytes: u64,
    },
    /// There are too many extra regions.
    #[error("{0} extra regions; at most {MAX_REGIONS} are supported")]
    TooManyRegions(usize),
    /// The whole space is too large.
    #[error("the guest's space of {0} bytes exceeds 16 GiB")]
    TooLarge(u64),
}

/// A page-aligned range of guest addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Span {
    /// One past the last byte.
    pub fn end(self) -> u64 {
        self.start + self.len
    }

    /// Whether `len` bytes at `address` are inside.
    pub fn holds(self, address: u64, len: u64) -> bool {
        address >= self.start && address.checked_add(len).is_some_and(|end| end <= self.end())
    }
}

/// The kind of an extra region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionKind {
    /// Memory that the guest reads and writes and that is reset.
    ReadWrite,
    /// Memory that the guest can only read.
    ReadOnly,
    /// Memory shared with the host and with every guest that maps it; it is not reset.
    Shared,
    /// Inaccessible addresses.
    Gap,
}

/// An extra region at its address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedRegion {
    pub(crate) span: Span,
    pub(crate) kind: RegionKind,
}

/// Requested sizes, in bytes.
#[derive(Debug, Clone)]
pub(crate) struct Sizes {
    pub(crate) memory: u64,
    pub(crate) stack: u64,
    pub(crate) input: u64,
    pub(crate) regions: Vec<(u64, RegionKind)>,
}

/// Where everything lies.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) main: Span,
    pub(crate) stack: Span,
    pub(crate) input: Span,
    pub(crate) heap: Span,
    pub(crate) regions: Vec<PlacedRegion>,
    /// Start of the system span; its length depends on the page tables.
    pub(crate) system: u64,
}

impl Layout {
    pub(crate) fn new(program: &Program<'_>, sizes: &Sizes) -> Result<Self, LayoutError> {
        if !MEMORY.contains(&sizes.memory) {
            return Err(LayoutError::Memory(sizes.memory));
        }
        aligned("memory", sizes.memory)?;
        aligned("stack", sizes.stack)?;
        aligned("input buffer", sizes.input)?;
        if sizes.regions.len() > MAX_REGIONS {
            return Err(LayoutError::TooManyRegions(sizes.regions.len()));
        }
        let main = Span { start: BASE, len: sizes.memory };
        let program = Span { start: BASE, len: program.span() };
        // Two guard pages and at least one page of heap.
        let needed = [program.len, sizes.stack, sizes.input, 3 * PAGE]
            .into_iter()
            .try_fold(0u64, u64::checked_add)
            .unwrap_or(u64::MAX);
        if needed > sizes.memory {
            return Err(LayoutError::TooSmall { memory: sizes.memory, needed });
        }
        let stack = Span { start: program.end() + PAGE, len: sizes.stack };
        let input = Span { start: stack.end(), len: sizes.input };
        let heap_start = input.end() + PAGE;
        let heap = Span { start: heap_start, len: main.end() - heap_start };
        let mut regions = Vec::with_capacity(sizes.regions.len());
        let mut next = main.end() + PAGE;
        for &(len, kind) in &sizes.regions {
            aligned("region", len)?;
            let end = next.checked_add(len).filter(|end| *end <= MAX_SPACE);
            let end = end.ok_or(LayoutError::TooLarge(next.saturating_add(len)))?;
            regions.push(PlacedRegion { span: Span { start: next, len }, kind });
            next = end;
        }
        // Without extra regions the system span follows at once, so that one memory slot of KVM
        // holds both: setting a slot up waits for a grace period of the kernel.
        let system = if regions.is_empty() { main.end() } else { next + PAGE };
        Ok(Self { main, stack, input, heap, regions, system })
    }

    /// Guest pages that the guest may read, with whether it may write and whether it may execute.
    pub(crate) fn mapped(&self, program: &Program<'_>) -> Vec<(Span, bool, bool)> {
        let mut spans = Vec::new();
        for segment in program.segments() {
            let start = BASE + segment.address / PAGE * PAGE;
            let end = (BASE + segment.address + segment.size).next_multiple_of(PAGE);
            spans.push((Span { start, len: end - start }, segment.writable, segment.executable));
        }
        for span in [self.stack, self.input, self.heap] {
            spans.push((span, true, false));
        }
        for region in &self.regions {
            match region.kind {
                RegionKind::ReadWrite | RegionKind::Shared => {
                    spans.push((region.span, true, false))
                }
                RegionKind::ReadOnly => spans.push((region.span, false, false)),
                RegionKind::Gap => {}
            }
        }
        spans
    }

    pub(crate) fn boot_regions(&self) -> [BootRegion; MAX_REGIONS] {
        let mut out = [BootRegion::default(); MAX_REGIONS];
        for (place, region) in out.iter_mut().zip(&self.regions) {
            *place = BootRegion {
                address: region.span.start,
                len: region.span.len,
                kind: match region.kind {
                    RegionKind::ReadWrite => 0,
                    RegionKind::ReadOnly => 1,
                    RegionKind::Shared => 2,
                    RegionKind::Gap => 3,
                },
            };
        }
        out
    }
}

fn aligned(what: &'static str, bytes: u64) -> Result<(), LayoutError> {
    if bytes == 0 || !bytes.is_multiple_of(PAGE) {
        return Err(LayoutError::Unaligned { what, bytes });
    }
    Ok(())
}
