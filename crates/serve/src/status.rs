//! The status page: the present state of a server, for people, and the same as JSON.
//!
//! Promises: the page loads nothing from anywhere else and runs nothing but its own script; it
//! shows the state of a moment ago. It shows no content of a sandbox, nor enough of its id to reach
//! it. Names of guests, templates and checkpoints are shown only at the address of operations.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue};
use serde_json::{Value, json};

use crate::error_response::ErrorResponse;
use crate::resident::resident_bytes;
use crate::service::{Phase, ServerState};

const PAGE: &str = include_str!("status.html");
/// Only the page's own script and style, and requests to its own server.
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

/// Viewer of the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Viewer {
    /// A client of the address for operations.
    Operator,
    /// Any client. Names that an operator or a tenant chose are not theirs to see.
    Anyone,
}

/// The page map of one sandbox, which `query` names as the page does.
pub(crate) async fn pages(shared: &ServerState, query: Option<&str>, viewer: Viewer) -> Response {
    if viewer == Viewer::Anyone {
        let why = "sandboxes are shown at the server's own address for operations: give it one with `admin`";
        return ErrorResponse::new(StatusCode::NOT_FOUND, why).into_response();
    }
    let named = query.and_then(|query| query.strip_prefix("sandbox="));
    let (Some(named), Some(routes)) = (named, &shared.sandboxes) else {
        return ErrorResponse::new(
            StatusCode::NOT_FOUND,
            "the request names no sandbox: add ?sandbox=ID",
        )
        .into_response();
    };
    match routes.sandboxes.page_map(named).await {
        Ok(map) => axum::Json(map).into_response(),
        Err(refusal) => refusal.into_response(),
    }
}

/// The contents of the page.
pub(crate) fn data(shared: &ServerState, viewer: Viewer) -> Value {
    let operator = viewer == Viewer::Operator;
    let table = shared.table();
    let guests = table.sites.iter().enumerate().map(|(number, site)| {
        let name = match operator {
            true => site.config.name.clone(),
            false => format!("guest {}", number + 1),
        };
        let (running, waiting) = table.gate.count(site.line);
        let pool = site.guest.pool_stats();
        let recent = site.metrics.recent();
        json!({
            "name": name,
            "route": Some(&site.config.route).filter(|_| operator),
            "host": site.config.host.as_ref().filter(|_| operator),
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
                "lastFailure": pool.last_failure.filter(|_| operator),
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
    let phase = *shared.phase.borrow();
    let phase = match phase {
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
        "sandboxes": shared.sandboxes.as_ref().map(|routes| routes.sandboxes.overview(operator)),
    })
}
