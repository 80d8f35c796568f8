//! Steps of random programs that multiply: matrix products, attention, convolution, pooling, dropout.

use shardwise::ops::{AttentionOptions, BlockMask, ConvOptions};
use shardwise::prelude::*;

use crate::random_programs::program::{Fill, LARGEST, Program, Value};
use crate::random_programs::steps::{Step, any, apply, one_of};

pub(crate) const STEPS: &[Step] =
    &[matmul, matmul, matmul, einsum, einsum, grouped, affine, attention, convolution, pooling, dropout, dtype];

/// How a sum of `k` products amplifies errors.
fn product_gain(p: &Program, a: usize, b: usize, k: usize) -> f64 {
    k.max(1) as f64 * p.value(a).span().max(p.value(b).span()).max(1.0)
}

fn matmul(p: &mut Program) -> Result<()> {
    let Some(a) = p.find(|v| v.rank() > 0 && v.rank() < 5) else { return Ok(()) };
    let shape = p.value(a).shape().to_vec();
    let k = shape[shape.len() - 1];
    let room = LARGEST / (p.value(a).count() / k.max(1)).max(1);
    let columns = 1 + p.below(room.clamp(1, 6));
    let b = match p.below(4) {
        0 => p.find_or(|v| v.shape() == [k], |_| vec![k])?,
        1 if shape.len() > 2 => {
            let batch: Vec<usize> =
                shape[..shape.len() - 2].iter().map(|&n| if p.chance(0.3) { 1 } else { n }).collect();
            p.leaf(&[batch, vec![k, columns]].concat(), Fill::Eighths)?
        }
        _ => p.find_or(|v| v.rank() == 2 && v.shape()[0] == k && v.shape()[1] <= columns, |_| vec![k, columns])?,
    };
    let gain = product_gain(p, a, b, k);
    apply!(p, "matmul", [a, b], true, gain, |x| x[0].matmul(&x[1]))
}

fn einsum(p: &mut Program) -> Result<()> {
    let equations = [
        "mk,kn->mn",
        "mk,nk->nm",
        "bmk,bkn->bmn",
        "bij,bjk->ki",
        "ab->ba",
        "abc->b",
        "m,n->mn",
        "k,k->",
        "ij,ij->i",
        "ij,jk,kl->il",
    ];
    let equation = one_of(p, &equations);
    let terms: Vec<&str> = equation.split("->").next().expect("a left side").split(',').collect();
    let mut sizes: Vec<(char, usize)> = Vec::new();
    let mut operands: Vec<usize> = Vec::new();
    for term in terms {
        let known = |c: char| sizes.iter().find(|(name, _)| *name == c).map(|(_, n)| *n);
        let fits = |v: &Value| {
            v.rank() == term.len()
                && term.chars().zip(v.shape()).all(|(c, &n)| n < 9 && known(c).is_none_or(|k| k == n))
        };
        let shape = |p: &mut Program| term.chars().map(|c| known(c).unwrap_or(1 + p.below(5))).collect();
        let operand = p.find_or(fits, shape)?;
        sizes.extend(term.chars().zip(p.value(operand).shape().iter().copied()));
        operands.push(operand);
    }
    let span = operands.iter().map(|&i| p.value(i).span()).fold(1.0, f64::max);
    let gain = sizes.iter().map(|(_, n)| *n.max(&1) as f64).product::<f64>() * span.powi(operands.len() as i32 - 1);
    apply!(p, format!("einsum {equation}"), operands, true, gain, |x| {
        DTensor::einsum(equation, &x.iter().collect::<Vec<_>>())
    })
}

fn grouped(p: &mut Program) -> Result<()> {
    let Some(a) = p.find(|v| v.rank() == 2 && v.count() > 0) else { return Ok(()) };
    let (m, k) = (p.value(a).shape()[0], p.value(a).shape()[1]);
    let (groups, n) = (1 + p.below(3), 1 + p.below(4));
    let b = p.leaf(&[groups, k, n], Fill::Eighths)?;
    // Sizes that add up to at most the rows.
    let sizes = p.leaf(&[groups], Fill::Below(m / groups + 1))?;
    let gain = product_gain(p, a, b, k);
    apply!(p, "grouped_mm", [a, b, sizes], true, gain, |x| x[0].grouped_mm(&x[1], Some(&x[2].cumsum(0)?)))
}

fn affine(p: &mut Program) -> Result<()> {
    let matrix = |v: &Value| v.rank() == 2;
    let Some(x) = p.find(matrix) else { return Ok(()) };
    let (m, k) = (p.value(x).shape()[0], p.value(x).shape()[1]);
    let n = 1 + p.below(5);
    let other = p.leaf(&[n, k], Fill::Eighths)?;
    let bias = p.leaf(&[n], Fill::Whole)?;
    let gain = 2.0 * product_gain(p, x, other, k);
    match p.below(3) {
        0 => apply!(p, "linear", [x, other, bias], true, gain, |x| x[0].linear(&x[1], Some(&x[2]))),
        1 => apply!(p, "addmm of the transpose", [x, other, bias], true, gain, |x| {
            x[2].addmm(&x[0], &x[1].t()?, 2.0, 1.0)
        }),
        _ => {
            let vector = p.find_or(|v| v.shape() == [m], |_| vec![m])?;
            let gain = product_gain(p, x, vector, m);
            apply!(p, "mv of the transpose", [x, vector], true, gain, |x| x[0].t()?.mv(&x[1]))
        }
    }
}

fn attention(p: &mut Program) -> Result<()> {
    let fits = |v: &Value| v.rank() > 2 && v.rank() < 5 && v.is_float() && v.count() > 0 && v.peak() <= 16.0;
    let q = p.find_or(fits, |p| vec![1 + p.below(2), one_of(p, &[1, 2, 4, 6]), 1 + p.below(5), 1 + p.below(4)])?;
    let shape = p.value(q).shape().to_vec();
    let [batch @ .., heads, _, size] = &shape[..] else { unreachable!("three dimensions at least") };
    let shared: Vec<usize> = (1..=*heads).filter(|h| heads.is_multiple_of(*h)).collect();
    let (heads, length) = (one_of(p, &shared), 1 + p.below(6));
    let of = |size: usize| [batch, &[heads, length, size]].concat();
    let (keys, values) = (p.leaf(&of(*size), Fill::Eighths)?, p.leaf(&of(*size), Fill::Eighths)?);
    let gain = length as f64 * (1.0 + 2.0 * *size as f64 * 16.0 * 16.0);
    if p.chance(0.3) && size.is_multiple_of(2) {
        return apply!(p, "rotary_embedding", [q], false, 2.0, |x| x[0].rotary_embedding(100.0, 3));
    }
    let (causal, hidden) = (p.chance(0.5), p.chance(0.3).then(|| 2 + p.below(3)));
    apply!(p, format!("attention, causal {causal}, hidden {hidden:?}"), [q, keys, values], false, gain, |x| {
        let sizes = [1, 1, x[0].shape()[x[0].ndim() - 2], length];
        let blocks =
            hidden.map(|every| BlockMask::from_fn(sizes, |_, _, query, key| !(query + key).is_multiple_of(every)));
        let block_mask = blocks.as_ref();
        let options = AttentionOptions { causal, scale: Some(0.125), block_mask, ..AttentionOptions::default() };
        x[0].scaled_dot_product_attention(&x[1], &x[2], options)
    })
}

fn convolution(p: &mut Program) -> Result<()> {
    let spatial = 1 + p.below(2);
    let fits = |v: &Value| v.rank() == spatial + 2 && v.count() <= 100 && v.count() > 0;
    let x = p.find_or(fits, |p| {
        let mut shape = vec![1 + p.below(2), one_of(p, &[1, 2, 4])];
        shape.extend((0..spatial).map(|_| 2 + p.below(5)));
        shape
    })?;
    let shape = p.value(x).shape().to_vec();
    let options = ConvOptions {
        stride: 1 + p.below(2),
        padding: p.below(3),
        dilation: 1 + p.below(2),
        groups: if shape[1].is_multiple_of(2) && p.chance(0.4) { 2 } else { 1 },
    };
    // A window of one element always fits.
    let fits = |n: usize, size: usize| (size - 1) * options.dilation < n + 2 * options.padding;
    let mut sizes = vec![options.groups * (1 + p.below(2)), shape[1] / options.groups];
    for &n in &shape[2..] {
        let size = 1 + p.below(3);
        sizes.push(if fits(n, size) { size } else { 1 });
    }
    let weight = p.leaf(&sizes, Fill::Eighths)?;
    let gain = product_gain(p, x, weight, sizes[1..].iter().product());
    let bias = if p.chance(0.5) { Some(p.leaf(&sizes[..1], Fill::Whole)?) } else { None };
    let operands: Vec<usize> = [x, weight].into_iter().chain(bias).collect();
    apply!(p, format!("conv{spatial}d {options:?}"), operands, true, 2.0 * gain, |x| match spatial {
        1 => x[0].conv1d(&x[1], x.get(2), options),
        _ => x[0].conv2d(&x[1], x.get(2), options),
    })
}

fn pooling(p: &mut Program) -> Result<()> {
    let spatial = 1 + p.below(2);
    let fits = |v: &Value| v.rank() == spatial + 2 && v.is_float() && v.shape()[2..].iter().all(|&n| n > 1);
    let x = p.find_or(fits, |p| {
        let mut shape = vec![1 + p.below(3), 1 + p.below(3)];
        shape.extend((0..spatial).map(|_| 2 + p.below(5)));
        shape
    })?;
    let (largest, padding, stride) = (p.chance(0.5), p.below(2), one_of(p, &[None, Some(1), Some(2), Some(3)]));
    let text = format!("pool{spatial}d of 2, largest {largest}, stride {stride:?}, padding {padding}");
    apply!(p, text, [x], largest, 1.0, |x| match (spatial, largest) {
        (1, true) => x[0].max_pool1d(2, stride, padding),
        (1, false) => x[0].avg_pool1d(2, stride, padding),
        (_, true) => x[0].max_pool2d(2, stride, padding),
        (_, false) => x[0].avg_pool2d(2, stride, padding),
    })
}

fn dropout(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(Value::is_float) else { return Ok(()) };
    let seed = p.below(1000) as u64;
    apply!(p, format!("dropout with seed {seed}"), [x], true, 2.0, |x| {
        x[0].device_mesh().manual_seed(seed);
        x[0].dropout(0.5, true)
    })
}

fn dtype(p: &mut Program) -> Result<()> {
    use candle_core::DType::{BF16, F16, F32, F64, I32, I64, U8};
    // An inexact number may be on either side of an integer.
    let Some(x) = p.find(any) else { return Ok(()) };
    let choices: &[DType] = match p.value(x).is_exact() {
        true => &[F64, F32, F16, BF16, I64, I32],
        false => &[F64, F32, F16, BF16],
    };
    let dtype = one_of(p, choices);
    let truth = p.value(x).is_exact() && p.value(x).peak() <= 1.0 && p.chance(0.2);
    let dtype = if truth && !p.value(x).is_float() { U8 } else { dtype };
    apply!(p, format!("to_dtype {}", dtype.as_str()), [x], true, 1.0, |x| x[0].to_dtype(dtype))
}
