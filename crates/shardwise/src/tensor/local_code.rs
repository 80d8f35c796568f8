//! Local code in the middle of a distributed program, with gradients: out with `to_local`, on with candle, back in with
//! `from_local`.
//!
//! Candle knows nothing of the tape of distributed tensors, but keeps a graph of its own for tensors that come from a
//! variable. So the local part of a tensor that has a gradient leaves as the result of an operation of candle's graph
//! ([`Exit`]), and `from_local` looks for such operations in the graph of the tensor that it gets: they are the inputs of one
//! recorded call ([`LocalCode`]), whose backward pass is candle's own. A local tensor stays a plain candle tensor, so local code
//! is any code on candle tensors. The alternative, a tensor type for local code, would have needed all of candle's methods again.
//!
//! Candle forgets an operand where there are no elements. So a rank that holds nothing may not see what its local code depends on,
//! and `from_local`, which ranks call together, tells it: exits have numbers that count alike on all ranks.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, LazyLock, Weak};

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout as Strides, Shape, Tensor, TensorId, Var, WithDType};
use parking_lot::Mutex;

use super::{Backward, DTensor, Keeps, Saved, is_recording};
use crate::error::{ErrorKind, Result};
use crate::placement::{Placement, ReduceOp, is_linear};
use crate::rank_context::{rank_context, rank_context_if_alive};
use shardwise_kernels::{contiguous, with_type};

/// Where the local part of a tensor leaves for local code.
pub(super) struct Exit {
    /// The variable of candle's graph that marks it.
    mark: TensorId,
    /// How many exits this rank's program had before: the same on all ranks.
    number: u64,
    tensor: DTensor,
    /// Placements of the gradient that comes back, if they were given.
    grad_placements: Option<Vec<Placement>>,
    /// The gradient of the local part, as candle's backward pass reaches it.
    gradient: Mutex<Option<Tensor>>,
}

/// The exits that are part of some graph, by their marks.
static EXITS: LazyLock<Mutex<HashMap<TensorId, Weak<Exit>>>> = LazyLock::new(Mutex::default);

/// The exits of this rank, by number.
#[derive(Default)]
struct Numbered {
    next: u64,
    alive: BTreeMap<u64, Weak<Exit>>,
    /// The last exits without elements, which candle may have forgotten when they are asked for.
    empty: VecDeque<Arc<Exit>>,
}

/// More exits than local code has inputs between a `to_local` and the `from_local` after it.
const EMPTY_KEPT: usize = 256;

impl Drop for Exit {
    fn drop(&mut self) {
        EXITS.lock().remove(&self.mark);
        // An exit may be dropped by another thread, or as this one ends.
        let _ =
            rank_context_if_alive(|context| context.local_exits.with(|n: &mut Numbered| n.alive.remove(&self.number)));
    }
}

/// The operation of candle's graph. Its argument is the mark, its result the local part.
struct Leaving(Arc<Exit>);

impl CustomOp1 for Leaving {
    fn name(&self) -> &'static str {
        "to_local"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Strides) -> candle_core::Result<(CpuStorage, Shape)> {
        let local = contiguous(self.0.tensor.local()).map_err(candle_core::Error::wrap)?;
        let storage = with_type!(local.dtype(), T => {
            let elements: Vec<T> = if local.elem_count() == 0 { Vec::new() } else { local.flatten_all()?.to_vec1()? };
            T::to_cpu_storage_owned(elements)
        }, otherwise unreachable!("tensors of a mesh have served types"));
        Ok((storage, local.shape().clone()))
    }

    /// The gradient ends here; `LocalCode` fetches it.
    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        *self.0.gradient.lock() = Some(gradient.clone());
        Ok(None)
    }
}

/// A copy of the local part of a tensor that has a gradient, as part of a graph of candle's.
pub(super) fn leave(tensor: &DTensor, grad_placements: Option<Vec<Placement>>) -> Result<Tensor> {
    let mark = Var::zeros((), DType::F32, &Device::Cpu)?;
    let count = |numbered: &mut Numbered| {
        numbered.next += 1;
        numbered.next
    };
    let number = rank_context(|context| context.local_exits.with(count));
    let tensor = tensor.clone();
    let exit = Arc::new(Exit { mark: mark.id(), number, tensor, grad_placements, gradient: Mutex::new(None) });
    EXITS.lock().insert(mark.id(), Arc::downgrade(&exit));
    let keep = |numbered: &mut Numbered| {
        numbered.alive.insert(number, Arc::downgrade(&exit));
        if exit.tensor.local().elem_count() > 0 {
            return None;
        }
        numbered.empty.push_back(Arc::clone(&exit));
        if numbered.empty.len() > EMPTY_KEPT { numbered.empty.pop_front() } else { None }
    };
    let forgotten = rank_context(|context| context.local_exits.with(keep));
    // Outside: dropping it takes it out of the numbered ones.
    drop(forgotten);
    Ok(mark.as_tensor().apply_op1(Leaving(exit))?)
}

/// The exits that a local tensor was computed from.
pub(super) fn exits_behind(local: &Tensor) -> Vec<Arc<Exit>> {
    if !is_recording() || !local.dtype().is_float() {
        return Vec::new();
    }
    let nodes = local.sorted_nodes();
    let marks: Vec<TensorId> = nodes.iter().filter(|node| node.is_variable()).map(|node| node.id()).collect();
    if marks.is_empty() {
        return Vec::new();
    }
    let exits = EXITS.lock();
    let mut found: Vec<Arc<Exit>> = marks.iter().filter_map(|mark| exits.get(mark)?.upgrade()).collect();
    // An exit that was dropped in between takes the lock.
    drop(exits);
    // The order of candle's graph is that of a walk; the order of exits is the same on all ranks.
    found.sort_by_key(|exit| exit.number);
    found
}

/// The numbers of exits.
pub(super) fn numbers(exits: &[Arc<Exit>]) -> Vec<i64> {
    exits.iter().map(|exit| exit.number as i64).collect()
}

/// The exits of this rank with some of these numbers, as other ranks found them.
pub(super) fn exits_numbered(mut numbers: Vec<i64>) -> Vec<Arc<Exit>> {
    numbers.sort_unstable();
    numbers.dedup();
    let find = |numbered: &mut Numbered| {
        numbers.iter().filter_map(|&number| numbered.alive.get(&(number as u64))?.upgrade()).collect()
    };
    rank_context(|context| context.local_exits.with(find))
}

/// The tensor `made` of a local tensor, with the local code between some exits and it as part of the graph of gradients.
pub(super) fn enter(
    made: DTensor,
    local: &Tensor,
    exits: Vec<Arc<Exit>>,
    grad_placements: Option<Vec<Placement>>,
) -> Result<DTensor> {
    if exits.is_empty() {
        return Ok(made);
    }
    let linear = |p: &Placement| p.reduction().is_none_or(is_linear);
    if !made.placements().iter().all(linear) {
        return Err(ErrorKind::Layout.error(
            "placements",
            format!("from_local of a tensor with a gradient as {}", made.layout()),
            "sums and means, whose gradient every rank knows",
            "reduce before from_local, or detach the local tensor",
        ));
    }
    let inputs: Vec<DTensor> = exits.iter().map(|exit| exit.tensor.clone()).collect();
    let inputs: Vec<&DTensor> = inputs.iter().collect();
    let grad_placements = grad_placements.unwrap_or_else(|| made.layout().settled().placements().to_vec());
    let placements = made.placements().to_vec();
    let backward =
        || Box::new(LocalCode { exits, local: local.clone(), placements, grad_placements }) as Box<dyn Backward>;
    Ok(DTensor::recorded(vec![made], &inputs, Keeps::Nothing, backward).swap_remove(0))
}

/// From some exits to one `from_local`.
struct LocalCode {
    exits: Vec<Arc<Exit>>,
    local: Tensor,
    /// Of the output.
    placements: Vec<Placement>,
    /// Of the gradient that local code gets.
    grad_placements: Vec<Placement>,
}

impl Backward for LocalCode {
    fn name(&self) -> &'static str {
        "from_local"
    }

    fn run(&self, saved: &Saved<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.inputs()]) };
        if is_recording() {
            let found = "the gradient of the gradient of local code";
            let fix = "use backward, or operators of distributed tensors";
            return Err(ErrorKind::Gradient.error("gradient", found, "a first derivative", fix));
        }
        let gradient = gradient.redistribute(self.grad_placements.iter().cloned())?;
        // Every operand of a mean counts with its share.
        let mean = |(p, &n): (&Placement, &usize)| if *p == Placement::Partial(ReduceOp::Avg) { n } else { 1 };
        let share: usize = self.placements.iter().zip(gradient.device_mesh().shape()).map(mean).product();
        let gradient = if share > 1 { gradient.div_scalar(share as f64)? } else { gradient };
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
        // The exits take the gradients; candle's store of them has nothing else that counts.
        (&self.local * gradient.local())?.sum_all()?.backward()?;
        let back = |(i, exit): (usize, &Arc<Exit>)| -> Result<Option<DTensor>> {
            if !saved.wants(i) {
                return Ok(None);
            }
            let local = match exit.gradient.lock().take() {
                Some(local) => contiguous(&local.detach())?,
                // A tensor that another rank's local code depends on.
                None => exit.tensor.local().zeros_like()?,
            };
            Ok(Some(match &exit.grad_placements {
                Some(given) => DTensor::from_local_with_shape(&local, saved.mesh(i), given.clone(), saved.shape(i))?,
                None => DTensor::from_parts(saved.mesh(i), saved.layout(i).settled(), local),
            }))
        };
        self.exits.iter().enumerate().map(back).collect()
    }
}
