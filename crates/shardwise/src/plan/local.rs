//! `collect_local_shard`.

use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::mesh::Mesh;
use crate::placement::Placement;
use crate::tensor::first_derivative_only;
use crate::tensor::{Backward, DTensor, SaveForBackward, SavedTensors};

/// Returns this rank's local shard as a tensor on a mesh of this rank only.
///
/// Differentiable: the gradient of the result is this rank's local shard of the gradient. Where the tensor is replicated and
/// ranks compute different things with their copies, their gradients differ. Partial sums are reduced first, which is
/// collective; nothing else is communicated, in either direction.
///
/// ```
/// use shardwise::plan::collect_local_shard;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let x = DTensor::arange(0.0..3.0, DType::F64, &mesh, [Shard(0)])?.requires_grad();
///     let mine = collect_local_shard(&x)?;
///     assert_eq!(mine.shape(), [2 - world.rank()]);
///     let gradients = mine.square()?.sum_all()?.backward()?;
///     assert_eq!(gradients.get(&x)?.full_tensor()?.to_vec1::<f64>()?, [0.0, 2.0, 4.0]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "_collect_local_shard")]
#[doc(alias = "to_local")]
#[track_caller]
pub fn collect_local_shard(tensor: &DTensor) -> Result<DTensor> {
    let mesh = tensor.device_mesh();
    if mesh.size() == 1 {
        return Ok(tensor.clone());
    }
    let settled = tensor.to_layout(&tensor.layout().reduced())?;
    let alone = DeviceMesh::new(mesh.world(), Mesh::from_ranks([("local", 1)], vec![mesh.world().rank()])?)?;
    let local = settled.local();
    let part = DTensor::from_local_with_shape(local, &alone, [Placement::Replicate], local.dims())?;
    Ok(DTensor::recorded(vec![part], &[&settled], SaveForBackward::Nothing, || Box::new(CollectLocalShardBackward))
        .swap_remove(0))
}

/// The backward pass of [`collect_local_shard`].
struct CollectLocalShardBackward;

impl Backward for CollectLocalShardBackward {
    fn name(&self) -> &'static str {
        "collect_local_shard"
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        first_derivative_only(self.name())?;
        let to_shard = |gradient: &DTensor| -> Result<DTensor> {
            let local = gradient.redistribute([Placement::Replicate])?;
            Ok(DTensor::from_parts(saved.mesh(0), saved.layout(0).clone(), local.local().clone()))
        };
        Ok(vec![gradients[0].as_ref().map(to_shard).transpose()?])
    }
}
