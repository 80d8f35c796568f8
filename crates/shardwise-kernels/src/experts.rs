//! Mixtures of experts: every row of a matrix goes through the gated MLPs of the few experts that were chosen for it.

use std::ops::AddAssign;

use candle_core::{DType, Tensor, WithDType};

use crate::error::Result;
use crate::quantized::{BlockType, quantized_matmul};
use crate::{Assembly, TensorMeta, batched_matmul, filled, index_select};

/// An activation function and its derivative.
#[derive(Debug, Clone, Copy)]
pub struct ExpertActivation {
    /// The function.
    pub value: fn(f64) -> f64,
    /// Its derivative.
    pub slope: fn(f64) -> f64,
}

/// The operands of a mixture of experts on one rank.
///
/// For [`expert_mlp`] stacks may be quantized: u8 `[experts, rows, blocks, bytes of a block]`, of f32 rows.
pub struct ExpertRows<'a> {
    /// Rows `[rows, features]`.
    pub x: &'a Tensor,
    /// The experts of every row, `[rows, chosen]`, as i64.
    pub chosen: &'a Tensor,
    /// Their weights in the result, `[rows, chosen]`, in the type of `x`.
    pub weights: &'a Tensor,
    /// Gates `[experts, hidden, features]`.
    pub gate: &'a Tensor,
    /// Up-projections `[experts, hidden, features]`.
    pub up: &'a Tensor,
    /// Down-projections `[experts, features, hidden]`.
    pub down: &'a Tensor,
    /// Types of the blocks of the three stacks, if they are quantized.
    pub blocks: Option<[BlockType; 3]>,
    /// The numbers of the experts that these tensors hold.
    pub experts: &'a [usize],
    /// The activation of the gate.
    pub activation: ExpertActivation,
}

/// Gradients of [`ExpertRows`].
pub struct ExpertGradients {
    /// Of the rows.
    pub x: Tensor,
    /// Of the weights in the result.
    pub weights: Tensor,
    /// Of the gates.
    pub gate: Tensor,
    /// Of the up-projections.
    pub up: Tensor,
    /// Of the down-projections.
    pub down: Tensor,
}

/// The rows that one expert computes: positions in `chosen`, and the rows themselves.
struct OwnRows {
    positions: Vec<usize>,
    rows: Vec<usize>,
}

/// The products inside one expert, `[rows, hidden]`.
struct Inner {
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    product: Tensor,
}

impl ExpertRows<'_> {
    /// The rows of every local expert.
    fn own_rows(&self) -> Result<Vec<OwnRows>> {
        let (count, chosen) = (self.chosen.dims()[1], self.chosen.flatten_all()?.to_vec1::<i64>()?);
        let of_expert = |expert: &usize| {
            let here = |(_, id): &(usize, &i64)| usize::try_from(**id) == Ok(*expert);
            let positions: Vec<usize> = chosen.iter().enumerate().filter(here).map(|(at, _)| at).collect();
            OwnRows { rows: positions.iter().map(|at| at / count).collect(), positions }
        };
        Ok(self.experts.iter().map(of_expert).collect())
    }

    fn is_empty(&self) -> bool {
        self.gate.elem_count() == 0 || self.x.elem_count() == 0
    }

    fn inner(&self, expert: usize, own: &OwnRows) -> Result<Inner> {
        let x = select(self.x, &own.rows)?;
        let gate = times_transposed(&x, &self.gate.get(expert)?, self.blocks.map(|[gate, ..]| gate))?;
        let up = times_transposed(&x, &self.up.get(expert)?, self.blocks.map(|[_, up, _]| up))?;
        let value = self.activation.value;
        let product = combined(&[&gate, &up], |v| value(v[0]) * v[1])?;
        Ok(Inner { x, gate, up, product })
    }

    /// The weight of every row of an expert, as a column.
    fn column(&self, own: &OwnRows) -> Result<Tensor> {
        Ok(select(&self.weights.flatten_all()?, &own.positions)?.unsqueeze(1)?)
    }
}

/// The weighted sum over the experts of every row, of the experts that this rank holds: `[rows, features]` in type `dtype`.
///
/// Computes each expert on its own rows alone.
///
/// # Errors
/// If memory does not suffice, or quantized stacks do not fit the rows.
pub fn expert_mlp(operands: &ExpertRows<'_>, dtype: DType) -> Result<Tensor> {
    let zeros = TensorMeta { shape: operands.x.dims().to_vec(), dtype };
    if operands.is_empty() {
        return filled(0.0, &zeros);
    }
    let mut sum = RowSum::new(operands.x, dtype)?;
    for (expert, own) in operands.own_rows()?.iter().enumerate().filter(|(_, own)| !own.rows.is_empty()) {
        let inner = operands.inner(expert, own)?;
        let found =
            times_transposed(&inner.product, &operands.down.get(expert)?, operands.blocks.map(|[.., down]| down))?;
        sum.add(&scaled(&found, &operands.column(own)?)?, &own.rows)?;
    }
    sum.finish()
}

/// The gradients of [`expert_mlp`] for the gradient `g` of its result; sums over what this rank holds.
///
/// # Errors
/// If memory does not suffice.
pub fn expert_mlp_backward(operands: &ExpertRows<'_>, g: &Tensor) -> Result<ExpertGradients> {
    let dtype = operands.x.dtype();
    let zeros = |like: &Tensor| filled(0.0, &TensorMeta { shape: like.dims().to_vec(), dtype: like.dtype() });
    if operands.is_empty() {
        return Ok(ExpertGradients {
            x: zeros(operands.x)?,
            weights: zeros(operands.weights)?,
            gate: zeros(operands.gate)?,
            up: zeros(operands.up)?,
            down: zeros(operands.down)?,
        });
    }
    let ExpertActivation { value, slope } = operands.activation;
    let mut of_x = RowSum::new(operands.x, dtype)?;
    let mut of_weights = RowSum::new(&operands.weights.flatten_all()?.unsqueeze(1)?, dtype)?;
    let assembly = |like: &Tensor| Assembly::new(TensorMeta { shape: like.dims().to_vec(), dtype: like.dtype() });
    let matrices = [assembly(operands.gate)?, assembly(operands.up)?, assembly(operands.down)?];
    for (expert, own) in operands.own_rows()?.iter().enumerate() {
        let gradients = if own.rows.is_empty() {
            let one = |stack: &Tensor| zeros(&stack.narrow(0, expert, 1)?);
            [one(operands.gate)?, one(operands.up)?, one(operands.down)?]
        } else {
            let Inner { x, gate, up, product } = operands.inner(expert, own)?;
            let (g, column) = (select(g, &own.rows)?, operands.column(own)?);
            let found = batched_matmul(&product, &operands.down.get(expert)?.t()?, 0, 1)?;
            of_weights.add(&row_sums(&combined(&[&g, &found], |v| v[0] * v[1])?)?, &own.positions)?;
            let g = scaled(&g, &column)?;
            let of_product = batched_matmul(&g, &operands.down.get(expert)?, 0, 1)?;
            let of_up = combined(&[&of_product, &gate], |v| v[0] * value(v[1]))?;
            let of_gate = combined(&[&of_product, &up, &gate], |v| v[0] * v[1] * slope(v[2]))?;
            let through_gate = batched_matmul(&of_gate, &operands.gate.get(expert)?, 0, 1)?;
            let through_up = batched_matmul(&of_up, &operands.up.get(expert)?, 0, 1)?;
            of_x.add(&through_gate, &own.rows)?;
            of_x.add(&through_up, &own.rows)?;
            [
                batched_matmul(&of_gate.t()?, &x, 0, 1)?.unsqueeze(0)?,
                batched_matmul(&of_up.t()?, &x, 0, 1)?.unsqueeze(0)?,
                batched_matmul(&g.t()?, &product, 0, 1)?.unsqueeze(0)?,
            ]
        };
        for (all, own) in matrices.iter().zip(&gradients) {
            // SAFETY: one thread; every expert has its own slice, of the type of the stack.
            unsafe { all.paste(own, &[expert, 0, 0]) };
        }
    }
    // SAFETY: every expert has been written.
    let [gate, up, down] = matrices.map(|all| unsafe { all.finish() });
    let weights = of_weights.finish()?.reshape(operands.weights.shape())?;
    Ok(ExpertGradients { x: of_x.finish()?, weights, gate, up, down })
}

/// Rows times the transpose of a matrix, which may consist of quantized blocks.
fn times_transposed(rows: &Tensor, matrix: &Tensor, block: Option<BlockType>) -> Result<Tensor> {
    match block {
        Some(block) => quantized_matmul(&rows.reshape((rows.dims()[0], (), block.elements()))?, matrix, block),
        None => batched_matmul(rows, &matrix.t()?, 0, 1),
    }
}

/// Rows of a tensor, in this order.
fn select(tensor: &Tensor, rows: &[usize]) -> Result<Tensor> {
    index_select(tensor, 0, rows)
}

/// Every row times the element of a column.
fn scaled(rows: &Tensor, column: &Tensor) -> Result<Tensor> {
    Ok(rows.broadcast_mul(column)?)
}

/// The sum of every row, as a column.
fn row_sums(rows: &Tensor) -> Result<Tensor> {
    let wide = if rows.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    Ok(rows.to_dtype(wide)?.sum_keepdim(1)?)
}

/// An elementwise function of tensors of one shape and type.
fn combined(tensors: &[&Tensor], function: impl Fn(&[f64]) -> f64) -> Result<Tensor> {
    fn of<T: WithDType>(tensors: &[&Tensor], function: impl Fn(&[f64]) -> f64) -> Result<Tensor> {
        let all = tensors.iter().map(|t| t.flatten_all()?.to_vec1::<T>()).collect::<candle_core::Result<Vec<_>>>()?;
        let mut values = vec![0.0; all.len()];
        let element = |i: usize| {
            values.iter_mut().zip(&all).for_each(|(value, elements)| *value = elements[i].to_f64());
            T::from_f64(function(&values))
        };
        let elements: Vec<T> = (0..all[0].len()).map(element).collect();
        Ok(Tensor::from_vec(elements, tensors[0].shape(), tensors[0].device())?)
    }
    match tensors[0].dtype() {
        DType::F64 => of::<f64>(tensors, function),
        DType::F32 => of::<f32>(tensors, function),
        dtype => {
            let wide = tensors.iter().map(|t| t.to_dtype(DType::F32)).collect::<candle_core::Result<Vec<_>>>()?;
            Ok(of::<f32>(&wide.iter().collect::<Vec<_>>(), function)?.to_dtype(dtype)?)
        }
    }
}

/// A matrix to whose rows other rows are added, in f32 or f64.
struct RowSum {
    sum: RowSums,
    shape: Vec<usize>,
    dtype: DType,
}

enum RowSums {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl RowSum {
    /// Zeros in the shape of `like`, which becomes a tensor of type `dtype`.
    fn new(like: &Tensor, dtype: DType) -> Result<Self> {
        let count = like.elem_count();
        let sum = match like.dtype() {
            DType::F64 => RowSums::F64(vec![0.0; count]),
            _ => RowSums::F32(vec![0.0; count]),
        };
        Ok(RowSum { sum, shape: like.dims().to_vec(), dtype })
    }

    /// Adds the rows of a matrix to these rows.
    fn add(&mut self, found: &Tensor, rows: &[usize]) -> Result<()> {
        let width = self.shape[1];
        match &mut self.sum {
            RowSums::F32(sum) => add_rows(sum, &found.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?, rows, width),
            RowSums::F64(sum) => add_rows(sum, &found.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?, rows, width),
        }
        Ok(())
    }

    fn finish(self) -> Result<Tensor> {
        let device = candle_core::Device::Cpu;
        let sum = match self.sum {
            RowSums::F32(sum) => Tensor::from_vec(sum, self.shape.as_slice(), &device)?,
            RowSums::F64(sum) => Tensor::from_vec(sum, self.shape.as_slice(), &device)?,
        };
        Ok(sum.to_dtype(self.dtype)?)
    }
}

fn add_rows<T: Copy + AddAssign>(sum: &mut [T], found: &[T], rows: &[usize], width: usize) {
    for (new, &row) in found.chunks_exact(width).zip(rows) {
        sum[row * width..(row + 1) * width].iter_mut().zip(new).for_each(|(sum, new)| *sum += *new);
    }
}
