//! Point-to-point messages. A receiver takes every message that arrives, in the order in which they were sent, and queues
//! the messages that it is not waiting for.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;

use candle_core::Tensor;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shardwise::comm::engine::{ReceiveBuffer, contiguous, immutable, with_bytes};
use shardwise::error::RankCall;
use shardwise::{Error, Result, TensorMeta};

use super::comm::{Comm, Request, Requests};
use super::deadlock::ActiveReceive;

/// Sender, group and tag of a message, by which receives match it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Envelope {
    /// Global rank of the sender.
    pub(super) from: usize,
    pub(super) group: u64,
    pub(super) tag: u64,
}

/// A received message: a tensor, or why the sender rejected its tensor, so that the receiver does not wait for it.
pub(super) struct Message {
    pub(super) content: Result<Tensor, String>,
    pub(super) site: String,
}

/// The first part of a message, as JSON; the elements of the tensor follow.
#[derive(Serialize, Deserialize)]
struct Header {
    group: u64,
    tag: u64,
    site: String,
    shape: Vec<usize>,
    dtype: String,
    rejected: Option<String>,
}

/// Messages that this rank has sent and received in one launch.
pub(super) struct MessageQueue {
    outgoing: Mutex<OutgoingMessages>,
    incoming: Mutex<IncomingMessages>,
    /// The receive in progress, and the number of receives so far.
    receiving: Mutex<(Option<PendingReceive>, u64)>,
}

/// A receive in progress.
struct PendingReceive {
    from: usize,
    call: RankCall,
}

struct OutgoingMessages {
    /// Number of messages sent to every rank.
    sent: Vec<u64>,
    sending: Vec<MessageInFlight>,
}

/// A message in flight, with the memory that it uses.
struct MessageInFlight {
    requests: Requests,
    _header: Vec<u8>,
    _tensor: Option<Tensor>,
}

struct IncomingMessages {
    /// Number of messages that have arrived from every rank.
    received: Vec<u64>,
    /// Messages that no receive has taken yet.
    unclaimed: HashMap<Envelope, VecDeque<Message>>,
}

const HEADER: c_int = 1;
const CONTENT: c_int = 2;

impl MessageQueue {
    pub(super) fn new(size: usize) -> Self {
        MessageQueue {
            outgoing: Mutex::new(OutgoingMessages { sent: vec![0; size], sending: Vec::new() }),
            incoming: Mutex::new(IncomingMessages { received: vec![0; size], unclaimed: HashMap::new() }),
            receiving: Mutex::default(),
        }
    }

    /// Reports a receive as in progress until what this returns is dropped.
    pub(super) fn wait(&self, from: usize, call: RankCall) -> impl Drop + '_ {
        struct PendingReceiveGuard<'a>(&'a MessageQueue);
        impl Drop for PendingReceiveGuard<'_> {
            fn drop(&mut self) {
                self.0.receiving.lock().0 = None;
            }
        }
        let mut receiving = self.receiving.lock();
        *receiving = (Some(PendingReceive { from, call }), receiving.1 + 1);
        PendingReceiveGuard(self)
    }

    /// The receive in progress.
    pub(super) fn receiving(&self) -> Option<ActiveReceive> {
        let (pending, number) = &*self.receiving.lock();
        let PendingReceive { from, call } = pending.as_ref()?;
        Some(ActiveReceive { from: *from, arrived: self.received(*from), number: *number, call: call.clone() })
    }

    /// Number of messages that were sent to every rank.
    pub(super) fn sent(&self) -> Vec<u64> {
        self.outgoing.lock().sent.clone()
    }

    /// Number of messages that have arrived from a rank.
    pub(super) fn received(&self, from: usize) -> u64 {
        self.incoming.lock().received[from]
    }

    /// Starts to send a tensor, or the reason why it was rejected, to a rank. Does not wait for the receiver.
    pub(super) fn send(
        &self,
        comm: &Comm,
        to: usize,
        (group, tag): (u64, u64),
        content: &Result<Tensor>,
        site: &str,
    ) -> Result<()> {
        let content = content
            .as_ref()
            .map_err(ToString::to_string)
            .and_then(|t| immutable(t).and_then(|t| contiguous(&t)).map_err(|error| error.to_string()));
        if to == comm.rank() {
            let envelope = Envelope { from: to, group, tag };
            self.incoming.lock().keep(envelope, Message { content, site: site.into() });
            return Ok(());
        }
        let (shape, dtype) = match &content {
            Ok(tensor) => (tensor.dims().to_vec(), tensor.dtype().as_str()),
            Err(_) => (Vec::new(), ""),
        };
        let rejected = content.as_ref().err().cloned();
        let header = Header { group, tag, site: site.into(), shape, dtype: dtype.into(), rejected };
        let header = serde_json::to_vec(&header).map_err(Error::other)?;
        // Locked while both parts are sent: the receiver expects them one after the other.
        let mut outgoing = self.outgoing.lock();
        outgoing.drop_completed()?;
        let (first, count) = (header.as_ptr(), header.len());
        // SAFETY: the memory is kept with the requests until they are complete.
        let mut requests = unsafe { comm.start_send(first, count, to, HEADER)? };
        if let Ok(tensor) = &content {
            let (first, bytes) = with_bytes(tensor, |bytes| (bytes.as_ptr(), bytes.len()))?;
            // SAFETY: as above, and nobody changes the tensor.
            requests.extend(unsafe { comm.start_send(first, bytes, to, CONTENT)? });
        }
        outgoing.sending.push(MessageInFlight { requests, _header: header, _tensor: content.ok() });
        outgoing.sent[to] += 1;
        Ok(())
    }

    /// Takes the next message with this envelope, if one has arrived.
    pub(super) fn take(&self, comm: &Comm, envelope: &Envelope) -> Result<Option<Message>> {
        let mut incoming = self.incoming.lock();
        incoming.collect(comm)?;
        let Some(queue) = incoming.unclaimed.get_mut(envelope) else { return Ok(None) };
        self.outgoing.lock().drop_completed()?;
        let message = queue.pop_front();
        if queue.is_empty() {
            incoming.unclaimed.remove(envelope);
        }
        Ok(message)
    }

    /// Returns an error for a message that the program has not received, after all ranks have left. `sent` is the number of
    /// messages that a rank has sent to this one.
    pub(super) fn unreceived(&self, comm: &Comm, sent: impl Fn(usize) -> u64) -> Result<Option<Error>> {
        let mut incoming = self.incoming.lock();
        // Messages still in flight are received, which also completes the requests of their senders. Rank by rank: a rank
        // whose messages have all been received may have started the next launch.
        for rank in (0..comm.size()).filter(|&rank| rank != comm.rank()) {
            while incoming.received[rank] < sent(rank) {
                incoming.collect_one(comm, Some(rank))?;
            }
        }
        for mut message in self.outgoing.lock().sending.drain(..) {
            Request::wait_all(&mut message.requests)?;
        }
        let Some((envelope, queue)) = incoming.unclaimed.iter().min_by_key(|(envelope, _)| *envelope) else {
            return Ok(None);
        };
        let Message { content, site } = &queue[0];
        let what = match content {
            Ok(tensor) => TensorMeta::new(tensor.dims(), tensor.dtype()).to_string(),
            Err(_) => "a tensor that was refused".to_string(),
        };
        Ok(Some(Error::Unreceived { from: envelope.from, to: comm.rank(), what, site: site.clone() }))
    }
}

impl OutgoingMessages {
    fn drop_completed(&mut self) -> Result<()> {
        let mut checked = Ok(());
        self.sending.retain_mut(|message| {
            let done = Request::all_done(&mut message.requests);
            done.map_or_else(
                |error| {
                    checked = Err(error);
                    true
                },
                |done| !done,
            )
        });
        checked
    }
}

impl IncomingMessages {
    fn keep(&mut self, envelope: Envelope, message: Message) {
        self.unclaimed.entry(envelope).or_default().push_back(message);
    }

    /// Queues all messages that have arrived.
    fn collect(&mut self, comm: &Comm) -> Result<()> {
        while self.collect_one(comm, None)? {}
        Ok(())
    }

    /// Queues a message from a rank (`None`: from any), if one has arrived. Returns whether one had.
    fn collect_one(&mut self, comm: &Comm, from: Option<usize>) -> Result<bool> {
        let Some(header) = comm.try_receive(HEADER, from)? else { return Ok(false) };
        let Header { group, tag, site, shape, dtype, rejected } =
            serde_json::from_slice(&header.bytes).map_err(Error::other)?;
        let content = match rejected {
            Some(reason) => Err(reason),
            None => {
                let meta = TensorMeta::new(shape, dtype.parse().map_err(Error::other)?);
                let (bytes, mut buffer) = (meta.bytes(), ReceiveBuffer::new(meta)?);
                // SAFETY: memory for that many bytes, which are received before it becomes a tensor.
                unsafe {
                    comm.receive(buffer.first(), bytes, header.from, CONTENT)?;
                    Ok(buffer.finish())
                }
            }
        };
        self.received[header.from] += 1;
        self.keep(Envelope { from: header.from, group, tag }, Message { content, site });
        Ok(true)
    }
}
