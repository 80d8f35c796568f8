//! Operators on distributed inputs: the value of every output, and the bytes that it took.

use std::io::Write;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Tensor};
use serde::Deserialize;
use serde_json::Value;
use shardwise::ops::{AttentionOptions, ConvOptions, LossOptions, Reduction};
use shardwise::prelude::*;

use crate::vectors::{PlacementForm, TensorForm};

#[derive(Deserialize)]
struct Case {
    op: String,
    mesh_shape: Vec<usize>,
    inputs: Vec<Input>,
    attrs: Value,
    expected: Vec<TensorForm>,
    rtol: f64,
    atol: f64,
}

#[derive(Deserialize)]
struct Input {
    global: TensorForm,
    placements: Vec<PlacementForm>,
    locals: Option<Vec<TensorForm>>,
}

/// Bytes that all ranks sent, ours and recorded, where the recorded run communicated and gave the right answer.
static SENT: Mutex<Vec<Sent>> = Mutex::new(Vec::new());

struct Sent {
    case: String,
    ours: usize,
    recorded: usize,
}

pub(crate) fn check(value: &Value) -> std::result::Result<(), String> {
    let case = Arc::new(Case::deserialize(value).map_err(|e| e.to_string())?);
    let ranks = case.mesh_shape.iter().product();
    let program = Arc::clone(&case);
    let world = ThreadWorld::new(ranks).map_err(|e| e.to_string())?;
    let sent = world.run(move |world| run(&program, &world)).map_err(|e| e.to_string())?;
    let recorded = value["torch_comm"]["bytes_sent_total"].as_u64().unwrap_or(0) as usize;
    if recorded > 0 && value["torch_error"].is_null() && value["torch_wrong"] != true {
        let inputs: Vec<String> =
            case.inputs.iter().map(|i| format!("{:?}{:?}", i.global.shape, i.placements)).collect();
        let case = format!("{} {} {}", value["id"], inputs.join(" "), case.attrs);
        SENT.lock().unwrap().push(Sent { case, ours: sent.into_iter().sum(), recorded });
    }
    Ok(())
}

/// Prints where more was sent than in the recorded run, and fails if that is so in more than one case of twenty.
pub(crate) fn compare_bytes() {
    let sent = SENT.lock().unwrap();
    let more: Vec<&Sent> = sent.iter().filter(|s| s.ours > s.recorded).collect();
    let sum = |f: fn(&Sent) -> usize| sent.iter().map(f).sum::<usize>();
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "bytes at most the recorded ones: {}/{} cases that communicated; in all {} against {}",
        sent.len() - more.len(),
        sent.len(),
        sum(|s| s.ours),
        sum(|s| s.recorded),
    )
    .expect("standard output");
    for s in &more {
        writeln!(out, "  {} sent {}, recorded {}", s.case, s.ours, s.recorded).expect("standard output");
    }
    assert!(more.len() * 20 <= sent.len(), "{} of {} cases sent more than recorded", more.len(), sent.len());
}

/// Runs the operator, compares its outputs, and returns the bytes that this rank sent for it.
fn run(case: &Case, world: &World) -> Result<usize> {
    let mesh = world.mesh(case.mesh_shape.clone())?;
    let mut inputs = Vec::new();
    for input in &case.inputs {
        let placements: Vec<Placement> = input.placements.iter().map(PlacementForm::to_placement).collect();
        inputs.push(match &input.locals {
            Some(locals) => {
                let local = locals[world.rank()].to_tensor();
                DTensor::from_local_with_shape(&local, &mesh, placements, input.global.shape.as_slice())?
            }
            None => DTensor::distribute_tensor(&input.global.to_tensor(), &mesh, placements, None)?,
        });
    }
    world.trace().clear();
    let outputs = apply(&case.op, &inputs, &case.attrs)?;
    let sent = world.trace().records().iter().map(|r| r.bytes).sum();
    if outputs.len() != case.expected.len() {
        return Err(Error::other(format!("{} outputs, expected {}", outputs.len(), case.expected.len())));
    }
    for (output, expected) in outputs.iter().zip(&case.expected) {
        close(&output.full_tensor()?, &expected.to_tensor(), case.rtol, case.atol)?;
    }
    Ok(sent)
}

/// The operator by its name in the vocabulary.
pub(crate) fn apply(name: &str, x: &[DTensor], attrs: &Value) -> Result<Vec<DTensor>> {
    let number = |key: &str| attrs[key].as_f64();
    let flag = |key: &str| attrs[key].as_bool().unwrap_or(false);
    let dims = |key: &str| -> Vec<isize> {
        match &attrs[key] {
            Value::Array(all) => all.iter().filter_map(Value::as_i64).map(|d| d as isize).collect(),
            Value::Number(n) => n.as_i64().map(|d| d as isize).into_iter().collect(),
            _ => Vec::new(),
        }
    };
    let reduction = match attrs["reduction"].as_str() {
        Some("sum") => Reduction::Sum,
        Some("none") => Reduction::None,
        Some("batchmean") => Reduction::BatchMean,
        _ => Reduction::Mean,
    };
    let dim = |key: &str| attrs[key].as_i64().unwrap_or(0) as isize;
    let maybe_dim = attrs["dim"].as_i64().map(|d| d as isize);
    let counts = |key: &str| -> Vec<usize> { dims(key).into_iter().map(|n| n as usize).collect() };
    let count = |key: &str| counts(key).first().copied().unwrap_or(0);
    let all: Vec<&DTensor> = x.iter().collect();
    let both = |(a, b): (DTensor, DTensor)| Ok(vec![a, b]);
    let classes = LossOptions {
        reduction,
        ignore_index: attrs["ignore_index"].as_i64().unwrap_or(-100),
        label_smoothing: number("label_smoothing").unwrap_or(0.0),
    };
    let convolution = ConvOptions {
        stride: attrs["stride"].as_u64().unwrap_or(1) as usize,
        padding: count("padding"),
        ..ConvOptions::default()
    };
    let result = match name {
        "neg" => x[0].neg(),
        "abs" => x[0].abs(),
        "exp" => x[0].exp(),
        "log" => x[0].log(),
        "log1p" => x[0].log1p(),
        "expm1" => x[0].expm1(),
        "sqrt" => x[0].sqrt(),
        "rsqrt" => x[0].rsqrt(),
        "reciprocal" => x[0].reciprocal(),
        "sin" => x[0].sin(),
        "cos" => x[0].cos(),
        "tan" => x[0].tan(),
        "asin" => x[0].asin(),
        "tanh" => x[0].tanh(),
        "sigmoid" => x[0].sigmoid(),
        "erf" => x[0].erf(),
        "erfc" => x[0].erfc(),
        "relu" => x[0].relu(),
        "silu" => x[0].silu(),
        "floor" => x[0].floor(),
        "ceil" => x[0].ceil(),
        "round" => x[0].round(),
        "trunc" => x[0].trunc(),
        "frac" => x[0].frac(),
        "sign" => x[0].sign(),
        "signbit" => x[0].signbit(),
        "square" => x[0].square(),
        "isnan" => x[0].isnan(),
        "isfinite" => x[0].isfinite(),
        "isinf" => x[0].isinf(),
        "sinh" => x[0].sinh(),
        "cosh" => x[0].cosh(),
        "atan" => x[0].atan(),
        "asinh" => x[0].asinh(),
        "log2" => x[0].log2(),
        "log10" => x[0].log10(),
        "exp2" => x[0].exp2(),
        "mish" => x[0].mish(),
        "hardswish" => x[0].hardswish(),
        "logsigmoid" => x[0].logsigmoid(),
        "softsign" => x[0].softsign(),
        "gelu" if attrs["approximate"] == "tanh" => x[0].gelu_tanh(),
        "gelu" => x[0].gelu(),
        "leaky_relu" => x[0].leaky_relu(number("negative_slope").unwrap_or(0.01)),
        "elu" => x[0].elu(number("alpha").unwrap_or(1.0)),
        "softplus" => x[0].softplus(number("beta").unwrap_or(1.0), number("threshold").unwrap_or(20.0)),
        "pow_scalar" => x[0].pow_scalar(number("exponent").unwrap_or(1.0)),
        "clamp" => x[0].clamp(number("min"), number("max")),
        "add_scalar" => x[0].add_scalar(number("other").unwrap_or(0.0)),
        "mul_scalar" => x[0].mul_scalar(number("other").unwrap_or(1.0)),
        "sub_scalar" => x[0].sub_scalar(number("other").unwrap_or(0.0)),
        "rsub_scalar" => x[0].rsub_scalar(number("other").unwrap_or(0.0)),
        "div_scalar" => x[0].div_scalar(number("other").unwrap_or(1.0)),
        "nan_to_num" => x[0].nan_to_num(
            number("nan").unwrap_or(0.0),
            number("posinf").unwrap_or(0.0),
            number("neginf").unwrap_or(0.0),
        ),
        "logical_not" => x[0].logical_not(),
        "full_like" => x[0].full_like(number("value").unwrap_or(0.0)),
        "clone" => Ok(x[0].clone()),
        "cast" => match attrs["dtype"].as_str().unwrap_or_default() {
            "bool" => x[0].ne(&x[0].zeros_like()?),
            "i8" => x[0].to_dtype(DType::I16),
            other => x[0].to_dtype(other.parse().map_err(|_| Error::other(format!("type {other}")))?),
        },
        "add" => match number("alpha").unwrap_or(1.0) {
            1.0 => x[0].add(&x[1]),
            alpha => x[0].add(&x[1].mul_scalar(alpha)?),
        },
        "sub" => x[0].sub(&x[1]),
        "mul" => x[0].mul(&x[1]),
        "div" => match attrs["rounding_mode"].as_str() {
            Some("floor") => x[0].div_floor(&x[1]),
            Some("trunc") => x[0].div_trunc(&x[1]),
            _ => x[0].div(&x[1]),
        },
        "pow" => x[0].pow(&x[1]),
        "maximum" => x[0].maximum(&x[1]),
        "minimum" => x[0].minimum(&x[1]),
        "fmod" => x[0].fmod(&x[1]),
        "remainder" => x[0].remainder(&x[1]),
        "atan2" => x[0].atan2(&x[1]),
        "hypot" => x[0].hypot(&x[1]),
        "eq" => x[0].eq(&x[1]),
        "ne" => x[0].ne(&x[1]),
        "lt" => x[0].lt(&x[1]),
        "le" => x[0].le(&x[1]),
        "gt" => x[0].gt(&x[1]),
        "ge" => x[0].ge(&x[1]),
        "logical_and" => x[0].logical_and(&x[1]),
        "logical_or" => x[0].logical_or(&x[1]),
        "logical_xor" => x[0].logical_xor(&x[1]),
        "bitwise_and" => x[0].bitwise_and(&x[1]),
        "where" => x[0].where_cond(&x[1], &x[2]),
        "masked_fill" => x[0].masked_fill(&x[1], number("value").unwrap_or(0.0)),
        "addcmul" => x[0].addcmul(&x[1], &x[2], number("value").unwrap_or(1.0)),
        "addcdiv" => x[0].addcdiv(&x[1], &x[2], number("value").unwrap_or(1.0)),
        "lerp" => x[0].lerp(&x[1], number("weight").unwrap_or(0.0)),
        "clamp_tensor" => x[0].clamp_tensor(&x[1], &x[2]),
        "mm" => x[0].mm(&x[1]),
        "bmm" => x[0].bmm(&x[1]),
        "matmul" => x[0].matmul(&x[1]),
        "mv" => x[0].mv(&x[1]),
        "linear" => x[0].linear(&x[1], x.get(2)),
        "addmm" => x[0].addmm(&x[1], &x[2], number("beta").unwrap_or(1.0), number("alpha").unwrap_or(1.0)),
        "baddbmm" => x[0].baddbmm(&x[1], &x[2], number("beta").unwrap_or(1.0), number("alpha").unwrap_or(1.0)),
        "mse_loss" => x[0].mse_loss(&x[1], reduction),
        "l1_loss" => x[0].l1_loss(&x[1], reduction),
        "smooth_l1_loss" => x[0].smooth_l1_loss(&x[1], number("beta").unwrap_or(1.0), reduction),
        "bce_with_logits" => x[0].bce_with_logits(&x[1], reduction),
        "kl_div" => x[0].kl_div(&x[1], reduction),
        "dropout_eval" => Ok(x[0].clone()),
        "aminmax" => {
            return Ok(vec![x[0].amin(&dims("dim"), flag("keepdim"))?, x[0].amax(&dims("dim"), flag("keepdim"))?]);
        }
        "masked_scatter_sum" => x[1].where_cond(&x[0], &x[0].zeros_like()?)?.sum(&[], false),
        "dot" => x[0].dot(&x[1]),
        "outer" => x[0].outer(&x[1]),
        "einsum" => DTensor::einsum(attrs["equation"].as_str().unwrap_or_default(), &x.iter().collect::<Vec<_>>()),
        "sum" => x[0].sum(&dims("dim"), flag("keepdim")),
        "mean" => x[0].mean(&dims("dim"), flag("keepdim")),
        "amax" => x[0].amax(&dims("dim"), flag("keepdim")),
        "amin" => x[0].amin(&dims("dim"), flag("keepdim")),
        "prod" => x[0].prod(&dims("dim"), flag("keepdim")),
        "any" => x[0].any(&dims("dim"), flag("keepdim")),
        "all" => x[0].all(&dims("dim"), flag("keepdim")),
        "count_nonzero" => x[0].count_nonzero(&dims("dim"), false),
        "var" => x[0].var(&dims("dim"), number("correction").unwrap_or(1.0), flag("keepdim")),
        "std" => x[0].std(&dims("dim"), number("correction").unwrap_or(1.0), flag("keepdim")),
        "logsumexp" => x[0].logsumexp(&dims("dim"), flag("keepdim")),
        "norm" => {
            let order = match attrs["ord"].as_str() {
                Some("inf") => f64::INFINITY,
                Some("-inf") => f64::NEG_INFINITY,
                _ => number("ord").unwrap_or(2.0),
            };
            x[0].norm(order, &dims("dim"), flag("keepdim"))
        }
        "softmax" => x[0].softmax(dim("dim")),
        "log_softmax" => x[0].log_softmax(dim("dim")),
        "layer_norm" => {
            x[0].layer_norm(dims("normalized_shape").len(), x.get(1), x.get(2), number("eps").unwrap_or(1e-5))
        }
        "rms_norm" => x[0].rms_norm(dims("normalized_shape").len(), x.get(1), number("eps").unwrap_or(1e-5)),
        "permute" => x[0].permute(&dims("dims")),
        "transpose" => x[0].transpose(dim("dim0"), dim("dim1")),
        "t" => x[0].t(),
        "movedim" => x[0].movedim(dim("source"), dim("destination")),
        "unsqueeze" => x[0].unsqueeze(dim("dim")),
        "squeeze" => x[0].squeeze(attrs["dim"].as_i64().map(|d| d as isize)),
        "expand" => x[0].expand(&dims("size")),
        "view" => x[0].view(&dims("shape")),
        "reshape" => x[0].reshape(&dims("shape")),
        "flatten" => x[0].flatten(dim("start_dim"), dim("end_dim")),
        "unflatten" => x[0].unflatten(dim("dim"), &dims("sizes")),
        "diagonal" => x[0].diagonal(dim("offset")),
        "cat" => DTensor::cat(&all, dim("dim")),
        "stack" => DTensor::stack(&all, dim("dim")),
        "split" => {
            return match &attrs["split_size"] {
                Value::Array(_) => x[0].split_sizes(&counts("split_size"), dim("dim")),
                _ => x[0].split(count("split_size"), dim("dim")),
            };
        }
        "chunk" => return x[0].chunk(count("chunks"), dim("dim")),
        "slice" => {
            let end = attrs["end"].as_i64().map(|e| e as isize);
            x[0].slice(dim("dim"), dim("start"), end, attrs["step"].as_u64().unwrap_or(1) as usize)
        }
        "select" => x[0].select(dim("dim"), dim("index")),
        "narrow" => x[0].narrow(dim("dim"), count("start"), count("length")),
        "unbind" => return x[0].unbind(dim("dim")),
        "pad" => {
            let borders: Vec<(usize, usize)> = counts("pad").chunks(2).map(|b| (b[0], b[1])).collect();
            x[0].pad(&borders, number("value").unwrap_or(0.0))
        }
        "flip" => x[0].flip(&dims("dims")),
        "roll" => x[0].roll(&dims("shifts"), &dims("dims")),
        "repeat" => x[0].repeat(&counts("repeats")),
        "repeat_interleave" => x[0].repeat_interleave(count("repeats"), dim("dim")),
        "tril" => x[0].tril(dim("diagonal")),
        "triu" => x[0].triu(dim("diagonal")),
        "index_select" => x[0].index_select(dim("dim"), &x[1]),
        "index" => x[0].index(&x[1]),
        "gather" => x[0].gather(dim("dim"), &x[1]),
        "scatter" => x[0].scatter(dim("dim"), &x[1], &x[2]),
        "scatter_add" => x[0].scatter_add(dim("dim"), &x[1], &x[2]),
        "index_add" => x[0].index_add(dim("dim"), &x[1], &x[2]),
        "embedding" => x[0].embedding(&x[1]),
        "one_hot" => x[0].one_hot(count("num_classes")),
        "bucketize" => x[0].bucketize(&x[1]),
        "sort" => return both(x[0].sort(dim("dim"), flag("descending"))?),
        "argsort" => x[0].argsort(dim("dim"), flag("descending")),
        "topk" => {
            return both(x[0].topk(count("k"), dim("dim"), attrs["largest"].as_bool().unwrap_or(true))?);
        }
        "max_dim" => return both(x[0].max_dim(dim("dim"), flag("keepdim"))?),
        "min_dim" => return both(x[0].min_dim(dim("dim"), flag("keepdim"))?),
        "argmax" => x[0].argmax(maybe_dim, flag("keepdim")),
        "argmin" => x[0].argmin(maybe_dim, flag("keepdim")),
        "cumsum" => x[0].cumsum(dim("dim")),
        "cumprod" => x[0].cumprod(dim("dim")),
        "group_norm" => x[0].group_norm(count("num_groups"), x.get(1), x.get(2), number("eps").unwrap_or(1e-5)),
        "cross_entropy" => x[0].cross_entropy(&x[1], classes),
        "nll_loss" => x[0].nll_loss(&x[1], classes),
        "scaled_dot_product_attention" | "sdpa_masked" => {
            let options = AttentionOptions { causal: flag("is_causal"), mask: x.get(3), scale: number("scale") };
            x[0].scaled_dot_product_attention(&x[1], &x[2], options)
        }
        "conv1d" => x[0].conv1d(&x[1], x.get(2), convolution),
        "conv2d" => x[0].conv2d(&x[1], x.get(2), convolution),
        "avg_pool2d" => x[0].avg_pool2d(count("kernel_size"), None, 0),
        "max_pool2d" => x[0].max_pool2d(count("kernel_size"), None, 0),
        other => return Err(Error::other(format!("no operator {other}"))),
    };
    Ok(vec![result?])
}

pub(crate) fn close(got: &Tensor, expected: &Tensor, rtol: f64, atol: f64) -> Result<()> {
    if got.dims() != expected.dims() || got.dtype() != expected.dtype() {
        return Err(Error::other(format!(
            "got {:?} {:?}, expected {:?} {:?}",
            got.dtype(),
            got.dims(),
            expected.dtype(),
            expected.dims()
        )));
    }
    if got.elem_count() == 0 {
        return Ok(());
    }
    let values = |t: &Tensor| -> Result<Vec<f64>> { Ok(t.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?) };
    let fits = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= atol + rtol * b.abs();
    if values(got)?.iter().zip(&values(expected)?).all(fits) {
        return Ok(());
    }
    Err(Error::other(format!("got {got}, expected {expected}")))
}
