//! The status page: what a server is doing now, for people, and the same as JSON.
//!
//! What it promises: the page loads nothing from anywhere else and runs nothing but its own script; what it shows
//! was true a moment ago. Nothing of a sandbox's content is on it, nor enough of its id to reach it.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue};
use serde_json::{Value, json};

use crate::metrics::resident_bytes;
use crate::refusal::Refusal;
use crate::service::{Phase, Shared};

const PAGE: &str = include_str!("status.html");
/// Only what is in the page itself: its script and style, and asking its own server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page.
pub(crate) fn page() -> Response {
    let mut response = Response::new(Body::from(PAGE));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// The page map of one sandbox, which `query` names as the page does.
pub(crate) async fn pages(shared: &Shared, query: Option<&str>) -> Response {
    let named = query.and_then(|query| query.strip_prefix("sandbox="));
    let (Some(named), Some(routes)) = (named, &shared.sandboxes) else {
        return Refusal::new(StatusCode::NOT_FOUND, "say which: ?sandbox=ID").into_response();
    };
    match routes.sandboxes.page_map(named).await {
        Ok(map) => axum::Json(map).into_response(),
        Err(refusal) => refusal.into_response(),
    }
}

/// What the page shows.
pub(crate) fn data(shared: &Shared) -> Value {
    let table = shared.table();
    let guests = table.sites.iter().map(|site| {
        let (running, waiting) = table.common.gate.count(site.line);
        let pool = site.guest.pool_stats();
        let recent = site.metrics.recent();
        json!({
            "name": site.config.name,
            "route": site.config.route,
            "host": site.config.host,
            "kind": site.kind(),
            "mode": site.mode(),
            "strategy": site.guest.strategy(),
            "running": running,
            "waiting": waiting,
            "places": site.config.max_concurrent_requests,
            "pool": {
                "alive": pool.alive,
                "idle": pool.idle,
                "created": pool.created,
                "returned": pool.returned,
                "grown": pool.resets.grown,
                "discarded": pool.resets.discarded,
                "replaced": pool.resets.replaced,
                "pages": pool.resets.pages,
                "quarantined": pool.quarantined,
                "quarantines": pool.quarantines,
                "lastFailure": pool.last_failure,
                "abandoned": pool.abandoned,
                "evicted": pool.evicted,
                "residentBytes": pool.resident_bytes,
            },
            "recent": {
                "requests": recent.requests,
                "medianMicroseconds": recent.median,
                "p99Microseconds": recent.p99,
            },
        })
    });
    let phase = match *shared.phase.borrow() {
        Phase::Running => "running",
        _ => "ending",
    };
    #[cfg(feature = "fleet")]
    let fleet = shared.fleet.as_ref().map(|fleet| fleet.about());
    #[cfg(not(feature = "fleet"))]
    let fleet = None::<()>;
    json!({
        "fleet": fleet,
        "version": env!("CARGO_PKG_VERSION"),
        "phase": phase,
        "connections": shared.metrics.connections.get(),
        "bufferedBytes": shared.budget.used(),
        "residentBytes": resident_bytes(),
        "guests": guests.collect::<Vec<_>>(),
        "sandboxes": shared.sandboxes.as_ref().map(|routes| routes.sandboxes.overview()),
    })
}
