//! Point-to-point messages between ranks.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use candle_core::Tensor;
use parking_lot::Mutex;

use crate::comm::dump::DumpedMessage;
use crate::error::{Error, Result, Site};
use crate::layout::TensorMeta;

/// The key by which a receiver finds a message: group, sender, receiver and tag. Ranks are global.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Envelope {
    pub(super) group: Vec<usize>,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) tag: u64,
}

/// A sent tensor, or the error that rejected it, so that the receiver does not wait forever.
pub(super) struct PostedMessage {
    pub(super) content: Result<Tensor>,
    pub(super) site: Site,
}

impl PostedMessage {
    /// Type and shape of the tensor.
    fn describe(&self) -> String {
        match &self.content {
            Ok(tensor) => TensorMeta::new(tensor.dims(), tensor.dtype()).to_string(),
            Err(_) => "a tensor that was refused".to_string(),
        }
    }
}

#[derive(Default)]
pub(super) struct Mailbox {
    /// Number of messages posted so far: a waiting rank looks into the map only when it has changed.
    posted: AtomicU64,
    messages: Mutex<HashMap<Envelope, VecDeque<PostedMessage>>>,
}

impl Mailbox {
    pub(super) fn post(&self, envelope: Envelope, message: PostedMessage) {
        self.messages.lock().entry(envelope).or_default().push_back(message);
        self.posted.fetch_add(1, SeqCst);
    }

    pub(super) fn posted(&self) -> u64 {
        self.posted.load(SeqCst)
    }

    pub(super) fn holds(&self, envelope: &Envelope) -> bool {
        self.messages.lock().contains_key(envelope)
    }

    pub(super) fn take(&self, envelope: &Envelope) -> Option<PostedMessage> {
        let mut messages = self.messages.lock();
        let queue = messages.get_mut(envelope)?;
        let message = queue.pop_front();
        if queue.is_empty() {
            messages.remove(envelope);
        }
        message
    }

    /// The messages that a rank sent and that were not received, by receiver and tag.
    pub(super) fn sent_by(&self, rank: usize) -> Vec<DumpedMessage> {
        let messages = self.messages.lock();
        let mut found: Vec<DumpedMessage> = messages
            .iter()
            .filter(|(envelope, _)| envelope.from == rank)
            .flat_map(|(envelope, queue)| {
                queue.iter().map(|message| DumpedMessage {
                    to: envelope.to,
                    tag: envelope.tag,
                    what: message.describe(),
                    site: message.site.to_string(),
                })
            })
            .collect();
        found.sort_by_key(|message| (message.to, message.tag));
        found
    }

    /// The error of a message that was never received, with its sender; the first by sender, receiver and tag.
    pub(super) fn unreceived(&self) -> Option<(usize, Error)> {
        let messages = self.messages.lock();
        let (envelope, queue) = messages.iter().min_by_key(|(e, _)| (e.from, e.to, e.tag))?;
        let message = queue.front()?;
        let (what, site) = (message.describe(), message.site.to_string());
        Some((envelope.from, Error::Unreceived { from: envelope.from, to: envelope.to, what, site }))
    }
}
