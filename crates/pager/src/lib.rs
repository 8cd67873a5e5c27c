//! Internal crate of `afresh` (`afresh::pager`). Fills memory from a page source: before the guest
//! starts, when it touches a page, or both at once.
//!
//! A [`Restore`] fills a range of a reservation from a [`PageSource`] (a file, an image this host
//! holds, a snapshot, or the embedder's own) by one of the [`FillStrategy`]s. Each can be forced;
//! [`FillStrategy::choose`] decides otherwise.
//!
//! A [`LazyImage`] is the same for the engine's own images: any number of slots use it while it is
//! filled.
//!
//! Promises:
//! * A page is seen whole or not at all. If its filler dies, hangs or gets wrong bytes, the memory
//!   is closed: touching it raises SIGSEGV, and [`Restore::wait`] names the cause. It never reads
//!   as zero, and no thread waits forever.
//! * When a restore is done nothing of the source is mapped or open, except with the strategies
//!   that only map it.
//!
//! May break it: system calls on missing pages fail with `EFAULT`, so a caller that passes guest
//! memory to the kernel calls [`Restore::resolve`] first.

#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod collapse;
mod contents;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod control;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod coordinator;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod detach;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod eager;
mod error;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod file_sources;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod image;
#[cfg(not(all(target_os = "linux", not(afresh_portable))))]
#[path = "image_whole.rs"]
mod image;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
pub mod images;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod lazy;
mod memory;
mod options;
mod recorder;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod restore;
mod source;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod staging;
mod strategy;
mod sum;
mod turn;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
pub mod vmm;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod wait_budget;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
mod working_set;

pub use afresh_store::SnapshotOptions;
pub use contents::{SnapshotContents, SnapshotState};
pub use error::{FreezeError, RestoreError, SaveMemoryError, SourceError, ThawError};
#[cfg(all(target_os = "linux", not(afresh_portable)))]
pub use file_sources::{FileSource, MemfdSource};
pub use image::LazyImage;
pub use memory::SnapshotMemory;
pub use options::Options;
pub use recorder::Recorder;
#[cfg(all(target_os = "linux", not(afresh_portable)))]
pub use restore::{Restore, Status};
#[cfg(all(target_os = "linux", not(afresh_portable)))]
pub use source::Piece;
pub use source::{PageSink, PageSource, SnapshotSource};
pub use strategy::{Answer, FillStrategy, UnknownStrategy};
pub use sum::StateSum;
pub use turn::{turn_applied, turn_since};
