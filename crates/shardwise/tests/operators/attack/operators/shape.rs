//! Views, slices, concatenation and padding.

use serde_json::{Value, json};
use shardwise::prelude::*;

use super::{Drawn, Operator, one};
use crate::attack::draw::Draw;

pub(super) const TABLE: &[&[Operator]] = &[&[
    Operator { name: "permute", draw: permute, apply: |x, a| Ok(one(x[0].permute(&a.dims("dims"))?)) },
    Operator { name: "transpose", draw: swap, apply: |x, a| Ok(one(x[0].transpose(a.dim("dim"), a.dim("to"))?)) },
    Operator { name: "t", draw: matrix, apply: |x, _| Ok(one(x[0].t()?)) },
    Operator { name: "movedim", draw: swap, apply: |x, a| Ok(one(x[0].movedim(a.dim("dim"), a.dim("to"))?)) },
    Operator { name: "unsqueeze", draw: unsqueeze, apply: |x, a| Ok(one(x[0].unsqueeze(a.dim("dim"))?)) },
    Operator { name: "squeeze", draw: squeeze, apply: |x, a| Ok(one(x[0].squeeze(a.maybe_dim("dim"))?)) },
    Operator { name: "expand", draw: expand, apply: |x, a| Ok(one(x[0].expand(&a.dims("size"))?)) },
    Operator { name: "reshape", draw: reshape, apply: |x, a| Ok(one(x[0].reshape(&a.dims("shape"))?)) },
    Operator { name: "view", draw: reshape, apply: |x, a| Ok(one(x[0].view(&a.dims("shape"))?)) },
    Operator { name: "flatten", draw: flatten, apply: |x, a| Ok(one(x[0].flatten(a.dim("start"), a.dim("end"))?)) },
    Operator {
        name: "unflatten",
        draw: unflatten,
        apply: |x, a| Ok(one(x[0].unflatten(a.dim("dim"), &a.dims("sizes"))?)),
    },
    Operator { name: "diagonal", draw: band, apply: |x, a| Ok(one(x[0].diagonal(a.dim("offset"))?)) },
    Operator { name: "tril", draw: band, apply: |x, a| Ok(one(x[0].tril(a.dim("offset"))?)) },
    Operator { name: "triu", draw: band, apply: |x, a| Ok(one(x[0].triu(a.dim("offset"))?)) },
    Operator { name: "cat", draw: cat, apply: |x, a| Ok(one(DTensor::cat(&refs(x), a.dim("dim"))?)) },
    Operator { name: "stack", draw: stack, apply: |x, a| Ok(one(DTensor::stack(&refs(x), a.dim("dim"))?)) },
    Operator { name: "split", draw: split, apply: |x, a| x[0].split(a.count("n")?, a.dim("dim")) },
    Operator {
        name: "split_sizes",
        draw: split_sizes,
        apply: |x, a| x[0].split_sizes(&a.counts("sizes")?, a.dim("dim")),
    },
    Operator { name: "chunk", draw: split, apply: |x, a| x[0].chunk(a.count("n")?, a.dim("dim")) },
    Operator {
        name: "slice",
        draw: slice,
        apply: |x, a| Ok(one(x[0].slice(a.dim("dim"), a.dim("start"), a.maybe_dim("end"), a.count("step")?)?)),
    },
    Operator { name: "select", draw: select, apply: |x, a| Ok(one(x[0].select(a.dim("dim"), a.dim("index"))?)) },
    Operator {
        name: "narrow",
        draw: narrow,
        apply: |x, a| Ok(one(x[0].narrow(a.dim("dim"), a.count("start")?, a.count("length")?)?)),
    },
    Operator { name: "unbind", draw: unbind, apply: |x, a| x[0].unbind(a.dim("dim")) },
    Operator {
        name: "pad",
        draw: pad,
        apply: |x, a| {
            let border: Vec<(usize, usize)> = a.counts("border")?.chunks(2).map(|b| (b[0], b[1])).collect();
            Ok(one(x[0].pad(&border, a.number("number"))?))
        },
    },
    Operator { name: "flip", draw: flip, apply: |x, a| Ok(one(x[0].flip(&a.dims("dims"))?)) },
    Operator { name: "roll", draw: roll, apply: |x, a| Ok(one(x[0].roll(&a.dims("shifts"), &a.dims("dims"))?)) },
    Operator { name: "repeat", draw: repeat, apply: |x, a| Ok(one(x[0].repeat(&a.counts("repeats")?)?)) },
    Operator {
        name: "repeat_interleave",
        draw: interleave,
        apply: |x, a| Ok(one(x[0].repeat_interleave(a.count("repeats")?, a.dim("dim"))?)),
    },
]];

fn refs(x: &[DTensor]) -> Vec<&DTensor> {
    x.iter().collect()
}

fn input(
    d: &mut Draw,
    ndim: std::ops::RangeInclusive<usize>,
    attrs: impl FnOnce(&mut Draw, &[usize]) -> Value,
) -> Drawn {
    let (shape, dtype) = (d.shape(ndim), d.any());
    let attrs = attrs(d, &shape);
    (vec![d.input(&shape, dtype)], attrs)
}

/// The size of a dimension that may be counted from the back.
fn at(shape: &[usize], dim: isize) -> usize {
    shape[dim.rem_euclid(shape.len() as isize) as usize]
}

fn permute(d: &mut Draw) -> Drawn {
    input(d, 0..=4, |d, shape| {
        let n = shape.len();
        let mut dims: Vec<isize> = (0..n as isize).collect();
        for i in (1..n).rev() {
            dims.swap(i, d.below(i + 1));
        }
        json!({"dims": dims.iter().map(|&m| if d.one_in(3) { m - n as isize } else { m }).collect::<Vec<_>>()})
    })
}

fn swap(d: &mut Draw) -> Drawn {
    input(d, 1..=4, |d, shape| json!({"dim": d.dim(shape.len()), "to": d.dim(shape.len())}))
}

fn matrix(d: &mut Draw) -> Drawn {
    input(d, 0..=2, |_, _| json!({}))
}

fn unsqueeze(d: &mut Draw) -> Drawn {
    input(d, 0..=4, |d, shape| json!({"dim": d.dim(shape.len() + 1)}))
}

fn squeeze(d: &mut Draw) -> Drawn {
    input(d, 0..=4, |d, shape| json!({"dim": if d.one_in(2) { Value::Null } else { json!(d.dim(shape.len())) }}))
}

fn expand(d: &mut Draw) -> Drawn {
    let (target, dtype) = (d.shape(0..=4), d.any());
    let from = d.broadcasting(&target);
    let kept = target.len() - from.len();
    let size = |(i, &n): (usize, &usize)| if i >= kept && from[i - kept] == n && n % 2 == 1 { -1 } else { n as isize };
    let sizes: Vec<isize> = target.iter().enumerate().map(size).collect();
    (vec![d.input(&from, dtype)], json!({"size": sizes}))
}

/// The prime factors of the size, distributed over new dimensions.
fn reshape(d: &mut Draw) -> Drawn {
    input(d, 0..=4, |d, shape| {
        let mut n: usize = shape.iter().product();
        let mut sizes = vec![1isize; 1 + d.below(4)];
        if n == 0 {
            sizes[0] = 0;
        } else {
            let mut factor = 2;
            while n > 1 {
                while n.is_multiple_of(factor) {
                    let i = d.below(sizes.len());
                    sizes[i] *= factor as isize;
                    n /= factor;
                }
                factor += 1;
            }
            if d.one_in(3) {
                let i = d.below(sizes.len());
                sizes[i] = -1;
            }
        }
        json!({"shape": sizes})
    })
}

fn flatten(d: &mut Draw) -> Drawn {
    input(d, 0..=4, |d, shape| {
        let start = d.below(shape.len());
        let end = start + d.below(shape.len().max(1) - start);
        let back = if d.one_in(3) { shape.len().max(1) as isize } else { 0 };
        json!({"start": start, "end": end as isize - back})
    })
}

fn unflatten(d: &mut Draw) -> Drawn {
    let (mut shape, dtype) = (d.shape(1..=3), d.any());
    let (dim, a, b) = (d.below(shape.len()), d.some(), d.some());
    shape[dim] = a * b;
    let sizes = match d.below(3) {
        0 => json!([a, b]),
        1 => json!([-1, b]),
        _ => json!([a, -1]),
    };
    (vec![d.input(&shape, dtype)], json!({"dim": dim, "sizes": sizes}))
}

fn band(d: &mut Draw) -> Drawn {
    input(d, 2..=4, |d, _| json!({"offset": d.below(9) as isize - 4}))
}

fn cat(d: &mut Draw) -> Drawn {
    let (mut shape, dtype) = (d.shape(1..=3), d.any());
    let dim = d.dim(shape.len());
    let at = dim.rem_euclid(shape.len() as isize) as usize;
    let mut inputs = Vec::new();
    for _ in 0..1 + d.below(4) {
        shape[at] = d.size();
        let dtype = if d.one_in(8) { d.any() } else { dtype };
        inputs.push(d.input(&shape, dtype));
    }
    (inputs, json!({"dim": dim}))
}

fn stack(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(0..=3), d.any());
    let inputs = (0..1 + d.below(3)).map(|_| d.input(&shape, dtype)).collect();
    (inputs, json!({"dim": d.dim(shape.len() + 1)}))
}

fn split(d: &mut Draw) -> Drawn {
    input(d, 1..=3, |d, shape| {
        let dim = d.dim(shape.len());
        // few pieces
        json!({"dim": dim, "n": (at(shape, dim) / 8 + 1 + d.below(5)).min(if at(shape, dim) > 100 { 7 } else { 50 })})
    })
}

fn split_sizes(d: &mut Draw) -> Drawn {
    input(d, 1..=3, |d, shape| {
        let dim = d.dim(shape.len());
        let mut left = at(shape, dim);
        let mut sizes = Vec::new();
        while left > 0 && sizes.len() < 3 {
            sizes.push(d.below(left + 1));
            left -= sizes[sizes.len() - 1];
        }
        sizes.push(left);
        json!({"dim": dim, "sizes": sizes})
    })
}

fn slice(d: &mut Draw) -> Drawn {
    input(d, 1..=4, |d, shape| {
        let dim = d.dim(shape.len());
        let n = at(shape, dim) as isize;
        let place = |d: &mut Draw| d.below(2 * n as usize + 3) as isize - n - 1;
        let end = if d.one_in(3) { Value::Null } else { json!(place(d)) };
        json!({"dim": dim, "start": place(d), "end": end, "step": d.choose(&[1, 1, 2, 3])})
    })
}

fn select(d: &mut Draw) -> Drawn {
    input(d, 1..=4, |d, shape| {
        let dim = d.dim(shape.len());
        json!({"dim": dim, "index": d.dim(at(shape, dim))})
    })
}

fn narrow(d: &mut Draw) -> Drawn {
    input(d, 1..=4, |d, shape| {
        let dim = d.dim(shape.len());
        let start = d.below(at(shape, dim) + 1);
        json!({"dim": dim, "start": start, "length": d.below(at(shape, dim) - start + 1)})
    })
}

fn unbind(d: &mut Draw) -> Drawn {
    let (shape, dtype) = ((0..1 + d.below(3)).map(|_| d.size()).collect::<Vec<_>>(), d.any());
    (vec![d.input(&shape, dtype)], json!({"dim": d.dim(shape.len())}))
}

fn pad(d: &mut Draw) -> Drawn {
    let (inputs, _) = input(d, 1..=4, |_, _| json!({}));
    let border: Vec<usize> = (0..2 * (1 + d.below(inputs[0].shape.len()))).map(|_| d.below(4)).collect();
    let number = if inputs[0].dtype.is_float() { d.number() } else { 3.0 };
    (inputs, json!({"border": border, "number": number}))
}

fn flip(d: &mut Draw) -> Drawn {
    input(d, 1..=4, |d, shape| json!({"dims": d.dims(shape.len())}))
}

fn roll(d: &mut Draw) -> Drawn {
    input(d, 1..=4, |d, shape| {
        let dims = match d.dims(shape.len()) {
            none if none.is_empty() => vec![0],
            some => some,
        };
        json!({"shifts": dims.iter().map(|_| d.below(21) as isize - 10).collect::<Vec<_>>(), "dims": dims})
    })
}

fn repeat(d: &mut Draw) -> Drawn {
    input(d, 0..=3, |d, shape| {
        let new = d.below(2);
        json!({"repeats": (0..shape.len() + new).map(|_| d.choose(&[0, 1, 1, 2, 3])).collect::<Vec<_>>()})
    })
}

fn interleave(d: &mut Draw) -> Drawn {
    input(d, 1..=3, |d, shape| json!({"repeats": d.below(4), "dim": d.dim(shape.len())}))
}
