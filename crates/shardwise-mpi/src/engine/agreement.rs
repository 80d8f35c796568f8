//! Whether all ranks of a group are about to make the same call.
//!
//! Three numbers of every rank, reduced to their maximum, tell whether there is anything to talk about; only then do the
//! ranks tell each other what they called.

use candle_core::Tensor;
use serde::{Deserialize, Serialize};
use shardwise::comm::Call;
use shardwise::comm::engine::{fingerprint, fingerprint_of};
use shardwise::error::{RankCall, Site};
use shardwise::{Error, Result, TensorMeta};

use super::comm::Comm;

/// What a rank tells the others when they do not agree.
#[derive(Serialize, Deserialize)]
struct Statement {
    call: String,
    site: String,
    refused: Option<String>,
    fingerprint: u64,
    /// Ranks of the group that send something else than this one expects.
    unexpected_from: Vec<usize>,
}

/// An error on every rank unless the calls of all can be carried out together. `ranks` are the global ranks of the group.
pub(super) fn check(comm: &Comm, ranks: &[usize], call: &Call, inputs: &[Tensor], site: Site) -> Result<()> {
    let refused = call.check(comm.rank(), comm.size(), inputs).err();
    let mine = if refused.is_some() { 0 } else { fingerprint(call, inputs) };
    let [largest, least, any_refused] = comm.greatest(&[mine, !mine, u64::from(refused.is_some())])?;
    let mut unexpected_from = Vec::new();
    let mut quarrel = largest != !least || any_refused > 0;
    if let (Call::AllToAll { expected }, false) = (call, quarrel) {
        let sent: Vec<u64> = inputs.iter().map(|t| fingerprint_of(&TensorMeta::new(t.dims(), t.dtype()))).collect();
        let coming = comm.exchange_numbers(&sent)?;
        unexpected_from = (0..comm.size()).filter(|&r| coming[r] != fingerprint_of(&expected[r])).collect();
        quarrel = comm.greatest(&[u64::from(!unexpected_from.is_empty())])? != [0];
    }
    if !quarrel {
        return Ok(());
    }
    let statement = Statement {
        call: call.describe(inputs),
        site: site.to_string(),
        refused: refused.as_ref().map(ToString::to_string),
        fingerprint: mine,
        unexpected_from,
    };
    let texts = comm.texts(&serde_json::to_string(&statement).map_err(Error::other)?)?;
    let all = texts.iter().map(|text| serde_json::from_str(text).map_err(Error::other)).collect::<Result<Vec<_>>>()?;
    Err(verdict(&all, ranks, comm.rank(), refused))
}

/// What is wrong, in the same words on every rank.
fn verdict(all: &[Statement], ranks: &[usize], me: usize, refused: Option<Error>) -> Error {
    let call = |position: usize| {
        let Statement { call, site, .. } = &all[position];
        Box::new(RankCall { rank: ranks[position], call: call.clone(), group: ranks.to_vec(), site: site.clone() })
    };
    let disagree =
        |a: usize, b: usize, advice: &'static str| Error::Mismatch { first: call(a), second: call(b), advice };
    if let Some(position) = all.iter().position(|s| s.refused.is_some()) {
        let told = || Error::other(all[position].refused.clone().unwrap_or_default());
        let source = if position == me { refused.unwrap_or_else(told) } else { told() };
        return Error::Rejected { call: call(position), source: Box::new(source) };
    }
    if let Some(other) = all.iter().position(|s| s.fingerprint != all[0].fingerprint) {
        return disagree(0, other, "every rank of a group must make the same calls in the same order");
    }
    let unexpected = all.iter().enumerate().find_map(|(to, s)| Some((*s.unexpected_from.first()?, to)));
    let (from, to) = unexpected.unwrap_or((0, me));
    disagree(from, to, "what a rank sends must be what the other expects from it")
}
