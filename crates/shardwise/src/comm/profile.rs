//! Profiles: the modules, operators, redistributions and collectives of a rank as spans of time, and its memory over time.
//!
//! Spans are recorded inside [`World::profile`](super::World::profile) only; outside of it an operator reads one flag. With the
//! feature `tracing` they are spans of the crate `tracing`, too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::DType;

use super::memory_kind::MemoryKind;
use crate::error::Site;
use crate::layout::Layout;
use crate::module_scope::{current_path, user_site};
use crate::rank_context::{Phase, RankContext, in_scope, rank_context, rank_context_if_alive};

/// What a [`ProfileSpan`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// The `forward` of a module.
    Module,
    /// An operator, or a [`record_operator`](super::record_operator) scope.
    Operator,
    /// The backward pass of one call of an operator.
    Gradient,
    /// A redistribution of a tensor.
    Redistribution,
    /// A collective, send, receive or one-sided read.
    Collective,
}

/// A stretch of a rank's time, with what the rank did in it. Spans nest.
#[derive(Debug, Clone)]
pub struct ProfileSpan {
    /// What it is.
    pub kind: SpanKind,
    /// Name of the operator or collective; empty for a module.
    pub name: &'static str,
    /// Index of the span around it.
    pub parent: Option<usize>,
    /// Begin, since the profile began.
    pub start: Duration,
    /// Time from begin to end.
    pub duration: Duration,
    /// For a collective, the part of `duration` in which the rank waited for other ranks.
    pub waiting: Duration,
    /// Path of the innermost module.
    pub module: Option<Arc<str>>,
    /// The part of a training step.
    pub phase: Phase,
    /// Layouts of the inputs.
    pub inputs: Vec<Layout>,
    /// Layouts of the outputs.
    pub outputs: Vec<Layout>,
    /// Type of the elements, for a redistribution.
    pub dtype: Option<DType>,
    /// Global ranks of the group of a collective.
    pub group: Arc<[usize]>,
    /// The mesh axes that the group spans, as in `dp,tp`.
    pub axes: Option<Arc<str>>,
    /// The global rank at the other end of a send, receive or one-sided read.
    pub peer: Option<usize>,
    /// Bytes that the rank sends, as in [`CommRecord::bytes`](super::CommRecord::bytes).
    pub bytes: usize,
    /// Estimated operations of an operator on this rank.
    pub flops: u64,
    /// Line of the user's program.
    pub site: Option<Site>,
    /// Why data moved, in one sentence.
    pub reason: Option<Arc<str>>,
}

/// Bytes that came into use (positive) or were released (negative).
#[derive(Debug, Clone, Copy)]
pub struct MemoryEvent {
    /// Time since the profile began.
    pub at: Duration,
    /// Number of spans that had begun.
    pub spans_begun: usize,
    /// The innermost span at that time.
    pub span: Option<usize>,
    /// The bytes.
    pub bytes: isize,
    /// What they are for.
    pub kind: MemoryKind,
    /// A number of the tensor; `u64::MAX` for memory of no tensor.
    pub tensor: u64,
}

/// What a rank did inside [`World::profile`](super::World::profile).
#[derive(Debug, Clone)]
pub struct Profile {
    /// The rank.
    pub rank: usize,
    /// Whether it was a dry run, in which times are those of planning.
    pub is_dry: bool,
    /// Time of the whole.
    pub duration: Duration,
    /// Bytes in use at the beginning, by [`MemoryKind`].
    pub memory_before: [usize; MemoryKind::ALL.len()],
    /// Spans in the order in which they began.
    pub spans: Vec<ProfileSpan>,
    /// Changes of the memory, in order.
    pub memory: Vec<MemoryEvent>,
}

/// What is recorded so far.
#[derive(Default)]
struct SpanRecorder {
    began: Option<Instant>,
    spans: Vec<ProfileSpan>,
    /// Spans that have begun and not ended, the innermost last.
    open: Vec<usize>,
    memory: Vec<MemoryEvent>,
}

impl SpanRecorder {
    fn elapsed(&self) -> Duration {
        self.began.map_or(Duration::ZERO, |began| began.elapsed())
    }
}

/// Runs `body` while spans and memory are recorded. The scope of an inner call records only for itself.
pub(super) fn recorded<R>(body: impl FnOnce() -> R) -> (R, Duration, Vec<ProfileSpan>, Vec<MemoryEvent>) {
    let enter = |context: &RankContext| {
        let new = SpanRecorder { began: Some(Instant::now()), ..SpanRecorder::default() };
        (context.profile.replace(new), context.is_profiling.replace(true))
    };
    let leave = |context: &RankContext, (outer, profiling): (SpanRecorder, bool)| {
        context.is_profiling.set(profiling);
        context.profile.replace(outer);
    };
    in_scope(enter, leave, || {
        let result = body();
        let found =
            rank_context(|context| context.profile.with(|recorder: &mut SpanRecorder| std::mem::take(recorder)));
        (result, found.elapsed(), found.spans, found.memory)
    })
}

/// Ends its span when it is dropped.
pub(crate) struct SpanGuard {
    /// Index of the span, if spans are being recorded.
    index: Option<usize>,
    has_duration: bool,
    #[cfg(feature = "tracing")]
    _entered: tracing::span::EnteredSpan,
}

/// Begins a span, which ends when the result is dropped.
#[must_use]
pub(crate) fn begin_span(kind: SpanKind, name: &'static str, site: Option<Site>) -> SpanGuard {
    let index = rank_context(|context| context.is_profiling.get().then(|| begin(context, kind, name, site)));
    SpanGuard {
        index,
        has_duration: false,
        #[cfg(feature = "tracing")]
        _entered: subscribed_span(kind, name).entered(),
    }
}

/// The span as subscribers of the crate `tracing` see it.
#[cfg(feature = "tracing")]
fn subscribed_span(kind: SpanKind, name: &'static str) -> tracing::Span {
    let module = || current_path().unwrap_or_default();
    match kind {
        SpanKind::Module => tracing::trace_span!("module", path = %module()),
        SpanKind::Operator => tracing::debug_span!("operator", name, module = %module()),
        SpanKind::Gradient => tracing::debug_span!("gradient", name),
        SpanKind::Redistribution => tracing::debug_span!("redistribution", module = %module()),
        SpanKind::Collective => tracing::debug_span!("collective", name, module = %module()),
    }
}

fn begin(context: &RankContext, kind: SpanKind, name: &'static str, site: Option<Site>) -> usize {
    let (module, phase) = (current_path(), context.phase.get());
    context.profile.with(|recorder: &mut SpanRecorder| {
        let index = recorder.spans.len();
        recorder.spans.push(ProfileSpan {
            kind,
            name,
            parent: recorder.open.last().copied(),
            start: recorder.elapsed(),
            duration: Duration::ZERO,
            waiting: Duration::ZERO,
            module,
            phase,
            inputs: Vec::new(),
            outputs: Vec::new(),
            dtype: None,
            group: Arc::from([]),
            axes: None,
            peer: None,
            bytes: 0,
            flops: 0,
            site: site.map(user_site),
            reason: None,
        });
        recorder.open.push(index);
        index
    })
}

impl SpanGuard {
    /// Completes the span, if spans are being recorded.
    pub(crate) fn fill(&self, fill: impl FnOnce(&mut ProfileSpan)) {
        if let Some(index) = self.index {
            rank_context(|context| {
                context.profile.with(|recorder: &mut SpanRecorder| recorder.spans.get_mut(index).map(fill))
            });
        }
    }

    /// Ends the span of a collective with the times that the trace has.
    pub(super) fn end_collective(mut self, start: Instant, duration: Duration, fill: impl FnOnce(&mut ProfileSpan)) {
        let Some(index) = self.index else { return };
        self.has_duration = true;
        rank_context(|context| {
            context.profile.with(|recorder: &mut SpanRecorder| {
                let began = recorder.began;
                let Some(span) = recorder.spans.get_mut(index) else { return };
                span.start = began.map_or(span.start, |began| start.saturating_duration_since(began));
                span.duration = duration;
                fill(span);
            });
        });
    }
}

impl Drop for SpanGuard {
    fn drop(&mut self) {
        let Some(index) = self.index else { return };
        rank_context_if_alive(|context| {
            context.profile.with(|recorder: &mut SpanRecorder| {
                let now = recorder.elapsed();
                recorder.open.retain(|&open| open < index);
                if let Some(span) = recorder.spans.get_mut(index).filter(|_| !self.has_duration) {
                    span.duration = now.saturating_sub(span.start);
                }
            });
        });
    }
}

/// Records a change of the memory, if spans are being recorded.
pub(super) fn note_memory(bytes: isize, kind: MemoryKind, tensor: u64) {
    rank_context_if_alive(|context| {
        if !context.is_profiling.get() || bytes == 0 {
            return;
        }
        context.profile.with(|recorder: &mut SpanRecorder| {
            let (at, spans_begun, span) = (recorder.elapsed(), recorder.spans.len(), recorder.open.last().copied());
            recorder.memory.push(MemoryEvent { at, spans_begun, span, bytes, kind, tensor });
        });
    });
}
