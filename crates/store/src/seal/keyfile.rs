//! Keys in files: text, a key in a line.
//!
//! `afresh-signing-key-v1:`, `afresh-public-key-v1:` or `afresh-seal-key-v1:` and 64 hexadecimal
//! digits; empty lines and lines that begin with `#` say nothing. A file with a secret must not be
//! accessible to others, and is made so.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use super::{PublicKey, SealKey, SigningKey};
use crate::SealError;
use crate::disk::temporary::{new_file_error, parent, sync_dir};
use crate::format::digest::{from_hex, to_hex};
use crate::{OpenError, SaveError};

const SIGNING: &str = "afresh-signing-key-v1:";
const SEAL: &str = "afresh-seal-key-v1:";
/// Longest file that is read.
const MAX: u64 = 64 << 10;

/// Creates a file that only its owner can read; one that is there is left alone.
fn create(path: &Path, line: &str) -> Result<(), SaveError> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| {
            file.write_all(format!("{line}\n").as_bytes())?;
            file.sync_all()?;
            // Snapshots that were sealed with the key need it after a crash.
            sync_dir(parent(path))
        })
        .map_err(|e| new_file_error(path, e))
}

/// The lines that say something.
fn read(path: &Path, secret: bool) -> Result<Vec<String>, OpenError> {
    let io = |e| OpenError::io(path, e);
    let file = std::fs::File::open(path).map_err(io)?;
    let meta = file.metadata().map_err(io)?;
    if secret && meta.permissions().mode() & 0o077 != 0 {
        return Err(SealError::KeyMode.into());
    }
    let mut text = String::new();
    file.take(MAX).read_to_string(&mut text).map_err(io)?;
    let says = |line: &&str| !line.is_empty() && !line.starts_with('#');
    Ok(text.lines().map(str::trim).filter(says).map(str::to_owned).collect())
}

/// The one secret in a file.
fn secret(path: &Path, prefix: &str) -> Result<[u8; 32], OpenError> {
    match read(path, true)?.as_slice() {
        [line] => line.strip_prefix(prefix).and_then(from_hex),
        _ => None,
    }
    .ok_or(OpenError::Seal(SealError::Key(
        "the file must hold one line, a key of the kind asked for",
    )))
}

impl SigningKey {
    /// Writes the key to a new file, readable by its owner alone.
    ///
    /// # Errors
    /// An I/O error, also when the file exists.
    pub fn create_file(&self, path: &Path) -> Result<(), SaveError> {
        create(path, &format!("{SIGNING}{}", to_hex(self.seed())))
    }

    /// Reads a key from a file.
    ///
    /// # Errors
    /// [`SealError::KeyMode`] when others may access it, [`SealError::Key`] when it holds no such
    /// key.
    pub fn from_file(path: &Path) -> Result<Self, OpenError> {
        Ok(Self::from_seed(secret(path, SIGNING)?)?)
    }
}

impl SealKey {
    /// Writes the key to a new file, readable by its owner alone.
    ///
    /// # Errors
    /// An I/O error, also when the file exists.
    pub fn create_file(&self, path: &Path) -> Result<(), SaveError> {
        create(path, &format!("{SEAL}{}", to_hex(self.bytes())))
    }

    /// Reads a key from a file.
    ///
    /// # Errors
    /// [`SealError::KeyMode`] when others may access it, [`SealError::Key`] when it holds no such
    /// key.
    pub fn from_file(path: &Path) -> Result<Self, OpenError> {
        Ok(Self::from_bytes(secret(path, SEAL)?)?)
    }
}

impl PublicKey {
    /// Reads the public keys in a file, at least one.
    ///
    /// # Errors
    /// [`SealError::Key`] when a line is no such key, or no line is a key.
    pub fn from_file(path: &Path) -> Result<Vec<Self>, OpenError> {
        let keys: Vec<Self> =
            read(path, false)?.iter().map(|line| line.parse()).collect::<Result<_, _>>()?;
        if keys.is_empty() {
            return Err(SealError::Key("the file holds no key").into());
        }
        Ok(keys)
    }
}
