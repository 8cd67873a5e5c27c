//! Background work that a budget refuses.
//!
//! Promises: such work does not run, and its sandbox is saved like an idle one, so that its memory
//! returns. It continues by itself once the budget has room, in a sandbox that comes back from the
//! store if it has to. The audit log has one line for each such rest. May break it: a server that
//! is started again leaves the work of a saved sandbox to the next call.

use std::sync::Arc;

use crate::error_response::{BudgetExcess, ErrorResponse};
use crate::lock::lock;
use crate::sandbox::agent::connect::ConnectError;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Residency, Sandbox};
use crate::sandbox::tenants::admission::MEMORY;

/// The end of streams of commands that a budget refuses.
pub(crate) fn budget_used_up(budget: &str) -> ConnectError {
    let why = format!(
        "the budget `{budget}` is used up: the commands of the sandbox wait until it has room"
    );
    ConnectError::new("resource_exhausted", why)
}

impl Sandboxes {
    /// Notes that a budget refuses the background work of a sandbox. Clients of commands that would
    /// add memory learn it now, since other work does not make room by the passing of time.
    pub(super) fn note_refused_work(&self, sandbox: &Sandbox, refusal: &ErrorResponse) {
        let Some(BudgetExcess { name, .. }) = refusal.budget.as_deref() else { return };
        if !sandbox.refused_work.refuse(name) {
            return;
        }
        let why = refusal.message.as_str();
        tracing::info!(id = sandbox.id, why, "the background work of a sandbox waits");
        self.record_own("background work", sandbox, "refused", Some(why));
        if *name == MEMORY {
            sandbox.commands.dismiss(&budget_used_up(name));
        }
    }

    /// Whether a sandbox was saved while a budget refused its background work.
    pub(super) async fn is_saved_with_refused_work(&self, sandbox: &Sandbox) -> bool {
        sandbox.refused_work.budget().is_some()
            && matches!(*sandbox.life.lock().await, Residency::Saved)
    }

    /// Lets refused background work begin again now: a budget may have changed.
    pub(crate) fn retry_refused_work(self: &Arc<Self>) {
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        for sandbox in all.iter().filter(|sandbox| sandbox.refused_work.budget().is_some()) {
            self.schedule_now(sandbox);
        }
    }
}
