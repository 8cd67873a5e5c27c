//! The sandboxes of one server, by their names.
//!
//! Promises: no more sandboxes exist than there are places. A closed one has its place until its
//! call has ended, because it has its memory until then.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{
    Mutex as CallMutex, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore, TryAcquireError,
};
use tokio_util::sync::CancellationToken;

use crate::arguments::MAIN;
use crate::sandbox::{Sandbox, SandboxError};
use crate::server::Config;
use crate::state_memory::StateMemory;

/// A sandbox with its place, which is free once no call uses it.
pub(crate) struct PlacedSandbox {
    pub(crate) sandbox: Sandbox,
    _place: OwnedSemaphorePermit,
}

/// A sandbox, which runs one call at a time.
#[derive(Clone)]
struct SharedSandbox {
    sandbox: Arc<CallMutex<PlacedSandbox>>,
    /// Ends its calls once it is closed.
    closed: CancellationToken,
}

/// A sandbox that a call uses.
pub(crate) struct EnteredSandbox {
    pub(crate) guard: OwnedMutexGuard<PlacedSandbox>,
    /// Ready once the sandbox is closed.
    pub(crate) closed: CancellationToken,
}

/// The sandboxes of a server.
pub(crate) struct Registry {
    pub(crate) config: Config,
    state: Mutex<RegistryState>,
    places: Arc<Semaphore>,
    memory: Arc<StateMemory>,
}

#[derive(Default)]
struct RegistryState {
    sandboxes: BTreeMap<String, SharedSandbox>,
    /// Sandboxes that were ever named.
    count: u64,
}

/// Places for sandboxes that are being made. Those left when it is dropped are free again.
pub(crate) struct Reservation {
    registry: Arc<Registry>,
    places: OwnedSemaphorePermit,
}

impl Reservation {
    /// Names the new sandboxes. They are at most as many as the places.
    pub(crate) fn fill(mut self, new: Vec<Sandbox>) -> Vec<String> {
        let mut names = Vec::with_capacity(new.len());
        for sandbox in new {
            let Some(place) = self.places.split(1) else {
                debug_assert!(false, "each sandbox has a place");
                break;
            };
            names.push(self.registry.add(sandbox, place));
        }
        names
    }
}

impl Registry {
    /// A registry with the sandbox [`MAIN`].
    pub(crate) fn new(config: Config) -> Result<Self, SandboxError> {
        let places = Arc::new(Semaphore::new(config.max_sandboxes.min(Semaphore::MAX_PERMITS)));
        let memory = StateMemory::new(config.max_state_memory);
        let this = Self { config, state: Mutex::default(), places, memory };
        let place = this.take_places(1)?;
        let main = SharedSandbox::new(this.start()?, place);
        this.lock().sandboxes.insert(MAIN.to_owned(), main);
        Ok(this)
    }

    fn lock(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new sandbox in the guest's warm state, without a name.
    pub(crate) fn start(&self) -> Result<Sandbox, SandboxError> {
        let session = self.config.guest.session()?;
        Ok(Sandbox::new(session, self.config.language, self.memory.charge()))
    }

    /// Names a sandbox.
    fn add(&self, sandbox: Sandbox, place: OwnedSemaphorePermit) -> String {
        let mut state = self.lock();
        state.count += 1;
        let name = format!("sandbox-{}", state.count);
        state.sandboxes.insert(name.clone(), SharedSandbox::new(sandbox, place));
        name
    }

    /// Reserves places for `count` sandboxes before they are made.
    ///
    /// # Errors
    /// The sandboxes, those that are closed and still have a call, and the reserved places leave
    /// too few.
    pub(crate) fn reserve(self: &Arc<Self>, count: usize) -> Result<Reservation, SandboxError> {
        Ok(Reservation { registry: Arc::clone(self), places: self.take_places(count)? })
    }

    fn take_places(&self, count: usize) -> Result<OwnedSemaphorePermit, SandboxError> {
        let wanted = u32::try_from(count).map_err(|_| TryAcquireError::NoPermits);
        let taken = wanted.and_then(|count| Arc::clone(&self.places).try_acquire_many_owned(count));
        taken.map_err(|_| {
            let (exist, max) = (self.lock().sandboxes.len(), self.config.max_sandboxes);
            let taken = max.saturating_sub(self.places.available_permits());
            let others = match taken.saturating_sub(exist) {
                0 => String::new(),
                others => format!(", {others} are being made or closed,"),
            };
            SandboxError::Refused(format!(
                "{exist} sandboxes exist{others} and at most {max} may; close one with \
                 `close_sandbox`"
            ))
        })
    }

    fn get(&self, name: &str) -> Result<SharedSandbox, SandboxError> {
        let found = self.lock().sandboxes.get(name).cloned();
        found.ok_or_else(|| SandboxError::Refused(unknown(name)))
    }

    /// The sandbox for a call, once the calls before it have ended.
    ///
    /// # Errors
    /// No sandbox has this name, or the call is cancelled or the sandbox closed while it waits.
    pub(crate) async fn enter(
        &self,
        name: &str,
        cancellation: &CancellationToken,
    ) -> Result<EnteredSandbox, SandboxError> {
        let SharedSandbox { sandbox, closed } = self.get(name)?;
        tokio::select! {
            biased;
            () = cancellation.cancelled() => Err(SandboxError::Cancelled),
            () = closed.cancelled() => Err(SandboxError::Closed),
            guard = sandbox.lock_owned() => Ok(EnteredSandbox { guard, closed }),
        }
    }

    /// Closes a sandbox, cancels its calls, and returns once they have ended.
    pub(crate) async fn close(&self, name: &str) -> Result<(), SandboxError> {
        if name == MAIN {
            let why = format!("the sandbox {MAIN:?} cannot be closed; roll it back instead");
            return Err(SandboxError::Refused(why));
        }
        let removed = self.lock().sandboxes.remove(name);
        let SharedSandbox { sandbox, closed } =
            removed.ok_or_else(|| SandboxError::Refused(unknown(name)))?;
        closed.cancel();
        let last = sandbox.lock_owned().await;
        let freed = tokio::task::spawn_blocking(move || drop(last)).await;
        freed.map_err(|error| SandboxError::Refused(error.to_string()))
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.lock().sandboxes.keys().cloned().collect()
    }
}

impl SharedSandbox {
    fn new(sandbox: Sandbox, place: OwnedSemaphorePermit) -> Self {
        let sandbox = PlacedSandbox { sandbox, _place: place };
        let (sandbox, closed) = (Arc::new(CallMutex::new(sandbox)), CancellationToken::new());
        Self { sandbox, closed }
    }
}

fn unknown(name: &str) -> String {
    format!("no sandbox is named {name:?}; `list_sandboxes` lists them")
}
