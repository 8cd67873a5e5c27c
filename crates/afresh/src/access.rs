//! What is demanded of every snapshot before it is opened: one type, with the feature `seal` or without.
//!
//! Without it nothing can be demanded, and nothing sealed can be opened.

use afresh_store::{OpenError, Snapshot, Store};

#[cfg(feature = "seal")]
pub(crate) use afresh_store::seal::Access;

/// Demands nothing.
#[cfg(not(feature = "seal"))]
#[derive(Clone, Debug, Default)]
pub(crate) struct Access;

/// Opens what `name` means in a directory.
#[cfg(feature = "seal")]
pub(crate) fn load(store: &Store, name: &str, access: &Access) -> Result<Snapshot, OpenError> {
    store.load_with(name, access)
}

#[cfg(not(feature = "seal"))]
pub(crate) fn load(store: &Store, name: &str, _: &Access) -> Result<Snapshot, OpenError> {
    store.load(name)
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

/// Opens what `name` means on a server.
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
