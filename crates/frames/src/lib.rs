//! Internal crate of `afresh` (`afresh::frames`). The frame pool: physical memory that is zero when
//! it is taken, and touched at memory speed.
//!
//! A fresh page of the kernel costs a fault. A page of this pool costs its share of mapping a 2 MiB
//! frame, and the zeroing, which a background thread can do in advance.
//!
//! * [`Pool`] returns [`CleanFrame`]s of 4 KiB to 1 GiB and takes [`DirtyFrame`]s back.
//! * [`FrameCache`] is a thread's own cache of them.
//! * [`ZeroSource`] and [`Lease`] map them into an address space.
//! * [`ZeroPool`] is the same idea for memory that must be private: slots, Wasm memories that grow,
//!   KVM guests. [`ProcessZeroPool`] is one that a process shares.
//!
//! ```
//! use afresh_frames::{Order, Pool, PoolOptions};
//!
//! let pool = Pool::new(PoolOptions::new(4096))?; // at most 16 MiB
//! let frame = pool.take(Order::HUGE)?.used(); // 2 MiB of zeros
//! let start = pool.address(&frame);
//! // SAFETY: the frame is ours and 2 MiB long.
//! unsafe { start.write(1) };
//! pool.give(frame); // zeroed again before anybody else gets it
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Promises and their limits are written at each file's head; the measurements behind the design
//! are in `docs/fault-path.md`.

mod buddy;
mod cache;
mod error;
mod frame;
mod handoff;
#[cfg(test)]
mod handoff_tests;
mod lease;
mod options;
mod pool;
mod process_zero_pool;
mod store;
mod throttle;
mod usage;
mod zero;
mod zero_pool;
mod zeroer;

/// The atomics of the hand-over, which the model in `tests/handoff_model.rs` replaces by its own.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
}

pub use cache::FrameCache;
pub use error::{NewPoolError, TakeError};
pub use frame::{Clean, CleanFrame, Dirty, DirtyFrame, Frame, Order};
pub use lease::{KernelZero, Lease, ZeroSource};
pub use options::{Background, PoolOptions};
pub use pool::Pool;
pub use process_zero_pool::ProcessZeroPool;
pub use store::PageKind;
pub use throttle::ThrottledSource;
pub use usage::{Usage, Work};
pub use zero_pool::ZeroPool;
