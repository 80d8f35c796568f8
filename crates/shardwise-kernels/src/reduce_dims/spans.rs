//! Spans of a long row, several of which are reduced at the same time.

use std::marker::PhantomData;

use super::accumulate::{Accumulate, LANES, combine_lanes};
use crate::convert::Compute;
use crate::simd;

/// Elements of one result that one thread reduces; a result of more is combined from the results of such spans, in order. A
/// multiple of [`LANES`], and 20 us of work. Changing it changes the bits of results.
pub(super) const SPAN: usize = 1 << 16;

/// Spans that are reduced at the same time with AVX-512. The lanes of one are two registers of f64, and wait for their additions:
/// 4 million f32 in the third cache take 0.174 ms one span after the other, and 0.148 in fours. AVX2 has no registers for so many.
pub(super) const TOGETHER: usize = 4;

/// [`TOGETHER`] adjacent spans.
pub(super) struct Spans<'a, C, S> {
    elements: &'a [C],
    step: PhantomData<S>,
}

impl<'a, C, S> Spans<'a, C, S> {
    pub(super) fn new(elements: &'a [C]) -> Self {
        Spans { elements, step: PhantomData }
    }
}

impl<C: Compute, S: Accumulate<C>> simd::Kernel for Spans<'_, C, S> {
    type Output = [S::Acc; TOGETHER];

    #[inline(always)]
    fn run<const FMA: bool>(self) -> Self::Output {
        let span = |i: usize| &self.elements[i * SPAN..][..SPAN].as_chunks::<LANES>().0[..SPAN / LANES];
        let (p, q, r, s) = (span(0), span(1), span(2), span(3));
        // Variables of their own: the compiler keeps no array of arrays in registers.
        let (mut a, mut b, mut c, mut d) =
            ([S::NEUTRAL; LANES], [S::NEUTRAL; LANES], [S::NEUTRAL; LANES], [S::NEUTRAL; LANES]);
        for i in 0..SPAN / LANES {
            a = step_lanes::<C, S>(a, &p[i]);
            b = step_lanes::<C, S>(b, &q[i]);
            c = step_lanes::<C, S>(c, &r[i]);
            d = step_lanes::<C, S>(d, &s[i]);
        }
        // Through memory: otherwise the compiler arranges the lanes as their combination needs them, which takes three times as long.
        std::hint::black_box([a, b, c, d]).map(combine_lanes::<C, S>)
    }
}

#[inline(always)]
fn step_lanes<C: Copy, S: Accumulate<C>>(mut lanes: [S::Acc; LANES], elements: &[C; LANES]) -> [S::Acc; LANES] {
    for i in 0..LANES {
        lanes[i] = S::step(lanes[i], elements[i]);
    }
    lanes
}
