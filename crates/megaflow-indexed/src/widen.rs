//! Stored tokens to `i64`.

use megaflow_core::TokenDtype;

/// Converts little-endian tokens of type `dtype` to `i64`, straight from the map.
///
/// Writes as many ids as both slices hold.
pub fn widen_tokens(dtype: TokenDtype, bytes: &[u8], out: &mut [i64]) {
    match dtype {
        TokenDtype::U8 => widen(bytes, out, |[byte]: [u8; 1]| i64::from(byte)),
        TokenDtype::I8 => widen(bytes, out, |token| i64::from(i8::from_le_bytes(token))),
        TokenDtype::I16 => widen(bytes, out, |token| i64::from(i16::from_le_bytes(token))),
        TokenDtype::U16 => widen(bytes, out, |token| i64::from(u16::from_le_bytes(token))),
        TokenDtype::I32 => widen(bytes, out, |token| i64::from(i32::from_le_bytes(token))),
        TokenDtype::I64 => widen(bytes, out, i64::from_le_bytes),
    }
}

#[inline(always)]
fn widen<const N: usize>(bytes: &[u8], out: &mut [i64], convert: impl Fn([u8; N]) -> i64) {
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
}
