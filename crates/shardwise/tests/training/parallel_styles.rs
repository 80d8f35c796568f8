//! Parallel styles: their collectives, results equal to one rank, mesh axes they leave alone, and invalid uses.

use candle_core::Tensor;
use shardwise::local_map;
use shardwise::nn::{
    Activation, AttentionConfig, Builder, Conv1d, Conv1dOptions, Embedding, Forward, Hooks, Linear, Mlp, Module,
    MultiHeadAttention, RmsNorm,
};
use shardwise::plan::{
    ColwiseParallel, ModuleView, ParallelStyle, PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput,
    RowwiseParallel, SequenceParallel, ShardingPlan, ShardingPlanner, TensorParallel, fully_shard, parallelize_module,
    replicate, shard_module,
};
use shardwise::prelude::*;

/// The collectives of a rank since its trace was cleared, without agreements.
fn collectives(world: &World) -> Vec<&'static str> {
    world.trace().records().iter().map(|r| r.call).filter(|call| *call != "agree").collect()
}

fn close(a: &Tensor, b: &Tensor) -> bool {
    let values = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    a.dims() == b.dims() && values(a).iter().zip(&values(b)).all(|(a, b)| (a - b).abs() <= 1e-9 * b.abs().max(1.0))
}

/// A transformer block over `[batch, length, 12]`, and layers outside it.
#[derive(Module)]
struct Block {
    norm: RmsNorm,
    attention: MultiHeadAttention,
    mlp: Mlp,
    words: Embedding,
    conv: Conv1d,
    deconv: Conv1d,
    hooks: Hooks,
}

impl Block {
    fn new(builder: &Builder) -> Result<Self> {
        let sizes =
            AttentionConfig { width: 12, heads: 4, key_heads: 4, causal: true, bias: true, ..Default::default() };
        Ok(Block {
            norm: RmsNorm::new(&builder.child("norm"), 12, 1e-6)?,
            attention: MultiHeadAttention::new(&builder.child("attention"), sizes)?,
            mlp: Mlp::new(&builder.child("mlp"), 12, 13, Activation::Gelu)?,
            words: Embedding::new(&builder.child("words"), 7, 12)?,
            conv: Conv1d::new(&builder.child("conv"), Conv1dOptions::new(5, 3, 3).padding(1))?,
            deconv: Conv1d::new(&builder.child("deconv"), Conv1dOptions::new(3, 5, 3).padding(1))?,
            hooks: Hooks::default(),
        })
    }
}

impl Forward for Block {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.hooks.run(ids, |ids| {
            let x = self.words.forward(ids)?;
            let x = x.add(&self.attention.forward(&self.norm.forward(&x)?)?)?;
            let x = x.add(&self.mlp.forward(&x)?)?;
            x.add(&self.deconv.forward(&self.conv.forward(&x)?.relu()?)?)
        })
    }
}

fn ids(mesh: &DeviceMesh, placements: &[Placement]) -> Result<DTensor> {
    DTensor::from_fn((4, 5), DType::I64, mesh, placements.to_vec(), |i| ((i[0] * 5 + i[1] * 3) % 7) as f64)
}

/// Output and gradients of the block.
fn run(block: &Block, ids: &DTensor) -> Result<Vec<(String, Tensor)>> {
    let y = block.forward(ids)?;
    let gradients = y.mul(&y.detach().add_scalar(0.5)?)?.sum_all()?.backward()?.in_param_layout()?;
    let mut all = vec![("output".to_string(), y.full_tensor()?)];
    for (name, param) in block.named_parameters() {
        all.push((name, gradients.get(&param.get())?.full_tensor()?));
    }
    Ok(all)
}

#[test]
fn styles_give_the_one_rank_result_on_meshes_of_any_ndim() {
    let program = |world: World| {
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        alone.manual_seed(4);
        let whole = Block::new(&Builder::new(&alone).dtype(DType::F64))?;
        let expected = run(&whole, &ids(&alone, &[Replicate])?)?;
        let meshes = [
            world.mesh([("tp", 4)])?,
            world.mesh([("dp", 2), ("tp", 2)])?,
            world.mesh([("dp", 2), ("x", 1), ("tp", 2)])?,
        ];
        for mesh in meshes {
            let axis = mesh.axis("tp")?;
            let (colwise, rowwise) = (ColwiseParallel::new("tp"), RowwiseParallel::new("tp"));
            let plain: Vec<(&str, &dyn ParallelStyle)> = vec![
                ("attention.query", &colwise),
                ("attention.key", &colwise),
                ("attention.value", &colwise),
                ("*.output", &rowwise),
                ("mlp.up", &colwise),
                ("mlp.down", &rowwise),
                ("words", &rowwise),
                ("conv", &colwise),
                ("deconv", &rowwise),
            ];
            let scattered = RowwiseParallel::new("tp").output(Shard(1));
            let (sequence, gathered) = (SequenceParallel::new("tp"), PrepareModuleInput::new("tp", Replicate));
            let columns = ColwiseParallel::new("tp").output(Shard(1));
            let (prepared, ends) =
                (PrepareModuleInputOutput::new("tp", Shard(1), Replicate), PrepareModuleOutput::new("tp", Replicate));
            let cut: Vec<(&str, &dyn ParallelStyle)> = vec![
                ("words", &columns),
                ("norm", &sequence),
                ("attention", &gathered),
                ("attention.query", &colwise),
                ("attention.key", &colwise),
                ("attention.value", &colwise),
                ("attention.output", &scattered),
                ("mlp", &gathered),
                ("mlp.up", &colwise),
                ("mlp.down", &scattered),
                ("conv", &prepared),
                ("deconv", &ends),
            ];
            for (i, styles) in [plain, cut].iter().enumerate() {
                mesh.manual_seed(4);
                let block = Block::new(&Builder::new(&mesh).dtype(DType::F64))?;
                parallelize_module(&block, &mesh, styles)?;
                for (name, param) in block.named_parameters() {
                    let others = param.get().placements().iter().enumerate().all(|(a, p)| a == axis || *p == Replicate);
                    assert!(others, "{name} has changed along another axis: {param:?}");
                }
                assert_eq!(block.mlp.down.weight.get().placements()[axis], Shard(1));
                let mut batch = vec![Replicate; mesh.ndim()];
                batch[0] = if mesh.ndim() > 1 { Shard(0) } else { Replicate };
                let found = run(&block, &ids(&mesh, &batch)?)?;
                for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                    assert!(close(found, expected), "styles {i} on {}: {name} {found} {expected}", mesh.mesh());
                }
            }
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[test]
fn styles_run_the_documented_collectives() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let counted = |styles: &[(&str, &dyn ParallelStyle)], part: &dyn Fn(&Block) -> Result<DTensor>| {
            let block = Block::new(&Builder::new(&mesh))?;
            parallelize_module(&block, &mesh, styles)?;
            world.trace().clear();
            let y = part(&block)?;
            let calls = collectives(&world);
            let tp = mesh.group(&["tp"])?;
            assert!(world.trace().records().iter().all(|r| r.call == "agree" || r.group[..] == *tp.ranks()));
            Ok::<_, Error>((calls, y.placements()[1].clone()))
        };
        let x = DTensor::randn((4, 6, 12), &mesh, [Shard(0), Replicate])?;
        let cut = x.redistribute([Shard(0), Shard(1)])?;
        let (colwise, rowwise) = (ColwiseParallel::new("tp"), RowwiseParallel::new("tp"));
        let pair: [(&str, &dyn ParallelStyle); 2] = [("mlp.up", &colwise), ("mlp.down", &rowwise)];
        assert_eq!(counted(&pair, &|b| b.mlp.forward(&x))?, (vec!["all_reduce"], Replicate));
        let heads: [(&str, &dyn ParallelStyle); 2] = [("attention.[qkv]*", &colwise), ("attention.output", &rowwise)];
        assert_eq!(counted(&heads, &|b| b.attention.forward(&x))?, (vec!["all_reduce"], Replicate));
        let heads: [(&str, &dyn ParallelStyle); 4] = [
            ("attention.query", &colwise),
            ("attention.key", &colwise),
            ("attention.value", &colwise),
            ("attention.output", &rowwise),
        ];
        assert_eq!(counted(&heads, &|b| b.attention.forward(&x))?, (vec!["all_reduce"], Replicate));
        let scattered = RowwiseParallel::new("tp").output(Shard(1));
        let (sequence, gathered) = (SequenceParallel::new("tp"), PrepareModuleInput::new("tp", Replicate));
        let cut_mlp: [(&str, &dyn ParallelStyle); 4] =
            [("norm", &sequence), ("mlp", &gathered), ("mlp.up", &colwise), ("mlp.down", &scattered)];
        let found = counted(&cut_mlp, &|b| b.mlp.forward(&b.norm.forward(&cut)?))?;
        assert_eq!(found, (vec!["all_gather", "reduce_scatter"], Shard(1)));
        // the planner for transformers does the same
        for (planner, calls, placement) in [
            (TensorParallel::new("tp"), vec!["all_reduce"; 2], Replicate),
            (
                TensorParallel::new("tp").sequence_parallel(1),
                vec!["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"],
                Shard(1),
            ),
        ] {
            let block = Block::new(&Builder::new(&mesh))?;
            shard_module(&block, &mesh, &planner.plan(&block, &mesh)?)?;
            let x = if placement == Replicate { &x } else { &cut };
            world.trace().clear();
            let y = block.mlp.forward(&block.attention.forward(&block.norm.forward(x)?)?)?;
            assert_eq!((collectives(&world), &y.placements()[1]), (calls, &placement));
        }
        let ids = ids(&mesh, &[Shard(0), Replicate])?;
        assert_eq!(counted(&[("words", &rowwise)], &|b| b.words.forward(&ids))?, (vec!["all_reduce"], Replicate));
        assert_eq!(counted(&[("words", &colwise)], &|b| b.words.forward(&ids))?, (vec![], Shard(2)));
        let whole = PrepareModuleOutput::new("tp", Replicate);
        let found = counted(&[("mlp.up", &ColwiseParallel::new("tp").output(Shard(-1))), ("mlp", &whole)], &|b| {
            b.mlp.forward(&x)
        })?;
        assert_eq!(found.1, Replicate);
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[test]
fn data_parallelism_in_one_line_communicates_gradients_once() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 4)])?;
        let x = DTensor::randn((64, 12), &mesh, [Shard(0)])?;
        let calls = |mlp: &Mlp| -> Result<Vec<&'static str>> {
            world.trace().clear();
            mlp.forward(&x)?.square()?.sum_all()?.backward()?.in_param_layout()?;
            Ok(collectives(&world))
        };
        let mlp = Mlp::new(&Builder::new(&mesh), 12, 16, Activation::Relu)?;
        replicate(&mlp, &mesh, &["dp"])?;
        assert_eq!(calls(&mlp)?, ["all_reduce"]);
        fully_shard(&mlp, &mesh, &["dp"])?;
        let found = calls(&mlp)?;
        let count = |call: &str| found.iter().filter(|c| **c == call).count();
        assert_eq!((count("all_gather"), count("reduce_scatter"), count("all_reduce")), (5, 4, 0), "{found:?}");
        assert_eq!(mlp.up.weight.get().local_shape(), [4, 12]);
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[test]
fn an_input_that_arrives_in_another_placement_than_stated_is_an_error() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let whole = DTensor::from_fn((4, 8), DType::F64, &mesh, [Shard(0), Replicate], |i| (i[0] * 8 + i[1]) as f64)?;
        let arriving = |placement: Placement| whole.redistribute([Shard(0), placement]);
        for stated in [Replicate, Shard(0), Shard(-1)] {
            let (colwise, rowwise) =
                (ColwiseParallel::new("tp").input(stated.clone()), RowwiseParallel::new("tp").input(stated.clone()));
            let styles: [(&dyn ParallelStyle, Placement); 2] = [(&colwise, Shard(1)), (&rowwise, Replicate)];
            for (style, output) in styles {
                mesh.manual_seed(7);
                let layer = Linear::new(&Builder::new(&mesh).dtype(DType::F64), 8, 8)?;
                let expected = layer.forward(&whole)?.full_tensor()?;
                parallelize_module(&layer, &mesh, &[("", style)])?;
                for placement in [Replicate, Shard(0), Shard(1)] {
                    let found = layer.forward(&arriving(placement.clone())?);
                    if placement == stated.normalized(2)? {
                        let y = found?;
                        assert_eq!(y.placements(), [Shard(0), output.clone()]);
                        assert!(close(&y.full_tensor()?, &expected));
                        continue;
                    }
                    let error = found.unwrap_err();
                    assert_eq!(error.kind(), Some(&shardwise::error::ErrorKind::Plan));
                    let text = error.to_string();
                    let parts = ["an input in", "as `input` of the style or plan states", "redistribute the input"];
                    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
                }
            }
        }
        // a plan says it too: its text, which ranks compare, has it; and it can be taken back
        let plan = ShardingPlan::new().expect_input("up", [("tp", Shard(0))]);
        assert!(plan.to_string().contains("arrives") && plan != ShardingPlan::new());
        let stored: ShardingPlan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        assert_eq!(stored, plan);
        for (plan, fails) in [(plan.clone(), true), (plan.remove("up"), false)] {
            let mlp = Mlp::new(&Builder::new(&mesh).dtype(DType::F64), 8, 8, Activation::Gelu)?;
            let plan = if fails { plan } else { plan.param("up.weight", [("tp", Shard(0))]) };
            let outcome = shard_module(&mlp, &mesh, &plan);
            assert_eq!(outcome.and_then(|()| mlp.forward(&whole)).is_err(), fails);
        }
        let mlp = Mlp::new(&Builder::new(&mesh), 8, 8, Activation::Gelu)?;
        let misspelled = ShardingPlan::new().expect_input("upp", [("tp", Shard(0))]);
        assert!(shard_module(&mlp, &mesh, &misspelled).unwrap_err().to_string().contains("`upp`"));
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

/// A custom style: weights of norms are sharded.
struct Pieces;

impl ParallelStyle for Pieces {
    fn extend(&self, plan: ShardingPlan, module: &ModuleView) -> Result<ShardingPlan> {
        Ok(plan.param(&format!("{}.weight", module.path()), [("tp", Shard(0))]))
    }
}

#[test]
fn mismatched_keys_and_styles_are_rejected_and_compatible_ones_combine() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let block = Block::new(&Builder::new(&mesh))?;
        let before: Vec<Layout> = block.named_parameters().iter().map(|(_, p)| p.layout()).collect();
        let colwise = ColwiseParallel::new("tp");
        let (rowwise, other_axis) = (RowwiseParallel::new("tp"), ColwiseParallel::new("pp"));
        let cases: [(&str, &dyn ParallelStyle, &[&str]); 6] = [
            ("mlp.upp", &colwise, &["`mlp.upp`", "fits no module", "`mlp.up`"]),
            ("mlp.*.*", &colwise, &["pattern `mlp.*.*`", "did you mean"]),
            ("mlp", &colwise, &["ColwiseParallel for `mlp`, a Mlp", "Linear"]),
            ("norm", &rowwise, &["RowwiseParallel for `norm`, a RmsNorm"]),
            ("mlp.down", &other_axis, &["`pp`", "`dp`, `tp`"]),
            ("mlp.up", &rowwise, &["mlp.up", "both fit", "tp: S(0)", "tp: S(1)"]),
        ];
        for (key, style, parts) in cases {
            let message =
                parallelize_module(&block, &mesh, &[("mlp.up", &colwise), (key, style)]).unwrap_err().to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{message} should have {parts:?}");
            assert_eq!(before, block.named_parameters().iter().map(|(_, p)| p.layout()).collect::<Vec<_>>());
        }
        // two axes for one layer
        let outer = ColwiseParallel::new("dp");
        parallelize_module(&block, &mesh, &[("mlp.up", &colwise), ("mlp.up", &outer), ("norm", &Pieces)])?;
        assert_eq!(block.mlp.up.weight.layout().shard_order(0), [1, 0]);
        assert_eq!(block.norm.weight.get().placements(), [Replicate, Shard(0)]);
        let y = block.mlp.up.forward(&DTensor::ones((2, 12), DType::F32, &mesh, [Replicate, Replicate])?)?;
        assert_eq!(y.placements(), [Shard(1), Shard(1)]);
        // the empty path is the module itself
        let layer = Linear::new(&Builder::new(&mesh), 4, 4)?;
        parallelize_module(&layer, &mesh, &[("", &colwise)])?;
        assert_eq!(layer.weight.get().placements(), [Replicate, Shard(0)]);
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[test]
fn local_map_works_on_uneven_shards_of_redistributed_inputs() {
    let program = |world: World| {
        let mesh = world.mesh([("tp", 4)])?;
        // 5 rows: 2, 2, 1 and 0
        let x = DTensor::from_fn((5, 3), DType::F64, &mesh, [Shard(1)], |i| (i[0] * 3 + i[1]) as f64)?.requires_grad();
        let w = DTensor::from_fn(3, DType::F64, &mesh, [Shard(0)], |i| 1.0 + i[0] as f64)?.requires_grad();
        let (rows, whole) = (x.redistribute([Shard(0)])?, w.redistribute([Replicate])?);
        let y = local_map(&[&rows, &whole], [Shard(0)], &[None, Some(vec![Partial(ReduceOp::Sum)])], |t| {
            t[0].sqr()?.broadcast_mul(&t[1])
        })?;
        assert_eq!((y.shape(), y.local_shape()[0]), (&[5, 3][..], [2, 2, 1, 0][world.rank()]));
        let direct = x.square()?.mul(&w)?;
        assert!(close(&y.full_tensor()?, &direct.full_tensor()?));
        let (found, expected) = (y.exp()?.log()?.sum_all()?.backward()?, direct.sum_all()?.backward()?);
        for leaf in [&x, &w] {
            assert!(close(&found.get(leaf)?.full_tensor()?, &expected.get(leaf)?.full_tensor()?));
        }
        // ragged parts come out as they are
        let some = local_map(&[&rows], [Shard(0)], &[], |t| t[0].narrow(0, 0, t[0].dims()[0].min(1)))?;
        assert_eq!(some.placements(), [Shard(0)], "one row each of the first three");
        assert_eq!(some.shape(), [3, 3]);
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}
