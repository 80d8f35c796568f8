//! Messages between all pairs of ranks at once: what has no collective of its own, or is too large for one.

use std::ffi::c_int;

use shardwise::Result;
use smallvec::SmallVec;

use super::comm::{Comm, Request};
use super::parts::Part;

const TAG: c_int = 1;

/// Sends one part to every rank and receives one from every rank. The part for the rank itself is copied.
///
/// # Safety
/// Addresses and sizes are those of live memory; what is received overlaps nothing; every rank expects as many bytes as
/// the other sends.
pub(super) unsafe fn exchange(comm: &Comm, send: &[Part<*const u8>], receive: &[Part<*mut u8>]) -> Result<()> {
    let (me, size) = (comm.rank(), comm.size());
    let mut requests: SmallVec<[Request; 8]> = SmallVec::new();
    // Everybody begins with the next rank, so that not all send to the first one at once.
    let others = || (1..size).map(|step| ((me + step) % size, (me + size - step) % size));
    for (_, from) in others() {
        let Part { first, bytes } = receive[from];
        // SAFETY: the caller's promise; waited for below.
        requests.extend(unsafe { comm.start_receive(first, bytes, from, TAG)? });
    }
    for (to, _) in others() {
        let Part { first, bytes } = send[to];
        // SAFETY: the caller's promise; waited for below.
        requests.extend(unsafe { comm.start_send(first, bytes, to, TAG)? });
    }
    if receive[me].bytes > 0 {
        // SAFETY: the caller's promise.
        unsafe { send[me].first.copy_to_nonoverlapping(receive[me].first, receive[me].bytes) };
    }
    Request::wait_all(&mut requests)
}
