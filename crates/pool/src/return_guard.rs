//! An item on its way back into its pool, and the records of items that fail on the way.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use afresh_sys::fork;
use afresh_sys::planted::{Bug, is};

use crate::pool_state::PoolState;
use crate::shard::IdleItem;
use crate::{Recycle, ResetCost};

/// Items that could not be made pristine.
#[derive(Default)]
pub(crate) struct Failures {
    pub(crate) by_reason: BTreeMap<&'static str, u64>,
    /// The error of the last one.
    pub(crate) last: Option<String>,
}

/// An item on its way back. While it has one, the item's state is not known to be good: if the
/// item's own code panics, it is dropped and counted as any other that could not be made pristine.
pub(crate) struct ReturnGuard<'a, T: Recycle> {
    pool: &'a PoolState<T>,
    pub(crate) idle: Option<Box<IdleItem<T>>>,
    /// The reason to record if it gets no further, and a description if one is known.
    pub(crate) why: (&'static str, Option<String>),
    /// Whether it keeps more memory than before.
    pub(crate) grew: bool,
}

impl<'a, T: Recycle> ReturnGuard<'a, T> {
    #[inline]
    pub(crate) fn new(pool: &'a PoolState<T>, idle: Box<IdleItem<T>>) -> Self {
        Self { pool, idle: Some(idle), why: ("panic", None), grew: false }
    }

    /// Makes the item pristine and enters it into the accounts; `false` if it must be dropped
    /// instead.
    #[inline]
    pub(crate) fn clean(&mut self, spare: bool) -> bool {
        let Some(idle) = self.idle.as_mut() else { return false };
        // A child does not use items of its parent, so making them pristine would be wasted.
        if idle.generation != fork::generation() {
            self.why.0 = "fork";
            return false;
        }
        let reset = match idle.item.recycle() {
            Ok(reset) => reset,
            Err(_) if is(Bug::Unclean) => ResetCost::default(),
            Err(error) => {
                self.why = (T::reason(&error), Some(error.to_string()));
                return false;
            }
        };
        idle.resets.add(&reset);
        if spare {
            if let Some(idle) = self.idle.take() {
                self.pool.discard(*idle);
            }
            return false;
        }
        let now = idle.item.resident_bytes();
        if now != idle.resident {
            self.grew = now > idle.resident;
            if !self.pool.account(idle, now) {
                self.why.0 = "trim";
                return false;
            }
        }
        idle.since = self.pool.tick.load(Ordering::Relaxed);
        idle.stamp = self.pool.budget.now();
        true
    }
}

impl<T: Recycle> Drop for ReturnGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if let Some(idle) = self.idle.take() {
            let mut failures = self.pool.failures.lock();
            *failures.by_reason.entry(self.why.0).or_default() += 1;
            failures.last = self.why.1.take().or(failures.last.take());
            drop(failures);
            self.pool.discard(*idle);
        }
    }
}
