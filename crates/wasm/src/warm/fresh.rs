//! Fresh mode: a new store and instance for every call, over memory that already holds the warm
//! image.
//!
//! Everything but memory is new by construction. The memories are slots: between two calls they are
//! reset, and the pages that calls write stay resident.

use std::sync::Arc;

use afresh_memory::ResetError;
use afresh_pool::{Recycle, ResetCost};
use afresh_rewrite::WarmState;
use wasmtime::{Extern, Instance, Store};

use crate::WarmError;
use crate::call::dynamic::start_error;
use crate::call::lease_options::LeaseOptions;
use crate::engine::linear::{GuestMemory, check_loss};
use crate::host::Host;
use crate::warm::compare::Comparison;
use crate::warm::instance_state::WarmMemory;
use crate::warm::reset::Blueprint;

/// The parts of a warm guest in fresh mode.
pub(crate) struct FreshState {
    pub(crate) blueprint: Blueprint,
    pub(crate) memories: Vec<WarmMemory>,
    /// The state baked into the module; `None` for a guest whose warm state cannot be kept.
    pub(crate) state: Option<WarmState>,
}

impl FreshState {
    /// Memories for one more call at a time.
    pub(crate) fn make(&self) -> Result<FreshMemories, WarmError> {
        FreshMemories::new(&self.memories, &self.blueprint.policy)
    }

    /// A new instance over `memories`, with the WASI context and the output that `options` set.
    pub(crate) async fn instantiate(
        &self,
        memories: &FreshMemories,
        options: &LeaseOptions,
    ) -> Result<(Store<Host>, Instance), WarmError> {
        let stores = &self.blueprint.stores;
        let mut store = stores.make()?;
        options.apply(store.data_mut());
        // Without kept state, start functions run again, as calls of the guest.
        let limits = options.limits(stores)?;
        if self.state.is_none() {
            limits.of_start().apply(&mut store);
        }
        let instantiated = self.blueprint.instantiate(&mut store, &memories.memories).await;
        let instance = instantiated.map_err(|error| start_error(error, limits))?;
        stores.unlimit(&mut store);
        check_loss(&memories.memories)?;
        for (memory, export) in memories.memories.iter().zip(&self.blueprint.memories) {
            let address = match instance.get_module_export(&mut store, export) {
                Some(Extern::Memory(handle)) => handle.data_ptr(&store),
                _ => std::ptr::null_mut(),
            };
            if address != memory.base() {
                return Err(WarmError::State(
                    "the instance runs on other memory than its slot".into(),
                ));
            }
        }
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
        policy: &crate::engine::linear::MemoryPolicy,
    ) -> Result<Self, WarmError> {
        let memories = warm
            .iter()
            .map(|m| GuestMemory::new(m.shape, &m.image, m.bytes, policy))
            .collect::<Result<_, _>>()?;
        Ok(Self { memories })
    }

    /// Differences from the warm image now.
    pub(crate) fn compare(&self) -> Result<Comparison, WarmError> {
        let mut found = Comparison {
            unseen: vec!["everything but memory: it is made anew with each instance"],
            ..Comparison::default()
        };
        for memory in &self.memories {
            let pages = memory.slot().verify().map_err(|e| WarmError::State(e.to_string()))?;
            found.bytes += pages.iter().map(|m| m.bytes).sum::<usize>();
            found.bytes += memory.bytes().abs_diff(memory.initial());
        }
        Ok(found)
    }
}

impl Recycle for FreshMemories {
    type Error = ResetError;

    fn key(&self) -> usize {
        0
    }

    #[inline]
    fn recycle(&mut self) -> Result<ResetCost, ResetError> {
        let mut took = ResetCost::default();
        for memory in &self.memories {
            memory.reset(&mut took)?;
        }
        Ok(took)
    }

    fn reason(error: &ResetError) -> &'static str {
        error.reason()
    }

    fn resident_bytes(&self) -> usize {
        self.memories.iter().map(|m| m.resident_bytes()).sum()
    }

    fn mappings(&self) -> usize {
        self.memories.iter().map(|m| m.mappings()).sum()
    }

    fn trim(&mut self) -> Result<(), ResetError> {
        self.memories.iter().try_for_each(|m| m.trim())
    }
}
