//! Gradient clipping.

use candle_core::{Device, Tensor};

use crate::autograd::Gradients;
use crate::comm::{Phase, World};
use crate::error::{ErrorKind, Result};
use crate::module_scope::in_phase;
use crate::param::Param;
use crate::placement::ReduceOp;
use crate::tensor::DTensor;
use shardwise_kernels::{NormPartial, norm_partial};

/// Scales the gradients of some parameters so that their total norm is at most `max_norm`.
///
/// Returns the gradients in the layouts of their parameters, and the total norm before clipping. Gradients of other
/// parameters are returned unchanged. `norm_type` is the order of the norm: 2, or infinity for the largest element.
///
/// Collective: all ranks of the world must call it, since parameters may be on different meshes. Communicates what brings
/// gradients into the layouts of their parameters, and one number per rank. In a dry run the norm is NaN.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) without parameters, if `norm_type` or `max_norm` is out of range, or if there are
/// gradients but none belongs to the current value of one of the parameters.
///
/// ```
/// use shardwise::optim::clip_grad_norm;
/// use shardwise::param::Param;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let w = Param::new(&DTensor::ones(9, DType::F32, &mesh, [Shard(0)])?);
///     let gradients = w.get().mul_scalar(2.0)?.sum_all()?.backward()?;
///     let (clipped, norm) = clip_grad_norm(gradients, [&w], 3.0, 2.0)?;
///     assert_eq!(norm, 6.0);
///     let clipped = clipped.get(&w.get())?.full_tensor()?.to_vec1::<f32>()?;
///     assert!(clipped.iter().all(|g| (g - 1.0).abs() < 1e-5));
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "clip_grad_norm_")]
#[track_caller]
pub fn clip_grad_norm<'a>(
    gradients: Gradients,
    params: impl IntoIterator<Item = &'a Param>,
    max_norm: f64,
    norm_type: f64,
) -> Result<(Gradients, f64)> {
    let usable = norm_type > 0.0 && max_norm >= 0.0;
    if !usable {
        let found = format!("norm type {norm_type} and max_norm {max_norm}");
        return Err(ErrorKind::Optimizer.error(
            "norm",
            found,
            "a type above 0 and a norm from 0",
            "the usual type is 2",
        ));
    }
    let leaves: Vec<DTensor> = params.into_iter().map(Param::get).collect();
    let Some(world) = leaves.first().map(|leaf| leaf.device_mesh().world().clone()) else {
        return Err(ErrorKind::Optimizer.error("parameters", "none", "at least one", "name the parameters to clip"));
    };
    let (own, others) = split_own(gradients, &leaves)?;
    let own = own.in_param_layout()?;
    let total = in_phase(Phase::Update, || total_norm(&own, &world, norm_type))?;
    // PyTorch's constant, which keeps a zero norm from dividing by zero.
    let factor = max_norm / (total + 1e-6);
    // PyTorch multiplies always, so that a NaN norm makes all gradients NaN; so does this.
    let own = if factor < 1.0 || factor.is_nan() { in_phase(Phase::Update, || own.scale(factor))? } else { own };
    Ok((own.accumulate(others)?, total))
}

/// Clamps every element of the gradients of some parameters to `-clip_value..=clip_value`.
///
/// Returns the gradients in the layouts of their parameters; those of other parameters are returned unchanged.
///
/// Collective: gradients that are partial sums are reduced first.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if `clip_value` is negative or NaN, or if there are gradients but none belongs to the
/// current value of one of the parameters.
#[doc(alias = "clip_grad_value_")]
#[track_caller]
pub fn clip_grad_value<'a>(
    gradients: Gradients,
    params: impl IntoIterator<Item = &'a Param>,
    clip_value: f64,
) -> Result<Gradients> {
    if clip_value < 0.0 || clip_value.is_nan() {
        return Err(ErrorKind::Optimizer.error("clip value", clip_value, "a number from 0", "it bounds sizes"));
    }
    let leaves: Vec<DTensor> = params.into_iter().map(Param::get).collect();
    let (own, others) = split_own(gradients, &leaves)?;
    // Partial sums must be reduced first: clamping does not commute with adding.
    let own = own.in_param_layout()?;
    let clamp = |gradient: &DTensor| gradient.clamp(Some(-clip_value), Some(clip_value));
    let clamped = in_phase(Phase::Update, || own.map(clamp))?;
    clamped.accumulate(others)
}

/// Divides gradients into those of some parameters and those of other leaves.
///
/// # Errors
/// If there are gradients but none belongs to the parameters: these are of another model, or were replaced since.
#[track_caller]
pub(super) fn split_own(gradients: Gradients, leaves: &[DTensor]) -> Result<(Gradients, Gradients)> {
    let given = gradients.len();
    let (own, others) = gradients.split(leaves);
    if own.is_empty() && given > 0 {
        return Err(ErrorKind::Optimizer.error(
            "gradients",
            format!("{given} gradient(s), none of them of a parameter among the {} given ones", leaves.len()),
            "gradients of the current values of the parameters",
            "name the parameters of the model that computed the loss, and call get() on them anew in every forward pass",
        ));
    }
    Ok((own, others))
}

/// The norm of the gradients of all ranks together. Communicates one number per rank.
#[track_caller]
fn total_norm(gradients: &Gradients, world: &World, norm_type: f64) -> Result<f64> {
    let (power, op) = match norm_type {
        f64::INFINITY => (NormPartial::MaxAbs, ReduceOp::Max),
        p => (NormPartial::PowerSum(p), ReduceOp::Sum),
    };
    let mut size = 0.0;
    for gradient in gradients.iter().filter(|gradient| !world.is_dry() && is_first_holder(gradient)) {
        let part = norm_partial(gradient.local(), power)?;
        size = match power {
            NormPartial::MaxAbs if size >= part => size,
            NormPartial::MaxAbs => part,
            NormPartial::PowerSum(_) => size + part,
        };
    }
    let all = world.all_reduce(&Tensor::new(size, &Device::Cpu)?, op)?;
    if world.is_dry() {
        return Ok(f64::NAN);
    }
    let all = all.to_scalar::<f64>()?;
    Ok(if norm_type.is_finite() { all.powf(1.0 / norm_type) } else { all })
}

/// Whether this rank is the first of the ranks that hold the same shard, so that every element is counted once.
fn is_first_holder(tensor: &DTensor) -> bool {
    let coordinate = tensor.device_mesh().my_coordinate();
    let mut axes = coordinate.iter().flatten().zip(tensor.placements());
    coordinate.is_some() && axes.all(|(&at, placement)| at == 0 || !placement.is_replicate())
}
