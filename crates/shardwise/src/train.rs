//! The training loop: steps of any [`Model`] on batches.
//!
//! ```
//! use shardwise::data::{Batches, TokenSequences};
//! use shardwise::models::{GptConfig, ParallelismConfig, DataParallelMode, build};
//! use shardwise::optim::{AdamW, ShardedOptimizer};
//! use shardwise::prelude::*;
//! use shardwise::train::Trainer;
//!
//! let config = GptConfig { n_layers: 1, d_model: 32, d_ff: 64, seq_len: 8, ..GptConfig::default() };
//! let mesh = Mesh::new([("dp", 2)])?;
//! let parallelism = ParallelismConfig { data_parallel: DataParallelMode::FullyShard, tensor_parallel: false, sequence_parallel: false };
//! let plan = parallelism.plan(&config, &mesh)?;
//! launch(2, move |world| {
//!     let mesh = world.device_mesh(mesh.clone())?;
//!     let text = TokenSequences::new((0..100).collect::<Vec<u32>>(), 8)?;
//!     let mut batches = Batches::new(text, &mesh)?.shuffle(7).batch(4).sharded("dp")?;
//!     let model = build(&config, &plan, &mesh, DType::F32)?;
//!     let optimizer = ShardedOptimizer::new(model.named_parameters(), AdamW::default())?;
//!     let mut trainer = Trainer::new(model, optimizer).clip_norm(1.0);
//!     for _ in 0..3 {
//!         let step = trainer.step(&batches.next_batch()?)?;
//!         assert!(step.loss.is_finite() && step.grad_norm.is_some());
//!     }
//!     Ok(())
//! })?;
//! # Ok::<(), Error>(())
//! ```

use candle_core::DType;

use crate::autograd::{BackwardOptions, Gradients};
use crate::data::IGNORED_LABEL;
use crate::error::{ErrorKind, Result};
use crate::models::Model;
use crate::nn::EvaluationScope;
use crate::optim::{ShardedOptimizer, clip_grad_norm};
use crate::param::Param;
use crate::tensor::{DTensor, no_grad};

/// A model and the optimizer of its parameters, with the training step of both.
///
/// To save or resume a training run, pass `(&trainer.model, &mut trainer.optimizer)` to
/// [`checkpoint::load_into`](crate::checkpoint::load_into) and its siblings.
pub struct Trainer<M> {
    /// The model that is trained.
    pub model: M,
    /// The optimizer of the model's parameters.
    pub optimizer: ShardedOptimizer,
    max_norm: Option<f64>,
    defer_reduction: bool,
    /// The tensor of a batch with its targets, whose number weights the batch.
    targets: Option<usize>,
}

/// Ends a training run whose loss on other data no longer becomes lower.
///
/// ```
/// use shardwise::train::EarlyStopping;
///
/// let stopping = EarlyStopping::new(2);
/// assert!(!stopping.has_converged([3.0, 2.0, 2.5, 1.9, 2.0]));
/// assert!(stopping.has_converged([3.0, 2.0, 2.5, 1.9, 2.0, 1.95]));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EarlyStopping {
    patience: u64,
}

impl EarlyStopping {
    /// Stops after `patience` evaluations in a row that are not lower than the lowest one before.
    pub fn new(patience: u64) -> Self {
        EarlyStopping { patience }
    }

    /// Whether the run should end after these losses, the first one first. It depends on nothing else, so that a run that resumes
    /// with the losses of the one before stops where that one would have. NaN is not lower than anything.
    pub fn has_converged(&self, losses: impl IntoIterator<Item = f64>) -> bool {
        let (mut lowest, mut since) = (f64::INFINITY, 0);
        for loss in losses {
            if loss < lowest {
                (lowest, since) = (loss, 0);
            } else {
                since += 1;
            }
        }
        since >= self.patience.max(1)
    }
}

/// Loss and gradient norm of a training step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainingStep {
    /// Mean loss of the batches, before the update.
    pub loss: f64,
    /// Total norm of all gradients before clipping; `None` without clipping.
    pub grad_norm: Option<f64>,
}

impl<M: Model> Trainer<M> {
    /// A trainer that does not clip gradients.
    pub fn new(model: M, optimizer: ShardedOptimizer) -> Self {
        Trainer { model, optimizer, max_norm: None, defer_reduction: false, targets: None }
    }

    /// Clips gradients to a total norm of `max_norm` in every step.
    #[doc(alias = "clip_grad_norm_")]
    #[must_use]
    pub fn clip_norm(self, max_norm: f64) -> Self {
        Trainer { max_norm: Some(max_norm), ..self }
    }

    /// Reduces the gradients of sharded parameters once per step instead of once per batch
    /// ([`BackwardOptions::defer_reduction`]): fewer collectives, and gradients of the full size until then.
    #[doc(alias = "no_sync")]
    #[must_use]
    pub fn defer_reduction(self) -> Self {
        Trainer { defer_reduction: true, ..self }
    }

    /// Weights the batches of [`step_on_all`](Self::step_on_all) by how many of their targets count, which are those other than
    /// [`IGNORED_LABEL`] in tensor `column` of a batch. The step is then that of one large batch also if batches have different amounts of
    /// padding; by default every batch has the same weight.
    #[doc(alias = "num_items_in_batch")]
    #[must_use]
    pub fn weight_by_targets(self, column: usize) -> Self {
        Trainer { targets: Some(column), ..self }
    }

    /// Runs one training step on a batch: forward, backward, clipping, update. Collective: all ranks of the mesh must call it.
    #[track_caller]
    pub fn step(&mut self, batch: &[DTensor]) -> Result<TrainingStep> {
        let (gradients, loss) = self.gradients(batch, 1.0)?;
        self.apply(gradients, loss)
    }

    /// Runs one training step on several batches with averaged gradients (gradient accumulation), see
    /// [`weight_by_targets`](Self::weight_by_targets).
    ///
    /// Collective: all ranks of the mesh must call it.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if there are no batches.
    #[track_caller]
    pub fn step_on_all(&mut self, batches: &[Vec<DTensor>]) -> Result<TrainingStep> {
        let mut sum: Option<(Gradients, f64)> = None;
        // The mean of a batch without targets is NaN, and it adds nothing.
        for (batch, share) in batches.iter().zip(self.shares(batches)?).filter(|(_, share)| *share > 0.0) {
            let (gradients, loss) = self.gradients(batch, share)?;
            sum = Some(match sum {
                Some((all, before)) => (all.accumulate(gradients)?, before + loss),
                None => (gradients, loss),
            });
        }
        let Some((gradients, loss)) = sum else {
            return Err(ErrorKind::Argument.error(
                "batches",
                "none",
                "one at least",
                "draw one with `Batches::next_batch`",
            ));
        };
        self.apply(gradients, loss)
    }

    /// Returns the loss of a batch in evaluation mode, without gradients. The mode of the model does not change, whether this
    /// succeeds or not.
    ///
    /// Collective: all ranks of the mesh must call it.
    #[track_caller]
    pub fn evaluate(&self, batch: &[DTensor]) -> Result<f64> {
        let _evaluation = EvaluationScope::new(&self.model);
        no_grad(|| self.model.batch_loss(batch)).and_then(|loss| number(&loss))
    }

    /// The part of each batch in the loss of a step.
    #[track_caller]
    fn shares(&self, batches: &[Vec<DTensor>]) -> Result<Vec<f64>> {
        let Some(column) = self.targets.filter(|_| batches.len() > 1) else {
            return Ok(vec![1.0 / batches.len().max(1) as f64; batches.len()]);
        };
        let counted = |batch: &Vec<DTensor>| match batch.get(column) {
            Some(targets) => number(&targets.ne(IGNORED_LABEL)?.to_dtype(DType::F64)?.sum_all()?),
            None => {
                let (found, needed) =
                    (format!("{} tensor(s) in a batch", batch.len()), format!("targets as tensor {column}"));
                Err(ErrorKind::Argument.error(
                    "batches",
                    found,
                    needed,
                    "name the tensor in `Trainer::weight_by_targets`",
                ))
            }
        };
        let counts = batches.iter().map(counted).collect::<Result<Vec<f64>>>()?;
        let total: f64 = counts.iter().sum();
        if total == 0.0 {
            let fix = "leave such batches out";
            return Err(ErrorKind::Data.error("batches", "no target that counts", "at least one", fix));
        }
        Ok(counts.iter().map(|count| count / total).collect())
    }

    /// Gradients and loss of one of several batches, scaled by its part in the step.
    #[track_caller]
    fn gradients(&self, batch: &[DTensor], share: f64) -> Result<(Gradients, f64)> {
        let loss = self.model.batch_loss(batch)?;
        let options = BackwardOptions { defer_reduction: self.defer_reduction, ..BackwardOptions::default() };
        let scaled = if share == 1.0 { loss.clone() } else { loss.mul_scalar(share)? };
        let gradients = scaled.backward_with(options)?;
        Ok((gradients, number(&loss)? * share))
    }

    #[track_caller]
    fn apply(&mut self, mut gradients: Gradients, loss: f64) -> Result<TrainingStep> {
        let mut grad_norm = None;
        if let Some(max_norm) = self.max_norm {
            let params: Vec<Param> = self.optimizer.params().map(|(_, param)| param.clone()).collect();
            let (clipped, found) = clip_grad_norm(gradients, &params, max_norm, 2.0)?;
            (gradients, grad_norm) = (clipped, Some(found));
        }
        self.optimizer.step(gradients)?;
        Ok(TrainingStep { loss, grad_norm })
    }
}

/// The value of a loss of any floating-point type.
#[track_caller]
fn number(loss: &DTensor) -> Result<f64> {
    Ok(loss.detach().full_tensor()?.to_dtype(DType::F64)?.to_scalar::<f64>()?)
}
