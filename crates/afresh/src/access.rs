//! Demands on every snapshot before it is opened: one type, with the feature `seal` or without.
//!
//! Without it nothing can be demanded, and nothing sealed can be opened.

use afresh_store::{OpenError, Snapshot, Store};

#[cfg(feature = "seal")]
pub(crate) use afresh_store::seal::Access;

/// Demands nothing.
#[cfg(not(feature = "seal"))]
#[derive(Clone, Debug, Default)]
pub(crate) struct Access;

/// Opens the snapshot `name` of a directory.
#[cfg(feature = "seal")]
pub(crate) fn load(store: &Store, name: &str, access: &Access) -> Result<Snapshot, OpenError> {
    store.load_with(name, access)
}

#[cfg(not(feature = "seal"))]
pub(crate) fn load(store: &Store, name: &str, _: &Access) -> Result<Snapshot, OpenError> {
    store.load(name)
}

/// The demands in the store's own type.
#[cfg(all(feature = "seal", any(feature = "wasm", feature = "vm", feature = "linux")))]
pub(crate) fn in_store(access: &Access) -> Access {
    access.clone()
}

#[cfg(all(not(feature = "seal"), any(feature = "wasm", feature = "vm", feature = "linux")))]
pub(crate) fn in_store(_: &Access) -> afresh_store::Access {
    afresh_store::Access::new()
}

/// Opens an archive.
#[cfg(feature = "seal")]
pub(crate) fn open_archive(path: &std::path::Path, access: &Access) -> Result<Snapshot, OpenError> {
    afresh_store::archive::open_with(path, access)
}

#[cfg(not(feature = "seal"))]
pub(crate) fn open_archive(path: &std::path::Path, _: &Access) -> Result<Snapshot, OpenError> {
    afresh_store::archive::open(path)
}

/// Opens the snapshot `name` of a server.
#[cfg(all(feature = "remote", feature = "seal"))]
pub(crate) fn load_remote(
    remote: &afresh_store::remote::Remote,
    name: &str,
    access: &Access,
) -> Result<Snapshot, afresh_store::remote::RemoteError> {
    remote.load_with(name, access)
}

#[cfg(all(feature = "remote", not(feature = "seal")))]
pub(crate) fn load_remote(
    remote: &afresh_store::remote::Remote,
    name: &str,
    _: &Access,
) -> Result<Snapshot, afresh_store::remote::RemoteError> {
    remote.load(name)
}
