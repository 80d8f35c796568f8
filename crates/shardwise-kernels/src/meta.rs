//! Shape and element type of a tensor, without its elements.

use std::fmt;

use candle_core::{DType, Shape};

/// Shape and element type of a tensor, without elements; what PyTorch keeps in a tensor on the `meta` device.
///
/// Sizes saturate instead of overflowing, so that a shape from a file or a user can be compared with a limit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorMeta {
    /// Size of every dimension, outermost first.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
}

impl TensorMeta {
    /// Combines a shape, such as `(2, 3)` or `&[2, 3]`, with an element type.
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        TensorMeta { shape: shape.into().into_dims(), dtype }
    }

    /// Number of elements, 1 for a scalar; `usize::MAX` if the product overflows.
    #[doc(alias = "numel")]
    pub fn elem_count(&self) -> usize {
        self.shape.iter().fold(1, |count, &n| count.saturating_mul(n))
    }

    /// Bytes of all elements; `usize::MAX` if the product overflows.
    #[doc(alias = "nbytes")]
    pub fn bytes(&self) -> usize {
        self.elem_count().saturating_mul(self.dtype.size_in_bytes())
    }
}

/// A shape and an element type as a pair, such as `((4, 2), DType::F32)`.
impl<S: Into<Shape>> From<(S, DType)> for TensorMeta {
    fn from((shape, dtype): (S, DType)) -> Self {
        TensorMeta::new(shape, dtype)
    }
}

impl fmt::Display for TensorMeta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype.as_str(), self.shape)
    }
}
