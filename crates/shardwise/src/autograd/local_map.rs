//! `local_map`: a function of local tensors as one differentiable call.

use candle_core::{Tensor, Var};

use crate::error::{ErrorKind, Result};
use crate::placement::{Placement, ReduceOp};
use crate::tensor::first_derivative_only;
use crate::tensor::{Backward, DTensor, SaveForBackward, SavedTensors, is_recording, placements_hash};
use shardwise_kernels::contiguous;

/// Runs `f` on copies of the inputs' local parts, in their current layouts, and returns its result as a tensor with the given
/// placements. Candle differentiates `f` in the backward pass.
///
/// Collective: every rank of the mesh must call it, because ranks exchange the shapes of sharded results and agree on those of
/// other results; elements are not communicated. The gradient of an input has the layout of the input, replicated where it is
/// partial. Where ranks compute different things with a replicated input, each has one term of its gradient: pass `Partial(Sum)` for
/// it in `gradients`, PyTorch's `in_grad_placements`.
///
/// ```
/// use shardwise::local_map;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let x = DTensor::arange(0.0..4.0, DType::F32, &mesh, [Shard(0)])?.requires_grad();
///     let scale = DTensor::ones(1, DType::F32, &mesh, [Replicate])?.requires_grad();
///     let gradients = [None, Some(vec![Partial(ReduceOp::Sum)])];
///     let y = local_map(&[&x, &scale], [Shard(0)], &gradients, |x| x[0].sqr()?.broadcast_mul(&x[1]))?;
///     let found = y.sum_all()?.backward()?;
///     assert_eq!(found.get(&x)?.full_tensor()?.to_vec1::<f32>()?, [0.0, 2.0, 4.0, 6.0]);
///     assert_eq!(found.get(&scale)?.full_tensor()?.to_vec1::<f32>()?, [14.0]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) without inputs, if the results do not fit the placements, or if a differentiable
/// output has a partial placement other than a sum or a mean.
#[doc(alias = "in_grad_placements")]
#[track_caller]
pub fn local_map(
    inputs: &[&DTensor],
    placements: impl IntoIterator<Item = Placement>,
    gradients: &[Option<Vec<Placement>>],
    f: impl FnOnce(&[Tensor]) -> candle_core::Result<Tensor>,
) -> Result<DTensor> {
    let Some(first) = inputs.first() else {
        return Err(ErrorKind::Operands.error(
            "local_map",
            "no inputs",
            "at least one tensor",
            "pass the tensors that it works on",
        ));
    };
    if gradients.len() > inputs.len() {
        let found = format!("{} placements of gradients for {} inputs", gradients.len(), inputs.len());
        return Err(ErrorKind::Operands.error("local_map", found, "one per input at most", "leave some out"));
    }
    let mesh = first.device_mesh();
    let traced = is_recording() && inputs.iter().any(|t| t.has_gradient());
    let vars = match traced {
        true => inputs.iter().map(|t| Ok(Var::from_tensor(t.local())?)).collect::<Result<Vec<_>>>()?,
        false => Vec::new(),
    };
    let placements: Vec<Placement> = placements.into_iter().collect();
    let sums = |p: &Placement| !p.is_partial() || matches!(p, Placement::Partial(ReduceOp::Sum | ReduceOp::Avg));
    if traced && !placements.iter().all(sums) {
        let found = format!("an output with placements {placements:?} in local_map");
        let needed = "sums and means, whose gradient every rank knows";
        return Err(ErrorKind::Layout.error("placements", found, needed, "reduce inside, or run it in no_grad"));
    }
    let locals: Vec<Tensor> = match traced {
        true => vars.iter().map(|v| v.as_tensor().clone()).collect(),
        false => inputs.iter().map(|t| t.to_local()).collect::<Result<_>>()?,
    };
    let local = f(&locals)?;
    // Results that nothing shards have one shape, on which ranks agree; the sizes of shards are exchanged.
    let sharded = placements.iter().any(|p| p.shard_dim().is_some());
    let output = if sharded || !mesh.contains(mesh.world().rank()) {
        DTensor::from_local(&local.detach(), mesh, placements)?
    } else {
        let shape = local.dims().iter().map(|&n| n as u64);
        let form: Vec<u64> = [local.dtype() as u64, placements_hash(&placements)].into_iter().chain(shape).collect();
        mesh.whole_group()?.agree("element type, placements and shape", &form)?;
        DTensor::from_local_with_shape(&local.detach(), mesh, placements, local.dims())?
    };
    let wanted = |i: usize| gradients.get(i).cloned().flatten();
    let wanted = (0..inputs.len()).map(wanted).collect();
    let backward = || {
        Box::new(LocalMapBackward { vars, local, wanted, placements: output.placements().to_vec() })
            as Box<dyn Backward>
    };
    Ok(DTensor::recorded(vec![output.clone()], inputs, SaveForBackward::Nothing, backward).swap_remove(0))
}

/// The backward pass of `local_map`.
struct LocalMapBackward {
    vars: Vec<Var>,
    local: Tensor,
    /// Per input the placements of its gradient, if they were given.
    wanted: Vec<Option<Vec<Placement>>>,
    /// Placements of the output.
    placements: Vec<Placement>,
}

impl Backward for LocalMapBackward {
    fn name(&self) -> &'static str {
        "local_map"
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
        first_derivative_only(self.name())?;
        // Each term of a partial sum has the gradient of the sum.
        let replicated = |p: &Placement| if p.is_partial() { Placement::Replicate } else { p.clone() };
        let gradient = gradient.redistribute(self.placements.iter().map(replicated))?;
        let mean = |(p, &n): (&Placement, &usize)| if *p == Placement::Partial(ReduceOp::Avg) { n } else { 1 };
        let share: usize = self.placements.iter().zip(gradient.device_mesh().shape()).map(mean).product();
        let gradient = if share > 1 { gradient.div_scalar(share as f64)? } else { gradient };
        let found = (&self.local * gradient.local())?.sum_all()?.backward()?;
        let mut inputs = Vec::new();
        for (i, var) in self.vars.iter().enumerate() {
            if !saved.needs_input_grad(i) {
                inputs.push(None);
                continue;
            }
            let local = match found.get(var) {
                Some(local) => local.detach(),
                None => var.as_tensor().zeros_like()?,
            };
            inputs.push(Some(match self.wanted[i].clone() {
                Some(placements) => DTensor::from_local_with_shape(&local, saved.mesh(i), placements, saved.shape(i))?,
                None => DTensor::from_parts(saved.mesh(i), saved.layout(i).reduced(), contiguous(&local)?),
            }));
        }
        Ok(inputs)
    }
}
