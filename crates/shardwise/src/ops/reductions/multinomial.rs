//! Draws of indices by weights. A draw depends only on the generator and on the row, so every layout draws the same indices.

use std::panic::Location;

use candle_core::DType;

use crate::comm::record_implicit_operator;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::op::name_call;
use crate::ops::{OpEntry, SampleInput};
use crate::random::Distribution;
use crate::tensor::DTensor;

impl DTensor {
    /// Draws `count` indices of the last dimension of a vector or matrix of weights, which need not add up to 1, with probabilities in
    /// proportion to the weights, as i64. Without `replacement`, the indices of a row differ. No gradient passes.
    ///
    /// Draws from the generator of the mesh, and draws the same indices in every layout. Collective: every rank of the mesh must call
    /// it. Rows are gathered if the last dimension is sharded.
    ///
    /// # Errors
    /// If the tensor is not a vector or matrix of floating-point numbers, or `count` is 0. A weight that is negative or not finite, a row of
    /// zeros, and fewer weights above zero than indices without replacement are errors on the ranks that hold the row; the other ranks
    /// get it with their next collective.
    #[track_caller]
    pub fn multinomial(&self, count: usize, replacement: bool) -> Result<DTensor> {
        let site = Location::caller();
        let refused = |found: String| {
            let needed =
                "weights from 0 on, some of them above 0 in every row, and without replacement as many as are drawn";
            let error = ErrorKind::Argument.error("weights", found, needed, "correct the weights or the count");
            Err(name_call(error, "multinomial", &[self], site))
        };
        if self.ndim() == 1 {
            return self.unsqueeze(0)?.multinomial(count, replacement)?.squeeze(Some(0));
        }
        if self.ndim() != 2 || !self.dtype().is_float() || count == 0 {
            return refused(format!("{count} indices of {} {}", self.dtype().as_str(), self.layout()));
        }
        let weights = self.detach().without_partials("multinomial", &[-1])?;
        let rows = weights.layout().without_axes(weights.layout().shard_order(1))?;
        let weights = record_implicit_operator("multinomial", || weights.to_layout_at(&rows, site))?;
        // Half precision has too few bits for sums of weights.
        let weights = weights.to_dtype(if self.dtype() == DType::F64 { DType::F64 } else { DType::F32 })?;
        let mesh = self.device_mesh();
        if !mesh.world().is_dry() && mesh.contains(mesh.world().rank()) {
            for row in weights.local().to_dtype(DType::F64)?.to_vec2::<f64>()? {
                let some = row.iter().filter(|weight| **weight > 0.0).count();
                if row.iter().any(|weight| !(0.0..f64::INFINITY).contains(weight)) {
                    return refused(format!("a row {row:?}"));
                }
                if some < if replacement { 1 } else { count } {
                    return refused(format!("a row with {some} weights above 0 for {count} indices"));
                }
            }
        }
        let draw = |columns: usize| -> Result<DTensor> {
            let shape = [self.shape()[0], columns];
            let layout = Layout::from_shard_orders(mesh.mesh(), &shape, rows.placements(), &rows.shard_orders())?;
            let uniform = Distribution::Uniform { low: 0.0, high: 1.0 };
            // Above 0 and up to 1.
            DTensor::random_in(&layout, weights.dtype(), mesh, uniform)?.rsub_scalar(1.0)
        };
        if replacement {
            let sums = weights.cumsum(-1)?;
            let total = sums.narrow(-1, self.shape()[1] - 1, 1)?;
            // The first sum that is not below a number above 0 is that of a weight above 0.
            return sums.searchsorted(&draw(count)?.mul(&total)?, false);
        }
        // The first of exponentially distributed times with these rates: PyTorch draws without replacement in this way, too.
        let times = draw(self.shape()[1])?.log()?.neg()?;
        let keys = weights.gt(0.0)?.where_cond(&weights.div(&times)?, -1.0)?;
        Ok(keys.topk(count, -1, true)?.1)
    }
}

pub(in crate::ops) const COMPOSED_OPS: &[OpEntry] = &[OpEntry {
    name: "multinomial",
    samples: || [[4, 6], [5, 3]].iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect(),
    apply: |x| {
        // the same draw every time, so that runs can be compared
        x[0].device_mesh().manual_seed(7);
        let weights = x[0].sigmoid()?;
        Ok(vec![weights.multinomial(4, true)?, weights.multinomial(2, false)?])
    },
}];
