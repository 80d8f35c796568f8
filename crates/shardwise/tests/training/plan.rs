//! Sharding plans: planners, replaced modules, layouts of outputs, local outputs; an invalid plan changes nothing.

use std::sync::Arc;

use candle_core::Tensor;
use shardwise::DryWorld;
use shardwise::nn::{
    Activation, AttentionConfig, Builder, Embedding, EmbeddingBag, Forward, Hooks, Layer, LayerNorm, Linear, Mlp,
    Module, MultiHeadAttention, RotaryEmbedding,
};
use shardwise::ops::EmbeddingBagMode;
use shardwise::optim::{ParamGroup, Sgd, ShardedOptimizer};
use shardwise::plan::{
    DataParallel, EmbeddingSharding, FullyShard, ModuleView, Sharder, ShardingPlan, ShardingPlanner, TensorParallel,
    VocabularyParallel, collect_local_shard, fully_shard, replicate, reshard_output, shard_module, shard_parameter,
};
use shardwise::prelude::*;
use shardwise::sharded::{ChunkShardingSpec, EnumerableShardingSpec, RemoteDevice, ShardMetadata};

fn close(a: &Tensor, b: &Tensor) -> bool {
    let values = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    a.dims() == b.dims() && values(a).iter().zip(&values(b)).all(|(a, b)| (a - b).abs() <= 1e-9 * b.abs().max(1.0))
}

fn alone(world: &World) -> Result<DeviceMesh> {
    world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)
}

fn attention(builder: &Builder, width: usize, heads: usize, key_heads: usize) -> Result<MultiHeadAttention> {
    let rotary = Some(RotaryEmbedding { base: 50.0 });
    let rest = AttentionConfig::default();
    MultiHeadAttention::new(
        builder,
        AttentionConfig { width, heads, key_heads, causal: true, rotary, bias: true, ..rest },
    )
}

#[test]
fn planners_place_parameters_as_documented() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let model = Model::new(&Builder::new(&mesh))?;
        let placed = |plan: &ShardingPlan| -> Result<Vec<(String, Vec<Placement>)>> {
            let table = plan.table(&model)?;
            assert_eq!(table.to_string().lines().count(), table.0.len() + 1);
            Ok(table.0.into_iter().map(|row| (row.path, row.layout.placements().to_vec())).collect())
        };
        let expect = |plan: &ShardingPlan, path: &str, placements: [Placement; 2]| -> Result<()> {
            let all = placed(plan)?;
            let (_, found) = all.iter().find(|(own, _)| own == path).expect("a parameter");
            assert_eq!(found[..], placements, "{path}\n{plan}");
            Ok(())
        };
        assert!(
            placed(&DataParallel::new(["dp", "tp"]).plan(&model, &mesh)?)?
                .iter()
                .all(|(_, p)| *p == [Replicate, Replicate])
        );
        let pieces = FullyShard::new(["dp"]).plan(&model, &mesh)?;
        expect(&pieces, "tokens.weight", [Shard(1), Replicate])?; // 11 rows do not divide, 8 columns do
        expect(&pieces, "layers.0.mlp.up.weight", [Shard(0), Replicate])?;
        expect(&pieces, "layers.0.mlp.down.weight", [Shard(1), Replicate])?;
        let tensor = TensorParallel::new("tp").plan(&model, &mesh)?;
        for (path, cut) in [
            ("tokens.weight", Shard(0)),
            ("layers.1.attention.query.weight", Shard(0)),
            ("layers.1.attention.query.bias", Shard(0)),
            ("layers.1.attention.output.weight", Shard(1)),
            ("layers.1.attention.output.bias", Replicate),
            ("layers.0.mlp.up.weight", Shard(0)),
            ("layers.0.mlp.down.weight", Shard(1)),
            ("layers.0.norm.weight", Replicate),
            ("own.w1.weight", Shard(0)),
            ("own.w2.weight", Shard(1)),
            ("unembed.weight", Shard(0)),
        ] {
            expect(&tensor, path, [Replicate, cut])?;
        }
        let both = TensorParallel::new("tp").and(FullyShard::new(["dp"])).plan(&model, &mesh)?;
        expect(&both, "layers.0.mlp.up.weight", [Shard(0), Shard(0)])?;
        expect(&both, "layers.0.mlp.up.bias", [Shard(0), Shard(0)])?;
        // tp shards first, so that one gather along dp restores the tensor-parallel shard
        let whole = Layout::replicated(mesh.mesh(), &[16, 8])?;
        let cut = both.layout_of("layers.0.mlp.up.weight", &whole)?;
        assert_eq!(cut.shard_order(0), [1, 0]);
        world.trace().clear();
        let gathered = DTensor::zeros((16, 8), DType::F32, &mesh, [Replicate, Replicate])?.to_layout(&cut)?;
        gathered.redistribute([Replicate, Shard(0)])?;
        assert_eq!(world.trace().records().iter().map(|r| r.call).collect::<Vec<_>>(), ["all_gather"]);
        // text and back
        let text = serde_json::to_string(&both).unwrap();
        assert_eq!(serde_json::from_str::<ShardingPlan>(&text).unwrap(), both);
        let code = ShardingPlan::new().sharder("tokens", VocabularyParallel::new("tp"));
        assert!(serde_json::to_string(&code).is_err());
        // one line each
        fully_shard(&model, &mesh, &["dp"])?;
        assert_eq!(model.tokens.weight.get().placements(), [Shard(1), Replicate]);
        replicate(&model, &mesh, &["dp"])?;
        assert_eq!(model.tokens.weight.get().placements(), [Replicate, Replicate]);
        assert!(TensorParallel::new("pp").plan(&model, &mesh).unwrap_err().to_string().contains("`pp`"));
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

/// A custom block without hooks.
#[derive(Module)]
struct Own {
    w1: Linear,
    w2: Linear,
}

#[derive(Module)]
struct Layer0 {
    norm: LayerNorm,
    attention: MultiHeadAttention,
    mlp: Mlp,
    hooks: Hooks,
}

impl Layer0 {
    fn new(builder: &Builder) -> Result<Self> {
        Ok(Layer0 {
            norm: LayerNorm::new(&builder.child("norm"), 8, 1e-5)?,
            attention: attention(&builder.child("attention"), 8, 4, 2)?,
            mlp: Mlp::new(&builder.child("mlp"), 8, 16, Activation::Gelu)?,
            hooks: Hooks::default(),
        })
    }
}

impl Forward for Layer0 {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let x = x.add(&self.attention.forward(&self.norm.forward(x)?)?)?;
            x.add(&self.mlp.forward(&x)?)
        })
    }
}

#[derive(Module)]
struct Model {
    tokens: Embedding,
    layers: Vec<Layer0>,
    own: Own,
    unembed: Linear,
}

impl Model {
    fn new(builder: &Builder) -> Result<Self> {
        Self::with_layers(builder, 3)
    }

    fn with_layers(builder: &Builder, count: usize) -> Result<Self> {
        Ok(Model {
            tokens: Embedding::new(&builder.child("tokens"), 11, 8)?,
            layers: (0..count).map(|i| Layer0::new(&builder.child(&format!("layers.{i}")))).collect::<Result<_>>()?,
            own: Own {
                w1: Linear::new(&builder.child("own.w1"), 8, 6)?,
                w2: Linear::new(&builder.child("own.w2"), 6, 8)?,
            },
            unembed: Linear::new(&builder.child("unembed"), 8, 11)?,
        })
    }

    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        let x = self.layers.iter().try_fold(self.tokens.forward(ids)?, |x, layer| layer.forward(&x))?;
        let x = x.add(&self.own.w2.forward(&self.own.w1.forward(&x)?.relu()?)?)?;
        self.unembed.forward(&x)
    }
}

fn ids(mesh: &DeviceMesh, placements: &[Placement]) -> Result<DTensor> {
    DTensor::from_fn((4, 3), DType::I64, mesh, placements.to_vec(), |i| ((i[0] * 5 + i[1] * 3) % 11) as f64)
}

/// Replaces a layer by twice the layer, whose weight it shares.
#[derive(Debug)]
struct Doubled;

#[derive(Module)]
struct Double {
    weight: Param,
    hooks: Hooks,
}

impl Forward for Double {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.linear(&self.weight.get(), None)?.mul_scalar(2.0))
    }
}

impl Sharder for Doubled {
    fn shard(&self, module: &ModuleView) -> Result<Arc<dyn Layer>> {
        assert_eq!((module.kind(), module.params().len()), ("Linear", 2), "{}", module.path());
        Ok(Arc::new(Double { weight: module.param("weight").expect("a weight").clone(), hooks: Hooks::default() }))
    }
}

#[test]
fn a_sharder_replaces_the_module_for_every_caller() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        mesh.manual_seed(1);
        let model = Model::new(&Builder::new(&mesh).dtype(DType::F64))?;
        let x = DTensor::from_fn((3, 8), DType::F64, &mesh, [Shard(0), Replicate], |i| (i[0] + i[1]) as f64)?;
        let once = x.linear(&model.own.w1.weight.get(), None)?;
        let plan = ShardingPlan::new().sharder("own.w1", Doubled).output("own.w1", [("tp", Shard(1))]);
        shard_module(&model, &mesh, &plan)?;
        let y = model.own.w1.forward(&x)?;
        assert_eq!(y.placements(), [Shard(0), Shard(1)], "the output plan goes with the path");
        assert!(close(&y.full_tensor()?, &(once.full_tensor()? * 2.0)?));
        // the bias is gone for walks, states and optimizers
        assert!(model.named_parameters().iter().all(|(name, _)| name != "own.w1.bias"));
        assert!(model.named_parameters().iter().any(|(name, _)| name == "own.w1.weight"));
        assert!(!model.state_dict().contains_key("own.w1.bias"));
        assert!(model.named_modules().contains(&("own.w1".to_string(), "Double")));
        let optimizer = ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(Sgd::default()))?;
        assert!(optimizer.param("own.w1.bias").is_none());
        // a module with derived fields is replaced as a whole
        let count = model.named_parameters().len();
        model.layers[2].hooks.replace(Arc::new(Linear::without_bias(&Builder::new(&mesh).dtype(DType::F64), 8, 8)?));
        let names: Vec<String> = model.named_parameters().into_iter().map(|(name, _)| name).collect();
        let inside: Vec<&String> = names.iter().filter(|name| name.starts_with("layers.2.")).collect();
        assert_eq!((inside.len(), inside[0].as_str()), (1, "layers.2.weight"));
        assert!(names.len() < count - 10);
        assert_eq!(model.layers[2].forward(&x)?.shape(), [3, 8]);
        shard_parameter(&model, &mesh, "layers.2.weight", [("tp", Shard(0))])?;
        assert_eq!(model.layers[2].forward(&x)?.placements(), [Shard(0), Shard(1)]);
        // hooks registered on the replaced path later go around the replacement
        reshard_output(&model, &mesh, "own.w1", [Replicate, Replicate])?;
        assert_eq!(model.own.w1.forward(&x)?.placements(), [Replicate, Replicate]);
        // a replaced module is limited to what its replacement supports
        let bag = EmbeddingBag::new(&Builder::new(&mesh), 4, 4, EmbeddingBagMode::Sum)?;
        bag.hooks.replace(Arc::new(Embedding::new(&Builder::new(&mesh), 4, 4)?));
        let zero = DTensor::zeros(2, DType::I64, &mesh, [Replicate, Replicate])?;
        assert!(bag.forward_bags(&zero, &[0]).unwrap_err().to_string().contains("forward_bags"));
        bag.hooks.clear();
        assert_eq!(bag.forward_bags(&zero, &[0])?.shape(), [1, 4]);
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[test]
fn a_whole_model_has_the_gradients_of_one_rank_under_combined_plans() {
    let program = |world: World| {
        let gradients = |model: &Model, mesh: &DeviceMesh| -> Result<Vec<(String, Tensor)>> {
            let mut batch = vec![Replicate; mesh.ndim()];
            batch[0] = Shard(0);
            let y = model.forward(&ids(mesh, &batch)?)?;
            let found = y.mul(&y.detach().add_scalar(0.5)?)?.sum_all()?.backward()?.in_param_layout()?;
            let mut all = vec![("output".to_string(), y.full_tensor()?)];
            for (name, param) in model.named_parameters() {
                assert_eq!(found.get(&param.get())?.layout(), &param.layout(), "{name}");
                all.push((name, found.get(&param.get())?.full_tensor()?));
            }
            Ok(all)
        };
        let alone = alone(&world)?;
        let expected = gradients(&Model::new(&Builder::new(&alone).dtype(DType::F64))?, &alone)?;
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let model = Model::new(&Builder::new(&mesh))?;
        let tensor = || TensorParallel::new("tp");
        for (i, plan) in [
            tensor().plan(&model, &mesh)?,
            tensor().sequence_parallel(1).plan(&model, &mesh)?,
            tensor().and(FullyShard::new(["dp"])).plan(&model, &mesh)?,
            tensor()
                .sequence_parallel(1)
                .embeddings(EmbeddingSharding::EmbeddingDim)
                .and(FullyShard::new(["dp"]).on_dim(0))
                .plan(&model, &mesh)?,
            tensor().and(DataParallel::new(["dp"])).plan(&model, &mesh)?,
        ]
        .iter()
        .enumerate()
        {
            mesh.manual_seed(0);
            let make = |builder: &Builder| Model::new(&builder.clone().dtype(DType::F64));
            let found = gradients(&plan.build(&mesh, make)?, &mesh)?;
            for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                assert!(close(found, expected), "plan {i}: {name} {found} {expected}");
            }
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[test]
fn a_model_built_by_a_plan_is_never_materialized_in_full() {
    let ran = DryWorld::new(8).unwrap().run(|world| {
        let mesh = world.mesh([("dp", 2), ("tp", 4)])?;
        let plan = ShardingPlan::new().param("**.weight", [("tp", Shard(0)), ("dp", Shard(0))]);
        plan.build(&mesh, |builder| Mlp::new(builder, 64, 256, Activation::Gelu)).map(drop)
    });
    assert_eq!(ran.unwrap().peak_bytes, 4 * (2 * 64 * 256 / 8 + 256 + 64));
}

#[test]
fn built_in_sharders_keep_values_and_gradients() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        mesh.manual_seed(2);
        let model = Model::new(&Builder::new(&mesh).dtype(DType::F64))?;
        let expected = model.forward(&ids(&mesh, &[Shard(0), Replicate])?)?.full_tensor()?;
        let gradient = |model: &Model, name: &str| -> Result<Tensor> {
            let loss = model.forward(&ids(&mesh, &[Shard(0), Replicate])?)?.square()?.sum_all()?;
            let params = model.named_parameters();
            let (_, param) = params.iter().find(|(own, _)| own == name).expect("a parameter");
            loss.backward()?.get(&param.get())?.full_tensor()
        };
        let of_table = gradient(&model, "tokens.weight")?;
        let scattered = VocabularyParallel { output: Shard(1), ..VocabularyParallel::new("tp") };
        shard_module(&model, &mesh, &ShardingPlan::new().sharder("tokens", scattered))?;
        let embedded = model.tokens.forward(&ids(&mesh, &[Shard(0), Replicate])?)?;
        assert_eq!(embedded.placements(), [Shard(0), Shard(1)]);
        let y = model.forward(&ids(&mesh, &[Shard(0), Replicate])?)?;
        assert!(close(&y.full_tensor()?, &expected));
        assert!(close(&gradient(&model, "tokens.weight")?, &of_table));
        let params = model.named_parameters();
        let table = params.iter().find(|(own, _)| own == "tokens.weight").expect("the table");
        assert_eq!(table.1.get().placements(), [Replicate, Shard(0)]);
        // of the wrong kind
        let wrong = ShardingPlan::new().sharder("layers.0.norm", VocabularyParallel::new("tp"));
        let message = shard_module(&model, &mesh, &wrong).unwrap_err().to_string();
        assert!(["LayerNorm", "layers.0.norm", "Embedding"].iter().all(|part| message.contains(part)), "{message}");
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[test]
fn outputs_are_resharded_and_returned_as_local_parts() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let model = Model::with_layers(&Builder::new(&mesh).dtype(DType::F64), 12)?;
        let expected = model.forward(&ids(&mesh, &[Replicate, Replicate])?)?;
        let plan = ShardingPlan::new()
            .param("unembed.weight", [("tp", Shard(1))])
            .input("layers.*", [("dp", Shard(0))])
            .output("layers.1*", [Shard(0), Shard(1)])
            .output("unembed", [Shard(0), Shard(2)])
            .return_local("unembed");
        shard_module(&model, &mesh, &plan)?;
        let x = model.tokens.forward(&ids(&mesh, &[Replicate, Replicate])?)?;
        assert_eq!(model.layers[0].forward(&x)?.placements(), [Shard(0), Replicate]);
        assert_eq!(model.layers[11].forward(&x)?.placements(), [Shard(0), Shard(1)]);
        let mine = model.forward(&ids(&mesh, &[Replicate, Replicate])?)?;
        let share = expected.redistribute([Shard(0), Shard(2)])?;
        assert_eq!((mine.device_mesh().size(), mine.shape()), (1, &share.local_shape()[..]));
        assert!(close(&mine.to_local()?, &share.to_local()?), "6 of 11 classes on one rank, 5 on the other");
        // the gradient reaches all ranks: the sum of local losses is the global loss
        let found = mine.square()?.sum_all()?.backward()?;
        let gradient = found.get(&model.tokens.weight.get())?.full_tensor()?;
        model.unembed.hooks.clear();
        let whole = model.forward(&ids(&mesh, &[Replicate, Replicate])?)?.square()?.sum_all()?.backward()?;
        assert!(close(&gradient, &whole.get(&model.tokens.weight.get())?.full_tensor()?));
        // partial sums are reduced, and a local output stays local
        let sum = DTensor::ones(2, DType::F64, &mesh, [Partial(ReduceOp::Sum), Replicate])?;
        let local = collect_local_shard(&sum)?;
        assert_eq!(local.to_local()?.to_vec1::<f64>()?, [1.0, 1.0]);
        assert_eq!(collect_local_shard(&local)?.shape(), [2]);
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[test]
fn mismatched_plans_are_rejected_without_changes() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let model = Model::with_layers(&Builder::new(&mesh), 12)?;
        let other = world.mesh([("x", 4)])?;
        let state = || {
            (
                model.named_modules(),
                model.named_parameters().into_iter().map(|(n, p)| (n, p.layout())).collect::<Vec<_>>(),
            )
        };
        let before = state();
        let rows = VocabularyParallel::new("tp");
        let new = ShardingPlan::new;
        // a valid entry stands next to every invalid one: it must not be applied
        let cases: Vec<(ShardingPlan, &[&str])> = vec![
            (new().param("own.w1.wait", [("tp", Shard(0))]), &["own.w1.wait", "fits no parameter", "`own.w1.weight`"]),
            (new().param("layer.*.mlp.up.weight", [("tp", Shard(0))]), &["pattern", "fits no parameter", "layers."]),
            (new().param("own.w1", [("tp", Shard(0))]), &["fits no parameter", "`own.w1.bias`"]),
            (new().sharder("own.w3", rows.clone()), &["fits no module", "`own.w1`"]),
            (new().output("unembedding", [("tp", Shard(0))]), &["fits no module", "`unembed`"]),
            (new().return_local("own.w"), &["fits no module", "`own.w1`"]),
            (
                new().sharder("own.w1", rows.clone()).param("own.w1.weight", [("tp", Shard(0))]),
                &["VocabularyParallel", "own.w1.weight", "narrower"],
            ),
            (
                new().sharder("own.w1", rows.clone()).param("own.**", [("tp", Shard(0))]),
                &["VocabularyParallel", "own.**"],
            ),
            (
                new().sharder("layers.1", Doubled).output("layers.1.mlp", [("tp", Replicate)]),
                &["Doubled", "layers.1.mlp"],
            ),
            (new().sharder("layers.1", Doubled).sharder("layers.1.mlp", Doubled), &["Doubled", "layers.1.mlp"]),
            (
                new().param("own.*.weight", [("tp", Shard(0))]).param("**.w1.weight", [("tp", Shard(1))]),
                &["own.*.weight", "**.w1.weight", "which both fit `own.w1.weight`"],
            ),
            (new().output("own.*", [("tp", Shard(0))]).output("own.w*", [("tp", Shard(1))]), &["both fit `own.w1`"]),
            (new().param("own.w1.weight", [("pp", Shard(0))]), &["`pp`", "`dp`, `tp`", "own.w1.weight"]),
            (new().input("own.w1", [("pp", Shard(0))]), &["`pp`", "own.w1"]),
            (new().param("own.w1.weight", [Shard(0)]), &["2, one per mesh axis", "own.w1.weight"]),
            (new().param("own.w1.weight", [("tp", Shard(0)), ("tp", Shard(1))]), &["`tp` twice"]),
            (new().param("own.w1.weight", [("tp", Shard(2))]), &["S(2)", "own.w1.weight", "from -2 to 1"]),
            (new().param("own.w1.bias", [("tp", Shard(-2))]), &["S(-2)", "own.w1.bias"]),
            (new().output("own", [("tp", Shard(0))]), &["`own`, a Own without hooks", "Hooks"]),
            (new().sharder("own", Doubled), &["`own`, a Own without hooks"]),
            (new().sharder("layers.3.mlp", rows), &["Mlp", "layers.3.mlp"]),
        ];
        for (plan, parts) in cases {
            let plan = plan.param("tokens.weight", [("tp", Shard(0))]).output("tokens", [("tp", Shard(0))]);
            let message = shard_module(&model, &mesh, &plan).unwrap_err().to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{message} should have {parts:?}");
            assert_eq!(state(), before, "{message}");
            assert_eq!(
                model.tokens.forward(&ids(&mesh, &[Replicate, Replicate])?)?.placements(),
                [Replicate, Replicate]
            );
        }
        // component by component: layers.1 is not a part of layers.11, nor the other way round
        let beside = new().sharder("layers.1.attention.query", Doubled).param("layers.11.**", [("tp", Shard(0))]);
        shard_module(&model, &mesh, &beside)?;
        assert!(model.layers[1].attention.query.hooks.replacement().is_some());
        // an exact path takes precedence over patterns
        let exact = new().param("own.*.weight", [("tp", Shard(0))]).param("own.w2.weight", [("tp", Shard(1))]);
        shard_module(&model, &mesh, &exact)?;
        assert_eq!(model.own.w2.weight.get().placements(), [Replicate, Shard(1)]);
        // a mesh that the parameters are not on
        let message = shard_module(&model, &other, &new().param("own.w1.weight", [Shard(0)])).unwrap_err().to_string();
        assert!(message.contains("x=4") && message.contains("own.w1.weight"), "{message}");
        // one parameter under two paths has one layout
        let shared = Own { w1: Linear::new(&Builder::new(&mesh), 4, 4)?, w2: Linear::new(&Builder::new(&mesh), 4, 4)? };
        let shared = Own { w2: Linear { weight: shared.w1.weight.clone(), ..shared.w2 }, ..shared };
        let apart = new().param("w1.weight", [("tp", Shard(0))]).param("w2.weight", [("tp", Shard(1))]);
        assert!(shard_module(&shared, &mesh, &apart).unwrap_err().to_string().contains("one parameter"));
        fully_shard(&shared, &mesh, &["dp"])?;
        assert_eq!(shared.w2.weight.get().placements(), [Shard(0), Replicate]);
        // the plan reaches a builder too
        let bad = new().param("weight", [("tp", Shard(3))]);
        assert!(
            bad.build(&mesh, |builder| Linear::new(builder, 4, 4)).err().expect("refused").to_string().contains("S(3)")
        );
        let unused = new().param("wait", [("tp", Shard(0))]);
        assert!(
            unused
                .build(&mesh, |builder| Linear::new(builder, 4, 4))
                .err()
                .expect("refused")
                .to_string()
                .contains("`weight`")
        );
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[test]
fn ranks_with_different_plans_all_get_an_error() {
    let program = |world: World| {
        let mesh = world.mesh([("tp", 2)])?;
        let layer = Linear::new(&Builder::new(&mesh), 4, 4)?;
        let plan = ShardingPlan::new().param("weight", [Shard(world.rank() as isize)]);
        let message = shard_module(&layer, &mesh, &plan).unwrap_err().to_string();
        assert!(message.contains("sharding plan"), "{message}");
        assert_eq!(layer.weight.get().placements(), [Replicate]);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(program).unwrap();
}

#[test]
fn ranks_outside_the_mesh_follow_the_plan_without_taking_part() {
    let program = |world: World| {
        let mesh = world.mesh([("tp", 2)])?;
        let plan = ShardingPlan::new().param("down.weight", [Shard(1)]).output("", [Replicate]);
        let mlp = plan.build(&mesh, |builder| Mlp::new(builder, 5, 7, Activation::Gelu))?;
        let y = mlp.forward(&DTensor::ones((3, 5), DType::F32, &mesh, [Replicate])?)?;
        y.sum_all()?.backward()?.in_param_layout()?;
        assert_eq!((y.placements(), mlp.down.weight.get().placements()), (&[Replicate][..], &[Shard(1)][..]));
        assert_eq!(y.local_elem_count(), [15, 15, 0][world.rank()]);
        Ok(())
    };
    ThreadWorld::new(3).unwrap().run(program).unwrap();
}

#[test]
fn a_plan_places_parameters_and_outputs_by_sharding_specs() {
    launch(3, |world| {
        let mesh = world.mesh([("tp", 3)])?;
        let rows = || ChunkShardingSpec::over_ranks(0, [0, 1, 2]);
        let uneven = |rank: usize, start: usize, size: usize| {
            ShardMetadata::new([start, 0], [size, 5], Some(RemoteDevice::cpu_of(rank)))
        };
        let boxes = EnumerableShardingSpec::new([uneven(0, 0, 4)?, uneven(1, 4, 1)?, uneven(2, 5, 2)?])?;
        let plan = ShardingPlan::new().param("bias", rows()?).param("weight", boxes).output("", rows()?);
        let layer = plan.build(&mesh, |builder| Linear::new(builder, 5, 7))?;
        assert_eq!(layer.weight.get().local_shape(), [[4, 5], [1, 5], [2, 5]][world.rank()]);
        assert_eq!(layer.bias.as_ref().unwrap().get().placements(), [Shard(0)]);
        let x = DTensor::ones((6, 5), DType::F32, &mesh, [Replicate])?;
        let y = layer.forward(&x)?;
        assert_eq!(y.placements(), [Shard(0)]);
        let whole = Linear::new(&Builder::new(&mesh), 5, 7)?;
        whole.load_state_dict(&layer.state_dict())?;
        assert!(close(&y.full_tensor()?, &whole.forward(&x)?.full_tensor()?));
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<ShardingPlan>(&text).unwrap(), plan);
        // shards in another order than the ranks of the mesh are not a layout on it
        let turned = ChunkShardingSpec::over_ranks(0, [1, 2, 0])?;
        let error = shard_parameter(&whole, &mesh, "weight", turned).unwrap_err().to_string();
        assert!(error.contains("`weight`") && error.contains("rank:1/cpu") && error.contains("order"), "{error}");
        assert_eq!(whole.weight.get().placements(), [Replicate], "nothing was changed");
        Ok(())
    })
    .unwrap();
}
