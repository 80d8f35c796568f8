//! The training loop: gradient accumulation, clipping, and evaluation without side effects on the model.

use candle_core::{Device, Tensor};
use shardwise::data::{Batches, Dataset};
use shardwise::models::Model;
use shardwise::nn::{Dropout, Linear};
use shardwise::ops::Reduction;
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
