//! The state that a guest stands on: what it was when it was frozen, and what its resets return to.

use std::sync::Arc;
use std::time::Duration;

use afresh_memory::Image;
use serde::{Deserialize, Serialize};

use crate::guest::Guest;
use crate::personality::{Absorbed, Ear, State, now_moment};
use crate::platform::{Call, Origin, PlatformError, Process, Registers, Segments};

/// How a frozen guest waits for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Wait {
    /// In a read of its only thread: where to, and how much at most.
    Read { to: u64, wanted: u64 },
    /// All threads wait, as the state says.
    Parked(Ear),
    /// One waits for the caller, and others could go on.
    Resting(Ear),
}

/// The memory of a process of the guest's, but for its content, and the registers that were in the one that played it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Whose memory it is.
    pub(crate) memory: u32,
    /// Whose registers they are: of those that use this memory.
    pub(crate) holds: u32,
    pub(crate) segments: Segments,
    pub(crate) registers: Registers,
    /// What shared files held when that memory had all of it.
    pub(crate) absorbed: Absorbed,
}

/// Frozen memory with its content.
#[derive(Clone, Debug)]
pub(crate) struct Ground {
    pub(crate) image: Image,
    pub(crate) part: Arc<Part>,
}

impl Ground {
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.image.same(&other.image) && Arc::ptr_eq(&self.part, &other.part)
    }
}

/// All of a frozen guest.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    /// The content of each part, in the same order.
    pub(crate) images: Arc<[Image]>,
    pub(crate) rest: Arc<Rest>,
}

/// All of it but the content of its memory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rest {
    /// By whose memory they are; the first is the first process's.
    pub(crate) parts: Vec<Arc<Part>>,
    pub(crate) state: Arc<State>,
    pub(crate) wait: Wait,
    /// What processes with the first memory are made from.
    pub(crate) origin: Origin,
}

impl Wait {
    /// The read that `call` is.
    pub(crate) fn of(guest: &Guest, call: &Call) -> Result<Self, PlatformError> {
        let (to, wanted) = guest.person.input_place(&guest.body.process, call)?;
        Ok(Self::Read { to, wanted })
    }

    /// How long until something happens by itself in a guest that waits so.
    pub(crate) fn due(self, state: &State) -> Option<Duration> {
        match self {
            Self::Read { .. } => None,
            Self::Parked(_) => state.due(now_moment()).map(Duration::from_nanos),
            Self::Resting(_) => Some(Duration::ZERO),
        }
    }
}

impl State {
    /// Whether these are its memories, and hold the registers of processes that use them; those of all other processes and threads are
    /// here.
    pub(crate) fn is_played_by(&self, parts: &[&Part]) -> bool {
        let of = |memory: u32| parts.iter().find(|part| part.memory == memory);
        let known =
            |part: &&Part| self.family.kin(part.holds).is_some_and(|kin| kin.memory == part.memory);
        let placed = self.family.kins().all(|kin| {
            let (Some(part), Some(threads)) = (of(kin.memory), self.threads_of(kin.id)) else {
                return false;
            };
            let held = part.holds == kin.id;
            let mut contexts = threads.iter().filter_map(|(_, thread)| thread.context.as_ref());
            threads.current().context.is_none() == held
                && contexts.all(|context| context.check(&part.registers).is_ok())
        });
        let ids = parts.iter().map(|part| part.memory);
        ids.eq(self.memories().into_keys()) && parts.iter().all(known) && placed
    }
}

impl Standing {
    pub(crate) fn new(grounds: Vec<Ground>, state: Arc<State>, wait: Wait) -> Self {
        let (images, parts): (Vec<_>, _) =
            grounds.into_iter().map(|ground| (ground.image, ground.part)).unzip();
        Self {
            images: images.into(),
            rest: Arc::new(Rest { parts, state, wait, origin: Origin::default() }),
        }
    }

    /// The memory of process `memory`.
    pub(crate) fn ground(&self, memory: u32) -> Option<Ground> {
        let index = self.rest.parts.binary_search_by_key(&memory, |part| part.memory).ok()?;
        let (image, part) = (self.images.get(index)?.clone(), Arc::clone(&self.rest.parts[index]));
        Some(Ground { image, part })
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        let images = self.images.iter().zip(other.images.iter()).all(|(one, two)| one.same(two));
        images && Arc::ptr_eq(&self.rest, &other.rest)
    }

    /// Pages that it has mapped, and those of them that take memory.
    pub(crate) fn pages(&self) -> (usize, usize) {
        let mapped = self.rest.parts.iter().map(|part| part.segments.pages()).sum();
        (mapped, self.images.iter().map(Image::stored_pages).sum())
    }
}

/// Reads memory that is mapped: ranges (start, length), one after the other.
pub(crate) fn read_all(
    process: &Process,
    ranges: &[(u64, usize)],
    out: &mut [u8],
) -> Result<(), PlatformError> {
    if process.read_ranges(ranges, out)? {
        return Ok(());
    }
    let error = std::io::Error::from_raw_os_error(libc::EFAULT);
    Err(PlatformError::kernel("reading the guest's memory", error))
}
