//! The one entry point of all operators: decide, bring the inputs to their layouts, run the kernel, record the call.

use std::panic::Location;

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use super::anomaly::{self, RecordedAt, in_backward_of, is_detecting};
use super::autocast::converted_operands;
use super::call_error::name_call;
use super::decision_cache::prepare_call;
use super::input_transfer::InputTransfer;
use super::widening::{convert_inputs, storage_types};
use super::{Gradient, GradientFn, KernelContext, Op, OpKind, scope};
use crate::comm::{Origin, SpanKind, begin_span, check_relabelling, record_implicit_operator};
use crate::error::{ErrorKind, Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::module_scope::with_reason;
use crate::tensor::{Backward, DTensor, SavedTensors, is_in_gradient, is_linearizing, is_recording};
use shardwise_kernels::{placeholder, same_storage};

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
/// use shardwise::candle_core::Tensor;
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
    if op.kind() == OpKind::Product
        && let Some(converted) = converted_operands(inputs)?
    {
        return execute(op, &converted.iter().collect::<SmallVec<[&DTensor; 3]>>(), site, None);
    }
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
/// Whether the sum is added depends only on layouts and types, so it is the same on all ranks; whether it is in place does not change
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
    fn take(self, output: &Layout, meta: &TensorMeta, storage: DType) -> Option<(DTensor, OntoKernel<'a>)> {
        let Self { sum, kernel, halves } = self;
        let fits = |sum: &mut DTensor| {
            let types = [sum.dtype(), meta.dtype, storage];
            let added = matches!(storage, DType::F32 | DType::F64) || halves && storage.is_float();
            sum.layout() == output && types.iter().all(|t| *t == sum.storage_for_kernel().dtype()) && added
        };
        let sum = if is_recording() || is_detecting() { None } else { sum.take_if(fits) };
        sum.map(|sum| (sum, kernel))
    }
}

fn execute<O: Op>(op: &O, inputs: &[&DTensor], site: Site, onto: Option<OntoSum<'_>>) -> Result<Vec<DTensor>> {
    check_one_mesh(op.name(), inputs, site)?;
    let mesh = inputs[0].device_mesh();
    let span = begin_span(SpanKind::Operator, op.name(), Some(site));
    let (prepared, call) = prepare_call(op, inputs).map_err(|e| name_call(e, op.name(), inputs, site))?;
    let (rank, dry) = (mesh.world().rank(), mesh.world().is_dry());
    let mut locals: SmallVec<[Tensor; 3]> = SmallVec::new();
    for ((input, transfer), why) in inputs.iter().zip(&prepared.transfers).zip(&prepared.why_moved) {
        let run = || {
            if let Some(to) = transfer.layout().filter(|to| *to != input.layout()) {
                check_relabelling(op.name(), input.layout(), to, rank, site)?;
            }
            record_implicit_operator(op.name(), || transfer.run(&input.detach(), dry, site))
        };
        locals.push(match (transfer, why) {
            (InputTransfer::Ready, _) => input.storage_for_kernel().clone(),
            (_, Some(why)) => with_reason(why, run)?,
            (_, None) => run()?,
        });
    }
    if dry {
        scope::note(op.name());
        let given: SmallVec<[&[usize]; 3]> = locals.iter().map(Tensor::dims).collect();
        let made: SmallVec<[&[usize]; 3]> = prepared.locals.iter().map(|m| m.shape.as_slice()).collect();
        mesh.world().flops().add(op.flops(&given, &made));
    }
    span.fill(|span| {
        span.inputs = inputs.iter().map(|input| input.layout().clone()).collect();
        span.outputs = prepared.decision.outputs.to_vec();
        let dims = |tensors: &[Tensor]| tensors.iter().map(|t| t.dims().to_vec()).collect::<Vec<_>>();
        let (given, made) = (dims(&locals), prepared.locals.iter().map(|m| m.shape.as_slice()).collect::<Vec<_>>());
        span.flops = op.flops(&given.iter().map(Vec::as_slice).collect::<Vec<_>>(), &made);
    });
    let storage = storage_types(op.accumulation(), inputs, &locals, &prepared.decision.outputs, &prepared.locals);
    let outputs = &prepared.decision.outputs;
    let onto = onto.and_then(|onto| onto.take(outputs.first()?, prepared.locals.first()?, *storage.first()?));
    let computes = !dry && mesh.contains(rank);
    let outputs = match !computes {
        true => {
            let shapes = prepared.locals.iter().zip(&storage);
            shapes
                .map(|(m, &storage)| Ok(placeholder(&TensorMeta::new(m.shape.as_slice(), storage))?))
                .collect::<Result<Vec<_>>>()?
        }
        false => {
            let place = KernelContext {
                decision: &prepared.decision,
                locals: &prepared.locals,
                storage_types: &storage,
                mesh: mesh.mesh(),
                rank,
            };
            convert_inputs(op.accumulation(), inputs, &mut locals, &storage, &prepared.locals)?;
            let made = match &onto {
                None => op.run(&locals, &place),
                Some((sum, kernel)) => kernel(sum.storage_for_kernel(), sum.is_exclusive(), &locals, &place),
            };
            let made = made.and_then(|made| checked_results(made, &prepared.locals, &storage));
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
        let stored = op.stored_elements(index, local.dims());
        let mut output = DTensor::from_repeated(stored, mesh, layout.clone(), local, meta.dtype, origin)?;
        output.set_why(prepared.why[index].as_ref());
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
        // What is recorded is linear in the gradients that arrive: leaving out a part of it would be wrong.
        Gradient::NotDifferentiable if is_linearizing() && outputs.iter().any(|y| y.dtype().is_float()) => {
            let found = format!("the gradient of {}, which cannot be differentiated itself", op.name());
            let needed = "operators whose gradients are differentiable";
            let error = ErrorKind::Gradient.error("gradient", found, needed, "leave the operator out of jvp");
            Err(name_call(error, op.name(), inputs, site))
        }
        Gradient::NotDifferentiable => Ok(outputs),
    }
}

/// Per output whether it uses memory of an input or of another output; such an input is no longer exclusive.
fn shared_memory(inputs: &[&DTensor], locals: &[Tensor], outputs: &[Tensor]) -> SmallVec<[bool; 3]> {
    let shared = |(index, output): (usize, &Tensor)| {
        let mut shares = outputs[..index].iter().any(|other| same_storage(output, other));
        for (input, local) in inputs.iter().zip(locals) {
            if same_storage(output, local) {
                input.storage();
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

/// Converts the results of a kernel to the types in which they are stored, and fails if their number, shapes or types are not
/// those of the output layouts. If one output is stored in a wider type, the kernel may have computed all outputs in it.
fn checked_results(mut made: Vec<Tensor>, locals: &[TensorMeta], storage: &[DType]) -> Result<Vec<Tensor>> {
    let wide = locals.iter().zip(storage).any(|(m, storage)| m.dtype != *storage);
    if wide {
        for (tensor, storage) in made.iter_mut().zip(storage) {
            if tensor.dtype() != *storage && tensor.dtype().is_float() && storage.is_float() {
                *tensor = tensor.to_dtype(*storage)?;
            }
        }
    }
    let fits = |((t, m), storage): ((&Tensor, &TensorMeta), &DType)| t.dims() == m.shape && t.dtype() == *storage;
    if made.len() == locals.len() && made.iter().zip(locals).zip(storage).all(fits) {
        return Ok(made);
    }
    let found = made.iter().map(|t| format!("{} {:?}", t.dtype().as_str(), t.dims())).collect::<Vec<_>>().join(", ");
    let needed = locals.iter().map(|m| format!("{} {:?}", m.dtype.as_str(), m.shape)).collect::<Vec<_>>().join(", ");
    Err(ErrorKind::Operands.error("local results", found, needed, "correct the kernel, or the rule that it runs under"))
}

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
        let _span = begin_span(SpanKind::Gradient, self.name(), None);
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
