//! The requests about sandboxes, and their handlers.

use std::borrow::Cow;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::DefaultBodyLimit;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, delete, get, post, put};
use hyper::header::CONTENT_LENGTH;
use hyper::service::Service;
use hyper::{Request, StatusCode};
use hyper_util::service::TowerToHyperService;
use percent_encoding::percent_decode_str;

use crate::error_response::ErrorResponse;
use crate::sandbox::agent::{contexts, envd, execute, process};
use crate::sandbox::catalog::templates;
use crate::sandbox::connections::network_update;
use crate::sandbox::http::authorization::sandbox_id;
use crate::sandbox::http::keys::Scope;
use crate::sandbox::http::request_record::{RequestRecord, TOKEN};
use crate::sandbox::http::signature::is_signed;
use crate::sandbox::http::{control, extensions, listing, usage_report};
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::lifecycle::sandbox_metrics;
use crate::sandbox::request_body::weight::{FILE_WEIGHT, JSON_WEIGHT, code_weight};
use crate::sandbox::transfer::file_transfer;

/// Words of paths that are not names.
const ROUTE_WORDS: [&str; 32] = [
    "v2",
    "v3",
    "builds",
    "status",
    "aliases",
    "tags",
    "sandboxes",
    "timeout",
    "refreshes",
    "network",
    "pause",
    "connect",
    "resume",
    "fork",
    "snapshots",
    "metrics",
    "templates",
    "checkpoints",
    "rollback",
    "tree",
    "diff",
    "openapi.json",
    "health",
    "execute",
    "contexts",
    "restart",
    "files",
    "filesystem.Filesystem",
    "process.Process",
    "usage",
    "volumes",
    "secrets",
];
/// Parts of E2B's API that this server lacks, and what to do without them.
const UNSERVED: [(&str, &str); 2] = [
    ("volumes", "keep files in a paused sandbox, a snapshot or a template"),
    ("secrets", "give variables to a sandbox, or rules for requests that set a header"),
];
/// The header with the key of a client of E2B.
const API_KEY: &str = "x-api-key";
/// Words of the longest path.
const MAX_PATH_WORDS: usize = 5;

/// The header of answers from within a sandbox that counts how often a host was lost with it.
const GENERATION: &str = "afresh-generation";

/// The proof that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    /// None.
    Public,
    /// A key with one of these scopes.
    Key(&'static [Scope]),
    /// The token of its sandbox, or a signature by it. The handler checks that, and knows
    /// exceptions.
    Token,
}

impl Access {
    /// The proof for a request.
    fn of<B>(request: &Request<B>) -> Self {
        let path = request.uri().path();
        if is_for_program(request) || !control(path) {
            return Self::Token;
        }
        match path {
            "/openapi.json" => Self::Public,
            // Its handler asks for the token of the link.
            _ if is_upload(request) => Self::Public,
            "/usage" => Self::Key(&[Scope::Use, Scope::Admin]),
            _ => Self::Key(&[Scope::Use]),
        }
    }
}

/// The requests that are about sandboxes.
pub(crate) struct Routes {
    pub(crate) sandboxes: Arc<Sandboxes>,
    control: TowerToHyperService<Router>,
    inside: TowerToHyperService<Router>,
}

/// A path of the control plane without its version.
fn unversioned(path: &str) -> &str {
    ["/v2", "/v3"].iter().find_map(|version| path.strip_prefix(version)).unwrap_or(path)
}

/// Whether a request sends a file for the build of a template.
fn is_upload<B>(request: &Request<B>) -> bool {
    let mut words = request.uri().path().split('/').skip(1);
    request.method() == hyper::Method::PUT
        && (words.next(), words.nth(1)) == (Some("templates"), Some("files"))
}

/// The name in a path of the control plane: its second word, decoded as its handler has it.
fn named(path: &str) -> Option<Cow<'_, str>> {
    let path = unversioned(path);
    let name = path.split('/').nth(2).filter(|name| !name.is_empty())?;
    Some(percent_decode_str(name).decode_utf8_lossy())
}

/// Maximum bytes of a body that is neither code nor a file: lists and labels take many times their
/// size once they are decoded.
const MAX_MESSAGE: usize = 1 << 20;

async fn unknown(request: Request<Body>) -> ErrorResponse {
    let part = request.uri().path().split('/').nth(1);
    if let Some((name, advice)) = UNSERVED.into_iter().find(|(name, _)| part == Some(name)) {
        let message = format!("this server has no {name}: {advice}");
        return ErrorResponse::new(StatusCode::NOT_IMPLEMENTED, message);
    }
    ErrorResponse::new(
        StatusCode::NOT_FOUND,
        "no such operation; /openapi.json lists what there is",
    )
}

impl Routes {
    pub(crate) fn new(sandboxes: Arc<Sandboxes>) -> Self {
        let content = DefaultBodyLimit::max(sandboxes.config.max_body);
        let most = DefaultBodyLimit::max(MAX_MESSAGE.min(sandboxes.config.max_body));
        let files = get(templates::upload_link).put(templates::upload).layer(content);
        let control = Router::new()
            .route("/sandboxes", post(control::create).get(listing::list))
            .route("/v2/sandboxes", post(control::create).get(listing::list))
            .route("/sandboxes/{id}", get(control::detail).delete(control::kill))
            .route("/sandboxes/{id}/timeout", post(control::timeout))
            .route("/sandboxes/{id}/refreshes", post(control::refresh))
            .route("/sandboxes/{id}/network", put(network_update::update))
            .route("/sandboxes/{id}/pause", post(control::pause))
            .route("/sandboxes/{id}/connect", post(control::connect))
            .route("/v2/sandboxes/{id}/connect", post(control::connect))
            .route("/sandboxes/{id}/resume", post(control::resume))
            .route("/sandboxes/{id}/fork", post(control::fork))
            .route("/sandboxes/{id}/snapshots", post(control::snapshot))
            .route("/sandboxes/{id}/metrics", get(sandbox_metrics::metrics))
            .route("/snapshots", get(listing::snapshots))
            .route("/v3/templates", post(templates::announce))
            .route("/templates", get(templates::list))
            .route("/v2/templates", get(templates::list))
            .route("/templates/{id}", get(templates::detail).delete(templates::forget))
            .route("/v2/templates/{id}/builds/{build}", post(templates::start))
            .route("/templates/{id}/builds/{build}/status", get(templates::status))
            .route("/templates/{id}/files/{files}", files)
            .route("/templates/aliases/{id}", get(templates::alias))
            .route("/templates/{id}/tags", get(templates::tags))
            .route("/templates/tags", post(templates::add_tags).delete(templates::remove_tags))
            .route("/sandboxes/{id}/checkpoints", post(extensions::checkpoint))
            .route("/sandboxes/{id}/checkpoints/{checkpoint}", delete(extensions::drop_checkpoint))
            .route("/sandboxes/{id}/rollback", post(extensions::rollback))
            .route("/sandboxes/{id}/tree", get(extensions::tree))
            .route("/sandboxes/{id}/diff", get(extensions::diff))
            .route("/usage", get(usage_report::usage))
            .route("/openapi.json", get(extensions::openapi))
            .fallback(unknown)
            .layer(most)
            .with_state(sandboxes.clone());
        let inside = Router::new()
            .route("/health", get(envd::health))
            .route("/execute", post(execute::execute).layer(content))
            .route("/contexts", get(contexts::list).post(contexts::create))
            .route("/contexts/{id}", delete(contexts::remove))
            .route("/contexts/{id}/restart", post(contexts::restart))
            .route("/files", get(file_transfer::read).post(file_transfer::write).layer(content))
            .route("/filesystem.Filesystem/{method}", post(envd::filesystem))
            .route("/process.Process/{method}", any(process::process))
            .fallback(unknown)
            .layer(most)
            .with_state(sandboxes.clone());
        Self {
            sandboxes,
            control: TowerToHyperService::new(control),
            inside: TowerToHyperService::new(inside),
        }
    }

    /// Maximum bytes of one request.
    pub(crate) fn most(&self) -> usize {
        self.sandboxes.config.max_body
    }

    /// Maximum bytes of memory per byte of a body, once it is decoded.
    pub(crate) fn weight<B>(request: &Request<B>) -> usize {
        match request.uri().path() {
            "/files" => FILE_WEIGHT,
            "/execute" => {
                let len = request.headers().get(CONTENT_LENGTH);
                code_weight(len.and_then(|len| len.to_str().ok()?.parse().ok()))
            }
            _ if is_upload(request) => FILE_WEIGHT,
            _ => JSON_WEIGHT,
        }
    }

    /// Whether a request's body goes to a program in a sandbox piece by piece.
    pub(crate) fn is_passed_on<B>(request: &Request<B>) -> bool {
        is_for_program(request)
    }

    /// Whether a request is about sandboxes.
    pub(crate) fn is_sandbox_request<B>(&self, request: &Request<B>) -> bool {
        let path = request.uri().path();
        sandbox_id(request.headers()).is_some() || is_signed(path, request.uri().query()) || {
            let first = unversioned(path).split('/').nth(1).unwrap_or_default();
            // A guest may have these routes. Its clients send no key of E2B.
            let is_unserved = UNSERVED.iter().any(|(name, _)| *name == first);
            ["sandboxes", "snapshots", "templates", "usage", "openapi.json"].contains(&first)
                || is_unserved && request.headers().contains_key(API_KEY)
        }
    }

    /// Whether a request is for one sandbox by its host or header. Hosts such as
    /// `10-42-0-7.pod.cluster.local` have no id of a sandbox.
    pub(crate) fn names_sandbox<B>(request: &Request<B>) -> bool {
        let is_id = |id: &str| id.len() >= 12 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        sandbox_id(request.headers()).is_some_and(|id| is_id(&id))
    }

    /// The subject of a request, for the routing in a fleet.
    #[cfg(feature = "fleet")]
    pub(crate) fn about<B>(request: &Request<B>) -> crate::sandbox::records::store::RouteSubject {
        use crate::sandbox::records::store::RouteSubject;
        let path = request.uri().path();
        if is_for_program(request) || !control(path) {
            let id = sandbox_id(request.headers());
            return id.map_or(RouteSubject::Other, |id| RouteSubject::Sandbox { id, inside: true });
        }
        let rest = unversioned(path);
        match (rest.strip_prefix("/sandboxes"), named(path)) {
            (Some(_), Some(id)) => RouteSubject::Sandbox { id: id.into_owned(), inside: false },
            (Some("" | "/"), None) if request.method() == hyper::Method::POST => RouteSubject::New,
            _ => RouteSubject::Other,
        }
    }

    /// The operation of a path: the path without names, so that the set is bounded.
    pub(crate) fn pattern(path: &str) -> String {
        let known = |word: &&str| ROUTE_WORDS.contains(word);
        let words = path.split('/').skip(1).take(MAX_PATH_WORDS);
        words.map(|word| format!("/{}", Some(word).filter(known).unwrap_or("{id}"))).collect()
    }

    pub(crate) async fn answer(&self, request: Request<Body>) -> Response {
        let sandbox = sandbox_id(request.headers()).and_then(|id| self.sandboxes.any(&id));
        let action = action(&request);
        let mut record = RequestRecord::new(&self.sandboxes, &request, &action);
        if is_for_program(&request) {
            // The connection counts its bytes.
            record.is_counted_elsewhere();
        }
        let answered = self.answer_recorded(request, sandbox.as_ref(), &record).await;
        let mut response = record.follow(answered.unwrap_or_else(IntoResponse::into_response));
        // A client that sees another number knows that a lost host undid calls.
        if let Some(sandbox) = sandbox {
            response.headers_mut().insert(GENERATION, sandbox.generation.into());
        }
        response
    }

    /// Checks the caller and the budgets of a request, and answers it.
    async fn answer_recorded(
        &self,
        mut request: Request<Body>,
        sandbox: Option<&Arc<Sandbox>>,
        record: &RequestRecord,
    ) -> Result<Response, ErrorResponse> {
        let (all, notes) = (&self.sandboxes, &record.notes);
        match Access::of(&request) {
            Access::Public => {}
            Access::Token => {
                if let Some(sandbox) = sandbox {
                    notes.set_caller(&sandbox.tenant, TOKEN);
                    notes.set_sandbox(&sandbox.id);
                    all.accounts.check_sent(&sandbox.tenant)?;
                }
            }
            Access::Key(scopes) => {
                let identity = all.config.keys.identity(request.headers());
                let identity = identity.inspect_err(|error| notes.set_denied(error))?;
                notes.set_caller(&identity.tenant, &identity.key);
                if let Some(id) = named(request.uri().path()) {
                    notes.set_sandbox(&id);
                }
                identity.clone().allow(scopes)?;
                request.extensions_mut().insert(identity);
            }
        }
        if let Some(tenant) = notes.tenant() {
            crate::span::tenant(&tenant);
        }
        record.begin().await?;
        request.extensions_mut().insert(notes.clone());
        Ok(self.answer_by_path(record.count_request(request)).await)
    }

    async fn answer_by_path(&self, request: Request<Body>) -> Response {
        #[cfg(linux_guests)]
        if let Some(port) = crate::sandbox::connections::port::of(request.headers()) {
            return crate::sandbox::connections::port::answer(&self.sandboxes, port, request).await;
        }
        let router = if control(request.uri().path()) { &self.control } else { &self.inside };
        match router.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}

/// The action of a request, for the audit log.
fn action<B>(request: &Request<B>) -> String {
    #[cfg(linux_guests)]
    if let Some(port) = crate::sandbox::connections::port::of(request.headers()) {
        return format!("port {port}");
    }
    Routes::pattern(request.uri().path())
}

/// Whether a request is for a program in a sandbox, with any path.
fn is_for_program<B>(request: &Request<B>) -> bool {
    #[cfg(linux_guests)]
    return crate::sandbox::connections::port::of(request.headers()).is_some();
    #[cfg(not(linux_guests))]
    {
        let _ = request;
        false
    }
}

/// Whether a path is one of the control plane's.
fn control(path: &str) -> bool {
    [
        "/sandboxes",
        "/v2/",
        "/v3/",
        "/snapshots",
        "/templates",
        "/usage",
        "/openapi.json",
        "/volumes",
        "/secrets",
    ]
    .iter()
    .any(|own| path.starts_with(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_its_path_without_names() {
        for (path, pattern) in [
            ("/sandboxes", "/sandboxes"),
            ("/v2/sandboxes/sb-1/connect", "/v2/sandboxes/{id}/connect"),
            ("/sandboxes/s/checkpoints/c", "/sandboxes/{id}/checkpoints/{id}"),
            ("/execute", "/execute"),
            ("/a/b/c/d/e/f/g", "/{id}/{id}/{id}/{id}/{id}"),
        ] {
            assert_eq!(Routes::pattern(path), pattern);
        }
    }

    #[test]
    fn an_encoded_name_is_that_of_its_handler() {
        for (path, name) in [
            ("/sandboxes/abc/pause", Some("abc")),
            ("/v2/sandboxes/%61b%63/connect", Some("abc")),
            ("/templates/web%3Av1", Some("web:v1")),
            ("/sandboxes/a%2Fb", Some("a/b")),
            ("/sandboxes/", None),
            ("/sandboxes", None),
        ] {
            assert_eq!(named(path).as_deref(), name, "{path}");
        }
    }
}
