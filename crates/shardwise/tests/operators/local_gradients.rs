//! Gradients through local code: from `to_local` or `full_tensor` through candle to `from_local`, on 1, 2 and 3 ranks,
//! against distributed operators and PyTorch's rules for `grad_placements`.

use candle_core::{Device, Tensor, Var};
use shardwise::prelude::*;
use shardwise::tensor::FromLocalOptions;

fn on_each_world(run: impl Fn(&DeviceMesh) -> Result<()> + Clone + Send + Sync + 'static) {
    for ranks in 1..=3 {
        let run = run.clone();
        ThreadWorld::new(ranks).unwrap().run(move |world| run(&world.mesh([("a", world.size())])?)).unwrap();
    }
}

fn leaf(mesh: &DeviceMesh, placement: Placement) -> Result<DTensor> {
    let whole = Tensor::arange(-5.0, 7.0, &Device::Cpu)?.reshape((4, 3))?;
    Ok(DTensor::distribute_tensor(&whole, mesh, [placement], None)?.requires_grad())
}

fn list(x: &DTensor) -> Result<Vec<f64>> {
    Ok(x.detach().full_tensor()?.flatten_all()?.to_vec1()?)
}

#[test]
fn a_shard_is_differentiable_through_local_code() {
    on_each_world(|mesh| {
        for placement in [Replicate, Shard(0), Shard(1)] {
            let x = leaf(mesh, placement.clone())?;
            let before = (&x * 0.5)?;
            let local = (before.to_local()?.sqr()? + 1.0)?.relu()?;
            let y = DTensor::from_local(&local, mesh, [placement.clone()])?;
            let found = (&y * &x)?.sum_all()?.backward()?;
            // (x^2 / 4 + 1) * x
            let expected = ((x.square()? * 0.75)? + 1.0)?;
            assert_eq!(list(found.get(&x)?)?, list(&expected)?, "{placement}");
        }
        Ok(())
    });
}

#[test]
fn local_code_may_have_several_inputs_and_outputs() {
    on_each_world(|mesh| {
        let (x, w) = (leaf(mesh, Shard(0))?, leaf(mesh, Shard(0))?);
        let (a, b) = (x.to_local()?, w.to_local()?);
        let product = (&a * &b)?;
        let y = DTensor::from_local(&product, mesh, [Shard(0)])?;
        let z = DTensor::from_local(&(&product * &a)?, mesh, [Shard(0)])?;
        let found = (y + &z)?.sum_all()?.backward()?;
        // x w + x^2 w
        assert_eq!(list(found.get(&x)?)?, list(&((&w + (&x * &w)?)? + (&x * &w)?)?)?);
        assert_eq!(list(found.get(&w)?)?, list(&(&x + x.square()?)?)?);
        Ok(())
    });
}

#[test]
fn a_replicated_tensor_that_ranks_use_differently_has_a_partial_gradient() {
    on_each_world(|mesh| {
        let (x, scale) = (leaf(mesh, Shard(0))?, DTensor::ones(3, DType::F64, mesh, [Replicate])?.requires_grad());
        let local = scale.to_local_with_grad_placements([Partial(ReduceOp::Sum)])?;
        let y = DTensor::from_local(&x.to_local()?.broadcast_mul(&local)?, mesh, [Shard(0)])?;
        let found = y.square()?.sum_all()?.backward()?;
        assert_eq!(found.get(&scale)?.placements(), [Partial(ReduceOp::Sum)]);
        assert_eq!(list(found.get(&scale)?)?, list(&(x.square()? * 2.0)?.sum(&[0], false)?)?);
        assert_eq!(list(found.get(&x)?)?, list(&(&x * 2.0)?)?);
        // The same with the full tensor of a sharded one, of which each rank uses its own rows.
        let w = leaf(mesh, Shard(1))?;
        let whole = w.full_tensor_with_grad_placements([Partial(ReduceOp::Sum)])?;
        let rows = x.layout().global_indices(mesh.world().rank(), 0);
        let mine = whole.narrow(0, rows.first().copied().unwrap_or(0), rows.len())?;
        let y = DTensor::from_local(&(x.to_local()? * mine)?, mesh, [Shard(0)])?;
        assert_eq!(list(y.sum_all()?.backward()?.get(&w)?)?, list(&x)?);
        Ok(())
    });
}

#[test]
fn a_full_tensor_is_differentiable_through_replicated_local_code() {
    on_each_world(|mesh| {
        for placement in [Replicate, Shard(0), Shard(1), Partial(ReduceOp::Sum)] {
            let x = leaf(mesh, placement.clone())?;
            let norm = x.full_tensor()?.sqr()?.sum_all()?;
            let loss = DTensor::replicate(&norm, mesh)?;
            assert_eq!(list(loss.backward()?.get(&x)?)?, list(&(&x * 2.0)?)?, "{placement}");
        }
        Ok(())
    });
}

#[test]
fn local_results_may_be_partial_sums_and_averages() {
    on_each_world(|mesh| {
        for op in [ReduceOp::Sum, ReduceOp::Avg] {
            let x = leaf(mesh, Shard(0))?;
            let term = x.to_local()?.sqr()?.sum_all()?;
            let loss = DTensor::from_local(&term, mesh, [Partial(op)])?;
            let share = if op == ReduceOp::Avg { mesh.size() as f64 } else { 1.0 };
            let expected = (&x * (2.0 / share))?;
            let (found, expected) = (list(loss.backward()?.get(&x)?)?, list(&expected)?);
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?} {expected:?}");
        }
        let x = leaf(mesh, Shard(0))?;
        let largest = x.to_local()?.abs()?.sum_all()?;
        let error = DTensor::from_local(&largest, mesh, [Partial(ReduceOp::Max)]).unwrap_err().to_string();
        assert!(error.contains("sums and means"), "{error}");
        Ok(())
    });
}

#[test]
fn grad_placements_set_the_layout_of_the_gradient_for_local_code() {
    on_each_world(|mesh| {
        let x = leaf(mesh, Replicate)?;
        let rows = DTensor::ones((4, 3), DType::F64, mesh, [Shard(0)])?;
        // A replicated output that is multiplied by a shard has a sharded gradient; a partial one keeps all ranks' terms.
        let terms = FromLocalOptions { grad_placements: Some(vec![Partial(ReduceOp::Sum)]), ..Default::default() };
        let local = x.to_local_with_grad_placements([Partial(ReduceOp::Sum)])?;
        let y = DTensor::from_local_with(&local, mesh, [Replicate], terms)?;
        let found = (&y * &rows)?.sum_all()?.backward()?;
        assert_eq!(list(found.get(&x)?)?, [1.0; 12]);
        if mesh.size() > 1 {
            let shards = FromLocalOptions { grad_placements: Some(vec![Shard(0)]), ..Default::default() };
            let y = DTensor::from_local_with(&x.to_local()?, mesh, [Replicate], shards)?;
            let error = y.sum_all()?.backward().unwrap_err().to_string();
            assert!(error.contains("grad_placements of from_local"), "{error}");
        }
        Ok(())
    });
}

#[test]
fn detached_and_untracked_tensors_have_no_gradient() {
    on_each_world(|mesh| {
        let x = leaf(mesh, Shard(0))?;
        let placed = |local: &Tensor| DTensor::from_local(local, mesh, [Shard(0)]);
        assert!(placed(&x.to_local()?)?.has_gradient());
        assert!(!placed(&x.to_local()?.detach())?.has_gradient());
        assert!(!placed(&x.detach().to_local()?)?.has_gradient());
        assert!(!no_grad(|| placed(&x.to_local()?))?.has_gradient());
        // candle variables of the program are not part of this graph
        let own = Var::from_tensor(&x.detach().to_local()?)?;
        assert!(!placed(own.as_tensor())?.has_gradient());
        // a backward pass frees the graph, and a second one is an error
        let y = placed(&x.to_local()?.sqr()?)?.sum_all()?;
        y.backward()?;
        assert!(y.backward().unwrap_err().to_string().contains("freed"));
        let error = placed(&x.to_local()?.sqr()?)?.sum_all()?.backward_graph().unwrap_err().to_string();
        assert!(error.contains("gradient of the gradient of local code"), "{error}");
        Ok(())
    });
}

#[test]
fn writes_of_local_code_do_not_change_the_tensor() {
    on_each_world(|mesh| {
        let x = leaf(mesh, Replicate)?;
        let local = x.to_local()?;
        local.slice_set(&Tensor::ones((1, 3), DType::F64, &Device::Cpu)?, 0, 0)?;
        assert_eq!(list(&x)?[0], -5.0);
        Ok(())
    });
}

#[test]
fn local_code_holds_no_memory_after_its_graph_is_dropped() {
    on_each_world(|mesh| {
        let x = leaf(mesh, Shard(0))?;
        let pass = || -> Result<()> {
            let y = (&x * 2.0)?;
            let local = (y.to_local()? * y.to_local()?)?;
            DTensor::from_local(&local, mesh, [Shard(0)])?.sum_all()?.backward()?;
            // never brought back
            y.to_local()?.sqr()?;
            Ok(())
        };
        pass()?;
        let before = mesh.world().memory().current();
        (0..20).try_for_each(|_| pass())?;
        assert_eq!(mesh.world().memory().current(), before);
        Ok(())
    });
}

#[test]
fn replicas_that_differ_are_an_error_that_names_the_rank() {
    ThreadWorld::new(4)
        .unwrap()
        .run(|world| {
            let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
            let check = || FromLocalOptions { run_check: true, ..Default::default() };
            let same = Tensor::full(world.rank() as f32 % 2.0, (2, 2), &Device::Cpu)?;
            DTensor::from_local_with(&same, &mesh, [Replicate, Shard(0)], check())?;
            let other = Tensor::full(if world.rank() == 3 { 7f32 } else { 1.0 }, (2, 2), &Device::Cpu)?;
            let error =
                DTensor::from_local_with(&other, &mesh, [Replicate, Shard(0)], check()).unwrap_err().to_string();
            assert!(error.contains("rank 3 differs from rank 1"), "{error}");
            assert!(!error.contains("rank 2 differs"), "{error}");
            // not compared unless asked, nor where ranks hold different parts
            DTensor::from_local(&other, &mesh, [Replicate, Shard(0)])?;
            let known = FromLocalOptions { shape: Some(vec![4, 4]), ..check() };
            DTensor::from_local_with(&other, &mesh, [Shard(0), Shard(1)], known)?;
            Ok(())
        })
        .unwrap();
}
