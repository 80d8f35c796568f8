//! A product of two matrices in memory, and the blocks in which it is summed.

use std::mem::MaybeUninit;

use super::pack::{MatmulElement, Source};
use crate::parallel::SharedPtr;

/// Products per block of the contracted dimension. A panel of the left factor (8 rows of 512 f32, 16 KiB) stays in the first
/// cache while panels of the right one are read from the second.
pub(super) const DEPTH: usize = 512;

/// A product of two matrices in memory.
#[derive(Clone, Copy)]
pub(super) struct MatrixProduct<S: MatmulElement> {
    /// Rows, columns and the contracted dimension.
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) left: Source<S>,
    pub(super) right: Source<S>,
    /// A row that is added to every row of the result.
    pub(super) bias: Option<*const S::Wide>,
    /// Whether the product is added to what the result holds. Without a bias.
    pub(super) accumulates: bool,
}

/// Reads some elements and writes as many results.
type ElementsFn<T> = dyn Fn(&[T], &mut [MaybeUninit<T>]) + Sync;

/// A function of the elements of a product, applied to every row of a group of columns as soon as it is complete, while it is in
/// the first cache.
#[derive(Clone, Copy)]
pub(super) struct Epilogue<'a, T> {
    /// Reads some elements of the product and writes as many results.
    pub(super) apply: &'a ElementsFn<T>,
    /// The address of the results, a matrix like that of the product, or of the product itself, which is then overwritten.
    pub(super) results: SharedPtr<T>,
}

impl<T: Copy> Epilogue<'_, T> {
    /// Applies the function to `count` elements of a row, which are `offset` elements after the first of the product.
    ///
    /// # Safety
    /// The elements are complete and inside the product and the results, and no other thread uses them.
    pub(super) unsafe fn apply_to(self, product: *const T, offset: usize, count: usize) {
        // As many columns as a group has, or nearly so.
        const CHUNK: usize = 512;
        let results = self.results.get();
        let mut copy = [MaybeUninit::<T>::uninit(); CHUNK];
        for begin in (offset..offset + count).step_by(CHUNK) {
            let count = CHUNK.min(offset + count - begin);
            // SAFETY: the caller's promises. What is overwritten is read from a copy.
            unsafe {
                let from = product.add(begin);
                let to = std::slice::from_raw_parts_mut(results.add(begin).cast::<MaybeUninit<T>>(), count);
                if std::ptr::eq(product, results) {
                    std::ptr::copy_nonoverlapping(from.cast(), copy.as_mut_ptr(), count);
                    (self.apply)(copy[..count].assume_init_ref(), to);
                } else {
                    (self.apply)(std::slice::from_raw_parts(from, count), to);
                }
            }
        }
    }
}
