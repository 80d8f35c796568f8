//! Direct messages between all pairs of ranks, for calls without an MPI collective and for tensors too large for one.

use std::ffi::c_int;

use shardwise::Result;
use smallvec::SmallVec;

use super::comm::{Comm, Request};
use super::message_buffer::MessageBuffer;

/// Tag of these messages, different from that of [`packet`](super::packet).
const TAG: c_int = 1;

/// Sends one buffer to every rank and receives one from every rank. Collective. The buffer for the rank itself is copied.
///
/// # Safety
/// Addresses and sizes are those of live memory; receive buffers overlap nothing; every rank expects as many bytes as the
/// other sends.
pub(super) unsafe fn exchange(
    comm: &Comm,
    send: &[MessageBuffer<*const u8>],
    receive: &[MessageBuffer<*mut u8>],
) -> Result<()> {
    let (me, size) = (comm.rank(), comm.size());
    let mut requests: SmallVec<[Request; 8]> = SmallVec::new();
    // Every rank starts with its successor, so that not all ranks send to rank 0 at once.
    let others = || (1..size).map(|step| ((me + step) % size, (me + size - step) % size));
    for (_, from) in others() {
        let MessageBuffer { first, bytes } = receive[from];
        // SAFETY: the caller's promise; waited for below.
        requests.extend(unsafe { comm.start_receive(first, bytes, from, TAG)? });
    }
    for (to, _) in others() {
        let MessageBuffer { first, bytes } = send[to];
        // SAFETY: the caller's promise; waited for below.
        requests.extend(unsafe { comm.start_send(first, bytes, to, TAG)? });
    }
    if receive[me].bytes > 0 {
        // SAFETY: the caller's promise.
        unsafe { send[me].first.copy_to_nonoverlapping(receive[me].first, receive[me].bytes) };
    }
    Request::wait_all(&mut requests)
}
