//! Buffers that go around between the threads and the consumer.

use std::sync::{Arc, Mutex};

use megaflow_core::{TokenDtype, TokensMut};

/// The memory of a batch, in the type of its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tokens {
    /// For vocabularies below 65,536 ids.
    U16(Vec<u16>),
    /// What most device kernels index with.
    I32(Vec<i32>),
    /// What torch's embedding and loss take.
    I64(Vec<i64>),
}

impl Tokens {
    fn new(dtype: TokenDtype, len: usize) -> Self {
        match dtype {
            TokenDtype::U16 => Self::U16(vec![0; len]),
            TokenDtype::I32 => Self::I32(vec![0; len]),
            _ => Self::I64(vec![0; len]),
        }
    }

    fn empty() -> Self {
        Self::I64(Vec::new())
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        match self {
            Self::U16(tokens) => tokens.len(),
            Self::I32(tokens) => tokens.len(),
            Self::I64(tokens) => tokens.len(),
        }
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the tokens.
    pub fn dtype(&self) -> TokenDtype {
        match self {
            Self::U16(_) => TokenDtype::U16,
            Self::I32(_) => TokenDtype::I32,
            Self::I64(_) => TokenDtype::I64,
        }
    }

    /// The tokens from `begin` to `end`, to be written.
    ///
    /// # Panics
    /// If there are no such tokens.
    pub fn slice_mut(&mut self, begin: usize, end: usize) -> TokensMut<'_> {
        match self {
            Self::U16(tokens) => TokensMut::U16(&mut tokens[begin..end]),
            Self::I32(tokens) => TokensMut::I32(&mut tokens[begin..end]),
            Self::I64(tokens) => TokensMut::I64(&mut tokens[begin..end]),
        }
    }

    /// The tokens as `i64`, in memory of their own.
    pub fn to_i64(&self) -> Vec<i64> {
        match self {
            Self::U16(tokens) => tokens.iter().copied().map(i64::from).collect(),
            Self::I32(tokens) => tokens.iter().copied().map(i64::from).collect(),
            Self::I64(tokens) => tokens.clone(),
        }
    }
}

/// Buffers of one size, kept for the next batch.
///
/// All calls only try the lock: the pool may be copied into a forked child while another thread holds it, and a buffer
/// less in the pool costs nothing but one allocation.
#[derive(Debug)]
pub struct BufferPool {
    buffers: Mutex<Vec<Tokens>>,
    dtype: TokenDtype,
    buffer_len: usize,
    capacity: usize,
}

impl BufferPool {
    pub(crate) fn new(dtype: TokenDtype, buffer_len: usize, capacity: usize) -> Arc<Self> {
        Arc::new(Self { buffers: Mutex::new(Vec::with_capacity(capacity)), dtype, buffer_len, capacity })
    }

    /// A buffer of the pool's size, with any content.
    pub(crate) fn take(&self) -> Tokens {
        let kept = self.buffers.try_lock().ok().and_then(|mut buffers| buffers.pop());
        kept.unwrap_or_else(|| Tokens::new(self.dtype, self.buffer_len))
    }

    pub(crate) fn put(&self, buffer: Tokens) {
        if let Ok(mut buffers) = self.buffers.try_lock() {
            if buffers.len() < self.capacity {
                buffers.push(buffer);
            }
        }
    }
}

/// The tokens of a batch, row by row. Dropping it gives the buffer back to the pool; [`into_tokens`](Self::into_tokens)
/// keeps it.
#[derive(Debug)]
pub struct BatchTokens {
    tokens: Tokens,
    pool: Arc<BufferPool>,
}

impl BatchTokens {
    pub(crate) fn new(tokens: Tokens, pool: Arc<BufferPool>) -> Self {
        Self { tokens, pool }
    }

    /// The tokens.
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// The tokens, to be changed in place.
    pub fn tokens_mut(&mut self) -> &mut Tokens {
        &mut self.tokens
    }

    /// The buffer itself, without a copy; the pool will make another.
    pub fn into_tokens(mut self) -> Tokens {
        std::mem::replace(&mut self.tokens, Tokens::empty())
    }
}

impl Drop for BatchTokens {
    fn drop(&mut self) {
        let tokens = std::mem::replace(&mut self.tokens, Tokens::empty());
        if tokens.len() == self.pool.buffer_len {
            self.pool.put(tokens);
        }
    }
}
