//! Saves in object stores and registries.
//!
//! Promises: a turn replaces the snapshot that its session came from and the session's own saves,
//! and no other writer's.

use afresh_store::remote::{Remote, RemoteError};
use afresh_store::{Encoding, Journal, ReplacedName, Sha256, Snapshot, Store};

use super::backend::FrozenGuest;
use super::save::target;
use super::temp_dir::TempDir;
use super::{SaveError, SaveOptions, Session};
use crate::{Cause, Options, Place, Reference};

/// Whether a session can be saved turn by turn in a remote.
pub(super) fn keeps_turns_remotely(place: &Place) -> Result<bool, SaveError> {
    Ok(place.remote()?.keeps_turns())
}

/// Sends a snapshot from a scratch directory.
pub(super) fn push(
    to: &Reference,
    store: &Store,
    snapshot: &Snapshot,
    name: &str,
    encoding: Encoding,
) -> Result<Sha256, SaveError> {
    let pushed = to.place().remote()?.push(store, snapshot, name, encoding, &mut |_| {});
    pushed.map_err(|e| SaveError::Write { reference: to.to_string(), source: e.into() })
}

impl dyn FrozenGuest + '_ {
    /// Saves it in a scratch directory, and sends it from there.
    fn send<T>(
        &self,
        to: &Reference,
        options: &SaveOptions,
        opened: &Options,
        send: impl FnOnce(&Remote, &Store, &Snapshot, &str, Encoding) -> Result<T, RemoteError>,
    ) -> Result<T, SaveError> {
        let name = target(to)?;
        let failed = |source: Cause| SaveError::Write { reference: to.to_string(), source };
        let (with, _) = self.with(None, options, opened)?;
        let scratch = TempDir::new()?;
        let store = Store::create(scratch.path()).map_err(|e| failed(e.into()))?;
        let id = self.store(&store, name, &with).map_err(failed)?;
        let own = options.own_access(opened);
        let snapshot = store.load_with(&id.to_string(), &own).map_err(|e| failed(e.into()))?;
        let remote = to.place().remote()?;
        let sent = send(&remote, &store, &snapshot, name, with.encoding);
        sent.map_err(|e| failed(e.into()))
    }
}

impl Session {
    /// Saves it whole, with turns to follow, in place of the session of `long` if that is one.
    pub(super) fn begin_remote_turns(
        &self,
        frozen: &dyn FrozenGuest,
        to: &Reference,
        options: &SaveOptions,
        long: Option<&Journal>,
    ) -> Result<Journal, SaveError> {
        let replaced = long.map_or_else(|| self.replaced(to), ReplacedName::Journal);
        let opened = &self.guest.inner().options;
        frozen.send(to, options, opened, |remote, store, snapshot, name, encoding| {
            remote.push_turns(store, snapshot, name, encoding, replaced, &mut |_| {})
        })
    }

    /// Saves it whole.
    pub(super) fn save_over_remote(
        &self,
        frozen: &dyn FrozenGuest,
        to: &Reference,
        options: &SaveOptions,
    ) -> Result<Sha256, SaveError> {
        let named = to.named()?;
        let (opened, replaced) = (&self.guest.inner().options, self.replaced(&named));
        frozen.send(to, options, opened, |remote, store, snapshot, name, encoding| {
            remote.push_over(store, snapshot, name, encoding, replaced, &mut |_| {})
        })
    }

    /// The journal of turns that follow on a snapshot in the same remote.
    pub(super) fn continue_remote_turns(
        &self,
        snapshot: &Snapshot,
        to: &Reference,
        options: &SaveOptions,
        same: impl Fn(Sha256) -> bool,
    ) -> Result<Option<Journal>, Cause> {
        if options.seals() {
            return Ok(None);
        }
        let remote = to.place().remote()?;
        if snapshot.turns().is_some() {
            // A session under another name is saved whole.
            return match remote.resolve(to.name()).is_ok_and(same) {
                true => Ok(snapshot.resume_turns()?),
                false => Ok(None),
            };
        }
        if options.shapes() {
            return Ok(None);
        }
        Ok(Some(remote.begin_turns(to.name(), snapshot, self.replaced(to))?))
    }
}
