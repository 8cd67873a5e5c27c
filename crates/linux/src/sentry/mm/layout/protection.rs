//! Protections of mappings, and advice on them.

use std::ops::Range;

use rustix::io::Errno;

use super::traits::MappingTraits;
use super::{GUEST, Layout, Mapping, pages};
use crate::sentry::mm::stub_calls::{Change, map_call, protect_call};

/// The protection that the processor gives: writable memory is readable.
pub(in crate::sentry) fn readable(protection: u64) -> u64 {
    let writes = protection & libc::PROT_WRITE as u64 != 0;
    if writes { protection | libc::PROT_READ as u64 } else { protection }
}

impl Layout {
    /// `mprotect`: writable memory is readable.
    pub(in crate::sentry) fn protect_as(
        &mut self,
        start: u64,
        len: u64,
        asked: u64,
    ) -> Result<Change, Errno> {
        let protection = readable(asked);
        self.change_protection(start, len, protection, protection != asked)
    }

    /// Gives a part of a mapping whose protection was changed its former protection and rules.
    /// There are no more mappings than before that change, or than after it.
    pub(in crate::sentry) fn put_back(&mut self, range: Range<u64>, was: Mapping) -> Change {
        // Reserved memory may have bytes now.
        let reserved = self.mapping_at(range.start).map_or(was.reserved, |(_, m)| m.reserved);
        let mapping = Mapping { end: range.end, reserved, ..was };
        let (start, len) = (range.start, range.end - range.start);
        self.place(range, mapping);
        let before = vec![protect_call(start, len, mapping.host_protection())];
        Change { before, ..Change::default() }
    }

    /// Gives memory a protection of the processor.
    #[cfg(test)]
    pub(crate) fn protect(
        &mut self,
        start: u64,
        len: u64,
        protection: u64,
    ) -> Result<Change, Errno> {
        self.change_protection(start, len, protection, false)
    }

    fn change_protection(
        &mut self,
        start: u64,
        len: u64,
        protection: u64,
        unreadable: bool,
    ) -> Result<Change, Errno> {
        if len == 0 {
            return Ok(Change::default());
        }
        if protection & !7 != 0 {
            return Err(Errno::INVAL);
        }
        let huge = len > GUEST.end;
        let range = if huge { Err(Errno::NOMEM) } else { pages(start, len) }?;
        if !self.allows(&range, 0) {
            return Err(Errno::NOMEM);
        }
        let mut parts = self.parts(&range);
        self.check_seals(&range)?;
        let writes = protection & libc::PROT_WRITE as u64 != 0;
        if writes && parts.iter().any(|(_, m)| m.traits.read_only) {
            return Err(Errno::ACCESS);
        }
        let growth = self.growth(&range, parts.len());
        // Pages beyond the end of a file stay closed.
        parts.retain(|(_, m)| !m.is_beyond());
        let set = |layout: &mut Self| {
            for (part, m) in &parts {
                let end = part.end;
                let reserved = m.reserved && (protection == 0 || m.is_sparse());
                let traits = MappingTraits { unreadable, ..m.traits };
                layout.place(part.clone(), Mapping { end, protection, reserved, traits, ..*m });
            }
        };
        self.check_change(&[&range], growth, set)?;
        let opens = |m: &Mapping| m.reserved && !m.is_sparse() && protection != 0;
        let opened = parts.iter().filter(|(_, m)| opens(m)).map(|(part, _)| part.end - part.start);
        self.afford(opened.sum(), false)?;
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (part, _) in parts.iter().filter(|(_, m)| !m.is_sparse()) {
            match ranges.last_mut().filter(|last| last.end == part.start) {
                Some(last) => last.end = part.end,
                None => ranges.push(part.clone()),
            }
        }
        set(self);
        let order =
            |range: Range<u64>| protect_call(range.start, range.end - range.start, protection);
        Ok(Change { before: ranges.into_iter().map(order).collect(), ..Change::default() })
    }

    /// `madvise`: only advice that discards bytes has an effect.
    pub(crate) fn advise(&mut self, start: u64, len: u64, advice: u64) -> Result<Change, Errno> {
        if len == 0 {
            return Ok(Change::default());
        }
        let range = pages(start, len)?;
        if !self.allows(&range, 0) {
            return Err(Errno::NOMEM);
        }
        // Advice that discards bytes which the process cannot write.
        let discards = [
            libc::MADV_DONTNEED,
            libc::MADV_FREE,
            libc::MADV_REMOVE,
            libc::MADV_DONTFORK,
            libc::MADV_WIPEONFORK,
            libc::MADV_DONTNEED_LOCKED,
        ];
        let is_kept = |m: &Mapping| {
            m.traits.sealed && m.is_anonymous() && m.protection & libc::PROT_WRITE as u64 == 0
        };
        if discards.contains(&(advice as i32)) && self.mappings_in(&range).any(|(_, m)| is_kept(m))
        {
            return Err(Errno::PERM);
        }
        match advice as i32 {
            libc::MADV_DONTNEED => {
                let parts = self.parts(&range);
                if parts.iter().any(|(_, m)| m.locked || m.file && m.share.is_none()) {
                    return Err(Errno::INVAL);
                }
                // Shared memory keeps its bytes, and sparse memory has none.
                let parts = parts.iter().filter(|(_, m)| m.share.is_none() && !m.is_sparse());
                let map = |(part, m): &(Range<u64>, Mapping)| {
                    map_call(part.start, part.end - part.start, m.protection)
                };
                Ok(Change { before: parts.map(map).collect(), ..Change::default() })
            }
            libc::MADV_NORMAL
            | libc::MADV_RANDOM
            | libc::MADV_SEQUENTIAL
            | libc::MADV_WILLNEED
            | libc::MADV_FREE
            | libc::MADV_DONTFORK
            | libc::MADV_DOFORK
            | libc::MADV_HUGEPAGE
            | libc::MADV_NOHUGEPAGE
            | libc::MADV_DONTDUMP
            | libc::MADV_DODUMP
            | libc::MADV_COLD
            | libc::MADV_PAGEOUT => Ok(Change::default()),
            _ => Err(Errno::INVAL),
        }
    }
}
