//! Norms of vectors and matrices, and condition numbers.

use candle_core::DType;

use super::factor::{dominant, matrix_samples, square_samples};
use super::spectral::spread;
use crate::error::{ErrorKind, Result};
use crate::ops::{OpEntry, SampleInput};
use crate::tensor::DTensor;

/// Which norm of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum MatrixNorm {
    /// The root of the sum of the squares: PyTorch's `"fro"`.
    #[default]
    Frobenius,
    /// The sum of the singular values: PyTorch's `"nuc"`.
    Nuclear,
    /// 1, -1: the largest or smallest sum of a column. Infinity, negative infinity: of a row. 2, -2: the largest or smallest
    /// singular value.
    Order(f64),
}

impl DTensor {
    /// Returns the norm of order `ord` of the vectors along some dimensions, or of all elements if `dims` is empty: the root of order
    /// `ord` of the sum of the powers, the largest or smallest magnitude if it is infinite, or the number of elements that are not
    /// zero if it is 0.
    ///
    /// If a dimension is sharded, ranks exchange sums; nothing is gathered. The gradient is 0 where an element or the norm is 0, as in
    /// PyTorch.
    #[doc(alias = "linalg.vector_norm")]
    #[track_caller]
    pub fn linalg_vector_norm(&self, ord: f64, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        check_float("linalg_vector_norm", self)?;
        // The one dimension that PyTorch lets a scalar have.
        let dims = if self.ndim() == 0 && matches!(dims, [0 | -1]) { &[] } else { dims };
        if matches!(self.dtype(), DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.linalg_vector_norm(ord, dims, keepdim)?.to_dtype(self.dtype());
        }
        if ord == 0.0 || ord == 1.0 || ord == 2.0 || ord.is_infinite() {
            return self.norm(ord, dims, keepdim);
        }
        // Powers of zeros have no derivative below order 1: they are constants, next to ones whose powers do.
        let size = self.abs()?;
        let empty = size.detach().eq(0.0)?;
        let power = size.masked_fill(&empty, 1.0)?.pow_scalar(ord)?;
        let power = power.masked_fill(&empty, if ord > 0.0 { 0.0 } else { f64::INFINITY })?;
        let sum = power.sum(dims, keepdim)?;
        let none = sum.detach().eq(0.0)?;
        sum.masked_fill(&none, 1.0)?.pow_scalar(1.0 / ord)?.masked_fill(&none, 0.0)
    }

    /// Returns the norms of the matrices in two dimensions, rows and columns.
    ///
    /// Sums are exchanged where dimensions are sharded; for norms of singular values, matrices are gathered.
    #[doc(alias = "linalg.matrix_norm")]
    #[track_caller]
    pub fn linalg_matrix_norm(&self, ord: MatrixNorm, dims: [isize; 2], keepdim: bool) -> Result<DTensor> {
        const NAME: &str = "linalg_matrix_norm";
        check_float(NAME, self)?;
        if self.ndim() < 2 {
            return Err(self.bad_dims(NAME, &dims, "a tensor of at least two dimensions"));
        }
        let [rows, columns] = [self.resolve_dim(NAME, dims[0])?, self.resolve_dim(NAME, dims[1])?];
        if rows == columns {
            return Err(self.bad_dims(NAME, &dims, "two different dimensions"));
        }
        let [row_dim, column_dim] = [rows as isize, columns as isize];
        let largest_sum = |summed: isize, over: isize, largest: bool| {
            let sums = self.abs()?.sum(&[summed], true)?;
            let found = if largest { sums.amax(&[over], true)? } else { sums.amin(&[over], true)? };
            found.to_dtype(self.dtype())
        };
        let with_dims = match ord {
            MatrixNorm::Frobenius => return self.linalg_vector_norm(2.0, &[row_dim, column_dim], keepdim),
            MatrixNorm::Order(f64::INFINITY) => largest_sum(column_dim, row_dim, true)?,
            MatrixNorm::Order(f64::NEG_INFINITY) => largest_sum(column_dim, row_dim, false)?,
            MatrixNorm::Order(1.0) => largest_sum(row_dim, column_dim, true)?,
            MatrixNorm::Order(-1.0) => largest_sum(row_dim, column_dim, false)?,
            MatrixNorm::Nuclear | MatrixNorm::Order(2.0 | -2.0) => {
                let others = (0..self.ndim()).filter(|&d| d != rows && d != columns);
                let order: Vec<isize> = others.chain([rows, columns]).map(|d| d as isize).collect();
                let values = self.permute(&order)?.linalg_svdvals()?;
                let found = match ord {
                    MatrixNorm::Nuclear => values.sum(&[-1], false)?,
                    MatrixNorm::Order(2.0) => values.amax(&[-1], false)?,
                    _ => values.amin(&[-1], false)?,
                };
                let first = rows.min(columns) as isize;
                found.unsqueeze(first)?.unsqueeze(rows.max(columns) as isize)?
            }
            MatrixNorm::Order(other) => {
                let found = format!("order {other} in {NAME}");
                let needed = "1, -1, 2, -2 or an infinity, the Frobenius or the nuclear norm";
                return Err(ErrorKind::Argument.error(
                    "order",
                    found,
                    needed,
                    "use another order, or linalg_vector_norm",
                ));
            }
        };
        if keepdim {
            return Ok(with_dims);
        }
        with_dims.squeeze(Some(rows.max(columns) as isize))?.squeeze(Some(rows.min(columns) as isize))
    }

    /// Returns a norm as PyTorch's `linalg.norm` chooses it. Without `ord`, the 2-norm of all elements, or of the vectors along `dims`.
    /// With it, of the vectors along one dimension or the matrices in two; without `dims`, of the whole tensor, which then has one or
    /// two dimensions.
    ///
    /// Communicates as [`linalg_vector_norm`](Self::linalg_vector_norm) and [`linalg_matrix_norm`](Self::linalg_matrix_norm) do.
    #[doc(alias = "linalg.norm")]
    #[track_caller]
    pub fn linalg_norm(&self, ord: Option<MatrixNorm>, dims: Option<&[isize]>, keepdim: bool) -> Result<DTensor> {
        const NAME: &str = "linalg_norm";
        check_float(NAME, self)?;
        let Some(ord) = ord else { return self.linalg_vector_norm(2.0, dims.unwrap_or(&[]), keepdim) };
        let all = [-2, -1];
        match (dims, ord) {
            (Some([dim]), MatrixNorm::Order(ord)) => self.linalg_vector_norm(ord, &[*dim], keepdim),
            (Some([rows, columns]), ord) => self.linalg_matrix_norm(ord, [*rows, *columns], keepdim),
            (None, MatrixNorm::Order(ord)) if self.ndim() == 1 => self.linalg_vector_norm(ord, &[], keepdim),
            (None, ord) if self.ndim() == 2 => self.linalg_matrix_norm(ord, all, keepdim),
            (None, _) => Err(self.bad_dims(NAME, &[], "one or two dimensions if an order and no dimensions are given")),
            (Some(dims), _) => Err(self.bad_dims(NAME, dims, "one dimension, or two for a norm of matrices")),
        }
    }

    /// Returns the condition numbers of matrices with respect to a norm; `None` is that of singular values, which takes matrices of any
    /// shape.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    #[doc(alias = "linalg.cond")]
    #[track_caller]
    pub fn linalg_cond(&self, ord: Option<MatrixNorm>) -> Result<DTensor> {
        if self.ndim() < 2 {
            return Err(self.bad_dims("linalg_cond", &[], "at least two dimensions"));
        }
        let ord = ord.unwrap_or(MatrixNorm::Order(2.0));
        if let MatrixNorm::Order(2.0 | -2.0) = ord {
            let values = self.linalg_svdvals()?;
            let (most, least) = (values.select(-1, 0)?, values.select(-1, -1)?);
            return if ord == MatrixNorm::Order(2.0) { most.div(&least) } else { least.div(&most) };
        }
        let (inverse, info) = self.linalg_inv_ex()?;
        let product =
            self.linalg_matrix_norm(ord, [-2, -1], false)?.mul(&inverse.linalg_matrix_norm(ord, [-2, -1], false)?)?;
        // The inverse of a singular matrix is not one.
        product.masked_fill(&info.ne(0)?, f64::INFINITY)
    }
}

/// Fails unless a tensor is of a floating-point type.
fn check_float(name: &str, x: &DTensor) -> Result<()> {
    if x.dtype().is_float() {
        return Ok(());
    }
    let found = format!("{} in {name} of {}", x.dtype().as_str(), x.layout());
    Err(ErrorKind::dtype(x.dtype()).error("tensor", found, "a floating-point type", "convert it with to_dtype first"))
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "linalg_vector_norm",
        samples: real_samples,
        apply: |x| {
            let orders = [2.0, 1.0, 0.5, 3.0, -1.0, f64::INFINITY, f64::NEG_INFINITY];
            let mut all = vec![x[0].linalg_vector_norm(2.0, &[], true)?, x[0].linalg_vector_norm(0.0, &[0], false)?];
            for ord in orders {
                all.push(x[0].linalg_vector_norm(ord, &[-1], false)?);
            }
            Ok(all)
        },
    },
    OpEntry {
        name: "linalg_matrix_norm",
        samples: real_samples,
        apply: |x| {
            let mut all = vec![x[0].linalg_matrix_norm(MatrixNorm::Frobenius, [-2, -1], true)?];
            // Without equal sums, at which maxima have no derivative.
            let a = spread(&dominant(&x[0])?)?;
            for ord in [1.0, -1.0, f64::INFINITY, f64::NEG_INFINITY] {
                all.push(a.linalg_matrix_norm(MatrixNorm::Order(ord), [-1, -2], false)?);
            }
            for ord in [MatrixNorm::Nuclear, MatrixNorm::Order(2.0), MatrixNorm::Order(-2.0)] {
                all.push(a.linalg_matrix_norm(ord, [-2, -1], false)?);
            }
            Ok(all)
        },
    },
    OpEntry {
        name: "linalg_norm",
        samples: real_samples,
        apply: |x| {
            let ord = Some(MatrixNorm::Order(1.0));
            Ok(vec![
                x[0].linalg_norm(None, None, false)?,
                x[0].linalg_norm(ord, Some(&[0]), true)?,
                x[0].linalg_norm(ord, Some(&[0, -1]), false)?,
            ])
        },
    },
    OpEntry {
        name: "linalg_cond",
        samples: square_samples,
        apply: |x| {
            let a = dominant(&x[0])?;
            Ok(vec![a.linalg_cond(None)?, a.linalg_cond(Some(MatrixNorm::Order(1.0)))?])
        },
    },
];

/// Matrices with elements, of which a maximum exists.
fn real_samples() -> Vec<Vec<SampleInput>> {
    let mut all = matrix_samples();
    all.pop();
    all
}
