//! Reductions, statistics, norms, sorting and scans.

use serde_json::{Value, json};

use super::{Drawn, Operator, one, two};
use crate::attack::draw::Draw;

macro_rules! reductions {
    ($draw:ident: $($name:ident),* $(,)?) => {
        &[$(Operator {
            name: stringify!($name),
            draw: $draw,
            apply: |x, a| Ok(one(x[0].$name(&a.dims("dims"), a.flag("keepdim"))?)),
        },)*]
    };
}

const ANY: &[Operator] = reductions!(any_type: sum, mean, prod, amax, amin, any, all, count_nonzero);
const REAL: &[Operator] = reductions!(real: logsumexp);

const OTHERS: &[Operator] = &[
    Operator {
        name: "var",
        draw: spread,
        apply: |x, a| Ok(one(x[0].var(&a.dims("dims"), a.number("correction"), a.flag("keepdim"))?)),
    },
    Operator {
        name: "std",
        draw: spread,
        apply: |x, a| Ok(one(x[0].std(&a.dims("dims"), a.number("correction"), a.flag("keepdim"))?)),
    },
    Operator {
        name: "norm",
        draw: norm,
        apply: |x, a| Ok(one(x[0].norm(a.number("order"), &a.dims("dims"), a.flag("keepdim"))?)),
    },
    Operator { name: "softmax", draw: along, apply: |x, a| Ok(one(x[0].softmax(a.dim("dim"))?)) },
    Operator { name: "log_softmax", draw: along, apply: |x, a| Ok(one(x[0].log_softmax(a.dim("dim"))?)) },
    Operator {
        name: "layer_norm",
        draw: layer_norm,
        apply: |x, a| Ok(one(x[0].layer_norm(a.count("ndim")?, x.get(1), x.get(2), a.number("eps"))?)),
    },
    Operator {
        name: "rms_norm",
        draw: rms_norm,
        apply: |x, a| Ok(one(x[0].rms_norm(a.count("ndim")?, x.get(1), a.number("eps"))?)),
    },
    Operator {
        name: "group_norm",
        draw: group_norm,
        apply: |x, a| Ok(one(x[0].group_norm(a.count("groups")?, x.get(1), x.get(2), a.number("eps"))?)),
    },
    Operator {
        name: "batch_norm",
        draw: batch_norm,
        apply: |x, a| {
            let (given, rest) = if a.flag("given") { (Some((&x[1], &x[2])), &x[3..]) } else { (None, &x[1..]) };
            Ok(one(x[0].batch_norm(given, rest.first(), rest.get(1), a.number("eps"))?))
        },
    },
    Operator { name: "sort", draw: order, apply: |x, a| Ok(two(x[0].sort(a.dim("dim"), a.flag("descending"))?)) },
    Operator { name: "argsort", draw: order, apply: |x, a| Ok(one(x[0].argsort(a.dim("dim"), a.flag("descending"))?)) },
    Operator {
        name: "topk",
        draw: some_of,
        apply: |x, a| Ok(two(x[0].topk(a.count("k")?, a.dim("dim"), a.flag("largest"))?)),
    },
    Operator {
        name: "kthvalue",
        draw: some_of,
        apply: |x, a| Ok(two(x[0].kthvalue(a.count("k")?, a.dim("dim"), a.flag("keepdim"))?)),
    },
    Operator { name: "max_dim", draw: extreme, apply: |x, a| Ok(two(x[0].max_dim(a.dim("dim"), a.flag("keepdim"))?)) },
    Operator { name: "min_dim", draw: extreme, apply: |x, a| Ok(two(x[0].min_dim(a.dim("dim"), a.flag("keepdim"))?)) },
    Operator {
        name: "argmax",
        draw: maybe_along,
        apply: |x, a| Ok(one(x[0].argmax(a.maybe_dim("dim"), a.flag("keepdim"))?)),
    },
    Operator {
        name: "argmin",
        draw: maybe_along,
        apply: |x, a| Ok(one(x[0].argmin(a.maybe_dim("dim"), a.flag("keepdim"))?)),
    },
    Operator {
        name: "aminmax",
        draw: maybe_along,
        apply: |x, a| Ok(two(x[0].aminmax(a.maybe_dim("dim"), a.flag("keepdim"))?)),
    },
    Operator { name: "cumsum", draw: extreme, apply: |x, a| Ok(one(x[0].cumsum(a.dim("dim"))?)) },
    Operator { name: "cumprod", draw: extreme, apply: |x, a| Ok(one(x[0].cumprod(a.dim("dim"))?)) },
    Operator { name: "cummax", draw: extreme, apply: |x, a| Ok(two(x[0].cummax(a.dim("dim"))?)) },
    Operator { name: "cummin", draw: extreme, apply: |x, a| Ok(two(x[0].cummin(a.dim("dim"))?)) },
];

pub(super) const TABLE: &[&[Operator]] = &[ANY, REAL, OTHERS];

fn dims(d: &mut Draw, ndim: usize) -> Value {
    json!({"dims": d.dims(ndim), "keepdim": d.one_in(3)})
}

fn any_type(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(0..=4), d.any());
    let attrs = dims(d, shape.len());
    (vec![d.input(&shape, dtype)], attrs)
}

fn real(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(0..=4), d.float());
    let attrs = dims(d, shape.len());
    (vec![d.input(&shape, dtype)], attrs)
}

fn spread(d: &mut Draw) -> Drawn {
    let (inputs, mut attrs) = real(d);
    attrs["correction"] = json!(d.choose(&[0.0, 1.0, 1.0]));
    (inputs, attrs)
}

fn norm(d: &mut Draw) -> Drawn {
    let (inputs, mut attrs) = real(d);
    attrs["order"] =
        d.choose(&[json!(0.0), json!(1.0), json!(2.0), json!(2.0), json!(3.0), json!("inf"), json!("-inf")]);
    (inputs, attrs)
}

fn along(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(0..=4), d.float());
    let dim = d.dim(shape.len());
    (vec![d.input(&shape, dtype)], json!({"dim": dim}))
}

fn maybe_along(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(0..=4), d.any());
    let dim = if d.one_in(3) { Value::Null } else { json!(d.dim(shape.len())) };
    (vec![d.input(&shape, dtype)], json!({"dim": dim, "keepdim": d.one_in(3)}))
}

fn extreme(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(0..=4), d.any());
    let dim = d.dim(shape.len());
    (vec![d.input(&shape, dtype)], json!({"dim": dim, "keepdim": d.one_in(3)}))
}

fn order(d: &mut Draw) -> Drawn {
    let (inputs, mut attrs) = extreme(d);
    attrs["descending"] = json!(d.one_in(2));
    (inputs, attrs)
}

fn some_of(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(1..=4), d.any());
    let dim = d.dim(shape.len());
    let n = shape[dim.rem_euclid(shape.len() as isize) as usize];
    let k = if n > 100 { d.choose(&[1, 8, n / 2]) } else { 1 + d.below(n) };
    (vec![d.input(&shape, dtype)], json!({"dim": dim, "k": k, "largest": d.one_in(2), "keepdim": d.one_in(3)}))
}

fn layer_norm(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(1..=4), d.float());
    let ndim = if d.one_in(3) { 1 + d.below(shape.len()) } else { 1 };
    let last = shape[shape.len() - ndim..].to_vec();
    let mut inputs = vec![d.input(&shape, dtype)];
    for _ in 0..d.below(3) {
        inputs.push(d.with(&last, dtype, "unit"));
    }
    (inputs, json!({"ndim": ndim, "eps": 1e-5}))
}

fn rms_norm(d: &mut Draw) -> Drawn {
    let (mut inputs, attrs) = layer_norm(d);
    inputs.truncate(2);
    (inputs, attrs)
}

fn group_norm(d: &mut Draw) -> Drawn {
    let groups = d.choose(&[1, 2, 3, 4]);
    let channels = groups * d.choose(&[1, 2, 4]);
    let mut shape = vec![d.some(), channels];
    match d.below(4) {
        0 => shape.extend([32, 32]),
        _ => shape.extend((0..d.below(3)).map(|_| 3)),
    }
    let dtype = d.float();
    let mut inputs = vec![d.input(&shape, dtype)];
    for _ in 0..d.choose(&[0, 1, 2]) {
        inputs.push(d.with(&[channels], dtype, "unit"));
    }
    (inputs, json!({"groups": groups, "eps": 1e-5}))
}

fn batch_norm(d: &mut Draw) -> Drawn {
    let (mut inputs, mut attrs) = group_norm(d);
    let (channels, dtype) = (inputs[0].shape[1], inputs[0].dtype);
    let given = d.one_in(3);
    if given {
        inputs.insert(1, d.with(&[channels], dtype, "unit"));
        inputs.insert(2, d.with(&[channels], dtype, "positive"));
    }
    attrs["given"] = json!(given);
    (inputs, attrs)
}
