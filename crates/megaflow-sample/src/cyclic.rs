//! The sampler `cyclic`: the samples again and again, each epoch in an order of its own.

use std::sync::{Arc, Mutex, PoisonError};

use megaflow_core::{SampleError, SampleLayout, SampleSource, TokensMut};

use crate::error::BuildError;
use crate::mt19937::Mt19937;

/// Orders of epochs that are kept: batches gathered ahead may lie in the next one.
const KEPT: usize = 2;
/// Below it torch draws 32 bits an entry, else 64.
const NARROW: u64 = u32::MAX as u64 / 20;

/// Position `p` is sample `torch.randperm(n, generator=torch.Generator().manual_seed(seed + p // n))[p % n]` of a source of
/// `n` samples. The order of an epoch takes 8 bytes a sample of memory.
pub struct CyclicSource {
    inner: Arc<dyn SampleSource>,
    seed: u64,
    num_samples: u64,
    orders: Mutex<Vec<(u64, Arc<[u64]>)>>,
}

impl CyclicSource {
    /// Repeats a source whose number of samples is known.
    ///
    /// # Errors
    /// [`BuildError::BadSetting`] if it has no samples, or more than fit into memory.
    pub fn new(inner: Arc<dyn SampleSource>, seed: u64) -> Result<Self, BuildError> {
        let num_samples = inner.num_samples();
        if num_samples == 0 || num_samples > 1 << 40 {
            let (setting, found) = ("samples of a cyclic order", i128::from(num_samples));
            return Err(BuildError::BadSetting { setting, expected: "1 to 2^40", found });
        }
        Ok(Self { inner, seed, num_samples, orders: Mutex::default() })
    }

    /// The sample behind a position in the endless order.
    pub fn locate(&self, position: u64) -> u64 {
        let (epoch, place) = (position / self.num_samples, position % self.num_samples);
        self.order(epoch)[place as usize]
    }

    fn order(&self, epoch: u64) -> Arc<[u64]> {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = orders.iter().find(|(kept, _)| *kept == epoch) {
            return Arc::clone(order);
        }
        let order: Arc<[u64]> = random_permutation(self.num_samples, self.seed.wrapping_add(epoch)).into();
        if orders.len() == KEPT {
            orders.remove(0);
        }
        orders.push((epoch, Arc::clone(&order)));
        order
    }
}

/// `torch.randperm(len, generator=torch.Generator().manual_seed(seed))`.
fn random_permutation(len: u64, seed: u64) -> Vec<u64> {
    let mut random = Mt19937::new(seed as u32); // torch too takes the low half
    let mut items: Vec<u64> = (0..len).collect();
    for place in 0..len.saturating_sub(1) {
        let left = len - place;
        let draw = if len < NARROW { u64::from(random.next_u32()) } else { random.next_u64() };
        items.swap(place as usize, (place + draw % left) as usize);
    }
    items
}

impl SampleSource for CyclicSource {
    fn num_samples(&self) -> u64 {
        // It has no end, and needs none to be asked for.
        i64::MAX as u64 - 1
    }

    fn sample_len(&self) -> usize {
        self.inner.sample_len()
    }

    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError> {
        self.inner.read_sample(self.locate(index), out)
    }

    fn read_into(&self, index: u64, out: TokensMut<'_>) -> Result<(), SampleError> {
        self.inner.read_into(self.locate(index), out)
    }

    fn read_counted(&self, index: u64, out: TokensMut<'_>) -> Result<usize, SampleError> {
        self.inner.read_counted(self.locate(index), out)
    }

    fn sample_tokens(&self, index: u64) -> Result<usize, SampleError> {
        self.inner.sample_tokens(self.locate(index))
    }

    fn layout(&self, index: u64, layout: &mut SampleLayout) -> Result<(), SampleError> {
        self.inner.layout(self.locate(index), layout)
    }

    fn read_ahead(&self, index: u64) {
        self.inner.read_ahead(self.locate(index));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_torchs() {
        // torch 2.11: torch.randperm(10, generator=torch.Generator().manual_seed(s)).tolist()
        for (seed, expected) in ORDERS_OF_TORCH {
            assert_eq!(random_permutation(10, seed), expected, "seed {seed}");
        }
        assert_eq!(random_permutation(1, 5), [0]);
    }

    const ORDERS_OF_TORCH: [(u64, [u64; 10]); 3] = [
        (0, [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]),
        (1234, [5, 4, 8, 2, 6, 9, 1, 7, 0, 3]),
        (4294967303, [5, 0, 3, 4, 1, 7, 9, 6, 8, 2]),
    ];
}
