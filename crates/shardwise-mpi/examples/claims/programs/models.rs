//! Layers and optimizers of models.

use serde_json::json;
use shardwise::models::{Model, ModelSpec, PretrainedConfig};
use shardwise::nn::{AttentionConfig, MultiHeadAttention};
use shardwise::optim::{Muon, ParamGroup};
use shardwise::plan::{ShardingPlanner, TensorParallel, shard_module};
use shardwise::prelude::*;

use super::{RANKS, all_elements, alone, calls, distance, line, square};

/// A mesh of this rank, with the axis that `line` has.
fn one_on_line(world: &World) -> Result<DeviceMesh> {
    world.device_mesh(Mesh::from_ranks([("tp", 1)], vec![world.rank()])?)
}

pub(super) fn nine_heads(world: &World) -> Result<String> {
    let sizes = AttentionConfig { width: 36, heads: 9, key_heads: 9, causal: true, ..AttentionConfig::default() };
    let run = |mesh: &DeviceMesh| -> Result<(Vec<f64>, usize)> {
        mesh.manual_seed(1);
        let model = MultiHeadAttention::new(&Builder::new(mesh).dtype(DType::F64), sizes)?;
        shard_module(&model, mesh, &TensorParallel::new("tp").plan(&model, mesh)?)?;
        let x =
            DTensor::from_fn((2, 5, 36), DType::F64, mesh, [Replicate], |i| ((i[0] * 5 + i[1]) * 36 + i[2]) as f64)?;
        let y = model.forward(&x.sin()?)?;
        Ok((all_elements(&y)?, model.named_parameters()[0].1.get().local_shape()[0]))
    };
    let ((expected, _), (found, rows)) = (run(&one_on_line(world)?)?, run(&line(world)?)?);
    assert!(distance(&found, &expected) < 1e-12);
    assert_eq!(rows, 4 * [3, 2, 2, 2][world.rank()]);
    Ok("9 heads as 3, 2, 2 and 2 on 4 ranks, values of one device".into())
}

pub(super) fn muon(world: &World) -> Result<String> {
    let step = |mesh: &DeviceMesh, placements: Vec<Placement>| -> Result<(Vec<f64>, usize)> {
        mesh.manual_seed(4);
        let random = || DTensor::randn((8, 12), mesh, placements.clone());
        let (weight, gradient) = (Param::new(&random()?), random()?);
        let group = ParamGroup::new(Muon::default()).with_lr(0.1);
        let mut optimizer = ShardedOptimizer::new([("weight".to_string(), weight.clone())], group)?;
        let gradients = weight.get().mul(&gradient)?.sum_all()?.backward()?;
        world.trace().clear();
        optimizer.step(gradients)?;
        let count = calls(world).len();
        Ok((all_elements(&weight.get())?, count))
    };
    let (expected, _) = step(&alone(world)?, vec![Replicate])?;
    let mut most = 0;
    for placements in [[Shard(0), Replicate], [Replicate, Shard(1)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]] {
        let (found, count) = step(&square(world)?, placements.to_vec())?;
        assert_eq!(found, expected, "{placements:?}");
        most = most.max(count);
    }
    assert!(most <= 1, "{most} collectives");
    Ok("the bits of one device in 4 layouts, with one collective per matrix and step".into())
}

pub(super) fn experts(world: &World) -> Result<String> {
    let config = PretrainedConfig::from_json(&json!({
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "vocab_size": 32,
        "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32,
        "sliding_window": null, "tie_word_embeddings": false,
    }))?;
    let run = |mesh: &DeviceMesh| -> Result<(Vec<f64>, usize)> {
        mesh.manual_seed(5);
        let model = config.build(&Builder::new(mesh).dtype(DType::F64))?;
        shard_module(&model, mesh, &TensorParallel::new("tp").plan(&model, mesh)?)?;
        let tokens = |shift: usize| {
            DTensor::from_fn((4, 6), DType::I64, mesh, [Replicate], move |i| {
                ((i[0] * 7 + i[1] * 3 + shift) % 32) as f64
            })
        };
        let loss = model.batch_loss(&[tokens(0)?, tokens(11)?])?;
        let of_experts = model.named_parameters().into_iter().filter(|(name, _)| name.contains(".experts.experts."));
        Ok((all_elements(&loss)?, of_experts.map(|(_, param)| param.get().local_elem_count()).sum()))
    };
    let ((expected, whole), (found, held)) = (run(&one_on_line(world)?)?, run(&line(world)?)?);
    assert!(distance(&found, &expected) < 1e-12);
    assert_eq!((whole, held * RANKS), (8 * 3 * 8 * 16, whole));
    Ok(format!("a rank holds {held} of {whole} elements of experts; the loss of one device"))
}
