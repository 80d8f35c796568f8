//! How the next token is chosen: pure functions of a row of logits.

use crate::error::{ErrorKind, Result};
use crate::random::{Distribution, GeneratorState};

/// How tokens are chosen, and when generation ends.
///
/// Settings apply in the order of transformers: repetition penalty, temperature, top-k, top-p, min-p. A temperature of 0 is
/// greedy decoding, in which only the penalty counts.
///
/// The random number of a token depends on the seed and on how many tokens the row has generated, so a prompt gives the same
/// tokens alone and in a batch, and on every mesh. Rows with the same prompt therefore give the same tokens.
///
/// ```
/// use shardwise::generate::Sampling;
///
/// let sampling = Sampling::greedy().tokens(64).stop("\n\n");
/// let varied = Sampling::new(0.8).top_k(50).top_p(0.95).seed(7);
/// assert!(sampling.check().is_ok() && varied.check().is_ok());
/// assert!(Sampling::new(-1.0).check().is_err());
/// ```
#[derive(Debug, Clone, PartialEq)]
#[doc(alias = "GenerationConfig")]
pub struct Sampling {
    /// Divides the logits; 0 is greedy decoding.
    pub temperature: f64,
    /// Sample from this many most likely tokens; 0 takes all. Among equal logits, lower ids come first.
    pub top_k: usize,
    /// Sample from the most likely tokens whose probabilities add up to this; 1 takes all.
    pub top_p: f64,
    /// Sample from tokens whose probability is at least this share of the largest one; 0 takes all.
    pub min_p: f64,
    /// Divides positive logits of tokens that the row has already, and multiplies negative ones; 1 changes nothing.
    pub repetition_penalty: f64,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Largest number of new tokens per row.
    #[doc(alias = "max_new_tokens")]
    pub max_tokens: usize,
    /// Texts that end a row.
    #[doc(alias = "stop_strings")]
    pub stop: Vec<String>,
    /// Tokens that end a row; `None` takes those of the model.
    #[doc(alias = "eos_token_id")]
    pub eos: Option<Vec<u32>>,
}

impl Sampling {
    /// Greedy decoding of at most 128 tokens.
    pub fn greedy() -> Self {
        Self::new(0.0)
    }

    /// Sampling at a temperature, of at most 128 tokens.
    pub fn new(temperature: f64) -> Self {
        Sampling {
            temperature,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            max_tokens: 128,
            stop: Vec::new(),
            eos: None,
        }
    }

    /// Sets the largest number of new tokens.
    #[must_use]
    pub fn tokens(self, most: usize) -> Self {
        Sampling { max_tokens: most, ..self }
    }

    /// Samples from the `k` most likely tokens.
    #[must_use]
    pub fn top_k(self, k: usize) -> Self {
        Sampling { top_k: k, ..self }
    }

    /// Samples from the most likely tokens whose probabilities add up to `p`.
    #[must_use]
    pub fn top_p(self, p: f64) -> Self {
        Sampling { top_p: p, ..self }
    }

    /// Samples from tokens that are at least `p` times as likely as the most likely one.
    #[must_use]
    pub fn min_p(self, p: f64) -> Self {
        Sampling { min_p: p, ..self }
    }

    /// Makes tokens that the row has already less likely, for a penalty above 1.
    #[must_use]
    pub fn repetition_penalty(self, penalty: f64) -> Self {
        Sampling { repetition_penalty: penalty, ..self }
    }

    /// Sets the seed.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Sampling { seed, ..self }
    }

    /// Adds a text that ends a row.
    #[must_use]
    pub fn stop(mut self, text: &str) -> Self {
        self.stop.push(text.to_string());
        self
    }

    /// Sets the tokens that end a row, in place of those of the model.
    #[must_use]
    pub fn eos(self, ids: &[u32]) -> Self {
        Sampling { eos: Some(ids.to_vec()), ..self }
    }

    /// Whether the most likely token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] with the name of the first setting that is out of range.
    pub fn check(&self) -> Result<()> {
        let finite_from_0 = |value: f64| value >= 0.0 && value.is_finite();
        let share = |value: f64| (0.0..=1.0).contains(&value);
        let checks: [(&'static str, f64, bool, &str); 4] = [
            ("temperature", self.temperature, finite_from_0(self.temperature), "a finite number of at least 0"),
            ("top-p", self.top_p, share(self.top_p), "a probability from 0 to 1"),
            ("min-p", self.min_p, share(self.min_p), "a share from 0 to 1"),
            (
                "repetition penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
                "a finite number above 0",
            ),
        ];
        for (what, found, good, needed) in checks {
            if !good {
                return Err(ErrorKind::Argument.error(what, found, needed, "correct the option"));
            }
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(ErrorKind::Argument.error("stop", "an empty text", "a text", "leave the option out"));
        }
        Ok(())
    }

    /// Applies the repetition penalty to the logits of tokens from `first` on. Each of `seen` counts once.
    pub fn penalize(&self, logits: &mut [f32], first: usize, seen: impl IntoIterator<Item = u32>) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        let penalty = self.repetition_penalty as f32;
        let seen: std::collections::BTreeSet<u32> = seen.into_iter().collect();
        for id in seen {
            if let Some(logit) = (id as usize).checked_sub(first).and_then(|at| logits.get_mut(at)) {
                *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
            }
        }
    }

    /// Returns the tokens that may be sampled, with probabilities that add up to 1, most likely first.
    ///
    /// `candidates` are pairs of token and logit, after the penalty: all of them, or at least the [`top_k`](Self::top_k) best.
    /// With greedy decoding the result is only the most likely token; NaN counts as the least likely.
    pub fn distribution(&self, mut candidates: Vec<(u32, f32)>) -> Vec<(u32, f64)> {
        let key = |logit: f32| if logit.is_nan() { f32::NEG_INFINITY } else { logit };
        let order = |a: &(u32, f32), b: &(u32, f32)| key(b.1).total_cmp(&key(a.1)).then(a.0.cmp(&b.0));
        let most = match (self.is_greedy(), self.top_k) {
            (true, _) => 1,
            (false, 0) => candidates.len(),
            (false, k) => k.min(candidates.len()),
        };
        if most < candidates.len() {
            // Partial selection first: vocabularies are long, and few tokens are kept.
            candidates.select_nth_unstable_by(most, order);
            candidates.truncate(most);
        }
        candidates.sort_unstable_by(order);
        let Some(&(_, largest)) = candidates.first() else { return Vec::new() };
        let temperature = if self.is_greedy() { 1.0 } else { self.temperature };
        let largest = f64::from(key(largest));
        let weight = |logit: f32| match f64::from(key(logit)) {
            // Where all logits are infinite, so is their difference.
            logit if logit == largest => 1.0,
            logit => ((logit - largest) / temperature).exp(),
        };
        let mut kept: Vec<(u32, f64)> = candidates.into_iter().map(|(id, logit)| (id, weight(logit))).collect();
        normalize(&mut kept);
        if self.top_p < 1.0 {
            // A token is dropped if it and all less likely ones have at most 1 - p together.
            let mut tail = 0.0;
            let below = kept.iter().rev().take_while(|(_, probability)| {
                tail += probability;
                tail <= 1.0 - self.top_p
            });
            let count = kept.len() - below.count();
            kept.truncate(count.max(1));
            normalize(&mut kept);
        }
        if self.min_p > 0.0 {
            let least = self.min_p * kept[0].1;
            kept.retain(|&(_, probability)| probability >= least);
            normalize(&mut kept);
        }
        kept
    }

    /// Picks one of the [`distribution`](Self::distribution)'s tokens, for the `number`-th new token of a row. Nothing if the
    /// distribution is empty.
    pub fn pick(&self, distribution: &[(u32, f64)], number: u64) -> Option<u32> {
        let draw = GeneratorState { seed: self.seed, offset: number };
        // All 53 bits of a double: a vocabulary has tokens of tiny probabilities.
        let mut left = Distribution::Uniform { low: 0.0, high: 1.0 }.at(draw, 0, 53);
        let chosen = distribution.iter().find(|(_, probability)| {
            left -= probability;
            left < 0.0
        });
        // Rounding may leave a rest after the last one.
        chosen.or(distribution.last()).map(|&(id, _)| id)
    }
}

fn normalize(weights: &mut [(u32, f64)]) {
    let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
    weights.iter_mut().for_each(|(_, weight)| *weight /= total);
}
