//! Activation checkpointing: activations are recomputed in the backward pass instead of being saved.

use std::sync::Arc;

use candle_core::DType;

use super::{Replayed, backward_pass};
use crate::error::{Error, ErrorKind, Result};
use crate::op::{autocast_dtype, with_autocast};
use crate::random::{Generator, GeneratorState};
use crate::rank_context::rank_context;
use crate::tensor::first_derivative_only;
use crate::tensor::{
    Backward, DTensor, SaveForBackward, SavedTensors, in_gradient, is_recording, next_number, with_recording,
};

/// Runs `f` without saving its activations: `f` runs again in the backward pass. PyTorch's `torch.utils.checkpoint`.
///
/// Collective if `f` communicates, which it does again in the backward pass. `f` must compute the same both times; random draws
/// from the generators of the inputs' meshes are repeated exactly. Tensors that `f` captures, such as parameters, get their
/// gradients, too.
///
/// ```
/// use shardwise::prelude::*;
/// use shardwise::checkpoint_activations;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let x = DTensor::randn((4, 8), &mesh, [Shard(0)])?;
///     let w = DTensor::randn((8, 8), &mesh, [Replicate])?.requires_grad();
///     let inner = w.clone();
///     let y = checkpoint_activations(&[&x], move |x| Ok(vec![x[0].matmul(&inner)?.gelu()?.dropout(0.1, true)?]))?;
///     let grads = y[0].sum_all()?.backward()?;
///     assert_eq!(grads.get(&w)?.shape(), [8, 8]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] without inputs. The gradient of the gradient is refused in the backward pass.
#[doc(alias = "checkpoint")]
#[doc(alias = "torch.utils.checkpoint")]
#[doc(alias = "activation_checkpointing")]
#[track_caller]
pub fn checkpoint_activations(
    inputs: &[&DTensor],
    f: impl Fn(&[DTensor]) -> Result<Vec<DTensor>> + Send + Sync + 'static,
) -> Result<Vec<DTensor>> {
    let first = inputs.first().ok_or_else(|| {
        ErrorKind::Operands.error::<Error>(
            "checkpoint",
            "no inputs",
            "at least one tensor",
            "pass the tensors that it works on",
        )
    })?;
    let draws = inputs.iter().map(|t| t.device_mesh().generator().state()).collect();
    let plain: Vec<DTensor> = inputs.iter().map(|t| t.detach()).collect();
    if !is_recording() {
        return f(&plain);
    }
    // Tensors that `f` captures may need a gradient even if no input does: an extra leaf puts the call into the graph.
    let anchor = first.detach().requires_grad();
    let outputs = with_recording(false, || f(&plain))?;
    let outputs = outputs.iter().map(DTensor::detach).collect();
    let all: Vec<&DTensor> = std::iter::once(&anchor).chain(inputs.iter().copied()).collect();
    Ok(DTensor::recorded(outputs, &all, SaveForBackward::Inputs, || {
        Box::new(CheckpointBackward { f: Arc::new(f), draws, autocast: autocast_dtype() })
    }))
}

/// The backward pass of a checkpointed function: runs it again, recorded, and goes back through the recording.
struct CheckpointBackward<F> {
    f: Arc<F>,
    /// Per input the state of the generator of its mesh before the first run.
    draws: Vec<GeneratorState>,
    /// The scope of [`autocast`](crate::autocast) of the first run.
    autocast: Option<DType>,
}

impl<F: Fn(&[DTensor]) -> Result<Vec<DTensor>> + Send + Sync> Backward for CheckpointBackward<F> {
    fn name(&self) -> &'static str {
        "checkpoint"
    }

    fn recomputes(&self) -> bool {
        true
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        first_derivative_only(self.name())?;
        // Input 0 is the anchor.
        let generators: Vec<&Generator> = (1..saved.num_inputs()).map(|i| saved.mesh(i).generator()).collect();
        let now: Vec<GeneratorState> = generators.iter().map(|g| g.state()).collect();
        generators.iter().zip(&self.draws).for_each(|(g, draws)| g.set_state(*draws));
        let first = next_number();
        let leaf = |i: usize| {
            if saved.needs_input_grad(i) { saved.input(i).detach().requires_grad() } else { saved.input(i).detach() }
        };
        let inputs: Vec<DTensor> = (1..saved.num_inputs()).map(leaf).collect();
        let again = || with_recording(true, || (self.f)(&inputs));
        let outputs = in_gradient(false, || with_autocast(self.autocast, again));
        generators.iter().zip(now).for_each(|(g, now)| g.set_state(now));
        let outputs = outputs?;
        let seeds = outputs.iter().zip(gradients).filter_map(|(y, g)| Some((y.tape()?.clone(), g.clone()?)));
        let mut found = backward_pass(seeds.collect(), first, false, None)?;
        let of_inputs =
            inputs.iter().map(|x| x.tape().and_then(|t| found.leaves.remove(&t.node.number)).map(|(_, g)| g));
        let of_inputs: Vec<Option<DTensor>> = std::iter::once(None).chain(of_inputs).collect();
        let keep = |replayed: &mut Replayed| replayed.append(&mut found.earlier);
        rank_context(|context| context.replayed_gradients.with(keep));
        Ok(of_inputs)
    }
}
