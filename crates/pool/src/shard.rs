//! One thread's share of a pool's idle items.
//!
//! Items are kept by key, most recently returned last: the warmest is handed out first.

use crate::Recycle;

/// An idle item and what the pool knows of it.
pub(crate) struct Idle<T> {
    pub(crate) item: T,
    /// Its share of the pool's count of resident bytes.
    pub(crate) resident: usize,
    /// The pool's tick when it came back.
    pub(crate) since: u64,
}

struct Bucket<T> {
    key: usize,
    idle: Vec<Idle<T>>,
}

/// Idle items, and counters that would be contended if all threads shared them.
pub(crate) struct Shard<T> {
    buckets: Vec<Bucket<T>>,
    pub(crate) handed_out: u64,
    pub(crate) returned: u64,
}

impl<T> Default for Shard<T> {
    fn default() -> Self {
        Self { buckets: Vec::new(), handed_out: 0, returned: 0 }
    }
}

impl<T: Recycle> Shard<T> {
    /// Takes the warmest item of `key`.
    #[inline]
    pub(crate) fn take(&mut self, key: usize) -> Option<Idle<T>> {
        let at = self.buckets.iter().position(|b| b.key == key)?;
        let idle = self.buckets[at].idle.pop();
        if at > 0 {
            // What is asked for now will likely be asked for next.
            self.buckets.swap(0, at);
        }
        idle
    }

    /// Takes the coldest item of any key.
    pub(crate) fn take_any(&mut self) -> Option<Idle<T>> {
        let bucket = self.buckets.iter_mut().rev().find(|b| !b.idle.is_empty())?;
        Some(bucket.idle.remove(0))
    }

    #[inline]
    pub(crate) fn put(&mut self, idle: Idle<T>) {
        let key = idle.item.key();
        match self.buckets.iter_mut().find(|b| b.key == key) {
            Some(bucket) => bucket.idle.push(idle),
            None => {
                self.buckets.retain(|b| !b.idle.is_empty());
                self.buckets.push(Bucket { key, idle: vec![idle] });
            }
        }
    }

    /// Takes every idle item for which `wanted` holds.
    pub(crate) fn take_where(&mut self, wanted: impl Fn(&Idle<T>) -> bool) -> Vec<Idle<T>> {
        let mut taken = Vec::new();
        for bucket in &mut self.buckets {
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

    pub(crate) fn len(&self) -> usize {
        self.buckets.iter().map(|b| b.idle.len()).sum()
    }
}
