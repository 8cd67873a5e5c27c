//! The keys that snapshots are signed and sealed with.

use afresh_pager::SnapshotOptions;
use afresh_store::seal::{SealKey, SigningKey};
use afresh_store::{Access, FoldOptions, Journal, SaveError, Turn};

/// The keys of a save.
#[derive(Clone, Debug, Default)]
pub(super) struct SaveKeys {
    pub(super) sign: Option<SigningKey>,
    pub(super) seal: Option<SealKey>,
}

impl SaveKeys {
    /// Whether there is a key to seal with.
    pub(super) fn seals(&self) -> bool {
        self.seal.is_some()
    }

    /// Whether there is any key.
    pub(super) fn is_any(&self) -> bool {
        self.sign.is_some() || self.seal.is_some()
    }

    /// Adds the keys to the options of a snapshot.
    pub(super) fn equip(&self, options: &mut SnapshotOptions) {
        options.seal.clone_from(&self.seal);
        options.sign.clone_from(&self.sign);
    }

    /// Adds the keys to the options of a fold.
    pub(super) fn equip_fold(&self, options: &mut FoldOptions) {
        options.sign.clone_from(&self.sign);
    }

    /// Appends a turn, signed if required.
    pub(super) fn append(&self, journal: &mut Journal, turn: &Turn) -> Result<u64, SaveError> {
        match &self.sign {
            Some(key) => journal.append(turn, Some(&|root| key.sign_turn(root))),
            None => journal.append(turn, None),
        }
    }

    /// The demands on the new snapshot. A delta is sealed like its parent, with the key that
    /// `opened` that.
    pub(super) fn access(&self, opened: &Access) -> Access {
        match &self.seal {
            Some(key) => Access::new().with_key(key.clone()),
            None => opened.clone(),
        }
    }
}
