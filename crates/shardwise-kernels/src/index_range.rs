//! Index tensors, read in their own type block by block, and the part of a dimension that a tensor holds.

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::Tensor;
use smallvec::SmallVec;

use super::convert::{Block, Compute};
use super::{contiguous, simd, with_first_element};
use crate::error::Result;

/// An index that selects nothing, such as that of an element another rank holds: the result is zero there.
pub const NO_INDEX: usize = usize::MAX;

/// Indices that are read at a time: 2 KiB of i64.
pub(super) const INDEX_BLOCK: usize = 256;

/// The indices of a dimension that a tensor holds, in ascending runs; [`NO_INDEX`] stands for every missing one.
#[derive(Debug, Clone)]
pub struct IndexRange {
    /// Start, end and position in the tensor of each run.
    runs: SmallVec<[(usize, usize, usize); 1]>,
    held: usize,
}

impl IndexRange {
    /// All indices below `n`.
    pub fn all(n: usize) -> Self {
        Self::new(std::iter::once(0..n))
    }

    /// The indices of ascending ranges, which the tensor holds one after the other.
    pub fn new(runs: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut held = 0;
        let place = |run: Range<usize>| {
            held += run.len();
            (run.start, run.end, held - run.len())
        };
        let runs = runs.into_iter().map(place).collect();
        IndexRange { runs, held }
    }

    /// How many indices the tensor holds.
    pub fn len(&self) -> usize {
        self.held
    }

    /// Whether the tensor holds no index.
    pub fn is_empty(&self) -> bool {
        self.held == 0
    }

    /// The position of an index in the tensor, or [`NO_INDEX`].
    #[inline(always)]
    pub fn position(&self, index: usize) -> usize {
        if let [(start, end, _)] = self.runs[..] {
            return if (start..end).contains(&index) { index - start } else { NO_INDEX };
        }
        let run = self.runs.partition_point(|&(start, ..)| start <= index).checked_sub(1).map(|r| self.runs[r]);
        run.filter(|&(_, end, _)| index < end).map_or(NO_INDEX, |(start, _, local)| local + index - start)
    }

    /// Writes the positions of indices; negative indices are held nowhere.
    fn positions<'a>(&self, indices: &[i64], to: &'a mut [MaybeUninit<usize>]) -> &'a [usize] {
        for (to, &index) in to.iter_mut().zip(indices) {
            to.write(usize::try_from(index).map_or(NO_INDEX, |index| self.position(index)));
        }
        // SAFETY: as many were just written as there are indices.
        unsafe { to[..indices.len()].assume_init_ref() }
    }
}

/// The elements of a contiguous index tensor, which outlives it.
#[derive(Clone, Copy)]
pub(super) struct IndexElements<'a> {
    tensor: &'a Tensor,
    first: *const u8,
}

// SAFETY: the address is that of elements that nobody writes while the tensor is borrowed.
unsafe impl Send for IndexElements<'_> {}
// SAFETY: as above.
unsafe impl Sync for IndexElements<'_> {}

impl<'a> IndexElements<'a> {
    /// # Panics
    /// If the tensor is not contiguous.
    pub(super) fn new(tensor: &'a Tensor) -> Self {
        assert!(tensor.is_contiguous());
        IndexElements { tensor, first: with_first_element(tensor, |first, _| first) }
    }

    /// Reads indices from number `from` on.
    pub(super) fn read<'b>(
        &self,
        from: usize,
        count: usize,
        buffer: &'b mut [MaybeUninit<i64>; INDEX_BLOCK],
    ) -> &'b [i64] {
        assert!(from + count <= self.tensor.elem_count());
        let (dtype, buffer) = (self.tensor.dtype(), &mut buffer[..count]);
        let block = Block { rows: 1, row_stride: 0, width: count, stride: 1 };
        // SAFETY: the elements are inside the tensor, and the buffer has the size of the block.
        unsafe {
            i64::load(dtype, self.first.add(from * dtype.size_in_bytes()), block, buffer);
            buffer.assume_init_ref()
        }
    }

    /// Calls `body` with the numbers of the first index of each block in a range, and the positions of the block's indices.
    pub(super) fn for_each_block(&self, range: Range<usize>, held: &IndexRange, mut body: impl FnMut(usize, &[usize])) {
        let mut indices = [MaybeUninit::uninit(); INDEX_BLOCK];
        let mut positions = [MaybeUninit::uninit(); INDEX_BLOCK];
        for from in range.clone().step_by(INDEX_BLOCK) {
            let count = INDEX_BLOCK.min(range.end - from);
            body(from, held.positions(self.read(from, count, &mut indices), &mut positions));
        }
    }
}

/// The first element of an integer tensor that is neither in `range` nor `ignored`, in row-major order.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor.
pub fn first_outside(tensor: &Tensor, range: Range<i64>, ignored: Option<i64>) -> Result<Option<i64>> {
    let tensor = contiguous(tensor)?;
    let (elements, count) = (IndexElements::new(&tensor), tensor.elem_count());
    let mut buffer = [MaybeUninit::uninit(); INDEX_BLOCK];
    for from in (0..count).step_by(INDEX_BLOCK) {
        let indices = elements.read(from, INDEX_BLOCK.min(count - from), &mut buffer);
        if simd::run(AllInside { indices, range: &range }) {
            continue;
        }
        let outside = |i: &&i64| !range.contains(*i) && ignored != Some(**i);
        if let Some(&index) = indices.iter().find(outside) {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

/// Whether all indices are in a range.
struct AllInside<'a> {
    indices: &'a [i64],
    range: &'a Range<i64>,
}

impl simd::Kernel for AllInside<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> bool {
        self.indices.iter().fold(true, |all, i| all & (*i >= self.range.start) & (*i < self.range.end))
    }
}

/// Returns an integer tensor as i64, with `n` added to negative elements.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor, or memory does not suffice.
pub fn wrapped_indices(tensor: &Tensor, n: usize) -> Result<Tensor> {
    let tensor = contiguous(tensor)?;
    let (elements, count) = (IndexElements::new(&tensor), tensor.elem_count());
    let mut buffer = [MaybeUninit::uninit(); INDEX_BLOCK];
    // SAFETY: the blocks together are all elements.
    unsafe {
        super::typed_slice::filled_by::<i64>(tensor.dims(), |to| {
            for from in (0..count).step_by(INDEX_BLOCK) {
                let indices = elements.read(from, INDEX_BLOCK.min(count - from), &mut buffer);
                for (i, &index) in indices.iter().enumerate() {
                    to.get().add(from + i).write(if index < 0 { index + n as i64 } else { index });
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn positions_are_those_of_the_runs() {
        let held = IndexRange::new([2..5, 9..10, 20..23]);
        let expected = |i: usize| match i {
            2..5 => i - 2,
            9 => 3,
            20..23 => i - 16,
            _ => NO_INDEX,
        };
        assert_eq!(held.len(), 7);
        (0..30).for_each(|i| assert_eq!(held.position(i), expected(i), "{i}"));
        assert_eq!(IndexRange::new([]).position(0), NO_INDEX);
    }

    #[test]
    fn the_first_element_outside_is_found_in_every_type_and_block() {
        for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64] {
            for at in [0, 1, 255, 256, 700] {
                let mut indices = vec![3i64; 701];
                (indices[at], indices[700]) = (100, 100);
                indices[0] = if at == 0 { 100 } else { 99 };
                let tensor = Tensor::new(indices, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                assert_eq!(first_outside(&tensor, 0..50, Some(99)).unwrap(), Some(100), "{dtype:?} {at}");
                assert_eq!(first_outside(&tensor, 0..101, None).unwrap(), None);
            }
        }
        let far = Tensor::new(&[1i64, i64::MAX, -1, i64::MIN], &Device::Cpu).unwrap();
        assert_eq!(first_outside(&far, 0..i64::MAX, None).unwrap(), Some(i64::MAX));
        assert_eq!(wrapped_indices(&far, 5).unwrap().to_vec1::<i64>().unwrap(), [1, i64::MAX, 4, i64::MIN + 5]);
    }
}
