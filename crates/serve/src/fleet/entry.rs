//! What the fleet's ledger says of a sandbox: who has it, how it was last saved, and what its clients know of it.
//!
//! What it promises: an entry is only ever changed by compare-and-set on its revision. That number is the fence: whoever
//! lost a sandbox names a number that is over, and what it saves late is never what the entry names. Saved states
//! have no names of their own; they are found by the digest in the entry.

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

/// What a host knows of the entry of a sandbox that it has.
#[derive(Clone, Debug)]
pub(crate) struct Anchor {
    pub(crate) revision: u64,
    pub(crate) state: Option<State>,
}

/// Hex digits of an id that say whose it is.
const WHOSE: usize = 6;
/// Hex digits of an id.
const LENGTH: usize = 22;

/// The first digits of a tenant's ids, by which its entries are found.
pub(crate) fn whose(tenant: &str) -> String {
    let digest = Sha256::digest(tenant.as_bytes());
    digest.iter().take(WHOSE / 2).map(|byte| format!("{byte:02x}")).collect()
}

/// The key of a sandbox or snapshot; none for what is no id of a fleet's, whatever a client sent.
pub(crate) fn key(id: &str) -> Option<String> {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (id.len() == LENGTH && id.bytes().all(hex)).then(|| format!("{}.{id}", &id[..WHOSE]))
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
