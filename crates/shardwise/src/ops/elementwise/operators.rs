//! The operators `+ - * /` and unary `-` of [`DTensor`]. As in candle they return a [`Result`]. They accept tensors and references,
//! the `Result` of another operator next to a tensor, and numbers on either side.
//!
//! ```
//! use shardwise::prelude::*;
//!
//! launch(2, |world| {
//!     let mesh = world.mesh([("dp", 2)])?;
//!     let x = DTensor::arange(0.0..4.0, DType::F32, &mesh, [Shard(0)])?;
//!     let y = ((&x * 2.0)? + 1)?; // 1, 3, 5, 7
//!     let z = (&y - &x) * &x; // the result of `-` is passed on, error or not
//!     assert_eq!((1.0 - z?)?.full_tensor()?.to_vec1::<f32>()?, [1.0, -1.0, -5.0, -11.0]);
//!     assert_eq!((-y)?.full_tensor()?.to_vec1::<f32>()?, [-1.0, -3.0, -5.0, -7.0]);
//!     Ok(())
//! })?;
//! # Ok::<(), Error>(())
//! ```

use std::borrow::Borrow;
use std::ops::{Add, Div, Mul, Neg, Sub};

use crate::error::{Error, Result};
use crate::tensor::{DTensor, Operand};

/// Implements one operator. Numbers are f64 and i64 only: then a literal has one possible type, and `(x * 2)?` needs no annotation.
macro_rules! operator {
    ($Trait:ident, $method:ident, |$number:ident, $x:ident| $reversed:expr) => {
        operator!(@tensors DTensor, $Trait, $method);
        operator!(@tensors &DTensor, $Trait, $method);
        operator!(@numbers f64, $Trait, $method, |$number, $x| $reversed);
        operator!(@numbers i64, $Trait, $method, |$number, $x| $reversed);
    };
    (@tensors $Left:ty, $Trait:ident, $method:ident) => {
        impl<B: Borrow<DTensor>> $Trait<B> for $Left {
            type Output = Result<DTensor>;

            #[track_caller]
            fn $method(self, other: B) -> Result<DTensor> {
                DTensor::$method(&self, other.borrow())
            }
        }

        impl<B: Borrow<DTensor>> $Trait<Result<B>> for $Left {
            type Output = Result<DTensor>;

            #[track_caller]
            fn $method(self, other: Result<B>) -> Result<DTensor> {
                DTensor::$method(&self, other?.borrow())
            }
        }

        impl<B: Borrow<DTensor>> $Trait<$Left> for Result<B, Error> {
            type Output = Result<DTensor>;

            #[track_caller]
            fn $method(self, other: $Left) -> Result<DTensor> {
                let other: &DTensor = other.borrow();
                DTensor::$method(self?.borrow(), other)
            }
        }
    };
    (@numbers $N:ty, $Trait:ident, $method:ident, |$number:ident, $x:ident| $reversed:expr) => {
        operator!(@number DTensor, $N, $Trait, $method, |$number, $x| $reversed);
        operator!(@number &DTensor, $N, $Trait, $method, |$number, $x| $reversed);
    };
    (@number $Tensor:ty, $N:ty, $Trait:ident, $method:ident, |$number:ident, $x:ident| $reversed:expr) => {
        impl $Trait<$N> for $Tensor {
            type Output = Result<DTensor>;

            #[track_caller]
            fn $method(self, number: $N) -> Result<DTensor> {
                DTensor::$method(&self, number)
            }
        }

        impl $Trait<$Tensor> for $N {
            type Output = Result<DTensor>;

            #[track_caller]
            fn $method(self, tensor: $Tensor) -> Result<DTensor> {
                let ($number, $x): ($N, &DTensor) = (self, tensor.borrow());
                $reversed
            }
        }
    };
}

operator!(Add, add, |number, x| x.add(number));
operator!(Sub, sub, |number, x| x.rsub_scalar(number));
operator!(Mul, mul, |number, x| x.mul(number));
operator!(Div, div, |number, x| DTensor::div(&*Operand::from(number).tensor(x)?, x));

impl Neg for &DTensor {
    type Output = Result<DTensor>;

    #[track_caller]
    fn neg(self) -> Result<DTensor> {
        DTensor::neg(self)
    }
}

impl Neg for DTensor {
    type Output = Result<DTensor>;

    #[track_caller]
    fn neg(self) -> Result<DTensor> {
        DTensor::neg(&self)
    }
}
