//! Saves of sandboxes: pauses by clients, saves of idle ones, and saves of a server that ends.
//!
//! Promises: a paused sandbox and its record are in the store before its client is answered. A
//! pause without memory keeps the files, and starts the state that the sandbox began in with them:
//! at once, or at the next resume if the sandbox is in the store already. Saves that are not forced
//! by the end of the server take turns by tenant. A host of a fleet that ends saves its sandboxes
//! also with a full disk.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use afresh::{Reference, SaveOptions, Session};
use hyper::StatusCode;
use tokio::sync::OwnedMutexGuard;

use crate::error_response::ErrorResponse;
use crate::failure::internal;
use crate::lock::lock;
use crate::sandbox::agent::connect::ConnectError;
use crate::sandbox::catalog::snapshots::own_bytes;
use crate::sandbox::life::registry::Sandboxes;
use crate::sandbox::life::sandbox::{Residency, Sandbox, next_event};
use crate::sandbox::life::tasks::{blocking, to_its_end};
use crate::sandbox::life::undo_point::UndoPoint;
use crate::sandbox::records::memory_directory::MemoryDirectory;
use crate::sandbox::records::record::{SandboxRecord, state_reference};
use crate::sandbox::records::store::SavedState;

/// How a sandbox is saved.
#[derive(Clone, Copy, Default)]
pub(crate) struct Saving {
    /// It is paused.
    pub(crate) pause: bool,
    /// The server ends.
    pub(crate) ending: bool,
    /// Its memory is dropped.
    pub(crate) files_only: bool,
}

/// Whether a save was refused because the disk is full.
fn is_full(refusal: &ErrorResponse) -> bool {
    refusal.status == StatusCode::INSUFFICIENT_STORAGE
}

impl Sandboxes {
    /// Saves a sandbox. Its guest is dropped, unless there are checkpoints or relatives to go to. A
    /// paused one, or one of an ending server, is released for any host of the fleet that needs it
    /// next.
    pub(crate) async fn save(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        how: Saving,
    ) -> Result<(), ErrorResponse> {
        let life = sandbox.life.clone().lock_owned().await;
        let place = match how.ending {
            true => None,
            false => {
                let patience = self.config.call_timeout;
                Some(self.pauses.enter(&self.accounts, &sandbox.tenant, patience).await?)
            }
        };
        let saving = self.clone().save_now(sandbox.clone(), life, how);
        to_its_end(async move {
            let _place = place;
            saving.await
        })
        .await
    }

    /// Pauses a sandbox for its client, within the budget of saved states, with its memory or with
    /// its files alone.
    pub(crate) async fn pause(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        memory: bool,
    ) -> Result<(), ErrorResponse> {
        self.count_stored(&sandbox.tenant).await?;
        self.check_stored(&sandbox.tenant, sandbox.charge.stored(), 0)?;
        self.save(sandbox, Saving { pause: true, ending: false, files_only: !memory }).await
    }

    /// Refuses a call of a sandbox that an ending server has not released yet. Its save may fail,
    /// and a call that was answered would be lost; or the state is saved, and the ledger does not
    /// name it yet.
    pub(crate) fn check_not_ending(&self, life: &Residency) -> Result<(), ErrorResponse> {
        if self.ending.load(Ordering::Relaxed)
            && matches!(life, Residency::Live(_) | Residency::Saved)
        {
            let message = "this server is ending, and the call was not begun; try again";
            return Err(ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, message));
        }
        Ok(())
    }

    /// Saves a state in the store of `dir`, and hands it to the fleet. Returns its own bytes as
    /// well.
    fn store_state(
        &self,
        sandbox: &Sandbox,
        session: &mut Session,
        dir: &Path,
    ) -> Result<(u64, SavedState), ErrorResponse> {
        let name = state_reference(dir, &format!("sandbox-{}", sandbox.id));
        let to: Reference = name.parse().map_err(|error| internal(&error))?;
        let saved = session.save(&to, &SaveOptions::new()).map_err(|error| internal(&error))?;
        let bytes = own_bytes(&saved);
        Ok((bytes, self.ledger.save_state(dir, &saved, bytes)?))
    }

    /// The same for a host that ends with a full disk: its fleet has room, so the state goes there
    /// through memory. Fails with `full` if that is not possible either.
    fn store_state_past_disk(
        &self,
        sandbox: &Sandbox,
        session: &mut Session,
        full: ErrorResponse,
    ) -> Result<(u64, SavedState), ErrorResponse> {
        let stored = MemoryDirectory::create(&sandbox.id)
            .map_err(|error| internal(&error))
            .and_then(|memory| self.store_state(sandbox, session, memory.path()));
        stored.map_err(|error| {
            tracing::warn!(id = sandbox.id, why = error.message, "not saved through memory");
            full
        })
    }

    pub(crate) async fn save_now(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        mut life: OwnedMutexGuard<Residency>,
        Saving { pause, ending, files_only }: Saving,
    ) -> Result<(), ErrorResponse> {
        let base = match files_only {
            true => Some(self.base_guest(&sandbox).await?),
            false => None,
        };
        let (this, own) = (self.clone(), sandbox.clone());
        let (mut life, saved) = blocking(move || {
            let session = match &mut *life {
                Residency::Live(session) => session,
                Residency::Saved => return Ok((life, None)),
                other => return Err(other.absent(&own.id)),
            };
            this.ledger.check(&*own)?;
            // A pause that is refused leaves the guest as it was.
            let mut fresh = match &base {
                Some(base) => Some(this.restart_guest(base, session)?),
                None => None,
            };
            let kept = fresh.as_mut().unwrap_or(session);
            own.goes_on.store(next_event(kept).is_some(), Ordering::Relaxed);
            let here = this.store_state(&own, kept, &this.config.dir);
            let (bytes, saved) = match here {
                Ok(stored) => {
                    this.ledger.saved_here(&*own);
                    // The state before has no name any more.
                    this.litter.store(true, Ordering::Relaxed);
                    stored
                }
                Err(refusal) if ending && is_full(&refusal) && this.ledger.releases() => {
                    this.store_state_past_disk(&own, kept, refusal)?
                }
                Err(refusal) => return Err(refusal),
            };
            own.charge.store(bytes);
            // A state that was to be restarted has a successor.
            own.set_restarts(false);
            if let Some(fresh) = fresh {
                own.charge.measure_now(&fresh);
                // The processes, contexts and checkpoints of the old guest end.
                **session = fresh;
                *lock(&own.mark) = UndoPoint::default();
                own.leave_family();
            }
            if pause || ending {
                let why = "the sandbox is saved, and its programs with it";
                let why = ConnectError::new("unavailable", why);
                own.commands.end(&why);
                own.watchers.end(&why);
            }
            if let Residency::Live(session) = &mut *life {
                // A relative may have made or dropped some.
                own.note_checkpoints(session);
            }
            if !own.is_branched() {
                *life = Residency::Saved;
                own.charge.release();
            }
            Ok((life, Some(saved)))
        })
        .await?;
        sandbox.saved.store(true, Ordering::Relaxed);
        let release =
            self.ledger.releases() && (ending || pause && matches!(*life, Residency::Saved));
        // It needs no memory now, and loses that of its saved state when it is resumed.
        let drops = files_only && saved.is_none();
        let mut record = SandboxRecord { paused: pause, ..sandbox.record() };
        if drops {
            record.drop_memory();
        }
        self.ledger.update(&*sandbox, record, saved, release).await?;
        if drops {
            sandbox.set_restarts(true);
            sandbox.charge.forget_measured();
            let why = ConnectError::new("unavailable", "the sandbox is paused without its memory");
            sandbox.commands.end(&why);
            sandbox.watchers.end(&why);
        }
        // Only now: a client that sees a paused sandbox relies on its save.
        sandbox.times().paused = pause;
        if release {
            // Calls that wait for it are made again, elsewhere.
            *life = Residency::Moved;
            if !ending {
                sandbox.charge.downloads.end();
            }
            lock(&self.all).remove(&sandbox.id);
            self.stored_elsewhere.add(&sandbox.tenant, sandbox.charge.stored());
        }
        Ok(())
    }
}
