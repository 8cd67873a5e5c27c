//! Ed25519 signatures over configurations.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::SealError;
use crate::Sha256;
use crate::format::digest::{from_hex, to_hex};

/// Annotation of a signature; the public key in hexadecimal follows.
const ANNOTATION: &str = "vnd.afresh.signature.ed25519.";
/// Has a signature be of no use anywhere else.
const DOMAIN: &[u8] = b"afresh snapshot signature version 1\0";

/// Signs snapshots. Cheap to clone; never printed.
#[derive(Clone)]
pub struct SigningKey {
    seed: [u8; 32],
    pair: Arc<Ed25519KeyPair>,
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.public())
    }
}

impl SigningKey {
    /// A new key.
    ///
    /// # Errors
    /// [`SealError::Library`] when the system gives no random bytes.
    pub fn generate() -> Result<Self, SealError> {
        Self::from_seed(super::cipher::random()?)
    }

    pub(super) fn from_seed(seed: [u8; 32]) -> Result<Self, SealError> {
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed)
            .map_err(|_| SealError::Library("the key is invalid"))?;
        Ok(Self { seed, pair: Arc::new(pair) })
    }

    pub(super) fn seed(&self) -> &[u8; 32] {
        &self.seed
    }

    /// The key that others verify with.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        let mut bytes = [0; 32];
        // An Ed25519 public key has 32 bytes.
        bytes.copy_from_slice(self.pair.public_key().as_ref());
        PublicKey(bytes)
    }
}

/// Verifies signatures. Written `afresh-public-key-v1:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

const PUBLIC: &str = "afresh-public-key-v1:";

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PUBLIC}{}", to_hex(&self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PublicKey {
    type Err = SealError;

    fn from_str(text: &str) -> Result<Self, SealError> {
        text.strip_prefix(PUBLIC)
            .and_then(from_hex)
            .map(Self)
            .ok_or(SealError::Key("a public key is `afresh-public-key-v1:` and 64 digits 0-9 a-f"))
    }
}

fn message(config: Sha256) -> Vec<u8> {
    [DOMAIN, &config.0].concat()
}

/// Name and value of the annotation that signs `config`.
pub(crate) fn annotation(key: &SigningKey, config: Sha256) -> Result<(String, String), SealError> {
    let signature =
        key.pair.try_sign(&message(config)).map_err(|_| SealError::Library("signing failed"))?;
    Ok((format!("{ANNOTATION}{}", to_hex(&key.public().0)), STANDARD.encode(signature)))
}

/// Has the signature of a turn be of no use anywhere else.
const TURN_DOMAIN: &[u8] = b"afresh turn signature version 1\0";

impl SigningKey {
    /// The public key, and a signature of the turn of this digest.
    ///
    /// # Errors
    /// [`SealError::Library`].
    pub fn sign_turn(&self, root: &[u8; 32]) -> Result<[u8; 96], SealError> {
        let signed = self.pair.try_sign(&[TURN_DOMAIN, root].concat());
        let signed = signed.map_err(|_| SealError::Library("signing failed"))?;
        let mut out = [0; 96];
        out[..32].copy_from_slice(&self.public().0);
        out[32..].copy_from_slice(signed.as_ref());
        Ok(out)
    }
}

/// Refuses the turn of digest `root` unless one of `keys` signed it.
pub(crate) fn check_turn(
    keys: &[PublicKey],
    root: &[u8; 32],
    signature: Option<&[u8]>,
) -> Result<(), SealError> {
    let Some((key, signature)) = signature.and_then(|bytes| bytes.split_first_chunk::<32>()) else {
        return Err(SealError::Unsigned);
    };
    let key = PublicKey(*key);
    if !keys.contains(&key) {
        return Err(SealError::Untrusted(vec![key.to_string()]));
    }
    UnparsedPublicKey::new(&ED25519, &key.0)
        .verify(&[TURN_DOMAIN, root].concat(), signature)
        .map_err(|_| SealError::Signature(key.to_string()))
}

/// The keys that annotations name.
pub(crate) fn claimed(annotations: &BTreeMap<String, String>) -> Vec<PublicKey> {
    let key = |name: &String| name.strip_prefix(ANNOTATION).and_then(from_hex).map(PublicKey);
    annotations.keys().filter_map(key).collect()
}

/// Refuses `config` unless one of `keys` signed it.
pub(crate) fn check(
    keys: &[PublicKey],
    config: Sha256,
    annotations: &BTreeMap<String, String>,
) -> Result<(), SealError> {
    let mut wrong = None;
    for key in keys {
        let Some(value) = annotations.get(&format!("{ANNOTATION}{}", to_hex(&key.0))) else {
            continue;
        };
        let verified = STANDARD.decode(value).is_ok_and(|signature| {
            UnparsedPublicKey::new(&ED25519, &key.0).verify(&message(config), &signature).is_ok()
        });
        if verified {
            return Ok(());
        }
        wrong = Some(SealError::Signature(key.to_string()));
    }
    let signers = claimed(annotations);
    Err(wrong.unwrap_or_else(|| match signers.as_slice() {
        [] => SealError::Unsigned,
        _ => SealError::Untrusted(signers.iter().map(PublicKey::to_string).collect()),
    }))
}
