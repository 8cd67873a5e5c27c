//! New sandboxes: of a template, a snapshot or an image.
//!
//! Promises: a tenant's new sandbox is within its budgets before its client is answered. As long as
//! a sandbox that was made with a key exists, and its key is known, no other is made with the key.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use afresh::Session;
use hyper::StatusCode;

use crate::concurrency::Permit;
use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::catalog::base_state::BaseState;
use crate::sandbox::http::session_error::refused;
use crate::sandbox::lifecycle::random::random;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Lifetime, Residency, Sandbox, next_event};
use crate::sandbox::lifecycle::tasks::{blocking, to_its_end};
use crate::sandbox::lifecycle::undo_point::Operation;
use crate::sandbox::records::creation_key::CreationKey;
use crate::sandbox::records::record::{SandboxRecord, SandboxSettings};
use crate::sandbox::records::store::KeyState;
use crate::sandbox::tenants::charge::Charge;

/// Options of a new sandbox.
#[derive(Clone, Debug)]
pub(crate) struct CreateOptions {
    pub(crate) template: String,
    /// A snapshot of a sandbox is refused.
    pub(crate) template_only: bool,
    pub(crate) time: Duration,
    pub(crate) pause_at_end: bool,
    pub(crate) settings: SandboxSettings,
}

/// A sandbox for a client that wants a new one.
pub(crate) struct Creation {
    pub(crate) sandbox: Arc<Sandbox>,
    /// An earlier request has made it.
    pub(crate) is_replay: bool,
}

/// Longest wait for another request with the same key.
const PENDING_TIMEOUT: Duration = Duration::from_secs(10);
const PENDING_CHECK_INTERVAL: Duration = Duration::from_millis(50);

impl Sandboxes {
    /// Makes a sandbox, unless the one that was made with the same key exists.
    pub(crate) async fn create_once(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        wanted: CreateOptions,
        key: CreationKey,
    ) -> Result<Creation, ErrorResponse> {
        // The request before may take longer than this one may wait.
        let account = self.accounts.of(tenant);
        let turn = self.keys.wait((tenant, &account), &key.digest);
        let turn = tokio::time::timeout(PENDING_TIMEOUT, turn).await;
        let turn = turn.map_err(|_| CreationKey::pending())??;
        let (this, tenant) = (self.clone(), tenant.clone());
        // The next request with the key must see how this one ended. While the ledger is away that
        // is not known, and the client repeats its request.
        let patience = self.config.call_timeout.max(PENDING_TIMEOUT);
        let making = to_its_end(async move {
            let _turn = turn;
            let until = Instant::now() + PENDING_TIMEOUT;
            loop {
                let state = this.key_state(&tenant, &key).await?;
                match state {
                    KeyState::Made(record) => {
                        key.check_request(&record.id, record.key.as_ref())?;
                        let sandbox = Arc::new(Sandbox::recorded(*record));
                        return Ok(Creation { sandbox, is_replay: true });
                    }
                    KeyState::Pending if Instant::now() >= until => {
                        return Err(CreationKey::pending());
                    }
                    KeyState::Pending => tokio::time::sleep(PENDING_CHECK_INTERVAL).await,
                    KeyState::Free => {
                        let own = Some(key.clone());
                        match this.create_keyed(&tenant, wanted.clone(), own).await {
                            Ok(sandbox) => return Ok(Creation { sandbox, is_replay: false }),
                            // Another host may have been faster.
                            Err(refusal) => {
                                let state = this.key_state(&tenant, &key).await?;
                                if let KeyState::Free = state {
                                    return Err(refusal);
                                }
                            }
                        }
                    }
                }
            }
        });
        let made = tokio::time::timeout(patience, making).await;
        made.unwrap_or_else(|_| Err(CreationKey::pending()))
    }

    /// The sandbox of a key.
    async fn key_state(&self, tenant: &str, key: &CreationKey) -> Result<KeyState, ErrorResponse> {
        if let Some(state) = self.ledger.key_state(tenant, key).await? {
            // The ledger has one that is killed here until it has ended.
            let ends = |record: &SandboxRecord| lock(&self.killed).contains_key(&record.id);
            return Ok(match state {
                KeyState::Made(record) if ends(&record) => KeyState::Pending,
                state => state,
            });
        }
        let all = lock(&self.all);
        let found = all.values().find(|sandbox| {
            let digest = sandbox.key.as_ref().map(|key| &key.digest);
            digest == Some(&key.digest) && !sandbox.killed.load(Ordering::Acquire)
        });
        Ok(found.map_or(KeyState::Free, |one| KeyState::Made(Box::new(one.record()))))
    }

    /// Makes a sandbox of a template or a snapshot.
    pub(crate) async fn create(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        wanted: CreateOptions,
    ) -> Result<Arc<Sandbox>, ErrorResponse> {
        self.create_keyed(tenant, wanted, None).await
    }

    async fn create_keyed(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        wanted: CreateOptions,
        key: Option<CreationKey>,
    ) -> Result<Arc<Sandbox>, ErrorResponse> {
        self.memory.admit(1).await?;
        let (warm, snapshot) = match wanted.template_only {
            true => self.resolve_template(tenant, &wanted.template).await?,
            false => self.resolve(tenant, &wanted.template).await?,
        };
        let envs = snapshot.as_ref().map(|known| known.record.envs.clone()).unwrap_or_default();
        let directory = snapshot.as_ref().and_then(|known| known.record.directory.clone());
        let root = snapshot.as_ref().is_some_and(|known| known.record.root);
        let has_envs = !(envs.is_empty() && wanted.settings.envs.is_empty());
        if has_envs && !warm.config.linux {
            let message = "`envVars` needs a template of a Linux program; this one evaluates code";
            return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
        }
        wanted.settings.network.accept(&warm.config)?;
        // A state keeps the name of its template, also where that has the options of another one.
        let of_state = snapshot.as_ref().map(|known| known.record.template.clone());
        let (name, own) = (of_state.unwrap_or_else(|| warm.config.name.clone()), warm.clone());
        let is_copy = snapshot.as_ref().is_some_and(|known| known.record.built.is_none());
        let base = match snapshot.as_ref().map(|known| &known.record) {
            None => Some(BaseState::template(&warm.identity)),
            Some(record) if record.built.is_some() => Some(BaseState::build(&record.id)),
            Some(record) => record.base.clone(),
        };
        let session = match snapshot {
            None => warm.guest.session().map_err(|error| refused(&error))?,
            Some(known) => {
                let _place = self.pull_place(tenant).await?;
                let this = self.clone();
                blocking(move || {
                    this.snapshot_guest(&warm, &known)?.session().map_err(|e| refused(&e))
                })
                .await?
            }
        };
        let times = self.lifetime(wanted.time, wanted.pause_at_end);
        let due = next_event(&session);
        let mut settings = wanted.settings;
        settings.envs = envs.into_iter().chain(settings.envs).collect();
        settings.directory = settings.directory.or(directory);
        settings.root |= root;
        let mut sandbox = self.assemble(tenant, (name, base), settings, session, times)?;
        (sandbox.key, sandbox.warm) = (key, own.into());
        // A snapshot of a sandbox is no state that a sandbox begins in.
        sandbox.set_first_is_saved(is_copy && sandbox.base.is_some());
        let sandbox = Arc::new(sandbox);
        self.admit(vec![sandbox.clone()]).await?;
        if sandbox.key.is_some() {
            // Another host may have the key if the lease was lost meanwhile.
            self.ledger.check(&*sandbox)?;
        }
        self.schedule_background(&sandbox, due);
        Ok(sandbox)
    }

    /// A place among the snapshots and images that are opened now.
    pub(crate) async fn pull_place(&self, tenant: &Arc<str>) -> Result<Permit, ErrorResponse> {
        self.pulls.enter(&self.accounts, tenant, self.config.call_timeout).await
    }

    /// A new sandbox. Without a base it is not restarted without its memory.
    pub(crate) fn assemble(
        &self,
        tenant: &Arc<str>,
        (template, base): (String, Option<BaseState>),
        settings: SandboxSettings,
        session: Session,
        times: Lifetime,
    ) -> Result<Sandbox, ErrorResponse> {
        settings.check_size()?;
        let charge = Charge::default();
        charge.measure(&session, Operation::Call);
        let life = Residency::Live(Box::new(session));
        let of = (tenant.clone(), template);
        let id = self.ledger.new_id(tenant)?;
        let mut sandbox = Sandbox::new(id, random(24)?, of, settings, life, times);
        (sandbox.charge, sandbox.base) = (charge, base);
        Ok(sandbox)
    }

    /// Forks a sandbox into new sandboxes.
    pub(crate) async fn fork(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        count: usize,
        time: Duration,
    ) -> Result<Vec<Arc<Sandbox>>, ErrorResponse> {
        // Before any session is made.
        self.check_count(&sandbox.tenant, count)?;
        let more = sandbox.charge.expected().saturating_mul(count as u64);
        self.check_memory(&sandbox.tenant, more)?;
        self.memory.admit(count).await?;
        let own = sandbox.clone();
        let forking = self.with(sandbox, move |session| {
            let forks = session.fork(count).map_err(|e| refused(&e))?;
            // Before any other operation: a sandbox with forks is not saved and dropped.
            own.note_checkpoints(session);
            let has_checkpoints = own.has_checkpoints.load(Ordering::Relaxed);
            Ok((forks, own.fork_group(), has_checkpoints, own.first_is_saved()))
        });
        let (forks, fork_group, has_checkpoints, first_is_saved) = forking.await?;
        let due = forks.first().and_then(next_event);
        let times = self.lifetime(time, sandbox.lifetime().pause_at_end);
        let mut made = Vec::with_capacity(forks.len());
        for session in forks {
            let of = (sandbox.template.clone(), sandbox.base.clone());
            let settings = sandbox.present_settings();
            let mut fork = self.assemble(&sandbox.tenant, of, settings, session, times)?;
            fork.warm = self.template_of(sandbox).into();
            let fork = Arc::new(fork);
            fork.join(&fork_group);
            fork.set_first_is_saved(first_is_saved);
            fork.has_checkpoints.store(has_checkpoints, Ordering::Relaxed);
            made.push(fork);
        }
        self.admit(made.clone()).await?;
        made.iter().for_each(|fork| self.schedule_background(fork, due));
        Ok(made)
    }
}
