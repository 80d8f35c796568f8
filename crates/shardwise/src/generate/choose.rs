//! The next token of every row, from logits that may be sharded.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::sampling::Sampling;
use crate::error::{ErrorKind, Result};
use crate::tensor::DTensor;

/// What choosing the next token of a row depends on, apart from its logits.
pub(super) struct RowHistory<'a> {
    /// Tokens of the row, without padding.
    pub(super) seen: &'a [u32],
    /// New tokens of the row so far.
    pub(super) number: u64,
}

/// Chooses a token per row of logits `[rows, vocabulary]`. Collective; every rank gets the same tokens.
///
/// Logits that are sharded on the vocabulary are not gathered for greedy decoding (one candidate per rank is exchanged) and
/// for top-k (k candidates per rank); otherwise one row per sequence is.
pub(super) fn choose(logits: &DTensor, sampling: &Sampling, rows: &[RowHistory<'_>]) -> Result<Vec<u32>> {
    let mut logits = logits.to_dtype(DType::F32)?;
    if sampling.repetition_penalty != 1.0 {
        logits = penalized(&logits, sampling, rows)?;
    }
    let vocabulary = logits.shape()[1];
    let candidates = if sampling.is_greedy() || 0 < sampling.top_k && sampling.top_k < vocabulary {
        let k = if sampling.is_greedy() { 1 } else { sampling.top_k };
        let (values, ids) = logits.topk(k, -1, true)?;
        let (values, ids) = (values.full_tensor()?.to_vec2::<f32>()?, ids.full_tensor()?.to_vec2::<i64>()?);
        let pairs = |(ids, values): (Vec<i64>, Vec<f32>)| ids.into_iter().map(|id| id as u32).zip(values).collect();
        ids.into_iter().zip(values).map(pairs).collect::<Vec<Vec<(u32, f32)>>>()
    } else {
        logits.full_tensor()?.to_vec2::<f32>()?.into_iter().map(|row| (0..).zip(row).collect()).collect()
    };
    let chosen = candidates.into_iter().zip(rows).enumerate().map(|(i, (candidates, row))| {
        // The largest candidate is NaN if any logit is.
        if candidates.iter().any(|(_, logit)| logit.is_nan()) {
            return Err(not_a_number(i));
        }
        sampling.pick(&sampling.distribution(candidates), row.number).ok_or_else(|| not_a_number(i))
    });
    chosen.collect()
}

fn not_a_number(row: usize) -> crate::error::Error {
    let found = format!("NaN for the next token of row {row}");
    let fix = "check the weights of the model, or compute in f32";
    ErrorKind::Model.error("logits", found, "numbers", fix)
}

/// The logits after the repetition penalty: every rank changes its own part.
#[track_caller]
fn penalized(logits: &DTensor, sampling: &Sampling, rows: &[RowHistory<'_>]) -> Result<DTensor> {
    let logits = logits.reduced(Location::caller())?;
    let (mesh, layout) = (logits.device_mesh(), logits.layout());
    if mesh.world().is_dry() {
        return Ok(logits);
    }
    let local_shape = layout.local_shape(mesh.world().rank());
    let mut values: Vec<f32> = logits.local().flatten_all()?.to_vec1()?;
    for owned in layout.boxes_of(mesh.world().rank()) {
        let ([first_row, first], [count, width]) =
            ([owned.global.offsets[0], owned.global.offsets[1]], [owned.global.sizes[0], owned.global.sizes[1]]);
        for row in 0..count {
            let start = (owned.local_offsets[0] + row) * local_shape[1] + owned.local_offsets[1];
            let seen = rows[first_row + row].seen.iter().copied();
            sampling.penalize(&mut values[start..start + width], first, seen);
        }
    }
    let local = Tensor::from_vec(values, local_shape, logits.local().device())?;
    Ok(DTensor::from_parts(mesh, layout.clone(), local))
}
