//! The control plane in E2B's shape: making, pausing, forking and ending sandboxes.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::response::IntoResponse;
use bytes::Bytes;
use hyper::header::HeaderValue;
use hyper::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use crate::error_response::ErrorResponse;
use crate::sandbox::catalog::build_request::check_reserved;
use crate::sandbox::catalog::snapshots::SnapshotOptions;
use crate::sandbox::connections::request_host::check_host;
use crate::sandbox::http::authorization::{Tenant, TenantSandbox, traffic_token};
use crate::sandbox::http::request_record::RequestNotes;
use crate::sandbox::http::response::{Answer, answer, check_label_lengths, json, rfc3339};
use crate::sandbox::lifecycle::creation::{CreateOptions, Creation};
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::records::creation_key::{CreationKey, REPLAY_HEADER};
use crate::sandbox::records::record::SandboxSettings;
use crate::sandbox::request_body::network_rules::NetworkRules;
use crate::sandbox::request_body::requests::{CreateRequest, TimeoutRequest, UnsupportedOption};

type All = State<Arc<Sandboxes>>;

/// The version of the E2B agent with this interface. Its clients choose their requests by it.
pub(crate) const AGENT: &str = "0.6.5";
/// Default lifetime of a sandbox in seconds.
const DEFAULT_TIMEOUT_SECONDS: u64 = 300;
/// Maximum forks of one request.
const MAX_FORKS: usize = 1000;

impl TimeoutRequest {
    fn or_default(&self) -> Duration {
        Duration::from_secs(self.timeout.unwrap_or(DEFAULT_TIMEOUT_SECONDS))
    }
}

/// Data that a client needs to reach a sandbox.
fn reach(sandbox: &Sandbox) -> Value {
    json!({
        "sandboxID": sandbox.id,
        "templateID": sandbox.template,
        "clientID": "afresh",
        "envdVersion": AGENT,
        "envdAccessToken": sandbox.token,
        "trafficAccessToken": traffic_token(&sandbox.token),
    })
}

pub(crate) fn detailed(all: &Sandboxes, sandbox: &Sandbox) -> Value {
    let times = *sandbox.lifetime();
    let template = all.template_of(sandbox);
    let network = sandbox.network.rules();
    json!({
        "sandboxID": sandbox.id,
        "templateID": sandbox.template,
        "alias": sandbox.template,
        "clientID": "afresh",
        "envdVersion": AGENT,
        "envdAccessToken": sandbox.token,
        "allowInternetAccess": network.has_internet(&template.config),
        "network": network.described(&sandbox.settings),
        "startedAt": rfc3339(sandbox.started),
        "endAt": rfc3339(times.ends_at()),
        "state": if sandbox.is_paused() { "paused" } else { "running" },
        "metadata": sandbox.settings.metadata,
        "cpuCount": 1,
        "memoryMB": template.config.memory >> 20,
        "diskSizeMB": 0,
        "lifecycle": {
            "autoResume": sandbox.settings.auto_resume,
            "onTimeout": if times.pause_at_end { "pause" } else { "kill" },
        },
    })
}

/// Refuses an option that this server does not have.
pub(crate) fn refuse_unsupported(option: Option<UnsupportedOption>) -> Result<(), ErrorResponse> {
    let Some((name, why)) = option else { return Ok(()) };
    let message = format!("`{name}` is not supported: {why}");
    Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message))
}

pub(crate) async fn create(
    State(all): All,
    Extension(notes): Extension<RequestNotes>,
    Tenant(tenant): Tenant,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let new: CreateRequest = json(&body)?;
    refuse_unsupported(new.unsupported())?;
    let key = CreationKey::read(&headers, &tenant, &body)?;
    let labels = new.metadata.iter().chain(&new.env_vars).flatten();
    check_label_lengths(labels.flat_map(|(name, value)| [name, value]).chain([&new.template]))?;
    let network = new.network.unwrap_or_default();
    check_host(network.mask_request_host.as_deref())?;
    let wanted = CreateOptions {
        template: new.template,
        template_only: new.template_only,
        time: Duration::from_secs(new.timeout.unwrap_or(DEFAULT_TIMEOUT_SECONDS)),
        pause_at_end: new.auto_pause,
        settings: SandboxSettings {
            metadata: new.metadata.unwrap_or_default(),
            envs: new.env_vars.unwrap_or_default(),
            public: network.allow_public_traffic.unwrap_or(all.config.public_traffic),
            host: network.mask_request_host,
            files_only: new.auto_pause_memory == Some(false),
            auto_resume: new.auto_resume.is_some_and(|resume| resume.enabled),
            directory: None,
            network: NetworkRules {
                allow_out: network.allow_out,
                deny_out: network.deny_out,
                rules: network.rules,
                internet: new.internet,
                ..NetworkRules::default()
            },
            ..SandboxSettings::default()
        },
    };
    let made = match key {
        None => {
            let sandbox = all.create(&tenant, wanted).await?;
            Creation { sandbox, is_replay: false }
        }
        Some(key) => all.create_once(&tenant, wanted, key).await?,
    };
    let mut answer = answer(StatusCode::CREATED, &reach(&made.sandbox));
    if made.is_replay {
        answer.headers_mut().insert(REPLAY_HEADER, HeaderValue::from_static("true"));
    } else {
        notes.set_made([&*made.sandbox.id].into_iter());
    }
    Ok(answer)
}

pub(crate) async fn detail(chosen: TenantSandbox) -> Answer {
    let (all, sandbox) = chosen.sandbox()?;
    Ok(answer(StatusCode::OK, &detailed(&all, &sandbox)))
}

pub(crate) async fn kill(chosen: TenantSandbox) -> Answer {
    let TenantSandbox { all, tenant, id } = chosen;
    all.kill_by_id(&tenant, &id).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(crate) async fn timeout(chosen: TenantSandbox, body: Bytes) -> Answer {
    let time: TimeoutRequest = json(&body)?;
    let (all, sandbox) = chosen.sandbox()?;
    let ends = all.lifetime(time.or_default(), false).ends;
    sandbox.lifetime().ends = ends;
    all.note(&sandbox, |_| ()).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(crate) async fn refresh(chosen: TenantSandbox, body: Bytes) -> Answer {
    let time: TimeoutRequest = json(&body)?;
    let (all, sandbox) = chosen.sandbox()?;
    let ends = all
        .lifetime(Duration::from_secs(time.duration.unwrap_or(DEFAULT_TIMEOUT_SECONDS)), false)
        .ends;
    let later = sandbox.lifetime().ends.max(ends);
    sandbox.lifetime().ends = later;
    all.note(&sandbox, |_| ()).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Refuses a snapshot without its memory.
fn with_memory(wanted: &TimeoutRequest) -> Result<(), ErrorResponse> {
    if wanted.memory == Some(false) {
        let message = "`memory: false` is for pauses: a snapshot has memory and files";
        return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
    }
    Ok(())
}

pub(crate) async fn pause(chosen: TenantSandbox, body: Bytes) -> Answer {
    let wanted: TimeoutRequest = json(&body)?;
    let (all, sandbox) = chosen.sandbox()?;
    if sandbox.lifetime().paused {
        let message = format!("the sandbox {} is paused already", sandbox.id);
        return Err(ErrorResponse::new(StatusCode::CONFLICT, message));
    }
    all.pause(&sandbox, wanted.memory != Some(false)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(crate) async fn connect(chosen: TenantSandbox, body: Bytes) -> Answer {
    let time: TimeoutRequest = json(&body)?;
    with_memory(&time)?;
    let (all, sandbox) = chosen.sandbox()?;
    let status = if sandbox.is_paused() { StatusCode::CREATED } else { StatusCode::OK };
    all.resume(&sandbox, Some(time.or_default())).await?;
    Ok(answer(status, &reach(&sandbox)))
}

pub(crate) async fn resume(chosen: TenantSandbox, body: Bytes) -> Answer {
    let time: TimeoutRequest = json(&body)?;
    let (all, sandbox) = chosen.sandbox()?;
    if !sandbox.is_paused() {
        let message = format!("the sandbox {} is running", sandbox.id);
        return Err(ErrorResponse::new(StatusCode::CONFLICT, message));
    }
    all.resume(&sandbox, Some(time.or_default())).await?;
    Ok(answer(StatusCode::CREATED, &reach(&sandbox)))
}

pub(crate) async fn fork(
    chosen: TenantSandbox,
    Extension(notes): Extension<RequestNotes>,
    body: Bytes,
) -> Answer {
    let wanted: TimeoutRequest = json(&body)?;
    let count = wanted.count.unwrap_or(1);
    if !(1..=MAX_FORKS).contains(&count) {
        let message = format!("`count` is from 1 to {MAX_FORKS}");
        return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
    }
    let (all, sandbox) = chosen.sandbox()?;
    let forks = all.fork(&sandbox, count, wanted.or_default()).await?;
    notes.set_made(forks.iter().map(|fork| &*fork.id));
    let forks: Vec<Value> = forks.iter().map(|fork| json!({"sandbox": reach(fork)})).collect();
    Ok(answer(StatusCode::CREATED, &Value::Array(forks)))
}

pub(crate) async fn snapshot(
    chosen: TenantSandbox,
    Extension(notes): Extension<RequestNotes>,
    body: Bytes,
) -> Answer {
    let wanted: TimeoutRequest = json(&body)?;
    with_memory(&wanted)?;
    check_label_lengths(&wanted.name)?;
    wanted.name.iter().try_for_each(|name| check_reserved(name))?;
    let (all, sandbox) = chosen.sandbox()?;
    let keep = SnapshotOptions::of_sandbox(&sandbox, wanted.name.into_iter().collect());
    let record = all.keep(&sandbox, keep).await?;
    notes.set_made([&*record.id].into_iter());
    let said = json!({"snapshotID": record.id, "names": record.names});
    Ok(answer(StatusCode::CREATED, &said))
}
