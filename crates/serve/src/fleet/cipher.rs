//! The cipher of ledger entries: tokens, variables and names of sandboxes are not readable in NATS
//! or in its files.
//!
//! Promises: each entry is encrypted and authenticated by AES-256-GCM with another key, derived
//! from the fleet's key and 32 random bytes, and is bound to its bucket and its key. An entry that
//! was moved, cut or changed does not open. Entries from before the fleet had a key still open,
//! unless the fleet requires that all are sealed.

use std::path::Path;
use std::sync::Arc;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};
use bytes::Bytes;
use sha2::{Digest, Sha256};

/// The first bytes of a sealed entry, which begin no other.
const MAGIC: [u8; 8] = *b"AFENTRY1";
/// Random bytes of an entry.
const SALT: usize = 32;
/// The first part of a line with a key, as `afresh keygen sealing` writes it.
const PREFIX: &str = "afresh-seal-key-v1:";
/// Maximum bytes of a file with a key.
const MAX_FILE: u64 = 4 << 10;

/// The key of a fleet.
pub(super) struct FleetKey {
    secret: [u8; 32],
    /// Whether entries that are not sealed are refused.
    requires_sealed: bool,
}

/// An entry does not open.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(crate) enum CipherError {
    /// There is no key here.
    #[error("it is sealed, and the fleet has no key here: set `entry-key`")]
    NoKey,
    /// Another key, or damage.
    #[error("it was sealed with another key, or is damaged")]
    Damaged,
    /// Not sealed, and the fleet requires it.
    #[error(
        "it is not sealed, and `require-sealed` is set: another client wrote it, or it is older than the key of the fleet; see `afresh fleet seal --check`"
    )]
    Plain,
    /// The library refused.
    #[error("the system gives no random bytes")]
    Random,
}

fn parse(text: &str) -> Option<[u8; 32]> {
    let mut lines =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let digits = lines.next()?.strip_prefix(PREFIX)?.as_bytes();
    if lines.next().is_some() || digits.len() != 64 {
        return None;
    }
    let mut secret = [0; 32];
    for (byte, pair) in secret.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(secret)
}

impl FleetKey {
    /// Reads the key in a file that only its owner may access.
    pub(super) fn read(file: &Path, requires_sealed: bool) -> Result<Arc<Self>, String> {
        use std::io::Read;
        use std::os::unix::fs::PermissionsExt;
        let read = || {
            let opened = std::fs::File::open(file)?;
            let mode = opened.metadata()?.permissions().mode();
            let mut text = String::new();
            opened.take(MAX_FILE).read_to_string(&mut text)?;
            Ok::<_, std::io::Error>((mode, text))
        };
        let shown = file.display();
        let (mode, text) = read().map_err(|error| format!("the fleet's key {shown}: {error}"))?;
        if mode & 0o007 != 0 {
            return Err(format!(
                "others may access the fleet's key {shown}; run `chmod o= {shown}`"
            ));
        }
        let secret = parse(&text).ok_or_else(|| {
            format!("{shown} has no key of a fleet; `afresh keygen sealing {shown}` makes one")
        })?;
        Ok(Arc::new(Self { secret, requires_sealed }))
    }

    /// Some digits that distinguish keys, and say nothing about them.
    pub(super) fn fingerprint(&self) -> String {
        let digest = Sha256::new().chain_update(b"afresh fleet key").chain_update(self.secret);
        digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    /// The cipher of one entry.
    fn cipher(&self, salt: &[u8]) -> Option<LessSafeKey> {
        let derived = Salt::new(HKDF_SHA256, salt).extract(&self.secret);
        let derived = derived.expand(&[b"afresh ledger entry"], &AES_256_GCM).ok()?;
        Some(LessSafeKey::new(UnboundKey::from(derived)))
    }

    fn seal(&self, place: &str, value: &[u8]) -> Result<Bytes, CipherError> {
        let mut salt = [0; SALT];
        aws_lc_rs::rand::fill(&mut salt).map_err(|_| CipherError::Random)?;
        let cipher = self.cipher(&salt).ok_or(CipherError::Random)?;
        let mut sealed = value.to_vec();
        let nonce = Nonce::assume_unique_for_key([0; 12]);
        cipher
            .seal_in_place_append_tag(nonce, Aad::from(place.as_bytes()), &mut sealed)
            .map_err(|_| CipherError::Random)?;
        Ok([&MAGIC[..], &salt, &sealed].concat().into())
    }

    fn open(&self, place: &str, sealed: &[u8]) -> Option<Bytes> {
        let (salt, sealed) = sealed.split_at_checked(SALT)?;
        let mut value = sealed.to_vec();
        let nonce = Nonce::assume_unique_for_key([0; 12]);
        let aad = Aad::from(place.as_bytes());
        let opened = self.cipher(salt)?.open_in_place(nonce, aad, &mut value).ok()?.len();
        value.truncate(opened);
        Some(value.into())
    }
}

/// An entry as it is stored at `place`.
pub(super) fn seal(
    key: Option<&Arc<FleetKey>>,
    place: &str,
    value: Bytes,
) -> Result<Bytes, CipherError> {
    match key {
        Some(key) => key.seal(place, &value),
        None => Ok(value),
    }
}

/// Whether an entry is sealed.
pub(super) fn is_sealed(value: &[u8]) -> bool {
    value.starts_with(&MAGIC)
}

/// An entry as it was before [`seal`].
pub(super) fn open(
    key: Option<&Arc<FleetKey>>,
    place: &str,
    value: Bytes,
) -> Result<Bytes, CipherError> {
    match value.strip_prefix(&MAGIC[..]) {
        None if key.is_some_and(|key| key.requires_sealed) => Err(CipherError::Plain),
        None => Ok(value),
        Some(sealed) => {
            key.ok_or(CipherError::NoKey)?.open(place, sealed).ok_or(CipherError::Damaged)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> Option<Arc<FleetKey>> {
        Some(Arc::new(FleetKey { secret: [byte; 32], requires_sealed: false }))
    }

    #[test]
    fn an_entry_opens_at_its_place_with_its_key_and_nowhere_else() {
        let own = key(1);
        let value = Bytes::from_static(br#"{"token":"s3cret"}"#);
        let sealed = seal(own.as_ref(), "b/k", value.clone()).unwrap();
        assert!(!sealed.windows(6).any(|part| part == b"s3cret"));
        assert_ne!(seal(own.as_ref(), "b/k", value.clone()).unwrap(), sealed);
        assert_eq!(open(own.as_ref(), "b/k", sealed.clone()).unwrap(), value);
        assert!(matches!(open(None, "b/k", sealed.clone()), Err(CipherError::NoKey)));
        assert!(matches!(open(own.as_ref(), "b/l", sealed.clone()), Err(CipherError::Damaged)));
        assert!(matches!(open(key(2).as_ref(), "b/k", sealed.clone()), Err(CipherError::Damaged)));
        for length in MAGIC.len()..sealed.len() {
            assert!(open(own.as_ref(), "b/k", sealed.slice(..length)).is_err(), "{length}");
        }
        // From before the fleet had a key.
        assert_eq!(open(own.as_ref(), "b/k", value.clone()).unwrap(), value);
        let strict = Some(Arc::new(FleetKey { secret: [1; 32], requires_sealed: true }));
        assert_eq!(open(strict.as_ref(), "b/k", sealed).unwrap(), value);
        assert!(matches!(open(strict.as_ref(), "b/k", value), Err(CipherError::Plain)));
    }

    /// Made by another implementation of HKDF and AES-GCM, Python's `hmac` and `cryptography`.
    const GOLDEN: [u8; 74] = *b"AFENTRY1\
        \x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\
        \x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f\
        \x2e\x73\xb6\xa1\x6c\x42\x64\x73\x07\x01\xf2\xd8\xeb\x12\xb7\xcb\x4d\
        \xfe\xfb\xfc\x88\x74\x71\xba\xf1\x67\xb0\xf2\x53\x80\xf8\x4c\x69\xf1";

    #[test]
    fn a_sealed_entry_of_a_released_version_opens() {
        let opened = open(key(1).as_ref(), "b/k", Bytes::from_static(&GOLDEN)).unwrap();
        assert_eq!(opened, &br#"{"token":"s3cret"}"#[..]);
    }

    #[test]
    fn keys_are_read_from_files_of_their_owner() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        let write = |text: &str, mode: u32| {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let line = format!("# the fleet's\n{PREFIX}{}\n", "0f".repeat(32));
        write(&line, 0o640);
        let read = FleetKey::read(&file, false).unwrap();
        assert_eq!(read.secret, [0x0f; 32]);
        assert!(read.fingerprint().len() == 16 && !read.fingerprint().contains("0f0f0f"));
        write(&line, 0o644);
        assert!(FleetKey::read(&file, false).err().unwrap().contains("chmod"));
        for text in ["", "key", &line.replace("0f", "0"), &format!("{line}{line}")] {
            write(text, 0o600);
            assert!(FleetKey::read(&file, false).err().unwrap().contains("keygen"), "{text}");
        }
    }
}
