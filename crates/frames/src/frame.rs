//! A frame: a block of physical memory of the pool, and, in its type, the state of its content.
//!
//! The three kinds are three types, and only the pool makes one of another: a [`DirtyFrame`]
//! becomes clean by being zeroed, a [`CleanFrame`] becomes dirty by being *used*, and an absent
//! one, which has no memory behind it, never leaves the pool. Memory can be reached through a used
//! frame only, so a clean list that holds a written page does not type-check.

use std::marker::PhantomData;

use afresh_sys::{HUGE_SIZE, PAGE_SIZE, PageRange};

/// Base-two logarithm of a block size in pages: 0 is 4 KiB, 9 is 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Order(u8);

impl Order {
    /// One page.
    pub const PAGE: Order = Order(0);
    /// A huge page: 2 MiB.
    pub const HUGE: Order = Order((HUGE_SIZE / PAGE_SIZE).trailing_zeros() as u8);
    /// The largest block the pool keeps in one piece: 1 GiB.
    pub const MAX: Order = Order(18);

    /// The order of a power, at most [`Order::MAX`].
    #[must_use]
    pub const fn new(power: u8) -> Order {
        if power > Self::MAX.0 { Self::MAX } else { Order(power) }
    }

    /// The largest order whose block fits in `pages` (which is at least one).
    #[must_use]
    pub const fn fitting(pages: usize) -> Order {
        match pages.checked_ilog2() {
            Some(power) => Order::new(power as u8),
            None => Order::PAGE,
        }
    }

    /// The smallest order whose block holds `pages`, or `None` past the largest.
    #[must_use]
    pub const fn holding(pages: usize) -> Option<Order> {
        match pages.checked_next_power_of_two() {
            Some(rounded) if rounded.trailing_zeros() <= Self::MAX.0 as u32 => {
                Some(Order(rounded.trailing_zeros() as u8))
            }
            _ => None,
        }
    }

    /// Pages in a block of this order.
    #[must_use]
    pub const fn pages(self) -> usize {
        1 << self.0
    }

    /// Index into a table with one entry an order.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A block of pool pages: naturally aligned, a power of two long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Block {
    pub(crate) start: u32,
    pub(crate) order: Order,
}

impl Block {
    pub(crate) fn new(start: usize, order: Order) -> Self {
        debug_assert!(start.is_multiple_of(order.pages()));
        Self { start: start as u32, order }
    }

    pub(crate) fn range(self) -> PageRange {
        PageRange::new(self.start as usize, self.order.pages())
    }

    pub(crate) fn pages(self) -> usize {
        self.order.pages()
    }

    /// The pieces of `order` that make up this block; the block itself when it is no larger.
    pub(crate) fn pieces(self, order: Order) -> impl Iterator<Item = Block> {
        let order = order.min(self.order);
        (0..self.pages() / order.pages())
            .map(move |i| Block::new(self.start as usize + i * order.pages(), order))
    }
}

/// Marks memory known to be zero throughout.
#[derive(Debug)]
pub enum Clean {}
/// Marks memory that may hold anything.
#[derive(Debug)]
pub enum Dirty {}

/// Memory owned by the holder of this value; `Kind` is the known state of its content.
///
/// Give it back with [`crate::Pool::give`] or [`crate::Pool::give_unused`]. A value that is dropped
/// instead never returns to the pool: memory is lost, never shared.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a frame that is not given back is lost to the pool"]
pub struct Frame<Kind> {
    pub(crate) block: Block,
    /// Which pool it came from: frames of one pool mean nothing to another.
    pub(crate) pool: u32,
    kind: PhantomData<fn() -> Kind>,
}

/// A frame known to be zero. It cannot be reached until it is made [`CleanFrame::used`].
///
/// ```compile_fail,E0308
/// # use afresh_frames::{Order, Pool, PoolOptions};
/// let pool = Pool::new(PoolOptions::inline(512)).unwrap();
/// let clean = pool.take(Order::PAGE).unwrap();
/// let start = pool.address(&clean); // only a used frame has an address
/// ```
///
/// ```compile_fail,E0308
/// # use afresh_frames::{Order, Pool, PoolOptions};
/// let pool = Pool::new(PoolOptions::inline(512)).unwrap();
/// let used = pool.take(Order::PAGE).unwrap().used();
/// pool.give_unused([used]); // what was used does not go back as clean
/// ```
pub type CleanFrame = Frame<Clean>;
/// A frame that its holder may read and write, so that nothing is known of its content.
pub type DirtyFrame = Frame<Dirty>;

impl<Kind> Frame<Kind> {
    pub(crate) fn new(block: Block, pool: u32) -> Self {
        Self { block, pool, kind: PhantomData }
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.block.pages()
    }

    /// Its order.
    #[must_use]
    pub fn order(&self) -> Order {
        self.block.order
    }

    /// Its pages in the pool file.
    #[must_use]
    pub fn file_range(&self) -> PageRange {
        self.block.range()
    }

    /// Splits it into frames of `order`, in order of address; itself when it is no larger.
    pub fn split(self, order: Order) -> impl Iterator<Item = Frame<Kind>> {
        let pool = self.pool;
        self.block.pieces(order).map(move |block| Frame::new(block, pool))
    }
}

impl CleanFrame {
    /// Gives up the knowledge that it is zero, in exchange for access.
    pub fn used(self) -> DirtyFrame {
        Frame::new(self.block, self.pool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_round_down_to_fit_and_up_to_hold() {
        assert_eq!(Order::HUGE.pages() * PAGE_SIZE, HUGE_SIZE);
        assert_eq!(Order::fitting(5).pages(), 4);
        assert_eq!(Order::holding(5).unwrap().pages(), 8);
        assert_eq!(Order::holding(usize::MAX), None);
        assert_eq!(Order::fitting(usize::MAX), Order::MAX);
    }

    #[test]
    fn a_split_frame_has_the_same_pages() {
        let frame: CleanFrame = Frame::new(Block::new(1024, Order::new(10)), 1);
        let parts: Vec<_> = frame.split(Order::HUGE).map(|f| f.file_range()).collect();
        assert_eq!(parts, [PageRange::new(1024, 512), PageRange::new(1536, 512)]);
    }
}
