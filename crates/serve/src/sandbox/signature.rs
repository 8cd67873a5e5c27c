//! Signed URLs of files: `signature` proves the token of a sandbox without showing it.
//!
//! Promises: a signature is for one path, one operation and one user, and ends at its time. A URL
//! that does not name a sandbox is for the one whose token signed it.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::{FromRequestParts, Query};
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::authorization::{AuthorizedSandbox, sandbox_id};
use super::keys::same;
use super::registry::Sandboxes;
use super::request_record::{RequestNotes, TOKEN};
use super::sandbox::Sandbox;
use super::user;
use crate::error_response::ErrorResponse;
use crate::lock::lock;

/// The query of a request for a file.
#[derive(Deserialize)]
struct FileQuery {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    signature_expiration: Option<i64>,
}

/// A sandbox and the path of its file, for a client with its token or a signature.
pub(super) struct FileAccess {
    pub(super) sandbox: Arc<Sandbox>,
    pub(super) path: Option<String>,
}

/// Whether a request is for a file by its signature alone.
pub(super) fn is_signed(path: &str, query: Option<&str>) -> bool {
    let signed = |pair: &str| pair.starts_with("signature=v1_");
    path == "/files" && query.is_some_and(|query| query.split('&').any(signed))
}

/// The signature of a file operation.
fn sign(signed: &str, token: &str, expiration: Option<i64>) -> String {
    let mut text = format!("{signed}:{token}");
    if let Some(expiration) = expiration {
        text.push_str(&format!(":{expiration}"));
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes())))
}

fn unauthorized(why: &str) -> ErrorResponse {
    ErrorResponse::new(StatusCode::UNAUTHORIZED, why)
}

/// The sandbox whose token signed a query.
fn signer(
    all: &Sandboxes,
    id: Option<&str>,
    signed: &str,
    query: &FileQuery,
) -> Result<Arc<Sandbox>, ErrorResponse> {
    let given = query.signature.as_deref().unwrap_or_default();
    let is_it = |sandbox: &Arc<Sandbox>| {
        let own = sign(signed, &sandbox.token, query.signature_expiration);
        same(own.as_bytes(), given.as_bytes())
    };
    let found = match id {
        Some(id) => Some(all.any(id).ok_or_else(|| Sandbox::not_running(id))?).filter(is_it),
        None => {
            let every: Vec<_> = lock(&all.all).values().cloned().collect();
            every.into_iter().find(is_it)
        }
    };
    let sandbox = found.ok_or_else(|| unauthorized("invalid signature"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    if query.signature_expiration.is_some_and(|ends| u64::try_from(ends).unwrap_or(0) < now) {
        return Err(unauthorized("signature is already expired"));
    }
    if sandbox.times().paused {
        return Err(Sandbox::not_running(&sandbox.id));
    }
    Ok(sandbox)
}

impl FromRequestParts<Arc<Sandboxes>> for FileAccess {
    type Rejection = ErrorResponse;

    async fn from_request_parts(
        parts: &mut Parts,
        all: &Arc<Sandboxes>,
    ) -> Result<Self, ErrorResponse> {
        let bad = |why: String| ErrorResponse::new(StatusCode::BAD_REQUEST, why);
        let query = Query::<FileQuery>::from_request_parts(parts, all).await;
        let Query(query) = query.map_err(|error| bad(error.body_text()))?;
        let user = query.username.as_deref().unwrap_or_default();
        user::check_name(user).map_err(|why| ErrorResponse::new(StatusCode::UNAUTHORIZED, why))?;
        let path = query.path.as_deref().unwrap_or_default();
        let sandbox = match query.signature {
            Some(_) => {
                let writes = parts.method == Method::POST || parts.method == Method::PUT;
                let operation = if writes { "write" } else { "read" };
                let id = sandbox_id(&parts.headers);
                let signed = format!("{path}:{operation}:{user}");
                let sandbox = signer(all, id.as_deref(), &signed, &query)?;
                if let Some(notes) = parts.extensions.get::<RequestNotes>() {
                    notes.set_caller(&sandbox.tenant, TOKEN);
                    notes.set_sandbox(&sandbox.id);
                }
                all.accounts.check_sent(&sandbox.tenant)?;
                sandbox
            }
            None => AuthorizedSandbox::from_request_parts(parts, all).await?.0,
        };
        Ok(Self { sandbox, path: query.path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_those_of_clients() {
        // As the client in Python makes them.
        assert_eq!(
            sign("/home/user/a.txt:read:", "token", None),
            "v1_9d+9NQHwSJMj04fFBbl0/qkmU2zFSlzEB4IWXDbnuNE"
        );
        assert_eq!(
            sign("a:write:user", "token", Some(7)),
            "v1_/zKJXrBq5lgBJ6rHhckFX7KZ+ahRYVrWjU+wH5eNJJ0"
        );
        assert!(is_signed("/files", Some("path=a&signature=v1_x")));
        for (path, query) in
            [("/files", "path=a"), ("/file", "signature=v1_x"), ("/files", "signature=x")]
        {
            assert!(!is_signed(path, Some(query)), "{path}?{query}");
        }
    }
}
