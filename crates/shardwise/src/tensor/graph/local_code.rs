//! Gradients through local code: code on candle tensors between a `to_local` and a `from_local`.
//!
//! Candle knows nothing of the tape of distributed tensors, but records its own graph for tensors that come from a variable. So
//! `to_local` of a tensor that has a gradient returns the result of a custom candle operation ([`ToLocalOp`]), called an exit,
//! and `from_local` searches the candle graph of its argument for exits. They become the inputs of one recorded call
//! ([`FromLocalBackward`]), whose backward pass runs candle's. The local tensor stays a plain candle tensor, so any code on
//! candle tensors works. The alternative, a tensor type for local code, would have to repeat all of candle's methods.
//!
//! Candle drops operands without elements from its graph. So a rank that holds no elements may not see what its local code
//! depends on. `from_local` is collective and shares this: exits have numbers, which are the same on all ranks.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, LazyLock, Weak};

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout as Strides, Shape, Tensor, TensorId, Var, WithDType};
use parking_lot::Mutex;

use crate::error::{ErrorKind, Result};
use crate::placement::{Placement, ReduceOp, is_linear};
use crate::rank_context::{rank_context, rank_context_if_alive};
use crate::tensor::{Backward, DTensor, SaveForBackward, SavedTensors, is_recording};
use shardwise_kernels::{contiguous, with_stored_type};

/// A `to_local` call: the local part of a tensor leaves the distributed graph for local code.
pub(in crate::tensor) struct LocalExit {
    /// The candle variable that marks the exit in candle's graph.
    mark: TensorId,
    /// Position among the exits of this rank's program: the same on all ranks.
    number: u64,
    tensor: DTensor,
    /// Placements of the gradient of the local part, if they were given.
    grad_placements: Option<Vec<Placement>>,
    /// The gradient of the local part, stored here by candle's backward pass.
    gradient: Mutex<Option<Tensor>>,
}

/// All exits that are alive, by their marks.
static EXITS: LazyLock<Mutex<HashMap<TensorId, Weak<LocalExit>>>> = LazyLock::new(Mutex::default);

/// The exits of this rank by number.
#[derive(Default)]
struct LocalExits {
    next: u64,
    alive: BTreeMap<u64, Weak<LocalExit>>,
    /// The most recent exits without elements, kept alive here because candle's graph may have dropped them.
    empty: VecDeque<Arc<LocalExit>>,
}

/// How many exits without elements are kept alive: more than any local code has inputs between `to_local` and `from_local`.
const MAX_EMPTY_EXITS: usize = 256;

impl Drop for LocalExit {
    fn drop(&mut self) {
        EXITS.lock().remove(&self.mark);
        // An exit may be dropped by another thread, or as this one ends.
        let _ = rank_context_if_alive(|context| {
            context.local_exits.with(|exits: &mut LocalExits| exits.alive.remove(&self.number))
        });
    }
}

/// The operation in candle's graph. Its argument is the mark, its result the local part.
struct ToLocalOp(Arc<LocalExit>);

impl CustomOp1 for ToLocalOp {
    fn name(&self) -> &'static str {
        "to_local"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Strides) -> candle_core::Result<(CpuStorage, Shape)> {
        let local = contiguous(self.0.tensor.local()).map_err(candle_core::Error::wrap)?;
        let storage = with_stored_type!(local.dtype(), T => {
            let elements: Vec<T> = if local.elem_count() == 0 { Vec::new() } else { local.flatten_all()?.to_vec1()? };
            T::to_cpu_storage_owned(elements)
        }, otherwise unreachable!("tensors of a mesh have served types"));
        Ok((storage, local.shape().clone()))
    }

    /// Stores the gradient in the exit, where `FromLocalBackward` reads it.
    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        *self.0.gradient.lock() = Some(gradient.clone());
        Ok(None)
    }
}

/// Copies the local part of a tensor that has a gradient, as an exit in candle's graph.
pub(in crate::tensor) fn leave(tensor: &DTensor, grad_placements: Option<Vec<Placement>>) -> Result<Tensor> {
    let mark = Var::zeros((), DType::F32, &Device::Cpu)?;
    let count = |exits: &mut LocalExits| {
        exits.next += 1;
        exits.next
    };
    let number = rank_context(|context| context.local_exits.with(count));
    let tensor = tensor.clone();
    let exit = Arc::new(LocalExit { mark: mark.id(), number, tensor, grad_placements, gradient: Mutex::new(None) });
    EXITS.lock().insert(mark.id(), Arc::downgrade(&exit));
    let keep = |exits: &mut LocalExits| {
        exits.alive.insert(number, Arc::downgrade(&exit));
        if exit.tensor.local().elem_count() > 0 {
            return None;
        }
        exits.empty.push_back(Arc::clone(&exit));
        if exits.empty.len() > MAX_EMPTY_EXITS { exits.empty.pop_front() } else { None }
    };
    let oldest = rank_context(|context| context.local_exits.with(keep));
    // Dropped outside of the closure: its drop removes it from the same map.
    drop(oldest);
    Ok(mark.as_tensor().apply_op1(ToLocalOp(exit))?)
}

/// The exits that a local tensor was computed from, by number.
pub(in crate::tensor) fn exits_behind(local: &Tensor) -> Vec<Arc<LocalExit>> {
    if !is_recording() || !local.dtype().is_float() {
        return Vec::new();
    }
    let nodes = local.sorted_nodes();
    let marks: Vec<TensorId> = nodes.iter().filter(|node| node.is_variable()).map(|node| node.id()).collect();
    if marks.is_empty() {
        return Vec::new();
    }
    let exits = EXITS.lock();
    let mut found: Vec<Arc<LocalExit>> = marks.iter().filter_map(|mark| exits.get(mark)?.upgrade()).collect();
    // Unlocked first: an exit that is dropped takes the lock.
    drop(exits);
    // The order in candle's graph depends on the traversal; the order of numbers is the same on all ranks.
    found.sort_by_key(|exit| exit.number);
    found
}

/// The numbers of exits, as elements of a tensor.
pub(in crate::tensor) fn numbers(exits: &[Arc<LocalExit>]) -> Vec<i64> {
    exits.iter().map(|exit| exit.number as i64).collect()
}

/// The exits of this rank with these numbers, which other ranks found.
pub(in crate::tensor) fn exits_numbered(mut numbers: Vec<i64>) -> Vec<Arc<LocalExit>> {
    numbers.sort_unstable();
    numbers.dedup();
    let find = |exits: &mut LocalExits| {
        numbers.iter().filter_map(|&number| exits.alive.get(&(number as u64))?.upgrade()).collect()
    };
    rank_context(|context| context.local_exits.with(find))
}

/// Records the local code between `exits` and the tensor `output`, which was built from `local`.
pub(in crate::tensor) fn enter(
    output: DTensor,
    local: &Tensor,
    exits: Vec<Arc<LocalExit>>,
    grad_placements: Option<Vec<Placement>>,
) -> Result<DTensor> {
    if exits.is_empty() {
        return Ok(output);
    }
    let linear = |p: &Placement| p.reduction().is_none_or(is_linear);
    if !output.placements().iter().all(linear) {
        return Err(ErrorKind::Layout.error(
            "placements",
            format!("from_local of a tensor with a gradient as {}", output.layout()),
            "sums and means, whose gradient every rank knows",
            "reduce before from_local, or detach the local tensor",
        ));
    }
    let inputs: Vec<DTensor> = exits.iter().map(|exit| exit.tensor.clone()).collect();
    let inputs: Vec<&DTensor> = inputs.iter().collect();
    let grad_placements = grad_placements.unwrap_or_else(|| output.layout().reduced().placements().to_vec());
    let placements = output.placements().to_vec();
    let backward = || {
        Box::new(FromLocalBackward { exits, local: local.clone(), placements, grad_placements }) as Box<dyn Backward>
    };
    Ok(DTensor::recorded(vec![output], &inputs, SaveForBackward::Nothing, backward).swap_remove(0))
}

/// The backward pass of local code, from one `from_local` to its exits.
struct FromLocalBackward {
    exits: Vec<Arc<LocalExit>>,
    local: Tensor,
    /// Placements of the output.
    placements: Vec<Placement>,
    /// Placements of the gradient that local code receives.
    grad_placements: Vec<Placement>,
}

impl Backward for FromLocalBackward {
    fn name(&self) -> &'static str {
        "from_local"
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
        if is_recording() {
            let found = "the gradient of the gradient of local code";
            let fix = "use backward, or operators of distributed tensors";
            return Err(ErrorKind::Gradient.error("gradient", found, "a first derivative", fix));
        }
        let gradient = gradient.redistribute(self.grad_placements.iter().cloned())?;
        // Each of the n terms of a mean contributes 1/n.
        let mean = |(p, &n): (&Placement, &usize)| if *p == Placement::Partial(ReduceOp::Avg) { n } else { 1 };
        let share: usize = self.placements.iter().zip(gradient.device_mesh().shape()).map(mean).product();
        if gradient.local().dims() != self.local.dims() {
            let found = format!("grad_placements that give this rank {:?}", gradient.local().dims());
            let needed = format!("{:?}, the shape of the local tensor", self.local.dims());
            return Err(ErrorKind::Gradient.error(
                "gradient",
                found,
                needed,
                "correct the grad_placements of from_local",
            ));
        }
        self.exits.iter().for_each(|exit| *exit.gradient.lock() = None);
        // The gradients arrive in the exits; the returned store has nothing else that is needed.
        let mut of_local = gradient.local().clone();
        if share > 1 {
            let share = Tensor::new(share as f64, of_local.device())?.to_dtype(of_local.dtype())?;
            of_local = of_local.broadcast_div(&share)?;
        }
        (&self.local * of_local)?.sum_all()?.backward()?;
        let input_gradient = |(i, exit): (usize, &Arc<LocalExit>)| -> Result<Option<DTensor>> {
            if !saved.needs_input_grad(i) {
                return Ok(None);
            }
            let local = match exit.gradient.lock().take() {
                Some(local) => contiguous(&local.detach())?,
                // Only another rank's local code depends on this exit.
                None => exit.tensor.local().zeros_like()?,
            };
            Ok(Some(match &exit.grad_placements {
                Some(given) => DTensor::from_local_with_shape(&local, saved.mesh(i), given.clone(), saved.shape(i))?,
                None => DTensor::from_parts(saved.mesh(i), saved.layout(i).reduced(), local),
            }))
        };
        self.exits.iter().enumerate().map(input_gradient).collect()
    }
}
