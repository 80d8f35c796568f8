//! PyTorch's operators and the calls of this library that correspond to them, as one table.
//!
//! The first column is the name in the recorded vectors, the second PyTorch's spelling, the third the inputs, and the
//! fourth the call here. Arguments that PyTorch passes by keyword are read from the case's attributes, `kw`.

use candle_core::DType;
use serde_json::Value;
use shardwise::ops::AttentionOptions;
use shardwise::prelude::*;

use crate::torch_attributes::Attributes;

/// An operator of PyTorch and the call that replaces it.
pub struct TorchOp {
    /// Name in the recorded vectors.
    pub name: &'static str,
    /// PyTorch's spelling.
    pub torch: &'static str,
    call: fn(&[DTensor], Attributes<'_>) -> Result<Vec<DTensor>>,
}

/// Runs the operator that the vectors call `name` on `inputs`, with the keyword arguments `attributes`.
///
/// # Errors
/// Those of the operator; also if there is no such operator, or if it takes another number of inputs.
pub fn apply(name: &str, inputs: &[DTensor], attributes: &Value) -> Result<Vec<DTensor>> {
    let op = TORCH_OPS.iter().find(|op| op.name == name);
    let op = op.ok_or_else(|| Error::other(format!("no operator {name} in the table of PyTorch's operators")))?;
    (op.call)(inputs, Attributes(attributes))
}

/// What operators return: one tensor, two, or a list.
trait Outputs {
    fn outputs(self) -> Result<Vec<DTensor>>;
}

impl Outputs for Result<DTensor> {
    fn outputs(self) -> Result<Vec<DTensor>> {
        Ok(vec![self?])
    }
}

impl Outputs for Result<(DTensor, DTensor)> {
    fn outputs(self) -> Result<Vec<DTensor>> {
        self.map(|(first, second)| vec![first, second])
    }
}

impl Outputs for Result<Vec<DTensor>> {
    fn outputs(self) -> Result<Vec<DTensor>> {
        self
    }
}

macro_rules! torch_ops {
    ($kw:ident; $($name:literal $torch:literal [$($input:pat),*] => $call:expr;)*) => {
        &[$(TorchOp {
            name: $name,
            torch: $torch,
            // Not every row has keywords or a fixed number of inputs.
            #[allow(unused_variables, irrefutable_let_patterns, clippy::redundant_at_rest_pattern)]
            call: |inputs, $kw| {
                let [$($input),*] = inputs else {
                    return Err(Error::other(format!("{}: unexpected number of inputs, {}", $torch, inputs.len())));
                };
                Outputs::outputs($call)
            },
        }),*]
    };
}

/// The table. Optional inputs are the rest of the list, as in `[x, weight, bias @ ..]`.
pub const TORCH_OPS: &[TorchOp] = torch_ops! { kw;
    // Functions of each element.
    "neg"         "torch.neg(x)"               [x] => x.neg();
    "abs"         "torch.abs(x)"               [x] => x.abs();
    "exp"         "torch.exp(x)"               [x] => x.exp();
    "exp2"        "torch.exp2(x)"              [x] => x.exp2();
    "expm1"       "torch.expm1(x)"             [x] => x.expm1();
    "log"         "torch.log(x)"               [x] => x.log();
    "log2"        "torch.log2(x)"              [x] => x.log2();
    "log10"       "torch.log10(x)"             [x] => x.log10();
    "log1p"       "torch.log1p(x)"             [x] => x.log1p();
    "sqrt"        "torch.sqrt(x)"              [x] => x.sqrt();
    "rsqrt"       "torch.rsqrt(x)"             [x] => x.rsqrt();
    "square"      "torch.square(x)"            [x] => x.square();
    "reciprocal"  "torch.reciprocal(x)"        [x] => x.reciprocal();
    "sin"         "torch.sin(x)"               [x] => x.sin();
    "cos"         "torch.cos(x)"               [x] => x.cos();
    "tan"         "torch.tan(x)"               [x] => x.tan();
    "asin"        "torch.asin(x)"              [x] => x.asin();
    "atan"        "torch.atan(x)"              [x] => x.atan();
    "sinh"        "torch.sinh(x)"              [x] => x.sinh();
    "cosh"        "torch.cosh(x)"              [x] => x.cosh();
    "tanh"        "torch.tanh(x)"              [x] => x.tanh();
    "asinh"       "torch.asinh(x)"             [x] => x.asinh();
    "erf"         "torch.erf(x)"               [x] => x.erf();
    "erfc"        "torch.erfc(x)"              [x] => x.erfc();
    "floor"       "torch.floor(x)"             [x] => x.floor();
    "ceil"        "torch.ceil(x)"              [x] => x.ceil();
    "round"       "torch.round(x)"             [x] => x.round();
    "trunc"       "torch.trunc(x)"             [x] => x.trunc();
    "frac"        "torch.frac(x)"              [x] => x.frac();
    "sign"        "torch.sign(x)"              [x] => x.sign();
    "signbit"     "torch.signbit(x)"           [x] => x.signbit();
    "isnan"       "torch.isnan(x)"             [x] => x.isnan();
    "isfinite"    "torch.isfinite(x)"          [x] => x.isfinite();
    "isinf"       "torch.isinf(x)"             [x] => x.isinf();
    "logical_not" "torch.logical_not(x)"       [x] => x.logical_not();
    "nan_to_num"  "torch.nan_to_num(x, nan, posinf, neginf)" [x] =>
        x.nan_to_num(kw.number_or("nan", 0.0), kw.number_or("posinf", 0.0), kw.number_or("neginf", 0.0));
    "clamp"       "torch.clamp(x, min, max)"   [x] => x.clamp(kw.number("min"), kw.number("max"));
    "cast"        "x.to(dtype)"                [x] => cast(x, kw.text("dtype").unwrap_or_default());
    "clone"       "torch.clone(x)"             [x] => Ok(x.clone());
    "full_like"   "torch.full_like(x, value)"  [x] => x.full_like(kw.number_or("value", 0.0));

    // Activations.
    "relu"         "F.relu(x)"                 [x] => x.relu();
    "silu"         "F.silu(x)"                 [x] => x.silu();
    "mish"         "F.mish(x)"                 [x] => x.mish();
    "hardswish"    "F.hardswish(x)"            [x] => x.hardswish();
    "sigmoid"      "torch.sigmoid(x)"          [x] => x.sigmoid();
    "logsigmoid"   "F.logsigmoid(x)"           [x] => x.logsigmoid();
    "softsign"     "F.softsign(x)"             [x] => x.softsign();
    "gelu"         "F.gelu(x, approximate)"    [x] =>
        if kw.text("approximate") == Some("tanh") { x.gelu_tanh() } else { x.gelu() };
    "leaky_relu"   "F.leaky_relu(x, negative_slope)" [x] => x.leaky_relu(kw.number_or("negative_slope", 0.01));
    "elu"          "F.elu(x, alpha)"           [x] => x.elu(kw.number_or("alpha", 1.0));
    "softplus"     "F.softplus(x, beta, threshold)" [x] =>
        x.softplus(kw.number_or("beta", 1.0), kw.number_or("threshold", 20.0));
    "dropout_eval" "F.dropout(x, p, training=False)" [x] => Ok(x.clone());

    // Arithmetic with a number. Rust's operators on references do the same: `(&x + 1.0)?`.
    "add_scalar"  "x + other"                  [x] => x.add_scalar(kw.number_or("other", 0.0));
    "sub_scalar"  "x - other"                  [x] => x.sub_scalar(kw.number_or("other", 0.0));
    "rsub_scalar" "other - x"                  [x] => x.rsub_scalar(kw.number_or("other", 0.0));
    "mul_scalar"  "x * other"                  [x] => x.mul_scalar(kw.number_or("other", 1.0));
    "div_scalar"  "x / other"                  [x] => x.div_scalar(kw.number_or("other", 1.0));
    "pow_scalar"  "torch.pow(x, exponent)"     [x] => x.pow_scalar(kw.number_or("exponent", 1.0));

    // Functions of two or three elements, with broadcasting.
    "add"         "torch.add(x, y, alpha)"     [x, y] => match kw.number_or("alpha", 1.0) {
        1.0 => x.add(y),
        alpha => x.add(&y.mul_scalar(alpha)?),
    };
    "sub"         "torch.sub(x, y)"            [x, y] => x.sub(y);
    "mul"         "torch.mul(x, y)"            [x, y] => x.mul(y);
    "div"         "torch.div(x, y, rounding_mode)" [x, y] => match kw.text("rounding_mode") {
        Some("floor") => x.div_floor(y),
        Some("trunc") => x.div_trunc(y),
        _ => x.div(y),
    };
    "pow"         "torch.pow(x, y)"            [x, y] => x.pow(y);
    "fmod"        "torch.fmod(x, y)"           [x, y] => x.fmod(y);
    "remainder"   "torch.remainder(x, y)"      [x, y] => x.remainder(y);
    "maximum"     "torch.maximum(x, y)"        [x, y] => x.maximum(y);
    "minimum"     "torch.minimum(x, y)"        [x, y] => x.minimum(y);
    "atan2"       "torch.atan2(x, y)"          [x, y] => x.atan2(y);
    "hypot"       "torch.hypot(x, y)"          [x, y] => x.hypot(y);
    "eq"          "torch.eq(x, y)"             [x, y] => x.eq(y);
    "ne"          "torch.ne(x, y)"             [x, y] => x.ne(y);
    "lt"          "torch.lt(x, y)"             [x, y] => x.lt(y);
    "le"          "torch.le(x, y)"             [x, y] => x.le(y);
    "gt"          "torch.gt(x, y)"             [x, y] => x.gt(y);
    "ge"          "torch.ge(x, y)"             [x, y] => x.ge(y);
    "logical_and" "torch.logical_and(x, y)"    [x, y] => x.logical_and(y);
    "logical_or"  "torch.logical_or(x, y)"     [x, y] => x.logical_or(y);
    "logical_xor" "torch.logical_xor(x, y)"    [x, y] => x.logical_xor(y);
    "bitwise_and" "torch.bitwise_and(x, y)"    [x, y] => x.bitwise_and(y);
    "where"       "torch.where(condition, x, y)" [condition, x, y] => condition.where_cond(x, y);
    "masked_fill" "x.masked_fill(mask, value)" [x, mask] => x.masked_fill(mask, kw.number_or("value", 0.0));
    "masked_scatter_sum" "torch.where(mask, x, 0).sum()" [x, mask] =>
        mask.where_cond(x, &x.zeros_like()?)?.sum(&[], false);
    "lerp"        "torch.lerp(x, end, weight)" [x, end] => x.lerp(end, kw.number_or("weight", 0.0));
    "addcmul"     "torch.addcmul(x, a, b, value)" [x, a, b] => x.addcmul(a, b, kw.number_or("value", 1.0));
    "addcdiv"     "torch.addcdiv(x, a, b, value)" [x, a, b] => x.addcdiv(a, b, kw.number_or("value", 1.0));
    "clamp_tensor" "torch.clamp(x, min_tensor, max_tensor)" [x, min, max] => x.clamp_tensor(min, max);

    // Products of matrices and vectors.
    "mm"      "torch.mm(a, b)"                 [a, b] => a.mm(b);
    "bmm"     "torch.bmm(a, b)"                [a, b] => a.bmm(b);
    "matmul"  "torch.matmul(a, b)"             [a, b] => a.matmul(b);
    "mv"      "torch.mv(matrix, vector)"       [matrix, vector] => matrix.mv(vector);
    "dot"     "torch.dot(a, b)"                [a, b] => a.dot(b);
    "outer"   "torch.outer(a, b)"              [a, b] => a.outer(b);
    "einsum"  "torch.einsum(equation, ...)"    [operands @ ..] =>
        DTensor::einsum(kw.text("equation").unwrap_or_default(), &operands.iter().collect::<Vec<_>>());
    "linear"  "F.linear(x, weight, bias)"      [x, weight, bias @ ..] => x.linear(weight, bias.first());
    "addmm"   "torch.addmm(x, a, b, beta, alpha)" [x, a, b] =>
        x.addmm(a, b, kw.number_or("beta", 1.0), kw.number_or("alpha", 1.0));
    "baddbmm" "torch.baddbmm(x, a, b, beta, alpha)" [x, a, b] =>
        x.baddbmm(a, b, kw.number_or("beta", 1.0), kw.number_or("alpha", 1.0));

    // Reductions: an empty list of dimensions means all of them.
    "sum"       "torch.sum(x, dim, keepdim)"   [x] => x.sum(&kw.dims("dim"), kw.flag("keepdim"));
    "mean"      "torch.mean(x, dim, keepdim)"  [x] => x.mean(&kw.dims("dim"), kw.flag("keepdim"));
    "prod"      "torch.prod(x, dim, keepdim)"  [x] => x.prod(&kw.dims("dim"), kw.flag("keepdim"));
    "amax"      "torch.amax(x, dim, keepdim)"  [x] => x.amax(&kw.dims("dim"), kw.flag("keepdim"));
    "amin"      "torch.amin(x, dim, keepdim)"  [x] => x.amin(&kw.dims("dim"), kw.flag("keepdim"));
    "aminmax"   "torch.aminmax(x, dim, keepdim)" [x] => {
        let (dims, keepdim) = (kw.dims("dim"), kw.flag("keepdim"));
        Ok((x.amin(&dims, keepdim)?, x.amax(&dims, keepdim)?))
    };
    "any"       "torch.any(x, dim, keepdim)"   [x] => x.any(&kw.dims("dim"), kw.flag("keepdim"));
    "all"       "torch.all(x, dim, keepdim)"   [x] => x.all(&kw.dims("dim"), kw.flag("keepdim"));
    "count_nonzero" "torch.count_nonzero(x, dim)" [x] => x.count_nonzero(&kw.dims("dim"), false);
    "var"       "torch.var(x, dim, correction, keepdim)" [x] =>
        x.var(&kw.dims("dim"), kw.number_or("correction", 1.0), kw.flag("keepdim"));
    "std"       "torch.std(x, dim, correction, keepdim)" [x] =>
        x.std(&kw.dims("dim"), kw.number_or("correction", 1.0), kw.flag("keepdim"));
    "norm"      "torch.linalg.vector_norm(x, ord, dim, keepdim)" [x] =>
        x.norm(kw.norm_order(), &kw.dims("dim"), kw.flag("keepdim"));
    "logsumexp" "torch.logsumexp(x, dim, keepdim)" [x] => x.logsumexp(&kw.dims("dim"), kw.flag("keepdim"));
    "max_dim"   "torch.max(x, dim, keepdim)"   [x] => x.max_dim(kw.dim("dim"), kw.flag("keepdim"));
    "min_dim"   "torch.min(x, dim, keepdim)"   [x] => x.min_dim(kw.dim("dim"), kw.flag("keepdim"));
    "argmax"    "torch.argmax(x, dim, keepdim)" [x] => x.argmax(kw.optional_dim("dim"), kw.flag("keepdim"));
    "argmin"    "torch.argmin(x, dim, keepdim)" [x] => x.argmin(kw.optional_dim("dim"), kw.flag("keepdim"));

    // Order and running results along a dimension.
    "sort"      "torch.sort(x, dim, descending)" [x] => x.sort(kw.dim("dim"), kw.flag("descending"));
    "argsort"   "torch.argsort(x, dim, descending)" [x] => x.argsort(kw.dim("dim"), kw.flag("descending"));
    "topk"      "torch.topk(x, k, dim, largest)" [x] =>
        x.topk(kw.count("k"), kw.dim("dim"), kw.flag_or("largest", true));
    "cumsum"    "torch.cumsum(x, dim)"         [x] => x.cumsum(kw.dim("dim"));
    "cumprod"   "torch.cumprod(x, dim)"        [x] => x.cumprod(kw.dim("dim"));

    // Softmax and normalization.
    "softmax"     "torch.softmax(x, dim)"      [x] => x.softmax(kw.dim("dim"));
    "log_softmax" "torch.log_softmax(x, dim)"  [x] => x.log_softmax(kw.dim("dim"));
    "layer_norm"  "F.layer_norm(x, normalized_shape, weight, bias, eps)" [x, affine @ ..] => {
        let ndim = kw.dims("normalized_shape").len();
        x.layer_norm(ndim, affine.first(), affine.get(1), kw.number_or("eps", 1e-5))
    };
    "rms_norm"    "F.rms_norm(x, normalized_shape, weight, eps)" [x, weight @ ..] =>
        x.rms_norm(kw.dims("normalized_shape").len(), weight.first(), kw.number_or("eps", 1e-5));
    "group_norm"  "F.group_norm(x, num_groups, weight, bias, eps)" [x, affine @ ..] =>
        x.group_norm(kw.count("num_groups"), affine.first(), affine.get(1), kw.number_or("eps", 1e-5));

    // Shapes.
    "permute"   "x.permute(dims)"              [x] => x.permute(&kw.dims("dims"));
    "transpose" "x.transpose(dim0, dim1)"      [x] => x.transpose(kw.dim("dim0"), kw.dim("dim1"));
    "t"         "x.t()"                        [x] => x.t();
    "movedim"   "x.movedim(source, destination)" [x] => x.movedim(kw.dim("source"), kw.dim("destination"));
    "unsqueeze" "x.unsqueeze(dim)"             [x] => x.unsqueeze(kw.dim("dim"));
    "squeeze"   "x.squeeze(dim)"               [x] => x.squeeze(kw.optional_dim("dim"));
    "expand"    "x.expand(size)"               [x] => x.expand(&kw.dims("size"));
    "view"      "x.view(shape)"                [x] => x.view(&kw.dims("shape"));
    "reshape"   "x.reshape(shape)"             [x] => x.reshape(&kw.dims("shape"));
    "flatten"   "x.flatten(start_dim, end_dim)" [x] => x.flatten(kw.dim("start_dim"), kw.dim("end_dim"));
    "unflatten" "x.unflatten(dim, sizes)"      [x] => x.unflatten(kw.dim("dim"), &kw.dims("sizes"));

    // Parts of a tensor, and joining tensors.
    "cat"       "torch.cat(tensors, dim)"      [tensors @ ..] =>
        DTensor::cat(&tensors.iter().collect::<Vec<_>>(), kw.dim("dim"));
    "stack"     "torch.stack(tensors, dim)"    [tensors @ ..] =>
        DTensor::stack(&tensors.iter().collect::<Vec<_>>(), kw.dim("dim"));
    "split"     "torch.split(x, split_size_or_sections, dim)" [x] => match kw.is_list("split_size") {
        true => x.split_sizes(&kw.counts("split_size"), kw.dim("dim")),
        false => x.split(kw.count("split_size"), kw.dim("dim")),
    };
    "chunk"     "torch.chunk(x, chunks, dim)"  [x] => x.chunk(kw.count("chunks"), kw.dim("dim"));
    "unbind"    "torch.unbind(x, dim)"         [x] => x.unbind(kw.dim("dim"));
    "slice"     "x[..., start:end:step, ...]"  [x] =>
        x.slice(kw.dim("dim"), kw.dim("start"), kw.optional_dim("end"), kw.count("step").max(1));
    "select"    "x.select(dim, index)"         [x] => x.select(kw.dim("dim"), kw.dim("index"));
    "narrow"    "x.narrow(dim, start, length)" [x] => x.narrow(kw.dim("dim"), kw.count("start"), kw.count("length"));
    "diagonal"  "torch.diagonal(x, offset)"    [x] => x.diagonal(kw.dim("offset"));
    "tril"      "torch.tril(x, diagonal)"      [x] => x.tril(kw.dim("diagonal"));
    "triu"      "torch.triu(x, diagonal)"      [x] => x.triu(kw.dim("diagonal"));
    "pad"       "F.pad(x, pad, value=value)"   [x] => x.pad(&kw.padding_pairs(), kw.number_or("value", 0.0));
    "flip"      "torch.flip(x, dims)"          [x] => x.flip(&kw.dims("dims"));
    "roll"      "torch.roll(x, shifts, dims)"  [x] => x.roll(&kw.dims("shifts"), &kw.dims("dims"));
    "repeat"    "x.repeat(repeats)"            [x] => x.repeat(&kw.counts("repeats"));
    "repeat_interleave" "x.repeat_interleave(repeats, dim)" [x] =>
        x.repeat_interleave(kw.count("repeats"), kw.dim("dim"));

    // Lookups by index, and writes by index.
    "index_select" "x.index_select(dim, index)" [x, index] => x.index_select(kw.dim("dim"), index);
    "index"        "x[index]"                  [x, index] => x.index(index);
    "gather"       "x.gather(dim, index)"      [x, index] => x.gather(kw.dim("dim"), index);
    "scatter"      "x.scatter(dim, index, src)" [x, index, src] => x.scatter(kw.dim("dim"), index, src);
    "scatter_add"  "x.scatter_add(dim, index, src)" [x, index, src] => x.scatter_add(kw.dim("dim"), index, src);
    "index_add"    "x.index_add(dim, index, source)" [x, index, source] => x.index_add(kw.dim("dim"), index, source);
    "embedding"    "F.embedding(ids, weight)"  [weight, ids] => weight.embedding(ids);
    "one_hot"      "F.one_hot(ids, num_classes)" [ids] => ids.one_hot(kw.count("num_classes"));
    "bucketize"    "torch.bucketize(x, boundaries)" [x, boundaries] => x.bucketize(boundaries);

    // Losses.
    "mse_loss"        "F.mse_loss(x, target, reduction)" [x, target] => x.mse_loss(target, kw.reduction());
    "l1_loss"         "F.l1_loss(x, target, reduction)" [x, target] => x.l1_loss(target, kw.reduction());
    "smooth_l1_loss"  "F.smooth_l1_loss(x, target, reduction, beta)" [x, target] =>
        x.smooth_l1_loss(target, kw.number_or("beta", 1.0), kw.reduction());
    "bce_with_logits" "F.binary_cross_entropy_with_logits(x, target, reduction)" [x, target] =>
        x.bce_with_logits(target, kw.reduction());
    "kl_div"          "F.kl_div(x, target, reduction)" [x, target] => x.kl_div(target, kw.reduction());
    "cross_entropy"   "F.cross_entropy(x, target, ignore_index, reduction, label_smoothing)" [x, target] =>
        x.cross_entropy(target, kw.loss_options());
    "nll_loss"        "F.nll_loss(x, target, ignore_index, reduction)" [x, target] =>
        x.nll_loss(target, kw.loss_options());

    // Attention, convolution and pooling.
    "scaled_dot_product_attention" "F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal, scale)"
        [q, k, v, mask @ ..] => attention(q, [k, v], mask.first(), kw);
    "sdpa_masked" "F.scaled_dot_product_attention(q, k, v, attn_mask)"
        [q, k, v, mask @ ..] => attention(q, [k, v], mask.first(), kw);
    "conv1d"     "F.conv1d(x, weight, bias, stride, padding)" [x, weight, bias @ ..] =>
        x.conv1d(weight, bias.first(), kw.convolution());
    "conv2d"     "F.conv2d(x, weight, bias, stride, padding)" [x, weight, bias @ ..] =>
        x.conv2d(weight, bias.first(), kw.convolution());
    "avg_pool2d" "F.avg_pool2d(x, kernel_size)" [x] => x.avg_pool2d(kw.count("kernel_size"), None, 0);
    "max_pool2d" "F.max_pool2d(x, kernel_size)" [x] => x.max_pool2d(kw.count("kernel_size"), None, 0);
};

/// Candle has neither bool, which becomes `u8`, nor `i8`, which becomes `i16`.
fn cast(x: &DTensor, dtype: &str) -> Result<DTensor> {
    match dtype {
        "bool" => x.ne(&x.zeros_like()?),
        "i8" => x.to_dtype(DType::I16),
        other => x.to_dtype(other.parse().map_err(|_| Error::other(format!("unknown dtype {other}")))?),
    }
}

fn attention(q: &DTensor, [k, v]: [&DTensor; 2], mask: Option<&DTensor>, kw: Attributes<'_>) -> Result<DTensor> {
    let options = AttentionOptions {
        causal: kw.flag("is_causal"),
        mask,
        scale: kw.number("scale"),
        ..AttentionOptions::default()
    };
    q.scaled_dot_product_attention(k, v, options)
}
