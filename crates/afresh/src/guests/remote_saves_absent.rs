//! No saves in object stores and registries: this build lacks the feature `remote`.

use afresh_store::{Encoding, Journal, Sha256, Snapshot, Store};

use super::backend::FrozenGuest;
use super::{SaveError, SaveOptions, Session};
use crate::{Cause, Place, Reference};

/// Whether a session can be saved turn by turn in a remote.
pub(super) fn keeps_turns_remotely(_: &Place) -> Result<bool, SaveError> {
    Ok(false)
}

/// Sends a snapshot from a scratch directory.
pub(super) fn push(
    to: &Reference,
    _: &Store,
    _: &Snapshot,
    _: &str,
    _: Encoding,
) -> Result<Sha256, SaveError> {
    Err(to.lacking_remote().into())
}

impl Session {
    /// Saves it whole, with turns to follow.
    pub(super) fn begin_remote_turns(
        &self,
        _: &dyn FrozenGuest,
        to: &Reference,
        _: &SaveOptions,
        _: Option<&Journal>,
    ) -> Result<Journal, SaveError> {
        Err(to.lacking_remote().into())
    }

    /// Saves it whole.
    pub(super) fn save_over_remote(
        &self,
        _: &dyn FrozenGuest,
        to: &Reference,
        _: &SaveOptions,
    ) -> Result<Sha256, SaveError> {
        Err(to.lacking_remote().into())
    }

    /// The journal of turns that follow on a snapshot in the same remote.
    pub(super) fn continue_remote_turns(
        &self,
        _: &Snapshot,
        to: &Reference,
        _: &SaveOptions,
        _: impl Fn(Sha256) -> bool,
    ) -> Result<Option<Journal>, Cause> {
        Err(to.lacking_remote().into())
    }
}
