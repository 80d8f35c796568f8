//! Dropout. The mask depends only on the global position of an element, so every layout drops the same elements.

use std::panic::Location;

use candle_core::DType;

use crate::error::{ErrorKind, Result};
use crate::op::name_call;
use crate::ops::{OpEntry, SampleInput};
use crate::placement::Placement;
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

    /// Draws ones and zeros in the layout of this tensor, whose elements are the probabilities of a one. No gradient passes.
    ///
    /// Draws as [`dropout`](Self::dropout) does. For one probability see [`Distribution::Bernoulli`].
    ///
    /// # Errors
    /// If the elements are integers. A probability outside of 0 to 1 is an error on the ranks that hold it; the other ranks get it with
    /// their next collective.
    #[track_caller]
    pub fn bernoulli(&self) -> Result<DTensor> {
        let site = Location::caller();
        let mesh = self.device_mesh();
        let refused = |found: String| {
            let error =
                ErrorKind::Argument.error("probabilities", found, "floating-point numbers from 0 to 1", "correct them");
            Err(name_call(error, "bernoulli", &[self], site))
        };
        if !self.dtype().is_float() {
            return refused(self.dtype().as_str().to_string());
        }
        let share = self.detach().without_partials("bernoulli", &[])?;
        if !mesh.world().is_dry() && mesh.contains(mesh.world().rank()) {
            let held = share.local().flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            if let Some(wrong) = held.iter().find(|p| !(0.0..=1.0).contains(*p)) {
                return refused(wrong.to_string());
            }
        }
        // Half precision has too few bits for small probabilities.
        let dtype = if self.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let uniform = Distribution::Uniform { low: 0.0, high: 1.0 };
        DTensor::random_in(share.layout(), dtype, mesh, uniform)?.lt(&share)?.to_dtype(self.dtype())
    }

    /// Zeroes whole channels, the first two dimensions, with probability `p` and scales the rest by `1 / (1 - p)`. Without a batch
    /// (`batched` is false) the first dimension has the channels.
    ///
    /// Draws as [`dropout`](Self::dropout) does.
    #[doc(alias = "dropout2d")]
    #[doc(alias = "dropout3d")]
    #[track_caller]
    pub fn feature_dropout(&self, p: f64, training: bool, batched: bool) -> Result<DTensor> {
        if !training || p == 0.0 || p == 1.0 || self.elem_count() == 0 {
            return self.dropout(p, training);
        }
        self.mul(&self.channel_ones(batched)?.dropout(p, true)?)
    }

    /// Sets elements to the negative saturation of [`selu`](Self::selu) with probability `p`, and scales and shifts the result so
    /// that mean and variance stay.
    ///
    /// Draws as [`dropout`](Self::dropout) does.
    #[track_caller]
    pub fn alpha_dropout(&self, p: f64, training: bool) -> Result<DTensor> {
        self.saturated(p, training, || self.ones_like())
    }

    /// Sets whole channels as [`alpha_dropout`](Self::alpha_dropout) does with elements.
    #[track_caller]
    pub fn feature_alpha_dropout(&self, p: f64, training: bool) -> Result<DTensor> {
        self.saturated(p, training, || self.channel_ones(true))
    }

    #[track_caller]
    fn saturated(&self, p: f64, training: bool, ones: impl FnOnce() -> Result<DTensor>) -> Result<DTensor> {
        const SATURATION: f64 = -1.758_099_340_847_376_6; // of selu at minus infinity
        if !training || p == 0.0 || self.elem_count() == 0 {
            return Ok(self.clone());
        }
        if p == 1.0 || !(0.0..=1.0).contains(&p) || !self.dtype().is_float() {
            return self.dropout(p, training);
        }
        let scale = 1.0 / ((SATURATION * SATURATION * p + 1.0) * (1.0 - p)).sqrt();
        let kept = ones()?.dropout(p, true)?.mul_scalar(1.0 - p)?;
        let dropped = kept.rsub_scalar(1.0)?.mul_scalar(SATURATION * scale)?;
        let shifted = dropped.add_scalar(-scale * SATURATION * p)?;
        self.mul(&kept.mul_scalar(scale)?)?.add(&shifted)
    }

    /// Ones, one per channel, that broadcast with this tensor.
    #[track_caller]
    fn channel_ones(&self, batched: bool) -> Result<DTensor> {
        let kept = if batched { 2 } else { 1 };
        let shape: Vec<usize> = self.shape().iter().enumerate().map(|(d, &n)| if d < kept { n } else { 1 }).collect();
        let replicated = vec![Placement::Replicate; self.placements().len()];
        DTensor::ones(shape, self.dtype(), self.device_mesh(), replicated)
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[OpEntry {
    name: "dropout",
    samples,
    apply: |x| {
        // the same draw every time, so that runs can be compared
        x[0].device_mesh().manual_seed(7);
        Ok(vec![x[0].dropout(0.5, true)?, x[0].dropout(0.5, false)?, x[0].dropout(1.0, true)?])
    },
}];

pub(in crate::ops) const COMPOSED_OPS: &[OpEntry] = &[
    OpEntry {
        name: "bernoulli",
        samples,
        apply: |x| {
            x[0].device_mesh().manual_seed(7);
            Ok(vec![x[0].sigmoid()?.bernoulli()?])
        },
    },
    OpEntry {
        name: "feature_dropout",
        samples,
        apply: |x| {
            x[0].device_mesh().manual_seed(7);
            Ok(vec![x[0].feature_dropout(0.5, true, true)?, x[0].feature_dropout(0.5, true, false)?])
        },
    },
    OpEntry {
        name: "alpha_dropout",
        samples,
        apply: |x| {
            x[0].device_mesh().manual_seed(7);
            Ok(vec![x[0].alpha_dropout(0.5, true)?])
        },
    },
    OpEntry {
        name: "feature_alpha_dropout",
        samples,
        apply: |x| {
            x[0].device_mesh().manual_seed(7);
            Ok(vec![x[0].feature_alpha_dropout(0.5, true)?])
        },
    },
];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[5, 3], &[1, 8], &[0, 2]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect()
}
