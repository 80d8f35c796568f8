//! The current mesh of a scope, for constructors without a mesh argument.

use super::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::rank_context::{RankContext, in_scope, rank_context};

/// Runs `body` with `mesh` as the current mesh, on which the constructors of
/// [`tensor::current_mesh`](crate::tensor::current_mesh) place tensors.
///
/// Local: the scope belongs to the calling rank. Scopes nest, and the innermost counts.
///
/// ```
/// use shardwise::prelude::*;
/// use shardwise::tensor::current_mesh;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let sum = with_mesh(&mesh, || {
///         let x = current_mesh::ones((4, 2), DType::F32, [Shard(0)])?;
///         let w = current_mesh::randn((2, 3), [Replicate])?;
///         x.matmul(&w)
///     })?;
///     assert_eq!(sum.shape(), [4, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "DeviceMesh.__enter__")]
#[doc(alias = "scope")]
pub fn with_mesh<R>(mesh: &DeviceMesh, body: impl FnOnce() -> Result<R>) -> Result<R> {
    let enter = |context: &RankContext| context.meshes.with(|meshes: &mut Vec<DeviceMesh>| meshes.push(mesh.clone()));
    in_scope(enter, |context, ()| drop(context.meshes.with(Vec::<DeviceMesh>::pop)), body)
}

/// Returns the mesh of the innermost [`with_mesh`] scope.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) outside of any scope.
#[doc(alias = "get_current_mesh")]
pub fn current_mesh() -> Result<DeviceMesh> {
    rank_context(|context| context.meshes.with(|meshes: &mut Vec<DeviceMesh>| meshes.last().cloned())).ok_or_else(
        || ErrorKind::Mesh.error("mesh", "none", "a mesh of the scope", "call this inside with_mesh, or pass the mesh"),
    )
}
