//! Products, attention, convolutions, pooling, and elementwise losses.

use serde_json::json;
use shardwise::ops::{AttentionOptions, ConvOptions, Reduction};
use shardwise::prelude::*;

use super::{Attrs, Drawn, Operator, one};
use crate::attack::draw::Draw;

macro_rules! products {
    ($($name:ident: $draw:ident),* $(,)?) => {
        &[$(Operator { name: stringify!($name), draw: $draw, apply: |x, _| Ok(one(x[0].$name(&x[1])?)) },)*]
    };
}

macro_rules! losses {
    ($($name:ident: $draw:ident),* $(,)?) => {
        &[$(Operator { name: stringify!($name), draw: $draw, apply: |x, a| Ok(one(x[0].$name(&x[1], reduction(a))?)) },)*]
    };
}

const PRODUCTS: &[Operator] = products!(matmul: matmul, mm: mm, bmm: bmm, mv: mv, dot: dot, outer: outer);
const LOSSES: &[Operator] = losses!(mse_loss: loss, l1_loss: loss, bce_with_logits: shares, kl_div: shares);

const OTHERS: &[Operator] = &[
    Operator {
        name: "smooth_l1_loss",
        draw: loss,
        apply: |x, a| Ok(one(x[0].smooth_l1_loss(&x[1], a.number("beta"), reduction(a))?)),
    },
    Operator {
        name: "einsum",
        draw: einsum,
        apply: |x, a| Ok(one(DTensor::einsum(a.text("equation"), &x.iter().collect::<Vec<_>>())?)),
    },
    Operator { name: "linear", draw: linear, apply: |x, _| Ok(one(x[0].linear(&x[1], x.get(2))?)) },
    Operator {
        name: "addmm",
        draw: addmm,
        apply: |x, a| Ok(one(x[0].addmm(&x[1], &x[2], a.number("beta"), a.number("alpha"))?)),
    },
    Operator {
        name: "baddbmm",
        draw: baddbmm,
        apply: |x, a| Ok(one(x[0].baddbmm(&x[1], &x[2], a.number("beta"), a.number("alpha"))?)),
    },
    Operator {
        name: "scaled_dot_product_attention",
        draw: attention,
        apply: |x, a| {
            let options = AttentionOptions {
                causal: a.flag("causal"),
                mask: x.get(3),
                scale: a.maybe_number("scale"),
                ..AttentionOptions::default()
            };
            Ok(one(x[0].scaled_dot_product_attention(&x[1], &x[2], options)?))
        },
    },
    Operator {
        name: "rotary_embedding",
        draw: rotary,
        apply: |x, a| Ok(one(x[0].rotary_embedding(a.number("base"), a.count("first")?)?)),
    },
    Operator { name: "conv1d", draw: conv1d, apply: |x, a| Ok(one(x[0].conv1d(&x[1], x.get(2), convolution(a)?)?)) },
    Operator { name: "conv2d", draw: conv2d, apply: |x, a| Ok(one(x[0].conv2d(&x[1], x.get(2), convolution(a)?)?)) },
    Operator {
        name: "avg_pool1d",
        draw: pool1d,
        apply: |x, a| Ok(one(x[0].avg_pool1d(a.count("kernel")?, Some(a.count("stride")?), a.count("padding")?)?)),
    },
    Operator {
        name: "avg_pool2d",
        draw: pool2d,
        apply: |x, a| Ok(one(x[0].avg_pool2d(a.count("kernel")?, Some(a.count("stride")?), a.count("padding")?)?)),
    },
    Operator {
        name: "max_pool1d",
        draw: pool1d,
        apply: |x, a| Ok(one(x[0].max_pool1d(a.count("kernel")?, Some(a.count("stride")?), a.count("padding")?)?)),
    },
    Operator {
        name: "max_pool2d",
        draw: pool2d,
        apply: |x, a| Ok(one(x[0].max_pool2d(a.count("kernel")?, Some(a.count("stride")?), a.count("padding")?)?)),
    },
];

pub(super) const TABLE: &[&[Operator]] = &[PRODUCTS, LOSSES, OTHERS];

pub(super) fn reduction(a: &Attrs<'_>) -> Reduction {
    match a.text("reduction") {
        "none" => Reduction::None,
        "sum" => Reduction::Sum,
        _ => Reduction::Mean,
    }
}

fn convolution(a: &Attrs<'_>) -> Result<ConvOptions> {
    Ok(ConvOptions {
        stride: a.count("stride")?,
        padding: a.count("padding")?,
        dilation: a.count("dilation")?,
        groups: a.count("groups")?,
    })
}

/// Sizes of a product: small, or those of a layer.
fn sizes(d: &mut Draw) -> [usize; 3] {
    if d.one_in(12) {
        d.choose(&[[64, 512, 128], [128, 1024, 32], [7, 4096, 5]])
    } else {
        [d.size(), d.size(), d.size()]
    }
}

/// A type of factors, integers now and then.
fn factor(d: &mut Draw) -> candle_core::DType {
    if d.one_in(6) { d.any() } else { d.float() }
}

fn matmul(d: &mut Draw) -> Drawn {
    let ([m, k, n], dtype) = (sizes(d), factor(d));
    let batch: Vec<usize> = (0..d.below(3)).map(|_| d.choose(&[1, 2, 3])).collect();
    let (front, other) = (d.broadcasting(&batch), d.broadcasting(&batch));
    let a = if d.one_in(6) { vec![k] } else { [&front[..], &[m, k]].concat() };
    let b = if d.one_in(6) { vec![k] } else { [&other[..], &[k, n]].concat() };
    (vec![d.input(&a, dtype), d.input(&b, dtype)], json!({}))
}

fn mm(d: &mut Draw) -> Drawn {
    let ([m, k, n], dtype) = (sizes(d), factor(d));
    (vec![d.input(&[m, k], dtype), d.input(&[k, n], dtype)], json!({}))
}

fn bmm(d: &mut Draw) -> Drawn {
    let ([m, k, n], dtype, b) = (sizes(d), factor(d), d.size());
    (vec![d.input(&[b, m, k], dtype), d.input(&[b, k, n], dtype)], json!({}))
}

fn mv(d: &mut Draw) -> Drawn {
    let ([m, k, _], dtype) = (sizes(d), factor(d));
    (vec![d.input(&[m, k], dtype), d.input(&[k], dtype)], json!({}))
}

fn dot(d: &mut Draw) -> Drawn {
    let ([_, k, _], dtype) = (sizes(d), factor(d));
    (vec![d.input(&[k], dtype), d.input(&[k], dtype)], json!({}))
}

fn outer(d: &mut Draw) -> Drawn {
    let ([m, _, n], dtype) = (sizes(d), factor(d));
    (vec![d.input(&[m], dtype), d.input(&[n], dtype)], json!({}))
}

fn einsum(d: &mut Draw) -> Drawn {
    let equations = [
        "ij,jk->ik",
        "bij,bjk->bik",
        "ij,kj->ik",
        "ij->ji",
        "ij->i",
        "i,j->ij",
        "bhqd,bhkd->bhqk",
        "ij,ij->",
        "abc,cd->abd",
    ];
    let (equation, dtype) = (d.choose(&equations), d.float());
    let sizes: Vec<usize> = (0..26).map(|_| d.size()).collect();
    let left = equation.split("->").next().expect("inputs");
    let inputs = left.split(',').map(|letters| {
        let shape: Vec<usize> = letters.bytes().map(|c| sizes[(c - b'a') as usize]).collect();
        d.input(&shape, dtype)
    });
    (inputs.collect(), json!({"equation": equation}))
}

fn linear(d: &mut Draw) -> Drawn {
    let ([m, k, n], dtype) = (sizes(d), d.float());
    let front: Vec<usize> = (0..d.below(3)).map(|_| d.choose(&[1, 2, 3])).collect();
    let shape = [&front[..], &[m, k][usize::from(d.one_in(6))..]].concat();
    let mut inputs = vec![d.input(&shape, dtype), d.with(&[n, k], dtype, "unit")];
    if d.one_in(2) {
        inputs.push(d.with(&[n], dtype, "unit"));
    }
    (inputs, json!({}))
}

fn addmm(d: &mut Draw) -> Drawn {
    let ([m, k, n], dtype) = (sizes(d), d.float());
    let first = d.broadcasting(&[m, n]);
    let inputs = vec![d.input(&first, dtype), d.with(&[m, k], dtype, "six"), d.with(&[k, n], dtype, "unit")];
    (inputs, json!({"beta": d.choose(&[1.0, 0.5, -2.0]), "alpha": d.choose(&[1.0, 0.25, 2.0])}))
}

fn baddbmm(d: &mut Draw) -> Drawn {
    let ([m, k, n], dtype, b) = (sizes(d), d.float(), d.some());
    let inputs = vec![d.input(&[b, m, n], dtype), d.with(&[b, m, k], dtype, "six"), d.with(&[b, k, n], dtype, "unit")];
    (inputs, json!({"beta": d.choose(&[1.0, 0.5, -2.0]), "alpha": d.choose(&[1.0, 0.25, 2.0])}))
}

fn attention(d: &mut Draw) -> Drawn {
    let (batch, heads, groups) = (d.choose(&[1, 2]), d.choose(&[1, 2, 3]), d.choose(&[1, 1, 2]));
    let (queries, keys, size) = if d.one_in(10) { (128, 128, 64) } else { (d.some(), d.some(), d.some()) };
    let (dtype, causal) = (d.float(), d.one_in(2));
    let values = d.choose(&["unit", "six", "whole"]);
    let mut inputs = vec![d.with(&[batch, heads * groups, queries, size], dtype, values)];
    for _ in 0..2 {
        inputs.push(d.with(&[batch, heads, keys, size], dtype, values));
    }
    if !causal && d.one_in(3) {
        inputs.push(d.with(&[queries, keys], dtype, "unit"));
    }
    (inputs, json!({"causal": causal, "scale": d.choose(&[json!(null), json!(0.1)])}))
}

fn rotary(d: &mut Draw) -> Drawn {
    let dtype = d.float();
    let shape = if d.one_in(8) { vec![1, 4, 512, 64] } else { vec![d.some(), d.size(), 2 * d.some()] };
    (vec![d.input(&shape, dtype)], json!({"base": d.choose(&[10000.0, 100.0]), "first": d.below(6)}))
}

fn conv(d: &mut Draw, spatial: usize) -> Drawn {
    let (groups, dtype) = (d.choose(&[1, 1, 2]), d.float());
    let (channels, out, kernel) = (groups * d.choose(&[1, 2, 3]), groups * d.choose(&[1, 2, 5]), d.choose(&[1, 2, 3]));
    let (stride, padding, dilation) = (d.choose(&[1, 1, 2]), d.below(3), d.choose(&[1, 1, 2]));
    let extents: Vec<usize> = (0..spatial).map(|_| d.choose(&[3, 5, 6, 9, 16])).collect();
    let shape = [&[d.some(), channels], &extents[..]].concat();
    let weight = [vec![out, channels / groups], vec![kernel; spatial]].concat();
    let mut inputs = vec![d.input(&shape, dtype), d.with(&weight, dtype, "unit")];
    if d.one_in(2) {
        inputs.push(d.with(&[out], dtype, "unit"));
    }
    (inputs, json!({"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}))
}

fn conv1d(d: &mut Draw) -> Drawn {
    conv(d, 1)
}

fn conv2d(d: &mut Draw) -> Drawn {
    conv(d, 2)
}

fn pool(d: &mut Draw, spatial: usize) -> Drawn {
    let (kernel, dtype) = (d.choose(&[1, 2, 3]), d.float());
    let extents: Vec<usize> = (0..spatial).map(|_| d.choose(&[3, 5, 6, 9, 32])).collect();
    let shape = [&[d.some(), d.some()], &extents[..]].concat();
    let attrs = json!({"kernel": kernel, "stride": d.choose(&[1, 2, 3]), "padding": d.below(kernel / 2 + 1)});
    (vec![d.input(&shape, dtype)], attrs)
}

fn pool1d(d: &mut Draw) -> Drawn {
    pool(d, 1)
}

fn pool2d(d: &mut Draw) -> Drawn {
    pool(d, 2)
}

fn loss(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(0..=3), d.float());
    let attrs = json!({"reduction": d.choose(&["none", "sum", "mean"]), "beta": d.choose(&[1.0, 0.5, 2.0])});
    (vec![d.input(&shape, dtype), d.input(&shape, dtype)], attrs)
}

/// A loss whose target is between 0 and 1.
fn shares(d: &mut Draw) -> Drawn {
    let (mut inputs, attrs) = loss(d);
    inputs[1].values = "probability";
    (inputs, attrs)
}
