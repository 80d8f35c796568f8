//! Check that all ranks of a group make the same call.
//!
//! Every call starts with the exchange of one packet ([`packet`](super::packet)). Only if the packets differ do the ranks
//! exchange the texts of their calls, from which all of them build the same error.

use candle_core::Tensor;
use serde::{Deserialize, Serialize};
use shardwise::comm::Call;
use shardwise::comm::engine::{CallOrigin, SAME_CALLS, SAME_VALUES, fingerprint, meta_fingerprint, while_waiting};
use shardwise::error::{RankCall, Site};
use shardwise::{Error, Result, TensorMeta};

use super::comm::Comm;
use super::packet::Packet;
use super::packet_call::PacketCall;

/// What a rank sends to the other ranks after a mismatch.
#[derive(Serialize, Deserialize)]
struct CallStatement {
    call: String,
    /// The value on whose behalf the rank communicates, if known.
    origin: Option<String>,
    site: String,
    rejected: Option<String>,
    fingerprint: u64,
    /// Ranks of the group that send another shape or type than this one expects.
    unexpected_from: Vec<usize>,
}

/// A call as this rank is about to make it.
pub(super) struct ProposedCall<'a> {
    pub(super) call: &'a Call,
    pub(super) inputs: &'a [Tensor],
    pub(super) site: Site,
    pub(super) origin: Option<&'a CallOrigin>,
    /// Why the call is rejected whatever its arguments are.
    pub(super) rejected: Option<Error>,
}

/// Checks that all ranks make the same valid call; otherwise every rank returns the same error. Collective.
///
/// `ranks` are the global ranks of the group. Returns the outputs of the call if they came in the packet, `None` if the call
/// has yet to be executed.
pub(super) fn check(
    comm: &Comm,
    ranks: &[usize],
    proposed: ProposedCall<'_>,
    deterministic: bool,
) -> Result<Option<Vec<Tensor>>> {
    let ProposedCall { call, inputs, site, origin, rejected } = proposed;
    let (me, size) = (comm.rank(), comm.size());
    // If this rank rejects its call, it still exchanges a packet: all ranks must get the error.
    let prepare = || {
        rejected.map_or(Ok(()), Err)?;
        call.check(me, size, inputs)?;
        let mut packet = Packet::new(fingerprint(call, inputs), false);
        let packet_call = PacketCall::of(call, inputs, size, deterministic);
        if let Some(packet_call) = packet_call {
            packet_call.pack(call, inputs, me, &mut packet)?;
        }
        if let Call::AllToAll { expected } = call {
            packet.balance = balance(me, inputs, expected);
        }
        Ok((packet, packet_call))
    };
    let (mine, packet_call, rejected) = match prepare() {
        Ok((packet, packet_call)) => (packet, packet_call, None),
        Err(error) => (Packet::new(0, true), None, Some(error)),
    };
    let all = {
        // Ranks meet here: who comes early waits for the last one, and a packet itself takes microseconds.
        let _waiting = while_waiting();
        mine.exchange(comm)?
    };
    if all.is_agreed() && all.balance == 0 {
        return packet_call.map(|packet_call| packet_call.unpack(call, inputs, (me, size), &all)).transpose();
    }
    let mut unexpected_from = Vec::new();
    if let (Call::AllToAll { expected }, true) = (call, all.is_agreed()) {
        let sent: Vec<u64> = inputs.iter().map(|t| meta_fingerprint(&TensorMeta::new(t.dims(), t.dtype()))).collect();
        let coming = comm.all_to_all_u64(&sent)?;
        unexpected_from = (0..size).filter(|&r| coming[r] != meta_fingerprint(&expected[r])).collect();
    }
    let statement = CallStatement {
        call: call.describe(inputs),
        origin: origin.map(ToString::to_string),
        site: site.to_string(),
        rejected: rejected.as_ref().map(ToString::to_string),
        fingerprint: mine.fingerprint,
        unexpected_from,
    };
    let texts = comm.all_gather_text(&serde_json::to_string(&statement).map_err(Error::other)?)?;
    let all = texts.iter().map(|text| serde_json::from_str(text).map_err(Error::other)).collect::<Result<Vec<_>>>()?;
    Err(mismatch_error(&all, ranks, me, rejected))
}

/// Hashes of what this rank sends to every rank, minus hashes of what it expects. Over all ranks they add up to 0 if every
/// rank gets what it expects, and otherwise with a probability of 2^-64 only.
fn balance(me: usize, inputs: &[Tensor], expected: &[TensorMeta]) -> u64 {
    let hash = |from: usize, to: usize, what: u64| {
        // The finalizer of splitmix64, so that neighbouring pairs of ranks have unrelated hashes.
        let mut z = what ^ ((from as u64) << 32 | to as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    let sent = inputs.iter().enumerate().fold(0u64, |sum, (to, t)| {
        sum.wrapping_add(hash(me, to, meta_fingerprint(&TensorMeta::new(t.dims(), t.dtype()))))
    });
    expected.iter().enumerate().fold(sent, |sum, (from, meta)| sum.wrapping_sub(hash(from, me, meta_fingerprint(meta))))
}

/// The error, the same on every rank.
fn mismatch_error(all: &[CallStatement], ranks: &[usize], me: usize, rejected: Option<Error>) -> Error {
    let call = |position: usize| {
        let CallStatement { call, origin, site, .. } = &all[position];
        let call = origin.as_ref().map_or_else(|| call.clone(), |origin| format!("{call} {origin}"));
        Box::new(RankCall { rank: ranks[position], call, group: ranks.to_vec(), site: site.clone() })
    };
    let disagree =
        |a: usize, b: usize, advice: &'static str| Error::Mismatch { first: call(a), second: call(b), advice };
    if let Some(position) = all.iter().position(|s| s.rejected.is_some()) {
        let reported = || Error::other(all[position].rejected.clone().unwrap_or_default());
        let source = if position == me { rejected.unwrap_or_else(reported) } else { reported() };
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
