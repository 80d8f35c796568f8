//! Fused attention: sharding rules and kernels of the forward and the backward pass.
//!
//! Batches, heads, groups and queries are independent. If the keys are sharded, every rank attends to its own keys, and the
//! results are merged by their logarithms of sums of exponentials: neither keys nor scores are communicated.

use candle_core::{DType, Tensor};

use super::composed::Composed;
use super::params::AttentionParams;
use crate::error::{ErrorKind, Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{Backward, DTensor, SaveForBackward, SavedTensors, is_recording};
use shardwise_kernels::attention::{
    AttentionArgs, AttentionBlocks, AttentionDropout, attention_backward, attention_forward, attention_part,
    merge_attention_parts, row_dots,
};
use shardwise_kernels::{concat, filled};

const NAME: &str = "scaled_dot_product_attention";

/// Attention over the keys that a rank holds.
///
/// Inputs: queries `[batch.., key heads, (groups,) queries, size]`, keys, values, and optionally a mask that broadcasts to the
/// scores. Outputs: the result, and the logarithms of the sums of exponentials; or over parts of the keys, the maxima of the
/// scores and the sums.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Attention {
    params: AttentionParams,
    /// Over how many parts the keys are sharded. If more than one, outputs have a first dimension of this size, sharded like
    /// the keys.
    parts: usize,
}

/// The backward pass of [`Attention`] over all keys. Inputs: those of the forward pass without the mask, the gradient of the
/// result, the logarithms, the dot products of result and gradient, and the mask if there is one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct AttentionBackward(AttentionParams);

/// Dot products of the rows of two tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RowDots;

/// Merges the outputs of [`Attention`] over parts of the keys to a tensor of type `dtype`. Inputs: results and their weights.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct MergeParts {
    dtype: DType,
}

/// The backward pass of attention whose parts have been merged.
struct MergedAttention(AttentionParams);

/// Runs attention: the result, and the logarithm of the sum of exponentials of every query's scores.
pub(super) fn attend(params: AttentionParams, inputs: &[&DTensor], site: Site) -> Result<[DTensor; 2]> {
    let parts = parts_of_keys(&params, inputs)?;
    let pair = |outputs: Vec<DTensor>| <[DTensor; 2]>::try_from(outputs).expect("two outputs");
    if parts == 1 {
        return dispatch(&Attention { params, parts }, inputs, site).map(pair);
    }
    let detached: Vec<DTensor> = inputs.iter().map(|t| t.detach()).collect();
    let op = Attention { params, parts };
    let found = dispatch(&op, &detached.iter().collect::<Vec<_>>(), site)?;
    let [results, maxima, sums] = <[DTensor; 3]>::try_from(found).expect("three outputs");
    // A part without keys has a maximum of -inf and a sum of zero.
    let highest = maxima.amax(&[0], true)?.all_reduced(NAME)?.nan_to_num(f64::NAN, f64::INFINITY, 0.0)?;
    let weights = maxima.sub(&highest)?.exp()?.mul(&sums)?;
    let total = weights.sum(&[0], true)?.all_reduced(NAME)?;
    // At least 1 if a key is seen, and else zero, like all weights.
    let shares = weights.div(&total.maximum(0.5)?)?;
    let merged = dispatch(&MergeParts { dtype: inputs[0].dtype() }, &[&results, &shares], site)?.swap_remove(0);
    let logs = total.log()?.add(&highest)?.squeeze(Some(0))?;
    let outputs = vec![merged, logs];
    Ok(pair(DTensor::recorded(outputs, inputs, SaveForBackward::All, || Box::new(MergedAttention(op.params)))))
}

/// Over how many parts the keys are sharded when attention runs on these inputs.
fn parts_of_keys(params: &AttentionParams, inputs: &[&DTensor]) -> Result<usize> {
    let dim = inputs[1].ndim() - 2;
    if inputs[1..3].iter().all(|t| t.layout().shard_order(dim).is_empty()) {
        return Ok(1);
    }
    let metas: Vec<TensorMeta> = inputs.iter().map(|t| t.meta()).collect();
    let layouts: Vec<&Layout> = inputs.iter().map(|t| t.layout()).collect();
    let elem: Vec<usize> = metas.iter().map(|m| m.dtype.size_in_bytes()).collect();
    let names = DimNames::new(params, &metas)?;
    let signature = names.forward(&metas, true, DimSharding::Reduces(ReduceOp::Sum))?;
    let [result, row] = names.shapes(&metas, Some(1));
    let decision = signature.decide(&layouts, &elem, &[&result, &row, &row])?;
    let RequiredInput::Layout(keys) = &decision.inputs[1] else { return Ok(1) };
    Ok(keys.shard_order(dim).iter().map(|&axis| keys.mesh().shape()[axis]).product())
}

/// Numbers of the dimensions of attention in a [`Signature`].
struct DimNames {
    /// Batch dimensions have the numbers below this one, which is that of the key heads.
    heads: usize,
    grouped: bool,
    groups: usize,
    queries: usize,
    keys: usize,
    size: usize,
    value_size: usize,
}

impl DimNames {
    fn new(params: &AttentionParams, inputs: &[TensorMeta]) -> Result<Self> {
        let dtype = inputs[0].dtype;
        if !dtype.is_float() || inputs[1..3].iter().any(|t| t.dtype != dtype) {
            let found = inputs[..3].iter().map(|t| t.dtype.as_str()).collect::<Vec<_>>().join(", ");
            return Err(ErrorKind::dtype(dtype).error(
                "operands",
                format!("queries, keys and values of types {found}"),
                "one floating-point type",
                "convert them with to_dtype",
            ));
        }
        let heads = inputs[1].shape.len() - 3;
        let first = heads + 1;
        let grouped = params.grouped;
        Ok(DimNames {
            heads,
            grouped,
            groups: first,
            queries: first + 1,
            keys: first + 2,
            size: first + 3,
            value_size: first + 4,
        })
    }

    /// The numbers of the dimensions of a tensor with batch dimensions and heads.
    fn of(&self, groups: bool, rest: &[usize]) -> Vec<Option<usize>> {
        let groups = (groups && self.grouped).then_some(self.groups);
        (0..=self.heads).chain(groups).chain(rest.iter().copied()).map(Some).collect()
    }

    /// The numbers of a mask, which is aligned with the last dimensions of the scores.
    fn of_mask(&self, inputs: &[TensorMeta], mask: &TensorMeta) -> Result<Vec<Option<usize>>> {
        let names = self.of(true, &[self.queries, self.keys]);
        let mut shape = inputs[0].shape.clone();
        *shape.last_mut().expect("queries have dimensions") = inputs[1].shape[self.heads + 1];
        let fits = mask.shape.len() <= shape.len()
            && mask.shape.iter().rev().zip(shape.iter().rev()).all(|(m, n)| m == n || *m == 1)
            && (mask.dtype.is_float() || mask.dtype == DType::U8);
        if !fits {
            return Err(ErrorKind::shape(&mask.shape).error(
                "mask",
                format!("{} {:?}", mask.dtype.as_str(), mask.shape),
                format!("floating-point or u8 elements that broadcast to the scores {shape:?}"),
                "reshape or convert the mask",
            ));
        }
        let missing = shape.len() - mask.shape.len();
        Ok((missing..shape.len()).map(|d| names[d].filter(|_| mask.shape[d - missing] == shape[d])).collect())
    }

    /// `shared` is what sharding groups and queries means; `keys` the same for keys.
    fn sharding(&self, shared: DimSharding, keys: DimSharding) -> Vec<DimSharding> {
        let free = (0..=self.heads).map(|_| DimSharding::Free);
        free.chain([shared, shared, keys, DimSharding::Never, DimSharding::Never]).collect()
    }

    /// The numbers of queries, keys and values.
    fn operands(&self) -> [Vec<Option<usize>>; 3] {
        let (q, k, v) = ([self.queries, self.size], [self.keys, self.size], [self.keys, self.value_size]);
        [self.of(true, &q), self.of(false, &k), self.of(false, &v)]
    }

    fn forward(&self, inputs: &[TensorMeta], parts: bool, keys: DimSharding) -> Result<Signature> {
        let mask = inputs.get(3).map(|mask| self.of_mask(inputs, mask)).transpose()?;
        let (result, row) = (self.of(true, &[self.queries, self.value_size]), self.of(true, &[self.queries]));
        let outputs = [result, row.clone()].into_iter().chain(parts.then_some(row));
        let outputs = outputs.map(|names| parts.then_some(None).into_iter().chain(names).collect::<Vec<_>>());
        let mut sharding = self.sharding(DimSharding::Free, keys);
        // Ranks with other features of the values compute the same statistics.
        sharding[self.value_size] = DimSharding::Free;
        let signature = Signature::new(sharding, self.operands().into_iter().chain(mask), outputs);
        // Linear in the values; the mean of equal statistics is each of them.
        let partial_values = (0..inputs.len()).map(|i| (i == 2).then_some(ReduceOp::Avg));
        Ok(if parts { signature } else { signature.allow_partial(partial_values, ReduceOp::Avg) })
    }

    /// The shapes of the result and the logarithms, with a first dimension of `parts` if given.
    fn shapes(&self, inputs: &[TensorMeta], parts: Option<usize>) -> [Vec<usize>; 2] {
        let rows = &inputs[0].shape[..inputs[0].shape.len() - 1];
        let logs: Vec<usize> = parts.into_iter().chain(rows.iter().copied()).collect();
        let value_size = inputs[2].shape[inputs[2].shape.len() - 1];
        [[logs.as_slice(), &[value_size]].concat(), logs]
    }
}

/// The type of logarithms and dot products.
fn statistics(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Runs `body` with the options of a kernel call on local tensors, of which the first two are queries and keys.
fn with_args<R>(
    params: &AttentionParams,
    mask: Option<&Tensor>,
    context: &KernelContext<'_>,
    body: impl FnOnce(&AttentionArgs<'_>) -> R,
) -> R {
    let (q, k) = (context.input_shape(0), context.input_shape(1));
    let (outer, key_dim) = (q.len() - 2, k.len() - 2);
    let (queries, keys) = (context.input_indices(0, outer), context.input_indices(1, key_dim));
    let mut heads = Vec::new();
    if params.dropout.is_some() || params.blocks.is_some() {
        heads.push(0);
        for (dim, &n) in q[..outer].iter().enumerate() {
            let held = context.input_indices(0, dim);
            heads = heads.iter().flat_map(|at| held.iter().map(move |i| at * n as u64 + *i as u64)).collect();
        }
    }
    let dropout = params.dropout.map(|dropout| AttentionDropout {
        p: dropout.p.0,
        seed: dropout.draw.seed,
        draw: dropout.draw.offset,
        heads: &heads,
        queries: q[outer],
        keys: k[key_dim],
    });
    let heads_per_batch = q[outer - 1 - usize::from(params.grouped)..outer].iter().product();
    let blocks = params.blocks.as_ref().map(|mask| AttentionBlocks { mask, heads: &heads, heads_per_batch });
    body(&AttentionArgs {
        scale: params.scale.0,
        soft_cap: params.soft_cap.map(|cap| cap.0),
        causal: params.causal,
        window: params.window,
        query_offset: params.query_offset,
        queries: &queries,
        keys: &keys,
        mask,
        blocks,
        dropout,
    })
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let names = DimNames::new(&self.params, inputs)?;
        let several = self.parts > 1;
        let keys = if several { DimSharding::Reduces(ReduceOp::Sum) } else { DimSharding::Never };
        let [result, logs] = names.shapes(inputs, several.then_some(self.parts));
        let dtype = inputs[0].dtype;
        // Parts are merged before the result is rounded.
        let result = TensorMeta { shape: result, dtype: if several { statistics(dtype) } else { dtype } };
        let logs = TensorMeta { shape: logs, dtype: statistics(dtype) };
        let outputs = [result, logs.clone()].into_iter().chain(several.then_some(logs)).collect();
        Ok(OpPlan { signature: names.forward(inputs, several, keys)?, outputs })
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let mut shapes: Vec<Vec<usize>> = plan.outputs.iter().map(|m| m.shape.clone()).collect();
        if self.parts > 1 {
            // A rank reduces one part. The same sizes as in `parts_of_keys` give the same decision.
            shapes.iter_mut().for_each(|shape| shape[0] = 1);
        }
        let shapes: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
        let mut decision = plan.signature.decide(inputs, elem, &shapes)?;
        if self.parts > 1 {
            let RequiredInput::Layout(keys) = &decision.inputs[1] else { return Ok(decision) };
            let axes = keys.shard_order(keys.shape().len() - 2).to_vec();
            for (output, meta) in decision.outputs.iter_mut().zip(&plan.outputs) {
                // Along the axes of the keys the rule says `Partial`; here every rank holds its own part.
                let mut placements = output.placements().to_vec();
                axes.iter().for_each(|&axis| placements[axis] = Placement::Shard(0));
                let mut orders = output.shard_orders();
                orders[0] = axes.clone();
                *output = Layout::from_shard_orders(output.mesh(), &meta.shape, &placements, &orders)?;
            }
        }
        Ok(decision)
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (operands, dtype) = ([&inputs[0], &inputs[1], &inputs[2]], context.output_dtype(0));
        with_args(&self.params, inputs.get(3), context, |args| {
            if self.parts == 1 {
                let (result, logs) = attention_forward(operands, dtype, args)?;
                return Ok(vec![result, logs]);
            }
            let found = attention_part(operands, dtype, args)?.into_iter().zip([0.0, f64::NEG_INFINITY, 0.0]);
            // A rank that holds several parts, because a custom rule did not shard the keys, has all keys in the first.
            let padded = |(output, (t, rest)): (usize, (Tensor, f64))| -> Result<Tensor> {
                let (t, local) = (t.unsqueeze(0)?, context.local_shape(output));
                let missing = TensorMeta::new([&[local[0].saturating_sub(1)], &local[1..]].concat(), t.dtype());
                if local[0] == 1 { Ok(t) } else { Ok(concat(&[t, filled(rest, &missing)?], 0)?) }
            };
            found.enumerate().map(padded).collect()
        })
    }

    fn flops(&self, inputs: &[&[usize]], outputs: &[&[usize]]) -> u64 {
        self.params.unmasked(2 * products(inputs, outputs[1].iter().product::<usize>(), [1, 1]))
    }

    fn gradient(&self) -> Gradient<Self> {
        if self.parts > 1 {
            return Gradient::NotDifferentiable; // the merged result is recorded as one call
        }
        Gradient::From(SaveForBackward::All, |op, saved, gradients| gradients_of(&op.params, saved, gradients))
    }
}

/// Multiplications of some products over the sizes of keys and values, for a number of queries.
fn products(inputs: &[&[usize]], rows: usize, [keys, values]: [usize; 2]) -> u64 {
    let ([.., length, size], [.., value_size]) = (inputs[1], inputs[2]) else { return 0 };
    rows as u64 * *length as u64 * (keys * size + values * value_size) as u64
}

impl Backward for MergedAttention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        gradients_of(&self.0, saved, gradients)
    }
}

/// The gradients of the inputs: block by block, or as a differentiable formula if the backward pass is recorded.
#[track_caller]
fn gradients_of(
    params: &AttentionParams,
    saved: &SavedTensors<'_>,
    gradients: &[Option<DTensor>],
) -> Result<Vec<Option<DTensor>>> {
    let count = saved.num_inputs();
    if gradients.iter().all(Option::is_none) {
        return Ok(vec![None; count]);
    }
    let inputs: Vec<DTensor> = (0..count).map(|i| saved.input(i)).collect();
    let found: Vec<Option<DTensor>> = if is_recording() {
        let call = Composed { params, q: &inputs[0], k: &inputs[1], v: &inputs[2], mask: inputs.get(3) };
        call.backward(gradients)?.into()
    } else {
        let (result, logs) = (saved.output(0), saved.output(1));
        let g = gradients[0].clone().map_or_else(|| result.zeros_like(), Ok)?;
        let site = std::panic::Location::caller();
        let mut dots = dispatch(&RowDots, &[&result, &g], site)?.swap_remove(0);
        if let Some(of_logs) = &gradients[1] {
            dots = dots.sub(of_logs)?;
        }
        let mut operands = vec![&inputs[0], &inputs[1], &inputs[2], &g, &logs, &dots];
        operands.extend(inputs.get(3));
        dispatch(&AttentionBackward(params.clone()), &operands, site)?.into_iter().map(Some).collect()
    };
    Ok(found.into_iter().chain(std::iter::repeat(None)).take(count).collect())
}

impl Op for AttentionBackward {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Terms of partial gradients are summed in f32 inside the kernel, which converts half precision block by block.
    fn accumulation(&self) -> Accumulation {
        Accumulation::Exact
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let names = DimNames::new(&self.0, inputs)?;
        let mask = inputs.get(6).map(|mask| names.of_mask(inputs, mask)).transpose()?;
        let summed = DimSharding::Reduces(ReduceOp::Sum);
        let (g, rows) = (names.of(true, &[names.queries, names.value_size]), names.of(true, &[names.queries]));
        let named = names.operands().into_iter().chain([g, rows.clone(), rows]).chain(mask);
        // Linear in the gradient of the result and its dot products together.
        let partial = (0..inputs.len()).map(|i| (i == 3 || i == 5).then_some(ReduceOp::Sum));
        let signature = Signature::new(names.sharding(summed, summed), named, names.operands())
            .allow_partial(partial, ReduceOp::Sum);
        Ok(OpPlan { signature, outputs: inputs[..3].to_vec() })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let dtypes = [0, 1, 2].map(|output| context.output_dtype(output));
        let found = with_args(&self.0, inputs.get(6), context, |args| {
            attention_backward([&inputs[0], &inputs[1], &inputs[2]], &inputs[3], [&inputs[4], &inputs[5]], dtypes, args)
        })?;
        Ok(vec![found.queries, found.keys, found.values])
    }

    fn flops(&self, inputs: &[&[usize]], _: &[&[usize]]) -> u64 {
        self.0.unmasked(2 * products(inputs, inputs[4].iter().product::<usize>(), [3, 2]))
    }

    /// Runs in backward passes that are not recorded; recorded ones use the composed formula.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

impl Op for RowDots {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let ndim = inputs[0].shape.len();
        let all: Vec<Option<usize>> = (0..ndim).map(Some).collect();
        let signature = Signature::product([all.clone(), all.clone()], all[..ndim - 1].to_vec());
        let shape = inputs[0].shape[..ndim - 1].to_vec();
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: statistics(inputs[0].dtype) }] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![row_dots(&inputs[0], &inputs[1])?])
    }

    /// Runs in backward passes that are not recorded; recorded ones use the composed formula.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

impl Op for MergeParts {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let all: Vec<Option<usize>> = (0..inputs[0].shape.len()).map(Some).collect();
        let signature = Signature::product([all.clone(), all[..all.len() - 1].to_vec()], all[1..].to_vec());
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape: inputs[0].shape[1..].to_vec(), dtype: self.dtype }] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let merged = merge_attention_parts(&inputs[0], &inputs[1])?;
        Ok(vec![merged.to_dtype(context.output_dtype(0))?])
    }

    /// Part of a call that is recorded as one.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}
