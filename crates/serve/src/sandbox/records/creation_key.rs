//! The key of a request for a new sandbox. A repeated request with the same key gets the same
//! sandbox.
//!
//! Promises: keys of different tenants never meet. The key itself is stored nowhere, only its
//! digest.

use hyper::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error_response::ErrorResponse;
use crate::sandbox::records::json_digest::json_digest;
use crate::sandbox::request_body::unknown_fields::UnknownFields;

/// The header of a request with its key.
pub(crate) const KEY_HEADER: &str = "idempotency-key";
/// The header of an answer with a sandbox that an earlier request has made.
pub(crate) const REPLAY_HEADER: &str = "idempotency-replayed";
/// Maximum bytes of a key.
const MAX_KEY_BYTES: usize = 255;
/// Bytes of a digest that are compared.
const DIGEST_BYTES: usize = 16;

/// The key of a request for a new sandbox, with a digest of the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CreationKey {
    /// The digest of tenant and key, in hex digits.
    pub(crate) digest: String,
    /// The digest of the request without its time, which a client may compute anew for each
    /// attempt, and without the order of its fields.
    request: String,
    /// The number of the rule for that digest. Zero stands for the rules of earlier builds.
    #[serde(default, skip_serializing_if = "is_earlier")]
    rule: u8,
    #[serde(flatten)]
    unknown: UnknownFields,
}

/// The present rule. Another one gets another number.
const DIGEST_RULE: u8 = 1;

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_earlier(rule: &u8) -> bool {
    *rule == 0
}

fn digest(parts: &[&[u8]]) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    digest.finalize().iter().take(DIGEST_BYTES).map(|byte| format!("{byte:02x}")).collect()
}

impl CreationKey {
    /// The key that the headers of a request have, if any.
    pub(crate) fn read(
        headers: &HeaderMap,
        tenant: &str,
        body: &[u8],
    ) -> Result<Option<Self>, ErrorResponse> {
        let mut found = headers.get_all(KEY_HEADER).iter();
        let Some(key) = found.next() else { return Ok(None) };
        let is_sane = (1..=MAX_KEY_BYTES).contains(&key.len())
            && key.as_bytes().iter().all(u8::is_ascii_graphic);
        if found.next().is_some() || !is_sane {
            let message = format!(
                "`Idempotency-Key` is one text of 1 to {MAX_KEY_BYTES} visible ASCII characters without spaces, such as a UUID"
            );
            return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
        }
        Ok(Some(Self {
            digest: digest(&[tenant.as_bytes(), key.as_bytes()]),
            request: digest(&[&json_digest(body, "timeout")]),
            rule: DIGEST_RULE,
            unknown: UnknownFields::default(),
        }))
    }

    /// Refuses the sandbox `id` if it was made with `other`, the same key of another request. With
    /// digests of different rules the key alone decides.
    pub(crate) fn check_request(
        &self,
        id: &str,
        other: Option<&Self>,
    ) -> Result<(), ErrorResponse> {
        let is_same = |other: &Self| other.rule != self.rule || other.request == self.request;
        if other.is_some_and(is_same) {
            return Ok(());
        }
        let message = format!(
            "the sandbox {id} was made with this `Idempotency-Key` by a request that differs in more than its `timeout`; use another key"
        );
        Err(ErrorResponse::new(StatusCode::UNPROCESSABLE_ENTITY, message))
    }

    /// The answer while another request with this key makes its sandbox.
    pub(crate) fn pending() -> ErrorResponse {
        let why = "another request with this `Idempotency-Key` is making its sandbox; try again";
        ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(tenant: &str, keys: &[&str], body: &str) -> Result<Option<CreationKey>, u16> {
        let mut headers = HeaderMap::new();
        for key in keys {
            headers.append(KEY_HEADER, key.parse().unwrap());
        }
        let read = CreationKey::read(&headers, tenant, body.as_bytes());
        read.map_err(|refusal| refusal.status.as_u16())
    }

    #[test]
    fn a_key_is_that_of_its_tenant_and_its_request() {
        const BODY: &str = r#"{"templateID": "a", "timeout": 5}"#;
        assert_eq!(read("acme", &[], BODY), Ok(None));
        let key = read("acme", &["one"], BODY).unwrap().unwrap();
        assert_eq!(read("acme", &["one"], r#"{"templateID": "a"}"#), Ok(Some(key.clone())));
        let same = |one, two| {
            let [one, two] = [one, two].map(|body| read("acme", &["one"], body).unwrap());
            one == two
        };
        assert!(same(r#"{"a":1,"timeout":2,"b":{"c":1,"d":2}}"#, r#"{"b":{"d":2,"c":1},"a":1}"#));
        assert!(!same(r#"{"a":1,"b":{"timeout":2}}"#, r#"{"a":1,"b":{}}"#));
        let other = read("acme", &["one"], r#"{"templateID": "b"}"#).unwrap().unwrap();
        assert!(other.digest == key.digest && other.request != key.request);
        // Lengths are part of the digest, so no tenant ends in the key of another.
        assert_ne!(read("acm", &["eone"], BODY).unwrap().unwrap().digest, key.digest);
        let long = "x".repeat(MAX_KEY_BYTES + 1);
        for wrong in [&["a", "a"][..], &[""], &["a b"], &["ä"], &[&long]] {
            assert_eq!(read("acme", wrong, BODY), Err(400), "{wrong:?}");
        }
    }

    /// As builds before the digest had the number of its rule wrote it, for `{"templateID":"a"}`.
    #[test]
    fn a_key_of_a_build_with_another_digest_is_that_of_its_request() {
        let key = read("acme", &["one"], r#"{"templateID":"a"}"#).unwrap().unwrap();
        let earlier = format!(r#"{{"digest":"{}","request":"{:032x}"}}"#, key.digest, 7);
        let earlier: CreationKey = serde_json::from_str(&earlier).unwrap();
        assert!(key.check_request("i", Some(&earlier)).is_ok());
        let other = read("acme", &["one"], r#"{"templateID":"b"}"#).unwrap().unwrap();
        assert!(key.check_request("i", Some(&key)).is_ok());
        assert!(key.check_request("i", Some(&other)).is_err());
        assert!(key.check_request("i", None).is_err());
        let written = serde_json::to_string(&key).unwrap();
        assert_eq!(serde_json::from_str::<CreationKey>(&written).unwrap(), key);
    }
}
