//! Products composed of other operators: sums over chosen dimensions, cross products, products with an addend.

use candle_core::DType;

use crate::error::{ErrorKind, Result};
use crate::ops::{OpEntry, SampleInput};
use crate::tensor::DTensor;

impl DTensor {
    /// Multiplies two tensors and sums over pairs of dimensions, `dims` of this one and `other_dims` of the other.
    ///
    /// PyTorch's `dims=n` is the last `n` of this tensor and the first `n` of the other. Communicates as [`einsum`](Self::einsum) does.
    ///
    /// # Errors
    /// If the lists differ in length, or the sizes of a pair differ.
    #[track_caller]
    pub fn tensordot(&self, other: &DTensor, dims: &[isize], other_dims: &[isize]) -> Result<DTensor> {
        const NAME: &str = "tensordot";
        // One letter per dimension; a tensor has far fewer dimensions than the alphabet letters.
        let fits = self.ndim() + other.ndim() <= 26;
        if dims.len() != other_dims.len() || !fits {
            let found = format!("{dims:?} and {other_dims:?} in {NAME} of {} and {}", self.layout(), other.layout());
            let needed = "as many dimensions of one tensor as of the other";
            return Err(ErrorKind::Argument.error("dimensions", found, needed, "list pairs of dimensions"));
        }
        let letter = |i: usize| char::from(b'a' + i as u8);
        let left: Vec<char> = (0..self.ndim()).map(letter).collect();
        let mut right: Vec<char> = (0..other.ndim()).map(|i| letter(self.ndim() + i)).collect();
        let mut summed = Vec::new();
        for (&i, &j) in dims.iter().zip(other_dims) {
            let name = left[self.resolve_dim(NAME, i)?];
            right[other.resolve_dim(NAME, j)?] = name;
            summed.push(name);
        }
        let kept: String = left.iter().chain(&right).filter(|c| !summed.contains(c)).collect();
        let [left, right] = [left, right].map(|letters| letters.into_iter().collect::<String>());
        DTensor::einsum(&format!("{left},{right}->{kept}"), &[self, other])
    }

    /// Returns the inner products of the vectors along the last dimensions of two tensors; a scalar multiplies all elements.
    ///
    /// Communicates as [`einsum`](Self::einsum) does.
    #[track_caller]
    pub fn inner(&self, other: &DTensor) -> Result<DTensor> {
        match self.ndim() == 0 || other.ndim() == 0 {
            true => self.mul(other),
            false => self.tensordot(other, &[-1], &[-1]),
        }
    }

    /// Returns the cross products of the vectors of three elements along a dimension, by default the first of size 3.
    ///
    /// If the dimension is sharded, its elements are exchanged.
    #[track_caller]
    pub fn cross(&self, other: &DTensor, dim: Option<isize>) -> Result<DTensor> {
        let both = DTensor::broadcast_tensors(&[self, other])?;
        let first = || both[0].shape().iter().position(|&n| n == 3).unwrap_or(0) as isize;
        both[0].linalg_cross(&both[1], dim.unwrap_or_else(first))
    }

    /// Returns `beta * self + alpha * (matrix @ vector)`.
    ///
    /// Communicates as [`mv`](Self::mv) and [`add`](Self::add) do.
    #[track_caller]
    pub fn addmv(&self, matrix: &DTensor, vector: &DTensor, beta: f64, alpha: f64) -> Result<DTensor> {
        self.scaled_sum(&matrix.mv(vector)?, beta, alpha)
    }

    /// Returns `beta * self + alpha` times the sum of the products of a batch of matrices.
    ///
    /// Communicates as [`bmm`](Self::bmm) and [`add`](Self::add) do; a sharded batch gives partial sums.
    #[track_caller]
    pub fn addbmm(&self, a: &DTensor, b: &DTensor, beta: f64, alpha: f64) -> Result<DTensor> {
        let products = a.bmm(b)?;
        // A sum of small integers is i64, a product of matrices is not.
        self.scaled_sum(&products.sum(&[0], false)?.to_dtype(products.dtype())?, beta, alpha)
    }

    /// Returns `beta * self + alpha` times the outer product of two vectors.
    ///
    /// Communicates as [`outer`](Self::outer) and [`add`](Self::add) do.
    #[track_caller]
    pub fn addr(&self, a: &DTensor, b: &DTensor, beta: f64, alpha: f64) -> Result<DTensor> {
        self.scaled_sum(&a.outer(b)?, beta, alpha)
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "tensordot",
        samples: || floats(&[&[&[4, 3, 2], &[2, 3, 5]], &[&[3, 2], &[2, 3]]]),
        apply: |x| {
            let first = x[0].ndim() as isize - 2;
            Ok(vec![x[0].tensordot(&x[1], &[first, -1], &[1, 0])?, x[0].tensordot(&x[1], &[-1], &[0])?])
        },
    },
    OpEntry {
        name: "inner",
        samples: || floats(&[&[&[4, 3], &[2, 3]], &[&[], &[2, 3]], &[&[3], &[3]]]),
        apply: |x| Ok(vec![x[0].inner(&x[1])?]),
    },
    OpEntry {
        name: "cross",
        samples: || floats(&[&[&[4, 3], &[4, 3]], &[&[3, 2], &[3, 1]]]),
        apply: |x| Ok(vec![x[0].cross(&x[1], None)?]),
    },
    OpEntry {
        name: "addmv",
        samples: || floats(&[&[&[4], &[4, 3], &[3]]]),
        apply: |x| Ok(vec![x[0].addmv(&x[1], &x[2], 0.5, 2.0)?]),
    },
    OpEntry {
        name: "addbmm",
        samples: || floats(&[&[&[3, 2], &[4, 3, 5], &[4, 5, 2]]]),
        apply: |x| Ok(vec![x[0].addbmm(&x[1], &x[2], 0.5, 2.0)?]),
    },
    OpEntry {
        name: "addr",
        samples: || floats(&[&[&[4, 3], &[4], &[3]]]),
        apply: |x| Ok(vec![x[0].addr(&x[1], &x[2], 0.5, 2.0)?, x[0].addr(&x[1], &x[2], 0.0, 1.0)?]),
    },
];

fn floats(samples: &[&[&[usize]]]) -> Vec<Vec<SampleInput>> {
    let one = |shapes: &&[&[usize]]| shapes.iter().map(|shape| SampleInput::new(shape, DType::F64)).collect();
    samples.iter().map(one).collect()
}
