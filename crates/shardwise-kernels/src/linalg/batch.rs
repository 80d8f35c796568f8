//! Batches of matrices: the leading dimensions of operands broadcast, and every matrix of a result is computed on its own.

use candle_core::{Tensor, WithDType};

use super::real::MatrixElement;
use crate::error::Result;
use crate::parallel::{SharedPtr, over_ranges};
use crate::typed_slice::with_slice;
use crate::uninit_buffer::UninitBuffer;

/// An operand: the batch dimensions and the elements of one item (a matrix, or a vector).
#[derive(Debug, Clone)]
pub(super) struct MatrixOperand<'a> {
    batch: &'a [usize],
    item: &'a [usize],
}

impl<'a> MatrixOperand<'a> {
    /// Divides the dimensions of a tensor: the last `ndim` are one item.
    pub(super) fn new(x: &'a Tensor, ndim: usize) -> Self {
        let (batch, item) = x.dims().split_at(x.dims().len() - ndim);
        MatrixOperand { batch, item }
    }

    pub(super) fn batch(&self) -> &'a [usize] {
        self.batch
    }

    /// Size of a dimension of an item, counted from the last.
    pub(super) fn size(&self, from_last: usize) -> usize {
        self.item[self.item.len() - from_last]
    }

    /// Elements of one item.
    pub(super) fn elements(&self) -> usize {
        self.item.iter().product()
    }

    /// The item of this operand that belongs to item `at` of a result with batch dimensions `of`, which this operand's
    /// broadcast to.
    pub(super) fn place(&self, of: &[usize], mut at: usize) -> usize {
        let (mut place, mut step) = (0, 1);
        for (d, &n) in of.iter().enumerate().rev() {
            let index = at % n;
            at /= n;
            if let Some(own) = (d + self.batch.len()).checked_sub(of.len()) {
                if self.batch[own] != 1 {
                    place += index * step;
                }
                step *= self.batch[own];
            }
        }
        place
    }
}

/// The batch dimensions that those of the operands broadcast to. They are known to fit.
pub(super) fn broadcast(operands: &[&[usize]]) -> Vec<usize> {
    let ndim = operands.iter().map(|b| b.len()).max().unwrap_or(0);
    let size = |d: usize| {
        let sizes = operands.iter().filter_map(|b| (d + b.len()).checked_sub(ndim).map(|own| b[own]));
        sizes.fold(1, |size, n| if n == 1 { size } else { n })
    };
    (0..ndim).map(size).collect()
}

/// Builds the tensors of a result: `real` and `whole` are the shapes of one item of each output, `cost` the work per item.
///
/// `body` gets the number of an item and the memory of its outputs, which holds zeros.
pub(super) fn over_items<T: MatrixElement, I: WithDType, const R: usize, const W: usize>(
    batch: &[usize],
    real: [&[usize]; R],
    whole: [&[usize]; W],
    cost: usize,
    body: impl Fn(usize, [&mut [T]; R], [&mut [I]; W]) + Sync,
) -> Result<([Tensor; R], [Tensor; W])> {
    let count: usize = batch.iter().product();
    let size = |item: &[usize]| item.iter().product::<usize>();
    let mut reals = Vec::with_capacity(R);
    for item in real {
        reals.push(UninitBuffer::zeroed(T::DTYPE, count * size(item))?);
    }
    let mut wholes = Vec::with_capacity(W);
    for item in whole {
        wholes.push(UninitBuffer::zeroed(I::DTYPE, count * size(item))?);
    }
    let real_memory: [SharedPtr<T>; R] = std::array::from_fn(|i| SharedPtr::new(reals[i].first().cast()));
    let whole_memory: [SharedPtr<I>; W] = std::array::from_fn(|i| SharedPtr::new(wholes[i].first().cast()));
    over_ranges(count, cost, 1, |range| {
        for at in range {
            // SAFETY: the memory has `count` items of this size, all zeros, and no other range has this one.
            let part = |i: usize| unsafe {
                std::slice::from_raw_parts_mut(real_memory[i].get().add(at * size(real[i])), size(real[i]))
            };
            // SAFETY: as above.
            let whole_part = |i: usize| unsafe {
                std::slice::from_raw_parts_mut(whole_memory[i].get().add(at * size(whole[i])), size(whole[i]))
            };
            body(at, std::array::from_fn(part), std::array::from_fn(whole_part));
        }
    });
    // SAFETY: every element was zeroed when it was allocated, and zeros are numbers of every type.
    let tensor = |(memory, item): (UninitBuffer, &[usize])| unsafe { memory.finish([batch, item].concat()) };
    let mut reals = reals.into_iter().zip(real).map(tensor);
    let mut wholes = wholes.into_iter().zip(whole).map(tensor);
    let next = |tensors: &mut dyn Iterator<Item = Tensor>| tensors.next().expect("one per shape");
    Ok((std::array::from_fn(|_| next(&mut reals)), std::array::from_fn(|_| next(&mut wholes))))
}

/// Runs `body` with the elements of two tensors.
pub(super) fn with_slices<A: WithDType, B: WithDType, R>(
    a: &Tensor,
    b: &Tensor,
    body: impl FnOnce(&[A], &[B]) -> Result<R>,
) -> Result<R> {
    with_slice::<A, _>(a, |a| with_slice::<B, _>(b, |b| body(a, b)))??
}

/// Item `at` of a slice of items with `size` elements each.
pub(super) fn item<T>(of: &[T], at: usize, size: usize) -> &[T] {
    &of[at * size..(at + 1) * size]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_broadcast_from_the_last_dimension() {
        assert_eq!(broadcast(&[&[2, 1], &[3]]), [2, 3]);
        assert_eq!(broadcast(&[&[], &[0, 1], &[5]]), [0, 5]);
        let of = [2, 3];
        let places = |batch: &[usize]| {
            let operand = MatrixOperand { batch, item: &[1] };
            (0..6).map(|at| operand.place(&of, at)).collect::<Vec<_>>()
        };
        assert_eq!(places(&[2, 1]), [0, 0, 0, 1, 1, 1]);
        assert_eq!(places(&[3]), [0, 1, 2, 0, 1, 2]);
        assert_eq!(places(&[]), [0; 6]);
        assert_eq!(places(&[2, 3]), [0, 1, 2, 3, 4, 5]);
    }
}
