//! Internal crate of `afresh` (`afresh::memory`). The engine under every afresh guest: images,
//! slots, write tracking and reset.
//!
//! An [`Image`] is immutable content. A [`Slot`] is a range of address space that holds one image
//! copy-on-write and can be reset to it. A [`Tracker`] records the written pages, and a
//! [`Strategy`] is the algorithm of a reset. After [`Slot::reset`] returns `Ok`, every byte of the
//! slot equals its image. After an error the slot is quarantined and refuses further use. A
//! [`RemoteSlot`] is the same for memory in another process, whose owner notices writes and copies
//! pages.
//!
//! The fastest strategy is the *write set*. The pages that recent runs wrote stay writable and
//! resident, and every reset copies them back. All others are write-protected, so a write to one of
//! them is noticed. In the steady state a reset makes no system call and the next run takes no
//! fault.
//!
//! ```
//! use afresh_memory::{ImageBuilder, Slot, SlotConfig};
//!
//! let mut warm = ImageBuilder::new(4);
//! warm.segment(0, b"warm")?;
//! let mut slot = Slot::new(&warm.build()?, SlotConfig::default())?;
//!
//! slot.write(0, b"dirt")?;
//! slot.reset()?;
//! let mut bytes = [0; 4];
//! slot.read(0, &mut bytes)?;
//! assert_eq!(&bytes, b"warm");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cost;
mod error;
mod image;
mod remote;
mod slot;
mod strategy;
mod tracker;
mod write_set;

#[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
pub use afresh_sys::SealedMemfd;
pub use afresh_sys::{
    Feature, Features, InheritedMutex, InheritedMutexGuard, Memfd, PAGE_SIZE, PageRange,
    Reservation, SysError, ZeroPageSource, fork, host::thread_cpu_time, page_align_up,
};
pub use cost::CostModel;
pub use error::{ImageError, ResetError, SlotError, TrackError};
pub use image::{
    BorrowedFile, FileOwner, Filler, Image, ImageBuilder, Inserter, PageLoss, PageOrigin,
};
#[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
pub use image::{ImageFile, SealedImageFile};
pub use remote::{Remote, RemoteError, RemoteSlot, UnreportedPages};
pub use slot::{FreezePreparation, Mismatch, ResetReport, Slot, SlotConfig, SlotStats};
pub use strategy::{Choice, HostAccess, Strategy, UnknownStrategy};
pub use tracker::{DirtyPages, Tracker, TrackerKind, WriteBarrier};
