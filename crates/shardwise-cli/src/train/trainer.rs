//! One training step, for training and for measuring it.

use shardwise::models::{LanguageModel, ModelConfig, batch_placements, build};
use shardwise::optim::{ParamGroup, Schedule, ShardedOptimizer, clip_grad_norm};
use shardwise::plan::ShardingPlan;
use shardwise::prelude::*;
use shardwise::{Gradients, no_grad};

/// A model with its optimizer, spread over a mesh.
pub(crate) struct Trainer {
    pub(crate) model: Box<dyn LanguageModel>,
    pub(super) mesh: DeviceMesh,
    pub(super) optimizer: ShardedOptimizer,
    /// The largest norm that gradients may have together.
    clip: Option<f64>,
}

/// What a step is about.
#[derive(Clone, Copy)]
pub(crate) struct Stepped {
    /// Mean over all tokens of the step.
    pub(crate) loss: f64,
    /// Of the gradients before clipping, if they are clipped.
    pub(crate) norm: Option<f64>,
}

/// Sequences of tokens, each one longer than the model is given: inputs and what follows them.
#[derive(Clone)]
pub(crate) struct Batch {
    /// One after the other.
    pub(crate) tokens: Vec<u32>,
    /// How many.
    pub(crate) sequences: usize,
}

impl Trainer {
    /// A new model on the mesh, with weights that depend on the seed alone. The second group is for parameters whose shapes
    /// the optimizer of the first one cannot take.
    pub(crate) fn new(
        config: &ModelConfig,
        plan: &ShardingPlan,
        mesh: &DeviceMesh,
        (dtype, seed): (DType, u64),
        ([group, rest], schedule): ([ParamGroup; 2], Schedule),
        clip: Option<f64>,
    ) -> Result<Self> {
        mesh.manual_seed(seed);
        let model = build(config, plan, mesh, dtype)?;
        let fits = |(_, param): &(String, Param)| group.algorithm.check_shape(&param.shape()).is_ok();
        let (fitting, others): (Vec<_>, Vec<_>) = model.named_parameters().into_iter().partition(fits);
        let mut optimizer = ShardedOptimizer::new(fitting, group)?;
        if !others.is_empty() {
            optimizer.add_param_group(others, rest)?;
        }
        optimizer.set_schedule(schedule);
        Ok(Trainer { model, mesh: mesh.clone(), optimizer, clip })
    }

    /// One step over some batches, whose gradients add up.
    pub(crate) fn step(&mut self, batches: &[Batch]) -> Result<Stepped> {
        let mut sum: Option<(Gradients, f64)> = None;
        for batch in batches {
            let (ids, targets) = self.spread_out(batch)?;
            let loss = self.model.loss(&ids, &targets)?;
            let share = if batches.len() == 1 { loss.clone() } else { loss.mul_scalar(1.0 / batches.len() as f64)? };
            let gradients = share.backward()?;
            let loss = f64::from(loss.item::<f32>()?) / batches.len() as f64;
            sum = Some(match sum {
                Some((all, before)) => (all.accumulate(gradients)?, before + loss),
                None => (gradients, loss),
            });
        }
        let (mut gradients, loss) = sum.expect("at least one batch");
        let mut norm = None;
        if let Some(clip) = self.clip {
            let params: Vec<Param> = self.optimizer.params().map(|(_, param)| param.clone()).collect();
            let (clipped, found) = clip_grad_norm(gradients, &params, clip, 2.0)?;
            (gradients, norm) = (clipped, Some(found));
        }
        self.optimizer.step(gradients)?;
        Ok(Stepped { loss, norm })
    }

    /// The loss on a batch, without learning from it.
    pub(crate) fn evaluate(&self, batch: &Batch) -> Result<f64> {
        self.model.eval();
        let (ids, targets) = self.spread_out(batch)?;
        let loss = no_grad(|| self.model.loss(&ids, &targets))?.item::<f32>()?;
        self.model.train();
        Ok(f64::from(loss))
    }

    /// Inputs and targets, of which every rank takes its part.
    fn spread_out(&self, batch: &Batch) -> Result<(DTensor, DTensor)> {
        let shape = (batch.sequences, batch.tokens.len() / batch.sequences);
        let all = candle_core::Tensor::from_slice(&batch.tokens, shape, &candle_core::Device::Cpu)?;
        let part = |start: usize| -> Result<DTensor> {
            let part = all.narrow(1, start, shape.1 - 1)?.contiguous()?;
            DTensor::distribute_tensor(&part, &self.mesh, batch_placements(&self.mesh), None)
        };
        Ok((part(0)?, part(1)?))
    }
}
