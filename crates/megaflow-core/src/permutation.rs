//! A permutation of `0..len` that is computed and not stored.

/// Half rounds of the network: each changes one half by the other. Four suffice in theory for random round functions
/// (Luby and Rackoff, 1988); ours are weak ones on few bits, hence twice as many.
const HALF_ROUNDS: usize = 8;
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A keyed permutation of `0..len`: a Feistel network over the next power of two, walked along its cycle until it lands
/// inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, method 3).
///
/// It is a bijection for every key and length, costs the same at every length, and shuffles; it is no cipher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyedPermutation {
    len: u64,
    high_bits: u32,
    low_bits: u32,
    keys: [u64; HALF_ROUNDS],
}

impl KeyedPermutation {
    /// The permutation of `0..len` that `seed` and `stream` (an epoch, for example) choose.
    pub fn new(seed: u64, stream: u64, len: u64) -> Self {
        let bits = (u64::BITS - len.saturating_sub(1).leading_zeros()).max(2);
        let mut state = mix(seed ^ mix(stream.wrapping_add(GOLDEN)));
        let keys = std::array::from_fn(|_| {
            state = state.wrapping_add(GOLDEN);
            mix(state)
        });
        Self { len, high_bits: bits / 2, low_bits: bits - bits / 2, keys }
    }

    /// Number of positions.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no position.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where `position` goes. `position` is below [`len`](Self::len); a larger one gives no meaningful answer.
    #[inline]
    pub fn get(&self, position: u64) -> u64 {
        if self.len < 2 {
            return position;
        }
        let mut at = position;
        loop {
            at = self.network(at);
            // The domain is below twice the length, so fewer than two turns are expected.
            if at < self.len {
                return at;
            }
        }
    }

    #[inline]
    fn network(&self, at: u64) -> u64 {
        let (mut high, mut low) = (at >> self.low_bits, at & ones(self.low_bits));
        for keys in self.keys.chunks_exact(2) {
            high ^= mix(low ^ keys[0]) >> (u64::BITS - self.high_bits);
            low ^= mix(high ^ keys[1]) >> (u64::BITS - self.low_bits);
        }
        high << self.low_bits | low
    }
}

#[inline]
fn ones(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit.
#[inline]
pub fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_permuted() {
        for len in (0..200).chain([1 << 10, (1 << 10) + 1, 4097, 65_535]) {
            for seed in 0..3 {
                let permutation = KeyedPermutation::new(seed, 5, len);
                let mut images: Vec<u64> = (0..len).map(|at| permutation.get(at)).collect();
                images.sort_unstable();
                assert!(images.into_iter().eq(0..len), "length {len}, seed {seed}");
            }
        }
    }

    #[test]
    fn huge_lengths_stay_inside_and_differ() {
        for len in [u64::from(u32::MAX), 1 << 40, (1 << 62) + 12_345, u64::MAX] {
            let permutation = KeyedPermutation::new(1, 0, len);
            let images: std::collections::HashSet<u64> = (0..1000).map(|at| permutation.get(at)).collect();
            assert_eq!(images.len(), 1000);
            assert!(images.iter().all(|&image| image < len));
        }
    }

    #[test]
    fn places_are_uniform_over_keys() {
        // Each of 7 places takes each position once in 7 keys on average: chi-square of 6 degrees of freedom each.
        let (len, keys) = (7, 7000);
        for position in 0..len {
            let mut counts = [0f64; 7];
            (0..keys).for_each(|seed| counts[KeyedPermutation::new(seed, 0, len).get(position) as usize] += 1.0);
            let expected = keys as f64 / len as f64;
            let chi: f64 = counts.iter().map(|count| (count - expected).powi(2) / expected).sum();
            assert!(chi < 27.9, "position {position}: chi-square {chi}"); // exceeded once in 10,000
        }
    }

    #[test]
    fn neighbours_are_torn_apart() {
        // Differences of neighbours' images fall evenly into 16 parts of the range: no stretch of the order survives.
        let len = 1 << 20;
        let permutation = KeyedPermutation::new(42, 0, len);
        let mut counts = [0f64; 16];
        for at in 0..len - 1 {
            let difference = permutation.get(at + 1).wrapping_sub(permutation.get(at)) & (len - 1);
            counts[(difference >> 16) as usize] += 1.0;
        }
        let expected = (len - 1) as f64 / 16.0;
        let chi: f64 = counts.iter().map(|count| (count - expected).powi(2) / expected).sum();
        assert!(chi < 44.3, "chi-square {chi}"); // 15 degrees of freedom: exceeded once in 10,000
    }

    #[test]
    fn streams_and_seeds_give_other_orders() {
        let order = |seed, stream| -> Vec<u64> {
            let permutation = KeyedPermutation::new(seed, stream, 1000);
            (0..1000).map(|at| permutation.get(at)).collect()
        };
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_eq!(order(1, 0), order(1, 0));
    }
}
