//! Initial values: bit-equal for every layout, with fans of the whole tensor.

use candle_core::DType;

use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::placement::Placement;
use crate::random::Distribution;
use crate::tensor::DTensor;

/// How a tensor begins.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// One number everywhere.
    Constant(f64),
    /// Uniform between two numbers.
    Uniform(f64, f64),
    /// Normal with a mean and a standard deviation.
    Normal(f64, f64),
    /// Normal with mean 0 and a standard deviation, drawn again outside two standard deviations.
    TruncNormal(f64),
    /// Uniform with variance `2 / (fan_in + fan_out)`, times the square of a gain.
    XavierUniform(f64),
    /// Normal with variance `2 / (fan_in + fan_out)`, times the square of a gain.
    XavierNormal(f64),
    /// Uniform with variance `1 / fan_in`, times the square of a gain.
    KaimingUniform(f64),
    /// Normal with variance `1 / fan_in`, times the square of a gain.
    KaimingNormal(f64),
}

impl Init {
    /// Zeros.
    pub const ZEROS: Init = Init::Constant(0.0);
    /// Ones.
    pub const ONES: Init = Init::Constant(1.0);
    /// What linear and convolution layers begin with: uniform within `1 / sqrt(fan_in)`.
    pub const LINEAR: Init = Init::KaimingUniform(0.577_350_269_189_625_8); // 1 / sqrt(3)

    /// A tensor that begins so. Draws from the generator of the mesh.
    #[track_caller]
    pub fn make(
        self,
        shape: &[usize],
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        self.make_in(&Layout::new(mesh.mesh(), shape, placements)?, dtype, mesh)
    }

    /// As [`make`](Self::make), in a layout.
    #[track_caller]
    pub fn make_in(self, layout: &Layout, dtype: DType, mesh: &DeviceMesh) -> Result<DTensor> {
        match self.start(layout.shape())? {
            Start::Constant(value) => DTensor::full_in(layout, value, dtype, mesh),
            Start::Random(distribution) => DTensor::random_in(layout, dtype, mesh, distribution),
        }
    }

    /// What the elements of a tensor of this shape begin with.
    pub(crate) fn start(self, shape: &[usize]) -> Result<Start> {
        let root3 = 3f64.sqrt();
        let fans = || fans(shape);
        Ok(Start::Random(match self {
            Init::Constant(value) => return Ok(Start::Constant(value)),
            Init::Uniform(low, high) => Distribution::Uniform { low, high },
            Init::Normal(mean, std) => Distribution::Normal { mean, std },
            Init::TruncNormal(std) => Distribution::TruncatedNormal { mean: 0.0, std, width: 2.0 },
            Init::XavierUniform(gain) => {
                let (fan_in, fan_out) = fans()?;
                uniform(gain * (2.0 / (fan_in + fan_out)).sqrt() * root3)
            }
            Init::XavierNormal(gain) => {
                let (fan_in, fan_out) = fans()?;
                Distribution::Normal { mean: 0.0, std: gain * (2.0 / (fan_in + fan_out)).sqrt() }
            }
            Init::KaimingUniform(gain) => uniform(gain / fans()?.0.sqrt() * root3),
            Init::KaimingNormal(gain) => Distribution::Normal { mean: 0.0, std: gain / fans()?.0.sqrt() },
        }))
    }
}

/// An initial value for a tensor of a certain shape.
pub(crate) enum Start {
    /// One number everywhere.
    Constant(f64),
    /// Random numbers.
    Random(Distribution),
}

fn uniform(bound: f64) -> Distribution {
    Distribution::Uniform { low: -bound, high: bound }
}

/// Inputs and outputs of one unit of a weight `[out, in, ...]`, of the whole tensor and not of a shard.
fn fans(shape: &[usize]) -> Result<(f64, f64)> {
    let [out, inputs, field @ ..] = shape else {
        let found = format!("shape {shape:?}");
        return Err(ErrorKind::shape(shape).error(
            "initialiser",
            found,
            "a weight [out, in, ...]",
            "use a uniform or normal one",
        ));
    };
    let field = field.iter().product::<usize>() as f64;
    Ok(((*inputs as f64 * field).max(1.0), (*out as f64 * field).max(1.0)))
}
