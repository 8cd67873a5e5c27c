//! The memories of the guest as host functions see them: whether they are whole.
//!
//! A page of a lazily opened snapshot may be lost: its source has failed, or it has a wrong digest.
//! Code of the host that touches such a page gets zeros (see [`afresh_memory::PageLoss`]).
//!
//! Promises: nothing derived from these zeros leaves the guest. Our own host functions wait for the
//! pages that they read, or check for a loss between reading and acting. wasmtime-wasi's functions
//! for components get an empty table of resources, in which they find no stream to write to. Every
//! call ends with the check. May break it: a host function of the embedder that was declared to
//! check ([`crate::Imports::check_memory`]) and does not.

use std::sync::Arc;

use afresh_memory::PageLoss;
use wasmtime::component::ResourceTable;

use crate::engine::linear::GuestMemory;
use crate::host::Host;

/// The memories that the guest of a store runs on.
#[derive(Clone, Default)]
pub(crate) struct HostMemories {
    all: Arc<[Arc<GuestMemory>]>,
    /// The losses of each, which every call reads.
    losses: Arc<[Arc<PageLoss>]>,
}

impl HostMemories {
    #[inline]
    fn have_lost(&self) -> bool {
        self.losses.iter().any(|loss| loss.is_known())
    }

    /// Waits for the pages of `bytes`, which are a part of one of the memories. No access to them
    /// fails afterwards.
    pub(crate) fn fetch(&self, bytes: &[u8]) -> wasmtime::Result<()> {
        let (address, len) = (bytes.as_ptr() as usize, bytes.len());
        let fetched = self.all.iter().try_for_each(|memory| memory.fetch(address, len));
        fetched.map_err(|error| wasmtime::Error::msg(error.to_string()))
    }
}

impl Host {
    /// Sets the memories that the guest is about to run on.
    pub(crate) fn set_memories(&mut self, memories: &[Arc<GuestMemory>]) {
        let losses = memories.iter().map(|memory| memory.loss().clone()).collect();
        self.memories = HostMemories { all: memories.into(), losses };
    }

    pub(crate) fn memories(&self) -> HostMemories {
        self.memories.clone()
    }

    /// Whether the guest has lost a page of its memories.
    #[inline]
    pub(crate) fn has_lost(&self) -> bool {
        self.memories.have_lost()
    }

    /// The lost page and the reason, if there is one.
    pub(crate) fn loss(&self) -> Option<String> {
        self.memories.all.iter().find_map(|memory| memory.lost())
    }

    /// Fails if the guest has lost a page of its memory, and zeros may have been read in its place.
    /// A host function calls it after it has copied memory or arguments of the guest, and before it
    /// acts on them ([`crate::Imports::check_memory`]).
    ///
    /// # Errors
    /// An error that names the page and why it is lost. The host function has to return it.
    #[inline]
    pub fn check_memory(&self) -> wasmtime::Result<()> {
        match self.has_lost() {
            false => Ok(()),
            true => Err(self.lost_error()),
        }
    }

    #[cold]
    fn lost_error(&self) -> wasmtime::Error {
        wasmtime::Error::msg(self.loss().unwrap_or_default())
    }

    /// Waits for the pages of `bytes`, a part of guest memory. A host function that acts on bytes
    /// without copying them calls it in place of [`Host::check_memory`]. Costs next to nothing
    /// unless the guest comes from a lazily opened snapshot.
    ///
    /// # Errors
    /// As [`Host::check_memory`], and when one of these pages will never be there.
    pub fn fetch_memory(&self, bytes: &[u8]) -> wasmtime::Result<()> {
        self.memories.fetch(bytes)
    }

    /// The table of component resources; an empty one after a loss.
    pub(crate) fn table(&mut self) -> &mut ResourceTable {
        let lost = self.has_lost();
        usable(lost, &mut self.void, &mut self.table)
    }
}

/// `table`, or an empty one in `void` after a loss.
pub(super) fn usable<'a>(
    lost: bool,
    void: &'a mut ResourceTable,
    table: &'a mut Option<ResourceTable>,
) -> &'a mut ResourceTable {
    if lost {
        *void = ResourceTable::new();
        return void;
    }
    table.get_or_insert_default()
}
