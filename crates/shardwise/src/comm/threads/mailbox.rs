//! Messages from one rank to another.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use candle_core::Tensor;
use parking_lot::Mutex;

use crate::error::{Error, Site};
use crate::layout::TensorMeta;

/// Who sends to whom, in which group and with which tag.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Envelope {
    pub(super) group: Vec<usize>,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) tag: u64,
}

#[derive(Default)]
pub(super) struct Mailbox {
    /// Number of messages ever posted: lets a waiting rank see cheaply whether looking again is worth it.
    posted: AtomicU64,
    messages: Mutex<HashMap<Envelope, VecDeque<(Tensor, Site)>>>,
}

impl Mailbox {
    pub(super) fn post(&self, envelope: Envelope, tensor: Tensor, site: Site) {
        self.messages.lock().entry(envelope).or_default().push_back((tensor, site));
        self.posted.fetch_add(1, SeqCst);
    }

    pub(super) fn posted(&self) -> u64 {
        self.posted.load(SeqCst)
    }

    pub(super) fn holds(&self, envelope: &Envelope) -> bool {
        self.messages.lock().contains_key(envelope)
    }

    pub(super) fn take(&self, envelope: &Envelope) -> Option<(Tensor, Site)> {
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
        let (tensor, site) = queue.front()?;
        let what = TensorMeta::new(tensor.dims(), tensor.dtype()).to_string();
        Some((envelope.from, Error::Unreceived { from: envelope.from, to: envelope.to, what, site }))
    }
}
