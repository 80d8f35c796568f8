//! Elementwise functions of broadcast tensors of any types and strides, in one pass over memory.

use std::array::from_fn;
use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{DType, Layout, Storage, Tensor};
use smallvec::SmallVec;

use super::convert::{Block, Compute};
use super::parallel::{SharedPtr, over_ranges};
use super::uninit_buffer::UninitBuffer;
use super::{contiguous, first_element, simd};
use crate::error::Result;

/// Elements per block where inputs or the output have to be converted or gathered: with at most 3 inputs, the buffers of
/// f64 take 16 KiB and stay in the first-level cache.
const CHUNK: usize = 512;

/// Elements per block where nothing has to be converted or gathered: long enough that the work per block does not count.
const LONG_CHUNK: usize = 8192;

/// Elements that are checked together for the shorter form of a function: 8 vectors of AVX-512.
const NEAR_BLOCK: usize = 128;

/// Cost per element of a function in f64 for [`over_ranges`]: most are library calls of 5 to 40 ns.
const F64_COST: usize = 20;

/// A function of `N` elements, in each of the three types in which it may be computed ([`ComputeType`]).
///
/// Fields of the implementing type are its constant arguments. The methods must be `#[inline(always)]`: the loop around them
/// is compiled for several instruction sets, and only what is inlined is compiled with it.
pub trait PointwiseFn<const N: usize>: Copy + Sync {
    /// Whether [`f32_near`](Self::f32_near) is a shorter form of [`f32`](Self::f32).
    const HAS_NEAR: bool = false;

    /// Computes in f32; `FMA` is passed on to the functions of [`math`](super::math).
    fn f32<const FMA: bool>(self, x: [f32; N]) -> f32;
    /// Computes in f32 where [`is_near`](Self::is_near) holds, with the same bits.
    #[inline(always)]
    fn f32_near<const FMA: bool>(self, x: [f32; N]) -> f32 {
        self.f32::<FMA>(x)
    }
    /// Whether the shorter form may be used, as in [`math::is_near`](super::math::is_near).
    #[inline(always)]
    fn is_near(self, _: [f32; N]) -> bool {
        true
    }
    /// Computes in f64.
    fn f64(self, x: [f64; N]) -> f64;
    /// Computes in i64, for integer results.
    fn i64(self, x: [i64; N]) -> i64;
}

/// A [`PointwiseFn`] from two closures: one in f64, used for f32 as well, and one in i64.
#[derive(Clone, Copy)]
pub struct ViaF64<R, W>(pub R, pub W);

impl<const N: usize, R, W> PointwiseFn<N> for ViaF64<R, W>
where
    R: Fn([f64; N]) -> f64 + Copy + Sync,
    W: Fn([i64; N]) -> i64 + Copy + Sync,
{
    #[inline(always)]
    fn f32<const FMA: bool>(self, x: [f32; N]) -> f32 {
        (self.0)(x.map(f64::from)) as f32
    }

    #[inline(always)]
    fn f64(self, x: [f64; N]) -> f64 {
        (self.0)(x)
    }

    #[inline(always)]
    fn i64(self, x: [i64; N]) -> i64 {
        (self.1)(x)
    }
}

/// A [`PointwiseFn`] from three closures: in f32, f64 and i64.
#[derive(Clone, Copy)]
pub struct PerType<S, R, W>(pub S, pub R, pub W);

impl<const N: usize, S, R, W> PointwiseFn<N> for PerType<S, R, W>
where
    S: Fn([f32; N]) -> f32 + Copy + Sync,
    R: Fn([f64; N]) -> f64 + Copy + Sync,
    W: Fn([i64; N]) -> i64 + Copy + Sync,
{
    #[inline(always)]
    fn f32<const FMA: bool>(self, x: [f32; N]) -> f32 {
        (self.0)(x)
    }

    #[inline(always)]
    fn f64(self, x: [f64; N]) -> f64 {
        (self.1)(x)
    }

    #[inline(always)]
    fn i64(self, x: [i64; N]) -> i64 {
        (self.2)(x)
    }
}

/// The type in which an elementwise function is computed; inputs are converted to it, results from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeType {
    /// f32, for f32 and the types that it represents exactly.
    F32,
    /// f64, for f64 and for integers of 32 and 64 bits.
    F64,
    /// i64, for functions of integers with an integer result. Arithmetic wraps where the function does.
    I64,
}

impl ComputeType {
    /// The floating-point type for inputs of these types: f32 if it represents all of them exactly, else f64.
    pub fn float_for(types: impl IntoIterator<Item = DType>) -> Self {
        let exact = |t| matches!(t, DType::F32 | DType::F16 | DType::BF16 | DType::U8 | DType::I16);
        if types.into_iter().all(exact) { ComputeType::F32 } else { ComputeType::F64 }
    }
}

/// Applies a function element by element to tensors that broadcast to `shape`, and returns a new contiguous tensor of
/// `dtype`.
///
/// The inputs may differ in type and strides. The function is computed in `compute`; results convert to `dtype` (integers
/// wrap, floats saturate). Large tensors are divided over the threads of the pool. The bits of a result do not depend on the
/// position of its element.
///
/// # Panics
/// If an input does not broadcast to `shape`.
pub fn pointwise<const N: usize, F: PointwiseFn<N>>(
    f: F,
    inputs: [&Tensor; N],
    shape: &[usize],
    compute: ComputeType,
    dtype: DType,
) -> Result<Tensor> {
    match compute {
        ComputeType::F32 => {
            over_blocks(inputs, shape, dtype, N + 1, &|inputs, out| simd::run(PointwiseF32 { f, inputs, out }))
        }
        ComputeType::F64 => {
            over_blocks(inputs, shape, dtype, F64_COST, &|inputs, out| simd::run(PointwiseF64 { f, inputs, out }))
        }
        ComputeType::I64 => {
            over_blocks(inputs, shape, dtype, 2 * (N + 1), &|inputs, out| simd::run(PointwiseI64 { f, inputs, out }))
        }
    }
}

/// Applies a function to some elements in f32, with the bits of [`pointwise`].
pub fn pointwise_f32<F: PointwiseFn<1>>(f: F, x: &[f32], out: &mut [MaybeUninit<f32>]) {
    simd::run(PointwiseF32 { f, inputs: [x], out });
}

pub(crate) struct PointwiseF32<'a, F, const N: usize> {
    pub(crate) f: F,
    pub(crate) inputs: [&'a [f32]; N],
    pub(crate) out: &'a mut [MaybeUninit<f32>],
}

impl<F: PointwiseFn<N>, const N: usize> simd::Kernel for PointwiseF32<'_, F, N> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let PointwiseF32 { f, inputs, out } = self;
        if !F::HAS_NEAR {
            return each(inputs, out, |x| f.f32::<FMA>(x));
        }
        // Full blocks: the check and each of the two loops have no remainder. The second reads from the first-level cache.
        let full = out.len() - out.len() % NEAR_BLOCK;
        let (blocks, rest) = out.split_at_mut(full);
        for (i, out) in blocks.as_chunks_mut::<NEAR_BLOCK>().0.iter_mut().enumerate() {
            let block: [&[f32]; N] = from_fn(|k| &inputs[k][i * NEAR_BLOCK..][..NEAR_BLOCK]);
            if all_near(f, block) {
                each(block, out, |x| f.f32_near::<FMA>(x));
            } else {
                each(block, out, |x| f.f32::<FMA>(x));
            }
        }
        let remainder: [&[f32]; N] = from_fn(|k| &inputs[k][full..][..rest.len()]);
        if all_near(f, remainder) {
            each(remainder, rest, |x| f.f32_near::<FMA>(x));
        } else {
            each(remainder, rest, |x| f.f32::<FMA>(x));
        }
    }
}

/// Whether the shorter form may be used for all elements. Without an early exit, so that the loop becomes vector
/// instructions.
#[inline(always)]
fn all_near<F: PointwiseFn<N>, const N: usize>(f: F, inputs: [&[f32]; N]) -> bool {
    (0..inputs[0].len()).fold(true, |near, i| near & f.is_near(from_fn(|k| inputs[k][i])))
}

struct PointwiseI64<'a, F, const N: usize> {
    f: F,
    inputs: [&'a [i64]; N],
    out: &'a mut [MaybeUninit<i64>],
}

impl<F: PointwiseFn<N>, const N: usize> simd::Kernel for PointwiseI64<'_, F, N> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        each(self.inputs, self.out, |x| self.f.i64(x));
    }
}

struct PointwiseF64<'a, F, const N: usize> {
    f: F,
    inputs: [&'a [f64]; N],
    out: &'a mut [MaybeUninit<f64>],
}

impl<F: PointwiseFn<N>, const N: usize> simd::Kernel for PointwiseF64<'_, F, N> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        each(self.inputs, self.out, |x| self.f.f64(x));
    }
}

/// Writes `f(inputs[..][i])` to `out[i]`. The bits do not depend on `i`: the remainder after the last full vector is
/// computed with the same operations.
#[inline(always)]
pub(super) fn each<T: Copy, const N: usize>(inputs: [&[T]; N], out: &mut [MaybeUninit<T>], f: impl Fn([T; N]) -> T) {
    let inputs: [&[T]; N] = from_fn(|k| &inputs[k][..out.len()]);
    for (i, out) in out.iter_mut().enumerate() {
        out.write(f(from_fn(|k| inputs[k][i])));
    }
}

/// A loop over a block of elements: inputs of one length, and an output of that length to write.
type BlockLoop<'a, C, const N: usize> = &'a (dyn Fn([&[C]; N], &mut [MaybeUninit<C>]) + Sync);

/// Calls a loop with the elements of tensors that broadcast to `shape`: in long ranges where no input has to be converted,
/// broadcast or gathered, else block by block. `cost` is that of an element for [`over_ranges`].
fn over_blocks<C: Compute, const N: usize>(
    inputs: [&Tensor; N],
    shape: &[usize],
    dtype: DType,
    cost: usize,
    body: BlockLoop<'_, C, N>,
) -> Result<Tensor> {
    let count = shape.iter().product();
    let output = UninitBuffer::new(dtype, count)?;
    if count > 0 {
        let mut copies = [const { None }; N];
        for (copy, input) in copies.iter_mut().zip(inputs).filter(|(_, input)| is_transposed(input)) {
            *copy = Some(contiguous(input)?);
        }
        let inputs: [&Tensor; N] = from_fn(|k| copies[k].as_ref().unwrap_or(inputs[k]));
        let guards = inputs.map(Tensor::storage_and_layout);
        let sources: [InputMemory; N] = from_fn(|k| InputMemory::new(&guards[k].0, guards[k].1));
        let in_place =
            (0..N).all(|k| sources[k].dtype == C::DTYPE && inputs[k].dims() == shape && inputs[k].is_contiguous());
        let out = SharedPtr::new(output.first());
        if in_place && dtype == C::DTYPE {
            // Ranges begin at multiples of a block, so that no range but the last has a remainder.
            over_ranges(count, cost, NEAR_BLOCK, |range| {
                // SAFETY: the tensors are contiguous with `count` elements of this type, and the guards keep them; ranges do
                // not overlap.
                unsafe {
                    let part = |k: usize| {
                        std::slice::from_raw_parts(sources[k].first().cast::<C>().add(range.start), range.len())
                    };
                    let out = out.get().cast::<MaybeUninit<C>>().add(range.start);
                    body(from_fn(part), std::slice::from_raw_parts_mut(out, range.len()));
                }
            });
        } else {
            let blocks = Blocks::new(&sources, merged_dims(shape, from_fn(|k| guards[k].1)), dtype, C::DTYPE);
            over_ranges(blocks.count(), cost * blocks.rows * blocks.width, 1, |range| {
                // SAFETY: the sizes and strides are those of the tensors, which the guards keep; ranges do not overlap.
                unsafe { blocks.run(range, out.get(), body) };
            });
        }
    }
    // SAFETY: the loop wrote every element.
    Ok(unsafe { output.finish(shape) })
}

/// Whether the innermost dimension has a stride above 1 (a transposed tensor) and the tensor is more than one block: then
/// it is faster to copy it in tiles first than to gather each block across cache lines.
fn is_transposed(t: &Tensor) -> bool {
    let innermost = t.dims().iter().zip(t.stride()).rev().find(|(size, _)| **size > 1);
    innermost.is_some_and(|(_, &stride)| stride > 1) && t.elem_count() > CHUNK
}

/// Address of the first element of an input, which is read only, and the element type.
#[derive(Clone, Copy)]
struct InputMemory {
    first: SharedPtr<u8>,
    dtype: DType,
}

impl InputMemory {
    fn new(storage: &Storage, layout: &Layout) -> Self {
        let (first, dtype) = first_element(storage, layout);
        InputMemory { first: SharedPtr::new(first.cast_mut()), dtype }
    }

    fn first(&self) -> *const u8 {
        self.first.get()
    }
}

/// A dimension of the output: its size, and the stride of every input, 0 where the input is broadcast.
type BroadcastDim<const N: usize> = (usize, [usize; N]);

/// The dimensions of the output, without those of size 1, and with adjacent dimensions merged where every input allows it.
fn merged_dims<const N: usize>(shape: &[usize], layouts: [&Layout; N]) -> SmallVec<[BroadcastDim<N>; 6]> {
    let mut dims: SmallVec<[BroadcastDim<N>; 6]> = SmallVec::new();
    for (d, &size) in shape.iter().enumerate().filter(|&(_, &size)| size != 1) {
        let strides: [usize; N] = from_fn(|k| {
            let missing = shape.len() - layouts[k].dims().len();
            let broadcast = d < missing || layouts[k].dims()[d - missing] == 1;
            // Otherwise memory outside the input would be read.
            assert!(broadcast || layouts[k].dims()[d - missing] == size, "{:?} to {shape:?}", layouts[k].dims());
            if broadcast { 0 } else { layouts[k].stride()[d - missing] }
        });
        match dims.last_mut() {
            Some((n, outer)) if (0..N).all(|k| outer[k] == strides[k] * size) => (*n, *outer) = (*n * size, strides),
            _ => dims.push((size, strides)),
        }
    }
    dims
}

/// The general case: blocks of several rows of the last dimension, or of a part of one row. Inputs and outputs that are not
/// contiguous in the compute type go through buffers.
struct Blocks<'a, const N: usize> {
    sources: &'a [InputMemory; N],
    dims: SmallVec<[BroadcastDim<N>; 6]>,
    /// Type of the result.
    dtype: DType,
    /// Rows and elements per row of a block; the last of each dimension may be smaller.
    rows: usize,
    width: usize,
}

impl<'a, const N: usize> Blocks<'a, N> {
    fn new(sources: &'a [InputMemory; N], dims: SmallVec<[BroadcastDim<N>; 6]>, dtype: DType, compute: DType) -> Self {
        let (n, stride) = dims.last().copied().unwrap_or((1, [0; N]));
        let direct = dtype == compute && (0..N).all(|k| sources[k].dtype == compute && stride[k] == 1);
        let (rows, width) = match n {
            _ if n >= CHUNK && direct => (1, n.min(LONG_CHUNK)),
            _ if n >= CHUNK => (1, CHUNK),
            _ => (CHUNK / n, n),
        };
        Blocks { sources, dims, dtype, rows, width }
    }

    /// The last two dimensions: their sizes, and the strides of the inputs.
    fn inner(&self) -> [BroadcastDim<N>; 2] {
        let last = self.dims.last().copied().unwrap_or((1, [0; N]));
        [self.dims.len().checked_sub(2).map_or((1, [0; N]), |d| self.dims[d]), last]
    }

    fn outer(&self) -> &[BroadcastDim<N>] {
        &self.dims[..self.dims.len().saturating_sub(2)]
    }

    /// Number of blocks along the last two dimensions.
    fn per_matrix(&self) -> [usize; 2] {
        let [(m, _), (n, _)] = self.inner();
        [m.div_ceil(self.rows), n.div_ceil(self.width)]
    }

    fn count(&self) -> usize {
        self.outer().iter().map(|(size, _)| size).product::<usize>() * self.per_matrix().iter().product::<usize>()
    }

    /// Computes the blocks with these numbers, counted in row-major order.
    ///
    /// # Safety
    /// Every element that sizes and strides reach is readable; `out` can be written for as many elements, and no other thread
    /// writes to those of these blocks.
    unsafe fn run<C: Compute>(&self, numbers: Range<usize>, out: *mut u8, body: BlockLoop<'_, C, N>) {
        let Blocks { sources, dtype, .. } = *self;
        let [(m, row_stride), (n, stride)] = self.inner();
        let [down, across] = self.per_matrix();
        let mut buffers = [[MaybeUninit::<C>::uninit(); CHUNK]; N];
        let mut results = [MaybeUninit::<C>::uninit(); CHUNK];
        // What each buffer holds: a broadcast input is often the same for block after block and is then loaded once.
        let mut held = [(std::ptr::null::<u8>(), 0, 0); N];
        for number in numbers {
            let (matrix, i, j) =
                (number / across / down, number / across % down * self.rows, number % across * self.width);
            let begin = offsets(self.outer(), matrix);
            let (rows, width) = (self.rows.min(m - i), self.width.min(n - j));
            let count = rows * width;
            for k in 0..N {
                let source = sources[k];
                let offset = begin[k] + i * row_stride[k] + j * stride[k];
                // SAFETY: the block is a part of the tensor.
                let first = unsafe { source.first().add(offset * source.dtype.size_in_bytes()) };
                let in_place = source.dtype == C::DTYPE && stride[k] == 1 && (rows == 1 || row_stride[k] == width);
                if !in_place && held[k] != (first, rows, width) {
                    let block = Block { rows, row_stride: row_stride[k], width, stride: stride[k] };
                    // SAFETY: as above; a block that is not read in place has no more elements than a buffer.
                    unsafe { C::load(source.dtype, first, block, &mut buffers[k][..count]) };
                }
                held[k] = (first, if in_place { 0 } else { rows }, width);
            }
            let inputs: [&[C]; N] = from_fn(|k| match held[k] {
                // SAFETY: read in place: the elements of the block are contiguous.
                (first, 0, _) => unsafe { std::slice::from_raw_parts(first.cast(), count) },
                // SAFETY: loaded above, or for a block before this one.
                _ => unsafe { buffers[k][..count].assume_init_ref() },
            });
            // SAFETY: blocks follow each other in row-major order: those before this one fill the rows above it, and if rows
            // are divided, it has one row.
            unsafe {
                let to = out.add(((matrix * m + i) * n + j) * dtype.size_in_bytes());
                if dtype == C::DTYPE {
                    body(inputs, std::slice::from_raw_parts_mut(to.cast(), count));
                } else {
                    body(inputs, &mut results[..count]);
                    C::store(dtype, results[..count].assume_init_ref(), to);
                }
            }
        }
    }
}

/// Offsets of the inputs, in elements, for index `number` of the outer dimensions in row-major order.
fn offsets<const N: usize>(outer: &[BroadcastDim<N>], mut number: usize) -> [usize; N] {
    let mut begin = [0; N];
    for (size, strides) in outer.iter().rev() {
        let index = number % size;
        number /= size;
        (0..N).for_each(|k| begin[k] += index * strides[k]);
    }
    begin
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn values(t: &Tensor) -> Vec<f64> {
        t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
    }

    /// A weighted sum of the inputs, so that swapped inputs or wrong elements change the result.
    fn weighted_sum<const N: usize>() -> impl PointwiseFn<N> {
        let real = |x: [f64; N]| x.iter().fold(0.0, |sum, x| sum * 3.0 + x);
        ViaF64(real, move |x: [i64; N]| real(x.map(|x| x as f64)) as i64)
    }

    fn check<const N: usize>(inputs: [&Tensor; N], shape: &[usize]) {
        let expanded = inputs.map(|t| values(&t.broadcast_as(shape).unwrap()));
        let expected: Vec<f64> =
            (0..shape.iter().product()).map(|i| expanded.iter().fold(0.0, |sum, x| sum * 3.0 + x[i])).collect();
        for arithmetic in [ComputeType::F32, ComputeType::F64, ComputeType::I64] {
            for dtype in [DType::F32, DType::F64, DType::I64, DType::I32] {
                let got = pointwise(weighted_sum::<N>(), inputs, shape, arithmetic, dtype).unwrap();
                assert_eq!((got.dims(), got.dtype()), (shape, dtype));
                assert!(got.is_contiguous());
                let layouts = inputs.map(Tensor::layout);
                assert_eq!(values(&got), expected, "{layouts:?} in {arithmetic:?} as {dtype:?}");
            }
        }
    }

    #[test]
    fn inputs_of_any_strides_and_types_broadcast() {
        let numbers = |shape: &[usize], dtype: DType| {
            let count = shape.iter().product::<usize>() as u32;
            let t = Tensor::arange(0u32, count, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
            // Small enough to be exact in every type.
            let small = (&t - ((&t / 120.0).unwrap().floor().unwrap() * 120.0).unwrap()).unwrap();
            small.reshape(shape).unwrap().to_dtype(dtype).unwrap()
        };
        // Rows shorter and longer than a chunk.
        for (m, n) in [(1, 1), (3, 5), (40, 100), (1, 700), (3, 700), (700, 3), (5, 512)] {
            for (one, other) in [(DType::F32, DType::F32), (DType::F64, DType::U8), (DType::BF16, DType::I64)] {
                let matrix = numbers(&[m, n], one);
                check([&matrix], &[m, n]);
                let turned = numbers(&[n, m], one).t().unwrap();
                check([&turned], &[m, n]);
                let narrowed = numbers(&[m + 2, n + 2], one).narrow(0, 1, m).unwrap().narrow(1, 2, n).unwrap();
                for partner in [&[m, n][..], &[n], &[m, 1], &[], &[1, 1]] {
                    let partner = numbers(partner, other);
                    for first in [&matrix, &turned, &narrowed] {
                        check([first, &partner], &[m, n]);
                        check([&partner, first], &[m, n]);
                        check([&partner, first, &turned], &[m, n]);
                    }
                }
            }
        }
        let (a, b) = (numbers(&[4, 1, 6, 5], DType::F32), numbers(&[3, 1, 5], DType::F16));
        check([&a.transpose(0, 2).unwrap(), &b], &[6, 3, 4, 5]);
        check([&numbers(&[0, 3], DType::F32), &numbers(&[3], DType::F32)], &[0, 3]);
        check([&matrix_without_elements()], &[0, 2]);
    }

    /// A view whose offset is outside its storage.
    fn matrix_without_elements() -> Tensor {
        Tensor::zeros((4, 2), DType::F32, &Device::Cpu).unwrap().narrow(0, 4, 0).unwrap()
    }

    #[test]
    fn the_bits_of_a_result_do_not_depend_on_its_position() {
        #[derive(Clone, Copy)]
        struct Gelu;
        impl PointwiseFn<1> for Gelu {
            #[inline(always)]
            fn f32<const FMA: bool>(self, [x]: [f32; 1]) -> f32 {
                crate::math::gelu::<FMA>(x)
            }
            #[inline(always)]
            fn f64(self, [x]: [f64; 1]) -> f64 {
                x
            }
            #[inline(always)]
            fn i64(self, [x]: [i64; 1]) -> i64 {
                x
            }
        }
        let gelu = |x: &Tensor| {
            let y = pointwise(Gelu, [x], x.dims(), ComputeType::F32, DType::F32).unwrap();
            y.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let x = Tensor::arange(-400f32, 400.0, &Device::Cpu).unwrap().affine(0.01, 0.003).unwrap();
        let all = gelu(&x);
        for (start, len) in [(0, 1), (1, 7), (3, 64), (5, 100), (17, 700), (793, 7)] {
            assert_eq!(gelu(&x.narrow(0, start, len).unwrap()), all[start..start + len]);
        }
        let strided = Tensor::stack(&[&x, &x], 1).unwrap().narrow(1, 1, 1).unwrap().squeeze(1).unwrap();
        assert_eq!(gelu(&strided), all);
    }

    #[test]
    fn the_bits_of_a_result_do_not_depend_on_the_number_of_threads() {
        let product = PerType(|[a, b]: [f32; 2]| a * b + a, |[a, b]: [f64; 2]| a * b + a, |[a, b]: [i64; 2]| a * b + a);
        let column = |n: usize| Tensor::arange(0u32, n as u32, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        let large = (column(300 * 701).affine(0.37, -40_000.0).unwrap()).reshape((300, 701)).unwrap();
        let row = column(701).affine(0.11, 3.0).unwrap();
        let bytes = |threads: usize, a: &Tensor, b: &Tensor, compute: ComputeType, dtype: DType| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let output = pool.install(|| pointwise(product, [a, b], &[300, 701], compute, dtype)).unwrap();
            crate::bytes_of(&output).unwrap()
        };
        for (dtype, compute) in
            [(DType::F32, ComputeType::F32), (DType::F64, ComputeType::F64), (DType::BF16, ComputeType::F32)]
        {
            let (large, row) = (large.to_dtype(dtype).unwrap(), row.to_dtype(dtype).unwrap());
            // In place, broadcast, and block by block with a conversion.
            for (a, b) in [(&large, &large), (&large, &row), (&row, &large)] {
                for output in [dtype, DType::F16] {
                    let expected = bytes(1, a, b, compute, output);
                    for threads in [2, 3, 5] {
                        assert_eq!(bytes(threads, a, b, compute, output), expected, "{dtype:?} on {threads} threads");
                    }
                }
            }
        }
    }
}
