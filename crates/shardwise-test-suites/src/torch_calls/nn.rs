//! Activations, normalizations, windows and attention of `torch.nn.functional`.

use candle_core::DType;
use serde_json::Value;
use shardwise::ops::{
    AttentionOptions, ConvOptions, ConvTransposeOptions, EmbeddingBagMode, EmbeddingBagOptions, EmbeddingOptions,
    GridMode, GridPadding, InterpolateOptions, Interpolation, MultiHeadOptions, PerDim, PoolOptions,
};
use shardwise::prelude::*;

use super::arguments::Arguments;
use super::calls::calls;

calls! {
    "nn.functional.relu(input, inplace=False)" => |a| a.tensor("input")?.relu();
    "nn.functional.silu(input, inplace=False)" => |a| a.tensor("input")?.silu();
    "nn.functional.mish(input, inplace=False)" => |a| a.tensor("input")?.mish();
    "nn.functional.hardswish(input, inplace=False)" => |a| a.tensor("input")?.hardswish();
    "nn.functional.logsigmoid(input)" => |a| a.tensor("input")?.logsigmoid();
    "nn.functional.softsign(input)" => |a| a.tensor("input")?.softsign();
    "nn.functional.gelu(input, *, approximate='none')" => |a| match a.text("approximate").as_deref() {
        Some("tanh") => a.tensor("input")?.gelu_tanh(),
        _ => a.tensor("input")?.gelu(),
    };
    "nn.functional.leaky_relu(input, negative_slope=0.01, inplace=False)" => |a|
        a.tensor("input")?.leaky_relu(a.float("negative_slope")?);
    "nn.functional.elu(input, alpha=1.0, inplace=False)" => |a| a.tensor("input")?.elu(a.float("alpha")?);
    "nn.functional.softplus(input, beta=1, threshold=20)" => |a|
        a.tensor("input")?.softplus(a.float("beta")?, a.float("threshold")?);
    "nn.functional.layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05)" => |a|
        a.tensor("input")?.layer_norm(a.sizes("normalized_shape").len(), a.optional_tensor("weight").as_ref(),
            a.optional_tensor("bias").as_ref(), a.float("eps")?);
    "nn.functional.group_norm(input, num_groups, weight=None, bias=None, eps=1e-05)" => |a|
        a.tensor("input")?.group_norm(a.size("num_groups")?, a.optional_tensor("weight").as_ref(),
            a.optional_tensor("bias").as_ref(), a.float("eps")?);
    "nn.functional.dropout(input, p=0.5, training=True, inplace=False)" => |a|
        a.tensor("input")?.dropout(a.float("p")?, a.flag("training"));
    "nn.functional.relu6(input, inplace=False)" => |a| a.tensor("input")?.relu6();
    "nn.functional.hardtanh(input, min_val=-1.0, max_val=1.0, inplace=False)" => |a|
        a.tensor("input")?.hardtanh(a.float("min_val")?, a.float("max_val")?);
    "nn.functional.hardsigmoid(input, inplace=False)" => |a| a.tensor("input")?.hardsigmoid();
    "nn.functional.selu(input, inplace=False)" => |a| a.tensor("input")?.selu();
    "nn.functional.celu(input, alpha=1.0, inplace=False)" => |a| a.tensor("input")?.celu(a.float("alpha")?);
    "nn.functional.tanhshrink(input)" => |a| a.tensor("input")?.tanhshrink();
    "nn.functional.hardshrink(input, lambd=0.5)" => |a| a.tensor("input")?.hardshrink(a.float("lambd")?);
    "nn.functional.softshrink(input, lambd=0.5)" => |a| a.tensor("input")?.softshrink(a.float("lambd")?);
    "nn.functional.threshold(input, threshold, value, inplace=False)" => |a|
        a.tensor("input")?.threshold(a.float("threshold")?, a.float("value")?);
    "nn.functional.rrelu(input, lower=0.125, upper=0.3333333333333333, training=False, inplace=False)" => |a|
        a.tensor("input")?.rrelu(a.float("lower")?, a.float("upper")?, a.flag("training"));
    "nn.functional.prelu(input, weight)" => |a| a.tensor("input")?.prelu(&a.tensor("weight")?);
    "nn.functional.glu(input, dim=-1)" => |a| a.tensor("input")?.glu(a.int("dim")?);
    "nn.functional.softmin(input, dim, _stacklevel=3, dtype=None)" => |a|
        a.converted(&a.tensor("input")?, "dtype")?.softmin(a.int("dim")?);
    "torch.ops.aten._safe_softmax.default(input, dim, dtype=None)" => |a|
        a.converted(&a.tensor("input")?, "dtype")?.safe_softmax(a.int("dim")?);

    // Dropout. Elements are drawn from the generator of the mesh.
    "nn.functional.dropout2d(input, p=0.5, training=True, inplace=False)" => |a| {
        let x = a.tensor("input")?;
        x.feature_dropout(a.float("p")?, a.flag("training"), x.ndim() != 3)
    };
    "nn.functional.dropout3d(input, p=0.5, training=True, inplace=False)" => |a| {
        let x = a.tensor("input")?;
        x.feature_dropout(a.float("p")?, a.flag("training"), x.ndim() != 4)
    };
    "nn.functional.alpha_dropout(input, p=0.5, training=False, inplace=False)" => |a|
        a.tensor("input")?.alpha_dropout(a.float("p")?, a.flag("training"));
    "nn.functional.feature_alpha_dropout(input, p=0.5, training=False, inplace=False)" => |a|
        a.tensor("input")?.feature_alpha_dropout(a.float("p")?, a.flag("training"));

    // Normalizations. Running statistics are those of a module; the operators return only the result.
    "nn.functional.rms_norm(input, normalized_shape, weight=None, eps=None)" => |a| {
        let x = a.tensor("input")?;
        let eps = a.optional_float("eps").unwrap_or(if x.dtype() == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) });
        x.rms_norm(a.sizes("normalized_shape").len(), a.optional_tensor("weight").as_ref(), eps)
    };
    "nn.functional.batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-05)" =>
        |a| Ok::<_, Error>(batch_norm(a, a.flag("training"))?.0);
    "nn.functional.instance_norm(input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-05)" =>
        |a| {
            let running = a.optional_tensor("running_mean").zip(a.optional_tensor("running_var"));
            let running = running.as_ref().filter(|_| !a.flag("use_input_stats")).map(|(mean, var)| (mean, var));
            a.tensor("input")?.instance_norm(
                running, a.optional_tensor("weight").as_ref(), a.optional_tensor("bias").as_ref(), a.float("eps")?)
        };
    // Result, mean and reciprocal standard deviation.
    "native_layer_norm(input, normalized_shape, weight, bias, eps)" => |a| a.tensor("input")?.native_layer_norm(
        a.sizes("normalized_shape").len(), a.optional_tensor("weight").as_ref(), a.optional_tensor("bias").as_ref(), a.float("eps")?);
    "native_group_norm(input, weight, bias, N, C, HxW, group, eps)" => |a| a.tensor("input")?.native_group_norm(
        a.size("group")?, a.optional_tensor("weight").as_ref(), a.optional_tensor("bias").as_ref(), a.float("eps")?);
    "native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)" => |a|
        batch_norm(a, a.flag("training"));
    "_native_batch_norm_legit(input, weight, bias, running_mean, running_var, training, momentum, eps)" => |a|
        batch_norm(a, a.flag("training"));
    "_batch_norm_with_update(input, weight, bias, running_mean, running_var, momentum, eps)" => |a| {
        let nothing = DTensor::zeros(0, DType::U8, a.mesh(), a.replicated())?;
        Ok::<_, Error>((batch_norm(a, true)?, nothing))
    };
    "nn.functional.local_response_norm(input, size, alpha=0.0001, beta=0.75, k=1.0)" => |a|
        a.tensor("input")?.local_response_norm(a.size("size")?, a.float("alpha")?, a.float("beta")?, a.float("k")?);
    "nn.functional.normalize(input, p=2.0, dim=1, eps=1e-12)" => |a|
        a.tensor("input")?.normalize(a.float("p")?, a.int("dim")?, a.float("eps")?);
    "nn.functional.cosine_similarity(x1, x2, dim=1, eps=1e-08)" => |a|
        a.tensor("x1")?.cosine_similarity(&a.tensor("x2")?, a.int("dim")?, a.float("eps")?);
    "nn.functional.pairwise_distance(x1, x2, p=2.0, eps=1e-06, keepdim=False)" => |a|
        a.tensor("x1")?.pairwise_distance(&a.tensor("x2")?, a.float("p")?, a.float("eps")?, a.flag("keepdim"));
    "nn.functional.pdist(input, p=2.0)" => |a| a.tensor("input")?.pdist(a.float("p")?);

    // Convolutions.
    "nn.functional.conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)" => |a| conv(a, 1);
    "nn.functional.conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)" => |a| conv(a, 2);
    "nn.functional.conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)" => |a| conv(a, 3);
    "nn.functional.conv_transpose1d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)" =>
        |a| conv_transpose(a, 1);
    "nn.functional.conv_transpose2d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)" =>
        |a| conv_transpose(a, 2);
    "nn.functional.conv_transpose3d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)" =>
        |a| conv_transpose(a, 3);

    // Pools. `avg_pool2d` and `max_pool2d` without options exchange halos; these take all options.
    "nn.functional.avg_pool1d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True)" => |a|
        a.tensor("input")?.avg_pool(1, &pool(a));
    "nn.functional.avg_pool2d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None)" =>
        |a| a.tensor("input")?.avg_pool(2, &pool(a));
    "nn.functional.avg_pool3d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None)" =>
        |a| a.tensor("input")?.avg_pool(3, &pool(a));
    "nn.functional.max_pool1d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False)" =>
        |a| with_indices(a, a.tensor("input")?.max_pool(1, &pool(a))?);
    "nn.functional.max_pool2d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False)" =>
        |a| with_indices(a, a.tensor("input")?.max_pool(2, &pool(a))?);
    "nn.functional.max_pool3d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False)" =>
        |a| with_indices(a, a.tensor("input")?.max_pool(3, &pool(a))?);
    "nn.functional.adaptive_avg_pool1d(input, output_size)" => |a| a.tensor("input")?.adaptive_avg_pool(&adaptive(a, 1));
    "nn.functional.adaptive_avg_pool2d(input, output_size)" => |a| a.tensor("input")?.adaptive_avg_pool(&adaptive(a, 2));
    "nn.functional.adaptive_avg_pool3d(input, output_size)" => |a| a.tensor("input")?.adaptive_avg_pool(&adaptive(a, 3));
    "nn.functional.adaptive_max_pool1d(input, output_size, return_indices=False)" => |a|
        with_indices(a, a.tensor("input")?.adaptive_max_pool(&adaptive(a, 1))?);
    "nn.functional.adaptive_max_pool2d(input, output_size, return_indices=False)" => |a|
        with_indices(a, a.tensor("input")?.adaptive_max_pool(&adaptive(a, 2))?);
    "nn.functional.adaptive_max_pool3d(input, output_size, return_indices=False)" => |a|
        with_indices(a, a.tensor("input")?.adaptive_max_pool(&adaptive(a, 3))?);
    "nn.functional.fractional_max_pool2d(input, kernel_size, output_size=None, output_ratio=None, return_indices=False, _random_samples=None)" =>
        |a| with_indices(a, fractional(a, 2)?);
    "nn.functional.fractional_max_pool3d(input, kernel_size, output_size=None, output_ratio=None, return_indices=False, _random_samples=None)" =>
        |a| with_indices(a, fractional(a, 3)?);
    "nn.functional.max_unpool1d(input, indices, kernel_size, stride=None, padding=0, output_size=None)" => |a| unpool(a, 1);
    "nn.functional.max_unpool2d(input, indices, kernel_size, stride=None, padding=0, output_size=None)" => |a| unpool(a, 2);
    "nn.functional.max_unpool3d(input, indices, kernel_size, stride=None, padding=0, output_size=None)" => |a| unpool(a, 3);
    "nn.functional.unfold(input, kernel_size, dilation=1, padding=0, stride=1)" => |a| a.tensor("input")?.im2col(
        &a.sizes("kernel_size"), &a.sizes("dilation"), &a.sizes("padding"), &a.sizes("stride"));
    "nn.functional.fold(input, output_size, kernel_size, dilation=1, padding=0, stride=1)" => |a| a.tensor("input")?.col2im(
        &a.sizes("output_size"), &a.sizes("kernel_size"), &a.sizes("dilation"), &a.sizes("padding"), &a.sizes("stride"));
    "nn.functional.lp_pool1d(input, norm_type, kernel_size, stride=None, ceil_mode=False)" => |a|
        a.tensor("input")?.lp_pool(a.float("norm_type")?, 1, &pool(a));
    "nn.functional.lp_pool2d(input, norm_type, kernel_size, stride=None, ceil_mode=False)" => |a|
        a.tensor("input")?.lp_pool(a.float("norm_type")?, 2, &pool(a));
    "nn.functional.lp_pool3d(input, norm_type, kernel_size, stride=None, ceil_mode=False)" => |a|
        a.tensor("input")?.lp_pool(a.float("norm_type")?, 3, &pool(a));

    // Resampling.
    "nn.functional.interpolate(input, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, antialias=False)" =>
        |a| resize(a, a.text("mode").as_deref().unwrap_or("nearest"), a.flag("align_corners"));
    "nn.functional.upsample_bilinear(input, size=None, scale_factor=None)" => |a| resize(a, "bilinear", true);
    "nn.functional.upsample_nearest(input, size=None, scale_factor=None)" => |a| resize(a, "nearest", false);
    "nn.functional.grid_sample(input, grid, mode='bilinear', padding_mode='zeros', align_corners=False)" => |a| {
        let mode = match a.text("mode").as_deref() {
            Some("nearest") => GridMode::Nearest,
            Some("bicubic") => GridMode::Bicubic,
            _ => GridMode::Bilinear,
        };
        let padding = match a.text("padding_mode").as_deref() {
            Some("border") => GridPadding::Border,
            Some("reflection") => GridPadding::Reflection,
            _ => GridPadding::Zeros,
        };
        a.tensor("input")?.grid_sample(&a.tensor("grid")?, mode, padding, a.flag("align_corners"))
    };
    // The same by numbers: bilinear, nearest, bicubic; zeros, border, reflection.
    "grid_sampler_2d(input, grid, interpolation_mode, padding_mode, align_corners)" => |a| numbered_grid(a);
    "grid_sampler_3d(input, grid, interpolation_mode, padding_mode, align_corners)" => |a| numbered_grid(a);

    // Embeddings: the weight comes first, as the tensor whose method it is here.
    "nn.functional.embedding(weight, input, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False)" =>
        |a| a.tensor("weight")?.embedding_with(&a.tensor("input")?, EmbeddingOptions {
            padding_idx: a.optional_int("padding_idx").map(|i| i as i64), max_norm: a.optional_float("max_norm"),
            norm_type: a.float("norm_type")?, scale_grad_by_freq: a.flag("scale_grad_by_freq") });
    "nn.functional.embedding_bag(weight, input, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, mode='mean', sparse=False, per_sample_weights=None, include_last_offset=False, padding_idx=None)" =>
        |a| {
            let (offsets, weights) = (a.optional_tensor("offsets"), a.optional_tensor("per_sample_weights"));
            let mode = match a.text("mode").as_deref() {
                Some("sum") => EmbeddingBagMode::Sum,
                Some("max") => EmbeddingBagMode::Max,
                _ => EmbeddingBagMode::Mean,
            };
            a.tensor("weight")?.embedding_bag_with(&a.tensor("input")?, &EmbeddingBagOptions {
                offsets: offsets.as_ref(), mode, per_sample_weights: weights.as_ref(),
                include_last_offset: a.flag("include_last_offset"),
                padding_idx: a.optional_int("padding_idx").map(|i| i as i64), max_norm: a.optional_float("max_norm"),
                norm_type: a.float("norm_type")?, scale_grad_by_freq: a.flag("scale_grad_by_freq") })
        };

    // Attention.
    "nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)" =>
        |a| {
            let mask = a.optional_tensor("attn_mask");
            a.tensor("query")?.scaled_dot_product_attention(&a.tensor("key")?, &a.tensor("value")?, AttentionOptions {
                causal: a.flag("is_causal"), mask: mask.as_ref(), scale: a.optional_float("scale"),
                dropout: a.float("dropout_p")?, ..AttentionOptions::default() })
        };
    "nn.functional.multi_head_attention_forward(query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training=True, key_padding_mask=None, need_weights=True, attn_mask=None, use_separate_proj_weight=False, q_proj_weight=None, k_proj_weight=None, v_proj_weight=None, static_k=None, static_v=None, average_attn_weights=True, is_causal=False)" =>
        |a| attention(a);
}

/// A batch normalization with the statistics of the batch or running ones; PyTorch returns no statistics for the latter.
fn batch_norm(a: &Arguments<'_>, training: bool) -> Result<(DTensor, DTensor, DTensor)> {
    let (x, weight, bias) = (a.tensor("input")?, a.optional_tensor("weight"), a.optional_tensor("bias"));
    // The form without running statistics has three arguments after the bias.
    let short = a.value("running_mean").is_boolean();
    let eps = a.float(if short { "training" } else { "eps" })?;
    let empty = || DTensor::zeros(0, x.dtype(), a.mesh(), a.replicated());
    if x.elem_count() == 0 && x.ndim() < 2 {
        return Ok((x.clone(), empty()?, empty()?));
    }
    if training || short {
        return x.native_batch_norm(weight.as_ref(), bias.as_ref(), eps);
    }
    let (mean, variance) = (a.tensor("running_mean")?, a.tensor("running_var")?);
    let result = x.batch_norm(Some((&mean, &variance)), weight.as_ref(), bias.as_ref(), eps)?;
    Ok((result, empty()?, empty()?))
}

/// An option of a window: one number, or one per spatial dimension.
fn per_dim(list: &[usize]) -> PerDim {
    match *list {
        [a, b] => [a, b].into(),
        [a, b, c] => [a, b, c].into(),
        [one, ..] => one.into(),
        [] => 0.into(),
    }
}

fn conv(a: &Arguments<'_>, spatial: usize) -> Result<DTensor> {
    let (mut x, weight, bias) = (a.tensor("input")?, a.tensor("weight")?, a.optional_tensor("bias"));
    let (stride, dilation, groups) = (a.sizes("stride"), a.sizes("dilation"), a.size("groups")?);
    let mut padding = a.sizes("padding");
    match a.text("padding").as_deref() {
        Some("same") => {
            x = x.pad_same(&weight.shape()[2..], per_dim(&dilation))?;
            padding = vec![0];
        }
        Some(_) => padding = vec![0],
        None => {}
    }
    let options =
        ConvOptions { stride: per_dim(&stride), padding: per_dim(&padding), dilation: per_dim(&dilation), groups };
    match spatial {
        1 => x.conv1d(&weight, bias.as_ref(), options),
        2 => x.conv2d(&weight, bias.as_ref(), options),
        _ => x.conv3d(&weight, bias.as_ref(), options),
    }
}

fn conv_transpose(a: &Arguments<'_>, spatial: usize) -> Result<DTensor> {
    let (x, weight, bias) = (a.tensor("input")?, a.tensor("weight")?, a.optional_tensor("bias"));
    let [stride, padding, output_padding, dilation] =
        ["stride", "padding", "output_padding", "dilation"].map(|name| per_dim(&a.sizes(name)));
    let options = ConvTransposeOptions { stride, padding, output_padding, dilation, groups: a.size("groups")? };
    match spatial {
        1 => x.conv_transpose1d(&weight, bias.as_ref(), options),
        2 => x.conv_transpose2d(&weight, bias.as_ref(), options),
        _ => x.conv_transpose3d(&weight, bias.as_ref(), options),
    }
}

fn pool(a: &Arguments<'_>) -> PoolOptions {
    let dilation = a.sizes("dilation");
    PoolOptions {
        kernel_size: a.sizes("kernel_size"),
        stride: a.sizes("stride"),
        padding: a.sizes("padding"),
        dilation: if dilation.is_empty() { vec![1] } else { dilation },
        ceil_mode: a.flag("ceil_mode"),
        count_include_pad: a.flag("count_include_pad"),
        divisor_override: a.optional_int("divisor_override").map(|n| n as i64),
    }
}

/// The indices only where they are asked for.
fn with_indices(a: &Arguments<'_>, (values, indices): (DTensor, DTensor)) -> Result<Vec<DTensor>> {
    Ok(if a.flag("return_indices") { vec![values, indices] } else { vec![values] })
}

/// Sizes of the result, one for all or one per dimension; None keeps a size.
fn adaptive(a: &Arguments<'_>, spatial: usize) -> Vec<Option<usize>> {
    let size = |v: &Value| v.as_u64().map(|n| n as usize);
    match &a.value("output_size") {
        Value::Array(all) if all.len() == 1 => vec![size(&all[0]); spatial],
        Value::Array(all) => all.iter().map(size).collect(),
        one => vec![size(one); spatial],
    }
}

fn fractional(a: &Arguments<'_>, spatial: usize) -> Result<(DTensor, DTensor)> {
    let x = a.tensor("input")?;
    let own = &x.shape()[x.ndim() - spatial..];
    let ratios = a.floats("output_ratio");
    let output: Vec<usize> = match a.sizes("output_size") {
        given if given.len() == 1 => vec![given[0]; spatial],
        given if !given.is_empty() => given,
        _ => (0..spatial).map(|s| (own[s] as f64 * ratios.get(s).unwrap_or(&ratios[0])) as usize).collect(),
    };
    let lead = &x.shape()[..x.ndim() - spatial];
    let samples = match a.optional_tensor("_random_samples") {
        Some(samples) => samples,
        None => DTensor::rand([lead, &[spatial]].concat(), a.mesh(), a.replicated())?,
    };
    x.fractional_max_pool(&a.sizes("kernel_size"), &output, &samples)
}

fn unpool(a: &Arguments<'_>, spatial: usize) -> Result<DTensor> {
    let (x, given) = (a.tensor("input")?, a.sizes("output_size"));
    let sizes = match given.len() {
        0 => pool(a).unpooled_sizes(&x.shape()[x.ndim() - spatial..]),
        n => given[n - spatial..].to_vec(),
    };
    x.max_unpool(&a.tensor("indices")?, &sizes)
}

fn resize(a: &Arguments<'_>, mode: &str, align_corners: bool) -> Result<DTensor> {
    let x = a.tensor("input")?;
    let spatial = x.ndim() - 2;
    let mode = match mode {
        "nearest" => Interpolation::Nearest,
        "nearest-exact" => Interpolation::NearestExact,
        "bicubic" => Interpolation::Bicubic,
        "area" => Interpolation::Area,
        _ => Interpolation::Linear,
    };
    let options = InterpolateOptions { mode, align_corners, scale_factor: None };
    let of_each = |list: Vec<usize>| if list.len() == 1 { vec![list[0]; spatial] } else { list };
    let factors = a.floats("scale_factor");
    let factors = if factors.len() == 1 { vec![factors[0]; spatial] } else { factors };
    match a.sizes("size") {
        given if !given.is_empty() => x.interpolate(&of_each(given), &options),
        // Positions by the sizes instead of the factors.
        _ if a.flag("recompute_scale_factor") => {
            let sizes = x.shape()[2..].iter().zip(&factors).map(|(&n, f)| (n as f64 * f).floor() as usize);
            x.interpolate(&sizes.collect::<Vec<_>>(), &options)
        }
        _ => x.interpolate_by(&factors, &options),
    }
}

fn numbered_grid(a: &Arguments<'_>) -> Result<DTensor> {
    let mode = [GridMode::Bilinear, GridMode::Nearest, GridMode::Bicubic].get(a.size("interpolation_mode")?).copied();
    let padding =
        [GridPadding::Zeros, GridPadding::Border, GridPadding::Reflection].get(a.size("padding_mode")?).copied();
    let (Some(mode), Some(padding)) = (mode, padding) else {
        return Err(Error::other("modes are numbered from 0 to 2"));
    };
    a.tensor("input")?.grid_sample(&a.tensor("grid")?, mode, padding, a.flag("align_corners"))
}

/// Attention with its projections. A bool mask of PyTorch masks where it is True, a u8 mask here where it is 0.
fn attention(a: &Arguments<'_>) -> Result<(DTensor, DTensor)> {
    let weights = match a.flag("use_separate_proj_weight") {
        true => vec![a.tensor("q_proj_weight")?, a.tensor("k_proj_weight")?, a.tensor("v_proj_weight")?],
        // Three pieces of any tensor: `chunk` returns fewer of a short one.
        false => a.tensor("in_proj_weight")?.tensor_split(3, 0)?,
    };
    let biases = a.optional_tensor("in_proj_bias").map(|b| b.tensor_split(3, 0)).transpose()?;
    let added = a.optional_tensor("bias_k").zip(a.optional_tensor("bias_v"));
    let mask = match a.optional_tensor("attn_mask") {
        Some(mask) if a.is_bool("attn_mask") => Some(mask.logical_not()?),
        mask => mask,
    };
    let (out_proj_weight, out_proj_bias) = (a.tensor("out_proj_weight")?, a.optional_tensor("out_proj_bias"));
    let options = MultiHeadOptions {
        num_heads: a.size("num_heads")?,
        in_proj_weight: [&weights[0], &weights[1], &weights[2]],
        in_proj_bias: biases.as_ref().map(|b| [&b[0], &b[1], &b[2]]),
        out_proj_weight: &out_proj_weight,
        out_proj_bias: out_proj_bias.as_ref(),
        bias_kv: added.as_ref().map(|(k, v)| [k, v]),
        add_zero_attn: a.flag("add_zero_attn"),
        attn_mask: mask.as_ref(),
    };
    a.tensor("query")?.multi_head_attention_forward(&a.tensor("key")?, &a.tensor("value")?, &options)
}
