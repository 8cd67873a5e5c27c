//! What `kvm-ioctls` lacks: the dirty ring, and the dirty log with manual protection.
//!
//! Promises: an entry of the ring is reported exactly once; a page that was reported stays
//! writable until it is given back (`DirtyRing::give_back` and `reset_dirty_rings`, or
//! `clear_dirty_log`). May break it: an older kernel without the capability, which is an error
//! when the capability is enabled and never later.
//!
//! Source of the interface: `Documentation/virt/kvm/api.rst`, sections 4.37, 4.117 and 8.29.

mod log;
mod ring;
mod watch;

pub use log::{clear_dirty_log, enable_manual_protect, get_dirty_log};
pub use ring::{DirtyGfn, DirtyRing, dirty_ring_limit, enable_dirty_ring, reset_dirty_rings};
pub use watch::{KickSignal, StopFlag, install_kick_handler};
