//! Checks for lost pages of guest memory, for host functions.

use std::sync::Arc;

use wasmtime::component::ResourceTable;

use crate::engine::linear::GuestMemory;
use crate::host::Host;
use crate::host::memories::{HostMemories, usable};

impl Host {
    /// Sets the memories that an instance is made over next.
    pub(crate) fn set_memories(&mut self, memories: &[Arc<GuestMemory>]) {
        self.memories = HostMemories::new(memories);
        self.instantiating = true;
    }

    /// Ends the instantiation over the memories.
    pub(crate) fn end_instantiation(&mut self) {
        self.instantiating = false;
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
        self.memories.loss()
    }

    /// Fails if the guest has lost a page of its memory: zeros may have been read instead.
    /// A host function calls it after it has copied memory or arguments of the guest, and before it
    /// acts on them ([`crate::Imports::check_memory`]).
    ///
    /// # Errors
    /// An error that names the page and the reason. The host function must return it.
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
    /// without copying them calls it in place of [`Host::check_memory`]. It is cheap unless the
    /// guest comes from a lazily opened snapshot.
    ///
    /// # Errors
    /// As [`Host::check_memory`], and when one of these pages is lost.
    pub fn fetch_memory(&self, bytes: &[u8]) -> wasmtime::Result<()> {
        self.memories.fetch(bytes)
    }

    /// The table of component resources; an empty one after a loss.
    pub(crate) fn table(&mut self) -> &mut ResourceTable {
        let lost = self.has_lost();
        usable(lost, &mut self.void, &mut self.table)
    }
}
