//! Whether all ranks of a group made the same call. The same verdict is reached on every rank.

use candle_core::Tensor;
use smallvec::SmallVec;

use super::call::Call;
use crate::error::{Error, RankCall, Result, Site};

/// A collective as one rank entered it.
#[derive(Clone)]
pub(crate) struct Entry {
    pub(crate) call: Call,
    pub(crate) inputs: SmallVec<[Tensor; 1]>,
    pub(crate) site: Site,
    /// Why this rank's arguments cannot be used, if they cannot.
    pub(crate) refused: Option<Error>,
}

impl Entry {
    pub(crate) fn new(call: &Call, inputs: &[Tensor], site: Site, me: usize, size: usize) -> Self {
        let refused = call.check(me, size, inputs).err();
        Entry { call: call.clone(), inputs: inputs.into(), site, refused }
    }

    /// The entry in words. `ranks` are the global ranks of the group, `me` the position of the caller.
    pub(crate) fn describe(&self, ranks: &[usize], me: usize) -> Box<RankCall> {
        Box::new(RankCall {
            rank: ranks[me],
            call: self.call.describe(&self.inputs),
            group: ranks.to_vec(),
            site: self.site,
        })
    }
}

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
            return Err(disagree(0, other, "every rank of a group must make the same calls in the same order"));
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
