//! One rank's end of a group of processes.

use shardwise::error::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use candle_core::Tensor;
use shardwise::comm::engine::{Purpose, describe};
use shardwise::comm::{Call, Communicator, ExposedTensors};
use shardwise::error::{RankCall, Site};
use shardwise::mesh::Network;
use shardwise::{Error, Result, TensorMeta};

use super::agreement::{self, Asked};
use super::collectives;
use super::comm::Comm;
use super::exposed::Handle;
use super::groups::GroupState;
use super::launch::Launch;
use super::mail::{Envelope, Message};
use super::shelf::SetId;
use super::watch::Pending;

pub(super) struct Member {
    launch: Arc<Launch>,
    group: Arc<GroupState>,
}

impl Member {
    /// This process's end of the group of all.
    pub(super) fn of_world(launch: Arc<Launch>) -> Self {
        let world = &launch.process.world;
        let all: Vec<usize> = (0..world.size()).collect();
        let group = launch.process.groups.get(&all, world.rank());
        Member { launch, group }
    }

    fn describe(&self, call: String, site: Site) -> RankCall {
        let GroupState { ranks, me, .. } = &*self.group;
        RankCall { rank: ranks[*me], call, group: ranks.clone(), site: site.to_string() }
    }

    /// Enters a collective and carries out `body` in it; it gets what has come along with the agreement of the ranks.
    fn together<R>(
        &self,
        call: &Call,
        inputs: &[Tensor],
        site: Site,
        body: impl FnOnce(&Comm, Option<Vec<Tensor>>) -> Result<R>,
    ) -> Result<R> {
        let purpose = Purpose::current();
        let purpose = purpose.as_ref();
        let describe = || self.describe(describe(call, inputs, purpose), site);
        self.launch.check_open(&describe)?;
        if let Some((rank, reason)) = self.launch.process.service.failure() {
            return Err(Error::PeerFailed { rank, reason: reason.into(), call: Box::new(describe()) });
        }
        let mut broken = self.group.turn.lock();
        if let Some(error) = &*broken {
            return Err(error.clone());
        }
        let mut out_of_step = |error: Error| {
            *broken = Some(error.clone());
            error
        };
        let refused = self.launch.check_thread().err();
        // What is refused must be told to the others; where nobody asks, this rank alone does not take part.
        let size = self.group.ranks.len();
        let asks = size > 1 && (self.launch.check || matches!(call, Call::Agree { .. } | Call::Expose));
        if !asks {
            let checked = refused.clone().map_or_else(|| call.check(self.group.me, size, inputs), Err);
            let refuse = |source| Error::Rejected { call: Box::new(describe()), source: Box::new(source) };
            checked.map_err(refuse).map_err(|error| if size > 1 { out_of_step(error) } else { error })?;
        }
        self.group.begun.fetch_add(1, SeqCst);
        let pending = Pending { deadline: self.launch.deadline, describe: &describe };
        self.group.waiting.over(&pending, || {
            let comm = self.group.comm(&self.launch.process.world)?;
            let come = match asks {
                true => {
                    let asked = Asked { call, inputs, site, purpose, refused };
                    agreement::check(comm, &self.group.ranks, asked, self.launch.limits.deterministic)?
                }
                false => None,
            };
            body(comm, come).map_err(out_of_step)
        })
    }

    /// The global rank of another rank of the group.
    fn other(&self, position: usize) -> Result<usize> {
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

    /// Waits for a message.
    fn wait_for(&self, envelope: &Envelope, call: &dyn Fn() -> RankCall) -> Result<Message> {
        let Launch { process, mail, .. } = &*self.launch;
        self.launch.wait_for(envelope.from, call, || {
            // Asked before looking: what was sent before leaving has been seen then.
            let (failure, sent) = (process.service.failure(), process.service.sent_by(envelope.from));
            if let Some(message) = mail.take(&process.mail, envelope)? {
                return Ok(Some(message));
            }
            if let Some((rank, reason)) = failure {
                return Err(Error::PeerFailed { rank, reason: reason.into(), call: Box::new(call()) });
            }
            let left = sent.is_some_and(|sent| mail.received(envelope.from) == sent);
            if left || process.service.has_ended(envelope.from) {
                return Err(Error::PeerLeft { rank: envelope.from, call: Box::new(call()) });
            }
            Ok(None)
        })
    }
}

impl Communicator for Member {
    fn rank(&self) -> usize {
        self.group.me
    }

    fn ranks(&self) -> &[usize] {
        &self.group.ranks
    }

    fn run(&self, call: &Call, inputs: &[Tensor], site: Site) -> Result<Vec<Tensor>> {
        self.together(call, inputs, site, |comm, come| match come {
            Some(outputs) => Ok(outputs),
            None => collectives::carry_out(comm, self.launch.limits, call, inputs),
        })
    }

    fn send(&self, tensor: &Tensor, to: usize, tag: u64, site: Site) -> Result<()> {
        let to = self.other(to)?;
        let meta = || TensorMeta::new(tensor.dims(), tensor.dtype());
        let describe = || self.describe(format!("send(to {to}, tag {tag}) of {}", meta()), site);
        self.launch.check_open(&describe)?;
        let Launch { process, mail, .. } = &*self.launch;
        if let Some((rank, reason)) = process.service.failure() {
            return Err(Error::PeerFailed { rank, reason: reason.into(), call: Box::new(describe()) });
        }
        if process.service.sent_by(to).is_some() {
            return Err(Error::PeerLeft { rank: to, call: Box::new(describe()) });
        }
        // The rules for a tensor are those of a collective on it.
        let content = Call::Expose.check(0, 1, std::slice::from_ref(tensor)).map(|()| tensor.clone());
        mail.send(&process.mail, to, (self.group.identity, tag), &content, &site.to_string())?;
        content.map(drop)
    }

    fn recv(&self, expected: &TensorMeta, from: usize, tag: u64, site: Site) -> Result<Tensor> {
        let from = self.other(from)?;
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
        Ok(Arc::new(Member { launch: Arc::clone(&self.launch), group }))
    }

    fn expose(&self, tensors: &[Tensor], site: Site) -> Result<Box<dyn ExposedTensors>> {
        let set = self.together(&Call::Expose, tensors, site, |comm, _| {
            let set = SetId { group: self.group.identity, number: self.group.exposed.fetch_add(1, SeqCst) };
            self.launch.process.service.shelf.put(set, tensors, self.group.ranks.len())?;
            // Nobody reads before all tensors are there.
            comm.barrier()?;
            Ok(set)
        })?;
        Ok(Box::new(Handle { launch: Arc::clone(&self.launch), group: Arc::clone(&self.group), set }))
    }

    fn abort(&self, reason: &str) {
        let rank = self.group.ranks[self.group.me];
        self.launch.process.service.die(&format!("rank {rank} aborted: {reason}"));
    }

    fn network(&self) -> Network {
        self.launch.network.clone()
    }
}
