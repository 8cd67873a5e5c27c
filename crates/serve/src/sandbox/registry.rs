//! All sandboxes of a server: who has which, what they are made from, when they end, and where they are kept.
//!
//! What it promises: a sandbox that was paused is in the store, record and all, before its client is told. Nobody's
//! limit is passed. What is saved in the directory when a server starts is there for its clients.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use afresh::files::Tree;
use afresh::{Guest, Reference, SaveOptions, Session};
use hyper::StatusCode;
use tokio::sync::{OwnedMutexGuard, Semaphore};
use tracing::Instrument;

use super::config::SandboxConfig;
use super::connect::Failed;
use super::ledger::{Kept, Ledger, internal};
use super::one::{Life, Sandbox, Times, due, refused};
use super::quota::Quota;
use super::template::{Warm, kept};
use crate::error::ServeError;
use crate::refusal::Refusal;

/// All sandboxes of a server.
pub(crate) struct Sandboxes {
    pub(crate) config: SandboxConfig,
    pub(super) templates: Vec<Arc<Warm>>,
    pub(super) all: Mutex<HashMap<String, Arc<Sandbox>>>,
    /// Those that were killed and whose entries may be in the ledger still: nobody takes them up from there.
    pub(super) killed: Arc<Mutex<HashSet<String>>>,
    /// The server ends: what is made now would not be saved with the others. Changed under the lock of `all`.
    pub(super) ending: AtomicBool,
    pub(super) opened: Mutex<HashMap<String, Guest>>,
    pub(super) ledger: Ledger,
    pub(super) quota: Quota,
    /// Whether the store holds what nothing names, and when it was last looked for.
    pub(super) litter: AtomicBool,
    pub(super) tidied: Mutex<Instant>,
    running: Arc<Semaphore>,
}

/// Why a sandbox has a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// It is called.
    Call,
    /// Somebody connects to a program in it.
    #[cfg(feature = "linux")]
    Connection,
    /// It goes on by itself, if it is live.
    Slice,
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
pub(super) fn random(bytes: usize) -> Result<String, Refusal> {
    let mut random = vec![0; bytes];
    let filled = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    if filled != Ok(bytes) {
        let message = "the host has no randomness to name a sandbox with";
        return Err(Refusal::busy(StatusCode::SERVICE_UNAVAILABLE, message));
    }
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs what takes time on a thread for such.
pub(super) async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, Refusal> + Send + 'static,
) -> Result<R, Refusal> {
    let span = tracing::Span::current();
    match tokio::task::spawn_blocking(move || span.in_scope(work)).await {
        Ok(result) => result,
        Err(error) => {
            tracing::error!(%error, "a call of a sandbox panicked");
            Err(Refusal::host())
        }
    }
}

/// Does what must not be left half done. It goes on when whoever asked for it goes away; what it waits for must end.
pub(super) async fn to_its_end<R: Send + 'static>(
    work: impl Future<Output = Result<R, Refusal>> + Send + 'static,
) -> Result<R, Refusal> {
    match tokio::spawn(work.in_current_span()).await {
        Ok(result) => result,
        Err(error) => Err(internal(&error)),
    }
}

impl Sandboxes {
    /// Opens every template, and finds what was saved.
    pub(crate) async fn open(
        config: &SandboxConfig,
        #[cfg(feature = "fleet")] fleet: Option<&Arc<crate::fleet::Fleet>>,
    ) -> Result<Arc<Self>, ServeError> {
        let config = config.clone();
        #[cfg(feature = "fleet")]
        let share = fleet.map(super::moving::Share::new);
        let opening = std::thread::Builder::new().name("afresh-open".to_owned());
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let failed = |source: afresh::Cause| ServeError::Sandboxes { source };
        let open = move || {
            let opened = Self::open_now(
                config,
                #[cfg(feature = "fleet")]
                share,
            );
            drop(sender.send(opened.map(Arc::new)));
        };
        opening.spawn(open).map_err(|error| failed(error.into()))?;
        let opened = receiver.await.map_err(|error| failed(error.into()))?;
        opened.map_err(failed)
    }

    fn open_now(
        config: SandboxConfig,
        #[cfg(feature = "fleet")] share: Option<super::moving::Share>,
    ) -> Result<Self, afresh::Cause> {
        if config.templates.is_empty() {
            return Err("no template is named that sandboxes could be made from".into());
        }
        std::fs::create_dir_all(&config.dir)?;
        #[cfg(feature = "fleet")]
        let (ledger, records) = match &share {
            Some(share) => (share.ledger(&config)?, Vec::new()),
            None => Ledger::alone(&config)?,
        };
        #[cfg(not(feature = "fleet"))]
        let (ledger, records) = Ledger::alone(&config)?;
        let templates = config.templates.iter().map(|template| {
            let warm = Warm::open(
                &config,
                template,
                #[cfg(feature = "fleet")]
                share.as_ref(),
            );
            warm.map(Arc::new)
        });
        let templates = templates.collect::<Result<Vec<_>, _>>()?;
        // What no sandbox, snapshot or template needs any more.
        let store = kept(&config.dir, "any").parse::<Reference>()?.place().store()?;
        for listed in store.list()? {
            if ledger.has_lost(&listed.tag.name) {
                store.untag(&listed.tag.name)?;
            }
        }
        store.gc()?;
        let all = records.into_iter();
        let all = all.map(|record| (record.id.clone(), Arc::new(Sandbox::recorded(record))));
        Ok(Self {
            templates,
            all: Mutex::new(all.collect()),
            killed: Arc::default(),
            ending: AtomicBool::new(false),
            opened: Mutex::new(HashMap::new()),
            ledger,
            quota: Quota::new(config.max_snapshots),
            litter: AtomicBool::new(false),
            tidied: Mutex::new(Instant::now()),
            running: Arc::new(Semaphore::new(config.max_running_calls.max(1))),
            config,
        })
    }

    /// Whether there is a template of just this name.
    fn has_template(&self, name: &str) -> bool {
        self.templates.iter().any(|template| template.config.name == name)
    }

    /// Calls that run, of so many that may.
    #[cfg(feature = "fleet")]
    pub(crate) fn busy(&self) -> (usize, usize) {
        let places = self.config.max_running_calls.max(1);
        (places - self.running.available_permits().min(places), places)
    }

    /// The template of this name; the first for one that is not known, as clients have names of their own for it.
    pub(super) fn template(&self, name: &str) -> &Arc<Warm> {
        let named = self.templates.iter().find(|template| template.config.name == name);
        named.unwrap_or(&self.templates[0])
    }

    /// A sandbox of a tenant.
    pub(super) fn of(&self, tenant: &str, id: &str) -> Result<Arc<Sandbox>, Refusal> {
        let found = lock(&self.all).get(id).filter(|sandbox| *sandbox.tenant == *tenant).cloned();
        found.ok_or_else(|| self.ledger.absent(id).unwrap_or_else(|| Sandbox::not_found(id)))
    }

    /// Whether it is this server that knows about a sandbox: it is here, or it is being killed here.
    #[cfg(feature = "fleet")]
    pub(crate) fn has(&self, id: &str) -> bool {
        lock(&self.all).contains_key(id) || lock(&self.killed).contains(id)
    }

    /// A sandbox, whoever asks: for those who show its token.
    pub(super) fn any(&self, id: &str) -> Option<Arc<Sandbox>> {
        lock(&self.all).get(id).cloned()
    }

    /// The sandboxes of a tenant, oldest first.
    pub(super) async fn list(&self, tenant: &str) -> Result<Vec<Arc<Sandbox>>, Refusal> {
        let mut own: Vec<_> = lock(&self.all)
            .values()
            .filter(|sandbox| *sandbox.tenant == *tenant)
            .cloned()
            .collect();
        for record in self.ledger.sandboxes_of(tenant).await? {
            if !own.iter().any(|sandbox| sandbox.id == record.id) {
                own.push(Arc::new(Sandbox::recorded(record)));
            }
        }
        own.sort_by(|one, two| (one.started, &one.id).cmp(&(two.started, &two.id)));
        Ok(own)
    }

    /// Takes new sandboxes in, all of them or none.
    async fn admit(self: &Arc<Self>, new: Vec<Arc<Sandbox>>) -> Result<(), Refusal> {
        self.take_in(&new)?;
        let this = self.clone();
        to_its_end(async move {
            let entered = this.ledger.enter(&new).await;
            if entered.is_err() {
                for sandbox in &new {
                    lock(&this.all).remove(&sandbox.id);
                    // What was entered of them is struck out; what nobody could be told is not known to anybody.
                    let _ = this.ledger.gone(sandbox).await;
                }
            }
            entered
        })
        .await
    }

    fn take_in(&self, new: &[Arc<Sandbox>]) -> Result<(), Refusal> {
        let Some(first) = new.first() else { return Ok(()) };
        let mut all = lock(&self.all);
        if self.ending.load(Ordering::Relaxed) {
            let message = "this server is ending, and makes no sandbox; try again";
            return Err(Refusal::busy(StatusCode::SERVICE_UNAVAILABLE, message));
        }
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
        let snapshot = match self.has_template(&wanted.template) {
            true => None,
            false => self.snapshot(tenant, &wanted.template).await?,
        };
        let template = snapshot.as_ref().map_or(&wanted.template, |known| &known.record.template);
        let warm = self.template(template).clone();
        let name = warm.config.name.clone();
        let session = match snapshot {
            None => warm.guest.session().map_err(|error| refused(&error))?,
            Some(known) => {
                let this = self.clone();
                blocking(move || {
                    this.snapshot_guest(&warm, &known)?.session().map_err(|e| refused(&e))
                })
                .await?
            }
        };
        let times = self.times(wanted.time, wanted.pause_at_end);
        let due = due(&session);
        let sandbox = self.made(tenant, name, wanted.metadata, session, times)?;
        self.admit(vec![sandbox.clone()]).await?;
        self.goes_on(&sandbox, due);
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
        Ok(Arc::new(Sandbox::new(self.ledger.id(tenant)?, random(24)?, of, metadata, life, times)))
    }

    /// Does something with a sandbox's session, which comes back from the store if it has to.
    pub(super) async fn with<R: Send + 'static>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        work: impl FnOnce(&mut Session) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<R, Refusal> {
        self.turn(sandbox, Turn::Call, work).await
    }

    /// The same, in a turn of any kind.
    pub(super) async fn turn<R: Send + 'static>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        kind: Turn,
        work: impl FnOnce(&mut Session) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<R, Refusal> {
        let waiting = sandbox.wait()?;
        let mut life = sandbox.life.clone().lock_owned().await;
        // Only once it is this call's turn, so that many calls of one sandbox hold one place. Never closed.
        let place = self.running.clone().acquire_owned().await;
        drop(waiting);
        self.ledger.check(sandbox)?;
        let (this, sandbox) = (self.clone(), sandbox.clone());
        blocking(move || {
            let _place = place;
            let wakes = kind != Turn::Slice;
            if wakes && matches!(*life, Life::Saved) {
                let restored = tracing::debug_span!("resume").in_scope(|| this.restore(&sandbox));
                *life = Life::Live(Box::new(restored?));
            }
            let used = || {
                if wakes {
                    sandbox.times().used = Instant::now();
                }
            };
            used();
            let result = match &mut *life {
                Life::Live(session) => {
                    let done = tracing::debug_span!("call").in_scope(|| work(session));
                    lock(&sandbox.mark).followed_by(kind);
                    let due = match sandbox.commands.moved() {
                        true => Some(Duration::ZERO),
                        false => due(session),
                    };
                    this.goes_on(&sandbox, due);
                    done
                }
                other => Err(other.absent(&sandbox.id)),
            };
            used();
            // Whoever may have it by now has not done this call.
            this.ledger.check(&sandbox)?;
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
        let name = self.ledger.opened_from(&self.config.dir, sandbox)?;
        let guest = afresh::open(name, &warm.options).map_err(|error| internal(&error))?;
        guest.session().map_err(|error| refused(&error))
    }

    /// Saves a sandbox. Its guest is dropped, unless there are checkpoints or relatives to go to. One that is paused, or
    /// whose server ends, is left to whichever host of a fleet it is wanted on next.
    pub(super) async fn save(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        pause: bool,
        ending: bool,
    ) -> Result<(), Refusal> {
        let life = sandbox.life.clone().lock_owned().await;
        to_its_end(self.clone().save_now(sandbox.clone(), life, pause, ending)).await
    }

    async fn save_now(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        mut life: OwnedMutexGuard<Life>,
        pause: bool,
        ending: bool,
    ) -> Result<(), Refusal> {
        let (this, own) = (self.clone(), sandbox.clone());
        let (mut life, saved) = blocking(move || {
            let session = match &mut *life {
                Life::Live(session) => session,
                Life::Saved => return Ok((life, None)),
                other => return Err(other.absent(&own.id)),
            };
            this.ledger.check(&own)?;
            own.goes_on.store(due(session).is_some(), Ordering::Relaxed);
            let name = kept(&this.config.dir, &format!("sandbox-{}", own.id));
            let to: Reference = name.parse().map_err(|error| internal(&error))?;
            let saved = session.save(&to, &SaveOptions::new()).map_err(|error| internal(&error))?;
            let saved: Kept = this.ledger.keep(&this.config.dir, &saved)?;
            this.ledger.saved_here(&own);
            // What was saved of it before has no name any more.
            this.litter.store(true, Ordering::Relaxed);
            if pause || ending {
                let why = "the sandbox is saved, and its programs with it";
                own.commands.end(&Failed::new("unavailable", why));
            }
            if !own.branched.load(Ordering::Relaxed) {
                *life = Life::Saved;
            }
            Ok((life, Some(saved)))
        })
        .await?;
        sandbox.saved.store(true, Ordering::Relaxed);
        let was = std::mem::replace(&mut sandbox.times().paused, pause);
        let release = self.ledger.releases() && (ending || pause && matches!(*life, Life::Saved));
        let put = self.ledger.saved(&sandbox, saved, release).await;
        match put {
            #[cfg(feature = "fleet")]
            Ok(()) if release => {
                // Calls that wait for it are made again, elsewhere.
                *life = Life::Moved;
                lock(&self.all).remove(&sandbox.id);
            }
            Ok(()) => {}
            Err(refusal) => {
                sandbox.times().paused = was;
                return Err(refusal);
            }
        }
        Ok(())
    }

    /// Lets a paused sandbox go on for `time` from now, and what went on by itself in it.
    pub(super) async fn resume(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        time: Option<Duration>,
    ) -> Result<(), Refusal> {
        let ends = time.map(|time| SystemTime::now() + time.min(self.config.timeout));
        let was_paused = {
            let mut times = sandbox.times();
            let later = ends.filter(|ends| times.paused || *ends > times.ends);
            times.ends = later.unwrap_or(times.ends);
            times.used = Instant::now();
            std::mem::replace(&mut times.paused, false)
        };
        self.note(sandbox).await?;
        if was_paused && sandbox.goes_on.load(Ordering::Relaxed) {
            let (this, own) = (self.clone(), sandbox.clone());
            tokio::spawn(async move {
                if let Err(refusal) = this.with(&own, |_| Ok(())).await {
                    let why = refusal.message;
                    tracing::debug!(id = own.id, why, "goes on with the next call");
                }
            });
        }
        Ok(())
    }

    /// Has the record of a sandbox that is written down say when it ends, and whether it is paused, now.
    pub(super) async fn note(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<(), Refusal> {
        if !self.ledger.has(sandbox) {
            return Ok(());
        }
        let life = sandbox.life.clone().lock_owned().await;
        match &*life {
            Life::Live(_) | Life::Saved => {
                let (this, sandbox) = (self.clone(), sandbox.clone());
                let noted = async move {
                    let _life = life;
                    this.ledger.saved(&sandbox, None, false).await
                };
                to_its_end(noted).await
            }
            other => Err(other.absent(&sandbox.id)),
        }
    }

    /// Forks of a sandbox, each a sandbox of its own.
    pub(super) async fn fork(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        count: usize,
        time: Duration,
    ) -> Result<Vec<Arc<Sandbox>>, Refusal> {
        let own = sandbox.clone();
        let forking = self.with(sandbox, move |session| {
            let forks = session.fork(count).map_err(|e| refused(&e))?;
            // Before anybody else's turn: it is not to be saved and dropped, with relatives to go to.
            own.branched.store(true, Ordering::Relaxed);
            Ok(forks)
        });
        let forks = forking.await?;
        let due = forks.first().and_then(due);
        let times = self.times(time, sandbox.times().pause_at_end);
        let mut made = Vec::with_capacity(forks.len());
        for session in forks {
            let (template, metadata) = (sandbox.template.clone(), sandbox.metadata.clone());
            let fork = self.made(&sandbox.tenant, template, metadata, session, times)?;
            fork.branched.store(true, Ordering::Relaxed);
            made.push(fork);
        }
        self.admit(made.clone()).await?;
        made.iter().for_each(|fork| self.goes_on(fork, due));
        Ok(made)
    }
}
