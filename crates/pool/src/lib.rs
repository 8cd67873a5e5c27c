//! Internal crate of `afresh` (`afresh::pool`). A pool of warm things that are reset when they come
//! back: slots, Wasm instances, micro-VMs.
//!
//! An item belongs to a *key* (its image, its module); a request for a key prefers an idle item
//! that already holds it. No limits are needed up front. Optional [`Limits`] bound the number of
//! items and the memory that idle ones may keep, and [`LimitPolicy`] selects the response at the
//! bound.
//!
//! Promises: an item is leased only after its [`Recycle::recycle`] succeeded; an item whose
//! recycling failed, or whose user panicked, is dropped, counted and never seen again. Threads
//! share nothing on the way through: each has a shard, and looks into others only when its own is
//! empty.
//!
//! ```
//! use afresh_memory::{Image, Slot, SlotConfig};
//! use afresh_pool::{Limits, Pool};
//!
//! let image = Image::zero(16);
//! let pool: Pool<Slot> = Pool::new(Limits::default());
//! let mut lease = pool.get(image.id(), |_| Slot::new(&image, SlotConfig::default()))?;
//! lease.write(0, b"secret")?;
//! drop(lease); // reset here
//! let lease = pool.get(image.id(), |_| Slot::new(&image, SlotConfig::default()))?;
//! let mut bytes = [1; 6];
//! lease.read(0, &mut bytes)?;
//! assert_eq!(bytes, [0; 6]);
//! assert_eq!(pool.stats().created, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod blocking;
mod budget;
mod discard;
mod error;
mod gate;
mod lease;
mod limits;
mod next_item;
mod pool;
mod pool_state;
mod pressure;
mod return_guard;
mod shard;
mod shared_cache;
mod stats;
mod sync;
mod trims;

pub use blocking::{JobHandle, MAX_CALL_THREADS, run_blocking};
pub use budget::{Budget, MappingCharge, ProcessLimits, Usage};
pub use error::PoolError;
pub use lease::{Lease, OwnedLease};
pub use limits::{LimitPolicy, Limits};
pub use next_item::NextItem;
pub use pool::Pool;
pub use shared_cache::SharedCache;
pub use stats::{PoolStats, ResetCost, ResetStats};

use afresh_memory::{PAGE_SIZE, ResetError, Slot};

/// Something a pool can hold.
pub trait Recycle: Send + 'static {
    /// Why recycling failed.
    type Error: std::fmt::Display;

    /// The kind of work that the item is warm for. Equal keys are interchangeable.
    fn key(&self) -> usize;

    /// Makes the item pristine, and returns the cost.
    ///
    /// # Errors
    /// Any error: the item is dropped.
    fn recycle(&mut self) -> Result<ResetCost, Self::Error>;

    /// The kind of an error, in a word or two: the pool counts failures by it.
    fn reason(_: &Self::Error) -> &'static str {
        "reset"
    }

    /// Bytes of private memory the item keeps while idle, roughly; called after every recycling, so
    /// it must be cheap.
    fn resident_bytes(&self) -> usize;

    /// Approximate mappings of the item during its life; queried once, when it was made.
    fn mappings(&self) -> usize {
        0
    }

    /// Releases unneeded memory and stays usable.
    ///
    /// # Errors
    /// Any error: the item is dropped.
    fn trim(&mut self) -> Result<(), Self::Error>;
}

impl Recycle for Slot {
    type Error = ResetError;

    fn key(&self) -> usize {
        self.image().id()
    }

    fn recycle(&mut self) -> Result<ResetCost, ResetError> {
        self.reset().map(ResetCost::from)
    }

    fn reason(error: &ResetError) -> &'static str {
        error.reason()
    }

    fn resident_bytes(&self) -> usize {
        self.write_set_len() * PAGE_SIZE
    }

    fn trim(&mut self) -> Result<(), ResetError> {
        Slot::trim(self)
    }
}
