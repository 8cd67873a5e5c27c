//! A warm guest: made once, leased for every call.

pub(crate) mod compare;
pub(crate) mod fresh;
pub(crate) mod frozen;
pub(crate) mod instance_state;
pub(crate) mod module;
pub(crate) mod ownership;
pub(crate) mod plan;
pub(crate) mod planted;
pub(crate) mod pools;
pub(crate) mod preparation;
pub(crate) mod reset;
pub(crate) mod state;
pub(crate) mod thaw;

use std::any::TypeId;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use afresh_memory::{PAGE_SIZE, Strategy};
use afresh_pool::{Pool, PoolStats};
use afresh_rewrite::{AnalyzeError, Roots, WarmState, bake, names};
use wasmtime::{
    AsContextMut, FuncType, Instance, ModuleExport, RootScope, Store, WasmParams, WasmResults,
};

use crate::call::bytes_entry;
use crate::call::dynamic::call_dynamic;
use crate::call::entry::Entry;
use crate::call::lease_options::LeaseOptions;
use crate::call::store_calls::AsyncStore;
use crate::call::stores::CallLimits;
use crate::engine::CompiledModule;
use crate::engine::call_path::{CallPath, drive};
use crate::engine::linear::GuestMemory;
use crate::error::join_names;
use crate::guest::{Arguments, Guest, GuestOptions, Mode, WarmUp};
use crate::host::clock::Clock;
use crate::host::{Host, descriptors};
use crate::warm::compare::Comparison;
use crate::warm::fresh::FreshState;
use crate::warm::frozen::Program;
use crate::warm::instance_state::WarmMemory;
use crate::warm::plan::Plan;
use crate::warm::pools::Pools;
use crate::warm::preparation::{INITIALIZE, Preparation};
use crate::warm::reset::{Blueprint, KEPT_HEAP, ResetInstance, ResetState};
use crate::{CallError, LoadError, WarmError, parse_arguments};

/// A report of the warm-up of a guest.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WarmReport {
    /// Reset or fresh, never auto.
    pub mode: Mode,
    /// The reason if reset mode was not possible.
    pub why_fresh: Option<String>,
    /// Bytes of the guest memories.
    pub memory_bytes: usize,
    /// Bytes of the memories that the images store; the rest is zero.
    pub image_bytes: usize,
    /// Mutable globals, tables and dropped segments that a reset restores.
    pub restored_items: usize,
    /// Time to analyse, rewrite and compile.
    pub compile: Duration,
    /// Time to instantiate and run the warm-up.
    pub warm_up: Duration,
    /// The strategy that resets the memories, and the reason for it.
    pub strategy: String,
    /// Whether clones take fresh entropy by the guest's `afresh_reseed` export.
    pub reseeds: bool,
}

/// An export that calls can name.
pub(crate) struct Callable {
    pub(crate) export: ModuleExport,
    pub(crate) ty: FuncType,
    /// Whether calls may name it.
    root: bool,
}

/// The times of making a guest.
pub(crate) struct Times {
    pub(crate) compile: Duration,
    pub(crate) warm_up: Duration,
}

pub(crate) struct Inner {
    /// No two guests of a process have the same.
    pub(crate) id: u64,
    pub(crate) exports: HashMap<String, Callable>,
    pub(crate) memory: Option<ModuleExport>,
    pub(crate) pools: Pools,
    /// A guest whose warm state cannot be kept: each fresh instance runs its initialiser again.
    pub(crate) initialize: bool,
    pub(crate) limits: CallLimits,
    pub(crate) way: CallPath,
    pub(crate) reseed: Option<Entry<(i64, i64), ()>>,
    entries: Mutex<HashMap<(String, TypeId), usize>>,
    pub(crate) report: WarmReport,
    pub(crate) program: Program,
    /// The guest clock's reading when its warm state was taken.
    pub(crate) read: u64,
}

/// A guest in its warm state; cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Warm {
    pub(crate) inner: Arc<Inner>,
}

impl std::fmt::Debug for Warm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Warm").field("report", &self.inner.report).finish()
    }
}

struct Warmer<'a> {
    guest: &'a Guest,
    clock: Clock,
    compile: Duration,
}

impl Warmer<'_> {
    fn blueprint(&self, compiled: &CompiledModule, plan: &Plan) -> Result<Blueprint, WarmError> {
        let Guest { engine, options, .. } = self.guest;
        Ok(Blueprint::new(engine, options, &compiled.module, plan, &self.clock)?)
    }

    /// The module compiled, with the time that it took counted.
    fn compile(&mut self, wasm: &[u8]) -> Result<CompiledModule, WarmError> {
        let started = Instant::now();
        let compiled = self.guest.engine.compile(wasm)?;
        self.compile += started.elapsed();
        Ok(compiled)
    }

    /// Runs the code that brings a new instance to its warm state, within `limits`, which the store
    /// has already.
    async fn run(
        &self,
        store: &mut impl AsyncStore,
        instance: Instance,
        preparation: &Preparation,
        warm_up: &WarmUp,
        limits: CallLimits,
    ) -> Result<(), WarmError> {
        let failed = |name: &str| {
            let name = name.to_owned();
            move |error| WarmError::Call { name, error }
        };
        let way = self.guest.call_path();
        for name in &preparation.first {
            call_dynamic(way, store, instance, name, &[], limits).await.map_err(failed(name))?;
        }
        for (name, arguments) in &warm_up.calls {
            let values = match arguments {
                Arguments::Values(values) => values.clone(),
                Arguments::Texts(texts) => match instance.get_func(&mut *store, name) {
                    Some(func) => {
                        let ty = func.ty(&*store);
                        parse_arguments(&ty, texts).map_err(|e| CallError::Arguments {
                            name: name.clone(),
                            expected: ty.to_string(),
                            reason: e.to_string(),
                        })
                    }
                    // The call itself reports the missing export.
                    None => Ok(Vec::new()),
                }
                .map_err(failed(name))?,
                Arguments::Bytes(input) => {
                    bytes_entry::warm_up(way, store, instance, name, input, limits)
                        .await
                        .map_err(failed(name))?;
                    continue;
                }
                Arguments::Component(_) => {
                    return Err(WarmError::State(format!(
                        "the warm-up call {name:?} has values of a component; this is a core module"
                    )));
                }
            };
            call_dynamic(way, store, instance, name, &values, limits)
                .await
                .map_err(failed(name))?;
        }
        Ok(())
    }

    /// Warms a guest whose state can be read out again.
    async fn warm(
        &mut self,
        blueprint: &Blueprint,
        preparation: &Preparation,
        warm_up: &WarmUp,
    ) -> Result<WarmedInstance, WarmError> {
        let memories = preparation
            .cold_memories(&self.guest.wasm, blueprint.stores.memory_limit)?
            .iter()
            .map(|m| GuestMemory::new(m.shape, &m.image, m.bytes, &blueprint.policy))
            .collect::<Result<Vec<_>, _>>()?;
        let mut store = blueprint.stores.make()?;
        let instance =
            blueprint.instantiate(&mut store, &memories).await.map_err(WarmError::Instantiate)?;
        // Values from the warm-up's calls, and values read below, must not stay rooted.
        let mut scope = RootScope::new(&mut store);
        let limits = blueprint.stores.limits.of_warm_up();
        limits.apply(&mut scope);
        self.run(&mut scope, instance, preparation, warm_up, limits).await?;
        blueprint.stores.unlimit(&mut scope);
        descriptors::check(scope.as_context_mut().data_mut())?;
        blueprint.stores.keep_files(scope.as_context_mut().data_mut());
        let mut warm = Vec::new();
        let mut sizes = Vec::new();
        let Plan { shapes, page_log2, .. } = &preparation.plan;
        for ((memory, &shape), log2) in memories.iter().zip(shapes).zip(page_log2) {
            let image = memory.slot().freeze_apart()?;
            let bytes = memory.bytes();
            sizes.push((bytes >> log2) as u64);
            warm.push(WarmMemory { shape, image, bytes });
        }
        let state = state::read(&mut scope, instance, &blueprint.visible, sizes)?;
        drop(scope);
        Ok(WarmedInstance { store, instance, memories, warm, state })
    }
}

/// The first instance, right after its warm-up, and the state that was read from it.
struct WarmedInstance {
    store: Store<Host>,
    instance: Instance,
    memories: Vec<Arc<GuestMemory>>,
    warm: Vec<WarmMemory>,
    state: WarmState,
}

impl Guest {
    /// Instantiates the module, runs the warm-up and keeps the resulting state.
    ///
    /// # Errors
    /// [`WarmError`], naming the missing part of the guest or the host.
    ///
    /// # Panics
    /// Within a task, for a guest with [`GuestOptions::asynchronous`]: see [`Guest::warm_async`].
    pub fn warm(&self, warm_up: WarmUp) -> Result<Warm, WarmError> {
        drive(self.call_path(), Warm::new(self, &warm_up))
    }

    /// As [`Guest::warm`], waiting for asynchronous host functions as a task does. Analysis and
    /// compilation block the thread.
    ///
    /// # Errors
    /// As [`Guest::warm`].
    pub async fn warm_async(&self, warm_up: WarmUp) -> Result<Warm, WarmError> {
        Warm::new(self, &warm_up).await
    }
}

impl Warm {
    pub(crate) async fn new(guest: &Guest, warm_up: &WarmUp) -> Result<Self, WarmError> {
        let options = &guest.options;
        let engine = &guest.engine;
        engine.keep_limits(options.timeout, options.fuel, options.watch.is_some())?;
        let started = Instant::now();
        let program = Program::new(engine, guest.wasm.clone());
        let mut warmer = Warmer { guest, clock: Clock::from(0), compile: Duration::ZERO };
        let kept = Preparation::load_cached(engine, &guest.wasm, &program.digest, options);
        let (mut preparation, prepared, mut compiled) = match kept {
            Some((preparation, compiled)) => (preparation, None, compiled),
            None => {
                let warms = !warm_up.calls.is_empty();
                let (preparation, prepared) = Preparation::make(&guest.wasm, options, warms)?;
                let compiled = engine.compile(&prepared.module)?;
                preparation.keep(engine, &program.digest, options, &compiled);
                // In fresh mode, and then alone: the warm state is baked into it.
                let prepared = (preparation.plan.mode == Mode::Fresh).then_some(prepared);
                (preparation, prepared, compiled)
            }
        };
        warmer.compile = started.elapsed();
        let mut blueprint = warmer.blueprint(&compiled, &preparation.plan)?;
        let started = Instant::now();
        let warmed = match preparation.plan.visible {
            None => None,
            Some(_) => {
                let warmed = warmer.warm(&blueprint, &preparation, warm_up).await?;
                match warmed.state.opaque() {
                    // Without a warm-up nothing is lost when each instance starts from the module.
                    Some(why) if warm_up.calls.is_empty() && options.mode != Mode::Reset => {
                        let (cold, prepared) =
                            Preparation::cold(&guest.wasm, options, why.to_string())?;
                        preparation = cold;
                        compiled = warmer.compile(&prepared.module)?;
                        blueprint = warmer.blueprint(&compiled, &preparation.plan)?;
                        None
                    }
                    Some(why) => return Err(WarmError::State(why.to_string())),
                    None => Some(warmed),
                }
            }
        };
        let plan = &preparation.plan;
        let (pools, cold) = match (warmed, prepared) {
            (None, _) => {
                let memories = preparation.cold_memories(&guest.wasm, options.memory_limit)?;
                let state = Box::new(FreshState { blueprint, memories, state: None });
                let pool = Pool::new(options.limits);
                // A first instance shows errors that every later lease would have.
                let first = pool.get(0, |_| state.make())?;
                drop(state.instantiate(&first, &LeaseOptions::new()).await?);
                drop(first);
                (Pools::Fresh { state, pool }, true)
            }
            (Some(warmed), None) => {
                let (digest, key) = (&program.digest, compiled.key.as_ref());
                plan.keep_warm(engine, digest, options, &warmed.state, key, &blueprint.module);
                let state =
                    Arc::new(ResetState { blueprint, memories: warmed.warm, state: warmed.state });
                for (memory, warm) in warmed.memories.iter().zip(&state.memories) {
                    memory.adopt(&warm.image)?;
                }
                let heap = warmed.store.gc_heap_capacity();
                let first = if heap > KEPT_HEAP || state.blueprint.stores.way != CallPath::Direct {
                    // The garbage of the warm-up, and its stack, would stay for as long as the
                    // instance does.
                    drop((warmed.store, warmed.memories));
                    state.make()?
                } else {
                    ResetInstance::adopt(&state, warmed.store, warmed.instance, warmed.memories)?
                };
                (Pools::reset(state, first, options.limits)?, false)
            }
            (Some(warmed), Some(prepared)) => {
                let baked =
                    bake(&prepared, &warmed.state).map_err(|e| WarmError::State(e.to_string()))?;
                drop(warmed.store);
                let files = blueprint.stores.files.clone();
                let compiled = warmer.compile(&baked)?;
                blueprint = warmer.blueprint(&compiled, plan)?;
                blueprint.stores.files = files;
                let (digest, key) = (&program.digest, compiled.key.as_ref());
                plan.keep_warm(engine, digest, options, &warmed.state, key, &blueprint.module);
                let state = Box::new(FreshState {
                    blueprint,
                    memories: warmed.warm,
                    state: Some(warmed.state),
                });
                (Pools::Fresh { state, pool: Pool::new(options.limits) }, false)
            }
        };
        let times = Times { compile: warmer.compile, warm_up: started.elapsed() };
        Self::finish(options, pools, cold, preparation.plan, times, program, warmer.clock.latest())
    }

    /// Puts a warm guest together.
    pub(crate) fn finish(
        options: &GuestOptions,
        pools: Pools,
        cold: bool,
        plan: Plan,
        times: Times,
        program: Program,
        read: u64,
    ) -> Result<Self, WarmError> {
        let strategy = options
            .strategy
            .choose(afresh_memory::Features::host(), options.host_access)
            .map_err(WarmError::Slot)?;
        let memories = pools.memories();
        let report = WarmReport {
            mode: plan.mode,
            why_fresh: plan.why_fresh,
            memory_bytes: memories.iter().map(|m| m.bytes).sum(),
            image_bytes: memories.iter().map(|m| m.image.stored_pages() * PAGE_SIZE).sum(),
            restored_items: plan.restored_items,
            compile: times.compile,
            warm_up: times.warm_up,
            strategy: format!("{} ({})", strategy.strategy, strategy.reason),
            reseeds: false,
        };
        let module = pools.blueprint().pre.module();
        let mut exports = HashMap::new();
        for export in module.exports() {
            let name = export.name();
            let Some(ty) = export.ty().func().cloned() else { continue };
            if name.starts_with(names::PREFIX) {
                continue;
            }
            if let Some(export) = module.get_export_index(name) {
                let root = options.roots.allow(name);
                exports.insert(name.to_owned(), Callable { export, ty, root });
            }
        }
        if let Roots::Named(roots) = &options.roots
            && let Some(name) = roots.iter().find(|name| !exports.contains_key(*name))
        {
            let mut available: Vec<String> = exports.into_keys().collect();
            available.sort_unstable();
            let error = AnalyzeError::NoSuchRoot { name: name.clone(), available };
            return Err(LoadError::from(error).into());
        }
        let initialize = cold && exports.contains_key(INITIALIZE);
        let memory = module.get_export_index(&names::memory(0));
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let blueprint = pools.blueprint();
        let (limits, way) = (blueprint.stores.limits, blueprint.stores.way);
        let mut inner = Inner {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            exports,
            memory,
            pools,
            initialize,
            limits,
            way,
            reseed: None,
            entries: Mutex::default(),
            report,
            program,
            read,
        };
        if inner.exports.contains_key(names::RESEED) {
            let hook = inner
                .entry(names::RESEED)
                .map_err(|error| WarmError::Call { name: names::RESEED.to_owned(), error })?;
            inner.reseed = Some(hook);
            inner.report.reseeds = true;
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Compares the next idle instance of the pool with the warm state, before it takes fresh
    /// entropy: bytes of memory that differ, and other items that do. Both must be 0.
    ///
    /// # Errors
    /// [`WarmError`] when the pool is exhausted or the state cannot be read.
    pub fn differences(&self) -> Result<(usize, usize), WarmError> {
        Ok(self.compare()?.counts())
    }

    /// As [`Warm::differences`], with the differing parts and those that were not compared.
    ///
    /// # Errors
    /// As [`Warm::differences`].
    pub fn compare(&self) -> Result<Comparison, WarmError> {
        match &self.inner.pools {
            Pools::Reset { state, pool } => pool.get(0, |_| state.make())?.compare(),
            Pools::Fresh { state, pool } => pool.get(0, |_| state.make())?.compare(),
        }
    }

    /// A handle for typed calls of one export. The first call checks the signature.
    ///
    /// # Errors
    /// [`CallError::NoSuchExport`].
    pub fn entry<P, R>(&self, name: &str) -> Result<Entry<P, R>, CallError>
    where
        P: WasmParams + 'static,
        R: WasmResults + 'static,
    {
        self.inner.entry(name)
    }

    /// The type of an exported function.
    ///
    /// # Errors
    /// [`CallError::NoSuchExport`].
    pub fn function_type(&self, name: &str) -> Result<FuncType, CallError> {
        Ok(self.inner.export(name)?.ty.clone())
    }

    /// The report of the warm-up.
    #[must_use]
    pub fn report(&self) -> &WarmReport {
        &self.inner.report
    }

    /// The strategy that resets its memories, never [`Strategy::Auto`].
    #[must_use]
    pub fn strategy(&self) -> Strategy {
        self.inner.pools.blueprint().policy.chosen()
    }

    /// The counters of its pool.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        match &self.inner.pools {
            Pools::Reset { pool, .. } => pool.stats(),
            Pools::Fresh { pool, .. } => pool.stats(),
        }
    }

    /// The number of replaced instances, and of resets that had to shrink a memory, because a call
    /// had grown a table or memory.
    #[must_use]
    pub fn growth_stats(&self) -> (u64, u64) {
        let blueprint = self.inner.pools.blueprint();
        (blueprint.replaced.load(Ordering::Relaxed), blueprint.shrunk.load(Ordering::Relaxed))
    }

    /// Returns memory of instances that were idle for `ticks` calls of this method to the host.
    pub fn trim_idle(&self, ticks: u64) -> usize {
        match &self.inner.pools {
            Pools::Reset { pool, .. } => pool.trim_idle(ticks),
            Pools::Fresh { pool, .. } => pool.trim_idle(ticks),
        }
    }
}

impl Inner {
    fn export(&self, name: &str) -> Result<&Callable, CallError> {
        self.exports.get(name).ok_or_else(|| CallError::NoSuchExport {
            name: name.to_owned(),
            available: self.names(|_| true),
        })
    }

    /// An export that calls may name.
    pub(crate) fn callable(&self, name: &str) -> Result<&Callable, CallError> {
        let callable = self.export(name)?;
        if !callable.root {
            let roots = self.names(|callable| callable.root);
            return Err(CallError::NotARoot { name: name.to_owned(), roots });
        }
        Ok(callable)
    }

    /// The names of the exported functions that are `wanted`.
    fn names(&self, wanted: impl Fn(&Callable) -> bool) -> String {
        let wanted = self.exports.iter().filter(|(_, callable)| wanted(callable));
        join_names(wanted.map(|(name, _)| name.clone()).collect())
    }

    fn entry<P, R>(&self, name: &str) -> Result<Entry<P, R>, CallError>
    where
        P: WasmParams + 'static,
        R: WasmResults + 'static,
    {
        let callable = self.callable(name)?;
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let next = entries.len();
        let number = *entries.entry((name.to_owned(), TypeId::of::<(P, R)>())).or_insert(next);
        Ok(Entry::new(name, callable.export, number, self.id))
    }
}
