//! Tensors with known elements in every layout: integers that depend only on the index, and operands of partial placements
//! that reduce to them exactly.

use candle_core::{DType, Device, Tensor};
use shardwise::prelude::*;

/// A pseudo-random number, the same for the same `parts` on every rank.
pub fn hash(parts: &[usize]) -> u64 {
    let mix = |h: u64, x: &usize| (h ^ *x as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    parts.iter().fold(0x1234_5678_9ABC_DEF1, mix).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 20
}

/// The element with this row-major index: an integer from -32 to 31.
pub fn value(flat: usize) -> f64 {
    (hash(&[flat]) % 64) as f64 - 32.0
}

/// The full tensor of this shape.
pub fn full_tensor(shape: &[usize]) -> Tensor {
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// The local tensor of a rank in a layout; on `Partial` axes, an operand that reduces to the full tensor exactly.
pub fn local(layout: &Layout, rank: usize) -> Tensor {
    local_of(layout, rank, 0, &value)
}

/// As [`local`], for elements given as a function of their row-major index. Tensors with different `salt` have different
/// partial operands.
pub fn local_of(layout: &Layout, rank: usize, salt: usize, value: &dyn Fn(usize) -> f64) -> Tensor {
    let Some(coordinate) = layout.mesh().coordinate(rank) else {
        return Tensor::zeros(0, DType::F64, &Device::Cpu).unwrap();
    };
    let shape = layout.shape();
    let mut flat = vec![0];
    for (dim, &n) in shape.iter().enumerate() {
        let held = layout.global_indices(rank, dim);
        flat = flat.iter().flat_map(|f| held.iter().map(move |i| f * n + i)).collect();
    }
    let operand = |&flat: &usize| {
        let mut x = value(flat);
        // The last axis is reduced first, so the operands of an axis are the values of the next one.
        for (axis, placement) in layout.placements().iter().enumerate() {
            if let Partial(op) = placement {
                x = operand_of(x, *op, layout.mesh().shape()[axis], coordinate[axis], &[flat + salt * (1 << 20), axis]);
            }
        }
        x
    };
    let values: Vec<f64> = flat.iter().map(operand).collect();
    Tensor::from_vec(values, layout.local_shape(rank), &Device::Cpu).unwrap()
}

/// Operand `i` of the `k` operands that reduce to `x`.
fn operand_of(x: f64, op: ReduceOp, k: usize, i: usize, seed: &[usize]) -> f64 {
    let noise = |j: usize| (hash(&[seed[0], seed[1], j]) % 9) as f64;
    let others = || (0..k - 1).map(noise).sum::<f64>();
    let winner = (hash(&[seed[0], seed[1], 77]) % k as u64) as usize;
    match op {
        ReduceOp::Sum if i + 1 < k => noise(i),
        ReduceOp::Sum => x - others(),
        ReduceOp::Avg if i + 1 < k => x + noise(i),
        ReduceOp::Avg => x - others(),
        ReduceOp::Max if i != winner => x - 1.0 - noise(i),
        ReduceOp::Min if i != winner => x + 1.0 + noise(i),
        ReduceOp::Product if i != winner => 1.0,
        ReduceOp::BitAnd if i != winner => (x as i64 | noise(i) as i64) as f64,
        ReduceOp::BitOr if i != winner => (x as i64 & noise(i) as i64) as f64,
        ReduceOp::BitXor if i + 1 < k => noise(i),
        ReduceOp::BitXor => (0..k - 1).fold(x as i64, |x, j| x ^ noise(j) as i64) as f64,
        _ => x,
    }
}

/// Whether shapes and elements are equal.
pub fn same(a: &Tensor, b: &Tensor) -> bool {
    let values = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    a.dims() == b.dims() && (a.elem_count() == 0 || values(a) == values(b))
}

/// The largest absolute value among the finite elements.
pub fn max_abs(t: &Tensor) -> f64 {
    if t.elem_count() == 0 {
        return 0.0;
    }
    let values = t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    values.iter().filter(|x| x.is_finite()).fold(0.0, |peak: f64, x| peak.max(x.abs()))
}

/// Whether tensors are equal up to the rounding of a few operations. The error of a sum is relative to its largest
/// term, which is no larger than `terms` or the sum.
pub fn close(a: &Tensor, b: &Tensor, terms: f64) -> bool {
    if a.elem_count() == 0 {
        return a.dims() == b.dims();
    }
    let values = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    let (a, b, precision) = match b.dtype() {
        DType::F32 => (values(a), values(b), f64::from(f32::EPSILON)),
        DType::F64 => (values(a), values(b), f64::EPSILON),
        _ => (values(a), values(b), 0.0),
    };
    let scale = b.iter().filter(|x| x.is_finite()).fold(terms, |scale: f64, x| scale.max(x.abs()));
    let close = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= 4.0 * precision * scale;
    a.len() == b.len() && a.iter().zip(&b).all(close)
}

/// A `Ragged` placement of `dim` on `axis`, applied after the placements in `so_far`: other uneven sizes for every
/// combination of outer coordinates.
pub fn ragged(mesh: &Mesh, shape: &[usize], so_far: &[Placement], dim: usize, axis: usize, seed: usize) -> Placement {
    let layout = Layout::new(mesh, shape, so_far.to_vec()).unwrap();
    let (axes, k) = (layout.shard_order(dim).to_vec(), mesh.shape()[axis]);
    let combinations: usize = axes.iter().map(|&a| mesh.shape()[a]).product();
    let mut sizes = Vec::new();
    for mut outer in 0..combinations {
        let number = outer;
        let mut coordinate = vec![0; mesh.ndim()];
        for &a in axes.iter().rev() {
            coordinate[a] = outer % mesh.shape()[a];
            outer /= mesh.shape()[a];
        }
        let mut left = layout.local_shape(mesh.rank_at(&coordinate).unwrap())[dim];
        for i in 0..k {
            let take = if i + 1 == k { left } else { hash(&[seed, number, i, dim]) as usize % (left + 1) };
            sizes.push(take);
            left -= take;
        }
    }
    Placement::ragged(dim as isize, sizes)
}
