//! A token type that holds the values of several.

use megaflow_core::TokenDtype;

use crate::widen::widen_tokens;

/// Smallest and largest value of a type.
fn range_of(dtype: TokenDtype) -> (i64, i64) {
    match dtype {
        TokenDtype::U8 => (0, i64::from(u8::MAX)),
        TokenDtype::I8 => (i64::from(i8::MIN), i64::from(i8::MAX)),
        TokenDtype::U16 => (0, i64::from(u16::MAX)),
        TokenDtype::I16 => (i64::from(i16::MIN), i64::from(i16::MAX)),
        TokenDtype::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        TokenDtype::I64 => (i64::MIN, i64::MAX),
    }
}

/// The smallest type that holds every value of both.
pub(super) fn common_dtype(first: TokenDtype, second: TokenDtype) -> TokenDtype {
    let ((low, high), (other_low, other_high)) = (range_of(first), range_of(second));
    let (low, high) = (low.min(other_low), high.max(other_high));
    let by_size = [TokenDtype::U8, TokenDtype::I8, TokenDtype::U16, TokenDtype::I16, TokenDtype::I32, TokenDtype::I64];
    let holds = |dtype: &TokenDtype| range_of(*dtype).0 <= low && high <= range_of(*dtype).1;
    by_size.into_iter().find(holds).unwrap_or(TokenDtype::I64)
}

/// Tokens of one type as little-endian tokens of a type that holds all its values.
pub(super) fn widen_bytes(from: TokenDtype, bytes: &[u8], to: TokenDtype, ids: &mut Vec<i64>, out: &mut Vec<u8>) {
    ids.resize(bytes.len() / from.size_bytes(), 0);
    widen_tokens(from, bytes, ids);
    out.clear();
    match to.size_bytes() {
        1 => out.extend(ids.iter().map(|&id| id as u8)),
        2 => out.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
        4 => out.extend(ids.iter().flat_map(|&id| (id as u32).to_le_bytes())),
        _ => out.extend(ids.iter().flat_map(|&id| id.to_le_bytes())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_type_holds_every_value_of_both() {
        use TokenDtype::{I8, I16, I32, I64, U8, U16};
        let all = [U8, I8, U16, I16, I32, I64];
        for first in all {
            for second in all {
                let common = common_dtype(first, second);
                for dtype in [first, second] {
                    assert!(range_of(common).0 <= range_of(dtype).0 && range_of(dtype).1 <= range_of(common).1);
                }
                assert_eq!(common, common_dtype(second, first));
            }
            assert_eq!(common_dtype(first, first), first);
        }
        assert_eq!((common_dtype(U16, I32), common_dtype(U16, I16), common_dtype(U8, I8)), (I32, I32, I16));
    }

    #[test]
    fn widening_keeps_signs_and_large_ids() {
        let (mut ids, mut out) = (Vec::new(), Vec::new());
        widen_bytes(TokenDtype::U16, &[0xff, 0xff, 1, 0], TokenDtype::I32, &mut ids, &mut out);
        assert_eq!(out, [0xff, 0xff, 0, 0, 1, 0, 0, 0]);
        widen_bytes(TokenDtype::I8, &[0xff], TokenDtype::I16, &mut ids, &mut out);
        assert_eq!(out, [0xff, 0xff]);
    }
}
