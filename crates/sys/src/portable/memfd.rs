//! A file that is a vector.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Call, PageRange, SysError, inject};

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    sealed: bool,
}

/// An anonymous file.
#[derive(Clone, Debug)]
pub struct Memfd(Arc<Mutex<State>>);

impl Memfd {
    /// Creates an empty file.
    ///
    /// # Errors
    /// Injected ones.
    pub fn new(_name: &std::ffi::CStr) -> Result<Self, SysError> {
        inject::gate(Call::MemfdCreate)?;
        Ok(Self(Arc::default()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writable(&self, call: Call) -> Result<MutexGuard<'_, State>, SysError> {
        inject::gate(call)?;
        let state = self.state();
        if state.sealed { Err(SysError::new(call, libc::EPERM)) } else { Ok(state) }
    }

    /// Sets the length.
    ///
    /// # Errors
    /// `EPERM` on a sealed file.
    pub fn set_len(&self, bytes: usize) -> Result<(), SysError> {
        self.writable(Call::Truncate)?.bytes.resize(bytes, 0);
        Ok(())
    }

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// `EPERM` on a sealed file.
    pub fn write_at(&self, bytes: &[u8], offset: usize) -> Result<(), SysError> {
        let mut state = self.writable(Call::Write)?;
        let end = offset + bytes.len();
        if state.bytes.len() < end {
            state.bytes.resize(end, 0);
        }
        state.bytes[offset..end].copy_from_slice(bytes);
        Ok(())
    }

    /// Writes pieces of raw memory (address, bytes) one after the other.
    ///
    /// # Safety
    /// Each piece must be readable.
    ///
    /// # Errors
    /// `EPERM` on a sealed file.
    pub unsafe fn write_from(
        &self,
        pieces: &[(*const u8, usize)],
        offset: usize,
    ) -> Result<(), SysError> {
        let mut at = offset;
        for (source, len) in pieces {
            // SAFETY: the caller promises that the piece is readable.
            self.write_at(unsafe { std::slice::from_raw_parts(*source, *len) }, at)?;
            at += len;
        }
        Ok(())
    }

    /// Zeroes a range.
    ///
    /// # Errors
    /// `EPERM` on a sealed file.
    pub fn punch_hole(&self, range: PageRange) -> Result<(), SysError> {
        let mut state = self.writable(Call::PunchHole)?;
        let end = (range.byte_start() + range.byte_len()).min(state.bytes.len());
        let start = range.byte_start().min(end);
        state.bytes[start..end].fill(0);
        Ok(())
    }

    /// Makes the file immutable.
    ///
    /// # Errors
    /// Injected ones.
    pub fn seal(&self) -> Result<(), SysError> {
        inject::gate(Call::Seal)?;
        self.state().sealed = true;
        Ok(())
    }

    /// Bytes held.
    #[must_use]
    pub fn resident_bytes(&self) -> usize {
        self.state().bytes.len()
    }

    /// Copies `len` bytes at `offset`; bytes past the end are zero.
    ///
    /// # Safety
    /// The destination must be writable, without other users.
    pub(super) unsafe fn copy_to(&self, offset: usize, to: *mut u8, len: usize) {
        let state = self.state();
        let from = offset.min(state.bytes.len());
        let held = (state.bytes.len() - from).min(len);
        // SAFETY: by the caller's promise; the source is in the vector, which no reservation has.
        unsafe {
            to.copy_from_nonoverlapping(state.bytes.as_ptr().add(from), held);
            to.add(held).write_bytes(0, len - held);
        }
    }
}
