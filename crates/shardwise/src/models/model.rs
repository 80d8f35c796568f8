//! What the library needs to know of a model and of its sizes: the door through which every model comes.

use candle_core::DType;
use serde_json::Value;

use super::names::Names;
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::nn::{Builder, Module};
use crate::tensor::DTensor;

/// A model that can be trained, saved and exported.
///
/// Beyond its [`Module`] walk, in which [`Heads`](crate::nn::Heads) and [`PlanHints`](crate::nn::PlanHints) say what
/// planners cannot see, it has a loss and the names of its weights. Models of this crate and of programs implement the same
/// trait; `crates/tests-outside/tests/model.rs` has one with two inputs and shared weights.
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
///     let model = Regression { layer: Linear::new(&Builder::new(&mesh).at("layer"), 3, 1)? };
///     assert_eq!(export(&model)?["layer.weight"].dims(), [1, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub trait Model: Module + Send + Sync {
    /// Returns the mean loss of a batch, a tensor without dimensions. The batch has the tensors of its samples, stacked, as
    /// [`Batches::next_batch`](crate::data::Batches::next_batch) returns them.
    #[track_caller]
    fn batch_loss(&self, batch: &[DTensor]) -> Result<DTensor>;

    /// Names of the weights in files: the paths of the parameters, unless the model has others.
    fn names(&self) -> Names {
        Names::of_paths(&self.named_parameters())
    }
}

impl<M: Model + ?Sized> Model for Box<M> {
    fn batch_loss(&self, batch: &[DTensor]) -> Result<DTensor> {
        (**self).batch_loss(batch)
    }

    fn names(&self) -> Names {
        (**self).names()
    }
}

/// Sizes of a [`Model`], from which it is built: what plans, searches and exports begin with.
///
/// [`Spread::plan`](super::Spread::plan), [`search_plan`](super::search_plan), [`estimate_step`](super::estimate_step),
/// [`build`](super::build) and [`export_hf`](super::export_hf) take any of them.
pub trait ModelSpec: Sync {
    /// The model.
    type Model: Model;

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    /// Should return an [`Error::Invalid`](crate::Error::Invalid) that names the size.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Builds a new model with the parameters that the builder creates.
    fn build(&self, at: &Builder) -> Result<Self::Model>;

    /// Returns a batch as it comes from the data, sharded by [`batch_placements`](super::batch_placements). Values do not
    /// matter: dry runs compute without them.
    fn example_batch(&self, samples: usize, mesh: &DeviceMesh) -> Result<Vec<DTensor>>;

    /// Returns what [`export_hf`](super::export_hf) writes to `config.json`, for weights of a type. Nothing is written for a
    /// null.
    fn hf_config(&self, dtype: DType) -> Value {
        let _ = dtype;
        Value::Null
    }
}
