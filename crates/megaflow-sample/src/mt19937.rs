//! The random numbers of `numpy.random.RandomState`, which Megatron's order is made of.

const WORDS: usize = 624;
const SHIFT: usize = 397;
/// Swaps whose partners are drawn, and fetched from memory, ahead of the swaps themselves.
const AHEAD: usize = 256;

/// The Mersenne twister with numpy's seeding by one integer.
#[derive(Clone)]
pub struct Mt19937 {
    state: [u32; WORDS],
    outputs: [u32; WORDS],
    next: usize,
}

impl Mt19937 {
    /// The generator of `numpy.random.RandomState(seed)`.
    pub fn new(seed: u32) -> Self {
        let mut state = [0; WORDS];
        state[0] = seed;
        for i in 1..WORDS {
            let previous: u32 = state[i - 1];
            state[i] = 1_812_433_253u32.wrapping_mul(previous ^ (previous >> 30)).wrapping_add(i as u32);
        }
        Self { state, outputs: [0; WORDS], next: WORDS }
    }

    fn refill(&mut self) {
        let state = &mut self.state;
        for i in 0..WORDS - SHIFT {
            state[i] = twist(state[i], state[i + 1]) ^ state[i + SHIFT];
        }
        for i in WORDS - SHIFT..WORDS - 1 {
            state[i] = twist(state[i], state[i + 1]) ^ state[i + SHIFT - WORDS];
        }
        state[WORDS - 1] = twist(state[WORDS - 1], state[0]) ^ state[SHIFT - 1];
        for (output, &word) in self.outputs.iter_mut().zip(state.iter()) {
            *output = temper(word);
        }
        self.next = 0;
    }

    /// The next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.next == WORDS {
            self.refill();
        }
        let output = self.outputs[self.next];
        self.next += 1;
        output
    }

    /// The next 64 random bits: the first output is the high half.
    pub fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        (high << 32) | u64::from(self.next_u32())
    }

    /// `RandomState.shuffle` of a one-dimensional array.
    pub fn shuffle<T: Copy>(&mut self, items: &mut [T]) {
        let mut bound = items.len().saturating_sub(1);
        while bound > u32::MAX as usize {
            let partner = self.draw_wide(bound as u64) as usize;
            items.swap(bound, partner);
            bound -= 1;
        }
        let mut partners = [0u32; AHEAD];
        while bound > 0 {
            let mask = u32::MAX >> (bound as u32).leading_zeros();
            // Bounds above half of the mask share it, so one block is drawn without asking again.
            let count = AHEAD.min(bound - (mask >> 1) as usize);
            let partners = &mut partners[..count];
            self.draw_descending(bound as u32, mask, partners);
            for &partner in partners.iter() {
                // The loads do not wait for each other, so that a large array is fetched at memory's full width.
                std::hint::black_box(items[partner as usize]);
            }
            for (step, &partner) in partners.iter().enumerate() {
                items.swap(bound - step, partner as usize);
            }
            bound -= count;
        }
    }

    /// Makes the draws of a [`shuffle`](Self::shuffle) of `len` items, and shuffles nothing.
    pub fn skip_shuffle(&mut self, len: u64) {
        let mut bound = len.saturating_sub(1);
        while bound > u64::from(u32::MAX) {
            self.draw_wide(bound);
            bound -= 1;
        }
        let mut partners = [0u32; AHEAD];
        while bound > 0 {
            let mask = u32::MAX >> (bound as u32).leading_zeros();
            let count = AHEAD.min(bound as usize - (mask >> 1) as usize);
            self.draw_descending(bound as u32, mask, &mut partners[..count]);
            bound -= count as u64;
        }
    }

    /// Draws from `[0, bound]`, `[0, bound - 1]`, ... by masked rejection, one output a try.
    fn draw_descending(&mut self, bound: u32, mask: u32, partners: &mut [u32]) {
        let mut filled = 0;
        while filled < partners.len() {
            if self.next == WORDS {
                self.refill();
            }
            let tries = (partners.len() - filled).min(WORDS - self.next);
            for &output in &self.outputs[self.next..self.next + tries] {
                let value = output & mask;
                partners[filled] = value;
                // No branch: half of the tries may fail, at random.
                filled += usize::from(value <= bound - filled as u32);
            }
            self.next += tries;
        }
    }

    fn draw_wide(&mut self, bound: u64) -> u64 {
        let mask = u64::MAX >> bound.leading_zeros();
        loop {
            let value = self.next_u64() & mask;
            if value <= bound {
                return value;
            }
        }
    }
}

#[inline(always)]
fn twist(high: u32, low: u32) -> u32 {
    let mixed = (high & 0x8000_0000) | (low & 0x7fff_ffff);
    (mixed >> 1) ^ (0x9908_b0df & (mixed & 1).wrapping_neg())
}

#[inline(always)]
fn temper(mut word: u32) -> u32 {
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c_5680;
    word ^= (word << 15) & 0xefc6_0000;
    word ^ (word >> 18)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_those_of_the_reference() {
        // The 10,000th output for seed 5489 is given by the C++ standard.
        let mut random = Mt19937::new(5489);
        let last = (0..10_000).map(|_| random.next_u32()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    #[test]
    fn shuffle_is_that_of_numpy() {
        // numpy.random.RandomState(1234): r.shuffle(numpy.arange(12))
        let mut items: Vec<i32> = (0..12).collect();
        Mt19937::new(1234).shuffle(&mut items);
        assert_eq!(items, [7, 8, 11, 2, 9, 10, 1, 0, 4, 5, 6, 3]);
    }

    #[test]
    fn block_shuffle_equals_one_draw_at_a_time() {
        for len in [0, 1, 2, 3, 255, 256, 257, 511, 512, 513, 1024, 1025, 5000] {
            let mut items: Vec<u32> = (0..len).collect();
            let mut expected = items.clone();
            let (mut random, mut one_by_one) = (Mt19937::new(len), Mt19937::new(len));
            random.shuffle(&mut items);
            for bound in (1..expected.len()).rev() {
                let mask = u32::MAX >> (bound as u32).leading_zeros();
                let partner =
                    std::iter::repeat_with(|| one_by_one.next_u32() & mask).find(|&value| value as usize <= bound);
                expected.swap(bound, partner.unwrap() as usize);
            }
            assert_eq!(items, expected, "length {len}");
            let mut skipping = Mt19937::new(len);
            skipping.skip_shuffle(u64::from(len));
            let next = random.next_u32();
            assert_eq!(next, one_by_one.next_u32(), "draws used for length {len}");
            assert_eq!(next, skipping.next_u32(), "draws skipped for length {len}");
        }
    }

    #[test]
    fn wide_draws_take_the_high_half_first() {
        let (mut random, mut halves) = (Mt19937::new(7), Mt19937::new(7));
        let (high, low) = (halves.next_u32(), halves.next_u32());
        assert_eq!(random.next_u64(), u64::from(high) << 32 | u64::from(low));
        let bound = (1 << 33) + 5;
        assert!((0..1000).all(|_| random.draw_wide(bound) <= bound));
    }
}
