//! Maps ranges of addresses to their owners: a table that signal handlers read while others change
//! it.
//!
//! A balanced tree (a treap) whose nodes never change. Adding or removing a range copies the path
//! from the root to it, some twenty nodes among ten thousand, and publishes the new root with one
//! store.
//!
//! Promises:
//! * A lookup takes no lock, allocates nothing and never waits.
//! * Adding a range waits for no lookup and for no user of a value.
//! * [`EntryGuard::close`] waits for users of the value of that very range only. Afterwards the
//!   value has no users.
//!
//! Why it is safe: two counts. One is of all *lookups*, which take a moment and run no code but
//! this. Unpublished nodes are freed only when it was seen at zero afterwards; no thread waits for
//! that, the next change looks again. The other is of each entry's *users*, which may take long; it
//! is counted up inside the lookup, so the entry is alive then, and closed before the value is
//! taken out.
//!
//! May break it: a thread that leaves a lookup or a value's use without coming back (`siglongjmp`
//! out of a signal handler that interrupted it). The handler that calls this blocks signals.

use std::cell::UnsafeCell;
use std::sync::Arc;

use super::readers::Readers;
use super::sync::{AtomicPtr, Ordering, Probe, constant};
use crate::split_mix::mix;

/// A range and its value.
struct Entry<T> {
    start: usize,
    end: usize,
    users: Readers,
    /// Taken out when the entry is closed and its last user has left; until then never changed.
    value: UnsafeCell<Option<T>>,
}

// SAFETY: `value` is shared with users, which read, until `users` is closed and empty, and then
// belongs to the one thread that closed it.
unsafe impl<T: Send + Sync> Send for Entry<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Entry<T> {}

/// The right to take an entry out again; there is one for each.
pub(crate) struct EntryGuard<T>(Arc<Entry<T>>);

impl<T> EntryGuard<T> {
    /// Waits until the entry has no users, and returns its value. It must have been removed before.
    /// Needs no lock.
    pub(crate) fn close(self, generation: u32) -> Option<T> {
        self.0.users.close(generation);
        // SAFETY: closed and without users, so the value is not read now or later; an entry has
        // only one `Held`, which is consumed here.
        unsafe { (*self.0.value.get()).take() }
    }
}

struct Node<T> {
    entry: Arc<Entry<T>>,
    /// Above both children's.
    weight: u64,
    left: Link<T>,
    right: Link<T>,
    probe: Probe,
}

type Link<T> = Option<Arc<Node<T>>>;

impl<T> Node<T> {
    fn link(entry: Arc<Entry<T>>, left: Link<T>, right: Link<T>) -> Link<T> {
        let weight = weight(entry.start);
        Some(Arc::new(Self { entry, weight, left, right, probe: Probe::new() }))
    }

    fn with_left(&self, left: Link<T>) -> Link<T> {
        Self::link(self.entry.clone(), left, self.right.clone())
    }

    fn with_right(&self, right: Link<T>) -> Link<T> {
        Self::link(self.entry.clone(), self.left.clone(), right)
    }
}

/// Spreads addresses, which come in patterns, so that the tree stays as flat as a random one.
fn weight(start: usize) -> u64 {
    mix(start as u64)
}

fn insert<T>(link: &Link<T>, entry: Arc<Entry<T>>) -> Link<T> {
    match link {
        Some(node) if node.weight >= weight(entry.start) => {
            if entry.start < node.entry.start {
                node.with_left(insert(&node.left, entry))
            } else {
                node.with_right(insert(&node.right, entry))
            }
        }
        _ => {
            let (left, right) = split(link, entry.start);
            Node::link(entry, left, right)
        }
    }
}

/// The entries below `start`, and the rest.
fn split<T>(link: &Link<T>, start: usize) -> (Link<T>, Link<T>) {
    let Some(node) = link else { return (None, None) };
    if node.entry.start < start {
        let (below, rest) = split(&node.right, start);
        (node.with_right(below), rest)
    } else {
        let (below, rest) = split(&node.left, start);
        (below, node.with_left(rest))
    }
}

fn without<T>(link: &Link<T>, start: usize) -> Link<T> {
    let node = link.as_ref()?;
    match start.cmp(&node.entry.start) {
        std::cmp::Ordering::Less => node.with_left(without(&node.left, start)),
        std::cmp::Ordering::Greater => node.with_right(without(&node.right, start)),
        std::cmp::Ordering::Equal => join(&node.left, &node.right),
    }
}

/// Both trees in one; everything in `left` is below everything in `right`.
fn join<T>(left: &Link<T>, right: &Link<T>) -> Link<T> {
    match (left, right) {
        (None, rest) | (rest, None) => rest.clone(),
        (Some(a), Some(b)) if a.weight >= b.weight => a.with_right(join(&a.right, right)),
        (Some(_), Some(b)) => b.with_left(join(left, &b.left)),
    }
}

/// The last entry that begins at or below `address`.
fn last_at<T>(mut node: Option<&Node<T>>, address: usize) -> Option<&Entry<T>> {
    let mut found = None;
    while let Some(at) = node {
        at.probe.touch();
        if at.entry.start <= address {
            found = Some(&*at.entry);
            node = at.right.as_deref();
        } else {
            node = at.left.as_deref();
        }
    }
    found
}

/// Trees that were unpublished and may still be looked at. Belongs to the thread that changes the
/// table.
pub(crate) struct UnpublishedTrees<T> {
    roots: Vec<Arc<Node<T>>>,
}

impl<T> UnpublishedTrees<T> {
    pub(crate) const fn new() -> Self {
        Self { roots: Vec::new() }
    }
}

pub(crate) struct Table<T> {
    /// The published tree, or null; one count of its `Arc` is held here.
    root: AtomicPtr<Node<T>>,
    lookups: Readers,
}

impl<T: Send + Sync> Table<T> {
    constant! {
        /// An empty table.
        fn new() -> Self {
            Self { root: AtomicPtr::new(std::ptr::null_mut()), lookups: Readers::new() }
        }
    }

    /// Calls `body` with the value that `address` belongs to. May be called in a signal handler.
    pub(crate) fn with<R>(
        &self,
        address: usize,
        generation: u32,
        body: impl FnOnce(&T) -> R,
    ) -> Option<R> {
        self.lookups.enter(generation);
        // SAFETY: a published tree is freed only after it was unpublished and `lookups` was seen at
        // zero; we are counted, and see the trees published before that.
        let root = unsafe { self.root.load(Ordering::Acquire).as_ref() };
        let entry = last_at(root, address)
            .filter(|entry| address < entry.end && entry.users.enter(generation))
            .map(std::ptr::from_ref);
        self.lookups.leave();
        // SAFETY: counted among its users before the lookup ended, so it is not closed so far, and
        // the closing thread waits for us before it releases the entry or its value.
        let entry = unsafe { &*entry? };
        // SAFETY: the value of an entry with users is never changed.
        let result = unsafe { &*entry.value.get() }.as_ref().map(body);
        entry.users.leave();
        result
    }

    /// Adds `start .. end`; `None` where it overlaps a range that is there. `unpublished` is the
    /// one of this process, and its lock serialises changes.
    pub(crate) fn insert(
        &self,
        unpublished: &mut UnpublishedTrees<T>,
        generation: u32,
        (start, end): (usize, usize),
        value: T,
    ) -> Option<EntryGuard<T>> {
        let root = self.published();
        if last_at(root.as_deref(), end - 1).is_some_and(|last| last.end > start) {
            return None;
        }
        let value = UnsafeCell::new(Some(value));
        let entry = Arc::new(Entry { start, end, users: Readers::new(), value });
        self.publish(unpublished, generation, insert(&root, entry.clone()));
        Some(EntryGuard(entry))
    }

    /// Removes an entry; later lookups do not find it. Earlier users may still use it: see
    /// [`EntryGuard::close`].
    pub(crate) fn remove(
        &self,
        unpublished: &mut UnpublishedTrees<T>,
        generation: u32,
        held: &EntryGuard<T>,
    ) {
        let root = self.published();
        self.publish(unpublished, generation, without(&root, held.0.start));
    }

    /// The published tree. Only for the thread that may change it.
    fn published(&self) -> Link<T> {
        let root = self.root.load(Ordering::Acquire);
        if root.is_null() {
            return None;
        }
        // SAFETY: `root` holds a count of an `Arc`, and only our caller could take it away.
        unsafe {
            Arc::increment_strong_count(root);
            Some(Arc::from_raw(root))
        }
    }

    fn publish(&self, unpublished: &mut UnpublishedTrees<T>, generation: u32, root: Link<T>) {
        let new = root.map_or(std::ptr::null_mut(), |root| Arc::into_raw(root).cast_mut());
        let old = self.root.swap(new, Ordering::AcqRel);
        if !old.is_null() {
            // SAFETY: the count that `root` held for the previous tree is ours now.
            unpublished.roots.push(unsafe { Arc::from_raw(old) });
        }
        if self.lookups.none(generation) {
            unpublished.roots.clear();
        }
    }
}
