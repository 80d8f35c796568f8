//! Mixtures of experts whose experts are sharded over other mesh axes than the rest of the model.

use serde_json::json;
use shardwise::models::{Model, ModelSpec, PretrainedConfig, PretrainedModel};
use shardwise::optim::{ParamGroup, Sgd};
use shardwise::plan::{DataParallel, FullyShard, ShardingPlanner, TensorParallel, shard_module};
use shardwise::prelude::*;

use crate::fsdp::net::{alone, assert_same_parameters, value};

const EXPERTS: usize = 4;
const WIDTH: usize = 16;
const HIDDEN: usize = 24;

fn config() -> Result<PretrainedConfig> {
    PretrainedConfig::from_json(&json!({
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "vocab_size": 32,
        "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "max_position_embeddings": 32,
        "sliding_window": null, "tie_word_embeddings": false,
    }))
}

fn build(mesh: &DeviceMesh) -> Result<PretrainedModel> {
    mesh.manual_seed(5);
    config()?.build(&Builder::new(mesh).dtype(DType::F64))
}

/// Ids and targets of step `step`.
fn batch(mesh: &DeviceMesh, placements: &[Placement], step: usize) -> Result<Vec<DTensor>> {
    let tokens = |shift: usize| {
        let token = move |at: &[usize]| ((at[0] * 7 + at[1] * at[1] * 3 + step * 5 + shift) % 32) as f64;
        DTensor::from_fn((16, 6), DType::I64, mesh, placements.to_vec(), token)
    };
    Ok(vec![tokens(0)?, tokens(11)?])
}

/// Sharded over `efsdp` and `ep` together, which is the data-parallel axis of everything but the experts. Of those, `ep` has whole
/// ones, and `efsdp` and `tp` shard the inside.
fn shard(model: &PretrainedModel, mesh: &DeviceMesh) -> Result<()> {
    let planner = TensorParallel::new("tp").and(DataParallel::new(["replicate"]));
    let plan = planner.and(FullyShard::new(["efsdp", "ep"])).plan(model, mesh)?;
    let (layer, stacks) = ("blocks.*.experts", "blocks.*.experts.experts");
    let plan = plan
        .replace(&format!("{stacks}.{{gate,up}}"), [("ep", Shard(0)), ("tp", Shard(1)), ("efsdp", Shard(1))])
        .replace(&format!("{stacks}.down"), [("ep", Shard(0)), ("tp", Shard(2)), ("efsdp", Shard(1))])
        // every rank of `ep` sees all tokens, and which experts they chose
        .input(layer, [("ep", Replicate)])
        .output(&format!("{layer}.router"), [("ep", Replicate)])
        .output(layer, [("ep", Shard(0))]);
    shard_module(model, mesh, &plan)
}

#[test]
fn experts_are_sharded_over_other_axes_than_the_rest() {
    for (replicas, tp) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        let what = format!("{replicas} replica(s), tensor parallel over {tp}");
        let run = move |world: World| {
            let mesh = world.mesh([("replicate", replicas), ("efsdp", 2), ("ep", 2), ("tp", tp)])?;
            let model = build(&mesh)?;
            shard(&model, &mesh)?;
            let experts = &model.named_parameters();
            let placed = |suffix: &str| {
                let (_, param) = experts.iter().find(|(name, _)| name.ends_with(suffix)).expect("a parameter");
                param.get().placements().to_vec()
            };
            assert_eq!(placed("experts.experts.up"), [Replicate, Shard(1), Shard(0), Shard(1)]);
            assert_eq!(placed("experts.experts.down"), [Replicate, Shard(1), Shard(0), Shard(2)]);
            assert_eq!(placed("experts.router.weight")[1..3], [Shard(1), Shard(1)]);
            let one = alone(&world)?;
            let plain = build(&one)?;
            assert_same_parameters(&model, &plain, 0.0, &what)?;
            let sgd = || ParamGroup::new(Sgd::default()).with_lr(0.5);
            let mut ours = ShardedOptimizer::new(model.named_parameters(), sgd())?;
            let mut theirs = ShardedOptimizer::new(plain.named_parameters(), sgd())?;
            for step in 0..3 {
                world.trace().clear();
                let loss = model.batch_loss(&batch(&mesh, &[Shard(0), Shard(0), Shard(0), Replicate], step)?)?;
                let expected = plain.batch_loss(&batch(&one, &[Replicate], step)?)?;
                assert!((value(&loss)? - value(&expected)?).abs() < TOLERANCE, "{what}, step {step}");
                ours.step(loss.backward()?)?;
                theirs.step(expected.backward()?)?;
                // tokens go to the experts, not experts to the tokens
                let stack = |shape: &[usize]| shape.len() == 3 && shape[0] == EXPERTS && shape[1..].contains(&HIDDEN);
                for record in world.trace().records() {
                    let moved = record.layouts.as_ref().is_some_and(|(from, _)| stack(from.shape()));
                    let along = record.axes.as_deref().unwrap_or_default();
                    assert!(!moved || along.split(',').all(|axis| axis != "ep"), "{what}: {record:?}");
                }
            }
            assert_same_parameters(&model, &plain, TOLERANCE, &what)
        };
        launch(replicas * 4 * tp, run).unwrap();
    }
}

/// The router computes probabilities in f32, which then differ in their last digit.
const TOLERANCE: f64 = 1e-6;
