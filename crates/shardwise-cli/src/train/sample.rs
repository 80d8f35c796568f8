//! Text that a model makes up.

use candle_core::{Device, Tensor};
use shardwise::models::LanguageModel;
use shardwise::no_grad;
use shardwise::prelude::*;

use super::data::scramble;

/// How many tokens follow a prompt, and how each of them is chosen.
#[derive(Clone, Copy)]
pub(crate) struct Choice {
    /// Number of tokens.
    pub(crate) tokens: usize,
    /// Number of tokens that the model was trained to look at; whatever is before them is forgotten.
    pub(crate) window: usize,
    /// Below 1 likely tokens become likelier; 0 always takes the likeliest.
    pub(crate) temperature: f64,
    /// Only so many of the likeliest tokens are considered.
    pub(crate) top: usize,
    pub(crate) seed: u64,
}

/// Tokens that follow a prompt. All ranks of the mesh make the same ones together.
pub(crate) fn continued(
    model: &dyn LanguageModel,
    mesh: &DeviceMesh,
    prompt: &[u32],
    choice: Choice,
) -> Result<Vec<u32>> {
    let mut tokens = prompt.to_vec();
    model.eval();
    for i in 0..choice.tokens {
        let seen = &tokens[tokens.len().saturating_sub(choice.window)..];
        let ids = Tensor::from_slice(seen, (1, seen.len()), &Device::Cpu)?;
        let ids = DTensor::distribute_tensor(&ids, mesh, vec![Replicate; mesh.ndim()], None)?;
        let last = no_grad(|| model.forward(&ids)?.select(1, -1)?.to_dtype(DType::F32))?;
        let logits = last.full_tensor()?.flatten_all()?.to_vec1::<f32>()?;
        tokens.push(choice.pick(&logits, i as u64));
    }
    model.train();
    Ok(tokens.split_off(prompt.len()))
}

impl Choice {
    /// One of the tokens with these logits, as the `number`-th choice.
    fn pick(self, logits: &[f32], number: u64) -> u32 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        order.truncate(if self.temperature == 0.0 { 1 } else { self.top.max(1) });
        let largest = f64::from(logits[order[0]]);
        let weight = |&token: &usize| ((f64::from(logits[token]) - largest) / self.temperature.max(1e-9)).exp();
        let total: f64 = order.iter().map(weight).sum();
        let mut left = total * (scramble(scramble(self.seed) ^ number) >> 11) as f64 / (1u64 << 53) as f64;
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
        let choice = Choice { tokens: 1, window: 1, temperature: 1.0, top: 3, seed: 5 };
        let mut counts = [0i32; 4];
        (0..6000).for_each(|i| counts[choice.pick(&logits, i) as usize] += 1);
        assert_eq!(counts[2], 0);
        for (token, expected) in [(0, 1000), (1, 3000), (3, 2000)] {
            assert!((counts[token] - expected).abs() < 150, "{counts:?}");
        }
        let greedy = Choice { temperature: 0.0, ..choice };
        assert!((0..20).all(|i| greedy.pick(&logits, i) == 1));
    }
}
