//! [`autocast`]: a scope in which products convert their operands to half precision.

use candle_core::DType;
use smallvec::SmallVec;

use crate::error::{ErrorKind, Result};
use crate::rank_context::{Phase, in_scope, rank_context};
use crate::tensor::{Backward, DTensor, SaveForBackward, SavedTensors};

/// Runs `body` with matrix products, convolutions and attention in half precision, as `torch.autocast`.
///
/// Inside, `matmul`, `mm`, `bmm`, `einsum`, `linear`, `addmm` and its kin, convolutions and `scaled_dot_product_attention` convert
/// their operands of f32, f16 and bf16 to `dtype` (bf16 or f16) and return that type; sums accumulate in f32. Operands are converted
/// before they are redistributed, so that half as many bytes move. Products with an operand of f64, and of integers, are computed as ever.
/// All other operators compute in the promoted type of their operands: a norm with f32 weights returns f32. Of half-precision operands,
/// `cross_entropy`, `nll_loss`, `mse_loss`, `l1_loss`, `smooth_l1_loss`, `bce_with_logits` and `kl_div` return f32.
///
/// The gradient of what was converted has the type of what was converted: f32 for parameters of f32. A backward pass computes in the types
/// of the forward pass, whether it runs inside or outside of the scope; so does an optimizer. [`DType::F32`] turns autocast off inside of
/// another scope.
///
/// Local: communicates nothing. Scopes nest; each rank enters its own, and all ranks must enter the same. Weights are converted for every
/// use; [`set_mixed_precision`](crate::nn::FsdpModule::set_mixed_precision) converts them once per step.
///
/// ```
/// use shardwise::{autocast, prelude::*};
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let x = DTensor::ones((4, 6), DType::F32, &mesh, [Replicate])?;
///     let w = DTensor::ones((8, 6), DType::F32, &mesh, [Shard(0)])?.requires_grad();
///     let y = autocast(DType::BF16, || x.linear(&w, None))?;
///     assert_eq!(y.dtype(), DType::BF16);
///     let gradients = y.to_dtype(DType::F32)?.sum_all()?.backward()?;
///     assert_eq!(gradients.get(&w)?.dtype(), DType::F32);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// Those of `body`, and [`ErrorKind::DType`] if `dtype` is not bf16, f16 or f32.
#[doc(alias = "torch.autocast")]
#[doc(alias = "torch.amp")]
pub fn autocast<R>(dtype: DType, body: impl FnOnce() -> Result<R>) -> Result<R> {
    match dtype {
        DType::BF16 | DType::F16 => with_autocast(Some(dtype), body),
        DType::F32 => with_autocast(None, body),
        _ => Err(ErrorKind::dtype(dtype).error(
            "element type of autocast",
            dtype.as_str(),
            "bf16 or f16, or f32 to turn it off",
            "use bf16; convert parameters with to_dtype for products in other types",
        )),
    }
}

/// Runs `body` with autocast to a type, or without.
pub(crate) fn with_autocast<R>(dtype: Option<DType>, body: impl FnOnce() -> R) -> R {
    in_scope(|context| context.autocast.replace(dtype), |context, before| context.autocast.set(before), body)
}

/// The type of the innermost [`autocast`] scope.
pub(crate) fn autocast_dtype() -> Option<DType> {
    rank_context(|context| context.autocast.get())
}

/// The type to which products convert now: backward passes and optimizers compute in the types that they are given.
fn active() -> Option<DType> {
    let is_forward = |context: &crate::rank_context::RankContext| {
        !context.is_in_gradient.get() && context.phase.get() != Phase::Update
    };
    rank_context(|context| context.autocast.get().filter(|_| is_forward(context)))
}

/// The type in which an operand of a product takes part in it.
pub(crate) fn product_dtype(dtype: DType) -> DType {
    let is_converted = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    active().filter(|_| is_converted).unwrap_or(dtype)
}

/// The type of a loss of operands of a type: f32 inside of a scope, where the operands are products that were rounded already.
pub(crate) fn loss_dtype(dtype: DType) -> DType {
    let is_half = matches!(dtype, DType::F16 | DType::BF16);
    if is_half && active().is_some() { DType::F32 } else { dtype }
}

/// An operand of a product in the type in which it takes part in it. Differentiable.
pub(crate) fn for_product(x: &DTensor) -> Result<DTensor> {
    let dtype = product_dtype(x.dtype());
    if dtype == x.dtype() {
        return Ok(x.clone());
    }
    let value = x.detach().to_dtype(dtype)?;
    Ok(DTensor::recorded(vec![value], &[x], SaveForBackward::Nothing, || Box::new(CastBackward)).swap_remove(0))
}

/// What is added to a product, such as a bias: in the type of the product where a scope chose that.
pub(crate) fn for_sum_with(product: &DTensor, x: &DTensor) -> Result<DTensor> {
    if product_dtype(x.dtype()) == product.dtype() { for_product(x) } else { Ok(x.clone()) }
}

/// The converted operands of a product, unless all of them have their types already or one is f64, which the product keeps.
pub(super) fn converted_operands(inputs: &[&DTensor]) -> Result<Option<SmallVec<[DTensor; 3]>>> {
    let stays = |x: &&DTensor| product_dtype(x.dtype()) == x.dtype();
    if active().is_none() || inputs.iter().all(stays) || inputs.iter().any(|x| x.dtype() == DType::F64) {
        return Ok(None);
    }
    inputs.iter().map(|x| for_product(x)).collect::<Result<_>>().map(Some)
}

/// The backward pass of a conversion. Unlike that of `to_dtype` it never reduces: a gradient that is a partial sum stays one, whose terms
/// are held in f32 and are reduced with the gradients of all parameters.
struct CastBackward;

impl Backward for CastBackward {
    fn name(&self) -> &'static str {
        "autocast"
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let converted = |g: &DTensor| match g.has_gradient() {
            true => g.to_dtype(saved.dtype(0)),
            false => g.with_terms_as(saved.dtype(0)),
        };
        Ok(vec![gradients[0].as_ref().map(converted).transpose()?])
    }
}
