//! The first element of every line in some order: `argmax`, `argmin`, and maxima and minima with their indices.

use std::mem::MaybeUninit;

use super::rank::{Rank, Ranked, Ranking};
use crate::simd;
use crate::typed_slice::filled_with;

/// Elements of a line whose smallest rank is found before it is compared with that of the line so far: long enough that the
/// comparison is free, short enough that looking for its position again reads the cache.
const CHUNK: usize = 256;

/// The index of the first element of a contiguous line.
pub(super) struct FirstOfLine<'a, T: Ranked> {
    pub(super) line: &'a [T],
    pub(super) ranking: Ranking<T::Rank>,
}

impl<T: Ranked> simd::Kernel for FirstOfLine<'_, T> {
    type Output = usize;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> usize {
        let FirstOfLine { line, ranking } = self;
        let (mut best, mut at) = (T::Rank::MAX, 0);
        for (number, chunk) in line.chunks(CHUNK).enumerate() {
            let least = chunk.iter().fold(T::Rank::MAX, |least, x| least.min(x.rank(ranking)));
            if least < best {
                (best, at) = (least, number * CHUNK);
            }
        }
        at + line[at..].iter().position(|x| x.rank(ranking) == best).expect("the smallest rank is that of an element")
    }
}

/// Columns whose ranks and indices are kept at a time: 8 or 16 KiB, in the first-level cache.
pub(super) const COLUMNS: usize = 1024;

/// Rows after which the indices, which have the width of a rank, are added to the results. Fits into u32.
const ROWS: usize = 1 << 30;

/// Finds the first elements of up to [`COLUMNS`] adjacent columns.
pub(super) struct FirstOfColumns<'a, T: Ranked> {
    /// From the first element of the first column to the last of the last.
    pub(super) elements: &'a [T],
    /// The distance between rows.
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) ranking: Ranking<T::Rank>,
    /// One index per column.
    pub(super) found: &'a mut [usize],
}

impl<T: Ranked> simd::Kernel for FirstOfColumns<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let width = self.found.len();
        let mut buffers = [[MaybeUninit::uninit(); COLUMNS]; 2];
        let [best, index] = &mut buffers;
        let best = filled_with(&mut best[..width], T::Rank::MAX);
        let index = filled_with(&mut index[..width], T::Rank::MAX);
        self.found.fill(0);
        for start in (0..self.rows).step_by(ROWS) {
            // `MAX` means that these rows have nothing better.
            index.fill(T::Rank::MAX);
            for row in start..self.rows.min(start + ROWS) {
                let number = T::Rank::from_usize(row - start);
                let line = &self.elements[row * self.stride..][..width];
                for ((best, index), &x) in best.iter_mut().zip(index.iter_mut()).zip(line) {
                    let rank = x.rank(self.ranking);
                    *index = if rank < *best { number } else { *index };
                    *best = (*best).min(rank);
                }
            }
            for (found, &index) in self.found.iter_mut().zip(index.iter()).filter(|(_, index)| **index != T::Rank::MAX)
            {
                *found = start + index.to_usize();
            }
        }
    }
}
