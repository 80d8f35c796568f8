//! Messages from one rank to another. The receiver takes everything that arrives, in the order in which it was sent, and
//! keeps what it was not looking for.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;

use candle_core::Tensor;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shardwise::comm::engine::{ReceiveBuffer, contiguous, immutable, with_bytes};
use shardwise::{Error, Result, TensorMeta};

use super::comm::{Comm, Request, Requests};

/// Who sends, in which group and with which tag.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Envelope {
    /// Global rank.
    pub(super) from: usize,
    pub(super) group: u64,
    pub(super) tag: u64,
}

/// What was sent: a tensor, or why the tensor was refused, so that the receiver does not wait for it.
pub(super) struct Message {
    pub(super) content: Result<Tensor, String>,
    pub(super) site: String,
}

/// The first part of a message.
#[derive(Serialize, Deserialize)]
struct Header {
    group: u64,
    tag: u64,
    site: String,
    shape: Vec<usize>,
    dtype: String,
    refused: Option<String>,
}

/// What this rank has sent and received in one launch.
pub(super) struct Mail {
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
}

struct Outgoing {
    /// Messages to every rank.
    sent: Vec<u64>,
    sending: Vec<Sending>,
}

/// A message under way, with the memory that must stay until it is sent.
struct Sending {
    requests: Requests,
    _header: Vec<u8>,
    _tensor: Option<Tensor>,
}

struct Incoming {
    /// Messages from every rank that have arrived.
    received: Vec<u64>,
    kept: HashMap<Envelope, VecDeque<Message>>,
}

const HEADER: c_int = 1;
const CONTENT: c_int = 2;

impl Mail {
    pub(super) fn new(size: usize) -> Self {
        Mail {
            outgoing: Mutex::new(Outgoing { sent: vec![0; size], sending: Vec::new() }),
            incoming: Mutex::new(Incoming { received: vec![0; size], kept: HashMap::new() }),
        }
    }

    /// Messages that were sent to every rank.
    pub(super) fn sent(&self) -> Vec<u64> {
        self.outgoing.lock().sent.clone()
    }

    /// Messages from a rank that have arrived.
    pub(super) fn received(&self, from: usize) -> u64 {
        self.incoming.lock().received[from]
    }

    /// Hands a tensor, or why it is refused, to a rank. Returns at once.
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
        let refused = content.as_ref().err().cloned();
        let header = Header { group, tag, site: site.into(), shape, dtype: dtype.into(), refused };
        let header = serde_json::to_vec(&header).map_err(Error::other)?;
        // Held over both parts: the receiver takes them one after the other.
        let mut outgoing = self.outgoing.lock();
        outgoing.forget_what_is_done()?;
        let (first, count) = (header.as_ptr(), header.len());
        // SAFETY: the memory is kept with the requests until they are done.
        let mut requests = unsafe { comm.start_send(first, count, to, HEADER)? };
        if let Ok(tensor) = &content {
            let (first, bytes) = with_bytes(tensor, |bytes| (bytes.as_ptr(), bytes.len()))?;
            // SAFETY: as above, and nobody changes the tensor.
            requests.extend(unsafe { comm.start_send(first, bytes, to, CONTENT)? });
        }
        outgoing.sending.push(Sending { requests, _header: header, _tensor: content.ok() });
        outgoing.sent[to] += 1;
        Ok(())
    }

    /// The next message with this envelope, if it has arrived.
    pub(super) fn take(&self, comm: &Comm, envelope: &Envelope) -> Result<Option<Message>> {
        let mut incoming = self.incoming.lock();
        incoming.collect(comm)?;
        let Some(queue) = incoming.kept.get_mut(envelope) else { return Ok(None) };
        self.outgoing.lock().forget_what_is_done()?;
        let message = queue.pop_front();
        if queue.is_empty() {
            incoming.kept.remove(envelope);
        }
        Ok(message)
    }

    /// A message that nobody has received. All ranks have left, and `sent` says what each has sent to this one.
    pub(super) fn unreceived(&self, comm: &Comm, sent: impl Fn(usize) -> u64) -> Result<Option<Error>> {
        let mut incoming = self.incoming.lock();
        // What was sent is on its way; taking it also sets the sender free.
        // Rank by rank: one that has all of its messages received may have begun the next launch.
        for rank in (0..comm.size()).filter(|&rank| rank != comm.rank()) {
            while incoming.received[rank] < sent(rank) {
                incoming.collect_one(comm, Some(rank))?;
            }
        }
        for mut message in self.outgoing.lock().sending.drain(..) {
            Request::wait_all(&mut message.requests)?;
        }
        let Some((envelope, queue)) = incoming.kept.iter().min_by_key(|(envelope, _)| *envelope) else {
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

impl Outgoing {
    fn forget_what_is_done(&mut self) -> Result<()> {
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

impl Incoming {
    fn keep(&mut self, envelope: Envelope, message: Message) {
        self.kept.entry(envelope).or_default().push_back(message);
    }

    /// Takes all messages that have arrived.
    fn collect(&mut self, comm: &Comm) -> Result<()> {
        while self.collect_one(comm, None)? {}
        Ok(())
    }

    /// Takes a message from a rank, or from anybody, if one has arrived.
    fn collect_one(&mut self, comm: &Comm, from: Option<usize>) -> Result<bool> {
        let Some(arrived) = comm.arrived_with(HEADER, from)? else { return Ok(false) };
        let Header { group, tag, site, shape, dtype, refused } =
            serde_json::from_slice(&arrived.bytes).map_err(Error::other)?;
        let content = match refused {
            Some(reason) => Err(reason),
            None => {
                let meta = TensorMeta::new(shape, dtype.parse().map_err(Error::other)?);
                let (bytes, mut buffer) = (meta.bytes(), ReceiveBuffer::new(meta)?);
                // SAFETY: memory for that many bytes, which are received before it becomes a tensor.
                unsafe {
                    comm.receive(buffer.first(), bytes, arrived.from, CONTENT)?;
                    Ok(buffer.finish())
                }
            }
        };
        self.received[arrived.from] += 1;
        self.keep(Envelope { from: arrived.from, group, tag }, Message { content, site });
        Ok(true)
    }
}
