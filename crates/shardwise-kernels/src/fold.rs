//! Reductions over dimensions of a tensor.
//!
//! The elements that one result is made of are numbered in row-major order; each is added to the lane of its number modulo
//! [`LANES`], and the lanes are joined in a fixed order at the end. So a result depends on its own elements only, not on
//! the way that is taken through memory: a tensor cut along other dimensions gives the same bits. Lanes also keep
//! the error of sums small, and f32 is summed in f64, which costs little.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use candle_core::{DType, Tensor};

use super::convert::{Block, Compute};
use super::fresh::Fresh;
use super::{Number, dense, filled, first_element, limits, vector};
use crate::error::Result;
use crate::meta::TensorMeta;

/// Sums that are carried side by side.
pub(super) const LANES: usize = 16;

/// Columns that are reduced together: few enough that their lanes stay in the first-level cache.
const COLUMNS: usize = 128;

/// Elements that are converted at a time.
const CHUNK: usize = LANES * COLUMNS;

/// What is made of many elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fold {
    /// Whole numbers wrap.
    Sum,
    /// Whole numbers wrap.
    Product,
    /// The largest; not-a-number wins.
    Max,
    /// The smallest; not-a-number wins.
    Min,
    /// 1 if any element is not zero.
    Any,
    /// 1 if no element is zero.
    All,
    /// How many elements are not zero.
    CountNonzero,
}

impl Fold {
    /// The result for no elements, of a type.
    fn neutral(self, dtype: DType) -> Number {
        let (least, most) = limits(dtype).map_or((f64::NEG_INFINITY.into(), f64::INFINITY.into()), |(least, most)| {
            (Number::Integer(least), Number::Integer(most))
        });
        match self {
            // Not -0.0, which would leave a sum of negative zeros negative: PyTorch gives 0.0 for it, and for no elements.
            Fold::Sum | Fold::Any | Fold::CountNonzero => Number::Integer(0),
            Fold::Product | Fold::All => Number::Integer(1),
            Fold::Max => least,
            Fold::Min => most,
        }
    }
}

/// Reduces the dimensions `dims`, in ascending order, of a tensor to one of this shape and type.
pub fn fold(kind: Fold, x: &Tensor, dims: &[usize], shape: &[usize], dtype: DType) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return filled(kind.neutral(dtype), &TensorMeta { shape: shape.to_vec(), dtype });
    }
    let (x, extent) = arranged(x, dims)?;
    match x.dtype() {
        DType::F64 => fold_in::<f64>(kind, &x, extent, shape, dtype),
        t if t.is_float() => fold_in::<f32>(kind, &x, extent, shape, dtype),
        _ => fold_in::<i64>(kind, &x, extent, shape, dtype),
    }
}

/// Sizes of a dense tensor whose middle is reduced: `[outer, reduced, inner]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    outer: usize,
    reduced: usize,
    inner: usize,
}

/// The tensor as a dense one of which a middle part is reduced, copied only if it must be.
fn arranged(x: &Tensor, dims: &[usize]) -> Result<(Tensor, Extent)> {
    if x.is_contiguous()
        && let Some(extent) = extent(x.dims(), dims)
    {
        return Ok((x.clone(), extent));
    }
    let kept: Vec<usize> = (0..x.rank()).filter(|d| !dims.contains(d)).collect();
    let reduced: usize = dims.iter().map(|&d| x.dims()[d]).product();
    let others = x.elem_count() / reduced;
    let last = x.permute([&kept, dims].concat())?;
    let first = x.permute([dims, &kept].concat())?;
    if first.is_contiguous() && !last.is_contiguous() {
        return Ok((first, Extent { outer: 1, reduced, inner: others }));
    }
    Ok((dense(&last)?, Extent { outer: others, reduced, inner: 1 }))
}

/// The sizes, if the dimensions to reduce lie beside each other.
fn extent(shape: &[usize], dims: &[usize]) -> Option<Extent> {
    let mut extent = Extent { outer: 1, reduced: 1, inner: 1 };
    for (d, &size) in shape.iter().enumerate().filter(|&(_, &size)| size != 1) {
        match (dims.contains(&d), extent.reduced, extent.inner) {
            (true, _, 1) => extent.reduced *= size,
            (true, ..) => return None,
            (false, 1, _) => extent.outer *= size,
            (false, ..) => extent.inner *= size,
        }
    }
    if extent.reduced == 1 {
        // Nothing is joined: one row of results instead of many rows of one element.
        (extent.outer, extent.inner) = (1, extent.outer);
    }
    Some(extent)
}

fn fold_in<C>(kind: Fold, x: &Tensor, extent: Extent, shape: &[usize], dtype: DType) -> Result<Tensor>
where
    C: Compute,
    Sum: Step<C>,
    Product: Step<C>,
    Max: Step<C>,
    Min: Step<C>,
    Any: Step<C>,
    All: Step<C>,
    CountNonzero: Step<C>,
{
    match kind {
        Fold::Sum => fold_by::<C, Sum>(x, extent, shape, dtype),
        Fold::Product => fold_by::<C, Product>(x, extent, shape, dtype),
        Fold::Max => fold_by::<C, Max>(x, extent, shape, dtype),
        Fold::Min => fold_by::<C, Min>(x, extent, shape, dtype),
        Fold::Any => fold_by::<C, Any>(x, extent, shape, dtype),
        Fold::All => fold_by::<C, All>(x, extent, shape, dtype),
        Fold::CountNonzero => fold_by::<C, CountNonzero>(x, extent, shape, dtype),
    }
}

fn fold_by<C: Compute, S: Step<C>>(x: &Tensor, extent: Extent, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let output = Fresh::new(dtype, extent.outer * extent.inner)?;
    let (storage, layout) = x.storage_and_layout();
    let (first, from) = first_element(&storage, layout);
    let source = Source { first, dtype: from, count: x.elem_count() };
    let mut results = Results { first: output.first(), dtype };
    match extent.inner {
        1 => rows::<C, S>(&source, extent, &mut results),
        _ => (0..extent.outer).for_each(|i| columns::<C, S>(&source, i, extent, &mut results)),
    }
    // SAFETY: every result was written.
    Ok(unsafe { output.finish(shape) })
}

/// Elements one after the other.
struct Source {
    first: *const u8,
    dtype: DType,
    count: usize,
}

impl Source {
    /// The elements, if they are of this type.
    fn in_place<C: Compute>(&self) -> Option<&[C]> {
        // SAFETY: so many elements of this type lie there, and whoever made this keeps them.
        (self.dtype == C::DTYPE).then(|| unsafe { std::slice::from_raw_parts(self.first.cast(), self.count) })
    }

    /// A block that begins at an element, converted.
    fn load<'a, C: Compute>(&self, from: usize, block: Block, buffer: &'a mut [MaybeUninit<C>; CHUNK]) -> &'a [C] {
        let buffer = &mut buffer[..block.rows * block.width];
        assert!(from + (block.rows - 1) * block.row_stride + (block.width - 1) * block.stride < self.count);
        // SAFETY: the last element of the block is one of ours; the buffer has its size.
        unsafe {
            C::load(self.dtype, self.first.add(from * self.dtype.size_in_bytes()), block, buffer);
            buffer.assume_init_ref()
        }
    }
}

/// Where results are written, one after the other; there is room for all of them.
struct Results {
    first: *mut u8,
    dtype: DType,
}

impl Results {
    fn push<A: Compute>(&mut self, results: &[A]) {
        // SAFETY: as many results are pushed as there is room for.
        unsafe {
            A::store(self.dtype, results, self.first);
            self.first = self.first.add(results.len() * self.dtype.size_in_bytes());
        }
    }
}

/// Reduces every row.
fn rows<C: Compute, S: Step<C>>(source: &Source, extent: Extent, results: &mut Results) {
    let (count, width) = (extent.outer, extent.reduced);
    let mut done = [S::NEUTRAL; COLUMNS];
    if let Some(elements) = source.in_place::<C>() {
        for rows in elements.chunks(COLUMNS * width) {
            let done = &mut done[..rows.len() / width];
            vector::run(Rows::<C, S> { rows, width, done });
            results.push(done);
        }
        return;
    }
    let mut buffer = [MaybeUninit::<C>::uninit(); CHUNK];
    let together = (CHUNK / width).clamp(1, COLUMNS);
    for row in (0..count).step_by(together) {
        let done = &mut done[..together.min(count - row)];
        if width <= CHUNK {
            let block = Block { rows: 1, row_stride: 0, width: done.len() * width, stride: 1 };
            let rows = source.load(row * width, block, &mut buffer);
            vector::run(Rows::<C, S> { rows, width, done });
        } else {
            let mut lanes = [S::NEUTRAL; LANES];
            for from in (0..width).step_by(CHUNK) {
                let block = Block { rows: 1, row_stride: 0, width: CHUNK.min(width - from), stride: 1 };
                let piece = source.load(row * width + from, block, &mut buffer);
                lanes = vector::run(Piece::<C, S> { lanes, piece });
            }
            done[0] = joined::<C, S>(lanes);
        }
        results.push(done);
    }
}

/// Reduces every column of the matrix that is number `outer`.
fn columns<C: Compute, S: Step<C>>(source: &Source, outer: usize, extent: Extent, results: &mut Results) {
    let Extent { reduced, inner, .. } = extent;
    let start = outer * reduced * inner;
    let mut buffer = [MaybeUninit::<C>::uninit(); CHUNK];
    let mut lanes = [MaybeUninit::<S::Acc>::uninit(); LANES * COLUMNS];
    for column in (0..inner).step_by(COLUMNS) {
        let width = COLUMNS.min(inner - column);
        let lanes = &mut lanes[..LANES * width];
        lanes.fill(MaybeUninit::new(S::NEUTRAL));
        // SAFETY: just written.
        let lanes = unsafe { lanes.assume_init_mut() };
        for row in (0..reduced).step_by(LANES) {
            let (from, rows) = (start + row * inner + column, LANES.min(reduced - row));
            match source.in_place::<C>() {
                Some(elements) if width == inner => {
                    vector::run(Zip::<C, S>::new(lanes, &elements[from..from + rows * width]));
                }
                Some(elements) => {
                    for (lane, i) in lanes.chunks_exact_mut(width).zip(0..rows) {
                        vector::run(Zip::<C, S>::new(lane, &elements[from + i * inner..][..width]));
                    }
                }
                None => {
                    let block = Block { rows, row_stride: inner, width, stride: 1 };
                    vector::run(Zip::<C, S>::new(lanes, source.load(from, block, &mut buffer)));
                }
            }
        }
        let mut half = LANES / 2;
        while half > 0 {
            let (left, right) = lanes.split_at_mut(half * width);
            left.iter_mut().zip(right).for_each(|(a, b)| *a = S::join(*a, *b));
            half /= 2;
        }
        results.push(&lanes[..width]);
    }
}

/// How elements of a type are reduced.
pub(super) trait Step<C> {
    /// What is carried along.
    type Acc: Compute;
    /// Where it begins.
    const NEUTRAL: Self::Acc;
    /// With one more element.
    fn step(acc: Self::Acc, x: C) -> Self::Acc;
    /// Two of them as one.
    fn join(a: Self::Acc, b: Self::Acc) -> Self::Acc;
}

pub(super) struct Sum;
struct Product;
pub(super) struct Max;
struct Min;
struct Any;
struct All;
struct CountNonzero;

#[inline(always)]
fn nonzero<T: PartialEq + Default + Copy>(x: T) -> i64 {
    i64::from(x != T::default())
}

// Not-a-number on either side stays.
macro_rules! larger {
    ($a:ident, $x:ident) => {
        if $a >= $x || $a.is_nan() { $a } else { $x }
    };
}
macro_rules! smaller {
    ($a:ident, $x:ident) => {
        if $a <= $x || $a.is_nan() { $a } else { $x }
    };
}
macro_rules! steps {
    ($($S:ident: $($C:ty)|* as $Acc:ty, $neutral:expr, |$a:ident, $x:ident| $step:expr, $join:expr;)*) => {$($(
        impl Step<$C> for $S {
            type Acc = $Acc;
            const NEUTRAL: $Acc = $neutral;

            #[inline(always)]
            fn step($a: $Acc, $x: $C) -> $Acc {
                $step
            }

            #[inline(always)]
            fn join($a: $Acc, $x: $Acc) -> $Acc {
                $join
            }
        }
    )*)*};
}
steps! {
    Sum: f32 | f64 as f64, 0.0, |a, x| a + x as f64, a + x;
    Sum: i64 as i64, 0, |a, x| a.wrapping_add(x), a.wrapping_add(x);
    Product: f32 | f64 as f64, 1.0, |a, x| a * x as f64, a * x;
    Product: i64 as i64, 1, |a, x| a.wrapping_mul(x), a.wrapping_mul(x);
    Max: f32 as f32, f32::NEG_INFINITY, |a, x| larger!(a, x), larger!(a, x);
    Max: f64 as f64, f64::NEG_INFINITY, |a, x| larger!(a, x), larger!(a, x);
    Max: i64 as i64, i64::MIN, |a, x| a.max(x), a.max(x);
    Min: f32 as f32, f32::INFINITY, |a, x| smaller!(a, x), smaller!(a, x);
    Min: f64 as f64, f64::INFINITY, |a, x| smaller!(a, x), smaller!(a, x);
    Min: i64 as i64, i64::MAX, |a, x| a.min(x), a.min(x);
    Any: f32 | f64 | i64 as i64, 0, |a, x| a | nonzero(x), a | x;
    All: f32 | f64 | i64 as i64, 1, |a, x| a & nonzero(x), a & x;
    CountNonzero: f32 | f64 | i64 as i64, 0, |a, x| a + nonzero(x), a + x;
}

/// The lanes as one, halves first.
#[inline(always)]
pub(super) fn joined<C, S: Step<C>>(mut lanes: [S::Acc; LANES]) -> S::Acc {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = S::join(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// The lanes with more elements, the first of which belongs to lane 0.
#[inline(always)]
pub(super) fn continued<C: Copy, S: Step<C>>(mut lanes: [S::Acc; LANES], elements: &[C]) -> [S::Acc; LANES] {
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

/// One result per row.
struct Rows<'a, C, S: Step<C>> {
    rows: &'a [C],
    width: usize,
    done: &'a mut [S::Acc],
}

impl<C: Compute, S: Step<C>> vector::Kernel for Rows<'_, C, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (done, row) in self.done.iter_mut().zip(self.rows.chunks_exact(self.width)) {
            *done = joined::<C, S>(continued::<C, S>([S::NEUTRAL; LANES], row));
        }
    }
}

/// A piece of one long row; all but the last have a multiple of [`LANES`] elements.
struct Piece<'a, C, S: Step<C>> {
    lanes: [S::Acc; LANES],
    piece: &'a [C],
}

impl<C: Compute, S: Step<C>> vector::Kernel for Piece<'_, C, S> {
    type Output = [S::Acc; LANES];

    #[inline(always)]
    fn run<const FMA: bool>(self) -> Self::Output {
        continued::<C, S>(self.lanes, self.piece)
    }
}

/// One element for every place of the accumulator, from its beginning.
struct Zip<'a, C, S: Step<C>> {
    acc: &'a mut [S::Acc],
    elements: &'a [C],
    step: PhantomData<S>,
}

impl<'a, C, S: Step<C>> Zip<'a, C, S> {
    fn new(acc: &'a mut [S::Acc], elements: &'a [C]) -> Self {
        Zip { acc, elements, step: PhantomData }
    }
}

impl<C: Compute, S: Step<C>> vector::Kernel for Zip<'_, C, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (acc, &x) in self.acc.iter_mut().zip(self.elements) {
            *acc = S::step(*acc, x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    const ALL: [Fold; 7] = [Fold::Sum, Fold::Product, Fold::Max, Fold::Min, Fold::Any, Fold::All, Fold::CountNonzero];

    fn numbers(shape: &[usize], dtype: DType) -> Tensor {
        let count = shape.iter().product::<usize>() as u32;
        let t = Tensor::arange(0u32, count, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        let small = t.affine(0.7, 1.0).unwrap().sin().unwrap().affine(3.0, 2.0).unwrap();
        small.round().unwrap().reshape(shape).unwrap().to_dtype(dtype).unwrap()
    }

    fn values(t: &Tensor) -> Vec<f64> {
        match t.elem_count() {
            0 => Vec::new(),
            _ => t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap(),
        }
    }

    fn plain(kind: Fold, row: &[f64]) -> f64 {
        let nonzero = row.iter().filter(|x| **x != 0.0).count();
        match kind {
            Fold::Sum => row.iter().sum(),
            Fold::Product => row.iter().product(),
            Fold::Max => row.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            Fold::Min => row.iter().copied().fold(f64::INFINITY, f64::min),
            Fold::Any => f64::from(u8::from(nonzero > 0)),
            Fold::All => f64::from(u8::from(nonzero == row.len())),
            Fold::CountNonzero => nonzero as f64,
        }
    }

    #[test]
    fn every_choice_of_dimensions_gives_the_plain_answer() {
        let shapes: [&[usize]; 6] = [&[7], &[5, 37], &[3, 4, 5], &[2, 300, 3], &[40, 1, 140], &[2, 3, 2, 3]];
        for shape in shapes {
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::I64, DType::I16] {
                let x = numbers(shape, dtype);
                let turned = numbers(&shape.iter().rev().copied().collect::<Vec<_>>(), dtype);
                let turned = turned.permute((0..shape.len()).rev().collect::<Vec<_>>()).unwrap();
                for chosen in 0..1usize << shape.len() {
                    let (dims, kept): (Vec<usize>, Vec<usize>) = (0..shape.len()).partition(|d| chosen >> d & 1 == 1);
                    let sizes: Vec<usize> = kept.iter().map(|&d| shape[d]).collect();
                    let width: usize = dims.iter().map(|&d| shape[d]).product();
                    for x in [&x, &turned] {
                        let rows = values(&x.permute([&kept[..], &dims].concat()).unwrap());
                        for kind in ALL {
                            // A product of many is not exact in any order.
                            if width > 12 && kind == Fold::Product {
                                continue;
                            }
                            // Counts and sums are not exact in small types.
                            let small = matches!(dtype, DType::I16 | DType::BF16);
                            let wide = if small { DType::I64 } else { dtype };
                            let expected: Vec<f64> = rows.chunks(width).map(|row| plain(kind, row)).collect();
                            let got = fold(kind, x, &dims, &sizes, wide).unwrap();
                            assert_eq!(got.dims(), sizes);
                            assert_eq!(values(&got), expected, "{kind:?} of {dtype:?} {shape:?} over {dims:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_result_depends_on_its_own_elements_only() {
        for dtype in [DType::F64, DType::F32, DType::F16] {
            let x = numbers(&[1000, 200], DType::F64).affine(0.1, 1e3).unwrap().to_dtype(dtype).unwrap();
            let all = values(&fold(Fold::Sum, &x, &[0], &[200], DType::F64).unwrap());
            for (start, len) in [(0, 1), (3, 17), (7, 150)] {
                let part = x.narrow(1, start, len).unwrap();
                let got = values(&fold(Fold::Sum, &part, &[0], &[len], DType::F64).unwrap());
                assert_eq!(got, all[start..start + len], "{dtype:?}");
                let got = values(&fold(Fold::Sum, &part.t().unwrap(), &[1], &[len], DType::F64).unwrap());
                assert_eq!(got, all[start..start + len], "{dtype:?}");
            }
        }
    }

    #[test]
    fn no_elements_give_the_neutral_one_and_not_a_number_wins() {
        let none = Tensor::zeros((4, 3), DType::I16, &Device::Cpu).unwrap().narrow(0, 4, 0).unwrap();
        let of = |kind| values(&fold(kind, &none, &[0], &[3], DType::I16).unwrap());
        assert_eq!(of(Fold::Max), vec![f64::from(i16::MIN); 3]);
        assert_eq!(of(Fold::Min), vec![f64::from(i16::MAX); 3]);
        assert_eq!(of(Fold::Product), vec![1.0; 3]);
        assert_eq!(fold(Fold::Sum, &none, &[1], &[0], DType::I64).unwrap().dims(), [0]);
        for place in 0..40 {
            let mut x = vec![1f32; 40];
            x[place] = f32::NAN;
            let x = Tensor::new(x, &Device::Cpu).unwrap();
            for kind in [Fold::Max, Fold::Min] {
                assert!(values(&fold(kind, &x, &[0], &[], DType::F32).unwrap())[0].is_nan(), "{place}");
            }
        }
        let bytes = Tensor::new(vec![200u8; 700], &Device::Cpu).unwrap();
        assert_eq!(values(&fold(Fold::Sum, &bytes, &[0], &[], DType::I64).unwrap()), [140_000.0]);
    }
}
