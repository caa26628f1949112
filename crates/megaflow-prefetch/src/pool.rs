//! Buffers that go around between the threads and the consumer.

use std::sync::{Arc, Mutex};

/// Buffers of one size, kept for the next batch.
///
/// All calls only try the lock: the pool may be copied into a forked child while another thread holds it, and a buffer
/// less in the pool costs nothing but one allocation.
#[derive(Debug)]
pub struct BufferPool {
    buffers: Mutex<Vec<Vec<i64>>>,
    buffer_len: usize,
    capacity: usize,
}

impl BufferPool {
    pub(crate) fn new(buffer_len: usize, capacity: usize) -> Arc<Self> {
        Arc::new(Self { buffers: Mutex::new(Vec::with_capacity(capacity)), buffer_len, capacity })
    }

    /// A buffer of the pool's size, with any content.
    pub(crate) fn take(&self) -> Vec<i64> {
        let kept = self.buffers.try_lock().ok().and_then(|mut buffers| buffers.pop());
        kept.unwrap_or_else(|| vec![0; self.buffer_len])
    }

    fn put(&self, buffer: Vec<i64>) {
        if let Ok(mut buffers) = self.buffers.try_lock() {
            if buffers.len() < self.capacity {
                buffers.push(buffer);
            }
        }
    }
}

/// The tokens of a batch, row by row. Dropping it gives the buffer back to the pool; [`into_vec`](Self::into_vec) keeps
/// it.
#[derive(Debug)]
pub struct BatchTokens {
    tokens: Vec<i64>,
    pool: Arc<BufferPool>,
}

impl BatchTokens {
    pub(crate) fn new(tokens: Vec<i64>, pool: Arc<BufferPool>) -> Self {
        Self { tokens, pool }
    }

    /// The tokens.
    pub fn as_slice(&self) -> &[i64] {
        &self.tokens
    }

    /// The tokens, to be changed in place.
    pub fn as_mut_slice(&mut self) -> &mut [i64] {
        &mut self.tokens
    }

    /// The buffer itself, without a copy; the pool will make another.
    pub fn into_vec(mut self) -> Vec<i64> {
        std::mem::take(&mut self.tokens)
    }
}

impl Drop for BatchTokens {
    fn drop(&mut self) {
        let tokens = std::mem::take(&mut self.tokens);
        if tokens.len() == self.pool.buffer_len {
            self.pool.put(tokens);
        }
    }
}
