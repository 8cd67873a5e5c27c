//! The layout of guest memory: every mapping, the break, and the limit.
//!
//! The kernel chooses nothing: each address comes from here, and the orders that put it into effect
//! contain all arguments. So the mappings are known without a query, and can be restored.

mod heap;
pub(in crate::sentry) mod limits;
pub(in crate::sentry) mod locks;
mod protection;
mod sparse;
pub(in crate::sentry) mod traits;

pub(in crate::sentry) use limits::MAX_ALL_MAPPINGS;
pub(in crate::sentry) use protection::readable;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use afresh_files::Node;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use traits::{GUARD_GAP, MappingTraits};

use crate::platform::{GUEST, IMAGE_LEN, MappedMemory};
use crate::sentry::mm::file_backing::{FileBacking, SharedMapping};
use crate::sentry::mm::memory_peak::note_mapped;
use crate::sentry::mm::stub_calls::{Change, Content, map_call, protect_call, unmap_call};

pub(crate) const PAGE: u64 = afresh_sys::PAGE_SIZE as u64;
/// Maximum mappings of a process. Each takes one or two kernel mappings; the kernel allows 65,530.
pub(in crate::sentry) const MAPPINGS: usize = 30_000;
/// `mmap` places mappings below this.
pub(in crate::sentry) const CEILING: u64 = 0x6fff_0000_0000;
/// The stack's highest address.
const STACK_TOP: u64 = 0x6fff_ffff_0000;
/// The largest limit of memory. The rest of an image is for gaps between its segments.
pub(crate) const MAX_RESERVED: u64 = IMAGE_LEN - (64 << 30);
/// Bytes of stack, all mapped at the start.
pub(crate) const STACK_LEN: u64 = 8 << 20;
pub(crate) const READ_WRITE: u64 = (libc::PROT_READ | libc::PROT_WRITE) as u64;

/// A mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mapping {
    pub(crate) end: u64,
    pub(crate) protection: u64,
    /// Whether it began as bytes of a file.
    pub(crate) file: bool,
    /// Whether nothing of it was ever accessible in the process, so that it takes no memory. With
    /// a protection it is sparse: parts of it become accessible when they are touched.
    pub(crate) reserved: bool,
    /// The shared memory that it shows, if it is shared.
    pub(crate) share: Option<FileBacking>,
    /// The part of a file that it began as, if it is not shared.
    pub(crate) origin: Option<FileBacking>,
    /// Whether it is locked. A snapshot has the locks of all mappings behind its older parts.
    #[serde(skip)]
    pub(crate) locked: bool,
    /// A snapshot has them behind its older parts, as the locks.
    #[serde(skip)]
    pub(crate) traits: MappingTraits,
}

/// The mappings of a guest. None overlap; neighbours that are alike are one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    maps: BTreeMap<u64, Mapping>,
    /// Mapped bytes, without reserved ones, which only the addresses bound.
    bytes: u64,
    reserved: u64,
    /// Mapped bytes that are shared.
    shared: u64,
    limit: u64,
    /// Bytes that other processes of the guest have mapped, and all that are shared.
    elsewhere: u64,
    /// Mappings of other processes.
    #[serde(skip)]
    mappings_elsewhere: usize,
    heap: u64,
    brk: u64,
    /// Mapped bytes that are locked, and whether new mappings are.
    #[serde(skip)]
    locked: u64,
    #[serde(skip)]
    locks_new: bool,
    /// Whether some mapping may grow.
    #[serde(skip)]
    growing: bool,
}

/// Whether a new mapping only reserves its addresses.
fn is_reserved(protection: u64, file: bool) -> bool {
    protection == 0 && !file
}

/// The pages of a range that a guest named, if it may name them.
pub(in crate::sentry) fn pages(start: u64, len: u64) -> Result<Range<u64>, Errno> {
    let len = len.checked_next_multiple_of(PAGE).ok_or(Errno::INVAL)?;
    let end = start.checked_add(len).ok_or(Errno::INVAL)?;
    if !start.is_multiple_of(PAGE) || len == 0 {
        return Err(Errno::INVAL);
    }
    if start < GUEST.start || end > GUEST.end {
        return Err(Errno::NOMEM);
    }
    Ok(start..end)
}

impl Mapping {
    /// Private memory up to `end`.
    pub(in crate::sentry) fn anonymous(end: u64, protection: u64, reserved: bool) -> Self {
        let (share, origin, traits) = (None, None, MappingTraits::default());
        let (file, locked) = (false, false);
        Self { end, protection, file, reserved, share, origin, locked, traits }
    }
}

impl Layout {
    /// An empty layout for at most `limit` bytes.
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            maps: BTreeMap::new(),
            bytes: 0,
            reserved: 0,
            shared: 0,
            limit,
            elsewhere: 0,
            mappings_elsewhere: 0,
            heap: 0,
            brk: 0,
            locked: 0,
            locks_new: false,
            growing: false,
        }
    }

    /// The first error of a layout from a snapshot, if any.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let (mut at, mut bytes, mut reserved, mut shared) = (GUEST.start, 0u64, 0u64, 0u64);
        for (&start, m) in &self.maps {
            let whole = start.is_multiple_of(PAGE) && m.end.is_multiple_of(PAGE);
            let protected = m.protection & !7 == 0 && (!m.is_sparse() || m.is_anonymous());
            // Shared memory is never only reserved, and mappings show whole pages of their files.
            let shares = m.share.is_none_or(|s| !m.reserved && s.ahead.is_multiple_of(PAGE))
                && m.origin.is_none_or(|origin| origin.ahead.is_multiple_of(PAGE));
            if start < at || m.end <= start || m.end > GUEST.end || !whole || !protected || !shares
            {
                return Err("its mappings overlap, or are outside the guest's range");
            }
            if !m.has_sound_traits() {
                return Err("a mapping has rules that it cannot have");
            }
            *if m.reserved { &mut reserved } else { &mut bytes } += m.end - start;
            shared += m.share.map_or(0, |_| m.end - start);
            at = m.end;
        }
        let fits = (bytes, reserved, shared) == (self.bytes, self.reserved, self.shared)
            && shared <= bytes
            // Shared bytes count once, however many mappings they have. A lowered limit unmaps
            // nothing, and the opener compares the sum with its own.
            && bytes - shared <= MAX_RESERVED
            && self.limit <= MAX_RESERVED;
        if !fits || self.maps.len() > MAPPINGS || self.heap > self.brk || self.brk > CEILING {
            return Err("its mappings are more than it may have");
        }
        Ok(())
    }

    /// Unmaps everything.
    pub(crate) fn clear(&mut self) -> Change {
        // One order for all.
        let before = match self.maps.is_empty() {
            true => Vec::new(),
            false => vec![unmap_call(GUEST.start, GUEST.end - GUEST.start)],
        };
        let (elsewhere, mappings_elsewhere) = (self.elsewhere, self.mappings_elsewhere);
        *self = Self { elsewhere, mappings_elsewhere, ..Self::new(self.limit) };
        Change { before, ..Change::default() }
    }

    /// Every mapping but the shared ones of the files `live`, sorted.
    pub(crate) fn own_mappings(
        &self,
        live: &BTreeSet<Node>,
    ) -> impl Iterator<Item = MappedMemory> + use<'_> {
        let live = live.clone();
        let own = move |m: &Mapping| m.share.is_none_or(|share| !live.contains(&share.node));
        let own = self.maps.iter().filter(move |(_, m)| own(m));
        own.map(|(&start, m)| MappedMemory {
            start,
            len: m.end - start,
            protection: m.host_protection(),
            reserved: m.reserved,
        })
    }

    /// Every mapping with its range, sorted.
    pub(in crate::sentry) fn all(&self) -> impl DoubleEndedIterator<Item = (Range<u64>, &Mapping)> {
        self.maps.iter().map(|(&start, mapping)| (start..mapping.end, mapping))
    }

    /// The mappings that begin at `start` or behind it.
    pub(in crate::sentry) fn all_from(
        &self,
        start: u64,
    ) -> impl Iterator<Item = (Range<u64>, &Mapping)> {
        self.maps.range(start..).map(|(&start, mapping)| (start..mapping.end, mapping))
    }

    /// The mapping that has an address.
    pub(in crate::sentry) fn mapping_at(&self, address: u64) -> Option<(Range<u64>, &Mapping)> {
        let (&start, mapping) = self.maps.range(..=address).next_back()?;
        (address < mapping.end).then_some((start..mapping.end, mapping))
    }

    /// The name of a mapping that every process has.
    pub(in crate::sentry) fn name(&self, range: &Range<u64>) -> Option<&'static str> {
        let heap = self.heap..self.brk.next_multiple_of(PAGE);
        let within = |whole: &Range<u64>| whole.start <= range.start && range.end <= whole.end;
        if !heap.is_empty() && within(&heap) {
            return Some("[heap]");
        }
        (range.end == STACK_TOP).then_some("[stack]")
    }

    /// Whether anything is mapped in `range`.
    pub(crate) fn touches(&self, range: &Range<u64>) -> bool {
        self.mappings_in(range).next().is_some()
    }

    /// The parts of mappings in `range`; none in an empty one.
    pub(in crate::sentry) fn parts(&self, range: &Range<u64>) -> Vec<(Range<u64>, Mapping)> {
        if range.is_empty() {
            return Vec::new();
        }
        let clip = |start: u64, m: &Mapping| start.max(range.start)..m.end.min(range.end);
        let mut parts: Vec<_> =
            self.mappings_in(range).map(|(start, m)| (clip(start, m), *m)).collect();
        parts.reverse();
        parts
    }

    /// The mappings in `range` with their starts, the last one first.
    fn mappings_in(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &Mapping)> {
        let (start, end) = (range.start, range.end.max(range.start));
        let before = self.maps.range(..end).rev();
        before.take_while(move |(_, m)| m.end > start).map(|(&at, m)| (at, m))
    }

    /// Whether all of `range` is mapped with at least `protection`.
    pub(crate) fn allows(&self, range: &Range<u64>, protection: u64) -> bool {
        let mut at = range.start;
        for (part, m) in self.parts(range) {
            if part.start != at || m.protection & protection != protection {
                return false;
            }
            at = part.end;
        }
        at == range.end
    }

    pub(in crate::sentry) fn remove(&mut self, range: &Range<u64>) {
        for (part, m) in self.parts(range) {
            // The mapping of the part, whose rest stays.
            let (&start, _) =
                self.maps.range(..=part.start).next_back().expect("it was found there");
            self.maps.remove(&start);
            if start < part.start {
                self.maps.insert(start, Mapping { end: part.start, ..m });
            }
            if m.end > part.end {
                self.maps.insert(part.end, m);
            }
            *self.counter(m.reserved) -= part.end - part.start;
            self.shared -= m.share.map_or(0, |_| part.end - part.start);
            self.locked -= if m.locked { part.end - part.start } else { 0 };
        }
    }

    /// The count of bytes that a mapping belongs to.
    fn counter(&mut self, reserved: bool) -> &mut u64 {
        if reserved { &mut self.reserved } else { &mut self.bytes }
    }

    fn insert(&mut self, range: Range<u64>, protection: u64, file: bool) {
        let end = range.end;
        let reserved = is_reserved(protection, file);
        self.place(range, Mapping { file, ..Mapping::anonymous(end, protection, reserved) });
    }

    /// Has a mapping like `new` at a place.
    pub(in crate::sentry) fn place(&mut self, mut range: Range<u64>, new: Mapping) {
        if range.is_empty() {
            return;
        }
        self.growing |= new.traits.grows;
        let alike = |m: &Mapping| Mapping { end: new.end, ..*m } == new;
        self.remove(&range);
        *self.counter(new.reserved) += range.end - range.start;
        self.shared += new.share.map_or(0, |_| range.end - range.start);
        self.locked += if new.locked { range.end - range.start } else { 0 };
        note_mapped(self.bytes_everywhere());
        if let Some((&start, m)) = self.maps.range(..range.start).next_back()
            && m.end == range.start
            && alike(m)
        {
            self.maps.remove(&start);
            range.start = start;
        }
        if let Some(m) = self.maps.get(&range.end).copied()
            && alike(&m)
        {
            self.maps.remove(&range.end);
            range.end = m.end;
        }
        self.maps.insert(range.start, Mapping { end: range.end, ..new });
    }

    /// The highest free range of `len` bytes below `ceiling`.
    pub(in crate::sentry) fn free(&self, len: u64, ceiling: u64) -> Result<u64, Errno> {
        let mut end = ceiling;
        for (&start, m) in self.maps.range(..ceiling).rev() {
            if m.end <= end && end - m.end >= len {
                break;
            }
            // Below one that grows there is room for that.
            let gap = if m.traits.grows { GUARD_GAP } else { 0 };
            end = end.min(start.saturating_sub(gap));
        }
        match end.checked_sub(len) {
            Some(start) if start >= GUEST.start => Ok(start),
            _ => Err(Errno::NOMEM),
        }
    }

    /// Where a mapping goes; an error if it may not be made.
    pub(in crate::sentry) fn plan(
        &self,
        at: Option<u64>,
        low: bool,
        len: u64,
        protection: u64,
        file: bool,
    ) -> Result<Range<u64>, Errno> {
        if len == 0 {
            return Err(Errno::INVAL);
        }
        let len = len.checked_next_multiple_of(PAGE).ok_or(Errno::NOMEM)?;
        if protection & !7 != 0 {
            return Err(Errno::INVAL);
        }
        let ceiling = if low { 1 << 31 } else { CEILING };
        let start = match at {
            Some(start) => start,
            None => self.free(len, ceiling)?,
        };
        let range = pages(start, len)?;
        self.check_seals(&range)?;
        let reserved = is_reserved(protection, file);
        let growth = self.growth(&range, 1);
        match file {
            // It becomes unlike its neighbours once its file is known.
            true => self.check_room(growth)?,
            false => self.check_change(&[&range], growth, |layout| {
                layout.insert(range.clone(), protection, file);
            })?,
        }
        self.afford(len - self.freed(&range, reserved), reserved)?;
        Ok(range)
    }

    /// Maps anonymous memory, or `content` of a file; `at` is where, if that is fixed.
    pub(crate) fn map(
        &mut self,
        at: Option<u64>,
        low: bool,
        len: u64,
        protection: u64,
        content: Option<Content>,
    ) -> Result<(u64, Change), Errno> {
        let range = self.plan(at, low, len, protection, content.is_some())?;
        let (start, len) = (range.start, range.end - range.start);
        self.insert(range, protection, content.is_some());
        let mut change = Change::default();
        let copied = matches!(content, Some(Content::Bytes(_) | Content::Copied(_)));
        let first = if copied { READ_WRITE } else { protection };
        // The new mapping takes its place.
        let whole = match content {
            Some(Content::Shown(_, shown, _)) => shown == len,
            Some(Content::Shared(..)) => true,
            _ => false,
        };
        if !whole {
            change.before.push(map_call(start, len, first));
        }
        if first != protection {
            change.after.push(protect_call(start, len, protection));
        }
        change.content = content.map(|content| (start, content));
        Ok((start, change))
    }

    /// Marks the mapping that was just made at `range` as shared.
    pub(in crate::sentry) fn share(&mut self, range: Range<u64>, share: FileBacking) {
        for (part, m) in self.parts(&range) {
            let end = part.end;
            self.place(part, Mapping { end, share: Some(share), ..m });
        }
    }

    /// Notes the part of a file that the private mapping which was just made at `range` begins
    /// with.
    pub(crate) fn originate(&mut self, range: Range<u64>, origin: FileBacking) {
        for (part, m) in self.parts(&range) {
            let end = part.end;
            self.place(part, Mapping { end, origin: Some(origin), ..m });
        }
    }

    /// All memory that is shared.
    pub(crate) fn shared(&self) -> Vec<SharedMapping> {
        if self.shared == 0 {
            return Vec::new();
        }
        let shared = |(&start, m): (&u64, &Mapping)| {
            let (range, protection) = (start..m.end, m.protection);
            m.share.map(|share| SharedMapping { range, share, protection })
        };
        self.maps.iter().filter_map(shared).collect()
    }

    pub(crate) fn unmap(&mut self, start: u64, len: u64) -> Result<Change, Errno> {
        let range = pages(start, len).map_err(|_| Errno::INVAL)?;
        self.check_seals(&range)?;
        self.check_room(self.growth(&range, 0))?;
        let mut change = Change::default();
        if self.touches(&range) {
            change.before.push(unmap_call(start, range.end - start));
        }
        self.remove(&range);
        Ok(change)
    }

    /// Maps the stack; its lowest and highest address.
    pub(crate) fn map_stack(&mut self) -> Result<(Range<u64>, Change), Errno> {
        let start = STACK_TOP - STACK_LEN;
        let (start, change) = self.map(Some(start), false, STACK_LEN, READ_WRITE, None)?;
        Ok((start..STACK_TOP, change))
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Time, Tree};

    use super::*;

    /// Random changes against an array of pages; the budget and the bounds hold throughout.
    #[test]
    fn a_layout_is_what_was_mapped() {
        let mut random = 7u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        let base = 0x10_0000;
        let mut layout = Layout::new(48 * PAGE);
        let mut pages = [None; 64];
        for _ in 0..20_000 {
            let start = next(64);
            let len = 1 + next(64 - start);
            let (at, bytes) = (base + start * PAGE, len * PAGE);
            let range = start as usize..(start + len) as usize;
            let protection = next(8);
            match next(3) {
                0 => {
                    let before = layout.clone();
                    if layout.map(Some(at), false, bytes, protection, None).is_ok() {
                        pages[range].fill(Some((protection, protection == 0)));
                    } else {
                        assert_eq!(layout, before);
                    }
                }
                1 => {
                    layout.unmap(at, bytes).unwrap();
                    pages[range].fill(None);
                }
                _ => {
                    let all = pages[range.clone()].iter().all(Option::is_some);
                    let done = layout.protect(at, bytes, protection).is_ok();
                    assert!(all || !done, "unmapped memory has no protection");
                    if done {
                        for (_, reserved) in pages[range].iter_mut().flatten() {
                            *reserved &= protection == 0;
                        }
                        let set = |page: &mut Option<(u64, bool)>| {
                            *page = page.map(|(_, reserved)| (protection, reserved));
                        };
                        pages[start as usize..(start + len) as usize].iter_mut().for_each(set);
                    }
                }
            }
            let mut seen = [None; 64];
            let mut last = (0, (8, false));
            for (&start, m) in &layout.maps {
                let kind = (m.protection, m.reserved);
                assert!(last != (start, kind), "neighbours that are alike are one");
                last = (m.end, kind);
                let page = ((start - base) / PAGE) as usize;
                seen[page..page + ((m.end - start) / PAGE) as usize].fill(Some(kind));
            }
            assert_eq!(seen, pages);
            let count = |reserved| pages.iter().flatten().filter(|page| page.1 == reserved).count();
            let counts = [count(false), count(true)].map(|pages| pages as u64 * PAGE);
            assert_eq!([layout.bytes, layout.reserved], counts);
            assert!(layout.bytes <= layout.limit);
        }
    }

    #[test]
    fn a_mapping_of_a_file_begins_at_a_page_of_it() {
        let mut tree = Tree::new(Budget::default());
        let node = tree.create_unnamed(0o600, Time::default()).unwrap();
        let mut layout = Layout::new(48 * PAGE);
        let (start, _) = layout.map(None, false, PAGE, 3, None).unwrap();
        layout.originate(start..start + PAGE, FileBacking::new(node, start, PAGE));
        assert_eq!(layout.check(), Ok(()));
        layout.originate(start..start + PAGE, FileBacking::new(node, start, 1));
        assert!(layout.check().is_err());
    }

    #[test]
    fn addresses_outside_the_guest_are_refused() {
        let mut layout = Layout::new(1 << 40);
        for at in [0, 0x1000, GUEST.end, GUEST.end - PAGE, 0x7100_0000_0000, u64::MAX - 0xfff] {
            assert!(layout.map(Some(at), false, 2 * PAGE, 3, None).is_err(), "{at:#x}");
            assert!(layout.unmap(at, 2 * PAGE).is_err(), "{at:#x}");
            assert!(layout.protect(at, 2 * PAGE, 7).is_err(), "{at:#x}");
        }
        assert!(layout.map(None, false, u64::MAX, 3, None).is_err());
        assert!(layout.map(None, false, 1 << 50, 3, None).is_err());
        layout.start_heap(0x20_0000);
        assert_eq!(layout.set_brk(u64::MAX).0, 0x20_0000);
        assert_eq!(layout.set_brk(GUEST.end + PAGE).0, 0x20_0000);
    }
}
