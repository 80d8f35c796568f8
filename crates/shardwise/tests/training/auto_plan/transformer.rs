//! A small transformer language model.

use shardwise::nn::{
    AttentionConfig, Builder, Embedding, Forward, Linear, Module, MultiHeadAttention, RmsNorm, SwiGlu,
};
use shardwise::ops::LossOptions;
use shardwise::prelude::*;

#[derive(Module)]
struct Layer {
    before: RmsNorm,
    attention: MultiHeadAttention,
    between: RmsNorm,
    mlp: SwiGlu,
}

#[derive(Module)]
pub(crate) struct Transformer {
    tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
}

const WIDTH: usize = 64;
const WORDS: usize = 96;

impl Transformer {
    pub(crate) fn new(builder: &Builder, layers: usize) -> Result<Self> {
        let sizes = AttentionConfig { width: WIDTH, heads: 4, key_heads: 4, causal: true, ..Default::default() };
        let layer = |builder: &Builder| {
            Ok(Layer {
                before: RmsNorm::new(&builder.child("before"), WIDTH, 1e-6)?,
                attention: MultiHeadAttention::new(&builder.child("attention"), sizes)?,
                between: RmsNorm::new(&builder.child("between"), WIDTH, 1e-6)?,
                mlp: SwiGlu::new(&builder.child("mlp"), WIDTH, 4 * WIDTH)?,
            })
        };
        Ok(Transformer {
            tokens: Embedding::new(&builder.child("tokens"), WORDS, WIDTH)?,
            layers: (0..layers).map(|i| layer(&builder.child(&format!("layers.{i}")))).collect::<Result<_>>()?,
            norm: RmsNorm::new(&builder.child("norm"), WIDTH, 1e-6)?,
            head: Linear::new(&builder.child("head"), WIDTH, WORDS)?,
        })
    }

    pub(crate) fn loss(&self, ids: &DTensor, targets: &DTensor) -> Result<DTensor> {
        let mut x = self.tokens.forward(ids)?;
        for layer in &self.layers {
            x = x.add(&layer.attention.forward(&layer.before.forward(&x)?)?)?;
            x = x.add(&layer.mlp.forward(&layer.between.forward(&x)?)?)?;
        }
        let logits = self.head.forward(&self.norm.forward(&x)?)?.flatten(0, 1)?;
        logits.cross_entropy(&targets.flatten(0, 1)?, LossOptions::default())
    }
}

/// Token ids and the ids that follow them, sharded over the first axis of a mesh of two.
pub(crate) fn batch(mesh: &DeviceMesh, length: usize) -> Result<(DTensor, DTensor)> {
    let words = |after: usize| {
        let word = move |at: &[usize]| ((at[0] * 31 + (at[1] + after) * 7) % WORDS) as f64;
        DTensor::from_fn((8, length), DType::I64, mesh, [Shard(0), Replicate], word)
    };
    Ok((words(0)?, words(1)?))
}
