//! One-sided reads of tensors that other ranks have exposed: their service threads answer.

use shardwise::error::ErrorKind;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use candle_core::{DType, Tensor};
use shardwise::comm::ExposedTensors;
use shardwise::comm::engine::{ReceiveBuffer, meta_fingerprint, with_bytes};
use shardwise::error::{RankCall, Site};
use shardwise::{Error, Result, TensorMeta};

use super::comm::Request;
use super::exposed_tensors::{ExposedSetId, ReadRequest, words};
use super::groups::GroupState;
use super::launch::Launch;

/// Access of one rank to the tensors that the ranks of a group exposed in one call.
pub(super) struct ExposedHandle {
    pub(super) launch: Arc<Launch>,
    pub(super) group: Arc<GroupState>,
    pub(super) set: ExposedSetId,
}

/// Tags of answers, so that those to several threads of this process do not mix.
static TICKETS: AtomicU32 = AtomicU32::new(0);

/// The largest tag that the MPI standard guarantees.
const LARGEST_TAG: u32 = 32_767;

impl ExposedHandle {
    /// Receives a tensor, or a text that describes what was found instead.
    fn receive(
        &self,
        rank: usize,
        request: &ReadRequest,
        expected: &TensorMeta,
        call: &dyn Fn() -> RankCall,
    ) -> Result<Result<Tensor, String>> {
        let service = &self.launch.process.service;
        service.request_tensor(rank, request)?;
        let tag = request.ticket as c_int;
        let receive = |meta: TensorMeta| -> Result<Tensor> {
            let (bytes, mut buffer) = (meta.bytes(), ReceiveBuffer::new(meta)?);
            // SAFETY: memory for that many bytes, which nobody else accesses before they have arrived.
            let mut requests = unsafe { service.answers.start_receive(buffer.first(), bytes, rank, tag)? };
            let arrived = self.launch.wait_for(rank, call, || Ok(Request::all_done(&mut requests)?.then_some(())));
            if let Err(error) = arrived {
                // MPI would write a late answer to memory that has been freed.
                service.abort_job(&error.to_string());
            }
            // SAFETY: all bytes have arrived.
            Ok(unsafe { buffer.finish() })
        };
        let header = receive(TensorMeta::new(16, DType::U8))?;
        let [found, length] = with_bytes(&header, words)?;
        if found == 1 {
            return Ok(Ok(receive(expected.clone())?));
        }
        let text = receive(TensorMeta::new(length as usize, DType::U8))?;
        Ok(Err(with_bytes(&text, |bytes| String::from_utf8_lossy(bytes).into_owned())?))
    }
}

impl ExposedTensors for ExposedHandle {
    fn read(&self, rank: usize, index: usize, expected: &TensorMeta, site: Site) -> Result<Tensor> {
        let group = &self.group;
        let call = || RankCall {
            rank: group.ranks[group.me],
            call: format!("fetch of {expected}"),
            group: group.ranks.clone(),
            site: site.to_string(),
        };
        self.launch.check_open(&call)?;
        let reject = |found: String| {
            let what = format!("{found} as tensor {index} of rank {rank} in group {:?}", group.ranks);
            let source = ErrorKind::Operands.error("fetch", what, expected, "read what the rank has exposed");
            Error::Rejected { call: Box::new(call()), source: Box::new(source) }
        };
        let Some(&owner) = group.ranks.get(rank) else { return Err(reject("nothing".into())) };
        let service = &self.launch.process.service;
        if owner == service.rank() {
            return match service.exposed.find(self.set, index) {
                Some(tensor) if TensorMeta::new(tensor.dims(), tensor.dtype()) == *expected => Ok(tensor),
                Some(tensor) => Err(reject(TensorMeta::new(tensor.dims(), tensor.dtype()).to_string())),
                None => Err(reject("nothing".into())),
            };
        }
        let ticket = u64::from(TICKETS.fetch_add(1, Relaxed) % LARGEST_TAG + 1);
        let request = ReadRequest { set: self.set, index: index as u64, expected: meta_fingerprint(expected), ticket };
        self.receive(owner, &request, expected, &call)?.map_err(reject)
    }
}

impl Drop for ExposedHandle {
    fn drop(&mut self) {
        if self.launch.is_open() {
            self.launch.process.service.release(&self.group.ranks, self.set);
        }
    }
}
