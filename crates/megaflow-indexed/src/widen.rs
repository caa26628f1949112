//! Stored tokens to ids of the reader's type.

use megaflow_core::{SampleError, TokenDtype, TokensMut};

/// Converts little-endian tokens of type `dtype` to `i64`, straight from the map.
///
/// Writes as many ids as both slices hold.
pub fn widen_tokens(dtype: TokenDtype, bytes: &[u8], out: &mut [i64]) {
    match dtype {
        TokenDtype::U8 => convert(bytes, out, |[byte]: [u8; 1]| i64::from(byte)),
        TokenDtype::I8 => convert(bytes, out, |token| i64::from(i8::from_le_bytes(token))),
        TokenDtype::I16 => convert(bytes, out, |token| i64::from(i16::from_le_bytes(token))),
        TokenDtype::U16 => convert(bytes, out, |token| i64::from(u16::from_le_bytes(token))),
        TokenDtype::I32 => convert(bytes, out, |token| i64::from(i32::from_le_bytes(token))),
        TokenDtype::I64 => convert(bytes, out, i64::from_le_bytes),
    }
}

/// Converts little-endian tokens of type `dtype` to the type of `out`, straight from the map where every id of `dtype`
/// fits. Writes as many ids as both hold. `index` is the sample's, for the message.
///
/// # Errors
/// [`SampleError::IdTooLarge`] for an id that the type of `out` cannot hold.
pub fn copy_tokens(dtype: TokenDtype, bytes: &[u8], index: u64, mut out: TokensMut<'_>) -> Result<(), SampleError> {
    match (dtype, &mut out) {
        (_, TokensMut::I64(ids)) => widen_tokens(dtype, bytes, ids),
        (TokenDtype::U8, TokensMut::I32(ids)) => convert(bytes, ids, |[byte]: [u8; 1]| i32::from(byte)),
        (TokenDtype::I8, TokensMut::I32(ids)) => convert(bytes, ids, |token| i32::from(i8::from_le_bytes(token))),
        (TokenDtype::I16, TokensMut::I32(ids)) => convert(bytes, ids, |token| i32::from(i16::from_le_bytes(token))),
        (TokenDtype::U16, TokensMut::I32(ids)) => convert(bytes, ids, |token| i32::from(u16::from_le_bytes(token))),
        (TokenDtype::I32, TokensMut::I32(ids)) => convert(bytes, ids, i32::from_le_bytes),
        (TokenDtype::U8, TokensMut::U16(ids)) => convert(bytes, ids, |[byte]: [u8; 1]| u16::from(byte)),
        (TokenDtype::U16, TokensMut::U16(ids)) => convert(bytes, ids, u16::from_le_bytes),
        _ => {
            let count = (bytes.len() / dtype.size_bytes()).min(out.len());
            let mut wide = vec![0; count];
            widen_tokens(dtype, bytes, &mut wide);
            return out.write_i64(index, &wide);
        }
    }
    Ok(())
}

#[inline(always)]
fn convert<const N: usize, T>(bytes: &[u8], out: &mut [T], convert: impl Fn([u8; N]) -> T) {
    for (id, token) in out.iter_mut().zip(bytes.chunks_exact(N)) {
        let mut array = [0; N];
        array.copy_from_slice(token);
        *id = convert(array);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_of_every_type_survive() {
        let cases: [(TokenDtype, &[u8], &[i64]); 6] = [
            (TokenDtype::U8, &[0, 255], &[0, 255]),
            (TokenDtype::I8, &[0x80, 0x7f], &[-128, 127]),
            (TokenDtype::I16, &[0, 0x80, 0xff, 0x7f], &[-32768, 32767]),
            (TokenDtype::U16, &[0, 0, 0xff, 0xff], &[0, 65535]),
            (TokenDtype::I32, &[0, 0, 0, 0x80, 1, 0, 0, 0], &[i64::from(i32::MIN), 1]),
            (TokenDtype::I64, &[0xff; 8], &[-1]),
        ];
        for (dtype, bytes, expected) in cases {
            let mut out = vec![0; expected.len()];
            widen_tokens(dtype, bytes, &mut out);
            assert_eq!(out, expected, "{dtype}");
        }
    }

    #[test]
    fn ids_are_the_same_in_every_type_that_holds_them() {
        for (dtype, bytes) in [
            (TokenDtype::U8, vec![0, 1, 255]),
            (TokenDtype::U16, vec![0, 0, 1, 0, 0xff, 0xff]),
            (TokenDtype::I8, vec![0, 127]),
            (TokenDtype::I16, vec![0, 0, 0xff, 0x7f]),
            (TokenDtype::I32, vec![0, 1, 0, 0, 0xff, 0xff, 0, 0]),
            (TokenDtype::I64, vec![0xff, 0xff, 0, 0, 0, 0, 0, 0]),
        ] {
            let count = bytes.len() / dtype.size_bytes();
            let (mut wide, mut ints, mut shorts) = (vec![0i64; count], vec![0i32; count], vec![0u16; count]);
            widen_tokens(dtype, &bytes, &mut wide);
            copy_tokens(dtype, &bytes, 0, TokensMut::I32(&mut ints)).unwrap();
            copy_tokens(dtype, &bytes, 0, TokensMut::U16(&mut shorts)).unwrap();
            assert_eq!(ints.iter().map(|&id| i64::from(id)).collect::<Vec<_>>(), wide, "{dtype}");
            assert_eq!(shorts.iter().map(|&id| i64::from(id)).collect::<Vec<_>>(), wide, "{dtype}");
        }
        let error = copy_tokens(TokenDtype::I32, &70_000i32.to_le_bytes(), 5, TokensMut::U16(&mut [0])).unwrap_err();
        assert!(error.to_string().contains("sample 5 holds token 70000"), "{error}");
    }
}
