//! The trace of a rank: every collective, send and receive with bytes, duration and source line.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::Tensor;
use parking_lot::Mutex;

use super::explicit::{self, ExplicitRedistribution, current_layouts};
use super::profile::{SpanKind, begin_span};
use super::{Call, Communicator, ExposedTensors};
use crate::error::{Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::mesh::Network;
use crate::module_scope::{current_path, current_phase};
use crate::rank_context::{Phase, RankContext, in_scope, rank_context};

/// One collective, send, receive or one-sided read of a rank.
#[derive(Debug, Clone)]
pub struct CommRecord {
    /// Name of the call, such as `all_gather`, `send` or `fetch`.
    pub call: &'static str,
    /// The outermost operator or [`record_operator`] scope that made the call, if any.
    pub operator: Option<&'static str>,
    /// Path of the innermost module whose forward or backward pass made the call, if any.
    pub module: Option<Arc<str>>,
    /// The part of a training step that the call belongs to.
    pub phase: Phase,
    /// Global ranks of the group.
    pub group: Arc<[usize]>,
    /// The mesh axes that the group spans, as in `dp,tp`; `None` if it is not a group of a mesh.
    pub axes: Option<Arc<str>>,
    /// The layouts before and after the redistribution that the call is a part of, if any.
    pub layouts: Option<(Layout, Layout)>,
    /// Why the data moves, in one sentence; `None` if the program asked for it.
    pub reason: Option<Arc<str>>,
    /// Bytes that this rank sends with an optimal algorithm ([`Call::bytes_sent`]); for a `fetch`, the bytes read.
    pub bytes: usize,
    /// Time in the call, including the wait for other ranks.
    pub duration: Duration,
    /// The part of `duration` in which the rank waited for other ranks, as the engine measures it: on threads until the last rank
    /// comes, on MPI the time of the exchange that checks whether all ranks make the same call. Zero on MPI without that check
    /// (`SHARDWISE_CHECK=0`), where waiting and moving data cannot be separated.
    pub waiting: Duration,
    /// Source line of the call.
    pub site: Site,
}

/// What one rank has communicated: the most recent calls one by one, and totals over all calls.
///
/// Always on; recording adds about 0.1 us to a call. PyTorch has `CommDebugMode` for this.
///
/// ```
/// # use shardwise::{launch, ReduceOp};
/// # use shardwise::candle_core::{Device, Tensor};
/// launch(2, |world| {
///     world.all_reduce(&Tensor::new(1f32, &Device::Cpu)?, ReduceOp::Sum)?;
///     let report = world.trace().report();
///     let (_, call, total) = report.0[0];
///     assert_eq!((call, total.calls, total.bytes), ("all_reduce", 1, 4));
///     Ok(())
/// })?;
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "CommDebugMode")]
#[derive(Debug, Clone)]
pub struct Trace(Arc<Mutex<TraceData>>);

#[derive(Debug)]
struct TraceData {
    /// Maximum length of `recent`.
    limit: usize,
    recent: VecDeque<CommRecord>,
    /// The call that the rank is in, or was in when it failed.
    pending: Option<PendingCall>,
    totals: BTreeMap<(&'static str, &'static str), CommTotal>,
}

/// A call that has begun and not ended.
#[derive(Debug, Clone)]
pub(super) struct PendingCall {
    pub(super) call: &'static str,
    pub(super) group: Arc<[usize]>,
    pub(super) operator: Option<&'static str>,
    pub(super) module: Option<Arc<str>>,
    pub(super) site: Site,
    pub(super) since: Instant,
}

/// Totals over the calls of one collective by one operator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CommTotal {
    /// Number of calls.
    pub calls: usize,
    /// Bytes that this rank sent, as in [`CommRecord::bytes`].
    pub bytes: usize,
    /// Time in these calls, including waits for other ranks.
    pub duration: Duration,
    /// The part of `duration` in which the rank waited for other ranks, as in [`CommRecord::waiting`].
    pub waiting: Duration,
}

/// How many records a trace keeps by default: some steps of a large model, in about 5 MB.
const MAX_RECORDS: usize = 1 << 16;

impl Default for Trace {
    fn default() -> Self {
        Self::keeping(MAX_RECORDS)
    }
}

impl Trace {
    /// A trace that keeps up to `limit` records; totals always cover all calls.
    pub(super) fn keeping(limit: usize) -> Self {
        Trace(Arc::new(Mutex::new(TraceData {
            limit,
            recent: VecDeque::new(),
            pending: None,
            totals: BTreeMap::new(),
        })))
    }

    /// A number that is unique among the traces alive in this process.
    pub(super) fn identity(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// The most recent calls (up to 65536), oldest first.
    pub fn records(&self) -> Vec<CommRecord> {
        self.0.lock().recent.iter().cloned().collect()
    }

    /// Deletes all records and totals.
    pub fn clear(&self) {
        let mut data = self.0.lock();
        data.recent.clear();
        data.totals.clear();
    }

    /// Totals by operator and collective over all calls since the launch or the last [`clear`](Self::clear).
    #[doc(alias = "get_comm_counts")]
    pub fn report(&self) -> CommReport {
        let data = self.0.lock();
        CommReport(data.totals.iter().map(|(&(operator, call), &total)| (operator, call, total)).collect())
    }

    /// Notes that a call begins.
    fn begin(&self, call: &'static str, group: &Arc<[usize]>, site: Site) {
        let (operator, module) = (current_operator().map(|(name, _)| name), current_path());
        let pending = PendingCall { call, group: Arc::clone(group), operator, module, site, since: Instant::now() };
        self.0.lock().pending = Some(pending);
    }

    /// The last `count` calls, oldest first, and the call that has begun and not ended.
    pub(super) fn last(&self, count: usize) -> (Vec<CommRecord>, Option<PendingCall>) {
        let data = self.0.lock();
        let skipped = data.recent.len().saturating_sub(count);
        (data.recent.iter().skip(skipped).cloned().collect(), data.pending.clone())
    }

    fn add(&self, record: CommRecord) {
        let mut data = self.0.lock();
        data.pending = None;
        let total = data.totals.entry((record.operator.unwrap_or("-"), record.call)).or_default();
        total.calls += 1;
        total.bytes += record.bytes;
        total.duration += record.duration;
        total.waiting += record.waiting;
        if data.recent.len() == data.limit {
            data.recent.pop_front();
        }
        data.recent.push_back(record);
    }
}

/// Totals as `(operator, collective, total)`, sorted; prints as a table. The operator is `-` outside of any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommReport(pub Vec<(&'static str, &'static str, CommTotal)>);

impl fmt::Display for CommReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<20} {:<15} {:>8} {:>14} {:>12}", "operator", "collective", "calls", "bytes", "ms")?;
        for (operator, call, total) in &self.0 {
            let ms = total.duration.as_secs_f64() * 1e3;
            writeln!(f, "{operator:<20} {call:<15} {:>8} {:>14} {ms:>12.3}", total.calls, total.bytes)?;
        }
        Ok(())
    }
}

/// Runs `body` and records its communication under `name` in the [`Trace`].
///
/// Scopes nest, and the outermost name counts. Local.
#[doc(alias = "record_function")]
pub fn record_operator<R>(name: &'static str, body: impl FnOnce() -> R) -> R {
    let _span = begin_span(SpanKind::Operator, name, None);
    in_operator(name, false, body)
}

/// As [`record_operator`], without a span in a [`Profile`](super::Profile).
pub(crate) fn name_operator<R>(name: &'static str, body: impl FnOnce() -> R) -> R {
    in_operator(name, false, body)
}

/// As [`record_operator`], for implicit communication, which is an error inside [`explicit_communication_only`].
pub(crate) fn record_implicit_operator<R>(name: &'static str, body: impl FnOnce() -> R) -> R {
    in_operator(name, true, body)
}

/// The operator that this thread is in, and whether its communication is implicit.
pub(super) fn current_operator() -> Option<(&'static str, bool)> {
    rank_context(|context| context.operators.borrow().last().copied())
}

fn in_operator<R>(name: &'static str, implicit: bool, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| {
        let mut stack = context.operators.borrow_mut();
        // Everything inside an implicit operator is implicit; the outermost name is the one the user called.
        let outer = stack.last().copied();
        stack.push((outer.map_or(name, |o| o.0), implicit || outer.is_some_and(|o| o.1)));
    };
    let leave = |context: &RankContext, ()| {
        context.operators.borrow_mut().pop();
    };
    in_scope(enter, leave, body)
}

/// What was communicated in an active [`record_communication`] scope.
#[derive(Default)]
struct Recorder {
    records: Vec<CommRecord>,
    /// Whether a rank other than the first one of a world that is not dry has communicated.
    is_follower: bool,
}

/// The active [`record_communication`] scopes, the innermost last.
type Recorders = Vec<Recorder>;

/// Runs `body` and returns its result with what this rank communicated in it, in order.
///
/// Local, and independent of the [`Trace`] of a world: it needs none, and nothing is dropped. Scopes nest.
///
/// ```
/// use shardwise::comm::record_communication;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let x = DTensor::ones((4, 4), DType::F32, &mesh, [Shard(0)])?;
///     let (_, records) = record_communication(|| x.redistribute([Replicate]));
///     assert_eq!((records.len(), records[0].call, records[0].axes.as_deref()), (1, "all_gather", Some("dp")));
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub fn record_communication<R>(body: impl FnOnce() -> R) -> (R, Vec<CommRecord>) {
    let (result, records, _) = record_on_rank(body);
    (result, records)
}

/// As [`record_communication`]; also returns whether this is the rank that speaks for all: the first one, the one of a dry run, or
/// any one if nothing was communicated.
pub(super) fn record_on_rank<R>(body: impl FnOnce() -> R) -> (R, Vec<CommRecord>, bool) {
    let mut found = Recorder::default();
    let enter = |context: &RankContext| {
        context.recorders.with(|scopes: &mut Recorders| scopes.push(Recorder::default()));
        context.recorder_count.set(context.recorder_count.get() + 1);
    };
    let leave = |context: &RankContext, ()| {
        context.recorder_count.set(context.recorder_count.get() - 1);
        found = context.recorders.with(|scopes: &mut Recorders| scopes.pop()).unwrap_or_default();
    };
    let result = in_scope(enter, leave, body);
    (result, found.records, !found.is_follower)
}

/// Runs `body`, in which an operator that would redistribute its inputs is an error instead.
///
/// Short for [`ExplicitRedistribution::error`]`.run(body)`. Local.
pub fn explicit_communication_only<R>(body: impl FnOnce() -> R) -> R {
    ExplicitRedistribution::error().run(body)
}

/// An engine that records the calls of another one.
pub(crate) struct Traced {
    engine: Arc<dyn Communicator>,
    group: Arc<[usize]>,
    trace: Trace,
}

impl Traced {
    pub(crate) fn new(engine: Arc<dyn Communicator>, trace: Trace) -> Self {
        Traced { group: engine.ranks().into(), engine, trace }
    }

    fn record<R>(
        &self,
        call: &'static str,
        peer: Option<usize>,
        bytes: impl FnOnce() -> usize,
        site: Site,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let current = current_operator();
        if let Some((operator, true)) = current {
            explicit::check(operator, call, self.group[self.engine.rank()], &self.group, site)?;
        }
        let span = begin_span(SpanKind::Collective, call, Some(site));
        let waited = || rank_context(|context| context.waited.get());
        self.trace.begin(call, &self.group, site);
        let (start, before) = (Instant::now(), waited());
        let result = body()?;
        let duration = start.elapsed();
        let waiting = waited().saturating_sub(before).min(duration);
        let (reason, axes) =
            rank_context(|context| (context.reason.borrow().clone(), context.group_axes.borrow().clone()));
        let record = CommRecord {
            call,
            operator: current.map(|(name, _)| name),
            module: current_path(),
            phase: current_phase(),
            group: Arc::clone(&self.group),
            axes,
            layouts: current_layouts(),
            reason,
            bytes: bytes(),
            duration,
            waiting,
            site,
        };
        if rank_context(|context| context.recorder_count.get()) > 0 {
            let is_follower = self.group[self.engine.rank()] != 0 && !self.engine.is_dry();
            let add = |recorder: &mut Recorder| {
                recorder.records.push(record.clone());
                recorder.is_follower |= is_follower;
            };
            rank_context(|context| context.recorders.with(|scopes: &mut Recorders| scopes.iter_mut().for_each(add)));
        }
        span.end_collective(start, record.duration, |span| {
            (span.bytes, span.waiting, span.group) = (record.bytes, record.waiting, Arc::clone(&record.group));
            (span.axes, span.reason) = (record.axes.clone(), record.reason.clone());
            span.peer = peer.and_then(|peer| self.group.get(peer).copied());
        });
        self.trace.add(record);
        Ok(result)
    }
}

/// One-sided reads that are recorded on the rank that reads.
struct TracedExposed {
    exposed: Box<dyn ExposedTensors>,
    this: Traced,
}

impl ExposedTensors for TracedExposed {
    fn read(&self, rank: usize, index: usize, expected: &TensorMeta, site: Site) -> Result<Tensor> {
        self.this.record(
            "fetch",
            Some(rank),
            || expected.bytes(),
            site,
            || self.exposed.read(rank, index, expected, site),
        )
    }
}

impl Communicator for Traced {
    fn rank(&self) -> usize {
        self.engine.rank()
    }

    fn ranks(&self) -> &[usize] {
        self.engine.ranks()
    }

    fn run(&self, call: &Call, inputs: &[Tensor], site: Site) -> Result<Vec<Tensor>> {
        let bytes = || call.bytes_sent(self.rank(), self.group.len(), inputs);
        self.record(call.name(), None, bytes, site, || self.engine.run(call, inputs, site))
    }

    fn send(&self, tensor: &Tensor, to: usize, tag: u64, site: Site) -> Result<()> {
        let bytes = || tensor.elem_count() * tensor.dtype().size_in_bytes();
        self.record("send", Some(to), bytes, site, || self.engine.send(tensor, to, tag, site))
    }

    fn recv(&self, expected: &TensorMeta, from: usize, tag: u64, site: Site) -> Result<Tensor> {
        self.record("recv", Some(from), || 0, site, || self.engine.recv(expected, from, tag, site))
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Traced::new(self.engine.subgroup(ranks)?, self.trace.clone())))
    }

    fn expose(&self, tensors: &[Tensor], site: Site) -> Result<Box<dyn ExposedTensors>> {
        let exposed = self.record("expose", None, || 0, site, || self.engine.expose(tensors, site))?;
        let this =
            Traced { engine: Arc::clone(&self.engine), group: Arc::clone(&self.group), trace: self.trace.clone() };
        Ok(Box::new(TracedExposed { exposed, this }))
    }

    fn abort(&self, reason: &str) {
        self.engine.abort(reason);
    }

    fn network(&self) -> Network {
        self.engine.network()
    }

    fn is_dry(&self) -> bool {
        self.engine.is_dry()
    }

    fn shares_memory(&self) -> bool {
        self.engine.shares_memory()
    }
}
