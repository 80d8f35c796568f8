//! Steps of random programs that compute. Each picks suitable operands among earlier values, adds leaves where it needs
//! more, and states how it amplifies errors. A step without suitable operands does nothing.

use rand::seq::IndexedRandom;
use shardwise::ops::{LossOptions, Reduction};
use shardwise::prelude::*;

use crate::random_programs::program::{Fill, LARGEST, Program, Value};

pub(crate) type Step = fn(&mut Program) -> Result<()>;

pub(crate) const STEPS: &[Step] = &[
    smooth,
    smooth,
    exponential,
    bent,
    scalars,
    discontinuous,
    add,
    add,
    multiply,
    divide,
    compare,
    whole_pairs,
    choose,
    three,
    reduce,
    reduce,
    count,
    statistics,
    softmax,
    normalise,
    normalise_channels,
    losses,
    classes,
];

type Unary = fn(&DTensor) -> Result<DTensor>;
type Binary = fn(&DTensor, &DTensor) -> Result<DTensor>;

/// One operator with one result.
macro_rules! apply {
    ($p:expr, $text:expr, $operands:expr, $keeps:expr, $gain:expr, |$x:ident| $body:expr) => {
        $p.apply(&$text, &$operands, $keeps, $gain, move |$x: &[DTensor]| Ok(vec![$body?])).map(drop)
    };
}
pub(crate) use apply;

pub(crate) fn any(_: &Value) -> bool {
    true
}

/// One of the choices.
pub(crate) fn one_of<T: Copy>(p: &mut Program, choices: &[T]) -> T {
    *choices.choose(p.rng()).expect("some choices")
}

fn unary(p: &mut Program, table: &[(&str, Unary)], keeps: bool, gain: f64, x: usize) -> Result<()> {
    let (name, f) = one_of(p, table);
    apply!(p, name, [x], keeps, gain, |x| f(&x[0]))
}

fn smooth(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(any) else { return Ok(()) };
    let table: [(&str, Unary); 18] = [
        ("tanh", DTensor::tanh),
        ("sin", DTensor::sin),
        ("cos", DTensor::cos),
        ("atan", DTensor::atan),
        ("asinh", DTensor::asinh),
        ("erf", DTensor::erf),
        ("erfc", DTensor::erfc),
        ("sigmoid", DTensor::sigmoid),
        ("logsigmoid", DTensor::logsigmoid),
        ("softsign", DTensor::softsign),
        ("silu", DTensor::silu),
        ("mish", DTensor::mish),
        ("gelu", DTensor::gelu),
        ("gelu_tanh", DTensor::gelu_tanh),
        ("hardswish", DTensor::hardswish),
        ("softplus", |x| x.softplus(1.0, 20.0)),
        ("log of square + 1", |x| x.square()?.add_scalar(1.0)?.log()),
        ("rsqrt of square + 1", |x| x.square()?.add_scalar(1.0)?.rsqrt()),
    ];
    unary(p, &table, false, 2.0, x)
}

fn exponential(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.peak() <= 3.0) else { return Ok(()) };
    let table: [(&str, Unary); 6] = [
        ("exp", DTensor::exp),
        ("exp2", DTensor::exp2),
        ("expm1", DTensor::expm1),
        ("sinh", DTensor::sinh),
        ("cosh", DTensor::cosh),
        ("log1p of square", |x| x.square()?.log1p()),
    ];
    unary(p, &table, false, 21.0, x)
}

/// Functions with a bend but no jump.
fn bent(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(any) else { return Ok(()) };
    let gain = 2.0 * p.value(x).span().max(1.0);
    let table: [(&str, Unary); 7] = [
        ("neg", DTensor::neg),
        ("abs", DTensor::abs),
        ("relu", DTensor::relu),
        ("square", DTensor::square),
        ("clamp", |x| x.clamp(Some(-3.0), Some(5.0))),
        ("clamp from below", |x| x.clamp(Some(0.0), None)),
        ("nan_to_num", |x| x.nan_to_num(0.0, 9.0, -9.0)),
    ];
    let rounding: [(&str, Unary); 2] = [("leaky_relu", |x| x.leaky_relu(0.1)), ("elu", |x| x.elu(0.5))];
    match p.chance(0.8) {
        true => unary(p, &table, true, gain, x),
        false => unary(p, &rounding, false, 1.0, x),
    }
}

fn scalars(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(any) else { return Ok(()) };
    let number = one_of(p, &[-2.0, -1.0, 2.0, 3.0, 0.5, -0.3]);
    let whole = f64::fract(number) == 0.0;
    match p.below(6) {
        0 => apply!(p, format!("add_scalar {number}"), [x], whole, 1.0, |x| x[0].add_scalar(number)),
        1 => apply!(p, format!("sub_scalar {number}"), [x], whole, 1.0, |x| x[0].sub_scalar(number)),
        2 => apply!(p, format!("rsub_scalar {number}"), [x], whole, 1.0, |x| x[0].rsub_scalar(number)),
        3 => apply!(p, format!("div_scalar {number}"), [x], false, 4.0, |x| x[0].div_scalar(number)),
        4 if p.value(x).span() < 40.0 => {
            let gain = 3.0 * p.value(x).span().powi(2).max(1.0);
            apply!(p, "pow_scalar 3", [x], true, gain, |x| x[0].pow_scalar(3.0))
        }
        _ => apply!(p, format!("mul_scalar {number}"), [x], whole, 3.0, |x| x[0].mul_scalar(number)),
    }
}

/// Functions that jump, only on exact values.
fn discontinuous(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(Value::is_exact) else { return Ok(()) };
    let table: [(&str, Unary); 9] = [
        ("sign", DTensor::sign),
        ("floor", DTensor::floor),
        ("ceil", DTensor::ceil),
        ("round", DTensor::round),
        ("trunc", DTensor::trunc),
        ("frac", DTensor::frac),
        ("logical_not", DTensor::logical_not),
        ("isfinite", DTensor::isfinite),
        ("isnan", DTensor::isnan),
    ];
    unary(p, &table, true, 1.0, x)
}

/// The shape of two tensors together, if they broadcast.
fn together(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let n = a.len().max(b.len());
    let at = |s: &[usize], d: usize| (d + s.len()).checked_sub(n).map_or(1, |d| s[d]);
    let size = |d: usize| match (at(a, d), at(b, d)) {
        (x, y) if x == y || y == 1 => Some(x),
        (1, y) => Some(y),
        _ => None,
    };
    (0..n).map(size).collect()
}

/// A partner that broadcasts with a value: an earlier one, or a new leaf with some dimensions of size 1 or left out.
pub(crate) fn partner(p: &mut Program, x: usize, wanted: impl Fn(&Value) -> bool) -> Result<usize> {
    let shape = p.value(x).shape().to_vec();
    let fits = |v: &Value| together(v.shape(), &shape).is_some_and(|s| s.iter().product::<usize>() <= LARGEST);
    p.find_or(
        |v| fits(v) && wanted(v),
        |p| {
            let mut partner: Vec<usize> = shape.iter().map(|&n| if p.chance(0.2) { 1 } else { n }).collect();
            let dropped = if p.chance(0.3) { p.below(shape.len() + 1) } else { 0 };
            partner.drain(..dropped);
            partner
        },
    )
}

fn add(p: &mut Program) -> Result<()> {
    let Some(a) = p.find(any) else { return Ok(()) };
    let b = partner(p, a, any)?;
    let table: [(&str, Binary); 5] = [
        ("add", |a, b| a.add(b)),
        ("sub", |a, b| a.sub(b)),
        ("maximum", |a, b| a.maximum(b)),
        ("minimum", |a, b| a.minimum(b)),
        ("lerp", |a, b| a.lerp(b, 0.25)),
    ];
    let (name, f) = one_of(p, &table);
    let order = if p.chance(0.5) { [a, b] } else { [b, a] };
    apply!(p, name, order, name != "lerp", 2.0, |x| f(&x[0], &x[1]))
}

fn multiply(p: &mut Program) -> Result<()> {
    let Some(a) = p.find(any) else { return Ok(()) };
    let b = partner(p, a, any)?;
    let gain = p.value(a).span().max(p.value(b).span()).max(1.0);
    apply!(p, "mul", [a, b], true, gain, |x| x[0].mul(&x[1]))
}

/// `|x| + 1`: nothing is divided by less.
fn positive(x: &DTensor) -> Result<DTensor> {
    x.abs()?.add_scalar(1.0)
}

fn divide(p: &mut Program) -> Result<()> {
    let Some(a) = p.find(any) else { return Ok(()) };
    let b = partner(p, a, any)?;
    let gain = p.value(a).span().max(1.0);
    let table: [(&str, Binary); 3] = [
        ("div by |x| + 1", |a, b| a.div(&positive(b)?)),
        ("atan2 with |x| + 1", |a, b| a.atan2(&positive(b)?)),
        ("hypot", |a, b| a.hypot(b)),
    ];
    let (name, f) = one_of(p, &table);
    apply!(p, name, [a, b], false, gain, |x| f(&x[0], &x[1]))
}

fn compare(p: &mut Program) -> Result<()> {
    let Some(a) = p.find(Value::is_exact) else { return Ok(()) };
    let b = partner(p, a, Value::is_exact)?;
    if !p.value(b).is_exact() {
        return Ok(());
    }
    let table: [(&str, Binary); 9] = [
        ("eq", |a, b| a.eq(b)),
        ("ne", |a, b| a.ne(b)),
        ("lt", |a, b| a.lt(b)),
        ("le", |a, b| a.le(b)),
        ("gt", |a, b| a.gt(b)),
        ("ge", |a, b| a.ge(b)),
        ("logical_and", |a, b| a.logical_and(b)),
        ("logical_or", |a, b| a.logical_or(b)),
        ("logical_xor", |a, b| a.logical_xor(b)),
    ];
    let (name, f) = one_of(p, &table);
    apply!(p, name, [a, b], true, 1.0, |x| f(&x[0], &x[1]))
}

fn whole_pairs(p: &mut Program) -> Result<()> {
    let ints = p.chance(0.5);
    let fits = |v: &Value| v.is_exact() && (!ints || !v.is_float());
    let Some(a) = p.find(fits) else { return Ok(()) };
    let b = partner(p, a, fits)?;
    if !fits(p.value(b)) {
        return Ok(());
    }
    let divisions: [(&str, Binary); 4] = [
        ("div_floor by |x| + 1", |a, b| a.div_floor(&positive(b)?)),
        ("div_trunc by |x| + 1", |a, b| a.div_trunc(&positive(b)?)),
        ("fmod by |x| + 1", |a, b| a.fmod(&positive(b)?)),
        ("remainder by |x| + 1", |a, b| a.remainder(&positive(b)?)),
    ];
    let bits: [(&str, Binary); 3] = [
        ("bitwise_and", |a, b| a.bitwise_and(b)),
        ("bitwise_or", |a, b| a.bitwise_or(b)),
        ("bitwise_xor", |a, b| a.bitwise_xor(b)),
    ];
    let (name, f) = if ints && p.chance(0.5) { one_of(p, &bits) } else { one_of(p, &divisions) };
    apply!(p, name, [a, b], true, 1.0, |x| f(&x[0], &x[1]))
}

/// An earlier exact value or a new leaf of zeros and ones that broadcasts with a value.
fn condition(p: &mut Program, x: usize) -> Result<usize> {
    let found = partner(p, x, Value::is_exact)?;
    if p.value(found).is_exact() {
        return Ok(found);
    }
    let shape = p.value(found).shape().to_vec();
    p.leaf(&shape, Fill::Below(2))
}

fn choose(p: &mut Program) -> Result<()> {
    let Some(a) = p.find(any) else { return Ok(()) };
    let b = partner(p, a, any)?;
    let c = condition(p, a)?;
    let shape = together(p.value(a).shape(), p.value(b).shape()).expect("partners");
    if together(p.value(c).shape(), &shape).is_none_or(|s| s.iter().product::<usize>() > LARGEST) {
        return Ok(());
    }
    match p.chance(0.7) {
        true => apply!(p, "where_cond", [c, a, b], true, 1.0, |x| x[0].where_cond(&x[1], &x[2])),
        false => apply!(p, "masked_fill 3 (mask first)", [c, a], true, 1.0, |x| x[1].masked_fill(&x[0], 3.0)),
    }
}

fn three(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(any) else { return Ok(()) };
    let (a, b) = (partner(p, x, any)?, partner(p, x, any)?);
    let shape = together(p.value(x).shape(), p.value(a).shape()).expect("partners");
    if together(p.value(b).shape(), &shape).is_none_or(|s| s.iter().product::<usize>() > LARGEST) {
        return Ok(());
    }
    let gain = 2.0 * p.value(a).span().max(p.value(b).span()).max(1.0);
    match p.below(3) {
        0 => apply!(p, "addcmul 2", [x, a, b], true, gain, |x| x[0].addcmul(&x[1], &x[2], 2.0)),
        1 => apply!(p, "addcdiv by |x| + 1", [x, a, b], false, gain, |x| x[0].addcdiv(&x[1], &positive(&x[2])?, 0.5)),
        _ => apply!(p, "clamp_tensor", [x, a, b], true, 1.0, |x| x[0].clamp_tensor(&x[1], &x[2])),
    }
}

fn reduce(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0) else { return Ok(()) };
    let (dims, keepdim) = (p.dims(p.value(x).rank()), p.chance(0.5));
    let v = p.value(x);
    let n: usize = dims.iter().map(|&d| v.shape()[d as usize]).product();
    let n = if dims.is_empty() { v.count() } else { n } as f64;
    let product = v.span().max(1.0).powf(n);
    let text = |name: &str| format!("{name} over {dims:?}, keepdim {keepdim}");
    match p.below(6) {
        0 | 1 => apply!(p, text("sum"), [x], true, n, |x| x[0].sum(&dims, keepdim)),
        2 => apply!(p, text("mean"), [x], false, 1.0, |x| x[0].mean(&dims, keepdim)),
        3 if product < 1e9 => apply!(p, text("prod"), [x], true, n * product, |x| x[0].prod(&dims, keepdim)),
        4 => apply!(p, text("amin"), [x], true, 1.0, |x| x[0].amin(&dims, keepdim)),
        _ => apply!(p, text("amax"), [x], true, 1.0, |x| x[0].amax(&dims, keepdim)),
    }
}

fn count(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.is_exact()) else { return Ok(()) };
    let (dims, keepdim) = (p.dims(p.value(x).rank()), p.chance(0.5));
    let text = |name: &str| format!("{name} over {dims:?}, keepdim {keepdim}");
    match p.below(3) {
        0 => apply!(p, text("any"), [x], true, 1.0, |x| x[0].any(&dims, keepdim)),
        1 => apply!(p, text("all"), [x], true, 1.0, |x| x[0].all(&dims, keepdim)),
        _ => apply!(p, text("count_nonzero"), [x], true, 1.0, |x| x[0].count_nonzero(&dims, keepdim)),
    }
}

fn statistics(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0 && v.is_float()) else { return Ok(()) };
    let (dims, keepdim) = (p.dims(p.value(x).rank()), p.chance(0.5));
    let (n, span) = (p.value(x).count() as f64, p.value(x).span().max(1.0));
    let text = |name: &str| format!("{name} over {dims:?}, keepdim {keepdim}");
    match p.below(4) {
        0 => apply!(p, text("var"), [x], false, 4.0 * span, |x| x[0].var(&dims, 0.0, keepdim)),
        1 => apply!(p, text("std"), [x], false, 4.0, |x| x[0].std(&dims, 0.0, keepdim)),
        2 => apply!(p, text("logsumexp"), [x], false, 2.0, |x| x[0].logsumexp(&dims, keepdim)),
        _ => {
            let order = one_of(p, &[1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY]);
            apply!(p, text(&format!("norm {order}")), [x], false, n, |x| x[0].norm(order, &dims, keepdim))
        }
    }
}

fn softmax(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0 && v.is_float()) else { return Ok(()) };
    let dim = p.dim(p.value(x).rank());
    match p.chance(0.5) {
        true => apply!(p, format!("softmax {dim}"), [x], false, 2.0, |x| x[0].softmax(dim)),
        false => apply!(p, format!("log_softmax {dim}"), [x], false, 4.0, |x| x[0].log_softmax(dim)),
    }
}

/// So large that a variance near zero does no harm.
const EPS: f64 = 0.5;

fn normalise(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.count() > 0 && v.is_float()) else { return Ok(()) };
    let last = 1 + p.below(p.value(x).rank().min(2));
    let v = p.value(x);
    let shape = v.shape()[v.rank() - last..].to_vec();
    let n = shape.iter().product::<usize>() as f64;
    let weight = p.leaf(&shape, Fill::Eighths)?;
    let gain = 3.0 * (1.0 + n) * p.value(weight).span();
    match p.below(4) {
        0 => {
            apply!(p, format!("layer_norm {last}, weight and bias"), [x, weight], false, gain, |x| {
                x[0].layer_norm(last, Some(&x[1]), Some(&x[1]), EPS)
            })
        }
        1 => apply!(p, format!("layer_norm {last}"), [x], false, gain, |x| x[0].layer_norm(last, None, None, EPS)),
        2 => apply!(p, format!("rms_norm {last}"), [x], false, gain, |x| x[0].rms_norm(last, None, EPS)),
        _ => apply!(p, format!("rms_norm {last}, weight"), [x, weight], false, gain, |x| {
            x[0].rms_norm(last, Some(&x[1]), EPS)
        }),
    }
}

fn normalise_channels(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 1 && v.count() > 0 && v.is_float()) else { return Ok(()) };
    let channels = p.value(x).shape()[1];
    let weight = p.leaf(&[channels], Fill::Eighths)?;
    let gain = 3.0 * (1.0 + p.value(x).count() as f64) * p.value(weight).span();
    if p.chance(0.5) {
        return apply!(p, "batch_norm", [x, weight], false, gain, |x| {
            x[0].batch_norm(None, Some(&x[1]), Some(&x[1]), EPS)
        });
    }
    let groups = (1..=channels).filter(|g| channels.is_multiple_of(*g)).collect::<Vec<_>>();
    let groups = one_of(p, &groups);
    apply!(p, format!("group_norm {groups}"), [x, weight], false, gain, |x| {
        x[0].group_norm(groups, Some(&x[1]), Some(&x[1]), EPS)
    })
}

fn losses(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.is_float() && v.count() > 0) else { return Ok(()) };
    let target = partner(p, x, |v| v.is_float() && v.count() > 0)?;
    let reduction = one_of(p, &[Reduction::None, Reduction::Sum, Reduction::Mean]);
    let n = p.value(x).count().max(p.value(target).count()) as f64;
    let gain = 4.0 * n * p.value(x).span().max(p.value(target).span()).max(1.0);
    type Loss = fn(&DTensor, &DTensor, Reduction) -> Result<DTensor>;
    let table: [(&str, Loss); 4] = [
        ("mse_loss", DTensor::mse_loss),
        ("l1_loss", DTensor::l1_loss),
        ("smooth_l1_loss", |x, t, r| x.smooth_l1_loss(t, 2.0, r)),
        ("bce_with_logits", DTensor::bce_with_logits),
    ];
    let (name, f) = one_of(p, &table);
    apply!(p, format!("{name} {reduction:?}"), [x, target], false, gain, |x| f(&x[0], &x[1], reduction))
}

fn classes(p: &mut Program) -> Result<()> {
    let Some(x) = p.find(|v| v.rank() > 0 && v.is_float() && v.count() > 0) else { return Ok(()) };
    let mut shape = p.value(x).shape().to_vec();
    let n = shape.remove(usize::from(shape.len() > 1));
    let target = p.leaf(&shape, Fill::Below(n))?;
    let gain = 4.0 * p.value(x).count() as f64;
    let options = LossOptions {
        reduction: one_of(p, &[Reduction::None, Reduction::Sum, Reduction::Mean]),
        ignore_index: one_of(p, &[-100, 0, 1]),
        label_smoothing: one_of(p, &[0.0, 0.25]),
    };
    match p.chance(0.6) {
        true => apply!(p, format!("cross_entropy {options:?}"), [x, target], false, gain, |x| {
            x[0].cross_entropy(&x[1], options)
        }),
        false => {
            apply!(p, format!("nll_loss {options:?}"), [x, target], false, gain, |x| x[0].nll_loss(&x[1], options))
        }
    }
}
