//! Snapshots on disk: OCI image layouts whose layers hold pages.
//!
//! A [`Store`] is a directory in the OCI image layout. It holds [`Snapshot`]s under names; a
//! snapshot is a configuration (which guest build it belongs to, and the guest's own state) and a
//! stack of page layers. `docs/format.md` describes every byte.
//!
//! Promises:
//! * Nothing read from a store is used before its digest was checked: the JSON files and layer
//!   indexes when a snapshot is opened, each group of pages when it is first read.
//! * A snapshot opens only for the guest build it was taken from; see [`GuestBuild`].
//! * Saving is atomic and durable: after a kill, a name means the old snapshot or the new one.
//! * Parsing is bounded: no length in a file makes the reader allocate more than the file holds,
//!   and what opening a snapshot would cost is held against [`Limits`] first.
//!
//! May break it: a process that changes a blob in place after its pages were checked. Blobs are
//! therefore written once, made read-only and never touched again.
//!
//! ```
//! use afresh_store::{GuestBuild, MemoryPages, SaveOptions, Store};
//!
//! let directory = tempfile::tempdir()?;
//! let store = Store::create(directory.path().join("store"))?;
//! let build = GuestBuild {
//!     kind: "example".to_owned(),
//!     module: "layout 1".to_owned(),
//!     engine: "example 1.0".to_owned(),
//!     cpu: Vec::new(),
//! };
//! let id = store.save("warm", &MemoryPages(b"warm".to_vec()), &SaveOptions::new(build))?;
//!
//! let snapshot = store.load("warm")?;
//! assert_eq!((snapshot.id(), snapshot.pages()), (id, 1));
//! let mut page = vec![0; 4096];
//! snapshot.read(0, &mut page)?;                  // checked against its digest
//! assert!(page.starts_with(b"warm\0"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod access;
pub mod archive;
mod blob;
mod blob_sink;
mod blobs;
mod collect;
mod compact;
mod descriptor;
mod diff;
mod digest;
mod error;
#[cfg(fuzzing)]
pub mod fuzzing;
mod guest;
mod hashing;
mod image;
mod index;
mod inspect;
mod json;
mod layer;
mod layer_writer;
mod layout;
mod limits;
mod list;
mod manifest;
mod map;
mod naming;
mod open;
mod pages;
mod range_reader;
mod raw;
#[cfg(feature = "remote")]
pub mod remote;
mod save;
#[cfg(feature = "seal")]
pub mod seal;
#[cfg(not(feature = "seal"))]
#[path = "unsealed.rs"]
mod seal;
#[cfg(feature = "seal")]
mod signing;
mod snapshot;
mod stack;
mod staging;
mod store;
mod temporary;
#[cfg(feature = "remote")]
mod transcode;
mod turn;
mod turns;

pub use access::Access;
pub use blob::BlobRead;
pub use collect::CollectionReport;
pub use compact::CompactOptions;
pub use diff::{Difference, diff};
pub use digest::Sha256;
pub use error::{GuestMismatch, LayerError, OpenError, SaveError, SealError};
pub use guest::{GuestBuild, host_cpu_features};
pub use index::{Encoding, Role};
pub use inspect::{Inspection, LayerInspection, PageKind};
pub use layer::Layer;
pub use limits::{BadLimit, Limits};
pub use list::{Extent, ListEntry};
pub use manifest::MAX_STATE;
pub use map::{MapRun, Origin, PageMap};
pub use pages::{MemoryPages, Pages};
pub use raw::{DiffError, DiffPages, FilePages};
pub use save::SaveOptions;
pub use snapshot::Snapshot;
pub use store::{Store, Tag};
pub use turn::{Journal, Patch, Signer, Turn, TurnBuilder, TurnError, TurnPiece};
pub use turns::{FoldOptions, Turns};
