//! A buddy allocator over page indices: free blocks of one kind, merged with their neighbours.
//!
//! A free block of order k is naturally aligned, and merges with its buddy (the block that differs
//! from it in bit k) as soon as both are free. Taking and giving cost a few list operations per
//! order. Lists are last-in-first-out, so that a take returns the memory most likely still in the
//! caches. After construction nothing allocates, so that a fault handler may use it.
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

/// The record for each place where a block can begin.
#[derive(Debug)]
struct Level {
    /// Base-two logarithm of the distance between places, in pages.
    shift: u32,
    links: Box<[Link]>,
    /// Order of the free block that begins at each place, or [`NOT_FREE`].
    orders: Box<[u8]>,
}

impl Level {
    fn new(pages: usize, shift: u32) -> Self {
        let places = pages.div_ceil(1 << shift);
        Self {
            shift,
            links: vec![Link { next: NONE, previous: NONE }; places].into(),
            orders: vec![NOT_FREE; places].into(),
        }
    }

    fn place(&self, start: u32) -> usize {
        (start >> self.shift) as usize
    }
}

/// Free blocks.
#[derive(Debug)]
pub(crate) struct Buddy {
    /// First free block of each order.
    heads: [u32; ORDERS],
    /// Bit k is set when order k has a free block.
    present: u32,
    /// Blocks below 2 MiB.
    small: Level,
    /// Blocks of 2 MiB and more, apart from the others so that their words share cache lines: a
    /// large request that finds the caches cold reads a few lines, not one for every block.
    large: Level,
    free: usize,
}

impl Buddy {
    /// An allocator over pages `0 .. pages` with none of them free.
    pub(crate) fn new(pages: usize) -> Self {
        Self {
            heads: [NONE; ORDERS],
            present: 0,
            small: Level::new(pages, 0),
            large: Level::new(pages, Order::HUGE.index() as u32),
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

    fn level(&mut self, order: Order) -> &mut Level {
        if order < Order::HUGE { &mut self.small } else { &mut self.large }
    }

    /// Whether a free block of exactly this order begins exactly here.
    fn is_free(&self, block: Block) -> bool {
        let level = if block.order < Order::HUGE { &self.small } else { &self.large };
        level.orders.get(level.place(block.start)) == Some(&(block.order.index() as u8))
    }

    fn push(&mut self, block: Block) {
        let order = block.order.index();
        let head = self.heads[order];
        let level = self.level(block.order);
        let place = level.place(block.start);
        level.links[place] = Link { next: head, previous: NONE };
        level.orders[place] = order as u8;
        if head != NONE {
            let next = level.place(head);
            level.links[next].previous = block.start;
        }
        self.heads[order] = block.start;
        self.present |= 1 << order;
    }

    fn unlink(&mut self, block: Block) {
        let order = block.order.index();
        let level = self.level(block.order);
        let place = level.place(block.start);
        let Link { next, previous } = level.links[place];
        level.orders[place] = NOT_FREE;
        if next != NONE {
            let after = level.place(next);
            level.links[after].previous = previous;
        }
        if previous != NONE {
            let before = level.place(previous);
            level.links[before].next = next;
            return;
        }
        self.heads[order] = next;
        if next == NONE {
            self.present &= !(1 << order);
        }
    }

    /// Frees a block, merging it as far as its buddies allow.
    ///
    /// # Panics
    /// If it is already free: a double free must stop here.
    pub(crate) fn give(&mut self, mut block: Block) {
        self.free += block.pages();
        assert!(!self.is_free(block), "block {block:?} given twice");
        while block.order < Order::MAX {
            let buddy = Block { start: block.start ^ block.pages() as u32, order: block.order };
            if !self.is_free(buddy) {
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
        // The lowest part is the one kept.
        let wanted = Block { start: whole.start, order };
        self.carve(whole, wanted);
        Some(wanted)
    }

    /// Takes this very block, if all of it is free in one piece.
    pub(crate) fn take_at(&mut self, wanted: Block) -> Option<Block> {
        for power in wanted.order.index()..ORDERS {
            let order = Order::new(power as u8);
            let start = wanted.start & !(order.pages() as u32 - 1);
            let whole = Block { start, order };
            if self.is_free(whole) {
                self.carve(whole, wanted);
                return Some(wanted);
            }
        }
        None
    }

    /// Takes `wanted` out of the free block `whole`, which holds it; the rest stays free.
    fn carve(&mut self, whole: Block, wanted: Block) {
        self.unlink(whole);
        self.free -= wanted.pages();
        let mut start = whole.start;
        for power in (wanted.order.index()..whole.order.index()).rev() {
            let half = Order::new(power as u8);
            let upper = start + half.pages() as u32;
            let other =
                if wanted.start < upper { upper } else { std::mem::replace(&mut start, upper) };
            self.push(Block { start: other, order: half });
        }
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
                let block = Block { start: at, order: Order::new(power as u8) };
                assert!(self.is_free(block));
                blocks.push(block);
                let level = if block.order < Order::HUGE { &self.small } else { &self.large };
                at = level.links[level.place(at)].next;
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

    // The interpreter is some thousand times slower.
    const MOST_PAGES: usize = if cfg!(miri) { 24 } else { 2500 };
    const MOST_STEPS: usize = if cfg!(miri) { 8 } else { 60 };

    /// The invariant of the free list: a set of free pages, and every possible merge done.
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
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 128 }))]

        #[test]
        fn any_sequence_of_takes_and_gives_matches_a_set_of_pages(
            pages in 1usize..MOST_PAGES,
            steps in proptest::collection::vec((any::<bool>(), 0u8..12, any::<usize>()), 1..MOST_STEPS),
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
                    let place = Block::new(pick % pages / order.pages() * order.pages(), order);
                    let (possible, taken) = match pick % 3 {
                        0 => (buddy.blocks().iter().any(|b| b.order >= order), buddy.take(order)),
                        1 => (
                            buddy.blocks().iter().any(|b| b.order >= order),
                            buddy.take_between(order, order),
                        ),
                        _ => (
                            (place.range().start..place.range().end()).all(|p| model.contains(&p)),
                            buddy.take_at(place),
                        ),
                    };
                    prop_assert_eq!(taken.is_some(), possible);
                    if pick % 3 == 2 && possible {
                        prop_assert_eq!(taken, Some(place));
                    }
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
