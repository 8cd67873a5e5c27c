//! Signed and sealed snapshots.
//!
//! A *signature* (Ed25519) is over the digest of the configuration, which names the root of every
//! layer and holds the guest build and state: it covers all that a guest can see, and stays valid
//! when layers are compressed on the way to another machine. It is an annotation of the manifest.
//! [`Access::trusting`] refuses a snapshot that none of the given keys signed before anything of it
//! is parsed but the manifest.
//!
//! A *sealed* snapshot (AES-256-GCM) has every blob but the manifest encrypted: see
//! `docs/format.md`. Pages are read at random and lazily as before, but cannot be mapped. The
//! manifest and the directory stay visible: names, and the number and length of blobs.
//!
//! Neither keeps an old snapshot from being given for a new one of the same signer or key. Name
//! snapshots by their id where that matters.
//!
//! The cryptography is that of `aws-lc-rs`, which the object stores' TLS brings along.

pub(crate) mod access;
#[cfg(feature = "seal")]
mod cipher;
#[cfg(feature = "seal")]
mod keyfile;
#[cfg(feature = "seal")]
mod sign;
#[cfg(not(feature = "seal"))]
mod unsealed;

#[cfg(feature = "seal")]
pub use access::Access;
#[cfg(feature = "seal")]
pub use cipher::SealKey;
#[cfg(feature = "seal")]
pub(crate) use cipher::Sealer;
#[cfg(feature = "seal")]
pub use sign::{PublicKey, SigningKey};
#[cfg(feature = "seal")]
pub(crate) use sign::{annotation, claimed};
#[cfg(not(feature = "seal"))]
pub(crate) use unsealed::{SealKey, Sealer};
