//! The training loop: gradient accumulation, clipping, and evaluation without side effects on the model.

use candle_core::{Device, Tensor};
use shardwise::data::{Batches, Dataset, IGNORED_LABEL};
use shardwise::models::Model;
use shardwise::nn::{Dropout, Linear};
use shardwise::ops::{LossOptions, Reduction};
use shardwise::optim::ParamGroup;
use shardwise::prelude::*;
use shardwise::train::Trainer;
use shardwise_test_suites::errors::same_error_on_all_ranks;

/// A regression with dropout, which training and evaluation treat differently.
#[derive(Module)]
struct Regression {
    layer: Linear,
    dropout: Dropout,
}

impl Regression {
    fn new(mesh: &DeviceMesh, dropout: f64) -> Result<Self> {
        mesh.manual_seed(2);
        let builder = Builder::new(mesh).dtype(DType::F64).placed(|_, _| vec![Shard(0)]);
        Ok(Regression { layer: Linear::new(&builder.child("layer"), 3, 2)?, dropout: Dropout::new(dropout)? })
    }
}

impl Model for Regression {
    fn batch_loss(&self, batch: &[DTensor]) -> Result<DTensor> {
        self.layer.forward(&self.dropout.forward(&batch[0])?)?.mse_loss(&batch[1], Reduction::Mean)
    }
}

struct Points;

impl Dataset for Points {
    fn len(&self) -> usize {
        24
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        let numbers = |count: usize| (0..count).map(|i| ((index * 5 + i * 3) % 7) as f64 - 3.0).collect::<Vec<_>>();
        let tensor = |count: usize| -> Result<Tensor> { Ok(Tensor::from_vec(numbers(count), count, &Device::Cpu)?) };
        Ok(vec![tensor(3)?, tensor(2)?])
    }
}

fn trainer(mesh: &DeviceMesh, dropout: f64) -> Result<Trainer<Regression>> {
    let model = Regression::new(mesh, dropout)?;
    let optimizer = ParamGroup::new(Sgd::default()).with_lr(0.05).over(&model)?;
    Ok(Trainer::new(model, optimizer))
}

fn batches(mesh: &DeviceMesh, samples: usize) -> Result<Batches<Points>> {
    Batches::new(Points, mesh)?.batch(samples).sharded("dp")
}

fn numbers(trainer: &Trainer<Regression>) -> Result<Vec<f64>> {
    Ok(trainer.model.layer.weight.get().full_tensor()?.flatten_all()?.to_vec1()?)
}

#[test]
fn gradient_accumulation_equals_one_large_batch() {
    for ranks in [2, 3] {
        let run = move |world: World| {
            let mesh = world.mesh([("dp", ranks)])?;
            let (mut one, mut several) = (trainer(&mesh, 0.0)?, trainer(&mesh, 0.0)?.clip_norm(1e9));
            let (mut whole, mut parts) = (batches(&mesh, 12)?, batches(&mesh, 4)?);
            for _ in 0..3 {
                let step = one.step(&whole.next_batch()?)?;
                let drawn = (0..3).map(|_| parts.next_batch()).collect::<Result<Vec<_>>>()?;
                let same = several.step_on_all(&drawn)?;
                assert!((step.loss - same.loss).abs() < 1e-13 * step.loss, "{step:?}, {same:?}");
                assert!(step.grad_norm.is_none() && same.grad_norm.is_some());
            }
            assert_eq!((one.optimizer.steps(), several.optimizer.steps()), (3, 3));
            let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-13;
            assert!(numbers(&one)?.iter().zip(&numbers(&several)?).all(near));
            Ok(())
        };
        launch(ranks, run).unwrap();
    }
}

/// Classes of tokens, some of which are padding.
#[derive(Module)]
struct Tagger {
    layer: Linear,
}

impl Model for Tagger {
    fn batch_loss(&self, batch: &[DTensor]) -> Result<DTensor> {
        let logits = self.layer.forward(&batch[0])?;
        let options = LossOptions { ignore_index: IGNORED_LABEL, ..LossOptions::default() };
        logits.reshape(&[-1, 5])?.cross_entropy(&batch[1].flatten(0, -1)?, options)
    }
}

/// Sequences of four tokens, of which sample `i` has `i % 5` that count.
struct Padded;

impl Dataset for Padded {
    fn len(&self) -> usize {
        24
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        let inputs: Vec<f64> = (0..12).map(|i| ((index * 5 + i * 3) % 7) as f64 - 3.0).collect();
        let label = |i: usize| if i < index % 5 { ((index + i) % 5) as i64 } else { IGNORED_LABEL };
        let targets: Vec<i64> = (0..4).map(label).collect();
        Ok(vec![Tensor::from_vec(inputs, (4, 3), &Device::Cpu)?, Tensor::from_vec(targets, 4, &Device::Cpu)?])
    }
}

#[test]
fn accumulation_by_targets_equals_one_large_batch_with_any_padding() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let trainer = || -> Result<Trainer<Tagger>> {
            mesh.manual_seed(3);
            let builder = Builder::new(&mesh).dtype(DType::F64).placed(|_, _| vec![Shard(0)]);
            let model = Tagger { layer: Linear::new(&builder.child("layer"), 3, 5)? };
            let optimizer = ParamGroup::new(Sgd::default()).with_lr(0.05).over(&model)?;
            Ok(Trainer::new(model, optimizer))
        };
        let numbers = |trainer: &Trainer<Tagger>| -> Result<Vec<f64>> {
            Ok(trainer.model.layer.weight.get().full_tensor()?.flatten_all()?.to_vec1()?)
        };
        let batches = |samples: usize| Batches::new(Padded, &mesh)?.batch(samples).sharded("dp");
        let far = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let (mut one, mut by_targets, mut by_batches) = (trainer()?, trainer()?.weight_by_targets(1), trainer()?);
        // Batches of one sample: the first one has no target that counts.
        let (mut whole, mut parts) = (batches(12)?, batches(1)?);
        let large = one.step(&whole.next_batch()?)?;
        let drawn = (0..12).map(|_| parts.next_batch()).collect::<Result<Vec<_>>>()?;
        let same = by_targets.step_on_all(&drawn)?;
        assert!((large.loss - same.loss).abs() < 1e-12, "{large:?}, {same:?}");
        assert!(far(&numbers(&one)?, &numbers(&by_targets)?) < 1e-13);
        // Equal weights give another step.
        let other = by_batches.step_on_all(&drawn[1..5])?;
        let same = trainer()?.weight_by_targets(1).step_on_all(&drawn[1..5])?;
        assert!((other.loss - same.loss).abs() > 1e-4, "{other:?}, {same:?}");
        let error = by_targets.step_on_all(&[drawn[0].clone(), drawn[5].clone()]).unwrap_err().to_string();
        assert!(error.contains("no target that counts"), "{error}");
        let mut wrong = trainer()?.weight_by_targets(2);
        assert!(wrong.step_on_all(&drawn[1..3]).unwrap_err().to_string().contains("tensor 2"));
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn gradients_are_clipped_to_a_norm() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let mut clipped = trainer(&mesh, 0.0)?.clip_norm(0.5);
        let before = [numbers(&clipped)?, clipped.model.layer.bias.as_ref().unwrap().get().full_tensor()?.to_vec1()?];
        let step = clipped.step(&batches(&mesh, 8)?.next_batch()?)?;
        assert!(step.grad_norm.is_some_and(|norm| norm > 0.5), "{step:?}");
        let after = [numbers(&clipped)?, clipped.model.layer.bias.as_ref().unwrap().get().full_tensor()?.to_vec1()?];
        let moved = before.concat().iter().zip(after.concat()).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
        // the step of a gradient with norm 0.5; clip_grad_norm adds 1e-6 to the divisor
        assert!((moved - 0.05 * 0.5).abs() < 1e-7, "{moved}");
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn evaluation_disables_dropout_and_leaves_the_mode_of_the_model() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let (dropping, plain) = (trainer(&mesh, 0.5)?, trainer(&mesh, 0.0)?);
        let batch = batches(&mesh, 8)?.next_batch()?;
        assert_eq!(dropping.evaluate(&batch)?, plain.evaluate(&batch)?);
        assert_eq!(dropping.evaluate(&batch)?, dropping.evaluate(&batch)?);
        let training = |trainer: &Trainer<Regression>| -> Result<f64> {
            Ok(trainer.model.batch_loss(&batch)?.full_tensor()?.to_scalar::<f64>()?)
        };
        assert_ne!(training(&dropping)?, plain.evaluate(&batch)?);
        assert!(training(&dropping)? != training(&plain)?);
        // also after a batch that cannot be evaluated
        assert!(dropping.evaluate(&[batch[0].clone(), batch[0].clone()]).is_err());
        assert_ne!(training(&dropping)?, plain.evaluate(&batch)?);
        // a model in evaluation mode stays in it
        dropping.model.eval();
        assert_eq!(dropping.evaluate(&batch)?, plain.evaluate(&batch)?);
        assert!(dropping.evaluate(&[batch[0].clone(), batch[0].clone()]).is_err());
        assert_eq!(training(&dropping)?, plain.evaluate(&batch)?);
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn a_step_without_batches_is_rejected_on_all_ranks() {
    let text = same_error_on_all_ranks(2, |world| trainer(&world.mesh([("dp", 2)])?, 0.0)?.step_on_all(&[]).map(drop));
    assert!(text.contains("batches") && text.contains("next_batch"), "{text}");
}
