//! Components, in fresh mode: a new store and instance for every call, over memories that already hold
//! the component's data.
//!
//! The active data segments of every core module are moved into images. Each instantiation takes slots
//! for the component's memories in the order in which wasmtime creates them, which one instantiation of
//! the original component shows; between calls the slots are reset, and the pages that calls write stay
//! resident.

use std::sync::Arc;
use std::time::Duration;

use afresh_memory::{ImageBuilder, PAGE_SIZE, page_align_up};
use afresh_pool::{Lease as PoolLease, Pool, PoolStats};
use afresh_rewrite::{NestedModule, prepare_component};
use wasmtime::Store;
use wasmtime::component::{Component, Instance, InstancePre, Linker, Val};

use crate::engine::TICK;
use crate::fresh::FreshMemories;
use crate::guest::Guest;
use crate::host::{Host, Wasi};
use crate::linear::{GuestMemory, MemoryPolicy, Shape, record_memories, with_memories};
use crate::reset::{UNLIMITED, WarmMemory};
use crate::{CallError, LoadError, WarmError};

struct Inner {
    pre: InstancePre<Host>,
    memories: Vec<WarmMemory>,
    policy: MemoryPolicy,
    wasi: Arc<Wasi>,
    memory_limit: usize,
    timeout: Option<Duration>,
    timeouts: bool,
    pool: Pool<FreshMemories>,
}

/// A component whose memories come warm; cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct WarmComponent {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for WarmComponent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WarmComponent").field("memories", &self.inner.memories.len()).finish()
    }
}

/// Which of the component's declared memories each created one is.
///
/// A shape that only one declaration has decides; among several, the content does: the original's data
/// is in the memory by now.
fn identify<'a>(
    created: &GuestMemory,
    modules: &'a [NestedModule],
) -> Result<Vec<(&'a NestedModule, u32)>, WarmError> {
    let mut candidates: Vec<(usize, &NestedModule, u32)> = Vec::new();
    for module in modules {
        for (index, memory) in (0u32..).zip(&module.memories) {
            if memory.import.is_some() || !created.is_shaped(Shape::of(memory)) {
                continue;
            }
            let mut matching = 0;
            for segment in module.segments.iter().filter(|s| s.memory == index) {
                let mut live = vec![0; segment.bytes.len()];
                created.slot().read(segment.offset as usize, &mut live)?;
                matching += live.iter().zip(&segment.bytes).filter(|(a, b)| a == b).count();
            }
            candidates.push((matching, module, index));
        }
    }
    let best = candidates.iter().map(|c| c.0).max().unwrap_or(0);
    Ok(candidates.into_iter().filter(|c| c.0 == best).map(|(_, m, i)| (m, i)).collect())
}

impl WarmComponent {
    pub(crate) fn new(guest: &Guest) -> Result<Self, WarmError> {
        let engine = &guest.engine;
        let options = &guest.options;
        if options.timeout.is_some() {
            engine.start_ticker();
        }
        let compile = |bytes: &[u8]| {
            Component::new(engine.wasmtime(), bytes).map_err(LoadError::Compile)
        };
        let prepared = prepare_component(&guest.wasm).map_err(LoadError::from)?;
        let mut linker: Linker<Host> = Linker::new(engine.wasmtime());
        wasmtime_wasi::p2::add_to_linker_sync(&mut linker).map_err(LoadError::Link)?;
        let wasi = Arc::new(options.wasi.clone());
        let timeouts = engine.inner.config.timeouts;
        let new_store = || {
            let host = Host::new(wasi.clone(), options.memory_limit);
            let mut store = Store::new(engine.wasmtime(), host);
            if timeouts {
                store.set_epoch_deadline(UNLIMITED);
            }
            store
        };

        let original = linker.instantiate_pre(&compile(&guest.wasm)?).map_err(LoadError::Link)?;
        let mut store = new_store();
        let (_, created) = record_memories(|| original.instantiate(&mut store))
            .map_err(WarmError::Instantiate)?;
        let mut memories = Vec::new();
        for memory in &created {
            let found = identify(memory, &prepared.modules)?;
            let same = |a: &(&NestedModule, u32), b: &(&NestedModule, u32)| {
                a.0.segments.iter().filter(|s| s.memory == a.1).eq(
                    b.0.segments.iter().filter(|s| s.memory == b.1),
                )
            };
            let Some((module, index)) = found.first().copied() else {
                // Not a memory of the component's own: wasmtime's heap for GC objects.
                continue;
            };
            if !found.iter().all(|other| same(other, &(module, index))) {
                return Err(WarmError::State(
                    "two of the component's memories cannot be told apart".to_owned(),
                ));
            }
            let shape = Shape::of(&module.memories[index as usize]);
            let mut image = ImageBuilder::new(page_align_up(shape.minimum) / PAGE_SIZE);
            for segment in module.segments.iter().filter(|s| s.memory == index) {
                image.segment(segment.offset as usize, &segment.bytes)?;
            }
            memories.push(WarmMemory { shape, image: image.build()?, bytes: shape.minimum });
        }
        drop(store);
        let pre = linker
            .instantiate_pre(&compile(&prepared.component)?)
            .map_err(LoadError::Link)?;
        let inner = Inner {
            pre,
            memories,
            policy: options.policy(engine),
            wasi,
            memory_limit: options.memory_limit,
            timeout: options.timeout,
            timeouts,
            pool: Pool::new(options.limits),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// A new instance for one call or several that belong together.
    ///
    /// # Errors
    /// [`WarmError`] when the pool is exhausted or the instance cannot be made.
    pub fn lease(&self) -> Result<ComponentLease<'_>, WarmError> {
        let inner = &*self.inner;
        let memories =
            inner.pool.get(0, |_| FreshMemories::new(&inner.memories, &inner.policy))?;
        let host = Host::new(inner.wasi.clone(), inner.memory_limit);
        let mut store = Store::new(inner.pre.engine(), host);
        if inner.memory_limit != usize::MAX {
            store.limiter(|host| host);
        }
        if inner.timeouts {
            store.set_epoch_deadline(UNLIMITED);
        }
        let instance = with_memories(&memories.memories, || inner.pre.instantiate(&mut store))
            .map_err(WarmError::Instantiate)?;
        Ok(ComponentLease { store, instance, memories, warm: inner })
    }

    /// The books of its pool.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        self.inner.pool.stats()
    }
}

/// A fresh instance of a component.
pub struct ComponentLease<'a> {
    /// Dropped before the memories come back to their pool.
    store: Store<Host>,
    instance: Instance,
    memories: PoolLease<'a, FreshMemories>,
    warm: &'a Inner,
}

impl std::fmt::Debug for ComponentLease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ComponentLease").field("host", self.store.data()).finish()
    }
}

impl ComponentLease<'_> {
    /// Calls an exported function of the component's world by name, or of an exported interface by
    /// `interface#function`.
    ///
    /// # Errors
    /// [`CallError`]; the lease is spent after a trap.
    pub fn call(&mut self, name: &str, arguments: &[Val]) -> Result<Vec<Val>, CallError> {
        let missing = || CallError::NoSuchExport {
            name: name.to_owned(),
            available: "what its world lists".to_owned(),
        };
        let function = match name.split_once('#') {
            None => name,
            Some((_, function)) => function,
        };
        let parent = match name.split_once('#') {
            None => None,
            Some((interface, _)) => Some(
                self.instance
                    .get_export_index(&mut self.store, None, interface)
                    .ok_or_else(missing)?,
            ),
        };
        let export = self
            .instance
            .get_export_index(&mut self.store, parent.as_ref(), function)
            .ok_or_else(missing)?;
        let func = self.instance.get_func(&mut self.store, export).ok_or_else(missing)?;
        let ty = func.ty(&self.store);
        if ty.params().len() != arguments.len() {
            return Err(CallError::Arguments {
                name: name.to_owned(),
                expected: format!("{} parameters", ty.params().len()),
                reason: format!("{} given", arguments.len()),
            });
        }
        let mut results = vec![Val::Bool(false); ty.results().len()];
        if let Some(timeout) = self.warm.timeout {
            let ticks = (timeout.as_nanos() / TICK.as_nanos()) as u64 + 1;
            self.store.set_epoch_deadline(ticks.min(UNLIMITED));
        }
        func.call(&mut self.store, arguments, &mut results)
            .map_err(|e| crate::lease::call_error(e, self.warm.timeout, None))?;
        Ok(results)
    }

    /// The call's host state.
    #[must_use]
    pub fn host(&self) -> &Host {
        self.store.data()
    }

    /// Bytes of the component's memories that differ from what it starts with.
    ///
    /// # Errors
    /// [`WarmError`] when the memory cannot be read.
    pub fn differences(&mut self) -> Result<usize, WarmError> {
        self.memories.differences().map_err(|e| WarmError::State(e.to_string()))
    }
}
