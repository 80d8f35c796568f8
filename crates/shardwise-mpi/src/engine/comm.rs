//! Safe wrapper of one MPI communicator: every function checks the return code of MPI.

use shardwise::error::ErrorKind;
use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use mpi::ffi;
use shardwise::{Error, Result};
use smallvec::SmallVec;

/// An MPI function returned an error code.
#[derive(Debug, thiserror::Error)]
#[error(
    "{function} failed with code {code}: {text}; look for messages of the MPI library above, the connection between the \
     machines and the memory they have left"
)]
struct MpiError {
    function: &'static str,
    code: c_int,
    text: String,
}

/// Turns a return code of MPI into a `Result`, with the text that the library has for it.
pub(super) fn check(function: &'static str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length: c_int = 0;
    // SAFETY: the buffer has the size that MPI asks for.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &raw mut length) };
    let bytes: Vec<u8> = text.iter().take(length.max(0) as usize).map(|&c| c as u8).collect();
    Err(Error::other(MpiError { function, code, text: String::from_utf8_lossy(&bytes).into_owned() }))
}

/// Calls an MPI function by name and checks its return code.
macro_rules! checked {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::engine::comm::check(stringify!($function), mpi::ffi::$function($($argument),*))
    };
}
pub(super) use checked;

/// Calls a collective MPI function on a communicator, which is its last argument.
///
/// A rank inside a blocking collective spins. With more processes than cores (oversubscription), spinning keeps the processes
/// that it waits for from running; there the nonblocking variant is started and tested, with a `yield` between tests. All
/// ranks must make the same choice, because MPI does not match blocking with nonblocking collectives.
macro_rules! collective {
    ($comm:expr, MPI_Barrier()) => { $crate::engine::comm::collective!(@ $comm, MPI_Barrier, MPI_Ibarrier, ()) };
    ($comm:expr, MPI_Bcast($($a:expr),* $(,)?)) => { $crate::engine::comm::collective!(@ $comm, MPI_Bcast, MPI_Ibcast, ($($a),*)) };
    ($comm:expr, MPI_Reduce($($a:expr),* $(,)?)) => { $crate::engine::comm::collective!(@ $comm, MPI_Reduce, MPI_Ireduce, ($($a),*)) };
    ($comm:expr, MPI_Allreduce($($a:expr),* $(,)?)) => {
        $crate::engine::comm::collective!(@ $comm, MPI_Allreduce, MPI_Iallreduce, ($($a),*))
    };
    ($comm:expr, MPI_Reduce_scatter($($a:expr),* $(,)?)) => {
        $crate::engine::comm::collective!(@ $comm, MPI_Reduce_scatter, MPI_Ireduce_scatter, ($($a),*))
    };
    ($comm:expr, MPI_Allgather($($a:expr),* $(,)?)) => {
        $crate::engine::comm::collective!(@ $comm, MPI_Allgather, MPI_Iallgather, ($($a),*))
    };
    ($comm:expr, MPI_Allgatherv($($a:expr),* $(,)?)) => {
        $crate::engine::comm::collective!(@ $comm, MPI_Allgatherv, MPI_Iallgatherv, ($($a),*))
    };
    ($comm:expr, MPI_Gatherv($($a:expr),* $(,)?)) => { $crate::engine::comm::collective!(@ $comm, MPI_Gatherv, MPI_Igatherv, ($($a),*)) };
    ($comm:expr, MPI_Scatterv($($a:expr),* $(,)?)) => {
        $crate::engine::comm::collective!(@ $comm, MPI_Scatterv, MPI_Iscatterv, ($($a),*))
    };
    ($comm:expr, MPI_Alltoall($($a:expr),* $(,)?)) => {
        $crate::engine::comm::collective!(@ $comm, MPI_Alltoall, MPI_Ialltoall, ($($a),*))
    };
    ($comm:expr, MPI_Alltoallv($($a:expr),* $(,)?)) => {
        $crate::engine::comm::collective!(@ $comm, MPI_Alltoallv, MPI_Ialltoallv, ($($a),*))
    };
    (@ $comm:expr, $now:ident, $begin:ident, ($($a:expr),*)) => {
        if $crate::engine::comm::oversubscribed() {
            let mut request = mpi::ffi::RSMPI_REQUEST_NULL;
            $crate::engine::comm::checked!($begin($($a,)* $comm.raw(), &raw mut request))
                .and_then(|()| $crate::engine::comm::Request::wait_all(&mut [$crate::engine::comm::Request::of(request)]))
        } else {
            $crate::engine::comm::checked!($now($($a,)* $comm.raw()))
        }
    };
}
pub(super) use collective;

/// Whether some machine of the job has more processes than cores.
static OVERSUBSCRIBED: AtomicBool = AtomicBool::new(false);

pub(super) fn oversubscribed() -> bool {
    OVERSUBSCRIBED.load(Relaxed)
}

/// Sets whether the job is oversubscribed: the same on all ranks, before the first collective of a group.
pub(super) fn set_oversubscribed(oversubscribed: bool) {
    OVERSUBSCRIBED.store(oversubscribed, Relaxed);
}

/// An MPI communicator. Several threads may call its functions, but only one at a time may be in a collective.
pub(super) struct Comm {
    raw: ffi::MPI_Comm,
    rank: usize,
    size: usize,
}

// SAFETY: a handle; MPI was initialised for several threads.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// A message whose size and sender were not known before it arrived.
pub(super) struct ReceivedMessage {
    pub(super) from: usize,
    pub(super) tag: c_int,
    pub(super) bytes: Vec<u8>,
}

impl Comm {
    /// Takes ownership of a communicator and makes MPI return its errors instead of ending the process.
    pub(super) fn adopt(raw: ffi::MPI_Comm) -> Result<Self> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a live communicator.
        unsafe {
            checked!(MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN))?;
            checked!(MPI_Comm_rank(raw, &raw mut rank))?;
            checked!(MPI_Comm_size(raw, &raw mut size))?;
        }
        Ok(Comm { raw, rank: rank as usize, size: size as usize })
    }

    pub(super) fn world() -> Result<Self> {
        // SAFETY: MPI is initialised.
        Self::adopt(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// Creates a communicator of the same processes, whose messages never match those of this one. Collective.
    pub(super) fn duplicate(&self) -> Result<Self> {
        // SAFETY: a live communicator; the handle is written before it is used.
        unsafe {
            let mut raw = ffi::RSMPI_COMM_NULL;
            checked!(MPI_Comm_dup(self.raw, &raw mut raw))?;
            Self::adopt(raw)
        }
    }

    /// Creates a communicator of `ranks` of this one, in that order. Collective over `ranks`, which include this rank.
    pub(super) fn of_ranks(&self, ranks: &[usize], tag: c_int) -> Result<Self> {
        let ranks: Vec<c_int> = ranks.iter().map(|&r| r as c_int).collect();
        // SAFETY: live communicator and groups; handles are written before they are used.
        unsafe {
            let (mut all, mut some) = (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL);
            checked!(MPI_Comm_group(self.raw, &raw mut all))?;
            checked!(MPI_Group_incl(all, ranks.len() as c_int, ranks.as_ptr(), &raw mut some))?;
            let mut raw = ffi::RSMPI_COMM_NULL;
            checked!(MPI_Comm_create_group(self.raw, some, tag, &raw mut raw))?;
            checked!(MPI_Group_free(&raw mut some))?;
            checked!(MPI_Group_free(&raw mut all))?;
            Self::adopt(raw)
        }
    }

    /// Creates the communicator of the processes that share memory with this one. Collective.
    pub(super) fn on_this_host(&self) -> Result<Self> {
        // SAFETY: a live communicator; the handle is written before it is used.
        unsafe {
            let mut raw = ffi::RSMPI_COMM_NULL;
            let (kind, info) = (ffi::RSMPI_COMM_TYPE_SHARED, ffi::RSMPI_INFO_NULL);
            checked!(MPI_Comm_split_type(self.raw, kind, self.rank as c_int, info, &raw mut raw))?;
            Self::adopt(raw)
        }
    }

    pub(super) fn raw(&self) -> ffi::MPI_Comm {
        self.raw
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn barrier(&self) -> Result<()> {
        // SAFETY: a live communicator.
        unsafe { collective!(self, MPI_Barrier()) }
    }

    /// Elementwise maximum over all ranks. Collective.
    pub(super) fn all_reduce_max<const N: usize>(&self, mine: &[u64; N]) -> Result<[u64; N]> {
        let mut all = [0; N];
        // SAFETY: both arrays have the length that is named.
        unsafe {
            collective!(
                self,
                MPI_Allreduce(
                    mine.as_ptr().cast(),
                    all.as_mut_ptr().cast(),
                    N as c_int,
                    ffi::RSMPI_UINT64_T,
                    ffi::RSMPI_MAX
                )
            )?;
        }
        Ok(all)
    }

    /// Gathers one number of every rank, in rank order. Collective.
    pub(super) fn all_gather_u64(&self, mine: u64) -> Result<Vec<u64>> {
        let mut all = vec![0u64; self.size];
        let (from, to) = ((&raw const mine).cast::<c_void>(), all.as_mut_ptr().cast());
        // SAFETY: room for one number of each rank.
        unsafe {
            let kind = ffi::RSMPI_UINT64_T;
            collective!(self, MPI_Allgather(from, 1, kind, to, 1, kind))?;
        }
        Ok(all)
    }

    /// Sends `mine[r]` to every rank `r` and returns what each sent to this one. Collective.
    pub(super) fn all_to_all_u64(&self, mine: &[u64]) -> Result<Vec<u64>> {
        assert_eq!(mine.len(), self.size);
        let mut all = vec![0u64; self.size];
        // SAFETY: room for one number of each rank on both sides.
        unsafe {
            let kind = ffi::RSMPI_UINT64_T;
            collective!(self, MPI_Alltoall(mine.as_ptr().cast(), 1, kind, all.as_mut_ptr().cast(), 1, kind))?;
        }
        Ok(all)
    }

    /// Gathers one text of every rank, in rank order. Collective.
    pub(super) fn all_gather_text(&self, mine: &str) -> Result<Vec<String>> {
        let counts: Vec<c_int> = self.all_gather_u64(mine.len() as u64)?.into_iter().map(|n| n as c_int).collect();
        let mut next = 0;
        let mut start = |&n: &c_int| {
            next += n;
            next - n
        };
        let starts: Vec<c_int> = counts.iter().map(&mut start).collect();
        let mut all = vec![0u8; counts.iter().map(|&n| n as usize).sum()];
        // SAFETY: the counts have just been exchanged, and there is room for all of them.
        unsafe {
            let kind = ffi::RSMPI_UINT8_T;
            collective!(
                self,
                MPI_Allgatherv(
                    mine.as_ptr().cast(),
                    mine.len() as c_int,
                    kind,
                    all.as_mut_ptr().cast(),
                    counts.as_ptr(),
                    starts.as_ptr(),
                    kind
                )
            )?;
        }
        let text = |(&start, &n): (&c_int, &c_int)| {
            String::from_utf8_lossy(&all[start as usize..(start + n) as usize]).into_owned()
        };
        Ok(starts.iter().zip(&counts).map(text).collect())
    }

    /// Sends a short message; returns when the buffer can be reused.
    pub(super) fn send(&self, bytes: &[u8], to: usize, tag: c_int) -> Result<()> {
        let (first, count) = (bytes.as_ptr().cast(), bytes.len() as c_int);
        // SAFETY: the bytes live until the call returns.
        unsafe { checked!(MPI_Send(first, count, ffi::RSMPI_UINT8_T, to as c_int, tag, self.raw)) }
    }

    /// Receives a message with any tag from any rank, if one has arrived. Does not wait for one.
    pub(super) fn try_receive_any(&self) -> Result<Option<ReceivedMessage>> {
        // SAFETY: a constant of the library.
        self.try_receive(unsafe { ffi::RSMPI_ANY_TAG }, None)
    }

    /// Receives a message with this tag from a rank (`None`: from any), if one has arrived. Does not wait for one.
    pub(super) fn try_receive(&self, tag: c_int, from: Option<usize>) -> Result<Option<ReceivedMessage>> {
        let (mut flag, mut count): (c_int, c_int) = (0, 0);
        let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
        // SAFETY: the status and the message are read only if MPI has written them, which `flag` reports; the buffer has the
        // size of the message.
        unsafe {
            let mut message = ffi::RSMPI_MESSAGE_NULL;
            let (from, flag_at) = (from.map_or(ffi::RSMPI_ANY_SOURCE, |rank| rank as c_int), &raw mut flag);
            let (message_at, status_at) = (&raw mut message, status.as_mut_ptr());
            checked!(MPI_Improbe(from, tag, self.raw, flag_at, message_at, status_at))?;
            if flag == 0 {
                return Ok(None);
            }
            checked!(MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &raw mut count))?;
            let (from, tag) = (status.assume_init_ref().MPI_SOURCE as usize, status.assume_init_ref().MPI_TAG);
            let mut bytes = vec![0u8; count as usize];
            let to = bytes.as_mut_ptr().cast();
            checked!(MPI_Mrecv(to, count, ffi::RSMPI_UINT8_T, message_at, ffi::RSMPI_STATUS_IGNORE))?;
            Ok(Some(ReceivedMessage { from, tag, bytes }))
        }
    }

    /// Starts to send bytes, in as many messages as it takes; none if there are no bytes.
    ///
    /// # Safety
    /// The bytes are neither moved nor changed until the requests are complete.
    pub(super) unsafe fn start_send(&self, first: *const u8, bytes: usize, to: usize, tag: c_int) -> Result<Requests> {
        in_pieces(bytes, false, |start, count, request| {
            // SAFETY: the caller's promise; the handle is written before it is used.
            unsafe {
                let (first, kind) = (first.add(start).cast::<c_void>(), ffi::RSMPI_UINT8_T);
                checked!(MPI_Isend(first, count, kind, to as c_int, tag, self.raw, request))
            }
        })
    }

    /// Starts to receive bytes that are sent with [`start_send`](Self::start_send).
    ///
    /// # Safety
    /// There is room for the bytes, which nobody else accesses until the requests are complete.
    pub(super) unsafe fn start_receive(
        &self,
        first: *mut u8,
        bytes: usize,
        from: usize,
        tag: c_int,
    ) -> Result<Requests> {
        in_pieces(bytes, true, |start, count, request| {
            // SAFETY: the caller's promise; the handle is written before it is used.
            unsafe {
                let (first, kind) = (first.add(start).cast::<c_void>(), ffi::RSMPI_UINT8_T);
                checked!(MPI_Irecv(first, count, kind, from as c_int, tag, self.raw, request))
            }
        })
    }

    /// Receives bytes that are sent with [`start_send`](Self::start_send), and waits for them.
    ///
    /// # Safety
    /// There is room for the bytes, which nobody else accesses.
    pub(super) unsafe fn receive(&self, first: *mut u8, bytes: usize, from: usize, tag: c_int) -> Result<()> {
        // SAFETY: the caller's promise, and the requests are complete when this function returns.
        Request::wait_all(&mut unsafe { self.start_receive(first, bytes, from, tag)? })
    }

    /// Ends all processes of the job with `MPI_Abort`.
    pub(super) fn abort(&self) -> ! {
        // SAFETY: a live communicator. Does not return in any library that works.
        unsafe { ffi::MPI_Abort(self.raw, 1) };
        std::process::abort();
    }
}

/// Longer messages are split into pieces of this many bytes: MPI counts bytes in a C `int`.
const MAX_MESSAGE_BYTES: usize = 1 << 30;

/// Starts one message per piece of `bytes`; `begin` gets the offset and size of the piece, and where to store the request.
fn in_pieces(
    bytes: usize,
    receives: bool,
    begin: impl Fn(usize, c_int, *mut ffi::MPI_Request) -> Result<()>,
) -> Result<Requests> {
    let piece = |start: usize| {
        // SAFETY: a constant of the library.
        let mut handle = unsafe { ffi::RSMPI_REQUEST_NULL };
        let count = MAX_MESSAGE_BYTES.min(bytes - start) as c_int;
        begin(start, count, &raw mut handle)?;
        Ok(Request { handle, expected: receives.then_some(count) })
    };
    (0..bytes).step_by(MAX_MESSAGE_BYTES).map(piece).collect()
}

/// Requests of one transfer; mostly one.
pub(super) type Requests = SmallVec<[Request; 1]>;

/// A message or collective in flight. Its memory is in use until it is complete.
pub(super) struct Request {
    handle: ffi::MPI_Request,
    /// For a receive, the number of bytes that must arrive.
    expected: Option<c_int>,
}

// SAFETY: a handle; MPI was initialised for several threads.
unsafe impl Send for Request {}

impl Request {
    /// A request without a check of the number of bytes: a send or a collective.
    pub(super) fn of(handle: ffi::MPI_Request) -> Self {
        Request { handle, expected: None }
    }

    /// Whether it is complete.
    pub(super) fn is_done(&mut self) -> Result<bool> {
        Self::all_done(std::slice::from_mut(self))
    }

    /// Whether all of them are complete.
    pub(super) fn all_done(requests: &mut [Request]) -> Result<bool> {
        let mut done: c_int = 0;
        let finish = |count, handles, statuses| {
            // SAFETY: as many live requests as are counted, and room for as many statuses.
            unsafe { checked!(MPI_Testall(count, handles, &raw mut done, statuses)) }
        };
        Self::finish_all(requests, finish)?;
        Ok(done != 0)
    }

    /// Waits for all of them.
    pub(super) fn wait_all(requests: &mut [Request]) -> Result<()> {
        if oversubscribed() {
            while !Self::all_done(requests)? {
                std::thread::yield_now();
            }
            return Ok(());
        }
        // SAFETY: as many live requests as are counted, and room for as many statuses.
        Self::finish_all(requests, |count, handles, statuses| unsafe {
            checked!(MPI_Waitall(count, handles, statuses))
        })
    }

    /// Completes requests with `MPI_Testall` or `MPI_Waitall`, and checks the bytes of the receives that are complete.
    fn finish_all(
        requests: &mut [Request],
        finish: impl FnOnce(c_int, *mut ffi::MPI_Request, *mut ffi::MPI_Status) -> Result<()>,
    ) -> Result<()> {
        let mut handles: SmallVec<[ffi::MPI_Request; 8]> = requests.iter().map(|request| request.handle).collect();
        let mut statuses: SmallVec<[MaybeUninit<ffi::MPI_Status>; 8]> = SmallVec::new();
        statuses.resize_with(requests.len(), MaybeUninit::uninit);
        let finished = finish(requests.len() as c_int, handles.as_mut_ptr(), statuses.as_mut_ptr().cast());
        for ((request, handle), status) in requests.iter_mut().zip(handles).zip(&statuses) {
            let was_active = request.is_active();
            request.handle = handle;
            if let (Ok(()), true, false, Some(expected)) =
                (&finished, was_active, request.is_active(), request.expected)
            {
                let mut came: c_int = 0;
                // SAFETY: the request is finished, so its status is written.
                unsafe { checked!(MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &raw mut came))? };
                if came != expected {
                    return Err(ErrorKind::Operands.error(
                        "message",
                        format!("{came} bytes from another rank"),
                        format!("{expected}"),
                        "send what the other rank expects; run it with SHARDWISE_CHECK=1 to see both calls",
                    ));
                }
            }
        }
        finished
    }

    fn is_active(&self) -> bool {
        // SAFETY: a constant of the library.
        self.handle != unsafe { ffi::RSMPI_REQUEST_NULL }
    }
}

impl Drop for Request {
    /// Ends the job if the request is still active: MPI would go on writing to memory that is about to be freed. This happens
    /// only after errors of MPI, which end the job anyway.
    fn drop(&mut self) {
        if self.is_active() {
            eprintln!("shardwise: a message was given up under way after an error of MPI; the job ends");
            // SAFETY: MPI is initialised, or there would be no request.
            unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
            std::process::abort();
        }
    }
}

/// Initialises MPI for several threads (`MPI_THREAD_MULTIPLE`).
pub(super) fn initialize() -> Result<()> {
    let started = mpi::initialize_with_threading(mpi::Threading::Multiple);
    let Some((universe, threading)) = started else {
        return Err(ErrorKind::Launch.error(
            "MPI",
            "a library that the program has already initialised",
            "to do it in launch",
            "leave MPI_Init to shardwise",
        ));
    };
    // Dropping it would finalize MPI, which happens when the process ends.
    std::mem::forget(universe);
    if threading == mpi::Threading::Multiple {
        return Ok(());
    }
    Err(ErrorKind::Launch.error(
        "MPI",
        format!("a library that supports threads at level {threading:?}"),
        "MPI_THREAD_MULTIPLE",
        "use a build of the library with thread support",
    ))
}

/// Finalizes MPI in this process.
pub(super) fn finalize() {
    // SAFETY: called once, when no other thread is inside MPI.
    unsafe { ffi::MPI_Finalize() };
}

/// A null pointer for a buffer that a collective ignores on this rank.
pub(super) fn null_buffer() -> *mut c_void {
    null_mut()
}
