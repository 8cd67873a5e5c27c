//! Internal crate of `afresh` (`afresh::arena`). Arenas of memory that are zero at every start and
//! touched at memory speed.
//!
//! * [`Arena`]: a range that grows, shrinks and is reset, on the frames of an
//!   [`afresh_frames::Pool`].
//! * [`Region`]: allocates Rust values in an arena and frees them all at once; collections too,
//!   with the feature `allocator-api2`.
//! * [`ZeroedAlloc`]: a global allocator whose large zeroed blocks come from the pool.
//!
//! ```
//! use afresh_arena::{Arena, ArenaOptions};
//! use afresh_frames::{Pool, PoolOptions};
//!
//! let pool = Pool::new(PoolOptions::new(8192))?; // at most 32 MiB
//! let mut arena = Arena::new(pool, ArenaOptions::committed(4096))?; // up to 16 MiB
//! for _request in 0..3 {
//!     arena.grow(4096)?;
//!     // SAFETY: the arena has just grown to 16 MiB, and nobody else uses it.
//!     unsafe { arena.base().add(1234).write(1) };
//!     arena.clear()?; // zero when it grows again
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod alloc;
#[cfg(feature = "allocator-api2")]
mod allocator;
mod arena;
mod density;
mod error;
mod frozen;
mod hugepage;
mod map;
mod region;
mod window;

pub use alloc::ZeroedAlloc;
pub use arena::{Arena, ArenaOptions, ArenaUsage, CommitPolicy};
pub use error::ArenaError;
pub use frozen::ThawError;
pub use region::Region;
