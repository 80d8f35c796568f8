//! Sharding decisions of a rank, prepared once per operator, arguments, input layouts and types.

use std::any::Any;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

use candle_core::DType;
use rustc_hash::FxHasher;
use smallvec::SmallVec;

use super::input_transfer::InputTransfer;
use super::scope;
use super::{Op, OpKind};
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::layout::{Layout, TensorMeta};
use crate::rank_context::rank_context;
use crate::rule::Decision;
use crate::tensor::{DTensor, check_memory, check_metas};
use shardwise_kernels::check_arithmetic;

/// Statistics of the cache of sharding decisions of this rank, see [`cache_report`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheReport {
    /// Calls whose decision was in the cache.
    pub hits: usize,
    /// Calls that had to be prepared.
    pub misses: usize,
    /// Decisions in the cache now.
    pub kept: usize,
}

/// The cache is cleared when it has this many decisions: a bound on memory for programs whose shapes change with every step. A
/// program that repeats its calls fills it again in one step.
const MAX_DECISIONS: usize = 4096;

/// The sharding decisions of a rank, by a hash of operator, arguments, input layouts and types.
#[derive(Default)]
struct DecisionCache {
    decisions: HashMap<u64, Vec<CacheEntry>, BuildHasherDefault<PrehashedKey>>,
    report: CacheReport,
}

impl DecisionCache {
    fn keep(&mut self, hash: u64, entry: CacheEntry) {
        self.report.misses += 1;
        if self.report.kept >= MAX_DECISIONS {
            self.decisions.clear();
            self.report.kept = 0;
        }
        self.report.kept += 1;
        self.decisions.entry(hash).or_default().push(entry);
    }
}

/// One decision with the call that it is for.
struct CacheEntry {
    op: Box<dyn Any>,
    /// The number of the scoped rule that prepared, or [`scope::DEFAULT_RULE`].
    rule: u64,
    inputs: SmallVec<[(Layout, DType); 3]>,
    mesh: DeviceMesh,
    prepared: Rc<PreparedCall>,
}

/// Everything about a call that does not depend on the data.
pub(super) struct PreparedCall {
    pub(super) decision: Decision,
    /// Per input how this rank obtains what the decision requires.
    pub(super) transfers: SmallVec<[InputTransfer; 3]>,
    /// Per output the shape and type of its local tensor on this rank.
    pub(super) locals: Vec<TensorMeta>,
    /// Per input why it is moved, if it is.
    pub(super) why_moved: SmallVec<[Option<Arc<str>>; 3]>,
    /// Per output why its layout is what it is, if data was moved or the output is partial.
    pub(super) why: Vec<Option<Arc<str>>>,
}

/// A hasher that returns its key, which is a hash already.
#[derive(Default)]
struct PrehashedKey(u64);

impl Hasher for PrehashedKey {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64")
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// Returns the statistics of the cache of sharding decisions of this rank.
///
/// Local. PyTorch's DTensor caches sharding propagation in the same way.
pub fn cache_report() -> CacheReport {
    rank_context(|context| context.decisions.with(|cache: &mut DecisionCache| cache.report))
}

/// Finds or makes the decision for a call. Also returns a hash of the call that is the same on all ranks.
pub(super) fn prepare_call<O: Op>(op: &O, inputs: &[&DTensor]) -> Result<(Rc<PreparedCall>, u64)> {
    let mesh = inputs[0].device_mesh();
    let scoped = scope::rule_for(op.name(), mesh.mesh());
    let rule = scoped.as_ref().map_or(scope::DEFAULT_RULE, |scoped| scoped.number);
    let mut hasher = FxHasher::default();
    op.name().hash(&mut hasher);
    op.hash(&mut hasher);
    for input in inputs {
        input.layout().hash(&mut hasher);
        (input.dtype() as u8).hash(&mut hasher);
    }
    let call = hasher.finish();
    rule.hash(&mut hasher);
    op.type_id().hash(&mut hasher);
    let hash = hasher.finish();
    let same = |entry: &CacheEntry| {
        entry.rule == rule
            && entry.op.downcast_ref::<O>() == Some(op)
            && entry.mesh.is_same(mesh)
            && entry.inputs.len() == inputs.len()
            && entry.inputs.iter().zip(inputs).all(|((layout, dtype), t)| layout == t.layout() && *dtype == t.dtype())
    };
    let find = |cache: &mut DecisionCache| {
        let entry = cache.decisions.get(&hash).and_then(|bucket| bucket.iter().find(|e| same(e)))?;
        cache.report.hits += 1;
        Some(Rc::clone(&entry.prepared))
    };
    if let Some(prepared) = rank_context(|context| context.decisions.with(find)) {
        return Ok((prepared, call));
    }
    let prepared = Rc::new(PreparedCall::new(op, inputs, scoped)?);
    let inputs = inputs.iter().map(|t| (t.layout().clone(), t.dtype())).collect();
    let entry =
        CacheEntry { op: Box::new(op.clone()), rule, inputs, mesh: mesh.clone(), prepared: Rc::clone(&prepared) };
    rank_context(|context| context.decisions.with(|cache: &mut DecisionCache| cache.keep(hash, entry)));
    Ok((prepared, call))
}

impl PreparedCall {
    /// Decides by the rule of a scope, or else by the rule of the operator.
    fn new<O: Op>(op: &O, inputs: &[&DTensor], scoped: Option<scope::RuleScope>) -> Result<Self> {
        let mesh = inputs[0].device_mesh();
        let metas: Vec<TensorMeta> = inputs.iter().map(|t| t.meta()).collect();
        if op.kind() != OpKind::AnyType {
            metas.iter().try_for_each(|meta| check_arithmetic(meta.dtype))?;
        }
        let plan = op.plan(&metas)?;
        let dry = mesh.world().is_dry();
        check_metas(&plan.outputs, mesh.size(), dry)?;
        let layouts: Vec<&Layout> = inputs.iter().map(|t| t.layout()).collect();
        let elem: Vec<usize> = metas.iter().map(|m| m.dtype.size_in_bytes()).collect();
        let decision = match scoped.map(|scoped| scoped.decide(&plan, &layouts)).transpose()?.flatten() {
            Some(decision) => decision,
            None => op.decide(&plan, &layouts, &elem)?,
        };
        for (layout, meta) in decision.outputs.iter().zip(&plan.outputs) {
            check_memory(layout, meta.dtype, dry)?;
        }
        let rank = mesh.world().rank();
        let local =
            |(layout, meta): (&Layout, &TensorMeta)| TensorMeta { shape: layout.local_shape(rank), dtype: meta.dtype };
        let locals = decision.outputs.iter().zip(&plan.outputs).map(local).collect();
        let transfers = inputs.iter().zip(&decision.inputs).map(|(input, need)| InputTransfer::new(mesh, input, need));
        let transfers = transfers.collect::<Result<SmallVec<_>>>()?;
        let why_moved: SmallVec<[Option<Arc<str>>; 3]> = (0..inputs.len())
            .map(|i| plan.signature.why_moved(op.name(), i, &layouts, &decision).map(Arc::from))
            .collect();
        let why = |o: usize| -> Option<Arc<str>> {
            let partial = plan.signature.why_partial(op.name(), o, &layouts, &decision);
            let sentences = why_moved.iter().flatten().map(|why| why.to_string()).chain(partial);
            let text = sentences.collect::<Vec<_>>().join("; ");
            (!text.is_empty()).then(|| text.into())
        };
        let why = (0..decision.outputs.len()).map(why).collect();
        Ok(PreparedCall { decision, transfers, locals, why_moved, why })
    }
}
