//! How the code of a guest is entered: as a plain call, or on a fiber that may wait.
//!
//! wasmtime refuses plain calls into a store whose imports are asynchronous, whoever makes them. So what the
//! engine itself runs in an instance, to bring it back, goes the guest's way, too; it calls no host function,
//! and is over when it was polled once.
//!
//! What it promises: a guest whose calls are synchronous has no fiber, unless its engine allows it more stack
//! than threads have. What may break it: a wasmtime whose `call_async` yields of itself; then restoring fails,
//! and the instance is dropped.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use wasmtime::component::{self, ComponentNamedList, Lift, Lower};
use wasmtime::{
    AsContextMut, Func, Instance, InstancePre, Store, TypedFunc, Val, WasmParams, WasmResults,
};

use crate::host::Host;

/// How code is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By a call on the thread's own stack.
    Direct,
    /// The same, on a larger stack than a thread need have; nothing waits.
    Deep,
    /// On a stack of its own, which is put aside while a host function waits.
    Fiber,
}

/// A store that a fiber may be put aside with.
pub(crate) trait Held: AsContextMut<Data = Host> + Send {}

impl<S: AsContextMut<Data = Host> + Send> Held for S {}

impl Way {
    /// That of a guest which waits or not, on an engine that allows it a deep stack or not.
    pub(crate) fn of(asynchronous: bool, deep: bool) -> Self {
        match (asynchronous, deep) {
            (true, _) => Way::Fiber,
            (false, true) => Way::Deep,
            (false, false) => Way::Direct,
        }
    }

    /// Whether calls may wait.
    pub(crate) fn waits(self) -> bool {
        self == Way::Fiber
    }

    pub(crate) async fn instantiate(
        self,
        pre: &InstancePre<Host>,
        store: &mut Store<Host>,
    ) -> wasmtime::Result<Instance> {
        match self {
            Way::Direct => pre.instantiate(store).map_err(explained),
            Way::Deep | Way::Fiber => pre.instantiate_async(store).await,
        }
    }

    pub(crate) async fn instantiate_component(
        self,
        pre: &component::InstancePre<Host>,
        store: &mut Store<Host>,
    ) -> wasmtime::Result<component::Instance> {
        match self {
            Way::Direct => pre.instantiate(store).map_err(explained),
            Way::Deep | Way::Fiber => pre.instantiate_async(store).await,
        }
    }

    pub(crate) async fn call(
        self,
        func: Func,
        store: &mut impl Held,
        arguments: &[Val],
        results: &mut [Val],
    ) -> wasmtime::Result<()> {
        match self {
            Way::Direct => func.call(store, arguments, results),
            Way::Deep | Way::Fiber => func.call_async(store, arguments, results).await,
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
            Way::Direct => func.call(store, arguments, results),
            Way::Deep | Way::Fiber => func.call_async(store, arguments, results).await,
        }
    }

    /// Calls a function of ours, which waits for nothing.
    #[inline]
    pub(crate) fn call_now<P, R>(
        self,
        func: &TypedFunc<P, R>,
        store: &mut impl Held,
        params: P,
    ) -> wasmtime::Result<R>
    where
        P: WasmParams + Sync,
        R: WasmResults + Sync,
    {
        match self {
            Way::Direct => func.call(store, params),
            Way::Deep | Way::Fiber => now(func.call_async(store, params)),
        }
    }

    /// As [`Way::call_now`], in a component.
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
            Way::Direct => func.call(store, params),
            Way::Deep | Way::Fiber => now(func.call_async(store, params)),
        }
    }
}

/// What wasmtime says of a plain call into a store with asynchronous imports.
pub(crate) const ASYNCHRONOUS: &str = "`*_async` functions";

/// What it means that a guest cannot be instantiated by a plain call.
fn explained(error: wasmtime::Error) -> wasmtime::Error {
    if error.to_string().contains(ASYNCHRONOUS) {
        return wasmtime::Error::msg(
            "one of its host functions is asynchronous, which `GuestOptions::asynchronous` has to allow",
        );
    }
    error
}

/// What a future gives without waiting; none, and it is dropped, where it would wait.
pub(crate) fn poll_once<F: Future>(future: F) -> Option<F::Output> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// As [`poll_once`], where waiting is a failure.
pub(crate) fn now<T>(future: impl Future<Output = wasmtime::Result<T>>) -> wasmtime::Result<T> {
    poll_once(future)
        .unwrap_or_else(|| Err(wasmtime::Error::msg("it waits for a host function, and may not")))
}

/// Runs a future to its end on this thread. Only one that goes [`Way::Fiber`] waits, and may need a runtime,
/// which this thread must not be a task of.
pub(crate) fn drive<F: Future>(way: Way, future: F) -> F::Output {
    match way {
        Way::Direct | Way::Deep => poll_once(future)
            .unwrap_or_else(|| unreachable!("nothing waits that calls no asynchronous function")),
        Way::Fiber => wasmtime_wasi::runtime::in_tokio(future),
    }
}
