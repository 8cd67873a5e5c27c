//! The state that a guest stands on: what it was when it was frozen, and what its resets return to.

use std::sync::Arc;

use afresh_memory::{Image, ImageBuilder, PAGE_SIZE};
use serde::{Deserialize, Serialize};

use crate::error::WarmError;
use crate::guest::Guest;
use crate::personality::{Change, Ear, State, protect_order};
use crate::platform::{Call, PlatformError, Registers, Segments, Then};

/// How a frozen guest waits for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Wait {
    /// In a read of its only thread: where to, and how much at most.
    Read { to: u64, wanted: u64 },
    /// All threads wait, as the state says.
    Parked(Ear),
}

/// All of a frozen guest.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    pub(crate) image: Image,
    pub(crate) rest: Arc<Rest>,
}

/// All of it but the content of its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rest {
    pub(crate) segments: Segments,
    pub(crate) state: Arc<State>,
    pub(crate) registers: Registers,
    pub(crate) wait: Wait,
}

impl Wait {
    /// The read that `call` is.
    pub(crate) fn of(guest: &Guest, call: &Call) -> Result<Self, PlatformError> {
        let (to, wanted) = guest.person.input_place(&guest.process, call)?;
        Ok(Self::Read { to, wanted })
    }
}

impl Standing {
    /// Freezes a guest that was never frozen before, and waits as `wait` says. Its process is not used again.
    pub(crate) fn first(guest: &mut Guest, wait: Wait) -> Result<Self, WarmError> {
        let registers = guest.process.registers();
        let state = Arc::clone(&guest.person.state);
        // What cannot be read is made readable.
        let read = libc::PROT_READ as u64;
        let closed = state.layout.mappings().filter(|(_, _, protection)| protection & read == 0);
        let open = closed.map(|(start, len, _)| protect_order(start, len, read));
        let change = Change { before: open.collect(), ..Change::default() };
        guest.enact(change, Then::Ask)?;
        let segments = Segments::default().place(state.layout.mappings());
        let mut builder = ImageBuilder::new(segments.pages());
        let mut bytes = vec![0; 1 << 20];
        for segment in segments.iter() {
            for held in guest.process.populated(segment.range())? {
                for at in held.clone().step_by(bytes.len()) {
                    let piece = &mut bytes[..(held.end - at).min(1 << 20) as usize];
                    read_all(guest, at, piece)?;
                    for (index, page) in piece.chunks_exact(PAGE_SIZE).enumerate() {
                        if page.iter().any(|&byte| byte != 0) {
                            let first = (at - segment.start) as usize / PAGE_SIZE + index;
                            let offset = (segment.page as usize + first) * PAGE_SIZE;
                            builder.segment(offset, page).map_err(stored)?;
                        }
                    }
                }
            }
        }
        let image = builder.build().map_err(stored)?;
        Ok(Self { image, rest: Arc::new(Rest { segments, state, registers, wait }) })
    }
}

/// Reads memory that is mapped.
pub(crate) fn read_all(guest: &Guest, address: u64, out: &mut [u8]) -> Result<(), PlatformError> {
    if guest.process.read(address, out)? {
        return Ok(());
    }
    let error = std::io::Error::from_raw_os_error(libc::EFAULT);
    Err(PlatformError::kernel("reading the guest's memory", error))
}

/// An image that could not be stored.
pub(crate) fn stored(error: afresh_memory::ImageError) -> PlatformError {
    PlatformError::kernel("storing the guest's image", std::io::Error::other(error.to_string()))
}
