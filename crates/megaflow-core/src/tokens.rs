//! Room for the tokens of a sample, in the type that the reader wants.

use crate::{SampleError, TokenDtype};

/// Where a sample is written: tokens of one of the types that batches may have.
#[derive(Debug)]
pub enum TokensMut<'a> {
    /// For vocabularies below 65,536 ids.
    U16(&'a mut [u16]),
    /// What most device kernels index with.
    I32(&'a mut [i32]),
    /// What torch's embedding and loss take.
    I64(&'a mut [i64]),
}

impl<'a> TokensMut<'a> {
    /// Tokens that fit.
    pub fn len(&self) -> usize {
        match self {
            Self::U16(out) => out.len(),
            Self::I32(out) => out.len(),
            Self::I64(out) => out.len(),
        }
    }

    /// Whether no token fits.
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

    /// The same room, borrowed again.
    pub fn reborrow(&mut self) -> TokensMut<'_> {
        match self {
            Self::U16(out) => TokensMut::U16(out),
            Self::I32(out) => TokensMut::I32(out),
            Self::I64(out) => TokensMut::I64(out),
        }
    }

    /// Takes the first `count` tokens off the room, or all that are left.
    pub fn take_front(&mut self, count: usize) -> TokensMut<'a> {
        fn front<'a, T>(room: &mut &'a mut [T], count: usize) -> &'a mut [T] {
            let (front, rest) = std::mem::take(room).split_at_mut(count);
            *room = rest;
            front
        }
        let count = count.min(self.len());
        match self {
            Self::U16(out) => TokensMut::U16(front(out, count)),
            Self::I32(out) => TokensMut::I32(front(out, count)),
            Self::I64(out) => TokensMut::I64(front(out, count)),
        }
    }

    /// The room from token `at` on.
    ///
    /// # Panics
    /// If there is less room.
    pub fn from(self, at: usize) -> Self
    where
        Self: Sized,
    {
        match self {
            Self::U16(out) => Self::U16(&mut out[at..]),
            Self::I32(out) => Self::I32(&mut out[at..]),
            Self::I64(out) => Self::I64(&mut out[at..]),
        }
    }

    /// Fills all room with padding; a negative id becomes 0 where the type has no sign.
    pub fn pad(&mut self, pad_id: i64) {
        match self {
            Self::U16(out) => out.fill(u16::try_from(pad_id).unwrap_or(0)),
            Self::I32(out) => out.fill(i32::try_from(pad_id).unwrap_or(0)),
            Self::I64(out) => out.fill(pad_id),
        }
    }

    /// Writes ids from the front on, as many as both hold.
    ///
    /// # Errors
    /// [`SampleError::IdTooLarge`] for one that the type cannot hold. `index` is the sample's, for the message.
    pub fn write_u32(&mut self, index: u64, ids: &[u32]) -> Result<(), SampleError> {
        match self {
            Self::U16(out) => narrow(index, TokenDtype::U16, ids, out),
            Self::I32(out) => narrow(index, TokenDtype::I32, ids, out),
            Self::I64(out) => {
                out.iter_mut().zip(ids).for_each(|(out, &id)| *out = i64::from(id));
                Ok(())
            }
        }
    }

    /// As [`write_u32`](Self::write_u32), for ids as `i64`.
    ///
    /// # Errors
    /// As [`write_u32`](Self::write_u32).
    pub fn write_i64(&mut self, index: u64, ids: &[i64]) -> Result<(), SampleError> {
        match self {
            Self::U16(out) => narrow(index, TokenDtype::U16, ids, out),
            Self::I32(out) => narrow(index, TokenDtype::I32, ids, out),
            Self::I64(out) => {
                let count = out.len().min(ids.len());
                out[..count].copy_from_slice(&ids[..count]);
                Ok(())
            }
        }
    }
}

fn narrow<F, T>(index: u64, dtype: TokenDtype, ids: &[F], out: &mut [T]) -> Result<(), SampleError>
where
    F: Copy + Into<i64>,
    T: TryFrom<i64>,
{
    for (out, &id) in out.iter_mut().zip(ids) {
        let id: i64 = id.into();
        *out = T::try_from(id).map_err(|_| SampleError::IdTooLarge { index, id, dtype })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_narrowed_or_refused_and_padding_fits() {
        let mut room = [0_u16; 4];
        TokensMut::U16(&mut room).pad(-1);
        TokensMut::U16(&mut room[1..]).write_u32(0, &[7, 65_535]).unwrap();
        assert_eq!(room, [0, 7, 65_535, 0]);
        let error = TokensMut::U16(&mut room).write_i64(9, &[1, 65_536]).unwrap_err().to_string();
        assert!(error.contains("sample 9") && error.contains("65536") && error.contains("uint16"), "{error}");
        let mut room = [0_i32; 2];
        TokensMut::I32(&mut room).pad(-1);
        assert_eq!(room, [-1, -1]);
    }

    #[test]
    fn front_and_rest_are_the_whole() {
        let mut room = [0i32; 5];
        let mut rest = TokensMut::I32(&mut room);
        rest.take_front(2).pad(7);
        assert_eq!(rest.len(), 3);
        rest.reborrow().pad(-1);
        assert_eq!(rest.take_front(9).len(), 3);
        assert!(rest.is_empty());
        assert_eq!(room, [7, 7, -1, -1, -1]);
    }
}
