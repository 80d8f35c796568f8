//! What the autograd graph records and when it frees it: in-place writes have gradients, and a backward pass frees the
//! tensors that were saved for it.

use shardwise::models::{DataParallelMode, GptConfig, ModelConfig, ParallelismConfig, batch_placements, build};
use shardwise::optim::{AdamW, ParamGroup, ShardedOptimizer};
use shardwise::prelude::*;
use shardwise::{BackwardOptions, DryWorld, checkpoint_activations, local_map, no_grad};

const LAYOUTS: [Placement; 4] = [Replicate, Shard(0), Shard(1), Partial(ReduceOp::Sum)];

fn numbers(t: &DTensor) -> Result<Vec<f64>> {
    Ok(t.full_tensor()?.flatten_all()?.to_vec1()?)
}

/// 0, 1, 2, ... in a layout.
fn counted(shape: (usize, usize), mesh: &DeviceMesh, placement: &Placement) -> Result<DTensor> {
    let value = move |at: &[usize]| (at[0] * shape.1 + at[1]) as f64;
    DTensor::from_fn(shape, DType::F64, mesh, [Replicate], value)?.redistribute([placement.clone()])
}

#[test]
fn fill_range_keeps_the_gradient_of_the_rest() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        // the program of a bug report
        let w = DTensor::ones(4, DType::F64, &mesh, [Shard(0)])?.requires_grad();
        let mut y = w.mul_scalar(3.0)?;
        y.fill_range(&[0..1], 0.0)?;
        let found = y.sum_all()?.add(&w.sum_all()?)?.backward()?;
        assert_eq!(numbers(found.get(&w)?)?, [1.0, 4.0, 4.0, 4.0]);
        for placement in LAYOUTS {
            let x = counted((3, 4), &mesh, &placement)?.requires_grad();
            let mut y = x.square()?;
            y.fill_range(&[1..3, 0..2], 7.0)?;
            assert!(y.has_gradient(), "{placement}");
            // 2 x, but for what was overwritten; the weights differ by element
            let weights = counted((3, 4), &mesh, &Replicate)?.add_scalar(1.0)?;
            let found = numbers(y.mul(&weights)?.sum_all()?.backward()?.get(&x)?)?;
            let expected = (0..12).map(|i| match i {
                4 | 5 | 8 | 9 => 0.0,
                i => 2.0 * f64::from(i) * f64::from(i + 1),
            });
            assert_eq!(found, expected.collect::<Vec<_>>(), "{placement}");
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn assign_splits_the_gradient_between_the_tensor_and_the_value() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        for (placement, of_value) in LAYOUTS.iter().flat_map(|p| LAYOUTS.iter().map(move |v| (p, v))) {
            let what = format!("{placement} {of_value}");
            let x = counted((3, 4), &mesh, placement)?.requires_grad();
            let v = counted((2, 2), &mesh, of_value)?.requires_grad();
            let mut y = x.square()?;
            y.assign(&[1..3, 0..2], &v.mul_scalar(5.0)?)?;
            let weights = counted((3, 4), &mesh, &Replicate)?.add_scalar(1.0)?;
            let cube = y.pow_scalar(3.0)?;
            let found = cube.mul(&weights)?.sum_all()?.backward()?;
            let inside = [4usize, 5, 8, 9];
            // d(w y^3) = 3 w y^2 dy, with dy = 2 x outside and 5 inside
            let expected = (0..12usize).map(|i| match inside.contains(&i) {
                true => 0.0,
                false => 6.0 * (i + 1) as f64 * (i as f64).powi(5),
            });
            assert_eq!(numbers(found.get(&x)?)?, expected.collect::<Vec<_>>(), "{what}");
            let expected = (0..4usize).map(|i| 15.0 * (inside[i] + 1) as f64 * (5.0 * i as f64).powi(2));
            assert_eq!(numbers(found.get(&v)?)?, expected.collect::<Vec<_>>(), "{what}");
        }
        // assigning all elements leaves nothing of the old value
        let (x, v) =
            (counted((3, 4), &mesh, &Shard(0))?.requires_grad(), counted((3, 4), &mesh, &Shard(1))?.requires_grad());
        let mut y = x.square()?;
        y.copy_from(&v)?;
        let found = y.square()?.sum_all()?.backward()?;
        assert!(found.get(&x).is_err());
        assert_eq!(numbers(found.get(&v)?)?, (0..12).map(|i| 2.0 * f64::from(i)).collect::<Vec<_>>());
        // no_grad records nothing, also where the value has a gradient
        let mut z = x.detach();
        no_grad(|| z.copy_from(&v.redistribute([Shard(0)])?))?;
        assert!(!z.has_gradient());
        // second derivatives go through a write too
        let x = counted((3, 4), &mesh, &Shard(0))?.requires_grad();
        let mut y = x.pow_scalar(3.0)?;
        y.fill_range(&[0..1, 0..4], 1.0)?;
        let first = y.sum_all()?.backward_graph()?;
        let second = first.get(&x)?.sum_all()?.backward()?;
        let expected = (0..12).map(|i| if i < 4 { 0.0 } else { 6.0 * f64::from(i) });
        assert_eq!(numbers(second.get(&x)?)?, expected.collect::<Vec<_>>());
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn in_place_writes_are_recorded_in_dry_runs() {
    let program = |world: &World| -> Result<Vec<(&'static str, usize)>> {
        let mesh = world.mesh([("a", 2)])?;
        let x = counted((6, 4), &mesh, &Shard(0))?.requires_grad();
        let v = counted((2, 4), &mesh, &Shard(1))?.requires_grad();
        let mut y = x.square()?;
        y.fill_range(&[0..1, 0..4], 0.0)?;
        y.assign(&[2..4, 0..4], &v)?;
        let gradients = y.square()?.sum_all()?.backward()?;
        assert_eq!(gradients.len(), 2);
        gradients.in_param_layout()?;
        Ok(world.trace().records().iter().map(|r| (r.call, r.bytes)).collect())
    };
    for rank in 0..2 {
        let dry = DryWorld::new(2).unwrap().as_rank(rank).unwrap().run(|world| program(&world)).unwrap().value;
        let real = ThreadWorld::new(2).unwrap().run(move |world| program(&world)).unwrap();
        assert_eq!(dry, real[rank]);
    }
}

#[test]
fn backward_graph_gradients_stay_differentiable_in_param_layout() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let x = counted((4, 2), &mesh, &Shard(0))?;
        let w = counted((2, 3), &mesh, &Replicate)?.add_scalar(1.0)?.requires_grad();
        let first = x.matmul(&w)?.pow_scalar(2.0)?.sum_all()?.backward_graph()?.in_param_layout()?;
        assert_eq!(first.get(&w)?.placements(), [Replicate]);
        // the gradient is linear in w: twice its slope is 2 x^T x
        let second = first.get(&w)?.sum_all()?.backward()?;
        let columns = [0.0 + 2.0 + 4.0 + 6.0, 1.0 + 3.0 + 5.0 + 7.0];
        let dots = |i: usize, j: usize| (0..4).map(|r| (2 * r + i) as f64 * (2 * r + j) as f64).sum::<f64>();
        assert_eq!(columns, [12.0, 16.0]);
        let expected: Vec<f64> = (0..2).flat_map(|i| [2.0 * (dots(i, 0) + dots(i, 1)); 3]).collect();
        assert_eq!(numbers(second.get(&w)?)?, expected);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn backward_frees_saved_tensors_while_results_are_alive() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let w = DTensor::randn((64, 64), &mesh, [Shard(1)])?.requires_grad();
        let mut x = DTensor::randn((64, 64), &mesh, [Replicate])?;
        let before = world.memory().current();
        for _ in 0..6 {
            x = x.matmul(&w)?.tanh()?.redistribute([Replicate])?;
        }
        let part = local_map(&[&x], [Replicate], &[], |x| x[0].sqr())?;
        let weight = w.clone();
        let replayed =
            checkpoint_activations(&[&part], move |x| Ok(vec![x[0].matmul(&weight)?.tanh()?]))?.swap_remove(0);
        let loss = replayed.sum_all()?;
        let graph = world.memory().current() - before;
        let retained = loss.backward_with(BackwardOptions { retain_graph: true, ..Default::default() })?;
        drop(retained);
        assert_eq!(world.memory().current() - before, graph, "a pass that retains the graph frees nothing");
        let gradients = loss.backward()?;
        // what remains are the tensors that variables here still hold: two activations, a half one, the loss, the gradient
        let (whole, half) = (64 * 64 * 4, 64 * 32 * 4);
        let left = world.memory().current() - before;
        println!("graph {graph} bytes, after backward {left} bytes");
        assert!(graph > 10 * whole, "{graph}");
        // a result of redistribute, of local_map, of checkpoint_activations, and the loss (a term held in f64); the
        // gradient of the half weight; the first input is no longer held
        assert_eq!(left, 2 * whole + half + 8 + half - whole, "{left}");
        drop((gradients, w));
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn a_second_backward_through_a_freed_graph_is_an_error() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let w = DTensor::randn((4, 4), &mesh, [Shard(0)])?.requires_grad();
        let trunk = w.exp()?;
        let (one, other) = (trunk.sum_all()?, trunk.square()?.sum_all()?);
        let keep = BackwardOptions { retain_graph: true, ..Default::default() };
        one.backward_with(keep)?;
        one.backward()?;
        world.trace().clear();
        for again in [&one, &other] {
            let error = again.backward().unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Invalid(_)), "{text}");
            assert!(["backward", "freed", "retain_graph"].iter().all(|part| text.contains(part)), "{text}");
        }
        assert!(world.trace().records().is_empty(), "found before anything is communicated");
        // the leaf is as usable as ever
        assert_eq!(w.square()?.sum_all()?.backward()?.len(), 1);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn a_backward_pass_frees_saved_tensors_progressively() {
    // 24 layers that save an activation of 1 MiB each: it is freed as soon as its gradient is computed
    let peak = |retain_graph: bool| {
        let run = DryWorld::new(2).unwrap().run(|world| {
            let mesh = world.mesh([("a", 2)])?;
            let w = DTensor::zeros((512, 512), DType::F32, &mesh, [Replicate])?.requires_grad();
            let mut x = DTensor::zeros((1024, 512), DType::F32, &mesh, [Shard(0)])?;
            for _ in 0..24 {
                x = x.matmul(&w)?.tanh()?;
            }
            let loss = x.sum_all()?;
            drop(x);
            let before = world.memory().current();
            world.memory().reset_peak();
            let gradients = loss.backward_with(BackwardOptions { retain_graph, ..Default::default() })?;
            drop(gradients);
            Ok((before, world.memory().peak(), world.memory().current()))
        });
        run.unwrap().value
    };
    let ((before, freeing, after), (_, keeping, kept)) = (peak(false), peak(true));
    println!("before {before}, peak {freeing} freeing and {keeping} keeping, after {after} and {kept}");
    assert!(kept == before && after < before / 8, "{before} {after} {kept}");
    assert!(freeing < keeping, "{freeing} {keeping}");
}

#[test]
fn no_activations_are_held_during_the_optimizer_step() {
    let config = ModelConfig::Gpt(GptConfig { n_layers: 6, d_model: 64, d_ff: 128, ..GptConfig::default() });
    let mesh: Mesh = "dp=2".parse().unwrap();
    let parallelism = ParallelismConfig {
        data_parallel: DataParallelMode::Replicate,
        tensor_parallel: false,
        sequence_parallel: false,
    };
    let plan = parallelism.plan(&config, &mesh).unwrap();
    let run = DryWorld::new(2).unwrap().run(|world| {
        let mesh = world.device_mesh(mesh.clone())?;
        let model = build(&config, &plan, &mesh, DType::F32)?;
        let mut optimizer = ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(AdamW::default()))?;
        let weights: usize = model.named_parameters().iter().map(|(_, p)| p.get().elem_count() * 4).sum();
        let ids = DTensor::zeros((16, config.seq_len()), DType::U32, &mesh, batch_placements(&mesh))?;
        let before = world.memory().current();
        // the loop of a program that holds its loss until the end of a step, as examples and the command do
        let loss = model.loss(&ids, &ids)?;
        let activations = world.memory().current() - before;
        let gradients = loss.backward()?;
        let after = world.memory().current() - before;
        println!("activations {activations} bytes, after backward {after} bytes, weights {weights} bytes");
        assert!(activations > 4 * weights, "{activations} {weights}");
        // one gradient per weight, and the loss, whose term may be held in f64
        assert!((weights + 4..=weights + 8).contains(&after), "{after} {weights}");
        world.memory().reset_peak();
        optimizer.step(gradients)?;
        Ok((activations, world.memory().peak() - before, weights, loss.elem_count()))
    });
    let (activations, peak, weights, _) = run.unwrap().value;
    println!("peak of the optimizer step {peak} bytes");
    // gradients as they are and reduced, new weights next to the old ones, and two moments
    assert!(peak <= 6 * weights && peak < activations, "{peak} {weights} {activations}");
}

#[test]
fn cummax_and_cummin_of_a_sharded_dimension_have_a_second_derivative() {
    let second = |mesh: &DeviceMesh, placement: Placement, least: bool| -> Result<Vec<f64>> {
        let value = |at: &[usize]| [1.5, -0.5, 2.0, 0.25, 2.5, -1.0, 3.0][at[0]] * if least { -1.0 } else { 1.0 };
        let x = DTensor::from_fn(7, DType::F64, mesh, [placement], value)?.requires_grad();
        let running = if least { x.cummin(0)?.0 } else { x.cummax(0)?.0 };
        let first = running.pow_scalar(3.0)?.sum_all()?.backward_graph()?.get(&x)?.clone();
        let weights = DTensor::arange(1.0..8.0, DType::F64, mesh, [Replicate])?;
        let gradients = first.mul(&weights)?.sum_all()?.backward()?;
        Ok(gradients.get(&x)?.full_tensor()?.to_vec1::<f64>()?)
    };
    let run = move |world: World| {
        let mesh = world.mesh([("a", 3)])?;
        for least in [false, true] {
            let sign = if least { -1.0 } else { 1.0 };
            // Elements 0, 2, 4 and 6 are the extremes of 2, 2, 2 and 1 totals: 6 x per total, times the weight.
            let expected = [18.0 * sign, 0.0, 72.0 * sign, 0.0, 150.0 * sign, 0.0, 126.0 * sign];
            assert_eq!(second(&mesh, Replicate, least)?, expected);
            assert_eq!(second(&mesh, Shard(0), least)?, expected);
        }
        Ok(())
    };
    ThreadWorld::new(3).unwrap().run(run).unwrap();
}
