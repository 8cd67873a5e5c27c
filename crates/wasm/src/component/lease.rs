//! Leases of components: calls of the exports of one new instance.
//!
//! Promises: an instance is the lease's own, store and all, and ends with it; a call that was
//! dropped in the middle is the last that its lease makes.

use std::sync::Arc;

use afresh_pool::Lease as PoolLease;
use afresh_rewrite::{Roots, names};
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{ComponentExportIndex, Func, Instance, InstancePre, Type, Val};
use wasmtime::{AsContextMut, Store, StoreContextMut, Trap};

use crate::call::dynamic::{call_error, start_error};
use crate::call::lease_options::{CallOptions, LeaseLimits, LeaseOptions};
use crate::call::stores::CallLimits;
use crate::call::values::{read_component_value, show_component_value};
use crate::component::shared::SharedComponent;
use crate::engine::call_path::{CallPath, drive};
use crate::engine::linear::{GuestMemory, MemoryOwner, check_loss, with_memories};
use crate::error::join_names;
use crate::host::Host;
use crate::host::uniqueness::{entropy, next_generation};
use crate::warm::compare::Comparison;
use crate::warm::fresh::FreshMemories;
use crate::{CallError, LoadError, StopHandle, WarmError};

/// A fresh instance of a component.
pub struct ComponentLease<'a> {
    /// Dropped before the memories come back to their pool.
    pub(crate) store: Store<Host>,
    pub(crate) instance: Instance,
    pub(crate) memories: PoolLease<'a, FreshMemories>,
    pub(crate) warm: &'a SharedComponent,
    /// The limits of each of its calls.
    pub(crate) limits: CallLimits,
    /// A call has begun and is not over: its future runs or was dropped, or a host function
    /// panicked.
    pub(crate) unfinished: bool,
    /// A call failed after it had begun.
    pub(crate) cut_short: bool,
    /// The guest of an owned lease, dropped after everything that borrows from it.
    pub(crate) keep: Option<Arc<SharedComponent>>,
}

/// A lease that owns a reference to its component, and can move to other threads and tasks; see
/// [`crate::WarmComponent::lease_owned`].
pub type OwnedComponentLease = ComponentLease<'static>;

impl std::fmt::Debug for ComponentLease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ComponentLease").field("host", self.store.data()).finish()
    }
}

/// Calls exports of one instance.
pub(crate) struct Caller<'a> {
    pub(crate) pre: &'a InstancePre<Host>,
    pub(crate) store: &'a mut Store<Host>,
    pub(crate) instance: Instance,
    pub(crate) limits: CallLimits,
    pub(crate) way: CallPath,
    /// The exports that may be called.
    pub(crate) roots: &'a Roots,
    /// Set by a call that fails after its arguments were counted.
    pub(crate) cut_short: &'a mut bool,
}

impl Caller<'_> {
    pub(crate) async fn call(
        &mut self,
        name: &str,
        arguments: &[Val],
    ) -> Result<Vec<Val>, CallError> {
        let func = self.function(name)?;
        self.call_function(name, func, arguments).await
    }

    pub(crate) async fn call_text(
        &mut self,
        name: &str,
        texts: &[String],
    ) -> Result<String, CallError> {
        let func = self.function(name)?;
        let ty = func.ty(&*self.store);
        let wanted: Vec<Type> = ty.params().map(|(_, ty)| ty).collect();
        let wrong = |reason: String| CallError::Arguments {
            name: name.to_owned(),
            expected: format!("{} parameters", wanted.len()),
            reason,
        };
        if wanted.len() != texts.len() {
            return Err(wrong(format!("{} given", texts.len())));
        }
        let arguments = wanted
            .iter()
            .zip(texts)
            .map(|(ty, text)| {
                read_component_value(ty, text)
                    .ok_or_else(|| wrong(format!("`{text}` cannot be read as {ty:?}")))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let results = self.call_function(name, func, &arguments).await?;
        Ok(results.iter().map(show_component_value).collect::<Vec<_>>().join(" "))
    }

    fn function(&mut self, name: &str) -> Result<Func, CallError> {
        let pre = self.pre;
        let missing = || CallError::NoSuchExport {
            name: name.to_owned(),
            available: join_names(functions(pre)),
        };
        if let Roots::Named(roots) = self.roots
            && !roots.iter().any(|root| root == name)
            && functions(pre).iter().any(|function| function == name)
        {
            let roots = join_names(roots.clone());
            return Err(CallError::NotARoot { name: name.to_owned(), roots });
        }
        let function = match name.split_once('#') {
            None => name,
            Some((_, function)) => function,
        };
        let parent = match name.split_once('#') {
            None => None,
            Some((interface, _)) => Some(
                self.instance
                    .get_export_index(&mut *self.store, None, interface)
                    .ok_or_else(missing)?,
            ),
        };
        let export = self
            .instance
            .get_export_index(&mut *self.store, parent.as_ref(), function)
            .ok_or_else(missing)?;
        self.instance.get_func(&mut *self.store, export).ok_or_else(missing)
    }

    async fn call_function(
        &mut self,
        name: &str,
        func: Func,
        arguments: &[Val],
    ) -> Result<Vec<Val>, CallError> {
        let ty = func.ty(&*self.store);
        if ty.params().len() != arguments.len() {
            return Err(CallError::Arguments {
                name: name.to_owned(),
                expected: format!("{} parameters", ty.params().len()),
                reason: format!("{} given", arguments.len()),
            });
        }
        let mut results = vec![Val::Bool(false); ty.results().len()];
        self.limits.apply(&mut *self.store);
        let cut_before = *self.cut_short;
        let result = self.way.call_component(func, self.store, arguments, &mut results).await;
        *self.cut_short |= result.is_err();
        if let Some(cause) = self.store.data().loss() {
            return Err(CallError::Memory(cause));
        }
        if let Some(failure) = self.store.data().failure() {
            return Err(CallError::Wasi(failure.to_owned()));
        }
        match result.map_err(|error| call_error(error, self.limits)) {
            Ok(()) => Ok(results),
            // wasmtime lets nothing into a store in which a call trapped.
            Err(CallError::Trap { trap: Trap::CannotEnterComponent, .. }) if cut_before => {
                Err(CallError::CutOff)
            }
            Err(error) => Err(error),
        }
    }
}

impl<'a> ComponentLease<'a> {
    /// Takes a new instance of a component.
    pub(crate) async fn begin(
        warm: &'a SharedComponent,
        options: &LeaseOptions,
    ) -> Result<Self, WarmError> {
        let memories = warm.take_memories(options)?;
        Self::prepare(warm, memories, options).await
    }

    /// Makes an instance over `memories`, and runs the component's own code for a new clone.
    pub(crate) async fn prepare(
        warm: &'a SharedComponent,
        memories: PoolLease<'a, FreshMemories>,
        options: &LeaseOptions,
    ) -> Result<Self, WarmError> {
        let limits = options.limits(&warm.stores)?;
        let mut store = warm.stores.make()?;
        options.apply(store.data_mut());
        store.data_mut().set_generation(next_generation());
        store.data_mut().set_memories(&memories.memories);
        // Start functions that run in every instance are calls of the guest.
        if warm.rerun_reason.is_some() {
            limits.of_start().apply(&mut store);
        }
        let instantiate = warm.stores.way.instantiate_component(&warm.pre, &mut store);
        let instance = with_memories(&memories.memories, MemoryOwner::Component, instantiate)
            .await
            .map_err(|error| start_error(error, limits))?;
        store.data_mut().end_instantiation();
        warm.stores.unlimit(&mut store);
        check_loss(&memories.memories)?;
        let mut lease = Self {
            store,
            instance,
            memories,
            warm,
            limits,
            unfinished: false,
            cut_short: false,
            keep: None,
        };
        if let Some(export) = &warm.reseed {
            let failed =
                |error| WarmError::Call { name: names::RESEED_COMPONENT.to_owned(), error };
            lease.reseed(export).await.map_err(failed)?;
        }
        Ok(lease)
    }
}

impl ComponentLease<'_> {
    fn caller(&mut self) -> Caller<'_> {
        Caller {
            pre: &self.warm.pre,
            store: &mut self.store,
            instance: self.instance,
            limits: self.limits,
            way: self.warm.stores.way,
            roots: &self.warm.roots,
            cut_short: &mut self.cut_short,
        }
    }

    /// Calls the component's export that takes fresh entropy.
    pub(crate) async fn reseed(&mut self, export: &ComponentExportIndex) -> Result<(), CallError> {
        let name = names::RESEED_COMPONENT;
        let missing =
            || CallError::NoSuchExport { name: name.to_owned(), available: String::new() };
        let func = self.instance.get_func(&mut self.store, export).ok_or_else(missing)?;
        let (lo, hi) = entropy();
        let words = [Val::U64(lo.cast_unsigned()), Val::U64(hi.cast_unsigned())];
        self.caller().call_function(name, func, &words).await.map(drop)
    }

    /// Refuses a call that waits where none may, a plain one where they wait, and one after a call
    /// that was cut off.
    fn check_call(&self, waits: bool) -> Result<(), CallError> {
        match (self.warm.stores.way.waits(), waits) {
            (true, false) => Err(CallError::Asynchronous),
            (false, true) => Err(CallError::Synchronous),
            _ => self.check_memory(),
        }
        .and_then(|()| if self.unfinished { Err(CallError::CutOff) } else { Ok(()) })
    }

    /// Fails if a call touched a lost page of a lazily opened snapshot. Every further call fails
    /// then. For calls through [`ComponentLease::lazy_bindings`].
    ///
    /// # Errors
    /// [`CallError::Memory`], with the page and the reason.
    pub fn check_memory(&self) -> Result<(), CallError> {
        self.store.data().loss().map_or(Ok(()), |cause| Err(CallError::Memory(cause)))
    }

    /// Calls an exported function of the component's world by name, or a function of an exported
    /// interface by `interface#function`.
    ///
    /// # Errors
    /// [`CallError`]. [`CallError::CutOff`] after a call that trapped, or in which a host function
    /// failed or panicked.
    pub fn call(&mut self, name: &str, arguments: &[Val]) -> Result<Vec<Val>, CallError> {
        self.check_call(false)?;
        // It stays so where a host function panics, and the embedder catches that.
        self.unfinished = true;
        let result = drive(CallPath::Direct, self.caller().call(name, arguments));
        self.unfinished = false;
        result
    }

    /// As [`ComponentLease::call`], for a guest with [`crate::GuestOptions::asynchronous`].
    ///
    /// # Errors
    /// As [`ComponentLease::call`]; [`CallError::CutOff`] when the future of an earlier call was
    /// dropped before it was over.
    pub async fn call_async(
        &mut self,
        name: &str,
        arguments: &[Val],
    ) -> Result<Vec<Val>, CallError> {
        self.check_call(true)?;
        self.unfinished = true;
        let result = self.caller().call(name, arguments).await;
        self.unfinished = false;
        result
    }

    /// Like [`ComponentLease::call`], with arguments as text (numbers, `true`, `false`, characters
    /// and strings) and the results as text.
    ///
    /// # Errors
    /// As [`ComponentLease::call`]; parameters of other types cannot be given as text.
    pub fn call_text(&mut self, name: &str, texts: &[String]) -> Result<String, CallError> {
        self.check_call(false)?;
        self.unfinished = true;
        let result = drive(CallPath::Direct, self.caller().call_text(name, texts));
        self.unfinished = false;
        result
    }

    /// As [`ComponentLease::call_text`], for a guest with [`crate::GuestOptions::asynchronous`].
    ///
    /// # Errors
    /// As [`ComponentLease::call_text`] and [`ComponentLease::call_async`].
    pub async fn call_text_async(
        &mut self,
        name: &str,
        texts: &[String],
    ) -> Result<String, CallError> {
        self.check_call(true)?;
        self.unfinished = true;
        let result = self.caller().call_text(name, texts).await;
        self.unfinished = false;
        result
    }

    /// As [`crate::Lease::is_asynchronous`].
    #[must_use]
    pub fn is_asynchronous(&self) -> bool {
        self.warm.stores.way.waits()
    }

    /// As [`crate::Lease::is_cut_short`].
    #[must_use]
    pub fn is_cut_short(&self) -> bool {
        self.unfinished || self.cut_short || self.store.data().has_lost()
    }

    /// As [`crate::Lease::memory_bytes`].
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.memories.memories.iter().map(|memory| memory.bytes()).sum()
    }

    /// As [`crate::Lease::dirty_pages`].
    ///
    /// # Errors
    /// [`WarmError`] when the memory cannot be read.
    pub fn dirty_pages(&mut self) -> Result<usize, WarmError> {
        let count = |memory: &Arc<GuestMemory>| {
            memory.dirty_pages().map_err(|error| WarmError::State(error.to_string()))
        };
        self.memories.memories.iter().map(count).sum()
    }

    /// A handle that stops the calls of this lease from another thread.
    #[must_use]
    pub fn stop_handle(&mut self) -> StopHandle {
        self.host_mut().stop_handle()
    }

    /// As [`crate::Lease::set_limits`].
    ///
    /// # Errors
    /// [`LoadError::Limit`] for a limit that the engine was not set up to keep; nothing is changed.
    pub fn set_limits(&mut self, options: &CallOptions) -> Result<LeaseLimits, LoadError> {
        let set = self.warm.stores.limits_over(options, self.limits)?;
        Ok(LeaseLimits(self.replace_limits(set)))
    }

    /// Sets limits that the lease had before.
    pub fn restore_limits(&mut self, limits: LeaseLimits) {
        self.replace_limits(limits.0);
    }

    /// Sets `limits`, lifts the fuel and deadline of the last call, and returns the limits before.
    fn replace_limits(&mut self, limits: CallLimits) -> CallLimits {
        self.warm.stores.unlimit(&mut self.store);
        std::mem::replace(&mut self.limits, limits)
    }

    /// Drops the instance. The end of a lease does the same, because each lease has a new instance.
    pub fn discard(self) {}

    /// The call's host state.
    #[must_use]
    pub fn host(&self) -> &Host {
        self.store.data()
    }

    /// The call's host state, to set values for the embedder's host functions.
    pub fn host_mut(&mut self) -> &mut Host {
        self.store.data_mut()
    }

    /// Its store and instance, for code generated by `wasmtime::component::bindgen!`. Call it
    /// before each call, because it sets the limits of one call. It waits until all memory of a
    /// lazily opened snapshot has arrived.
    ///
    /// # Errors
    /// [`CallError::Memory`] when a page is lost.
    pub fn bindings(&mut self) -> Result<(StoreContextMut<'_, Host>, Instance), CallError> {
        for memory in &self.memories.memories {
            memory.complete().map_err(|error| CallError::Memory(error.to_string()))?;
        }
        Ok(self.lazy_bindings())
    }

    /// As [`ComponentLease::bindings`], while pages of a lazily opened snapshot are missing. Call
    /// [`ComponentLease::check_memory`] after each call, and before its results are used.
    pub fn lazy_bindings(&mut self) -> (StoreContextMut<'_, Host>, Instance) {
        self.limits.apply(&mut self.store);
        (self.store.as_context_mut(), self.instance)
    }

    /// Translates the failure of a call that was made through [`ComponentLease::bindings`].
    #[must_use]
    pub fn explain(&self, error: wasmtime::Error) -> CallError {
        if let Err(lost) = self.check_memory() {
            return lost;
        }
        match self.store.data().failure() {
            Some(failure) => CallError::Wasi(failure.to_owned()),
            None => call_error(error, self.limits),
        }
    }

    /// Bytes of component memories that differ from its initial state.
    ///
    /// # Errors
    /// [`WarmError`] when the memory cannot be read.
    pub fn differences(&mut self) -> Result<usize, WarmError> {
        Ok(self.compare()?.bytes)
    }

    /// Differences from the component's initial state. Only memory is compared, because everything
    /// else is made anew.
    ///
    /// # Errors
    /// As [`ComponentLease::differences`].
    pub fn compare(&mut self) -> Result<Comparison, WarmError> {
        self.memories.compare()
    }
}

/// The functions that a component exports, as [`ComponentLease::call`] names them.
pub(crate) fn functions(pre: &InstancePre<Host>) -> Vec<String> {
    let ty = pre.component().component_type();
    let mut names = Vec::new();
    for (name, item) in ty.exports(pre.engine()).filter(|(name, _)| *name != names::STATE) {
        match item.ty {
            ComponentItem::ComponentFunc(_) => names.push(name.to_owned()),
            ComponentItem::ComponentInstance(interface) => {
                let functions = interface
                    .exports(pre.engine())
                    .filter(|(_, item)| matches!(item.ty, ComponentItem::ComponentFunc(_)))
                    .map(|(function, _)| format!("{name}#{function}"));
                names.extend(functions);
            }
            _ => {}
        }
    }
    names
}
