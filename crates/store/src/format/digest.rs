//! SHA-256 digests, which name blobs as the OCI specification wants.

use std::fmt;
use std::str::FromStr;

use sha2::Digest;

/// A SHA-256 digest, written `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sha256(pub [u8; 32]);

impl Sha256 {
    /// The digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(sha2::Sha256::digest(bytes).into())
    }

    /// The 64 digits without the prefix: the file name of the blob.
    #[must_use]
    pub fn hex(&self) -> String {
        to_hex(&self.0)
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text that is not a digest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not of the form sha256:<64 lower-case hexadecimal digits>")]
pub struct BadDigest(pub String);

impl FromStr for Sha256 {
    type Err = BadDigest;

    fn from_str(text: &str) -> Result<Self, BadDigest> {
        text.strip_prefix("sha256:")
            .and_then(from_hex)
            .map(Self)
            .ok_or_else(|| BadDigest(text.chars().take(80).collect()))
    }
}

/// Lower-case hexadecimal digits of a digest.
pub(crate) fn to_hex(bytes: &[u8; 32]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(64), |mut out, byte| {
        // Writing to a string cannot fail.
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// Reads exactly 64 lower-case digits. Upper case is refused, so that every digest has one
/// spelling.
pub(crate) fn from_hex(text: &str) -> Option<[u8; 32]> {
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut out = [0; 32];
    for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_has_one_spelling() {
        let digest = Sha256::of(b"");
        let text = digest.to_string();
        assert_eq!(text, "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(text.parse(), Ok(digest));
        assert!(text.to_uppercase().parse::<Sha256>().is_err());
        assert!("sha256:../../../../etc/passwd".parse::<Sha256>().is_err());
    }
}
