//! Health of the parts that a server relies on: its lease in a fleet, its directory, the fleet's
//! store, and calls that end.
//!
//! Promises: a probe delays no request. A lost lease makes a server of sandboxes alone unready.
//! Faults of stores do not: sandboxes stay usable without saves. `/readyz` names them, and
//! `afresh_healthy` has them for alerts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::response::{IntoResponse, Response};
use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::health_check::Check;
use crate::lock::lock;
use crate::service::{Phase, ServerState};

/// Interval of probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// Time of a probe after which its part counts as failed: a disk or network that hangs gives no
/// error.
const MAX_PROBE_TIME: Duration = Duration::from_secs(10);

/// The results of the last probes.
#[derive(Debug, Default)]
pub(crate) struct Health {
    probed: Mutex<Option<Instant>>,
    /// The probe that runs, and since when.
    running: Mutex<Option<(Check, Instant)>>,
    directory_fails: AtomicBool,
    #[cfg(feature = "fleet")]
    store_fails: AtomicBool,
}

/// Stores the result of a probe, and logs a change.
fn note(fails: &AtomicBool, check: Check, result: Result<(), String>) {
    let before = fails.swap(result.is_err(), Ordering::Relaxed);
    match result {
        Err(why) if !before => tracing::error!(check = check.name(), why, "unhealthy"),
        Ok(()) if before => tracing::warn!(check = check.name(), "healthy again"),
        _ => {}
    }
}

impl Health {
    /// The last result of a part that is probed.
    fn result(&self, check: Check) -> Option<&AtomicBool> {
        match check {
            Check::Directory => Some(&self.directory_fails),
            #[cfg(feature = "fleet")]
            Check::Store => Some(&self.store_fails),
            _ => None,
        }
    }

    /// Whether probes begin now: the last ones are some time ago, and have ended. One that hangs
    /// counts as failed.
    fn begins(&self, now: Instant) -> bool {
        {
            let mut probed = lock(&self.probed);
            if probed.is_some_and(|probed| now.duration_since(probed) < PROBE_INTERVAL) {
                return false;
            }
            *probed = Some(now);
        }
        let mut running = lock(&self.running);
        if let Some((check, since)) = *running {
            if now.duration_since(since) >= MAX_PROBE_TIME
                && let Some(fails) = self.result(check)
            {
                note(fails, check, Err("the probe does not end".to_owned()));
            }
            return false;
        }
        *running = Some((Check::Directory, now));
        true
    }

    /// Probes one part.
    fn run(&self, check: Check, probe: impl FnOnce() -> Result<(), String>) {
        *lock(&self.running) = Some((check, Instant::now()));
        let result = probe();
        // Under the lock, so that no earlier look at the time counts after it.
        let _running = lock(&self.running);
        if let Some(fails) = self.result(check) {
            note(fails, check, result);
        }
    }

    /// Starts probes if the last ones are some time ago. Within a runtime.
    pub(crate) fn probe(shared: &Arc<ServerState>) {
        if !shared.health.begins(Instant::now()) {
            return;
        }
        let shared = shared.clone();
        tokio::task::spawn_blocking(move || {
            let this = &shared.health;
            if let Some(routes) = &shared.sandboxes {
                let probe = || routes.sandboxes.probe_directory();
                this.run(Check::Directory, || probe().map_err(|error| error.to_string()));
            }
            #[cfg(feature = "fleet")]
            if let Some(fleet) = &shared.fleet {
                this.run(Check::Store, || fleet.probe_store());
            }
            *lock(&this.running) = None;
        });
    }
}

/// Every check of a server, and whether it fails now.
pub(crate) fn checks(shared: &ServerState) -> Vec<(Check, bool)> {
    let mut all = Vec::new();
    if let Some(routes) = &shared.sandboxes {
        all.push((Check::Directory, shared.health.directory_fails.load(Ordering::Relaxed)));
        let is_overdue = routes.sandboxes.has_overdue_calls.load(Ordering::Relaxed);
        all.push((Check::Calls, is_overdue));
    }
    #[cfg(feature = "fleet")]
    if let Some(fleet) = &shared.fleet {
        all.push((Check::Lease, !fleet.safe()));
        all.push((Check::Store, shared.health.store_fails.load(Ordering::Relaxed)));
    }
    all
}

/// The answer to `/readyz`.
pub(crate) fn ready(shared: &ServerState) -> Response {
    if *shared.phase.borrow() != Phase::Running {
        let why = "the server is ending; use another";
        return ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    }
    let faults: Vec<Check> =
        checks(shared).into_iter().filter(|(_, fails)| *fails).map(|(check, _)| check).collect();
    #[cfg(feature = "fleet")]
    if faults.contains(&Check::Lease) && shared.table().sites.is_empty() {
        let why = Check::Lease.fault();
        return ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    }
    let lines = faults.iter().map(|check| format!("{}: {}\n", check.name(), check.fault()));
    format!("ready\n{}", lines.collect::<String>()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_that_hangs_counts_as_failed_until_it_ends_well() {
        let health = Health::default();
        let fails = || health.directory_fails.load(Ordering::Relaxed);
        let begun = Instant::now();
        assert!(health.begins(begun) && !health.begins(begun));
        let mut later = begun;
        health.run(Check::Directory, || {
            later = Instant::now() + PROBE_INTERVAL;
            assert!(!health.begins(later) && !fails());
            later += MAX_PROBE_TIME;
            assert!(!health.begins(later) && fails());
            Ok(())
        });
        assert!(!fails());
        *lock(&health.running) = None;
        assert!(health.begins(later + PROBE_INTERVAL));
    }
}
