//! Products of matrices and vectors, powers, exponentials, and products of reflections.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::factor::square_samples;
use super::rule::{
    BatchDims, Whole, check_same_type, full_product, matrices, meta, misfit, outputs, refuse_second, signature, square,
};
use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::placement::Placement;
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::linalg;

impl DTensor {
    /// Multiplies matrices in the order with the fewest multiplications; the first may be a row and the last a column vector.
    ///
    /// Communicates as [`matmul`](Self::matmul) does for each product.
    ///
    /// # Errors
    /// If there are fewer than two tensors, or sizes do not fit.
    #[doc(alias = "linalg.multi_dot")]
    #[doc(alias = "chain_matmul")]
    #[track_caller]
    pub fn linalg_multi_dot(tensors: &[&DTensor]) -> Result<DTensor> {
        let [first, inner @ .., last] = tensors else {
            let found = format!("{} tensors in linalg_multi_dot", tensors.len());
            return Err(ErrorKind::Operands.error("operands", found, "at least two tensors", "pass the factors"));
        };
        let vector_or_matrix = |x: &DTensor| matches!(x.ndim(), 1 | 2);
        if let Some(bad) = inner.iter().find(|x| x.ndim() != 2) {
            return Err(bad.bad_dims("linalg_multi_dot", &[], "matrices, between the first and the last tensor"));
        }
        if let Some(bad) = [first, last].into_iter().find(|x| !vector_or_matrix(x)) {
            return Err(bad.bad_dims("linalg_multi_dot", &[], "a vector or a matrix"));
        }
        // One letter per size between two factors. Beyond the letters, the order is from left to right.
        let letters: Vec<char> = ('a'..='z').chain('A'..='Z').collect();
        if tensors.len() >= letters.len() {
            return inner.iter().chain([last]).try_fold((*first).clone(), |product, x| product.matmul(x));
        }
        let term = |i: usize, x: &DTensor| match x.ndim() {
            1 if i == 0 => letters[1].to_string(),
            1 => letters[i].to_string(),
            _ => [letters[i], letters[i + 1]].iter().collect(),
        };
        let terms: Vec<String> = tensors.iter().enumerate().map(|(i, x)| term(i, x)).collect();
        let rows = if first.ndim() == 2 { letters[0].to_string() } else { String::new() };
        let columns = if last.ndim() == 2 { letters[tensors.len()].to_string() } else { String::new() };
        for (i, pair) in tensors.windows(2).enumerate() {
            if pair[0].shape()[pair[0].ndim() - 1] != pair[1].shape()[0] {
                let needed = format!("as many columns in factor {i} as rows in the next, {:?}", pair[1].shape());
                return Err(pair[0].bad_dims("linalg_multi_dot", &[], &needed));
            }
        }
        DTensor::einsum(&format!("{}->{rows}{columns}", terms.join(",")), tensors)
    }

    /// Raises square matrices to an integer power; a negative one is that of the inverse.
    ///
    /// Communicates as [`matmul`](Self::matmul) does for each product, and as [`linalg_inv`](Self::linalg_inv) for negative powers.
    #[doc(alias = "linalg.matrix_power")]
    #[track_caller]
    pub fn linalg_matrix_power(&self, n: i64) -> Result<DTensor> {
        let size = match *self.shape() {
            [.., rows, columns] if rows == columns => rows,
            _ => return Err(self.bad_dims("linalg_matrix_power", &[], "square matrices")),
        };
        if n == 0 {
            return self.zeros_like()?.add(&self.identity(size)?);
        }
        let mut square = if n < 0 { self.linalg_inv()? } else { self.clone() };
        let (mut left, mut product) = (n.unsigned_abs(), None);
        loop {
            if left & 1 == 1 {
                product = Some(product.map_or(Ok(square.clone()), |product: DTensor| product.matmul(&square))?);
            }
            left >>= 1;
            match product {
                Some(product) if left == 0 => return Ok(product),
                _ => square = square.matmul(&square)?,
            }
        }
    }

    /// Returns the dot products of the vectors along a dimension of two tensors that broadcast.
    ///
    /// If the dimension is sharded in both, the result is `Partial(Sum)`; nothing is gathered.
    #[doc(alias = "linalg.vecdot")]
    #[track_caller]
    pub fn linalg_vecdot(&self, other: &DTensor, dim: isize) -> Result<DTensor> {
        let product = self.mul(other)?;
        product.sum(&[dim], false)?.to_dtype(dtype::promote(self.dtype(), other.dtype()))
    }

    /// Returns the cross products of the vectors of three elements along a dimension of two tensors that broadcast.
    ///
    /// If the dimension is sharded, its elements are exchanged.
    #[doc(alias = "linalg.cross")]
    #[track_caller]
    pub fn linalg_cross(&self, other: &DTensor, dim: isize) -> Result<DTensor> {
        const NAME: &str = "linalg_cross";
        for x in [self, other] {
            let at = x.resolve_dim(NAME, dim)?;
            if x.shape()[at] != 3 || self.ndim() != other.ndim() {
                let needed = "tensors of the same number of dimensions, with 3 elements along the dimension";
                return Err(x.bad_dims(NAME, &[dim], needed));
            }
        }
        let turned = |x: &DTensor, by: isize| x.roll(&[-by], &[dim]);
        let positive = turned(self, 1)?.mul(&turned(other, 2)?)?;
        positive.sub(&turned(self, 2)?.mul(&turned(other, 1)?)?)
    }

    /// Returns the powers 0 to `n - 1` of every element in a new last dimension; `None` is the size of the last dimension.
    ///
    /// Elementwise: communicates nothing. Integers give i64.
    #[doc(alias = "linalg.vander")]
    #[track_caller]
    pub fn linalg_vander(&self, n: Option<usize>) -> Result<DTensor> {
        let x = if self.ndim() == 0 { self.unsqueeze(0)? } else { self.clone() };
        let x = if x.dtype().is_float() { x } else { x.to_dtype(DType::I64)? };
        let n = n.unwrap_or(x.shape()[x.ndim() - 1]);
        if n < 2 {
            let found = format!("{n} columns in linalg_vander of {}", self.layout());
            return Err(ErrorKind::Argument.error("columns", found, "at least 2", "ask for more powers"));
        }
        let placements = vec![Placement::Replicate; x.placements().len()];
        let exponents = DTensor::arange(0.0..n as f64, x.dtype(), x.device_mesh(), placements)?;
        x.unsqueeze(-1)?.pow(&exponents)
    }

    /// Returns the first columns, as many as this tensor has, of the product of Householder reflections, whose vectors are below the
    /// diagonal of this tensor and whose factors are `tau`.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    #[doc(alias = "linalg.householder_product")]
    #[doc(alias = "orgqr")]
    #[track_caller]
    pub fn linalg_householder_product(&self, tau: &DTensor) -> Result<DTensor> {
        Ok(dispatch(&HouseholderProduct, &[self, tau], Location::caller())?.swap_remove(0))
    }

    /// Multiplies `other` by the orthogonal matrix `Q` of the reflections in this tensor and `tau`, or by `Q^T` if `transpose`; from the left
    /// or, unless `left`, from the right.
    ///
    /// Batch dimensions may be sharded; `Q` is gathered.
    #[track_caller]
    pub fn ormqr(&self, tau: &DTensor, other: &DTensor, left: bool, transpose: bool) -> Result<DTensor> {
        let [.., rows, columns] = *self.shape() else {
            return Err(self.bad_dims("ormqr", &[], "at least two dimensions"));
        };
        let square = if columns < rows {
            let mut shape = self.shape().to_vec();
            shape[self.ndim() - 1] = rows - columns;
            let placements = vec![Placement::Replicate; self.placements().len()];
            let zeros = DTensor::zeros(shape, self.dtype(), self.device_mesh(), placements)?;
            DTensor::cat(&[self, &zeros], -1)?
        } else {
            self.narrow(-1, 0, rows)?
        };
        let q = square.linalg_householder_product(tau)?;
        let q = if transpose { q.mt()? } else { q };
        if left { full_product(&q, other) } else { full_product(other, &q) }
    }

    /// Returns the exponentials of square matrices.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    #[doc(alias = "linalg.matrix_exp")]
    #[track_caller]
    pub fn matrix_exp(&self) -> Result<DTensor> {
        if matches!(self.dtype(), DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.matrix_exp()?.to_dtype(self.dtype());
        }
        Ok(dispatch(&MatrixExp, &[self], Location::caller())?.swap_remove(0))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct MatrixExp;

impl Op for MatrixExp {
    fn name(&self) -> &'static str {
        "matrix_exp"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = square(self.name(), &inputs[0])?;
        let whole: (&[usize], &[_]) = (a.batch, &[Whole, Whole]);
        Ok(OpPlan { signature: signature(a.batch, &[whole], &[whole]), outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![linalg::matrix_exp(&inputs[0])?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |_, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None]) };
            // The upper right block of the exponential of [[A^T, G], [0, A^T]] is the derivative in direction G.
            let at = saved.input(0).mt()?;
            let n = at.shape()[at.ndim() - 1];
            let above = DTensor::cat(&[&at, g], -1)?;
            let below = DTensor::cat(&[&at.zeros_like()?, &at], -1)?;
            let whole = DTensor::cat(&[&above, &below], -2)?.matrix_exp()?;
            Ok(vec![Some(whole.narrow(-2, 0, n)?.narrow(-1, n, n)?)])
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct HouseholderProduct;

/// Checks reflections and their factors; returns the batch dimensions.
fn reflections<'a>(name: &str, inputs: &'a [TensorMeta]) -> Result<&'a [usize]> {
    let a = matrices(name, &inputs[0])?;
    check_same_type(name, &[&inputs[0], &inputs[1]])?;
    let fits = match inputs[1].shape.as_slice() {
        [batch @ .., count] => batch == a.batch && *count <= a.columns,
        [] => false,
    };
    if a.rows >= a.columns && fits {
        return Ok(a.batch);
    }
    let needed = "at least as many rows as columns, and in the same batch at most as many factors as columns";
    Err(misfit(name, &[&inputs[0], &inputs[1]], needed))
}

impl Op for HouseholderProduct {
    fn name(&self) -> &'static str {
        "linalg_householder_product"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let batch = reflections(self.name(), inputs)?;
        let whole: (&[usize], &[_]) = (batch, &[Whole, Whole]);
        Ok(OpPlan {
            signature: signature(batch, &[whole, (batch, &[Whole])], &[whole]),
            outputs: vec![inputs[0].clone()],
        })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![linalg::householder_product(&inputs[0], &inputs[1])?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None, None]) };
            refuse_second(op.name())?;
            let inputs = [&saved.input(0), &saved.input(1), g];
            let [of_a, of_tau] = outputs(dispatch(&HouseholderBackward, &inputs, Location::caller())?);
            Ok(vec![Some(of_a), Some(of_tau)])
        })
    }
}

/// Backward pass of [`HouseholderProduct`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct HouseholderBackward;

impl Op for HouseholderBackward {
    fn name(&self) -> &'static str {
        "linalg_householder_product"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let batch = reflections(self.name(), inputs)?;
        let (whole, factors): (BatchDims<'_>, BatchDims<'_>) = ((batch, &[Whole, Whole]), (batch, &[Whole]));
        let signature = signature(batch, &[whole, factors, whole], &[whole, factors]);
        let count = inputs[1].shape[inputs[1].shape.len() - 1];
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone(), meta(batch, &[count], inputs[1].dtype)] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (of_a, of_tau) = linalg::householder_product_backward(&inputs[0], &inputs[1], &inputs[2])?;
        Ok(vec![of_a, of_tau])
    }

    /// Refused before it is called in a recorded pass.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "linalg_multi_dot",
        samples: || {
            let shapes: [[&[usize]; 3]; 3] =
                [[&[3, 4], &[4, 2], &[2, 5]], [&[4], &[4, 3], &[3]], [&[2, 0], &[0, 3], &[3, 2]]];
            let input = |shape: &&[usize]| SampleInput::new(shape, DType::F64);
            shapes.iter().map(|all| all.iter().map(input).collect()).collect()
        },
        apply: |x| Ok(vec![DTensor::linalg_multi_dot(&x.iter().collect::<Vec<_>>())?]),
    },
    OpEntry {
        name: "linalg_matrix_power",
        samples: square_samples,
        apply: |x| {
            let a = x[0].mul_scalar(1.0 / 32.0)?;
            let inverse = super::factor::dominant(&x[0])?.linalg_matrix_power(-2)?;
            Ok(vec![a.linalg_matrix_power(0)?, a.linalg_matrix_power(5)?, inverse])
        },
    },
    OpEntry { name: "linalg_vecdot", samples: vector_samples, apply: |x| Ok(vec![x[0].linalg_vecdot(&x[1], -1)?]) },
    OpEntry { name: "linalg_cross", samples: vector_samples, apply: |x| Ok(vec![x[0].linalg_cross(&x[1], -1)?]) },
    OpEntry {
        name: "linalg_vander",
        samples: || {
            let shapes: [&[usize]; 3] = [&[3], &[2, 3], &[0]];
            shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect()
        },
        apply: |x| Ok(vec![x[0].linalg_vander(Some(3))?]),
    },
    OpEntry {
        name: "linalg_householder_product",
        samples: reflection_samples,
        apply: |x| Ok(vec![small(&x[0])?.linalg_householder_product(&small(&x[1])?)?]),
    },
    OpEntry {
        name: "ormqr",
        samples: reflection_samples,
        apply: |x| {
            let (a, tau) = (small(&x[0])?, small(&x[1])?);
            let other = a.transpose(-2, -1)?;
            Ok(vec![a.ormqr(&tau, &a, true, false)?, a.ormqr(&tau, &other, false, true)?])
        },
    },
    OpEntry { name: "matrix_exp", samples: square_samples, apply: |x| Ok(vec![small(&x[0])?.matrix_exp()?]) },
];

fn small(x: &DTensor) -> Result<DTensor> {
    x.mul_scalar(1.0 / 32.0)
}

fn vector_samples() -> Vec<Vec<SampleInput>> {
    let shapes: [(&[usize], &[usize]); 3] = [(&[4, 3], &[4, 3]), (&[1, 3], &[5, 3]), (&[0, 3], &[1, 3])];
    shapes.iter().map(|(a, b)| vec![SampleInput::new(a, DType::F64), SampleInput::new(b, DType::F64)]).collect()
}

fn reflection_samples() -> Vec<Vec<SampleInput>> {
    let shapes: [(&[usize], &[usize]); 3] = [(&[3, 4, 2], &[3, 2]), (&[5, 3], &[2]), (&[2, 2], &[0])];
    shapes.iter().map(|(a, b)| vec![SampleInput::new(a, DType::F64), SampleInput::new(b, DType::F64)]).collect()
}
