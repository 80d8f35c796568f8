//! One model sharded by three plans: written by hand, by planners, and by parallel styles. The losses are equal.
//!
//! Run with `cargo run --example 12_plans`.

use shardwise::nn::{Activation, Builder, Embedding, Forward, LayerNorm, Linear, Mlp, Module};
use shardwise::ops::LossOptions;
use shardwise::plan::{
    ColwiseParallel, FullyShard, RowwiseParallel, ShardingPlan, ShardingPlanner, TensorParallel, parallelize_module,
    shard_module,
};
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

    fn loss(&self, mesh: &DeviceMesh) -> Result<f32> {
        let batch = [Shard(0), Replicate];
        let ids = DTensor::from_fn(128, DType::I64, mesh, batch.clone(), |i| ((i[0] * 37) % 64) as f64)?;
        let targets = DTensor::from_fn(128, DType::I64, mesh, batch, |i| ((i[0] * 37 + 1) % 64) as f64)?;
        let x = self.tokens.forward(&ids)?;
        let x = x.add(&self.mlp.forward(&self.norm.forward(&x)?)?)?;
        self.head.forward(&x)?.cross_entropy(&targets, LossOptions::default())?.item()
    }
}

fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let fresh = || {
            mesh.manual_seed(1);
            Model::new(&Builder::new(&mesh))
        };
        let expected = fresh()?.loss(&mesh)?;
        // By hand: patterns of parameter paths with placements, and the layout of an output.
        let by_hand = ShardingPlan::new()
            .param("mlp.up.*", [("tp", Shard(0))])
            .param("mlp.down.weight", [("tp", Shard(1))])
            .param("tokens.weight", [Shard(0), Replicate])
            .output("mlp", [("tp", Replicate)]);
        // By planners: tensor parallelism, then fully sharded data parallelism on the rest.
        let planned = TensorParallel::new("tp").and(FullyShard::new(["dp"])).plan(&fresh()?, &mesh)?;
        for (name, plan) in [("by hand", &by_hand), ("planned", &planned)] {
            let model = fresh()?;
            shard_module(&model, &mesh, plan)?;
            let loss = model.loss(&mesh)?;
            assert!((loss - expected).abs() < 1e-4, "{name}: {loss}, expected {expected}");
            if world.rank() == 0 {
                println!("{name}: loss {loss:.4}\n{plan}");
            }
        }
        // By PyTorch's parallel styles.
        let model = fresh()?;
        parallelize_module(
            &model,
            &mesh,
            &[("mlp.up", &ColwiseParallel::new("tp")), ("mlp.down", &RowwiseParallel::new("tp"))],
        )?;
        assert!((model.loss(&mesh)? - expected).abs() < 1e-4);
        let table = planned.table(&fresh()?)?;
        if world.rank() == 0 {
            println!("planned, per parameter:\n{table}");
        }
        Ok(())
    })
}
