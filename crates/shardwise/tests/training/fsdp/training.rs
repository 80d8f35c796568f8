//! Training steps that must equal those of one device.

use shardwise::Gradients;
use shardwise::nn::{BatchNorm, GroupNorm, Linear, RmsNorm};
use shardwise::plan::fully_shard;
use shardwise::prelude::*;

use crate::fsdp::net::*;

#[test]
fn every_way_of_sharding_trains_like_one_device() {
    for way in &WAYS {
        let run = move |world: World| {
            for (width, recompute) in [(5, false), (6, true)] {
                let mesh = way.mesh(&world)?;
                let net = way.build(&mesh, width, DType::F64)?;
                let (one, plain) = reference(&world, width, DType::F64)?;
                assert_same_parameters(&net, &plain, 0.0, way.name)?;
                let (mut ours, mut theirs) = (AdamW::default().over(&net)?, AdamW::default().over(&plain)?);
                for step in 0..4 {
                    let (x, target) = batch(&mesh, &way.batch(), DType::F64, step)?;
                    let loss = net.loss(&x, &target, recompute)?;
                    let (x, target) = batch(&one, &[Replicate], DType::F64, step)?;
                    let expected = plain.loss(&x, &target, false)?;
                    assert!((value(&loss)? - value(&expected)?).abs() < 1e-9, "{} step {step}", way.name);
                    ours.step(loss.backward()?)?;
                    theirs.step(expected.backward()?)?;
                }
                assert_same_parameters(&net, &plain, 1e-9, way.name)?;
            }
            Ok(())
        };
        launch(way.ranks(), run).unwrap();
    }
}

#[test]
fn one_rank_communicates_nothing() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 1)])?;
        mesh.manual_seed(5);
        let net = Net::new(&Builder::new(&mesh), 5, 2)?;
        fully_shard(&net, &mesh, &["dp"])?;
        let mut optimizer = AdamW::default().over(&net)?;
        let (one, plain) = reference(&world, 5, DType::F32)?;
        let mut theirs = AdamW::default().over(&plain)?;
        for step in 0..3 {
            let (x, target) = batch(&mesh, &[Shard(0)], DType::F32, step)?;
            world.trace().clear();
            optimizer.step(net.loss(&x, &target, false)?.backward()?)?;
            assert_eq!(calls(&world), Vec::<&str>::new());
            let (x, target) = batch(&one, &[Replicate], DType::F32, step)?;
            theirs.step(plain.loss(&x, &target, false)?.backward()?)?;
        }
        assert_same_parameters(&net, &plain, 0.0, "one rank")
    };
    launch(1, run).unwrap();
}

#[test]
fn a_layer_that_is_used_twice_adds_up_its_gradients_and_reduces_them_once() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 8, DType::F64)?, reference(&world, 8, DType::F64)?);
        let twice = |net: &Net, (x, _): (DTensor, DTensor)| {
            let x = net.first.forward(&x)?;
            let block = &net.blocks[0];
            block.down.forward(&block.up.forward(&block.down.forward(&block.up.forward(&x)?)?)?)?.square()?.mean_all()
        };
        let loss = twice(&net, batch(&mesh, &way.batch(), DType::F64, 0)?)?;
        world.trace().clear();
        let gradients = loss.backward()?;
        assert_eq!(count(&world, "reduce_scatter"), 6, "one per parameter: {:?}", calls(&world));
        let expected = twice(&plain, batch(&one, &[Replicate], DType::F64, 0)?)?.backward()?;
        assert_eq!((gradients.len(), expected.len()), (6, 6));
        for pick in [|net: &Net| net.first.weight.get(), |net: &Net| net.blocks[0].up.weight.get()] {
            let (a, b) = (gradients.get(&pick(&net))?.full_tensor()?, expected.get(&pick(&plain))?.full_tensor()?);
            assert!(distance(&a, &b) < 1e-12);
        }
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn two_forward_passes_before_one_backward_pass_give_all_gradients() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 6, DType::F64)?, reference(&world, 6, DType::F64)?);
        let apart = |net: &Net, mesh: &DeviceMesh, placed: &[Placement], recompute: bool| {
            let (a, _) = batch(mesh, placed, DType::F64, 0)?;
            let (b, _) = batch(mesh, placed, DType::F64, 1)?;
            let (a, b) = (net.features(&a, recompute)?, net.features(&b, recompute)?);
            a.sub(&b)?.square()?.mean_all()?.backward()
        };
        for recompute in [false, true] {
            let found = apart(&net, &mesh, &way.batch(), recompute)?;
            let expected = apart(&plain, &one, &[Replicate], false)?;
            // the head is not used
            assert_eq!((found.len(), expected.len()), (14, 14));
            assert!(found.get(&net.head.weight.get()).is_err());
            let pairs = net.named_parameters().into_iter().zip(plain.named_parameters());
            for ((name, a), (_, b)) in pairs.filter(|((name, _), _)| !name.starts_with("head")) {
                let (a, b) = (found.get(&a.get())?.full_tensor()?, expected.get(&b.get())?.full_tensor()?);
                assert!(distance(&a, &b) < 1e-12, "{name}, recomputed: {recompute}");
            }
        }
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn the_head_may_run_apart_on_chunks_of_the_features() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 6, DType::F64)?, reference(&world, 6, DType::F64)?);
        let (x, target) = batch(&mesh, &way.batch(), DType::F64, 0)?;
        let features = net.features(&x, false)?;
        // the features' gradient adds up over the chunks of the head
        let cut = features.detach().requires_grad();
        let mut sum: Option<Gradients> = None;
        for chunk in 0..2 {
            let rows = |t: &DTensor| t.narrow(0, ROWS / 2 * chunk, ROWS / 2);
            let loss = net
                .head
                .forward(&rows(&cut)?)?
                .sub(&rows(&target)?)?
                .square()?
                .sum_all()?
                .mul_scalar(1.0 / (3 * ROWS) as f64)?;
            let gradients = loss.backward()?;
            sum = Some(match sum {
                Some(sum) => sum.accumulate(gradients)?,
                None => gradients,
            });
        }
        let sum = sum.expect("two chunks");
        let of_features = sum.get(&cut)?.clone();
        let all = sum.accumulate(features.backward_from(&of_features)?)?;
        let (x, target) = batch(&one, &[Replicate], DType::F64, 0)?;
        let expected = plain.loss(&x, &target, false)?.backward()?;
        assert_same_gradients((&net, &all), (&plain, &expected), 1e-12, "chunks")
    };
    launch(4, run).unwrap();
}

#[test]
fn a_forward_pass_that_fails_leaves_the_model_usable() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 6, DType::F64)?, reference(&world, 6, DType::F64)?);
        net.set_reshard_after_forward(false, &["dp"]);
        let (x, target) = batch(&mesh, &way.batch(), DType::F64, 0)?;
        let wrong = x.narrow(1, 0, 5)?;
        let failing = |net: &Net| net.blocks[1].down.forward(&net.features(&x, false)?);
        assert!(net.first.forward(&wrong).is_err() && failing(&net).is_err());
        let found = net.loss(&x, &target, false)?.backward()?;
        let (x, target) = batch(&one, &[Replicate], DType::F64, 0)?;
        let expected = plain.loss(&x, &target, false)?.backward()?;
        assert_same_gradients((&net, &found), (&plain, &expected), 1e-12, "after failures")
    };
    launch(4, run).unwrap();
}

/// Two heads of which the second may not be used.
#[derive(Module)]
struct TwoHeads {
    one: Linear,
    two: Linear,
    never: Linear,
}

#[test]
fn outputs_and_modules_that_the_loss_does_not_use_have_no_gradient_and_do_not_change() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let built = Builder::new(&mesh).placed(|_, _| vec![Shard(0)]);
        let linear = |name: &str| Linear::new(&built.child(name), 6, 4);
        let heads = TwoHeads { one: linear("one")?, two: linear("two")?, never: linear("never")? };
        let mut optimizer = AdamW { weight_decay: 0.1, ..AdamW::default() }.over(&heads)?;
        let values = |layer: &Linear| Ok::<_, Error>(numbers(&layer.weight.get().full_tensor()?));
        let never = values(&heads.never)?;
        for step in 0..4 {
            let (x, _) = batch(&mesh, &[Shard(0)], DType::F32, step)?;
            let (one, two) = (heads.one.forward(&x)?, heads.two.forward(&x)?);
            let loss = if step < 3 { one.add(&two)? } else { one }.square()?.sum_all()?;
            let (one, two) = (values(&heads.one)?, values(&heads.two)?);
            let gradients = loss.backward()?;
            assert_eq!(gradients.len(), if step < 3 { 4 } else { 2 });
            optimizer.step(gradients)?;
            assert_ne!(values(&heads.one)?, one);
            assert_eq!(values(&heads.two)? == two, step == 3);
        }
        assert_eq!(values(&heads.never)?, never);
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn an_unused_leaf_gets_a_zero_gradient_on_request() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let built = Builder::new(&mesh).placed(|_, _| vec![Shard(0)]);
        let (used, expert) = (Linear::new(&built, 6, 4)?, Linear::new(&built, 6, 4)?);
        let frozen = Linear::new(&built, 6, 4)?;
        frozen.set_requires_grad(false);
        let (x, _) = batch(&mesh, &[Shard(0)], DType::F32, 0)?;
        let gradients = used.forward(&x)?.sum_all()?.backward()?;
        let all = [&used, &expert, &frozen].map(|layer| layer.weight.get());
        let before = numbers(&gradients.get(&all[0])?.full_tensor()?);
        let gradients = gradients.with_zeros(all.clone())?;
        assert_eq!(numbers(&gradients.get(&all[0])?.full_tensor()?), before);
        assert_eq!(numbers(&gradients.get(&all[1])?.full_tensor()?), [0.0; 24]);
        assert_eq!(gradients.get(&all[1])?.layout(), all[1].layout());
        assert!(!gradients.contains(&all[2]));
        // the step then decays the weight
        let before = numbers(&all[1].full_tensor()?);
        let decay = AdamW { weight_decay: 0.5, ..AdamW::default() };
        let mut optimizer = ShardedOptimizer::new([("expert".to_string(), expert.weight.clone())], decay)?;
        let lr = optimizer.groups()[0].lr;
        optimizer.step(gradients)?;
        let after = numbers(&expert.weight.get().full_tensor()?);
        assert!(after.iter().zip(&before).all(|(a, b)| (a - b * (1.0 - 0.5 * lr)).abs() < 1e-7));
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn norms_between_half_precision_layers_work() {
    #[derive(Module)]
    struct Norms {
        up: Linear,
        batch: BatchNorm,
        rms: RmsNorm,
        group: GroupNorm,
        down: Linear,
    }
    let run = |world: World| {
        for half in [DType::BF16, DType::F16] {
            let mesh = world.mesh([("dp", 2)])?;
            let built = Builder::new(&mesh);
            let net = Norms {
                up: Linear::new(&built.child("up"), 6, 8)?,
                batch: BatchNorm::new(&built.child("batch"), 8, 0.1, 1e-5)?,
                rms: RmsNorm::new(&built.child("rms"), 8, 1e-5)?,
                group: GroupNorm::new(&built.child("group"), 2, 8, 1e-5)?,
                down: Linear::new(&built.child("down"), 8, 3)?,
            };
            fully_shard(&net, &mesh, &["dp"])?;
            let (x, _) = batch(&mesh, &[Shard(0)], DType::F32, 0)?;
            let forward = || {
                let h = net.rms.forward(&net.batch.forward(&net.up.forward(&x)?)?)?;
                net.down.forward(&net.group.forward(&h)?)
            };
            let exact = forward()?.full_tensor()?;
            let policy = shardwise::nn::MixedPrecision { param_dtype: Some(half), ..Default::default() };
            net.set_mixed_precision(Some(policy))?;
            let y = forward()?;
            assert_eq!(y.dtype(), half);
            // three digits of bf16, through four layers
            assert!(distance(&y.full_tensor()?, &exact) < 0.1, "{half:?}: {}", distance(&y.full_tensor()?, &exact));
            let gradients = y.to_dtype(DType::F32)?.square()?.mean_all()?.backward()?;
            assert_eq!(gradients.len(), 9);
            assert!(gradients.iter().all(|gradient| gradient.dtype() == DType::F32));
            assert_eq!(net.batch.running_mean.get().dtype(), DType::F32);
            net.eval();
            assert_eq!(forward()?.dtype(), half);
        }
        Ok(())
    };
    launch(2, run).unwrap();
}
