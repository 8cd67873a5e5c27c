//! A live instance on lease, in either mode: the one place where a lease depends on the mode.
//!
//! Promises: a call gets the parts of its instance from [`Parts`], which are the same in both
//! modes. Operations that depend on the mode (reading the state, comparing, unusual ends) are
//! implemented here, once each.

use afresh_memory::FreezePreparation;
use wasmtime::{AsContext, AsContextMut, Instance, Memory, Store, StoreContextMut};

use crate::call::entry::TypedFunctions;
use crate::engine::linear::GuestMemory;
use crate::host::Host;
use crate::warm::compare::Comparison;
use crate::warm::fresh::FreshMemories;
use crate::warm::instance_state::InstanceState;
use crate::warm::ownership::Ownership;
use crate::warm::reset::SlotFreeze;
use crate::{FreezeError, WarmError};

/// An instance on lease.
#[allow(clippy::large_enum_variant, reason = "one of them is on every lease's own stack")]
pub(crate) enum Live<'a> {
    /// From a pool or a session, which resets it when the lease ends.
    Reset(Ownership<'a>),
    /// Dropped with the lease.
    Fresh(Fresh<'a>),
}

/// An instance that was made for the lease.
pub(crate) struct Fresh<'a> {
    /// Has one instance; dropped before the memories come back to their pool.
    pub(crate) store: Store<Host>,
    /// The store's only one.
    pub(crate) instance: Instance,
    /// As [`Parts::unfinished`].
    pub(crate) unfinished: bool,
    /// The memories of the instance. In the warm state when the pool hands them out.
    pub(crate) memories: afresh_pool::Lease<'a, FreshMemories>,
}

/// The parts of an instance that calls need.
pub(crate) struct Parts<'l> {
    /// Its host state is that of the present lease.
    pub(crate) store: StoreContextMut<'l, Host>,
    pub(crate) instance: Instance,
    /// A call has begun and is not over: its future runs, was dropped or leaked, or a host function
    /// panicked. The state that such a call left in the store is never read; the instance is
    /// replaced when the lease ends.
    pub(crate) unfinished: &'l mut bool,
    /// Functions that were called before; none for an instance that will not be called again.
    pub(crate) known: Option<&'l mut TypedFunctions>,
}

impl<'a> Live<'a> {
    #[inline]
    pub(crate) fn parts(&mut self) -> Parts<'_> {
        match self {
            Self::Reset(lease) => {
                let item = &mut **lease;
                Parts {
                    store: item.store.as_context_mut(),
                    instance: item.instance,
                    unfinished: &mut item.unfinished,
                    known: Some(&mut item.known),
                }
            }
            Self::Fresh(fresh) => Parts {
                store: fresh.store.as_context_mut(),
                instance: fresh.instance,
                unfinished: &mut fresh.unfinished,
                known: None,
            },
        }
    }

    /// Whether a call was cut off.
    pub(crate) fn is_unfinished(&self) -> bool {
        match self {
            Self::Reset(lease) => lease.unfinished,
            Self::Fresh(fresh) => fresh.unfinished,
        }
    }

    /// The lease's host state.
    pub(crate) fn host(&self) -> &Host {
        match self {
            Self::Reset(lease) => lease.store.as_context().data(),
            Self::Fresh(fresh) => fresh.store.data(),
        }
    }

    #[inline]
    pub(crate) fn host_mut(&mut self) -> &mut Host {
        match self {
            Self::Reset(lease) => lease.store.data_mut(),
            Self::Fresh(fresh) => fresh.store.data_mut(),
        }
    }

    /// A memory that it runs on, by its place among those that the module defines.
    pub(crate) fn memory(&self, number: usize) -> Option<&GuestMemory> {
        match self {
            Self::Reset(lease) => lease.memories.get(number).map(|(memory, _)| &**memory),
            Self::Fresh(fresh) => fresh.memories.memories.get(number).map(|memory| &**memory),
        }
    }

    pub(crate) fn memories(&self) -> impl Iterator<Item = &GuestMemory> {
        (0..).map_while(|number| self.memory(number))
    }

    /// wasmtime's own handle of the first memory, where it is at hand.
    pub(crate) fn handle(&self) -> Option<Memory> {
        match self {
            Self::Reset(lease) => lease.memories.first().map(|(_, handle)| *handle),
            Self::Fresh(_) => None,
        }
    }

    /// Begins the freeze of each memory; none in fresh mode.
    pub(crate) fn prepare_freeze(&mut self) -> Result<Vec<FreezePreparation>, FreezeError> {
        match self {
            Self::Reset(lease) => Ok(lease.prepare_freeze()?),
            Self::Fresh(_) => Ok(Vec::new()),
        }
    }

    /// The present state: memories, everything else, and the reading of the clock.
    pub(crate) fn state(&mut self, slot_freeze: SlotFreeze) -> Result<InstanceState, FreezeError> {
        match self {
            Self::Reset(lease) => Ok(lease.freeze(slot_freeze)?),
            Self::Fresh(_) => Err(FreezeError::State(
                "the globals of an instance in fresh mode cannot be read; run it in reset mode"
                    .to_owned(),
            )),
        }
    }

    /// Differences from the warm state.
    pub(crate) fn compare(&mut self) -> Result<Comparison, WarmError> {
        match self {
            Self::Reset(lease) => lease.compare(),
            Self::Fresh(fresh) => fresh.memories.compare(),
        }
    }

    /// Drops the instance, and its memories, instead of resetting it.
    pub(crate) fn discard(self) {
        match self {
            Self::Reset(lease) => lease.discard(),
            Self::Fresh(Fresh { store, memories, .. }) => {
                drop(store);
                memories.discard();
            }
        }
    }
}
