//! Internal crate of `afresh` (`afresh::store`). Snapshots on disk: OCI image layouts whose layers
//! hold pages.
//!
//! A [`Store`] is a directory in the OCI image layout. It holds [`Snapshot`]s under names. A
//! snapshot is a configuration (its guest build, and the guest's state) and a stack of page layers.
//! `docs/format.md` describes every byte.
//!
//! Promises:
//! * No byte of a store is used before its digest is checked: JSON files and layer indexes when a
//!   snapshot is opened, each group of pages when it is first read.
//! * A snapshot opens only for the guest build it was taken from; see [`GuestBuild`].
//! * Saving is atomic and durable: after a kill, a name means the old snapshot or the new one.
//! * Parsing is bounded: no length in a file makes the reader allocate more than the file holds,
//!   and the cost of opening a snapshot is compared with [`Limits`] first.
//!
//! May break it: a process that changes a blob in place after its pages were checked. Blobs are
//! therefore written once, made read-only and never touched again.
//!
//! ```
//! use afresh_store::{GuestBuild, MemoryPages, SaveRequest, Store};
//!
//! let directory = tempfile::tempdir()?;
//! let store = Store::create(directory.path().join("store"))?;
//! let build = GuestBuild {
//!     kind: "example".to_owned(),
//!     module: "layout 1".to_owned(),
//!     engine: "example 1.0".to_owned(),
//!     cpu: Vec::new(),
//! };
//! let id = store.save("warm", &MemoryPages(b"warm".to_vec()), &SaveRequest::new(build))?;
//!
//! let snapshot = store.load("warm")?;
//! assert_eq!((snapshot.id(), snapshot.pages()), (id, 1));
//! let mut page = vec![0; 4096];
//! snapshot.read(0, &mut page)?;                  // checked against its digest
//! assert!(page.starts_with(b"warm\0"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod archive;
mod blobs;
mod disk;
mod format;
#[cfg(fuzzing)]
pub mod fuzzing;
mod layers;
mod local;
#[cfg(feature = "remote")]
pub mod remote;
#[cfg(feature = "seal")]
pub mod seal;
#[cfg(not(feature = "seal"))]
mod seal;
mod snapshots;
mod turn;
mod writing;

pub use format::blob::BlobRead;
pub use format::digest::Sha256;
pub use format::error::{GuestMismatch, LayerError, OpenError, SaveError, SealError, TurnError};
pub use format::guest::{GuestBuild, host_cpu_features};
pub use format::index::{Encoding, Role};
pub use format::layout::Tag;
pub use format::limits::{BadLimit, Limits};
pub use format::manifest::MAX_STATE;
pub use format::map::{MapRun, Origin, PageMap};
pub use format::pages::{MemoryPages, Pages};
pub use format::redacted_url::RedactedUrl;
pub use layers::layer::Layer;
pub use local::collect::CollectionReport;
pub use local::list::{Extent, ListEntry};
pub use local::replaced_name::{NameCondition, ReplacedName};
pub use local::store::Store;
pub use seal::access::Access;
pub use snapshots::diff::{Difference, diff};
pub use snapshots::inspect::{Inspection, LayerInspection, PageKind};
pub use snapshots::raw::{DiffError, DiffPages, FilePages};
pub use snapshots::snapshot::Snapshot;
pub use snapshots::turns::Turns;
pub use turn::{Journal, Patch, Signer, Turn, TurnBuilder, TurnPiece};
pub use writing::compact::CompactOptions;
pub use writing::fold::FoldOptions;
pub use writing::save::{SaveRequest, SaveTimes, SnapshotOptions};
