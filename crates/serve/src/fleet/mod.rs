//! Several hosts that share the work, over NATS and a common store.
//!
//! Promises: any host takes any request, and forwards it to a host that holds the guest or the
//! sandbox. A sandbox has one owner: an entry in a ledger that is only changed by compare-and-set,
//! under a lease that its owner stops relying on before another host may break it. Every host finds
//! every acknowledged save. While NATS is away, guests of this host are served, and requests that
//! need the fleet get 503. May break it: see [`policy::Lease`]; a NATS that loses acknowledged
//! writes.

mod adverts;
mod backup;
mod backup_error;
mod body_reader;
mod bucket_check;
mod catalog;
mod cipher;
mod claim_counts;
mod clock;
mod collect;
mod complete_ledger;
mod config;
mod creation_keys;
mod credentials;
mod fencing;
mod frame;
mod host;
mod interrupted_takeovers;
mod lease_renewal;
mod locations;
mod nats;
mod nats_error;
mod operators;
mod owned_index;
mod placement_store;
pub mod policy;
mod readable_entries;
mod record;
mod routing;
mod rpc_client;
mod rpc_server;
mod sandbox_store;
mod seal;
mod tenant_budgets;
mod tenant_counts;
mod unconfirmed_takeovers;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use tokio::task::AbortHandle;

pub use backup::{BackupReport, backup, restore};
pub use backup_error::BackupError;
pub use collect::{CollectError, collect};
pub use config::FleetConfig;
pub(crate) use host::FleetHost;
pub use operators::{NodesError, drain, nodes};
pub(crate) use routing::{RouteDecision, route_of};
pub use seal::{SealError, SealReport, seal};

use crate::error::ServeError;
use crate::lock::lock;
use crate::private_directory::open_group_private;
use crate::random::hex_digits;
use clock::now;
use credentials::Role;
use nats::NatsConnection;
use policy::{
    Announcements, FailureDetector, HeartbeatGroups, Lease, LeaseParameters, Members,
    MonotonicTime, NodeStatus, SplitMix64,
};

/// This host in its fleet.
pub(crate) struct Fleet {
    pub(crate) config: FleetConfig,
    parameters: LeaseParameters,
    /// Subject of requests to this process.
    node: String,
    name: String,
    links: NatsConnection,
    store: Option<afresh::store::remote::Remote>,
    own: Mutex<OwnLease>,
    members: Mutex<Members>,
    /// The part of the fleet whose heartbeats this host receives.
    heartbeat_groups: Mutex<HeartbeatGroups>,
    /// Notified when that changes.
    regrouped: Arc<tokio::sync::Notify>,
    sets: Mutex<adverts::KnownSets>,
    announcements: Mutex<Announcements>,
    suspicion: Mutex<FailureDetector>,
    /// Lives that requests wait for, which are watched in addition to the neighbours.
    suspects: Mutex<HashMap<String, MonotonicTime>>,
    /// Lives whose leases are over.
    over: Mutex<BTreeSet<String>>,
    /// Lives whose leases are broken and whose sandboxes this host has not swept, by the time of
    /// the next attempt.
    unswept: Mutex<BTreeMap<String, MonotonicTime>>,
    /// Entries of these lives that hosts keep or take at this moment, or whose takeover was
    /// interrupted.
    interrupted: Mutex<interrupted_takeovers::InterruptedTakeovers>,
    /// Sandboxes whose entries may name this host, which does not hold them, by the time of the
    /// next attempt to release them.
    unfinished: Mutex<BTreeMap<String, MonotonicTime>>,
    /// The last known hosts of sandboxes.
    locations: Mutex<locations::Locations>,
    /// One for the sandboxes that share a place in it, so that one host takes a sandbox once.
    taking: [tokio::sync::Mutex<()>; 64],
    random: Mutex<SplitMix64>,
    /// Held while doubtful sandboxes are settled.
    settling: tokio::sync::Mutex<()>,
    draining: AtomicBool,
    transfers: Mutex<HashMap<u64, Arc<rpc_server::Transfer>>>,
    next_transfer: AtomicU64,
    /// Calls of other hosts that are worked on, by the numbers that these gave them.
    running: Mutex<HashSet<u64>>,
    /// How far the clocks of other hosts are ahead of this one's, in milliseconds.
    clocks: Mutex<HashMap<String, i64>>,
    /// The sandboxes of each tenant on all hosts.
    pub(crate) tenants: tenant_counts::TenantCounts,
    /// The keys of requests of each tenant.
    claims: claim_counts::ClaimCounts,
    /// The use of tenants on other hosts, and the reports of this one.
    tenant_budgets: tenant_budgets::TenantBudgets,
    host: OnceLock<Weak<dyn FleetHost>>,
    /// Runs requests of threads that open templates.
    runtime: tokio::runtime::Handle,
    drain: tokio::sync::Notify,
    tasks: Mutex<Vec<AbortHandle>>,
    pub(crate) counts: Counts,
}

/// The lease that this host has now.
struct OwnLease {
    life: String,
    lease: Lease,
    /// Leases that it has had.
    lives: u64,
}

/// Counters.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Calls that were answered by a host with the needed guest or template.
    pub(crate) held: prometheus_client::metrics::counter::Counter,
    /// Calls that ran on a host without the data.
    pub(crate) elsewhere: prometheus_client::metrics::counter::Counter,
    /// Calls that went to another host.
    pub(crate) forwarded: prometheus_client::metrics::counter::Counter,
    /// Sandboxes that were taken over.
    pub(crate) taken: prometheus_client::metrics::counter::Counter,
    /// Sandboxes that were lost to another host, or with their lease.
    pub(crate) lost: prometheus_client::metrics::counter::Counter,
    /// Entries that were left out of lists because they cannot be read.
    pub(crate) unreadable: prometheus_client::metrics::counter::Counter,
    /// Sandboxes of lost hosts that a sweep could not release. It is repeated.
    pub(crate) unswept: prometheus_client::metrics::counter::Counter,
    /// Received heartbeats.
    pub(crate) adverts: prometheus_client::metrics::counter::Counter,
}

/// Makes the buckets of a fleet, so that hosts need no permission to do so.
///
/// # Errors
/// [`NodesError::Away`].
pub async fn init(config: &FleetConfig) -> Result<(), NodesError> {
    NatsConnection::open(config, "afresh", Role::Admin).await.map(drop).map_err(NodesError::Away)
}

/// The remote that is meant by a URL or a directory.
fn store(place: &str) -> Result<afresh::store::remote::Remote, afresh::Cause> {
    let url = match place.contains("://") {
        true => place.to_owned(),
        false => {
            open_group_private(place.as_ref())?;
            format!("file://{}", std::fs::canonicalize(place)?.display())
        }
    };
    let place: afresh::Place = url.parse()?;
    Ok(place.remote()?)
}

/// Name of this fleet in the store.
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
        let node = hex_digits(6).ok_or("the host has no randomness to name itself with")?;
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let name = config.name.clone().unwrap_or_else(|| host.trim().to_owned());
        if name.len() > policy::MAX_HOST_NAME {
            let (bytes, most) = (name.len(), policy::MAX_HOST_NAME);
            return Err(format!(
                "the name of this host has {bytes} bytes, and other hosts learn at most {most}: choose a shorter `name`"
            )
            .into());
        }
        let links = NatsConnection::open(config, &name, Role::Host).await?;
        let store = match config.store.clone() {
            // It blocks on threads.
            Some(place) => {
                let keeper = keeper(config);
                let opening = move || {
                    let store = store(&place).map_err(|e| e.to_string())?;
                    // A collection of the store must get the names of this fleet.
                    store.claim(&keeper).map_err(|e| e.to_string())?;
                    Ok::<_, String>(store)
                };
                Some(tokio::task::spawn_blocking(opening).await??)
            }
            None => None,
        };
        let parameters = LeaseParameters { time: config.lease };
        let seed = u64::from_str_radix(&node, 16).unwrap_or(1);
        let sent = now();
        let life = format!("{node}-1");
        let enter = async || lease_renewal::enter(&links, &life, &name, parameters).await;
        let revision = nats::patiently(enter).await?;
        lease_renewal::check_parameters(&links, &life, parameters).await?;
        let this = Arc::new(Self {
            parameters,
            links,
            store,
            own: Mutex::new(OwnLease {
                life,
                lease: Lease::from_request(parameters, revision, sent),
                lives: 1,
            }),
            members: Mutex::new(Members::default()),
            heartbeat_groups: Mutex::new(HeartbeatGroups::new(
                &node,
                1,
                &mut SplitMix64::new(seed),
            )),
            regrouped: Arc::default(),
            sets: Mutex::default(),
            announcements: Mutex::default(),
            suspicion: Mutex::new(FailureDetector::new(parameters)),
            suspects: Mutex::default(),
            over: Mutex::default(),
            unswept: Mutex::default(),
            interrupted: Mutex::default(),
            unfinished: Mutex::default(),
            locations: Mutex::default(),
            taking: std::array::from_fn(|_| tokio::sync::Mutex::new(())),
            random: Mutex::new(SplitMix64::new(seed)),
            settling: tokio::sync::Mutex::new(()),
            draining: AtomicBool::new(false),
            transfers: Mutex::default(),
            next_transfer: AtomicU64::new(1),
            running: Mutex::default(),
            clocks: Mutex::default(),
            tenants: tenant_counts::TenantCounts::default(),
            claims: claim_counts::ClaimCounts::default(),
            tenant_budgets: tenant_budgets::TenantBudgets::default(),
            host: OnceLock::new(),
            runtime: tokio::runtime::Handle::current(),
            drain: tokio::sync::Notify::new(),
            tasks: Mutex::default(),
            counts: Counts::default(),
            config: config.clone(),
            node,
            name,
        });
        // From now on: opening guests may take longer than a lease.
        this.spawn(lease_renewal::renewing(Arc::downgrade(&this)));
        Ok(this)
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        lock(&self.tasks).push(tokio::spawn(work).abort_handle());
    }

    /// Begins to answer other hosts, to send heartbeats and to watch leases.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        host: &Arc<dyn FleetHost>,
    ) -> Result<(), ServeError> {
        if self.host.set(Arc::downgrade(host)).is_err() {
            return Ok(());
        }
        let failed = |source| ServeError::Fleet { source };
        rpc_server::listen(self).await.map_err(failed)?;
        operators::begin(self).await.map_err(failed)?;
        adverts::begin(self).await.map_err(failed)?;
        if let Err(error) = self.find_unswept().await {
            tracing::warn!(%error, "broken leases are not listed");
        }
        self.spawn(lease_renewal::watching(Arc::downgrade(self)));
        self.spawn(tenant_counts::counting(Arc::downgrade(self)));
        Ok(())
    }

    /// Asks other hosts to send nothing new.
    pub(crate) fn begin_to_end(&self) {
        self.draining.store(true, std::sync::atomic::Ordering::Relaxed);
        self.drain.notify_one();
    }

    /// Leaves, once everything was saved and released.
    pub(crate) async fn leave(&self) {
        for task in lock(&self.tasks).drain(..) {
            task.abort();
        }
        lease_renewal::leave(self).await;
        // The last messages must arrive.
        let _ = tokio::time::timeout(Duration::from_secs(2), self.links.client.flush()).await;
    }

    fn host(&self) -> Option<Arc<dyn FleetHost>> {
        self.host.get()?.upgrade()
    }

    /// The life that this host is in.
    fn life(&self) -> String {
        lock(&self.own).life.clone()
    }

    /// Whether this host is still in this life, as far as it knows.
    pub(crate) fn is_alive(&self, life: &str) -> bool {
        let own = lock(&self.own);
        own.life == life && !own.lease.is_broken()
    }

    /// Whether this host may answer for the sandboxes that it has.
    pub(crate) fn safe(&self) -> bool {
        lock(&self.own).lease.safe(now())
    }

    /// The fleet as this host sees it, for the status page.
    pub(crate) fn about(&self) -> serde_json::Value {
        let (hosts, heard) = (self.size(), lock(&self.members).len());
        serde_json::json!({
            "fleet": self.config.fleet,
            "host": self.life(),
            "name": self.name,
            "safe": self.safe(),
            "hosts": hosts,
            "heard": heard,
            "sandboxes": self.tenants.count(),
            "forwarded": self.counts.forwarded.get(),
            "taken": self.counts.taken.get(),
        })
    }

    /// The status of this host.
    fn advert(&self) -> NodeStatus {
        let mut advert = NodeStatus {
            host: self.life(),
            name: self.name.clone(),
            draining: self.draining.load(std::sync::atomic::Ordering::Relaxed) || !self.safe(),
            ..NodeStatus::default()
        };
        if let Some(host) = self.host() {
            let (running, places) = host.busy();
            advert.load = thousandths(running, places);
            advert.held.extend(host.routes());
            if let Some(sandboxes) = host.sandboxes() {
                let (running, places) = sandboxes.busy();
                advert.load = advert.load.max(thousandths(running, places));
                advert.sandboxes = sandboxes.live();
                let templates = sandboxes.templates();
                advert.held.extend(templates.iter().map(|name| routing::template_of(name)));
                advert.held.extend(sandboxes.held_sources());
            }
        }
        advert
    }

    /// How full this host is.
    fn load(&self) -> u32 {
        let Some(host) = self.host() else { return 0 };
        let (running, places) = host.busy();
        let sandboxes = host.sandboxes().map_or((0, 1), |sandboxes| sandboxes.busy());
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

#[cfg(test)]
mod tests;
