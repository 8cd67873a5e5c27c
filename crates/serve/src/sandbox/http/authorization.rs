//! The tenant and the sandbox of a request, which its key or its token gives access to.
//!
//! Promises: the traffic token of a sandbox reaches its ports and the contexts of its code, and
//! neither runs code nor reaches files. It is derived from the token of the sandbox by a one-way
//! function.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequestParts, RawPathParams};
use hyper::header::{HOST, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode};
use sha2::{Digest, Sha256};

use crate::error_response::ErrorResponse;
use crate::sandbox::http::keys::{Identity, Scope, same};
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;

/// The header of E2B clients that names a sandbox where the host does not.
pub(crate) const SANDBOX: &str = "e2b-sandbox-id";

/// The tenant of a request to the control plane.
pub(crate) struct Tenant(pub(crate) Arc<str>);

impl FromRequestParts<Arc<Sandboxes>> for Tenant {
    type Rejection = ErrorResponse;

    async fn from_request_parts(
        parts: &mut Parts,
        all: &Arc<Sandboxes>,
    ) -> Result<Self, ErrorResponse> {
        let known = parts.extensions.get::<Identity>().cloned();
        let identity = known.map_or_else(|| all.config.keys.identity(&parts.headers), Ok)?;
        Ok(Self(identity.allow(&[Scope::Use])?))
    }
}

/// The sandbox or snapshot of a tenant that a path of the control plane names.
pub(crate) struct TenantSandbox {
    pub(crate) all: Arc<Sandboxes>,
    pub(crate) tenant: Arc<str>,
    pub(crate) id: String,
}

impl FromRequestParts<Arc<Sandboxes>> for TenantSandbox {
    type Rejection = ErrorResponse;

    async fn from_request_parts(
        parts: &mut Parts,
        all: &Arc<Sandboxes>,
    ) -> Result<Self, ErrorResponse> {
        let Tenant(tenant) = Tenant::from_request_parts(parts, all).await?;
        // The first that the path names; a handler without any would have no use for this.
        let named = RawPathParams::from_request_parts(parts, all).await;
        let named = named
            .map_err(|error| ErrorResponse::new(StatusCode::BAD_REQUEST, error.body_text()))?;
        let id = named.iter().next().map(|(_, id)| id.to_owned()).unwrap_or_default();
        Ok(Self { all: all.clone(), tenant, id })
    }
}

impl TenantSandbox {
    /// The sandbox, which is looked up last: errors of the request come first.
    pub(crate) fn sandbox(self) -> Result<(Arc<Sandboxes>, Arc<Sandbox>), ErrorResponse> {
        let sandbox = self.all.of(&self.tenant, &self.id)?;
        Ok((self.all, sandbox))
    }
}

/// Minimum lifetime of a sandbox that a request resumes.
const AUTO_RESUME_TIME: Duration = Duration::from_secs(300);

/// The header with the token of a sandbox.
pub(crate) const ACCESS_TOKEN: &str = "x-access-token";
/// The header with its traffic token.
pub(crate) const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";
/// Bytes of a block of SHA-256.
const HMAC_BLOCK: usize = 64;

/// The token for the ports of the sandbox with this token: `HMAC(token, "traffic")` in hexadecimal.
pub(crate) fn traffic_token(token: &str) -> String {
    let mut key = [0_u8; HMAC_BLOCK];
    match key.get_mut(..token.len()) {
        Some(start) => start.copy_from_slice(token.as_bytes()),
        None => key[..32].copy_from_slice(&Sha256::digest(token)),
    }
    let padded = |pad: u8| Sha256::new_with_prefix(key.map(|byte| byte ^ pad));
    let inner = padded(0x36).chain_update("traffic").finalize();
    let mac = padded(0x5c).chain_update(inner).finalize();
    mac.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a path of the agent takes the traffic token as well: clients of E2B show no other one
/// for contexts.
pub(crate) fn takes_traffic_token(path: &str) -> bool {
    path.strip_prefix("/contexts").is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The sandbox that a request is sent into, by a client with its token.
pub(crate) struct AuthorizedSandbox(pub(crate) Arc<Sandbox>);

impl FromRequestParts<Arc<Sandboxes>> for AuthorizedSandbox {
    type Rejection = ErrorResponse;

    async fn from_request_parts(
        parts: &mut Parts,
        all: &Arc<Sandboxes>,
    ) -> Result<Self, ErrorResponse> {
        let sandbox = called(all, &parts.headers)?;
        let shows = match takes_traffic_token(parts.uri.path()) {
            true => shows_traffic_token,
            false => shows_token,
        };
        if !shows(&parts.headers, &sandbox.token) {
            return Err(no_token());
        }
        Ok(Self(resume_for_request(all, sandbox).await?))
    }
}

/// The answer to a request into a sandbox without its token.
pub(crate) fn no_token() -> ErrorResponse {
    let why = "the request does not show the sandbox's token";
    ErrorResponse::new(StatusCode::UNAUTHORIZED, why)
}

/// The sandbox of a request into one, without a check of its token. One that is paused counts as
/// absent unless requests resume it.
pub(crate) fn called(all: &Sandboxes, headers: &HeaderMap) -> Result<Arc<Sandbox>, ErrorResponse> {
    let id = sandbox_id(headers).unwrap_or_default();
    let answers =
        |sandbox: &Arc<Sandbox>| !sandbox.lifetime().paused || sandbox.settings.auto_resume;
    all.any(&id)
        .filter(answers)
        .ok_or_else(|| all.moved(&id).unwrap_or_else(|| Sandbox::not_running(&id)))
}

/// Whether a request shows the token of a sandbox.
pub(crate) fn shows_token(headers: &HeaderMap, token: &str) -> bool {
    headers.get(ACCESS_TOKEN).is_some_and(|shown| same(shown.as_bytes(), token.as_bytes()))
}

/// Whether a request shows the traffic token of the sandbox with this token, or the token itself.
pub(crate) fn shows_traffic_token(headers: &HeaderMap, token: &str) -> bool {
    let shows = |shown: &HeaderValue| same(shown.as_bytes(), traffic_token(token).as_bytes());
    shows_token(headers, token) || headers.get(TRAFFIC_TOKEN).is_some_and(shows)
}

/// A sandbox for a request into it. One that requests resume is resumed.
pub(crate) async fn resume_for_request(
    all: &Arc<Sandboxes>,
    sandbox: Arc<Sandbox>,
) -> Result<Arc<Sandbox>, ErrorResponse> {
    if sandbox.lifetime().paused {
        all.resume(&sandbox, Some(AUTO_RESUME_TIME)).await?;
    }
    Ok(sandbox)
}

/// The sandbox that a request names: in a header, or in its host (`49999-ID.domain`).
pub(crate) fn sandbox_id(headers: &HeaderMap) -> Option<String> {
    if let Some(id) = headers.get(SANDBOX) {
        return id.to_str().ok().map(str::to_owned);
    }
    let host = headers.get(HOST)?.to_str().ok()?;
    let (port, rest) = host.split_once('-')?;
    let (id, _) = rest.split_once('.')?;
    port.bytes().all(|byte| byte.is_ascii_digit()).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made by another implementation, Python's `hmac`.
    #[test]
    fn the_traffic_token_is_an_hmac_of_the_token() {
        assert_eq!(
            traffic_token("token"),
            "b0db037ac3ed2574cc42e55259272fa6390fcca6887d2724d7c977642fda0ca3"
        );
        assert_eq!(
            traffic_token(&"t".repeat(65)),
            "febf3a8b1a6ead76f06eb0ff5d8bc3798ec421e98f8dea5c31586ad196973e12"
        );
    }

    #[test]
    fn the_traffic_token_is_for_ports_and_contexts() {
        let show = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            [shows_token(&headers, "token"), shows_traffic_token(&headers, "token")]
        };
        let traffic = traffic_token("token");
        assert_eq!(show(ACCESS_TOKEN, "token"), [true, true]);
        assert_eq!(show(TRAFFIC_TOKEN, &traffic), [false, true]);
        // Each header has its own token.
        assert_eq!(show(TRAFFIC_TOKEN, "token"), [false, false]);
        assert_eq!(show(ACCESS_TOKEN, &traffic), [false, false]);
        for (path, takes) in [
            ("/contexts", true),
            ("/contexts/1/restart", true),
            ("/execute", false),
            ("/files", false),
            ("/contexts.Any/x", false),
            ("/process.Process/Start", false),
        ] {
            assert_eq!(takes_traffic_token(path), takes, "{path}");
        }
    }

    #[test]
    fn a_sandbox_is_named_by_a_header_or_by_its_host() {
        let of = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            sandbox_id(&headers)
        };
        assert_eq!(of("e2b-sandbox-id", "abc").as_deref(), Some("abc"));
        assert_eq!(of("host", "49999-abc.example").as_deref(), Some("abc"));
        assert_eq!(of("host", "localhost:8080"), None);
        assert_eq!(of("host", "my-host.example"), None);
    }
}
