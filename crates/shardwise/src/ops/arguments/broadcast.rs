//! Broadcasting of shapes.

use smallvec::SmallVec;

use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorMeta;

fn shape_mismatch(name: &str, shapes: &[&[usize]]) -> Error {
    ErrorKind::shape(shapes[0]).error(
        "operands",
        format!("shapes {shapes:?} in {name}"),
        "shapes that are equal or 1 in every dimension, counted from the last",
        "reshape or expand the tensors",
    )
}

/// The shape that these shapes broadcast to, `None` if they do not broadcast.
pub(in crate::ops) fn broadcast_shape(shapes: &[&[usize]]) -> Option<SmallVec<[usize; 6]>> {
    let ndim = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut met: SmallVec<[usize; 6]> = SmallVec::from_elem(1, ndim);
    for shape in shapes {
        for (out, &n) in met[ndim - shape.len()..].iter_mut().zip(*shape) {
            if *out == 1 {
                *out = n;
            } else if n != *out && n != 1 {
                return None;
            }
        }
    }
    Some(met)
}

/// Returns the shape that tensors of these shapes broadcast to. Local.
///
/// # Errors
/// If two sizes of a dimension, counted from the last, differ and none is 1.
pub fn broadcast_shapes(shapes: &[&[usize]]) -> Result<Vec<usize>> {
    broadcast_shape(shapes).map(SmallVec::into_vec).ok_or_else(|| shape_mismatch("broadcast_shapes", shapes))
}

/// The shape that the inputs of an operator broadcast to, or an error that names the operator.
pub(in crate::ops) fn broadcast(name: &str, inputs: &[TensorMeta]) -> Result<Vec<usize>> {
    let shapes: Vec<&[usize]> = inputs.iter().map(|m| m.shape.as_slice()).collect();
    broadcast_shape(&shapes).map(SmallVec::into_vec).ok_or_else(|| shape_mismatch(name, &shapes))
}
