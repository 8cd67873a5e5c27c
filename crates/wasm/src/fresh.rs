//! Fresh mode: a new store and instance for every call, over memory that already holds the warm image.
//!
//! Everything but memory is new by construction. The memories are slots: between two calls they are
//! reset, and the pages that calls write stay resident.

use std::sync::Arc;

use afresh_memory::ResetError;
use afresh_pool::Recycle;
use afresh_rewrite::WarmState;
use wasmtime::{Instance, Store};

use crate::WarmError;
use crate::host::Host;
use crate::linear::{GuestMemory, with_memories};
use crate::reset::{Blueprint, WarmMemory};

/// What a warm guest in fresh mode consists of.
pub(crate) struct FreshState {
    pub(crate) blueprint: Blueprint,
    pub(crate) memories: Vec<WarmMemory>,
    /// What was baked into the module; `None` for a guest whose warm state cannot be kept.
    pub(crate) state: Option<WarmState>,
}

impl FreshState {
    /// Memories for one more call at a time.
    pub(crate) fn make(&self) -> Result<FreshMemories, WarmError> {
        FreshMemories::new(&self.memories, &self.blueprint.policy)
    }

    /// A new instance over `memories`.
    pub(crate) fn instantiate(
        &self,
        memories: &FreshMemories,
    ) -> Result<(Store<Host>, Instance), WarmError> {
        let mut store = self.blueprint.stores.make();
        let pre = &self.blueprint.pre;
        let instance = with_memories(&memories.memories, || pre.instantiate(&mut store))
            .map_err(WarmError::Instantiate)?;
        Ok((store, instance))
    }
}

/// The memories that one instance at a time runs on.
pub(crate) struct FreshMemories {
    pub(crate) memories: Vec<Arc<GuestMemory>>,
}

impl FreshMemories {
    pub(crate) fn new(
        warm: &[WarmMemory],
        policy: &crate::linear::MemoryPolicy,
    ) -> Result<Self, WarmError> {
        let memories = warm
            .iter()
            .map(|m| GuestMemory::new(m.shape, &m.image, m.bytes, policy))
            .collect::<Result<_, _>>()?;
        Ok(Self { memories })
    }

    /// Bytes that differ from the warm image now.
    pub(crate) fn differences(&self) -> Result<usize, ResetError> {
        let mut bytes = 0;
        for memory in &self.memories {
            bytes += memory.slot().verify()?.iter().map(|m| m.bytes).sum::<usize>();
        }
        Ok(bytes)
    }
}

impl Recycle for FreshMemories {
    type Error = ResetError;

    fn key(&self) -> usize {
        0
    }

    #[inline]
    fn recycle(&mut self) -> Result<(), ResetError> {
        for memory in &self.memories {
            memory.reset()?;
        }
        Ok(())
    }

    fn resident_bytes(&self) -> usize {
        self.memories.iter().map(|m| m.resident_bytes()).sum()
    }

    fn trim(&mut self) -> Result<(), ResetError> {
        self.memories.iter().try_for_each(|m| m.trim())
    }
}
