//! What an operator is ([`Op`]), and the dispatch that executes every operator: decide the layouts (cached per operator, input
//! layouts and types), redistribute the inputs, run the kernel on local tensors, record the call for the backward pass.

mod anomaly;
mod scope;
mod widening;

pub use anomaly::detect_anomaly;
use anomaly::{RecordedAt, in_backward_of, is_detecting};
pub(crate) use scope::{ScopedRule, operators_in, with_rule};
pub use widening::Accumulation;

use std::any::Any;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::panic::Location;
use std::rc::Rc;

use candle_core::{DType, Tensor};
use rustc_hash::FxHasher;
use smallvec::SmallVec;

use crate::comm::{DeviceMesh, Origin, record_implicit_operator, with_purpose};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::layout::{Layout, OwnedBox, Runs, TensorBox, TensorMeta, coordinates};
use crate::mesh::Mesh;
use crate::module_scope::user_site;
use crate::rank_context::rank_context;
use crate::redistribute::BoxExchange;
use crate::rule::{Decision, RequiredInput, Signature};
use crate::tensor::{
    Backward, DTensor, SaveForBackward, SavedTensors, check_metas, check_room, is_in_gradient, is_recording,
};
use shardwise_kernels::{placeholder, same_storage};
use widening::{convert_inputs, held_types};

/// An operator together with its non-tensor arguments: sharding rule, local kernel and gradient.
///
/// Implement it for a custom operator and call it with [`apply`]. Equal values must behave alike: decisions are cached by value.
/// Hashes are compared between ranks, which may be separate processes, so hash the contents of an argument, not its address.
#[doc(alias = "custom_op")]
#[doc(alias = "autograd.Function")]
pub trait Op: Any + Clone + Eq + Hash + Send + Sync {
    /// The name in errors, traces and [`override_rule`](crate::ops::override_rule).
    fn name(&self) -> &'static str;

    /// Returns the sharding rule and the outputs for inputs of these shapes and types.
    ///
    /// Called once per cached decision, on every rank alike.
    ///
    /// # Errors
    /// If the operator does not accept such inputs. The error is completed with the name and layouts of the call.
    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan>;

    /// Chooses the layouts in which one call runs, for inputs in these layouts; `elem` are their element sizes in bytes.
    ///
    /// The default takes the cheapest choice that the signature allows. Override it if shards of inputs and outputs are related
    /// in a way that named dimensions do not express, as in `flip` or a convolution.
    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let shapes: Vec<&[usize]> = plan.outputs.iter().map(|m| m.shape.as_slice()).collect();
        plan.signature.decide(inputs, elem, &shapes)
    }

    /// Runs the kernel on this rank's local tensors, and returns the local tensors of the outputs.
    ///
    /// The inputs share memory with distributed tensors, which are immutable: a kernel must not write to them in place, nor keep
    /// another handle to what it returns. Not called in a dry run.
    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>>;

    /// In which type the kernel computes its term of an output that is `Partial` with a sum, mean or product.
    fn accumulation(&self) -> Accumulation {
        Accumulation::InF32
    }

    /// The number of floating-point operations on local tensors of these shapes, for estimates of a step.
    ///
    /// The default is one per element of the largest tensor.
    fn flops(&self, inputs: &[&[usize]], outputs: &[&[usize]]) -> u64 {
        let largest = inputs.iter().chain(outputs).map(|shape| shape.iter().product::<usize>()).max();
        largest.unwrap_or(0) as u64
    }

    /// Returns the backward pass, or [`Gradient::NotDifferentiable`].
    ///
    /// There is no default: an operator whose gradient was forgotten would silently act as a constant.
    ///
    /// ```compile_fail,E0046
    /// # use candle_core::Tensor;
    /// # use shardwise::op::{KernelContext, Op, OpPlan};
    /// # use shardwise::prelude::*;
    /// # #[derive(Clone, PartialEq, Eq, Hash)]
    /// # struct Cube;
    /// impl Op for Cube {
    ///     # fn name(&self) -> &'static str { "cube" }
    ///     # fn plan(&self, _: &[TensorMeta]) -> Result<OpPlan> { unreachable!() }
    ///     # fn run(&self, _: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> { unreachable!() }
    ///     // name, plan and run, but no gradient
    /// }
    /// ```
    fn gradient(&self) -> Gradient<Self>;
}

/// The gradient of an operator, see [`Op::gradient`].
pub enum Gradient<O: ?Sized> {
    /// The backward pass treats the outputs as constants: they are integers, or the operator is itself part of a backward pass
    /// that is not recorded. `backward` from such an output is an error.
    #[doc(alias = "mark_non_differentiable")]
    NotDifferentiable,
    /// The backward pass is this function, which gets the tensors that the call saves for it.
    From(SaveForBackward, GradientFn<O>),
}

/// The backward pass of an operator: computes the gradient of every input (`None`: zero, or not [wanted](SavedTensors::needs_input_grad)) from
/// the gradients of the outputs (`None`: zero), with operators on distributed tensors. See [`Backward::run`].
pub type GradientFn<O> = fn(&O, &SavedTensors<'_>, &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>>;

/// One call of an operator as the autograd graph holds it.
struct RecordedCall<O> {
    op: O,
    gradient: GradientFn<O>,
    /// Where it was called; recorded inside [`detect_anomaly`] only.
    recorded_at: Option<RecordedAt>,
}

impl<O: Op> Backward for RecordedCall<O> {
    fn name(&self) -> &'static str {
        self.op.name()
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let run = || check_gradients(self.name(), saved, (self.gradient)(&self.op, saved, gradients)?);
        if is_detecting() { in_backward_of(self.name(), self.recorded_at.clone(), run) } else { run() }
    }
}

/// Fails unless a gradient function returned one gradient per input, each of its shape or `None`.
fn check_gradients(name: &str, saved: &SavedTensors<'_>, found: Vec<Option<DTensor>>) -> Result<Vec<Option<DTensor>>> {
    let fits = |(i, g): (usize, &Option<DTensor>)| g.as_ref().is_none_or(|g| g.shape() == saved.shape(i));
    if found.len() == saved.num_inputs() && found.iter().enumerate().all(fits) {
        return Ok(found);
    }
    let shapes = |of: &mut dyn Iterator<Item = String>| of.collect::<Vec<_>>().join(", ");
    let given = shapes(&mut found.iter().map(|g| g.as_ref().map_or("none".into(), |g| format!("{:?}", g.shape()))));
    let needed = shapes(&mut (0..saved.num_inputs()).map(|i| format!("{:?}", saved.shape(i))));
    let found = format!("gradients of shapes {given} from {name}");
    let needed = format!("one per input, of shapes {needed}, or none where it is zero");
    Err(ErrorKind::Gradient.error("gradient", found, needed, "correct the gradient of the operator"))
}

/// What a kernel can ask about the rank that it runs on: which indices of inputs and outputs the rank holds, and in which types.
///
/// Local: answers from the layouts, without communication.
pub struct KernelContext<'a> {
    decision: &'a Decision,
    locals: &'a [TensorMeta],
    held: &'a [DType],
    mesh: &'a Mesh,
    rank: usize,
}

impl KernelContext<'_> {
    /// The global indices along a dimension that this rank holds of an input, in local order, as ranges.
    pub(crate) fn input_runs(&self, input: usize, dim: usize) -> Runs {
        match &self.decision.inputs[input] {
            RequiredInput::Layout(layout) => layout.owned(dim, &self.coordinate()),
            RequiredInput::Boxes { boxes, .. } => {
                let own = &boxes[self.position()];
                Runs::range(own.offsets[dim]..own.offsets[dim] + own.sizes[dim])
            }
        }
    }

    /// The local shape of an output on this rank.
    pub fn local_shape(&self, output: usize) -> &[usize] {
        &self.locals[output].shape
    }

    /// The type in which this rank holds its local tensor of an output.
    ///
    /// Terms of a partial sum are held in a wider type than the reduced tensor has, see [`Accumulation`]. A result in another
    /// floating-point type is converted.
    pub fn output_dtype(&self, output: usize) -> DType {
        self.held[output]
    }

    /// The global indices along a dimension that this rank holds of an output, in local order, as ranges.
    pub(crate) fn output_runs(&self, output: usize, dim: usize) -> Runs {
        self.decision.outputs[output].owned(dim, &self.coordinate())
    }

    /// How many shards of an input along a dimension begin before an index.
    pub(crate) fn shards_before(&self, input: usize, dim: usize, index: usize) -> usize {
        let RequiredInput::Layout(layout) = &self.decision.inputs[input] else { return 0 };
        let starts = coordinates(self.mesh, layout.shard_order(dim)).filter_map(|c| layout.owned(dim, &c).first());
        starts.filter(|&start| start < index).count()
    }

    /// The global shape of an input.
    pub fn input_shape(&self, input: usize) -> &[usize] {
        match &self.decision.inputs[input] {
            RequiredInput::Layout(layout) | RequiredInput::Boxes { from: layout, .. } => layout.shape(),
        }
    }

    /// The global indices along a dimension that this rank holds of an input, one by one in local order.
    pub fn input_indices(&self, input: usize, dim: usize) -> Vec<usize> {
        self.input_runs(input, dim).iter().flatten().collect()
    }

    /// The global indices along a dimension that this rank holds of an output, one by one in local order.
    pub fn output_indices(&self, output: usize, dim: usize) -> Vec<usize> {
        self.output_runs(output, dim).iter().flatten().collect()
    }

    fn coordinate(&self) -> Vec<usize> {
        self.mesh.coordinate(self.rank).expect("kernels run on ranks of the mesh")
    }

    fn position(&self) -> usize {
        self.mesh.ranks().iter().position(|&r| r == self.rank).expect("kernels run on ranks of the mesh")
    }
}

/// The sharding rule and the outputs of an operator, for inputs of certain shapes and types.
pub struct OpPlan {
    /// In which layouts it can run.
    pub signature: Signature,
    /// Global shape and type of each output.
    pub outputs: Vec<TensorMeta>,
}

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
struct PreparedCall {
    decision: Decision,
    /// Per input how this rank obtains what the decision requires.
    transfers: SmallVec<[InputTransfer; 3]>,
    /// Per output the shape and type of its local tensor on this rank.
    locals: Vec<TensorMeta>,
}

/// How a rank obtains what an operator requires of an input.
enum InputTransfer {
    /// The input is in the required layout already.
    Ready,
    Redistribute(Layout),
    /// After a redistribution every rank holds its box already and narrows its local tensor to it.
    Narrow {
        from: Layout,
        ranges: Vec<(usize, usize)>,
        after: TensorMeta,
    },
    /// After a redistribution ranks exchange boxes.
    Fetch {
        from: Layout,
        exchange: Box<BoxExchange>,
        after: TensorMeta,
    },
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

/// Executes a custom operator on tensors of one mesh, in the same way as the operators of this crate.
///
/// Its rule decides the layouts (cached), inputs in another layout are redistributed, and the call is recorded for the backward
/// pass if an input has a gradient. Every rank of the mesh must call it: it is collective whenever inputs have to be redistributed.
///
/// # Errors
/// If there is no input, the inputs are on different meshes, the plan refuses them, or the kernel fails or returns tensors of
/// other shapes than its rule promises.
///
/// ```
/// use candle_core::Tensor;
/// use shardwise::op::{self, Gradient, KernelContext, Op, OpPlan};
/// use shardwise::prelude::*;
/// use shardwise::rule::Signature;
/// use shardwise::tensor::SaveForBackward;
///
/// /// The cube of every element.
/// #[derive(Clone, PartialEq, Eq, Hash)]
/// struct Cube;
///
/// impl Op for Cube {
///     fn name(&self) -> &'static str {
///         "cube"
///     }
///
///     fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
///         let shape = inputs[0].shape.as_slice();
///         Ok(OpPlan { signature: Signature::pointwise(&[shape], shape), outputs: vec![inputs[0].clone()] })
///     }
///
///     fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
///         Ok(vec![inputs[0].powf(3.0)?])
///     }
///
///     fn gradient(&self) -> Gradient<Self> {
///         Gradient::From(SaveForBackward::Inputs, |_, saved, gradients| {
///             let slope = saved.input(0).square()?.mul_scalar(3.0)?;
///             Ok(vec![gradients[0].as_ref().map(|g| g.mul(&slope)).transpose()?])
///         })
///     }
/// }
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let x = DTensor::arange(0.0..3.0, DType::F64, &mesh, [Shard(0)])?.requires_grad();
///     let y = op::apply(&Cube, &[&x])?.swap_remove(0);
///     assert_eq!(y.placements(), [Shard(0)]);
///     assert_eq!(y.sum_all()?.backward()?.get(&x)?.full_tensor()?.to_vec1::<f64>()?, [0.0, 3.0, 12.0]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[track_caller]
pub fn apply<O: Op>(op: &O, inputs: &[&DTensor]) -> Result<Vec<DTensor>> {
    if inputs.is_empty() {
        let found = format!("{} without tensors", op.name());
        return Err(ErrorKind::Operands.error(
            "operands",
            found,
            "at least one tensor",
            "pass the tensors that it works on",
        ));
    }
    dispatch(op, inputs, Location::caller())
}

/// Executes an operator on tensors of one mesh: the one entry point of all operators.
pub(crate) fn dispatch<O: Op>(op: &O, inputs: &[&DTensor], site: Site) -> Result<Vec<DTensor>> {
    execute(op, inputs, site, None)
}

/// A sum to which an operator can add its first output in the same pass over memory, see [`dispatch_onto`].
struct OntoSum<'a> {
    sum: &'a mut Option<DTensor>,
    kernel: OntoKernel<'a>,
    halves: bool,
}

/// Runs a kernel that adds its first output to the local part of a sum, in place if the flag says that nothing else uses its memory,
/// and returns all outputs.
pub(crate) type OntoKernel<'a> = &'a dyn Fn(&Tensor, bool, &[Tensor], &KernelContext<'_>) -> Result<Vec<Tensor>>;

/// Executes an operator of a backward pass as [`dispatch`] does, and adds `sum` to its first output with `kernel`: then `sum` is `None`
/// afterwards. Leaves it where the layout or the type of the output is another, or the pass is recorded. `halves`: whether
/// the kernel adds half-precision numbers, too.
///
/// Whether the sum is added depends on layouts and types alone, so it is the same on all ranks; whether it is in place does not change
/// the result.
pub(crate) fn dispatch_onto<O: Op>(
    op: &O,
    inputs: &[&DTensor],
    sum: &mut Option<DTensor>,
    kernel: OntoKernel<'_>,
    halves: bool,
    site: Site,
) -> Result<Vec<DTensor>> {
    let onto = sum.is_some().then_some(OntoSum { sum, kernel, halves });
    execute(op, inputs, site, onto)
}

impl<'a> OntoSum<'a> {
    /// Takes the sum if it has the layout and the type of the output.
    fn take(self, output: &Layout, meta: &TensorMeta, held: DType) -> Option<(DTensor, OntoKernel<'a>)> {
        let Self { sum, kernel, halves } = self;
        let fits = |sum: &mut DTensor| {
            let types = [sum.dtype(), meta.dtype, held];
            let added = matches!(held, DType::F32 | DType::F64) || halves && held.is_float();
            sum.layout() == output && types.iter().all(|t| *t == sum.held_for_kernel().dtype()) && added
        };
        let sum = if is_recording() || is_detecting() { None } else { sum.take_if(fits) };
        sum.map(|sum| (sum, kernel))
    }
}

fn execute<O: Op>(op: &O, inputs: &[&DTensor], site: Site, onto: Option<OntoSum<'_>>) -> Result<Vec<DTensor>> {
    check_one_mesh(op.name(), inputs, site)?;
    let mesh = inputs[0].device_mesh();
    let (prepared, call) = prepare_call(op, inputs).map_err(|e| name_call(e, op.name(), inputs, site))?;
    let (rank, dry) = (mesh.world().rank(), mesh.world().is_dry());
    let mut locals: SmallVec<[Tensor; 3]> = SmallVec::new();
    for (input, transfer) in inputs.iter().zip(&prepared.transfers) {
        locals.push(match transfer {
            InputTransfer::Ready => input.held_for_kernel().clone(),
            _ => record_implicit_operator(op.name(), || transfer.run(&input.detach(), dry, site))?,
        });
    }
    if dry {
        scope::note(op.name());
        let held: SmallVec<[&[usize]; 3]> = locals.iter().map(Tensor::dims).collect();
        let made: SmallVec<[&[usize]; 3]> = prepared.locals.iter().map(|m| m.shape.as_slice()).collect();
        mesh.world().flops().add(op.flops(&held, &made));
    }
    let held = held_types(op.accumulation(), inputs, &locals, &prepared.decision.outputs, &prepared.locals);
    let outputs = &prepared.decision.outputs;
    let onto = onto.and_then(|onto| onto.take(outputs.first()?, prepared.locals.first()?, *held.first()?));
    let computes = !dry && mesh.contains(rank);
    let outputs = match !computes {
        true => {
            let shapes = prepared.locals.iter().zip(&held);
            shapes
                .map(|(m, &held)| Ok(placeholder(&TensorMeta::new(m.shape.as_slice(), held))?))
                .collect::<Result<Vec<_>>>()?
        }
        false => {
            let place = KernelContext {
                decision: &prepared.decision,
                locals: &prepared.locals,
                held: &held,
                mesh: mesh.mesh(),
                rank,
            };
            convert_inputs(op.accumulation(), inputs, &mut locals, &held, &prepared.locals)?;
            let made = match &onto {
                None => op.run(&locals, &place),
                Some((sum, kernel)) => kernel(sum.held_for_kernel(), sum.is_exclusive(), &locals, &place),
            };
            let made = made.and_then(|made| checked_results(made, &prepared.locals, &held));
            made.map_err(|e| name_call(e, op.name(), inputs, site))?
        }
    };
    let shares = match computes && is_in_gradient() && !is_recording() {
        true => Some(shared_memory(inputs, &locals, &outputs)),
        false => None,
    };
    let origin = Origin::operator(op.name(), call, inputs.iter().map(|t| t.origin()), inputs[0].shape());
    let wrap = |(index, ((layout, meta), local)): (usize, ((&Layout, &TensorMeta), Tensor))| {
        let mut origin = origin.output(index);
        if let (0, Some((sum, _))) = (index, &onto) {
            origin = Origin::operator("add", call, [sum.origin(), &origin].into_iter(), sum.shape());
        }
        let output = DTensor::from_held(mesh, layout.clone(), local, meta.dtype, origin)?;
        // What is added to a sum is in memory of the sum, or in new memory.
        if shares.as_ref().is_some_and(|shares| !shares[index]) || onto.is_some() && index == 0 {
            output.set_exclusive();
        }
        Ok(output)
    };
    let described = prepared.decision.outputs.iter().zip(&prepared.locals);
    let outputs = described.zip(outputs).enumerate().map(wrap).collect::<Result<Vec<DTensor>>>()?;
    if is_detecting() && !dry && mesh.contains(rank) {
        anomaly::check(op.name(), inputs, &outputs, site)?;
    }
    if inputs.iter().all(|t| !t.has_gradient()) {
        return Ok(outputs);
    }
    match op.gradient() {
        Gradient::From(saves, gradient) => Ok(DTensor::recorded(outputs, inputs, saves, || {
            let recorded_at = is_detecting().then(|| RecordedAt::here(site));
            Box::new(RecordedCall { op: op.clone(), gradient, recorded_at })
        })),
        Gradient::NotDifferentiable => Ok(outputs),
    }
}

/// Per output whether it uses memory of an input or of another output; such an input is no longer exclusive.
fn shared_memory(inputs: &[&DTensor], locals: &[Tensor], outputs: &[Tensor]) -> SmallVec<[bool; 3]> {
    let shared = |(index, output): (usize, &Tensor)| {
        let mut shares = outputs[..index].iter().any(|other| same_storage(output, other));
        for (input, local) in inputs.iter().zip(locals) {
            if same_storage(output, local) {
                input.held();
                shares = true;
            }
        }
        shares
    };
    outputs.iter().enumerate().map(shared).collect()
}

/// Fails if the operands of an operator are on different meshes.
pub(crate) fn check_one_mesh(name: &str, inputs: &[&DTensor], site: Site) -> Result<()> {
    let mesh = inputs[0].device_mesh();
    let Some(other) = inputs.iter().find(|t| t.device_mesh() != mesh) else { return Ok(()) };
    let found = format!("tensors on meshes {} and {}", mesh.mesh(), other.layout().mesh());
    let error =
        ErrorKind::Operands.error("operands", found, "tensors on one mesh", "move the tensors to one mesh first");
    Err(name_call(error, name, inputs, site))
}

/// Converts the results of a kernel to the types in which they are held, and fails if their number, shapes or types are not
/// those of the output layouts. If one output is held in a wider type, the kernel may have computed all outputs in it.
fn checked_results(mut made: Vec<Tensor>, locals: &[TensorMeta], held: &[DType]) -> Result<Vec<Tensor>> {
    let wide = locals.iter().zip(held).any(|(m, held)| m.dtype != *held);
    if wide {
        for (tensor, held) in made.iter_mut().zip(held) {
            if tensor.dtype() != *held && tensor.dtype().is_float() && held.is_float() {
                *tensor = tensor.to_dtype(*held)?;
            }
        }
    }
    let fits = |((t, m), held): ((&Tensor, &TensorMeta), &DType)| t.dims() == m.shape && t.dtype() == *held;
    if made.len() == locals.len() && made.iter().zip(locals).zip(held).all(fits) {
        return Ok(made);
    }
    let found = made.iter().map(|t| format!("{} {:?}", t.dtype().as_str(), t.dims())).collect::<Vec<_>>().join(", ");
    let needed = locals.iter().map(|m| format!("{} {:?}", m.dtype.as_str(), m.shape)).collect::<Vec<_>>().join(", ");
    Err(ErrorKind::Operands.error("local results", found, needed, "correct the kernel, or the rule that it runs under"))
}

impl InputTransfer {
    fn new(mesh: &DeviceMesh, input: &DTensor, need: &RequiredInput) -> Result<Self> {
        let (from, axes, boxes) = match need {
            RequiredInput::Layout(layout) if layout == input.layout() => return Ok(InputTransfer::Ready),
            RequiredInput::Layout(layout) => return Ok(InputTransfer::Redistribute(layout.clone())),
            RequiredInput::Boxes { from, .. } if !mesh.contains(mesh.world().rank()) => {
                return Ok(InputTransfer::Redistribute(from.clone()));
            }
            RequiredInput::Boxes { from, axes, boxes } => (from.clone(), axes, boxes),
        };
        let inside = |b: &TensorBox| {
            let mut ends = b.offsets.iter().zip(&b.sizes).zip(from.shape());
            let dims = from.shape().len();
            b.offsets.len() == dims
                && b.sizes.len() == dims
                && ends.all(|((o, s), n)| o.checked_add(*s).is_some_and(|end| end <= *n))
        };
        if boxes.len() != mesh.mesh().size() || !boxes.iter().all(inside) {
            let needed = format!("a box of {from} for each of {} ranks", mesh.mesh().size());
            let found = format!("boxes {boxes:?}");
            return Err(ErrorKind::Layout.error(
                "rule",
                found,
                needed,
                "request a box inside of the input for every rank",
            ));
        }
        let ranks = mesh.mesh().ranks();
        let position = |rank: usize| ranks.iter().position(|&r| r == rank).expect("a rank of the mesh");
        let wanted = |rank: usize| {
            let global = boxes[position(rank)].clone();
            let local_offsets = vec![0; global.offsets.len()];
            let some = global.volume() > 0;
            some.then_some(OwnedBox { rank, global, local_offsets }).into_iter().collect::<Vec<_>>()
        };
        let me = mesh.world().rank();
        let after = TensorMeta { shape: boxes[position(me)].sizes.clone(), dtype: input.dtype() };
        // Every rank of the group must come to the same answer, because either all of them exchange or none.
        let held = |rank: usize| {
            let own = from.boxes_of(rank);
            own.len() <= 1
                && wanted(rank)
                    .iter()
                    .all(|w| own.iter().any(|o| o.global.intersect(&w.global).as_ref() == Some(&w.global)))
        };
        if mesh.mesh().group_ranks(axes, me).into_iter().all(held) {
            let ranges = match (wanted(me).first(), from.boxes_of(me).first()) {
                (Some(w), Some(own)) => {
                    let starts = w.global.offsets.iter().zip(&own.global.offsets).map(|(w, o)| w - o);
                    starts.zip(w.global.sizes.iter().copied()).collect()
                }
                _ => after.shape.iter().map(|&n| (0, n)).collect(),
            };
            return Ok(InputTransfer::Narrow { from, ranges, after });
        }
        let exchange = BoxExchange::new(mesh.group_of(axes)?, input.dtype(), |r| from.boxes_of(r), wanted);
        Ok(InputTransfer::Fetch { from, exchange: Box::new(exchange), after })
    }

    fn run(&self, input: &DTensor, dry: bool, site: Site) -> Result<Tensor> {
        match self {
            InputTransfer::Ready => Ok(input.held().clone()),
            InputTransfer::Redistribute(layout) => Ok(input.to_layout_at(layout, site)?.held().clone()),
            InputTransfer::Narrow { from, ranges, after } => {
                let source = input.to_layout_at(from, site)?;
                if dry || after.elem_count() == 0 {
                    return Ok(placeholder(&TensorMeta::new(after.shape.as_slice(), source.held().dtype()))?);
                }
                let narrow = |t: Tensor, (dim, &(start, len)): (usize, &(usize, usize))| t.narrow(dim, start, len);
                Ok(ranges.iter().enumerate().try_fold(source.held().clone(), narrow)?)
            }
            InputTransfer::Fetch { from, exchange, after } => {
                let source = input.to_layout_at(from, site)?;
                let held = source.held();
                with_purpose(input.origin(), 0, || {
                    if held.dtype() == after.dtype {
                        return exchange.assemble(held, after, site);
                    }
                    // Terms of a partial sum along other axes move in the wider type in which they are held.
                    let after = TensorMeta::new(after.shape.as_slice(), held.dtype());
                    exchange.of_type(held.dtype()).assemble(held, &after, site)
                })
            }
        }
    }
}

/// Finds or makes the decision for a call. Also returns a hash of the call that is the same on all ranks.
fn prepare_call<O: Op>(op: &O, inputs: &[&DTensor]) -> Result<(Rc<PreparedCall>, u64)> {
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
            check_room(layout, meta.dtype, dry)?;
        }
        let rank = mesh.world().rank();
        let local =
            |(layout, meta): (&Layout, &TensorMeta)| TensorMeta { shape: layout.local_shape(rank), dtype: meta.dtype };
        let locals = decision.outputs.iter().zip(&plan.outputs).map(local).collect();
        let transfers = inputs.iter().zip(&decision.inputs).map(|(input, need)| InputTransfer::new(mesh, input, need));
        let transfers = transfers.collect::<Result<SmallVec<_>>>()?;
        Ok(PreparedCall { decision, transfers, locals })
    }
}

/// Adds the operator, its tensors and the line of the program to an error.
#[cold]
pub(crate) fn name_call(error: Error, name: &str, inputs: &[&DTensor], site: Site) -> Error {
    let Error::Invalid(mut invalid) = error else { return error };
    let tensors: Vec<String> = inputs.iter().map(|t| format!("{} {}", t.dtype().as_str(), t.layout())).collect();
    let site = user_site(site);
    invalid.found = format!("{} (called as {}({}) at {site})", invalid.found, name, tensors.join("; "));
    Error::Invalid(invalid)
}
