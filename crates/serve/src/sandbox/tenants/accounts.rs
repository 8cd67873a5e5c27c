//! The use of each tenant: totals for bills, and windows for budgets.
//!
//! Promises: totals only grow, and a server that is started again continues them from its
//! directory. May break it: a server that is killed loses the use since the last write, at most
//! [`WRITE_INTERVAL`]; a server that is started again has used nothing in the present window. In a
//! fleet the budgets of a tenant are for all hosts: the use of the others is added, as
//! [`SandboxStore::use_elsewhere`] reports it.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use crate::error_response::{BudgetExcess, BudgetOwner, ErrorResponse};
use crate::lock::lock;
use crate::sandbox::records::record::Records;
use crate::sandbox::records::store::{SandboxStore, TenantUse};
use crate::sandbox::records::tenant_use::window_at;
use crate::sandbox::request_body::unknown_fields::UnknownFields;
use crate::sandbox::tenants::budgets::{Budgets, Limits};
use crate::sandbox::tenants::totals::{StoredTotals, Totals};

/// Interval of writes of the totals.
pub(crate) const WRITE_INTERVAL: Duration = Duration::from_secs(10);
/// Name of the file of the totals.
const FILE: &str = "usage";
/// Seconds until a budget without a window may have room again.
const RETRY_SECONDS: u64 = 5;
/// Maximum tenants with separate labels in metrics. The others share one.
pub(crate) const MAX_LABELLED_TENANTS: usize = 200;
/// The shared label of tenants without a separate one. No tenant has this name: names have no
/// spaces.
const OTHERS: &str = "all others";

/// Use within a window.
#[derive(Debug)]
struct UsageWindow {
    number: u64,
    ran: Duration,
    sent: u64,
    outbound: u64,
}

impl UsageWindow {
    fn begin(number: u64) -> Self {
        Self { number, ran: Duration::ZERO, sent: 0, outbound: 0 }
    }
}

/// The use of a tenant, or of the whole server.
pub(crate) struct Account {
    owner: BudgetOwner,
    /// Whether metrics show it under its own name.
    labelled: bool,
    totals: Mutex<Totals>,
    window: Mutex<UsageWindow>,
    /// Open connections to programs in sandboxes.
    connections: AtomicU64,
    /// Refusals by budget.
    refused: Mutex<BTreeMap<&'static str, u64>>,
    /// Fields of the file that a later version has added.
    unknown: UnknownFields,
}

impl Account {
    fn new(owner: BudgetOwner, labelled: bool, totals: Totals) -> Self {
        Self {
            owner,
            labelled,
            totals: Mutex::new(totals),
            window: Mutex::new(UsageWindow::begin(0)),
            connections: AtomicU64::new(0),
            refused: Mutex::default(),
            unknown: UnknownFields::default(),
        }
    }

    /// The value of the label `tenant` in metrics of the tenant with this account.
    pub(crate) fn label<'a>(&self, tenant: &'a str) -> &'a str {
        if self.labelled { tenant } else { OTHERS }
    }

    pub(crate) fn totals(&self) -> Totals {
        *lock(&self.totals)
    }

    /// Refusals by budget.
    pub(crate) fn refusals(&self) -> BTreeMap<&'static str, u64> {
        lock(&self.refused).clone()
    }

    /// Open connections to programs in sandboxes.
    pub(crate) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// The refusal for a budget, which is counted.
    fn refuse(
        &self,
        name: &'static str,
        (limit, used): (u64, u64),
        retry_after: u64,
        advice: &'static str,
    ) -> ErrorResponse {
        *lock(&self.refused).entry(name).or_default() += 1;
        let owner = self.owner;
        let excess = BudgetExcess { owner, name, limit, used, retry_after, advice };
        ErrorResponse::over_budget(excess)
    }

    /// Refuses `more` units beyond a limit of things that exist now.
    pub(crate) fn admit(
        &self,
        name: &'static str,
        limit: Option<u64>,
        (used, more): (u64, u64),
        advice: &'static str,
    ) -> Result<(), ErrorResponse> {
        match limit {
            Some(limit) if used.saturating_add(more) > limit => {
                // Shown in the unit of the budget.
                let shown = match name.ends_with("-mib") {
                    true => (limit >> 20, used.div_ceil(1 << 20)),
                    false => (limit, used),
                };
                Err(self.refuse(name, shown, RETRY_SECONDS, advice))
            }
            _ => Ok(()),
        }
    }

    /// Use of the present window, and the seconds until it ends.
    fn in_window<R>(&self, length: Duration, read: impl FnOnce(&mut UsageWindow) -> R) -> (R, u64) {
        let (number, left) = window_at(SystemTime::now(), length);
        let mut window = lock(&self.window);
        if window.number != number {
            *window = UsageWindow::begin(number);
        }
        (read(&mut window), left)
    }

    /// The use of this account here, with this memory.
    #[cfg(feature = "fleet")]
    fn present_use(&self, length: Duration, memory: u64) -> TenantUse {
        let connections = self.connections();
        let read = |window: &mut UsageWindow| TenantUse {
            window: window.number,
            memory,
            connections,
            cpu: u64::try_from(window.ran.as_millis()).unwrap_or(u64::MAX),
            sent: window.sent,
            outbound: window.outbound,
        };
        self.in_window(length, read).0
    }

    /// Refuses a call once the CPU time of the window is used up, with that of other hosts.
    fn check_cpu(
        &self,
        limits: &Limits,
        length: Duration,
        elsewhere: &TenantUse,
    ) -> Result<(), ErrorResponse> {
        let Some(limit) = limits.cpu_time else { return Ok(()) };
        let (ran, left) = self.in_window(length, |window| window.ran);
        let ran = ran.saturating_add(Duration::from_millis(elsewhere.cpu));
        if ran < limit {
            return Ok(());
        }
        let advice = "run less code in each window";
        Err(self.refuse("cpu-seconds", (limit.as_secs(), ran.as_secs()), left, advice))
    }

    /// Refuses a request into a sandbox once the sent bytes of the window are used up.
    fn check_sent(
        &self,
        limits: &Limits,
        length: Duration,
        elsewhere: &TenantUse,
    ) -> Result<(), ErrorResponse> {
        let texts = ("sent-mib", "read less in each window");
        self.check_bytes(texts, limits.sent, length, (elsewhere.sent, |window| window.sent))
    }

    /// Refuses a call once the outbound bytes of the window are used up.
    fn check_outbound(
        &self,
        limits: &Limits,
        length: Duration,
        elsewhere: &TenantUse,
    ) -> Result<(), ErrorResponse> {
        let texts = ("outbound-mib", "send less to servers outside in each window");
        let used = (elsewhere.outbound, (|window| window.outbound) as fn(&mut UsageWindow) -> u64);
        self.check_bytes(texts, limits.outbound, length, used)
    }

    /// Refuses once the bytes of other hosts and those of the window that `used` reads are the
    /// limit. The texts are the budget's name and advice.
    fn check_bytes(
        &self,
        (name, advice): (&'static str, &'static str),
        limit: Option<u64>,
        length: Duration,
        (elsewhere, used): (u64, fn(&mut UsageWindow) -> u64),
    ) -> Result<(), ErrorResponse> {
        let Some(limit) = limit else { return Ok(()) };
        let (used, left) = self.in_window(length, used);
        let used = used.saturating_add(elsewhere);
        if used < limit {
            return Ok(());
        }
        Err(self.refuse(name, (limit >> 20, used >> 20), left, advice))
    }

    fn add_outbound(&self, bytes: u64, length: Duration) {
        self.in_window(length, |window| window.outbound = window.outbound.saturating_add(bytes));
        lock(&self.totals).outbound_bytes += bytes;
    }

    fn add_run(&self, time: Duration, length: Duration, is_call: bool) {
        self.in_window(length, |window| window.ran = window.ran.saturating_add(time));
        let mut totals = lock(&self.totals);
        totals.cpu_seconds += time.as_secs_f64();
        totals.calls += u64::from(is_call);
    }

    fn add_sent(&self, bytes: u64, length: Duration) {
        self.in_window(length, |window| window.sent = window.sent.saturating_add(bytes));
        lock(&self.totals).sent_bytes += bytes;
    }
}

/// A connection to a program in a sandbox, until it is dropped.
#[cfg(linux_guests)]
#[derive(Debug)]
pub(crate) struct ConnectionGuard(Vec<Arc<Account>>);

impl std::fmt::Debug for Account {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Account").field("totals", &self.totals()).finish_non_exhaustive()
    }
}

#[cfg(linux_guests)]
impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        for account in &self.0 {
            account.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The accounts of all tenants.
pub(crate) struct Accounts {
    budgets: RwLock<Arc<Budgets>>,
    pub(crate) server: Arc<Account>,
    tenants: Mutex<HashMap<Arc<str>, Arc<Account>>>,
    records: Records,
    /// The totals differ from the file.
    changed: AtomicBool,
    written: Mutex<Instant>,
    /// Knows the use of tenants on other hosts.
    store: Option<Arc<dyn SandboxStore>>,
}

impl Accounts {
    /// Accounts whose totals are in `dir`.
    pub(crate) fn open(dir: &Path, budgets: Budgets) -> io::Result<Self> {
        let records = Records::open(dir.join("usage"))?;
        let known = records.get::<BTreeMap<String, StoredTotals>>(FILE)?.unwrap_or_default();
        let entry = |(number, (name, stored)): (usize, (String, StoredTotals))| {
            let labelled = number < MAX_LABELLED_TENANTS;
            let mut account = Account::new(BudgetOwner::Tenant, labelled, stored.totals);
            account.unknown = stored.unknown;
            (Arc::from(name), Arc::new(account))
        };
        Ok(Self {
            budgets: RwLock::new(Arc::new(budgets)),
            server: Arc::new(Account::new(BudgetOwner::Server, false, Totals::default())),
            tenants: Mutex::new(known.into_iter().enumerate().map(entry).collect()),
            records,
            changed: AtomicBool::new(false),
            written: Mutex::new(Instant::now()),
            store: None,
        })
    }

    /// Adds the use of tenants on other hosts, as `store` reports it.
    pub(crate) fn with_store(self, store: Arc<dyn SandboxStore>) -> Self {
        Self { store: Some(store), ..self }
    }

    /// The use of a tenant on other hosts, in the present window.
    pub(crate) fn elsewhere(&self, tenant: &str) -> TenantUse {
        let Some(store) = &self.store else { return TenantUse::default() };
        store.use_elsewhere(tenant, window_at(SystemTime::now(), self.budgets().window).0)
    }

    /// The use here of the tenants that have limits on all hosts together. `memory` is that of a
    /// tenant.
    #[cfg(feature = "fleet")]
    pub(crate) fn uses(&self, memory: impl Fn(&str) -> u64) -> Vec<(Arc<str>, TenantUse)> {
        let budgets = self.budgets();
        let limited = |tenant: &Arc<str>| budgets.of(tenant).has_shared();
        let all = self.all().into_iter().filter(|(tenant, _)| limited(tenant));
        let used = all.map(|(tenant, account)| {
            let used = account.present_use(budgets.window, memory(&tenant));
            (tenant, used)
        });
        used.filter(|(_, used)| !used.is_nothing()).collect()
    }

    pub(crate) fn budgets(&self) -> Arc<Budgets> {
        self.budgets.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the budgets. The use of the present windows stays.
    pub(crate) fn renew(&self, budgets: &Budgets) {
        *self.budgets.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(budgets.clone());
    }

    /// The account of a tenant.
    pub(crate) fn of(&self, tenant: &Arc<str>) -> Arc<Account> {
        let mut tenants = lock(&self.tenants);
        if let Some(account) = tenants.get(tenant) {
            return account.clone();
        }
        let labelled = tenants.len() < MAX_LABELLED_TENANTS;
        let account = Arc::new(Account::new(BudgetOwner::Tenant, labelled, Totals::default()));
        tenants.insert(tenant.clone(), account.clone());
        account
    }

    /// All accounts of tenants, by name.
    pub(crate) fn all(&self) -> BTreeMap<Arc<str>, Arc<Account>> {
        lock(&self.tenants).iter().map(|(name, account)| (name.clone(), account.clone())).collect()
    }

    /// Refuses a call of a tenant whose CPU time or outbound bytes, or those of the server, are
    /// used up.
    pub(crate) fn check_call(&self, tenant: &Arc<str>) -> Result<(), ErrorResponse> {
        let budgets = self.budgets();
        let limits = budgets.of(tenant);
        let elsewhere = match (limits.cpu_time, limits.outbound) {
            (None, None) => TenantUse::default(),
            _ => self.elsewhere(tenant),
        };
        let nothing = TenantUse::default();
        let of_tenant = (self.of(tenant), limits, elsewhere);
        let of_server = (self.server.clone(), budgets.server.clone(), nothing);
        for (account, limits, elsewhere) in [of_tenant, of_server] {
            account.check_cpu(&limits, budgets.window, &elsewhere)?;
            account.check_outbound(&limits, budgets.window, &elsewhere)?;
        }
        Ok(())
    }

    /// Refuses a request into a sandbox of a tenant that was sent as much as it may be, or the
    /// server has sent.
    pub(crate) fn check_sent(&self, tenant: &Arc<str>) -> Result<(), ErrorResponse> {
        let budgets = self.budgets();
        let (limits, nothing) = (budgets.of(tenant), TenantUse::default());
        let elsewhere = limits.sent.map_or(nothing, |_| self.elsewhere(tenant));
        self.of(tenant).check_sent(&limits, budgets.window, &elsewhere)?;
        self.server.check_sent(&budgets.server, budgets.window, &nothing)
    }

    /// A sandbox of a tenant ran for this time.
    pub(crate) fn add_run(&self, tenant: &Arc<str>, time: Duration, is_call: bool) {
        let window = self.budgets().window;
        self.of(tenant).add_run(time, window, is_call);
        self.server.add_run(time, window, is_call);
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Bytes that programs of a tenant sent to servers outside.
    pub(crate) fn add_outbound(&self, tenant: &Arc<str>, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let window = self.budgets().window;
        self.of(tenant).add_outbound(bytes, window);
        self.server.add_outbound(bytes, window);
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Bytes that were sent to a tenant.
    pub(crate) fn add_sent(&self, tenant: &Arc<str>, bytes: u64) {
        let window = self.budgets().window;
        self.of(tenant).add_sent(bytes, window);
        self.server.add_sent(bytes, window);
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Bytes that a tenant sent.
    pub(crate) fn add_received(&self, tenant: &Arc<str>, bytes: u64) {
        lock(&self.of(tenant).totals).received_bytes += bytes;
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Sandboxes that a tenant made.
    pub(crate) fn add_sandboxes(&self, tenant: &Arc<str>, count: usize) {
        lock(&self.of(tenant).totals).sandboxes += count as u64;
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Memory and saved states that a tenant had for this time.
    pub(crate) fn add_held(&self, tenant: &Arc<str>, (memory, stored): (u64, u64), time: Duration) {
        let account = self.of(tenant);
        let mut totals = lock(&account.totals);
        totals.memory_byte_seconds += memory as f64 * time.as_secs_f64();
        totals.stored_byte_seconds += stored as f64 * time.as_secs_f64();
        self.changed.store(true, Ordering::Relaxed);
    }

    /// A connection of a tenant to a program in one of its sandboxes.
    #[cfg(linux_guests)]
    pub(crate) fn connect(&self, tenant: &Arc<str>) -> Result<ConnectionGuard, ErrorResponse> {
        let budgets = self.budgets();
        let limit = budgets.of(tenant).connections;
        let elsewhere = limit.map_or(0, |_| self.elsewhere(tenant).connections);
        let own = (self.of(tenant), limit, elsewhere);
        let server = (self.server.clone(), budgets.server.connections, 0);
        let mut guard = ConnectionGuard(Vec::with_capacity(2));
        for (account, limit, elsewhere) in [own, server] {
            // Counted first, so that concurrent connections here never exceed the limit together.
            let before = account.connections.fetch_add(1, Ordering::Relaxed);
            let before = before.saturating_add(elsewhere);
            guard.0.push(account.clone());
            let limit = limit.map(|limit| limit as u64);
            account.admit("max-connections", limit, (before, 1), "close some connections")?;
        }
        Ok(guard)
    }

    /// Writes the totals if they changed, once in a while or `now`. Blocks.
    pub(crate) fn write(&self, now: bool) {
        {
            let mut written = lock(&self.written);
            if !now && written.elapsed() < WRITE_INTERVAL {
                return;
            }
            *written = Instant::now();
        }
        if !self.changed.swap(false, Ordering::Relaxed) {
            return;
        }
        let stored = |account: &Account| {
            let (totals, unknown) = (account.totals(), account.unknown.clone());
            StoredTotals { totals, unknown }
        };
        let all = self.all();
        let all: BTreeMap<&str, StoredTotals> =
            all.iter().map(|(name, account)| (&**name, stored(account))).collect();
        if let Err(error) = self.records.store_record(FILE, &all) {
            self.changed.store(true, Ordering::Relaxed);
            tracing::error!(%error, "the usage of tenants could not be written; it is written again later");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_totals_keeps_the_fields_of_a_later_version() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path().join("usage")).unwrap();
        let later = serde_json::json!({"acme": {"calls": 1, "gpuSeconds": 2.5}});
        records.store_record(FILE, &later).unwrap();
        let accounts = Accounts::open(dir.path(), Budgets::default()).unwrap();
        accounts.add_run(&"acme".into(), Duration::from_secs(1), true);
        accounts.write(true);
        let again: serde_json::Value = records.get(FILE).unwrap().unwrap();
        let (calls, added) = (&again["acme"]["calls"], &again["acme"]["gpuSeconds"]);
        assert_eq!((calls, added), (&2.into(), &2.5.into()), "{again}");
    }

    #[test]
    fn windows_bind_one_tenant_and_totals_outlast_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut budgets = Budgets::default();
        budgets.tenant.cpu_time = Some(Duration::from_secs(2));
        budgets.tenant.sent = Some(1 << 20);
        let accounts = Accounts::open(dir.path(), budgets.clone()).unwrap();
        let (one, two): (Arc<str>, Arc<str>) = ("one".into(), "two".into());
        accounts.add_run(&one, Duration::from_secs(1), true);
        accounts.check_call(&one).unwrap();
        accounts.add_run(&one, Duration::from_secs(1), true);
        let refused = accounts.check_call(&one).unwrap_err();
        let excess = refused.budget.unwrap();
        assert_eq!((excess.name, excess.limit, excess.used), ("cpu-seconds", 2, 2));
        assert!((1..=3601).contains(&excess.retry_after), "{excess:?}");
        accounts.add_sent(&one, 3 << 20);
        assert_eq!(accounts.check_sent(&one).unwrap_err().budget.unwrap().used, 3);
        accounts.check_call(&two).unwrap();
        accounts.check_sent(&two).unwrap();
        assert_eq!(accounts.of(&one).refusals()["cpu-seconds"], 1);
        accounts.write(true);
        let again = Accounts::open(dir.path(), budgets.clone()).unwrap();
        assert_eq!(again.of(&one).totals(), accounts.of(&one).totals());
        again.check_call(&one).unwrap();
        // All tenants together have a limit, too.
        budgets.server.cpu_time = Some(Duration::ZERO);
        again.renew(&budgets);
        let excess = again.check_call(&two).unwrap_err().budget.unwrap();
        assert_eq!(excess.owner, BudgetOwner::Server);
        // A window that is over.
        budgets.window = Duration::ZERO;
        accounts.renew(&budgets);
        assert_eq!(accounts.check_sent(&one), Ok(()));
    }

    #[test]
    fn tenants_without_a_label_share_one() {
        let dir = tempfile::tempdir().unwrap();
        let accounts = Accounts::open(dir.path(), Budgets::default()).unwrap();
        let labelled = (0..MAX_LABELLED_TENANTS + 5)
            .filter(|number| accounts.of(&Arc::from(format!("tenant-{number}"))).labelled)
            .count();
        assert_eq!(labelled, MAX_LABELLED_TENANTS);
    }

    #[cfg(linux_guests)]
    #[test]
    fn connections_are_bounded_and_a_closed_one_makes_room() {
        let dir = tempfile::tempdir().unwrap();
        let mut budgets = Budgets::default();
        budgets.tenant.connections = Some(1);
        budgets.server.connections = Some(2);
        let accounts = Accounts::open(dir.path(), budgets).unwrap();
        let names: [Arc<str>; 3] = ["one".into(), "two".into(), "three".into()];
        let first = accounts.connect(&names[0]).unwrap();
        assert_eq!(accounts.connect(&names[0]).unwrap_err().status.as_u16(), 429);
        let _second = accounts.connect(&names[1]).unwrap();
        assert_eq!(accounts.connect(&names[2]).unwrap_err().status.as_u16(), 503);
        drop(first);
        assert!(accounts.connect(&names[2]).is_ok());
        assert_eq!(accounts.of(&names[0]).connections(), 0);
    }
}
