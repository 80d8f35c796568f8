//! Every family of models trains with tensor parallelism over 1 to 8 ranks as on one rank, also where ranks have no key head, no
//! expert, no row of a matrix and no token.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;
use serde_json::Value;
use shardwise::models::{
    self, DataParallelMode, GptConfig, LanguageModel, LlamaConfig, LoadOptions, ModelConfig, ParallelismConfig,
    PretrainedConfig, batch_placements, build,
};
use shardwise::nn::Module;
use shardwise::ops::LossOptions;
use shardwise::optim::{ParamGroup, Sgd, ShardedOptimizer};
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;
use shardwise_test_suites::vectors;

const STEPS: usize = 2;
const ROWS: usize = 4;

/// Losses, all gradients of the last step and the weights after it, by name.
type Trained = (Vec<f64>, Vec<(String, Vec<f64>)>);

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

/// Ids below `vocabulary`, the same in every step.
fn tokens(mesh: &DeviceMesh, vocabulary: usize, length: usize, shift: usize) -> Result<DTensor> {
    let token = move |i: &[usize]| ((i[0] * 11 + (i[1] + shift) * 7 + i[0] * i[1]) % vocabulary) as f64;
    DTensor::from_fn((ROWS, length), DType::I64, mesh, batch_placements(mesh.mesh()), token)
}

/// Trains for a few steps of plain gradient descent, which does not enlarge rounding errors of small gradients.
fn train(model: &impl Module, loss_of: impl Fn() -> Result<DTensor>) -> Result<Trained> {
    let group = ParamGroup::new(Sgd::default()).with_lr(0.05);
    let mut optimizer = ShardedOptimizer::new(model.named_parameters(), group)?;
    let (mut losses, mut found) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let loss = loss_of()?;
        losses.push(loss.item::<f64>()?);
        let gradients = loss.backward()?;
        if step + 1 == STEPS {
            for (path, param) in model.named_parameters() {
                if let Ok(gradient) = gradients.get(&param.get()) {
                    found.push((format!("gradient of {path}"), numbers(&gradient.full_tensor()?)?));
                }
            }
        }
        optimizer.step(gradients)?;
    }
    for (path, param) in model.named_parameters() {
        found.push((path, numbers(&param.get().full_tensor()?)?));
    }
    Ok((losses, found))
}

/// The loss in f64: that of the models is computed in f32.
fn language_loss(model: &(impl LanguageModel + ?Sized), ids: &DTensor, targets: &DTensor) -> Result<DTensor> {
    model.forward(ids)?.flatten(0, 1)?.cross_entropy(&targets.flatten(0, 1)?, LossOptions::default())
}

/// What is different between two runs, if anything is.
fn difference(expected: &Trained, found: &Trained) -> Option<String> {
    let far = |name: &str, a: &[f64], b: &[f64]| {
        let scale = a.iter().fold(1e-3, |most: f64, x| most.max(x.abs()));
        let worst =
            a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |w: f64, d| if d > w || d.is_nan() { d } else { w });
        // Sums of a few hundred terms in f64, in another order.
        let is_far = a.len() != b.len() || worst.is_nan() || worst > 1e-10 * scale;
        is_far.then(|| format!("{name} differs by {worst:e}, of {scale:e}"))
    };
    if let Some(text) = far("the loss", &expected.0, &found.0) {
        return Some(text);
    }
    if expected.1.iter().map(|(name, _)| name).ne(found.1.iter().map(|(name, _)| name)) {
        return Some("other parameters or gradients".to_string());
    }
    expected.1.iter().zip(&found.1).find_map(|((name, a), (_, b))| far(name, a, b))
}

/// Runs on one rank and on all meshes, and compares.
fn compare(
    what: &str,
    meshes: &[(&'static str, bool)],
    run: impl Fn(&DeviceMesh, bool) -> Result<Trained> + Send + Sync + 'static,
) -> Vec<String> {
    let run = Arc::new(run);
    let on = |mesh: &'static str, sequence: bool| {
        let run = Arc::clone(&run);
        let axes: Mesh = mesh.parse().unwrap();
        ThreadWorld::new(axes.size()).unwrap().run(move |world| run(&world.device_mesh(axes.clone())?, sequence))
    };
    let expected = match on("tp=1", false) {
        Ok(mut ranks) => ranks.swap_remove(0),
        Err(error) => return vec![format!("{what} on one rank: {error}")],
    };
    assert!(expected.0[1] < expected.0[0], "{what} learns: {:?}", expected.0);
    let mut failures = Vec::new();
    for &(mesh, sequence) in meshes {
        let failure = match on(mesh, sequence) {
            Ok(ranks) => difference(&expected, &ranks[0]),
            Err(error) => Some(error.to_string()),
        };
        failures.extend(failure.map(|text| format!("{what} on {mesh}, sequence parallel: {sequence}: {text}")));
    }
    failures
}

const TENSOR_PARALLEL: [&str; 7] = ["tp=2", "tp=3", "tp=4", "tp=5", "tp=6", "tp=7", "tp=8"];

/// A recorded directory of weights for every family.
fn directories() -> Vec<(PathBuf, PretrainedConfig)> {
    let entries = std::fs::read_dir(vectors::directory().join("models")).unwrap();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.retain(|path| path.join("cases.json").exists() && path.join("config.json").exists());
    let mut seen = BTreeSet::new();
    let configs = paths.into_iter().map(|path| (path.clone(), PretrainedConfig::read(&path).unwrap()));
    let found: Vec<_> = configs.filter(|(_, config)| seen.insert(config.model_type())).collect();
    let missing: Vec<_> = PretrainedConfig::model_types().into_iter().filter(|name| !seen.contains(name)).collect();
    assert!(missing.is_empty(), "families without a directory: {missing:?}");
    found
}

fn train_loaded(path: &Path, config: &PretrainedConfig, mesh: &DeviceMesh, sequence: bool) -> Result<Trained> {
    let options = LoadOptions { dtype: DType::F64, ..LoadOptions::default() };
    let planner = TensorParallel::new("tp");
    let planner = if sequence { planner.sequence_parallel(1) } else { planner };
    let length = 10;
    if config.is_encoder() {
        let (encoder, _) = models::load_encoder_with(path, mesh, planner, &options)?;
        return train(&encoder, || {
            let ids = tokens(mesh, config.vocab_size(), length, 0)?;
            let hidden = encoder.encode(&ids, None, None)?.last_hidden_state;
            // Hidden states are normalized: the sum of their squares would have no gradient.
            hidden.sub_scalar(0.5)?.square()?.mul(&hidden)?.mean_all()
        });
    }
    let (model, _) = models::load_with(path, mesh, planner, &options)?;
    train(&model, || {
        let batch = |shift| tokens(mesh, config.vocab_size(), length, shift);
        language_loss(&model, &batch(0)?, &batch(1)?)
    })
}

#[test]
fn every_family_trains_over_1_to_8_ranks_as_on_one() {
    let mut failures = Vec::new();
    for (path, config) in directories() {
        let name = config.model_type();
        // The sequence of 10 tokens does not divide by most of the sizes.
        let meshes: Vec<(&'static str, bool)> =
            TENSOR_PARALLEL.into_iter().enumerate().map(|(i, mesh)| (mesh, i % 2 == 0)).collect();
        failures.extend(compare(name, &meshes, move |mesh, sequence| train_loaded(&path, &config, mesh, sequence)));
    }
    assert!(failures.is_empty(), "{} runs differ:\n{}", failures.len(), failures.join("\n"));
}

/// The configuration of a family with fewer heads, experts, features and tokens than there are ranks.
fn tiny(config: &PretrainedConfig) -> PretrainedConfig {
    let mut json: Value = config.json().clone();
    let sizes = [
        ("vocab_size", 5),
        ("intermediate_size", 3),
        ("moe_intermediate_size", 2),
        ("shared_expert_intermediate_size", 3),
        ("n_inner", 3),
        ("num_experts", 3),
        ("num_local_experts", 3),
        ("num_experts_per_tok", 2),
    ];
    for (name, size) in sizes {
        if json.get(name).is_some_and(|found| found.is_number() || name == "n_inner") {
            json[name] = size.into();
        }
    }
    PretrainedConfig::from_json(&json).unwrap_or_else(|error| panic!("{}: {error}", config.model_type()))
}

fn train_built(config: &ModelConfig, mesh: &DeviceMesh, sequence: bool) -> Result<Trained> {
    let data_parallel =
        if mesh.axis("dp").is_ok() { DataParallelMode::FullyShard } else { DataParallelMode::Replicate };
    let parallelism = ParallelismConfig { data_parallel, tensor_parallel: true, sequence_parallel: sequence };
    let plan = parallelism.plan(config, mesh.mesh())?;
    mesh.manual_seed(11);
    let model = build(config, &plan, mesh, DType::F64)?;
    train(&model, || {
        let batch = |shift| tokens(mesh, config.vocab_size(), 3, shift);
        language_loss(&model, &batch(0)?, &batch(1)?)
    })
}

#[test]
fn ranks_without_heads_experts_rows_or_tokens_train_along() {
    let sizes = |n_heads, d_ff| GptConfig {
        vocab_size: 5,
        seq_len: 4,
        d_model: 6,
        n_layers: 2,
        n_heads,
        d_ff,
        ..GptConfig::default()
    };
    let llama = LlamaConfig {
        vocab_size: 5,
        seq_len: 4,
        d_model: 12,
        n_layers: 2,
        n_heads: 3,
        n_kv_heads: 1,
        d_ff: 3,
        ..LlamaConfig::default()
    };
    let mut configs = vec![
        ("gpt".to_string(), ModelConfig::Gpt(sizes(3, 3))),
        (
            "gpt with one head and a tied head".to_string(),
            ModelConfig::Gpt(GptConfig { tied_head: true, ..sizes(1, 2) }),
        ),
        ("llama".to_string(), ModelConfig::Llama(llama.clone())),
        ("llama with a tied head".to_string(), ModelConfig::Llama(LlamaConfig { tied_head: true, ..llama })),
    ];
    for (_, config) in directories().into_iter().filter(|(_, config)| !config.is_encoder()) {
        let name = format!("tiny {}", config.model_type());
        configs.push((name, ModelConfig::Pretrained { config: tiny(&config), seq_len: 4 }));
    }
    let mut failures = Vec::new();
    for (name, config) in configs {
        let meshes = ["tp=5", "tp=7", "dp=2,tp=3", "dp=3,tp=2"];
        let meshes = meshes.into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]).collect::<Vec<_>>();
        failures.extend(compare(&name, &meshes, move |mesh, sequence| train_built(&config, mesh, sequence)));
    }
    assert!(failures.is_empty(), "{} runs differ:\n{}", failures.len(), failures.join("\n"));
}
