//! Reading what other ranks have exposed, without their help: their services answer.

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
use super::groups::GroupState;
use super::launch::Launch;
use super::shelf::{ReadRequest, SetId, words};

/// What the ranks of a group exposed together, seen from one of them.
pub(super) struct Handle {
    pub(super) launch: Arc<Launch>,
    pub(super) group: Arc<GroupState>,
    pub(super) set: SetId,
}

/// Tells apart the answers to what threads of this process ask at the same time.
static TICKETS: AtomicU32 = AtomicU32::new(0);

/// Any MPI library takes tags up to this one.
const LARGEST_TAG: u32 = 32_767;

impl Handle {
    /// Receives a tensor, or hears what is there instead.
    fn receive(
        &self,
        rank: usize,
        request: &ReadRequest,
        expected: &TensorMeta,
        call: &dyn Fn() -> RankCall,
    ) -> Result<Result<Tensor, String>> {
        let service = &self.launch.process.service;
        service.ask(rank, request)?;
        let tag = request.ticket as c_int;
        let receive = |meta: TensorMeta| -> Result<Tensor> {
            let (bytes, mut buffer) = (meta.bytes(), ReceiveBuffer::new(meta)?);
            // SAFETY: memory for that many bytes, which nobody touches before they have come.
            let mut requests = unsafe { service.answers.start_receive(buffer.first(), bytes, rank, tag)? };
            let come = self.launch.wait_for(rank, call, || Ok(Request::all_done(&mut requests)?.then_some(())));
            if let Err(error) = come {
                // What is late would be written to memory that is no longer there.
                service.die(&error.to_string());
            }
            // SAFETY: all of it has come.
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

impl ExposedTensors for Handle {
    fn read(&self, rank: usize, index: usize, expected: &TensorMeta, site: Site) -> Result<Tensor> {
        let group = &self.group;
        let call = || RankCall {
            rank: group.ranks[group.me],
            call: format!("fetch of {expected}"),
            group: group.ranks.clone(),
            site: site.to_string(),
        };
        self.launch.check_open(&call)?;
        let refuse = |found: String| {
            let what = format!("{found} as tensor {index} of rank {rank} in group {:?}", group.ranks);
            let source = ErrorKind::Operands.error("fetch", what, expected, "read what the rank has exposed");
            Error::Rejected { call: Box::new(call()), source: Box::new(source) }
        };
        let Some(&owner) = group.ranks.get(rank) else { return Err(refuse("nothing".into())) };
        let service = &self.launch.process.service;
        if owner == service.rank() {
            return match service.shelf.find(self.set, index) {
                Some(tensor) if TensorMeta::new(tensor.dims(), tensor.dtype()) == *expected => Ok(tensor),
                Some(tensor) => Err(refuse(TensorMeta::new(tensor.dims(), tensor.dtype()).to_string())),
                None => Err(refuse("nothing".into())),
            };
        }
        let ticket = u64::from(TICKETS.fetch_add(1, Relaxed) % LARGEST_TAG + 1);
        let request = ReadRequest { set: self.set, index: index as u64, expected: meta_fingerprint(expected), ticket };
        self.receive(owner, &request, expected, &call)?.map_err(refuse)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.launch.is_open() {
            self.launch.process.service.release(&self.group.ranks, self.set);
        }
    }
}
