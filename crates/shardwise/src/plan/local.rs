//! What a rank holds of a tensor, as a tensor of its own.

use crate::autograd::first_derivative_only;
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::mesh::Mesh;
use crate::placement::Placement;
use crate::tensor::{Backward, DTensor, SaveForBackward, SavedTensors};

/// What this rank holds of a tensor, on a mesh of this rank alone. Pending reductions are carried out first.
///
/// Nothing else is communicated, in either direction: the gradient of the part becomes this rank's part of the gradient.
/// Where ranks hold copies and go on to compute different things with them, each has a gradient of its own.
///
/// ```
/// use shardwise::plan::collect_local_shard;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let x = DTensor::arange(0.0.. 3.0, DType::F64, &mesh, [Shard(0)])?.requires_grad();
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
    let settled = tensor.to_layout(&tensor.layout().settled())?;
    let alone = DeviceMesh::new(mesh.world(), Mesh::from_ranks([("local", 1)], vec![mesh.world().rank()])?)?;
    let local = settled.local();
    let part = DTensor::from_local_with_shape(local, &alone, [Placement::Replicate], local.dims())?;
    Ok(DTensor::recorded(vec![part], &[&settled], SaveForBackward::Nothing, || Box::new(LocalPart)).swap_remove(0))
}

/// The way back of [`collect_local_shard`].
struct LocalPart;

impl Backward for LocalPart {
    fn name(&self) -> &'static str {
        "collect_local_shard"
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        first_derivative_only(self.name())?;
        let whole = |gradient: &DTensor| -> Result<DTensor> {
            let local = gradient.redistribute([Placement::Replicate])?;
            Ok(DTensor::from_parts(saved.mesh(0), saved.layout(0).clone(), local.local().clone()))
        };
        Ok(vec![gradients[0].as_ref().map(whole).transpose()?])
    }
}
