//! Tensor parallelism shards attention at head boundaries on any number of ranks: uneven heads need the collectives of even
//! ones, and give the losses of one rank.

use std::collections::BTreeMap;

use shardwise::models::{
    DataParallelMode, GptConfig, LlamaConfig, ModelConfig, ParallelismConfig, batch_placements, build,
};
use shardwise::nn::{Builder, Forward, Heads, Linear, Module};
use shardwise::ops::AttentionOptions;
use shardwise::optim::{AdamW, ParamGroup, ShardedOptimizer};
use shardwise::plan::{ShardingPlanner, TensorParallel, shard_module};
use shardwise::prelude::*;

const LENGTH: usize = 6;

fn gpt(heads: usize) -> ModelConfig {
    ModelConfig::Gpt(GptConfig {
        vocab_size: 40,
        seq_len: LENGTH,
        d_model: 4 * heads,
        n_layers: 2,
        n_heads: heads,
        d_ff: 40,
        ..GptConfig::default()
    })
}

fn llama(heads: usize, key_heads: usize) -> ModelConfig {
    ModelConfig::Llama(LlamaConfig {
        vocab_size: 40,
        seq_len: LENGTH,
        d_model: 4 * heads,
        n_layers: 2,
        n_heads: heads,
        n_kv_heads: key_heads,
        d_ff: 40,
        ..LlamaConfig::default()
    })
}

type Calls = BTreeMap<(&'static str, &'static str), usize>;

/// Losses of three steps, and the collectives of the last one.
fn trained(
    config: &ModelConfig,
    mesh: &str,
    data_parallel: DataParallelMode,
    sequence_parallel: bool,
) -> (Vec<f32>, Calls) {
    let (config, mesh) = (config.clone(), mesh.parse::<Mesh>().unwrap());
    let tensor_parallel = mesh.axis("tp").is_ok();
    let plan = ParallelismConfig { data_parallel, tensor_parallel, sequence_parallel }.plan(&config, &mesh).unwrap();
    let ranks = mesh.size();
    let run = move |world: World| {
        let mesh = world.device_mesh(mesh.clone())?;
        mesh.manual_seed(3);
        let model = build(&config, &plan, &mesh, DType::F32)?;
        let group = ParamGroup::new(AdamW::default()).with_lr(0.01);
        let mut optimizer = ShardedOptimizer::new(model.named_parameters(), group)?;
        let (mut losses, mut calls) = (Vec::new(), Calls::new());
        for step in 0..3 {
            let tokens = |shift: usize| move |i: &[usize]| ((i[0] * 11 + (i[1] + shift) * 7 + step * 5) % 40) as f64;
            let make = |shift| DTensor::from_fn((4, LENGTH), DType::U32, &mesh, batch_placements(&mesh), tokens(shift));
            let (ids, targets) = (make(0)?, make(1)?);
            world.trace().clear();
            let loss = model.loss(&ids, &targets)?;
            optimizer.step(loss.backward()?)?;
            let report = world.trace().report();
            calls = report.0.into_iter().map(|(operator, call, total)| ((operator, call), total.calls)).collect();
            losses.push(loss.item::<f32>()?);
        }
        Ok((losses, calls))
    };
    ThreadWorld::new(ranks).unwrap().run(run).unwrap().swap_remove(0)
}

fn check(uneven: &ModelConfig, even: &ModelConfig, mesh: &str, data_parallel: DataParallelMode, sequence: bool) {
    let (expected, _) = trained(uneven, "dp=1", DataParallelMode::Replicate, false);
    let (losses, calls) = trained(uneven, mesh, data_parallel, sequence);
    let close = losses.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1.0));
    assert!(close, "{uneven:?} on {mesh}, {data_parallel:?}: {losses:?}, not {expected:?}");
    let (_, needed) = trained(even, mesh, data_parallel, sequence);
    assert_eq!(calls, needed, "{uneven:?} on {mesh}, {data_parallel:?}, sequence {sequence}");
    println!("{} collectives per step on {mesh}", calls.values().sum::<usize>());
}

#[test]
fn five_heads_on_two_ranks_need_the_collectives_of_four() {
    check(&gpt(5), &gpt(4), "tp=2", DataParallelMode::Replicate, false);
    check(&gpt(5), &gpt(4), "tp=2", DataParallelMode::Replicate, true);
    check(&gpt(3), &gpt(4), "dp=2,tp=2", DataParallelMode::FullyShard, false);
}

#[test]
fn groups_of_query_heads_stay_with_their_key_head() {
    check(&llama(6, 3), &llama(8, 4), "tp=2", DataParallelMode::Replicate, false);
    check(&llama(10, 5), &llama(12, 6), "tp=3", DataParallelMode::Replicate, true);
}

#[test]
fn with_more_ranks_than_heads_some_ranks_hold_none() {
    check(&gpt(3), &gpt(4), "tp=4", DataParallelMode::Replicate, false);
    check(&llama(4, 2), &llama(6, 3), "tp=3", DataParallelMode::Replicate, false);
    check(&llama(4, 2), &llama(8, 4), "tp=4", DataParallelMode::Replicate, true);
}

/// Queries, keys and values in one projection, ordered by head.
#[derive(Module)]
struct Fused {
    qkv: Linear,
    out: Linear,
    heads: Heads,
}

const SIZE: usize = 4;

impl Fused {
    fn new(builder: &Builder, heads: usize) -> Result<Self> {
        let width = heads * SIZE;
        Ok(Fused {
            qkv: Linear::new(&builder.child("qkv"), width, 3 * width)?,
            out: Linear::new(&builder.child("out"), width, width)?,
            heads: Heads { query: heads, key: heads },
        })
    }

    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let all = self.qkv.forward(x)?.unflatten(-1, &[self.heads.key as isize, -1])?.transpose(-3, -2)?;
        let part = |i: usize| all.narrow(-1, i * SIZE, SIZE);
        let mixed = part(0)?.scaled_dot_product_attention(&part(1)?, &part(2)?, AttentionOptions::default())?;
        self.out.forward(&mixed.transpose(-3, -2)?.flatten(-2, -1)?)
    }
}

#[test]
fn a_fused_projection_is_sharded_at_head_boundaries() {
    for (ranks, heads) in [(2, 5), (3, 4), (4, 3), (2, 4)] {
        let calls = launch(ranks, move |world| {
            let mesh = world.mesh([("tp", world.size())])?;
            mesh.manual_seed(1);
            let layer = Fused::new(&Builder::new(&mesh), heads)?;
            let x = DTensor::randn((2, LENGTH, heads * SIZE), &mesh, [Replicate])?;
            let expected = layer.forward(&x)?.full_tensor()?;
            let plan = TensorParallel::new("tp").plan(&layer, &mesh)?;
            shard_module(&layer, &mesh, &plan)?;
            world.trace().clear();
            let y = layer.forward(&x)?;
            let calls: Vec<&str> = world.trace().records().iter().map(|r| r.call).collect();
            let gradients = y.square()?.sum_all()?.backward()?;
            assert_eq!(gradients.get(&layer.qkv.weight.get())?.shape(), [3 * heads * SIZE, heads * SIZE]);
            let far = y.full_tensor()?.sub(&expected)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
            assert!(far < 1e-5, "{far}");
            Ok(calls)
        });
        assert_eq!(calls.unwrap(), ["all_reduce"], "{heads} heads on {ranks} ranks");
    }
}

#[test]
fn heads_are_distributed_as_evenly_as_possible() {
    launch(6, |world| {
        let placements = |mesh: &DeviceMesh, heads: usize, axes: &[&str]| -> Result<Vec<Placement>> {
            let layer = Fused::new(&Builder::new(mesh), heads)?;
            let mut plan = shardwise::plan::ShardingPlan::new();
            for axis in axes {
                plan = TensorParallel::new(axis).extend(plan, &layer, mesh)?;
            }
            Ok(plan.table(&layer)?.0[0].layout.placements().to_vec())
        };
        let six = world.mesh([("tp", 6)])?;
        let head = 3 * SIZE;
        assert_eq!(placements(&six, 6, &["tp"])?, [Shard(0)]);
        let sizes = [2, 2, 1, 1, 1, 1].map(|n| n * head);
        assert_eq!(placements(&six, 8, &["tp"])?, [Placement::ragged(0, sizes)]);
        // two axes, one after the other: 4 and 3 heads, then 2, 1, 1 and 1, 1, 1
        let both = world.mesh([("a", 2), ("b", 3)])?;
        let outer = Placement::ragged(0, [4 * head, 3 * head]);
        let inner = Placement::ragged(0, [2, 1, 1, 1, 1, 1].map(|n| n * head));
        assert_eq!(placements(&both, 7, &["a", "b"])?, [outer, inner]);
        Ok(())
    })
    .unwrap();
}
