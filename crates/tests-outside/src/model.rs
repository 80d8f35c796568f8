//! A custom model: two towers that embed queries and documents with one token table, trained to find the document of every
//! query in the batch. It is planned, searched for, estimated, trained, saved, resumed on another mesh and exported through
//! the same traits as the models of the library.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use shardwise::Mesh;
use shardwise::candle_core::{Device, Tensor};
use shardwise::checkpoint::{self, Series, State};
use shardwise::data::{Batches, Dataset};
use shardwise::error::ErrorKind;
use shardwise::mesh::Network;
use shardwise::models::{
    DataParallelMode, Model, ModelSpec, ParallelismConfig, StepOptions, WeightNames, batch_placements, build,
    estimate_step, export, export_hf, import, search_plan,
};
use shardwise::nn::init::Init;
use shardwise::nn::{
    AttentionConfig, Conv1d, Conv1dOptions, Embedding, ForwardAll, Hooks, LayerNorm, Linear, MultiHeadAttention,
    PlanHints,
};
use shardwise::ops::LossOptions;
use shardwise::optim::Schedule;
use shardwise::plan::{FullyShard, ShardingPlan, ShardingPlanner, TensorParallel, shard_module};
use shardwise::prelude::*;
use shardwise::train::Trainer;

/// Sizes of the model.
#[derive(Clone)]
struct TwoTowerConfig {
    vocabulary: usize,
    width: usize,
    heads: usize,
    hidden: usize,
    /// Lengths of queries and documents.
    lengths: [usize; 2],
}

const CONFIG: TwoTowerConfig = TwoTowerConfig { vocabulary: 20, width: 12, heads: 3, hidden: 18, lengths: [3, 7] };

/// An MLP whose layers have names that planners do not know.
#[derive(Module)]
struct Mixer {
    norm: LayerNorm,
    widen: Linear,
    narrow: Linear,
    hooks: Hooks,
    hints: PlanHints,
}

impl Mixer {
    fn new(builder: &Builder, config: &TwoTowerConfig) -> Result<Self> {
        Ok(Mixer {
            norm: LayerNorm::new(&builder.child("norm"), config.width, 1e-5)?,
            widen: Linear::new(&builder.child("widen"), config.width, config.hidden)?,
            narrow: Linear::new(&builder.child("narrow"), config.hidden, config.width)?,
            hooks: builder.hooks(),
            hints: PlanHints::new().column("widen").row("narrow"),
        })
    }
}

impl Forward for Mixer {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x + &self.narrow.forward(&self.widen.forward(&self.norm.forward(x)?)?.gelu()?)?)
    }
}

/// A vector per text: what stands next to each other, attention, and a mixer.
#[derive(Module)]
struct Tower {
    tokens: Embedding,
    neighbours: Conv1d,
    attention: MultiHeadAttention,
    mixers: Vec<Mixer>,
    hooks: Hooks,
    hints: PlanHints,
}

impl Tower {
    fn new(builder: &Builder, config: &TwoTowerConfig, tokens: Embedding) -> Result<Self> {
        let TwoTowerConfig { width, heads, .. } = *config;
        let attention = AttentionConfig { width, heads, key_heads: heads, ..AttentionConfig::default() };
        let same_length = Conv1dOptions::new(width, width, 3).padding(1);
        let mixers = (0..2).map(|i| Mixer::new(&builder.child(&format!("mixers.{i}")), config));
        Ok(Tower {
            tokens,
            neighbours: Conv1d::new(&builder.child("neighbours"), same_length)?,
            attention: MultiHeadAttention::new(&builder.child("attention"), attention)?,
            mixers: mixers.collect::<Result<_>>()?,
            hooks: builder.hooks(),
            hints: PlanHints::new().batch_input("attention"),
        })
    }
}

impl Forward for Tower {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.hooks.run(ids, |ids| {
            let x = self.tokens.forward(ids)?;
            let x = (&x + &self.neighbours.forward(&x.transpose(1, 2)?)?.transpose(1, 2)?)?;
            let x = (&x + &self.attention.forward(&x)?)?;
            self.mixers.iter().try_fold(x, |x, mixer| mixer.forward(&x))?.mean(&[1], false)
        })
    }
}

#[derive(Module)]
struct TwoTowers {
    queries: Tower,
    documents: Tower,
    sharpness: Param,
    hooks: Hooks,
}

impl ForwardAll for TwoTowers {
    /// Queries and documents to how well each query fits each document.
    fn forward_all(&self, inputs: &[&DTensor]) -> Result<Vec<DTensor>> {
        self.hooks.run_all(inputs, |x| {
            let (queries, documents) = (self.queries.forward(&x[0])?, self.documents.forward(&x[1])?);
            Ok(vec![(&queries.matmul(&documents.t()?)? * &self.sharpness.get())?])
        })
    }
}

impl Model for TwoTowers {
    fn batch_loss(&self, batch: &[DTensor]) -> Result<DTensor> {
        let scores = self.forward_all(&[&batch[0], &batch[1]])?.swap_remove(0);
        let (pairs, mesh) = (scores.shape()[0], scores.device_mesh());
        let own = DTensor::arange(0.0..pairs as f64, DType::I64, mesh, vec![Replicate; mesh.ndim()])?;
        scores.cross_entropy(&own, LossOptions::default())
    }

    fn weight_names(&self) -> WeightNames {
        let mut names =
            WeightNames::new().add("embeddings.weight", "queries.tokens.weight").add("logit_scale", "sharpness");
        for (theirs, ours) in [("query_encoder", "queries"), ("document_encoder", "documents")] {
            let name = |end: &str| format!("{theirs}.{end}");
            let path = |end: &str| format!("{ours}.{end}");
            let projections = ["query", "key", "value"].map(|part| path(&format!("attention.{part}.weight")));
            names = names.join(&name("attention.in_proj_weight"), projections);
            names = names.add(&name("attention.out_proj.weight"), &path("attention.output.weight"));
            for kind in ["weight", "bias"] {
                names = names.add(&name(&format!("conv.{kind}")), &path(&format!("neighbours.{kind}")));
                for i in 0..2 {
                    let (mlp, mixer) = (name(&format!("mlp.{i}")), path(&format!("mixers.{i}")));
                    names = names.add(&format!("{mlp}.ln.{kind}"), &format!("{mixer}.norm.{kind}"));
                    for (their, our) in [("wi", "widen"), ("wo", "narrow")] {
                        let (name, path) = (format!("{mlp}.{their}.{kind}"), format!("{mixer}.{our}.{kind}"));
                        names = if kind == "bias" { names.add(&name, &path) } else { names.transposed(&name, [path]) };
                    }
                }
            }
        }
        names
    }
}

impl ModelSpec for TwoTowerConfig {
    type Model = TwoTowers;

    fn check(&self) -> Result<()> {
        match self.width.is_multiple_of(self.heads) {
            true => Ok(()),
            false => {
                let found = format!("width {} for {} heads", self.width, self.heads);
                Err(ErrorKind::Argument.error("two towers", found, "a multiple of the heads", "change the width"))
            }
        }
    }

    fn build(&self, builder: &Builder) -> Result<TwoTowers> {
        let tower = |name: &str, tokens: Embedding| Tower::new(&builder.child(name), self, tokens);
        let tokens = Embedding::new(&builder.child("queries.tokens"), self.vocabulary, self.width)?;
        let shared = tokens.shared(builder.child("documents.tokens").hooks());
        Ok(TwoTowers {
            queries: tower("queries", tokens)?,
            documents: tower("documents", shared)?,
            sharpness: builder.param("sharpness", &[1], Init::Constant(0.5))?,
            hooks: builder.hooks(),
        })
    }

    fn example_batch(&self, samples: usize, mesh: &DeviceMesh) -> Result<Vec<DTensor>> {
        let ids = |length: usize| DTensor::zeros((samples, length), DType::I64, mesh, batch_placements(mesh));
        self.lengths.map(ids).into_iter().collect()
    }

    fn hf_config(&self, dtype: DType) -> Value {
        json!({ "model_type": "two_tower", "hidden_size": self.width, "torch_dtype": dtype.as_str() })
    }
}

/// Queries whose tokens stand somewhere in their documents.
struct Pairs;

impl Dataset for Pairs {
    fn len(&self) -> usize {
        17
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        let text = |length: usize, stride: usize| -> Result<Tensor> {
            let ids = (0..length).map(|i| ((index * 7 + i * stride) % CONFIG.vocabulary) as i64);
            Ok(Tensor::from_vec(ids.collect(), length, &Device::Cpu)?)
        };
        Ok(vec![text(CONFIG.lengths[0], 6)?, text(CONFIG.lengths[1], 3)?])
    }
}

const BATCH: usize = 6;

fn sharded() -> ParallelismConfig {
    ParallelismConfig { data_parallel: DataParallelMode::FullyShard, tensor_parallel: false, sequence_parallel: false }
}

fn tensor_parallel() -> ParallelismConfig {
    ParallelismConfig { data_parallel: DataParallelMode::Replicate, tensor_parallel: true, sequence_parallel: false }
}

/// Trains on from the newest checkpoint of a series up to a step, and saves there. Returns losses by step.
fn train(mesh: &Mesh, plan: &ShardingPlan, series: &Series, until: u64) -> Result<BTreeMap<u64, f64>> {
    let run = |world: World| {
        let mesh = world.device_mesh(mesh.clone())?;
        mesh.manual_seed(5);
        let model = build(&CONFIG, plan, &mesh, DType::F64)?;
        let schedule = Schedule::Linear { warmup: 2, total: 12, end: 0.1 };
        let optimizer = AdamW { weight_decay: 0.1, ..AdamW::default() }.over(&model)?.with_schedule(schedule);
        let mut trainer = Trainer::new(model, optimizer).clip_norm(1.0);
        trainer.optimizer.groups_mut()[0].lr = 0.02;
        let mut batches = Batches::new(Pairs, &mesh)?.shuffle(3).batch(BATCH);
        if mesh.mesh().axis("dp").is_ok() {
            batches = batches.sharded("dp")?;
        }
        series.resume(&world, (&trainer.model, &mut trainer.optimizer, &mesh, &mut batches))?;
        let mut losses = BTreeMap::new();
        while trainer.optimizer.steps() < until {
            let step = trainer.step(&batches.next_batch()?)?;
            losses.insert(trainer.optimizer.steps(), step.loss);
        }
        series.save_from(&world, until, (&trainer.model, &trainer.optimizer, &mesh, &batches))?;
        Ok(losses)
    };
    shardwise::launch_scoped(mesh.size(), run)
}

/// A directory that is removed at the end.
struct TestDirectory(PathBuf);

impl TestDirectory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("shardwise-model-outside-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        TestDirectory(path)
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn planners_follow_the_modules_and_the_hints() {
    for size in [2, 3] {
        let run = move |world: World| {
            let mesh = world.mesh([("dp", 1), ("tp", size)])?;
            let model = CONFIG.build(&Builder::new(&mesh))?;
            let plan = TensorParallel::new("tp").and(FullyShard::new(["dp"])).plan(&model, &mesh)?;
            let plan = plan.replace("*.neighbours.weight", [("tp", Shard(0))]);
            shard_module(&model, &mesh, &plan)?;
            let params: BTreeMap<String, Param> = model.named_parameters().into_iter().collect();
            let tp = |path: &str| params[path].get().placements()[1].clone();
            assert!(params.contains_key("queries.tokens.weight") && !params.contains_key("documents.tokens.weight"));
            for tower in ["queries", "documents"] {
                // by hint, by name, by pattern
                assert_eq!(tp(&format!("{tower}.mixers.1.widen.weight")), Shard(0));
                assert_eq!(tp(&format!("{tower}.mixers.0.narrow.weight")), Shard(1));
                let heads = if size == 2 { Placement::ragged(0, [8, 4]) } else { Shard(0) };
                assert_eq!(tp(&format!("{tower}.attention.key.weight")), heads);
                assert_eq!(tp(&format!("{tower}.neighbours.weight")), Shard(0));
                assert_eq!(tp(&format!("{tower}.neighbours.bias")), Replicate);
            }
            Ok(())
        };
        launch(size, run).unwrap();
    }
}

#[test]
fn hints_that_name_no_layer_are_an_error_on_all_ranks() {
    let run = |world: World| {
        let mesh = world.mesh([("tp", 2)])?;
        let mut model = CONFIG.build(&Builder::new(&mesh))?;
        model.documents.mixers[1].hints = PlanHints::new().column("widden").row("narrow");
        let message = TensorParallel::new("tp").plan(&model, &mesh).unwrap_err().to_string();
        for part in ["column `widden`", "`documents.mixers.1`", "did you mean `documents.mixers.1.widen`"] {
            assert!(message.contains(part), "{message}");
        }
        Ok(())
    };
    launch(2, run).unwrap();
    let odd = TwoTowerConfig { width: 13, ..CONFIG };
    let message = sharded().plan(&odd, &Mesh::new([("dp", 2)]).unwrap()).unwrap_err().to_string();
    assert!(message.contains("width 13 for 3 heads"), "{message}");
}

fn on_threads() -> StepOptions {
    StepOptions::new(BATCH, Network::THREADS)
}

#[test]
fn a_plan_search_and_estimates_run_the_step_without_data() {
    let mesh = Mesh::new([("dp", 2)]).unwrap();
    let replicated = ParallelismConfig { data_parallel: DataParallelMode::Replicate, ..sharded() };
    for (mesh, parallelism) in
        [(&mesh, replicated), (&mesh, sharded()), (&Mesh::new([("tp", 3)]).unwrap(), tensor_parallel())]
    {
        let plan = parallelism.plan(&CONFIG, mesh).unwrap();
        let estimate = estimate_step(&CONFIG, &plan, mesh, &on_threads()).unwrap();
        let executed = |world: World| {
            let mesh = world.device_mesh(mesh.clone())?;
            world.trace().clear();
            let model = build(&CONFIG, &plan, &mesh, DType::F32)?;
            model.batch_loss(&CONFIG.example_batch(BATCH, &mesh)?)?.backward()?.in_param_layout()?;
            Ok(world.trace().records().len())
        };
        // what the dry run predicts is what ranks do
        assert_eq!(
            estimate.collectives,
            shardwise::launch_scoped(mesh.size(), executed).unwrap(),
            "{mesh} {parallelism:?}"
        );
        assert!(estimate.us() > 0.0 && estimate.peak_bytes > 0);
    }
    let search = search_plan(&CONFIG, &Mesh::new([("dp", 3)]).unwrap(), &on_threads()).unwrap();
    let names: Vec<&str> = search.trials.iter().map(|trial| trial.name.as_str()).collect();
    // mixers are a kind of block because of their hints
    assert!(names.iter().any(|name| name.contains("Mixer dp:tensor")), "{names:?}");
    assert!(names.contains(&"all replicated"), "{names:?}");
    assert!(search.trials.iter().all(|trial| trial.estimate.us() >= search.estimate.us()));
}

#[test]
fn a_run_resumes_on_another_mesh_with_the_losses_of_the_uninterrupted_run() {
    let place = TestDirectory::new("resume");
    let series = |name: &str| Series::new(place.0.join(name));
    let mesh = |axis: &str, size: usize| Mesh::new([(axis, size)]).unwrap();
    let one = sharded().plan(&CONFIG, &mesh("dp", 1)).unwrap();
    let whole = train(&mesh("dp", 1), &one, &series("whole"), 8).unwrap();
    assert!(whole.len() == 8 && whole[&8] < 0.8 * whole[&1], "{whole:?}");
    let searched = search_plan(&CONFIG, &mesh("dp", 2), &on_threads()).unwrap().plan;
    let on_two = tensor_parallel().plan(&CONFIG, &mesh("tp", 2)).unwrap();
    let on_three = sharded().plan(&CONFIG, &mesh("dp", 3)).unwrap();
    for (name, first, then) in [
        ("2-3", (mesh("tp", 2), &on_two), (mesh("dp", 3), &on_three)),
        ("3-2", (mesh("dp", 3), &on_three), (mesh("dp", 2), &searched)),
    ] {
        let mut losses = train(&first.0, first.1, &series(name), 5).unwrap();
        assert!(losses.keys().copied().eq(1..=5));
        let rest = train(&then.0, then.1, &series(name), 8).unwrap();
        // three batches into the data: the last ones are of the second and third epoch
        assert!(rest.keys().copied().eq(6..=8));
        losses.extend(rest);
        // f64 with the sums of a step in another order: 1e-16 each, a factor of 1e4 for eight steps of AdamW
        let far = losses.iter().find(|(step, loss)| (*loss - whole[step]).abs() > 1e-12 * whole[step]);
        assert!(far.is_none(), "{name}: {losses:?}, not {whole:?}");
    }
}

/// Names with type and shape, from the header of a file.
fn header(path: &Path) -> BTreeMap<String, (String, Vec<usize>)> {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    let shape =
        |value: &Value| value["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
    tensors.map(|(name, value)| (name, (value["dtype"].as_str().unwrap().to_string(), shape(&value)))).collect()
}

#[test]
fn an_export_has_the_names_of_the_model_and_is_read_back() {
    let place = TestDirectory::new("export");
    let path = place.0.join("hf");
    let numbers = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let written = |world: World| {
        let mesh = world.mesh([("dp", 3)])?;
        let model = build(&CONFIG, &sharded().plan(&CONFIG, mesh.mesh())?, &mesh, DType::F32)?;
        export_hf(&world, &path, &model, &CONFIG)?;
        export(&model)
    };
    let weights = shardwise::launch_scoped(3, written).unwrap();
    let found = header(&path.join("model.safetensors"));
    // 2 towers of 2 + 2 + 2 * 6 weights, the table once, and the sharpness
    assert_eq!((found.len(), weights.len()), (34, 34));
    let of = |name: &str, shape: &[usize]| assert_eq!(found[name], ("F32".to_string(), shape.to_vec()), "{name}");
    of("embeddings.weight", &[20, 12]);
    of("query_encoder.attention.in_proj_weight", &[36, 12]);
    of("document_encoder.conv.weight", &[12, 12, 3]);
    // transposed in files
    of("document_encoder.mlp.1.wi.weight", &[12, 18]);
    of("query_encoder.mlp.0.wo.bias", &[12]);
    let stored = shardwise::candle_core::safetensors::load(path.join("model.safetensors"), &Device::Cpu).unwrap();
    for (name, weight) in &weights {
        let is_transposed = name.ends_with("wi.weight") || name.ends_with("wo.weight");
        let expected = if is_transposed { weight.t().unwrap() } else { weight.clone() };
        assert_eq!(numbers(&stored[name]), numbers(&expected), "{name}");
    }
    let config: Value = serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
    assert_eq!(config, json!({ "model_type": "two_tower", "hidden_size": 12, "torch_dtype": "f32" }));

    // into another model on another mesh: tensors by name in any layout, and whole weights by `import`
    let read = |world: World| {
        let mesh = world.mesh([("tp", 2)])?;
        mesh.manual_seed(77);
        let model = build(&CONFIG, &tensor_parallel().plan(&CONFIG, mesh.mesh())?, &mesh, DType::F32)?;
        let table = model.documents.tokens.weight.get().detach();
        let loaded = checkpoint::load(&world, &path, &State::map([("embeddings.weight", table.clone())]))?;
        assert_eq!(loaded.tensor("embeddings.weight")?.layout(), table.layout());
        assert_eq!(
            numbers(&loaded.tensor("embeddings.weight")?.full_tensor()?),
            numbers(&weights["embeddings.weight"])
        );
        import(&model, &weights)?;
        let own = export(&model)?;
        assert!(weights.iter().all(|(name, weight)| numbers(&own[name]) == numbers(weight)));
        Ok(())
    };
    shardwise::launch_scoped(2, read).unwrap();
}
