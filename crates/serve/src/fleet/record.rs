//! The entry of a sandbox in the fleet's ledger: its owner, its last saved state, and its record.
//!
//! Promises: an entry is only ever changed by compare-and-set on its revision. That number is the fence: a host
//! that lost a sandbox names an old revision, so a late save never enters the ledger. Saved states
//! have no names; the digest in the entry finds them.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::sandbox::SandboxRecord;

/// A sandbox in the ledger.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// The life of the host that has it.
    pub(crate) owner: Option<String>,
    pub(crate) record: SandboxRecord,
    /// How it was last saved.
    pub(crate) state: Option<State>,
}

impl Entry {
    /// The entry once `life` has taken the sandbox. A host that took it back itself undoes nothing.
    pub(crate) fn taken_by(self, life: &str, again: bool) -> Self {
        let lost = self.owner.is_some() && !again;
        let entry = if lost { self.undone() } else { self };
        Self { owner: Some(life.to_owned()), ..entry }
    }

    /// The entry once its host was lost: calls since the last save are undone.
    pub(crate) fn undone(mut self) -> Self {
        self.record.generation += 1;
        self
    }
}

/// A saved state in the fleet's store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    /// The digest of its manifest.
    pub(crate) digest: String,
    /// Bytes that its template has not.
    pub(crate) bytes: u64,
    /// The life of the host that saved it.
    pub(crate) by: String,
}

/// The entry of a sandbox as its owner knows it.
#[derive(Clone, Debug)]
pub(crate) struct Anchor {
    pub(crate) revision: u64,
    pub(crate) state: Option<State>,
    /// A later state, which is in the store and which no entry names yet: the change that would have named it failed. The
    /// next change of the entry names it.
    pub(crate) pending: Option<State>,
}

impl Anchor {
    pub(crate) fn new(revision: u64, state: Option<State>) -> Self {
        Self { revision, state, pending: None }
    }
}

/// Hex digits of an id that identify its tenant.
const TENANT_DIGITS: usize = 6;
/// Hex digits of an id.
const ID_DIGITS: usize = 22;

/// The first digits of the ids of a tenant, which select its entries.
pub(crate) fn whose(tenant: &str) -> String {
    let digest = Sha256::digest(tenant.as_bytes());
    digest.iter().take(TENANT_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect()
}

/// The key of a sandbox or snapshot; `None` for anything but an id of a fleet.
pub(crate) fn key(id: &str) -> Option<String> {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (id.len() == ID_DIGITS && id.bytes().all(hex)).then(|| format!("{}.{id}", &id[..TENANT_DIGITS]))
}

/// The key under which a tenant's snapshot of a name is found.
pub(crate) fn named(tenant: &str, name: &str) -> String {
    let digest = Sha256::digest(format!("{tenant}/{name}").as_bytes());
    let digits: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("name.{}.{digits}", whose(tenant))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_made_of_ids_and_of_nothing_else() {
        let id = format!("{}{}", whose("acme"), "0123456789abcdef");
        assert_eq!(key(&id), Some(format!("{}.{id}", whose("acme"))));
        for wrong in [
            "",
            "*",
            ">",
            "0123456789abcdef01234.",
            "0123456789ABCDEF012345",
            "ä123456789abcdef01234",
        ] {
            assert_eq!(key(wrong), None, "{wrong}");
        }
        assert_ne!(named("a", "b"), named("a", "c"));
        assert!(!named("a", "*.>").contains('*'));
    }
}
