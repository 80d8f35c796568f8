//! Activations and elementwise functions composed of other operators: shrinkage, thresholds, gated units.

use candle_core::DType;

use crate::error::{ErrorKind, Result};
use crate::ops::elementwise::unary::samples;
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::random::Distribution;
use crate::tensor::{DTensor, Operand};

/// The constants of `selu`, with which activations keep mean 0 and variance 1.
const SELU_ALPHA: f64 = 1.673_263_242_354_377_2;
const SELU_SCALE: f64 = 1.050_700_987_355_480_5;

impl DTensor {
    /// Clamps each element from `min` to `max`; the gradient at the bounds is 0, unlike that of [`clamp`](Self::clamp).
    ///
    /// Elementwise: keeps the layout and the type, and communicates only to reduce a partial tensor. Integers have no gradient, and
    /// bounds between two of them are rounded towards zero, as in PyTorch.
    #[track_caller]
    pub fn hardtanh(&self, min: f64, max: f64) -> Result<DTensor> {
        let x = self.without_partials("hardtanh", &[])?;
        if !self.dtype().is_float() {
            return x.clamp(Some(min.trunc()), Some(max.trunc()))?.to_dtype(self.dtype());
        }
        let below = x.le(min)?.where_cond(min, &x)?;
        x.ge(max)?.where_cond(max, &below)
    }

    /// Clamps each element from 0 to 6, see [`hardtanh`](Self::hardtanh).
    #[track_caller]
    pub fn relu6(&self) -> Result<DTensor> {
        self.hardtanh(0.0, 6.0)
    }

    /// Applies the hard sigmoid, `clamp(x + 3, 0, 6) / 6`.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn hardsigmoid(&self) -> Result<DTensor> {
        let clamped = self.add_scalar(3.0)?.hardtanh(0.0, 6.0)?;
        let value = clamped.detach().div_scalar(6.0)?;
        // PyTorch's slope is a sixth in f32, whatever the type.
        clamped.mul_scalar(f64::from(1.0f32 / 6.0))?.straight_through(&value)
    }

    /// Applies the scaled exponential linear unit.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn selu(&self) -> Result<DTensor> {
        self.elu(SELU_ALPHA)?.mul_scalar(SELU_SCALE)
    }

    /// Applies the continuously differentiable exponential linear unit, `alpha * (exp(x / alpha) - 1)` for negative elements.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn celu(&self, alpha: f64) -> Result<DTensor> {
        let x = self.without_partials("celu", &[])?;
        let below = x.clamp(None, Some(0.0))?;
        let value = below.detach().div_scalar(alpha)?.expm1()?.mul_scalar(alpha)?;
        // PyTorch's slope divides by alpha in f32, whatever the type.
        let rounded = f64::from(alpha as f32);
        let slope = below.div_scalar(rounded)?.expm1()?.mul_scalar(alpha)?;
        x.gt(0.0)?.where_cond(&x, &slope.straight_through(&value)?)
    }

    /// Returns `x - tanh(x)` of each element.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn tanhshrink(&self) -> Result<DTensor> {
        self.sub(&self.tanh()?)
    }

    /// Replaces elements from `-lambda` to `lambda` by 0.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn hardshrink(&self, lambda: f64) -> Result<DTensor> {
        let x = self.without_partials("hardshrink", &[])?;
        x.abs()?.le(lambda)?.where_cond(0.0, &x)
    }

    /// Moves every element towards 0 by `lambda`, and those closer to 0 than that to 0.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn softshrink(&self, lambda: f64) -> Result<DTensor> {
        let x = self.without_partials("softshrink", &[])?;
        let moved = x.gt(0.0)?.where_cond(&x.add_scalar(-lambda)?, &x.add_scalar(lambda)?)?;
        x.abs()?.le(lambda)?.where_cond(&x.mul_scalar(0.0)?, &moved)
    }

    /// Replaces elements that are not above `threshold` by `value`.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn threshold(&self, threshold: f64, value: f64) -> Result<DTensor> {
        let x = self.without_partials("threshold", &[])?;
        x.le(threshold)?.where_cond(value, &x)
    }

    /// Multiplies negative elements by a slope drawn between `lower` and `upper` in training, and by their mean otherwise.
    ///
    /// In training the slopes depend on seed and position, not on the layout; ranks compare the states of their generators.
    #[track_caller]
    pub fn rrelu(&self, lower: f64, upper: f64, training: bool) -> Result<DTensor> {
        if !training || self.elem_count() == 0 {
            return self.leaky_relu(0.5 * (lower + upper));
        }
        let x = self.without_partials("rrelu", &[])?;
        let slopes = x.random_like(Distribution::Uniform { low: lower, high: upper })?;
        x.ge(0.0)?.where_cond(&x, &x.mul(&slopes)?)
    }

    /// Multiplies negative elements by a learned slope: one for all, or one per channel (dimension 1).
    ///
    /// # Errors
    /// If the weight is neither one number nor one per channel.
    #[track_caller]
    pub fn prelu(&self, weight: &DTensor) -> Result<DTensor> {
        let channels = match self.ndim() {
            0 | 1 => 1,
            _ => self.shape()[1],
        };
        let slopes = match weight.elem_count() {
            1 => weight.reshape(&[])?,
            n if n == channels && weight.ndim() == 1 => {
                weight.reshape(&[vec![-1], vec![1; self.ndim() - 2]].concat())?
            }
            _ => {
                let found = format!("a weight {} in prelu of {}", weight.layout(), self.layout());
                let needed = format!("one number or {channels}, the number of channels");
                return Err(ErrorKind::shape(weight.shape()).error("weight", found, needed, "reshape the weight"));
            }
        };
        let x = self.without_partials("prelu", &[])?;
        x.gt(0.0)?.where_cond(&x, &x.mul(&slopes)?)
    }

    /// Applies the gated linear unit: the first half of a dimension times the sigmoid of the second half.
    ///
    /// Communicates as [`narrow`](Self::narrow) and [`mul`](Self::mul) do: if the dimension is sharded, one half moves.
    ///
    /// # Errors
    /// If the size of the dimension is odd.
    #[track_caller]
    pub fn glu(&self, dim: isize) -> Result<DTensor> {
        let at = self.resolve_dim("glu", dim)?;
        let n = self.shape()[at];
        if !n.is_multiple_of(2) {
            return Err(self.bad_dims("glu", &[dim], "a dimension of even size"));
        }
        let x = self.without_partials("glu", &[dim])?;
        x.narrow(dim, 0, n / 2)?.mul(&x.narrow(dim, n / 2, n / 2)?.sigmoid()?)
    }

    /// Applies the softmax to the negative elements along a dimension; communicates as [`softmax`](Self::softmax) does.
    #[track_caller]
    pub fn softmin(&self, dim: isize) -> Result<DTensor> {
        self.neg()?.softmax(dim)
    }

    /// Returns `log(x / (1 - x))` of each element, clamped from `eps` to `1 - eps` first if `eps` is given.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn logit(&self, eps: Option<f64>) -> Result<DTensor> {
        let x = self.to_dtype(dtype::real(self.dtype()))?.without_partials("logit", &[])?;
        let x = match eps {
            Some(eps) if eps <= 0.5 => x.clamp(Some(eps), Some(1.0 - eps))?,
            // Bounds in the wrong order: as PyTorch, which compares with the lower one first. No element is between them.
            Some(eps) => {
                let bound = |at: f64| x.clamp(Some(at), Some(at));
                x.lt(eps)?.where_cond(&bound(eps)?, &bound(1.0 - eps)?)?
            }
            None => x,
        };
        let x = match eps {
            Some(_) => x,
            // The slope outside of 0 to 1 is NaN, as the value is; the logarithm by itself would give a number.
            None => {
                let outside = x.detach().lt(0.0)?.logical_or(&x.detach().gt(1.0)?)?;
                x.add(&outside.where_cond(f64::NAN, 0.0)?.to_dtype(x.dtype())?)?
            }
        };
        x.div(&x.rsub_scalar(1.0)?)?.log()
    }

    /// Rounds each element to a number of decimal places; a negative number rounds to tens, hundreds, ...
    ///
    /// PyTorch's `round(decimals=)`. Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[doc(alias = "round")]
    #[track_caller]
    pub fn round_decimals(&self, decimals: i32) -> Result<DTensor> {
        if decimals == 0 || !self.dtype().is_float() {
            return self.round();
        }
        let power = 10f64.powi(decimals.abs());
        match decimals > 0 {
            true => self.mul_scalar(power)?.round()?.div_scalar(power),
            false => self.div_scalar(power)?.round()?.mul_scalar(power),
        }
    }

    /// Splits each element into a fraction from 0.5 to 1 and an exponent (i32): `x = fraction * 2^exponent`.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn frexp(&self) -> Result<(DTensor, DTensor)> {
        let x = self.without_partials("frexp", &[])?;
        let exponent = x.detach().frexp_exponent()?;
        // In two steps: the power of the largest and the smallest numbers is beyond the type.
        let half = exponent.mul_scalar(-0.5)?.floor()?;
        let rest = exponent.add(&half)?.neg()?;
        Ok((x.mul(&half.exp2()?)?.mul(&rest.exp2()?)?, exponent.to_dtype(DType::I32)?))
    }

    /// Multiplies by 2 to the power `other`. Elementwise, with broadcasting.
    #[track_caller]
    pub fn ldexp(&self, other: &DTensor) -> Result<DTensor> {
        self.mul(&other.exp2()?)
    }

    /// Raises to a power in f64, whatever the types. Elementwise, with broadcasting.
    #[track_caller]
    pub fn float_power<'a>(&self, exponent: impl Into<Operand<'a>>) -> Result<DTensor> {
        let base = self.to_dtype(DType::F64)?;
        match exponent.into() {
            Operand::Tensor(exponent) => base.pow(&exponent.to_dtype(DType::F64)?),
            Operand::Number(exponent) => base.pow_scalar(exponent.to_f64()),
        }
    }

    /// Returns 1 (u8) where `|self - other| <= atol + rtol * |other|`, where both are the same infinity, and where both are NaN if
    /// `equal_nan`. Elementwise, with broadcasting.
    #[track_caller]
    pub fn isclose(&self, other: &DTensor, rtol: f64, atol: f64, equal_nan: bool) -> Result<DTensor> {
        let exact = self.eq(other)?;
        let real = |x: &DTensor| if x.dtype().is_float() { Ok(x.clone()) } else { x.to_dtype(DType::F64) };
        let (a, b) = (real(self)?, real(other)?);
        let distance = a.sub(&b)?.abs()?;
        let allowed = b.abs()?.mul_scalar(rtol)?.add_scalar(atol)?;
        let near = distance.le(&allowed)?.logical_and(&distance.isfinite()?)?.logical_or(&exact)?;
        if !equal_nan {
            return Ok(near);
        }
        near.logical_or(&a.isnan()?.logical_and(&b.isnan()?)?)
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "hardtanh", samples, apply: |x| Ok(vec![x[0].hardtanh(-0.5, 0.5)?]) },
    OpEntry { name: "relu6", samples, apply: |x| Ok(vec![x[0].relu6()?]) },
    OpEntry { name: "hardsigmoid", samples, apply: |x| Ok(vec![x[0].hardsigmoid()?]) },
    OpEntry { name: "selu", samples, apply: |x| Ok(vec![x[0].selu()?]) },
    OpEntry { name: "celu", samples, apply: |x| Ok(vec![x[0].celu(0.5)?]) },
    OpEntry { name: "tanhshrink", samples, apply: |x| Ok(vec![x[0].tanhshrink()?]) },
    OpEntry { name: "hardshrink", samples, apply: |x| Ok(vec![x[0].hardshrink(0.5)?]) },
    OpEntry { name: "softshrink", samples, apply: |x| Ok(vec![x[0].softshrink(0.5)?]) },
    OpEntry { name: "threshold", samples, apply: |x| Ok(vec![x[0].threshold(0.5, -1.0)?]) },
    OpEntry {
        name: "rrelu",
        samples: reals,
        apply: |x| {
            // the same draw every time, so that runs can be compared
            x[0].device_mesh().manual_seed(7);
            Ok(vec![x[0].rrelu(0.1, 0.3, true)?, x[0].rrelu(0.1, 0.3, false)?])
        },
    },
    OpEntry { name: "prelu", samples: channels, apply: |x| Ok(vec![x[0].prelu(&x[1])?]) },
    OpEntry { name: "glu", samples: halves, apply: |x| Ok(vec![x[0].glu(0)?, x[0].glu(-1)?]) },
    OpEntry { name: "softmin", samples: halves, apply: |x| Ok(vec![x[0].softmin(0)?, x[0].softmin(-1)?]) },
    OpEntry { name: "logit", samples, apply: |x| Ok(vec![x[0].logit(Some(0.1))?]) },
    OpEntry { name: "round_decimals", samples, apply: |x| Ok(vec![x[0].round_decimals(1)?, x[0].round_decimals(-1)?]) },
    OpEntry {
        name: "frexp",
        samples: reals,
        apply: |x| {
            let (fraction, exponent) = x[0].frexp()?;
            Ok(vec![fraction, exponent])
        },
    },
    OpEntry { name: "ldexp", samples: pairs, apply: |x| Ok(vec![x[0].ldexp(&x[1])?]) },
    OpEntry {
        name: "float_power",
        samples: pairs,
        apply: |x| Ok(vec![x[0].float_power(&x[1])?, x[0].float_power(2.0)?]),
    },
    OpEntry { name: "isclose", samples: pairs, apply: |x| Ok(vec![x[0].isclose(&x[1], 0.5, 0.5, true)?]) },
];

fn reals() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[5, 3], &[1, 8], &[0, 2]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect()
}

fn halves() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 2] = [&[4, 6], &[2, 3, 8]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect()
}

fn channels() -> Vec<Vec<SampleInput>> {
    let shapes: [(&[usize], &[usize]); 3] = [(&[3, 4, 2], &[4]), (&[5, 4], &[1]), (&[6], &[1])];
    shapes
        .iter()
        .map(|(x, weight)| vec![SampleInput::new(x, DType::F64), SampleInput::new(weight, DType::F64)])
        .collect()
}

fn pairs() -> Vec<Vec<SampleInput>> {
    let shapes: [(&[usize], &[usize]); 3] = [(&[5, 3], &[5, 3]), (&[4], &[2, 1]), (&[0, 2], &[2])];
    shapes.iter().map(|(a, b)| vec![SampleInput::new(a, DType::F64), SampleInput::new(b, DType::F64)]).collect()
}
