//! Attention and its gradient in terms of other differentiable operators: for masks with a gradient and for second
//! derivatives. Stores the scores.

use super::params::AttentionParams;
use crate::error::Result;
use crate::placement::Placement;
use crate::random::{Distribution, Generator};
use crate::tensor::{DTensor, RandomOptions};
use shardwise_kernels::attention::BlockMask;

/// The operands of one call; a mask has the dimensions of the scores, aligned at the last.
pub(super) struct Composed<'a> {
    pub(super) params: &'a AttentionParams,
    pub(super) q: &'a DTensor,
    pub(super) k: &'a DTensor,
    pub(super) v: &'a DTensor,
    pub(super) mask: Option<&'a DTensor>,
}

/// Scores after the softmax.
struct Probabilities {
    p: DTensor,
    /// Slope of the soft cap at every score.
    slope: Option<DTensor>,
    /// Zero for dropped probabilities, and `1 / (1 - p)` for the rest.
    kept: Option<DTensor>,
    logsumexp: DTensor,
}

impl Composed<'_> {
    /// The output, and the logarithm of the sum of exponentials of the scores.
    #[track_caller]
    pub(super) fn forward(&self) -> Result<[DTensor; 2]> {
        let Probabilities { p, kept, logsumexp, .. } = self.probabilities()?;
        let dropped = kept.map_or(Ok(p.clone()), |kept| p.mul(&kept))?;
        Ok([dropped.matmul(&self.shared(self.v)?)?, logsumexp])
    }

    /// The gradients of queries, keys and values for those of the two outputs of [`forward`](Self::forward).
    #[track_caller]
    pub(super) fn backward(&self, gradients: &[Option<DTensor>]) -> Result<[Option<DTensor>; 3]> {
        let Probabilities { p, slope, kept, .. } = self.probabilities()?;
        let (k, v) = (self.shared(self.k)?, self.shared(self.v)?);
        let mut of_scores: Option<DTensor> = None;
        let mut of_v = None;
        if let Some(g) = &gradients[0] {
            let mut of_p = g.matmul(&v.transpose(-2, -1)?)?;
            let mut dropped = p.clone();
            if let Some(kept) = &kept {
                (of_p, dropped) = (of_p.mul(kept)?, p.mul(kept)?);
            }
            of_v = Some(self.summed(&dropped.transpose(-2, -1)?.matmul(g)?)?);
            of_scores = Some(p.mul(&of_p.sub(&p.mul(&of_p)?.sum(&[-1], true)?)?)?);
        }
        if let Some(g) = &gradients[1] {
            let through = p.mul(&g.unsqueeze(-1)?.to_dtype(p.dtype())?)?;
            of_scores = Some(of_scores.map_or(Ok(through.clone()), |found| found.add(&through))?);
        }
        let Some(mut of_scores) = of_scores else { return Ok([None, None, None]) };
        if let Some(slope) = &slope {
            of_scores = of_scores.mul(slope)?;
        }
        let of_scores = of_scores.mul_scalar(self.params.scale.0)?;
        let of_q = of_scores.matmul(&k)?;
        let of_k = self.summed(&of_scores.transpose(-2, -1)?.matmul(self.q)?)?;
        Ok([Some(of_q), Some(of_k), of_v])
    }

    /// Keys or values with a dimension for the groups of query heads.
    #[track_caller]
    fn shared(&self, t: &DTensor) -> Result<DTensor> {
        if self.params.grouped { t.unsqueeze(-3) } else { Ok(t.clone()) }
    }

    /// The sum over the groups of query heads that share a key head.
    #[track_caller]
    fn summed(&self, t: &DTensor) -> Result<DTensor> {
        if self.params.grouped { t.sum(&[-3], false) } else { Ok(t.clone()) }
    }

    /// A mask by blocks as a tensor with the dimensions of the scores.
    #[track_caller]
    fn dense(&self, blocks: &BlockMask) -> Result<DTensor> {
        let [batches, heads, queries, keys] = blocks.sizes();
        let outer = &self.q.shape()[..self.q.ndim() - 2];
        let first_head = outer.len() - 1 - usize::from(self.params.grouped);
        let size = |(d, &n): (usize, &usize)| if (if d < first_head { batches } else { heads }) == 1 { 1 } else { n };
        let shape: Vec<usize> = outer.iter().enumerate().map(size).chain([queries, keys]).collect();
        self.q.constant(&blocks.to_tensor()?.reshape(shape)?)
    }

    #[track_caller]
    fn probabilities(&self) -> Result<Probabilities> {
        let params = self.params;
        let mut scores = self.q.mul_scalar(params.scale.0)?.matmul(&self.shared(self.k)?.transpose(-2, -1)?)?;
        let mut slope = None;
        if let Some(cap) = params.soft_cap {
            let bent = scores.div_scalar(cap.0)?.tanh()?;
            slope = Some(bent.square()?.neg()?.add_scalar(1.0)?);
            scores = bent.mul_scalar(cap.0)?;
        }
        if let Some(mask) = self.mask {
            scores = match mask.dtype().is_float() {
                true => scores.add(&mask.to_dtype(scores.dtype())?)?,
                false => scores.masked_fill(&mask.eq(0.0)?, f64::NEG_INFINITY)?,
            };
        }
        if let Some(blocks) = &params.blocks {
            scores = scores.masked_fill(&self.dense(blocks)?.eq(0.0)?, f64::NEG_INFINITY)?;
        }
        if params.causal || params.window.is_some() {
            let oldest = params.window.map(|window| params.query_offset.saturating_sub_unsigned(window));
            scores = scores.attention_band(oldest, params.causal.then_some(params.query_offset))?;
        }
        // A query that sees no key has probabilities of zero, and no gradient.
        let unseen = scores.detach().amax(&[-1], true)?.eq(f64::NEG_INFINITY)?;
        let seen = scores.masked_fill(&unseen, 0.0)?;
        let p = seen.softmax(-1)?.masked_fill(&unseen, 0.0)?;
        let logsumexp = scores.masked_fill(&unseen, 0.0)?.logsumexp(&[-1], true)?;
        let logsumexp = logsumexp.masked_fill(&unseen, f64::NEG_INFINITY)?.squeeze(Some(-1))?;
        let kept = match &params.dropout {
            Some(dropout) => {
                let generator = Generator::new(dropout.draw.seed);
                generator.set_state(dropout.draw);
                let keep = 1.0 - dropout.p.0;
                let options =
                    RandomOptions { distribution: Distribution::Bernoulli { p: keep }, generator: Some(&generator) };
                let replicated = vec![Placement::Replicate; p.placements().len()];
                let drawn = DTensor::random(options, p.shape(), p.dtype(), p.device_mesh(), replicated)?;
                Some(drawn.mul_scalar(1.0 / keep)?)
            }
            None => None,
        };
        Ok(Probabilities { p, slope, kept, logsumexp })
    }
}
