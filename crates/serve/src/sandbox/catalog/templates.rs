//! Templates over HTTP, as in the API of E2B: builds, their files and logs, names, tags and lists.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::extract::{Extension, FromRequest, Path, Query, Request, State};
use axum::response::IntoResponse;
use bytes::Bytes;
use hyper::header::HOST;
use hyper::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::body::Meter;
use crate::error_response::ErrorResponse;
use crate::sandbox::catalog::build_request::{check_tags, split, tagged};
use crate::sandbox::http::authorization::{Tenant, TenantSandbox};
use crate::sandbox::http::response::{Answer, answer, check_label_lengths, json, rfc3339};
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::tasks::blocking;
use crate::sandbox::records::record::{BuiltTemplate, SnapshotRecord};
use crate::sandbox::records::store::StoredSnapshot;
use crate::sandbox::request_body::template_requests::{BuildPlan, NewTemplate, TagRequest};

type All = State<Arc<Sandboxes>>;

/// Maximum bytes of the digest of a file.
const MAX_DIGEST_BYTES: usize = 128;

fn not_found(name: &str) -> ErrorResponse {
    ErrorResponse::new(StatusCode::NOT_FOUND, format!("the template {name} was not found"))
}

/// Says that a template is to be built.
pub(crate) async fn announce(State(all): All, Tenant(tenant): Tenant, body: Bytes) -> Answer {
    let new: NewTemplate = json(&body)?;
    let memory = new.memory_mib;
    let (name, tags) = new.names()?;
    if all.has_template(&name) {
        let message = format!("the template {name} is one of the configuration");
        return Err(ErrorResponse::new(StatusCode::CONFLICT, message));
    }
    let most =
        all.templates.all().iter().map(|warm| warm.config.memory >> 20).max().unwrap_or_default();
    if memory.is_some_and(|memory| memory > most) {
        let message = format!("`memoryMB` is at most {most}, the `memory-mib` of the templates");
        return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
    }
    let build = all.builds.add(&tenant, name, tags)?;
    let said = json!({
        "templateID": build.template,
        "buildID": build.id,
        "public": false,
        "names": [build.template],
        "aliases": [build.template],
        "tags": build.tags,
    });
    Ok(answer(StatusCode::ACCEPTED, &said))
}

/// Starts a build.
pub(crate) async fn start(
    State(all): All,
    Tenant(tenant): Tenant,
    Path((template, id)): Path<(String, String)>,
    Extension(meter): Extension<Meter>,
    body: Bytes,
) -> Answer {
    let build = all.builds.of(&tenant, &template, &id)?;
    let mut plan: BuildPlan = json(&body)?;
    let steps = plan.take_steps()?;
    // A build may wait for others of its tenant, longer than its request lasts.
    let mut held = meter.budget().share();
    if !held.add(plan.bytes(&steps)) {
        return Err(ErrorResponse::no_memory());
    }
    if !build.begin() {
        let message = format!("the build {id} was started already");
        return Err(ErrorResponse::new(StatusCode::CONFLICT, message));
    }
    tokio::spawn(async move {
        all.build(build, plan, steps).await;
        drop(held);
    });
    Ok(StatusCode::ACCEPTED.into_response())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StatusQuery {
    #[serde(default)]
    logs_offset: usize,
}

/// Where a build is, and its log.
pub(crate) async fn status(
    State(all): All,
    Tenant(tenant): Tenant,
    Path((template, id)): Path<(String, String)>,
    Query(wanted): Query<StatusQuery>,
) -> Answer {
    let build = all.builds.of(&tenant, &template, &id)?;
    Ok(answer(StatusCode::OK, &build.status(wanted.logs_offset)))
}

/// The link to send a file to.
pub(crate) async fn upload_link(
    State(all): All,
    Tenant(tenant): Tenant,
    Path((template, files)): Path<(String, String)>,
    headers: HeaderMap,
) -> Answer {
    let is_digest = |byte: u8| byte.is_ascii_alphanumeric();
    if files.len() > MAX_DIGEST_BYTES || !files.bytes().all(is_digest) {
        let message = "the digest of files has letters and digits";
        return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
    }
    let (token, present) = all.builds.expect(&tenant, &files)?;
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let missing =
        || ErrorResponse::new(StatusCode::BAD_REQUEST, "the request has no `Host` header");
    let host = text(HOST.as_str()).ok_or_else(missing)?;
    let usual = if all.config.https { "https" } else { "http" };
    let scheme = text("x-forwarded-proto").unwrap_or(usual);
    let template: String =
        percent_encoding::utf8_percent_encode(&template, percent_encoding::NON_ALPHANUMERIC)
            .to_string();
    let url = format!("{scheme}://{host}/templates/{template}/files/{files}?token={token}");
    Ok(answer(StatusCode::CREATED, &json!({"present": present, "url": url})))
}

#[derive(Deserialize)]
pub(crate) struct UploadQuery {
    token: String,
}

/// Keeps a file for a build.
pub(crate) async fn upload(
    State(all): All,
    Path((_, files)): Path<(String, String)>,
    Query(shown): Query<UploadQuery>,
    request: Request,
) -> Answer {
    // Before the body, which anyone can send.
    let tenant = all.builds.check_link(&files, &shown.token)?;
    if let Some(meter) = request.extensions().get::<Meter>() {
        meter.set_tenant(Some(&tenant));
    }
    let body = Bytes::from_request(request, &())
        .await
        .map_err(|error| ErrorResponse::new(StatusCode::PAYLOAD_TOO_LARGE, error.body_text()))?;
    blocking(move || all.builds.put(&all.config.dir, (&files, &shown.token), &body)).await?;
    Ok(StatusCode::OK.into_response())
}

/// Whether a name is that of a template, as a creation of templates alone resolves it.
pub(crate) async fn alias(chosen: TenantSandbox) -> Answer {
    let TenantSandbox { all, tenant, id } = chosen;
    match all.resolve_template(&tenant, &id).await {
        Ok(_) => {}
        Err(refusal) if refusal.status == StatusCode::NOT_FOUND => return Err(not_found(&id)),
        Err(refusal) => return Err(refusal),
    }
    let (name, _) = split(&id);
    Ok(answer(StatusCode::OK, &json!({"templateID": name, "public": false})))
}

impl Sandboxes {
    /// The builds of a template that are kept, oldest first.
    async fn builds_of(
        &self,
        tenant: &Arc<str>,
        template: &str,
    ) -> Result<Vec<(BuiltTemplate, SnapshotRecord)>, ErrorResponse> {
        let all = self.snapshots(tenant).await?.into_iter();
        let mut own: Vec<_> = all
            .filter_map(|record| Some((record.built.clone()?, record)))
            .filter(|(built, _)| built.template == template)
            .collect();
        own.sort_by(|(one, _), (two, _)| (one.made, &one.id).cmp(&(two.made, &two.id)));
        Ok(own)
    }

    /// A build by its name with a tag.
    async fn build_named(&self, tenant: &str, name: &str) -> Result<StoredSnapshot, ErrorResponse> {
        let known = self.snapshot(tenant, name).await?;
        known.filter(|known| known.record.built.is_some()).ok_or_else(|| not_found(name))
    }
}

/// The tags of a template.
pub(crate) async fn tags(chosen: TenantSandbox) -> Answer {
    let TenantSandbox { all, tenant, id } = chosen;
    let builds = all.builds_of(&tenant, &id).await?;
    if builds.is_empty() {
        return Err(not_found(&id));
    }
    let tags = builds.iter().flat_map(|(built, record)| {
        let tags = record.names.iter().filter_map(|name| split(name).1);
        tags.map(|tag| json!({"tag": tag, "buildID": built.id, "createdAt": moment(built)}))
    });
    Ok(answer(StatusCode::OK, &tags.collect()))
}

fn moment(built: &BuiltTemplate) -> String {
    rfc3339(UNIX_EPOCH + Duration::from_millis(built.made))
}

/// Gives a build further tags, which other builds of the template lose.
pub(crate) async fn add_tags(State(all): All, Tenant(tenant): Tenant, body: Bytes) -> Answer {
    let wanted: TagRequest = json(&body)?;
    check_tags(&wanted.tags)?;
    let known = all.build_named(&tenant, &wanted.target).await?.record;
    let (name, _) = split(&wanted.target);
    let names: Vec<String> = wanted.tags.iter().flat_map(|tag| tagged(name, tag)).collect();
    let new = names.iter().filter(|name| !known.names.contains(name));
    check_label_lengths(known.names.iter().chain(new))?;
    if !all.ledger.add_names(&known, &names).await? {
        return Err(not_found(&wanted.target));
    }
    let id = known.built.map(|built| built.id).unwrap_or_default();
    Ok(answer(StatusCode::CREATED, &json!({"buildID": id, "tags": wanted.tags})))
}

/// Takes tags away.
pub(crate) async fn remove_tags(State(all): All, Tenant(tenant): Tenant, body: Bytes) -> Answer {
    let wanted: TagRequest = json(&body)?;
    check_tags(&wanted.tags)?;
    let (name, _) = split(&wanted.target);
    for tag in &wanted.tags {
        let known = all.build_named(&tenant, &format!("{name}:{tag}")).await?;
        all.ledger.remove_names(&known.record, &tagged(name, tag)).await?;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// A template in a list.
fn listed(all: &Sandboxes, name: &str, builds: &[(BuiltTemplate, SnapshotRecord)]) -> Value {
    let base = builds.last().map_or(name, |(_, record)| &record.template);
    let made = |at: Option<&(BuiltTemplate, SnapshotRecord)>| at.map(|(built, _)| moment(built));
    let names: Vec<&String> = builds.iter().flat_map(|(_, record)| &record.names).collect();
    json!({
        "templateID": name,
        "buildID": builds.last().map(|(built, _)| built.id.as_str()).unwrap_or_default(),
        "cpuCount": 1,
        "memoryMB": all.template(base).config.memory >> 20,
        "diskSizeMB": all.template(base).config.files >> 20,
        "public": false,
        "aliases": [name],
        "names": names,
        "createdAt": made(builds.first()),
        "updatedAt": made(builds.last()),
        "createdBy": null,
        "lastSpawnedAt": null,
        "spawnCount": 0,
        "buildCount": builds.len(),
        "envdVersion": crate::sandbox::http::control::AGENT,
        "buildStatus": "ready",
    })
}

/// All templates: those of the configuration, and the tenant's own.
pub(crate) async fn list(State(all): All, Tenant(tenant): Tenant) -> Answer {
    let mut own: BTreeMap<String, Vec<(BuiltTemplate, SnapshotRecord)>> = BTreeMap::new();
    for record in all.snapshots(&tenant).await? {
        if let Some(built) = record.built.clone() {
            own.entry(built.template.clone()).or_default().push((built, record));
        }
    }
    let templates = all.templates.all();
    let configured = templates.iter().map(|warm| listed(&all, &warm.config.name, &[]));
    let mut listed: Vec<Value> = configured.collect();
    for (name, mut builds) in own {
        builds.sort_by_key(|(built, _)| built.made);
        listed.push(self::listed(&all, &name, &builds));
    }
    Ok(answer(StatusCode::OK, &Value::Array(listed)))
}

/// One template with its builds.
pub(crate) async fn detail(chosen: TenantSandbox) -> Answer {
    let TenantSandbox { all, tenant, id } = chosen;
    let builds = all.builds_of(&tenant, &id).await?;
    if builds.is_empty() && !all.has_template(&id) {
        return Err(not_found(&id));
    }
    let mut said = listed(&all, &id, &builds);
    let one = |(built, record): &(BuiltTemplate, SnapshotRecord)| {
        json!({
            "buildID": built.id,
            "status": "ready",
            "createdAt": moment(built),
            "updatedAt": moment(built),
            "finishedAt": moment(built),
            "cpuCount": 1,
            "memoryMB": all.template(&record.template).config.memory >> 20,
        })
    };
    said["builds"] = builds.iter().map(one).collect();
    Ok(answer(StatusCode::OK, &said))
}

/// Removes a template with all its builds, or a snapshot.
pub(crate) async fn forget(chosen: TenantSandbox) -> Answer {
    let TenantSandbox { all, tenant, id } = chosen;
    let builds = all.builds_of(&tenant, &id).await?;
    if builds.is_empty() {
        let known = all.snapshot(&tenant, &id).await?.ok_or_else(|| {
            let message = format!("the template or snapshot {id} was not found");
            ErrorResponse::new(StatusCode::NOT_FOUND, message)
        })?;
        all.forget(known.record).await?;
    }
    for (_, record) in builds {
        all.forget(record).await?;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}
