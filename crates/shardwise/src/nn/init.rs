//! Initializers of parameters.
//!
//! Values are bit-equal for every layout and number of ranks, and fans are those of the full tensor, not of a shard.

use candle_core::DType;

use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::placement::Placement;
use crate::random::Distribution;
use crate::tensor::DTensor;

/// An initializer: what a new tensor is filled with. Gains are factors of the standard deviation, as in `torch.nn.init`.
#[doc(alias = "torch.nn.init")]
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// One value everywhere.
    #[doc(alias = "constant_")]
    Constant(f64),
    /// Uniform from the first number to below the second.
    #[doc(alias = "uniform_")]
    Uniform(f64, f64),
    /// Normal with a mean and a standard deviation.
    #[doc(alias = "normal_")]
    Normal(f64, f64),
    /// Normal with mean 0 and this standard deviation, truncated at two standard deviations.
    #[doc(alias = "trunc_normal_")]
    TruncNormal(f64),
    /// Uniform with variance `gain^2 * 2 / (fan_in + fan_out)`.
    #[doc(alias = "xavier_uniform_")]
    XavierUniform(f64),
    /// Normal with variance `gain^2 * 2 / (fan_in + fan_out)`.
    #[doc(alias = "xavier_normal_")]
    XavierNormal(f64),
    /// Uniform with variance `gain^2 / fan_in`.
    #[doc(alias = "kaiming_uniform_")]
    KaimingUniform(f64),
    /// Normal with variance `gain^2 / fan_in`.
    #[doc(alias = "kaiming_normal_")]
    KaimingNormal(f64),
}

impl Init {
    /// Fills with zeros.
    pub const ZEROS: Init = Init::Constant(0.0);
    /// Fills with ones.
    pub const ONES: Init = Init::Constant(1.0);
    /// PyTorch's default for linear and convolution layers: uniform within `1 / sqrt(fan_in)`.
    pub const LINEAR: Init = Init::KaimingUniform(0.577_350_269_189_625_8); // 1 / sqrt(3)

    /// Creates a tensor filled by this initializer, with random numbers from the generator of the mesh.
    ///
    /// Local: every rank draws the elements of its own shard. All ranks of the mesh must call it, because it advances the
    /// generator.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if placements do not fit the shape, or an initializer with fans is used for a
    /// shape of less than two dimensions.
    #[track_caller]
    pub fn create(
        self,
        shape: &[usize],
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        self.create_in(&Layout::new(mesh.mesh(), shape, placements)?, dtype, mesh)
    }

    /// As [`create`](Self::create), in a layout.
    #[track_caller]
    pub fn create_in(self, layout: &Layout, dtype: DType, mesh: &DeviceMesh) -> Result<DTensor> {
        self.initial_value(layout.shape())?.create_in(layout, dtype, mesh)
    }

    /// Resolves the fans for a full tensor of this shape.
    pub(crate) fn initial_value(self, shape: &[usize]) -> Result<InitialValue> {
        let root3 = 3f64.sqrt();
        let fans = || fans(shape);
        Ok(InitialValue::Random(match self {
            Init::Constant(value) => return Ok(InitialValue::Constant(value)),
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

/// An initializer for one shape: fans are resolved.
pub(crate) enum InitialValue {
    Constant(f64),
    Random(Distribution),
}

impl InitialValue {
    /// Creates a tensor with this value, as [`Init::create_in`] does.
    #[track_caller]
    pub(crate) fn create_in(self, layout: &Layout, dtype: DType, mesh: &DeviceMesh) -> Result<DTensor> {
        match self {
            InitialValue::Constant(value) => DTensor::full_in(layout, value, dtype, mesh),
            InitialValue::Random(distribution) => DTensor::random_in(layout, dtype, mesh, distribution),
        }
    }
}

fn uniform(bound: f64) -> Distribution {
    Distribution::Uniform { low: -bound, high: bound }
}

/// `fan_in` and `fan_out` of a weight `[out, in, ...]`.
fn fans(shape: &[usize]) -> Result<(f64, f64)> {
    let [out, inputs, field @ ..] = shape else {
        let found = format!("shape {shape:?}");
        return Err(ErrorKind::shape(shape).error(
            "initializer",
            found,
            "a weight [out, in, ...]",
            "use a uniform or normal one",
        ));
    };
    let field = field.iter().product::<usize>() as f64;
    Ok(((*inputs as f64 * field).max(1.0), (*out as f64 * field).max(1.0)))
}
