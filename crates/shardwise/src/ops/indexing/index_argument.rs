//! The argument of indexing: numbers, ranges, masks and lists as one [`Index`] per dimension.

use std::borrow::Cow;
use std::ops::{Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

use crate::tensor::DTensor;

/// An index of one dimension of a tensor, see [`DTensor::i`].
///
/// Numbers, ranges, tensors and lists convert into it.
#[doc(alias = "TensorIndexer")]
#[derive(Clone)]
pub enum Index<'a> {
    /// One index, which removes the dimension; a negative one counts from the end.
    At(isize),
    /// Every `step`-th index of a range. Negative ends count from the end, and ends beyond the tensor are clamped. Clippy takes
    /// the literal `1..-1` for an empty range: allow its lint `reversed_empty_ranges` where you write such ranges.
    Range {
        /// The first index; `None`: the beginning of the dimension.
        start: Option<isize>,
        /// The end of the range, exclusive; `None`: the end of the dimension.
        end: Option<isize>,
        /// The distance between indices, at least 1.
        step: usize,
    },
    /// A mask if its type is u8, the type of comparisons: it indexes as many dimensions as it has. Else indices, which may be
    /// negative; their dimensions replace the indexed one.
    Tensor(Cow<'a, DTensor>),
    /// Indices, which may be negative.
    List(Vec<i64>),
    /// A new dimension of size 1.
    NewAxis,
    /// As many full dimensions as the other indices leave.
    Ellipsis,
}

/// Inserts a dimension of size 1: `x.i((.., NewAxis))`. PyTorch's `None` in an index.
#[derive(Debug, Clone, Copy)]
pub struct NewAxis;

/// Stands for as many full dimensions as the other indices leave, `...` in PyTorch: `x.i((Ellipsis, 0))` is the first index of the
/// last dimension.
#[derive(Debug, Clone, Copy)]
pub struct Ellipsis;

/// Returns every `step`-th index of a range: `x.i(strided(1.., 2))` is `x[1::2]` in PyTorch.
///
/// Indices other than ranges are returned unchanged.
pub fn strided<'a>(range: impl Into<Index<'a>>, step: usize) -> Index<'a> {
    match range.into() {
        Index::Range { start, end, .. } => Index::Range { start, end, step },
        other => other,
    }
}

pub(in crate::ops) const ALL: Index<'static> = Index::Range { start: None, end: None, step: 1 };

macro_rules! integers {
    ($($T:ty),*) => {$(
        impl From<$T> for Index<'_> {
            fn from(index: $T) -> Self {
                Index::At(at(index))
            }
        }

        impl From<Range<$T>> for Index<'_> {
            fn from(range: Range<$T>) -> Self {
                Index::Range { start: Some(at(range.start)), end: Some(at(range.end)), step: 1 }
            }
        }

        impl From<RangeFrom<$T>> for Index<'_> {
            fn from(range: RangeFrom<$T>) -> Self {
                Index::Range { start: Some(at(range.start)), end: None, step: 1 }
            }
        }

        impl From<RangeTo<$T>> for Index<'_> {
            fn from(range: RangeTo<$T>) -> Self {
                Index::Range { start: None, end: Some(at(range.end)), step: 1 }
            }
        }

        impl From<RangeInclusive<$T>> for Index<'_> {
            fn from(range: RangeInclusive<$T>) -> Self {
                Index::Range { start: Some(at(*range.start())), end: behind(at(*range.end())), step: 1 }
            }
        }

        impl From<RangeToInclusive<$T>> for Index<'_> {
            fn from(range: RangeToInclusive<$T>) -> Self {
                Index::Range { start: None, end: behind(at(range.end)), step: 1 }
            }
        }
    )*};
}
integers!(i32, i64, isize, u32, usize);

/// Converts an index of any integer type; one that does not fit saturates, and is then out of range.
fn at(index: impl TryInto<isize>) -> isize {
    index.try_into().unwrap_or(isize::MAX)
}

/// The exclusive end of an inclusive range; after the last index, -1, comes the end of the dimension.
fn behind(last: isize) -> Option<isize> {
    (last != -1).then_some(last.saturating_add(1))
}

impl From<RangeFull> for Index<'_> {
    fn from(_: RangeFull) -> Self {
        ALL
    }
}

impl<'a> From<&'a DTensor> for Index<'a> {
    fn from(tensor: &'a DTensor) -> Self {
        Index::Tensor(Cow::Borrowed(tensor))
    }
}

impl From<DTensor> for Index<'_> {
    fn from(tensor: DTensor) -> Self {
        Index::Tensor(Cow::Owned(tensor))
    }
}

impl From<Vec<i64>> for Index<'_> {
    fn from(indices: Vec<i64>) -> Self {
        Index::List(indices)
    }
}

impl From<&[i64]> for Index<'_> {
    fn from(indices: &[i64]) -> Self {
        Index::List(indices.to_vec())
    }
}

impl<const N: usize> From<[i64; N]> for Index<'_> {
    fn from(indices: [i64; N]) -> Self {
        Index::List(indices.to_vec())
    }
}

impl From<NewAxis> for Index<'_> {
    fn from(_: NewAxis) -> Self {
        Index::NewAxis
    }
}

impl From<Ellipsis> for Index<'_> {
    fn from(_: Ellipsis) -> Self {
        Index::Ellipsis
    }
}

/// The argument of [`DTensor::i`]: one [`Index`] or a tuple of up to six, for the dimensions of the tensor in order.
#[doc(alias = "IndexOp")]
pub trait Indices<'a> {
    /// Converts the indices to a list.
    fn list(self) -> Vec<Index<'a>>;
}

impl<'a, I: Into<Index<'a>>> Indices<'a> for I {
    fn list(self) -> Vec<Index<'a>> {
        vec![self.into()]
    }
}

impl<'a> Indices<'a> for Vec<Index<'a>> {
    fn list(self) -> Vec<Index<'a>> {
        self
    }
}

macro_rules! tuples {
    ($(($($T:ident),*);)*) => {$(
        impl<'a, $($T: Into<Index<'a>>),*> Indices<'a> for ($($T,)*) {
            #[allow(non_snake_case)]
            fn list(self) -> Vec<Index<'a>> {
                let ($($T,)*) = self;
                vec![$($T.into()),*]
            }
        }
    )*};
}
tuples! {
    (A);
    (A, B);
    (A, B, C);
    (A, B, C, D);
    (A, B, C, D, E);
    (A, B, C, D, E, F);
}
