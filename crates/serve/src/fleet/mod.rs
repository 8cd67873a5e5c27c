//! More machines that share the work, over NATS and a store that all of them see.
//!
//! What it promises: any host takes any request, and what it has not got itself goes to a host that has. A sandbox
//! has one owner: an entry in a ledger that is only changed by compare-and-set, held by a lease that its owner stops
//! relying on before anybody may break it. What was acknowledged as saved is found by every host. While NATS is away,
//! guests of this host are served on, and what needs the fleet is refused with 503.
//! What may break it: see [`policy::Lease`]; and a NATS that forgets what it acknowledged.

mod clock;
mod collect;
mod config;
mod entry;
mod forward;
mod hold;
mod keep;
mod links;
pub mod policy;
mod sessions;
mod talk;
mod tell;
mod way;
mod wire;

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::task::AbortHandle;

pub use collect::{CollectError, collect};
pub use config::FleetConfig;
pub(crate) use entry::{Anchor, State};
pub(crate) use sessions::Taken;
pub use tell::{NodesError, drain, nodes};
pub(crate) use way::{About, Way};

use crate::error::ServeError;
use crate::service::Shared;
use clock::now;
use links::Links;
use policy::{Advert, Lease, Members, Moment, Seed, Suspicion, Terms};

/// This host in its fleet.
pub(crate) struct Fleet {
    pub(crate) config: FleetConfig,
    terms: Terms,
    /// What requests for this process are sent to.
    node: String,
    name: String,
    links: Links,
    store: Option<afresh::store::remote::Remote>,
    own: Mutex<Own>,
    members: Mutex<Members>,
    suspicion: Mutex<Suspicion>,
    /// Lives that somebody waits for, which are looked after beside those in the ring.
    suspects: Mutex<HashMap<String, Moment>>,
    /// Lives whose leases are over.
    over: Mutex<BTreeSet<String>>,
    /// Where sandboxes were found last.
    ways: Mutex<HashMap<String, String>>,
    /// One for the sandboxes that share a place in it, so that one host takes a sandbox once.
    taking: [tokio::sync::Mutex<()>; 64],
    random: Mutex<Seed>,
    /// Held by the one that settles what is in doubt.
    settling: tokio::sync::Mutex<()>,
    draining: AtomicBool,
    transfers: Mutex<HashMap<u64, Arc<talk::Transfer>>>,
    next_transfer: AtomicU64,
    shared: OnceLock<Weak<Shared>>,
    drain: tokio::sync::Notify,
    tasks: Mutex<Vec<AbortHandle>>,
    pub(crate) counts: Counts,
}

/// The lease that this host has now.
struct Own {
    life: String,
    lease: Lease,
    /// Leases that it has had.
    lives: u64,
}

/// What is counted.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Calls that were answered here, or sent to where what they need is held.
    pub(crate) held: prometheus_client::metrics::counter::Counter,
    /// Calls that went where nothing of it was held.
    pub(crate) elsewhere: prometheus_client::metrics::counter::Counter,
    /// Calls that went to another host.
    pub(crate) forwarded: prometheus_client::metrics::counter::Counter,
    /// Sandboxes that were taken over.
    pub(crate) taken: prometheus_client::metrics::counter::Counter,
    /// Sandboxes that were lost to another host, or with their lease.
    pub(crate) lost: prometheus_client::metrics::counter::Counter,
    /// Adverts that were heard.
    pub(crate) adverts: prometheus_client::metrics::counter::Counter,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// So many random hex digits.
fn digits(bytes: usize) -> Result<String, afresh::Cause> {
    let mut random = vec![0; bytes];
    let flags = rustix::rand::GetRandomFlags::empty();
    if rustix::rand::getrandom(&mut random, flags) != Ok(bytes) {
        return Err("the host has no randomness to name itself with".into());
    }
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The remote that is meant by a URL or a directory.
fn store(place: &str) -> Result<afresh::store::remote::Remote, afresh::Cause> {
    let url = match place.contains("://") {
        true => place.to_owned(),
        false => {
            std::fs::create_dir_all(place)?;
            format!("file://{}", std::fs::canonicalize(place)?.display())
        }
    };
    let place: afresh::Place = url.parse()?;
    Ok(place.remote()?)
}

/// What the store knows this fleet by.
fn keeper(config: &FleetConfig) -> String {
    format!("fleet-{}", config.fleet)
}

impl Fleet {
    /// Joins: connects, and takes a lease, which is renewed from then on.
    pub(crate) async fn join(config: &FleetConfig) -> Result<Arc<Self>, ServeError> {
        let failed = |source: afresh::Cause| ServeError::Fleet { source };
        Self::try_join(config).await.map_err(failed)
    }

    async fn try_join(config: &FleetConfig) -> Result<Arc<Self>, afresh::Cause> {
        if config.lease < Duration::from_millis(500) {
            return Err(
                "a lease takes at least 500 ms: hosts could not renew a shorter one in time".into(),
            );
        }
        let node = digits(6)?;
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let name = config.name.clone().unwrap_or_else(|| host.trim().to_owned());
        let links = Links::open(config, &name).await?;
        let store = match config.store.clone() {
            // It waits for threads of its own.
            Some(place) => {
                let keeper = keeper(config);
                let opening = move || {
                    let store = store(&place).map_err(|e| e.to_string())?;
                    // Whoever collects there is to ask this fleet what it names.
                    store.claim(&keeper).map_err(|e| e.to_string())?;
                    Ok::<_, String>(store)
                };
                Some(tokio::task::spawn_blocking(opening).await??)
            }
            None => None,
        };
        let terms = Terms { time: config.lease };
        let seed = u64::from_str_radix(&node, 16).unwrap_or(1);
        let sent = now();
        let life = format!("{node}-1");
        let revision = hold::enter(&links, &life, &name).await?;
        let this = Arc::new(Self {
            terms,
            links,
            store,
            own: Mutex::new(Own { life, lease: Lease::taken(terms, revision, sent), lives: 1 }),
            members: Mutex::new(Members::default()),
            suspicion: Mutex::new(Suspicion::new(terms)),
            suspects: Mutex::default(),
            over: Mutex::default(),
            ways: Mutex::default(),
            taking: std::array::from_fn(|_| tokio::sync::Mutex::new(())),
            random: Mutex::new(Seed::new(seed)),
            settling: tokio::sync::Mutex::new(()),
            draining: AtomicBool::new(false),
            transfers: Mutex::default(),
            next_transfer: AtomicU64::new(1),
            shared: OnceLock::new(),
            drain: tokio::sync::Notify::new(),
            tasks: Mutex::default(),
            counts: Counts::default(),
            config: config.clone(),
            node,
            name,
        });
        // From now on: opening guests may take longer than a lease.
        this.spawn(hold::renewing(Arc::downgrade(&this)));
        Ok(this)
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        lock(&self.tasks).push(tokio::spawn(work).abort_handle());
    }

    /// Begins to answer other hosts, to tell of itself and to look after others.
    pub(crate) async fn begin(self: &Arc<Self>, shared: &Arc<Shared>) -> Result<(), ServeError> {
        if self.shared.set(Arc::downgrade(shared)).is_err() {
            return Ok(());
        }
        let failed = |source| ServeError::Fleet { source };
        talk::listen(self).await.map_err(failed)?;
        tell::begin(self).await.map_err(failed)?;
        self.spawn(hold::watching(Arc::downgrade(self)));
        Ok(())
    }

    /// Has the others send nothing new.
    pub(crate) fn begin_to_end(&self) {
        self.draining.store(true, std::sync::atomic::Ordering::Relaxed);
        self.drain.notify_one();
    }

    /// Whether this host is about to leave.
    pub(crate) fn ends(&self) -> bool {
        self.draining.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Leaves, once everything was saved and released.
    pub(crate) async fn leave(&self) {
        for task in lock(&self.tasks).drain(..) {
            task.abort();
        }
        hold::leave(self).await;
        // What was said last is to arrive.
        let _ = tokio::time::timeout(Duration::from_secs(2), self.links.client.flush()).await;
    }

    fn shared(&self) -> Option<Arc<Shared>> {
        self.shared.get()?.upgrade()
    }

    /// The life that this host is in.
    fn life(&self) -> String {
        lock(&self.own).life.clone()
    }

    /// Whether this host is in this life still, and knows of nobody who ended it.
    pub(crate) fn lives(&self, life: &str) -> bool {
        let own = lock(&self.own);
        own.life == life && !own.lease.is_broken()
    }

    /// Whether this host may answer for the sandboxes that it has.
    pub(crate) fn safe(&self) -> bool {
        lock(&self.own).lease.safe(now())
    }

    /// What other hosts need not be asked about this one.
    pub(crate) fn about(&self) -> serde_json::Value {
        let members = lock(&self.members);
        serde_json::json!({
            "fleet": self.config.fleet,
            "host": self.life(),
            "name": self.name,
            "safe": self.safe(),
            "hosts": members.len(),
            "forwarded": self.counts.forwarded.get(),
            "taken": self.counts.taken.get(),
        })
    }

    /// What this host says of itself.
    fn advert(&self) -> Advert {
        let mut advert = Advert {
            host: self.life(),
            name: self.name.clone(),
            draining: self.draining.load(std::sync::atomic::Ordering::Relaxed) || !self.safe(),
            ..Advert::default()
        };
        if let Some(shared) = self.shared() {
            let table = shared.table();
            let (running, places) = table.common.gate.busy();
            advert.load = thousandths(running, places);
            advert.held.extend(table.sites.iter().map(|site| way::route_of(&site.config)));
            if let Some(routes) = &shared.sandboxes {
                let (running, places) = routes.sandboxes.busy();
                advert.load = advert.load.max(thousandths(running, places));
                advert.sandboxes = routes.sandboxes.count().0;
                advert.held.extend(routes.sandboxes.held());
            }
        }
        advert
    }

    /// How full this host is.
    fn load(&self) -> u32 {
        let Some(shared) = self.shared() else { return 0 };
        let (running, places) = shared.table().common.gate.busy();
        let sandboxes = shared.sandboxes.as_ref().map_or((0, 1), |routes| routes.sandboxes.busy());
        thousandths(running, places).max(thousandths(sandboxes.0, sandboxes.1))
    }

    /// Whether a life is known to be over.
    fn is_over(&self, life: &str) -> bool {
        lock(&self.over).contains(life)
    }
}

fn thousandths(running: usize, places: usize) -> u32 {
    u32::try_from(running * 1000 / places.max(1)).unwrap_or(u32::MAX)
}
