//! Sharding a model that exists: what is placed where, and replicas that a broadcast repairs.

use candle_core::{Device, Tensor};
use shardwise::nn::{Buffer, Linear, init::Init};
use shardwise::plan::{FullyShard, ShardingPlan, ShardingPlanner, fully_shard, replicate, shard_module};
use shardwise::prelude::*;
use shardwise_test_suites::errors::same_error_on_all_ranks;

use crate::fsdp::net::*;

#[derive(Module)]
struct WithScalar {
    scale: Param,
    empty: Param,
    layer: Linear,
    statistics: Buffer,
}

impl WithScalar {
    fn new(builder: &Builder, inputs: usize, outputs: usize) -> Result<Self> {
        Ok(WithScalar {
            scale: builder.param("scale", &[], Init::ONES)?,
            empty: builder.param("empty", &[0, 3], Init::ONES)?,
            layer: Linear::new(&builder.child("layer"), inputs, outputs)?,
            statistics: builder.buffer("statistics", &[5], Init::ONES)?,
        })
    }
}

#[test]
fn a_scalar_parameter_is_replicated_and_trained() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 4)])?;
        let model = WithScalar::new(&Builder::new(&mesh), 6, 3)?;
        fully_shard(&model, &mesh, &["dp"])?;
        assert_eq!(model.scale.get().placements(), [Replicate]);
        let (x, target) = batch(&mesh, &[Shard(0)], DType::F32, 0)?;
        let mut optimizer = Sgd::default().over(&model)?;
        let y = model.layer.forward(&x)?.mul(&model.scale.get())?;
        optimizer.step(y.sub(&target)?.square()?.mean_all()?.backward()?)?;
        assert_ne!(numbers(&model.scale.get().full_tensor()?), [1.0]);
        model.check_replicas()
    };
    launch(4, run).unwrap();
}

#[test]
fn dimensions_that_do_not_divide_are_sharded_unevenly() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 8)])?;
        let model = Linear::new(&Builder::new(&mesh), 17, 3)?;
        let before = model.weight.get().full_tensor()?;
        fully_shard(&model, &mesh, &["dp"])?;
        assert_eq!(model.weight.get().placements(), [Shard(1)]);
        let local = model.weight.get().to_local()?;
        assert_eq!(local.dims()[1], [3, 3, 3, 3, 3, 2, 0, 0][world.rank()]);
        assert_eq!(distance(&model.weight.get().full_tensor()?, &before), 0.0);
        // the last dimension, counted from the end
        let last = ShardingPlan::new().param("weight", [("dp", Shard(-1))]);
        let other = Linear::without_bias(&Builder::new(&mesh), 17, 3)?;
        shard_module(&other, &mesh, &last)?;
        assert_eq!(other.weight.layout(), model.weight.layout());
        Ok(())
    };
    launch(8, run).unwrap();
}

#[test]
fn sharding_a_model_again_changes_nothing_and_communicates_nothing() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let net = Net::new(&Builder::new(&mesh), 6, 1)?;
        fully_shard(&net, &mesh, &["dp"])?;
        let (layouts, before) = (net.named_parameters(), net.head.weight.get());
        let layouts: Vec<Layout> = layouts.iter().map(|(_, param)| param.layout()).collect();
        world.trace().clear();
        fully_shard(&net, &mesh, &["dp"])?;
        assert!(
            !calls(&world).iter().any(|call| ["all_gather", "all_to_all", "broadcast", "scatter"].contains(call)),
            "{:?}",
            calls(&world)
        );
        assert!(net.named_parameters().iter().map(|(_, param)| param.layout()).eq(layouts));
        assert!(net.head.weight.get().shares_memory(&before));
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn a_parameter_that_is_replaced_after_sharding_is_used() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let layer = Linear::without_bias(&Builder::new(&mesh), 6, 4)?;
        fully_shard(&layer, &mesh, &["dp"])?;
        layer.set_reshard_after_forward(false, &["dp"]);
        let (x, _) = batch(&mesh, &[Shard(0)], DType::F32, 0)?;
        let before = layer.forward(&x)?.full_tensor()?;
        layer.weight.set(&layer.weight.get().mul_scalar(3.0)?)?;
        let after = layer.forward(&x)?;
        assert!(distance(&after.full_tensor()?, &(before * 3.0)?) < 1e-5);
        assert_eq!(
            after.sum_all()?.backward()?.get(&layer.weight.get())?.placements(),
            layer.weight.get().placements()
        );
        Ok(())
    };
    launch(2, run).unwrap();
}

/// Replicas of a model in which the second one, and buffers of odd ranks, have other values.
fn differing(world: &World) -> Result<(DeviceMesh, WithScalar)> {
    let mesh = world.mesh([("rep", 2), ("dp", 2)])?;
    let model = WithScalar::new(&Builder::new(&mesh), 6, 4)?;
    fully_shard(&model, &mesh, &["dp"])?;
    replicate(&model, &mesh, &["rep"])?;
    if world.rank() >= 2 {
        let weight = model.layer.weight.get();
        let other = Tensor::full(1337f32, weight.layout().local_shape(world.rank()), &Device::Cpu)?;
        let other = DTensor::from_local_with_shape(&other, &mesh, weight.placements().to_vec(), weight.shape())?;
        model.layer.weight.set(&other)?;
    }
    let own = Tensor::full(world.rank() as f32, 5, &Device::Cpu)?;
    model.statistics.set(&DTensor::from_local_with_shape(&own, &mesh, [Replicate, Replicate], 5)?);
    Ok((mesh, model))
}

#[test]
fn replicas_that_differ_are_found_and_made_equal() {
    let text = same_error_on_all_ranks(4, |world| differing(&world)?.1.check_replicas());
    for part in ["`layer.weight`", "rank 2 differs from rank 0", "broadcast_replicas"] {
        assert!(text.contains(part), "{text}");
    }
    let run = |world: World| {
        let (_, model) = differing(&world)?;
        let weight = model.layer.weight.get();
        world.trace().clear();
        model.broadcast_replicas()?;
        assert!(count(&world, "broadcast") <= 5, "{:?}", calls(&world));
        assert_eq!(calls(&world).len(), count(&world, "broadcast"));
        model.check_replicas()?;
        assert!(!numbers(&model.layer.weight.get().full_tensor()?).contains(&1337.0));
        assert_eq!(numbers(&model.statistics.get().full_tensor()?), [0.0; 5]);
        assert_eq!(model.layer.weight.layout(), *weight.layout());
        if world.rank() < 2 {
            assert_eq!(distance(&model.layer.weight.get().to_local()?, &weight.to_local()?), 0.0);
        }
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn a_planner_shards_on_the_dimension_that_is_asked_for() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let net = Net::new(&Builder::new(&mesh), 6, 1)?;
        let plan = FullyShard::new(["dp"]).on_dim(1).plan(&net, &mesh)?;
        shard_module(&net, &mesh, &plan)?;
        for (name, param) in net.named_parameters() {
            let dim = param.shape().len() - 1;
            assert_eq!(param.get().placements(), [Shard(dim as isize)], "{name}");
        }
        Ok(())
    };
    launch(2, run).unwrap();
}
