//! The reduction operations of collectives and of `Partial` placements.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;

use crate::error::{Error, ErrorKind, Result};

/// How the tensors of several ranks combine element by element in a reduction; PyTorch's `ReduceOp`.
///
/// f16 and bf16 accumulate in f32 and round once; integers wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Sum divided by the number of operands; floating-point types only.
    Avg,
    /// Maximum; NaN if any operand is NaN, as in a maximum over one tensor.
    Max,
    /// Minimum; NaN if any operand is NaN.
    Min,
    /// Product.
    #[doc(alias = "PRODUCT")]
    Product,
    /// Bitwise and; integers only.
    #[doc(alias = "BAND")]
    BitAnd,
    /// Bitwise or; integers only.
    #[doc(alias = "BOR")]
    BitOr,
    /// Bitwise exclusive or; integers only.
    #[doc(alias = "BXOR")]
    BitXor,
    /// Logarithm of the sum of exponentials; floating-point types only. How ranks combine those of their shards of a softmax. PyTorch
    /// does not have it.
    LogSumExp,
}

impl ReduceOp {
    /// The operations that PyTorch has, for tests and for texts that list them: all but [`LogSumExp`](Self::LogSumExp).
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

    /// Name used in layouts, traces and options: `sum`, `avg`, `max`, `min`, `product`, `and`, `or`, `xor`,
    /// `logsumexp`.
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
            ReduceOp::LogSumExp => "logsumexp",
        }
    }

    /// Whether tensors of `dtype` can be reduced with this operation: bitwise operations need integers, and an average
    /// needs floats, because that of integers would have to be rounded.
    pub fn supports(self, dtype: DType) -> bool {
        let integer = matches!(dtype, DType::U8 | DType::U32 | DType::I16 | DType::I32 | DType::I64);
        let float = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
        match self {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Min | ReduceOp::Product => integer || float,
            ReduceOp::Avg | ReduceOp::LogSumExp => float,
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => integer,
        }
    }

    /// Checks that the operation [`supports`](Self::supports) the type.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] if it does not.
    pub fn check(self, dtype: DType) -> Result<()> {
        if self.supports(dtype) {
            return Ok(());
        }
        let (needed, fix) = match self {
            ReduceOp::Avg => ("a floating-point type", "convert the tensor first, or use sum"),
            ReduceOp::LogSumExp => ("a floating-point type", "convert the tensor first"),
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

    /// Parses the names of [`ReduceOp::name`], and PyTorch's `band`, `bor` and `bxor`.
    fn from_str(text: &str) -> Result<Self> {
        let name = match text.trim() {
            "band" => "and",
            "bor" => "or",
            "bxor" => "xor",
            other => other,
        };
        ReduceOp::ALL.into_iter().chain([ReduceOp::LogSumExp]).find(|op| op.name() == name).ok_or_else(|| {
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
    fn supports_depends_on_the_element_type() {
        assert!(ReduceOp::BitXor.supports(DType::I64) && !ReduceOp::BitXor.supports(DType::F32));
        assert!(ReduceOp::Avg.supports(DType::BF16) && !ReduceOp::Avg.supports(DType::I64));
        assert!(!ReduceOp::Sum.supports(DType::F8E4M3) && !ReduceOp::LogSumExp.supports(DType::I64));
        assert_eq!("logsumexp".parse::<ReduceOp>().unwrap(), ReduceOp::LogSumExp);
        let message = ReduceOp::Avg.check(DType::I64).unwrap_err().to_string();
        assert!(message.contains("avg of i64") && message.contains("floating-point"), "{message}");
    }
}
