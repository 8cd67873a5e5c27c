//! Reset mode: one live instance, brought back to its warm state after every call.
//!
//! Memory comes back by the slot's strategy; globals, tables and dropped segments by a function that was
//! added to the module and runs inside it, because the host's setters cost a hundred times as much. What
//! cannot be undone in place (a grown table) makes the instance be replaced from the warm state.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_pool::Recycle;
use afresh_rewrite::{Visible, WarmState, names};
use wasmtime::{Instance, InstancePre, Memory, Module, Store, TypedFunc};

use crate::guest::GuestOptions;
use crate::host::Host;
use crate::linear::{GuestMemory, MemoryPolicy, Shape, with_memories};
use crate::plan::Plan;
use crate::state;
use crate::stores::Stores;
use crate::{Engine, LoadError, WarmError};

/// A warm memory: what it is declared as, its content, and its size in bytes.
#[derive(Clone, Debug)]
pub(crate) struct WarmMemory {
    pub(crate) shape: Shape,
    pub(crate) image: afresh_memory::Image,
    pub(crate) bytes: usize,
}

/// What every instance of a guest is made from.
pub(crate) struct Blueprint {
    pub(crate) pre: InstancePre<Host>,
    pub(crate) stores: Stores,
    pub(crate) policy: MemoryPolicy,
    pub(crate) visible: Visible,
    pub(crate) page_log2: Vec<u32>,
    /// Whether a restore has anything to do beside memory.
    pub(crate) restores: bool,
    /// Whether calls may leave garbage on the store's GC heap.
    pub(crate) collects: bool,
    /// Instances replaced because a call grew a table.
    pub(crate) replaced: AtomicU64,
    /// Resets after which a memory had to be shrunk.
    pub(crate) shrunk: AtomicU64,
}

impl Blueprint {
    pub(crate) fn new(
        engine: &Engine,
        options: &GuestOptions,
        module: &Module,
        plan: &Plan,
    ) -> Result<Self, LoadError> {
        let linker = options.linker(engine)?;
        Ok(Self {
            pre: linker.instantiate_pre(module).map_err(LoadError::Link)?,
            stores: Stores::new(engine, options),
            policy: options.policy(engine),
            visible: plan.visible.clone().unwrap_or_default(),
            page_log2: plan.page_log2.clone(),
            restores: plan.restored_items > 0,
            collects: plan.collects,
            replaced: AtomicU64::new(0),
            shrunk: AtomicU64::new(0),
        })
    }
}

/// What a warm guest in reset mode consists of.
pub(crate) struct ResetState {
    pub(crate) blueprint: Blueprint,
    pub(crate) memories: Vec<WarmMemory>,
    pub(crate) state: WarmState,
}

impl ResetState {
    /// A further instance in the warm state.
    pub(crate) fn make(self: &Arc<Self>) -> Result<ResetInstance, WarmError> {
        let blueprint = &self.blueprint;
        let memories = self
            .memories
            .iter()
            .map(|m| GuestMemory::new(m.shape, &m.image, m.bytes, &blueprint.policy))
            .collect::<Result<Vec<_>, _>>()?;
        let mut store = blueprint.stores.make();
        let instance = with_memories(&memories, || blueprint.pre.instantiate(&mut store))
            .map_err(WarmError::Instantiate)?;
        state::apply(&mut store, instance, &self.state)?;
        ResetInstance::adopt(self, store, instance, memories)
    }
}

/// A live instance that can be brought back.
pub(crate) struct ResetInstance {
    pub(crate) store: Store<Host>,
    pub(crate) instance: Instance,
    pub(crate) memories: Vec<(Arc<GuestMemory>, Memory)>,
    restore: Option<TypedFunc<(), i32>>,
    /// Functions that leases call, typed, by entry number.
    pub(crate) typed: Vec<Option<Box<dyn Any + Send>>>,
    recycled: u32,
    of: Arc<ResetState>,
}

/// Recycles between two collections of a store's GC heap.
const COLLECT_EVERY: u32 = 256;

impl ResetInstance {
    /// Takes over an instance that is in the warm state, memories included, and makes that the state it
    /// comes back to.
    pub(crate) fn adopt(
        of: &Arc<ResetState>,
        mut store: Store<Host>,
        instance: Instance,
        memories: Vec<Arc<GuestMemory>>,
    ) -> Result<Self, WarmError> {
        let broken = |what: &str| WarmError::State(format!("the prepared module {what}"));
        let mut held = Vec::with_capacity(memories.len());
        for (index, memory) in (0..).zip(memories) {
            let handle = instance
                .get_memory(&mut store, &names::memory(index))
                .ok_or_else(|| broken("does not export its memory"))?;
            if !std::ptr::eq(handle.data_ptr(&store), memory.slot().base()) {
                return Err(broken("runs on other memory than its slot"));
            }
            held.push((memory, handle));
        }
        let save: TypedFunc<(), i32> = instance
            .get_typed_func(&mut store, names::SAVE)
            .map_err(|_| broken("has no save function"))?;
        of.blueprint.stores.unlimit(&mut store);
        if save.call(&mut store, ()).map_err(WarmError::Instantiate)? != 0 {
            return Err(WarmError::State(
                "a table of the warm guest is too large to keep a copy of".to_owned(),
            ));
        }
        let restore = if of.blueprint.restores {
            let restore = instance
                .get_typed_func(&mut store, names::RESTORE)
                .map_err(|_| broken("has no restore function"))?;
            Some(restore)
        } else {
            None
        };
        let mut this = Self {
            store,
            instance,
            memories: held,
            restore,
            typed: Vec::new(),
            recycled: 0,
            of: of.clone(),
        };
        // Instantiation may have written data that is not part of the warm image.
        this.restore_in_place().map_err(|e| WarmError::State(e.to_string()))?;
        Ok(this)
    }

    /// Brings everything back; `false` when that takes a new instance.
    #[inline]
    fn restore_in_place(&mut self) -> Result<bool, RestoreError> {
        self.store.data_mut().clear();
        let blueprint = &self.of.blueprint;
        if let Some(restore) = &self.restore {
            blueprint.stores.unlimit(&mut self.store);
            let status = restore.call(&mut self.store, ()).map_err(RestoreError::Restore)?;
            if status != 0 {
                return Ok(false);
            }
        }
        for (memory, handle) in &self.memories {
            if memory.reset()? {
                blueprint.shrunk.fetch_add(1, Ordering::Relaxed);
                handle.grow(&mut self.store, 0).map_err(RestoreError::Restore)?;
            }
        }
        if blueprint.collects {
            self.recycled = self.recycled.wrapping_add(1);
            if self.recycled.is_multiple_of(COLLECT_EVERY) {
                self.store.gc(None).map_err(RestoreError::Restore)?;
            }
        }
        Ok(true)
    }

    /// The present state, as one that later instances could start from.
    pub(crate) fn freeze(&mut self) -> Result<(Vec<WarmMemory>, WarmState), WarmError> {
        let (mut memories, mut sizes) = (Vec::new(), Vec::new());
        let logs = &self.of.blueprint.page_log2;
        for (((memory, _), warm), log2) in self.memories.iter().zip(&self.of.memories).zip(logs) {
            let bytes = memory.bytes();
            let image = memory.slot().freeze()?;
            sizes.push((bytes >> log2) as u64);
            memories.push(WarmMemory { shape: warm.shape, image, bytes });
        }
        let visible = &self.of.blueprint.visible;
        let state = state::read(&mut self.store, self.instance, visible, sizes)?;
        Ok((memories, state))
    }

    /// Counts what differs from the warm state now: bytes of memory, and globals and tables.
    pub(crate) fn differences(&mut self) -> Result<(usize, usize), WarmError> {
        let mut bytes = 0;
        for ((memory, _), warm) in self.memories.iter().zip(&self.of.memories) {
            let found = memory.slot().verify().map_err(|e| WarmError::State(e.to_string()))?;
            bytes += found.iter().map(|m| m.bytes).sum::<usize>();
            bytes += memory.bytes().abs_diff(warm.bytes);
        }
        // Sizes are compared above, so that the state read here differs in the rest alone.
        let sizes = self.of.state.memories.clone();
        let visible = &self.of.blueprint.visible;
        let now = state::read(&mut self.store, self.instance, visible, sizes)?;
        let warm = &self.of.state;
        let globals = now.globals.iter().filter(|(k, v)| warm.globals.get(k) != Some(v)).count();
        let tables = now.tables.iter().filter(|(k, v)| warm.tables.get(k) != Some(v)).count();
        let dropped = usize::from(now.dropped_data != warm.dropped_data)
            + usize::from(now.dropped_elements != warm.dropped_elements);
        Ok((bytes, globals + tables + dropped))
    }
}

/// Why an instance could not be brought back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoreError {
    /// The memory.
    #[error(transparent)]
    Memory(#[from] afresh_memory::ResetError),
    /// The module's own restore function, or wasmtime.
    #[error("restoring the instance failed: {0:#}")]
    Restore(wasmtime::Error),
    /// The instance that was to replace it.
    #[error("replacing the instance failed: {0}")]
    Replace(Box<WarmError>),
}

impl Recycle for ResetInstance {
    type Error = RestoreError;

    fn key(&self) -> usize {
        0
    }

    #[inline]
    fn recycle(&mut self) -> Result<(), RestoreError> {
        if self.restore_in_place()? {
            return Ok(());
        }
        let of = self.of.clone();
        of.blueprint.replaced.fetch_add(1, Ordering::Relaxed);
        *self = of.make().map_err(|e| RestoreError::Replace(Box::new(e)))?;
        Ok(())
    }

    fn resident_bytes(&self) -> usize {
        self.memories.iter().map(|(m, _)| m.resident_bytes()).sum()
    }

    fn trim(&mut self) -> Result<(), RestoreError> {
        for (memory, _) in &self.memories {
            memory.trim()?;
        }
        Ok(())
    }
}
