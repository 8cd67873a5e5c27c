//! No saves in object stores and registries: this build lacks the feature `remote`.

use afresh_store::{Encoding, Journal, Sha256, Snapshot, Store};

use super::backend::FrozenGuest;
use super::{SaveError, SaveOptions, Session};
use crate::{Cause, Place, Reference, ReferenceError};

/// The meanings that a session gave to names: none.
#[derive(Default)]
pub(crate) struct KnownMeanings(());

impl KnownMeanings {
    /// Notes that the session was saved whole.
    pub(crate) fn saved(&mut self, _: &Reference, _: Sha256) -> Result<(), ReferenceError> {
        Ok(())
    }

    /// Notes that the session was saved turn by turn.
    pub(crate) fn note_session(&mut self, _: Reference, _: Journal) {}

    /// Whether the session gave a meaning to a name.
    pub(crate) fn has(&self, _: &Reference) -> bool {
        false
    }
}

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
