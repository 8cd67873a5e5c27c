//! Freezes of memory that a vector stands for.

use std::collections::BTreeMap;

use super::*;
use crate::ImageBuilder;

/// Memory that is read as that of another process is.
struct FakeRemote {
    bytes: Vec<u8>,
    written: Vec<PageRange>,
    /// The number of reads of each page.
    reads: BTreeMap<usize, usize>,
}

impl FakeRemote {
    /// Memory that shows `image`.
    fn new(image: &Image) -> Self {
        let mut bytes = vec![0; image.pages() * PAGE_SIZE];
        image.read(0, &mut bytes);
        Self { bytes, written: Vec::new(), reads: BTreeMap::new() }
    }

    /// Writes to `page`, as a guest does.
    fn write(&mut self, page: usize, value: u8) {
        self.bytes[page * PAGE_SIZE..(page + 1) * PAGE_SIZE].fill(value);
        self.written.push(PageRange::new(page, 1));
    }
}

impl Remote for FakeRemote {
    type Error = SysError;

    fn watched(&self) -> Vec<PageRange> {
        vec![PageRange::new(0, self.bytes.len() / PAGE_SIZE)]
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), SysError> {
        written.append(&mut self.written);
        Ok(())
    }

    fn arm(&mut self, _: &[PageRange]) -> Result<(), SysError> {
        Ok(())
    }

    fn open(&mut self, _: &[PageRange]) -> Result<(), SysError> {
        Ok(())
    }

    fn renew(&mut self, _: &Image, _: &[PageRange]) -> Result<(), SysError> {
        Ok(())
    }

    fn read(&mut self, pages: &[PageRange], out: &mut [u8]) -> Result<(), SysError> {
        let numbers = pages.iter().flat_map(|run| run.start..run.end());
        for (page, out) in numbers.zip(out.chunks_exact_mut(PAGE_SIZE)) {
            out.copy_from_slice(&self.bytes[page * PAGE_SIZE..(page + 1) * PAGE_SIZE]);
            *self.reads.entry(page).or_default() += 1;
        }
        Ok(())
    }
}

/// An image of `pages` pages without a page of zeros.
fn full(pages: usize) -> Image {
    let mut builder = ImageBuilder::new(pages);
    for page in 0..pages {
        builder.segment(page * PAGE_SIZE + 8, &[page as u8 | 1; 8]).unwrap();
    }
    builder.build().unwrap()
}

/// Freezes `remote`, compares each page of the new image with it, and returns the image.
fn check_freeze(slot: &mut RemoteSlot, remote: &mut FakeRemote, pages: usize) -> Image {
    let frozen = slot.freeze(remote, pages, &UnreportedPages::default()).unwrap();
    assert_eq!(frozen.pages(), pages);
    for page in 0..pages {
        let live = remote.bytes.get(page * PAGE_SIZE..(page + 1) * PAGE_SIZE);
        assert!(frozen.page_is(page, live.unwrap_or(&[0; PAGE_SIZE])), "page {page}");
    }
    frozen
}

fn slot_of(image: &Image) -> RemoteSlot {
    RemoteSlot::new::<SysError>(image, Strategy::Auto, usize::MAX).unwrap()
}

#[test]
#[cfg_attr(miri, ignore = "mappings of one file share no memory there")]
fn scattered_pages_are_frozen_exactly_and_read_once() {
    // More than a batch, and more runs than a slot has mappings for one backing.
    const PAGES: usize = 1200;
    let before = full(PAGES);
    let mut remote = FakeRemote::new(&before);
    let mut slot = slot_of(&before);
    for page in (0..PAGES).step_by(2) {
        // Every fourth is zero now, and every tenth has its old content again.
        match page {
            page if page % 10 == 0 => {
                let mut old = [0; PAGE_SIZE];
                before.read(page * PAGE_SIZE, &mut old);
                remote.write(page, 9);
                remote.bytes[page * PAGE_SIZE..(page + 1) * PAGE_SIZE].copy_from_slice(&old);
            }
            page if page % 4 == 0 => remote.write(page, 0),
            page => remote.write(page, page as u8 | 0x80),
        }
    }
    let frozen = check_freeze(&mut slot, &mut remote, PAGES);
    let even = |page: &usize| page.is_multiple_of(2);
    assert!(remote.reads.keys().copied().eq((0..PAGES).filter(even)));
    assert!(remote.reads.values().all(|reads| *reads == 1));
    let changed = (0..PAGES).filter(|page| page % 2 == 0 && page % 10 != 0);
    let found = before.differing_content(&frozen).unwrap();
    assert!(found.iter().flat_map(|run| run.start..run.end()).eq(changed));
    // The image before is as it was.
    assert_eq!(before.digest(), full(PAGES).digest());
}

#[test]
#[cfg_attr(miri, ignore = "mappings of one file share no memory there")]
fn changes_of_more_pages_than_are_kept_are_frozen_exactly() {
    const PAGES: usize = 2 * MAX_KEPT + 1000;
    let before = full(PAGES);
    let mut remote = FakeRemote::new(&before);
    let mut slot = slot_of(&before);
    // Two of three pages, so that the limit is reached within a run and within a batch.
    (0..PAGES).filter(|page| page % 3 != 1).for_each(|page| remote.write(page, page as u8 | 0x80));
    check_freeze(&mut slot, &mut remote, PAGES + 5);
    let twice = remote.reads.values().filter(|reads| **reads == 2).count();
    let changed = (0..PAGES).filter(|page| page % 3 != 1).count();
    assert_eq!((remote.reads.len(), twice), (changed, changed - MAX_KEPT));
}

#[test]
#[cfg_attr(miri, ignore = "mappings of one file share no memory there")]
fn a_scattered_delta_is_stored_without_holes() {
    const PAGES: usize = 300 * 40;
    let before = full(PAGES);
    let mut remote = FakeRemote::new(&before);
    let mut slot = slot_of(&before);
    (0..PAGES).step_by(40).for_each(|page| remote.write(page, page as u8 | 0x80));
    let frozen = check_freeze(&mut slot, &mut remote, PAGES);
    let place = |page: usize| frozen.extents_in(PageRange::new(page, 1)).next().unwrap().at;
    assert!((0..PAGES).step_by(40).map(place).eq(0..300));
}
