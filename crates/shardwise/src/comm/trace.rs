//! What a rank communicated: every collective with its size, duration and place in the program.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::Tensor;
use parking_lot::Mutex;

use super::explicit::{self, ExplicitRedistribution};
use super::{Call, Communicator, Exposed};
use crate::error::{Result, Site};
use crate::layout::TensorMeta;
use crate::mesh::Network;
use crate::rank_context::{RankContext, in_scope, rank_context};

/// One collective, send or receive as a rank made it.
#[derive(Debug, Clone)]
pub struct Record {
    /// Name of the collective.
    pub call: &'static str,
    /// The operator in whose course it was made, if any.
    pub operator: Option<&'static str>,
    /// Global ranks of the group.
    pub group: Arc<[usize]>,
    /// Bytes that this rank sends at least.
    pub bytes: usize,
    /// How long it took, waiting included.
    pub duration: Duration,
    /// Where the program made the call.
    pub site: Site,
}

/// The record of one rank. Always on: a call costs about a tenth of a microsecond more. Keeps the most recent calls and
/// the sums over all of them.
#[doc(alias = "CommDebugMode")]
#[derive(Debug, Clone)]
pub struct Trace(Arc<Mutex<Kept>>);

#[derive(Debug)]
struct Kept {
    /// How many calls are kept one by one.
    limit: usize,
    recent: VecDeque<Record>,
    totals: BTreeMap<(&'static str, &'static str), Total>,
}

/// Sums over the calls of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Total {
    /// Number of calls.
    pub calls: usize,
    /// Bytes that this rank sent at least.
    pub bytes: usize,
    /// Time in these calls, waiting included.
    pub duration: Duration,
}

/// How many calls are kept one by one, unless all are wanted.
const KEPT: usize = 1 << 16;

impl Default for Trace {
    fn default() -> Self {
        Self::keeping(KEPT)
    }
}

impl Trace {
    /// A trace that keeps so many calls one by one.
    pub(super) fn keeping(limit: usize) -> Self {
        Trace(Arc::new(Mutex::new(Kept { limit, recent: VecDeque::new(), totals: BTreeMap::new() })))
    }

    /// A number that no other trace has while this one lives.
    pub(super) fn identity(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// The most recent calls, oldest first.
    pub fn records(&self) -> Vec<Record> {
        self.0.lock().recent.iter().cloned().collect()
    }

    /// Forgets everything so far.
    pub fn clear(&self) {
        let mut kept = self.0.lock();
        kept.recent.clear();
        kept.totals.clear();
    }

    /// Sums by operator and collective over all calls since the beginning or the last [`clear`](Self::clear).
    pub fn report(&self) -> Report {
        let kept = self.0.lock();
        Report(kept.totals.iter().map(|(&(operator, call), &total)| (operator, call, total)).collect())
    }

    fn add(&self, record: Record) {
        let mut kept = self.0.lock();
        let total = kept.totals.entry((record.operator.unwrap_or("-"), record.call)).or_default();
        total.calls += 1;
        total.bytes += record.bytes;
        total.duration += record.duration;
        if kept.recent.len() == kept.limit {
            kept.recent.pop_front();
        }
        kept.recent.push_back(record);
    }
}

/// Communication by operator and collective; prints as a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report(pub Vec<(&'static str, &'static str, Total)>);

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<20} {:<15} {:>8} {:>14} {:>12}", "operator", "collective", "calls", "bytes", "ms")?;
        for (operator, call, total) in &self.0 {
            let ms = total.duration.as_secs_f64() * 1e3;
            writeln!(f, "{operator:<20} {call:<15} {:>8} {:>14} {ms:>12.3}", total.calls, total.bytes)?;
        }
        Ok(())
    }
}

/// Runs `body`; what it communicates is recorded under the name of the operator.
pub fn operator<R>(name: &'static str, body: impl FnOnce() -> R) -> R {
    in_operator(name, false, body)
}

/// As [`operator`], for communication that the program did not ask for by name: an error inside
/// [`explicit_communication_only`].
pub(crate) fn implicitly<R>(name: &'static str, body: impl FnOnce() -> R) -> R {
    in_operator(name, true, body)
}

/// The operator that this thread is in, and whether it communicates without being asked.
pub(super) fn current_operator() -> Option<(&'static str, bool)> {
    rank_context(|context| context.operators.borrow().last().copied())
}

fn in_operator<R>(name: &'static str, implicit: bool, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| {
        let mut stack = context.operators.borrow_mut();
        // What an implicit operator does on the way is implicit too, and the outermost name counts.
        let outer = stack.last().copied();
        stack.push((outer.map_or(name, |o| o.0), implicit || outer.is_some_and(|o| o.1)));
    };
    let leave = |context: &RankContext, ()| {
        context.operators.borrow_mut().pop();
    };
    in_scope(enter, leave, body)
}

/// Runs `body`; inside, communication that the program does not ask for by name (`redistribute`, `full_tensor`, a
/// collective of a group) is an error instead: [`ExplicitRedistribution::error`]. Scopes nest; each rank is in its own.
pub fn explicit_communication_only<R>(body: impl FnOnce() -> R) -> R {
    ExplicitRedistribution::error().run(body)
}

/// An engine whose calls are recorded.
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
        bytes: impl FnOnce() -> usize,
        site: Site,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let current = current_operator();
        if let Some((operator, true)) = current {
            explicit::check(operator, call, self.group[self.engine.rank()], &self.group, site)?;
        }
        let start = Instant::now();
        let result = body()?;
        let operator = current.map(|(name, _)| name);
        let (duration, group) = (start.elapsed(), Arc::clone(&self.group));
        self.trace.add(Record { call, operator, group, bytes: bytes(), duration, site });
        Ok(result)
    }
}

/// Reads that are recorded, as bytes of the rank that reads.
struct TracedExposed {
    exposed: Box<dyn Exposed>,
    this: Traced,
}

impl Exposed for TracedExposed {
    fn read(&self, rank: usize, index: usize, expected: &TensorMeta, site: Site) -> Result<Tensor> {
        self.this.record("fetch", || expected.bytes(), site, || self.exposed.read(rank, index, expected, site))
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
        self.record(call.name(), bytes, site, || self.engine.run(call, inputs, site))
    }

    fn send(&self, tensor: &Tensor, to: usize, tag: u64, site: Site) -> Result<()> {
        let bytes = || tensor.elem_count() * tensor.dtype().size_in_bytes();
        self.record("send", bytes, site, || self.engine.send(tensor, to, tag, site))
    }

    fn recv(&self, expected: &TensorMeta, from: usize, tag: u64, site: Site) -> Result<Tensor> {
        self.record("recv", || 0, site, || self.engine.recv(expected, from, tag, site))
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Traced::new(self.engine.subgroup(ranks)?, self.trace.clone())))
    }

    fn expose(&self, tensors: &[Tensor], site: Site) -> Result<Box<dyn Exposed>> {
        let exposed = self.record("expose", || 0, site, || self.engine.expose(tensors, site))?;
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
