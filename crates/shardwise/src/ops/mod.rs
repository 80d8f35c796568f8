//! The operators, one family per file: rule, kernel, methods. [`ops`] lists them all.

mod affine;
mod attention;
mod band;
mod binary;
mod convolution;
mod derivative;
mod dropout;
mod dtype;
mod einsum;
mod flip;
mod join;
mod lookup;
mod loss;
mod narrow;
mod order;
mod reduce;
mod reshape;
mod rows;
mod scalar;
mod scan;
mod scatter;
mod statistics;
mod ternary;
mod unary;
mod view;

pub use attention::Attention;
pub use convolution::Convolution;
pub use lookup::Bag;
pub use loss::{Classes, Reduction};

use candle_core::DType;

use crate::comm::DryWorld;
use crate::error::Result;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// One operator as tests and tables see it.
pub struct OpEntry {
    /// Name of the method on [`DTensor`].
    pub name: &'static str,
    /// Inputs to try it on: shapes that broadcast, are uneven, of size one, or empty.
    pub samples: fn() -> Vec<Vec<Sample>>,
    /// The operator on such inputs.
    pub apply: fn(&[DTensor]) -> Result<Vec<DTensor>>,
}

impl OpEntry {
    /// Whether a gradient can be taken through the operator: tried on its first sample, with floating-point inputs.
    pub fn is_differentiable(&self) -> Result<bool> {
        let mut ran = DryWorld::new(1)?.run(|world| {
            let mesh = world.mesh([("one", 1)])?;
            let input = |sample: &Sample| {
                let dtype = if sample.below.is_some() { sample.dtype } else { DType::F64 };
                let tensor = DTensor::zeros(sample.shape.as_slice(), dtype, &mesh, [Placement::Replicate])?;
                Ok(if sample.below.is_some() { tensor } else { tensor.requires_grad() })
            };
            let inputs = (self.samples)()[0].iter().map(input).collect::<Result<Vec<_>>>()?;
            // Operators on whole numbers alone refuse others.
            Ok((self.apply)(&inputs).is_ok_and(|outputs| outputs.iter().any(DTensor::has_gradient)))
        })?;
        Ok(std::mem::take(&mut ran.value))
    }
}

/// One input of a sample call.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: DType,
    /// Its elements are indices below this number.
    pub below: Option<usize>,
}

impl Sample {
    fn new(shape: &[usize], dtype: DType) -> Self {
        Sample { shape: shape.to_vec(), dtype, below: None }
    }

    fn index(shape: &[usize], below: usize) -> Self {
        Sample { shape: shape.to_vec(), dtype: DType::I64, below: Some(below) }
    }
}

/// All operators.
pub fn ops() -> impl Iterator<Item = &'static OpEntry> {
    OPS.iter().flat_map(|family| family.iter())
}

/// The families of operators.
static OPS: [&[OpEntry]; 22] = [
    unary::OPS,
    binary::OPS,
    ternary::OPS,
    einsum::OPS,
    affine::OPS,
    reduce::OPS,
    statistics::OPS,
    loss::OPS,
    view::OPS,
    reshape::OPS,
    narrow::OPS,
    join::OPS,
    flip::OPS,
    band::OPS,
    lookup::OPS,
    scatter::OPS,
    order::OPS,
    scan::OPS,
    loss::CLASS_OPS,
    dropout::OPS,
    attention::OPS,
    convolution::OPS,
];
