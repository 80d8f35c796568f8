//! Complex numbers as pairs of real ones: [`ComplexTensor`].

use std::fmt;

use candle_core::{DType, Tensor};

use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// A distributed tensor of complex numbers.
///
/// Real and imaginary parts are the last dimension, of size 2 and never sharded, of a real tensor: [`view_as_real`](Self::view_as_real)
/// returns it, and [`DTensor::view_as_complex`] takes it. Shape and placements are those of the complex numbers, without that dimension.
/// Operators communicate as those on real tensors do, both parts together.
///
/// The gradient of a real result is `dL/d(real) + i dL/d(imaginary)`, as in PyTorch: a leaf is a real tensor, whose gradient has both parts
/// in its last dimension.
///
/// ```
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let pairs = DTensor::arange(0.0..8.0, DType::F64, &mesh, [Shard(0)])?.reshape(&[4, 2])?.requires_grad();
///     let z = pairs.view_as_complex()?; // 0+1i, 2+3i, 4+5i, 6+7i
///     assert_eq!((z.shape(), z.placements()), ([4].as_slice(), [Shard(0)].as_slice()));
///     let product = (&z * &z.conj()?)?;
///     assert_eq!(product.real()?.full_tensor()?.to_vec1::<f64>()?, [1.0, 13.0, 41.0, 85.0]);
///     let gradients = z.abs()?.square()?.sum_all()?.backward()?;
///     let expected = pairs.detach().mul_scalar(2.0)?;
///     assert!(gradients.get(&pairs)?.allclose(&expected, 1e-12, 0.0)?);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
#[doc(alias = "complex64")]
#[doc(alias = "complex128")]
pub struct ComplexTensor {
    /// `[..., 2]`; no mesh axis shards the last dimension.
    parts: DTensor,
}

impl DTensor {
    /// Reads the last dimension, of size 2, as the real and imaginary parts of complex numbers.
    ///
    /// Local and without a copy, unless that dimension is sharded: then it is redistributed, which is collective.
    ///
    /// # Errors
    /// If the last dimension does not have two elements, or the type is not a floating-point type.
    #[track_caller]
    pub fn view_as_complex(&self) -> Result<ComplexTensor> {
        if self.shape().last() != Some(&2) || !self.dtype().is_float() || self.dtype() == DType::F8E4M3 {
            return Err(ErrorKind::shape(self.shape()).error(
                "parts of complex numbers",
                format!("{} {}", self.dtype().as_str(), self.layout()),
                "a tensor [..., 2] of a floating-point type with arithmetic",
                "stack real and imaginary parts along a last dimension, or convert the tensor",
            ));
        }
        let last = self.ndim() - 1;
        let whole = |p: &Placement| if p.shard_dim() == Some(last) { Placement::Replicate } else { p.clone() };
        match self.placements().iter().any(|p| p.shard_dim() == Some(last)) {
            false => Ok(ComplexTensor { parts: self.clone() }),
            true => {
                let placements: Vec<Placement> = self.placements().iter().map(whole).collect();
                Ok(ComplexTensor { parts: self.redistribute(placements)? })
            }
        }
    }
}

impl ComplexTensor {
    /// Creates complex numbers from their real and imaginary parts, which broadcast.
    #[doc(alias = "torch.complex")]
    #[track_caller]
    pub fn new(real: &DTensor, imag: &DTensor) -> Result<Self> {
        let parts = DTensor::broadcast_tensors(&[real, imag])?;
        DTensor::stack(&[&parts[0], &parts[1]], -1)?.view_as_complex()
    }

    /// Creates complex numbers from their absolute values and angles.
    #[doc(alias = "torch.polar")]
    #[track_caller]
    pub fn polar(abs: &DTensor, angle: &DTensor) -> Result<Self> {
        ComplexTensor::new(&abs.mul(&angle.cos()?)?, &abs.mul(&angle.sin()?)?)
    }

    /// Returns the real tensor with real and imaginary parts in its last dimension. Local, no copy.
    pub fn view_as_real(&self) -> &DTensor {
        &self.parts
    }

    /// Shape, without the dimension of the parts.
    pub fn shape(&self) -> &[usize] {
        &self.parts.shape()[..self.parts.ndim() - 1]
    }

    /// Number of dimensions, without that of the parts.
    pub fn ndim(&self) -> usize {
        self.parts.ndim() - 1
    }

    /// Element type of the real and of the imaginary parts: f32 for PyTorch's `complex64`.
    pub fn dtype(&self) -> DType {
        self.parts.dtype()
    }

    /// Placements, one per mesh axis.
    pub fn placements(&self) -> &[Placement] {
        self.parts.placements()
    }

    /// The mesh of the tensor.
    pub fn device_mesh(&self) -> &DeviceMesh {
        self.parts.device_mesh()
    }

    /// Redistributes to `placements` on the same mesh, both parts in the same collectives. Collective and differentiable, as
    /// [`DTensor::redistribute`] is.
    ///
    /// # Errors
    /// If a placement does not fit the shape.
    #[track_caller]
    pub fn redistribute(&self, placements: impl IntoIterator<Item = Placement>) -> Result<Self> {
        // Dimensions are those of the complex numbers, also where they are counted from the end.
        let layout = Layout::new(self.device_mesh().mesh(), self.shape(), placements)?;
        Ok(ComplexTensor { parts: self.parts.redistribute(layout.placements().to_vec())? })
    }

    /// Gathers the full tensor to every rank, as real numbers `[..., 2]`. Collective.
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        self.parts.full_tensor()
    }

    /// Returns the tensor without its place in the autograd graph. Local, no copy.
    pub fn detach(&self) -> Self {
        ComplexTensor { parts: self.parts.detach() }
    }

    /// Returns the real parts. Local.
    #[track_caller]
    pub fn real(&self) -> Result<DTensor> {
        self.parts.select(-1, 0)
    }

    /// Returns the imaginary parts. Local.
    #[track_caller]
    pub fn imag(&self) -> Result<DTensor> {
        self.parts.select(-1, 1)
    }

    /// Returns the conjugates: imaginary parts are negated. Local.
    #[doc(alias = "conj_physical")]
    #[track_caller]
    pub fn conj(&self) -> Result<Self> {
        Ok(ComplexTensor { parts: self.parts.mul(&self.signs([1.0, -1.0])?)? })
    }

    /// Returns the absolute values. Local, unless the tensor is partial. The gradient at 0 is 0, as in PyTorch.
    #[track_caller]
    pub fn abs(&self) -> Result<DTensor> {
        self.parts.norm(2.0, &[-1], false)
    }

    /// Returns the angles, from -pi to pi. Local, unless the tensor is partial.
    #[track_caller]
    pub fn angle(&self) -> Result<DTensor> {
        self.imag()?.atan2(&self.real()?)
    }

    /// Adds two tensors, which broadcast.
    #[track_caller]
    pub fn add(&self, other: &ComplexTensor) -> Result<Self> {
        Ok(ComplexTensor { parts: self.parts.add(&other.parts)? })
    }

    /// Subtracts a tensor; both broadcast.
    #[track_caller]
    pub fn sub(&self, other: &ComplexTensor) -> Result<Self> {
        Ok(ComplexTensor { parts: self.parts.sub(&other.parts)? })
    }

    /// Multiplies two tensors, which broadcast.
    #[track_caller]
    pub fn mul(&self, other: &ComplexTensor) -> Result<Self> {
        // (x + iy) b is x b + y (i b): both terms are products with a part that broadcasts over the parts of b.
        let of_real = self.parts.narrow(-1, 0, 1)?.mul(&other.parts)?;
        let of_imag = self.parts.narrow(-1, 1, 1)?.mul(&other.times_i()?.parts)?;
        Ok(ComplexTensor { parts: of_real.add(&of_imag)? })
    }

    /// Divides by a tensor; both broadcast.
    ///
    /// The divisor is scaled by its larger part first, so that squares neither overflow nor vanish.
    #[track_caller]
    pub fn div(&self, other: &ComplexTensor) -> Result<Self> {
        // The quotient does not depend on the scale, so neither does its gradient.
        let scale = other.detach().parts.abs()?.amax(&[-1], true)?;
        let divisor = ComplexTensor { parts: other.parts.div(&scale)? };
        let square = divisor.parts.square()?.sum(&[-1], true)?;
        let quotient = self.mul(&divisor.conj()?)?;
        Ok(ComplexTensor { parts: quotient.parts.div(&square)?.div(&scale)? })
    }

    /// Multiplies by real numbers, which broadcast.
    #[track_caller]
    pub fn mul_real(&self, factor: &DTensor) -> Result<Self> {
        Ok(ComplexTensor { parts: self.parts.mul(&factor.unsqueeze(-1)?)? })
    }

    /// Negates every number. Local.
    #[track_caller]
    pub fn neg(&self) -> Result<Self> {
        Ok(ComplexTensor { parts: self.parts.neg()? })
    }

    /// Multiplies by the imaginary unit. Local.
    #[track_caller]
    pub fn times_i(&self) -> Result<Self> {
        Ok(ComplexTensor { parts: self.parts.flip(&[-1])?.mul(&self.signs([-1.0, 1.0])?)? })
    }

    /// Exchanges two dimensions, counted without that of the parts. Local.
    ///
    /// # Errors
    /// If there is no such dimension.
    #[track_caller]
    pub fn transpose(&self, a: isize, b: isize) -> Result<Self> {
        let from_end = |dim: isize| if dim < 0 { dim - 1 } else { dim };
        // The dimension of the parts has the number after the last one.
        if [a, b].iter().any(|&dim| from_end(dim) >= self.ndim() as isize) {
            return Err(ErrorKind::shape(self.shape()).error(
                "dimension",
                format!("{a} and {b} in transpose of shape {:?}", self.shape()),
                format!("dimensions below {}", self.ndim()),
                "correct the dimensions",
            ));
        }
        Ok(ComplexTensor { parts: self.parts.transpose(from_end(a), from_end(b))? })
    }

    /// Multiplies matrices `[..., m, k]` and `[..., k, n]`; leading dimensions broadcast.
    ///
    /// One product of real matrices of twice the size, which communicates as [`DTensor::matmul`] does.
    ///
    /// # Errors
    /// If a tensor has less than two dimensions, or sizes do not fit.
    #[track_caller]
    pub fn matmul(&self, other: &ComplexTensor) -> Result<Self> {
        if self.ndim() < 2 || other.ndim() < 2 {
            return Err(ErrorKind::shape(self.shape()).error(
                "operands",
                format!("shapes {:?} and {:?} in matmul of complex numbers", self.shape(), other.shape()),
                "matrices [..., m, k] and [..., k, n]",
                "unsqueeze vectors first",
            ));
        }
        // [..., k, parts, n, parts of the result]: what the real and what the imaginary part of a factor is multiplied by.
        let by = DTensor::stack(&[&other.parts, &other.times_i()?.parts], -3)?;
        Ok(ComplexTensor { parts: DTensor::einsum("...mkc,...kcno->...mno", &[&self.parts, &by])? })
    }

    /// A replicated vector with a sign for each part.
    fn signs(&self, signs: [f64; 2]) -> Result<DTensor> {
        let replicated = vec![Placement::Replicate; self.placements().len()];
        DTensor::from_fn(2, self.dtype(), self.device_mesh(), replicated, |at| signs[at[0]])
    }
}

macro_rules! complex_operators {
    ($($Trait:ident $method:ident),*) => {$(
        impl std::ops::$Trait<&ComplexTensor> for &ComplexTensor {
            type Output = Result<ComplexTensor>;

            #[track_caller]
            fn $method(self, other: &ComplexTensor) -> Result<ComplexTensor> {
                ComplexTensor::$method(self, other)
            }
        }
    )*};
}
complex_operators!(Add add, Sub sub, Mul mul, Div div);

impl std::ops::Neg for &ComplexTensor {
    type Output = Result<ComplexTensor>;

    #[track_caller]
    fn neg(self) -> Result<ComplexTensor> {
        ComplexTensor::neg(self)
    }
}

/// As the real tensor with both parts.
impl fmt::Debug for ComplexTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "complex of {:?}", self.parts)
    }
}
