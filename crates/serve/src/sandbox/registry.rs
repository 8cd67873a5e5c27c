//! All sandboxes of a server: who has which, what they are made from, when they end, and where they are kept.
//!
//! What it promises: a sandbox that was paused is in the store, record and all, before its client is told. Nobody's
//! limit is passed. What is saved in the directory when a server starts is there for its clients.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use afresh::files::Tree;
use afresh::{Guest, Reference, SaveOptions, Session};
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::config::SandboxConfig;
use super::one::{Life, MARK, Sandbox, Times, refused};
use super::record::{Records, SandboxRecord, SnapshotRecord};
use super::template::{Warm, kept};
use crate::error::ServeError;
use crate::failure::describe;
use crate::refusal::Refusal;

/// Guests of snapshots that are kept open for the next sandbox.
const OPEN_SNAPSHOTS: usize = 32;

/// Most sandboxes, and most states of one, that the status page shows.
const SHOWN: usize = 50;

/// How long a client waits for the end of a sandbox that is being called.
const ENDING: Duration = Duration::from_secs(1);

/// All sandboxes of a server.
pub(crate) struct Sandboxes {
    pub(super) config: SandboxConfig,
    templates: Vec<Arc<Warm>>,
    all: Mutex<HashMap<String, Arc<Sandbox>>>,
    snapshots: Mutex<BTreeMap<String, SnapshotRecord>>,
    opened: Mutex<HashMap<String, Guest>>,
    sandbox_records: Records,
    snapshot_records: Records,
    running: Arc<Semaphore>,
}

/// What a new sandbox is to be like.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) template: String,
    pub(super) time: Duration,
    pub(super) pause_at_end: bool,
    pub(super) metadata: BTreeMap<String, String>,
}

/// So many random bytes, as text.
fn random(bytes: usize) -> Result<String, Refusal> {
    let mut random = vec![0; bytes];
    let filled = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    if filled != Ok(bytes) {
        let message = "the host has no randomness to name a sandbox with";
        return Err(Refusal::busy(StatusCode::SERVICE_UNAVAILABLE, message));
    }
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs what takes time on a thread for such.
async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, Refusal> + Send + 'static,
) -> Result<R, Refusal> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => {
            tracing::error!(%error, "a call of a sandbox panicked");
            Err(Refusal::host())
        }
    }
}

fn internal(error: &(dyn std::error::Error + 'static)) -> Refusal {
    Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, describe(error))
}

impl Sandboxes {
    /// Opens every template, and finds what was saved.
    pub(crate) async fn open(config: &SandboxConfig) -> Result<Arc<Self>, ServeError> {
        let config = config.clone();
        let opening = std::thread::Builder::new().name("afresh-open".to_owned());
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let failed = |source: afresh::Cause| ServeError::Sandboxes { source };
        opening
            .spawn(move || drop(sender.send(Self::open_now(config).map(Arc::new))))
            .map_err(|error| failed(error.into()))?;
        let opened = receiver.await.map_err(|error| failed(error.into()))?;
        opened.map_err(failed)
    }

    fn open_now(config: SandboxConfig) -> Result<Self, afresh::Cause> {
        if config.templates.is_empty() {
            return Err("no template is named that sandboxes could be made from".into());
        }
        std::fs::create_dir_all(&config.dir)?;
        let sandbox_records = Records::open(config.dir.join("sandboxes"))?;
        let snapshot_records = Records::open(config.dir.join("records"))?;
        let templates =
            config.templates.iter().map(|template| Warm::open(&config, template).map(Arc::new));
        let templates = templates.collect::<Result<Vec<_>, _>>()?;
        // What no sandbox, snapshot or template needs any more.
        kept(&config.dir, "any").parse::<Reference>()?.place().store()?.gc()?;
        let all = sandbox_records.all::<SandboxRecord>()?.into_iter();
        let all = all.map(|record| (record.id.clone(), Arc::new(Sandbox::recorded(record))));
        let snapshots = snapshot_records.all::<SnapshotRecord>()?.into_iter();
        let snapshots = snapshots.map(|record| (record.id.clone(), record));
        Ok(Self {
            templates,
            all: Mutex::new(all.collect()),
            snapshots: Mutex::new(snapshots.collect()),
            opened: Mutex::new(HashMap::new()),
            sandbox_records,
            snapshot_records,
            running: Arc::new(Semaphore::new(config.max_running_calls.max(1))),
            config,
        })
    }

    /// The template of this name; the first for one that is not known, as clients have names of their own for it.
    pub(super) fn template(&self, name: &str) -> &Arc<Warm> {
        let named = self.templates.iter().find(|template| template.config.name == name);
        named.unwrap_or(&self.templates[0])
    }

    /// A sandbox of a tenant.
    pub(super) fn of(&self, tenant: &str, id: &str) -> Result<Arc<Sandbox>, Refusal> {
        let found = lock(&self.all).get(id).filter(|sandbox| *sandbox.tenant == *tenant).cloned();
        found.ok_or_else(|| Sandbox::not_found(id))
    }

    /// A sandbox, whoever asks: for those who show its token.
    pub(super) fn any(&self, id: &str) -> Option<Arc<Sandbox>> {
        lock(&self.all).get(id).cloned()
    }

    /// The sandboxes of a tenant, oldest first.
    pub(super) fn list(&self, tenant: &str) -> Vec<Arc<Sandbox>> {
        let mut own: Vec<_> = lock(&self.all)
            .values()
            .filter(|sandbox| *sandbox.tenant == *tenant)
            .cloned()
            .collect();
        own.sort_by(|one, two| one.started.cmp(&two.started).then_with(|| one.id.cmp(&two.id)));
        own
    }

    /// How many sandboxes there are: live, and saved.
    pub(crate) fn count(&self) -> (usize, usize) {
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        let saved = |sandbox: &&Arc<Sandbox>| {
            sandbox.life.try_lock().is_ok_and(|life| matches!(*life, Life::Saved))
        };
        let saved = all.iter().filter(saved).count();
        (all.len() - saved, saved)
    }

    /// What the status page shows of them: all in numbers, and of some the tree they stand in.
    pub(crate) fn overview(&self) -> Value {
        let (live, saved) = self.count();
        let mut all: Vec<_> = lock(&self.all).values().cloned().collect();
        all.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.times().used));
        let some = all.iter().take(SHOWN).map(|sandbox| {
            let paused = sandbox.times().paused;
            // One that is being called is not waited for.
            let (at, states) = match sandbox.life.try_lock().as_deref() {
                Ok(Life::Live(session)) => {
                    let states = session.tree();
                    let states = states.iter().rev().take(SHOWN).rev().map(|state| {
                        json!({
                            "id": state.id.to_string(),
                            "parent": state.parent.map(|parent| parent.to_string()),
                            "name": state.name.as_deref().filter(|name| *name != MARK),
                        })
                    });
                    (Some(session.at().to_string()), states.collect())
                }
                _ => (None, Vec::new()),
            };
            json!({
                "id": &sandbox.id[..6],
                "template": sandbox.template,
                "state": if paused { "paused" } else { "running" },
                "runs": sandbox.runs.load(Ordering::Relaxed),
                "at": at,
                "states": states,
            })
        });
        json!({"live": live, "saved": saved, "some": some.collect::<Vec<_>>()})
    }

    /// Takes new sandboxes in, all of them or none.
    fn admit(&self, new: &[Arc<Sandbox>]) -> Result<(), Refusal> {
        let Some(first) = new.first() else { return Ok(()) };
        let mut all = lock(&self.all);
        let own = all.values().filter(|sandbox| sandbox.tenant == first.tenant).count();
        if own + new.len() > self.config.max_sandboxes {
            let most = self.config.max_sandboxes;
            let message = format!("a tenant may have {most} sandboxes, and has {own}; kill some");
            return Err(Refusal::busy(StatusCode::TOO_MANY_REQUESTS, message));
        }
        all.extend(new.iter().map(|sandbox| (sandbox.id.clone(), sandbox.clone())));
        Ok(())
    }

    /// A life that begins now.
    pub(super) fn times(&self, time: Duration, pause_at_end: bool) -> Times {
        let ends = SystemTime::now() + time.min(self.config.timeout);
        Times { ends, used: Instant::now(), paused: false, pause_at_end }
    }

    /// Makes a sandbox of a template or a snapshot.
    pub(super) async fn create(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        wanted: Wanted,
    ) -> Result<Arc<Sandbox>, Refusal> {
        let snapshot = self.snapshot(tenant, &wanted.template);
        let template = snapshot.as_ref().map_or(&wanted.template, |record| &record.template);
        let warm = self.template(template).clone();
        let name = warm.config.name.clone();
        let session = match snapshot {
            None => warm.guest.session().map_err(|error| refused(&error))?,
            Some(record) => {
                let this = self.clone();
                blocking(move || {
                    this.snapshot_guest(&warm, &record.id)?.session().map_err(|e| refused(&e))
                })
                .await?
            }
        };
        let times = self.times(wanted.time, wanted.pause_at_end);
        let sandbox = self.made(tenant, name, wanted.metadata, session, times)?;
        self.admit(std::slice::from_ref(&sandbox))?;
        Ok(sandbox)
    }

    fn made(
        &self,
        tenant: &Arc<str>,
        template: String,
        metadata: BTreeMap<String, String>,
        session: Session,
        times: Times,
    ) -> Result<Arc<Sandbox>, Refusal> {
        let life = Life::Live(Box::new(session));
        let of = (tenant.clone(), template);
        Ok(Arc::new(Sandbox::new(random(10)?, random(24)?, of, metadata, life, times)))
    }

    /// The guest of a snapshot, opened once.
    fn snapshot_guest(&self, warm: &Warm, id: &str) -> Result<Guest, Refusal> {
        if let Some(guest) = lock(&self.opened).get(id) {
            return Ok(guest.clone());
        }
        let name = kept(&self.config.dir, &format!("snap-{id}"));
        let guest = afresh::open(name, &warm.options).map_err(|error| internal(&error))?;
        let mut opened = lock(&self.opened);
        if opened.len() >= OPEN_SNAPSHOTS {
            opened.clear();
        }
        opened.insert(id.to_owned(), guest.clone());
        Ok(guest)
    }

    /// Does something with a sandbox's session, which comes back from the store if it has to.
    pub(super) async fn with<R: Send + 'static>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        work: impl FnOnce(&mut Session) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<R, Refusal> {
        let waiting = sandbox.wait()?;
        let mut life = sandbox.life.clone().lock_owned().await;
        // Only once it is this call's turn, so that many calls of one sandbox hold one place. Never closed.
        let place = self.running.clone().acquire_owned().await;
        drop(waiting);
        let (this, sandbox) = (self.clone(), sandbox.clone());
        blocking(move || {
            let _place = place;
            if matches!(*life, Life::Saved) {
                *life = Life::Live(Box::new(this.restore(&sandbox)?));
            }
            sandbox.times().used = Instant::now();
            let result = match &mut *life {
                Life::Live(session) => work(session),
                _ => Err(Sandbox::not_found(&sandbox.id)),
            };
            sandbox.times().used = Instant::now();
            result
        })
        .await
    }

    /// Reads the files of a sandbox.
    pub(super) async fn tree<R: Send + 'static>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        read: impl FnOnce(&Tree) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<R, Refusal> {
        self.with(sandbox, |session| {
            let tree = session.files().map_err(|error| refused(&error))?.tree();
            read(&tree)
        })
        .await
    }

    /// Changes the files of a sandbox; what fails changes nothing.
    pub(super) async fn files<R: Send + 'static>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        change: impl FnOnce(&mut Tree) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<R, Refusal> {
        self.with(sandbox, |session| {
            let mut files = session.files().map_err(|error| refused(&error))?;
            let mut tree = files.tree();
            let result = change(&mut tree)?;
            let put = files.change("", |old| {
                *old = tree;
                Ok(())
            });
            put.map_err(|error| refused(&error))?;
            Ok(result)
        })
        .await
    }

    fn restore(&self, sandbox: &Sandbox) -> Result<Session, Refusal> {
        let warm = self.template(&sandbox.template);
        let name = kept(&self.config.dir, &format!("sandbox-{}", sandbox.id));
        let guest = afresh::open(name, &warm.options).map_err(|error| internal(&error))?;
        guest.session().map_err(|error| refused(&error))
    }

    /// Saves a sandbox. Its guest is dropped, unless there are checkpoints or relatives to go to.
    pub(super) async fn save(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        pause: bool,
    ) -> Result<(), Refusal> {
        let mut life = sandbox.life.clone().lock_owned().await;
        let (this, sandbox) = (self.clone(), sandbox.clone());
        blocking(move || {
            let session = match &mut *life {
                Life::Live(session) => Some(session),
                Life::Saved => None,
                Life::Gone => return Err(Sandbox::not_found(&sandbox.id)),
            };
            if let Some(session) = session {
                let name = kept(&this.config.dir, &format!("sandbox-{}", sandbox.id));
                let to: Reference = name.parse().map_err(|error| internal(&error))?;
                session.save(&to, &SaveOptions::new()).map_err(|error| internal(&error))?;
                if !sandbox.branched.load(Ordering::Relaxed) {
                    *life = Life::Saved;
                }
            }
            sandbox.saved.store(true, Ordering::Relaxed);
            let was = std::mem::replace(&mut sandbox.times().paused, pause);
            let put = this.sandbox_records.put(&sandbox.id, &sandbox.record());
            put.map_err(|error| {
                sandbox.times().paused = was;
                internal(&error)
            })
        })
        .await
    }

    /// Lets a paused sandbox go on for `time` from now.
    pub(super) async fn resume(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        time: Option<Duration>,
    ) -> Result<(), Refusal> {
        let ends = time.map(|time| SystemTime::now() + time.min(self.config.timeout));
        {
            let mut times = sandbox.times();
            let later = ends.filter(|ends| times.paused || *ends > times.ends);
            times.ends = later.unwrap_or(times.ends);
            times.paused = false;
            times.used = Instant::now();
        }
        self.note(sandbox).await
    }

    /// Has the record of a sandbox that is in the store say when it ends, and whether it is paused, now.
    pub(super) async fn note(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<(), Refusal> {
        if !sandbox.saved.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (this, sandbox) = (self.clone(), sandbox.clone());
        let life = sandbox.life.clone().lock_owned().await;
        blocking(move || match *life {
            Life::Gone => Err(Sandbox::not_found(&sandbox.id)),
            _ => this.sandbox_records.put(&sandbox.id, &sandbox.record()).map_err(|e| internal(&e)),
        })
        .await
    }

    /// Ends a sandbox, and forgets it.
    pub(super) async fn kill(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<(), Refusal> {
        if lock(&self.all).remove(&sandbox.id).is_none() {
            return Err(Sandbox::not_found(&sandbox.id));
        }
        let (this, sandbox) = (self.clone(), sandbox.clone());
        let ending = tokio::spawn(async move {
            let mut life = sandbox.life.clone().lock_owned().await;
            blocking(move || {
                *life = Life::Gone;
                this.sandbox_records.remove(&sandbox.id).map_err(|error| internal(&error))?;
                this.untag(&format!("sandbox-{}", sandbox.id));
                Ok(())
            })
            .await
        });
        // Nobody finds it any more; a call that is under way may last, and is not waited for.
        match tokio::time::timeout(ENDING, ending).await {
            Ok(Ok(ended)) => ended,
            Ok(Err(error)) => Err(internal(&error)),
            Err(_) => Ok(()),
        }
    }

    /// Takes a name out of the store, if it is there.
    fn untag(&self, name: &str) {
        let place: Result<Reference, _> = kept(&self.config.dir, name).parse();
        if let Ok(store) = place.map_err(drop).and_then(|r| r.place().store().map_err(drop)) {
            // A sandbox that was never saved has none.
            let _ = store.untag(name);
        }
    }

    /// Forks of a sandbox, each a sandbox of its own.
    pub(super) async fn fork(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        count: usize,
        time: Duration,
    ) -> Result<Vec<Arc<Sandbox>>, Refusal> {
        let forks =
            self.with(sandbox, move |session| session.fork(count).map_err(|e| refused(&e))).await?;
        let times = self.times(time, sandbox.times().pause_at_end);
        let mut made = Vec::with_capacity(forks.len());
        for session in forks {
            let (template, metadata) = (sandbox.template.clone(), sandbox.metadata.clone());
            let fork = self.made(&sandbox.tenant, template, metadata, session, times)?;
            fork.branched.store(true, Ordering::Relaxed);
            made.push(fork);
        }
        self.admit(&made)?;
        sandbox.branched.store(true, Ordering::Relaxed);
        Ok(made)
    }

    /// Saves a sandbox's present state as something that others can be made from.
    pub(super) async fn keep(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        names: Vec<String>,
    ) -> Result<SnapshotRecord, Refusal> {
        let record = SnapshotRecord {
            id: random(10)?,
            tenant: sandbox.tenant.to_string(),
            template: sandbox.template.clone(),
            sandbox: sandbox.id.clone(),
            names,
        };
        let (this, kept_record) = (self.clone(), record.clone());
        self.with(sandbox, move |session| {
            let name = kept(&this.config.dir, &format!("snap-{}", kept_record.id));
            let to: Reference = name.parse().map_err(|error| internal(&error))?;
            session.save(&to, &SaveOptions::new()).map_err(|error| internal(&error))?;
            this.name(kept_record).map_err(|error| internal(&error))
        })
        .await?;
        Ok(record)
    }

    /// Takes a snapshot in. A name that another of the tenant had is its own from then on.
    fn name(&self, record: SnapshotRecord) -> std::io::Result<()> {
        self.snapshot_records.put(&record.id, &record)?;
        let mut snapshots = lock(&self.snapshots);
        for other in snapshots.values_mut().filter(|other| other.tenant == record.tenant) {
            let had = other.names.len();
            other.names.retain(|name| !record.names.contains(name));
            if other.names.len() != had {
                self.snapshot_records.put(&other.id, other)?;
            }
        }
        snapshots.insert(record.id.clone(), record);
        Ok(())
    }

    /// A snapshot of a tenant, by its id or its name.
    pub(super) fn snapshot(&self, tenant: &str, name: &str) -> Option<SnapshotRecord> {
        let snapshots = lock(&self.snapshots);
        let own = |record: &&SnapshotRecord| record.tenant == tenant;
        if let Some(record) = snapshots.get(name).filter(own) {
            return Some(record.clone());
        }
        let named = |record: &&SnapshotRecord| record.names.iter().any(|own| own == name);
        snapshots.values().filter(own).find(named).cloned()
    }

    /// The snapshots of a tenant.
    pub(super) fn snapshots(&self, tenant: &str) -> Vec<SnapshotRecord> {
        lock(&self.snapshots).values().filter(|record| record.tenant == tenant).cloned().collect()
    }

    /// Forgets a snapshot. Sandboxes that were made from it keep what they have.
    pub(super) async fn forget(self: &Arc<Self>, record: SnapshotRecord) -> Result<(), Refusal> {
        lock(&self.snapshots).remove(&record.id);
        lock(&self.opened).remove(&record.id);
        let this = self.clone();
        blocking(move || {
            this.snapshot_records.remove(&record.id).map_err(|error| internal(&error))?;
            this.untag(&format!("snap-{}", record.id));
            Ok(())
        })
        .await
    }

    /// Ends those whose time is over, and saves those that nobody has called for a while.
    pub(crate) async fn sweep(self: &Arc<Self>) {
        let now = SystemTime::now();
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        for sandbox in all {
            let times = *sandbox.times();
            // One that is being called gets its turn later.
            let free = sandbox.life.try_lock().is_ok();
            let result = if times.paused || !free {
                Ok(())
            } else if times.ends <= now {
                match times.pause_at_end {
                    true => self.save(&sandbox, true).await,
                    false => self.kill(&sandbox).await,
                }
            } else if times.used.elapsed() >= self.config.idle_timeout
                && !sandbox.branched.load(Ordering::Relaxed)
                && sandbox.life.try_lock().is_ok_and(|life| matches!(*life, Life::Live(_)))
            {
                self.save(&sandbox, false).await
            } else {
                Ok(())
            };
            if let Err(refusal) = result {
                tracing::warn!(id = sandbox.id, why = refusal.message, "not saved or ended");
            }
        }
    }

    /// Saves every live sandbox, when the server ends.
    pub(crate) async fn save_all(self: &Arc<Self>) {
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        for sandbox in all {
            let paused = sandbox.times().paused;
            if let Err(refusal) = self.save(&sandbox, paused).await {
                tracing::error!(id = sandbox.id, why = refusal.message, "a sandbox is lost");
            }
        }
    }
}
