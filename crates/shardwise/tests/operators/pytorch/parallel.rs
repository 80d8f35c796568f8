//! Scenarios of PyTorch's tests of parallel styles, `local_map`, embeddings, convolutions and communication records.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use shardwise::nn::{Activation, Builder, Dropout, Embedding, LayerNorm, Linear, Mlp, Module, RmsNorm};
use shardwise::ops::{AttentionOptions, ConvOptions, EmbeddingOptions};
use shardwise::plan::{
    ColwiseParallel, FullyShard, PrepareModuleOutput, RowwiseParallel, SequenceParallel, ShardingPlanner,
    TensorParallel, parallelize_module, shard_module,
};
use shardwise::prelude::*;
use shardwise::{checkpoint_activations, local_map};
use shardwise_test_suites::counting::{counted, counted_both_ways};

use crate::pytorch::{assert_close, list, on, tensor};

const SUM: Placement = Partial(ReduceOp::Sum);

fn builder(mesh: &DeviceMesh) -> Builder {
    Builder::new(mesh).dtype(DType::F64)
}

#[test]
fn a_colwise_layer_gathers_a_sharded_input_once() {
    on(4, |world| {
        let mesh = world.mesh([("tp", 4)])?;
        mesh.manual_seed(1);
        let whole = Linear::new(&builder(&mesh), 16, 16)?;
        let expected = whole.forward(&tensor(&mesh, &[8, 16], &[Replicate])?)?;
        for (input, forward, backward) in
            [(Replicate, &[][..], &[][..]), (Shard(0), &["all_gather"], &["reduce_scatter"])]
        {
            mesh.manual_seed(1);
            let layer = Linear::new(&builder(&mesh), 16, 16)?;
            parallelize_module(&layer, &mesh, &[("", &ColwiseParallel::new("tp").input(input.clone()))])?;
            let x = tensor(&mesh, &[8, 16], std::slice::from_ref(&input))?.requires_grad();
            let (y, grads, calls) = counted_both_ways(&world, || layer.forward(&x))?;
            assert_eq!(y.placements(), [Shard(1)]);
            assert_eq!(calls, [forward.to_vec(), backward.to_vec()], "{input}");
            assert_close(&y, &expected, "output");
            // the gradient of a replicated input is a partial sum, reduced when it is read
            let gradient = grads.get(&x)?;
            assert_eq!(gradient.placements(), [if input == Replicate { SUM } else { Shard(0) }]);
            let whole_x = tensor(&mesh, &[8, 16], &[Replicate])?.requires_grad();
            assert_close(gradient, whole.forward(&whole_x)?.sum_all()?.backward()?.get(&whole_x)?, "gradient");
        }
        Ok(())
    });
}

#[test]
fn a_sequence_parallel_mlp_takes_the_collectives_of_pytorch() {
    on(4, |world| {
        let mesh = world.mesh([("tp", 4)])?;
        let run = |sequence: bool| -> Result<(Mlp, DTensor)> {
            mesh.manual_seed(5);
            let mlp = Mlp::new(&builder(&mesh), 10, 16, Activation::Relu)?;
            let (up, down) = match sequence {
                true => (ColwiseParallel::new("tp").input(Shard(0)), RowwiseParallel::new("tp").output(Shard(0))),
                false => (ColwiseParallel::new("tp"), RowwiseParallel::new("tp")),
            };
            parallelize_module(&mlp, &mesh, &[("up", &up), ("down", &down)])?;
            let x = tensor(&mesh, &[8, 10], &[if sequence { Shard(0) } else { Replicate }])?;
            Ok((mlp, x))
        };
        let mut outputs = Vec::new();
        for (sequence, gathers, scatters, reduces) in [(true, 2, 1, 0), (false, 0, 0, 1)] {
            let (mlp, x) = run(sequence)?;
            let (_, _, calls) = counted_both_ways(&world, || mlp.forward(&x))?;
            let of = |name: &str| calls.iter().flatten().filter(|call| **call == name).count();
            let found = (of("all_gather"), of("reduce_scatter"), of("all_reduce"));
            assert_eq!(found, (gathers, scatters, reduces), "{calls:?}");
            assert_eq!(calls.concat().len(), gathers + scatters + reduces);
            // one step, and the output after it
            let mut optimizer = ShardedOptimizer::new(mlp.named_parameters(), Sgd::default())?;
            optimizer.step(mlp.forward(&x)?.sum_all()?.backward()?)?;
            let after = mlp.forward(&x)?;
            // without gradients the same
            let (inferred, calls) = counted(&world, || no_grad(|| mlp.forward(&x)))?;
            assert!(inferred.equal(&after)? && calls.len() <= 2);
            outputs.push(after);
        }
        assert_close(&outputs[0], &outputs[1], "after a step");
        Ok(())
    });
}

#[test]
fn frozen_weights_stay_frozen_and_cost_no_backward_collectives() {
    on(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let layer = Linear::new(&builder(&mesh), 16, 16)?;
        layer.weight.set_requires_grad(false);
        parallelize_module(&layer, &mesh, &[("", &ColwiseParallel::new("tp"))])?;
        assert!(!layer.weight.requires_grad() && layer.bias.as_ref().is_some_and(Param::requires_grad));
        let rowwise = Linear::new(&builder(&mesh), 16, 16)?;
        rowwise.set_requires_grad(false);
        parallelize_module(&rowwise, &mesh, &[("", &RowwiseParallel::new("tp"))])?;
        assert_eq!(rowwise.weight.get().placements(), [Shard(1)]);
        assert!(rowwise.named_parameters().iter().all(|(_, param)| !param.requires_grad()));
        // embedding -> norm -> linear, with what is trainable chosen
        let ids = DTensor::from_fn((4, 8), DType::I64, &mesh, [Replicate], |i| ((i[0] * 3 + i[1]) % 16) as f64)?;
        for trainable in 0..8usize {
            let (words, norm, out) = (
                Embedding::new(&builder(&mesh).child("words"), 16, 8)?,
                LayerNorm::new(&builder(&mesh).child("norm"), 8, 1e-5)?,
                Linear::new(&builder(&mesh).child("out"), 8, 16)?,
            );
            parallelize_module(&words, &mesh, &[("", &RowwiseParallel::new("tp").output(Shard(1)))])?;
            parallelize_module(&norm, &mesh, &[("", &SequenceParallel::new("tp"))])?;
            parallelize_module(&out, &mesh, &[("", &ColwiseParallel::new("tp").input(Shard(1)).output(Replicate))])?;
            words.set_requires_grad(trainable & 1 > 0);
            norm.set_requires_grad(trainable & 2 > 0);
            out.set_requires_grad(trainable & 4 > 0);
            let (y, forward) = counted(&world, || out.forward(&norm.forward(&words.forward(&ids)?)?))?;
            assert_eq!(forward, ["reduce_scatter", "all_gather", "all_gather"]);
            if trainable == 0 {
                assert!(!y.has_gradient());
                continue;
            }
            let (grads, backward) = counted(&world, || y.sum_all()?.backward())?;
            // into the input of the linear layer one reduce-scatter, into the table one all-gather
            let most = usize::from(trainable & 3 > 0) + usize::from(trainable & 1 > 0);
            assert!(backward.len() <= most, "trainable {trainable:03b}: {backward:?}");
            let count = (trainable & 1) + 2 * (trainable >> 1 & 1) + 2 * (trainable >> 2 & 1);
            assert_eq!(grads.len(), count);
        }
        Ok(())
    });
}

#[test]
fn sequence_parallel_layers_move_nothing_and_leave_partial_gradients() {
    on(4, |world| {
        let mesh = world.mesh([("tp", 4)])?;
        let style = SequenceParallel::new("tp");
        let (layer, rms) = (LayerNorm::new(&builder(&mesh), 12, 1e-5)?, RmsNorm::new(&builder(&mesh), 12, 1e-5)?);
        let dropout = Dropout::new(0.5)?;
        parallelize_module(&layer, &mesh, &[("", &style)])?;
        parallelize_module(&rms, &mesh, &[("", &style)])?;
        parallelize_module(&dropout, &mesh, &[("", &style)])?;
        for (sharded, most) in [(Shard(1), 0), (Shard(0), 1)] {
            let x = tensor(&mesh, &[20, 32, 12], std::slice::from_ref(&sharded))?.requires_grad();
            for (name, run) in [
                ("layer norm", &(|x: &DTensor| layer.forward(x)) as &dyn Fn(&DTensor) -> Result<DTensor>),
                ("rms norm", &|x: &DTensor| rms.forward(x)),
                ("dropout", &|x: &DTensor| dropout.forward(x)),
            ] {
                let (y, grads, calls) = counted_both_ways(&world, || run(&x))?;
                assert_eq!(y.placements(), [Shard(1)], "{name}");
                assert!(calls.iter().all(|calls| calls.len() <= most), "{name} of {sharded}: {calls:?}");
                if name == "layer norm" {
                    assert_eq!(grads.get(&layer.weight.get())?.placements(), [SUM]);
                }
            }
        }
        Ok(())
    });
}

#[test]
fn outputs_are_prepared_and_an_empty_plan_changes_nothing() {
    on(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let layer = Linear::new(&builder(&mesh), 16, 16)?;
        parallelize_module(&layer, &mesh, &[])?;
        assert_eq!(layer.weight.get().placements(), [Replicate]);
        parallelize_module(&layer, &mesh, &[("", &PrepareModuleOutput::new("tp", Shard(0)))])?;
        let (y, calls) = counted(&world, || layer.forward(&tensor(&mesh, &[8, 16], &[Replicate])?))?;
        assert_eq!((y.placements(), calls.len()), (&[Shard(0)][..], 0));
        Ok(())
    });
}

#[test]
fn both_dimensions_of_parallelism_with_recomputed_activations_follow_data_parallelism() {
    on(4, |world| {
        let losses = |mesh: &DeviceMesh, sharded: bool| -> Result<Vec<f64>> {
            mesh.manual_seed(8);
            let mlp = Arc::new(Mlp::new(&builder(mesh), 8, 12, Activation::Gelu)?);
            if sharded {
                let plan = TensorParallel::new("tp").plan(&*mlp, mesh)?;
                shard_module(&*mlp, mesh, &plan)?;
                shard_module(&*mlp, mesh, &FullyShard::new(["dp"]).plan(&*mlp, mesh)?)?;
            }
            let mut optimizer = ShardedOptimizer::new(mlp.named_parameters(), Adam::default())?;
            let batch = if sharded { vec![Shard(0), Replicate] } else { vec![Shard(0); mesh.ndim()] };
            let x = tensor(mesh, &[8, 8], &batch)?;
            let mut all = Vec::new();
            for _ in 0..5 {
                let inner = Arc::clone(&mlp);
                let y = checkpoint_activations(&[&x], move |x| Ok(vec![inner.forward(&x[0])?]))?.swap_remove(0);
                let loss = y.square()?.mean_all()?;
                all.push(loss.item::<f64>()?);
                optimizer.step(loss.backward()?)?;
            }
            Ok(all)
        };
        let (both, data) =
            (losses(&world.mesh([("dp", 2), ("tp", 2)])?, true)?, losses(&world.mesh([("dp", 4)])?, false)?);
        assert!(both.iter().zip(&data).all(|(a, b)| (a - b).abs() < 1e-12 * b.abs()), "{both:?} {data:?}");
        assert!(both[4] < both[0]);
        Ok(())
    });
}

#[test]
fn tables_by_columns_and_rows_take_the_collectives_of_pytorch() {
    on(4, |world| {
        let mesh = world.mesh([("tp", 4)])?;
        let ids = |shape: &[usize], below: usize, placement: Placement| {
            DTensor::from_fn(shape, DType::I64, &mesh, [placement], |i| {
                (i.iter().fold(1, |sum, n| sum * 3 + n) % below) as f64
            })
        };
        for (vocabulary, width) in [(17, 12), (13, 22), (23, 16)] {
            for shape in [vec![4], vec![2, 3], vec![2, 3, 2]] {
                let picks = ids(&shape, vocabulary, Replicate)?;
                let whole = tensor(&mesh, &[vocabulary, width], &[Replicate])?.requires_grad();
                let expected = whole.embedding(&picks)?;
                let wanted = expected.sum_all()?.backward()?;
                for (placement, reading) in [(Shard(1), &[][..]), (Shard(0), &["all_reduce"])] {
                    let table = tensor(&mesh, &[vocabulary, width], std::slice::from_ref(&placement))?.requires_grad();
                    let (y, grads, calls) = counted_both_ways(&world, || table.embedding(&picks))?;
                    assert!(calls.concat().is_empty(), "{placement}: {calls:?}");
                    assert_close(grads.get(&table)?, wanted.get(&whole)?, "gradient");
                    if placement == Shard(0) {
                        let (_, calls) = counted(&world, || y.redistribute([Replicate]))?;
                        assert_eq!(calls, reading);
                    }
                    assert_close(&y, &expected, "rows");
                }
            }
        }
        // the padding row has no gradient, and rows are not longer than max_norm
        for placement in [Replicate, Shard(0), Shard(1)] {
            let table = tensor(&mesh, &[12, 8], std::slice::from_ref(&placement))?.requires_grad();
            let picks = ids(&[3, 4], 12, Replicate)?;
            let options = EmbeddingOptions { padding_idx: Some(4), max_norm: Some(2.0), ..EmbeddingOptions::default() };
            let y = table.embedding_with(&picks, options)?;
            let norms = list(&y.norm(2.0, &[-1], false)?)?;
            assert!(norms.iter().all(|norm| *norm <= 2.0 + 1e-6), "{norms:?}");
            let grads = y.sum_all()?.backward()?;
            let per_row = list(&grads.get(&table)?.sum(&[1], false)?)?;
            let counts = list(&picks)?;
            for (row, found) in per_row.iter().enumerate() {
                let count = counts.iter().filter(|id| **id == row as f64).count();
                assert_eq!(*found, if row == 4 { 0.0 } else { 8.0 * count as f64 }, "row {row} of {placement}");
            }
            assert!(per_row[4] == 0.0 && counts.contains(&4.0), "{counts:?}");
        }
        // two tables, read later, one of them twice
        let (a, b) = (tensor(&mesh, &[16, 4], &[Shard(0)])?, tensor(&mesh, &[13, 4], &[Shard(0)])?);
        let (x, y) = (a.embedding(&ids(&[5], 16, Replicate)?)?, b.embedding(&ids(&[5], 13, Replicate)?)?);
        let first = list(&x)?;
        assert_eq!(
            (first, list(&y)?),
            (list(&x)?, list(&b.redistribute([Replicate])?.embedding(&ids(&[5], 13, Replicate)?)?)?)
        );
        Ok(())
    });
}

#[test]
fn embeddings_of_reordered_ids_are_reordered_embeddings() {
    on(4, |world| {
        let mesh = world.mesh([("tp", 4)])?;
        let words = Embedding::new(&builder(&mesh).child("words"), 25, 13)?;
        let positions = Embedding::new(&builder(&mesh).child("positions"), 13, 13)?;
        for table in [&words, &positions] {
            parallelize_module(table, &mesh, &[("", &ColwiseParallel::new("tp"))])?;
        }
        let ids = DTensor::from_fn((7, 13), DType::I64, &mesh, [Replicate], |i| ((i[0] * 5 + i[1]) % 11) as f64)?;
        let straight = words.forward(&ids)?.redistribute([Shard(1)])?;
        let turned = words.forward(&ids.t()?)?.redistribute([Shard(0)])?;
        assert!(straight.equal(&turned.transpose(0, 1)?)?);
        let at = DTensor::arange(0..13, DType::I64, &mesh, [Replicate])?;
        let sum = straight.add(&positions.forward(&at)?.redistribute([Shard(0)])?)?;
        let whole = words.weight.get().redistribute([Replicate])?.embedding(&ids)?;
        let places = positions.weight.get().redistribute([Replicate])?.embedding(&at)?;
        assert_close(&sum, &whole.add(&places)?, "words and positions");
        Ok(())
    });
}

#[test]
fn local_functions_may_communicate_and_take_inputs_of_other_meshes() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let (x, w) = (tensor(&mesh, &[16, 8], &[Shard(1)])?, tensor(&mesh, &[8, 12], &[Shard(0)])?);
        let whole = |x: &DTensor| x.redistribute(vec![Replicate; x.placements().len()]);
        let expected = whole(&x)?.matmul(&whole(&w)?)?;
        // a product of local parts, summed by the program
        let group = mesh.group(&["a"])?;
        let reduced = |t: &[Tensor]| -> candle_core::Result<Tensor> {
            group.all_reduce(&t[0].matmul(&t[1])?, ReduceOp::Sum).map_err(candle_core::Error::wrap)
        };
        let (y, calls) = counted(&world, || local_map(&[&x, &w], [Replicate], &[], reduced))?;
        assert_eq!(calls, ["all_reduce"]);
        // ranks whose results differ in shape get an error
        let rank = world.rank();
        let uneven = local_map(&[&x], [Replicate], &[], |t| t[0].narrow(0, 0, 1 + rank % 2));
        assert!(matches!(uneven, Err(Error::Mismatch { .. })), "{uneven:?}");
        assert_close(&y, &expected, "local product");
        // inputs in other layouts are an error, or are moved first
        let rows = tensor(&mesh, &[16, 8], &[Replicate])?;
        assert!(rows.expect("a=S(1)").is_err());
        let y = local_map(&[&rows.redistribute([Shard(1)])?, &w], [SUM], &[], |t| t[0].matmul(&t[1]))?;
        assert_close(&y, &expected, "partial product");
        // a function of the local part that returns a plain number needs no map
        let mine = x.to_local()?.sum_all()?.to_scalar::<f64>()?;
        assert_eq!(
            world.all_reduce(&Tensor::new(mine, &Device::Cpu)?, ReduceOp::Sum)?.to_scalar::<f64>()?,
            x.sum_all()?.item::<f64>()?
        );
        // uneven shards on two axes, and inputs of two meshes: the first one's mesh is that of the result
        let square = world.mesh([("a", 2), ("b", 2)])?;
        let x = tensor(&square, &[9, 5], &[Shard(0), Shard(1)])?;
        assert_close(&local_map(&[&x], [Shard(0), Shard(1)], &[], |t| &t[0] * 2.0)?, &(&x * 2.0)?, "times 2");
        let (w, x) = (tensor(&square, &[8, 8], &[Shard(0), Shard(1)])?, tensor(&mesh, &[8, 16], &[Shard(1)])?);
        let y = local_map(&[&w, &x], [Replicate, Shard(1)], &[], |t| t[1].matmul(&t[0]))?;
        assert_eq!((y.device_mesh() == &square, y.shape()), (true, &[8, 8][..]));
        assert_eq!(y.local_shape(), [8, 4]);
        let local = x.to_local()?.matmul(&w.to_local()?)?;
        assert_eq!(y.to_local()?.to_vec2::<f64>()?, local.to_vec2::<f64>()?);
        Ok(())
    });
}

#[test]
fn convolutions_of_sharded_columns_train_as_on_one_rank() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        // kernel, options, and the collectives of the forward pass: none where windows do not overlap, else one exchange of borders
        let down = ConvOptions { stride: 4, ..ConvOptions::default() };
        let deep = ConvOptions { padding: 3, groups: 8, ..ConvOptions::default() };
        for (channels, kernel, options, most) in [([3, 5], 4, down, 0), ([8, 1], 7, deep, 1)] {
            let outputs = if options.groups > 1 { channels[0] } else { channels[1] };
            let inside = channels[0] / options.groups;
            let steps = |placement: Placement| -> Result<(Vec<Vec<f64>>, usize)> {
                let x = (tensor(&mesh, &[3, channels[0], 16, 32], &[placement])? * 0.1)?;
                let weight = Param::new(&(tensor(&mesh, &[outputs, inside, kernel, kernel], &[Replicate])? * 0.05)?);
                let bias = Param::new(&tensor(&mesh, &[outputs], &[Replicate])?);
                let named = [("weight".to_string(), weight.clone()), ("bias".to_string(), bias.clone())];
                let mut optimizer = ShardedOptimizer::new(named, Sgd::default())?;
                let mut calls = 0;
                for _ in 0..10 {
                    let (y, forward) = counted(&world, || x.conv2d(&weight.get(), Some(&bias.get()), options))?;
                    calls = forward.len();
                    let grads = y.square()?.mean_all()?.backward()?;
                    assert_eq!(grads.len(), 2, "the input needs none");
                    optimizer.step(grads)?;
                }
                Ok((vec![list(&weight.get())?, list(&bias.get())?], calls))
            };
            let ((sharded, calls), (whole, _)) = (steps(Shard(3))?, steps(Replicate)?);
            assert!(calls <= most, "{calls} collectives");
            let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12;
            assert!(sharded.concat().iter().zip(&whole.concat()).all(near));
        }
        Ok(())
    });
}

#[test]
fn attention_of_sharded_sequences_is_right_without_context_parallelism() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let of = |placement: Placement, factor: f64| -> Result<DTensor> {
            tensor(&mesh, &[2, 4, 32, 8], &[placement])? * factor
        };
        let run = |placement: Placement| -> Result<DTensor> {
            let [q, k, v] = [0.3, 0.2, 1.0].map(|factor| of(placement.clone(), factor));
            q?.scaled_dot_product_attention(&k?, &v?, AttentionOptions { causal: true, ..AttentionOptions::default() })
        };
        let expected = run(Replicate)?;
        for placement in [Shard(0), Shard(1), Shard(2)] {
            assert!(run(placement.clone())?.allclose(&expected, 1e-10, 1e-10)?, "{placement}");
        }
        for placement in [Shard(0), Shard(1)] {
            let [q, k, v] = [0.3, 0.2, 1.0].map(|factor| of(placement.clone(), factor).map(|t| t.requires_grad()));
            let (q, k, v) = (q?, k?, v?);
            let (y, grads, calls) = counted_both_ways(&world, || {
                q.scaled_dot_product_attention(&k, &v, AttentionOptions { causal: true, ..AttentionOptions::default() })
            })?;
            assert!(calls.concat().is_empty(), "{placement}: {calls:?}");
            assert_eq!(y.placements(), std::slice::from_ref(&placement));
            assert!([&q, &k, &v].iter().all(|leaf| grads.get(leaf).unwrap().placements() == [placement.clone()]));
        }
        Ok(())
    });
}

#[test]
fn records_start_again_after_they_are_cleared() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let x = tensor(&mesh, &[4, 4], &[Shard(0)])?;
        for _ in 0..3 {
            let (_, calls) = counted(&world, || x.redistribute([Replicate]))?;
            assert_eq!(calls, ["all_gather"]);
            let report = world.trace().report();
            assert_eq!(
                report.0.iter().filter(|(_, call, _)| *call == "all_gather").map(|(_, _, t)| t.calls).sum::<usize>(),
                1
            );
        }
        world.trace().clear();
        assert!(world.trace().records().is_empty() && world.trace().report().0.is_empty());
        Ok(())
    });
}
