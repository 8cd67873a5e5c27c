//! The view of an arena: which chunk is mapped to what, and every change to that.
//!
//! All changes are made under one lock, by the owner or by a fault handler. Whoever holds it touches
//! no arena memory and, in a handler, allocates nothing; so a fault can always take it.
//!
//! Frames that are given back stay mapped, inaccessibly: the next cycle asks the pool for the same
//! ones and only lifts the protection. Whoever has them meanwhile is safe from this view, and this
//! view's owner from them, as the hardware refuses every access.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use afresh_frames::{CleanFrame, DirtyFrame, Order, Pool, TakeError};
use afresh_sys::{
    Advice, HUGE_SIZE, PAGE_SIZE, PageRange, Protection, Reservation, SysError, fault,
};

use crate::chunk::{Backing, CHUNK, Chunk, Mapping, left_over};
use crate::density;
use crate::window::Window;
use crate::{ArenaError, ArenaOptions, Holding};

/// How often the same address may fault although it is mapped, before the fault is passed on.
const ODD: usize = 64;

/// Whether the pool may take memory from the kernel, which a fault handler must not wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    Allowed,
    Forbidden,
}

/// What the lock protects.
#[derive(Debug)]
struct Chunks {
    chunks: Box<[Chunk]>,
    window: Window,
    /// Cycles so far, for the rhythm of looks at density.
    cycle: usize,
}

/// The mappings of an arena.
#[derive(Debug)]
pub(crate) struct View {
    memory: Reservation,
    pool: Arc<Pool>,
    chunks: Mutex<Chunks>,
    /// Accessible pages.
    size: AtomicUsize,
    adapt: bool,
    faults: AtomicUsize,
    /// Faults in a row in memory that is mapped.
    odd: AtomicUsize,
}

impl View {
    pub(crate) fn new(pool: Arc<Pool>, options: ArenaOptions) -> Result<Self, SysError> {
        let max = options.max.max(1);
        let memory = Reservation::aligned(max, HUGE_SIZE)?;
        let chunks = Chunks {
            chunks: (0..max.div_ceil(CHUNK)).map(|_| Chunk::default()).collect(),
            window: Window::new(options.window),
            cycle: 0,
        };
        Ok(Self {
            memory,
            pool,
            chunks: Mutex::new(chunks),
            size: 0.into(),
            adapt: options.adapt,
            faults: 0.into(),
            odd: 0.into(),
        })
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.base().as_ptr()
    }

    pub(crate) fn max_pages(&self) -> usize {
        self.memory.pages()
    }

    pub(crate) fn pages(&self) -> usize {
        self.size.load(Ordering::Relaxed)
    }

    pub(crate) fn faults(&self) -> usize {
        self.faults.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Chunks> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn holding(&self) -> Holding {
        let mut holding = Holding::default();
        for chunk in &self.lock().chunks {
            match chunk.backing {
                Backing::Nothing => {}
                Backing::Frame(_) => holding.frames += 1,
                Backing::Kernel => holding.kernel_chunks += 1,
            }
            holding.sparse_chunks += usize::from(chunk.sparse);
        }
        holding
    }

    /// The accessible pages of all chunks that are backed by anything.
    pub(crate) fn present(&self) -> Vec<PageRange> {
        let (chunks, size) = (self.lock(), self.pages());
        let backed = chunks.chunks.iter().enumerate().filter(|(_, chunk)| !chunk.is_empty());
        let pages = backed.map(|(at, _)| Self::visible(at, 1, size));
        pages.filter(|range| !range.is_empty()).collect()
    }

    /// The accessible pages of `len` chunks from `chunk` on, when the arena has `size` pages.
    fn visible(chunk: usize, len: usize, size: usize) -> PageRange {
        let start = chunk * CHUNK;
        PageRange::new(start, (len * CHUNK).min(size.saturating_sub(start)))
    }

    /// Makes the accessible part `size` pages long. New pages of a chunk that is mapped already are
    /// mapped now; removed ones are unmapped, and their memory is given back or made zero.
    pub(crate) fn set_pages(&self, size: usize) -> Result<(), ArenaError> {
        let mut chunks = self.lock();
        let old = self.pages();
        if size > old {
            self.extend(&mut chunks, old, size)?;
            self.size.store(size, Ordering::Relaxed);
            return Ok(());
        }
        self.size.store(size, Ordering::Relaxed);
        let edge = size.next_multiple_of(CHUNK);
        let cut = PageRange::new(size, old.min(edge).saturating_sub(size));
        let whole = self.unmap(&mut chunks, PageRange::new(edge, old.saturating_sub(edge)), false);
        if !cut.is_empty() && !chunks.chunks[size / CHUNK].is_empty() {
            let closed = self.memory.map_anonymous(cut, Protection::None);
            let chunk = &mut chunks.chunks[size / CHUNK];
            if let Some(mapping) = &mut chunk.mapping {
                mapping.len = cut.start % CHUNK;
            }
            if let Backing::Frame(frame) = &mut chunk.backing {
                self.pool.zero(frame, PageRange::new(cut.start % CHUNK, cut.len));
            }
            closed?;
        }
        whole
    }

    /// Maps what the last chunk gains when the arena grows from `old` to `new` pages.
    fn extend(&self, chunks: &mut Chunks, old: usize, new: usize) -> Result<(), ArenaError> {
        let edge = old.next_multiple_of(CHUNK).min(new);
        let gain = PageRange::new(old, edge - old);
        if gain.is_empty() {
            return Ok(());
        }
        let chunk = &mut chunks.chunks[old / CHUNK];
        match &chunk.backing {
            Backing::Nothing => {}
            Backing::Frame(frame) => {
                let file_page = frame.file_range().start;
                self.pool.map(frame, old % CHUNK, &self.memory, gain)?;
                chunk.mapping = Some(Mapping { file_page, len: old % CHUNK + gain.len });
            }
            Backing::Kernel => self.map_small(gain)?,
        }
        Ok(())
    }

    /// Makes every chunk that `range` touches present.
    pub(crate) fn fill(&self, range: PageRange, growth: Growth) -> Result<(), ArenaError> {
        let end = range.end().div_ceil(CHUNK);
        let mut at = range.start / CHUNK;
        while at < end && !range.is_empty() {
            at += self.map_at(&mut self.lock(), at, end - at, growth)?;
        }
        Ok(())
    }

    /// Sees to it that faults find memory in the pool. It is a wish: what the pool cannot have comes
    /// from the kernel.
    pub(crate) fn stock(&self, pages: usize) -> Result<(), ArenaError> {
        match self.pool.stock(pages) {
            Err(TakeError::Limit { .. } | TakeError::Fragmented { .. }) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Maps what can be known beforehand, so that touching it raises no signal: the kernel's memory
    /// over sparse chunks, which costs nothing until it is touched, and frames over the chunks that
    /// had some in the last cycle, as far as the pool has them at hand.
    pub(crate) fn anticipate(&self, range: PageRange) -> Result<(), ArenaError> {
        if !self.adapt || range.is_empty() {
            return Ok(());
        }
        let mut chunks = self.lock();
        let end = range.end().div_ceil(CHUNK);
        let mut at = range.start / CHUNK;
        while at < end {
            let chunk = &chunks.chunks[at];
            if !chunk.is_empty() || !(chunk.sparse || chunk.expected) {
                at += 1;
                continue;
            }
            let known = |c: &Chunk| c.sparse == chunk.sparse && (c.sparse || c.expected);
            let run = chunks.chunks[at..end].iter().take_while(|c| known(c)).count();
            at += self.map_at(&mut chunks, at, run, Growth::Forbidden)?;
        }
        Ok(())
    }

    /// Drops everything: the arena is empty afterwards.
    pub(crate) fn drop_all(&self) -> Result<(), ArenaError> {
        let mut chunks = self.lock();
        let size = self.size.swap(0, Ordering::Relaxed);
        let look = self.adapt && density::is_time(chunks.cycle);
        let result = self.unmap(&mut chunks, PageRange::new(0, size), look);
        chunks.cycle += 1;
        chunks.window.reset();
        result
    }

    /// Maps memory at chunk `at` and up to `most - 1` empty ones after it. Returns how many chunks
    /// from `at` on have memory now, at least one.
    ///
    /// With growth forbidden, nothing here allocates: it runs in a fault handler then.
    fn map_at(
        &self,
        chunks: &mut Chunks,
        at: usize,
        most: usize,
        growth: Growth,
    ) -> Result<usize, ArenaError> {
        let size = self.pages();
        let sparse = |chunk: &Chunk| self.adapt && chunk.sparse;
        let kind = sparse(&chunks.chunks[at]);
        let after = &chunks.chunks[at..size.div_ceil(CHUNK).min(at.saturating_add(most))];
        let run = after.iter().take_while(|c| c.is_empty() && sparse(c) == kind).count();
        if run == 0 {
            return Ok(1);
        }
        if kind {
            return self.map_kernel(chunks, at, run, size);
        }
        let visible = Self::visible(at, run, size).len;
        if let Some((file_page, order)) = left_over(&chunks.chunks[at..at + run], visible)
            && let Some(frame) = self.pool.take_at(file_page, order)
        {
            return self.reopen(chunks, at, frame, size);
        }
        let largest = Order::fitting(run * CHUNK);
        let taken = match growth {
            Growth::Allowed => self.pool.take_between(Order::HUGE, largest),
            Growth::Forbidden => self.pool.take_resident(Order::HUGE, largest),
        };
        let frame = match taken {
            Ok(frame) => frame,
            Err(_) if growth == Growth::Forbidden => return self.map_kernel(chunks, at, 1, size),
            Err(error) => return Err(error.into()),
        };
        let frame = frame.used();
        let len = frame.pages() / CHUNK;
        let range = Self::visible(at, len, size);
        let start = frame.file_range().start;
        // Whatever comes of it, what was left over there is gone.
        chunks.chunks[at..at + len].iter_mut().for_each(|chunk| chunk.mapping = None);
        if let Err(error) = self.pool.map(&frame, 0, &self.memory, range) {
            // Something may be mapped there, but nothing of it is accessible.
            self.pool.give(frame);
            return Err(error.into());
        }
        for (chunk, place) in chunks.chunks[at..at + len].iter_mut().zip(0..) {
            let len = (range.len - place * CHUNK).min(CHUNK);
            chunk.mapping = Some(Mapping { file_page: start + place * CHUNK, len });
        }
        Ok(Self::back(chunks, at, frame))
    }

    /// Makes the left-over mapping of a frame that has come back accessible.
    fn reopen(
        &self,
        chunks: &mut Chunks,
        at: usize,
        frame: CleanFrame,
        size: usize,
    ) -> Result<usize, ArenaError> {
        let range = Self::visible(at, frame.pages() / CHUNK, size);
        if let Err(error) = self.memory.protect(range, Protection::ReadWrite) {
            // Part of it may be accessible: it is closed with the rest, or never given away.
            self.pool.quarantine(frame.used());
            return Err(error.into());
        }
        Ok(Self::back(chunks, at, frame.used()))
    }

    /// Notes that a frame backs the chunks from `at` on; returns how many.
    fn back(chunks: &mut Chunks, at: usize, frame: DirtyFrame) -> usize {
        let len = frame.pages() / CHUNK;
        for (chunk, piece) in chunks.chunks[at..].iter_mut().zip(frame.split(Order::HUGE)) {
            chunk.backing = Backing::Frame(piece);
        }
        len
    }

    /// Maps the kernel's memory over `len` empty chunks from `at` on.
    fn map_kernel(
        &self,
        chunks: &mut Chunks,
        at: usize,
        len: usize,
        size: usize,
    ) -> Result<usize, ArenaError> {
        self.map_small(Self::visible(at, len, size))?;
        for chunk in &mut chunks.chunks[at..at + len] {
            chunk.backing = Backing::Kernel;
            chunk.mapping = None;
        }
        Ok(len)
    }

    /// Maps the kernel's memory in 4 KiB pages, whatever the host's huge page setting.
    fn map_small(&self, range: PageRange) -> Result<(), SysError> {
        self.memory.map_anonymous(range, Protection::ReadWrite)?;
        self.memory.advise(range, Advice::NoHugePage)
    }

    /// Unmaps the chunks of `range` (which begins at a chunk) and gives their frames back.
    fn unmap(&self, chunks: &mut Chunks, range: PageRange, look: bool) -> Result<(), ArenaError> {
        let (first, end) = (range.start / CHUNK, range.end().div_ceil(CHUNK));
        if range.is_empty() || chunks.chunks[first..end].iter().all(Chunk::is_empty) {
            return Ok(());
        }
        let cycle = chunks.cycle;
        let chunks = &mut chunks.chunks[first..end];
        if look {
            for (chunk, at) in chunks.iter_mut().zip(first..) {
                if matches!(chunk.backing, Backing::Kernel) && chunk.sparse {
                    let visible = Self::visible(at, 1, range.end());
                    chunk.sparse = !density::is_dense(self.memory.resident_pages(visible));
                }
            }
        }
        let unmapped = self.close(chunks, range);
        if look && unmapped.is_ok() {
            for chunk in chunks.iter_mut() {
                if let Backing::Frame(frame) = &chunk.backing {
                    chunk.sparse = density::frame_is_sparse(&self.pool, frame, cycle);
                }
            }
        }
        let mut frames =
            chunks.iter_mut().filter_map(|chunk| match std::mem::take(&mut chunk.backing) {
                Backing::Frame(frame) => Some(frame),
                Backing::Nothing | Backing::Kernel => None,
            });
        match unmapped {
            Ok(()) => self.pool.give_all(frames),
            // Still mapped, so never to be lent again.
            Err(_) => frames.by_ref().for_each(|frame| self.pool.quarantine(frame)),
        }
        Ok(unmapped?)
    }
}

impl View {
    /// Makes `range` inaccessible. Mappings of frames stay, without access; the kernel's memory is
    /// dropped.
    fn close(&self, chunks: &mut [Chunk], range: PageRange) -> Result<(), SysError> {
        let mut at = range.start;
        for run in chunks.chunk_by_mut(|a, b| a.mapping.is_some() == b.mapping.is_some()) {
            let part = PageRange::new(at, (run.len() * CHUNK).min(range.end() - at));
            at += part.len;
            if run[0].mapping.is_none() && run.iter().all(Chunk::is_empty) {
                continue;
            }
            let kept =
                run[0].mapping.is_some() && self.memory.protect(part, Protection::None).is_ok();
            if !kept {
                self.memory.map_anonymous(part, Protection::None)?;
                run.iter_mut().for_each(|chunk| chunk.mapping = None);
            }
        }
        Ok(())
    }
}

impl fault::FaultHandler for View {
    fn answers(&self, signal: fault::FaultSignal) -> bool {
        // SIGBUS here is a failing memory module or a lost file, which no mapping cures.
        signal == fault::FaultSignal::Segv
    }

    fn on_fault(&self, fault: &fault::Fault) -> bool {
        if fault.signal != fault::FaultSignal::Segv {
            return false;
        }
        let offset = fault.address.wrapping_sub(self.base() as usize);
        let page = offset / PAGE_SIZE;
        let mut chunks = self.lock();
        if page >= self.pages() {
            return false;
        }
        let at = page / CHUNK;
        if !chunks.chunks[at].is_empty() {
            // Another thread was faster, usually; an access that faults for ever is not ours.
            return self.odd.fetch_add(1, Ordering::Relaxed) < ODD;
        }
        self.odd.store(0, Ordering::Relaxed);
        self.faults.fetch_add(1, Ordering::Relaxed);
        let most = chunks.window.at(at);
        match self.map_at(&mut chunks, at, most, Growth::Forbidden) {
            Ok(len) => {
                chunks.window.mapped(at, len);
                true
            }
            Err(_) => false,
        }
    }
}
