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

/// The memories that the guest of a store runs on.
#[derive(Clone, Default)]
pub(crate) struct HostMemories {
    all: Arc<[Arc<GuestMemory>]>,
    /// The losses of each, which every call reads.
    losses: Arc<[Arc<PageLoss>]>,
}

impl HostMemories {
    pub(crate) fn new(memories: &[Arc<GuestMemory>]) -> Self {
        let losses = memories.iter().map(|memory| memory.loss().clone()).collect();
        Self { all: memories.into(), losses }
    }

    /// Their bytes together.
    pub(super) fn bytes(&self) -> usize {
        self.all.iter().map(|memory| memory.bytes()).fold(0, usize::saturating_add)
    }

    /// Bytes of the largest.
    pub(super) fn largest(&self) -> usize {
        self.all.iter().map(|memory| memory.bytes()).max().unwrap_or(0)
    }

    /// Whether one of them has lost a page.
    #[inline]
    pub(super) fn have_lost(&self) -> bool {
        self.losses.iter().any(|loss| loss.is_known())
    }

    /// The lost page and the reason, if there is one.
    pub(super) fn loss(&self) -> Option<String> {
        self.all.iter().find_map(|memory| memory.lost())
    }

    /// Waits for the pages of `bytes`, which are a part of one of the memories. No access to them
    /// fails afterwards.
    pub(crate) fn fetch(&self, bytes: &[u8]) -> wasmtime::Result<()> {
        let (address, len) = (bytes.as_ptr() as usize, bytes.len());
        let fetched = self.all.iter().try_for_each(|memory| memory.fetch(address, len));
        fetched.map_err(|error| wasmtime::Error::msg(error.to_string()))
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
