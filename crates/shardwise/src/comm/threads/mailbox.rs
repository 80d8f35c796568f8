//! Messages from one rank to another.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use candle_core::Tensor;
use parking_lot::Mutex;

use crate::error::{Error, Result, Site};
use crate::layout::TensorMeta;

/// Who sends to whom, in which group and with which tag.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Envelope {
    pub(super) group: Vec<usize>,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) tag: u64,
}

/// What was sent: a tensor, or why the tensor was refused, so that the receiver does not wait for it.
pub(super) struct Message {
    pub(super) content: Result<Tensor>,
    pub(super) site: Site,
}

#[derive(Default)]
pub(super) struct Mailbox {
    /// Number of messages ever posted: lets a waiting rank see cheaply whether looking again is worth it.
    posted: AtomicU64,
    messages: Mutex<HashMap<Envelope, VecDeque<Message>>>,
}

impl Mailbox {
    pub(super) fn post(&self, envelope: Envelope, message: Message) {
        self.messages.lock().entry(envelope).or_default().push_back(message);
        self.posted.fetch_add(1, SeqCst);
    }

    pub(super) fn posted(&self) -> u64 {
        self.posted.load(SeqCst)
    }

    pub(super) fn holds(&self, envelope: &Envelope) -> bool {
        self.messages.lock().contains_key(envelope)
    }

    pub(super) fn take(&self, envelope: &Envelope) -> Option<Message> {
        let mut messages = self.messages.lock();
        let queue = messages.get_mut(envelope)?;
        let message = queue.pop_front();
        if queue.is_empty() {
            messages.remove(envelope);
        }
        message
    }

    /// A message that nobody received, with its sender.
    pub(super) fn unreceived(&self) -> Option<(usize, Error)> {
        let messages = self.messages.lock();
        let (envelope, queue) = messages.iter().min_by_key(|(e, _)| (e.from, e.to, e.tag))?;
        let Message { content, site } = queue.front()?;
        let what = match content {
            Ok(tensor) => TensorMeta::new(tensor.dims(), tensor.dtype()).to_string(),
            Err(_) => "a tensor that was refused".to_string(),
        };
        Some((envelope.from, Error::Unreceived { from: envelope.from, to: envelope.to, what, site: site.to_string() }))
    }
}
