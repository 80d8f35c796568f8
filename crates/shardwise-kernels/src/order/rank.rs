//! Unsigned integers that order elements: sorting and selection compare and count these, whatever the element type.

use std::cmp::Ordering;

use candle_core::WithDType;
use half::{bf16, f16};

/// Which elements come first. Ties are ordered by index, so sorts are stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SortOrder {
    /// The largest; NaN counts as larger than any number.
    Descending,
    /// The smallest; NaN counts as larger than any number.
    Ascending,
    /// The smallest, but NaN before any number: for minima, which propagate NaN.
    Smallest,
}

/// An unsigned integer as the rank of an element: elements with smaller ranks come first.
pub(super) trait Rank: Copy + Ord + Default + Send + Sync {
    const MAX: Self;
    const BYTES: usize;
    /// An integer of twice the width.
    type Wide: Ord;

    /// The rank in the upper half, and the index in the lower one.
    fn with_index(self, index: u32) -> Self::Wide;

    /// Byte number `i`, from the least significant one.
    fn byte(self, i: usize) -> usize;

    /// The integer with all of these bits.
    fn from_usize(n: usize) -> Self;

    fn to_usize(self) -> usize;
}

macro_rules! ranks {
    ($($K:ty: $Wide:ty),*) => {$(
        impl Rank for $K {
            const MAX: Self = <$K>::MAX;
            const BYTES: usize = size_of::<$K>();
            type Wide = $Wide;

            #[inline(always)]
            fn with_index(self, index: u32) -> $Wide {
                <$Wide>::from(self) << <$K>::BITS | <$Wide>::from(index)
            }

            #[inline(always)]
            fn byte(self, i: usize) -> usize {
                (self >> (8 * i) & 0xff) as usize
            }

            #[inline(always)]
            fn from_usize(n: usize) -> Self {
                n as $K
            }

            #[inline(always)]
            fn to_usize(self) -> usize {
                self as usize
            }
        }
    )*};
}
ranks!(u32: u64, u64: u128);

/// What turns the ascending number of an element into its rank.
#[derive(Clone, Copy)]
pub(super) struct Ranking<K> {
    /// All ones to reverse the order.
    flip: K,
    /// The rank of NaN.
    nan: K,
}

impl<K: Rank> Ranking<K> {
    pub(super) fn new(order: SortOrder) -> Self {
        match order {
            SortOrder::Descending => Ranking { flip: K::MAX, nan: K::default() },
            SortOrder::Ascending => Ranking { flip: K::default(), nan: K::MAX },
            SortOrder::Smallest => Ranking { flip: K::default(), nan: K::default() },
        }
    }
}

/// An element that has a rank. -0.0 has the rank of 0.0, and all NaN have one rank, which no number has.
pub(super) trait Ranked: WithDType {
    type Rank: Rank;

    fn rank(self, ranking: Ranking<Self::Rank>) -> Self::Rank;
}

macro_rules! integers {
    ($($T:ty: $K:ty, |$x:ident| $number:expr;)*) => {$(
        impl Ranked for $T {
            type Rank = $K;

            #[inline(always)]
            fn rank(self, ranking: Ranking<$K>) -> $K {
                let $x = self;
                $number ^ ranking.flip
            }
        }
    )*};
}
// Flipping the sign bit orders two's complement as unsigned.
integers! {
    u8: u32, |x| u32::from(x);
    u32: u32, |x| x;
    i16: u32, |x| i32::from(x) as u32 ^ 1 << 31;
    i32: u32, |x| x as u32 ^ 1 << 31;
    i64: u64, |x| x as u64 ^ 1 << 63;
}

macro_rules! floats {
    ($($T:ty: $K:ty, $signed:ty;)*) => {$(
        impl Ranked for $T {
            type Rank = $K;

            #[inline(always)]
            fn rank(self, ranking: Ranking<$K>) -> $K {
                // Adding 0.0 turns -0.0 into 0.0. Negative numbers are ordered by the complement of their bits.
                let bits = (self + 0.0).to_bits();
                let sign = (bits as $signed >> (<$K>::BITS - 1)) as $K;
                let number = bits ^ (sign | 1 << (<$K>::BITS - 1));
                if self.is_nan() { ranking.nan } else { number ^ ranking.flip }
            }
        }
    )*};
}
floats! {
    f32: u32, i32;
    f64: u64, i64;
}

macro_rules! halves {
    ($($T:ty: $infinity:literal;)*) => {$(
        impl Ranked for $T {
            type Rank = u32;

            #[inline(always)]
            fn rank(self, ranking: Ranking<u32>) -> u32 {
                let bits = u32::from(self.to_bits());
                let magnitude = bits & 0x7fff;
                // 0x8000 is zero: negative numbers are below it, from the largest magnitude up.
                let number = if bits >> 15 == 1 { 0x8000 - magnitude } else { 0x8000 + magnitude };
                if magnitude > $infinity { ranking.nan } else { number ^ ranking.flip }
            }
        }
    )*};
}
halves! {
    f16: 0x7c00;
    bf16: 0x7f80;
}

/// The rank of an element, and its index in its line. Ordered by rank, then by index.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct RankedIndex<K> {
    pub(super) rank: K,
    pub(super) index: u32,
}

impl<K: Rank> Ord for RankedIndex<K> {
    /// Compares one integer per item instead of two fields, which avoids a branch.
    #[inline(always)]
    fn cmp(&self, other: &Self) -> Ordering {
        self.rank.with_index(self.index).cmp(&other.rank.with_index(other.index))
    }
}

impl<K: Rank> PartialOrd for RankedIndex<K> {
    #[inline(always)]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
