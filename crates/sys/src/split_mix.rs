//! SplitMix64 (Steele, Lea and Flood, 2014): one seed, one sequence, on every machine.
//!
//! It spreads keys, chooses among hosts and drives tests. It is not for secrets: `random` is.

/// The numbers of one seed.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The sequence of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub const fn next_word(&mut self) -> u64 {
        let word = mix(self.0);
        self.0 = self.0.wrapping_add(STEP);
        word
    }

    /// A number below `bound`; 0 if that is 0.
    pub const fn below(&mut self, bound: usize) -> usize {
        let bound = if bound == 0 { 1 } else { bound };
        (self.next_word() % bound as u64) as usize
    }
}

/// The distance of two states.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The number that follows the state `word`.
pub(crate) const fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_that_of_the_reference() {
        let mut random = SplitMix64::new(1_234_567);
        let drawn = [(); 3].map(|()| random.next_word());
        let reference =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(drawn, reference);
        assert_eq!((SplitMix64::new(7).below(0), SplitMix64::new(7).below(1)), (0, 0));
    }
}
