//! Random numbers that are the same in every run.

/// SplitMix64: one seed, one sequence, on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 when that is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.word() % bound.max(1) as u64) as usize
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
