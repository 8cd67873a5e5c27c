//! `mremap`: mappings that grow, shrink and move. The bytes of private memory are copied; shared
//! memory is mapped anew.
//!
//! Promises: a call that fails has changed nothing.

use std::ops::Range;

use rustix::io::Errno;

use crate::platform::GUEST;
use crate::sentry::Sentry;
use crate::sentry::kernel::resource_limits::is_data;
use crate::sentry::mm::file_backing::{FileBacking, SharedMapping};
use crate::sentry::mm::layout::traits::MappingTraits;
use crate::sentry::mm::layout::{CEILING, Layout, Mapping, PAGE, READ_WRITE, pages};
use crate::sentry::mm::shared::writes;
use crate::sentry::mm::stub_calls::{Change, map_call, protect_call, unmap_call};
use crate::sentry::result::{SyscallControl, SyscallResult};

const MAY_MOVE: u64 = libc::MREMAP_MAYMOVE as u64;
const FIXED: u64 = libc::MREMAP_FIXED as u64;
const KEEPS_OLD: u64 = libc::MREMAP_DONTUNMAP as u64;

/// The arguments of a call, as far as they can be checked without mappings.
#[derive(Clone, Debug)]
struct Remap {
    old: Range<u64>,
    new_len: u64,
    flags: u64,
    /// Where the mapping goes, if that is fixed.
    to: Option<u64>,
}

impl Remap {
    fn new(a: &[u64; 6]) -> Result<Self, Errno> {
        let [old, old_len, new_len, flags, to, _] = *a;
        let has = |flag: u64| flags & flag != 0;
        let moves = has(FIXED) || has(KEEPS_OLD);
        if flags & !(MAY_MOVE | FIXED | KEEPS_OLD) != 0 || moves && !has(MAY_MOVE) {
            return Err(Errno::INVAL);
        }
        let whole = |len: u64| len.checked_next_multiple_of(PAGE).ok_or(Errno::INVAL);
        let (old_len, new_len) = (whole(old_len)?, whole(new_len)?);
        if new_len == 0 || !old.is_multiple_of(PAGE) || has(KEEPS_OLD) && old_len != new_len {
            return Err(Errno::INVAL);
        }
        let old = old..old.checked_add(old_len).ok_or(Errno::INVAL)?;
        let to = has(FIXED).then_some(to);
        if let Some(to) = to {
            let target = pages(to, new_len).map_err(|_| Errno::INVAL)?;
            if target.start < old.end && old.start < target.end {
                return Err(Errno::INVAL);
            }
        }
        Ok(Self { old, new_len, flags, to })
    }

    fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }
}

impl Layout {
    /// The only mapping in a range, which it covers.
    fn whole(&self, range: &Range<u64>) -> Result<Mapping, Errno> {
        let first = self.parts(range).into_iter().next();
        first.filter(|(part, _)| part == range).map(|(_, mapping)| mapping).ok_or(Errno::FAULT)
    }

    /// `mremap` of a mapping that is not shared, or that stays where it is.
    fn remap(&mut self, remap: &Remap) -> Result<(u64, Change), Errno> {
        let Remap { old, new_len, .. } = remap.clone();
        let len = old.end - old.start;
        let stays = remap.to.is_none() && !remap.has(KEEPS_OLD);
        if !stays || new_len != len {
            self.check_seals(&old)?;
        }
        if let Some(to) = remap.to {
            self.check_seals(&(to..to.saturating_add(new_len)))?;
        }
        if stays && new_len < len {
            return Ok((old.start, self.unmap(old.start + new_len, len - new_len)?));
        }
        let mut mapping = self.whole(&old)?;
        if stays && new_len == len {
            return Ok((old.start, Change::default()));
        }
        if new_len > len && mapping.file {
            return Err(Errno::NOMEM);
        }
        let tail = old.end..old.start.checked_add(new_len).ok_or(Errno::NOMEM)?;
        if stays && tail.end <= GUEST.end && !self.touches(&tail) {
            // It becomes a part of the mapping.
            self.afford(new_len - len, mapping.reserved)?;
            let order = map_call(tail.start, tail.end - tail.start, mapping.host_protection());
            self.place(tail.clone(), Mapping { end: tail.end, ..mapping });
            return Ok((old.start, Change { before: vec![order], ..Change::default() }));
        }
        if !remap.has(MAY_MOVE) {
            return Err(Errno::NOMEM);
        }
        self.afford(new_len, mapping.reserved)?;
        let start = remap.to.map_or_else(|| self.free(new_len, CEILING), Ok)?;
        let new = start..start + new_len;
        let left = match remap.has(KEEPS_OLD) {
            true if mapping.locked => self.growth(&old, 1),
            true => 0,
            false => self.growth(&old, 0),
        };
        let kept = Mapping { locked: false, ..mapping };
        if let Some(origin) = &mut mapping.origin {
            *origin = FileBacking::new(origin.node, start, origin.offset(old.start));
        }
        let transfer = |layout: &mut Self| {
            layout.place(new.clone(), Mapping { end: new.end, ..mapping });
            match remap.has(KEEPS_OLD) {
                // The lock moves with the bytes.
                true if mapping.locked => layout.place(old.clone(), kept),
                true => {}
                false => layout.remove(&old),
            }
        };
        self.check_change(&[&new, &old], self.growth(&new, 1) + left, transfer)?;
        transfer(self);
        let mut change = Change::default();
        if mapping.reserved {
            change.before.push(map_call(start, new_len, 0));
        } else {
            if mapping.protection & libc::PROT_READ as u64 == 0 {
                change.before.push(protect_call(old.start, len, libc::PROT_READ as u64));
            }
            change.before.push(map_call(start, new_len, READ_WRITE));
            change.copies.push([start, old.start, len.min(new_len)]);
            if mapping.protection != READ_WRITE {
                change.after.push(protect_call(start, new_len, mapping.protection));
            }
        }
        change.after.push(match remap.has(KEEPS_OLD) {
            true => map_call(old.start, len, mapping.host_protection()),
            false => unmap_call(old.start, len),
        });
        Ok((start, change))
    }

    /// [`Self::remap`] by the arguments of a call.
    #[cfg(test)]
    pub(super) fn remap_by(&mut self, a: &[u64; 6]) -> Result<(u64, Change), Errno> {
        self.remap(&Remap::new(a)?)
    }
}

impl Sentry {
    /// `mremap(2)`: a private mapping of a file does not grow (`ENOMEM`).
    pub(in crate::sentry) fn sys_mremap(&mut self, a: &[u64; 6]) -> SyscallResult {
        let remap = Remap::new(a)?;
        if remap.old.is_empty() {
            return self.map_again(&remap);
        }
        if remap.old.start < GUEST.start || remap.old.end > GUEST.end {
            return Err(Errno::FAULT.into());
        }
        let len = remap.old.end - remap.old.start;
        let stays = remap.to.is_none() && !remap.has(KEEPS_OLD) && remap.new_len <= len;
        let more = if remap.has(KEEPS_OLD) { len } else { remap.new_len.saturating_sub(len) };
        let old = self.state.layout.whole(&remap.old);
        let data = old.is_ok_and(|m| is_data(m.protection, m.share.is_some()));
        if old.is_ok_and(|m| m.locked) && remap.new_len > len {
            self.may_lock_more(remap.new_len - len)?;
        }
        // Limits that are exceeded already forbid only growth.
        if more > 0 {
            self.state.check_address_space(more, &(0..0), data)?;
        }
        let (start, change) = match old.map(|m| m.share) {
            Ok(Some(share)) if !stays => self.remap_shared(&remap, share)?,
            _ => self.change().layout.remap(&remap)?,
        };
        Ok(SyscallControl::Memory(start, change))
    }

    /// Maps shared memory a second time: `mremap` with an old length of 0.
    fn map_again(&mut self, remap: &Remap) -> SyscallResult {
        if remap.old.start < GUEST.start {
            return Err(Errno::INVAL.into());
        }
        let at = remap.old.start;
        let shared = self.state.layout.shared();
        let shared = shared.into_iter().find(|shared| shared.range.contains(&at));
        let Some(SharedMapping { share, protection, .. }) = shared else {
            let mapped = self.state.layout.touches(&(at..at + 1));
            return Err(if mapped { Errno::INVAL } else { Errno::FAULT }.into());
        };
        if !remap.has(MAY_MOVE) {
            // The old one stays, and there is no room for another in its place.
            return Err(Errno::NOMEM.into());
        }
        let (offset, len) = (share.offset(at), remap.new_len);
        let traits = self.state.layout.mapping_at(at).map(|(_, m)| m.traits).unwrap_or_default();
        // A seal is of the old one.
        let traits = MappingTraits { sealed: false, ..traits };
        self.state.layout.plan(remap.to, false, len, protection, true)?;
        self.state.check_address_space(len, &(0..0), false)?;
        let content = self.shared_content(share.node, offset, len, protection)?;
        let layout = &mut self.change().layout;
        let (start, change) = layout.map(remap.to, false, len, protection, Some(content))?;
        layout.share(start..start + len, FileBacking::new(share.node, start, offset));
        layout.set_traits(&(start..start + len.next_multiple_of(PAGE)), traits);
        Ok(SyscallControl::Memory(start, change))
    }

    /// `remap_file_pages(2)`: maps another part of the file at a part of a shared mapping, as Linux
    /// does.
    pub(in crate::sentry) fn sys_remap_file_pages(
        &mut self,
        start: u64,
        size: u64,
        protection: u64,
        page: u64,
    ) -> SyscallResult {
        let (start, size) = (start / PAGE * PAGE, size / PAGE * PAGE);
        let offset = page.checked_mul(PAGE).filter(|offset| offset.checked_add(size).is_some());
        let (Some(end), Some(offset)) = (start.checked_add(size), offset) else {
            return Err(Errno::INVAL.into());
        };
        let range = start..end;
        if protection != 0 || size == 0 {
            return Err(Errno::INVAL.into());
        }
        // All of it shows one file, with the same rights.
        let parts = self.state.layout.parts(&range);
        let Some(&(_, first)) = parts.first() else { return Err(Errno::INVAL.into()) };
        let Some(share) = first.share else { return Err(Errno::INVAL.into()) };
        let is_alike = |m: &Mapping| {
            (m.share.map(|share| share.node), m.protection) == (Some(share.node), first.protection)
        };
        if !self.state.layout.allows(&range, 0) || !parts.iter().all(|(_, m)| is_alike(m)) {
            return Err(Errno::INVAL.into());
        }
        if self.state.system_v.is_removed(share.node) {
            return Err(Errno::IDRM.into());
        }
        self.state.layout.plan(Some(start), false, size, first.protection, true)?;
        let room = self.state.layout.growth(&range, 2);
        self.state.layout.check_room(room)?;
        if offset + size > self.state.tree.stat(share.node)?.size.next_multiple_of(PAGE) {
            self.make_live(share.node, offset..offset + size, writes(first.protection))?;
        }
        self.keep_mapped(share.node, offset..offset + size, first.protection)?;
        let content = self.shared_content(share.node, offset, size, first.protection)?;
        let layout = &mut self.change().layout;
        let (_, change) = layout.map(Some(start), false, size, first.protection, Some(content))?;
        layout.share(range.clone(), FileBacking::new(share.node, start, offset));
        layout.set_traits(&range, first.traits);
        if first.locked {
            layout.set_locked(&range, true)?;
        }
        self.count_shared()?;
        Ok(SyscallControl::Memory(0, change))
    }

    /// Maps a part of a shared file at another place, or more of it. Its bytes are up to date.
    fn remap_shared(&mut self, remap: &Remap, share: FileBacking) -> SyscallResult<(u64, Change)> {
        let Remap { old, new_len, .. } = remap.clone();
        let mut layout = self.state.layout.clone();
        layout.check_seals(&old)?;
        let Mapping { protection, traits, .. } = layout.whole(&old)?;
        let offset = share.offset(old.start);
        // A mapping that moves goes to addresses that were free before.
        let free = layout.free(new_len, CEILING);
        // The old addresses show the same bytes, if they stay.
        let mut change = match remap.has(KEEPS_OLD) {
            true => Change::default(),
            false => layout.unmap(old.start, old.end - old.start)?,
        };
        let grown = old.start..old.start.checked_add(new_len).ok_or(Errno::NOMEM)?;
        let fits = grown.end <= GUEST.end && !layout.touches(&grown);
        let to = match remap.to {
            Some(to) => Some(to),
            None if fits => Some(old.start),
            None if remap.has(MAY_MOVE) => Some(free?),
            None => return Err(Errno::NOMEM.into()),
        };
        layout.plan(to, false, new_len, protection, true)?;
        let content = self.shared_content(share.node, offset, new_len, protection)?;
        let (start, mapped) = layout.map(to, false, new_len, protection, Some(content))?;
        layout.share(start..start + new_len, FileBacking::new(share.node, start, offset));
        layout.set_traits(&(start..start + new_len), traits);
        change.before.extend(mapped.before);
        (change.content, change.after) = (mapped.content, mapped.after);
        self.change().layout = layout;
        Ok((start, change))
    }
}
