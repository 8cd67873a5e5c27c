//! Places for calls of sandboxes, shared fairly by the tenants.
//!
//! Promises: a free place goes to the next waiting tenant in turn, and no tenant has all of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::StatusCode;

use super::config::SandboxConfig;
use super::registry::lock;
use crate::concurrency::{ConcurrencyLimiter, Permit, Share};
use crate::error_response::ErrorResponse;

/// Places, each for one call at a time.
pub(super) struct CallPermits {
    gate: Arc<ConcurrencyLimiter>,
    lines: Mutex<HashMap<Arc<str>, usize>>,
    share: Share,
}

impl CallPermits {
    pub(super) fn new(config: &SandboxConfig) -> Self {
        let places = config.max_running_calls.max(1);
        // A quarter is left to the others, however long a tenant's calls last. A sandbox has one call that waits at a time.
        let share =
            Share { running: (places - places / 4).max(1), waiting: config.max_sandboxes.max(1) };
        Self { gate: ConcurrencyLimiter::new(places, []), lines: Mutex::default(), share }
    }

    /// A place for a tenant's call.
    pub(super) async fn enter(
        &self,
        tenant: &Arc<str>,
        patience: Duration,
    ) -> Result<Permit, ErrorResponse> {
        let line = *lock(&self.lines)
            .entry(tenant.clone())
            .or_insert_with(|| self.gate.add_line(self.share));
        self.gate.enter(line, patience).await.map_err(|_| {
            let message = "no place became free for the call; run fewer at a time, or try again";
            ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, message)
        })
    }

    /// Calls that run or wait, and the limit of running ones.
    #[cfg(feature = "fleet")]
    pub(super) fn busy(&self) -> (usize, usize) {
        self.gate.busy()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn a_tenant_with_many_calls_delays_another_by_none() {
        let mut config = SandboxConfig::new("nowhere");
        config.max_running_calls = 4;
        let places = Arc::new(CallPermits::new(&config));
        let (one, two): (Arc<str>, Arc<str>) = ("one".into(), "two".into());
        let mut running = Vec::new();
        for _ in 0..3 {
            running.push(places.enter(&one, TEST_TIMEOUT).await.unwrap());
        }
        for _ in 0..100 {
            let (places, one) = (places.clone(), one.clone());
            tokio::spawn(async move { drop(places.enter(&one, TEST_TIMEOUT).await) });
        }
        tokio::task::yield_now().await;
        let refused = places.enter(&one, Duration::from_millis(1)).await.err().expect("they wait");
        assert_eq!((refused.status, refused.later), (StatusCode::SERVICE_UNAVAILABLE, true));
        assert!(places.enter(&two, Duration::from_millis(1)).await.is_ok());
        drop(running);
    }
}
