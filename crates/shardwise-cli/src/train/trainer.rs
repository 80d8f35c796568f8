//! Builds a model with its optimizer, for `train` and for `bench train`.

use std::path::Path;

use shardwise::data::Batches;
use shardwise::models::{LoadOptions, ModelConfig, PretrainedModel, build, load_planned};
use shardwise::optim::{ParamGroup, Schedule, ShardedOptimizer};
use shardwise::plan::ShardingPlan;
use shardwise::prelude::*;

use super::data::TextData;
use super::lora::LoraSettings;

pub(crate) type Trainer = shardwise::train::Trainer<PretrainedModel>;

/// The state of a run that its checkpoints store.
pub(super) struct TrainingRun {
    pub(super) trainer: Trainer,
    pub(super) mesh: DeviceMesh,
    pub(super) batches: Batches<TextData>,
    /// Number of steps done.
    pub(super) step: u64,
}

/// The settings of a [`Trainer`].
pub(crate) struct TrainerConfig<'a> {
    pub(crate) config: &'a ModelConfig,
    /// The model whose weights the run begins with.
    pub(crate) init: Option<&'a Path>,
    pub(crate) lora: Option<&'a LoraSettings>,
    pub(crate) plan: &'a ShardingPlan,
    /// Data type of the parameters.
    pub(crate) dtype: DType,
    /// Seed of the initialization, which is the same on every mesh.
    pub(crate) seed: u64,
    /// For the parameters that the optimizer of the first group supports, and for the remaining ones.
    pub(crate) groups: &'a [ParamGroup; 2],
    pub(crate) schedule: Schedule,
    /// Maximum gradient norm.
    pub(crate) clip: Option<f64>,
}

impl TrainerConfig<'_> {
    /// Builds the model and its optimizer on a mesh. Collective.
    pub(crate) fn build(&self, mesh: &DeviceMesh) -> Result<Trainer> {
        mesh.manual_seed(self.seed);
        let model = match self.init {
            Some(path) => {
                let options = LoadOptions { dtype: self.dtype, ..LoadOptions::default() };
                load_planned(path, mesh, self.plan, &options)?.0
            }
            None => build(self.config, self.plan, mesh, self.dtype)?,
        };
        self.lora.map_or(Ok(()), |lora| lora.apply(&model))?;
        let [group, rest] = self.groups;
        let fits = |(_, param): &(String, Param)| group.algorithm.check_shape(&param.shape()).is_ok();
        let (fitting, remaining): (Vec<_>, Vec<_>) = model.trainable_parameters().into_iter().partition(fits);
        let mut optimizer = ShardedOptimizer::new(fitting, group.clone())?;
        if !remaining.is_empty() {
            optimizer.add_param_group(remaining, rest.clone())?;
        }
        optimizer.set_schedule(self.schedule);
        // Documents have padding, the targets of which do not count.
        let trainer = Trainer::new(model, optimizer).weight_by_targets(1);
        Ok(match self.clip {
            Some(norm) => trainer.clip_norm(norm),
            None => trainer,
        })
    }
}
