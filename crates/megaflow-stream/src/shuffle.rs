//! Shuffles that depend on a key alone.

/// Domains of the keys, so that shards and windows do not share a shuffle.
pub(crate) const SHARDS: u64 = 1;
pub(crate) const WINDOW: u64 = 2;

/// SplitMix64: one state, well-mixed output; the finaliser of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
/// Generators" (OOPSLA 2014).
struct SplitMix64(u64);

impl SplitMix64 {
    fn of(parts: &[u64]) -> Self {
        let mut state = Self(0);
        for &part in parts {
            let mixed = state.next();
            state = Self(mixed ^ part);
        }
        state
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; the bias is below 2^-32 for any bound that fits into memory.
    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

/// Shuffles `items` by the key `parts` (Fisher and Yates).
pub(crate) fn shuffle<T>(items: &mut [T], parts: &[u64]) {
    let mut random = SplitMix64::of(parts);
    for last in (1..items.len()).rev() {
        items.swap(last, random.below(last + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(parts: &[u64]) -> Vec<usize> {
        let mut items: Vec<usize> = (0..50).collect();
        shuffle(&mut items, parts);
        items
    }

    #[test]
    fn the_key_alone_decides_and_every_part_counts() {
        let first = order(&[SHARDS, 1, 2]);
        assert_eq!(first, order(&[SHARDS, 1, 2]));
        for other in [[WINDOW, 1, 2], [SHARDS, 2, 2], [SHARDS, 1, 3], [SHARDS, 2, 1]] {
            assert_ne!(first, order(&other));
        }
        let mut sorted = first;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn every_item_reaches_every_place_equally_often() {
        let mut seen = [[0_u32; 6]; 6];
        for seed in 0..12_000 {
            let mut items = [0, 1, 2, 3, 4, 5];
            shuffle(&mut items, &[WINDOW, seed]);
            items.iter().enumerate().for_each(|(place, &item)| seen[item][place] += 1);
        }
        // 12,000 / 6 = 2,000 with a standard deviation of 41.
        assert!(seen.iter().flatten().all(|&count| (1_800..2_200).contains(&count)), "{seen:?}");
    }
}
