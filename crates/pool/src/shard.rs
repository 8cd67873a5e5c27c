//! One thread's share of the idle items in a pool.
//!
//! The item that came back last sits in a single atomic place: the common case, one thread that
//! takes an item and brings it back, is one swap each way. The others are kept by key behind a
//! lock, most recently returned last, so that the warmest is leased first.
//!
//! Memory ordering: an item is read only after the swap that took it out, which acquires what the
//! swap that put it there released. A relaxed load only decides whether to swap: it may miss an
//! item, and the caller then looks elsewhere. A thread that is about to wait must not miss one, so
//! [`Shard::is_empty`] and the stores of [`Shard::put`] are `SeqCst` (see [`crate::gate`]).

use afresh_sys::planted::{Bug, is};

use crate::sync::{AtomicPtr, InheritedMutex, InheritedMutexGuard, Ordering, locked_here};
use crate::{Recycle, ResetStats};

/// An idle item and the pool's records of it. Boxed once, when the item is made.
pub(crate) struct IdleItem<T> {
    pub(crate) item: T,
    /// Its share of the resident bytes that the pool counts.
    pub(crate) resident: usize,
    /// Mappings it takes.
    pub(crate) mappings: usize,
    /// The pool's tick when it came back.
    pub(crate) since: u64,
    /// The budget's clock when it came back.
    pub(crate) stamp: u64,
    /// The costs of its resets.
    pub(crate) resets: ResetStats,
    /// The process that it was made in.
    pub(crate) generation: u32,
}

pub(crate) struct Bucket<T> {
    key: usize,
    idle: Vec<Box<IdleItem<T>>>,
}

/// Idle items, on separate cache lines (two, because processors fetch them in pairs).
#[repr(align(128))]
pub(crate) struct Shard<T> {
    /// The item that came back last, or null. The thread that swaps it out owns it.
    last: AtomicPtr<IdleItem<T>>,
    /// A child of a fork gets none of the items of a lock that a thread of its parent held.
    buckets: InheritedMutex<Vec<Bucket<T>>>,
}

impl<T> Default for Shard<T> {
    fn default() -> Self {
        Self {
            last: AtomicPtr::new(std::ptr::null_mut()),
            buckets: InheritedMutex::new(Vec::new()),
        }
    }
}

impl<T> Drop for Shard<T> {
    fn drop(&mut self) {
        drop(self.take_last());
    }
}

impl<T> Shard<T> {
    /// Takes the item in the fast place, with any key.
    #[inline]
    fn take_last(&self) -> Option<Box<IdleItem<T>>> {
        // A read first: finding nothing must not make the cache line bounce between threads.
        if self.last.load(Ordering::Relaxed).is_null() {
            return None;
        }
        let last = self.last.swap(std::ptr::null_mut(), Ordering::Acquire);
        // SAFETY: a non-null pointer came from `Box::into_raw` in `put`, and the swap gave it to us
        // alone.
        (!last.is_null()).then(|| unsafe { Box::from_raw(last) })
    }

    pub(crate) fn buckets(&self) -> InheritedMutexGuard<'_, Vec<Bucket<T>>> {
        locked_here(&self.buckets)
    }
}

impl<T: Recycle> Shard<T> {
    /// Takes the warmest item of `key`. `returned` is called if an item of another key was out for
    /// a moment: a thread that looked for it then may have missed it.
    #[inline]
    pub(crate) fn take(&self, key: usize, returned: impl FnOnce()) -> Option<Box<IdleItem<T>>> {
        match self.take_last() {
            Some(idle) if idle.item.key() == key || is(Bug::Key) => Some(idle),
            Some(other) => {
                let taken = self.take_kept(key, Some(other));
                returned();
                taken
            }
            None => self.take_kept(key, None),
        }
    }

    #[cold]
    fn take_kept(&self, key: usize, other: Option<Box<IdleItem<T>>>) -> Option<Box<IdleItem<T>>> {
        let mut buckets = self.buckets();
        if let Some(other) = other {
            keep(&mut buckets, other);
        }
        let at = buckets.iter().position(|b| b.key == key)?;
        let idle = buckets[at].idle.pop();
        if at > 0 {
            // The next request will likely have the same key.
            buckets.swap(0, at);
        }
        idle
    }

    /// Takes the coldest item of any key.
    pub(crate) fn take_any(&self) -> Option<Box<IdleItem<T>>> {
        let kept = {
            let mut buckets = self.buckets();
            let bucket = buckets.iter_mut().rev().find(|b| !b.idle.is_empty());
            bucket.map(|b| b.idle.remove(0))
        };
        kept.or_else(|| self.take_last())
    }

    #[inline]
    pub(crate) fn put(&self, idle: Box<IdleItem<T>>) {
        let idle = Box::into_raw(idle);
        let placed = self.last.compare_exchange(
            std::ptr::null_mut(),
            idle,
            Ordering::SeqCst,
            Ordering::Relaxed,
        );
        if placed.is_err() {
            // SAFETY: it was not placed, so it is still ours, from `into_raw` just above.
            self.put_kept(unsafe { Box::from_raw(idle) });
        }
    }

    /// The fast place is taken: the newcomer goes there, for it is warmer.
    #[cold]
    fn put_kept(&self, idle: Box<IdleItem<T>>) {
        let former = self.last.swap(Box::into_raw(idle), Ordering::SeqCst);
        if !former.is_null() {
            // SAFETY: as in `take_last`.
            keep(&mut self.buckets(), unsafe { Box::from_raw(former) });
        }
    }

    /// Takes every idle item for which `wanted` holds.
    pub(crate) fn take_where(
        &self,
        mut wanted: impl FnMut(&IdleItem<T>) -> bool,
    ) -> Vec<Box<IdleItem<T>>> {
        let mut taken = Vec::new();
        let mut buckets = self.buckets();
        if let Some(last) = self.take_last() {
            keep(&mut buckets, last);
        }
        for bucket in buckets.iter_mut() {
            let mut at = 0;
            while at < bucket.idle.len() {
                if wanted(&bucket.idle[at]) {
                    taken.push(bucket.idle.remove(at));
                } else {
                    at += 1;
                }
            }
        }
        taken
    }

    /// Takes the item at an address that [`Shard::for_each`] gave out, unless it was used since.
    /// Another one may have the address by then.
    pub(crate) fn take_at(&self, address: usize) -> Option<Box<IdleItem<T>>> {
        let mut buckets = self.buckets();
        buckets.iter_mut().find_map(|bucket| {
            let mut idle = bucket.idle.iter();
            let at = idle.position(|idle| std::ptr::from_ref(&**idle).addr() == address)?;
            Some(bucket.idle.remove(at))
        })
    }

    /// Puts an item back as the coldest one of its key.
    pub(crate) fn put_cold(&self, idle: Box<IdleItem<T>>) {
        let mut buckets = self.buckets();
        let key = idle.item.key();
        match buckets.iter_mut().find(|b| b.key == key) {
            Some(bucket) => bucket.idle.insert(0, idle),
            None => keep(&mut buckets, idle),
        }
    }

    /// Calls `look` with every idle item.
    pub(crate) fn for_each(&self, mut look: impl FnMut(&IdleItem<T>)) {
        let mut buckets = self.buckets();
        if let Some(last) = self.take_last() {
            keep(&mut buckets, last);
        }
        buckets.iter().flat_map(|b| &b.idle).for_each(|idle| look(idle));
    }

    /// Whether it holds nothing. Finds every item whose return signals before the caller waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.last.load(Ordering::SeqCst).is_null()
            && self.buckets().iter().all(|b| b.idle.is_empty())
    }
}

fn keep<T: Recycle>(buckets: &mut Vec<Bucket<T>>, idle: Box<IdleItem<T>>) {
    let key = idle.item.key();
    match buckets.iter_mut().find(|b| b.key == key) {
        Some(bucket) => bucket.idle.push(idle),
        None => {
            buckets.retain(|b| !b.idle.is_empty());
            buckets.push(Bucket { key, idle: vec![idle] });
        }
    }
}
