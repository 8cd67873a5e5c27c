//! The number of keys of requests that each tenant has in the ledger, and its limit.
//!
//! Promises: a host makes no claim for a tenant that has as many as it may, as far as it knows. It
//! begins with the number in the ledger, and counts the claims that it makes and releases. At the
//! limit it counts those in the ledger, at most once in [`COUNT_LIFETIME`], and removes claims of
//! sandboxes that ended without a host, when their entries expired. May break it: several hosts.
//! Each can make as many claims before it counts those of the others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::error_response::{BudgetExcess, BudgetOwner, ErrorResponse};
use crate::lock::lock;

/// Time for which a count of the ledger is valid.
const COUNT_LIFETIME: Duration = Duration::from_secs(30);

/// The claims of each tenant.
#[derive(Default)]
pub(super) struct ClaimCounts(Mutex<HashMap<Arc<str>, Arc<ClaimCount>>>);

/// The claims of one tenant.
#[derive(Default)]
pub(super) struct ClaimCount {
    claims: AtomicUsize,
    /// Set once the claims of this host's earlier processes, and of other hosts, are counted.
    begun: tokio::sync::OnceCell<()>,
    /// Held while the ledger is read; others wait for the result.
    pub(super) counted: tokio::sync::Mutex<Option<Instant>>,
}

impl ClaimCounts {
    pub(super) fn of(&self, tenant: &str) -> Arc<ClaimCount> {
        let mut all = lock(&self.0);
        if let Some(count) = all.get(tenant) {
            return count.clone();
        }
        all.entry(tenant.into()).or_default().clone()
    }

    /// A claim of a tenant is not in the ledger any more.
    pub(super) fn release(&self, tenant: &str) {
        let claims = &self.of(tenant).claims;
        let less = |claims: usize| Some(claims.saturating_sub(1));
        let _ = claims.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

impl ClaimCount {
    /// Counts another claim, if there are fewer than `limit`.
    fn take(&self, limit: usize) -> bool {
        let more = |claims: usize| (claims < limit).then_some(claims + 1);
        self.claims.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Begins with the claims that the ledger has, which `count` returns. Others wait for it.
    pub(super) async fn begin(
        &self,
        count: impl Future<Output = Result<usize, ErrorResponse>>,
    ) -> Result<(), ErrorResponse> {
        let begin = async || {
            self.claims.store(count.await?, Ordering::Relaxed);
            Ok(())
        };
        self.begun.get_or_try_init(begin).await.map(drop)
    }

    /// Counts another claim, or refuses it at the limit. `count` returns the claims in the ledger.
    pub(super) async fn admit(
        &self,
        limit: usize,
        count: impl Future<Output = Result<usize, ErrorResponse>>,
    ) -> Result<(), ErrorResponse> {
        if self.take(limit) {
            return Ok(());
        }
        let mut counted = self.counted.lock().await;
        if counted.is_none_or(|at| at.elapsed() >= COUNT_LIFETIME) {
            self.claims.store(count.await?, Ordering::Relaxed);
            *counted = Some(Instant::now());
        }
        if self.take(limit) {
            return Ok(());
        }
        let elapsed = counted.map_or(Duration::ZERO, |at| at.elapsed());
        Err(ErrorResponse::over_budget(BudgetExcess {
            owner: BudgetOwner::Tenant,
            name: "creation-keys",
            limit: limit as u64,
            used: self.claims.load(Ordering::Relaxed) as u64,
            retry_after: COUNT_LIFETIME.saturating_sub(elapsed).as_secs().max(1),
            advice: "kill sandboxes that were made with an `Idempotency-Key`, make others without one",
        }))
    }
}
