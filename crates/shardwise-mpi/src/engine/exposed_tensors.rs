//! Tensors of this rank that other ranks of a group may read, and the messages with which they do.

use std::collections::HashMap;
use std::ffi::c_int;

use candle_core::Tensor;
use parking_lot::Mutex;
use shardwise::comm::engine::{contiguous, immutable, meta_fingerprint, with_bytes};
use shardwise::{Result, TensorMeta};

use super::comm::{Comm, Request};

/// Identifies the tensors that the ranks of a group exposed in one call.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ExposedSetId {
    pub(super) group: u64,
    pub(super) number: u64,
}

/// A request to read one exposed tensor of another rank.
pub(super) struct ReadRequest {
    pub(super) set: ExposedSetId,
    pub(super) index: u64,
    /// Fingerprint of the expected shape and type.
    pub(super) expected: u64,
    /// MPI tag of the answer.
    pub(super) ticket: u64,
}

/// The exposed sets of this rank, each with the number of ranks that may still read it.
#[derive(Default)]
pub(super) struct ExposedStore {
    sets: Mutex<HashMap<ExposedSetId, (Vec<Tensor>, usize)>>,
}

pub(super) fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let word = |i: usize| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().expect("eight bytes"));
    std::array::from_fn(word)
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

impl ExposedSetId {
    pub(super) fn encode(self) -> Vec<u8> {
        bytes_of(&[self.group, self.number])
    }

    pub(super) fn decode(bytes: &[u8]) -> Self {
        let [group, number] = words(bytes);
        ExposedSetId { group, number }
    }
}

impl ReadRequest {
    pub(super) fn encode(&self) -> Vec<u8> {
        bytes_of(&[self.set.group, self.set.number, self.index, self.expected, self.ticket])
    }
}

impl ExposedStore {
    /// Exposes tensors to `readers` ranks, until all of them have released the set.
    pub(super) fn put(&self, set: ExposedSetId, tensors: &[Tensor], readers: usize) -> Result<()> {
        let tensors = tensors.iter().map(|t| Ok(contiguous(&immutable(t)?)?)).collect::<Result<Vec<_>>>()?;
        self.sets.lock().insert(set, (tensors, readers));
        Ok(())
    }

    /// Releases a set for one of its readers; the last release frees its tensors.
    pub(super) fn release(&self, set: ExposedSetId) {
        let mut sets = self.sets.lock();
        if let Some((_, readers)) = sets.get_mut(&set) {
            *readers -= 1;
            if *readers == 0 {
                sets.remove(&set);
            }
        }
    }

    /// Frees all sets, at the end of a launch.
    pub(super) fn clear(&self) {
        self.sets.lock().clear();
    }

    pub(super) fn find(&self, set: ExposedSetId, index: usize) -> Option<Tensor> {
        self.sets.lock().get(&set)?.0.get(index).cloned()
    }

    /// Starts to send a requested tensor, or sends a text that describes what was found instead. Returns the requests with the
    /// memory that they use.
    pub(super) fn answer(&self, request: &[u8], to: usize, answers: &Comm) -> Result<Vec<(Request, Tensor)>> {
        let [group, number, index, expected, ticket] = words(request);
        let tag = ticket as c_int;
        let found = self.find(ExposedSetId { group, number }, index as usize);
        let meta = found.as_ref().map(|t| TensorMeta::new(t.dims(), t.dtype()));
        match (found, meta) {
            (Some(tensor), Some(meta)) if meta_fingerprint(&meta) == expected => {
                answers.send(&bytes_of(&[1, 0]), to, tag)?;
                let (first, bytes) = with_bytes(&tensor, |bytes| (bytes.as_ptr(), bytes.len()))?;
                // SAFETY: the tensor is kept with the requests until they are complete, and nobody changes it.
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
