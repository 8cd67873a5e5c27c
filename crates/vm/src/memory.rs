//! A guest's memory as the host reaches it: bounds-checked copies that record their writes.
//!
//! Promises: no address from a guest is used unchecked, no reference to guest memory is ever
//! formed, and every page written through this interface is known to the next reset, for every
//! tracker of guest writes. May break it: writing through the slot's raw address elsewhere.

use std::sync::Arc;

use afresh_memory::{PageRange, Slot, TrackError};

use crate::layout::Span;
use crate::shared::SharedMemory;
use crate::tracker::TrackerHandle;

/// An address range that is not (wholly) accessible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{len} bytes at guest address {address:#x} are not {}{}",
    if *.write { "writable" } else { "readable" },
    .incomplete.as_ref().map(|cause| format!(": {cause}")).unwrap_or_default()
)]
#[non_exhaustive]
pub struct AccessError {
    /// First guest address.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Whether the access was a write.
    pub write: bool,
    /// Why the content will never be there, where the guest comes from a snapshot and that is the
    /// reason.
    pub incomplete: Option<String>,
}

/// A span and how to reach it.
#[derive(Debug, Clone)]
struct Window {
    span: Span,
    writable: bool,
    shared: Option<Arc<SharedMemory>>,
}

/// The host address of each accessible guest address.
#[derive(Debug, Clone, Default)]
pub(crate) struct Map {
    windows: Vec<Window>,
}

impl Map {
    /// Adds a span; adjacent spans of the same kind become one, so that a buffer may cross them.
    pub(crate) fn add(&mut self, span: Span, writable: bool, shared: Option<Arc<SharedMemory>>) {
        if let Some(last) = self.windows.last_mut()
            && last.span.end() == span.start
            && last.writable == writable
            && last.shared.is_none()
            && shared.is_none()
        {
            last.span.len += span.len;
            return;
        }
        self.windows.push(Window { span, writable, shared });
    }

    fn find(&self, address: u64, len: u64, write: bool) -> Result<&Window, AccessError> {
        self.windows
            .iter()
            .find(|w| w.span.holds(address, len) && (w.writable || !write))
            .ok_or(AccessError { address, len, write, incomplete: None })
    }

    /// Whether a range is accessible; an empty one always is.
    pub(crate) fn check(&self, address: u64, len: u64, write: bool) -> Result<(), AccessError> {
        if len == 0 {
            return Ok(());
        }
        self.find(address, len, write).map(|_| ())
    }
}

/// The memory of one sandbox: its slot, its map and the tracker that is notified of host writes.
#[derive(Debug)]
pub(crate) struct GuestMemory {
    pub(crate) slot: Slot,
    map: Arc<Map>,
    tracker: Option<TrackerHandle>,
}

impl GuestMemory {
    pub(crate) fn new(slot: Slot, map: Arc<Map>, tracker: Option<TrackerHandle>) -> Self {
        Self { slot, map, tracker }
    }

    pub(crate) fn map(&self) -> &Arc<Map> {
        &self.map
    }

    /// Makes room in a full dirty ring.
    pub(crate) fn ring_full(&self) -> Result<(), TrackError> {
        self.tracker.as_ref().map_or(Ok(()), TrackerHandle::ring_full)
    }

    fn pointer(&self, window: &Window, address: u64) -> *mut u8 {
        match &window.shared {
            Some(shared) => shared.pointer((address - window.span.start) as usize),
            None => self.slot.base().wrapping_add(address as usize),
        }
    }

    /// Waits until the bytes are in place, in a guest whose memory is filled lazily. Only then may
    /// they be touched: a page that never comes closes the memory.
    fn fetch(
        &self,
        window: &Window,
        address: u64,
        len: u64,
        write: bool,
    ) -> Result<(), AccessError> {
        if window.shared.is_some() {
            return Ok(());
        }
        self.slot.fetch(address as usize, len as usize).map_err(|error| AccessError {
            address,
            len,
            write,
            incomplete: Some(error.to_string()),
        })
    }

    /// Copies guest memory out.
    pub(crate) fn read(&self, address: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let len = out.len() as u64;
        if len == 0 {
            return Ok(());
        }
        let window = self.map.find(address, len, false)?;
        self.fetch(window, address, len, false)?;
        if let Some(shared) = &window.shared {
            // Other threads may be in it; the window is never longer than the memory.
            let _fits = shared.read((address - window.span.start) as usize, out);
            return Ok(());
        }
        // SAFETY: the window holds `len` bytes at `address`, mapped until `self` is dropped; the
        // vCPU is stopped.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.pointer(window, address),
                out.as_mut_ptr(),
                out.len(),
            );
        }
        Ok(())
    }

    /// Copies guest memory into a new vector. The range is checked before anything is allocated.
    pub(crate) fn read_vec(&self, address: u64, len: u64) -> Result<Vec<u8>, AccessError> {
        let mut out = Vec::new();
        self.append(address, len, &mut out)?;
        Ok(out)
    }

    /// Copies guest memory to the end of a vector. The range is checked before room is made for it.
    pub(crate) fn append(
        &self,
        address: u64,
        len: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), AccessError> {
        if len == 0 {
            return Ok(());
        }
        let window = self.map.find(address, len, false)?;
        self.fetch(window, address, len, false)?;
        let (len, before) = (len as usize, out.len());
        if let Some(shared) = &window.shared {
            // As in `read`.
            out.resize(before + len, 0);
            let _fits = shared.read((address - window.span.start) as usize, &mut out[before..]);
            return Ok(());
        }
        out.reserve(len);
        // SAFETY: as in `read`; the vector has room for `len` bytes behind those it holds, and they
        // are initialised by the copy before its length is set.
        unsafe {
            let target = out.as_mut_ptr().add(before);
            std::ptr::copy_nonoverlapping(self.pointer(window, address), target, len);
            out.set_len(before + len);
        }
        Ok(())
    }

    /// Copies `bytes` into guest memory that the guest itself may write.
    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let len = bytes.len() as u64;
        if len == 0 {
            return Ok(());
        }
        let window = self.map.find(address, len, true)?;
        self.fetch(window, address, len, true)?;
        if let Some(shared) = &window.shared {
            // As in `read`.
            let _fits = shared.write((address - window.span.start) as usize, bytes);
            return Ok(());
        }
        let target = self.pointer(window, address);
        if let Some(tracker) = &self.tracker {
            tracker.host_wrote(PageRange::covering(address as usize, bytes.len()));
        }
        // SAFETY: the window holds `len` writable bytes at `address`; the vCPU is stopped.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        Ok(())
    }
}
