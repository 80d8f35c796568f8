//! Automatic planning: searches plans for a small transformer on 2 x 4 ranks with dry runs, under several memory limits
//! per rank, and compares them with tensor parallelism written by hand.
//!
//! Run with `cargo run --example 13_auto_plan`.

use shardwise::nn::{
    AttentionConfig, Builder, Embedding, Forward, Linear, Module, MultiHeadAttention, RmsNorm, SwiGlu,
};
use shardwise::ops::LossOptions;
use shardwise::optim::{AdamW, ParamGroup, ShardedOptimizer};
use shardwise::plan::{AutoPlanner, ShardingPlan, ShardingPlanner, TensorParallel};
use shardwise::prelude::*;
use shardwise::{DryWorld, launch};

const WIDTH: usize = 128;
const WORDS: usize = 512;

#[derive(Module)]
struct Block {
    before: RmsNorm,
    attention: MultiHeadAttention,
    between: RmsNorm,
    mlp: SwiGlu,
}

#[derive(Module)]
struct Model {
    tokens: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
}

impl Model {
    fn new(builder: &Builder) -> Result<Self> {
        let sizes = AttentionConfig { width: WIDTH, heads: 8, key_heads: 8, causal: true, ..Default::default() };
        let block = |builder: &Builder| {
            Ok(Block {
                before: RmsNorm::new(&builder.child("before"), WIDTH, 1e-6)?,
                attention: MultiHeadAttention::new(&builder.child("attention"), sizes)?,
                between: RmsNorm::new(&builder.child("between"), WIDTH, 1e-6)?,
                mlp: SwiGlu::new(&builder.child("mlp"), WIDTH, 3 * WIDTH)?,
            })
        };
        Ok(Model {
            tokens: Embedding::new(&builder.child("tokens"), WORDS, WIDTH)?,
            blocks: (0..2).map(|i| block(&builder.child(&format!("blocks.{i}")))).collect::<Result<_>>()?,
            norm: RmsNorm::new(&builder.child("norm"), WIDTH, 1e-6)?,
            head: Linear::without_bias(&builder.child("head"), WIDTH, WORDS)?,
        })
    }

    fn loss(&self, mesh: &DeviceMesh) -> Result<DTensor> {
        let words = |after: usize| {
            let word = move |at: &[usize]| ((at[0] * 31 + (at[1] + after) * 7) % WORDS) as f64;
            DTensor::from_fn((8, 32), DType::I64, mesh, [Shard(0), Replicate], word)
        };
        let mut x = self.tokens.forward(&words(0)?)?;
        for block in &self.blocks {
            x = x.add(&block.attention.forward(&block.before.forward(&x)?)?)?;
            x = x.add(&block.mlp.forward(&block.between.forward(&x)?)?)?;
        }
        let logits = self.head.forward(&self.norm.forward(&x)?)?.flatten(0, 1)?;
        logits.cross_entropy(&words(1)?.flatten(0, 1)?, LossOptions::default())
    }
}

/// One training step with a plan.
fn step(plan: &ShardingPlan, mesh: &DeviceMesh) -> Result<()> {
    let model = plan.build(mesh, Model::new)?;
    let mut optimizer = ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(AdamW::default()))?;
    optimizer.step(model.loss(mesh)?.backward()?)
}

fn main() -> Result<()> {
    let axes = [("dp", 2), ("tp", 4)];
    let found = DryWorld::new(8)?.run(|world| {
        let mesh = world.mesh(axes)?;
        let model = Model::new(&Builder::new(&mesh))?;
        let by_hand = TensorParallel::new("tp").plan(&model, &mesh)?;
        let planner = || AutoPlanner::new(step).candidate("by hand", by_hand.clone());
        let reference = planner().estimate(&by_hand, &mesh)?;
        println!("by hand: {:.1} us, {} KiB per rank", reference.us(), reference.peak_bytes >> 10);
        let mut plans = Vec::new();
        for limit in [usize::MAX, 3000 << 10, 2200 << 10, 1 << 10] {
            let limit_text =
                if limit == usize::MAX { "no limit".to_string() } else { format!("limit {} KiB", limit >> 10) };
            match planner().memory_limit(limit).search(&model, &mesh) {
                Ok(search) => {
                    let best: String = search.to_string().lines().take(6).map(|line| format!("{line}\n")).collect();
                    println!("{limit_text}, {} plans tried, the best of them:\n{best}", search.trials.len());
                    assert!(search.estimate.peak_bytes <= limit);
                    assert!(reference.peak_bytes > limit || search.estimate.us() <= reference.us());
                    plans.push(search.plan);
                }
                Err(error) => println!("{limit_text}: {error}\n"),
            }
        }
        println!("the plan without a limit:\n{}", plans[0].table(&model)?);
        Ok(plans.swap_remove(0))
    })?;
    // A plan is a value: the ranks of a real run build their model from it.
    let plan = found.value;
    launch(8, move |world| step(&plan, &world.mesh(axes)?))
}
