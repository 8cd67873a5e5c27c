//! Reset mode: one live instance, reset to its warm state after every call.
//!
//! Memory comes back by the slot's strategy; globals, tables and dropped segments by a function
//! that was added to the module and runs inside it, because the host's setters cost a hundred times
//! as much. If a change cannot be undone in place (a grown table, a large collected heap), the
//! instance is replaced from the warm state. `docs/decisions/what-a-store-keeps.md` lists the other
//! state that a store keeps between two calls, and how it is handled.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_memory::{FreezePreparation, Image, ImageError, Slot};
use afresh_pool::{Budget, MappingCharge, Recycle, ResetCost};
use afresh_rewrite::{VisibleState, WarmState, names};
use afresh_sys::planted::{Bug, is};
use wasmtime::{
    AsContextMut, Instance, InstancePre, Memory, Module, ModuleExport, RootScope, Store, TypedFunc,
};

use crate::call::entry::TypedFunctions;
use crate::call::scope::{ScopedStore, forget_exception};
use crate::call::stores::Stores;
use crate::call::unsatisfied;
use crate::engine::call_path::{CallPath, now};
use crate::engine::guest_code::GuestCode;
use crate::engine::linear::{GuestMemory, MemoryOwner, MemoryPolicy, with_memories};
use crate::engine::stacks::{self, KeptStack};
use crate::guest::GuestOptions;
use crate::host::clock::Clock;
use crate::host::{Host, descriptors};
use crate::warm::compare::Comparison;
use crate::warm::instance_state::{InstanceState, WarmMemory};
use crate::warm::plan::Plan;
use crate::warm::{planted, state};
use crate::{Engine, LoadError, Mode, WarmError};

/// The parts from which every instance of a guest is made.
pub(crate) struct Blueprint {
    /// Marks the faults of the code as those of a guest. Dropped before the code.
    _text: Option<GuestCode>,
    pub(crate) pre: InstancePre<Host>,
    /// The module that `pre` instantiates. Keeping it lets others that open the guest share it.
    pub(crate) module: Arc<Module>,
    pub(crate) stores: Stores,
    pub(crate) policy: MemoryPolicy,
    pub(crate) visible: VisibleState,
    pub(crate) page_log2: Vec<u32>,
    /// The memories that the module defines, as it exports them.
    pub(crate) memories: Vec<ModuleExport>,
    /// Whether a restore has work other than memory.
    pub(crate) restores: bool,
    /// Whether calls may make objects on the store's collected heap, or give references to them.
    pub(crate) collects: bool,
    /// Instances replaced because a call grew a table, or the collected heap beyond its limit.
    pub(crate) replaced: AtomicU64,
    /// Resets after which a memory had to be shrunk.
    pub(crate) shrunk: AtomicU64,
    /// The share of the process budget that the code holds.
    _code: MappingCharge,
}

/// How the memories that a prepared or baked module defines are found in an instance, by index.
fn defined_memories(module: &Module) -> Result<Vec<ModuleExport>, LoadError> {
    let imported = module.imports().filter(|i| i.ty().memory().is_some()).count() as u32;
    let all = module.resources_required().num_memories;
    let export = |index| {
        module.get_export_index(&names::memory(index)).ok_or_else(|| {
            LoadError::Compile(wasmtime::Error::msg("the prepared module hides its memory"))
        })
    };
    (imported..imported + all).map(export).collect()
}

impl Blueprint {
    pub(crate) fn new(
        engine: &Engine,
        options: &GuestOptions,
        module: &Arc<Module>,
        plan: &Plan,
        clock: &Clock,
    ) -> Result<Self, LoadError> {
        let mut linker = options.linker(engine)?;
        if options.stub_imports {
            linker.define_unknown_imports_as_traps(module).map_err(LoadError::Link)?;
        }
        // Instances made by a host function live until the store is dropped, and nothing restores
        // them.
        let instances = (plan.mode == Mode::Reset).then_some(1);
        let stores = Stores::new(engine, options, clock, instances)?;
        let pre = linker
            .instantiate_pre(module)
            .map_err(|error| unsatisfied::of_module(&linker, module, &stores, error))?;
        Ok(Self {
            _text: GuestCode::of_module(module),
            pre,
            module: module.clone(),
            stores,
            policy: options.policy(engine, false),
            visible: plan.visible.clone().unwrap_or_default(),
            page_log2: plan.page_log2.clone(),
            memories: defined_memories(module)?,
            restores: plan.restored_items > 0,
            collects: plan.collects,
            replaced: AtomicU64::new(0),
            shrunk: AtomicU64::new(0),
            _code: Budget::process().hold(CODE_MAPPINGS),
        })
    }
}

impl Blueprint {
    /// A new instance in `store`, over `memories`.
    pub(crate) async fn instantiate(
        &self,
        store: &mut Store<Host>,
        memories: &[Arc<GuestMemory>],
    ) -> wasmtime::Result<Instance> {
        store.data_mut().set_memories(memories);
        let instantiate = self.stores.way.instantiate(&self.pre, store);
        let instance = with_memories(memories, MemoryOwner::Module, instantiate).await;
        store.data_mut().end_instantiation();
        instance
    }
}

/// The parts of a warm guest in reset mode.
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
        self.make_over(memories)
    }

    /// An instance in the warm state, over memories that stay as they are.
    pub(crate) fn make_over(
        self: &Arc<Self>,
        memories: Vec<Arc<GuestMemory>>,
    ) -> Result<ResetInstance, WarmError> {
        let blueprint = &self.blueprint;
        let (made, stack) = stacks::record(|| {
            let mut store = blueprint.stores.make()?;
            // The warm state was within the limit when it was made.
            store.data_mut().set_memory_limit(usize::MAX);
            // Instantiation runs no code of a prepared module.
            let instance = now(blueprint.instantiate(&mut store, &memories))
                .map_err(WarmError::Instantiate)?;
            state::apply(&mut store, instance, &self.state)?;
            ResetInstance::adopt(self, store, instance, memories)
        });
        let mut made = made?;
        made.stack = stack;
        Ok(made)
    }
}

/// How a memory is frozen: [`Slot::freeze`] or [`Slot::freeze_live`].
pub(crate) type SlotFreeze = fn(&mut Slot) -> Result<Image, ImageError>;

/// A live instance that can be reset. In the warm state whenever it is not leased, except in a
/// session, where it is in the state that its last call left.
pub(crate) struct ResetInstance {
    /// Has no roots of an earlier lease.
    pub(crate) store: ScopedStore,
    /// The only one in the store, so that nothing in it is left unrestored.
    pub(crate) instance: Instance,
    /// The memories that the module itself defines, in order; each handle has the size of its slot.
    pub(crate) memories: Vec<(Arc<GuestMemory>, Memory)>,
    /// The added restore function; `None` where only memory is restored.
    restore: Option<TypedFunc<(), i32>>,
    /// Found by calls; of this instance, so they go with it.
    pub(crate) known: TypedFunctions,
    /// As [`crate::lease::leased_instance::InstanceParts::unfinished`]. If set, the store is not
    /// used again.
    pub(crate) unfinished: bool,
    /// A user of the instance panicked. If set, a session replaces it; the pool drops such an item
    /// itself.
    pub(crate) unwound: bool,
    /// The sizes of the collected heap.
    heap: Heap,
    /// The stack of its calls, where they run on a fiber.
    stack: KeptStack,
    /// The memory of the stack between calls of a session. Pools count it themselves.
    stack_charge: Option<MappingCharge>,
    /// The state that a reset restores.
    pub(crate) reset_state: Arc<ResetState>,
}

/// Bytes of the collected heap, which stay when its objects are collected.
#[derive(Clone, Copy)]
struct Heap {
    /// The size in the warm state.
    warm: usize,
    /// As of the last restore.
    now: usize,
}

impl Heap {
    /// Whether an instance with it is kept.
    fn fits(self) -> bool {
        self.now <= self.warm.max(KEPT_HEAP)
    }
}

/// Mappings of an instance that are not memories: tables, and the collected heap if it has one.
pub(crate) const INSTANCE_MAPPINGS: usize = 1;

/// Mappings of a compiled guest, in use or not.
pub(crate) const CODE_MAPPINGS: usize = 4;

/// Bytes that a collected heap may grow to and be kept. wasmtime cannot shrink it, so an instance
/// with a larger one is replaced, unless the warm state itself is larger.
pub(crate) const KEPT_HEAP: usize = 1 << 20;

impl ResetInstance {
    /// Mappings of its memories, tables, heap and stack.
    pub(crate) fn all_mappings(&self) -> usize {
        let own = match self.reset_state.blueprint.stores.way {
            CallPath::Direct => INSTANCE_MAPPINGS,
            CallPath::Deep | CallPath::Fiber => INSTANCE_MAPPINGS + stacks::MAPPINGS,
        };
        self.memories.iter().map(|(memory, _)| memory.mappings()).sum::<usize>() + own
    }

    /// Bytes that its stack keeps, and those that are charged for it in a session.
    #[cfg(test)]
    pub(crate) fn stack_bytes(&self) -> (usize, usize) {
        let charged = self.stack_charge.as_ref().map_or(0, MappingCharge::bytes);
        (self.stack.resident_bytes(true), charged)
    }

    /// Leaves its stack little memory after a call of a session, and charges it to the budget of
    /// the process.
    pub(crate) fn settle_stack(&mut self) {
        if self.reset_state.blueprint.stores.way == CallPath::Direct
            || self.unfinished
            || self.unwound
        {
            return;
        }
        let bytes = self.stack.shrink();
        if self.stack_charge.as_ref().map_or(0, MappingCharge::bytes) != bytes {
            self.stack_charge = Some(Budget::process().hold_later(0, bytes));
        }
    }

    /// Takes over an instance that is in the warm state, memories included, and makes that the
    /// state it comes back to.
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
        let stores = &of.blueprint.stores;
        stores.unlimit(&mut store);
        // The copies that it makes of tables are no part of the guest.
        store.data_mut().set_memory_limit(usize::MAX);
        let table_bytes = store.data_mut().table_bytes();
        if stores.way.call_now(&save, &mut store, ()).map_err(WarmError::Instantiate)? != 0 {
            return Err(WarmError::State(
                "a table of the warm guest is too large to keep a copy of".to_owned(),
            ));
        }
        store.data_mut().set_table_bytes(table_bytes);
        let restore = if of.blueprint.restores {
            let restore = instance
                .get_typed_func(&mut store, names::RESTORE)
                .map_err(|_| broken("has no restore function"))?;
            Some(restore)
        } else {
            None
        };
        let heap = store.gc_heap_capacity();
        let mut this = Self {
            store: ScopedStore::new(store),
            instance,
            memories: held,
            restore,
            known: TypedFunctions::default(),
            unfinished: false,
            unwound: false,
            heap: Heap { warm: heap, now: heap },
            stack: KeptStack::default(),
            stack_charge: None,
            reset_state: of.clone(),
        };
        // Instantiation may have written data that is not part of the warm image.
        this.restore_in_place(&mut ResetCost::default())
            .map_err(|e| WarmError::State(e.to_string()))?;
        Ok(this)
    }

    /// Brings everything back; `false` when that takes a new instance.
    #[inline]
    fn restore_in_place(&mut self, took: &mut ResetCost) -> Result<bool, RestoreError> {
        let blueprint = &self.reset_state.blueprint;
        if !is(Bug::HostState) {
            self.store.data_mut().clear();
        }
        forget_exception(&mut self.store);
        // Limits are lifted even if none of our code runs: a host function may have set its own.
        blueprint.stores.unlimit(&mut self.store);
        if self.store.data_mut().lost_callback() {
            return Ok(false);
        }
        if let Some(restore) = &self.restore {
            let left = planted::before(&mut self.store, self.instance, &blueprint.visible);
            let way = blueprint.stores.way;
            let status =
                way.call_now(restore, &mut self.store, ()).map_err(RestoreError::Restore)?;
            planted::after(&mut self.store, self.instance, &blueprint.visible, left);
            if status != 0 && !is(Bug::Replace) {
                return Ok(false);
            }
        }
        for (memory, handle) in &self.memories {
            if memory.reset(took)? && !is(Bug::View) {
                blueprint.shrunk.fetch_add(1, Ordering::Relaxed);
                handle.grow(&mut self.store, 0).map_err(RestoreError::Restore)?;
            }
        }
        if blueprint.collects {
            let collected = self.store.renew(|store| match store.gc_heap_capacity() {
                0 => Ok(0),
                _ => store.gc(None).map(|()| store.gc_heap_capacity()),
            });
            self.heap.now = collected.map_err(RestoreError::Restore)?;
            return Ok(self.heap.fits());
        }
        Ok(true)
    }

    /// Begins the freeze of each memory.
    pub(crate) fn prepare_freeze(&mut self) -> Result<Vec<FreezePreparation>, WarmError> {
        self.memories.iter().map(|(memory, _)| Ok(memory.slot().prepare_freeze()?)).collect()
    }

    /// The present state, as one that later instances could start from.
    pub(crate) fn freeze(&mut self, slot_freeze: SlotFreeze) -> Result<InstanceState, WarmError> {
        descriptors::check(self.store.data_mut())?;
        let (mut memories, mut sizes) = (Vec::new(), Vec::new());
        let logs = &self.reset_state.blueprint.page_log2;
        for (((memory, _), warm), log2) in
            self.memories.iter().zip(&self.reset_state.memories).zip(logs)
        {
            let bytes = memory.bytes();
            let image = slot_freeze(&mut memory.slot())?;
            sizes.push((bytes >> log2) as u64);
            memories.push(WarmMemory { shape: warm.shape, image, bytes });
        }
        let visible = &self.reset_state.blueprint.visible;
        let mut scope = RootScope::new(&mut self.store);
        let state = state::read(&mut scope, self.instance, visible, sizes)?;
        drop(scope);
        let files = self.store.data_mut().files();
        Ok(InstanceState {
            memories,
            state,
            files,
            read: self.reset_state.blueprint.stores.clock.latest(),
        })
    }

    /// Differences from the warm state now.
    pub(crate) fn compare(&mut self) -> Result<Comparison, WarmError> {
        let mut found = Comparison::default();
        for ((memory, _), warm) in self.memories.iter().zip(&self.reset_state.memories) {
            let pages = memory.slot().verify().map_err(|e| WarmError::State(e.to_string()))?;
            found.bytes += pages.iter().map(|m| m.bytes).sum::<usize>();
            found.bytes += memory.bytes().abs_diff(warm.bytes);
        }
        // The sizes that wasmtime believes are checked separately.
        for (index, (memory, handle)) in (0..).zip(&self.memories) {
            let seen = handle.data_size(&self.store);
            found.item(seen != memory.bytes(), &format!("size of memory {index} in wasmtime"));
        }
        // Sizes are compared above, so that the state read here differs in the rest alone.
        let sizes = self.reset_state.state.memories.clone();
        let visible = &self.reset_state.blueprint.visible;
        let mut scope = RootScope::new(&mut self.store);
        let now = state::read(&mut scope, self.instance, visible, sizes)?;
        let warm = &self.reset_state.state;
        found.maps("global", &warm.globals, &now.globals);
        found.maps("table", &warm.tables, &now.tables);
        let data = now.dropped_data.symmetric_difference(&warm.dropped_data);
        found.items.extend(data.map(|index| format!("data segment {index}")));
        let elements = now.dropped_elements.symmetric_difference(&warm.dropped_elements);
        found.items.extend(elements.map(|index| format!("element segment {index}")));
        let mut store = scope.as_context_mut();
        found.item(store.has_pending_exception(), "pending exception");
        found.item(!store.data_mut().is_clear(), "host state");
        found.item(!self.heap.fits(), "size of the collected heap");
        Ok(found)
    }
}

/// Why an instance could not be reset.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoreError {
    /// The memory.
    #[error(transparent)]
    Memory(#[from] afresh_memory::ResetError),
    /// The module's own restore function, or wasmtime.
    #[error("restoring the instance failed: {0:#}")]
    Restore(wasmtime::Error),
    /// The replacement instance failed.
    #[error("replacing the instance failed: {0}")]
    Replace(Box<WarmError>),
}

impl Recycle for ResetInstance {
    type Error = RestoreError;

    fn key(&self) -> usize {
        0
    }

    #[inline]
    fn recycle(&mut self) -> Result<ResetCost, RestoreError> {
        let mut took = ResetCost::default();
        if !self.unfinished && self.restore_in_place(&mut took)? {
            return Ok(took);
        }
        // Where it went half-way, only the rest is counted.
        took = ResetCost { replaced: true, grown: took.grown, ..ResetCost::default() };
        let of = self.reset_state.clone();
        of.blueprint.replaced.fetch_add(1, Ordering::Relaxed);
        // The memories stay, with the pages that calls write: a guest that needs this after every
        // call pays the price of fresh mode.
        for (memory, _) in &self.memories {
            memory.reset(&mut took)?;
        }
        let memories = self.memories.iter().map(|(memory, _)| memory.clone()).collect();
        *self = of.make_over(memories).map_err(|e| RestoreError::Replace(Box::new(e)))?;
        Ok(took)
    }

    fn reason(error: &RestoreError) -> &'static str {
        match error {
            RestoreError::Memory(error) => error.reason(),
            RestoreError::Restore(_) => "restore",
            RestoreError::Replace(_) => "replace",
        }
    }

    fn resident_bytes(&self) -> usize {
        let memories = self.memories.iter().map(|(m, _)| m.resident_bytes()).sum::<usize>();
        memories
            + self.heap.now
            + self.stack.resident_bytes(self.reset_state.blueprint.stores.limited)
    }

    fn mappings(&self) -> usize {
        self.all_mappings()
    }

    fn trim(&mut self) -> Result<(), RestoreError> {
        for (memory, _) in &self.memories {
            memory.trim()?;
        }
        // An instance whose call was cut off has been replaced: nothing runs on its stack.
        self.stack.trim().map_err(afresh_memory::ResetError::from)?;
        Ok(())
    }
}
