//! A small random generator that the host can reseed.
//!
//! Xoroshiro128+ (Blackman and Vigna, 2018): 128 bits of state, enough for `Math.random()` and its
//! like, and no more secure than they are. It promises that equal states draw equal numbers, so two
//! clones of a snapshot agree until they are reseeded.

/// Xoroshiro128+ generator.
#[derive(Clone, Debug)]
pub struct Random {
    state: [u64; 2],
}

/// SplitMix64, which the authors of xoroshiro recommend. A guest cannot use the copy of the host.
const fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Random {
    /// A generator seeded with 128 bits. Every seed is allowed, zero included.
    pub const fn new(lo: u64, hi: u64) -> Self {
        let state = [mix(lo), mix(mix(hi) ^ lo)];
        // The all-zero state is the only one that xoroshiro never leaves.
        if state[0] | state[1] == 0 { Self { state: [1, 0] } } else { Self { state } }
    }

    /// The next 64 bits.
    pub const fn next_u64(&mut self) -> u64 {
        let [s0, mut s1] = self.state;
        let drawn = s0.wrapping_add(s1);
        s1 ^= s0;
        self.state = [s0.rotate_left(24) ^ s1 ^ (s1 << 16), s1.rotate_left(37)];
        drawn
    }

    /// A number in `[0, 1)` with 53 random bits.
    pub const fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn equal_seeds_draw_equal_numbers_and_other_seeds_do_not() {
        let draw = |lo, hi| {
            let mut random = Random::new(lo, hi);
            std::array::from_fn::<u64, 8, _>(|_| random.next_u64())
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        for (lo, hi) in [(0, 0), (2, 1), (1, 3), (0, 2), (u64::MAX, u64::MAX)] {
            assert_ne!(draw(1, 2), draw(lo, hi), "seed {lo}, {hi}");
        }
    }

    #[test]
    fn numbers_lie_in_the_unit_interval_and_spread_over_it() {
        let mut random = Random::new(0, 0);
        let mut tenths = [0u32; 10];
        for _ in 0..10_000 {
            let x = random.next_f64();
            assert!((0.0..1.0).contains(&x), "{x}");
            tenths[(x * 10.0) as usize] += 1;
        }
        for (tenth, count) in tenths.iter().enumerate() {
            assert!((800..1200).contains(count), "tenth {tenth} drawn {count} times of 10000");
        }
    }
}
