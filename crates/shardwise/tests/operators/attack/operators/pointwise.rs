//! Elementwise functions, with broadcasting.

use candle_core::DType;
use serde_json::json;

use super::{Attrs, Drawn, Operator, one};
use crate::attack::draw::{Draw, INTEGERS};

macro_rules! unary {
    ($($name:ident),* $(,)?) => {
        &[$(Operator { name: stringify!($name), draw: unary, apply: |x, _| Ok(one(x[0].$name()?)) },)*]
    };
}

macro_rules! positive {
    ($($name:ident),* $(,)?) => {
        &[$(Operator { name: stringify!($name), draw: positive, apply: |x, _| Ok(one(x[0].$name()?)) },)*]
    };
}

macro_rules! binary {
    ($draw:ident: $($name:ident),* $(,)?) => {
        &[$(Operator { name: stringify!($name), draw: $draw, apply: |x, _| Ok(one(x[0].$name(&x[1])?)) },)*]
    };
}

const UNARY: &[Operator] = unary!(
    neg,
    abs,
    sign,
    square,
    relu,
    floor,
    ceil,
    round,
    trunc,
    frac,
    exp,
    expm1,
    exp2,
    reciprocal,
    sin,
    cos,
    tan,
    asin,
    atan,
    sinh,
    cosh,
    asinh,
    tanh,
    erf,
    erfc,
    sigmoid,
    logsigmoid,
    softsign,
    silu,
    mish,
    hardswish,
    gelu,
    gelu_tanh,
    isnan,
    isfinite,
    isinf,
    signbit,
    logical_not,
);
const POSITIVE: &[Operator] = positive!(log, log1p, log2, log10, sqrt, rsqrt);
const BINARY: &[Operator] = binary!(binary:
    add, sub, mul, div, div_floor, div_trunc, maximum, minimum, fmod, remainder, atan2, hypot, eq, ne, lt, le, gt, ge,
    logical_and, logical_or, logical_xor,
);
const BITS: &[Operator] = binary!(bits: bitwise_and, bitwise_or, bitwise_xor);

const OTHERS: &[Operator] = &[
    Operator { name: "pow", draw: power, apply: |x, _| Ok(one(x[0].pow(&x[1])?)) },
    Operator { name: "leaky_relu", draw: number, apply: |x, a| Ok(one(x[0].leaky_relu(a.number("number"))?)) },
    Operator { name: "elu", draw: number, apply: |x, a| Ok(one(x[0].elu(a.number("number"))?)) },
    Operator {
        name: "softplus",
        draw: softplus,
        apply: |x, a| Ok(one(x[0].softplus(a.number("beta"), a.number("threshold"))?)),
    },
    Operator { name: "pow_scalar", draw: exponent, apply: |x, a| Ok(one(x[0].pow_scalar(a.number("number"))?)) },
    Operator {
        name: "clamp",
        draw: clamp,
        apply: |x, a| Ok(one(x[0].clamp(a.maybe_number("min"), a.maybe_number("max"))?)),
    },
    Operator { name: "add_scalar", draw: number, apply: |x, a| Ok(one(x[0].add_scalar(a.number("number"))?)) },
    Operator { name: "sub_scalar", draw: number, apply: |x, a| Ok(one(x[0].sub_scalar(a.number("number"))?)) },
    Operator { name: "rsub_scalar", draw: number, apply: |x, a| Ok(one(x[0].rsub_scalar(a.number("number"))?)) },
    Operator { name: "mul_scalar", draw: number, apply: |x, a| Ok(one(x[0].mul_scalar(a.number("number"))?)) },
    Operator { name: "div_scalar", draw: number, apply: |x, a| Ok(one(x[0].div_scalar(a.number("number"))?)) },
    Operator {
        name: "nan_to_num",
        draw: nan_to_num,
        apply: |x, a| Ok(one(x[0].nan_to_num(a.number("nan"), a.number("posinf"), a.number("neginf"))?)),
    },
    Operator { name: "where_cond", draw: choice, apply: |x, _| Ok(one(x[0].where_cond(&x[1], &x[2])?)) },
    Operator { name: "masked_fill", draw: masked, apply: |x, a| Ok(one(x[0].masked_fill(&x[1], a.number("number"))?)) },
    Operator { name: "addcmul", draw: ternary, apply: |x, a| Ok(one(x[0].addcmul(&x[1], &x[2], a.number("number"))?)) },
    Operator { name: "addcdiv", draw: ternary, apply: |x, a| Ok(one(x[0].addcdiv(&x[1], &x[2], a.number("number"))?)) },
    Operator { name: "clamp_tensor", draw: ternary, apply: |x, _| Ok(one(x[0].clamp_tensor(&x[1], &x[2])?)) },
    Operator { name: "lerp", draw: lerp, apply: |x, a| Ok(one(x[0].lerp(&x[1], a.number("weight"))?)) },
    Operator { name: "to_dtype", draw: cast, apply: |x, a: &Attrs<'_>| Ok(one(x[0].to_dtype(a.dtype("dtype")?)?)) },
];

pub(super) const TABLE: &[&[Operator]] = &[UNARY, POSITIVE, BINARY, BITS, OTHERS];

fn unary(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(0..=4), d.any());
    (vec![d.input(&shape, dtype)], json!({}))
}

fn positive(d: &mut Draw) -> Drawn {
    let (shape, dtype) = (d.shape(0..=4), d.any());
    let input = match dtype.is_float() && !d.one_in(4) {
        true => d.with(&shape, dtype, "positive"),
        false => d.input(&shape, dtype),
    };
    (vec![input], json!({}))
}

/// Two types; of a scalar and another tensor one and the same, because PyTorch's types depend on the number of dimensions.
fn types(d: &mut Draw, shapes: &[&[usize]]) -> Vec<DType> {
    let first = d.any();
    let mixed = d.one_in(4) && shapes.iter().all(|s| !s.is_empty());
    shapes.iter().enumerate().map(|(i, _)| if i > 0 && mixed { d.any() } else { first }).collect()
}

fn binary(d: &mut Draw) -> Drawn {
    let shape = d.shape(0..=4);
    let (a, b) = (d.broadcasting(&shape), d.broadcasting(&shape));
    let types = types(d, &[&a, &b]);
    (vec![d.input(&a, types[0]), d.input(&b, types[1])], json!({}))
}

fn bits(d: &mut Draw) -> Drawn {
    let shape = d.shape(0..=3);
    let (a, b) = (d.broadcasting(&shape), d.broadcasting(&shape));
    let dtype = d.choose(INTEGERS);
    (vec![d.input(&a, dtype), d.input(&b, dtype)], json!({}))
}

fn power(d: &mut Draw) -> Drawn {
    let shape = d.shape(0..=3);
    let (a, b) = (d.broadcasting(&shape), d.broadcasting(&shape));
    let dtype = d.any();
    if !dtype.is_float() {
        return (vec![d.input(&a, dtype), d.with(&b, dtype, "small")], json!({}));
    }
    let base = d.choose(&["positive", "unit", "special"]);
    let exponent = d.choose(&["unit", "whole", "special"]);
    (vec![d.with(&a, dtype, base), d.with(&b, dtype, exponent)], json!({}))
}

fn number(d: &mut Draw) -> Drawn {
    let (inputs, _) = unary(d);
    (inputs, json!({"number": d.number()}))
}

fn exponent(d: &mut Draw) -> Drawn {
    let (inputs, _) = positive(d);
    (inputs, json!({"number": d.choose(&[0.0, 1.0, 2.0, 3.0, 4.0, 0.5, -1.0, -2.0, 1.5, -0.5, 10.0])}))
}

fn softplus(d: &mut Draw) -> Drawn {
    let (inputs, _) = unary(d);
    (inputs, json!({"beta": d.choose(&[1.0, 2.0, 0.5]), "threshold": d.choose(&[20.0, 5.0])}))
}

fn clamp(d: &mut Draw) -> Drawn {
    let (inputs, _) = unary(d);
    let (low, high) = (d.number(), d.number());
    let attrs = match d.below(3) {
        0 => json!({"min": low, "max": high}),
        1 => json!({"min": low, "max": null}),
        _ => json!({"min": null, "max": high}),
    };
    (inputs, attrs)
}

fn nan_to_num(d: &mut Draw) -> Drawn {
    let shape = d.shape(0..=3);
    let dtype = d.float();
    (vec![d.with(&shape, dtype, "special")], json!({"nan": d.number(), "posinf": 1000.0, "neginf": -1000.0}))
}

fn choice(d: &mut Draw) -> Drawn {
    let shape = d.shape(0..=3);
    let all = [d.broadcasting(&shape), d.broadcasting(&shape), d.broadcasting(&shape)];
    let types = types(d, &[&all[1], &all[2]]);
    (vec![d.with(&all[0], DType::U8, "mask"), d.input(&all[1], types[0]), d.input(&all[2], types[1])], json!({}))
}

fn masked(d: &mut Draw) -> Drawn {
    let shape = d.shape(0..=3);
    let (mask, dtype) = (d.broadcasting(&shape), d.any());
    let value = if dtype.is_float() { d.number() } else { d.choose(&[0.0, 1.0, 7.0]) };
    (vec![d.input(&shape, dtype), d.with(&mask, DType::U8, "mask")], json!({"number": value}))
}

fn ternary(d: &mut Draw) -> Drawn {
    let shape = d.shape(0..=3);
    let all = [d.broadcasting(&shape), d.broadcasting(&shape), d.broadcasting(&shape)];
    let dtype = d.any();
    let number = if dtype.is_float() { d.number() } else { d.choose(&[1.0, 2.0, -3.0]) };
    (all.iter().map(|s| d.input(s, dtype)).collect(), json!({"number": number}))
}

fn lerp(d: &mut Draw) -> Drawn {
    let shape = d.shape(0..=3);
    let (a, b, dtype) = (d.broadcasting(&shape), d.broadcasting(&shape), d.float());
    (vec![d.input(&a, dtype), d.input(&b, dtype)], json!({"weight": d.choose(&[0.0, 0.25, 0.5, 0.9, 1.0, 2.0])}))
}

fn cast(d: &mut Draw) -> Drawn {
    let (shape, from, to) = (d.shape(0..=3), d.any(), d.any());
    // What an integer becomes that its type does not hold is not defined in PyTorch.
    let input = match (from.is_float(), to.is_float()) {
        (true, false) => d.with(&shape, from, if to == DType::U8 { "positive" } else { "six" }),
        _ => d.input(&shape, from),
    };
    (vec![input], json!({"dtype": to.as_str()}))
}
