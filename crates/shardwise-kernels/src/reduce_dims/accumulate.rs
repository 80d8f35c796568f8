//! What is accumulated: the step, the neutral element, and the lanes in which the elements of one result are reduced.

use crate::convert::Compute;

/// Independent accumulators per result: a multiple of the vector length of every processor. Changing it changes the bits of
/// results.
pub(crate) const LANES: usize = 16;

/// How elements of type `C` are reduced.
pub(crate) trait Accumulate<C> {
    /// The accumulator.
    type Acc: Compute;
    /// Its initial value.
    const NEUTRAL: Self::Acc;
    /// Accumulates one element.
    fn step(acc: Self::Acc, x: C) -> Self::Acc;
    /// Combines two accumulators.
    fn combine(a: Self::Acc, b: Self::Acc) -> Self::Acc;
}

pub(crate) struct Sum;
pub(super) struct Product;
pub(crate) struct Max;
pub(super) struct Min;
pub(super) struct Any;
pub(super) struct All;
pub(super) struct CountNonzero;

#[inline(always)]
fn nonzero<T: PartialEq + Default + Copy>(x: T) -> i64 {
    i64::from(x != T::default())
}

// NaN on either side propagates.
macro_rules! max_or_nan {
    ($a:ident, $x:ident) => {
        if $a >= $x || $a.is_nan() { $a } else { $x }
    };
}
macro_rules! min_or_nan {
    ($a:ident, $x:ident) => {
        if $a <= $x || $a.is_nan() { $a } else { $x }
    };
}
macro_rules! accumulators {
    ($($S:ident: $($C:ty)|* as $Acc:ty, $neutral:expr, |$a:ident, $x:ident| $step:expr, $join:expr;)*) => {$($(
        impl Accumulate<$C> for $S {
            type Acc = $Acc;
            const NEUTRAL: $Acc = $neutral;

            #[inline(always)]
            fn step($a: $Acc, $x: $C) -> $Acc {
                $step
            }

            #[inline(always)]
            fn combine($a: $Acc, $x: $Acc) -> $Acc {
                $join
            }
        }
    )*)*};
}
accumulators! {
    Sum: f32 | f64 as f64, 0.0, |a, x| a + x as f64, a + x;
    Sum: i64 as i64, 0, |a, x| a.wrapping_add(x), a.wrapping_add(x);
    Product: f32 | f64 as f64, 1.0, |a, x| a * x as f64, a * x;
    Product: i64 as i64, 1, |a, x| a.wrapping_mul(x), a.wrapping_mul(x);
    Max: f32 as f32, f32::NEG_INFINITY, |a, x| max_or_nan!(a, x), max_or_nan!(a, x);
    Max: f64 as f64, f64::NEG_INFINITY, |a, x| max_or_nan!(a, x), max_or_nan!(a, x);
    Max: i64 as i64, i64::MIN, |a, x| a.max(x), a.max(x);
    Min: f32 as f32, f32::INFINITY, |a, x| min_or_nan!(a, x), min_or_nan!(a, x);
    Min: f64 as f64, f64::INFINITY, |a, x| min_or_nan!(a, x), min_or_nan!(a, x);
    Min: i64 as i64, i64::MAX, |a, x| a.min(x), a.min(x);
    Any: f32 | f64 | i64 as i64, 0, |a, x| a | nonzero(x), a | x;
    All: f32 | f64 | i64 as i64, 1, |a, x| a & nonzero(x), a & x;
    CountNonzero: f32 | f64 | i64 as i64, 0, |a, x| a + nonzero(x), a + x;
}

/// Combines the lanes pairwise: the first half with the second, and so on.
#[inline(always)]
pub(crate) fn combine_lanes<C, S: Accumulate<C>>(mut lanes: [S::Acc; LANES]) -> S::Acc {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = S::combine(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Accumulates more elements, the first of which belongs to lane 0.
#[inline(always)]
pub(crate) fn accumulate_lanes<C: Copy, S: Accumulate<C>>(
    mut lanes: [S::Acc; LANES],
    elements: &[C],
) -> [S::Acc; LANES] {
    let (whole, rest) = elements.as_chunks::<LANES>();
    for chunk in whole {
        for i in 0..LANES {
            lanes[i] = S::step(lanes[i], chunk[i]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = S::step(*lane, x);
    }
    lanes
}
