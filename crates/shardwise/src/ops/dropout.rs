//! Dropout. The mask depends on the global position of an element alone, so every layout drops the same elements.

use candle_core::DType;

use super::{OpEntry, SampleInput};
use crate::error::{ErrorKind, Result};
use crate::random::Distribution;
use crate::tensor::DTensor;

impl DTensor {
    /// Zeroes elements with probability `p` and scales the rest by `1 / (1 - p)`; returns this tensor unless `training`.
    ///
    /// Draws from the generator of the mesh, and drops the same elements in every layout. Collective: every rank of the mesh must
    /// call it. Ranks compare the states of their generators; no elements move.
    ///
    /// # Errors
    /// If `p` is not in `0..=1` or the elements are integers.
    #[track_caller]
    pub fn dropout(&self, p: f64, training: bool) -> Result<DTensor> {
        if !(0.0..=1.0).contains(&p) || !self.dtype().is_float() {
            let found = format!("probability {p} for {} in dropout of {}", self.dtype().as_str(), self.layout());
            return Err(ErrorKind::Argument.error(
                "operands",
                found,
                "0 to 1 for a floating-point tensor",
                "correct the call",
            ));
        }
        if !training || p == 0.0 {
            return Ok(self.clone());
        }
        if p == 1.0 {
            return self.mul(&self.zeros_like()?);
        }
        let mask = DTensor::random_in(
            &self.layout().reduced(),
            self.dtype(),
            self.device_mesh(),
            Distribution::Bernoulli { p: 1.0 - p },
        )?;
        self.mul(&mask.mul_scalar(1.0 / (1.0 - p))?)
    }
}

pub(super) const OPS: &[OpEntry] = &[OpEntry {
    name: "dropout",
    samples,
    apply: |x| {
        // the same draw every time, so that runs can be compared
        x[0].device_mesh().manual_seed(7);
        Ok(vec![x[0].dropout(0.5, true)?, x[0].dropout(0.5, false)?, x[0].dropout(1.0, true)?])
    },
}];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[5, 3], &[1, 8], &[0, 2]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect()
}
