//! Arenas of memory that are zero at every start and touched at memory speed.
//!
//! * [`Arena`]: a range that grows, shrinks and is reset, on the frames of an [`afresh_frames::Pool`].
//! * [`Region`]: allocates Rust values in an arena and frees them all at once.
//! * [`ZeroedAlloc`]: a global allocator whose large zeroed blocks come from the pool.
//! * [`mod@bench`]: the measurements of `docs/fault-path.md`.

mod alloc;
mod arena;
#[cfg(not(miri))]
pub mod bench;
mod chunk;
mod density;
mod error;
mod map;
mod region;
mod window;

pub use alloc::ZeroedAlloc;
pub use arena::{Arena, ArenaOptions, Commit, Holding};
pub use error::ArenaError;
pub use region::Region;
