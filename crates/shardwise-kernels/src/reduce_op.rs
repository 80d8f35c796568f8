//! The reductions of operands.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;

use crate::error::{Error, ErrorKind, Result};

/// How operands of one shape combine, element by element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The mean.
    Avg,
    /// The largest operand; NaN wins, as in a maximum over one tensor.
    Max,
    /// The smallest operand; NaN wins.
    Min,
    /// The product.
    Product,
    /// Bitwise and, integers only.
    BitAnd,
    /// Bitwise or, integers only.
    BitOr,
    /// Bitwise exclusive or, integers only.
    BitXor,
}

impl ReduceOp {
    /// All operations.
    pub const ALL: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Max,
        ReduceOp::Min,
        ReduceOp::Product,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
    ];

    /// The name used in text: `sum`, `avg`, `max`, `min`, `product`, `and`, `or`, `xor`.
    pub fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Product => "product",
            ReduceOp::BitAnd => "and",
            ReduceOp::BitOr => "or",
            ReduceOp::BitXor => "xor",
        }
    }

    /// Whether tensors of `dtype` can be reduced so: bitwise operations need integers, and a mean of integers would
    /// have to be rounded.
    pub fn supports(self, dtype: DType) -> bool {
        let integer = matches!(dtype, DType::U8 | DType::U32 | DType::I16 | DType::I32 | DType::I64);
        let float = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
        match self {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Min | ReduceOp::Product => integer || float,
            ReduceOp::Avg => float,
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => integer,
        }
    }

    /// An error unless [`supports`](Self::supports) the type.
    pub fn check(self, dtype: DType) -> Result<()> {
        if self.supports(dtype) {
            return Ok(());
        }
        let (needed, fix) = match self {
            ReduceOp::Avg => ("a floating-point type", "convert the tensor first, or use sum"),
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => ("an integer type", "convert the tensor first"),
            _ => ("f64, f32, f16, bf16, i64, i32, i16, u32 or u8", "convert the tensor first"),
        };
        Err(ErrorKind::dtype(dtype).error("reduction", format!("{} of {}", self, dtype.as_str()), needed, fix))
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    /// Reads the names of [`ReduceOp::name`]; `band`, `bor` and `bxor` are understood as well.
    fn from_str(text: &str) -> Result<Self> {
        let name = match text.trim() {
            "band" => "and",
            "bor" => "or",
            "bxor" => "xor",
            other => other,
        };
        ReduceOp::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| {
            ErrorKind::unknown(text).error(
                "reduction",
                format!("`{text}`"),
                ReduceOp::ALL.map(ReduceOp::name).join(", "),
                "use one of these names",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_know_their_types() {
        assert!(ReduceOp::BitXor.supports(DType::I64) && !ReduceOp::BitXor.supports(DType::F32));
        assert!(ReduceOp::Avg.supports(DType::BF16) && !ReduceOp::Avg.supports(DType::I64));
        assert!(!ReduceOp::Sum.supports(DType::F8E4M3));
        let message = ReduceOp::Avg.check(DType::I64).unwrap_err().to_string();
        assert!(message.contains("avg of i64") && message.contains("floating-point"), "{message}");
    }
}
