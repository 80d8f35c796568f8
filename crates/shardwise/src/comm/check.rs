//! Whether all ranks of a group made the same call. The same verdict is reached on every rank.

use std::hash::{Hash, Hasher};

use candle_core::Tensor;
use rustc_hash::FxHasher;
use smallvec::SmallVec;

use super::call::Call;
use super::purpose::Purpose;
use crate::error::{Error, RankCall, Result, Site};
use crate::layout::TensorMeta;

/// A collective as one rank entered it.
#[derive(Clone)]
pub(crate) struct Entry {
    pub(crate) call: Call,
    pub(crate) inputs: SmallVec<[Tensor; 1]>,
    pub(crate) site: Site,
    /// On whose behalf the rank communicates, if that is known.
    pub(crate) purpose: Option<Purpose>,
    /// Why this rank's arguments cannot be used, if they cannot.
    pub(crate) refused: Option<Error>,
}

impl Entry {
    pub(crate) fn new(call: &Call, inputs: &[Tensor], site: Site, me: usize, size: usize) -> Self {
        let refused = call.check(me, size, inputs).err();
        Entry { call: call.clone(), inputs: inputs.into(), site, purpose: Purpose::current(), refused }
    }

    /// The entry in words. `ranks` are the global ranks of the group, `me` the position of the caller.
    pub(crate) fn describe(&self, ranks: &[usize], me: usize) -> Box<RankCall> {
        Box::new(RankCall {
            rank: ranks[me],
            call: describe(&self.call, &self.inputs, self.purpose.as_ref()),
            group: ranks.to_vec(),
            site: self.site.to_string(),
        })
    }
}

/// The call and its tensors in words, and on whose behalf it is made.
pub fn describe(call: &Call, inputs: &[Tensor], purpose: Option<&Purpose>) -> String {
    let call = call.describe(inputs);
    purpose.map_or_else(|| call.clone(), |purpose| format!("{call} {purpose}"))
}

/// What to do about ranks that make different calls.
pub const SAME_CALLS: &str = "every rank of a group must make the same calls in the same order";

/// What to do about ranks that make the same call on behalf of different values.
pub const SAME_VALUES: &str = "the values come from different operators, arguments or shapes, so run the same operators on the same shapes on all ranks";

/// An error unless all entries can be carried out together. `ranks` are the global ranks of the group.
pub(crate) fn check_agreement(entries: &[&Entry], ranks: &[usize]) -> Result<()> {
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
        if !agree(entries[0], entries[other]) {
            return Err(disagree(0, other, SAME_CALLS));
        }
        let purpose = |entry: &Entry| entry.purpose.as_ref().map_or(0, Purpose::hash);
        if purpose(entries[0]) != purpose(entries[other]) {
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

/// A number that is the same on two ranks if and only if (but for one chance in 2^64) their entries are the same call on
/// tensors that fit together, made on behalf of the same value ([`Purpose::current`]), as `check_agreement` judges it;
/// the arguments must be good. What ranks hand each other in an `all_to_all` is not part of it: compare
/// [`fingerprint_of`] what is sent and what is expected.
pub fn fingerprint(call: &Call, inputs: &[Tensor]) -> u64 {
    let mut hasher = FxHasher::default();
    std::mem::discriminant(call).hash(&mut hasher);
    Purpose::current_hash().hash(&mut hasher);
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

/// A number that stands for a shape and an element type.
pub fn fingerprint_of(meta: &TensorMeta) -> u64 {
    let mut hasher = FxHasher::default();
    meta.shape.hash(&mut hasher);
    meta.dtype.as_str().hash(&mut hasher);
    hasher.finish()
}

/// Whether two entries are the same call on tensors that fit together.
fn agree(a: &Entry, b: &Entry) -> bool {
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
        // Nothing beyond the call itself: the tensor is the root's alone and is part of the call.
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
        let entries: Vec<Entry> = calls
            .iter()
            .flat_map(|call| {
                tensors.iter().map(|t| Entry {
                    call: call.clone(),
                    inputs: smallvec![t.clone()],
                    site,
                    purpose: None,
                    refused: None,
                })
            })
            .collect();
        let (mut same, mut other) = (0, 0);
        for a in &entries {
            for b in &entries {
                let equal = fingerprint(&a.call, &a.inputs) == fingerprint(&b.call, &b.inputs);
                assert_eq!(equal, agree(a, b), "{:?} {:?} and {:?} {:?}", a.call, a.inputs, b.call, b.inputs);
                if equal { same += 1 } else { other += 1 }
            }
        }
        assert!(same > entries.len() && other > entries.len(), "{same} {other}");
    }
}
