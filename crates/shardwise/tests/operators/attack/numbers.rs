//! The elements of inputs, computed only from a seed and the index of the element, with operations that round alike
//! everywhere: `scripts/attack_oracle.py` computes the same bits, so that calls are exchanged without data.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use serde::Serialize;
use shardwise::prelude::*;

/// One input of a call: the whole tensor, whatever its layout.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Input {
    pub(crate) shape: Vec<usize>,
    #[serde(serialize_with = "as_name")]
    pub(crate) dtype: DType,
    /// The kind of values, see [`Input::real`] and [`Input::whole`].
    pub(crate) values: &'static str,
    pub(crate) seed: u64,
    /// Bound of an index, number of classes, or the distance of elements along a dimension, by kind.
    pub(crate) n: i64,
    pub(crate) inner: usize,
    pub(crate) len: usize,
}

fn as_name<S: serde::Serializer>(dtype: &DType, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.as_str())
}

/// Elements, as numbers that hold those of the type exactly.
#[derive(Debug, Clone)]
pub(crate) enum Elements {
    Real(Vec<f64>),
    Whole(Vec<i64>),
}

/// A pseudo-random number for every pair.
pub(crate) fn mix(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Nearly normally distributed with standard deviation 1: the sum of four uniform integers, scaled.
fn bell(h: u64) -> f64 {
    let sum = (h & 0xFFFF) + ((h >> 16) & 0xFFFF) + ((h >> 32) & 0xFFFF) + (h >> 48);
    (sum as i64 - 131_070) as f64 / 37837.0
}

/// The positions to compare of a tensor with `n` elements: all, or `samples` that look random.
pub(crate) fn positions(n: usize, samples: usize, seed: u64) -> Vec<usize> {
    if n <= samples {
        return (0..n).collect();
    }
    (0..samples as u64).map(|k| (mix(seed ^ 0x5A5A, k) % n as u64) as usize).collect()
}

/// The weight of an output element in the loss of which gradients are taken: a multiple of 1/4, exact in every type.
pub(crate) fn cotangent(seed: u64, output: usize, i: usize) -> f64 {
    ((mix(seed ^ 0xC0DE ^ ((output as u64) << 32), i as u64) >> 20) % 17) as f64 / 4.0 - 2.0
}

/// The exponents of the `tiny` and the `huge` values, and the largest number, of a type.
fn range(dtype: DType) -> (i32, i32, f64, f64) {
    match dtype {
        DType::F16 => (-14, 13, 65504.0, 2f64.powi(-24)),
        DType::BF16 => (-126, 62, 3.389_531_389_251_535_5e38, 2f64.powi(-133)),
        DType::F32 => (-126, 62, f64::from(f32::MAX), 2f64.powi(-149)),
        _ => (-1000, 500, f64::MAX, 5e-324),
    }
}

/// A number in a floating-point type; the half types go through f32.
pub(crate) fn rounded(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f16::from_f32(x as f32).to_f64(),
        DType::BF16 => bf16::from_f32(x as f32).to_f64(),
        DType::F32 => f64::from(x as f32),
        _ => x,
    }
}

/// The smallest and the largest number of an integer type.
fn ends(dtype: DType) -> (i64, i64) {
    match dtype {
        DType::U8 => (0, 255),
        DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        _ => (i64::MIN, i64::MAX),
    }
}

/// A number as an integer type holds it: its low bits.
fn wrapped(x: i64, dtype: DType) -> i64 {
    match dtype {
        DType::U8 => x & 0xFF,
        DType::I32 => i64::from(x as i32),
        _ => x,
    }
}

impl Input {
    /// An element of a floating-point input, by its row-major number.
    fn real(&self, flat: usize) -> f64 {
        let h = mix(self.seed, flat as u64);
        let (tiny, huge, largest, least) = range(self.dtype);
        let x = match self.values {
            "unit" => bell(h),
            "six" => 6.0 * bell(h),
            "tiny" => bell(h) * 2f64.powi(tiny),
            "huge" => bell(h) * 2f64.powi(huge),
            "wide" => bell(h) * 2f64.powi((mix(self.seed ^ 1, flat as u64) % 21) as i32 - 10),
            "whole" => ((h >> 40) % 9) as f64 - 4.0,
            "positive" => bell(h).abs() + 0.015625,
            "probability" => ((h >> 44) as f64 + 0.5) / 1_048_576.0,
            "stairs" => flat as f64 * 0.75 - 4.0,
            "special" => {
                let other = mix(self.seed ^ 1, flat as u64);
                let values = [
                    0.0,
                    -0.0,
                    f64::INFINITY,
                    f64::NEG_INFINITY,
                    f64::NAN,
                    1.0,
                    -1.0,
                    0.5,
                    -0.5,
                    largest,
                    -largest,
                    least,
                    -least,
                ];
                if other.is_multiple_of(4) { values[((other >> 8) % 13) as usize] } else { 6.0 * bell(h) }
            }
            other => panic!("no real values {other}"),
        };
        rounded(x, self.dtype)
    }

    /// An element of an integer input.
    fn whole(&self, flat: usize) -> i64 {
        let h = mix(self.seed, flat as u64);
        let (least, most) = ends(self.dtype);
        let x = match self.values {
            "small" if self.dtype == DType::U8 => ((h >> 40) % 17) as i64,
            "small" => ((h >> 40) % 17) as i64 - 8,
            "bits" => h as i64,
            "extreme" => {
                let values = [least, most, 0, 1, -1, most - 1, least + 1, 9_007_199_254_740_993, 2, 3];
                values[((h >> 16) % 10) as usize]
            }
            "mask" => (h >> 33) as i64 & 1,
            "index" => ((h >> 32) % self.n as u64) as i64,
            // counted from the back as often as from the front
            "signed index" => ((h >> 32) % (2 * self.n as u64)) as i64 - self.n,
            // distinct along a dimension whose elements are `inner` apart
            "turn" => ((flat / self.inner % self.len) as i64 + (self.seed % 1000) as i64) % self.n,
            "target" if h.is_multiple_of(8) => -100,
            "target" => ((h >> 32) % self.n as u64) as i64,
            other => panic!("no integers {other}"),
        };
        wrapped(x, self.dtype)
    }

    /// Whether partial placements make sense: an index is not a sum of indices.
    pub(crate) fn is_data(&self) -> bool {
        !matches!(self.values, "index" | "signed index" | "turn" | "target" | "mask" | "stairs")
    }

    /// The local tensor of this input in a layout; on partial axes, an operand that reduces to it exactly.
    pub(crate) fn local(&self, layout: &Layout, rank: usize) -> Result<Tensor> {
        let coordinate = layout.mesh().coordinate(rank).expect("every rank is in the mesh");
        let mut flat = vec![0];
        for (dim, &n) in self.shape.iter().enumerate() {
            let held = layout.global_indices(rank, dim);
            flat = flat.iter().flat_map(|f| held.iter().map(move |i| f * n + i)).collect();
        }
        let pending: Vec<(ReduceOp, usize, usize)> = (0..coordinate.len())
            .filter_map(|axis| match layout.placements()[axis] {
                Partial(op) => Some((op, layout.mesh().shape()[axis], coordinate[axis])),
                _ => None,
            })
            .collect();
        let shape = layout.local_shape(rank);
        if self.dtype.is_float() {
            let (.., largest, _) = range(self.dtype);
            let one = |&f: &usize| {
                let (mut x, mut bound) = (self.real(f), largest);
                for &(op, k, i) in &pending {
                    x = real_operand(x, op, k, i, f, bound);
                    // Terms of opposite sign on only one axis: 3x, which another order of two axes adds up to, may round.
                    bound = if op == ReduceOp::Sum { 0.0 } else { bound };
                }
                x
            };
            to_tensor(&Elements::Real(flat.iter().map(one).collect()), &shape, self.dtype)
        } else {
            let one = |&f: &usize| {
                let x = self.whole(f);
                // Wrapped after every reduction: the negative of an unsigned number is a large one to the next minimum.
                pending.iter().fold(x, |x, &(op, k, i)| wrapped(whole_operand(x, op, k, i, f), self.dtype))
            };
            to_tensor(&Elements::Whole(flat.iter().map(one).collect()), &shape, self.dtype)
        }
    }
}

/// Operand `i` of `k` of a reduction whose result is exactly `x`, in any order and type that holds `x`.
fn real_operand(x: f64, op: ReduceOp, k: usize, i: usize, flat: usize, largest: f64) -> f64 {
    // A special value on all ranks, where it survives; doubled only where that does not overflow.
    let plain = x == 0.0 || !x.is_finite() || x.abs() > largest / 8.0;
    let winner = flat % k;
    match op {
        _ if k == 1 => x,
        ReduceOp::Sum if plain && x.is_finite() && x != 0.0 => {
            if i == winner {
                x
            } else {
                0.0
            }
        }
        ReduceOp::Sum if !plain && i == winner => 2.0 * x,
        ReduceOp::Sum if !plain && i == (winner + 1) % k => -x,
        ReduceOp::Sum if !plain => 0.0,
        ReduceOp::Avg if !plain => {
            if i.is_multiple_of(2) {
                2.0 * x
            } else {
                0.0
            }
        }
        ReduceOp::Max if !plain && i != winner => -x.abs(),
        ReduceOp::Min if !plain && i != winner => x.abs(),
        ReduceOp::Product if i != winner => 1.0,
        _ => x,
    }
}

fn whole_operand(x: i64, op: ReduceOp, k: usize, i: usize, flat: usize) -> i64 {
    let winner = flat % k;
    match op {
        _ if k == 1 => x,
        ReduceOp::Sum if i == winner => x.wrapping_mul(2),
        ReduceOp::Sum if i == (winner + 1) % k => x.wrapping_neg(),
        ReduceOp::Sum => 0,
        ReduceOp::BitXor if i == winner => x ^ 0x55,
        ReduceOp::BitXor if i == (winner + 1) % k => 0x55,
        ReduceOp::BitXor => 0,
        ReduceOp::Max if i != winner => x.min(0),
        ReduceOp::Min if i != winner => x.max(0),
        ReduceOp::Product if i != winner => 1,
        _ => x,
    }
}

/// A tensor of a type that holds the elements.
pub(crate) fn to_tensor(elements: &Elements, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let cpu = &Device::Cpu;
    Ok(match (elements, dtype) {
        (Elements::Real(all), DType::F16) => {
            Tensor::from_vec(all.iter().map(|&x| f16::from_f64(x)).collect(), shape, cpu)?
        }
        (Elements::Real(all), DType::BF16) => {
            Tensor::from_vec(all.iter().map(|&x| bf16::from_f64(x)).collect(), shape, cpu)?
        }
        (Elements::Real(all), DType::F32) => Tensor::from_vec(all.iter().map(|&x| x as f32).collect(), shape, cpu)?,
        (Elements::Real(all), _) => Tensor::from_vec(all.clone(), shape, cpu)?,
        (Elements::Whole(all), DType::U8) => Tensor::from_vec(all.iter().map(|&x| x as u8).collect(), shape, cpu)?,
        (Elements::Whole(all), DType::I32) => Tensor::from_vec(all.iter().map(|&x| x as i32).collect(), shape, cpu)?,
        (Elements::Whole(all), _) => Tensor::from_vec(all.clone(), shape, cpu)?,
    })
}

/// The elements of a tensor in row-major order, exactly.
pub(crate) fn elements(tensor: &Tensor) -> Result<Elements> {
    let flat = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::F16 => Elements::Real(flat.to_vec1::<f16>()?.iter().map(|x| x.to_f64()).collect()),
        DType::BF16 => Elements::Real(flat.to_vec1::<bf16>()?.iter().map(|x| x.to_f64()).collect()),
        DType::F32 => Elements::Real(flat.to_vec1::<f32>()?.iter().map(|&x| f64::from(x)).collect()),
        DType::F64 => Elements::Real(flat.to_vec1::<f64>()?),
        DType::U8 => Elements::Whole(flat.to_vec1::<u8>()?.iter().map(|&x| i64::from(x)).collect()),
        DType::I32 => Elements::Whole(flat.to_vec1::<i32>()?.iter().map(|&x| i64::from(x)).collect()),
        DType::I64 => Elements::Whole(flat.to_vec1::<i64>()?),
        other => return Err(Error::other(format!("a result of type {}", other.as_str()))),
    })
}
