//! A new model with its optimizer, for training and for measuring it.

use shardwise::data::{Batches, TokenSequences};
use shardwise::models::{LanguageModel, ModelConfig, build};
use shardwise::optim::{ParamGroup, Schedule, ShardedOptimizer};
use shardwise::plan::ShardingPlan;
use shardwise::prelude::*;

pub(crate) type Trainer = shardwise::train::Trainer<Box<dyn LanguageModel>>;

/// A run at a step: what its checkpoints hold.
pub(super) struct TrainingRun {
    pub(super) trainer: Trainer,
    pub(super) mesh: DeviceMesh,
    pub(super) batches: Batches<TokenSequences>,
    /// Steps taken.
    pub(super) step: u64,
}

/// What a trainer is built from.
pub(crate) struct Recipe<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) plan: &'a ShardingPlan,
    /// Type of the parameters.
    pub(crate) dtype: DType,
    /// Seed of the weights, which are the same on every mesh.
    pub(crate) seed: u64,
    /// For the parameters that the optimizer of the first group takes, and for all others.
    pub(crate) groups: &'a [ParamGroup; 2],
    pub(crate) schedule: Schedule,
    /// The largest norm that gradients may have together.
    pub(crate) clip: Option<f64>,
}

impl Recipe<'_> {
    /// Builds the model on a mesh, and its optimizer.
    pub(crate) fn build(&self, mesh: &DeviceMesh) -> Result<Trainer> {
        mesh.manual_seed(self.seed);
        let model = build(self.config, self.plan, mesh, self.dtype)?;
        let [group, rest] = self.groups;
        let fits = |(_, param): &(String, Param)| group.algorithm.check_shape(&param.shape()).is_ok();
        let (fitting, others): (Vec<_>, Vec<_>) = model.named_parameters().into_iter().partition(fits);
        let mut optimizer = ShardedOptimizer::new(fitting, group.clone())?;
        if !others.is_empty() {
            optimizer.add_param_group(others, rest.clone())?;
        }
        optimizer.set_schedule(self.schedule);
        let trainer = Trainer::new(model, optimizer);
        Ok(match self.clip {
            Some(norm) => trainer.clip_norm(norm),
            None => trainer,
        })
    }
}
