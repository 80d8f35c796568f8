//! Named parameters in every kind of layout, with gradients whose elements are known.

use candle_core::{DType, Tensor};
use shardwise::Param;
use shardwise::optim::{Adadelta, Adagrad, Adam, AdamW, Adamax, Algorithm, Asgd, Lion, NAdam, RAdam, RmsProp, Sgd};
use shardwise::prelude::*;

use crate::values;

/// Every elementwise optimizer, with each combination of its options that selects another formula.
pub fn algorithms() -> Vec<Algorithm> {
    let (sgd, rms) = (Sgd { weight_decay: 0.1, ..Sgd::default() }, RmsProp { weight_decay: 0.1, ..RmsProp::default() });
    let adam = Adam { weight_decay: 0.1, ..Adam::default() };
    vec![
        sgd.into(),
        Sgd { momentum: 0.9, dampening: 0.3, ..sgd }.into(),
        Sgd { momentum: 0.9, nesterov: true, ..sgd }.into(),
        Adagrad { lr_decay: 0.1, weight_decay: 0.1, initial_accumulator_value: 0.5, ..Adagrad::default() }.into(),
        adam.into(),
        Adam { amsgrad: true, betas: (0.5, 0.7), ..adam }.into(),
        AdamW::default().into(),
        AdamW { amsgrad: true, betas: (0.5, 0.7), ..AdamW::default() }.into(),
        rms.into(),
        RmsProp { momentum: 0.9, ..rms }.into(),
        RmsProp { centered: true, ..rms }.into(),
        RmsProp { momentum: 0.9, centered: true, ..rms }.into(),
        Adadelta { weight_decay: 0.1, ..Adadelta::default() }.into(),
        Adamax { weight_decay: 0.1, ..Adamax::default() }.into(),
        NAdam { weight_decay: 0.1, ..NAdam::default() }.into(),
        NAdam { weight_decay: 0.1, decoupled_weight_decay: true, ..NAdam::default() }.into(),
        // Five steps are without the second moment, or with it from the second one on.
        RAdam { weight_decay: 0.1, ..RAdam::default() }.into(),
        RAdam { weight_decay: 0.1, decoupled_weight_decay: true, betas: (0.6, 0.96), ..RAdam::default() }.into(),
        Asgd { weight_decay: 0.1, ..Asgd::default() }.into(),
        Asgd { lambd: 0.1, alpha: 0.5, t0: 1.0, ..Asgd::default() }.into(),
        Lion { weight_decay: 0.1, ..Lion::default() }.into(),
    ]
}

/// Shapes of parameters, each with its placements on a 2 x 2 mesh.
pub fn layouts() -> Vec<(Vec<usize>, [Placement; 2])> {
    vec![
        (vec![5, 3], [Shard(0), Shard(1)]),
        (vec![7], [Shard(0), Shard(0)]),
        (vec![7, 2], [Placement::ragged(0, [5, 2]), Replicate]),
        (vec![9, 2], [Replicate, Placement::StridedShard { dim: 0, split_factor: 3 }]),
        (vec![3, 40], [Replicate, Replicate]),
        (vec![], [Replicate, Replicate]),
        (vec![4], [Partial(ReduceOp::Sum), Replicate]),
        (vec![0, 3], [Shard(0), Replicate]),
        (vec![1], [Shard(0), Shard(0)]),
    ]
}

/// Placements of the gradient at step `t`: partial sums, sharded with a partial sum, or replicated.
pub fn gradient_placements(shape: &[usize], t: usize) -> [Placement; 2] {
    match (t % 3, shape.is_empty()) {
        (0, _) => [Partial(ReduceOp::Sum), Partial(ReduceOp::Sum)],
        (1, false) => [Shard(0), Partial(ReduceOp::Sum)],
        _ => [Replicate, Replicate],
    }
}

/// Element `flat` of parameter `i` before the first step.
pub fn initial_value(i: usize, flat: usize) -> f64 {
    values::value(flat + 100 * i) / 16.0
}

/// Element `flat` of the gradient of parameter `i` at step `t`.
pub fn gradient_value(i: usize, t: usize, flat: usize) -> f64 {
    values::value(flat + 1000 * t + 100 * i + 17)
}

/// A tensor in any layout whose elements are a function of their row-major index.
pub fn tensor(
    mesh: &DeviceMesh,
    shape: &[usize],
    placed: &[Placement],
    dtype: DType,
    f: &dyn Fn(usize) -> f64,
) -> Result<DTensor> {
    let layout = Layout::new(mesh.mesh(), shape, placed.to_vec())?;
    let local = values::local_of(&layout, mesh.world().rank(), 0, f).to_dtype(dtype)?;
    DTensor::from_local_with_shape(&local, mesh, placed.to_vec(), shape)
}

/// One parameter per entry of `layouts`, on `mesh`.
pub fn params(mesh: &DeviceMesh, layouts: &[(Vec<usize>, Vec<Placement>)]) -> Result<Vec<Param>> {
    let one = |(i, (shape, placed)): (usize, &(Vec<usize>, Vec<Placement>))| {
        Ok(Param::new(&tensor(mesh, shape, placed, DType::F64, &|flat| initial_value(i, flat))?))
    };
    layouts.iter().enumerate().map(one).collect()
}

/// The parameters with the names `p0`, `p1`, ...
pub fn named(params: &[Param]) -> Vec<(String, Param)> {
    params.iter().enumerate().map(|(i, param)| (format!("p{i}"), param.clone())).collect()
}

/// The gradients of step `t`, in layouts that change from step to step (see [`gradient_placements`]).
pub fn gradients(params: &[Param], t: usize) -> Result<Gradients> {
    let mut all: Option<Gradients> = None;
    for (i, param) in params.iter().enumerate() {
        let leaf = param.get();
        let placed = match leaf.placements().len() {
            2 => gradient_placements(leaf.shape(), t).to_vec(),
            _ => vec![Partial(ReduceOp::Sum)],
        };
        let cotangent =
            tensor(leaf.device_mesh(), leaf.shape(), &placed, leaf.dtype(), &|flat| gradient_value(i, t, flat))?;
        let one = leaf.backward_from(&cotangent)?;
        all = Some(match all {
            Some(all) => all.accumulate(one)?,
            None => one,
        });
    }
    Ok(all.unwrap())
}

/// The elements as f64, in row-major order.
pub fn numbers(t: &Tensor) -> Vec<f64> {
    if t.elem_count() == 0 {
        return Vec::new();
    }
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The elements of every full parameter. Collective.
pub fn full_values(params: &[Param]) -> Result<Vec<Vec<f64>>> {
    params.iter().map(|param| Ok(numbers(&param.get().full_tensor()?))).collect()
}

/// A mesh of this rank only.
pub fn single_rank_mesh(world: &World) -> Result<DeviceMesh> {
    world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)
}

/// [`layouts`] as [`params`] takes them.
pub fn sharded_layouts() -> Vec<(Vec<usize>, Vec<Placement>)> {
    layouts().into_iter().map(|(shape, placed)| (shape, placed.to_vec())).collect()
}

/// The shapes of [`layouts`] on a mesh of one axis, replicated: the one-device run.
pub fn replicated_layouts() -> Vec<(Vec<usize>, Vec<Placement>)> {
    layouts().into_iter().map(|(shape, _)| (shape, vec![Replicate])).collect()
}
