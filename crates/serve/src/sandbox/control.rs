//! The control plane in E2B's shape: making, listing, pausing, forking and ending sandboxes.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::extract::{Query, State};
use axum::response::IntoResponse;
use bytes::Bytes;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::registry::{CreateOptions, Sandboxes};
use super::requests::{CreateRequest, TimeoutRequest};
use super::routes::{Answer, Tenant, TenantSandbox, answer, json, short};
use super::sandbox::{Sandbox, milliseconds};
use crate::error_response::ErrorResponse;

type All = State<Arc<Sandboxes>>;

/// The version of the E2B agent with this interface. Its clients choose their requests by it.
const AGENT: &str = "0.6.5";
/// Default lifetime of a sandbox in seconds.
const DEFAULT_TIMEOUT_SECONDS: u64 = 300;
/// Maximum forks of one request.
const FORKS: usize = 1000;
/// Maximum sandboxes or snapshots of one page.
const PAGE: usize = 100;

impl TimeoutRequest {
    fn or_usual(&self) -> Duration {
        Duration::from_secs(self.timeout.unwrap_or(DEFAULT_TIMEOUT_SECONDS))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListQuery {
    limit: Option<usize>,
    next_token: Option<String>,
    #[serde(default)]
    state: Option<String>,
    #[serde(rename = "sandboxID")]
    sandbox: Option<String>,
    name: Option<String>,
}

/// Data that a client needs to reach a sandbox.
fn reach(sandbox: &Sandbox) -> Value {
    json!({
        "sandboxID": sandbox.id,
        "templateID": sandbox.template,
        "clientID": "afresh",
        "envdVersion": AGENT,
        "envdAccessToken": sandbox.token,
        "trafficAccessToken": sandbox.token,
    })
}

/// Milliseconds since 1970, as RFC 3339 writes them.
fn rfc3339(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

fn detailed(all: &Sandboxes, sandbox: &Sandbox) -> Value {
    let times = *sandbox.times();
    let template = all.template(&sandbox.template);
    json!({
        "sandboxID": sandbox.id,
        "templateID": sandbox.template,
        "alias": sandbox.template,
        "clientID": "afresh",
        "envdVersion": AGENT,
        "envdAccessToken": sandbox.token,
        "startedAt": rfc3339(sandbox.started),
        "endAt": rfc3339(times.ends),
        "state": if times.paused { "paused" } else { "running" },
        "metadata": sandbox.metadata,
        "cpuCount": 1,
        "memoryMB": template.config.memory >> 20,
        "diskSizeMB": 0,
        "lifecycle": {
            "autoResume": false,
            "onTimeout": if times.pause_at_end { "pause" } else { "kill" },
        },
    })
}

pub(super) async fn create(State(all): All, Tenant(tenant): Tenant, body: Bytes) -> Answer {
    let new: CreateRequest = json(&body)?;
    let labels = new.metadata.iter().flatten().flat_map(|(name, value)| [name, value]);
    short(labels.chain([&new.template]))?;
    let wanted = CreateOptions {
        template: new.template,
        time: Duration::from_secs(new.timeout.unwrap_or(DEFAULT_TIMEOUT_SECONDS)),
        pause_at_end: new.auto_pause,
        metadata: new.metadata.unwrap_or_default(),
    };
    let sandbox = all.create(&tenant, wanted).await?;
    Ok(answer(StatusCode::CREATED, &reach(&sandbox)))
}

/// One page of a list, and the start of the next.
fn page<T>(
    items: Vec<T>,
    listing: &ListQuery,
    id: impl Fn(&T) -> &str,
) -> (Vec<T>, Option<String>) {
    let after = listing.next_token.as_deref();
    let begin = after.and_then(|after| items.iter().position(|item| id(item) == after));
    let most = listing.limit.unwrap_or(PAGE).clamp(1, PAGE);
    let mut rest: Vec<T> = items.into_iter().skip(begin.map_or(0, |place| place + 1)).collect();
    let more = rest.len() > most;
    rest.truncate(most);
    let next = rest.last().filter(|_| more).map(|last| id(last).to_owned());
    (rest, next)
}

fn paged(items: Vec<Value>, next: Option<String>) -> Answer {
    let mut response = answer(StatusCode::OK, &Value::Array(items));
    if let Some(next) = next.and_then(|next| next.parse().ok()) {
        response.headers_mut().insert("x-next-token", next);
    }
    Ok(response)
}

pub(super) async fn list(
    State(all): All,
    Tenant(tenant): Tenant,
    Query(listing): Query<ListQuery>,
) -> Answer {
    let mut own = all.list(&tenant).await?;
    if let Some(states) = &listing.state {
        own.retain(|sandbox| {
            let state = if sandbox.times().paused { "paused" } else { "running" };
            states.split(',').any(|wanted| wanted == state)
        });
    }
    let (own, next) = page(own, &listing, |sandbox| &sandbox.id);
    paged(own.iter().map(|sandbox| detailed(&all, sandbox)).collect(), next)
}

pub(super) async fn detail(chosen: TenantSandbox) -> Answer {
    let (all, sandbox) = chosen.sandbox()?;
    Ok(answer(StatusCode::OK, &detailed(&all, &sandbox)))
}

pub(super) async fn kill(chosen: TenantSandbox) -> Answer {
    let (all, sandbox) = chosen.sandbox()?;
    all.kill(&sandbox).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(super) async fn timeout(chosen: TenantSandbox, body: Bytes) -> Answer {
    let time: TimeoutRequest = json(&body)?;
    let (all, sandbox) = chosen.sandbox()?;
    let ends = all.times(time.or_usual(), false).ends;
    sandbox.times().ends = ends;
    all.note(&sandbox, |_| ()).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(super) async fn refresh(chosen: TenantSandbox, body: Bytes) -> Answer {
    let time: TimeoutRequest = json(&body)?;
    let (all, sandbox) = chosen.sandbox()?;
    let ends = all
        .times(Duration::from_secs(time.duration.unwrap_or(DEFAULT_TIMEOUT_SECONDS)), false)
        .ends;
    let later = sandbox.times().ends.max(ends);
    sandbox.times().ends = later;
    all.note(&sandbox, |_| ()).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(super) async fn pause(chosen: TenantSandbox) -> Answer {
    let (all, sandbox) = chosen.sandbox()?;
    if sandbox.times().paused {
        let message = format!("the sandbox {} is paused already", sandbox.id);
        return Err(ErrorResponse::new(StatusCode::CONFLICT, message));
    }
    all.save(&sandbox, true, false).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(super) async fn connect(chosen: TenantSandbox, body: Bytes) -> Answer {
    let time: TimeoutRequest = json(&body)?;
    let (all, sandbox) = chosen.sandbox()?;
    let status = if sandbox.times().paused { StatusCode::CREATED } else { StatusCode::OK };
    all.resume(&sandbox, Some(time.or_usual())).await?;
    Ok(answer(status, &reach(&sandbox)))
}

pub(super) async fn resume(chosen: TenantSandbox, body: Bytes) -> Answer {
    let time: TimeoutRequest = json(&body)?;
    let (all, sandbox) = chosen.sandbox()?;
    if !sandbox.times().paused {
        let message = format!("the sandbox {} is running", sandbox.id);
        return Err(ErrorResponse::new(StatusCode::CONFLICT, message));
    }
    all.resume(&sandbox, Some(time.or_usual())).await?;
    Ok(answer(StatusCode::CREATED, &reach(&sandbox)))
}

pub(super) async fn fork(chosen: TenantSandbox, body: Bytes) -> Answer {
    let wanted: TimeoutRequest = json(&body)?;
    let count = wanted.count.unwrap_or(1);
    if !(1..=FORKS).contains(&count) {
        let message = format!("`count` is from 1 to {FORKS}");
        return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
    }
    let (all, sandbox) = chosen.sandbox()?;
    let forks = all.fork(&sandbox, count, wanted.or_usual()).await?;
    let forks: Vec<Value> = forks.iter().map(|fork| json!({"sandbox": reach(fork)})).collect();
    Ok(answer(StatusCode::CREATED, &Value::Array(forks)))
}

pub(super) async fn snapshot(chosen: TenantSandbox, body: Bytes) -> Answer {
    let wanted: TimeoutRequest = json(&body)?;
    short(&wanted.name)?;
    let (all, sandbox) = chosen.sandbox()?;
    let record = all.keep(&sandbox, wanted.name.into_iter().collect()).await?;
    let said = json!({"snapshotID": record.id, "names": record.names});
    Ok(answer(StatusCode::CREATED, &said))
}

pub(super) async fn snapshots(
    State(all): All,
    Tenant(tenant): Tenant,
    Query(listing): Query<ListQuery>,
) -> Answer {
    let mut own = all.snapshots(&tenant).await?;
    own.retain(|record| {
        let named = |name: &String| record.id == *name || record.names.contains(name);
        listing.sandbox.as_ref().is_none_or(|id| record.sandbox == *id)
            && listing.name.as_ref().is_none_or(named)
    });
    let (own, next) = page(own, &listing, |record| &record.id);
    let said = |record: &super::record::SnapshotRecord| json!({"snapshotID": record.id, "names": record.names});
    paged(own.iter().map(said).collect(), next)
}

pub(super) async fn forget(chosen: TenantSandbox) -> Answer {
    let TenantSandbox { all, tenant, id } = chosen;
    let known = all.snapshot(&tenant, &id).await?.ok_or_else(|| {
        ErrorResponse::new(StatusCode::NOT_FOUND, format!("the snapshot {id} was not found"))
    })?;
    all.forget(known.record).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Metrics that E2B measures inside a machine. There is no machine here, so the list is empty.
pub(super) async fn metrics(chosen: TenantSandbox) -> Answer {
    let (_, sandbox) = chosen.sandbox()?;
    tracing::trace!(id = sandbox.id, since = milliseconds(sandbox.started), "no samples");
    Ok(answer(StatusCode::OK, &json!([])))
}
