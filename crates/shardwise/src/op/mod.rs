//! What an operator is ([`Op`]), and the dispatch that executes every operator: decide the layouts (cached per operator, input
//! layouts and types), redistribute the inputs, run the kernel on local tensors, record the call for the backward pass.

mod call_error;
mod anomaly;
mod autocast;
mod scope;
mod widening;
mod kernel_context;
mod input_transfer;
mod decision_cache;
mod dispatch;

pub use anomaly::detect_anomaly;
pub use autocast::autocast;
pub(crate) use autocast::{autocast_dtype, for_product, for_sum_with, loss_dtype, product_dtype, with_autocast};
pub(crate) use call_error::name_call;
pub use decision_cache::{CacheReport, cache_report};
pub use dispatch::apply;
pub(crate) use dispatch::{check_one_mesh, dispatch, dispatch_onto};
pub use kernel_context::KernelContext;
pub(crate) use scope::{ScopedRule, operators_in, with_rule};
pub use widening::Accumulation;

use std::any::Any;
use std::hash::Hash;

use candle_core::Tensor;

use crate::error::Result;
use crate::layout::{Layout, TensorMeta};
use crate::rule::{Decision, Signature};
use crate::tensor::{DTensor, SaveForBackward, SavedTensors};

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

    /// What the operator does with its operands: products take part in [`autocast()`], and most operators refuse f8.
    fn kind(&self) -> OpKind {
        OpKind::Arithmetic
    }

    /// In which type the kernel computes its term of an output that is `Partial` with a sum, mean or product.
    fn accumulation(&self) -> Accumulation {
        Accumulation::InF32
    }

    /// The number of elements in memory of a local output of this shape: fewer than all if it repeats elements by broadcasting.
    fn stored_elements(&self, _output: usize, local_shape: &[usize]) -> usize {
        local_shape.iter().product()
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
    /// # use shardwise::candle_core::Tensor;
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

/// What an operator does with its operands, see [`Op::kind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpKind {
    /// Computes with them in their types.
    Arithmetic,
    /// Sums products of them: inside of [`autocast()`] they are converted to half precision first.
    Product,
    /// Takes elements of any type, also of f8, which other operators refuse: it moves them, or decodes them itself.
    AnyType,
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
/// the gradients of the outputs (`None`: zero), with operators on distributed tensors. See [`Backward::run`](crate::tensor::Backward::run).
pub type GradientFn<O> = fn(&O, &SavedTensors<'_>, &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>>;

/// The sharding rule and the outputs of an operator, for inputs of certain shapes and types.
pub struct OpPlan {
    /// In which layouts it can run.
    pub signature: Signature,
    /// Global shape and type of each output.
    pub outputs: Vec<TensorMeta>,
}
