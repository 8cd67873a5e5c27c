//! The host's own access to a slot's bytes.

use afresh_sys::{Advice, PAGE_SIZE, PageRange};

use super::{Method, Slot};
use crate::SlotError;

impl Slot {
    fn check_bytes(&self, offset: usize, len: usize) -> Result<(), SlotError> {
        let outside = SlotError::OutOfBounds { offset, len };
        let Some(end) = offset.checked_add(len) else { return Err(outside) };
        let fits = self
            .space
            .accessible()
            .any(|r| offset >= r.byte_start() && end <= r.byte_start() + r.byte_len());
        if fits || len == 0 { Ok(()) } else { Err(outside) }
    }

    /// Copies bytes of one region out of the slot. If the image is filled lazily, it waits for
    /// them.
    ///
    /// # Errors
    /// [`SlotError::OutOfBounds`], [`SlotError::Image`] when bytes are lost, or a quarantined slot.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), SlotError> {
        self.check()?;
        self.check_bytes(offset, out.len())?;
        self.fetch(offset, out.len())?;
        // SAFETY: the bytes are accessible. The copy uses a raw pointer because a guest thread may
        // write them during the copy, in which case the caller sees some mixture.
        unsafe { std::ptr::copy(self.base().add(offset), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies bytes into the slot, like a write of the guest: it is tracked, and the next reset
    /// undoes it.
    ///
    /// # Errors
    /// As [`Slot::read`].
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), SlotError> {
        self.check()?;
        self.check_bytes(offset, bytes.len())?;
        self.fetch(offset, bytes.len())?;
        // SAFETY: the bytes are accessible and `&mut self` keeps other hosts away; faults on
        // protected pages are resolved by the tracker.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.base().add(offset), bytes.len()) };
        Ok(())
    }

    /// Waits until the bytes of a lazily filled image are in place, so that a system call may touch
    /// them. For other images it is cheap. Bytes outside the slot are ignored.
    ///
    /// # Errors
    /// [`SlotError::Image`] when they are lost, or the slot has lost others; a quarantined slot.
    pub fn fetch(&self, offset: usize, len: usize) -> Result<(), SlotError> {
        if self.state.filling().is_some() {
            // Pages that other slots have lost are no concern of this one.
            if self.loss.is_known() || self.state.reason().is_some() || self.is_of_parent() {
                self.check()?;
            }
            let pages = self.space.capacity.saturating_mul(PAGE_SIZE);
            let end = offset.saturating_add(len).min(pages);
            if offset < end {
                self.image.resolve(PageRange::covering(offset, end - offset))?;
            }
        }
        Ok(())
    }

    /// Makes a range writable without a fault, so that a system call may write it under every
    /// tracker. The next reset restores it. [`Slot::prepare_freeze`] and [`Slot::freeze_live`]
    /// protect it again: open it again before a system call writes it.
    ///
    /// # Errors
    /// [`SlotError::OutOfBounds`]; any other error quarantines the slot.
    pub fn open_range(&mut self, offset: usize, len: usize) -> Result<(), SlotError> {
        self.check()?;
        self.check_bytes(offset, len)?;
        self.preload(&[PageRange::covering(offset, len)])
    }

    /// Adds pages to the write set before they are written, such as those that another slot of the
    /// same image has learned. They become writable and resident.
    ///
    /// Pages outside the accessible regions are ignored.
    ///
    /// # Errors
    /// [`SlotError`]; the slot is quarantined.
    pub fn preload(&mut self, pages: &[PageRange]) -> Result<(), SlotError> {
        self.check()?;
        let inside: Vec<PageRange> = pages
            .iter()
            .flat_map(|p| self.space.accessible().filter_map(|r| r.intersect(*p)))
            .collect();
        // Opening a page skips the handler that would copy it.
        self.settle_capture()?;
        let Method::WriteSet(tracker) = &mut self.method else { return Ok(()) };
        if self.adapt.discarding() {
            return Ok(());
        }
        let result = tracker.open(&inside);
        if let Err(error) = &result {
            self.quarantine(error.to_string());
        }
        result?;
        self.write_set.learn(&inside);
        self.plan()?;
        for range in inside {
            // Only saves faults: without it each page faults once.
            let _ = self.space.advise(range, Advice::PopulateWrite);
        }
        Ok(())
    }
}
