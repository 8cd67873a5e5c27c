//! Random numbers that are the same in every run.

use afresh_sys::SplitMix64;

/// One seed, one sequence, on every machine.
#[derive(Clone, Debug)]
pub struct Random(SplitMix64);

impl Random {
    /// The sequence of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    /// The next number.
    pub fn word(&mut self) -> u64 {
        self.0.next_word()
    }

    /// A number below `bound`; 0 when that is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of `items`, which must not be empty, and its index.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> (usize, &'a T) {
        let at = self.below(items.len());
        (at, &items[at])
    }

    /// Small numbers mostly, so that accesses are often in bounds.
    pub fn int(&mut self) -> u64 {
        let value = self.word();
        match value % 8 {
            0 => value,
            1 => value >> 48,
            _ => (value >> 32) % 16,
        }
    }
}
