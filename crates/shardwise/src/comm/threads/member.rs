//! The [`Communicator`] of one thread rank in one group.

use std::sync::Arc;

use candle_core::Tensor;
use parking_lot::MutexGuard;

use super::collectives;
use super::hub::{Hub, Wait, WaitReason};
use super::mailbox::{Envelope, PostedMessage};
use super::meeting::{Meeting, MemberProgress, PhaseWaiter, PostedEntry};
use crate::comm::check::{CallEntry, check_agreement};
use crate::comm::{Call, Communicator, ExposedTensors};
use crate::error::{Error, ErrorKind, RankCall, Result, Site};
use crate::layout::TensorMeta;
use crate::mesh::Network;
use shardwise_kernels::{check_stored, own_copy};

pub(super) struct Member {
    hub: Arc<Hub>,
    meeting: Arc<Meeting>,
    me: usize,
}

impl Member {
    /// The communicator of `rank` in the group of all ranks. The calling thread is the one that runs the rank's program.
    pub(super) fn of_world(hub: Arc<Hub>, rank: usize) -> Self {
        hub.enter(rank);
        let meeting = hub.meeting(&(0..hub.size()).collect::<Vec<_>>());
        Member { hub, meeting, me: rank }
    }

    /// The envelope of a message between this rank and rank `other` of the group; an error if the group has no such rank.
    fn envelope(&self, other: usize, tag: u64, incoming: bool) -> Result<Envelope> {
        let ranks = self.ranks();
        let Some(&other) = ranks.get(other) else {
            return Err(ErrorKind::Rank { rank: other, size: ranks.len() }.error(
                "rank",
                format!("{other} in a group of {}", ranks.len()),
                format!("a rank below {}", ranks.len()),
                "ranks count within the group",
            ));
        };
        let (from, to) = if incoming { (other, ranks[self.me]) } else { (ranks[self.me], other) };
        Ok(Envelope { group: ranks.to_vec(), from, to, tag })
    }

    /// Waits for all ranks of the group and checks that they make the same call. Returns their entries.
    fn meet(
        &self,
        call: &Call,
        inputs: &[Tensor],
        site: Site,
    ) -> Result<(Vec<Arc<PostedEntry>>, MutexGuard<'_, MemberProgress>)> {
        let (me, size) = (self.me, self.ranks().len());
        let mut entry = CallEntry::new(call, inputs, site, me, size);
        self.check_running(|| entry.describe(self.ranks(), me))?;
        if let Err(error) = self.hub.check_thread(self.ranks()[me]) {
            entry.refused = Some(error);
        }
        let mut turn = self.meeting.begin(me)?;
        if let Some(error) = self.hub.failure_for(|| entry.describe(self.ranks(), me)) {
            return Err(error);
        }
        let output = collectives::prepare(&mut entry, me, size);
        let all = self.meeting.exchange(&*self.hub, me, &mut turn, PostedEntry { entry, output })?;
        let entries: smallvec::SmallVec<[&CallEntry; 8]> = all.iter().map(|p| &p.entry).collect();
        check_agreement(&entries, self.ranks())?;
        drop(entries);
        Ok((all, turn))
    }

    fn check_running(&self, call: impl FnOnce() -> Box<RankCall>) -> Result<()> {
        self.hub.check_running(self.ranks()[self.me], call)
    }

    fn describe(&self, call: String, site: Site) -> Box<RankCall> {
        Box::new(RankCall { rank: self.ranks()[self.me], call, group: self.ranks().to_vec(), site: site.to_string() })
    }
}

impl Communicator for Member {
    fn rank(&self) -> usize {
        self.me
    }

    fn ranks(&self) -> &[usize] {
        self.meeting.ranks()
    }

    fn run(&self, call: &Call, inputs: &[Tensor], site: Site) -> Result<Vec<Tensor>> {
        let (all, mut turn) = self.meet(call, inputs, site)?;
        let me = self.me;
        collectives::execute(&all, me, || {
            self.meeting.pass(&*self.hub, me, &mut turn, &|| all[me].entry.describe(self.ranks(), me))
        })
    }

    fn send(&self, tensor: &Tensor, to: usize, tag: u64, site: Site) -> Result<()> {
        let envelope = self.envelope(to, tag, false)?;
        let describe = || self.describe(format!("send(to {}, tag {tag}) of {}", envelope.to, meta(tensor)), site);
        let to = envelope.to;
        self.check_running(describe)?;
        let gone = self.hub.has_left(to);
        if let Some(error) = self.hub.failure_for(describe) {
            return Err(error);
        }
        if gone {
            return Err(Error::PeerLeft { rank: to, call: describe() });
        }
        // The receiver may read it at any time, so it must be memory that the sender cannot overwrite.
        let content = check_stored(tensor).and_then(|()| own_copy(tensor)).map_err(Error::from);
        let refused = content.as_ref().err().cloned();
        self.hub.mailbox.post(envelope, PostedMessage { content, site });
        self.hub.wake(to);
        refused.map_or(Ok(()), Err)
    }

    fn recv(&self, expected: &TensorMeta, from: usize, tag: u64, site: Site) -> Result<Tensor> {
        let envelope = self.envelope(from, tag, true)?;
        let mailbox = &self.hub.mailbox;
        let describe = || self.describe(format!("recv({expected} from {}, tag {tag})", envelope.from), site);
        self.check_running(describe)?;
        let received = loop {
            let posted = mailbox.posted();
            if let Some(message) = mailbox.take(&envelope) {
                break message;
            }
            if let Some(error) = self.hub.failure_for(describe) {
                return Err(error);
            }
            self.hub.wait_until(
                envelope.to,
                || mailbox.posted() != posted && mailbox.holds(&envelope),
                || if mailbox.holds(&envelope) { Vec::new() } else { vec![envelope.from] },
                || Wait { call: describe(), reason: WaitReason::Message(envelope.clone()) },
            )?;
        };
        let PostedMessage { content, site: sent_at } = received;
        let tensor = content.map_err(|source| {
            let (rank, call) = (envelope.from, format!("send(to {}, tag {tag})", envelope.to));
            let call = RankCall { rank, call, group: self.ranks().to_vec(), site: sent_at.to_string() };
            Error::Rejected { call: Box::new(call), source: Box::new(source) }
        })?;
        if meta(&tensor) == *expected {
            return Ok(tensor);
        }
        let sent = RankCall {
            rank: envelope.from,
            call: format!("send(to {}, tag {tag}) of {}", envelope.to, meta(&tensor)),
            group: self.ranks().to_vec(),
            site: sent_at.to_string(),
        };
        let advice = "what a rank sends must be what the other expects from it";
        Err(Error::Mismatch { first: Box::new(sent), second: describe(), advice })
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        if let Some(rank) = ranks.iter().find(|&&r| r >= self.hub.size()) {
            return Err(ErrorKind::Rank { rank: *rank, size: self.hub.size() }.error(
                "group",
                format!("rank {rank} in {ranks:?}"),
                format!("ranks below {}, the size of the world", self.hub.size()),
                "use ranks of this world",
            ));
        }
        let me = self.ranks()[self.me];
        let me = ranks.iter().position(|&r| r == me).expect("the group has checked that the asking rank is a member");
        Ok(Arc::new(Member { hub: Arc::clone(&self.hub), meeting: self.hub.meeting(ranks), me }))
    }

    fn expose(&self, tensors: &[Tensor], site: Site) -> Result<Box<dyn ExposedTensors>> {
        let all = self.meet(&Call::Expose, tensors, site)?.0;
        let tensors = all.iter().map(|p| p.entry.inputs.to_vec()).collect();
        Ok(Box::new(SharedTensors { tensors, ranks: self.ranks().to_vec(), me: self.ranks()[self.me] }))
    }

    fn abort(&self, reason: &str) {
        self.hub.fail(self.ranks()[self.me], format!("aborted: {reason}"));
    }

    fn network(&self) -> Network {
        Network::THREADS
    }

    fn shares_memory(&self) -> bool {
        true
    }
}

/// The exposed tensors of all ranks, by position in the group. A read clones a reference.
struct SharedTensors {
    tensors: Vec<Vec<Tensor>>,
    ranks: Vec<usize>,
    me: usize,
}

impl ExposedTensors for SharedTensors {
    fn read(&self, rank: usize, index: usize, expected: &TensorMeta, site: Site) -> Result<Tensor> {
        let found = self.tensors.get(rank).and_then(|tensors| tensors.get(index));
        match found {
            Some(tensor) if meta(tensor) == *expected => Ok(tensor.clone()),
            _ => {
                let found = found.map_or("nothing".to_string(), |tensor| meta(tensor).to_string());
                let what = format!("{found} as tensor {index} of rank {rank} in group {:?}", self.ranks);
                let call = RankCall {
                    rank: self.me,
                    call: format!("fetch of {expected}"),
                    group: self.ranks.clone(),
                    site: site.to_string(),
                };
                let source = ErrorKind::Operands.error("fetch", what, expected, "read what the rank has exposed");
                Err(Error::Rejected { call: Box::new(call), source: Box::new(source) })
            }
        }
    }
}

fn meta(tensor: &Tensor) -> TensorMeta {
    TensorMeta::new(tensor.dims(), tensor.dtype())
}
