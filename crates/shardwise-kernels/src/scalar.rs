//! Scalar arguments of factories and operators, and the conversion of scalars to element types.

use std::hash::{Hash, Hasher};

use candle_core::{DType, WithDType};

use crate::error::{ErrorKind, Result};

/// A scalar argument, like PyTorch's `Number`: a float, or an integer, which stays exact over the range of i64.
///
/// Functions that take `impl Into<Number>` take plain Rust numbers: `x.add_scalar(1.5)`, `x.add_scalar((1i64 << 53) + 1)`.
///
/// Comparison and hashing are by bits, so that NaN equals itself and `0.0` differs from `-0.0`.
#[doc(alias = "Scalar")]
#[derive(Debug, Clone, Copy)]
pub enum Number {
    /// A floating-point number.
    Real(f64),
    /// An integer.
    Integer(i64),
}

impl Number {
    /// Converts to f64; integers of more than 53 bits are rounded.
    pub fn to_f64(self) -> f64 {
        match self {
            Number::Real(x) => x,
            Number::Integer(n) => n as f64,
        }
    }

    /// Converts to i64: truncates the fraction, saturates outside the range of i64, and turns NaN into 0.
    pub fn to_i64(self) -> i64 {
        match self {
            Number::Real(x) => x as i64,
            Number::Integer(n) => n,
        }
    }

    /// Whether it is an exact integer, so that an operator on an integer tensor and this number returns integers.
    pub fn is_integer(self) -> bool {
        match self {
            // 9e15 is just below 2^53, up to which f64 represents every integer.
            Number::Real(x) => x.fract() == 0.0 && x.abs() < 9e15,
            Number::Integer(_) => true,
        }
    }

    /// The negated number; `i64::MIN` wraps to itself.
    pub fn negative(self) -> Self {
        match self {
            Number::Real(x) => Number::Real(-x),
            Number::Integer(n) => Number::Integer(n.wrapping_neg()),
        }
    }

    /// Converts to an element; integers wrap.
    pub(super) fn element<T: ScalarElement>(self) -> T {
        match self {
            Number::Real(x) => T::from_f64(x),
            Number::Integer(n) => T::from_integer(n),
        }
    }

    /// Converts the number to the range of an element type.
    ///
    /// As in PyTorch, fractions are truncated for integer types, and a negative integer wraps in an unsigned type.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if the type does not represent the number: NaN or an infinity for an integer type, 300 for u8.
    pub fn fit(self, dtype: DType) -> Result<Self> {
        let Some((least, most)) = integer_range(dtype) else { return Ok(self) };
        // Negative integers down to -MAX wrap in unsigned types; a negative number with a fraction does not.
        let low = match self {
            Number::Integer(_) if least == 0 => -most,
            Number::Real(x) if least == 0 && x.fract() == 0.0 => -most,
            _ => least,
        };
        let inside = match self {
            Number::Integer(n) => (low..=most).contains(&n),
            // `i64::MAX as f64` rounds up to 2^63, which is outside i64.
            Number::Real(x) => {
                !x.is_nan() && x >= low as f64 && x.trunc() <= most as f64 && x < 9_223_372_036_854_775_808.0
            }
        };
        if inside {
            return Ok(Number::Integer(self.to_i64()));
        }
        let found = match self {
            Number::Real(x) => format!("{x} for {}", dtype.as_str()),
            Number::Integer(n) => format!("{n} for {}", dtype.as_str()),
        };
        Err(ErrorKind::Argument.error(
            "number",
            found,
            format!("a number from {least} to {most}"),
            "use another number or type",
        ))
    }
}

/// An element type to which scalars convert.
pub(super) trait ScalarElement: WithDType {
    /// The low bits of the integer, or the nearest float.
    fn from_integer(n: i64) -> Self;
}

macro_rules! elements {
    ($($T:ty: |$n:ident| $of:expr;)*) => {$(
        impl ScalarElement for $T {
            fn from_integer($n: i64) -> Self {
                $of
            }
        }
    )*};
}
elements! {
    u8: |n| n as u8;
    u32: |n| n as u32;
    i16: |n| n as i16;
    i32: |n| n as i32;
    i64: |n| n;
    f32: |n| n as f32;
    f64: |n| n as f64;
    half::f16: |n| half::f16::from_f64(n as f64);
    half::bf16: |n| half::bf16::from_f64(n as f64);
}

/// Minimum and maximum of an integer type; `None` for floating-point types. PyTorch's `torch.iinfo`.
pub fn integer_range(dtype: DType) -> Option<(i64, i64)> {
    Some(match dtype {
        DType::U8 => (0, u8::MAX.into()),
        DType::U32 => (0, u32::MAX.into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::I64 => (i64::MIN, i64::MAX),
        _ => return None,
    })
}

impl PartialEq for Number {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Number::Real(a), Number::Real(b)) => a.to_bits() == b.to_bits(),
            (Number::Integer(a), Number::Integer(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Number {}

impl Hash for Number {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Number::Real(x) => (0u8, x.to_bits()).hash(state),
            Number::Integer(n) => (1u8, n).hash(state),
        }
    }
}

macro_rules! numbers {
    ($($Variant:ident: $($T:ty),*;)*) => {$($(
        impl From<$T> for Number {
            fn from(number: $T) -> Self {
                Number::$Variant(number.into())
            }
        }
    )*)*};
}
numbers! {
    Real: f32, f64;
    Integer: u8, u32, i16, i32, i64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fit_accepts_what_the_type_represents() {
        let fits = |number: Number, dtype| number.fit(dtype).ok().map(Number::to_i64);
        for (x, u8, i16, i64) in [
            (300.0, None, Some(300), Some(300)),
            (-1.0, Some(255 - 256), Some(-1), Some(-1)),
            (-1.7, None, Some(-1), Some(-1)),
            (1.7, Some(1), Some(1), Some(1)),
            (255.9, Some(255), Some(255), Some(255)),
            (32768.0, None, None, Some(32768)),
            (f64::NAN, None, None, None),
            (f64::NEG_INFINITY, None, None, None),
            (9.3e18, None, None, None),
            (-9_223_372_036_854_775_808.0, None, None, Some(i64::MIN)),
        ] {
            let number = Number::Real(x);
            assert_eq!(
                [fits(number, DType::U8), fits(number, DType::I16), fits(number, DType::I64)],
                [u8, i16, i64],
                "{x}"
            );
        }
        assert_eq!(fits(Number::Integer(i64::MAX), DType::I64), Some(i64::MAX));
        assert_eq!(Number::Real(f64::NAN).fit(DType::F16).unwrap(), Number::Real(f64::NAN));
    }
}
