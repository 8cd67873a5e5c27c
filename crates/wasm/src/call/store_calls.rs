//! Calls into a store, by the path of its guest.

use wasmtime::component::{self, ComponentNamedList, Lift, Lower};
use wasmtime::{
    AsContextMut, Func, Instance, InstancePre, Store, TypedFunc, Val, WasmParams, WasmResults,
};

use crate::engine::call_path::{CallPath, now};
use crate::host::Host;

/// A store that a fiber may be put aside with.
pub(crate) trait AsyncStore: AsContextMut<Data = Host> + Send {}

impl<S: AsContextMut<Data = Host> + Send> AsyncStore for S {}

impl CallPath {
    pub(crate) async fn instantiate(
        self,
        pre: &InstancePre<Host>,
        store: &mut Store<Host>,
    ) -> wasmtime::Result<Instance> {
        match self {
            CallPath::Direct => pre.instantiate(store).map_err(explain),
            CallPath::Deep | CallPath::Fiber => pre.instantiate_async(store).await,
        }
    }

    pub(crate) async fn instantiate_component(
        self,
        pre: &component::InstancePre<Host>,
        store: &mut Store<Host>,
    ) -> wasmtime::Result<component::Instance> {
        match self {
            CallPath::Direct => pre.instantiate(store).map_err(explain),
            CallPath::Deep | CallPath::Fiber => pre.instantiate_async(store).await,
        }
    }

    pub(crate) async fn call(
        self,
        func: Func,
        store: &mut impl AsyncStore,
        arguments: &[Val],
        results: &mut [Val],
    ) -> wasmtime::Result<()> {
        match self {
            CallPath::Direct => func.call(store, arguments, results),
            CallPath::Deep | CallPath::Fiber => func.call_async(store, arguments, results).await,
        }
    }

    pub(crate) async fn call_component(
        self,
        func: component::Func,
        store: &mut Store<Host>,
        arguments: &[component::Val],
        results: &mut [component::Val],
    ) -> wasmtime::Result<()> {
        match self {
            CallPath::Direct => func.call(store, arguments, results),
            CallPath::Deep | CallPath::Fiber => func.call_async(store, arguments, results).await,
        }
    }

    /// Calls one of our functions, which waits for nothing.
    #[inline]
    pub(crate) fn call_now<P, R>(
        self,
        func: &TypedFunc<P, R>,
        store: &mut impl AsyncStore,
        params: P,
    ) -> wasmtime::Result<R>
    where
        P: WasmParams + Sync,
        R: WasmResults + Sync,
    {
        match self {
            CallPath::Direct => func.call(store, params),
            CallPath::Deep | CallPath::Fiber => now(func.call_async(store, params)),
        }
    }

    /// As [`CallPath::call_now`], in a component.
    pub(crate) fn call_component_now<P, R>(
        self,
        func: &component::TypedFunc<P, R>,
        store: &mut Store<Host>,
        params: P,
    ) -> wasmtime::Result<R>
    where
        P: ComponentNamedList + Lower + Send + Sync,
        R: ComponentNamedList + Lift + Send + Sync + 'static,
    {
        match self {
            CallPath::Direct => func.call(store, params),
            CallPath::Deep | CallPath::Fiber => now(func.call_async(store, params)),
        }
    }
}

/// Part of the error that wasmtime returns for a plain call into a store with asynchronous imports.
pub(crate) const ASYNCHRONOUS: &str = "`*_async` functions";

/// Explains why a guest cannot be instantiated by a plain call.
fn explain(error: wasmtime::Error) -> wasmtime::Error {
    if error.to_string().contains(ASYNCHRONOUS) {
        return wasmtime::Error::msg(
            "one of its host functions is asynchronous, which `GuestOptions::asynchronous` has to allow",
        );
    }
    error
}
