//! The hand-over between takers and the zeroing thread, under every interleaving that matters and
//! the weak memory of the model (loom): a block has one owner at any time, and the zeroes are
//! visible to its next owner.
#![cfg(not(miri))]
// The module is compiled a second time here, and the model does not use all of it.
#![allow(dead_code, unreachable_pub)]

#[path = "../src/frame.rs"]
mod frame;
#[path = "../src/handoff.rs"]
mod handoff;

/// The model's atomics in place of the real ones.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
}

use frame::{Block, Order};
use handoff::{Handoff, Outcome};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};

/// Two blocks' memory; loom fails the test on any access that is not ordered after the last.
struct World {
    handoff: Handoff<2>,
    memory: [UnsafeCell<u32>; 2],
    lock: Mutex<()>,
}

impl World {
    fn write(&self, block: Block, value: u32) {
        // SAFETY: loom checks that accesses are ordered, which is the purpose of the test.
        self.memory[block.start as usize].with_mut(|p| unsafe { *p = value });
    }

    fn read(&self, block: Block) -> u32 {
        // SAFETY: as above.
        self.memory[block.start as usize].with(|p| unsafe { *p })
    }
}

fn world() -> Arc<World> {
    Arc::new(World {
        handoff: Handoff::new(),
        memory: std::array::from_fn(|_| UnsafeCell::new(0)),
        lock: Mutex::new(()),
    })
}

/// The zeroing thread with at most two blocks.
fn zeroer(world: &World) {
    for _ in 0..2 {
        if let Some(claim) = world.handoff.claim() {
            world.write(claim.block, 0);
            world.handoff.finish(claim, Outcome::Clean);
        }
    }
}

#[test]
fn a_harvested_block_is_seen_zero_and_a_reclaimed_one_is_the_takers_alone() {
    loom::model(|| {
        let world = world();
        let blocks = [0, 1].map(|page| Block::new(page, Order::PAGE));
        for block in blocks {
            world.write(block, 7);
            world.handoff.offer(block).unwrap();
        }
        let other = world.clone();
        let thread = loom::thread::spawn(move || zeroer(&other));
        let mut back = 0;
        let guard = world.lock.lock().unwrap();
        if let Some(block) = world.handoff.reclaim(Order::PAGE) {
            assert_eq!(world.read(block), 7);
            world.write(block, 9);
            back += 1;
        }
        world.handoff.harvest(|block, outcome| {
            assert_eq!((outcome, world.read(block)), (Outcome::Clean, 0));
            world.write(block, 9);
            back += 1;
        });
        drop(guard);
        thread.join().unwrap();
        world.handoff.harvest(|block, _| {
            assert_eq!(world.read(block), 0);
            back += 1;
        });
        while let Some(block) = world.handoff.reclaim(Order::PAGE) {
            assert_eq!(world.read(block), 7);
            back += 1;
        }
        assert_eq!((back, world.handoff.pages()), (2, 0));
    });
}

#[test]
fn a_slot_used_again_at_once_never_confuses_two_blocks() {
    loom::model(|| {
        let world = world();
        let first = Block::new(0, Order::PAGE);
        world.write(first, 7);
        world.handoff.offer(first).unwrap();
        let other = world.clone();
        let thread = loom::thread::spawn(move || zeroer(&other));
        // Whether it comes back claimed or not, the same block goes in again.
        let mut mine = world.handoff.reclaim(Order::PAGE);
        world.handoff.harvest(|block, _| mine = Some(block));
        if let Some(block) = mine {
            world.write(block, 8);
            world.handoff.offer(block).unwrap();
        }
        thread.join().unwrap();
        let mut end = world.handoff.reclaim(Order::PAGE).map(|block| (block, false));
        world.handoff.harvest(|block, _| {
            assert!(end.is_none());
            end = Some((block, true));
        });
        let (block, clean) = end.expect("the block is somewhere");
        assert_eq!(world.read(block) == 0, clean);
    });
}
