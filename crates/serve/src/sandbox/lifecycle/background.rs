//! Background work in idle sandboxes: programs that commands or code have left running.
//!
//! Promises: they run in slices, between which calls get their turn. A slice that is cut short
//! takes the sandbox back to the end of its last call, and the next call lets it continue from
//! there. One that a budget refuses is tried again once the budget may have room
//! ([`refused_work`](super::refused_work)).

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use hyper::StatusCode;
use serde_json::json;
use tokio::time::Instant;

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::agent::connect::ConnectError;
use crate::sandbox::agent::output_router::OutputRouter;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Residency, Sandbox, command, run_slice};
use crate::sandbox::lifecycle::undo_point::Operation;

/// Minimum time until background work that was refused is tried again.
const REFUSAL_BACKOFF: Duration = Duration::from_secs(1);
/// Maximum time until then, after which a reload may have raised a budget.
const MAX_REFUSAL_WAIT: Duration = Duration::from_secs(60);

impl Sandboxes {
    /// The output router of a call of a sandbox.
    pub(crate) fn output_router(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> OutputRouter {
        let (this, own) = (Arc::downgrade(self), sandbox.clone());
        let check = move || match own.killed.load(Ordering::Relaxed) {
            true => Err(Sandbox::not_running(&own.id)),
            false => this.upgrade().map_or(Ok(()), |this| this.ledger.check(&*own)),
        };
        let limit = self.template_of(sandbox).config.cpu_limit.or(self.config.cpu_limit);
        OutputRouter::new(self.config.call_timeout, sandbox.commands.clone(), check)
            .limit_cpu_time(limit)
    }

    /// A sandbox was called; something may happen in it by itself after `due`.
    pub(crate) fn schedule_background(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        due: Option<Duration>,
    ) {
        sandbox.refused_work.clear();
        let due = due.and_then(|due| Instant::now().checked_add(due));
        if sandbox.commands.set_due(due) {
            tokio::spawn(drive(Arc::downgrade(self), sandbox.clone()));
        }
    }

    /// Something may happen in a sandbox by itself now.
    pub(super) fn schedule_now(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        if sandbox.commands.set_due(Some(Instant::now())) {
            tokio::spawn(drive(Arc::downgrade(self), sandbox.clone()));
        }
    }

    /// Bytes for a sandbox have arrived, or room for its output.
    #[cfg(linux_guests)]
    pub(crate) fn wake(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        if sandbox.commands.wake() {
            tokio::spawn(drive(Arc::downgrade(self), sandbox.clone()));
        }
    }

    /// Ends commands that have run too long, and runs the rest for a slice.
    async fn step(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<(), ErrorResponse> {
        let (own, mut router) = (sandbox.clone(), self.output_router(sandbox).for_management());
        let language = self.template_of(sandbox).language;
        self.turn(sandbox, Operation::Slice, move |session| {
            if own.lifetime().paused {
                return Err(ErrorResponse::new(
                    StatusCode::CONFLICT,
                    "the sandbox is paused; connect to it to resume it",
                ));
            }
            let _slice = own.commands.slice();
            let mut mark = lock(&own.mark);
            for number in own.commands.overdue() {
                let kill = json!({"op": "signal", "pid": number, "signal": 9});
                command(session, language, &kill, &mut mark, &mut router)?;
                own.commands.drop_limit(number);
            }
            run_slice(session, &mut mark, &mut router)
        })
        .await
    }

    /// Ends all subscriptions, since the server ends.
    pub(crate) fn end_subscriptions(&self) {
        let why =
            ConnectError::new("unavailable", "the server is ending; connect to the command again");
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        all.iter().for_each(|sandbox| sandbox.commands.dismiss(&why));
    }
}

/// Runs the background work of a sandbox to its end.
async fn drive(all: Weak<Sandboxes>, sandbox: Arc<Sandbox>) {
    while let Some(at) = sandbox.commands.next() {
        // A sleep, however short, lasts a millisecond.
        if at > Instant::now() {
            tokio::select! {
                () = tokio::time::sleep_until(at) => {}
                () = sandbox.commands.changed() => continue,
            }
        }
        let all = all.upgrade().filter(|all| !all.ending.load(Ordering::Relaxed));
        let Some(all) = all else {
            sandbox.commands.rest();
            continue;
        };
        let done = match all.is_saved_with_refused_work(&sandbox).await {
            // It comes back from the store, and continues.
            true => match all.check_memory(&sandbox.tenant, sandbox.charge.expected()) {
                Ok(()) => all.with(&sandbox, |_| Ok(())).await,
                refused => refused,
            },
            false => all.step(&sandbox).await,
        };
        if let Err(refusal) = done {
            tracing::debug!(id = sandbox.id, why = refusal.message, "background work was refused");
            all.note_refused_work(&sandbox, &refusal);
            let waits = refusal.later && sandbox.refused_work.budget().is_some();
            // One that is saved or has left begins again where it lives next, unless its work waits
            // for a budget here.
            match *sandbox.life.lock().await {
                Residency::Live(_) => {}
                Residency::Saved if waits => {}
                _ => {
                    sandbox.refused_work.clear();
                    sandbox.commands.rest();
                    continue;
                }
            }
            let wait = refusal.retry_after().map(|wait| wait.max(REFUSAL_BACKOFF));
            let wait = wait.map(|wait| wait.min(MAX_REFUSAL_WAIT));
            sandbox.commands.rest_after_refusal(wait, REFUSAL_BACKOFF);
        }
    }
}
