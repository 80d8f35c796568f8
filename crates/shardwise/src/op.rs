//! Operators and the one way in which they are carried out: decide the layouts (once per combination), bring the inputs
//! there, run the kernel on local tensors.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use crate::comm::implicitly;
use crate::error::{Error, Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::local::placeholder;
use crate::rule::{Decision, Signature};
use crate::tensor::DTensor;

/// An operator with its arguments that are not tensors. Equal operators do the same.
pub trait Op: Any + Clone + Eq + Hash {
    /// Name for errors and records.
    fn name(&self) -> &'static str;

    /// How the operator may be spread, and what it gives, for inputs of these shapes and types.
    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan>;

    /// The operator on local tensors.
    fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>>;
}

/// What an operator does with inputs of certain shapes and types.
pub struct OpPlan {
    /// How it may be spread.
    pub signature: Signature,
    /// Its outputs.
    pub outputs: Vec<TensorMeta>,
}

/// How often a decision was found and how often it had to be made, on this thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheReport {
    /// Decisions found.
    pub hits: usize,
    /// Decisions made.
    pub misses: usize,
    /// Decisions kept.
    pub kept: usize,
}

/// Decisions that are kept before all are forgotten.
const KEPT: usize = 4096;

#[derive(Default)]
struct Cache {
    decisions: HashMap<u64, Vec<Entry>, BuildHasherDefault<PassThrough>>,
    report: CacheReport,
}

struct Entry {
    op: Box<dyn Any>,
    inputs: SmallVec<[(Layout, DType); 3]>,
    decided: Rc<Decided>,
}

/// Everything about a call that does not depend on data.
struct Decided {
    decision: Decision,
    /// Per output what this rank holds of it.
    locals: Vec<TensorMeta>,
}

/// The keys are hashes already.
#[derive(Default)]
struct PassThrough(u64);

impl Hasher for PassThrough {
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

thread_local! {
    static CACHE: RefCell<Cache> = RefCell::new(Cache::default());
}

/// What the cache of decisions of this thread has done so far.
pub fn cache_report() -> CacheReport {
    CACHE.with_borrow(|cache| cache.report)
}

/// Carries out an operator on tensors of one mesh.
pub(crate) fn dispatch<O: Op>(op: &O, inputs: &[&DTensor], site: Site) -> Result<Vec<DTensor>> {
    let mesh = inputs[0].device_mesh();
    if let Some(other) = inputs.iter().find(|t| t.device_mesh() != mesh) {
        return Err(refuse(op, inputs, &format!("a tensor on mesh {}", other.layout().mesh()), "tensors on one mesh"));
    }
    let decided = decide(op, inputs)?;
    let mut locals: SmallVec<[Tensor; 3]> = SmallVec::new();
    for (input, layout) in inputs.iter().zip(&decided.decision.inputs) {
        locals.push(match layout == input.layout() {
            true => input.to_local().clone(),
            false => implicitly(op.name(), || input.to_layout_at(layout, site))?.to_local().clone(),
        });
    }
    let outputs = match mesh.world().is_dry() || !mesh.contains(mesh.world().rank()) {
        true => decided.locals.iter().map(placeholder).collect::<Result<Vec<_>>>()?,
        false => op.run(&locals)?,
    };
    let wrap = |(layout, local): (&Layout, Tensor)| DTensor::from_parts(mesh, layout.clone(), local);
    Ok(decided.decision.outputs.iter().zip(outputs).map(wrap).collect())
}

fn decide<O: Op>(op: &O, inputs: &[&DTensor]) -> Result<Rc<Decided>> {
    let mut hasher = BuildHasherDefault::<DefaultHasher>::default().build_hasher();
    op.type_id().hash(&mut hasher);
    op.hash(&mut hasher);
    for input in inputs {
        input.layout().hash(&mut hasher);
        (input.dtype() as u8).hash(&mut hasher);
    }
    let hash = hasher.finish();
    let same = |entry: &Entry| {
        entry.op.downcast_ref::<O>() == Some(op)
            && entry.inputs.len() == inputs.len()
            && entry.inputs.iter().zip(inputs).all(|((layout, dtype), t)| layout == t.layout() && *dtype == t.dtype())
    };
    let found = CACHE.with_borrow_mut(|cache| {
        let entry = cache.decisions.get(&hash).and_then(|bucket| bucket.iter().find(|e| same(e)))?;
        cache.report.hits += 1;
        Some(Rc::clone(&entry.decided))
    });
    if let Some(decided) = found {
        return Ok(decided);
    }
    let metas: Vec<TensorMeta> = inputs.iter().map(|t| t.meta()).collect();
    let plan = op.plan(&metas)?;
    let layouts: Vec<&Layout> = inputs.iter().map(|t| t.layout()).collect();
    let elem: Vec<usize> = metas.iter().map(|m| m.dtype.size_in_bytes()).collect();
    let shapes: Vec<&[usize]> = plan.outputs.iter().map(|m| m.shape.as_slice()).collect();
    let decision = plan.signature.decide(&layouts, &elem, &shapes)?;
    let rank = inputs[0].device_mesh().world().rank();
    let local =
        |(layout, meta): (&Layout, &TensorMeta)| TensorMeta { shape: layout.local_shape(rank), dtype: meta.dtype };
    let locals = decision.outputs.iter().zip(&plan.outputs).map(local).collect();
    let decided = Rc::new(Decided { decision, locals });
    CACHE.with_borrow_mut(|cache| {
        cache.report.misses += 1;
        if cache.report.kept >= KEPT {
            cache.decisions.clear();
            cache.report.kept = 0;
        }
        cache.report.kept += 1;
        let inputs = inputs.iter().map(|t| (t.layout().clone(), t.dtype())).collect();
        let entry = Entry { op: Box::new(op.clone()), inputs, decided: Rc::clone(&decided) };
        cache.decisions.entry(hash).or_default().push(entry);
    });
    Ok(decided)
}

/// An error that names the operator and its tensors.
fn refuse<O: Op>(op: &O, inputs: &[&DTensor], found: &str, needed: &str) -> Error {
    let tensors: Vec<String> = inputs.iter().map(|t| format!("{} {}", t.dtype().as_str(), t.layout())).collect();
    let found = format!("{found} in {}({})", op.name(), tensors.join("; "));
    Error::invalid("operands", found, needed, "move or convert the tensors first")
}
