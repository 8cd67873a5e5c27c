//! The tenant and the sandbox of a request, which its key or its token gives access to.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequestParts, RawPathParams};
use hyper::header::HOST;
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode};

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

/// The headers that a sandbox's token is shown in.
pub(crate) const TOKENS: [&str; 2] = ["x-access-token", "e2b-traffic-access-token"];

/// The sandbox that a request is sent into, by a client with its token.
pub(crate) struct AuthorizedSandbox(pub(crate) Arc<Sandbox>);

impl FromRequestParts<Arc<Sandboxes>> for AuthorizedSandbox {
    type Rejection = ErrorResponse;

    async fn from_request_parts(
        parts: &mut Parts,
        all: &Arc<Sandboxes>,
    ) -> Result<Self, ErrorResponse> {
        let sandbox = called(all, &parts.headers)?;
        if !shows_token(&parts.headers, &sandbox) {
            return Err(ErrorResponse::new(
                StatusCode::UNAUTHORIZED,
                "the request does not show the sandbox's token",
            ));
        }
        Ok(Self(resume_for_request(all, sandbox).await?))
    }
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
pub(crate) fn shows_token(headers: &HeaderMap, sandbox: &Sandbox) -> bool {
    let shown = TOKENS.iter().filter_map(|name| headers.get(*name));
    shown.into_iter().any(|shown| same(shown.as_bytes(), sandbox.token.as_bytes()))
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
