//! Places for calls, saves and pulls of sandboxes, shared by the tenants in proportion to their
//! weights.
//!
//! Promises: a free place goes to a waiting tenant by weighted fair queueing, and no tenant has
//! more than three quarters of the places. Tenants with long operations cannot take all places
//! together: each leaves at least a third as many free as it has. While `n` of them take all they
//! get, each has `3 / (3 n + 1)` of the places, and the rest is free for tenants that have none.
//! May break it: as many tenants with an operation each as there are places.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::StatusCode;

use crate::concurrency::{ConcurrencyLimiter, Permit, Share};
use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::tenants::accounts::Accounts;
use crate::sandbox::tenants::budgets::Limits;

/// Maximum weight of a tenant.
pub(crate) const MAX_WEIGHT: u32 = 1000;

/// Tenants with lines before those without operations give them to others.
const MAX_LINES: usize = 1024;

/// Places, each for one operation at a time.
pub(crate) struct TenantQueue {
    /// The operation that has a place, for messages.
    operation: &'static str,
    gate: Arc<ConcurrencyLimiter>,
    lines: Mutex<HashMap<Arc<str>, Line>>,
    places: usize,
    waiting: usize,
    /// Whether the budget of running calls applies.
    is_for_calls: bool,
}

struct Line {
    /// Cloned while an operation enters: another tenant does not get the line meanwhile.
    number: Arc<usize>,
    share: Share,
}

impl TenantQueue {
    /// Places for calls. A tenant has at most `waiting` calls that wait.
    pub(crate) fn for_calls(places: usize, waiting: usize) -> Self {
        Self { is_for_calls: true, ..Self::new("call", places, waiting) }
    }

    /// Places for another operation.
    pub(crate) fn new(operation: &'static str, places: usize, waiting: usize) -> Self {
        let places = places.max(1);
        let gate = ConcurrencyLimiter::with_reserve(places);
        let waiting = waiting.max(1);
        Self { operation, gate, lines: Mutex::default(), places, waiting, is_for_calls: false }
    }

    fn share(&self, limits: &Limits) -> Share {
        // A quarter is left to the others, however long a tenant's calls last.
        let most = (self.places - self.places / 4).max(1);
        let own = limits.running_calls.filter(|_| self.is_for_calls);
        let weight = limits.weight.unwrap_or(1).clamp(1, MAX_WEIGHT);
        Share { running: own.unwrap_or(most).clamp(1, most), waiting: self.waiting, weight }
    }

    /// The line of a tenant, with its present share.
    fn line(&self, tenant: &Arc<str>, limits: &Limits) -> Arc<usize> {
        let share = self.share(limits);
        let mut lines = lock(&self.lines);
        if let Some(line) = lines.get_mut(tenant) {
            if line.share != share {
                line.share = share;
                self.gate.set_share(*line.number, share);
            }
            return line.number.clone();
        }
        let idle = self.take_idle_line(&mut lines, share);
        let number = Arc::new(idle.unwrap_or_else(|| self.gate.add_line(share)));
        lines.insert(tenant.clone(), Line { number: number.clone(), share });
        number
    }

    /// The line of a tenant without operations, for another one, if there are many lines.
    fn take_idle_line(&self, lines: &mut HashMap<Arc<str>, Line>, share: Share) -> Option<usize> {
        if lines.len() < MAX_LINES {
            return None;
        }
        let mut unused = lines.iter().filter(|(_, line)| Arc::strong_count(&line.number) == 1);
        let (name, _) = unused.find(|(_, line)| self.gate.reuse_line(*line.number, share))?;
        let name = name.clone();
        lines.remove(&name).map(|line| *line.number)
    }

    /// A place for a tenant's operation.
    pub(crate) async fn enter(
        &self,
        accounts: &Accounts,
        tenant: &Arc<str>,
        patience: Duration,
    ) -> Result<Permit, ErrorResponse> {
        let limits = accounts.budgets().of(tenant);
        let line = self.line(tenant, &limits);
        self.gate.enter(*line, patience).await.map_err(|_| {
            let (running, _) = self.gate.count(*line);
            let own = limits.running_calls.filter(|_| self.is_for_calls);
            if let Some(limit) = own.filter(|limit| running >= *limit) {
                let used = (running as u64, 1);
                let advice = "run fewer calls at a time";
                let refused = accounts.of(tenant).admit(
                    "max-running-calls",
                    Some(limit as u64),
                    used,
                    advice,
                );
                if let Err(refusal) = refused {
                    return refusal;
                }
            }
            let operation = self.operation;
            let message = format!(
                "no place became free for the {operation}; run fewer at a time, or try again"
            );
            ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, message)
        })
    }

    /// Operations that run or wait, and the limit of running ones.
    #[cfg(feature = "fleet")]
    pub(crate) fn busy(&self) -> (usize, usize) {
        self.gate.busy()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::tenants::budgets::Budgets;

    const TEST_TIMEOUT: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn a_tenant_with_many_calls_delays_another_by_none() {
        let dir = tempfile::tempdir().unwrap();
        let accounts = Arc::new(Accounts::open(dir.path(), Budgets::default()).unwrap());
        let places = Arc::new(TenantQueue::for_calls(4, 1000));
        let (one, two): (Arc<str>, Arc<str>) = ("one".into(), "two".into());
        let mut running = Vec::new();
        for _ in 0..3 {
            running.push(places.enter(&accounts, &one, TEST_TIMEOUT).await.unwrap());
        }
        for _ in 0..100 {
            let (places, one, accounts) = (places.clone(), one.clone(), accounts.clone());
            tokio::spawn(async move { drop(places.enter(&accounts, &one, TEST_TIMEOUT).await) });
        }
        tokio::task::yield_now().await;
        let refused = places.enter(&accounts, &one, Duration::from_millis(1)).await;
        let refused = refused.err().expect("they wait");
        assert_eq!((refused.status, refused.later), (StatusCode::SERVICE_UNAVAILABLE, true));
        assert!(places.enter(&accounts, &two, Duration::from_millis(1)).await.is_ok());
        drop(running);
    }

    /// Takes places for a tenant until it gets no more.
    async fn fill(
        places: &TenantQueue,
        accounts: &Accounts,
        tenant: &str,
        held: &mut Vec<Permit>,
    ) -> usize {
        let (tenant, before) = (tenant.into(), held.len());
        while let Ok(place) = places.enter(accounts, &tenant, Duration::from_millis(1)).await {
            held.push(place);
        }
        held.len() - before
    }

    #[tokio::test]
    async fn tenants_with_long_calls_leave_places_to_one_that_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let accounts = Accounts::open(dir.path(), Budgets::default()).unwrap();
        for (places, expected) in
            [(1, &[1][..]), (2, &[1, 1]), (4, &[3, 1]), (8, &[6, 1, 1]), (64, &[48, 12, 3, 1])]
        {
            let queue = TenantQueue::for_calls(places, 1);
            let mut held = Vec::new();
            for (number, expected) in expected.iter().enumerate() {
                let tenant = format!("tenant-{number}");
                let taken = fill(&queue, &accounts, &tenant, &mut held).await;
                assert_eq!(taken, *expected, "{tenant} of {places} places");
            }
        }
    }

    /// Two tenants whose calls end and begin again have equal shares, however they began.
    #[tokio::test]
    async fn tenants_that_take_all_places_they_get_come_to_equal_shares() {
        let dir = tempfile::tempdir().unwrap();
        let accounts = Accounts::open(dir.path(), Budgets::default()).unwrap();
        let queue = TenantQueue::for_calls(64, 1);
        let (mut one, mut two, mut three) = (Vec::new(), Vec::new(), Vec::new());
        fill(&queue, &accounts, "one", &mut one).await;
        for _ in 0..100 {
            fill(&queue, &accounts, "two", &mut two).await;
            drop(one.pop());
            fill(&queue, &accounts, "one", &mut one).await;
        }
        assert!(one.len().abs_diff(two.len()) <= 2, "{} and {}", one.len(), two.len());
        assert!((26..=28).contains(&two.len()), "{}", two.len());
        assert!(fill(&queue, &accounts, "three", &mut three).await >= 6);
    }

    #[tokio::test]
    async fn tenants_have_places_by_their_weights() {
        let dir = tempfile::tempdir().unwrap();
        let mut budgets = Budgets::default();
        let heavy = Limits { weight: Some(3), ..Limits::default() };
        budgets.tenants.insert("heavy".to_owned(), heavy);
        let accounts = Accounts::open(dir.path(), budgets).unwrap();
        let queue = TenantQueue::for_calls(64, 1);
        let (mut heavy, mut light) = (Vec::new(), Vec::new());
        fill(&queue, &accounts, "heavy", &mut heavy).await;
        assert_eq!(heavy.len(), 48);
        for _ in 0..100 {
            fill(&queue, &accounts, "light", &mut light).await;
            drop(heavy.pop());
            fill(&queue, &accounts, "heavy", &mut heavy).await;
        }
        assert!((43..=45).contains(&heavy.len()), "{}", heavy.len());
        assert!((13..=15).contains(&light.len()), "{}", light.len());
    }

    #[tokio::test]
    async fn tenants_without_operations_give_their_lines_to_others() {
        let dir = tempfile::tempdir().unwrap();
        let accounts = Accounts::open(dir.path(), Budgets::default()).unwrap();
        let queue = TenantQueue::for_calls(8, 1);
        let enter = async |tenant: &str| queue.enter(&accounts, &tenant.into(), TEST_TIMEOUT).await;
        let running = enter("running").await.unwrap();
        let parked = enter("parked").await.unwrap().park().ok().expect("there is room");
        for number in 0..2 * MAX_LINES {
            drop(enter(&format!("tenant-{number}")).await.unwrap());
        }
        let names = |name: &str| lock(&queue.lines).contains_key(name);
        assert!(lock(&queue.lines).len() <= MAX_LINES);
        assert!(names("running") && names("parked"));
        assert!(queue.gate.lines() <= MAX_LINES);
        drop((running, parked));
    }

    #[tokio::test]
    async fn a_tenant_has_its_own_number_of_running_calls() {
        let dir = tempfile::tempdir().unwrap();
        let mut budgets = Budgets::default();
        let own = Limits { running_calls: Some(1), ..Limits::default() };
        budgets.tenants.insert("one".to_owned(), own);
        let accounts = Accounts::open(dir.path(), budgets.clone()).unwrap();
        let places = TenantQueue::for_calls(4, 1000);
        let (one, two): (Arc<str>, Arc<str>) = ("one".into(), "two".into());
        let _held = places.enter(&accounts, &one, TEST_TIMEOUT).await.unwrap();
        let refused = places.enter(&accounts, &one, Duration::from_millis(1)).await;
        let refused = refused.err().expect("it has one call");
        let excess = refused.budget.expect("it names the budget");
        assert_eq!((excess.name, excess.limit, excess.used), ("max-running-calls", 1, 1));
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
        let _other = places.enter(&accounts, &two, Duration::from_millis(1)).await.unwrap();
        // A reload binds the next call.
        budgets.tenants.clear();
        accounts.renew(&budgets);
        assert!(places.enter(&accounts, &one, Duration::from_millis(1)).await.is_ok());
    }
}
