//! The sandboxes of one server, by their names.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Mutex as CallMutex, OwnedMutexGuard};
use tokio_util::sync::CancellationToken;

use crate::arguments::MAIN;
use crate::sandbox::{Sandbox, SandboxError};
use crate::server::Config;

/// A sandbox, which runs one call at a time.
pub(crate) type SharedSandbox = Arc<CallMutex<Sandbox>>;

/// The sandboxes of a server.
pub(crate) struct Registry {
    pub(crate) config: Config,
    state: Mutex<RegistryState>,
}

#[derive(Default)]
struct RegistryState {
    sandboxes: BTreeMap<String, SharedSandbox>,
    /// Sandboxes that were ever named.
    count: u64,
    /// Places reserved for sandboxes that are being made.
    reserved: usize,
}

/// Places for sandboxes that are being made. Those left when it is dropped are free again.
pub(crate) struct Reservation {
    registry: Arc<Registry>,
    count: usize,
}

impl Reservation {
    /// Names the new sandboxes. They are at most as many as the places.
    pub(crate) fn fill(mut self, new: Vec<Sandbox>) -> Vec<String> {
        let mut state = self.registry.lock();
        debug_assert!(new.len() <= self.count, "each sandbox has a place");
        state.reserved -= std::mem::take(&mut self.count);
        let mut names = Vec::with_capacity(new.len());
        for sandbox in new {
            state.count += 1;
            let name = format!("sandbox-{}", state.count);
            state.sandboxes.insert(name.clone(), Arc::new(CallMutex::new(sandbox)));
            names.push(name);
        }
        names
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.registry.lock().reserved -= self.count;
    }
}

impl Registry {
    /// A registry with the sandbox [`MAIN`].
    pub(crate) fn new(config: Config) -> Result<Self, SandboxError> {
        let this = Self { config, state: Mutex::default() };
        let main = this.start()?;
        this.lock().sandboxes.insert(MAIN.to_owned(), Arc::new(CallMutex::new(main)));
        Ok(this)
    }

    fn lock(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new sandbox in the guest's warm state, without a name.
    pub(crate) fn start(&self) -> Result<Sandbox, SandboxError> {
        Ok(Sandbox::new(self.config.guest.session()?, self.config.language))
    }

    /// Reserves places for `count` sandboxes before they are made.
    ///
    /// # Errors
    /// The sandboxes and the reserved places leave too few.
    pub(crate) fn reserve(self: &Arc<Self>, count: usize) -> Result<Reservation, SandboxError> {
        self.lock().reserve(count, self.config.max_sandboxes)?;
        Ok(Reservation { registry: Arc::clone(self), count })
    }

    fn get(&self, name: &str) -> Result<SharedSandbox, SandboxError> {
        let found = self.lock().sandboxes.get(name).cloned();
        found.ok_or_else(|| SandboxError::Refused(unknown(name)))
    }

    /// The sandbox for a call, once the calls before it have ended.
    ///
    /// # Errors
    /// No sandbox has this name, or the call is cancelled while it waits.
    pub(crate) async fn enter(
        &self,
        name: &str,
        cancellation: &CancellationToken,
    ) -> Result<OwnedMutexGuard<Sandbox>, SandboxError> {
        let sandbox = self.get(name)?;
        tokio::select! {
            biased;
            () = cancellation.cancelled() => Err(SandboxError::Cancelled),
            sandbox = sandbox.lock_owned() => Ok(sandbox),
        }
    }

    /// Closes a sandbox. A call that runs in it ends first.
    pub(crate) fn close(&self, name: &str) -> Result<(), SandboxError> {
        if name == MAIN {
            let why = format!("the sandbox {MAIN:?} cannot be closed; roll it back instead");
            return Err(SandboxError::Refused(why));
        }
        let closed = self.lock().sandboxes.remove(name);
        // Freed without the lock.
        closed.map(drop).ok_or_else(|| SandboxError::Refused(unknown(name)))
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.lock().sandboxes.keys().cloned().collect()
    }
}

fn unknown(name: &str) -> String {
    format!("no sandbox is named {name:?}; `list_sandboxes` lists them")
}

impl RegistryState {
    fn reserve(&mut self, count: usize, max: usize) -> Result<(), SandboxError> {
        let exist = self.sandboxes.len();
        if count > max.saturating_sub(exist).saturating_sub(self.reserved) {
            let making = match self.reserved {
                0 => String::new(),
                reserved => format!(", {reserved} are being made,"),
            };
            return Err(SandboxError::Refused(format!(
                "{exist} sandboxes exist{making} and at most {max} may; close one with \
                 `close_sandbox`"
            )));
        }
        self.reserved += count;
        Ok(())
    }
}
