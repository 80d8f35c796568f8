//! The norm of all gradients of a model is that of the unsharded model, in every layout: also where gradients are still terms of a
//! sum, are computed in other types, belong to shared or merged parameters, or square to more than their type holds.

use shardwise::BackwardOptions;
use shardwise::ErrorKind;
use shardwise::nn::{Linear, MixedPrecision};
use shardwise::optim::{Sgd, ShardedOptimizer, clip_grad_norm, clip_grad_value};
use shardwise::prelude::*;

use crate::fsdp::net::*;

const STEPS: usize = 3;

/// The gradients of a few micro-batches together.
fn sum_of(mut gradients: impl FnMut(usize) -> Result<Gradients>) -> Result<Gradients> {
    let first = gradients(0)?;
    (1..STEPS).try_fold(first, |sum, step| sum.accumulate(gradients(step)?))
}

fn parameters(net: &impl Module) -> Vec<Param> {
    net.named_parameters().into_iter().map(|(_, param)| param).collect()
}

#[test]
fn the_norm_and_the_clipped_gradients_are_those_of_one_device_in_every_layout() {
    for way in &WAYS {
        let run = move |world: World| {
            let mesh = way.mesh(&world)?;
            // Width 5 divides by no number of ranks.
            let net = way.build(&mesh, 5, DType::F64)?;
            let (one, plain) = reference(&world, 5, DType::F64)?;
            let ours = |defer_reduction: bool| {
                sum_of(|step| {
                    let (x, target) = batch(&mesh, &way.batch(), DType::F64, step)?;
                    let options = BackwardOptions { defer_reduction, ..BackwardOptions::default() };
                    net.loss(&x, &target, step == 1)?.backward_with(options)
                })
            };
            let theirs = || {
                sum_of(|step| {
                    let (x, target) = batch(&one, &[Replicate], DType::F64, step)?;
                    plain.loss(&x, &target, false)?.backward()
                })
            };
            // By hand, from full tensors.
            let flat: Vec<f64> = {
                let all = theirs()?;
                let full =
                    parameters(&plain).into_iter().map(|param| Ok(numbers(&all.get(&param.get())?.full_tensor()?)));
                full.collect::<Result<Vec<_>>>()?.concat()
            };
            for norm_type in [1.0, 2.0, 3.0, f64::INFINITY] {
                let expected = match norm_type {
                    f64::INFINITY => flat.iter().fold(0.0, |most: f64, x| most.max(x.abs())),
                    p => flat.iter().map(|x| x.abs().powf(p)).sum::<f64>().powf(1.0 / p),
                };
                for (deferred, max_norm) in [(false, expected / 7.0), (true, expected / 7.0), (true, expected * 7.0)] {
                    let what = format!("{}, norm {norm_type}, deferred: {deferred}", way.name);
                    // A parameter that is named twice counts once.
                    let named = [parameters(&net), parameters(&net)].concat();
                    let (clipped, norm) = clip_grad_norm(ours(deferred)?, &named, max_norm, norm_type)?;
                    assert!((norm - expected).abs() < 1e-11 * expected, "{what}: {norm}, not {expected}");
                    // By hand: every rank has the reference, and a norm would count all of them.
                    let reference = theirs()?.scale((max_norm / (expected + 1e-6)).min(1.0))?;
                    assert_same_gradients((&net, &clipped), (&plain, &reference), 1e-12, &what)?;
                    let (clipped, norm) = clip_grad_norm(clipped, &named, max_norm, norm_type)?;
                    // It is clipped now, and reduced: the same again.
                    assert!((norm - max_norm.min(expected)).abs() < 1e-5 * expected, "{what}: {norm} after clipping");
                    assert_same_gradients((&net, &clipped), (&plain, &reference), 1e-5, &what)?;
                }
            }
            let by_value = clip_grad_value(ours(true)?, &parameters(&net), 0.01)?;
            let reference = clip_grad_value(theirs()?, &parameters(&plain), 0.01)?;
            assert_same_gradients((&net, &by_value), (&plain, &reference), 1e-12, way.name)
        };
        launch(way.ranks(), run).unwrap();
    }
}

/// The parts of a model may have types of their own. The norm adds up squares that their types do not hold.
#[test]
fn gradients_of_several_types_on_several_meshes_have_one_norm() {
    let run = |world: World| {
        let (square, line) = (world.mesh([("a", 2), ("b", 2)])?, world.mesh([("c", 4)])?);
        let pair = world.device_mesh(Mesh::from_ranks([("d", 2)], vec![3, 1])?)?;
        // Mesh, placements, type, shape and the number that every element of the gradient is.
        let parts: [(&DeviceMesh, &str, DType, &[usize], f64); 8] = [
            (&square, "S(0),S(0)", DType::F16, &[7, 3], 300.0),
            (&square, "S(1),R", DType::BF16, &[5, 3], 2.0),
            (&square, "R,S(0)", DType::F32, &[3, 2], 2f64.powi(80)),
            (&square, "SS(0,2),S(0)", DType::F64, &[9], -3.0),
            (&line, "BC(0,1)", DType::F32, &[6], 5.0),
            (&line, "S(0)", DType::F32, &[2, 2], -7.0),
            (&pair, "S(1)", DType::F32, &[2, 3], 11.0),
            (&pair, "R", DType::F16, &[], 4.0),
        ];
        let param = |(mesh, placements, dtype, shape, _): &(&DeviceMesh, &str, DType, &[usize], f64)| -> Result<Param> {
            Ok(Param::new(&DTensor::full(1.0, *shape, *dtype, mesh, Placement::parse_list(placements)?)?))
        };
        let params = parts.iter().map(param).collect::<Result<Vec<_>>>()?;
        let backward = |i: usize| params[i].get().mul_scalar(parts[i].4)?.sum_all()?.backward();
        for norm_type in [1.0, 2.0, f64::INFINITY] {
            let counted =
                parts.iter().map(|(_, _, _, shape, number)| (shape.iter().product::<usize>() as f64, number.abs()));
            let expected = match norm_type {
                f64::INFINITY => counted.fold(0.0, |most: f64, (_, x)| most.max(x)),
                p => counted.map(|(count, x)| count * x.powf(p)).sum::<f64>().powf(1.0 / p),
            };
            let first = backward(0)?;
            let gradients = (1..parts.len()).try_fold(first, |all, i| all.accumulate(backward(i)?))?;
            let (_, norm) = clip_grad_norm(gradients, &params, f64::MAX, norm_type)?;
            assert!((norm - expected).abs() < 1e-12 * expected, "norm {norm_type}: {norm}, not {expected}");
        }
        Ok(())
    };
    launch(4, run).unwrap();
}

/// In the type of a policy the norm is that of the gradients that the optimizer gets.
#[test]
fn the_norm_with_mixed_precision_is_that_of_the_gradients_that_are_returned() {
    for way in &WAYS {
        let run = move |world: World| {
            let mesh = way.mesh(&world)?;
            let net = way.build(&mesh, 5, DType::F32)?;
            net.set_mixed_precision(Some(MixedPrecision {
                param_dtype: Some(DType::BF16),
                ..MixedPrecision::default()
            }))?;
            let (x, target) = batch(&mesh, &way.batch(), DType::F32, 0)?;
            let gradients = net.loss(&x, &target, false)?.backward()?;
            let (clipped, norm) = clip_grad_norm(gradients, &parameters(&net), 1e9, 2.0)?;
            let mut squares = 0.0;
            for param in parameters(&net) {
                let gradient = clipped.get(&param.get())?;
                assert_eq!(gradient.layout(), &param.get().layout().reduced());
                squares += numbers(&gradient.full_tensor()?).iter().map(|x| x * x).sum::<f64>();
            }
            assert!((norm - squares.sqrt()).abs() < 1e-12 * norm, "{}: {norm}, not {}", way.name, squares.sqrt());
            Ok(())
        };
        launch(way.ranks(), run).unwrap();
    }
}

/// A parameter with merged dimensions, whose shards cross the borders of the first one.
#[test]
fn merged_parameters_are_clipped_like_others() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 4)])?;
        let layer = Linear::without_bias(&Builder::new(&mesh).dtype(DType::F64), 2, 3)?;
        let stack = Param::new(&DTensor::full(1.0, (3, 5, 2), DType::F64, &mesh, [Replicate])?);
        stack.merge_dims(2)?;
        stack.set(&stack.get().detach().redistribute([Shard(0)])?)?;
        let scale =
            DTensor::from_fn((3, 5, 2), DType::F64, &mesh, [Replicate], |i| (i[0] * 10 + i[1] * 2 + i[2]) as f64)?;
        let x = DTensor::from_fn((8, 2), DType::F64, &mesh, [Shard(0)], |i| i[0] as f64)?;
        let loss = stack.forward_value()?.mul(&scale)?.sum_all()?.add(&layer.forward(&x)?.sum_all()?)?;
        let (clipped, norm) = clip_grad_norm(loss.backward()?, [&stack, &layer.weight], 1.0, 2.0)?;
        let squares = (0..30).map(|i| (i * i) as f64).sum::<f64>() + 6.0 * 28.0 * 28.0;
        assert!((norm - squares.sqrt()).abs() < 1e-10, "{norm}, not {}", squares.sqrt());
        let gradient = clipped.get(&stack.get())?;
        assert_eq!(gradient.placements(), [Shard(0)]);
        let found = numbers(&gradient.full_tensor()?);
        assert!(found.iter().enumerate().all(|(i, x)| (x * norm - i as f64).abs() < 1e-4), "{found:?}");
        Ok(())
    };
    launch(4, run).unwrap();
}

/// Clipping with the parameters of another model would return 0 and clip nothing; the optimizer refuses such gradients, too.
#[test]
fn clipping_with_the_parameters_of_another_model_is_an_error() {
    for way in &WAYS {
        let run = move |world: World| {
            let mesh = way.mesh(&world)?;
            let (net, other) = (way.build(&mesh, 5, DType::F64)?, way.build(&mesh, 5, DType::F64)?);
            let gradients = || {
                let (x, target) = batch(&mesh, &way.batch(), DType::F64, 0)?;
                net.loss(&x, &target, false)?.backward()
            };
            let mut optimizer = ShardedOptimizer::new(other.named_parameters(), Sgd::default())?;
            for refused in [
                clip_grad_norm(gradients()?, &parameters(&other), 1.0, 2.0).map(drop),
                clip_grad_norm(gradients()?, &parameters(&other), 1.0, f64::INFINITY).map(drop),
                clip_grad_value(gradients()?, &parameters(&other), 1.0).map(drop),
                optimizer.step(gradients()?),
            ] {
                let error = refused.expect_err("gradients of another model");
                assert!(matches!(error.kind(), Some(ErrorKind::Optimizer)), "{error}");
                assert!(error.to_string().contains("none of them of a parameter"), "{error}");
            }
            let (_, norm) = clip_grad_norm(gradients()?, &parameters(&net), 1.0, 2.0)?;
            assert!(norm > 0.0);
            Ok(())
        };
        ThreadWorld::new(way.ranks()).unwrap().run(run).unwrap();
    }
}
