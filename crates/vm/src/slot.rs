//! One contiguous reservation holding an image copy-on-write, and the image itself.
//!
//! Promises: an image never changes once sealed; a slot's accessible runs show the image until
//! they are written; everything else of the reservation faults. May break it: nothing in safe code.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::PAGE;
use crate::pages::{PageSet, Run};

/// Bytes of inaccessible address space before and after a slot.
const GUARD: usize = 1 << 20;

/// Immutable page-granular content; pages of zeros are not stored.
#[derive(Debug)]
pub(crate) struct Image {
    file: OwnedFd,
    view: Mapping,
    stored: PageSet,
    pages: u64,
}

impl Image {
    /// Builds an image of `pages` pages from pieces of content, each at a page index. A piece's
    /// length is a multiple of the page size.
    pub(crate) fn build<'a>(
        pages: u64,
        pieces: impl IntoIterator<Item = (u64, &'a [u8])>,
    ) -> Result<Self, Errno> {
        let file = memfd_create("afresh-image", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let len = pages * PAGE;
        ftruncate(&file, len)?;
        let mut stored = PageSet::new(pages);
        for (first, bytes) in pieces {
            let mut start = None;
            let count = bytes.len() as u64 / PAGE;
            for index in 0..=count {
                let page = (index < count)
                    .then(|| &bytes[(index * PAGE) as usize..((index + 1) * PAGE) as usize]);
                let content = page.is_some_and(|page| !is_zero(page));
                match (content, start) {
                    (true, None) => start = Some(index),
                    (false, Some(from)) => {
                        let range = (from * PAGE) as usize..(index * PAGE) as usize;
                        write_all(&file, &bytes[range], (first + from) * PAGE)?;
                        stored.insert_range(first + from, first + index);
                        start = None;
                    }
                    _ => {}
                }
            }
        }
        fcntl_add_seals(
            &file,
            SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
        )?;
        // SAFETY: a fresh read-only mapping of a sealed file, at an address of the kernel's choice.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len as usize,
                ProtFlags::READ,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        let view = Mapping::new(base, len as usize)?;
        Ok(Self { file, view, stored, pages })
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    pub(crate) fn stored(&self) -> &PageSet {
        &self.stored
    }

    /// The content of a stored page.
    pub(crate) fn page(&self, page: u64) -> Option<&[u8]> {
        if !self.stored.contains(page) {
            return None;
        }
        // SAFETY: the page lies inside the view; the file is sealed, so nobody can change it.
        Some(unsafe {
            std::slice::from_raw_parts(self.view.at((page * PAGE) as usize), PAGE as usize)
        })
    }
}

fn write_all(file: &OwnedFd, mut bytes: &[u8], mut at: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let n = rustix::io::pwrite(file, bytes, at)?;
        bytes = &bytes[n..];
        at += n as u64;
    }
    Ok(())
}

/// Whether a page holds only zeros.
pub(crate) fn is_zero(page: &[u8]) -> bool {
    page.chunks_exact(64).all(|chunk| chunk.iter().fold(0, |a, b| a | b) == 0)
}

#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is not tied to a thread; its users state how they access it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(base: *mut core::ffi::c_void, len: usize) -> Result<Self, Errno> {
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { base, len })
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.len);
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the owner is being dropped, so nothing refers to the mapping any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A reservation showing an image.
#[derive(Debug)]
pub(crate) struct Slot {
    reserved: Mapping,
    image: Arc<Image>,
    accessible: Arc<Vec<Run>>,
}

impl Slot {
    /// Reserves address space for `image` and maps the `accessible` runs of pages.
    pub(crate) fn new(image: Arc<Image>, accessible: Arc<Vec<Run>>) -> Result<Self, Errno> {
        let len = (image.pages * PAGE) as usize + 2 * GUARD;
        // SAFETY: a fresh inaccessible mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let slot = Self { reserved: Mapping::new(base, len)?, image, accessible };
        for run in slot.accessible.iter() {
            slot.show(run)?;
        }
        Ok(slot)
    }

    /// Shows another image of the same shape at the same addresses. Private pages are dropped.
    /// On an error the slot must not be used any more.
    pub(crate) fn rebase(&mut self, image: Arc<Image>) -> Result<(), Errno> {
        if image.pages != self.image.pages {
            return Err(Errno::INVAL);
        }
        self.image = image;
        for run in self.accessible.iter() {
            self.show(run)?;
        }
        Ok(())
    }

    fn show(&self, run: &Run) -> Result<(), Errno> {
        // SAFETY: the run lies inside the reservation, which is ours; MAP_FIXED replaces it.
        unsafe {
            mmap(
                self.pointer((run.start * PAGE) as usize).cast(),
                ((run.end - run.start) * PAGE) as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
                &self.image.file,
                run.start * PAGE,
            )
        }?;
        Ok(())
    }

    pub(crate) fn pages(&self) -> u64 {
        self.image.pages
    }

    pub(crate) fn image(&self) -> &Arc<Image> {
        &self.image
    }

    pub(crate) fn accessible(&self) -> &Arc<Vec<Run>> {
        &self.accessible
    }

    /// Host address of the byte at `offset`.
    pub(crate) fn pointer(&self, offset: usize) -> *mut u8 {
        self.reserved.at(GUARD + offset)
    }

    /// Copies the image's pages `run`, all accessible, over the slot's.
    pub(crate) fn copy_back(&self, run: &Run) {
        let mut page = run.start;
        while page < run.end {
            let stored = self.image.stored.contains(page);
            let mut end = page + 1;
            while end < run.end && self.image.stored.contains(end) == stored {
                end += 1;
            }
            let (at, len) = ((page * PAGE) as usize, ((end - page) * PAGE) as usize);
            // SAFETY: the pages lie inside the slot and the view; the vCPU is stopped and no
            // reference to slot memory exists.
            unsafe {
                if stored {
                    std::ptr::copy_nonoverlapping(self.image.view.at(at), self.pointer(at), len);
                } else {
                    std::ptr::write_bytes(self.pointer(at), 0, len);
                }
            }
            page = end;
        }
    }

    /// Drops the slot's own copies of the pages `run`, so that they show the image again.
    pub(crate) fn discard(&self, run: &Run) -> Result<(), Errno> {
        // SAFETY: the pages lie inside the slot; for a private file mapping the next access shows
        // the file's content again.
        unsafe {
            madvise(
                self.pointer((run.start * PAGE) as usize).cast(),
                ((run.end - run.start) * PAGE) as usize,
                Advice::LinuxDontNeed,
            )
        }
    }

    /// Copies accessible pages out; `out` is as long as the run.
    pub(crate) fn read_run(&self, run: &Run, out: &mut [u8]) {
        let len = (((run.end - run.start) * PAGE) as usize).min(out.len());
        // SAFETY: callers pass accessible pages, which the slot holds; the vCPU is stopped.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.pointer((run.start * PAGE) as usize),
                out.as_mut_ptr(),
                len,
            );
        }
    }

    /// Copies a page out.
    pub(crate) fn read_page(&self, page: u64, out: &mut [u8; PAGE as usize]) {
        // SAFETY: callers pass accessible pages; the vCPU is stopped.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.pointer((page * PAGE) as usize),
                out.as_mut_ptr(),
                PAGE as usize,
            );
        }
    }

    /// The first accessible page that differs from the image.
    pub(crate) fn first_difference(&self) -> Option<u64> {
        let mut live = [0; PAGE as usize];
        self.accessible.iter().cloned().flatten().find(|page| {
            self.read_page(*page, &mut live);
            match self.image.page(*page) {
                Some(content) => live[..] != *content,
                None => !is_zero(&live),
            }
        })
    }
}
