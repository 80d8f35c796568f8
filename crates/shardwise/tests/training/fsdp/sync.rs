//! Micro-batches: when gradients are reduced.

use shardwise::BackwardOptions;
use shardwise::plan::fully_shard;
use shardwise::prelude::*;
use shardwise::train::Trainer;

use crate::fsdp::net::*;

const NO_SYNC: BackwardOptions<'static> = BackwardOptions {
    cotangent: None,
    retain_graph: false,
    create_graph: false,
    defer_reduction: true,
    on_gradient: None,
};

/// The gradients of three micro-batches, and the collectives of each backward pass and of the reduction at the end.
fn micro_batches(
    world: &World,
    net: &Net,
    mesh: &DeviceMesh,
    placed: &[Placement],
    options: BackwardOptions<'_>,
) -> Result<(Gradients, [Vec<&'static str>; 2])> {
    let mut sum: Option<Gradients> = None;
    let mut during = Vec::new();
    for step in 0..3 {
        let (x, target) = batch(mesh, placed, DType::F64, step)?;
        let loss = net.loss(&x, &target, false)?.mul_scalar(1.0 / 3.0)?;
        world.trace().clear();
        let gradients = loss.backward_with(options)?;
        sum = Some(match sum {
            Some(sum) => sum.accumulate(gradients)?,
            None => gradients,
        });
        during.extend(calls(world));
    }
    world.trace().clear();
    let sum = sum.expect("three").in_param_layout()?;
    let after = calls(world);
    Ok((sum, [during, after]))
}

fn expected(world: &World, width: usize) -> Result<(Net, Gradients)> {
    let (one, plain) = reference(world, width, DType::F64)?;
    let (sum, _) = micro_batches(world, &plain, &one, &[Replicate], BackwardOptions::default())?;
    Ok((plain, sum))
}

fn times(calls: &[&str], call: &str) -> usize {
    calls.iter().filter(|name| **name == call).count()
}

#[test]
fn deferred_gradients_of_sharded_weights_are_reduced_once_for_all_micro_batches() {
    for way in WAYS.iter().filter(|way| !way.shard.is_empty()) {
        let run = move |world: World| {
            let mesh = way.mesh(&world)?;
            let net = way.build(&mesh, 6, DType::F64)?;
            let (found, [during, after]) = micro_batches(&world, &net, &mesh, &way.batch(), NO_SYNC)?;
            if !way.name.contains("TP") {
                assert_eq!((times(&during, "reduce_scatter"), times(&during, "all_reduce")), (0, 0), "{}", way.name);
            }
            // PyTorch: one reduce_scatter per unit, one all_reduce per unit between replicas
            let weights = net.named_parameters().len();
            assert!(times(&after, "reduce_scatter") <= weights, "{}: {after:?}", way.name);
            if way.name == "FSDP" {
                assert_eq!(after, ["reduce_scatter"]);
            }
            let (plain, expected) = expected(&world, 6)?;
            assert_same_gradients((&net, &found), (&plain, &expected), 1e-12, way.name)?;
            for (name, param) in net.named_parameters() {
                assert_eq!(found.get(&param.get())?.layout(), &param.layout(), "{name}");
            }
            Ok(())
        };
        launch(way.ranks(), run).unwrap();
    }
}

#[test]
fn without_deferral_weights_are_reduced_per_micro_batch_and_replicas_once() {
    let run = |world: World| {
        let weights = 14 + 2;
        let (plain, expected) = expected(&world, 6)?;
        for (way, scatters, reductions) in [(&WAYS[0], 3 * weights, 0), (&WAYS[2], 3 * weights, 1), (&WAYS[1], 0, 1)] {
            let mesh = way.mesh(&world)?;
            let net = way.build(&mesh, 6, DType::F64)?;
            let (found, [during, after]) =
                micro_batches(&world, &net, &mesh, &way.batch(), BackwardOptions::default())?;
            let found_scatters = times(&during, "reduce_scatter");
            assert!(
                found_scatters <= scatters && (found_scatters > 0) == (scatters > 0),
                "{}: {found_scatters}",
                way.name
            );
            assert_eq!(times(&during, "all_reduce"), 0, "{}", way.name);
            assert!(times(&after, "all_reduce") <= reductions, "{}: {after:?}", way.name);
            assert_eq!(times(&after, "reduce_scatter"), 0, "{}", way.name);
            assert_same_gradients((&net, &found), (&plain, &expected), 1e-12, way.name)?;
        }
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn deferral_holds_in_recomputed_blocks_and_pending_gradients_can_be_read_and_changed() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 6, DType::F64)?, reference(&world, 6, DType::F64)?);
        let (x, target) = batch(&mesh, &way.batch(), DType::F64, 0)?;
        let loss = net.loss(&x, &target, true)?;
        world.trace().clear();
        let pending = loss.backward_with(NO_SYNC)?;
        assert_eq!(count(&world, "reduce_scatter"), 0);
        let weight = net.blocks[0].up.weight.get();
        assert_eq!(pending.get(&weight)?.placements(), [Partial(ReduceOp::Sum)]);
        let doubled = pending.map(|gradient| gradient.mul_scalar(2.0))?.in_param_layout()?;
        let (x, target) = batch(&one, &[Replicate], DType::F64, 0)?;
        let expected = plain.loss(&x, &target, false)?.backward()?.scale(2.0)?;
        assert_same_gradients((&net, &doubled), (&plain, &expected), 1e-12, "pending")?;
        // the scope ends with the pass
        let loss = net.loss(
            &batch(&mesh, &way.batch(), DType::F64, 0)?.0,
            &batch(&mesh, &way.batch(), DType::F64, 0)?.1,
            true,
        )?;
        assert_eq!(loss.backward()?.get(&weight)?.placements(), weight.placements());
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn a_trainer_reduces_once_for_several_batches_on_request() {
    use shardwise::models::{GptConfig, build};
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let config = GptConfig {
            n_layers: 1,
            d_model: 8,
            d_ff: 16,
            n_heads: 2,
            seq_len: 8,
            vocab_size: 11,
            ..GptConfig::default()
        };
        let model = || {
            mesh.manual_seed(3);
            let model = build(&config, &shardwise::plan::ShardingPlan::new(), &mesh, DType::F64)?;
            fully_shard(&model, &mesh, &["dp"])?;
            Ok::<_, Error>(model)
        };
        let ids = |salt: usize| {
            DTensor::from_fn((32, 8), DType::I64, &mesh, [Shard(0)], move |i| ((i[0] * 3 + i[1] + salt) % 11) as f64)
        };
        let batches: Vec<Vec<DTensor>> = (0..3).map(|i| Ok(vec![ids(i)?, ids(i + 1)?])).collect::<Result<_>>()?;
        let mut counts = Vec::new();
        let mut trained = Vec::new();
        for deferred in [false, true] {
            let model = model()?;
            let optimizer = AdamW::default().over(&model)?;
            let mut trainer = Trainer::new(model, optimizer);
            if deferred {
                trainer = trainer.defer_reduction();
            }
            world.trace().clear();
            trainer.step_on_all(&batches)?;
            counts.push(count(&world, "reduce_scatter"));
            trained.push(trainer.model);
        }
        assert!(counts[1] > 0 && 3 * counts[1] <= counts[0], "{counts:?}");
        assert_same_parameters(&trained[0], &trained[1], 1e-9, "deferred")
    };
    launch(2, run).unwrap();
}

#[test]
fn gradients_can_be_divided_by_any_factor() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        for dtype in [DType::F32, DType::BF16] {
            let net = way.build(&mesh, 6, dtype)?;
            let (x, target) = batch(&mesh, &way.batch(), dtype, 0)?;
            let gradients = || net.loss(&x, &target, false)?.backward()?.in_param_layout();
            // the loss is the mean over the whole batch, so there is nothing to divide by the number of ranks
            let (whole, halved) = (gradients()?, gradients()?.scale(0.5)?);
            for (a, b) in whole.iter().zip(halved.iter()) {
                let doubled: Vec<f64> = numbers(&b.full_tensor()?).iter().map(|x| 2.0 * x).collect();
                assert_eq!(numbers(&a.full_tensor()?), doubled);
            }
        }
        Ok(())
    };
    launch(4, run).unwrap();
}
