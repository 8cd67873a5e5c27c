//! A watch over calls: a function of the embedder's that is asked, while a call runs, whether it may go on.
//!
//! What it promises: it is asked at every tick of the epoch, 5 ms unless the embedder says otherwise, on the thread that
//! runs the guest, and a call that may not go on ends before the guest's next loop or function. What may break it: a
//! host function that takes long, during which nobody asks.

use std::sync::Arc;
use std::time::Instant;

use wasmtime::{StoreContextMut, Trap, UpdateDeadline};

use crate::host::Host;

type Ask = dyn Fn(&mut Host) -> bool + Send + Sync;

/// Asked, while a call or a module's warm-up runs, whether it may go on. The default is nobody.
///
/// Needs [`crate::EngineConfig::timeouts`]. A call that is ended fails with [`crate::CallError::Stopped`].
#[derive(Clone, Default)]
pub struct Watch(Option<Arc<Ask>>);

impl Watch {
    /// A watch that ends a call by `false`. It finds the state of the call in its host state
    /// ([`Host::data`], [`Host::state`]), and is asked on the thread that runs the guest.
    pub fn new(ask: impl Fn(&mut Host) -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(ask)))
    }

    /// Whether anybody is asked.
    #[must_use]
    pub fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the call that `host` belongs to may go on.
    pub(crate) fn allows(&self, host: &mut Host) -> bool {
        self.0.as_ref().is_none_or(|ask| ask(host))
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Watch").field(&self.0.is_some()).finish()
    }
}

/// How a call ends that the watch ended.
#[derive(Debug, thiserror::Error)]
#[error("the embedder's watch ended the call")]
pub(crate) struct Stopped;

/// What happens at a tick of a call that is watched, or that gives way.
pub(crate) fn look(
    mut store: StoreContextMut<'_, Host>,
    gives_way: bool,
) -> wasmtime::Result<UpdateDeadline> {
    let host = store.data_mut();
    let over = match gives_way {
        true => !host.take_turn(),
        false => host.until().is_some_and(|until| Instant::now() >= until),
    };
    if over {
        return Err(Trap::Interrupt.into());
    }
    let watch = host.watch();
    match watch.allows(host) {
        false => Err(Stopped.into()),
        true if gives_way => Ok(UpdateDeadline::Yield(1)),
        true => Ok(UpdateDeadline::Continue(1)),
    }
}
