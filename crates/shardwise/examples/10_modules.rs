//! A model written as one-device code, its sharding specified separately; trained for 20 steps in two layouts, with
//! equal losses.
//!
//! Run with `cargo run --example 10_modules`.

use shardwise::nn::{Activation, Builder, Embedding, Forward, LayerNorm, Linear, Mlp, Module};
use shardwise::ops::LossOptions;
use shardwise::optim::{AdamW, ParamGroup, ShardedOptimizer};
use shardwise::prelude::*;

#[derive(Module)]
struct Model {
    tokens: Embedding,
    norm: LayerNorm,
    mlp: Mlp,
    head: Linear,
}

impl Model {
    fn new(builder: &Builder) -> Result<Self> {
        Ok(Model {
            tokens: Embedding::new(&builder.child("tokens"), 64, 32)?,
            norm: LayerNorm::new(&builder.child("norm"), 32, 1e-5)?,
            mlp: Mlp::new(&builder.child("mlp"), 32, 128, Activation::Gelu)?,
            head: Linear::new(&builder.child("head"), 32, 64)?,
        })
    }

    fn loss(&self, ids: &DTensor, targets: &DTensor) -> Result<DTensor> {
        let x = self.tokens.forward(ids)?;
        let x = x.add(&self.mlp.forward(&self.norm.forward(&x)?)?)?;
        self.head.forward(&x)?.cross_entropy(targets, LossOptions::default())
    }
}

/// Trains on predicting the next number modulo 64 and returns the loss of every step.
fn train(mesh: &DeviceMesh, place: fn(&str, &[usize]) -> Vec<Placement>) -> Result<Vec<f32>> {
    mesh.manual_seed(1);
    let model = Model::new(&Builder::new(mesh).placed(place))?;
    let mut optimizer =
        ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(AdamW::default()).with_lr(0.01))?;
    let batch = [Shard(0), Replicate];
    let ids = DTensor::from_fn(128, DType::I64, mesh, batch.clone(), |i| ((i[0] * 37) % 64) as f64)?;
    let targets = DTensor::from_fn(128, DType::I64, mesh, batch, |i| ((i[0] * 37 + 1) % 64) as f64)?;
    let mut losses = Vec::new();
    for _ in 0..20 {
        let loss = model.loss(&ids, &targets)?;
        optimizer.step(loss.backward()?)?;
        losses.push(loss.item()?);
    }
    Ok(losses)
}

fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let replicated = train(&mesh, |_, _| vec![Replicate, Replicate])?;
        // Weights are sharded over dp; those of the MLP and the head over tp for tensor parallelism.
        let sharded = train(&mesh, |path, shape| match path {
            "mlp.up.weight" | "mlp.up.bias" | "head.weight" | "head.bias" => vec![Replicate, Shard(0)],
            "mlp.down.weight" => vec![Shard(0), Shard(1)],
            _ if shape.len() == 2 => vec![Shard(0), Replicate],
            _ => vec![Replicate, Replicate],
        })?;
        let apart = replicated.iter().zip(&sharded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        if world.rank() == 0 {
            println!(
                "loss {:.4} to {:.4}; largest difference between the two layouts {apart:.1e}",
                replicated[0], replicated[19]
            );
        }
        assert!(apart < 1e-4 && replicated[19] < 0.5 * replicated[0], "{replicated:?} {sharded:?}");
        Ok(())
    })
}
