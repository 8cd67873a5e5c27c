//! The table of fault ranges under every interleaving that matters and the weak memory of the model
//! (loom): a lookup never sees a freed node, a handler never runs on a value that was taken out,
//! and counts from before a fork are void.
#![cfg(not(miri))]
// The modules are compiled a second time here, and the model does not use all of them.
#![allow(dead_code, unreachable_pub, clippy::duplicate_mod)]

#[path = "../src/linux/fault/readers.rs"]
mod readers;
#[path = "../src/split_mix.rs"]
mod split_mix;
#[path = "../src/linux/fault/table.rs"]
mod table;

/// The model's atomics in place of the real ones.
mod sync {
    use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

    pub(crate) fn wake_waiters() {}

    pub(crate) fn wait_for_leavers(done: impl Fn() -> bool) {
        while !done() {
            loom::thread::yield_now();
        }
    }

    /// Memory whose reads and release loom checks to be ordered.
    pub(crate) struct Probe(UnsafeCell<()>);

    impl Probe {
        pub(crate) fn new() -> Self {
            Self(UnsafeCell::new(()))
        }

        pub(crate) fn touch(&self) {
            self.0.with(|_| ());
        }
    }

    impl Drop for Probe {
        fn drop(&mut self) {
            self.0.with_mut(|_| ());
        }
    }

    // SAFETY: loom checks the accesses; that is the test.
    unsafe impl Sync for Probe {}
    // SAFETY: as above.
    unsafe impl Send for Probe {}

    macro_rules! constant {
        ($(#[$doc:meta])* fn new() -> Self $body:block) => {
            $(#[$doc])*
            pub(crate) fn new() -> Self $body
        };
    }
    pub(crate) use constant;
}

use loom::sync::{Arc, Mutex};
use readers::Readers;
use sync::Probe;
use table::{Table, UnpublishedTrees};

const GENERATION: u32 = 1;

struct World {
    table: Table<Probe>,
    changes: Mutex<UnpublishedTrees<Probe>>,
}

impl World {
    fn new() -> Self {
        Self { table: Table::new(), changes: Mutex::new(UnpublishedTrees::new()) }
    }

    fn add(&self, start: usize) -> table::EntryGuard<Probe> {
        let mut changes = self.changes.lock().unwrap();
        let range = (start, start + 10);
        self.table.insert(&mut changes, GENERATION, range, Probe::new()).unwrap()
    }

    fn take_out(&self, held: table::EntryGuard<Probe>) {
        self.table.remove(&mut self.changes.lock().unwrap(), GENERATION, &held);
        drop(held.close(GENERATION).unwrap());
    }

    fn look(&self, address: usize) -> bool {
        self.table.with(address, GENERATION, Probe::touch).is_some()
    }
}

#[test]
fn a_lookup_finds_what_is_there_and_never_what_was_freed() {
    loom::model(|| {
        let world = Arc::new(World::new());
        let first = world.add(10);
        let kept = world.add(30);
        let reader = {
            let world = world.clone();
            loom::thread::spawn(move || {
                world.look(15);
                assert!(world.look(35), "it is there all the time");
            })
        };
        world.take_out(first);
        assert!(!world.look(15));
        // Frees the nodes that the removal could not.
        let last = world.add(50);
        reader.join().unwrap();
        for held in [kept, last] {
            world.take_out(held);
        }
    });
}

#[test]
fn two_who_change_the_table_lose_nothing() {
    loom::model(|| {
        let world = Arc::new(World::new());
        let first = world.add(10);
        let other = {
            let world = world.clone();
            loom::thread::spawn(move || world.add(30))
        };
        world.take_out(first);
        let second = other.join().unwrap();
        assert!(world.look(35) && !world.look(15));
        world.take_out(second);
    });
}

#[test]
fn a_count_left_by_a_fork_counts_no_reader() {
    // Three threads that exchange in a loop: every interleaving with at most two preemptions.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let readers = Arc::new(Readers::new());
        // Two threads of the parent, which the child does not have.
        assert!(readers.enter(1) && readers.enter(1));
        let inside = Arc::new(Probe::new());
        let others: Vec<_> = (0..2)
            .map(|_| {
                let (readers, inside) = (readers.clone(), inside.clone());
                loom::thread::spawn(move || {
                    if readers.enter(2) {
                        inside.touch();
                        readers.leave();
                    }
                })
            })
            .collect();
        readers.close(2);
        assert!(readers.none(2) || !readers.enter(2));
        for other in others {
            other.join().unwrap();
        }
        assert!(readers.none(2) && !readers.enter(2));
    });
}
