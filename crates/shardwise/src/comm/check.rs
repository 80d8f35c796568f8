//! Checks that all ranks of a group made the same call. Every rank reaches the same verdict.

use std::hash::{Hash, Hasher};

use candle_core::Tensor;
use rustc_hash::FxHasher;
use smallvec::SmallVec;

use super::call::Call;
use super::origin::CallOrigin;
use crate::error::{Error, RankCall, Result, Site};
use crate::layout::TensorMeta;

/// A collective as one rank entered it.
#[derive(Clone)]
pub(crate) struct CallEntry {
    pub(crate) call: Call,
    pub(crate) inputs: SmallVec<[Tensor; 1]>,
    pub(crate) site: Site,
    /// The value for which the rank communicates, if known.
    pub(crate) origin: Option<CallOrigin>,
    /// What is wrong with this rank's arguments, if anything.
    pub(crate) refused: Option<Error>,
}

impl CallEntry {
    pub(crate) fn new(call: &Call, inputs: &[Tensor], site: Site, me: usize, size: usize) -> Self {
        let refused = call.check(me, size, inputs).err();
        CallEntry { call: call.clone(), inputs: inputs.into(), site, origin: CallOrigin::current(), refused }
    }

    /// The entry as it appears in errors. `ranks` are the global ranks of the group, `me` the position of the caller.
    pub(crate) fn describe(&self, ranks: &[usize], me: usize) -> Box<RankCall> {
        Box::new(RankCall {
            rank: ranks[me],
            call: describe(&self.call, &self.inputs, self.origin.as_ref()),
            group: ranks.to_vec(),
            site: self.site.to_string(),
        })
    }
}

/// The call, its tensors and what it is for as text, for errors.
pub fn describe(call: &Call, inputs: &[Tensor], origin: Option<&CallOrigin>) -> String {
    let call = call.describe(inputs);
    origin.map_or_else(|| call.clone(), |origin| format!("{call} {origin}"))
}

/// The advice for ranks that make different calls.
pub const SAME_CALLS: &str = "every rank of a group must make the same calls in the same order";

/// The advice for ranks that make the same call for different values.
pub const SAME_VALUES: &str = "the values come from different operators, arguments or shapes, so run the same operators on the same shapes on all ranks";

/// An error unless all entries are one collective with valid arguments. `ranks` are the global ranks of the group.
pub(crate) fn check_agreement(entries: &[&CallEntry], ranks: &[usize]) -> Result<()> {
    for (position, entry) in entries.iter().enumerate() {
        if let Some(error) = &entry.refused {
            let call = entry.describe(ranks, position);
            return Err(Error::Rejected { call, source: Box::new(error.clone()) });
        }
    }
    let disagree = |a: usize, b: usize, advice: &'static str| Error::Mismatch {
        first: entries[a].describe(ranks, a),
        second: entries[b].describe(ranks, b),
        advice,
    };
    for other in 1..entries.len() {
        if !same_call(entries[0], entries[other]) {
            return Err(disagree(0, other, SAME_CALLS));
        }
        let origin = |entry: &CallEntry| entry.origin.as_ref().map_or(0, CallOrigin::hash);
        if origin(entries[0]) != origin(entries[other]) {
            return Err(disagree(0, other, SAME_VALUES));
        }
    }
    if let Call::AllToAll { .. } = entries[0].call {
        for (to, receiver) in entries.iter().enumerate() {
            let Call::AllToAll { expected } = &receiver.call else { unreachable!("all calls agree") };
            for (from, sender) in entries.iter().enumerate() {
                let sent = &sender.inputs[to];
                if sent.dims() != expected[from].shape || sent.dtype() != expected[from].dtype {
                    return Err(disagree(from, to, "what a rank sends must be what the other expects from it"));
                }
            }
        }
    }
    Ok(())
}

/// A hash that is equal on two ranks if their calls match: the same call, tensors of matching types and shapes, and the
/// same value ([`CallOrigin::current`]).
///
/// Calls that do not match collide with a chance of 2^-64. The arguments must have passed [`Call::check`]. The tensors of an
/// `all_to_all` are not included: compare the [`meta_fingerprint`] of what is sent and of what is expected.
pub fn fingerprint(call: &Call, inputs: &[Tensor]) -> u64 {
    let mut hasher = FxHasher::default();
    std::mem::discriminant(call).hash(&mut hasher);
    CallOrigin::current_hash().hash(&mut hasher);
    let masked = match call {
        Call::AllToAll { .. } => return hasher.finish(),
        Call::AllGather { dim, .. } | Call::Gather { dim, .. } | Call::ExchangeDims { from: dim, .. } => Some(*dim),
        _ => None,
    };
    call.hash(&mut hasher);
    let reads =
        masked.is_some() || matches!(call, Call::AllReduce { .. } | Call::Reduce { .. } | Call::ReduceScatter { .. });
    if let (true, Some(input)) = (reads, inputs.first()) {
        input.dtype().as_str().hash(&mut hasher);
        for (d, size) in input.dims().iter().enumerate() {
            (if masked == Some(d) { 0 } else { size + 1 }).hash(&mut hasher);
        }
    }
    hasher.finish()
}

/// A hash of a shape and an element type, the same in every process.
pub fn meta_fingerprint(meta: &TensorMeta) -> u64 {
    let mut hasher = FxHasher::default();
    meta.shape.hash(&mut hasher);
    meta.dtype.as_str().hash(&mut hasher);
    hasher.finish()
}

/// Whether two entries are the same call on tensors of matching types and shapes.
fn same_call(a: &CallEntry, b: &CallEntry) -> bool {
    let same_type = || a.inputs[0].dtype() == b.inputs[0].dtype();
    match (&a.call, &b.call) {
        (Call::AllToAll { .. }, Call::AllToAll { .. }) => true,
        (x, y) if x != y => false,
        (Call::AllReduce { .. } | Call::Reduce { .. } | Call::ReduceScatter { .. }, _) => {
            same_type() && a.inputs[0].dims() == b.inputs[0].dims()
        }
        (Call::AllGather { dim, .. } | Call::Gather { dim, .. } | Call::ExchangeDims { from: dim, .. }, _) => {
            let (x, y) = (a.inputs[0].dims(), b.inputs[0].dims());
            same_type() && x.len() == y.len() && (0..x.len()).all(|d| d == *dim || x[d] == y[d])
        }
        // Only the call: either there are no tensors, or only the root has one, which the call describes.
        (
            Call::Barrier
            | Call::Agree { .. }
            | Call::Expose
            | Call::Broadcast { .. }
            | Call::Scatter { .. }
            | Call::AllToAll { .. },
            _,
        ) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::ReduceOp;
    use candle_core::{DType, Device};
    use smallvec::smallvec;

    #[test]
    fn fingerprints_are_equal_where_entries_agree_and_only_there() {
        let calls = [
            Call::Barrier,
            Call::Expose,
            Call::Agree { what: "step", values: smallvec![1] },
            Call::Agree { what: "step", values: smallvec![2] },
            Call::AllReduce { op: ReduceOp::Sum },
            Call::AllReduce { op: ReduceOp::Max },
            Call::Reduce { op: ReduceOp::Sum, root: 0 },
            Call::Reduce { op: ReduceOp::Sum, root: 1 },
            Call::AllGather { dim: 0, sizes: smallvec![2, 3] },
            Call::AllGather { dim: 1, sizes: smallvec![2, 3] },
            Call::Gather { dim: 0, sizes: smallvec![2, 3], root: 0 },
            Call::ReduceScatter { op: ReduceOp::Sum, dim: 0, sizes: smallvec![1, 1] },
            Call::Broadcast { whole: TensorMeta::new((2, 2), DType::F32), root: 0 },
            Call::Broadcast { whole: TensorMeta::new((2, 2), DType::F64), root: 0 },
            Call::ExchangeDims { from: 0, from_sizes: smallvec![2, 3], to: 1, to_sizes: smallvec![1, 1] },
            Call::AllToAll { expected: vec![TensorMeta::new(1, DType::F32)] },
            Call::AllToAll { expected: vec![TensorMeta::new(2, DType::F32)] },
        ];
        let tensors = [
            (vec![2, 2], DType::F32),
            (vec![3, 2], DType::F32),
            (vec![2, 3], DType::F32),
            (vec![2, 2], DType::F64),
            (vec![2], DType::F32),
        ]
        .map(|(shape, dtype)| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap());
        let site = std::panic::Location::caller();
        let entries: Vec<CallEntry> = calls
            .iter()
            .flat_map(|call| {
                tensors.iter().map(|t| CallEntry {
                    call: call.clone(),
                    inputs: smallvec![t.clone()],
                    site,
                    origin: None,
                    refused: None,
                })
            })
            .collect();
        let (mut same, mut other) = (0, 0);
        for a in &entries {
            for b in &entries {
                let equal = fingerprint(&a.call, &a.inputs) == fingerprint(&b.call, &b.inputs);
                assert_eq!(equal, same_call(a, b), "{:?} {:?} and {:?} {:?}", a.call, a.inputs, b.call, b.inputs);
                if equal { same += 1 } else { other += 1 }
            }
        }
        assert!(same > entries.len() && other > entries.len(), "{same} {other}");
    }
}
