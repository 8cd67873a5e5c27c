//! Signed URLs of files: `signature` proves the token of a sandbox without showing it.
//!
//! Promises: a signature is for one path, one operation and one user, and ends at its time. A URL
//! that does not name a sandbox is for the one whose token signed it. A request hashes its path
//! once, and a token of a sandbox in one or two blocks, and [`TokenSearch`] limits the tokens, so
//! that a client without a key makes little work.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::{FromRequestParts, Query};
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::http::authorization::{AuthorizedSandbox, sandbox_id};
use crate::sandbox::http::request_record::{RequestNotes, TOKEN};
#[cfg(doc)]
use crate::sandbox::http::token_search::TokenSearch;
use crate::sandbox::http::user::User;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::transfer::file_entry::check_path;

/// The query of a request for a file.
#[derive(Deserialize)]
struct FileQuery {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    signature_expiration: Option<i64>,
}

/// A sandbox and the path of its file, for a client with its token or a signature.
pub(crate) struct FileAccess {
    pub(crate) sandbox: Arc<Sandbox>,
    /// The user in whose home a relative path starts.
    pub(crate) user: User,
    pub(crate) path: Option<String>,
}

/// Whether a request is for a file by its signature alone.
pub(crate) fn is_signed(path: &str, query: Option<&str>) -> bool {
    let signed = |pair: &str| pair.starts_with("signature=v1_");
    path == "/files" && query.is_some_and(|query| query.split('&').any(signed))
}

/// The signature of a file operation, without its prefix `v1_` and decoded.
#[derive(Clone, Copy, Debug)]
struct Signature([u8; 32]);

impl Signature {
    /// A signature as a query has it.
    fn read(text: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        let text = text.strip_prefix("v1_")?;
        match STANDARD_NO_PAD.decode_slice(text, &mut bytes) {
            Ok(32) => Some(Self(bytes)),
            _ => None,
        }
    }

    /// Whether two are the same, in a time that does not depend on their bytes.
    fn is(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |differs, (one, two)| differs | (one ^ two)) == 0
    }
}

/// A file operation that is signed by one token or another.
struct SignedOperation {
    /// The hash of the text before the token.
    begun: Sha256,
    /// The text behind the token.
    end: String,
}

impl SignedOperation {
    fn new(path: &str, operation: &str, user: &str, expiration: Option<i64>) -> Self {
        let begun = Sha256::new_with_prefix(format!("{path}:{operation}:{user}:"));
        let end = expiration.map(|expiration| format!(":{expiration}")).unwrap_or_default();
        Self { begun, end }
    }

    /// The signature by a token.
    fn sign(&self, token: &str) -> Signature {
        Signature(self.begun.clone().chain_update(token).chain_update(&self.end).finalize().into())
    }
}

fn unauthorized(why: &str) -> ErrorResponse {
    ErrorResponse::new(StatusCode::UNAUTHORIZED, why)
}

/// The name of an operation in the text that is signed.
fn operation_of(method: &Method) -> &'static str {
    if method == Method::POST || method == Method::PUT { "write" } else { "read" }
}

/// Whether a signature is past its time.
fn has_ended(expiration: Option<i64>) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    expiration.is_some_and(|ends| u64::try_from(ends).unwrap_or(0) < now)
}

/// Whether a request for a file shows a signature by a token.
#[cfg(feature = "fleet")]
pub(crate) fn is_signed_by<B>(request: &hyper::Request<B>, token: &str) -> bool {
    let uri = request.uri();
    if !is_signed(uri.path(), uri.query()) {
        return false;
    }
    let Ok(Query(query)) = Query::<FileQuery>::try_from_uri(uri) else { return false };
    let Some(given) = query.signature.as_deref().and_then(Signature::read) else { return false };
    let path = query.path.as_deref().unwrap_or_default();
    let user = query.username.as_deref().unwrap_or_default();
    let ends = query.signature_expiration;
    let signed = SignedOperation::new(path, operation_of(request.method()), user, ends);
    !has_ended(ends) && signed.sign(token).is(&given)
}

/// The sandbox whose token signed a query.
async fn signer(
    all: &Sandboxes,
    id: Option<&str>,
    given: &str,
    operation: &SignedOperation,
    expiration: Option<i64>,
) -> Result<Arc<Sandbox>, ErrorResponse> {
    let given = Signature::read(given).ok_or_else(|| unauthorized("invalid signature"))?;
    let is_it = |sandbox: &Arc<Sandbox>| operation.sign(&sandbox.token).is(&given);
    let found = match id {
        Some(id) => Some(all.any(id).ok_or_else(|| Sandbox::not_running(id))?).filter(is_it),
        None => {
            let every = || lock(&all.all).values().cloned().collect();
            all.token_search.find(every, is_it).await?
        }
    };
    let sandbox = found.ok_or_else(|| unauthorized("invalid signature"))?;
    if has_ended(expiration) {
        return Err(unauthorized("signature is already expired"));
    }
    if sandbox.lifetime().paused {
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
        let name = query.username.as_deref().unwrap_or_default();
        let user =
            User::named(name).map_err(|why| ErrorResponse::new(StatusCode::UNAUTHORIZED, why))?;
        let path = query.path.as_deref().unwrap_or_default();
        check_path(path)?;
        let sandbox = match &query.signature {
            Some(given) => {
                let operation = operation_of(&parts.method);
                let id = sandbox_id(&parts.headers);
                let expiration = query.signature_expiration;
                let signed = SignedOperation::new(path, operation, name, expiration);
                let sandbox = signer(all, id.as_deref(), given, &signed, expiration).await?;
                if let Some(notes) = parts.extensions.get::<RequestNotes>() {
                    notes.set_caller(&sandbox.tenant, TOKEN);
                    notes.set_sandbox(&sandbox.id);
                }
                all.accounts.check_sent(&sandbox.tenant)?;
                sandbox
            }
            None => AuthorizedSandbox::from_request_parts(parts, all).await?.0,
        };
        let user = user.unwrap_or(User::of(sandbox.settings.root));
        Ok(Self { sandbox, user, path: query.path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_those_of_clients() {
        let signed = |path, operation, user, expiration, text| {
            let own = SignedOperation::new(path, operation, user, expiration).sign("token");
            own.is(&Signature::read(text).unwrap())
        };
        // As the client in Python makes them.
        let (read, write) = (
            "v1_9d+9NQHwSJMj04fFBbl0/qkmU2zFSlzEB4IWXDbnuNE",
            "v1_/zKJXrBq5lgBJ6rHhckFX7KZ+ahRYVrWjU+wH5eNJJ0",
        );
        assert!(signed("/home/user/a.txt", "read", "", None, read));
        assert!(signed("a", "write", "user", Some(7), write));
        assert!(
            !signed("a", "write", "user", Some(8), write) && !signed("a", "read", "", None, read)
        );
        for malformed in ["", "v1_", &read[3..], &read[..40], &format!("{read}="), &read.repeat(2)]
        {
            assert!(Signature::read(malformed).is_none(), "{malformed}");
        }
        assert!(is_signed("/files", Some("path=a&signature=v1_x")));
        for (path, query) in
            [("/files", "path=a"), ("/file", "signature=v1_x"), ("/files", "signature=x")]
        {
            assert!(!is_signed(path, Some(query)), "{path}?{query}");
        }
    }
    #[cfg(feature = "fleet")]
    #[test]
    fn a_request_is_signed_by_one_token_for_one_operation() {
        let sign = |ends: Option<i64>| {
            let signature = SignedOperation::new("/a b", "read", "user", ends).sign("token");
            STANDARD_NO_PAD.encode(signature.0).replace('+', "%2B").replace('/', "%2F")
        };
        let request = |method: Method, signature: &str, rest: &str| {
            let uri = format!("/files?path=/a%20b&username=user&signature=v1_{signature}{rest}");
            hyper::Request::builder().method(method).uri(uri).body(()).unwrap()
        };
        let read = request(Method::GET, &sign(None), "");
        assert!(is_signed_by(&read, "token"));
        assert!(!is_signed_by(&read, "other"));
        assert!(!is_signed_by(&request(Method::POST, &sign(None), ""), "token"));
        // The signature has the time, which is not over yet.
        let later = "&signature_expiration=99999999999";
        assert!(is_signed_by(&request(Method::GET, &sign(Some(99_999_999_999)), later), "token"));
        assert!(!is_signed_by(&request(Method::GET, &sign(None), later), "token"));
        let over = "&signature_expiration=1";
        assert!(!is_signed_by(&request(Method::GET, &sign(Some(1)), over), "token"));
        let header = hyper::Request::builder().uri("/files?path=/a%20b").body(()).unwrap();
        assert!(!is_signed_by(&header, "token"));
    }
}
