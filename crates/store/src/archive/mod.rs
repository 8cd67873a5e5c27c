//! A snapshot in one file: an OCI image layout in an uncompressed tar, which tools that know
//! `oci-archive` can read.
//!
//! Raw page layers are on page boundaries of the file, so it can be mapped as a store's blobs can.
//! `docs/format.md` says where everything is.
//!
//! Promises:
//! * [`open`] reads member headers, manifest, configuration and layer indexes, and no page. Reads
//!   are checked as in a store.
//! * [`save`] and [`export`] are atomic and durable: after a kill, the path means the old archive
//!   or the new one. The next writer of the same path removes the files of a killed one.
//! * They replace no file but an archive with a snapshot, and a file that appears while they write
//!   stays. Between the last check of an archive and the rename that replaces it, another process
//!   can put another file there, which the rename replaces.
//! * Reading is bounded: links, names outside the archive, two members of one name, and lengths
//!   that the file does not have are refused by name, and nothing is allocated for them.

mod read;
mod tar;
mod write;

use std::path::Path;

pub use crate::format::error::ArchiveError;

use crate::blobs::source::{Blobs, read_manifest, read_small};
use crate::format::descriptor::Descriptor;
use crate::format::layout::{IndexJson, LayoutJson};
use crate::format::manifest::{INDEX_FILE, LAYOUT_FILE, MAX_INDEX_JSON, parse, print};
use crate::layers::blob_sink::{BlobSink, copy_to};
use crate::local::naming::ExpectedName;
use crate::seal::access::Access;
use crate::snapshots::open::open_snapshot;
use crate::writing::fold::fold_into;
use crate::writing::save::write_memory;
use crate::{
    FoldOptions, Limits, OpenError, Pages, SaveError, SaveRequest, Sha256, Snapshot, Store,
};
use read::Members;
use write::ArchiveWriter;

/// Checks that [`save`] and [`export`] would write to `path`: the path does not exist, or is an
/// archive with a snapshot, which they replace.
///
/// # Errors
/// [`SaveError::Link`], [`SaveError::UnreadableTarget`] and [`SaveError::ForeignFile`] for other
/// files, and [`SaveError::Io`] for a path that cannot be read.
pub fn check_target(path: &Path) -> Result<(), SaveError> {
    write::is_replaceable(path).map(drop)
}

/// Saves `memory` as an archive at `path`, and returns the snapshot's id. An existing archive is
/// replaced, and any other file is refused. The archive of a delta has the layers of its parent.
/// `name` is the tag that other tools show.
///
/// # Errors
/// [`SaveError`] by cause; what was at `path` stays.
pub fn save(
    path: &Path,
    name: Option<&str>,
    memory: &dyn Pages,
    request: &SaveRequest,
) -> Result<Sha256, SaveError> {
    let mut archive = ArchiveWriter::create(path)?;
    let (id, size) = write_memory(&mut archive, memory, request)?;
    archive.finish(id, size, name)?;
    Ok(id)
}

/// Writes `snapshot`, wherever it is, as an archive at `path`; its id stays the same. The result is
/// byte for byte what [`save`] would have written. `path` may be the archive that the snapshot was
/// opened from, but no other kind of file.
///
/// # Errors
/// [`SaveError`] by cause, among them a layer that does not have its digest; what was at `path`
/// stays.
pub fn export(snapshot: &Snapshot, path: &Path, name: Option<&str>) -> Result<(), SaveError> {
    let mut archive = ArchiveWriter::create(path)?;
    if snapshot.turns().is_some() {
        let (id, size) = fold_into(&mut archive, snapshot, &FoldOptions::default())?;
        return archive.finish(id, size, name);
    }
    for layer in snapshot.layers().iter().chain(snapshot.working_set_layer()) {
        archive.keep(layer)?;
    }
    archive.put(snapshot.config_blob()?)?;
    let (_, size) = archive.put(snapshot.manifest_blob()?)?;
    archive.finish(snapshot.id(), size, name)
}

/// Opens the snapshot in the archive at `path`.
///
/// # Errors
/// [`OpenError::Archive`] when the file is no archive that this crate reads, or holds no snapshot
/// or several; the errors of [`Store::load`].
pub fn open(path: &Path) -> Result<Snapshot, OpenError> {
    let members = Members::open(path)?;
    let id = only_snapshot(&members)?;
    open_snapshot(&members, id, &Access::new())
}

/// As [`open`], for a snapshot that meets the demands of `access`: signed by a trusted key, or
/// sealed with the given one.
///
/// # Errors
/// [`OpenError::Seal`] by cause, and those of [`open`].
pub fn open_with(path: &Path, access: &Access) -> Result<Snapshot, OpenError> {
    let members = Members::open(path)?;
    let id = only_snapshot(&members)?;
    open_snapshot(&members, id, access)
}

/// Copies the snapshot in the archive at `path` to `store`, checking the digest of every blob, and
/// tags it `name`. Blobs that the store has are not copied again. A sealed snapshot stays sealed,
/// and no key is needed.
///
/// # Errors
/// [`SaveError`] by cause; `name` is unchanged then.
pub fn import(path: &Path, store: &Store, name: &str) -> Result<Sha256, SaveError> {
    let members = Members::open(path)?;
    let id = only_snapshot(&members)?;
    let manifest = read_manifest(&members, id)?;
    let mut shelf = store.stage_for(name)?;
    for descriptor in manifest.layers.iter().chain([&manifest.config]) {
        let digest = descriptor.digest("the manifest")?;
        if !shelf.has(digest, descriptor.size)? {
            copy_to(&mut shelf, &*members.open(digest)?, digest, None)?;
        }
    }
    shelf.put(read_small(&members, "the manifest", id, crate::format::manifest::MAX_MANIFEST)?)?;
    if !manifest.is_sealed() {
        // The result must open, whatever the archive claimed. Running it is another matter.
        open_snapshot(store, id, &Access::new().with_limits(Limits::NONE))?;
    }
    shelf.rename(name, id, ExpectedName::Any)?;
    Ok(id)
}

/// The one snapshot of the archive.
fn only_snapshot(members: &Members) -> Result<Sha256, OpenError> {
    let layout = members.small(LAYOUT_FILE, "`oci-layout`", 4096)?;
    let layout: LayoutJson = parse("`oci-layout`", &layout)?;
    if !layout.image_layout_version.starts_with("1.") {
        let found = format!("layout version {}", layout.image_layout_version);
        return Err(OpenError::MediaType { what: "`oci-layout`", found });
    }
    let index: IndexJson =
        parse("`index.json`", &members.small(INDEX_FILE, "`index.json`", MAX_INDEX_JSON)?)?;
    index.check()?;
    let mut found = index.manifests.iter().filter(|it| it.is_snapshot() != Some(false));
    match (found.next(), found.count()) {
        (Some(descriptor), 0) => descriptor.digest("`index.json`"),
        (None, _) => Err(members.bad(ArchiveError::Snapshots(0))),
        (Some(_), more) => Err(members.bad(ArchiveError::Snapshots(1 + more))),
    }
}

/// `index.json` of an archive with one snapshot.
fn index_of(id: Sha256, size: u64, name: Option<&str>) -> Result<Vec<u8>, SaveError> {
    let descriptor = match name {
        None => Descriptor::snapshot(id, size),
        Some(name) => {
            crate::local::store::check_name(name)?;
            Descriptor::named(id, size, name)
        }
    };
    let index = IndexJson { manifests: vec![descriptor], ..IndexJson::default() };
    print(&index)
}
