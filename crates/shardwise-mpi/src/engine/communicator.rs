//! The [`Communicator`] of one rank in a group of processes.

use shardwise::error::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use candle_core::Tensor;
use shardwise::comm::engine::{CallOrigin, describe};
use shardwise::comm::{Call, Communicator, ExposedTensors};
use shardwise::error::{RankCall, Site};
use shardwise::mesh::Network;
use shardwise::{Error, Result, TensorMeta};

use super::agreement::{self, ProposedCall};
use super::collectives;
use super::comm::Comm;
use super::exposed_tensors::ExposedSetId;
use super::groups::GroupState;
use super::launch::Launch;
use super::messages::{Envelope, Message};
use super::pending_call::PendingCall;
use super::remote_read::ExposedHandle;

pub(super) struct MpiCommunicator {
    launch: Arc<Launch>,
    group: Arc<GroupState>,
}

impl MpiCommunicator {
    /// The communicator of all ranks of the job.
    pub(super) fn of_world(launch: Arc<Launch>) -> Self {
        let world = &launch.process.world;
        let all: Vec<usize> = (0..world.size()).collect();
        let group = launch.process.groups.get(&all, world.rank());
        MpiCommunicator { launch, group }
    }

    fn describe(&self, call: String, site: Site) -> RankCall {
        let GroupState { ranks, me, .. } = &*self.group;
        RankCall { rank: ranks[*me], call, group: ranks.clone(), site: site.to_string() }
    }

    /// Starts a collective, checks that all ranks make the same call, and runs `body`, which gets the outputs if they came in
    /// the packet.
    fn run_collective<R>(
        &self,
        call: &Call,
        inputs: &[Tensor],
        site: Site,
        body: impl FnOnce(&Comm, Option<Vec<Tensor>>) -> Result<R>,
    ) -> Result<R> {
        let origin = CallOrigin::current();
        let origin = origin.as_ref();
        let describe = || self.describe(describe(call, inputs, origin), site);
        self.launch.check_open(&describe)?;
        if let Some((rank, reason)) = self.launch.process.service.failure() {
            return Err(Error::PeerFailed { rank, reason: reason.into(), call: Box::new(describe()) });
        }
        let mut out_of_sync = self.group.out_of_sync.lock();
        if let Some(error) = &*out_of_sync {
            return Err(error.clone());
        }
        let mut leave_sync = |error: Error| {
            *out_of_sync = Some(error.clone());
            error
        };
        let rejected = self.launch.check_thread().err();
        // With the check, a rank that rejects its call still takes part in it, so that all ranks get the error. Without the
        // check, only this rank returns an error and no longer makes the same calls as the group.
        let size = self.group.ranks.len();
        let compares = size > 1 && (self.launch.check || matches!(call, Call::Agree { .. } | Call::Expose));
        if !compares {
            let checked = rejected.clone().map_or_else(|| call.check(self.group.me, size, inputs), Err);
            let reject = |source| Error::Rejected { call: Box::new(describe()), source: Box::new(source) };
            checked.map_err(reject).map_err(|error| if size > 1 { leave_sync(error) } else { error })?;
        }
        self.group.begun.fetch_add(1, SeqCst);
        let pending = PendingCall { deadline: self.launch.deadline, describe: &describe };
        self.group.pending.run(&pending, || {
            let comm = self.group.comm(&self.launch.process.world)?;
            let received = match compares {
                true => {
                    let proposed = ProposedCall { call, inputs, site, origin, rejected };
                    agreement::check(comm, &self.group.ranks, proposed, self.launch.limits.deterministic)?
                }
                false => None,
            };
            body(comm, received).map_err(leave_sync)
        })
    }

    /// The global rank at a position of the group.
    fn global_rank(&self, position: usize) -> Result<usize> {
        let ranks = &self.group.ranks;
        ranks.get(position).copied().ok_or_else(|| {
            ErrorKind::Rank { rank: position, size: ranks.len() }.error(
                "rank",
                format!("{position} in a group of {}", ranks.len()),
                format!("a rank below {}", ranks.len()),
                "ranks count within the group",
            )
        })
    }

    /// Waits for a message, a failure or the exit of its sender, or the deadline.
    fn wait_for(&self, envelope: &Envelope, call: &dyn Fn() -> RankCall) -> Result<Message> {
        let Launch { process, messages, .. } = &*self.launch;
        if let Some(message) = messages.take(&process.message_comm, envelope)? {
            return Ok(message);
        }
        let _receiving = messages.wait(envelope.from, call());
        self.launch.wait_for(envelope.from, call, || {
            // Read before the queue: if the sender has left by now, all of its messages are found below.
            let (failure, sent) = (process.service.failure(), process.service.sent_by(envelope.from));
            if let Some(message) = messages.take(&process.message_comm, envelope)? {
                return Ok(Some(message));
            }
            if let Some((rank, reason)) = failure {
                return Err(Error::PeerFailed { rank, reason: reason.into(), call: Box::new(call()) });
            }
            let left = sent.is_some_and(|sent| messages.received(envelope.from) == sent);
            if left || process.service.has_ended(envelope.from) {
                return Err(Error::PeerLeft { rank: envelope.from, call: Box::new(call()) });
            }
            Ok(None)
        })
    }
}

impl Communicator for MpiCommunicator {
    fn rank(&self) -> usize {
        self.group.me
    }

    fn ranks(&self) -> &[usize] {
        &self.group.ranks
    }

    fn run(&self, call: &Call, inputs: &[Tensor], site: Site) -> Result<Vec<Tensor>> {
        self.run_collective(call, inputs, site, |comm, received| match received {
            Some(outputs) => Ok(outputs),
            None => collectives::execute(comm, self.launch.limits, call, inputs),
        })
    }

    fn send(&self, tensor: &Tensor, to: usize, tag: u64, site: Site) -> Result<()> {
        let to = self.global_rank(to)?;
        let meta = || TensorMeta::new(tensor.dims(), tensor.dtype());
        let describe = || self.describe(format!("send(to {to}, tag {tag}) of {}", meta()), site);
        self.launch.check_open(&describe)?;
        let Launch { process, messages, .. } = &*self.launch;
        if let Some((rank, reason)) = process.service.failure() {
            return Err(Error::PeerFailed { rank, reason: reason.into(), call: Box::new(describe()) });
        }
        if process.service.sent_by(to).is_some() {
            return Err(Error::PeerLeft { rank: to, call: Box::new(describe()) });
        }
        // A message may contain the tensors that a collective accepts.
        let content = Call::Expose.check(0, 1, std::slice::from_ref(tensor)).map(|()| tensor.clone());
        messages.send(&process.message_comm, to, (self.group.identity, tag), &content, &site.to_string())?;
        content.map(drop)
    }

    fn recv(&self, expected: &TensorMeta, from: usize, tag: u64, site: Site) -> Result<Tensor> {
        let from = self.global_rank(from)?;
        let describe = || self.describe(format!("recv({expected} from {from}, tag {tag})"), site);
        self.launch.check_open(&describe)?;
        let me = self.group.ranks[self.group.me];
        let envelope = Envelope { from, group: self.group.identity, tag };
        let Message { content, site: sent_at } = self.wait_for(&envelope, &describe)?;
        let sent = |what: String| {
            let group = self.group.ranks.clone();
            Box::new(RankCall {
                rank: from,
                call: format!("send(to {me}, tag {tag}){what}"),
                group,
                site: sent_at.clone(),
            })
        };
        let tensor = content
            .map_err(|why| Error::Rejected { call: sent(String::new()), source: Box::new(Error::other(why)) })?;
        let meta = TensorMeta::new(tensor.dims(), tensor.dtype());
        if meta == *expected {
            return Ok(tensor);
        }
        let advice = "what a rank sends must be what the other expects from it";
        Err(Error::Mismatch { first: sent(format!(" of {meta}")), second: Box::new(describe()), advice })
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        let world = &self.launch.process.world;
        if let Some(rank) = ranks.iter().find(|&&r| r >= world.size()) {
            return Err(ErrorKind::Rank { rank: *rank, size: world.size() }.error(
                "group",
                format!("rank {rank} in {ranks:?}"),
                format!("ranks below {}, the size of the world", world.size()),
                "use ranks of this world",
            ));
        }
        let group = self.launch.process.groups.get(ranks, world.rank());
        Ok(Arc::new(MpiCommunicator { launch: Arc::clone(&self.launch), group }))
    }

    fn expose(&self, tensors: &[Tensor], site: Site) -> Result<Box<dyn ExposedTensors>> {
        let set = self.run_collective(&Call::Expose, tensors, site, |comm, _| {
            let set = ExposedSetId { group: self.group.identity, number: self.group.exposed.fetch_add(1, SeqCst) };
            self.launch.process.service.exposed.put(set, tensors, self.group.ranks.len())?;
            // No rank reads before all tensors are exposed.
            comm.barrier()?;
            Ok(set)
        })?;
        Ok(Box::new(ExposedHandle { launch: Arc::clone(&self.launch), group: Arc::clone(&self.group), set }))
    }

    fn abort(&self, reason: &str) {
        let rank = self.group.ranks[self.group.me];
        self.launch.process.service.abort_job(&format!("rank {rank} aborted: {reason}"));
    }

    fn network(&self) -> Network {
        self.launch.network.clone()
    }
}
