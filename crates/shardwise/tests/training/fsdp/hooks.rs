//! Functions of single gradients: optimizers in the backward pass, and other reductions between replicas.

use std::cell::RefCell;

use shardwise::BackwardOptions;
use shardwise::prelude::*;

use crate::fsdp::net::*;

#[test]
fn an_optimizer_in_the_backward_pass_steps_alike() {
    for way in [&WAYS[0], &WAYS[2], &WAYS[5]] {
        let run = move |world: World| {
            let mesh = way.mesh(&world)?;
            for recompute in [false, true] {
                let (net, other) = (way.build(&mesh, 6, DType::F64)?, way.build(&mesh, 6, DType::F64)?);
                let (mut after, mut inside) = (AdamW::default().over(&net)?, AdamW::default().over(&other)?);
                for step in 0..3 {
                    let (x, target) = batch(&mesh, &way.batch(), DType::F64, step)?;
                    after.step(net.loss(&x, &target, recompute)?.backward()?)?;
                    let rest = inside.step_in_backward(&other.loss(&x, &target, recompute)?)?;
                    assert!(rest.is_empty());
                }
                assert_eq!(inside.steps(), 3);
                assert_same_parameters(&net, &other, 1e-12, way.name)?;
            }
            Ok(())
        };
        launch(way.ranks(), run).unwrap();
    }
}

#[test]
fn stepping_in_the_backward_pass_holds_fewer_gradients() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 1)])?;
        let mut peaks = Vec::new();
        for inside in [false, true] {
            let net = Net::new(&Builder::new(&mesh), 64, 4)?;
            let mut optimizer = Sgd::default().over(&net)?;
            // few rows, so that gradients and not activations are the peak
            let (x, target) = batch(&mesh, &[Replicate], DType::F32, 0)?;
            let (x, target) = (x.narrow(0, 0, 8)?, target.narrow(0, 0, 8)?);
            let before = world.memory().current();
            world.memory().reset_peak();
            let loss = net.loss(&x, &target, false)?;
            if inside {
                optimizer.step_in_backward(&loss)?;
            } else {
                optimizer.step(loss.backward()?)?;
            }
            peaks.push(world.memory().peak() - before);
        }
        let block = 2 * 64 * 128 * 4;
        assert!(peaks[1] + 2 * block < peaks[0], "{peaks:?}");
        Ok(())
    };
    launch(1, run).unwrap();
}

#[test]
fn a_gradient_hook_sees_every_complete_gradient_once() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let net = way.build(&mesh, 6, DType::F64)?;
        let (x, target) = batch(&mesh, &way.batch(), DType::F64, 0)?;
        for recompute in [false, true] {
            // every layer is used twice
            let loss = || net.loss(&x, &target, recompute)?.add(&net.loss(&x.mul_scalar(0.5)?, &target, recompute)?);
            let expected = loss()?.backward()?;
            let seen: RefCell<Vec<String>> = RefCell::default();
            let params = net.named_parameters();
            let note = |gradient: Gradients| {
                assert_eq!(gradient.len(), 1);
                let (name, param) =
                    params.iter().find(|(_, param)| gradient.contains(&param.get())).expect("a parameter");
                let (found, expected) = (gradient.get(&param.get())?, expected.get(&param.get())?);
                assert!(distance(&found.full_tensor()?, &expected.full_tensor()?) < 1e-12, "{name}");
                seen.borrow_mut().push(name.clone());
                gradient.scale(2.0)
            };
            let doubled = loss()?.backward_with(BackwardOptions { on_gradient: Some(&note), ..Default::default() })?;
            let mut seen = seen.into_inner();
            // the last layer is complete first, unless blocks are recomputed
            assert!(recompute || seen[0].starts_with("head"), "{seen:?}");
            seen.sort();
            assert_eq!(seen.len(), 16);
            seen.dedup();
            assert_eq!(seen.len(), 16);
            for (_, param) in &params {
                let (a, b) = (doubled.get(&param.get())?.full_tensor()?, expected.get(&param.get())?.full_tensor()?);
                assert!(distance(&a, &(b * 2.0)?) < 1e-12);
            }
            // an error ends the pass
            let refuse = |_: Gradients| Err(Error::other("refused"));
            let options = BackwardOptions { on_gradient: Some(&refuse), ..Default::default() };
            assert!(loss()?.backward_with(options).unwrap_err().to_string().contains("refused"));
        }
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn a_program_replaces_the_reduction_between_replicas() {
    let run = |world: World| {
        let mesh = world.mesh([("rep", 2), ("dp", 2)])?;
        let weight = DTensor::full(2.0, (4, 3), DType::F32, &mesh, [Replicate, Shard(0)])?.requires_grad();
        // row r of the batch is r + 1; each of four ranks has two rows
        let x = DTensor::from_fn((8, 4), DType::F32, &mesh, [Shard(0), Shard(0)], |i| (i[0] + 1) as f64)?;
        let gradients = x.matmul(&weight)?.sum_all()?.backward()?;
        let own = gradients.get(&weight)?.placements().to_vec();
        assert_eq!(own, [Partial(ReduceOp::Sum), Shard(0)]);
        let replicas = mesh.group(&["rep"])?;
        world.trace().clear();
        let largest = gradients.map(|gradient| {
            let local = replicas.all_reduce(&gradient.to_local()?, ReduceOp::Max)?;
            DTensor::from_local_with_shape(&local, &mesh, [Replicate, Shard(0)], gradient.shape())
        })?;
        let largest = largest.in_param_layout()?;
        assert_eq!(count(&world, "all_reduce"), 1, "{:?}", calls(&world));
        // the second replica has rows 4..8: 5 + 6 + 7 + 8; their sum with the first would be 36
        assert_eq!(numbers(&largest.get(&weight)?.full_tensor()?), [26.0; 12]);
        Ok(())
    };
    launch(4, run).unwrap();
}
