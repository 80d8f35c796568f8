//! Forward-mode derivatives, by differentiating the gradient, which is linear in its cotangent.

use super::backward_pass;
use crate::comm::Phase;
use crate::error::{ErrorKind, Result};
use crate::module_scope::in_phase;
use crate::tensor::{DTensor, Tape, constants_before, linearizing, next_number, with_constants_before, with_recording};

/// Computes `f(primals)` and its derivative in the direction `tangents`: the Jacobian-vector product. PyTorch's `torch.func.jvp`.
///
/// Returns the outputs of `f` and their tangents, without gradients of their own. Tensors that `f` captures, such as parameters, are
/// constants. Each tangent has the shape of its primal, in any layout.
///
/// Collective if `f` communicates or its gradients do. Takes about as long as two backward passes: the gradient of `f` is linear in the
/// cotangents, and its derivative with respect to them, applied to the tangents, is the product. Saves what one backward pass saves.
///
/// ```
/// use shardwise::jvp;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let x = DTensor::arange(1.0..4.0, DType::F64, &mesh, [Shard(0)])?;
///     let direction = DTensor::ones(3, DType::F64, &mesh, [Replicate])?;
///     let (y, slope) = jvp(|x| Ok(vec![x[0].square()?]), &[&x], &[&direction])?;
///     assert_eq!(y[0].full_tensor()?.to_vec1::<f64>()?, [1.0, 4.0, 9.0]);
///     assert_eq!(slope[0].full_tensor()?.to_vec1::<f64>()?, [2.0, 4.0, 6.0]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if there is not one tangent per primal, of its shape and on its mesh, a primal is of an
/// integer type, an operator of `f` has a gradient that cannot be differentiated, which the error names, or `f` calls `jvp`.
#[doc(alias = "torch.func.jvp")]
#[doc(alias = "forward_ad")]
#[track_caller]
pub fn jvp(
    f: impl FnOnce(&[DTensor]) -> Result<Vec<DTensor>>,
    primals: &[&DTensor],
    tangents: &[&DTensor],
) -> Result<(Vec<DTensor>, Vec<DTensor>)> {
    check(primals, tangents)?;
    let first = next_number();
    let inputs: Vec<DTensor> = primals.iter().map(|x| x.detach().requires_grad()).collect();
    let outputs = with_constants_before(first, || with_recording(true, || f(&inputs)))?;
    let cotangent = |y: &DTensor| {
        let placements = y.layout().reduced().placements().to_vec();
        Ok(DTensor::zeros(y.shape(), y.dtype(), y.device_mesh(), placements)?.requires_grad())
    };
    let cotangents = outputs.iter().map(cotangent).collect::<Result<Vec<_>>>()?;
    // Zeros, because the gradient is linear in them: of it, the recorded operators are needed, and not the value.
    let seeds = outputs.iter().zip(&cotangents).filter_map(|(y, u)| Some((y.tape()?.clone(), u.clone())));
    let seeds: Vec<(Tape, DTensor)> = seeds.collect();
    let pass = |seeds, first| backward_pass(seeds, first, false, None);
    let gradients = in_phase(Phase::Backward, || linearizing(|| with_recording(true, || pass(seeds, first))))?.leaves;
    let mut seeds: Vec<(Tape, DTensor)> = Vec::new();
    for (x, tangent) in inputs.iter().zip(tangents) {
        let found = x.tape().and_then(|tape| gradients.get(&tape.node.number));
        if let Some((gradient, tape)) = found.and_then(|(_, gradient)| Some((gradient, gradient.tape()?))) {
            seeds.push((tape.clone(), tangent.detach().to_dtype(gradient.dtype())?));
        }
    }
    let mut products = in_phase(Phase::Backward, || with_recording(false, || pass(seeds, 0)))?.leaves;
    let product = |u: &DTensor| match products.remove(&u.tape().expect("a leaf").node.number) {
        Some((_, product)) => Ok(product),
        None => Ok(u.detach()), // nothing that the output depends on has a tangent: zeros
    };
    let products = cotangents.iter().map(product).collect::<Result<Vec<_>>>()?;
    Ok((outputs.iter().map(DTensor::detach).collect(), products))
}

fn check(primals: &[&DTensor], tangents: &[&DTensor]) -> Result<()> {
    if constants_before() > 0 {
        let (found, fix) = ("jvp inside the function of another jvp", "use backward_graph for higher derivatives");
        return Err(ErrorKind::Gradient.error("derivative", found, "a first derivative", fix));
    }
    if primals.is_empty() || primals.len() != tangents.len() {
        let found = format!("{} primal(s) and {} tangent(s) in jvp", primals.len(), tangents.len());
        return Err(ErrorKind::Operands.error("operands", found, "one tangent per primal", "pass as many of both"));
    }
    for (x, tangent) in primals.iter().zip(tangents) {
        if !x.dtype().is_float() {
            let found = format!("a primal {} {} in jvp", x.dtype().as_str(), x.layout());
            let needed = "floating-point numbers";
            return Err(ErrorKind::dtype(x.dtype()).error("primal", found, needed, "let the function capture it"));
        }
        if x.shape() != tangent.shape() || x.device_mesh() != tangent.device_mesh() || !tangent.dtype().is_float() {
            let found = format!("{} {} for {} in jvp", tangent.dtype().as_str(), tangent.layout(), x.layout());
            let needed = "floating-point numbers of the same shape on the same mesh";
            return Err(ErrorKind::shape(tangent.shape()).error("tangent", found, needed, "reshape or convert it"));
        }
    }
    Ok(())
}
