//! Dropping idle items.
//!
//! Promises: items are taken out in batches of at most [`MAX_DISCARD_BATCH`], those first that have
//! been idle longest. Calls find the others while a batch is dropped, however long that takes. May
//! break it: the code of an item that is dropped.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::Recycle;
use crate::pool_state::PoolState;
use crate::shard::IdleItem;

/// Maximum items that are taken out at a time.
const MAX_DISCARD_BATCH: usize = 16;

impl<T: Recycle> PoolState<T> {
    /// Drops all items, also if the code of one panics, and passes the first panic on.
    pub(crate) fn discard_all(&self, items: Vec<Box<IdleItem<T>>>) {
        let mut first = None;
        for idle in items {
            let discarded = catch_unwind(AssertUnwindSafe(|| self.discard(*idle)));
            first = first.or(discarded.err());
        }
        if let Some(panic) = first {
            resume_unwind(panic);
        }
    }

    /// Drops idle items for which `wanted` holds in batches, those first that have been idle
    /// longest, until `more` returns `false`. The items of later batches can be handed out
    /// meanwhile, and stay then. Returns how many were dropped. The first panic of one is passed
    /// on at the end.
    pub(crate) fn discard_oldest(
        &self,
        mut wanted: impl FnMut(&IdleItem<T>) -> bool,
        mut more: impl FnMut(&IdleItem<T>) -> bool,
    ) -> u64 {
        let mut stamps = Vec::new();
        for shard in &self.shards {
            shard.for_each(|idle| {
                if wanted(idle) {
                    stamps.push(idle.stamp);
                }
            });
        }
        stamps.sort_unstable();
        let (mut count, mut first) = (0, None);
        for batch in stamps.chunks(MAX_DISCARD_BATCH) {
            let Some(until) = batch.last() else { break };
            let (mut old, mut ended) = (Vec::new(), false);
            for shard in &self.shards {
                let mut left = batch.len() - old.len();
                old.extend(shard.take_where(|idle| {
                    let fits = left > 0 && !ended && idle.stamp <= *until && wanted(idle);
                    let goes = fits && more(idle);
                    ended |= fits && !goes;
                    left -= usize::from(goes);
                    goes
                }));
            }
            count += old.len() as u64;
            let discarded = catch_unwind(AssertUnwindSafe(|| self.discard_all(old)));
            first = first.or(discarded.err());
            if ended {
                break;
            }
        }
        if let Some(panic) = first {
            resume_unwind(panic);
        }
        count
    }

    pub(crate) fn clear(&self, key: Option<usize>) {
        let of_key = |idle: &IdleItem<T>| key.is_none_or(|key| idle.item.key() == key);
        self.discard_oldest(of_key, |_| true);
    }
}
