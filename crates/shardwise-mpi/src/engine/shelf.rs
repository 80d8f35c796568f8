//! Tensors that this rank lets others read, and what is said about them.

use std::collections::HashMap;
use std::ffi::c_int;

use candle_core::Tensor;
use parking_lot::Mutex;
use shardwise::comm::engine::{contiguous, immutable, meta_fingerprint, with_bytes};
use shardwise::{Result, TensorMeta};

use super::comm::{Comm, Request};

/// A set of tensors that the ranks of a group exposed together.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct SetId {
    pub(super) group: u64,
    pub(super) number: u64,
}

/// What a rank asks of another.
pub(super) struct ReadRequest {
    pub(super) set: SetId,
    pub(super) index: u64,
    /// Stands for the shape and type that are expected.
    pub(super) expected: u64,
    /// Tag of the answer.
    pub(super) ticket: u64,
}

/// The sets, with the ranks that may still read them.
#[derive(Default)]
pub(super) struct Shelf {
    sets: Mutex<HashMap<SetId, (Vec<Tensor>, usize)>>,
}

pub(super) fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let word = |i: usize| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().expect("eight bytes"));
    std::array::from_fn(word)
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

impl SetId {
    pub(super) fn encode(self) -> Vec<u8> {
        bytes_of(&[self.group, self.number])
    }

    pub(super) fn decode(bytes: &[u8]) -> Self {
        let [group, number] = words(bytes);
        SetId { group, number }
    }
}

impl ReadRequest {
    pub(super) fn encode(&self) -> Vec<u8> {
        bytes_of(&[self.set.group, self.set.number, self.index, self.expected, self.ticket])
    }
}

impl Shelf {
    /// Puts tensors where `readers` ranks can read them.
    pub(super) fn put(&self, set: SetId, tensors: &[Tensor], readers: usize) -> Result<()> {
        let tensors = tensors.iter().map(|t| Ok(contiguous(&immutable(t)?)?)).collect::<Result<Vec<_>>>()?;
        self.sets.lock().insert(set, (tensors, readers));
        Ok(())
    }

    /// One of the readers has no more use for a set.
    pub(super) fn release(&self, set: SetId) {
        let mut sets = self.sets.lock();
        if let Some((_, readers)) = sets.get_mut(&set) {
            *readers -= 1;
            if *readers == 0 {
                sets.remove(&set);
            }
        }
    }

    /// Takes all sets away: nobody is left to read them.
    pub(super) fn clear(&self) {
        self.sets.lock().clear();
    }

    pub(super) fn find(&self, set: SetId, index: usize) -> Option<Tensor> {
        self.sets.lock().get(&set)?.0.get(index).cloned()
    }

    /// Begins to send what was asked for, or says what is there instead.
    pub(super) fn answer(&self, request: &[u8], to: usize, answers: &Comm) -> Result<Vec<(Request, Tensor)>> {
        let [group, number, index, expected, ticket] = words(request);
        let tag = ticket as c_int;
        let found = self.find(SetId { group, number }, index as usize);
        let meta = found.as_ref().map(|t| TensorMeta::new(t.dims(), t.dtype()));
        match (found, meta) {
            (Some(tensor), Some(meta)) if meta_fingerprint(&meta) == expected => {
                answers.send(&bytes_of(&[1, 0]), to, tag)?;
                let (first, bytes) = with_bytes(&tensor, |bytes| (bytes.as_ptr(), bytes.len()))?;
                // SAFETY: the tensor is kept with the requests until they are done, and nobody changes it.
                let requests = unsafe { answers.start_send(first, bytes, to, tag)? };
                Ok(requests.into_iter().map(|request| (request, tensor.clone())).collect())
            }
            (_, meta) => {
                let text = meta.map_or("nothing".to_string(), |meta| meta.to_string());
                answers.send(&bytes_of(&[0, text.len() as u64]), to, tag)?;
                answers.send(text.as_bytes(), to, tag)?;
                Ok(Vec::new())
            }
        }
    }
}
