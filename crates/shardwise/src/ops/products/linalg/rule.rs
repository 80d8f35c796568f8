//! Shapes and sharding of operators on matrices: leading dimensions are a batch, which broadcasts and may be sharded, and every matrix
//! is computed by one rank.

use candle_core::DType;

use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::with_autocast;
use crate::ops::arguments::broadcast::broadcast_shape;
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, is_recording};

/// The shape of a tensor of matrices.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrices<'a> {
    pub(super) batch: &'a [usize],
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// The dimensions of one item of a batch in a [`Signature`]: held whole by a rank, or independent of each other like the right-hand
/// sides of a system.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum ItemDim {
    Whole,
    Free,
}

pub(super) use ItemDim::{Free, Whole};

/// The batch dimensions of a tensor and the dimensions of an item.
pub(super) type BatchDims<'a> = (&'a [usize], &'a [ItemDim]);

/// The product of matrices in their own types, inside of `autocast` too: a part of an operator that PyTorch does not compose of products.
#[track_caller]
pub(super) fn full_product(a: &DTensor, b: &DTensor) -> Result<DTensor> {
    with_autocast(None, || a.matmul(b))
}

/// Reads a shape as that of matrices of f32 or f64.
pub(super) fn matrices<'a>(name: &str, of: &'a TensorMeta) -> Result<Matrices<'a>> {
    check_real(name, of.dtype)?;
    let [batch @ .., rows, columns] = of.shape.as_slice() else {
        let found = format!("shape {:?} in {name}", of.shape);
        return Err(ErrorKind::shape(&of.shape).error(
            "matrices",
            found,
            "at least two dimensions",
            "reshape the tensor, or unsqueeze a vector",
        ));
    };
    Ok(Matrices { batch, rows: *rows, columns: *columns })
}

/// Reads a shape as that of square matrices of f32 or f64.
pub(super) fn square<'a>(name: &str, of: &'a TensorMeta) -> Result<Matrices<'a>> {
    let found = matrices(name, of)?;
    if found.rows == found.columns {
        return Ok(found);
    }
    let text = format!("{} by {} matrices in {name}", found.rows, found.columns);
    Err(ErrorKind::shape(&of.shape).error(
        "matrices",
        text,
        "square matrices",
        "pass matrices with as many rows as columns",
    ))
}

/// Fails unless a type is f32 or f64.
pub(super) fn check_real(name: &str, dtype: DType) -> Result<()> {
    if matches!(dtype, DType::F32 | DType::F64) {
        return Ok(());
    }
    let found = format!("{} in {name}", dtype.as_str());
    Err(ErrorKind::dtype(dtype).error("matrices", found, "f32 or f64", "convert the matrices first"))
}

/// Fails unless two operands have the same type.
pub(super) fn check_same_type(name: &str, inputs: &[&TensorMeta]) -> Result<()> {
    let types: Vec<&str> = inputs.iter().map(|m| m.dtype.as_str()).collect();
    if inputs.iter().all(|m| m.dtype == inputs[0].dtype) {
        return Ok(());
    }
    let found = format!("{} in {name}", types.join(" and "));
    Err(ErrorKind::dtype(inputs[0].dtype).error("operands", found, "one type", "convert one of the operands first"))
}

/// An error about sizes that do not fit.
pub(super) fn misfit(name: &str, inputs: &[&TensorMeta], needed: &str) -> crate::error::Error {
    let shapes: Vec<&[usize]> = inputs.iter().map(|m| m.shape.as_slice()).collect();
    let found = format!("shapes {shapes:?} in {name}");
    ErrorKind::shape(&inputs[0].shape).error("operands", found, needed, "reshape or transpose the operands")
}

/// The batch dimensions that the batch dimensions of the operands broadcast to.
pub(super) fn broadcast_batch(name: &str, inputs: &[&TensorMeta], batches: &[&[usize]]) -> Result<Vec<usize>> {
    let needed = "batch dimensions that are equal or 1, counted from the last";
    broadcast_shape(batches).map(|b| b.into_vec()).ok_or_else(|| misfit(name, inputs, needed))
}

/// The signature of an operator that works on every item of a batch by itself. Each tensor is given by its own batch dimensions, which
/// broadcast to `batch`, and by the dimensions of an item; [`Free`] ones are one dimension of the operator.
pub(super) fn signature(batch: &[usize], inputs: &[BatchDims<'_>], outputs: &[BatchDims<'_>]) -> Signature {
    let free = batch.len();
    let dims = |&(own, item): &BatchDims<'_>| {
        let missing = batch.len() - own.len();
        let of_batch = own.iter().enumerate().map(|(d, &n)| (n == batch[d + missing]).then_some(d + missing));
        of_batch.chain(item.iter().map(|dim| (*dim == Free).then_some(free))).collect::<Vec<_>>()
    };
    let sharding = vec![DimSharding::Free; batch.len() + 1];
    Signature::new(sharding, inputs.iter().map(dims), outputs.iter().map(dims))
}

/// The shape and type of a result.
pub(super) fn meta(batch: &[usize], item: &[usize], dtype: DType) -> TensorMeta {
    TensorMeta { shape: [batch, item].concat(), dtype }
}

/// Fails if a matrix of this rank could not be factorized: if its `info` is not 0.
pub(super) fn check_info(name: &str, info: &candle_core::Tensor, needed: &str) -> Result<()> {
    let failed = shardwise_kernels::to_f64_vec(info)?;
    let Some((at, step)) = failed.iter().enumerate().find(|(_, step)| **step != 0.0) else { return Ok(()) };
    let found = format!("matrix {at} of this rank's batch in {name} fails at row {step}");
    Err(ErrorKind::Argument.error(
        "matrices",
        found,
        needed,
        "change the matrices, or use the operator that returns info",
    ))
}

/// The verdict on matrices that an operator moves before it factorizes them: it communicates anyway, so all ranks learn of a failure.
impl DTensor {
    /// Whether an operator on whole matrices moves these.
    pub(super) fn moves_matrices(&self) -> bool {
        let dims = self.ndim().saturating_sub(2)..self.ndim();
        self.layout().is_partial() || dims.into_iter().any(|dim| !self.layout().shard_order(dim).is_empty())
    }

    /// Fails on every rank if the `info` of a matrix, which this tensor holds, is not 0. Collective if batch dimensions are sharded.
    #[track_caller]
    pub(super) fn check_info_of_all(&self, name: &str, needed: &str) -> Result<()> {
        let (world, mesh) = (self.device_mesh().world(), self.device_mesh());
        if self.elem_count() == 0 || world.is_dry() || !mesh.contains(world.rank()) {
            return Ok(());
        }
        let worst = self.detach().to_dtype(DType::I64)?.amax(&[], false)?.item::<i64>()?;
        if worst == 0 {
            return Ok(());
        }
        let found = format!("a matrix of the batch in {name} fails at row {worst}");
        Err(ErrorKind::Argument.error(
            "matrices",
            found,
            needed.to_string(),
            "change the matrices, or use the operator that returns info",
        ))
    }
}

/// Conveniences of the gradients, which are formulas of matrices.
impl DTensor {
    /// The transpose of the last two dimensions.
    #[track_caller]
    pub(super) fn mt(&self) -> Result<DTensor> {
        self.transpose(-2, -1)
    }

    /// The identity matrix in the type of this tensor, replicated.
    #[track_caller]
    pub(super) fn identity(&self, n: usize) -> Result<DTensor> {
        let placements = vec![crate::placement::Placement::Replicate; self.placements().len()];
        DTensor::eye((n, n), self.dtype(), self.device_mesh(), placements)
    }

    /// Diagonal matrices with the vectors of the last dimension.
    #[track_caller]
    pub(super) fn diagonal_matrices(&self) -> Result<DTensor> {
        let n = self.shape()[self.ndim() - 1];
        self.unsqueeze(-1)?.mul(&self.identity(n)?)
    }

    /// Scales the rows of matrices by the numbers of a vector.
    #[track_caller]
    pub(super) fn scale_rows(&self, by: &DTensor) -> Result<DTensor> {
        self.mul(&by.unsqueeze(-1)?)
    }

    /// Scales the columns of matrices by the numbers of a vector.
    #[track_caller]
    pub(super) fn scale_columns(&self, by: &DTensor) -> Result<DTensor> {
        self.mul(&by.unsqueeze(-2)?)
    }
}

/// Adds what there is of two gradients.
#[track_caller]
pub(super) fn sum(a: Option<DTensor>, b: Option<DTensor>) -> Result<Option<DTensor>> {
    match (a, b) {
        (Some(a), Some(b)) => a.add(&b).map(Some),
        (a, b) => Ok(a.or(b)),
    }
}

/// The outputs of an operator as an array.
pub(super) fn outputs<const N: usize>(found: Vec<DTensor>) -> [DTensor; N] {
    found.try_into().unwrap_or_else(|_| unreachable!("as many as the plan says"))
}

/// Fails unless a tensor holds `steps` pivots per matrix.
pub(super) fn check_pivots(name: &str, pivots: &TensorMeta, steps: usize) -> Result<()> {
    if pivots.dtype != DType::I32 {
        let found = format!("pivots of type {} in {name}", pivots.dtype.as_str());
        return Err(ErrorKind::dtype(pivots.dtype).error(
            "pivots",
            found,
            "i32",
            "pass the pivots of the factorization",
        ));
    }
    if pivots.shape.last() == Some(&steps) {
        return Ok(());
    }
    let found = format!("pivots of shape {:?} in {name}", pivots.shape);
    let needed = format!("{steps} pivots per matrix");
    Err(ErrorKind::shape(&pivots.shape).error("pivots", found, needed, "pass the pivots of the factorization"))
}

/// Refuses a recorded backward pass, for gradients that are kernels of their own or use results without a derivative.
pub(super) fn refuse_second(name: &str) -> Result<()> {
    if !is_recording() {
        return Ok(());
    }
    let found = format!("the gradient of the gradient of {name}");
    let needed = "a first derivative";
    Err(ErrorKind::Gradient.error("gradient", found, needed, "use backward, or operators with second derivatives"))
}
