//! A buddy allocator over page indices: free blocks of one kind, merged with their neighbours.
//!
//! A free block of order k is naturally aligned, and merges with its buddy (the block that differs
//! from it in bit k) as soon as both are free. Taking and giving cost a few list operations per
//! order. Lists are last-in-first-out, so that the memory handed out is the memory most likely still
//! in the caches. After construction nothing allocates, so that a fault handler may use it.
//!
//! The pool keeps three of these, one for clean, one for dirty, one for absent memory.

use crate::frame::{Block, Order};

const NONE: u32 = u32::MAX;
const ORDERS: usize = Order::MAX.index() + 1;
/// Marks a page that does not begin a free block.
const NOT_FREE: u8 = u8::MAX;

/// Neighbours of a free block in the list of its order.
#[derive(Clone, Copy, Debug)]
struct Link {
    next: u32,
    previous: u32,
}

/// Free blocks.
#[derive(Debug)]
pub(crate) struct Buddy {
    /// First free block of each order.
    heads: [u32; ORDERS],
    /// Bit k is set when order k has a free block.
    present: u32,
    links: Box<[Link]>,
    /// Order of the free block that begins at each page, or [`NOT_FREE`].
    orders: Box<[u8]>,
    free: usize,
}

impl Buddy {
    /// An allocator over pages `0 .. pages` with none of them free.
    pub(crate) fn new(pages: usize) -> Self {
        Self {
            heads: [NONE; ORDERS],
            present: 0,
            links: vec![Link { next: NONE, previous: NONE }; pages].into(),
            orders: vec![NOT_FREE; pages].into(),
            free: 0,
        }
    }

    /// Number of free pages.
    pub(crate) fn free_pages(&self) -> usize {
        self.free
    }

    /// Order of the largest free block.
    pub(crate) fn largest(&self) -> Option<Order> {
        self.present.checked_ilog2().map(|order| Order::new(order as u8))
    }

    fn push(&mut self, block: Block) {
        let (start, order) = (block.start as usize, block.order.index());
        let head = self.heads[order];
        self.links[start] = Link { next: head, previous: NONE };
        if head != NONE {
            self.links[head as usize].previous = block.start;
        }
        self.heads[order] = block.start;
        self.orders[start] = order as u8;
        self.present |= 1 << order;
    }

    fn unlink(&mut self, block: Block) {
        let (start, order) = (block.start as usize, block.order.index());
        let Link { next, previous } = self.links[start];
        match previous {
            NONE => self.heads[order] = next,
            previous => self.links[previous as usize].next = next,
        }
        if next != NONE {
            self.links[next as usize].previous = previous;
        }
        if self.heads[order] == NONE {
            self.present &= !(1 << order);
        }
        self.orders[start] = NOT_FREE;
    }

    /// Frees a block, merging it as far as its buddies allow.
    ///
    /// # Panics
    /// If part of it is free already: handing memory out twice must not go on.
    pub(crate) fn give(&mut self, mut block: Block) {
        self.free += block.pages();
        assert!(self.orders[block.start as usize] == NOT_FREE, "block {block:?} given twice");
        while block.order < Order::MAX {
            let buddy = Block { start: block.start ^ block.pages() as u32, order: block.order };
            if self.orders.get(buddy.start as usize) != Some(&(block.order.index() as u8)) {
                break;
            }
            self.unlink(buddy);
            let order = Order::new(block.order.index() as u8 + 1);
            block = Block { start: block.start.min(buddy.start), order };
        }
        self.push(block);
    }

    /// Takes a block of exactly `order`, splitting the smallest larger one.
    pub(crate) fn take(&mut self, order: Order) -> Option<Block> {
        let fitting = self.present >> order.index();
        if fitting == 0 {
            return None;
        }
        let found = Order::new(order.index() as u8 + fitting.trailing_zeros() as u8);
        let whole = Block { start: self.heads[found.index()], order: found };
        self.unlink(whole);
        self.free -= order.pages();
        // The lower half is kept at every step; the upper ones go back.
        for power in (order.index()..found.index()).rev() {
            let half = Order::new(power as u8);
            self.push(Block { start: whole.start + half.pages() as u32, order: half });
        }
        Some(Block { start: whole.start, order })
    }

    /// Takes a block of at most `largest` and at least `smallest`: the largest there is.
    pub(crate) fn take_between(&mut self, smallest: Order, largest: Order) -> Option<Block> {
        let best = self.largest()?.min(largest);
        if best < smallest { None } else { self.take(best) }
    }

    /// Every free block, by order and then list; for tests and checks.
    #[cfg(test)]
    pub(crate) fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        for power in 0..ORDERS {
            let mut at = self.heads[power];
            while at != NONE {
                blocks.push(Block { start: at, order: Order::new(power as u8) });
                at = self.links[at as usize].next;
            }
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// What the free list means: a set of free pages, and every possible merge done.
    fn check(buddy: &Buddy, model: &BTreeSet<usize>) {
        let blocks = buddy.blocks();
        let mut pages = BTreeSet::new();
        for block in &blocks {
            assert_eq!(block.start as usize % block.pages(), 0);
            for page in block.range().start..block.range().end() {
                assert!(pages.insert(page), "page {page} is in two free blocks");
            }
            let twin = Block { start: block.start ^ block.pages() as u32, order: block.order };
            assert!(
                block.order == Order::MAX || !blocks.contains(&twin),
                "{block:?} not merged with its buddy"
            );
        }
        assert_eq!(&pages, model);
        assert_eq!(buddy.free_pages(), model.len());
        assert_eq!(buddy.largest(), blocks.iter().map(|b| b.order).max());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 128 }))]

        #[test]
        fn any_sequence_of_takes_and_gives_matches_a_set_of_pages(
            pages in 1usize..700,
            steps in proptest::collection::vec((any::<bool>(), 0u8..11, any::<usize>()), 1..200),
        ) {
            let mut buddy = Buddy::new(pages);
            let mut model = BTreeSet::new();
            for page in 0..pages {
                buddy.give(Block::new(page, Order::PAGE));
                model.insert(page);
            }
            check(&buddy, &model);
            let mut held: Vec<Block> = Vec::new();
            for (take, power, pick) in steps {
                if take {
                    let order = Order::new(power);
                    let possible = buddy.blocks().iter().any(|b| b.order >= order);
                    let taken = if pick % 2 == 0 {
                        buddy.take(order)
                    } else {
                        buddy.take_between(order, order)
                    };
                    prop_assert_eq!(taken.is_some(), possible);
                    if let Some(block) = taken {
                        for page in block.range().start..block.range().end() {
                            prop_assert!(model.remove(&page), "page {} handed out twice", page);
                        }
                        held.push(block);
                    }
                } else if !held.is_empty() {
                    let block = held.swap_remove(pick % held.len());
                    // Part by part, as a caller that split the block gives it back.
                    for piece in block.pieces(Order::new(power)) {
                        buddy.give(piece);
                    }
                    model.extend(block.range().start..block.range().end());
                }
                check(&buddy, &model);
            }
            for block in held {
                buddy.give(block);
                model.extend(block.range().start..block.range().end());
            }
            check(&buddy, &model);
            prop_assert_eq!(model.len(), pages);
        }
    }

    #[test]
    fn the_largest_block_up_to_the_wish_is_taken_and_smaller_than_the_least_is_refused() {
        let mut buddy = Buddy::new(64);
        buddy.give(Block::new(0, Order::new(3)));
        buddy.give(Block::new(32, Order::new(5)));
        assert_eq!(buddy.take_between(Order::PAGE, Order::new(9)).unwrap().pages(), 32);
        assert_eq!(buddy.take_between(Order::PAGE, Order::new(9)).unwrap().pages(), 8);
        buddy.give(Block::new(0, Order::new(3)));
        assert_eq!(buddy.take_between(Order::new(4), Order::new(9)), None);
    }

    #[test]
    #[should_panic(expected = "given twice")]
    fn giving_a_block_twice_is_noticed() {
        let mut buddy = Buddy::new(8);
        buddy.give(Block::new(4, Order::new(1)));
        buddy.give(Block::new(4, Order::new(1)));
    }
}
