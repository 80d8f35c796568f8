//! Gradients: of partial sums, in several types, of parameters sharded in several ways, and when weights are gathered for them.

use std::sync::Arc;

use shardwise::nn::{FsdpModule, Linear, MixedPrecision};
use shardwise::ops::LossOptions;
use shardwise::optim::clip_grad_norm;
use shardwise::plan::{FullyShard, ShardingPlanner, fully_shard, shard_module};
use shardwise::prelude::*;
use shardwise::{BackwardOptions, checkpoint_activations};

use super::{RANKS, all_elements, calls, counting, line, square};

pub(super) fn partial_gradients(world: &World) -> Result<String> {
    let mesh = line(world)?;
    for through_local in [false, true] {
        let x = DTensor::arange(1.0..9.0, DType::F64, &mesh, [Shard(0)])?.requires_grad();
        let sum = x.square()?.sum_all()?;
        assert_eq!(sum.placements(), [Partial(ReduceOp::Sum)]);
        let sum = match through_local {
            true => DTensor::from_local(&sum.to_local()?, &mesh, sum.placements().to_vec())?,
            false => sum,
        };
        let gradients = sum.square()?.backward()?;
        // d (sum x^2)^2 = 4 x sum x^2, and the sum is 204.
        let expected: Vec<f64> = (1..9).map(|x| f64::from(4 * 204 * x)).collect();
        assert_eq!(all_elements(gradients.get(&x)?)?, expected, "through local tensors: {through_local}");
    }
    Ok("exact, with and without local tensors between".into())
}

pub(super) fn partial_sums(world: &World) -> Result<String> {
    let mesh = line(world)?;
    let x = counting(&mesh, &[4, 8], [Shard(1)])?;
    let product = x.matmul(&DTensor::ones((8, 2), DType::F64, &mesh, [Shard(0)])?)?;
    assert_eq!(product.placements(), [Partial(ReduceOp::Sum)]);
    let sums =
        |plus: f64| -> Vec<f64> { [28.0, 28.0, 92.0, 92.0, 156.0, 156.0, 220.0, 220.0].map(|sum| sum + plus).into() };
    assert_eq!(all_elements(&(&product + 10.0)?)?, sums(10.0));
    let bias = DTensor::full(3.0, 2, DType::F64, &mesh, [Replicate])?.requires_grad();
    let y = (&product + &bias)?;
    assert_eq!(all_elements(&y)?, sums(3.0));
    assert_eq!(all_elements(y.sum_all()?.backward()?.get(&bias)?)?, [4.0; 2]);
    assert!(!(&product * -5.0)?.equal(&(&product * 2.0)?)?);
    Ok("sums and gradients exact".into())
}

#[derive(Module)]
struct Scale {
    weight: Param,
}

pub(super) fn reduction_type(world: &World) -> Result<String> {
    let mesh = square(world)?;
    let model = Scale { weight: Param::new(&DTensor::ones(4, DType::F32, &mesh, [Replicate, Replicate])?) };
    fully_shard(&model, &mesh, &["dp"])?;
    let policy =
        MixedPrecision { param_dtype: Some(DType::BF16), reduce_dtype: Some(DType::F32), ..Default::default() };
    model.set_mixed_precision(Some(policy))?;
    // Each tensor-parallel rank has one term; 256 and 1 add up to 257, which bf16 does not have.
    let terms = |i: &[usize]| [256.0, 1.0][i[0]];
    let terms = DTensor::from_fn((2, 4), DType::BF16, &mesh, [Replicate, Shard(0)], terms)?;
    let gradients = terms.mul(&model.weight.forward_value()?)?.sum_all()?.backward()?.in_param_layout()?;
    assert_eq!(all_elements(gradients.get(&model.weight.get())?)?, [257.0; 4]);
    Ok("the gradient 256 + 1 of a bf16 weight is 257, which bf16 does not have".into())
}

#[derive(Module)]
struct Two {
    first: Linear,
    second: Linear,
}

pub(super) fn mixed_accumulation(world: &World) -> Result<String> {
    let mesh = line(world)?;
    let builder = Builder::new(&mesh);
    let linear = |name: &str| Linear::without_bias(&builder.child(name), 4, 4);
    let model = Two { first: linear("first")?, second: linear("second")? };
    fully_shard(&model, &mesh, &["tp"])?;
    let policy =
        MixedPrecision { param_dtype: Some(DType::BF16), reduce_dtype: Some(DType::F32), ..Default::default() };
    model.set_mixed_precision(Some(policy))?;
    let x = DTensor::full(3.0, (RANKS, 4), DType::F32, &mesh, [Shard(0)])?;
    for defer_reduction in [false, true] {
        let options = BackwardOptions { defer_reduction, ..BackwardOptions::default() };
        let early = model.first.forward(&x)?.sum_all()?.backward_with(options)?;
        let both = (model.first.forward(&x)? + model.second.forward(&x)?)?.sum_all()?;
        let sum = early.accumulate(both.backward_with(options)?)?.in_param_layout()?;
        for (param, expected) in [(&model.first.weight, 24.0), (&model.second.weight, 12.0)] {
            let gradient = sum.get(&param.get())?;
            assert_eq!((gradient.dtype(), all_elements(gradient)?), (DType::F32, vec![expected; 16]));
        }
    }
    Ok("exact, reduced each time and deferred".into())
}

pub(super) fn other_dimensions(world: &World) -> Result<String> {
    let trained = |mesh: &DeviceMesh| -> Result<(Vec<usize>, Vec<f64>)> {
        mesh.manual_seed(1);
        let model = Linear::without_bias(&Builder::new(mesh), 5, 8)?;
        if mesh.size() > 1 {
            shard_module(&model, mesh, &FullyShard::new(["tp"]).on_dim(1).plan(&model, mesh)?)?;
        }
        let mut optimizer = AdamW::default().over(&model)?;
        let x = DTensor::from_fn((RANKS, 5), DType::F32, mesh, [Shard(0)], |i| (i[0] + 3 * i[1]) as f64)?;
        for _ in 0..3 {
            // The gradient is a sum of integers: exact in every order.
            optimizer.step(model.forward(&x)?.sum_all()?.backward()?)?;
        }
        let weight = model.weight.get();
        Ok((weight.local_shape().to_vec(), all_elements(&weight)?))
    };
    let (_, expected) = trained(&world.device_mesh(Mesh::from_ranks([("tp", 1)], vec![world.rank()])?)?)?;
    let (local, found) = trained(&line(world)?)?;
    assert_eq!(local, [8, [2, 2, 1, 0][world.rank()]]);
    assert_eq!(found, expected);
    Ok("8 x 5 weights in columns 2, 2, 1, 0: after 3 steps of AdamW the bits of one device".into())
}

pub(super) fn clipping(world: &World) -> Result<String> {
    let (first, second) = (line(world)?, square(world)?);
    let a = Param::new(&DTensor::ones(8, DType::F64, &first, [Shard(0)])?);
    let b = Param::new(&DTensor::ones(8, DType::F64, &second, [Shard(0), Replicate])?);
    let gradients = (a.get() * 3.0)?.sum_all()?.backward()?.accumulate((b.get() * 4.0)?.sum_all()?.backward()?)?;
    let (clipped, norm) = clip_grad_norm(gradients, [&a, &b], 1.0, 2.0)?;
    assert!((norm - 200_f64.sqrt()).abs() < 1e-12, "{norm}");
    let each = all_elements(clipped.get(&b.get())?)?;
    assert!(each.iter().all(|x| (x - 4.0 / (norm + 1e-6)).abs() < 1e-15), "{each:?}");
    Ok("the norm over both meshes and the clipped gradients are right".into())
}

#[derive(Module)]
struct Network {
    body: Linear,
    head: Arc<Linear>,
}

pub(super) fn head_gathers(world: &World) -> Result<String> {
    const CHUNKS: usize = 8;
    let run = |mesh: &DeviceMesh| -> Result<(Vec<f64>, usize)> {
        mesh.manual_seed(2);
        let builder = Builder::new(mesh).dtype(DType::F64);
        let head = Arc::new(Linear::without_bias(&builder.child("head"), 8, 32)?);
        let model = Network { body: Linear::new(&builder.child("body"), 8, 8)?, head };
        if mesh.size() > 1 {
            fully_shard(&model, mesh, &["tp"])?;
            // Only the head stays gathered, until the step.
            model.head.set_reshard_after_forward(false, &["tp"]);
        }
        // So many rows that moving the weight costs less than moving them.
        let x = DTensor::from_fn((1024, 8), DType::F64, mesh, [Shard(0)], |i| ((i[0] * 8 + i[1]) as f64).sin())?;
        let targets = |rows: usize| DTensor::from_fn(rows, DType::I64, mesh, [Shard(0)], |i| (i[0] % 32) as f64);
        let hidden = model.body.forward(&x)?.unflatten(0, &[-1, CHUNKS as isize])?;
        world.trace().clear();
        let mut loss = None;
        for chunk in 0..CHUNKS as isize {
            let (head, targets) = (Arc::clone(&model.head), targets(1024 / CHUNKS)?);
            let rows = hidden.select(1, chunk)?;
            let part = checkpoint_activations(&[&rows], move |rows| {
                Ok(vec![head.forward(&rows[0])?.cross_entropy(&targets, LossOptions::default())?])
            })?
            .swap_remove(0);
            loss = Some(loss.map_or(Ok(part.clone()), |loss: DTensor| loss.add(&part))?);
        }
        let gradients = loss.expect("chunks").backward()?.in_param_layout()?;
        let of_head = |record: &&shardwise::comm::CommRecord| {
            record.call == "all_gather" && record.layouts.as_ref().is_some_and(|(from, _)| from.shape() == [32, 8])
        };
        let gathers = world.trace().records().iter().filter(of_head).count();
        Ok((all_elements(gradients.get(&model.head.weight.get())?)?, gathers))
    };
    let one = world.device_mesh(Mesh::from_ranks([("tp", 1)], vec![world.rank()])?)?;
    let ((expected, _), (found, gathers)) = (run(&one)?, run(&line(world)?)?);
    assert!(super::distance(&found, &expected) < 1e-13);
    assert_eq!(gathers, 1, "{:?}", calls(world));
    Ok(format!("{gathers} gather of the head for {CHUNKS} recomputed chunks, forward and backward"))
}
