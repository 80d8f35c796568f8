//! Scenarios of PyTorch's `test_tp_style.py`, `test_parallelize_api.py`, `test_tp_random_state.py`, `test_random_ops.py` and
//! `test_comm_mode_features.py`: layers under parallel styles, forward and backward, how they start, and what is recorded.

use std::collections::BTreeMap;

use candle_core::Tensor;
use shardwise::comm::{Phase, record_communication};
use shardwise::nn::init::Init;
use shardwise::nn::{Activation, Builder, Embedding, Linear, Mlp, Module};
use shardwise::plan::{ColwiseParallel, ParallelStyle, RowwiseParallel, ShardingPlan, parallelize_module};
use shardwise::prelude::*;
use shardwise_test_suites::counting::counted_both_ways;

use crate::pytorch::{assert_close, list, on, tensor};

fn builder(mesh: &DeviceMesh) -> Builder {
    Builder::new(mesh).dtype(DType::F64)
}

#[test]
fn row_parallel_layers_take_the_collectives_of_pytorch_both_ways() {
    on(4, |world| {
        let mesh = world.mesh([("tp", 4)])?;
        mesh.manual_seed(1);
        let whole = Linear::new(&builder(&mesh), 16, 10)?;
        let whole_x = tensor(&mesh, &[8, 16], &[Replicate])?.requires_grad();
        let expected = whole.forward(&whole_x)?;
        let wanted = expected.sum_all()?.backward()?;
        let cases = [(Replicate, &["all_reduce"][..], &[][..]), (Shard(0), &["reduce_scatter"], &["all_gather"])];
        for (output, forward, backward) in &cases {
            mesh.manual_seed(1);
            let layer = Linear::new(&builder(&mesh), 16, 10)?;
            parallelize_module(&layer, &mesh, &[("", &RowwiseParallel::new("tp").output(output.clone()))])?;
            assert_eq!(layer.weight.get().placements(), [Shard(1)]);
            let x = tensor(&mesh, &[8, 16], &[Shard(1)])?.requires_grad();
            let (y, grads, calls) = counted_both_ways(&world, || layer.forward(&x))?;
            assert_eq!(calls, [forward.to_vec(), backward.to_vec()], "output {output}");
            assert_eq!(y.placements(), std::slice::from_ref(output));
            assert_close(&y, &expected, "output");
            assert_close(grads.get(&x)?, wanted.get(&whole_x)?, "gradient of the input");
            let (found, right) = (grads.get(&layer.weight.get())?, wanted.get(&whole.weight.get())?);
            assert_eq!(found.placements(), [Shard(1)]);
            assert_close(found, right, "gradient of the weight");
        }
        // tables by rows and by columns
        let ids = DTensor::from_fn((4, 8), DType::I64, &mesh, [Replicate], |i| ((i[0] * 5 + i[1]) % 16) as f64)?;
        mesh.manual_seed(2);
        let whole = Embedding::new(&builder(&mesh), 16, 16)?;
        let expected = whole.forward(&ids)?;
        let wanted = expected.sum_all()?.backward()?;
        let (rows, scattered) = (RowwiseParallel::new("tp"), RowwiseParallel::new("tp").output(Shard(1)));
        let columns = ColwiseParallel::new("tp");
        type Case<'a> = (&'a dyn ParallelStyle, Placement, &'static [&'static str], &'static [&'static str]);
        let cases: [Case<'_>; 3] = [
            (&rows, Replicate, &["all_reduce"], &[]),
            (&scattered, Shard(1), &["reduce_scatter"], &["all_gather"]),
            (&columns, Shard(2), &[], &[]),
        ];
        for (style, output, forward, backward) in cases {
            mesh.manual_seed(2);
            let table = Embedding::new(&builder(&mesh), 16, 16)?;
            parallelize_module(&table, &mesh, &[("", style)])?;
            let (y, grads, calls) = counted_both_ways(&world, || table.forward(&ids))?;
            assert_eq!(calls, [forward.to_vec(), backward.to_vec()], "output {output}");
            assert_eq!(y.placements(), [output]);
            assert_close(&y, &expected, "rows");
            assert_close(grads.get(&table.weight.get())?, wanted.get(&whole.weight.get())?, "gradient of the table");
        }
        Ok(())
    });
}

/// A network below another one.
#[derive(Module)]
struct Outer {
    net: Mlp,
}

#[test]
fn column_parallel_networks_step_as_one_rank_does_at_any_depth() {
    on(4, |world| {
        let mesh = world.mesh([("tp", 4)])?;
        let x = tensor(&mesh, &[6, 10], &[Replicate])?;
        let whole = ColwiseParallel::new("tp").output(Replicate);
        let after = |prefix: Option<&str>| -> Result<Vec<Vec<f64>>> {
            mesh.manual_seed(4);
            let outer = Outer { net: Mlp::new(&builder(&mesh).child("net"), 10, 16, Activation::Relu)? };
            match prefix {
                Some("net.") => parallelize_module(&outer, &mesh, &[("net.up", &whole), ("net.down", &whole)])?,
                Some(_) => parallelize_module(&outer.net, &mesh, &[("up", &whole), ("down", &whole)])?,
                None => {}
            }
            if prefix.is_some() {
                assert_eq!(outer.net.down.weight.get().placements(), [Shard(0)]);
            }
            let mut optimizer = ShardedOptimizer::new(outer.named_parameters(), Sgd::default())?;
            let y = outer.net.forward(&x)?;
            assert_eq!(y.placements(), [Replicate]);
            optimizer.step(y.square()?.sum_all()?.backward()?)?;
            let mut all = vec![list(&y)?, list(&outer.net.forward(&x)?)?];
            for (_, param) in outer.named_parameters() {
                all.push(list(&param.get())?);
            }
            Ok(all)
        };
        let expected = after(None)?;
        for prefix in ["", "net."] {
            let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12 * b.abs().max(1.0);
            let found = after(Some(prefix))?;
            assert!(found.concat().iter().zip(&expected.concat()).all(near), "{found:?} {expected:?}");
        }
        Ok(())
    });
}

/// The local parts of all ranks, in order.
fn parts(world: &World, local: &Tensor) -> Result<Vec<Vec<f64>>> {
    let count = local.elem_count();
    let all = world.all_gather(&local.flatten_all()?, 0, &vec![count; world.size()])?.to_vec1::<f64>()?;
    Ok(all.chunks(count).map(<[f64]>::to_vec).collect())
}

#[test]
fn initial_weights_are_equal_exactly_where_ranks_hold_the_same_elements() {
    on(8, |world| {
        let cases: [(&str, &str, [Placement; 3]); 4] = [
            ("tensor parallel", "a=1,b=1,tp=8", [Replicate, Replicate, Shard(0)]),
            ("data and tensor parallel", "a=2,dp=2,tp=2", [Replicate, Replicate, Shard(0)]),
            ("fully sharded and tensor parallel", "a=1,dp=4,tp=2", [Replicate, Shard(0), Shard(0)]),
            ("replicated, sharded and tensor parallel", "a=2,dp=2,tp=2", [Replicate, Shard(0), Shard(0)]),
        ];
        for (name, mesh, placements) in cases {
            let mesh = world.device_mesh(mesh.parse()?)?;
            mesh.manual_seed(11);
            let plan = ShardingPlan::new().param("weight", placements.clone());
            let layer = plan.build(&mesh, |builder| Linear::without_bias(&builder.clone().dtype(DType::F64), 8, 8))?;
            assert_eq!(layer.weight.get().placements(), placements, "{name}");
            let uniform = Init::Uniform(0.0, 1.2).create(&[8, 8], DType::F64, &mesh, placements.clone())?;
            assert!(list(&uniform)?.iter().all(|x| (0.0..1.2).contains(x)), "{name}");
            for weight in [layer.weight.get(), uniform] {
                let held = parts(&world, &weight.to_local()?)?;
                for (i, a) in held.iter().enumerate() {
                    for (j, b) in held.iter().enumerate() {
                        let same = weight.layout().global_offset(i) == weight.layout().global_offset(j);
                        assert_eq!(a == b, same, "{name}: ranks {i} and {j}");
                    }
                }
            }
            let constant = Init::Constant(2.4).create(&[5, 3], DType::F64, &mesh, placements.clone())?;
            assert_eq!(list(&constant)?, [2.4; 15]);
        }
        Ok(())
    });
}

#[test]
fn collectives_are_recorded_per_module_and_pass() {
    on(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let outer = Outer { net: Mlp::new(&builder(&mesh).child("net"), 8, 16, Activation::Relu)? };
        let (up, down) = (ColwiseParallel::new("tp"), RowwiseParallel::new("tp"));
        parallelize_module(&outer, &mesh, &[("net.up", &up), ("net.down", &down)])?;
        let x = tensor(&mesh, &[4, 8], &[Replicate])?;
        let (result, records) = record_communication(|| outer.net.forward(&x)?.sum_all()?.backward());
        result?;
        // per module what it and the modules in it communicate
        let mut counts: BTreeMap<(String, &str, bool), usize> = BTreeMap::new();
        for record in records.iter().filter(|record| record.call != "agree") {
            let path = record.module.as_deref().unwrap_or_default();
            let mut parents = vec![String::new()];
            for part in path.split('.').filter(|part| !part.is_empty()) {
                let parent = parents.last().expect("the whole");
                parents.push(if parent.is_empty() { part.to_string() } else { format!("{parent}.{part}") });
            }
            for parent in parents {
                *counts.entry((parent, record.call, record.phase == Phase::Forward)).or_default() += 1;
            }
        }
        let expected = ["", "net", "net.down"].map(|path| ((path.to_string(), "all_reduce", true), 1));
        assert_eq!(counts.into_iter().collect::<Vec<_>>(), expected, "{records:#?}");
        Ok(())
    });
}
