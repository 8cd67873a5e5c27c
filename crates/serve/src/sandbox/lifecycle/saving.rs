//! Saves of sandboxes: pauses by clients, saves of idle ones, and saves of a server that ends.
//!
//! Promises: a paused sandbox and its record are in the store before its client is answered. A
//! pause without memory keeps the files, and starts the state that the sandbox began in with them:
//! at once, or at the next resume if the sandbox is in the store already. Until such a pause is
//! recorded, the guest lives on with its memory and the store keeps the state of the last save, so
//! one that is refused changes nothing. The same holds for each save with memory outside a fleet.
//! Saves that are not forced by the end of the server take turns by tenant. A host of a fleet that
//! ends saves its sandboxes also with a full disk.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use afresh::{Reference, SaveOptions, Session};
use hyper::StatusCode;
use tokio::sync::OwnedMutexGuard;

use crate::error_response::ErrorResponse;
use crate::failure::internal;
use crate::lock::lock;
use crate::sandbox::catalog::base_guest::BaseGuest;
use crate::sandbox::catalog::snapshots::last_layer;
use crate::sandbox::lifecycle::refusals::budget_used_up;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Residency, Sandbox, next_event};
use crate::sandbox::lifecycle::tasks::{blocking, to_its_end};
use crate::sandbox::lifecycle::undo_point::UndoPoint;
use crate::sandbox::records::memory_directory::MemoryDirectory;
use crate::sandbox::records::record::{SandboxRecord, saved_name, state_reference};
use crate::sandbox::records::store::{SavedState, StoredSandbox};
use crate::sandbox::tenants::charge::memory_of;
use crate::sandbox::tenants::stored_blobs::StoredState;

/// The method of saving a sandbox.
#[derive(Clone, Copy, Default)]
pub(crate) struct SaveMode {
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
        how: SaveMode,
    ) -> Result<(), ErrorResponse> {
        let life = sandbox.life.clone().lock_owned().await;
        let patience = self.config.call_timeout;
        let place = self.pauses.enter(&self.accounts, &sandbox.tenant, patience).await?;
        let saving = self.clone().save_now(sandbox.clone(), life, how);
        to_its_end(async move {
            let _place = place;
            saving.await
        })
        .await
    }

    /// Saves a sandbox of an ending server, whose calls have ended.
    pub(crate) async fn save_at_end(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        life: OwnedMutexGuard<Residency>,
    ) -> Result<(), ErrorResponse> {
        let how =
            SaveMode { pause: sandbox.lifetime().paused, ending: true, ..SaveMode::default() };
        to_its_end(self.clone().save_now(sandbox.clone(), life, how)).await
    }

    /// Pauses a sandbox for its client, within the budget of saved states, with its memory or with
    /// its files alone.
    pub(crate) async fn pause(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        memory: bool,
    ) -> Result<(), ErrorResponse> {
        self.count_stored(&sandbox.tenant).await?;
        self.check_stored(&sandbox.tenant, sandbox.charge.own_stored(), 0)?;
        self.save(sandbox, SaveMode { pause: true, ending: false, files_only: !memory }).await
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

    /// Saves a state of a tenant as `name` in the store of `dir`, and hands it to the fleet. Its
    /// charge begins with that.
    fn store_state(
        &self,
        tenant: &Arc<str>,
        name: &str,
        session: &mut Session,
        dir: &Path,
    ) -> Result<(StoredState, SavedState), ErrorResponse> {
        let to: Reference = state_reference(dir, name).parse().map_err(|error| internal(&error))?;
        let saved = session.save(&to, &SaveOptions::new()).map_err(|error| internal(&error))?;
        let store = to.place().store().map_err(|error| internal(&error))?;
        let state = self.charge_state(tenant, &store, saved.id).map_err(|e| internal(&*e))?;
        Ok((state, self.ledger.save_state(dir, &saved, last_layer(&saved))?))
    }

    /// The same for a host that ends with a full disk: its fleet has room, so the state goes there
    /// through memory. Fails with `full` if that is not possible either.
    fn store_state_past_disk(
        &self,
        sandbox: &Sandbox,
        session: &mut Session,
        full: ErrorResponse,
    ) -> Result<(StoredState, SavedState), ErrorResponse> {
        let stored = MemoryDirectory::create(&sandbox.id)
            .map_err(|error| internal(&error))
            .and_then(|memory| {
                let (tenant, name) = (&sandbox.tenant, sandbox.saved_name());
                self.store_state(tenant, &name, session, memory.path())
            });
        stored.map_err(|error| {
            tracing::warn!(id = sandbox.id, why = error.message, "not saved through memory");
            full
        })
    }

    pub(crate) async fn save_now(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        life: OwnedMutexGuard<Residency>,
        how: SaveMode,
    ) -> Result<(), ErrorResponse> {
        let SaveMode { pause, ending, files_only } = how;
        let base = match files_only {
            true => Some(self.base_guest(&sandbox).await?),
            false => None,
        };
        if let Some(base) = base.filter(|_| matches!(*life, Residency::Live(_))) {
            return self.save_restarted(sandbox, life, base, how).await;
        }
        if matches!(*life, Residency::Live(_)) {
            return self.save_live(sandbox, life, how).await;
        }
        if !matches!(*life, Residency::Saved) {
            return Err(life.absent(&sandbox.id));
        }
        sandbox.saved.store(true, Ordering::Relaxed);
        let release = self.ledger.releases() && (ending || pause);
        let mut record = SandboxRecord { paused: pause, ..sandbox.record() };
        // It needs no memory now, and loses that of its saved state when it is resumed.
        if files_only {
            record.drop_memory();
        }
        let updated = self.ledger.update(&*sandbox, record, None, release).await;
        if updated.is_err() && files_only {
            // A change that failed may be on the disk, and the next server would drop the memory.
            self.restore_record(&sandbox).await;
        }
        updated?;
        if files_only {
            sandbox.set_restarts(true);
            sandbox.charge.forget_measured();
            sandbox.end_programs("the sandbox is paused without its memory");
        }
        self.note_saved(&sandbox, life, how, release).await
    }

    /// Saves a live sandbox with its memory. Outside a fleet the state gets the other one of two
    /// names, and the record switches the names: a refused save leaves the state that the record
    /// names. A fleet names states by their digests, and the next change of the entry names this
    /// one.
    async fn save_live(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        mut life: OwnedMutexGuard<Residency>,
        how: SaveMode,
    ) -> Result<(), ErrorResponse> {
        let SaveMode { pause, ending, .. } = how;
        let second = sandbox.second_name.load(Ordering::Relaxed);
        let switches = !self.ledger.releases() && sandbox.is_saved();
        let (second, name) = match switches {
            true => (!second, saved_name(&sandbox.id, !second)),
            false => (second, sandbox.saved_name()),
        };
        let (this, own, to) = (self.clone(), sandbox.clone(), name.clone());
        let (life, stored, goes_on) = blocking(move || {
            let Residency::Live(session) = &mut *life else { return Err(life.absent(&own.id)) };
            this.ledger.check(&*own)?;
            let goes_on = next_event(session).is_some();
            let stored = match this.store_state(&own.tenant, &to, session, &this.config.dir) {
                Ok(stored) => {
                    this.ledger.saved_here(&*own);
                    stored
                }
                Err(refusal) if ending && is_full(&refusal) && this.ledger.releases() => {
                    this.store_state_past_disk(&own, session, refusal)?
                }
                Err(refusal) => {
                    if !this.ledger.releases() {
                        // A save that fails late may have named it.
                        this.untag(&to);
                    }
                    return Err(refusal);
                }
            };
            // A relative may have made or dropped some.
            own.note_checkpoints(session);
            Ok((life, stored, goes_on))
        })
        .await?;
        let (state, saved) = stored;
        let leaves = !sandbox.is_branched();
        let release = self.ledger.releases() && (ending || pause && leaves);
        let record = SandboxRecord {
            paused: pause,
            goes_on,
            stored: state.bytes(),
            // A state that was to be restarted has a successor.
            restarts: false,
            second_name: second,
            ..sandbox.record()
        };
        let updated = self.ledger.update(&*sandbox, record, Some(saved), release).await;
        // A change that failed may be on the disk: the state that it names is needed until the
        // record before is back.
        let is_needed = updated.is_err() && !self.restore_record(&sandbox).await;
        let (this, own) = (self.clone(), sandbox.clone());
        let mut life = blocking(move || {
            // In a fleet the next change of the entry names the state.
            if updated.is_ok() || this.ledger.releases() {
                own.goes_on.store(goes_on, Ordering::Relaxed);
                own.charge.store(state);
                own.set_restarts(false);
                own.saved.store(true, Ordering::Relaxed);
                if switches {
                    this.untag(&own.saved_name());
                    own.second_name.store(second, Ordering::Relaxed);
                }
                // The state before has no name any more.
                this.has_garbage.store(true, Ordering::Relaxed);
            } else if !is_needed {
                this.untag(&name);
            }
            updated.map(|()| life)
        })
        .await?;
        // Only now: a save that is refused leaves the guest and its programs.
        if pause || ending {
            sandbox.end_programs("the sandbox is saved, and its programs with it");
        } else if let Some(budget) = sandbox.refused_work.budget() {
            // Its programs continue once the budget has room.
            sandbox.end_streams(&budget_used_up(budget));
        }
        if leaves {
            let own = sandbox.clone();
            life = blocking(move || {
                *life = Residency::Saved;
                // It holds a state of the guest that has left.
                *lock(&own.mark) = UndoPoint::default();
                own.charge.release();
                Ok(life)
            })
            .await?;
        }
        self.note_saved(&sandbox, life, how, release).await
    }

    /// Pauses a live sandbox without its memory: a guest of `base` with its files takes the place
    /// of the guest once that is recorded.
    async fn save_restarted(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        mut life: OwnedMutexGuard<Residency>,
        base: BaseGuest,
        how: SaveMode,
    ) -> Result<(), ErrorResponse> {
        let (this, own) = (self.clone(), sandbox.clone());
        let second = !sandbox.second_name.load(Ordering::Relaxed);
        let name = saved_name(&sandbox.id, second);
        let to = name.clone();
        let (mut life, fresh, (state, saved)) = blocking(move || {
            let Residency::Live(session) = &mut *life else { return Err(life.absent(&own.id)) };
            this.ledger.check(&*own)?;
            let mut fresh = this.restart_guest(&base, session)?;
            let stored = this.store_state(&own.tenant, &to, &mut fresh, &this.config.dir);
            // A save that fails late may have named it.
            let stored = stored.inspect_err(|_| this.untag(&to))?;
            Ok((life, fresh, stored))
        })
        .await?;
        let record = SandboxRecord {
            paused: how.pause,
            goes_on: next_event(&fresh).is_some(),
            stored: state.bytes(),
            memory: memory_of(&fresh),
            restarts: false,
            second_name: second,
            ..sandbox.record()
        };
        let (goes_on, memory) = (record.goes_on, record.memory);
        let release = self.ledger.releases() && (how.ending || how.pause);
        let saved = Some(saved.replacing_guest());
        let updated = self.ledger.update(&*sandbox, record, saved, release).await;
        // A change that failed may be on the disk: the state that it names is needed until the
        // record before is back.
        let is_needed = updated.is_err() && !self.restore_record(&sandbox).await;
        let (this, own) = (self.clone(), sandbox.clone());
        let life = blocking(move || {
            drop(fresh);
            if let Err(refusal) = updated {
                if !is_needed {
                    this.untag(&name);
                }
                return Err(refusal);
            }
            this.untag(&own.saved_name());
            own.second_name.store(second, Ordering::Relaxed);
            this.ledger.saved_here(&*own);
            own.goes_on.store(goes_on, Ordering::Relaxed);
            own.set_restarts(false);
            own.charge.store(state);
            own.charge.set(memory);
            own.charge.release();
            // The processes, contexts and checkpoints of the old guest end.
            *life = Residency::Saved;
            *lock(&own.mark) = UndoPoint::default();
            own.leave_fork_group();
            own.end_programs("the sandbox is saved without its memory");
            Ok(life)
        })
        .await?;
        sandbox.saved.store(true, Ordering::Relaxed);
        self.note_saved(&sandbox, life, how, release).await
    }

    /// Undoes a change of a record that failed: whether the record is as before.
    async fn restore_record(&self, sandbox: &Arc<Sandbox>) -> bool {
        // The states of a fleet are not in the directory of this host, and the record of a killed
        // sandbox is removed.
        if self.ledger.releases() || sandbox.killed.load(Ordering::Acquire) {
            return true;
        }
        let restored = match sandbox.is_saved() {
            true => self.ledger.update(&**sandbox, sandbox.record(), None, false).await,
            false => self.ledger.remove(&**sandbox).await,
        };
        restored.is_ok()
    }

    /// Shows a sandbox as saved, and leaves it to other hosts if it is released.
    async fn note_saved(
        &self,
        sandbox: &Arc<Sandbox>,
        mut life: OwnedMutexGuard<Residency>,
        SaveMode { pause, ending, .. }: SaveMode,
        release: bool,
    ) -> Result<(), ErrorResponse> {
        // Only now: a client that sees a paused sandbox relies on its save.
        sandbox.lifetime().paused = pause;
        if release {
            // Calls that wait for it are made again, elsewhere. A branched one is still live here,
            // and the end of its session blocks.
            life = blocking(move || {
                *life = Residency::Moved;
                Ok(life)
            })
            .await?;
            if !ending {
                sandbox.charge.downloads.end();
            }
            lock(&self.all).remove(&sandbox.id);
            self.remote_usage.add(&sandbox.tenant, sandbox.charge.stored());
        }
        drop(life);
        Ok(())
    }
}
