//! Text generation.

use candle_core::{Device, Tensor};
use shardwise::models::LanguageModel;
use shardwise::no_grad;
use shardwise::prelude::*;

use super::data::splitmix64;

/// How tokens are sampled.
#[derive(Clone, Copy)]
pub(crate) struct Sampling {
    /// Number of tokens to generate.
    pub(crate) tokens: usize,
    /// Context length: tokens before the last `window` ones are ignored.
    pub(crate) window: usize,
    /// 0 is greedy decoding.
    pub(crate) temperature: f64,
    /// Number of most likely tokens to sample from.
    pub(crate) top_k: usize,
    pub(crate) seed: u64,
}

/// Generates tokens that follow a prompt. Collective: all ranks of the mesh get the same ones.
pub(crate) fn generate(
    model: &dyn LanguageModel,
    mesh: &DeviceMesh,
    prompt: &[u32],
    sampling: Sampling,
) -> Result<Vec<u32>> {
    let mut tokens = prompt.to_vec();
    model.eval();
    for i in 0..sampling.tokens {
        let seen = &tokens[tokens.len().saturating_sub(sampling.window)..];
        let ids = Tensor::from_slice(seen, (1, seen.len()), &Device::Cpu)?;
        let ids = DTensor::distribute_tensor(&ids, mesh, vec![Replicate; mesh.ndim()], None)?;
        let last = no_grad(|| model.forward(&ids)?.select(1, -1)?.to_dtype(DType::F32))?;
        let logits = last.full_tensor()?.flatten_all()?.to_vec1::<f32>()?;
        tokens.push(sampling.pick(&logits, i as u64));
    }
    model.train();
    Ok(tokens.split_off(prompt.len()))
}

impl Sampling {
    /// Samples a token from logits. `number` counts the tokens of a text, so that each has its own random number.
    fn pick(self, logits: &[f32], number: u64) -> u32 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        order.truncate(if self.temperature == 0.0 { 1 } else { self.top_k.max(1) });
        let largest = f64::from(logits[order[0]]);
        let weight = |&token: &usize| ((f64::from(logits[token]) - largest) / self.temperature.max(1e-9)).exp();
        let total: f64 = order.iter().map(weight).sum();
        let mut left = total * (splitmix64(splitmix64(self.seed) ^ number) >> 11) as f64 / (1u64 << 53) as f64;
        let chosen = order.iter().find(|token| {
            left -= weight(token);
            left < 0.0
        });
        *chosen.unwrap_or(&order[0]) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_chosen_as_often_as_they_are_likely_and_only_from_the_top() {
        let logits = [0.0, 3f32.ln(), -9.0, 2f32.ln()];
        let sampling = Sampling { tokens: 1, window: 1, temperature: 1.0, top_k: 3, seed: 5 };
        let mut counts = [0i32; 4];
        (0..6000).for_each(|i| counts[sampling.pick(&logits, i) as usize] += 1);
        assert_eq!(counts[2], 0);
        for (token, expected) in [(0, 1000), (1, 3000), (3, 2000)] {
            assert!((counts[token] - expected).abs() < 150, "{counts:?}");
        }
        let greedy = Sampling { temperature: 0.0, ..sampling };
        assert!((0..20).all(|i| greedy.pick(&logits, i) == 1));
    }
}
