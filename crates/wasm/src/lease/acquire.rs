//! Taking leases. A lease is borrowed from its guest or owned; it has the guest's options, or its
//! own limits and WASI context; it is taken at once, or waits for the guest's own initialisation.
//!
//! Promises: an owned lease keeps its guest, so it may outlive every handle to it and move to other
//! threads and tasks; where it is dropped does not matter.

use std::sync::Arc;

use afresh_pool::NextItem;

use crate::call::lease_options::LeaseOptions;
use crate::engine::call_path::poll_once;
use crate::lease::background::prepare_elsewhere;
use crate::lease::leased_instance::{FreshInstance, LeasedInstance};
use crate::lease::{Lease, OwnedLease};
use crate::warm::Inner;
use crate::warm::fresh::{FreshMemories, FreshState};
use crate::warm::ownership::Ownership;
use crate::warm::pools::Pools;
use crate::warm::reset::ResetInstance;
use crate::{Warm, WarmError};

/// Polls a lease that must be ready at once; an error if its guest waits first.
#[inline]
pub(crate) fn at_once<T>(
    taken: impl Future<Output = Result<T, WarmError>>,
) -> Result<T, WarmError> {
    poll_once(taken).unwrap_or_else(|| {
        Err(WarmError::Instantiate(wasmtime::Error::msg(
            "its initialisation waits for a host function; take the lease with `lease_async`",
        )))
    })
}

/// An instance, or its memories, taken from the pool. No code of the guest has run for the lease.
enum PoolItem<'a> {
    Reset(afresh_pool::Lease<'a, ResetInstance>),
    Fresh(&'a FreshState, afresh_pool::Lease<'a, FreshMemories>),
}

impl Inner {
    /// Takes an item from the pool; `new` for one that is made for the lease.
    fn take_item(&self, options: &LeaseOptions, new: bool) -> Result<PoolItem<'_>, WarmError> {
        let exhausted = options.policy(self.pools.limits().exhausted);
        Ok(match &self.pools {
            Pools::Reset { state, pool } => {
                let make = || state.make();
                PoolItem::Reset(match new {
                    true => pool.spare(make)?,
                    false => pool.get_with(0, exhausted, |_| make())?,
                })
            }
            Pools::Fresh { state, pool } => {
                let make = || state.make();
                let memories = match new {
                    true => pool.spare(make)?,
                    false => pool.get_with(0, exhausted, |_| make())?,
                };
                PoolItem::Fresh(state, memories)
            }
        })
    }

    /// Makes a lease of an item, and runs the guest's own code for a new clone.
    async fn prepare<'a>(
        &'a self,
        item: PoolItem<'a>,
        options: &LeaseOptions,
    ) -> Result<Lease<'a>, WarmError> {
        let limits = options.limits(&self.pools.blueprint().stores)?;
        let live = match item {
            PoolItem::Reset(mut item) => {
                options.apply(item.store.data_mut());
                LeasedInstance::Reset(Ownership::Pooled(item))
            }
            PoolItem::Fresh(state, memories) => {
                let (store, instance) = state.instantiate(&memories, options).await?;
                LeasedInstance::Fresh(FreshInstance {
                    store,
                    instance,
                    unfinished: false,
                    memories,
                })
            }
        };
        let mut lease = Lease::begin(self, live, limits);
        lease.prepare().await?;
        Ok(lease)
    }

    /// Whether code of the guest prepares each instance.
    fn prepares(&self) -> bool {
        let starts = match &self.pools {
            Pools::Reset { .. } => false,
            Pools::Fresh { state, .. } => state.state.is_none(),
        };
        starts || self.initialize || self.reseed.is_some()
    }

    /// Takes a lease; `new` for one of an instance made for it.
    async fn take(&self, options: &LeaseOptions, new: bool) -> Result<Lease<'_>, WarmError> {
        options.limits(&self.pools.blueprint().stores)?;
        self.prepare(self.take_item(options, new)?, options).await
    }
}

/// An item of the pool that keeps its guest.
struct OwnedItem {
    item: PoolItem<'static>,
    /// Dropped last.
    keep: Arc<Inner>,
}

impl OwnedItem {
    async fn prepare(self, options: &LeaseOptions) -> Result<OwnedLease, WarmError> {
        let Self { item, keep } = self;
        // SAFETY: `item` and the lease are dropped before `keep`, or with the lease that gets it:
        // the function owns both, and moves `item` out first.
        let inner = unsafe { borrow_inner(&keep) };
        let lease = inner.prepare(item, options).await?;
        Ok(lease.keep(keep))
    }
}

/// The guest, borrowed from `keep`.
///
/// # Safety
/// The reference, and everything borrowed from it, must not outlive `keep`.
unsafe fn borrow_inner(keep: &Arc<Inner>) -> &'static Inner {
    // SAFETY: an `Arc` does not move its value, and the caller keeps the `Arc` until the last use.
    unsafe { &*Arc::as_ptr(keep) }
}

impl Warm {
    /// Takes an instance in the warm state, for one or several calls. Dropping the lease returns
    /// it.
    ///
    /// # Errors
    /// [`WarmError`] when the pool is exhausted or a new instance cannot be made.
    #[inline]
    pub fn lease(&self) -> Result<Lease<'_>, WarmError> {
        let inner = &*self.inner;
        if let Pools::Reset { state, pool } = &inner.pools
            && inner.reseed.is_none()
        {
            // The way of nearly every call.
            let live = LeasedInstance::Reset(Ownership::Pooled(pool.get(0, |_| state.make())?));
            return Ok(Lease::begin(inner, live, inner.limits));
        }
        at_once(inner.take(&LeaseOptions::default(), false))
    }

    /// As [`Warm::lease`], with `options` for this lease.
    ///
    /// # Errors
    /// As [`Warm::lease`]; [`WarmError::Load`] for a limit that the engine was not set up to keep,
    /// and for directories that do not fit those of the guest.
    pub fn lease_with(&self, options: &LeaseOptions) -> Result<Lease<'_>, WarmError> {
        at_once(self.inner.take(options, false))
    }

    /// As [`Warm::lease_with`], but the lease owns its guest. It can move to other threads and
    /// tasks, and can be kept without limit. It takes some nanoseconds longer, for a reference
    /// count that all threads share.
    ///
    /// # Errors
    /// As [`Warm::lease_with`].
    pub fn lease_owned(&self, options: &LeaseOptions) -> Result<OwnedLease, WarmError> {
        let keep = self.inner.clone();
        // SAFETY: the lease gets `keep`, which it drops last; until then `keep` is dropped after
        // it.
        let lease = at_once(unsafe { borrow_inner(&keep) }.take(options, false))?;
        Ok(lease.keep(keep))
    }

    /// As [`Warm::lease_owned`], but asynchronous: it waits for an instance if all are in use, and
    /// for the guest's initialisation if each instance runs `_initialize`, `afresh_reseed` or a
    /// start function again. Waiting blocks no thread, and dropping the future ends the wait. Such
    /// initialisation runs within the limits of a call, on a thread for calls that block; that of
    /// an [asynchronous](crate::GuestOptions::asynchronous) guest runs in the task. A dropped
    /// future stops it as [`crate::StopHandle`] stops a call.
    ///
    /// # Errors
    /// As [`Warm::lease_with`], but no limit of the pool is an error.
    pub async fn lease_async(&self, options: &LeaseOptions) -> Result<OwnedLease, WarmError> {
        options.limits(&self.inner.pools.blueprint().stores)?;
        let attempt = options.without_blocking(self.inner.pools.limits().exhausted);
        let mut next = None;
        loop {
            let keep = self.inner.clone();
            // SAFETY: the item is put together with `keep`, which is dropped after it.
            match unsafe { borrow_inner(&keep) }.take_item(&attempt, false) {
                Err(WarmError::Exhausted { .. }) => {}
                taken => {
                    let item = OwnedItem { item: taken?, keep };
                    if !self.inner.prepares() || self.inner.way.waits() {
                        return item.prepare(&attempt).await;
                    }
                    let prepare = move |options: &LeaseOptions| at_once(item.prepare(options));
                    return prepare_elsewhere(&attempt, prepare).await;
                }
            }
            next.get_or_insert_with(|| self.next_instance()).wait().await;
        }
    }

    /// Waits, as a task, for an instance to come back when the pool is at its limit.
    #[must_use]
    pub fn next_instance(&self) -> NextItem {
        self.inner.pools.next_instance()
    }

    /// Makes a new instance that is dropped with the lease, for comparison with a pooled one.
    ///
    /// # Errors
    /// [`WarmError`] when it cannot be made.
    pub fn lease_new(&self) -> Result<Lease<'_>, WarmError> {
        at_once(self.inner.take(&LeaseOptions::default(), true))
    }
}
