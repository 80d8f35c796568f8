//! Type promotion: the element type of an operator's result.

use candle_core::DType;

/// The promoted type of two types: floating point before integers, then the wider one.
/// u32 with a signed type gives i64, which holds both.
pub(in crate::ops) fn promote(a: DType, b: DType) -> DType {
    if a == b {
        return a;
    }
    match (a.is_float(), b.is_float()) {
        (true, false) => a,
        (false, true) => b,
        // Neither of the two half-precision types holds the other.
        (true, true) if a.size_in_bytes() == b.size_in_bytes() => DType::F32,
        (true, true) => wider(a, b),
        (false, false) => {
            let signed = |d: DType| matches!(d, DType::I16 | DType::I32 | DType::I64);
            match (a, b) {
                (DType::U32, other) | (other, DType::U32) if signed(other) => DType::I64,
                _ => wider(a, b),
            }
        }
    }
}

fn wider(a: DType, b: DType) -> DType {
    if a.size_in_bytes() >= b.size_in_bytes() { a } else { b }
}

/// The floating-point type of a result: integers become f32, PyTorch's default type.
pub(in crate::ops) fn real(dtype: DType) -> DType {
    if dtype.is_float() { dtype } else { DType::F32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promotion_does_not_lose_range() {
        use DType::{BF16, F16, F32, F64, I16, I32, I64, U8, U32};
        for (a, b, expected) in [
            (F16, BF16, F32),
            (F32, F64, F64),
            (BF16, I64, BF16),
            (U8, I16, I16),
            (U32, I32, I64),
            (U32, U8, U32),
            (I32, I64, I64),
            (U8, F16, F16),
        ] {
            assert_eq!((promote(a, b), promote(b, a)), (expected, expected), "{a:?} {b:?}");
        }
    }
}
