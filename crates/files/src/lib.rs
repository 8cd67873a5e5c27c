//! Internal crate of `afresh` (`afresh::files`). File trees that are plain data, like the memory of
//! the guests that use them.
//!
//! A [`Tree`] holds directories, files, symbolic and hard links in memory, over read-only
//! [`Layer`]s: a host directory, a zip, a tar, an OCI image. A clone costs a few reference counts
//! for a tree of any size, and shares every page that neither has written since; so a checkpoint is
//! a clone, and a rollback is an assignment. The tree's own data stays within a [`Budget`].
//!
//! ```
//! use afresh_files::{Budget, Change, Time, Tree};
//!
//! let mut tree = Tree::new(Budget::default());
//! tree.write_path("/data/a.csv", b"1,2", Time::now())?;
//! let checkpoint = tree.clone();
//!
//! tree.write_path("/data/a.csv", b"1,3", Time::now())?;
//! let difference = checkpoint.diff(&tree)?;
//! assert_eq!(difference.changes[0].path, b"/data/a.csv");
//! assert_eq!((difference.changes[0].change, difference.bytes), (Change::Changed, 1));
//!
//! tree = checkpoint;
//! assert_eq!(tree.read_path("/data/a.csv", 1 << 20)?, b"1,2");
//! # Ok::<(), afresh_files::Refused>(())
//! ```
//!
//! # Serving the file calls of a guest
//!
//! * A file is a [`Node`], its inode number: [`Tree::stat`], [`Tree::read`], [`Tree::write`],
//!   [`Tree::set_size`], [`Tree::set_mode`], [`Tree::set_times`], [`Tree::read_link`],
//!   [`Tree::list`], and for extended attributes [`Tree::set_attribute`].
//! * A path is followed by [`Tree::walk`], as Linux does ([`Walk::new`]) or as WASI does
//!   ([`Walk::beneath`]). It gives a [`ResolvedName`]: a directory, the last name, and the file
//!   with that name, if it exists. To make, remove or move a name, walk with [`Walk::name`], and
//!   pass the result to [`Tree::create_at`], [`Tree::link_at`], [`Tree::rename_at`],
//!   [`Tree::remove_file_at`], [`Tree::remove_directory_at`], which handle a slash behind the name.
//! * An open file is an [`OpenFile`]: position, access, and for a directory the last listing, so
//!   that [`OpenFile::entries`] continues where it was; call it again until it returns no entries.
//!   It holds its node: a file without a name stays until it is [closed](Tree::close). Descriptors
//!   that share one (`dup`) need not hold it twice. Keep tree and open files in one value: clone
//!   them together, put them back together.
//! * `Refused::errno` is the number for a program.
//! * Times are given by the caller. Users are not modelled: modes are kept, and enforced only where
//!   a walk may pass only through directories that their owner may search ([`Walk::searching`]).
//! * A host directory that a guest may change is no part of a tree: [`HostHandle::grant`] opens
//!   one, whose functions follow paths as [`Walk::beneath`] does, and write through.
//! * Devices are entries with a number ([`New::Device`]); the caller implements them.

mod error;
#[cfg(target_os = "linux")]
mod granted;
#[cfg(not(target_os = "linux"))]
#[path = "granted_absent.rs"]
mod granted;
mod host_values;
mod layers;
mod nodes;
mod read_at;
mod saved;
mod trees;

pub use error::{LayerError, Refused};
pub use granted::HostHandle;
pub use host_values::{Durability, HostEntry, HostKind, HostOpening, HostStat};
pub use layers::host::HostFile;
pub use layers::image::{OciConfig, OciImage};
pub use layers::item::LayerLimits;
pub use layers::layer::Layer;
pub use layers::layer_bytes::LayerBytes;
pub use layers::oci_document::{OciBlob, OciDocument};
pub use nodes::node::{Kind, Node, Stat, Time, Times};
pub use saved::description::{SavedTree, TreeError};
pub use saved::stored_layers::StoredLayers;
pub use trees::bytes::{FileBytes, FileReader};
pub use trees::diff::{Change, FileChange, FileDifference};
pub use trees::open::{Access, OpenFile, Whence};
pub use trees::path::{ResolvedName, Walk};
pub use trees::tree::{Budget, DirEntry, FileVersion, New, Rename, Tree};
