//! Products with a quantized matrix: with few rows the blocks are multiplied as integers, with many they are expanded first.

use std::array::from_fn;
use std::marker::PhantomData;
use std::ops::Range;

use candle_core::{DType, Tensor};

use super::BlockType;
use super::packed::{GROUP, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, QuantizedBlock};
use super::rounded_rows::RoundedRows;
use super::vectors::{Arrays, HALF, LANES, Vectors};
use crate::error::{ErrorKind, Result};
use crate::parallel::{SharedPtr, over_ranges};
use crate::simd::InstructionSet;
use crate::typed_slice::{filled_by, with_slice};
use crate::{batched_matmul, concat, contiguous, with_bytes};

/// With more rows than this a matrix is expanded to f32 first: expanding takes about as long as multiplying integers with this
/// many rows, and products of f32 with many rows reach more of what the processor can do.
const MAX_ROWS: usize = 32;
/// Rows of a matrix that are expanded at a time: with usual sizes a few megabytes.
const EXPANDED_ROWS: usize = 256;
/// Bytes of the matrix that all rows are multiplied with before the next ones: they stay in the cache.
const CACHED_BYTES: usize = 128 << 10;

/// Multiplies rows by the transpose of a quantized matrix: f32 `[.., blocks, elements of a block]` and u8
/// `[out, blocks, bytes of a block]` give f32 `[.., out]`.
///
/// Up to 32 rows are rounded to integers of 16 bits that share a scale per 32 elements, and multiplied with the integers of the
/// blocks: the result is that of the expanded matrix up to 1/65000 of the largest of every 32 elements. More rows, rare types
/// of blocks (Q2_K, Q3_K, Q8_1, Q8_K, IQ4_NL) and rows with infinite elements or NaN are multiplied in f32. Large products use the
/// rayon pool of the calling thread; the bits do not depend on the number of threads, and those of products of integers not
/// on the instructions of the processor either.
///
/// # Errors
/// [`ErrorKind::Shape`] or [`ErrorKind::DType`] if the operands are not of these shapes and types.
pub fn quantized_matmul(x: &Tensor, weight: &Tensor, block: BlockType) -> Result<Tensor> {
    check_blocks(weight, block)?;
    let weight = &contiguous(weight)?;
    let [out, blocks, _] = *weight.dims() else {
        let found = format!("{block} blocks {:?}", weight.dims());
        let needed = "a matrix [out, blocks, bytes of a block]";
        return Err(ErrorKind::shape(weight.dims()).error("operands", found, needed, "reshape the blocks"));
    };
    let (leading, last) = x.dims().split_at(x.dims().len().saturating_sub(2));
    if last != [blocks, block.elements()] || x.dtype() != DType::F32 {
        return Err(ErrorKind::shape(x.dims()).error(
            "operands",
            format!("{} {:?} and {block} blocks {:?}", x.dtype().as_str(), x.dims(), weight.dims()),
            format!("f32 [.., {blocks}, {}]", block.elements()),
            "unflatten the features of the input",
        ));
    }
    let (rows, shape) = (leading.iter().product::<usize>(), [leading, &[out]].concat());
    let columns = blocks * block.elements();
    if rows > MAX_ROWS && out > 0 {
        let x = x.reshape((rows, columns))?;
        let parts = (0..out).step_by(EXPANDED_ROWS).map(|first| {
            let count = EXPANDED_ROWS.min(out - first);
            let part = dequantize(&weight.narrow(0, first, count)?, block)?;
            batched_matmul(&x, &part.reshape((count, columns))?.t()?, 0, 1)
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        return Ok(concat(&parts, 1)?.reshape(shape)?);
    }
    with_slice(x, |x: &[f32]| {
        with_bytes(weight, |weight| {
            let expanded = ExpandedProduct { x, weight, rows, columns, out };
            let Some(x) = &RoundedRows::new(x) else { return expanded.compute(block, &shape) };
            let product = QuantizedProduct { x, weight, rows, columns, out };
            match block {
                BlockType::Q8_0 => product.compute::<Q8_0>(&shape),
                BlockType::Q4_0 => product.compute::<Q4_0>(&shape),
                BlockType::Q4_1 => product.compute::<Q4_1>(&shape),
                BlockType::Q5_0 => product.compute::<Q5_0>(&shape),
                BlockType::Q5_1 => product.compute::<Q5_1>(&shape),
                BlockType::Q4K => product.compute::<Q4K>(&shape),
                BlockType::Q5K => product.compute::<Q5K>(&shape),
                BlockType::Q6K => product.compute::<Q6K>(&shape),
                _ => expanded.compute(block, &shape),
            }
        })
    })??
}

/// Expands blocks, u8 `[.., bytes of a block]`, to f32 `[.., elements of a block]`.
///
/// # Errors
/// [`ErrorKind::Shape`] if it is not a tensor of blocks of this type.
pub fn dequantize(blocks: &Tensor, block: BlockType) -> Result<Tensor> {
    check_blocks(blocks, block)?;
    let blocks = &contiguous(blocks)?;
    let mut shape = blocks.dims().to_vec();
    shape.pop();
    let count: usize = shape.iter().product();
    shape.push(block.elements());
    with_bytes(blocks, |bytes| {
        // SAFETY: the ranges of blocks cover all elements.
        unsafe {
            filled_by(&shape, |to: SharedPtr<f32>| {
                // About half a nanosecond per element.
                over_ranges(count, block.elements() * 2, 1, |range| {
                    let (first, length) = (range.start * block.elements(), range.len() * block.elements());
                    let to = std::slice::from_raw_parts_mut(to.get().add(first), length);
                    let bytes = &bytes[range.start * block.bytes()..range.end * block.bytes()];
                    block.dequantize(bytes, to).expect("as many elements as the blocks have");
                });
            })
        }
    })?
}

/// Checks that a tensor can hold blocks of a type.
fn check_blocks(blocks: &Tensor, block: BlockType) -> Result<()> {
    if blocks.dtype() == DType::U8 && blocks.dims().last() == Some(&block.bytes()) {
        return Ok(());
    }
    let found = format!("{} {:?}", blocks.dtype().as_str(), blocks.dims());
    let needed = format!("{block} blocks, u8 [.., {}]", block.bytes());
    Err(ErrorKind::shape(blocks.dims()).error(
        "quantized blocks",
        found,
        needed,
        "state the type of the blocks in the file",
    ))
}

/// A product with a matrix whose rows are expanded one by one.
struct ExpandedProduct<'a> {
    /// `[rows, columns]`.
    x: &'a [f32],
    /// The blocks of `[out, columns]`.
    weight: &'a [u8],
    rows: usize,
    columns: usize,
    out: usize,
}

impl ExpandedProduct<'_> {
    fn compute(&self, block: BlockType, shape: &[usize]) -> Result<Tensor> {
        let row_bytes = self.columns / block.elements() * block.bytes();
        // SAFETY: the ranges cover all columns of the result, and each is computed for all rows.
        unsafe {
            filled_by(shape, |to: SharedPtr<f32>| {
                over_ranges(self.out, self.columns * (1 + self.rows), 1, |range| {
                    let mut row = vec![0.0; self.columns];
                    for out in range {
                        let bytes = &self.weight[out * row_bytes..(out + 1) * row_bytes];
                        block.dequantize(bytes, &mut row).expect("a row has whole blocks");
                        for m in 0..self.rows {
                            let x = &self.x[m * self.columns..(m + 1) * self.columns];
                            let sum: f32 = x.iter().zip(&row).map(|(x, w)| x * w).sum();
                            to.get().add(m * self.out + out).write(sum);
                        }
                    }
                });
            })
        }
    }
}

/// A product of integers.
#[derive(Clone, Copy)]
struct QuantizedProduct<'a> {
    /// `[rows, columns]`.
    x: &'a RoundedRows,
    /// The blocks of `[out, columns]`.
    weight: &'a [u8],
    rows: usize,
    columns: usize,
    out: usize,
}

impl QuantizedProduct<'_> {
    fn compute<P: QuantizedBlock>(self, shape: &[usize]) -> Result<Tensor> {
        debug_assert_eq!((P::ELEMENTS, P::BYTES), (P::TYPE.elements(), P::TYPE.bytes()));
        // SAFETY: the ranges cover all columns of the result, and each is computed for all rows.
        unsafe {
            filled_by(shape, |to: SharedPtr<f32>| {
                // About a twentieth of a nanosecond per element of the matrix.
                over_ranges(self.out, (self.columns * self.rows).div_ceil(6), 4, |range| {
                    OutputRange::<P> { product: self, range, to, blocks: PhantomData }
                        .compute(InstructionSet::selected());
                });
            })
        }
    }
}

/// The columns `range` of the result of a product.
struct OutputRange<'a, P> {
    product: QuantizedProduct<'a>,
    range: Range<usize>,
    to: SharedPtr<f32>,
    blocks: PhantomData<P>,
}

impl<P: QuantizedBlock> OutputRange<'_, P> {
    /// # Safety
    /// The processor has the instructions.
    unsafe fn compute(self, instructions: InstructionSet) {
        match instructions {
            // SAFETY: the caller's promise.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 | InstructionSet::Avx512 => unsafe { with_avx2(self) },
            // SAFETY: no instructions beyond the baseline.
            InstructionSet::Baseline => unsafe { self.run::<Arrays>() },
        }
    }

    /// # Safety
    /// The processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn run<V: Vectors>(self) {
        let row_bytes = self.product.columns / P::ELEMENTS * P::BYTES;
        let cached = (CACHED_BYTES / row_bytes.max(1)).max(4);
        let mut first = self.range.start;
        while first < self.range.end {
            let columns = first..(first + cached).min(self.range.end);
            let mut row = 0;
            while row < self.product.rows {
                // Several sums at a time, to hide the latency of an addition.
                // SAFETY: the caller's promise.
                row += unsafe {
                    match self.product.rows - row {
                        1 => self.rows::<V, 1, 1>(row, columns.clone()),
                        2 | 3 => self.rows::<V, 1, 2>(row, columns.clone()),
                        _ => self.rows::<V, 1, 4>(row, columns.clone()),
                    }
                };
            }
            first = columns.end;
        }
    }

    /// Computes `M` rows of the result, `R` columns at a time. Returns `M`.
    ///
    /// # Safety
    /// The processor has the instructions of `V`, and `columns` are in the range of this call.
    #[inline(always)]
    unsafe fn rows<V: Vectors, const R: usize, const M: usize>(&self, row: usize, columns: Range<usize>) -> usize {
        let mut column = columns.start;
        // SAFETY: the caller's promise.
        unsafe {
            while column + R <= columns.end {
                self.tile::<V, R, M>(row, column);
                column += R;
            }
            while column < columns.end {
                self.tile::<V, 1, M>(row, column);
                column += 1;
            }
        }
        M
    }

    /// # Safety
    /// As `rows`.
    #[inline(always)]
    unsafe fn tile<V: Vectors, const R: usize, const M: usize>(&self, row: usize, column: usize) {
        let QuantizedProduct { x, weight, columns, out, .. } = self.product;
        let (blocks, groups) = (columns / P::ELEMENTS, columns / GROUP);
        let integers: [&[i16]; M] = from_fn(|m| &x.integers[(row + m) * columns..(row + m + 1) * columns]);
        let of_groups = |m: usize| (row + m) * groups..(row + m + 1) * groups;
        let of_x: [&[[f32; 2]]; M] = from_fn(|m| &x.scales_and_sums[of_groups(m)]);
        let row_bytes = blocks * P::BYTES;
        let weight: [&[u8]; R] = from_fn(|r| &weight[(column + r) * row_bytes..(column + r + 1) * row_bytes]);
        // SAFETY: the caller's promise. Blocks and groups are below their numbers, which the slices were built for; the column is
        // in the range of this call, which no other thread writes, and the row is in the result.
        unsafe {
            // The second of each pair adds up the offsets.
            let (mut lanes, mut offsets) = ([[V::zero(); M]; R], [[V::pair([0.0; 2]); M]; R]);
            for block in 0..blocks {
                for r in 0..R {
                    let bytes = weight[r].get_unchecked(block * P::BYTES..(block + 1) * P::BYTES);
                    let of_block = P::scales::<V>(bytes);
                    for group in 0..P::ELEMENTS / GROUP {
                        let at = block * (P::ELEMENTS / GROUP) + group;
                        let [first, second] = P::group::<V>(bytes, group);
                        let of_group = P::group_scales::<V>(&of_block, group);
                        for m in 0..M {
                            let x = integers[m].get_unchecked(at * GROUP..(at + 1) * GROUP);
                            let of_x = *of_x[m].get_unchecked(at);
                            let (first, second) = (V::dot(first, x), V::dot(second, &x[HALF..]));
                            if P::ONE_SCALE {
                                let scale_and_offset = V::multiply_pairs(of_group, V::pair(of_x));
                                let [scale, _] = V::values(scale_and_offset);
                                lanes[r][m] = V::add_scaled(lanes[r][m], scale, V::add(first, second));
                                if P::HAS_OFFSET {
                                    offsets[r][m] = V::add_pairs(offsets[r][m], scale_and_offset);
                                }
                            } else {
                                let [of_x, _] = of_x;
                                let scales = V::values(V::multiply_pairs(of_group, V::pair([of_x; 2])));
                                lanes[r][m] = V::add_scaled(lanes[r][m], scales[0], first);
                                lanes[r][m] = V::add_scaled(lanes[r][m], scales[1], second);
                            }
                        }
                    }
                }
            }
            for r in 0..R {
                for m in 0..M {
                    let [_, offset] = V::values(offsets[r][m]);
                    let sum = total(V::lanes(lanes[r][m])) + offset;
                    self.to.get().add((row + m) * out + column + r).write(sum);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn with_avx2<P: QuantizedBlock>(range: OutputRange<'_, P>) {
    // SAFETY: the caller's promise.
    unsafe { range.run::<super::vectors::Avx2>() }
}

/// The sum of all lanes, pairwise.
#[inline(always)]
fn total(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    /// Where the half floats of a block begin: random bits there would be NaN.
    fn halves(block: BlockType) -> &'static [usize] {
        match block {
            BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q8_1 | BlockType::Q4K | BlockType::Q5K => &[0, 2],
            BlockType::Q2K => &[80, 82],
            BlockType::Q3K => &[108],
            BlockType::Q6K => &[208],
            BlockType::Q8K => &[],
            _ => &[0],
        }
    }

    fn random_blocks(rng: &mut StdRng, block: BlockType, shape: (usize, usize)) -> Tensor {
        let mut bytes: Vec<u8> = (0..shape.0 * shape.1 * block.bytes()).map(|_| rng.random()).collect();
        for one in bytes.chunks_mut(block.bytes()) {
            for &at in halves(block) {
                // Normal and subnormal numbers of both signs.
                let bits: u16 = rng.random_range(0..0x2c00) | if rng.random() { 0x8000 } else { 0 };
                one[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            }
            if block == BlockType::Q8K {
                one[..4].copy_from_slice(&0.01f32.to_le_bytes());
            }
        }
        Tensor::from_vec(bytes, (shape.0, shape.1, block.bytes()), &Device::Cpu).unwrap()
    }

    fn random_rows(rng: &mut StdRng, rows: usize, blocks: usize, elements: usize) -> Tensor {
        let values: Vec<f32> = (0..rows * blocks * elements).map(|_| rng.random_range(-1.0..1.0)).collect();
        Tensor::from_vec(values, (rows, blocks, elements), &Device::Cpu).unwrap()
    }

    /// The elements of a row as the product rounds them, in exact arithmetic, and the largest error of each.
    fn rounded(x: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let group = |x: &[f32]| {
            let scale = f64::from(x.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) / 32767.0);
            let one = move |x: &f32| (f64::from(*x) / scale).round_ties_even() * scale;
            x.iter().map(|x| (one(x), scale / 2.0)).collect::<Vec<_>>()
        };
        x.chunks(GROUP).flat_map(group).unzip()
    }

    #[test]
    fn products_are_those_of_the_expanded_matrix_and_rounded_rows() {
        let mut rng = StdRng::seed_from_u64(1);
        for &block in BlockType::ALL {
            let is_rare =
                matches!(block, BlockType::Q2K | BlockType::Q3K | BlockType::Q8_1 | BlockType::Q8K | BlockType::IQ4NL);
            for (rows, out) in [(1, 9), (2, 4), (3, 5), (4, 1), (7, 6), (17, 300), (33, 300), (0, 3), (1, 0)] {
                let blocks = 3;
                let weight = random_blocks(&mut rng, block, (out, blocks));
                let x = random_rows(&mut rng, rows, blocks, block.elements());
                let found = quantized_matmul(&x, &weight, block).unwrap();
                assert_eq!(found.dims(), [rows, out]);
                let columns = blocks * block.elements();
                let expanded = dequantize(&weight, block).unwrap().reshape((out, columns)).unwrap();
                let (w, x) =
                    (expanded.to_vec2::<f32>().unwrap(), x.reshape((rows, columns)).unwrap().to_vec2::<f32>().unwrap());
                let found = found.to_vec2::<f32>().unwrap();
                for (m, x) in x.iter().enumerate() {
                    let (rounded, rounding) = rounded(x);
                    for (n, w) in w.iter().enumerate() {
                        let (mut exact, mut of_rounded, mut bound) = (0.0, 0.0, 0.0);
                        for (i, w) in w.iter().map(|w| f64::from(*w)).enumerate() {
                            exact += w * f64::from(x[i]);
                            of_rounded += w * rounded[i];
                            bound += w.abs() * rounding[i];
                        }
                        let found = f64::from(found[m][n]);
                        // Sums of f32 are rounded at the size of what they add: elements of a block before its offset.
                        let largest = w.iter().fold(0.0, |largest, w| f64::from(*w).abs().max(largest));
                        let in_f32 = 1e-6 * largest * x.iter().map(|x| f64::from(*x).abs()).sum::<f64>();
                        assert!(
                            (found - exact).abs() <= bound + in_f32,
                            "{block} {rows} x {out}: {found}, not {exact}"
                        );
                        let expected = if is_rare || rows > MAX_ROWS { exact } else { of_rounded };
                        assert!((found - expected).abs() <= in_f32, "{block} {rows} x {out}: {found}, not {expected}");
                    }
                }
            }
        }
    }

    /// The result of `P` on one instruction set.
    fn on_instructions<P: QuantizedBlock>(set: InstructionSet, product: QuantizedProduct<'_>) -> Vec<f32> {
        let mut result = vec![0.0; product.rows * product.out];
        let to = SharedPtr::new(result.as_mut_ptr());
        // SAFETY: the set is available, and the memory that of the result.
        unsafe { OutputRange::<P> { product, range: 0..product.out, to, blocks: PhantomData }.compute(set) };
        result
    }

    fn same_bits<P: QuantizedBlock>() {
        let mut rng = StdRng::seed_from_u64(2);
        let (rows, out, blocks) = (7, 90, 2048 / P::ELEMENTS);
        let weight = random_blocks(&mut rng, P::TYPE, (out, blocks));
        let x = random_rows(&mut rng, rows, blocks, P::ELEMENTS);
        let pool = |threads: usize| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let on = |threads: usize| pool(threads).install(|| quantized_matmul(&x, &weight, P::TYPE).unwrap());
        let flat = |t: Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let one = flat(on(1));
        assert_eq!(flat(on(3)), one, "{}", P::TYPE);
        // A row does not depend on the other rows.
        for row in 0..rows {
            let alone = flat(quantized_matmul(&x.narrow(0, row, 1).unwrap(), &weight, P::TYPE).unwrap());
            assert_eq!(alone, one[row * out..(row + 1) * out], "{}", P::TYPE);
        }
        let x = RoundedRows::new(&flat(x)).unwrap();
        let weight = weight.flatten_all().unwrap().to_vec1::<u8>().unwrap();
        let product = QuantizedProduct { x: &x, weight: &weight, rows, columns: 2048, out };
        for (name, set) in InstructionSet::available() {
            assert_eq!(on_instructions::<P>(*set, product), one, "{} on {name}", P::TYPE);
        }
    }

    #[test]
    fn bits_are_the_same_on_all_vector_instructions_and_threads() {
        same_bits::<Q8_0>();
        same_bits::<Q4_0>();
        same_bits::<Q4_1>();
        same_bits::<Q5_0>();
        same_bits::<Q5_1>();
        same_bits::<Q4K>();
        same_bits::<Q5K>();
        same_bits::<Q6K>();
    }

    /// Rows that integers cannot hold are multiplied in f32.
    #[test]
    fn infinite_elements_and_nan_stay() {
        let mut bytes = vec![1u8; 34];
        bytes[..2].copy_from_slice(&0x3c00u16.to_le_bytes());
        let weight = Tensor::from_vec(bytes, (1, 1, 34), &Device::Cpu).unwrap();
        for (bad, rest) in [(f32::INFINITY, 1.0), (f32::NEG_INFINITY, 1.0), (f32::NAN, 1.0)] {
            let mut x = vec![rest; 32];
            x[5] = bad;
            let x = Tensor::from_vec(x, (1, 1, 32), &Device::Cpu).unwrap();
            let found = quantized_matmul(&x, &weight, BlockType::Q8_0)
                .unwrap()
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()[0];
            assert!(found == bad || found.is_nan() && bad.is_nan(), "{found} of {bad}");
        }
    }

    #[test]
    fn operands_of_other_shapes_are_refused() {
        let weight = Tensor::zeros((4, 2, 34), DType::U8, &Device::Cpu).unwrap();
        for x in [(1, 2, 16), (1, 3, 32)] {
            let x = Tensor::zeros(x, DType::F32, &Device::Cpu).unwrap();
            assert!(quantized_matmul(&x, &weight, BlockType::Q8_0).is_err());
        }
        let x = Tensor::zeros((1, 2, 32), DType::F32, &Device::Cpu).unwrap();
        assert!(quantized_matmul(&x, &weight, BlockType::Q4_0).is_err(), "blocks of another size");
        assert!(quantized_matmul(&x, &weight.get(0).unwrap(), BlockType::Q8_0).is_err());
        let x = Tensor::zeros((1, 2, 32), DType::F64, &Device::Cpu).unwrap();
        assert!(quantized_matmul(&x, &weight, BlockType::Q8_0).is_err());
        assert!(dequantize(&Tensor::zeros((4, 33), DType::U8, &Device::Cpu).unwrap(), BlockType::Q8_0).is_err());
        assert!(dequantize(&Tensor::zeros((4, 34), DType::U32, &Device::Cpu).unwrap(), BlockType::Q8_0).is_err());
        // An infinite scale stays infinite, as in an expanded matrix.
        let mut bytes = vec![1u8; 34];
        bytes[..2].copy_from_slice(&0x7c00u16.to_le_bytes());
        let weight = Tensor::from_vec(bytes, (1, 1, 34), &Device::Cpu).unwrap();
        let x = Tensor::ones((1, 1, 32), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(
            quantized_matmul(&x, &weight, BlockType::Q8_0).unwrap().to_vec2::<f32>().unwrap(),
            [[f32::INFINITY]]
        );
    }
}
