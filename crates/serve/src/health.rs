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

/// The results of the last probes.
#[derive(Debug, Default)]
pub(crate) struct Health {
    probed: Mutex<Option<Instant>>,
    is_probing: AtomicBool,
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
    /// Starts probes if the last ones are some time ago. Within a runtime.
    pub(crate) fn probe(shared: &Arc<ServerState>) {
        let this = &shared.health;
        {
            let mut probed = lock(&this.probed);
            if probed.is_some_and(|probed| probed.elapsed() < PROBE_INTERVAL) {
                return;
            }
            *probed = Some(Instant::now());
        }
        if this.is_probing.swap(true, Ordering::Relaxed) {
            return;
        }
        let shared = shared.clone();
        tokio::task::spawn_blocking(move || {
            let this = &shared.health;
            if let Some(routes) = &shared.sandboxes {
                let result = routes.sandboxes.probe_directory().map_err(|error| error.to_string());
                note(&this.directory_fails, Check::Directory, result);
            }
            #[cfg(feature = "fleet")]
            if let Some(fleet) = &shared.fleet {
                note(&this.store_fails, Check::Store, fleet.probe_store());
            }
            this.is_probing.store(false, Ordering::Relaxed);
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
