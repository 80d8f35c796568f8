//! Steps of random programs that move elements: redistribution, views, slices, concatenation, lookups, scatters and
//! sorting.

use rand::seq::SliceRandom;
use shardwise::ops::EmbeddingBagMode;
use shardwise::prelude::*;

use crate::random_programs::program::{Fill, LARGEST, Program, Value};
use crate::random_programs::steps::{Step, any, apply, one_of};

pub(crate) const STEPS: &[Step] = &[
    redistribute,
    redistribute,
    redistribute,
    reshape,
    reshape,
    flatten,
    rename,
    rename,
    stretch,
    narrow,
    pieces,
    cat,
    stack,
    border,
    turn,
    repeat,
    band,
    index_select,
    gather,
    embedding,
    one_hot,
    bucketize,
    scatter_add,
    index_add,
    scatter,
    sort,
    extremes,
    scan,
];

fn redistribute(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(any) else { return Ok(()) };
    let (shape, dtype) = (p.value(x).shape().to_vec(), p.value(x).dtype());
    let layout = p.layout(&shape, dtype, true);
    apply!(p, format!("to_layout {layout}"), [x], true, 1.0, |x| {
        // the unsharded side has only one layout
        if x[0].layout().mesh() == layout.mesh() { x[0].to_layout(&layout) } else { Ok(x[0].clone()) }
    })
}

fn signed(shape: &[usize]) -> Vec<isize> {
    shape.iter().map(|&n| n as isize).collect()
}

/// A shape with `count` elements.
fn factors(p: &mut Program, mut count: usize) -> Vec<usize> {
    let mut shape = Vec::new();
    while count > 1 && shape.len() < 4 {
        let divisors: Vec<usize> = (1..=count).filter(|d| count.is_multiple_of(*d)).collect();
        let size = one_of(p, &divisors);
        shape.push(size);
        count /= size;
    }
    if count != 1 || shape.is_empty() || p.chance(0.2) {
        shape.push(count);
    }
    shape.shuffle(p.rng());
    shape
}

fn reshape(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(any) else { return Ok(()) };
    let count = p.value(x).count();
    let mut shape = signed(&factors(p, count));
    if count > 0 && p.chance(0.3) {
        let open = p.below(shape.len());
        shape[open] = -1;
    }
    apply!(p, format!("reshape {shape:?}"), [x], true, 1.0, |x| x[0].reshape(&shape))
}

fn flatten(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.rank() < 5) else { return Ok(()) };
    let ndim = p.value(x).rank();
    let dim = p.below(ndim);
    if p.chance(0.5) {
        let end = dim + p.below(ndim - dim);
        return apply!(p, format!("flatten {dim} to {end}"), [x], true, 1.0, |x| {
            x[0].flatten(dim as isize, end as isize)
        });
    }
    let n = p.value(x).shape()[dim];
    let sizes = signed(&factors(p, n));
    apply!(p, format!("unflatten {dim} to {sizes:?}"), [x], true, 1.0, |x| x[0].unflatten(dim as isize, &sizes))
}

fn rename(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.rank() < 6) else { return Ok(()) };
    let ndim = p.value(x).rank();
    let (a, b) = (p.dim(ndim), p.dim(ndim));
    match p.below(6) {
        0 => {
            let mut order: Vec<isize> = (0..ndim as isize).collect();
            order.shuffle(p.rng());
            apply!(p, format!("permute {order:?}"), [x], true, 1.0, |x| x[0].permute(&order))
        }
        1 => apply!(p, format!("transpose {a} {b}"), [x], true, 1.0, |x| x[0].transpose(a, b)),
        2 => apply!(p, format!("movedim {a} {b}"), [x], true, 1.0, |x| x[0].movedim(a, b)),
        3 => apply!(p, "squeeze all", [x], true, 1.0, |x| x[0].squeeze(None)),
        4 => apply!(p, format!("squeeze {a}"), [x], true, 1.0, |x| x[0].squeeze(Some(a))),
        _ => apply!(p, format!("unsqueeze {a}"), [x], true, 1.0, |x| x[0].unsqueeze(a)),
    }
}

fn stretch(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() < 4 && v.count() <= LARGEST / 6) else { return Ok(()) };
    let mut sizes: Vec<isize> = signed(p.value(x).shape());
    for size in &mut sizes {
        if *size == 1 {
            *size = 1 + p.below(3) as isize;
        } else if p.chance(0.3) {
            *size = -1;
        }
    }
    if p.chance(0.5) {
        sizes.insert(0, 1 + p.below(3) as isize);
    }
    apply!(p, format!("expand {sizes:?}"), [x], true, 1.0, |x| x[0].expand(&sizes))
}

fn narrow(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0) else { return Ok(()) };
    let ndim = p.value(x).rank();
    let dim = p.dim(ndim);
    let n = p.value(x).shape()[dim.rem_euclid(ndim as isize) as usize];
    let start = p.below(n);
    let length = p.below(n - start + 1);
    match p.below(3) {
        0 => apply!(p, format!("narrow {dim} from {start} by {length}"), [x], true, 1.0, |x| {
            x[0].narrow(dim, start, length)
        }),
        1 => {
            let (end, step) = (one_of(p, &[None, Some(-1), Some((start + length) as isize), Some(99)]), 1 + p.below(3));
            apply!(p, format!("slice {dim} from {start} to {end:?} step {step}"), [x], true, 1.0, |x| {
                x[0].slice(dim, start as isize, end, step)
            })
        }
        _ => {
            let index = if p.chance(0.5) { start as isize } else { start as isize - n as isize };
            apply!(p, format!("select {index} of {dim}"), [x], true, 1.0, |x| x[0].select(dim, index))
        }
    }
}

fn pieces(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0) else { return Ok(()) };
    let ndim = p.value(x).rank();
    let dim = p.dim(ndim);
    let n = p.value(x).shape()[dim.rem_euclid(ndim as isize) as usize];
    let (size, first) = (1 + p.below(n), p.below(n + 1));
    let made = match p.below(4) {
        0 => p.apply(&format!("split {dim} by {size}"), &[x], true, 1.0, |x| x[0].split(size, dim)),
        1 => p.apply(&format!("split_sizes {dim} at {first}"), &[x], true, 1.0, |x| {
            x[0].split_sizes(&[first, 0, n - first], dim)
        }),
        2 => p.apply(&format!("chunk {dim} into {size}"), &[x], true, 1.0, |x| x[0].chunk(size, dim)),
        _ => p.apply(&format!("unbind {dim}"), &[x], true, 1.0, |x| x[0].unbind(dim)),
    };
    made.map(drop)
}

/// Another tensor of the same sizes but along a dimension.
fn beside(p: &mut Program, x: usize, dim: usize) -> Result<usize> {
    let shape = p.value(x).shape().to_vec();
    let others = |s: &[usize]| s.iter().enumerate().filter(|(d, _)| *d != dim).map(|(_, &n)| n).collect::<Vec<_>>();
    let fits = |v: &Value| v.rank() == shape.len() && others(v.shape()) == others(&shape) && v.count() <= LARGEST / 3;
    p.find_or(fits, |p| {
        let mut other = shape.clone();
        other[dim] = p.below(4);
        other
    })
}

fn cat(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() <= LARGEST / 3) else { return Ok(()) };
    let dim = p.below(p.value(x).rank());
    let mut operands = vec![x];
    for _ in 0..1 + p.below(2) {
        operands.push(beside(p, x, dim)?);
    }
    operands.shuffle(p.rng());
    apply!(p, format!("cat along {dim}"), operands, true, 1.0, |x| {
        DTensor::cat(&x.iter().collect::<Vec<_>>(), dim as isize)
    })
}

fn stack(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() < 5 && v.count() <= LARGEST / 2) else { return Ok(()) };
    let shape = p.value(x).shape().to_vec();
    let other = p.find_or(|v| v.shape() == shape, |_| shape.clone())?;
    let dim = p.dim(shape.len() + 1);
    apply!(p, format!("stack along {dim}"), [x, other], true, 1.0, |x| DTensor::stack(&[&x[0], &x[1]], dim))
}

fn border(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() <= LARGEST / 4) else { return Ok(()) };
    let borders: Vec<(usize, usize)> =
        (0..p.below(p.value(x).rank().min(2)) + 1).map(|_| (p.below(3), p.below(3))).collect();
    let value = one_of(p, &[0.0, 7.0]);
    apply!(p, format!("pad {borders:?} with {value}"), [x], true, 1.0, |x| x[0].pad(&borders, value))
}

fn turn(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0) else { return Ok(()) };
    let dims = p.dims(p.value(x).rank());
    if p.chance(0.5) {
        return apply!(p, format!("flip {dims:?}"), [x], true, 1.0, |x| x[0].flip(&dims));
    }
    let shifts: Vec<isize> = (0..dims.len().max(1)).map(|_| p.below(9) as isize - 4).collect();
    apply!(p, format!("roll {shifts:?} along {dims:?}"), [x], true, 1.0, |x| x[0].roll(&shifts, &dims))
}

fn repeat(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.rank() < 4 && v.count() <= LARGEST / 8) else { return Ok(()) };
    let ndim = p.value(x).rank();
    if p.chance(0.5) {
        let (dim, times) = (p.dim(ndim), p.below(4));
        return apply!(p, format!("repeat_interleave {times} along {dim}"), [x], true, 1.0, |x| {
            x[0].repeat_interleave(times, dim)
        });
    }
    let mut times = vec![1; ndim + p.below(2)];
    for _ in 0..2 {
        let at = p.below(times.len());
        times[at] = 1 + p.below(2);
    }
    apply!(p, format!("repeat {times:?}"), [x], true, 1.0, |x| x[0].repeat(&times))
}

fn band(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 1) else { return Ok(()) };
    let offset = p.below(7) as isize - 3;
    match p.below(3) {
        0 => apply!(p, format!("tril {offset}"), [x], true, 1.0, |x| x[0].tril(offset)),
        1 => apply!(p, format!("triu {offset}"), [x], true, 1.0, |x| x[0].triu(offset)),
        _ => apply!(p, format!("diagonal {offset}"), [x], true, 1.0, |x| x[0].diagonal(offset)),
    }
}

/// Indices below `n`: a new leaf.
fn indices(p: &mut Program, shape: &[usize], n: usize) -> Result<usize> {
    p.leaf(shape, Fill::Below(n))
}

fn index_select(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0 && v.count() <= LARGEST / 4) else { return Ok(()) };
    let ndim = p.value(x).rank();
    let dim = p.dim(ndim);
    let n = p.value(x).shape()[dim.rem_euclid(ndim as isize) as usize];
    if p.chance(0.6) {
        let length = p.below(6);
        let index = indices(p, &[length], n)?;
        return apply!(p, format!("index_select {dim}"), [x, index], true, 1.0, |x| x[0].index_select(dim, &x[1]));
    }
    let shape = [1 + p.below(2), 1 + p.below(3)];
    let index = indices(p, &shape, p.value(x).shape()[0])?;
    apply!(p, "index, from the back", [x, index], true, 1.0, |x| x[0].index(&x[1].rsub_scalar(-1.0)?))
}

/// A shape for an index into `x`: shorter in some dimensions, of any length along `dim`.
fn index_shape(p: &mut Program, x: usize, dim: usize) -> Vec<usize> {
    let shape = p.value(x).shape().to_vec();
    let mut sizes: Vec<usize> = shape.iter().map(|&n| if p.chance(0.3) { p.below(n + 1) } else { n }).collect();
    sizes[dim] = p.below(6);
    sizes
}

fn gather(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0 && v.count() <= LARGEST / 5) else { return Ok(()) };
    let dim = p.below(p.value(x).rank());
    let shape = index_shape(p, x, dim);
    let index = indices(p, &shape, p.value(x).shape()[dim])?;
    apply!(p, format!("gather {dim}"), [x, index], true, 1.0, |x| x[0].gather(dim as isize, &x[1]))
}

fn embedding(p: &mut Program) -> Result<()> {
    let weight =
        p.find_or(|v| v.rank() == 2 && v.count() > 0 && v.shape()[1] < 12, |p| vec![3 + p.below(6), 1 + p.below(5)])?;
    let (bags, size) = (1 + p.below(4), 1 + p.below(4));
    let ids = indices(p, &[bags, size], p.value(weight).shape()[0])?;
    if p.chance(0.5) {
        return apply!(p, "embedding", [weight, ids], true, 1.0, |x| x[0].embedding(&x[1]));
    }
    let mode = one_of(p, &[EmbeddingBagMode::Sum, EmbeddingBagMode::Mean, EmbeddingBagMode::Max]);
    let keeps = mode != EmbeddingBagMode::Mean;
    apply!(p, format!("embedding_bag {mode:?}"), [weight, ids], keeps, size as f64, |x| {
        x[0].embedding_bag(&x[1], None, mode)
    })
}

fn one_hot(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| !v.is_float() && v.rank() < 5 && v.count() <= LARGEST / 4) else { return Ok(()) };
    let classes = 1 + p.below(4);
    apply!(p, format!("one_hot {classes} of clamped"), [x], true, 1.0, |x| {
        x[0].clamp(Some(0.0), Some(classes as f64 - 1.0))?.one_hot(classes)
    })
}

fn bucketize(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(Value::is_exact) else { return Ok(()) };
    let length = 1 + p.below(5);
    let edges = p.leaf(&[length], Fill::Eighths)?;
    apply!(p, "bucketize, boundaries sorted", [x, edges], true, 1.0, |x| {
        // no boundary is an integer, so that no element equals one
        x[0].bucketize(&x[1].floor()?.add_scalar(0.5)?.sort(0, false)?.0)
    })
}

fn scatter_add(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0) else { return Ok(()) };
    let dim = p.below(p.value(x).rank());
    let shape = index_shape(p, x, dim);
    let index = indices(p, &shape, p.value(x).shape()[dim])?;
    let longer: Vec<usize> = shape.iter().map(|&n| if p.chance(0.2) { n + 1 } else { n }).collect();
    let source = p.find_or(|v| v.shape() == longer && v.is_float(), |_| longer.clone())?;
    if !p.value(x).is_float() {
        return Ok(()); // a fraction would be truncated
    }
    let gain = 1.0 + shape[dim] as f64;
    apply!(p, format!("scatter_add {dim}"), [x, index, source], true, gain, |x| {
        x[0].scatter_add(dim as isize, &x[1], &x[2])
    })
}

fn index_add(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0 && v.is_float()) else { return Ok(()) };
    let dim = p.below(p.value(x).rank());
    let mut shape = p.value(x).shape().to_vec();
    let n = shape[dim];
    shape[dim] = p.below(6);
    let index = indices(p, &[shape[dim]], n)?;
    let source = p.find_or(|v| v.shape() == shape, |_| shape.clone())?;
    let gain = 1.0 + shape[dim] as f64;
    if dim == 0 && p.chance(0.4) {
        return apply!(p, "index_put, adding", [x, index, source], true, gain, |x| {
            x[0].index_put(&[&x[1]], &x[2], true)
        });
    }
    apply!(p, format!("index_add {dim}"), [x, index, source], true, gain, |x| {
        x[0].index_add(dim as isize, &x[1], &x[2])
    })
}

/// Distinct places: the order of a leaf along the dimension.
fn scatter(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0) else { return Ok(()) };
    let dim = p.below(p.value(x).rank());
    let shape = p.value(x).shape().to_vec();
    let (keys, kept) = (p.leaf(&shape, Fill::Whole)?, 1 + p.below(shape[dim]));
    let source = p.find_or(|v| v.shape() == shape, |_| shape.clone())?;
    if !p.value(x).is_float() && p.value(source).is_float() {
        return Ok(());
    }
    apply!(p, format!("scatter {dim} of the order of the second, {kept} of it"), [x, keys, source], true, 1.0, |x| {
        let places = x[1].argsort(dim as isize, true)?.narrow(dim as isize, 0, kept)?;
        x[0].scatter(dim as isize, &places, &x[2])
    })
}

/// Keeps the places only where the values are exact: else an error might swap two.
fn pair(found: (DTensor, DTensor), exact: bool) -> Vec<DTensor> {
    if exact { vec![found.0, found.1] } else { vec![found.0] }
}

fn sort(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0) else { return Ok(()) };
    let ndim = p.value(x).rank();
    let (dim, exact, down) = (p.dim(ndim), p.value(x).is_exact(), p.chance(0.5));
    let n = p.value(x).shape()[dim.rem_euclid(ndim as isize) as usize];
    let (k, keepdim) = (1 + p.below(n), p.chance(0.5));
    let made = match p.below(3) {
        0 => p.apply(&format!("sort {dim}, descending {down}"), &[x], true, 1.0, |x| {
            Ok(pair(x[0].sort(dim, down)?, exact))
        }),
        1 => p.apply(&format!("topk {k} of {dim}, largest {down}"), &[x], true, 1.0, |x| {
            Ok(pair(x[0].topk(k, dim, down)?, exact))
        }),
        _ => p.apply(&format!("kthvalue {k} of {dim}, keepdim {keepdim}"), &[x], true, 1.0, |x| {
            Ok(pair(x[0].kthvalue(k, dim, keepdim)?, exact))
        }),
    };
    made.map(drop)
}

fn extremes(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0) else { return Ok(()) };
    let (dim, exact, keepdim) = (p.dim(p.value(x).rank()), p.value(x).is_exact(), p.chance(0.5));
    let all = one_of(p, &[None, Some(dim)]);
    let text = format!("of {dim} or {all:?}, keepdim {keepdim}");
    let made = match p.below(if exact { 5 } else { 3 }) {
        0 => p.apply(&format!("max_dim {text}"), &[x], true, 1.0, |x| Ok(pair(x[0].max_dim(dim, keepdim)?, exact))),
        1 => p.apply(&format!("min_dim {text}"), &[x], true, 1.0, |x| Ok(pair(x[0].min_dim(dim, keepdim)?, exact))),
        2 => p.apply(&format!("aminmax {text}"), &[x], true, 1.0, |x| Ok(pair(x[0].aminmax(all, keepdim)?, true))),
        3 => p.apply(&format!("argmax {text}"), &[x], true, 1.0, |x| Ok(vec![x[0].argmax(all, keepdim)?])),
        _ => p.apply(&format!("argmin {text}"), &[x], true, 1.0, |x| Ok(vec![x[0].argmin(all, keepdim)?])),
    };
    made.map(drop)
}

fn scan(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0) else { return Ok(()) };
    let ndim = p.value(x).rank();
    let (dim, exact) = (p.dim(ndim), p.value(x).is_exact());
    let n = p.value(x).shape()[dim.rem_euclid(ndim as isize) as usize] as f64;
    let product = n * p.value(x).span().max(1.0).powf(n);
    let made = match p.below(4) {
        0 => p.apply(&format!("cummax {dim}"), &[x], true, 1.0, |x| Ok(pair(x[0].cummax(dim)?, exact))),
        1 => p.apply(&format!("cummin {dim}"), &[x], true, 1.0, |x| Ok(pair(x[0].cummin(dim)?, exact))),
        2 if product < 1e9 => p.apply(&format!("cumprod {dim}"), &[x], true, product, |x| Ok(vec![x[0].cumprod(dim)?])),
        _ => p.apply(&format!("cumsum {dim}"), &[x], true, n.max(1.0), |x| Ok(vec![x[0].cumsum(dim)?])),
    };
    made.map(drop)
}
