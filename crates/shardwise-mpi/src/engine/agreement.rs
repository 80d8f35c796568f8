//! Whether all ranks of a group are about to make the same call.
//!
//! Every call begins with the packets of all ranks, combined into one. It says whether there is anything to talk about; only
//! then do the ranks tell each other what they called.

use candle_core::Tensor;
use serde::{Deserialize, Serialize};
use shardwise::comm::Call;
use shardwise::comm::engine::{Purpose, SAME_CALLS, SAME_VALUES, fingerprint, meta_fingerprint};
use shardwise::error::{RankCall, Site};
use shardwise::{Error, Result, TensorMeta};

use super::comm::Comm;
use super::packet::Packet;
use super::small::Small;

/// What a rank tells the others when they do not agree.
#[derive(Serialize, Deserialize)]
struct Statement {
    call: String,
    /// On whose behalf, if that is known.
    purpose: Option<String>,
    site: String,
    refused: Option<String>,
    fingerprint: u64,
    /// Ranks of the group that send something else than this one expects.
    unexpected_from: Vec<usize>,
}

/// A call as this rank makes it.
pub(super) struct Asked<'a> {
    pub(super) call: &'a Call,
    pub(super) inputs: &'a [Tensor],
    pub(super) site: Site,
    pub(super) purpose: Option<&'a Purpose>,
    /// Why the call is refused whatever its arguments are.
    pub(super) refused: Option<Error>,
}

/// An error on every rank unless the calls of all can be carried out together. `ranks` are the global ranks of the group.
/// What this rank gets from the call, if that has come along.
pub(super) fn check(
    comm: &Comm,
    ranks: &[usize],
    asked: Asked<'_>,
    deterministic: bool,
) -> Result<Option<Vec<Tensor>>> {
    let Asked { call, inputs, site, purpose, refused } = asked;
    let (me, size) = (comm.rank(), comm.size());
    // Whatever this rank refuses, all must hear of.
    let prepare = || {
        refused.map_or(Ok(()), Err)?;
        call.check(me, size, inputs)?;
        let mut packet = Packet::new(fingerprint(call, inputs), false);
        let small = Small::of(call, inputs, size, deterministic);
        if let Some(small) = small {
            small.pack(call, inputs, me, &mut packet)?;
        }
        if let Call::AllToAll { expected } = call {
            packet.balance = balance(me, inputs, expected);
        }
        Ok((packet, small))
    };
    let (mine, small, refused) = match prepare() {
        Ok((packet, small)) => (packet, small, None),
        Err(error) => (Packet::new(0, true), None, Some(error)),
    };
    let all = mine.exchange(comm)?;
    if all.is_agreed() && all.balance == 0 {
        return small.map(|small| small.unpack(call, inputs, (me, size), &all)).transpose();
    }
    let mut unexpected_from = Vec::new();
    if let (Call::AllToAll { expected }, true) = (call, all.is_agreed()) {
        let sent: Vec<u64> = inputs.iter().map(|t| meta_fingerprint(&TensorMeta::new(t.dims(), t.dtype()))).collect();
        let coming = comm.exchange_numbers(&sent)?;
        unexpected_from = (0..size).filter(|&r| coming[r] != meta_fingerprint(&expected[r])).collect();
    }
    let statement = Statement {
        call: call.describe(inputs),
        purpose: purpose.map(ToString::to_string),
        site: site.to_string(),
        refused: refused.as_ref().map(ToString::to_string),
        fingerprint: mine.fingerprint,
        unexpected_from,
    };
    let texts = comm.texts(&serde_json::to_string(&statement).map_err(Error::other)?)?;
    let all = texts.iter().map(|text| serde_json::from_str(text).map_err(Error::other)).collect::<Result<Vec<_>>>()?;
    Err(verdict(&all, ranks, me, refused))
}

/// Numbers for what a rank sends to every rank, less those for what it expects: over all ranks they add up to 0 if everybody
/// gets what it expects, and (but for one chance in 2^64) only then.
fn balance(me: usize, inputs: &[Tensor], expected: &[TensorMeta]) -> u64 {
    let number = |from: usize, to: usize, what: u64| {
        // Far apart for pairs that are close: the finalizer of splitmix64.
        let mut z = what ^ ((from as u64) << 32 | to as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    let sent = inputs.iter().enumerate().fold(0u64, |sum, (to, t)| {
        sum.wrapping_add(number(me, to, meta_fingerprint(&TensorMeta::new(t.dims(), t.dtype()))))
    });
    expected
        .iter()
        .enumerate()
        .fold(sent, |sum, (from, meta)| sum.wrapping_sub(number(from, me, meta_fingerprint(meta))))
}

/// What is wrong, in the same words on every rank.
fn verdict(all: &[Statement], ranks: &[usize], me: usize, refused: Option<Error>) -> Error {
    let call = |position: usize| {
        let Statement { call, purpose, site, .. } = &all[position];
        let call = purpose.as_ref().map_or_else(|| call.clone(), |purpose| format!("{call} {purpose}"));
        Box::new(RankCall { rank: ranks[position], call, group: ranks.to_vec(), site: site.clone() })
    };
    let disagree =
        |a: usize, b: usize, advice: &'static str| Error::Mismatch { first: call(a), second: call(b), advice };
    if let Some(position) = all.iter().position(|s| s.refused.is_some()) {
        let told = || Error::other(all[position].refused.clone().unwrap_or_default());
        let source = if position == me { refused.unwrap_or_else(told) } else { told() };
        return Error::Rejected { call: call(position), source: Box::new(source) };
    }
    if let Some(other) = all.iter().position(|s| s.fingerprint != all[0].fingerprint) {
        let advice = if all[other].call == all[0].call { SAME_VALUES } else { SAME_CALLS };
        return disagree(0, other, advice);
    }
    let unexpected = all.iter().enumerate().find_map(|(to, s)| Some((*s.unexpected_from.first()?, to)));
    let (from, to) = unexpected.unwrap_or((0, me));
    disagree(from, to, "what a rank sends must be what the other expects from it")
}
