//! Lookups and scatters by index, and classification losses.

use candle_core::DType;
use serde_json::json;
use shardwise::ops::{EmbeddingBagMode, LossOptions};

use super::product::reduction;
use super::{Attrs, Drawn, Operator, one};
use crate::attack::draw::Draw;
use crate::attack::numbers::Input;

pub(super) const TABLE: &[&[Operator]] = &[&[
    Operator { name: "index_select", draw: select, apply: |x, a| Ok(one(x[0].index_select(a.dim("dim"), &x[1])?)) },
    Operator { name: "index", draw: index, apply: |x, _| Ok(one(x[0].index(&x[1])?)) },
    Operator { name: "embedding", draw: embedding, apply: |x, _| Ok(one(x[0].embedding(&x[1])?)) },
    Operator {
        name: "embedding_bag",
        draw: bags,
        apply: |x, a| {
            let mode = match a.text("mode") {
                "sum" => EmbeddingBagMode::Sum,
                "mean" => EmbeddingBagMode::Mean,
                _ => EmbeddingBagMode::Max,
            };
            let offsets = if a.0["offsets"].is_null() { None } else { Some(a.counts("offsets")?) };
            Ok(one(x[0].embedding_bag(&x[1], offsets.as_deref(), mode)?))
        },
    },
    Operator { name: "gather", draw: gather, apply: |x, a| Ok(one(x[0].gather(a.dim("dim"), &x[1])?)) },
    Operator { name: "one_hot", draw: one_hot, apply: |x, a| Ok(one(x[0].one_hot(a.count("classes")?)?)) },
    Operator { name: "bucketize", draw: bucketize, apply: |x, _| Ok(one(x[0].bucketize(&x[1])?)) },
    Operator { name: "scatter", draw: scatter, apply: |x, a| Ok(one(x[0].scatter(a.dim("dim"), &x[1], &x[2])?)) },
    Operator {
        name: "scatter_add",
        draw: scatter_add,
        apply: |x, a| Ok(one(x[0].scatter_add(a.dim("dim"), &x[1], &x[2])?)),
    },
    Operator { name: "index_add", draw: index_add, apply: |x, a| Ok(one(x[0].index_add(a.dim("dim"), &x[1], &x[2])?)) },
    Operator {
        name: "index_put",
        draw: index_put,
        apply: |x, a| {
            let (values, indices) = (&x[1], &x[2..]);
            Ok(one(x[0].index_put(&indices.iter().collect::<Vec<_>>(), values, a.flag("accumulate"))?))
        },
    },
    Operator { name: "cross_entropy", draw: classes, apply: |x, a| Ok(one(x[0].cross_entropy(&x[1], options(a))?)) },
    Operator { name: "nll_loss", draw: classes, apply: |x, a| Ok(one(x[0].nll_loss(&x[1], options(a))?)) },
]];

fn options(a: &Attrs<'_>) -> LossOptions {
    LossOptions { reduction: reduction(a), ignore_index: -100, label_smoothing: a.number("smoothing") }
}

fn select(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(1..=4), d.any());
    let dim = d.dim(shape.len());
    let n = shape[dim.rem_euclid(shape.len() as isize) as usize];
    // Of a dimension without elements, none.
    let count = if n == 0 { 0 } else { d.size() };
    (vec![d.input(&shape, dtype), d.index(&[count], n.max(1))], json!({"dim": dim}))
}

fn index(d: &mut Draw) -> Drawn {
    let (mut shape, dtype) = (d.shape(1..=3), d.any());
    shape[0] = shape[0].max(1);
    let places: Vec<usize> = (0..d.below(3)).map(|_| d.size()).collect();
    let index = Input { values: "signed index", ..d.index(&places, shape[0]) };
    (vec![d.input(&shape, dtype), index], json!({}))
}

fn embedding(d: &mut Draw) -> Drawn {
    let shape = if d.one_in(8) { vec![1000, 512] } else { vec![d.some(), d.size()] };
    let dtype = d.float();
    let ids: Vec<usize> = (0..d.below(3)).map(|_| d.size()).collect();
    (vec![d.input(&shape, dtype), d.index(&ids, shape[0])], json!({}))
}

fn bags(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (vec![d.some(), d.some()], d.float());
    let mode = d.choose(&["sum", "mean", "max"]);
    let (ids, offsets) = match d.one_in(2) {
        true => (vec![d.some(), d.some()], json!(null)),
        false => {
            let n = 1 + d.below(8);
            let mut offsets = vec![0];
            for _ in 0..d.below(4) {
                let last = offsets[offsets.len() - 1];
                offsets.push(last + d.below(n - last + 1));
            }
            (vec![n], json!(offsets))
        }
    };
    (vec![d.with(&shape, dtype, "unit"), d.index(&ids, shape[0])], json!({"mode": mode, "offsets": offsets}))
}

/// A tensor, and the shape of an index into it along a dimension: nowhere longer but along that one.
fn inside(d: &mut Draw) -> (Vec<usize>, usize, Vec<usize>) {
    let mut shape = d.shape(1..=3);
    let dim = d.below(shape.len());
    shape[dim] = shape[dim].max(1);
    let places = shape.iter().enumerate().map(|(i, &n)| if i == dim { d.some() } else { d.below(n + 1).max(n / 2) });
    let places = places.collect();
    (shape, dim, places)
}

fn gather(d: &mut Draw) -> Drawn {
    let (shape, dim, places) = inside(d);
    let dtype = d.any();
    (vec![d.input(&shape, dtype), d.index(&places, shape[dim])], json!({"dim": dim}))
}

fn scatter(d: &mut Draw) -> Drawn {
    let (shape, dim, mut places) = inside(d);
    places[dim] = places[dim].min(shape[dim]);
    let dtype = d.any();
    let turn = Input {
        values: "turn",
        inner: places[dim + 1..].iter().product::<usize>().max(1),
        len: places[dim],
        ..d.index(&places, shape[dim])
    };
    let source = longer(d, &places);
    (vec![d.input(&shape, dtype), turn, d.input(&source, dtype)], json!({"dim": dim}))
}

/// A source may be longer than its index.
fn longer(d: &mut Draw, places: &[usize]) -> Vec<usize> {
    places.iter().map(|&n| if d.one_in(6) { n + 1 } else { n }).collect()
}

fn scatter_add(d: &mut Draw) -> Drawn {
    let (shape, dim, places) = inside(d);
    let dtype = d.any();
    let source = longer(d, &places);
    (vec![d.input(&shape, dtype), d.index(&places, shape[dim]), d.input(&source, dtype)], json!({"dim": dim}))
}

fn index_add(d: &mut Draw) -> Drawn {
    let (mut shape, dtype) = (d.shape(1..=3), d.any());
    let dim = d.below(shape.len());
    shape[dim] = shape[dim].max(1);
    let mut source = shape.clone();
    source[dim] = d.size();
    let index = d.index(&[source[dim]], shape[dim]);
    (vec![d.input(&shape, dtype), index, d.input(&source, dtype)], json!({"dim": dim}))
}

fn index_put(d: &mut Draw) -> Drawn {
    let shape: Vec<usize> = (0..1 + d.below(3)).map(|_| d.some()).collect();
    let (dtype, accumulate) = (d.any(), d.one_in(2));
    let named = 1 + d.below(shape.len());
    // Places that are named twice have one value only if they add up.
    let count = if accumulate { d.size() } else { d.below(shape[0] + 1) };
    let mut indices = Vec::new();
    for &n in &shape[..named] {
        indices.push(match indices.is_empty() && !accumulate {
            true => Input { values: "turn", inner: 1, len: count.max(1), ..d.index(&[count], n) },
            false => d.index(&[count], n),
        });
    }
    let values = [&[count], &shape[named..]].concat();
    let mut inputs = vec![d.input(&shape, dtype), d.input(&values, dtype)];
    inputs.extend(indices);
    (inputs, json!({"accumulate": accumulate}))
}

fn one_hot(d: &mut Draw) -> Drawn {
    let shape = d.shape(0..=2);
    // The result of a large shape stays small.
    let most = if shape.iter().product::<usize>() > 4096 { 5 } else { 300 };
    let classes = d.choose(&[1, 5, 17, 300]).min(most);
    let bound = if d.one_in(8) { classes + 2 } else { classes };
    let dtype = d.choose(&[DType::I64, DType::I64, DType::U8, DType::I32]);
    let ids = Input { dtype, ..d.index(&shape, bound) };
    (vec![ids], json!({"classes": classes}))
}

fn bucketize(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(0..=3), d.float());
    let boundaries = [d.size()];
    (vec![d.input(&shape, dtype), d.with(&boundaries, dtype, "stairs")], json!({}))
}

fn classes(d: &mut Draw) -> Drawn {
    let n = d.choose(&[2, 3, 7, 10, 1000]);
    let shape = match d.below(4) {
        0 => vec![n],
        1 => vec![d.some(), n, d.some()],
        2 => vec![64, n],
        _ => vec![d.size(), n],
    };
    let target: Vec<usize> =
        shape.iter().enumerate().filter(|(i, _)| *i != usize::from(shape.len() > 1)).map(|(_, &n)| n).collect();
    let dtype = d.float();
    let reduction = d.choose(&["none", "sum", "mean"]);
    let values = d.choose(&["unit", "six", "six", "whole", "tiny"]);
    let logits = d.with(&shape, dtype, values);
    let targets = Input { n: n as i64, ..d.with(&target, DType::I64, "target") };
    (vec![logits, targets], json!({"reduction": reduction, "smoothing": d.choose(&[0.0, 0.0, 0.1])}))
}
