//! Steps of random programs that call operators of the table of composed ones, on new tensors of the shapes of their samples.

use candle_core::DType;
use rand::seq::IndexedRandom;
use shardwise::ops::{OpEntry, composed_ops};
use shardwise::prelude::*;

use crate::random_programs::program::{Fill, Program};
use crate::random_programs::steps::Step;

pub(crate) const STEPS: &[Step] = &[composed];

/// How much an operator may magnify its operands: the largest of them, the product of several factors, is far below.
const GAIN: f64 = 1e3;

const SIZED_BY_DATA: [&str; 4] = ["unique", "unique_consecutive", "bincount", "repeat_interleave_each"];

fn composed(p: &mut Program) -> Result<()> {
    // The size of these results depends on data, which a rank outside of the mesh does not have: it could not go on with them.
    let unknown = |op: &&OpEntry| p.has_ranks_outside() && SIZED_BY_DATA.contains(&op.name);
    let entries: Vec<&OpEntry> = composed_ops().filter(|op| !unknown(op)).collect();
    let op = *entries.choose(p.rng()).expect("some operators");
    let samples = (op.samples)();
    let samples = samples.choose(p.rng()).expect("some samples").clone();
    let mut operands = Vec::new();
    for sample in &samples {
        let fill = match sample.below {
            Some(n) => Fill::Below(n),
            None if sample.dtype == DType::I64 => Fill::Int,
            None => Fill::Eighths,
        };
        operands.push(p.leaf(&sample.shape, fill)?);
    }
    let apply = op.apply;
    p.apply(op.name, &operands, false, GAIN, move |x| {
        x[0].device_mesh().manual_seed(7);
        apply(x)
    })?;
    Ok(())
}
