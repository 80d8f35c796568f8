//! What the library needs to know of a model and of its sizes: the door through which every model comes.

use candle_core::DType;
use serde_json::Value;

use super::names::WeightNames;
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::nn::{Builder, Module};
use crate::tensor::DTensor;

/// A model that can be trained, saved and exported.
///
/// It is a [`Module`] with a loss and, optionally, names of its weights in files. Fields of type [`Heads`](crate::nn::Heads)
/// and [`PlanHints`](crate::nn::PlanHints) give planners what they cannot see in the parameters. Custom models implement
/// the same trait as those of this crate; `crates/tests-outside/src/model.rs` has one with two inputs and shared weights.
///
/// ```
/// use shardwise::models::{Model, export};
/// use shardwise::nn::Linear;
/// use shardwise::ops::Reduction;
/// use shardwise::prelude::*;
///
/// #[derive(Module)]
/// struct Regression {
///     layer: Linear,
/// }
///
/// impl Model for Regression {
///     fn batch_loss(&self, batch: &[DTensor]) -> Result<DTensor> {
///         self.layer.forward(&batch[0])?.mse_loss(&batch[1], Reduction::Mean)
///     }
/// }
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let model = Regression { layer: Linear::new(&Builder::new(&mesh).child("layer"), 3, 1)? };
///     assert_eq!(export(&model)?["layer.weight"].dims(), [1, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub trait Model: Module + Send + Sync {
    /// Returns the mean loss of a batch as a scalar tensor. The batch has the stacked tensors of its samples, as
    /// [`Batches::next_batch`](crate::data::Batches::next_batch) returns them. Collective.
    #[track_caller]
    fn batch_loss(&self, batch: &[DTensor]) -> Result<DTensor>;

    /// Names of the weights in files; the paths of the parameters by default.
    fn weight_names(&self) -> WeightNames {
        WeightNames::of_paths(&self.named_parameters())
    }
}

impl<M: Model + ?Sized> Model for Box<M> {
    fn batch_loss(&self, batch: &[DTensor]) -> Result<DTensor> {
        (**self).batch_loss(batch)
    }

    fn weight_names(&self) -> WeightNames {
        (**self).weight_names()
    }
}

/// Sizes of a [`Model`], from which it is built; the input of planners and exports.
///
/// [`ParallelismConfig::plan`](super::ParallelismConfig::plan), [`search_plan`](super::search_plan), [`estimate_step`](super::estimate_step),
/// [`build`](super::build) and [`export_hf`](super::export_hf) take any of them.
pub trait ModelSpec: Sync {
    /// Type of the model.
    type Model: Model;

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    /// Should return an [`Error::Invalid`](crate::Error::Invalid) that names the size.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Builds the model; the builder creates its parameters.
    fn build(&self, builder: &Builder) -> Result<Self::Model>;

    /// Returns a batch with the shapes and types of real ones, sharded by [`batch_placements`](super::batch_placements).
    /// Values do not matter: it is used in dry runs.
    fn example_batch(&self, samples: usize, mesh: &DeviceMesh) -> Result<Vec<DTensor>>;

    /// Returns what [`export_hf`](super::export_hf) writes to `config.json`, for weights of a type. `Null`, the default, writes
    /// no such file.
    fn hf_config(&self, dtype: DType) -> Value {
        let _ = dtype;
        Value::Null
    }
}
