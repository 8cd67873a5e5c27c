//! The memory of a VMM as it is now, or as it was frozen: what its process holds, over the source.
//!
//! Promises: a page that the process has, in memory or swapped out, is read from it. One that it
//! does not have is the source's if nothing has filled or discarded it, else zero. Memory that is
//! not the one of the userfaultfd is refused, also that of a program which the VMM executes later,
//! because a program of another user has secrets there. The lists of its pages are charged to the
//! budget of its endpoint.
//!
//! May break it: a guest that runs during the scan. Its pages are then of different moments.

use std::io;
use std::sync::{Arc, PoisonError};

use afresh_store::Pages;
use afresh_sys::{PAGE_SIZE, PageRange, ProcessMemory};

use super::page::Page;
use super::ranges::{ChargedList, runs};
use super::request_error::RequestError;
use super::service::Service;
use super::watch::Origin;
use super::watch_end::WatchId;

/// Pages compared with the source at a time.
const BATCH: usize = 64;

/// Where the current content of pages is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// At this address of the process.
    Process(usize),
    Zero,
}

/// The current memory of a VMM.
pub(super) struct VmMemory<'a> {
    service: &'a Service<'a>,
    process: Arc<ProcessMemory>,
    /// Pages of the source that are not as in the source, perhaps, in order.
    changed: ChargedList<(PageRange, Content)>,
    /// The frozen image that this is.
    frozen: Option<WatchId>,
}

impl<'a> VmMemory<'a> {
    /// Finds the pages that the process of a VMM holds.
    pub(super) fn of(service: &'a Service<'a>) -> Result<Self, RequestError> {
        let (process, shared) = open(service)?;
        let mut changed = ChargedList::new(service.budget.as_ref());
        let most = service.mappings.iter().map(|mapping| mapping.pages).max();
        let _there = service.charge(most.unwrap_or_default())?;
        // During the scan nothing is filled and no discard is noted.
        let pages = service.lock();
        for (number, mapping) in service.mappings.iter().enumerate() {
            let base = pages.address(number, 0);
            let end = base + mapping.pages * PAGE_SIZE;
            let mut there = vec![false; mapping.pages];
            if shared {
                // A page can be in the file and not be mapped: all but those that were never filled
                // are read.
                for run in pages.ranges(number, |page, _| page != Page::Missing) {
                    there[run.start..run.end()].fill(true);
                }
            }
            let note = |run: std::ops::Range<usize>| {
                there[(run.start - base) / PAGE_SIZE..(run.end - base) / PAGE_SIZE].fill(true);
            };
            process.present(base..end, note).map_err(RequestError::Process)?;
            let content = |page: usize| match pages.state(number, page) {
                Page::Unmapped => Some(false),
                _ if there[page] => Some(true),
                Page::Missing | Page::Filling if pages.is_cleared(number, page) => Some(false),
                Page::Missing | Page::Filling => None,
                // Discarded, with an event or without one.
                Page::Present | Page::Removed => Some(false),
            };
            for (run, is_there) in runs((0..mapping.pages).map(content)) {
                let content = match is_there {
                    Some(true) => Content::Process(base + run.start * PAGE_SIZE),
                    Some(false) => Content::Zero,
                    None => continue,
                };
                let run = PageRange::new(mapping.offset + run.start, run.len);
                changed.push((run, content)).map_err(RequestError::Ranges)?;
            }
        }
        drop(pages);
        changed.sort_unstable_by_key(|(run, _)| run.start);
        Ok(Self { service, process, changed, frozen: None })
    }

    /// The frozen image of a watch.
    pub(super) fn frozen(service: &'a Service<'a>, watch: WatchId) -> Result<Self, RequestError> {
        let mut changed = ChargedList::new(service.budget.as_ref());
        let mut pages = service.lock();
        let process = pages.watches.frozen(watch)?.process.clone();
        for (number, mapping) in service.mappings.iter().enumerate() {
            let base = pages.address(number, 0);
            for (run, origin) in pages.watches.frozen(watch)?.changed(number) {
                let content = match origin {
                    Origin::Source => continue,
                    Origin::Process => Content::Process(base + run.start * PAGE_SIZE),
                    Origin::Zero => Content::Zero,
                };
                let run = PageRange::new(mapping.offset + run.start, run.len);
                changed.push((run, content)).map_err(RequestError::Ranges)?;
            }
        }
        drop(pages);
        changed.sort_unstable_by_key(|(run, _)| run.start);
        Ok(Self { service, process, changed, frozen: Some(watch) })
    }

    /// The number of runs of pages that can differ from the source.
    pub(super) fn ranges(&self) -> usize {
        self.changed.len()
    }

    /// The pages that can differ from the source.
    pub(super) fn changed(&self) -> Vec<PageRange> {
        self.changed.iter().map(|(run, _)| *run).collect()
    }

    /// The pages that do differ from the source.
    pub(super) fn differing(&self) -> Result<ChargedList<PageRange>, RequestError> {
        let mut differing = ChargedList::<PageRange>::new(self.service.budget.as_ref());
        let (mut now, mut before) = (vec![0; BATCH * PAGE_SIZE], vec![0; BATCH * PAGE_SIZE]);
        for (run, content) in &*self.changed {
            for first in (run.start..run.end()).step_by(BATCH) {
                let bytes = BATCH.min(run.end() - first) * PAGE_SIZE;
                let (now, before) = (&mut now[..bytes], &mut before[..bytes]);
                self.read_content(*content, first - run.start, now)
                    .and_then(|()| self.read_source(first, before))
                    .map_err(RequestError::Process)?;
                let pairs = now.chunks(PAGE_SIZE).zip(before.chunks(PAGE_SIZE));
                for (page, _) in pairs.enumerate().filter(|(_, (now, before))| now != before) {
                    match differing.last_mut() {
                        Some(last) if last.end() == first + page => last.len += 1,
                        _ => differing
                            .push(PageRange::new(first + page, 1))
                            .map_err(RequestError::Ranges)?,
                    }
                }
            }
        }
        Ok(differing)
    }

    /// Reads from page `skip` of a run on.
    fn read_content(&self, content: Content, skip: usize, out: &mut [u8]) -> io::Result<()> {
        match content {
            Content::Process(address) => {
                let address = address + skip * PAGE_SIZE;
                match self.frozen {
                    Some(id) => self.service.read_frozen((id, &self.process), address, out),
                    None => self.process.read(address, out),
                }
            }
            Content::Zero => {
                out.fill(0);
                Ok(())
            }
        }
    }

    fn read_source(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
        let pages = out.len() / PAGE_SIZE;
        // SAFETY: the slice has the length of the pages, and is borrowed for this call alone.
        unsafe { self.service.source.read(first, out.as_mut_ptr(), pages) }
            .map_err(io::Error::other)
    }
}

/// Opens the memory of the userfaultfd, in the process that connected. Returns as well whether a
/// part of it is shared.
///
/// The checked files stay open, because the registration does not show any more once the VMM is
/// detached. These files belong to the address space: a program that the VMM executes has
/// another one, and its memory is never read.
pub(super) fn open(service: &Service<'_>) -> Result<(Arc<ProcessMemory>, bool), RequestError> {
    let mut mapped = ChargedList::new(service.budget.as_ref());
    {
        let pages = service.lock();
        for number in 0..service.mappings.len() {
            for run in pages.ranges(number, |page, _| page != Page::Unmapped) {
                let start = pages.address(number, run.start);
                mapped.push(start..start + run.byte_len()).map_err(RequestError::Ranges)?;
            }
        }
    }
    // Held while the mappings are read: a file has one offset.
    let mut verified = service.verified.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(memory) = &*verified {
        let kind = memory.mapping_kind(&mut mapped).map_err(RequestError::Process)?;
        return Ok((memory.clone(), kind.shared));
    }
    let memory = ProcessMemory::open(&service.process).map_err(RequestError::Process)?;
    let kind = memory.mapping_kind(&mut mapped).map_err(RequestError::Process)?;
    if !kind.watched {
        return Err(RequestError::OtherMemory(memory.pid()));
    }
    let memory = verified.insert(Arc::new(memory)).clone();
    Ok((memory, kind.shared))
}

/// Opens the memory of a VMM while its registration shows: it does not once the VMM is detached.
pub(super) fn verify(service: &Service<'_>) {
    // Later requests for the memory are refused if it fails.
    let _ = open(service);
}

impl Pages for VmMemory<'_> {
    fn pages(&self) -> usize {
        self.service.source.pages()
    }

    fn occupied(&self) -> Vec<PageRange> {
        PageRange::merge([self.service.occupied.clone(), self.changed()].concat())
    }

    fn read(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
        let wanted = PageRange::new(first, out.len() / PAGE_SIZE);
        let bytes =
            |run: PageRange| (run.start - first) * PAGE_SIZE..(run.end() - first) * PAGE_SIZE;
        let mut at = wanted.start;
        let from = self.changed.partition_point(|(run, _)| run.end() <= wanted.start);
        for (run, content) in &self.changed[from..] {
            let Some(part) = run.intersect(wanted) else { break };
            let before = PageRange::new(at, part.start - at);
            if !before.is_empty() {
                self.read_source(at, &mut out[bytes(before)])?;
            }
            self.read_content(*content, part.start - run.start, &mut out[bytes(part)])?;
            at = part.end();
        }
        let rest = PageRange::new(at, wanted.end() - at);
        if rest.is_empty() { Ok(()) } else { self.read_source(at, &mut out[bytes(rest)]) }
    }
}
