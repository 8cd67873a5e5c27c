//! Components, in fresh mode: a new store and instance for every call, over memories that already
//! hold the component's data, or its state after the warm-up ([`crate::component::nested`]).
//!
//! The active data segments of every core module are moved into images. An instantiation of a
//! probe, whose memories identify themselves, shows once in which order wasmtime makes the
//! memories. Every later instantiation takes slots in that order. Between calls the slots are
//! reset, and the pages that calls write stay resident.

pub(crate) mod compiled;
pub(crate) mod lease;
pub(crate) mod nested;
pub(crate) mod shared;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use afresh_memory::{ImageBuilder, PAGE_SIZE, page_align_up};
use afresh_pool::{Budget, NextItem, Pool, PoolStats};
use afresh_rewrite::{
    AnalyzeError, DataSegment, MARK_BYTES, NestedModule, PreparedComponent, Roots, WarmState,
    names, prepare_component,
};
use afresh_sys::planted::{Bug, is};
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{InstancePre, Linker};

use crate::call::lease_options::LeaseOptions;
use crate::call::stores::Stores;
use crate::call::unsatisfied;
use crate::component::compiled::{compile, compile_direct};
use crate::component::lease::{ComponentLease, OwnedComponentLease, functions};
use crate::component::shared::{OwnedMemories, SharedComponent, borrow};
use crate::engine::call_path::{drive, now};
use crate::engine::guest_code::GuestCode;
use crate::engine::linear::{GuestMemory, Shape, record_memories};
use crate::guest::{Guest, GuestOptions, WarmUp};
use crate::host::Host;
use crate::host::clock::Clock;
use crate::lease::acquire::at_once;
use crate::lease::background::prepare_elsewhere;
use crate::warm::compare::Comparison;
use crate::warm::fresh::FreshMemories;
use crate::warm::frozen::Program;
use crate::warm::instance_state::WarmMemory;
use crate::warm::reset::CODE_MAPPINGS;
use crate::warm::thaw::with_files;
use crate::{Engine, FreezeError, Frozen, FrozenState, LoadError, ThawError, WarmError};

/// A component before any of its code has run.
struct Outline {
    prepared: PreparedComponent,
    linker: Linker<Host>,
    stores: Stores,
    /// Its memories in the order in which wasmtime makes them, with the data that segments put
    /// there.
    cold: Vec<WarmMemory>,
}

impl Outline {
    fn new(
        engine: &Engine,
        options: &GuestOptions,
        wasm: &[u8],
        clock: &Clock,
    ) -> Result<Self, WarmError> {
        let prepared = prepare_component(wasm).map_err(LoadError::from)?;
        let mut linker = options.component_linker(engine)?;
        let mut stores = Stores::new(engine, options, clock, None)?;
        let probe = compile(engine, &prepared.probe)?;
        stores.has_no_files_for(&probe)?;
        if options.stub_imports {
            unsatisfied::stub(&mut linker, &probe);
        }
        let probe = linker
            .instantiate_pre(&probe)
            .map_err(|error| unsatisfied::of_component(&linker, &probe, error))?;
        let mut store = stores.make()?;
        // It has no code that could wait.
        let (_, probed) =
            record_memories(|| now(stores.way.instantiate_component(&probe, &mut store)))
                .map_err(WarmError::Instantiate)?;
        // The limiter compared each memory of the probe alone.
        store.data_mut().set_memories(&probed);
        store.data_mut().check_memory_limit().map_err(WarmError::Instantiate)?;
        // Instances of one module share their images.
        let mut built = BTreeMap::new();
        let cold = in_order(&prepared, &probed)?
            .into_iter()
            .map(|declared| match built.entry(declared.key()) {
                Entry::Occupied(known) => Ok(WarmMemory::clone(known.get())),
                Entry::Vacant(place) => Ok(place.insert(declared.warm_memory()?).clone()),
            })
            .collect::<Result<Vec<_>, WarmError>>()?;
        Ok(Self { prepared, linker, stores, cold })
    }
}

/// A component with warm memories; cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct WarmComponent {
    inner: Arc<SharedComponent>,
}

impl std::fmt::Debug for WarmComponent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WarmComponent").field("memories", &self.inner.memories.len()).finish()
    }
}

/// A memory that a module of the component defines.
#[derive(Clone, Copy)]
struct DeclaredMemory<'a> {
    module: &'a NestedModule,
    index: u32,
}

impl<'a> DeclaredMemory<'a> {
    fn all(module: &'a NestedModule) -> impl Iterator<Item = Self> + 'a {
        (0u32..)
            .zip(&module.memories)
            .filter(|(_, memory)| !memory.imported)
            .map(move |(index, _)| Self { module, index })
    }

    /// Identifies the memory among all of the component.
    fn key(&self) -> (*const NestedModule, u32) {
        (self.module, self.index)
    }

    fn shape(&self) -> Shape {
        Shape::of(&self.module.memories[self.index as usize])
    }

    fn segments(&self) -> impl Iterator<Item = &'a DataSegment> + use<'a> {
        let index = self.index;
        self.module.segments.iter().filter(move |s| s.memory == index)
    }

    fn warm_memory(&self) -> Result<WarmMemory, WarmError> {
        let shape = self.shape();
        let mut image = ImageBuilder::new(page_align_up(shape.minimum) / PAGE_SIZE);
        for segment in self.segments() {
            image.segment(segment.offset as usize, &segment.bytes)?;
        }
        Ok(WarmMemory { shape, image: image.build()?, bytes: shape.minimum })
    }
}

/// The component's memories in the order in which wasmtime makes them, as one instantiation of the
/// probe shows it.
fn in_order<'a>(
    prepared: &'a PreparedComponent,
    probed: &[Arc<GuestMemory>],
) -> Result<Vec<DeclaredMemory<'a>>, WarmError> {
    let unknown = |memory: &GuestMemory| {
        WarmError::State(format!(
            "the component makes a memory of {} bytes, which its modules do not declare",
            memory.bytes()
        ))
    };
    let mut order = Vec::with_capacity(probed.len());
    for memory in probed {
        let mut mark = [0; MARK_BYTES];
        if memory.bytes() >= MARK_BYTES {
            memory.slot().read(0, &mut mark)?;
        }
        let declared = match prepared.marked(mark) {
            Some((module, index)) => DeclaredMemory { module: &prepared.modules[module], index },
            // Without room for a mark the memory has no data either, so any memory with the same
            // declaration fits.
            None => prepared
                .modules
                .iter()
                .flat_map(DeclaredMemory::all)
                .filter(|d| !d.module.memories[d.index as usize].has_mark())
                .find(|d| d.shape() == memory.shape() && d.segments().next().is_none())
                .ok_or_else(|| unknown(memory))?,
        };
        if declared.shape() != memory.shape() {
            return Err(unknown(memory));
        }
        order.push(declared);
    }
    if is(Bug::Order) {
        order.reverse();
    }
    Ok(order)
}

impl Guest {
    /// Like [`Guest::warm`], for a component without a warm-up. The state after its start functions
    /// is kept if possible, and otherwise [`WarmComponent::rerun_reason`] has the reason.
    ///
    /// # Errors
    /// [`WarmError`] for a core module, or when the component does not compile or link.
    pub fn warm_component(&self) -> Result<WarmComponent, WarmError> {
        self.warm_component_with(&WarmUp::new())
    }

    /// Like [`Guest::warm`], for components. Every instance is new, and starts in the state after
    /// the warm-up.
    ///
    /// # Errors
    /// [`WarmError`] for a core module, when the component does not compile or link, when a call of
    /// the warm-up fails, or for state that no new instance can start with, by name.
    pub fn warm_component_with(&self, warm_up: &WarmUp) -> Result<WarmComponent, WarmError> {
        drive(self.call_path(), WarmComponent::new(self, warm_up))
    }

    /// As [`Guest::warm_component_with`], waiting for asynchronous host functions as a task does.
    /// Compilation blocks the thread.
    ///
    /// # Errors
    /// As [`Guest::warm_component_with`].
    pub async fn warm_component_async(&self, warm_up: &WarmUp) -> Result<WarmComponent, WarmError> {
        WarmComponent::new(self, warm_up).await
    }
}

impl WarmComponent {
    pub(crate) async fn new(guest: &Guest, warm_up: &WarmUp) -> Result<Self, WarmError> {
        let engine = &guest.engine;
        let options = &guest.options;
        engine.keep_limits(options.timeout, options.fuel, options.watch.is_some())?;
        engine.check_process()?;
        let Outline { prepared, linker, stores, cold } =
            Outline::new(engine, options, &guest.wasm, &Clock::from(0))?;
        // If instantiation runs no code, the images already hold its result.
        let starts = prepared.modules.iter().any(|module| module.starts);
        let warmed = match starts || !warm_up.calls.is_empty() {
            true => nested::warm(guest, &linker, &stores, &cold, warm_up).await.map(Some),
            false => Ok(None),
        };
        let (memories, state, rerun_reason) = match warmed {
            Ok(Some(warm)) => (warm.memories, Some(warm.modules), None),
            // Nothing but the images' data is in the way of a new instance.
            Ok(None) => (cold, Some(Vec::new()), None),
            // Without a warm-up nothing is lost when every instance starts as the component does.
            Err(error @ (WarmError::State(_) | WarmError::Load(LoadError::Component(_))))
                if warm_up.calls.is_empty() =>
            {
                (cold, None, Some(error.to_string()))
            }
            Err(error) => return Err(error),
        };
        let component = match &state {
            Some(state) if starts || !warm_up.calls.is_empty() => {
                nested::baked(&guest.wasm, state)?
            }
            _ => prepared.component,
        };
        let program = Program::new(engine, guest.wasm.clone());
        let pre = linker
            .instantiate_pre(&compile_direct(engine, &component)?)
            .map_err(LoadError::Link)?;
        Self::finish(guest, pre, memories, stores, program, state, rerun_reason).await
    }

    /// A warm component in the state of `frozen`, without running its warm-up. With a cache of
    /// compiled guests ([`crate::EngineConfig::cache`]) that has it, nothing is compiled.
    ///
    /// # Errors
    /// [`ThawError`] when state and component do not fit together, or as
    /// [`Guest::warm_component_with`].
    pub fn thaw(
        engine: &Engine,
        options: &GuestOptions,
        frozen: &Frozen,
    ) -> Result<Self, ThawError> {
        let bad = |why: &str| ThawError::State(why.to_owned());
        let Some(state) = &frozen.nested else {
            return Err(bad("it is a core module; thaw it with `Warm::thaw`"));
        };
        engine
            .keep_limits(options.timeout, options.fuel, options.watch.is_some())
            .map_err(WarmError::from)?;
        engine.check_process().map_err(WarmError::from)?;
        let wasm = frozen.program.read()?;
        let options = &with_files(options, frozen);
        frozen.check_limit(options.memory_limit)?;
        let outline = Outline::new(engine, options, &wasm, &Clock::from(frozen.read))?;
        outline.stores.thaw_files(frozen.files.as_ref())?;
        let (cold, warm) = (&outline.cold, &frozen.memories);
        if !cold.iter().map(|m| m.shape).eq(warm.iter().map(|m| m.shape)) {
            return Err(bad("its memories are not those of the component"));
        }
        if warm.iter().any(|m| m.bytes < m.shape.minimum) {
            return Err(bad("a memory is smaller than the component declares it"));
        }
        let component =
            compile_direct(engine, &nested::baked(&wasm, state)?).map_err(WarmError::from)?;
        let pre = outline
            .linker
            .instantiate_pre(&component)
            .map_err(|e| WarmError::from(LoadError::Link(e)))?;
        let guest = Guest { engine: engine.clone(), wasm: wasm.into(), options: options.clone() };
        let (stores, program) = (outline.stores, frozen.program.clone());
        let memories = frozen.memories.clone();
        let state = Some(state.clone());
        Ok(drive(
            guest.call_path(),
            Self::finish(&guest, pre, memories, stores, program, state, None),
        )?)
    }

    async fn finish(
        guest: &Guest,
        pre: InstancePre<Host>,
        memories: Vec<WarmMemory>,
        stores: Stores,
        program: Program,
        state: Option<Vec<Option<WarmState>>>,
        rerun_reason: Option<String>,
    ) -> Result<Self, WarmError> {
        let options = &guest.options;
        if let Roots::Named(roots) = &options.roots {
            let exports = functions(&pre);
            if let Some(name) = roots.iter().find(|name| !exports.contains(name)) {
                let error = AnalyzeError::NoSuchRoot { name: name.clone(), available: exports };
                return Err(LoadError::from(error).into());
            }
        }
        let reseed = match pre.component().get_export(None, names::RESEED_COMPONENT) {
            Some((ComponentItem::ComponentFunc(_), export)) => Some(export),
            _ => None,
        };
        let inner = SharedComponent {
            _text: GuestCode::of_component(pre.component()),
            pre,
            reseed,
            roots: options.roots.clone(),
            memories,
            policy: options.policy(&guest.engine, true),
            pool: Pool::new(options.limits),
            program,
            read: stores.clock.latest(),
            stores,
            state,
            rerun_reason,
            _code: Budget::process().hold(CODE_MAPPINGS),
        };
        let this = Self { inner: Arc::new(inner) };
        // A first lease shows errors that every later lease would have.
        drop(ComponentLease::begin(&this.inner, &LeaseOptions::default()).await?);
        Ok(this)
    }

    /// The warm state, to be saved or thawed elsewhere. Shares the memory.
    ///
    /// # Errors
    /// [`FreezeError::State`] for a component whose warm state cannot be kept.
    pub fn freeze(&self) -> Result<Frozen, FreezeError> {
        let inner = &self.inner;
        let Some(nested) = &inner.state else {
            return Err(FreezeError::State(format!(
                "each instance starts as the component does, for {}",
                inner.rerun_reason.as_deref().unwrap_or("its state cannot be kept")
            )));
        };
        let sizes = inner.memories.iter().map(|m| m.bytes as u64).collect();
        let state = WarmState { memories: sizes, ..WarmState::default() };
        let memories = inner.memories.clone();
        let files = inner.stores.kept_files();
        let (program, nested) = (inner.program.clone(), Some(nested.clone()));
        FrozenState::join(program, memories, state, inner.read, nested, files.as_ref())
    }

    /// A new instance for one or several calls.
    ///
    /// # Errors
    /// [`WarmError`] when the pool is exhausted or the instance cannot be made.
    pub fn lease(&self) -> Result<ComponentLease<'_>, WarmError> {
        self.lease_with(&LeaseOptions::default())
    }

    /// As [`WarmComponent::lease`], with `options` for this lease.
    ///
    /// # Errors
    /// As [`WarmComponent::lease`]; [`WarmError::Load`] for a limit that the engine was not set up
    /// to keep, and for directories that do not fit those of the guest.
    pub fn lease_with(&self, options: &LeaseOptions) -> Result<ComponentLease<'_>, WarmError> {
        at_once(ComponentLease::begin(&self.inner, options))
    }

    /// As [`WarmComponent::lease_with`], but the lease owns its guest. It can move to other threads
    /// and tasks, and can be kept without limit.
    ///
    /// # Errors
    /// As [`WarmComponent::lease_with`].
    pub fn lease_owned(&self, options: &LeaseOptions) -> Result<OwnedComponentLease, WarmError> {
        let keep = self.inner.clone();
        // SAFETY: the lease gets `keep`, which it drops last; until then `keep` is dropped after
        // it.
        let mut lease = at_once(ComponentLease::begin(unsafe { borrow(&keep) }, options))?;
        lease.keep = Some(keep);
        Ok(lease)
    }

    /// As [`WarmComponent::lease_owned`], but asynchronous: it waits for an instance where all are
    /// in use, and for the start functions of the component where each instance runs them anew
    /// ([`WarmComponent::rerun_reason`]). Dropping the future ends the wait. These run as for
    /// [`crate::Warm::lease_async`].
    ///
    /// # Errors
    /// As [`WarmComponent::lease_with`], but no limit of the pool is an error.
    pub async fn lease_async(
        &self,
        options: &LeaseOptions,
    ) -> Result<OwnedComponentLease, WarmError> {
        let attempt = options.without_blocking(self.inner.pool.limits().exhausted);
        let mut next = None;
        loop {
            let keep = self.inner.clone();
            // SAFETY: the memories are put together with `keep`, which is dropped after them.
            match unsafe { borrow(&keep) }.take_memories(&attempt) {
                Err(WarmError::Exhausted { .. }) => {}
                taken => {
                    let taken = OwnedMemories { memories: taken?, keep };
                    if !self.inner.prepares() || self.inner.stores.way.waits() {
                        return taken.prepare(&attempt).await;
                    }
                    let prepare = move |options: &LeaseOptions| at_once(taken.prepare(options));
                    return prepare_elsewhere(&attempt, prepare).await;
                }
            }
            next.get_or_insert_with(|| self.next_instance()).wait().await;
        }
    }

    /// Waits, as a task, for an instance to end when the pool is at its limit.
    #[must_use]
    pub fn next_instance(&self) -> NextItem {
        self.inner.pool.room()
    }

    /// Compares the memories that the pool would lease next with the component's initial state.
    ///
    /// # Errors
    /// [`WarmError`] when the pool is exhausted or the memory cannot be read.
    pub fn compare(&self) -> Result<Comparison, WarmError> {
        let inner = &*self.inner;
        inner.pool.get(0, |_| FreshMemories::new(&inner.memories, &inner.policy))?.compare()
    }

    /// The reason if each instance runs the component's start functions again, because their
    /// results could not be kept.
    #[must_use]
    pub fn rerun_reason(&self) -> Option<&str> {
        self.inner.rerun_reason.as_deref()
    }

    /// The entry point of a WASI command, if this is one: the `run` of `wasi:cli/run`, under its
    /// name for [`ComponentLease::call`].
    #[must_use]
    pub fn command(&self) -> Option<String> {
        let pre = &self.inner.pre;
        let ty = pre.component().component_type();
        let name = ty.exports(pre.engine()).map(|(name, _)| name);
        let interface = name.into_iter().find(|name| name.starts_with("wasi:cli/run@"))?;
        Some(format!("{interface}#run"))
    }

    /// Whether clones take fresh entropy by the component's `afresh-reseed` export.
    #[must_use]
    pub fn reseeds(&self) -> bool {
        self.inner.reseed.is_some()
    }

    /// The strategy that resets its memories, never
    /// [`Strategy::Auto`](afresh_memory::Strategy::Auto).
    #[must_use]
    pub fn strategy(&self) -> afresh_memory::Strategy {
        self.inner.policy.chosen()
    }

    /// The counters of its pool.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        self.inner.pool.stats()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EngineConfig;

    /// Two instances of one module with a memory of a page.
    const TWICE: &str = r#"(component
        (core module $m (memory 1) (data (i32.const 8) "data"))
        (core instance (instantiate $m))
        (core instance (instantiate $m)))"#;

    fn outline(memory_limit: usize) -> Result<Outline, WarmError> {
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let options = GuestOptions { memory_limit, ..GuestOptions::default() };
        Outline::new(&engine, &options, &wat::parse_str(TWICE).unwrap(), &Clock::from(0))
    }

    #[test]
    fn instances_of_one_module_share_an_image() {
        let memories = outline(2 << 16).unwrap().cold;
        assert_eq!(memories.len(), 2);
        assert!(memories[0].image.same(&memories[1].image));
    }

    #[test]
    fn memories_beyond_the_limit_together_are_refused_before_they_are_filled() {
        let error = outline(3 << 15).err().expect("two pages are beyond one and a half");
        assert!(error.to_string().contains("memory_limit"), "{error}");
    }
}
