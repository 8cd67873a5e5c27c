//! A hook on calls: a function of the embedder that is called whenever the guest is entered or
//! left, and may end the call.
//!
//! Promises: it gets the events of the guest itself, by wasmtime's names and on the thread that
//! runs the guest: calls, those of a warm-up, and the start of a cold instance. The engine's own
//! code that saves, restores or reads an instance causes no event. May break it: such code that is
//! entered without [`Stores::unlimit`](crate::call::stores::Stores::unlimit) before it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use wasmtime::{CallHook, Store};

use crate::host::Host;

type HookFunction = dyn Fn(&mut Host, CallHook) -> wasmtime::Result<()> + Send + Sync;

/// A callback for each entry of a guest call into Wasm and each exit from it. The default has no
/// callback, and costs nothing.
///
/// An error ends the call as an error of a host function does, with [`crate::CallError::Host`]
/// unless it is a [`Trap`](wasmtime::Trap), and the instance is treated as after every failed call.
/// An error at the end of the call replaces its result. A hook that panics ends the call with an
/// error.
#[derive(Clone, Default)]
pub struct Hook(Option<Arc<HookFunction>>);

impl Hook {
    /// A hook with access to the host state of the call ([`Host::state`], [`Host::data`]). A call
    /// of a host function, or of the runtime, as when a memory grows, is reported as
    /// [`CallHook::CallingHost`] and [`CallHook::ReturningFromHost`].
    pub fn new(
        tell: impl Fn(&mut Host, CallHook) -> wasmtime::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(tell)))
    }

    /// Registers the hook as the call hook of `store`.
    pub(crate) fn set(&self, store: &mut Store<Host>) {
        let Some(tell) = self.0.clone() else { return };
        store.call_hook(move |mut store, what| {
            let host = store.data_mut();
            if !host.is_guests() {
                return Ok(());
            }
            // wasmtime would lose a hook that unwinds, and later calls would go untold.
            catch_unwind(AssertUnwindSafe(|| tell(host, what)))
                .unwrap_or_else(|_| Err(wasmtime::Error::msg("the embedder's call hook panicked")))
        });
    }
}

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Hook").field(&self.0.is_some()).finish()
    }
}
