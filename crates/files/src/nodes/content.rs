//! The bytes of a file: its own pages over those of a layer below, with holes where there is
//! neither.
//!
//! Promises: a copy costs nothing and shares every page until one of the two is written; a write
//! copies the pages it touches; unwritten parts take no room. May break it: a layer that changes
//! while it is used.

use std::ops::Range;
use std::sync::Arc;

use crate::error::Refused;
use crate::nodes::map::Map;
use crate::nodes::source::{LowerBytes, Source, SourceVersion};

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;
/// Pages are paid for in steps of this size, so that many small ones cannot take more than they
/// pay.
const STEP: u64 = 256;
/// Maximum length of a file.
const MAX_FILE_SIZE: u64 = i64::MAX as u64;

/// Where the bytes are that a layer below has.
#[derive(Clone, Debug)]
pub(crate) struct LowerContent {
    pub(crate) source: Source,
    /// Bytes of it that still count: a file that was cut shorter does not get them back.
    pub(crate) len: u64,
    /// The version of a host file that has these bytes. One of a saved tree is not known.
    pub(crate) version: Option<SourceVersion>,
}

impl PartialEq for LowerContent {
    fn eq(&self, other: &Self) -> bool {
        let versions = self.version.zip(other.version);
        (self.source, self.len) == (other.source, other.len)
            && versions.is_none_or(|(one, two)| one == two)
    }
}

/// The bytes of a file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Content {
    pub(crate) size: u64,
    /// By number; bytes after the end of one are zeros.
    pub(crate) pages: Map<u64, Arc<Vec<u8>>>,
    pub(crate) under: Option<LowerContent>,
    /// The cost of the pages.
    pub(crate) paid: u64,
}

pub(crate) fn cost(page: usize) -> u64 {
    (page as u64).max(1).next_multiple_of(STEP)
}

impl Content {
    /// Bytes of a layer.
    pub(crate) fn of(source: Source, len: u64) -> Self {
        let under = LowerContent { source, len, version: None };
        Self { size: len, under: Some(under), ..Self::default() }
    }

    /// Bytes of a version of a host file.
    pub(crate) fn of_version(source: Source, len: u64, version: SourceVersion) -> Self {
        let under = LowerContent { source, len, version: Some(version) };
        Self { size: len, under: Some(under), ..Self::default() }
    }

    /// Bytes that are stored for it, here or below.
    pub(crate) fn occupied(&self) -> u64 {
        self.paid + self.under.as_ref().map_or(0, |under| under.len)
    }

    fn page_below(&self, number: u64) -> bool {
        self.under.as_ref().is_some_and(|under| number * (PAGE as u64) < under.len)
    }

    /// The page as it is below.
    fn page_of_layer(&self, layers: &impl LowerBytes, number: u64) -> Result<Vec<u8>, Refused> {
        let Some(under) = &self.under else { return Ok(Vec::new()) };
        let at = number * PAGE as u64;
        let len = under.len.saturating_sub(at).min(PAGE as u64) as usize;
        let mut page = vec![0; len];
        if len > 0 {
            layers.read(under.source, under.version, at, &mut page)?;
        }
        Ok(page)
    }

    /// Reads from `offset` on as much as there is.
    pub(crate) fn read(
        &self,
        layers: &impl LowerBytes,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, Refused> {
        let len = self.size.saturating_sub(offset).min(out.len() as u64) as usize;
        let out = &mut out[..len];
        out.fill(0);
        if len == 0 {
            return Ok(0);
        }
        let end = offset + len as u64;
        // First the layer below, in the gaps between the file's own pages.
        let mut hole = offset;
        for (number, page) in self.pages.from(&(offset / PAGE as u64)) {
            let start = number * PAGE as u64;
            if start >= end {
                break;
            }
            self.read_below(layers, offset, hole.max(offset), start, out)?;
            hole = start + PAGE as u64;
            let from = offset.max(start);
            let to = end.min(start + page.len() as u64);
            if from < to {
                let part = &page[(from - start) as usize..(to - start) as usize];
                out[(from - offset) as usize..(to - offset) as usize].copy_from_slice(part);
            }
        }
        self.read_below(layers, offset, hole.max(offset), end, out)?;
        Ok(len)
    }

    /// Reads the layer's bytes between `from` and `to` into `out`, which begins at `base`.
    fn read_below(
        &self,
        layers: &impl LowerBytes,
        base: u64,
        from: u64,
        to: u64,
        out: &mut [u8],
    ) -> Result<(), Refused> {
        let Some(under) = &self.under else { return Ok(()) };
        let to = to.min(under.len);
        if from >= to {
            return Ok(());
        }
        let part = &mut out[(from - base) as usize..(to - base) as usize];
        layers.read(under.source, under.version, from, part)
    }

    /// Writes as much as `room` pays for; returns the number of bytes, and the change of the cost.
    pub(crate) fn write(
        &mut self,
        layers: &impl LowerBytes,
        offset: u64,
        bytes: &[u8],
        mut room: u64,
    ) -> Result<usize, Refused> {
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= MAX_FILE_SIZE);
        end.ok_or(Refused::TooLarge)?;
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let (number, from) = (at / PAGE as u64, (at % PAGE as u64) as usize);
            let len = (PAGE - from).min(bytes.len() - done);
            let part = &bytes[done..done + len];
            match self.write_page(layers, number, from, part, room) {
                Ok(paid) => room -= paid,
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
            done += len;
            self.size = self.size.max(at + len as u64);
        }
        Ok(done)
    }

    /// Writes into one page; returns the change of its cost.
    fn write_page(
        &mut self,
        layers: &impl LowerBytes,
        number: u64,
        from: usize,
        part: &[u8],
        room: u64,
    ) -> Result<u64, Refused> {
        let old = self.pages.get(&number).map(|page| page.len());
        let below = if old.is_some() { 0 } else { self.below(number) };
        let len = (from + part.len()).max(old.unwrap_or(below));
        let paid = cost(len) - old.map_or(0, cost);
        if paid > room {
            return Err(Refused::Full);
        }
        if old.is_none() {
            let whole = from == 0 && part.len() >= below;
            let page = if whole || !self.page_below(number) {
                Vec::new()
            } else {
                self.page_of_layer(layers, number)?
            };
            self.pages.insert(number, Arc::new(page));
        }
        if let Some(page) = self.pages.get_mut(&number) {
            let page = Arc::make_mut(page);
            if page.len() < from + part.len() {
                page.resize(from + part.len(), 0);
            }
            page[from..from + part.len()].copy_from_slice(part);
        }
        self.paid += paid;
        Ok(paid)
    }

    /// Bytes of a page that the layer has.
    fn below(&self, number: u64) -> usize {
        let under = self.under.as_ref().map_or(0, |under| under.len);
        under.saturating_sub(number * PAGE as u64).min(PAGE as u64) as usize
    }

    /// Makes it shorter or, with zeros, longer.
    pub(crate) fn set_size(&mut self, size: u64) -> Result<(), Refused> {
        if size > MAX_FILE_SIZE {
            return Err(Refused::TooLarge);
        }
        if size < self.size {
            self.cut(size);
        }
        self.size = size;
        Ok(())
    }

    fn cut(&mut self, size: u64) {
        if size == 0 {
            (self.pages, self.under, self.paid) = (Map::default(), None, 0);
            return;
        }
        let first = size.div_ceil(PAGE as u64);
        let gone: Vec<u64> = self.pages.from(&first).map(|(number, _)| *number).collect();
        for number in gone {
            if let Some(page) = self.pages.remove(&number) {
                self.paid -= cost(page.len());
            }
        }
        let (number, keep) = (size / PAGE as u64, (size % PAGE as u64) as usize);
        if keep > 0
            && let Some(page) = self.pages.get_mut(&number)
            && page.len() > keep
        {
            self.paid -= cost(page.len()) - cost(keep);
            Arc::make_mut(page).truncate(keep);
        }
        if let Some(under) = &mut self.under {
            under.len = under.len.min(size);
        }
    }

    /// The next position from `from` on that is stored, or that is not.
    pub(crate) fn next_run(&self, from: u64, data: bool) -> Option<u64> {
        if from >= self.size {
            return None;
        }
        let mut at = from;
        loop {
            let number = at / PAGE as u64;
            if (self.page_below(number) || self.pages.get(&number).is_some()) == data {
                return Some(at);
            }
            let next = match data {
                // Nothing is below here, or it would have been found.
                true => *self.pages.from(&(number + 1)).next()?.0,
                false if self.page_below(number) => self.pages_below(),
                false => number + 1,
            };
            at = next * PAGE as u64;
            if at >= self.size {
                return (!data).then_some(self.size);
            }
        }
    }

    /// Whether the two are stored alike: the same pages, over the same bytes below.
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.size == other.size
            && self.under == other.under
            && self.pages.differing(&other.pages, |a, b| a == b).is_empty()
    }

    /// Number of pages that the layer has, holes included.
    fn pages_below(&self) -> u64 {
        self.under.as_ref().map_or(0, |under| under.len.div_ceil(PAGE as u64))
    }

    /// Ranges of pages that are stored, here or below, in order.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        let below = self.pages_below();
        let own = self.pages.iter().map(|(number, _)| *number).filter(move |n| *n >= below);
        std::iter::once(0..below).chain(own.map(|number| number..number + 1))
    }

    /// The first page from `number` on that is stored. Holes of host files are left out.
    pub(crate) fn next_page(&self, layers: &impl LowerBytes, number: u64) -> Option<u64> {
        let own = self.pages.from(&number).next().map(|(number, _)| *number);
        let under = self.under.as_ref().filter(|_| self.page_below(number));
        let below = under.and_then(|under| {
            let at = layers.next_data(under.source, number * PAGE as u64)?;
            (at < under.len).then_some(at / PAGE as u64)
        });
        own.into_iter().chain(below).min()
    }
}
