//! Scenarios of PyTorch's `test_dtensor.py`, `test_api.py`, `test_init.py` and `test_random_ops.py`.

use candle_core::{Device, Tensor};
use shardwise::Generator;
use shardwise::comm::current_mesh;
use shardwise::error::ErrorKind;
use shardwise::nn::{Activation, Builder, Linear, Mlp, Module, distribute_module};
use shardwise::plan::{ColwiseParallel, RowwiseParallel, ShardingPlan, parallelize_module, shard_module};
use shardwise::prelude::*;
use shardwise::tensor::current_mesh as on_current_mesh;
use shardwise_test_suites::counting::counted;

use crate::pytorch::{list, on};

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F64, &Device::Cpu).unwrap()
}

/// A matrix with other elements at every place.
fn matrix(rows: usize, columns: usize) -> Tensor {
    Tensor::arange(0f64, (rows * columns) as f64, &Device::Cpu).unwrap().reshape((rows, columns)).unwrap()
}

#[test]
fn local_parts_on_three_axes_multiply_the_dimensions_that_are_sharded() {
    on(8, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2), ("c", 2)])?;
        for (placements, shape) in
            [([Shard(0), Shard(1), Shard(2)], [6, 6, 6]), ([Shard(0), Shard(0), Shard(2)], [12, 3, 6])]
        {
            let x = DTensor::from_local(&ones(&[3, 3, 3]), &mesh, placements)?;
            assert_eq!((x.shape(), x.local_shape()), (&shape[..], vec![3, 3, 3]));
            assert_eq!(x.device_mesh().device_type(), "cpu");
        }
        Ok(())
    });
}

#[test]
fn plain_code_before_between_and_after_is_one_graph() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let x = DTensor::from_local(&ones(&[3, 3]), &mesh, [Shard(0)])?.requires_grad();
        // x 3, a plain sum with 8, x 6, and plain again
        let plain = ((x.to_local()? * 3.0)? + 8.0)?;
        let middle = (DTensor::from_local(&plain, &mesh, [Shard(0)])? * 6.0)?;
        let after = DTensor::from_local(&(middle.to_local()? + 1.0)?, &mesh, [Shard(0)])?;
        let grads = after.sum_all()?.backward()?;
        assert_eq!(list(grads.get(&x)?)?, [18.0; 36]);
        Ok(())
    });
}

#[test]
fn a_gradient_hint_of_partial_is_one_reduce_scatter() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let x = DTensor::from_local(&ones(&[2, 3]), &mesh, [Shard(0)])?.requires_grad();
        let sum = [Partial(ReduceOp::Sum)];
        let (y, forward) = counted(&world, || {
            let local = x.redistribute([Replicate])?.to_local_with_grad_placements(sum.clone())?;
            // every rank uses the whole, so that the gradients of the ranks add up
            DTensor::from_local_with_shape(&(local * 1.0)?, &mesh, sum.clone(), (8, 3))
        })?;
        assert_eq!(forward, ["all_gather"]);
        let (grads, backward) = counted(&world, || y.sum_all()?.backward())?;
        assert_eq!(backward, ["reduce_scatter"]);
        assert_eq!(list(grads.get(&x)?)?, [4.0; 24]);
        // the same through the full tensor
        let whole = x.full_tensor_with_grad_placements(sum.clone())?;
        let y = DTensor::from_local_with_shape(&(whole * 1.0)?, &mesh, sum, (8, 3))?;
        assert_eq!(list(y.sum_all()?.backward()?.get(&x)?)?, [4.0; 24]);
        Ok(())
    });
}

#[test]
fn a_replicated_tensor_with_a_partial_gradient_is_reduced_once() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let x = DTensor::ones((4, 3), DType::F64, &mesh, [Replicate])?.requires_grad();
        let local = x.to_local_with_grad_placements([Partial(ReduceOp::Sum)])?;
        let mine = local.narrow(0, world.rank(), 1)?;
        let y = DTensor::from_local(&mine, &mesh, [Shard(0)])?;
        let (grads, calls) = counted(&world, || y.sum_all()?.backward()?.in_param_layout())?;
        assert_eq!(calls, ["all_reduce"]);
        assert_eq!(list(grads.get(&x)?)?, [1.0; 12]);
        Ok(())
    });
}

#[test]
fn ranks_outside_a_mesh_hold_nothing_and_never_wait() {
    on(4, |world| {
        let mesh = world.device_mesh("dp=2@0,2".parse()?)?;
        let inside = mesh.my_coordinate().is_some();
        let x = DTensor::from_local(&ones(&[3, 4]), &mesh, [Shard(0)])?;
        assert_eq!((x.shape(), x.placements()), (&[6, 4][..], &[Shard(0)][..]));
        assert_eq!(x.local_elem_count(), if inside { 12 } else { 0 });
        let y = (&x + 2.0)?;
        assert_eq!(y.local_elem_count(), if inside { 12 } else { 0 });
        // S(0) to R and back
        let back = y.redistribute([Replicate])?.redistribute([Shard(0)])?;
        assert_eq!(back.local_elem_count(), if inside { 12 } else { 0 });
        // a rank outside has no elements to compare: it gets an answer that is the same on all ranks, or an error
        assert!(!back.equal(&y.narrow(0, 0, 3)?)? && !back.equal(&y.to_dtype(DType::F32)?)?);
        for (found, expected) in [(back.equal(&y), true), (back.equal(&x), false), (back.allclose(&y, 0.0, 0.0), true)]
        {
            match inside {
                true => assert_eq!(found?, expected),
                false => assert_eq!(found.unwrap_err().kind(), Some(&ErrorKind::NoData)),
            }
        }
        let sum = y.sum_all()?;
        match inside {
            true => assert_eq!(sum.item::<f64>()?, 72.0),
            false => assert_eq!(sum.item::<f64>().unwrap_err().kind(), Some(&ErrorKind::NoData)),
        }
        let parts = y.split(3, 0)?;
        assert_eq!(parts.iter().map(|p| p.shape().to_vec()).collect::<Vec<_>>(), [vec![3, 4], vec![3, 4]]);
        assert!(inside || parts.iter().all(|part| part.local_elem_count() == 0));
        // another number of dimensions is found on every rank
        assert!(DTensor::from_local(&ones(&[3]), &mesh, [Shard(1)]).is_err());
        world.barrier()
    });
}

#[test]
fn factories_on_some_ranks_of_the_world_fill_those_alone() {
    on(4, |world| {
        for (text, sizes) in [("a=2@0,3", vec![16, 0, 0, 16]), ("a=3@0,1,3", vec![11, 11, 0, 10])] {
            let mesh = world.device_mesh(text.parse()?)?;
            let x = DTensor::zeros((32, 3), DType::F32, &mesh, [Shard(0)])?;
            assert_eq!(x.layout().local_shape(world.rank()).first().copied().unwrap_or(0), sizes[world.rank()]);
            assert_eq!(x.local_elem_count(), 3 * sizes[world.rank()]);
        }
        let mesh = world.device_mesh("a=2,b=1@0,3".parse()?)?;
        let x = DTensor::zeros((32, 3), DType::F32, &mesh, [Shard(0), Shard(1)])?;
        assert_eq!(x.local_elem_count(), if [0, 3].contains(&world.rank()) { 48 } else { 0 });
        Ok(())
    });
}

#[test]
fn the_mesh_of_a_scope_is_used_by_constructors_and_styles() {
    on(8, |world| {
        let (flat, square) = (world.mesh([("tp", 8)])?, world.mesh([("dp", 2), ("tp", 4)])?);
        with_mesh(&flat, || {
            let x = on_current_mesh::from_local(&ones(&[3, 3]), [Shard(0)])?;
            assert_eq!(x.shape(), [24, 3]);
            with_mesh(&square, || {
                let y = on_current_mesh::distribute_tensor(&matrix(8, 4), [Shard(0), Shard(1)], None)?;
                assert_eq!(y.local_shape(), [4, 1]);
                let mlp = Mlp::new(&Builder::new(&current_mesh()?), 8, 16, Activation::Relu)?;
                let (up, down) = (ColwiseParallel::new("tp"), RowwiseParallel::new("tp"));
                parallelize_module(&mlp, &current_mesh()?, &[("up", &up), ("down", &down)])?;
                assert_eq!(mlp.up.weight.get().placements(), [Replicate, Shard(0)]);
                Ok(())
            })?;
            // a tensor keeps its mesh
            assert_eq!(x.redistribute([Replicate])?.device_mesh(), &flat);
            Ok(())
        })
    });
}

#[test]
fn axes_that_shard_one_dimension_have_an_order() {
    let mesh: Mesh = "a=2,b=2,c=2".parse().unwrap();
    let layout = |placements: &str| Layout::new(&mesh, (8, 8, 8), Placement::parse_list(placements).unwrap()).unwrap();
    let first = layout("S(1),S(1),S(0)");
    assert_eq!((first.shard_order(0), first.shard_order(1), first.shard_order(2)), (&[2][..], &[0, 1][..], &[][..]));
    let none = layout("R,P(sum),R");
    assert!((0..3).all(|dim| none.shard_order(dim).is_empty()));
    let second = layout("S(1),S(2),S(1)");
    assert_eq!(second.shard_order(1), [0, 2]);
    assert!(second.has_default_order());
    let swapped =
        Layout::with_shard_order(&mesh, (8, 8, 8), second.placements().to_vec(), &[(1, &["c", "a"])]).unwrap();
    assert!(!swapped.has_default_order() && swapped != second);
}

#[test]
fn distributing_one_ranks_data_is_one_exchange_and_the_leaf_is_trainable() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let mine = (matrix(12, 3) * (world.rank() + 1) as f64)?;
        let (x, calls) = counted(&world, || DTensor::distribute_tensor(&mine, &mesh, [Shard(0)], Some(0)))?;
        assert_eq!(calls.len(), 1, "{calls:?}");
        assert_eq!(x.full_tensor()?.to_vec2::<f64>()?, matrix(12, 3).to_vec2::<f64>()?);
        let x = x.requires_grad();
        assert_eq!(list((&x * 2.0)?.sum_all()?.backward()?.get(&x)?)?, [2.0; 36]);
        Ok(())
    });
}

/// Twenty layers, as a list with names.
#[derive(Module)]
struct Stack {
    layers: Vec<Linear>,
}

#[test]
fn a_module_of_many_layers_is_distributed_as_the_function_says() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let build = || -> Result<Stack> {
            let builder = Builder::new(&mesh);
            let layer = |i: usize| Linear::new(&builder.child("layers").child(&i.to_string()), 8, 8);
            Ok(Stack { layers: (0..20).map(layer).collect::<Result<_>>()? })
        };
        let placements = |stack: &Stack| {
            stack.named_parameters().into_iter().map(|(_, p)| p.get().placements()[0].clone()).collect::<Vec<_>>()
        };
        let stack = build()?;
        distribute_module(&stack, &|_, _| Some(vec![Shard(0)]), None, None)?;
        assert_eq!(placements(&stack), vec![Shard(0); 40]);
        let stack = build()?;
        distribute_module(&stack, &|_, _| None, None, None)?;
        assert_eq!(placements(&stack), vec![Replicate; 40]);
        // only two layers, one of them frozen
        let stack = build()?;
        stack.layers[8].weight.set_requires_grad(false);
        let chosen = |path: &str, _: &Param| {
            let sharded = path.starts_with("layers.0.") || path.starts_with("layers.8.");
            sharded.then(|| vec![Shard(0)])
        };
        distribute_module(&stack, &chosen, None, None)?;
        for (path, param) in stack.named_parameters() {
            assert_eq!(param.get().placements()[0] == Shard(0), chosen(&path, &param).is_some(), "{path}");
            assert_eq!(param.requires_grad(), path != "layers.8.weight", "{path}");
        }
        let mut x = DTensor::ones((2, 8), DType::F32, &mesh, [Replicate])?;
        for layer in &stack.layers {
            x = layer.forward(&x)?;
        }
        let grads = x.sum_all()?.backward()?;
        assert_eq!(grads.len(), 39);
        assert!(grads.get(&stack.layers[8].weight.get()).is_err());
        Ok(())
    });
}

#[test]
fn hooks_of_a_distributed_module_see_its_input_and_output() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let layer = Linear::new(&Builder::new(&mesh).dtype(DType::F64), 4, 4)?;
        let rows = DTensor::from_local(&ones(&[2, 4]), &mesh, [Shard(0)])?;
        distribute_module(
            &layer,
            &|_, _| Some(vec![Replicate]),
            Some(Box::new(|x| x.redistribute([Shard(0)]))),
            Some(Box::new(|y| y.redistribute([Replicate]))),
        )?;
        let y = layer.forward(&rows)?;
        assert_eq!((y.shape(), y.placements()), (&[8, 4][..], &[Replicate][..]));
        let grads = y.sum_all()?.backward()?.in_param_layout()?;
        let gradient = grads.get(&layer.weight.get())?;
        assert_eq!(gradient.placements(), [Replicate]);
        assert_eq!(list(gradient)?, [8.0; 16]);
        Ok(())
    });
}

#[test]
fn a_model_built_in_its_layout_steps_as_one_that_is_sharded_afterwards() {
    on(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let plan = ShardingPlan::new()
            .param("up.weight", [Shard(0)])
            .param("up.bias", [Shard(0)])
            .param("down.weight", [Shard(1)]);
        let x = DTensor::ones((4, 5), DType::F32, &mesh, [Replicate])?;
        let stepped = |mlp: &Mlp| -> Result<Vec<Vec<f32>>> {
            let mut optimizer = ShardedOptimizer::new(mlp.named_parameters(), Sgd::default())?;
            optimizer.step(mlp.forward(&x)?.square()?.sum_all()?.backward()?)?;
            let all = mlp.named_parameters().into_iter();
            all.map(|(_, p)| Ok(p.get().full_tensor()?.flatten_all()?.to_vec1()?)).collect()
        };
        mesh.manual_seed(3);
        let built = plan.build(&mesh, |builder| Mlp::new(builder, 5, 1024, Activation::Relu))?;
        assert_eq!(built.up.weight.get().local_shape(), [512, 5]);
        mesh.manual_seed(3);
        let sharded = Mlp::new(&Builder::new(&mesh), 5, 1024, Activation::Relu)?;
        shard_module(&sharded, &mesh, &plan)?;
        assert_eq!(stepped(&built)?, stepped(&sharded)?);
        Ok(())
    });
}

#[test]
fn tensors_of_another_type_and_shape_are_made_from_one() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let x = DTensor::full(7.0, (9, 4), DType::F32, &mesh, [Shard(0)])?;
        let ((same, other), calls) = counted(&world, || {
            let half = x.zeros_like()?.to_dtype(DType::BF16)?;
            Ok((half, DTensor::full(42.0, (3, 3), DType::F32, &mesh, [Replicate])?))
        })?;
        assert_eq!((same.dtype(), same.layout()), (DType::BF16, x.layout()));
        assert_eq!(
            (x.dtype(), x.to_local()?.flatten_all()?.to_vec1::<f32>()?.iter().all(|v| *v == 7.0)),
            (DType::F32, true)
        );
        assert_eq!((other.shape(), other.placements()), (&[3, 3][..], &[Replicate][..]));
        assert!(calls.is_empty(), "{calls:?}");
        // there and back
        let wide = DTensor::randn((8, 4), &mesh, [Shard(0)])?.to_dtype(DType::BF16)?;
        assert!(wide.to_dtype(DType::F32)?.to_dtype(DType::BF16)?.equal(&wide)?);
        Ok(())
    });
}

#[test]
fn seeds_are_local_and_drawn_from_alike() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let (_, calls) = counted(&world, || {
            mesh.manual_seed(5);
            Ok(())
        })?;
        assert!(world.trace().records().is_empty() && calls.is_empty(), "a seed communicates nothing");
        // a seed with the highest bit
        let seed = u64::MAX - 5;
        mesh.manual_seed(seed);
        let state = mesh.generator().state();
        assert_eq!(state.seed, seed);
        let first = DTensor::randn(8, &mesh, [Shard(0)])?;
        mesh.generator().set_state(state);
        assert!(first.equal(&DTensor::randn(8, &mesh, [Replicate])?)?);
        assert_eq!(Generator::new(seed).state().seed, seed);
        // parts of a sharded draw differ, replicas do not
        let x = DTensor::rand((4, 16), &mesh, [Shard(1)])?;
        let all = x.full_tensor()?.to_vec2::<f32>()?;
        assert_ne!(all[0][..4], all[0][4..8]);
        mesh.manual_seed(9);
        let masked = x.redistribute([Replicate])?.dropout(0.2, true)?;
        let whole = DTensor::from_local(&masked.to_local()?, &mesh, [Shard(0)])?.full_tensor()?;
        for rank in 1..4 {
            assert_eq!(whole.narrow(0, 4 * rank, 4)?.to_vec2::<f32>()?, whole.narrow(0, 0, 4)?.to_vec2::<f32>()?);
        }
        Ok(())
    });
}

#[test]
fn random_tensors_of_half_precision_are_drawn_as_on_one_rank() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let like = DTensor::zeros((8, 6), dtype, &mesh, [Shard(0)])?;
            let draw = |like: &DTensor| -> Result<[DTensor; 3]> {
                mesh.manual_seed(1);
                Ok([like.rand_like()?, like.randn_like()?, like.randint_like(0..9)?])
            };
            let whole = like.redistribute([Replicate])?;
            for (sharded, one) in draw(&like)?.iter().zip(draw(&whole)?.iter()) {
                assert_eq!((sharded.dtype(), sharded.placements()), (dtype, &[Shard(0)][..]));
                assert!(sharded.equal(one)?);
                let rows = sharded.to_dtype(DType::F32)?.full_tensor()?.to_vec2::<f32>()?;
                assert_ne!(rows[0], rows[2], "ranks draw different numbers");
            }
        }
        Ok(())
    });
}

#[test]
fn stages_have_seeds_of_their_own() {
    on(4, |world| {
        let mesh = world.mesh([("pp", 2), ("spmd", 2)])?;
        let stage = mesh.my_coordinate().expect("a rank of the mesh")[0];
        let own = mesh.slice(["spmd"])?;
        own.manual_seed(123 + stage as u64);
        let x = DTensor::rand((4, 4), &own, [Shard(0)])?;
        let all = DTensor::from_local(&x.to_local()?, &mesh, [Shard(0), Shard(0)])?.full_tensor()?.to_vec2::<f32>()?;
        let parts: Vec<&[Vec<f32>]> = all.chunks(2).collect();
        assert!((0..4).all(|i| (0..i).all(|j| parts[i] != parts[j])), "{parts:?}");
        Ok(())
    });
}

#[test]
fn a_seed_for_a_mesh_of_other_ranks_changes_nothing() {
    on(4, |world| {
        let (mesh, all) = (world.device_mesh("a=2@0,1".parse()?)?, world.mesh([("a", 4)])?);
        all.manual_seed(2);
        // one program for all ranks: PyTorch refuses this call on ranks 2 and 3
        mesh.manual_seed(7);
        let x = DTensor::rand(8, &mesh, [Shard(0)])?;
        let y = DTensor::rand(8, &all, [Shard(0)])?;
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        alone.manual_seed(2);
        let expected = DTensor::rand(8, &alone, [Replicate])?.full_tensor()?.to_vec1::<f32>()?;
        assert_eq!(y.full_tensor()?.to_vec1::<f32>()?, expected);
        alone.manual_seed(7);
        let expected = DTensor::rand(8, &alone, [Replicate])?.full_tensor()?.to_vec1::<f32>()?;
        if mesh.my_coordinate().is_some() {
            assert_eq!(x.full_tensor()?.to_vec1::<f32>()?, expected);
        }
        world.barrier()
    });
}

#[test]
fn draws_with_a_tensor_of_probabilities_are_those_of_one_rank() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let share = |placement| DTensor::from_fn((4, 250), DType::F32, &mesh, [placement], |i| i[0] as f64 / 3.0);
        mesh.manual_seed(11);
        let whole = share(Replicate)?.bernoulli()?;
        let counts = whole.sum(&[1], false)?.full_tensor()?.to_vec1::<f32>()?;
        assert_eq!((counts[0], counts[3]), (0.0, 250.0), "probabilities 0 and 1");
        // five standard deviations of 250 draws
        assert!((counts[1] - 83.3).abs() < 38.0 && (counts[2] - 166.7).abs() < 38.0, "{counts:?}");
        for placement in [Shard(0), Shard(1), Partial(ReduceOp::Sum)] {
            mesh.manual_seed(11);
            let x = share(Replicate)?.redistribute([placement])?.requires_grad();
            let drawn = x.bernoulli()?;
            assert!(drawn.equal(&whole)?);
            // a draw is a constant: the gradient is that of the other factor
            let grads = (&drawn * &x)?.sum_all()?.backward()?;
            assert!(grads.get(&x)?.equal(&whole)?);
        }
        let error = (share(Replicate)? + 0.5)?.bernoulli().unwrap_err().to_string();
        assert!(error.contains("bernoulli") && error.contains("0 to 1"), "{error}");
        assert!(DTensor::ones(2, DType::I64, &mesh, [Replicate])?.bernoulli().is_err());
        Ok(())
    });
}

#[test]
fn placements_say_what_they_are() {
    let all = ["R", "S(0)", "S(3)", "SS(3,1)", "SS(3,2)", "SS(0,2)", "P(sum)", "P(max)"];
    let all: Vec<Placement> = all.iter().map(|text| text.parse().unwrap()).collect();
    for (i, a) in all.iter().enumerate() {
        assert!(all.iter().skip(i + 1).all(|b| a != b), "{a}");
        let kinds = [a.is_replicate(), a.is_shard(None), a.is_partial()];
        assert_eq!(kinds.iter().filter(|kind| **kind).count(), 1, "{a}");
    }
    // a strided shard is a shard of its dimension, and a kind of its own
    let strided = Placement::strided(3, 2);
    assert!(strided.is_shard(Some(3)) && !strided.is_shard(Some(0)) && strided.shard_dim() == Some(3));
    assert!(matches!(strided, Placement::StridedShard { .. }) && !matches!(strided, Shard(_)));
}
