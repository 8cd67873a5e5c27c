//! Saves of sandboxes: pauses by clients, saves of idle ones, and saves of a server that ends.
//!
//! Promises: a paused sandbox and its record are in the store before its client is answered. Saves that are not forced by
//! the end of the server take turns by tenant.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use afresh::{Reference, SaveOptions};
use tokio::sync::OwnedMutexGuard;

use super::connect::ConnectError;
use super::record::SandboxRecord;
use super::registry::{Sandboxes, blocking, lock, to_its_end};
use super::sandbox::{Residency, Sandbox, next_event};
use super::snapshots::own_bytes;
use super::template::state_reference;
use crate::error_response::ErrorResponse;
use crate::failure::internal;

impl Sandboxes {
    /// Saves a sandbox. Its guest is dropped, unless there are checkpoints or relatives to go to. A paused one, or
    /// one of an ending server, is released for any host of the fleet that needs it next.
    pub(super) async fn save(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        pause: bool,
        ending: bool,
    ) -> Result<(), ErrorResponse> {
        let life = sandbox.life.clone().lock_owned().await;
        let place = match ending {
            true => None,
            false => {
                let patience = self.config.call_timeout;
                Some(self.pauses.enter(&self.accounts, &sandbox.tenant, patience).await?)
            }
        };
        let saving = self.clone().save_now(sandbox.clone(), life, pause, ending);
        to_its_end(async move {
            let _place = place;
            saving.await
        })
        .await
    }

    /// Pauses a sandbox for its client, within the budget of saved states.
    pub(super) async fn pause(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
    ) -> Result<(), ErrorResponse> {
        self.check_stored(&sandbox.tenant, sandbox.charge.stored(), 0)?;
        self.save(sandbox, true, false).await
    }

    pub(super) async fn save_now(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        mut life: OwnedMutexGuard<Residency>,
        pause: bool,
        ending: bool,
    ) -> Result<(), ErrorResponse> {
        let (this, own) = (self.clone(), sandbox.clone());
        let (mut life, saved) = blocking(move || {
            let session = match &mut *life {
                Residency::Live(session) => session,
                Residency::Saved => return Ok((life, None)),
                other => return Err(other.absent(&own.id)),
            };
            this.ledger.check(&*own)?;
            own.goes_on.store(next_event(session).is_some(), Ordering::Relaxed);
            let name = state_reference(&this.config.dir, &format!("sandbox-{}", own.id));
            let to: Reference = name.parse().map_err(|error| internal(&error))?;
            let saved = session.save(&to, &SaveOptions::new()).map_err(|error| internal(&error))?;
            let bytes = own_bytes(&saved);
            let saved = this.ledger.save_state(&this.config.dir, &saved, bytes)?;
            own.charge.store(bytes);
            this.ledger.saved_here(&*own);
            // The state before has no name any more.
            this.litter.store(true, Ordering::Relaxed);
            if pause || ending {
                let why = "the sandbox is saved, and its programs with it";
                let why = ConnectError::new("unavailable", why);
                own.commands.end(&why);
                own.watchers.end(&why);
            }
            if !own.branched.load(Ordering::Relaxed) {
                *life = Residency::Saved;
                own.charge.release();
            }
            Ok((life, Some(saved)))
        })
        .await?;
        sandbox.saved.store(true, Ordering::Relaxed);
        let release =
            self.ledger.releases() && (ending || pause && matches!(*life, Residency::Saved));
        let record = SandboxRecord { paused: pause, ..sandbox.record() };
        self.ledger.update(&*sandbox, record, saved, release).await?;
        // Only now: a client that sees a paused sandbox relies on its save.
        sandbox.times().paused = pause;
        if release {
            // Calls that wait for it are made again, elsewhere.
            *life = Residency::Moved;
            lock(&self.all).remove(&sandbox.id);
        }
        Ok(())
    }
}
