//! Grouped matrix products: adjacent rows form groups, each of which is multiplied by a matrix of its own, as the tokens of every
//! expert in a mixture of experts.

use std::ops::Range;
use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::{Runs, TensorMeta};
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::arguments::indices::not_integer;
use crate::ops::products::einsum::multiply_batches;
use crate::ops::products::equation::Label;
use crate::ops::products::local_product::{ProductResult, product};
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::{concat, filled};

const NAME: &str = "grouped_mm";

/// The rows of every group times the matrix of the group. Inputs: rows `[rows, k]`, matrices `[groups, k, n]`, and the ends of the
/// groups. Rows after the last group have the result 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RowGroups;

/// A product per group, summed over its rows. Inputs: `[rows, m]`, `[rows, n]`, the ends of the groups, and a vector with an element
/// per group, of which only the layout matters: it shards the groups of the result `[groups, m, n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SummedGroups;

impl DTensor {
    /// Multiplies groups of adjacent rows, columns or summed elements by a matrix of their own: the products inside a mixture of
    /// experts. PyTorch's `torch.nn.functional.grouped_mm`, without its limits on types and strides.
    ///
    /// `offsets` are integers, one per group: where it ends. The first group begins at 0, every other one where the one before ends.
    ///
    /// | this tensor | `other` | `offsets` divide | result |
    /// |---|---|---|---|
    /// | `[m, k]` | `[groups, k, n]` | `m` | `[m, n]`, 0 in rows after the last group |
    /// | `[groups, m, k]` | `[k, n]` | `n` | `[m, n]`, 0 in columns after the last group |
    /// | `[m, k]` | `[k, n]` | `k` | `[groups, m, n]` |
    /// | `[groups, m, k]` | `[groups, k, n]` | (none) | `[groups, m, n]` |
    ///
    /// Communicates nothing if rows, columns or groups are sharded, or the summed dimension of both operands. Of sharded groups, a
    /// rank computes its own, and the result is `Partial(Sum)`, as it is if the summed dimension is sharded. Offsets that are
    /// sharded are gathered. Gradients are grouped products, too; they can be differentiated again.
    ///
    /// ```
    /// use shardwise::candle_core::{Device, Tensor};
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("ep", 2)])?;
    ///     let tokens = DTensor::ones((6, 4), DType::F32, &mesh, [Replicate])?;
    ///     let experts = DTensor::ones((2, 4, 3), DType::F32, &mesh, [Shard(0)])?; // one expert per rank
    ///     let ends = DTensor::replicate(&Tensor::new(&[2i64, 6], &Device::Cpu)?, &mesh)?; // rows 0..2 and 2..6
    ///     let y = tokens.grouped_mm(&experts, Some(&ends))?;
    ///     assert_eq!(y.placements(), [Partial(ReduceOp::Sum)]);
    ///     assert_eq!(y.full_tensor()?.to_vec2::<f32>()?, [[4.0; 3]; 6]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// If sizes do not fit, offsets are missing or not needed, are not integers, descend, or end outside of the dimension.
    #[doc(alias = "_grouped_mm")]
    #[track_caller]
    pub fn grouped_mm(&self, other: &DTensor, offsets: Option<&DTensor>) -> Result<DTensor> {
        let dtype = dtype::promote(self.dtype(), other.dtype());
        if self.dtype() != dtype || other.dtype() != dtype {
            return self.to_dtype(dtype)?.grouped_mm(&other.to_dtype(dtype)?, offsets);
        }
        match (self.ndim(), other.ndim(), offsets) {
            (2, 3, Some(offsets)) => row_groups(self, other, offsets),
            (3, 2, Some(offsets)) => row_groups(&other.t()?, &self.transpose(1, 2)?, offsets)?.t(),
            (2, 2, Some(offsets)) => {
                let groups = offsets.shape().first().copied().unwrap_or(0);
                let whole = vec![Placement::Replicate; self.placements().len()];
                let groups = DTensor::zeros(groups, DType::U8, self.device_mesh(), whole)?;
                summed_groups(&self.t()?, other, offsets, &groups)
            }
            (3, 3, None) => multiply_batches(NAME, self, other),
            _ => {
                let ends = offsets.map_or("none".to_string(), |offsets| offsets.layout().to_string());
                let found = format!("{} and {} with offsets {ends} in {NAME}", self.layout(), other.layout());
                let needed = "matrices or stacks of them, with offsets unless both are stacks";
                Err(ErrorKind::Operands.error("operands", found, needed, "reshape the operands, or add the offsets"))
            }
        }
    }
}

#[track_caller]
fn row_groups(rows: &DTensor, matrices: &DTensor, offsets: &DTensor) -> Result<DTensor> {
    Ok(dispatch(&RowGroups, &[rows, matrices, offsets], Location::caller())?.swap_remove(0))
}

#[track_caller]
fn summed_groups(a: &DTensor, b: &DTensor, offsets: &DTensor, groups: &DTensor) -> Result<DTensor> {
    Ok(dispatch(&SummedGroups, &[a, b, offsets, groups], Location::caller())?.swap_remove(0))
}

/// A vector with an element per matrix, sharded as the matrices are over the axes that shard neither of two other tensors: so that
/// a rank computes only the gradients of its own matrices.
#[track_caller]
fn groups_like(matrices: &DTensor, others: [&DTensor; 2]) -> Result<DTensor> {
    let placement = |axis: usize| {
        let own = &matrices.placements()[axis];
        let idle = others.iter().all(|t| !t.placements()[axis].is_shard(None));
        if idle && own.is_shard(Some(0)) { own.clone() } else { Placement::Replicate }
    };
    let placements: Vec<Placement> = (0..matrices.placements().len()).map(placement).collect();
    let zeros = |placements| DTensor::zeros(matrices.shape()[0], DType::U8, matrices.device_mesh(), placements);
    // Sizes of an uneven shard may belong to the shards of other axes, too.
    zeros(placements.clone()).or_else(|_| zeros(vec![Placement::Replicate; placements.len()]))
}

const ROWS: Option<usize> = Some(0);
/// Dimensions of one operand, and of the other.
const LEFT: Option<usize> = Some(1);
const RIGHT: Option<usize> = Some(2);
const GROUPS: Option<usize> = Some(3);
/// Ends of groups, all of which every rank needs.
const OFFSETS: Option<usize> = Some(4);

const SUM: DimSharding = DimSharding::Reduces(ReduceOp::Sum);

/// A signature that is linear in each of the first two inputs.
fn signature<const N: usize>(
    dims: [DimSharding; 5],
    inputs: [Vec<Option<usize>>; N],
    output: Vec<Option<usize>>,
) -> Signature {
    let mut signature = Signature::new(dims, inputs, [output]);
    for (factor, op) in [0, 1].into_iter().flat_map(|factor| [ReduceOp::Sum, ReduceOp::Avg].map(|op| (factor, op))) {
        signature = signature.allow_partial((0..N).map(|i| (i == factor).then_some(op)), op);
    }
    signature
}

/// Checks shapes and types: `rows`, which the offsets divide, are the same in both operands; so are two other sizes, and the groups.
fn check(inputs: &[TensorMeta], same: [(usize, usize); 2]) -> Result<()> {
    let offsets = &inputs[2];
    if offsets.dtype.is_float() {
        return Err(not_integer(&format!("offsets of {NAME}"), offsets.dtype));
    }
    if offsets.shape.len() != 1 || same.iter().any(|(a, b)| a != b) {
        let shapes: Vec<String> = inputs[..3].iter().map(|t| format!("{:?}", t.shape)).collect();
        return Err(ErrorKind::shape(&inputs[1].shape).error(
            "operands",
            format!("rows, matrices and offsets of shapes {}", shapes.join(", ")),
            "one size of the dimension that is summed over, and an offset per group",
            "reshape the operands",
        ));
    }
    Ok(())
}

/// The rows of every group, from where they end.
fn group_rows(offsets: &Tensor, rows: usize) -> Result<Vec<Range<usize>>> {
    let ends = offsets.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let mut ranges = Vec::with_capacity(ends.len());
    let mut start = 0;
    for &end in &ends {
        let Some(end) = usize::try_from(end).ok().filter(|end| (start..=rows).contains(end)) else {
            let found = format!("{end} after {start} for {rows} rows or columns in {NAME}");
            let needed = format!("ends of groups that do not descend, of at most {rows}");
            return Err(ErrorKind::Index { index: end, size: rows }.error(
                "offsets",
                found,
                needed,
                "correct the offsets",
            ));
        };
        ranges.push(start..end);
        start = end;
    }
    Ok(ranges)
}

/// Where some of the indices that a rank holds are in its local tensor. Those of a range are adjacent, since local indices ascend.
fn positions(held: &Runs, indices: &Range<usize>) -> Range<usize> {
    let below = |end: usize| held.iter().map(|run| run.end.min(end).saturating_sub(run.start)).sum::<usize>();
    below(indices.start)..below(indices.end)
}

/// The dimensions of the product of one group.
const M: Label = Label::letter('m');
const K: Label = Label::letter('k');
const N: Label = Label::letter('n');

/// The product of one group, in the type `dtype` of a result or of its terms.
fn group_product(a: &Tensor, a_term: &[Label], b: &Tensor, b_term: &[Label], dtype: DType) -> Result<Tensor> {
    let halves = a.dtype() == b.dtype() && matches!(a.dtype(), DType::F16 | DType::BF16);
    let (work, result) = match dtype {
        DType::F32 if halves => (a.dtype(), ProductResult::SumsF32),
        // Integers are computed in i64 and wrap at the end, as their partial sums do.
        _ if !dtype.is_float() => (DType::I64, ProductResult::OfFactorType),
        _ => (dtype, ProductResult::OfFactorType),
    };
    let found = product(&a.to_dtype(work)?, a_term, &b.to_dtype(work)?, b_term, &[M, N], result)?;
    Ok(found.to_dtype(dtype)?)
}

impl Op for RowGroups {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (rows, matrices) = (&inputs[0].shape, &inputs[1].shape);
        let groups = inputs[2].shape.first().copied().unwrap_or(0);
        check(inputs, [(rows[1], matrices[1]), (groups, matrices[0])])?;
        let dims = [DimSharding::Free, SUM, DimSharding::Free, SUM, DimSharding::Never];
        let named = [vec![ROWS, LEFT], vec![GROUPS, LEFT, RIGHT], vec![OFFSETS]];
        let output = TensorMeta::new([rows[0], matrices[2]].as_slice(), inputs[0].dtype);
        Ok(OpPlan { signature: signature(dims, named, vec![ROWS, RIGHT]), outputs: vec![output] })
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::InF32FromAnyType
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let [rows, matrices, offsets] = inputs else { unreachable!("three inputs") };
        let groups = group_rows(offsets, context.input_shape(0)[0])?;
        let (shape, dtype) = (context.local_shape(0), context.output_dtype(0));
        let held = context.input_runs(0, 0);
        let zeros = |count: usize| filled(0.0, &TensorMeta::new([count, shape[1]].as_slice(), dtype));
        let mut parts = Vec::new();
        let mut done = 0;
        for (matrix, group) in context.input_runs(1, 0).iter().flatten().enumerate() {
            let own = positions(&held, &groups[group]);
            if own.is_empty() || shape[1] == 0 {
                continue;
            }
            // Rows of groups that other ranks have.
            if done < own.start {
                parts.push(zeros(own.start - done)?);
            }
            done = own.end;
            let own = rows.narrow(0, own.start, own.len())?;
            parts.push(group_product(&own, &[M, K], &matrices.get(matrix)?, &[K, N], dtype)?);
        }
        parts.push(zeros(shape[0] - done)?);
        Ok(vec![concat(&parts, 0)?])
    }

    /// As if all rows were in a group, and as many in each.
    fn flops(&self, inputs: &[&[usize]], outputs: &[&[usize]]) -> u64 {
        2 * (inputs[0].iter().product::<usize>() * outputs[0][1]) as u64
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |_, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None; 3]) };
            let (rows, matrices, offsets) = (saved.input(0), saved.input(1), saved.input(2));
            let of_rows = || row_groups(g, &matrices.transpose(1, 2)?, &offsets);
            let of_matrices = || summed_groups(&rows, g, &offsets, &groups_like(&matrices, [&rows, g])?);
            Ok(vec![
                saved.needs_input_grad(0).then(of_rows).transpose()?,
                saved.needs_input_grad(1).then(of_matrices).transpose()?,
                None,
            ])
        })
    }
}

impl Op for SummedGroups {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (a, b, groups) = (&inputs[0].shape, &inputs[1].shape, inputs[3].shape[0]);
        check(inputs, [(a[0], b[0]), (groups, groups)])?;
        let dims = [SUM, DimSharding::Free, DimSharding::Free, DimSharding::Free, DimSharding::Never];
        let named = [vec![ROWS, LEFT], vec![ROWS, RIGHT], vec![OFFSETS], vec![GROUPS]];
        let output = TensorMeta::new([groups, a[1], b[1]].as_slice(), inputs[0].dtype);
        Ok(OpPlan { signature: signature(dims, named, vec![GROUPS, LEFT, RIGHT]), outputs: vec![output] })
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::InF32FromAnyType
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let [a, b, offsets, _] = inputs else { unreachable!("four inputs") };
        let groups = group_rows(offsets, context.input_shape(0)[0])?;
        let (shape, dtype) = (context.local_shape(0), context.output_dtype(0));
        let held = context.input_runs(0, 0);
        let of_group = |group: usize| {
            let own = positions(&held, &groups[group]);
            if own.is_empty() || shape[1..].contains(&0) {
                return Ok(filled(0.0, &TensorMeta::new([&[1], &shape[1..]].concat(), dtype))?);
            }
            let rows = |t: &Tensor| t.narrow(0, own.start, own.len());
            Ok(group_product(&rows(a)?, &[K, M], &rows(b)?, &[K, N], dtype)?.unsqueeze(0)?)
        };
        let parts = context.output_runs(0, 0).iter().flatten().map(of_group).collect::<Result<Vec<_>>>()?;
        match parts.is_empty() {
            true => Ok(vec![filled(0.0, &TensorMeta::new(shape, dtype))?]),
            false => Ok(vec![concat(&parts, 0)?]),
        }
    }

    fn flops(&self, inputs: &[&[usize]], outputs: &[&[usize]]) -> u64 {
        2 * (inputs[0].iter().product::<usize>() * outputs[0][2]) as u64
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |_, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None; 4]) };
            let (a, b, offsets) = (saved.input(0), saved.input(1), saved.input(2));
            let of_a = || row_groups(&b, &g.transpose(1, 2)?, &offsets);
            let of_b = || row_groups(&a, g, &offsets);
            Ok(vec![
                saved.needs_input_grad(0).then(of_a).transpose()?,
                saved.needs_input_grad(1).then(of_b).transpose()?,
                None,
                None,
            ])
        })
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[OpEntry {
    name: NAME,
    samples: grouped_samples,
    apply: |x| {
        let (a, b) = (x[0].shape(), x[1].shape());
        let (groups, size) = match (a.len(), b.len()) {
            (2, 3) => (b[0], a[0]),
            (3, 2) => (a[0], b[1]),
            (2, 2) => (2, a[1]),
            _ => return Ok(vec![x[0].grouped_mm(&x[1], None)?]),
        };
        // Groups of several sizes, and something after the last one.
        let whole = vec![Placement::Replicate; x[0].placements().len()];
        let end = |at: &[usize]| (size * (at[0] + 1) / (groups + 1)) as f64;
        let offsets = DTensor::from_fn(groups, DType::I64, x[0].device_mesh(), whole, end)?;
        Ok(vec![x[0].grouped_mm(&x[1], Some(&offsets))?])
    },
}];

fn grouped_samples() -> Vec<Vec<SampleInput>> {
    let factors = |a: &[usize], b: &[usize]| vec![SampleInput::new(a, DType::I64), SampleInput::new(b, DType::I64)];
    vec![
        factors(&[7, 3], &[3, 3, 2]),
        factors(&[3, 2, 4], &[4, 6]),
        factors(&[3, 5], &[5, 2]),
        factors(&[2, 2], &[4, 2, 3]),
        factors(&[0, 2], &[2, 2, 3]),
        factors(&[3, 2, 4], &[3, 4, 2]),
    ]
}
