//! The hand-over with real threads; `tests/handoff_model.rs` has the model. Apart from the module,
//! which the model compiles with other atomics.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::frame::{Block, Order};
use crate::handoff::{Handoff, Outcome};

#[test]
fn a_block_that_was_not_claimed_can_be_reclaimed_and_a_claimed_one_can_not() {
    let handoff = Handoff::<128>::new();
    let block = Block::new(512, Order::HUGE);
    handoff.offer(block).unwrap();
    assert_eq!(handoff.reclaim(Order::new(10)), None);
    assert_eq!(handoff.reclaim(Order::PAGE), Some(block));
    handoff.offer(block).unwrap();
    let claim = handoff.claim().unwrap();
    assert_eq!(handoff.reclaim(Order::PAGE), None);
    assert_eq!(handoff.pages(), 512);
    handoff.finish(claim, Outcome::Clean);
    let mut got = Vec::new();
    handoff.harvest(|block, outcome| got.push((block, outcome)));
    assert_eq!(got, [(block, Outcome::Clean)]);
    assert_eq!(handoff.pages(), 0);
}

#[test]
fn a_full_queue_gives_the_block_back() {
    let handoff = Handoff::<128>::new();
    for page in 0..128 {
        handoff.offer(Block::new(page, Order::PAGE)).unwrap();
    }
    let more = Block::new(128, Order::PAGE);
    assert_eq!(handoff.offer(more), Err(more));
}

#[test]
fn under_contention_every_block_is_in_one_place_at_a_time() {
    let blocks = if cfg!(miri) { 8 } else { 64 };
    let rounds = if cfg!(miri) { 30 } else { 20_000 };
    let handoff = Handoff::<128>::new();
    let stop = AtomicBool::new(false);
    let lock = Mutex::new((0..blocks).map(|p| Block::new(p, Order::PAGE)).collect::<Vec<_>>());
    // One word a block: its present owner. A second owner is a failed exchange.
    let owned: Vec<AtomicBool> = (0..blocks).map(|_| AtomicBool::new(false)).collect();
    let own = |block: Block, from: bool| {
        let word = &owned[block.start as usize];
        assert!(
            word.compare_exchange(from, !from, Ordering::Relaxed, Ordering::Relaxed).is_ok(),
            "{block:?} has two owners"
        );
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if let Some(claim) = handoff.claim() {
                    own(claim.block, false);
                    own(claim.block, true);
                    handoff.finish(claim, Outcome::Clean);
                } else {
                    std::thread::yield_now();
                }
            }
        });
        let users: Vec<_> = (0..2)
            .map(|user| {
                let (lock, handoff, own) = (&lock, &handoff, &own);
                scope.spawn(move || {
                    for round in 0..rounds {
                        let mut free = lock.lock().unwrap();
                        handoff.harvest(|block, _| free.push(block));
                        if (round + user) % 3 == 0 {
                            free.extend(handoff.reclaim(Order::PAGE));
                        }
                        let mine = free.pop();
                        drop(free);
                        if let Some(block) = mine {
                            own(block, false);
                            own(block, true);
                            let _guard = lock.lock().unwrap();
                            handoff.offer(block).unwrap();
                        }
                    }
                })
            })
            .collect();
        let failed = users.into_iter().any(|user| user.join().is_err());
        stop.store(true, Ordering::Relaxed);
        assert!(!failed, "a user failed");
    });
    let mut free = lock.into_inner().unwrap();
    handoff.harvest(|block, _| free.push(block));
    while let Some(block) = handoff.reclaim(Order::PAGE) {
        free.push(block);
    }
    free.sort();
    let all: Vec<_> = (0..blocks).map(|p| Block::new(p, Order::PAGE)).collect();
    assert_eq!(free, all);
    assert_eq!(handoff.pages(), 0);
}
