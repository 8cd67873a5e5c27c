//! The idle items of a pool and the threads that wait for one, under every interleaving and the
//! weak memory of the model (loom): an item has one owner at any time, its owner sees what the last
//! one wrote, and no thread waits while an item is idle. A missed wake-up is a deadlock, which loom
//! reports.
#![cfg(not(miri))]
// The modules are compiled a second time here, and the model does not use all of them.
#![allow(dead_code, unreachable_pub, missing_docs)]

#[path = "../src/gate.rs"]
mod gate;
#[path = "../src/shard.rs"]
mod shard;

/// The model's atomics and locks in place of the real ones.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, fence};
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use loom::sync::{Mutex as InheritedMutex, MutexGuard as InheritedMutexGuard};

    pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }

    pub(crate) fn locked_here<T>(mutex: &InheritedMutex<T>) -> InheritedMutexGuard<'_, T> {
        mutex.lock().unwrap()
    }

    /// loom treats `SeqCst` accesses as acquire and release, and models the fence only.
    pub(crate) fn between_return_and_look() {
        fence(Ordering::SeqCst);
    }
}

use std::task::{Wake, Waker};

use gate::{Gate, Turn};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Notify};
use shard::{IdleItem, Shard};

/// Counts of resets, which the model does not use.
#[derive(Default)]
pub struct ResetStats;

/// The methods of the trait that shards use.
pub trait Recycle {
    /// The kind of work that the item is warm for.
    fn key(&self) -> usize;
}

/// An item whose memory loom checks for accesses without an order.
struct Item {
    key: usize,
    memory: UnsafeCell<u32>,
}

impl Recycle for Item {
    fn key(&self) -> usize {
        self.key
    }
}

/// Wakes a task of the model, which is a thread of it.
struct Alarm(Notify);

impl Wake for Alarm {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.notify();
    }
}

/// A pool with one shard.
struct World {
    shard: Shard<Item>,
    gate: Gate,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self { shard: Shard::default(), gate: Gate::new() })
    }

    fn put(&self, idle: Box<IdleItem<Item>>) {
        self.shard.put(idle);
        self.gate.signal();
    }

    fn try_take(&self, key: usize) -> Option<Box<IdleItem<Item>>> {
        self.shard.take(key, || self.gate.signal())
    }

    /// Takes an item of `key`, and waits for one without a deadline.
    fn take(&self, key: usize) -> Box<IdleItem<Item>> {
        loop {
            if let Some(idle) = self.try_take(key) {
                return idle;
            }
            assert!(self.gate.wait(None, || !self.shard.is_empty()));
        }
    }

    /// Takes an item of `key` as a task does.
    fn take_as_task(&self, key: usize) -> Box<IdleItem<Item>> {
        let alarm = std::sync::Arc::new(Alarm(Notify::new()));
        let (waker, mut turn) = (Waker::from(alarm.clone()), Turn::default());
        loop {
            if let Some(idle) = self.try_take(key) {
                self.gate.leave(&mut turn, || !self.shard.is_empty());
                return idle;
            }
            while !self.gate.poll(&mut turn, &waker, || !self.shard.is_empty()) {
                alarm.0.wait();
            }
        }
    }
}

fn item(key: usize) -> Box<IdleItem<Item>> {
    Box::new(IdleItem {
        item: Item { key, memory: UnsafeCell::new(0) },
        resident: 0,
        mappings: 0,
        since: 0,
        stamp: 0,
        resets: ResetStats,
        generation: 0,
    })
}

fn write(idle: &IdleItem<Item>) {
    // SAFETY: loom checks that accesses are ordered, which is the purpose of the test.
    idle.item.memory.with_mut(|value| unsafe { *value += 1 });
}

#[test]
fn a_thread_that_waits_gets_the_item_that_comes_back() {
    loom::model(|| {
        let world = World::new();
        let other = {
            let world = world.clone();
            loom::thread::spawn(move || write(&world.take(1)))
        };
        let idle = item(1);
        write(&idle);
        world.put(idle);
        other.join().unwrap();
    });
}

#[test]
fn a_task_that_waits_gets_the_item_that_comes_back() {
    loom::model(|| {
        let world = World::new();
        let other = {
            let world = world.clone();
            loom::thread::spawn(move || write(&world.take_as_task(1)))
        };
        let idle = item(1);
        write(&idle);
        world.put(idle);
        other.join().unwrap();
    });
}

#[test]
fn a_task_that_leaves_wakes_the_next_one() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let world = World::new();
        let alarm = std::sync::Arc::new(Alarm(Notify::new()));
        let (waker, mut turn) = (Waker::from(alarm), Turn::default());
        let waits = !world.gate.poll(&mut turn, &waker, || !world.shard.is_empty());
        assert!(waits);
        let other = {
            let world = world.clone();
            loom::thread::spawn(move || drop(world.take_as_task(1)))
        };
        world.put(item(1));
        world.gate.leave(&mut turn, || !world.shard.is_empty());
        other.join().unwrap();
    });
}

/// Another task waits while a task that was woken leaves without an attempt.
fn leave_after_the_turn(polls: impl Fn(&World, &mut Turn, &Waker) + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let world = World::new();
        let alarm = std::sync::Arc::new(Alarm(Notify::new()));
        let (waker, mut turn) = (Waker::from(alarm), Turn::default());
        assert!(!world.gate.poll(&mut turn, &waker, || !world.shard.is_empty()));
        let other = {
            let world = world.clone();
            loom::thread::spawn(move || drop(world.take_as_task(1)))
        };
        world.put(item(1));
        polls(&world, &mut turn, &waker);
        world.gate.leave(&mut turn, || !world.shard.is_empty());
        other.join().unwrap();
    });
}

#[test]
fn a_task_that_leaves_between_its_turn_and_its_attempt_wakes_the_next_one() {
    leave_after_the_turn(|world, turn, waker| {
        // The other task may have been faster.
        world.gate.poll(turn, waker, || !world.shard.is_empty());
    });
}

#[test]
fn a_task_that_leaves_after_any_number_of_turns_wakes_the_next_one() {
    leave_after_the_turn(|world, turn, waker| {
        for _ in 0..2 {
            world.gate.poll(turn, waker, || !world.shard.is_empty());
        }
    });
}

#[test]
fn an_item_that_was_out_for_a_request_with_another_key_is_found() {
    loom::model(|| {
        let world = World::new();
        world.put(item(1));
        let other = {
            let world = world.clone();
            loom::thread::spawn(move || drop(world.take(1)))
        };
        assert!(world.try_take(2).is_none());
        other.join().unwrap();
    });
}

#[test]
fn two_threads_share_two_items() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let world = World::new();
        world.put(item(1));
        let other = {
            let world = world.clone();
            loom::thread::spawn(move || {
                let idle = world.take(1);
                write(&idle);
                world.put(idle);
            })
        };
        world.put(item(1));
        let idle = world.take(1);
        write(&idle);
        world.put(idle);
        other.join().unwrap();
        assert!(world.try_take(1).is_some() && world.try_take(1).is_some());
        assert!(world.try_take(1).is_none());
    });
}
