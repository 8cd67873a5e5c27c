//! Caches of a process that give memory back under memory pressure, as idle items do.

use afresh_sys::{InheritedMutex, InheritedMutexGuard};

/// A cache whose unused entries can be made again.
pub trait SharedCache: Sync {
    /// Its name, which no other cache of the process has.
    fn name(&self) -> &'static str;

    /// Bytes of all entries, used or not. It is called every second at most, and takes no lock for
    /// long.
    fn bytes(&self) -> usize;

    /// Releases unused entries with half of their bytes, or a little more. Returns the bytes that
    /// were released.
    fn release(&self) -> usize;
}

/// The caches that a budget relieves.
pub(crate) struct SharedCaches(InheritedMutex<Vec<&'static dyn SharedCache>>);

impl std::fmt::Debug for SharedCaches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.all().iter().map(|cache| cache.name())).finish()
    }
}

impl SharedCaches {
    pub(crate) fn new() -> Self {
        Self(InheritedMutex::new(Vec::new()))
    }

    /// The list. A forked child gets an empty one if a thread of its parent held the lock.
    fn list(&self) -> InheritedMutexGuard<'_, Vec<&'static dyn SharedCache>> {
        self.0.lock()
    }

    /// Adds a cache, once.
    pub(crate) fn add(&self, cache: &'static dyn SharedCache) {
        let mut caches = self.list();
        if !caches.iter().any(|known| known.name() == cache.name()) {
            caches.push(cache);
        }
    }

    /// The caches. The list is unlocked when they are used.
    fn all(&self) -> Vec<&'static dyn SharedCache> {
        self.list().clone()
    }

    /// Bytes of all caches.
    pub(crate) fn bytes(&self) -> usize {
        self.all().into_iter().map(SharedCache::bytes).sum()
    }

    /// Has each cache release half of its unused bytes, and returns their sum.
    pub(crate) fn release(&self) -> usize {
        self.all().into_iter().map(SharedCache::release).sum()
    }
}
