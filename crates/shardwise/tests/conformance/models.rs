//! Model directories of `models/`, loaded on several meshes and compared with what transformers computed: logits, hidden
//! states, generated tokens, losses and gradients, hidden states of encoders.
//!
//! One check is one kind of value of one directory on one mesh.

use std::cell::OnceCell;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;
use serde_json::Value;
use shardwise::models::{
    self, DataParallelMode, Encoder, KvCache, LoadOptions, Model, ParallelismConfig, Pooling, PretrainedConfig,
    PretrainedModel, batch_placements,
};
use shardwise::nn::{Forward, Module};
use shardwise::optim::{AdamW, ParamGroup, ShardedOptimizer};
use shardwise::plan::{DataParallel, TensorParallel};
use shardwise::prelude::*;
use shardwise_test_suites::vectors;

/// Meshes on which everything is compared; parameters are sharded over `tp` and replicated over `dp`.
const MESHES: &[&str] = &["tp=1", "tp=2", "tp=3", "tp=5", "dp=2,tp=2"];
/// Meshes of other sizes, also of more ranks than there are key heads or heads, on which logits and hidden states are compared.
const MORE_MESHES: &[&str] = &["tp=4", "tp=6", "tp=7", "tp=8"];
/// The mesh on which losses and gradients are compared once more, with parameters that are sharded over `dp`.
const FULLY_SHARDED: &str = "dp=2";

/// Kinds of values, with what was wrong with them.
type Outcomes = Vec<(&'static str, std::result::Result<(), String>)>;

pub(crate) fn check() {
    let (mut cases, mut failures) = (0, Vec::new());
    for directory in directories() {
        let name = directory.file_name().unwrap().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(directory.join("cases.json")).unwrap();
        let recorded: Arc<Value> = Arc::new(serde_json::from_str(&text).unwrap());
        for mesh in MESHES.iter().chain(MORE_MESHES).copied().chain([FULLY_SHARDED]) {
            let outcomes = on_mesh(&directory, &recorded, mesh);
            cases += outcomes.len();
            for (kind, outcome) in outcomes {
                if let Err(difference) = outcome {
                    failures.push(format!("{name} on {mesh}, {kind}: {difference}"));
                }
            }
        }
    }
    vectors::conclude("models", cases, &failures);
}

/// All directories with weights, or only those whose name `SHARDWISE_MODELS` contains, separated by commas.
fn directories() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(vectors::directory().join("models")).expect("model directories");
    let wanted = std::env::var("SHARDWISE_MODELS").unwrap_or_default();
    let wanted = |path: &Path| wanted.is_empty() || wanted.split(',').any(|name| path.ends_with(name));
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    found.retain(|path| path.join("cases.json").exists() && path.join("config.json").exists() && wanted(path));
    found.sort();
    found
}

/// Kinds of values that are compared on a mesh.
fn kinds(recorded: &Value, mesh: &str) -> Vec<&'static str> {
    if MORE_MESHES.contains(&mesh) {
        return match recorded["kind"].as_str() {
            Some("encoder") => vec!["last_hidden_state"],
            _ => vec!["logits"],
        };
    }
    let train = ["loss", "grad_norms", "fine_tune"];
    let mut kinds = match recorded["kind"].as_str() {
        Some("encoder") => vec!["last_hidden_state", "pooler_output", "embedding", "cosine"],
        _ => vec!["logits", "hidden_norms", "greedy_cached", "greedy"],
    };
    kinds.extend((!recorded["generate"].as_array().is_none_or(Vec::is_empty)).then_some("generate"));
    if mesh == FULLY_SHARDED {
        kinds.clear();
    }
    kinds.extend(train.iter().filter(|_| !recorded["train"].is_null()));
    kinds
}

fn on_mesh(directory: &Path, recorded: &Arc<Value>, mesh: &'static str) -> Outcomes {
    let kinds = kinds(recorded, mesh);
    if kinds.is_empty() {
        return Vec::new();
    }
    let axes: Mesh = mesh.parse().unwrap();
    let (ranks, all) = (axes.size(), kinds.clone());
    let (directory, recorded) = (directory.to_path_buf(), Arc::clone(recorded));
    let run = move |world: World| -> Result<Outcomes> {
        let mesh = world.device_mesh(axes.clone())?;
        let mut outcomes = Vec::new();
        let checked = Recorded::new(&directory, &recorded, &mesh);
        for &kind in &all {
            // A rank that fails alone would leave the rest waiting, so all ranks learn of it here.
            let outcome = world.all_ok(checked.compare(kind));
            outcomes.push((kind, outcome.map_err(|error| error.to_string())));
        }
        Ok(outcomes)
    };
    match ThreadWorld::new(ranks).unwrap().run(run) {
        Ok(mut of_ranks) => of_ranks.swap_remove(0),
        Err(error) => kinds.iter().map(|kind| (*kind, Err(error.to_string()))).collect(),
    }
}

/// The recorded values of a directory, on a mesh.
struct Recorded<'a> {
    directory: &'a Path,
    recorded: &'a Value,
    mesh: &'a DeviceMesh,
    /// The model, once it has been loaded.
    loaded: OnceCell<Result<PretrainedModel>>,
}

impl<'a> Recorded<'a> {
    fn new(directory: &'a Path, recorded: &'a Value, mesh: &'a DeviceMesh) -> Self {
        Recorded { directory, recorded, mesh, loaded: OnceCell::new() }
    }

    /// The model with the weights of the files.
    fn model(&self) -> Result<&PretrainedModel> {
        self.loaded.get_or_init(|| self.load()).as_ref().map_err(Clone::clone)
    }

    fn compare(&self, kind: &'static str) -> Result<()> {
        match kind {
            "last_hidden_state" | "pooler_output" | "embedding" | "cosine" => self.compare_encoder(kind),
            "loss" | "grad_norms" => self.compare_gradients(kind),
            "fine_tune" => self.compare_fine_tuning(),
            _ => self.compare_inference(kind),
        }
    }

    fn load(&self) -> Result<PretrainedModel> {
        let options = LoadOptions::default();
        if self.mesh.axis("tp").is_ok() {
            return models::load(self.directory, self.mesh, TensorParallel::new("tp"));
        }
        let config = PretrainedConfig::read(self.directory)?;
        let parallelism = ParallelismConfig {
            data_parallel: DataParallelMode::FullyShard,
            tensor_parallel: false,
            sequence_parallel: false,
        };
        let plan = parallelism.plan(&config, self.mesh.mesh())?;
        models::load_planned(self.directory, self.mesh, &plan, &options).map(|(model, _)| model)
    }

    fn ids(&self, rows: &[Vec<u32>]) -> Result<DTensor> {
        let shape = (rows.len(), rows[0].len());
        DTensor::from_fn(shape, DType::I64, self.mesh, batch_placements(self.mesh.mesh()), |i| {
            f64::from(rows[i[0]][i[1]])
        })
    }

    fn tolerance(&self, kind: &str) -> (f64, f64) {
        let found = &self.recorded["tolerance"][kind];
        (found["atol"].as_f64().expect("atol"), found["rtol"].as_f64().expect("rtol"))
    }

    fn close(&self, what: &str, kind: &str, got: &[f64], expected: &[f64]) -> Result<()> {
        let (atol, rtol) = self.tolerance(kind);
        if got.len() != expected.len() {
            return Err(Error::other(format!("{what}: {} values instead of {}", got.len(), expected.len())));
        }
        let off =
            |(a, b): (&f64, &f64)| (a - b).abs().partial_cmp(&(atol + rtol * b.abs())).is_none_or(Ordering::is_gt);
        match got.iter().zip(expected).position(off) {
            None => Ok(()),
            Some(i) => {
                Err(Error::other(format!("{what}: value {i} of {} is {}, expected {}", got.len(), got[i], expected[i])))
            }
        }
    }

    fn compare_inference(&self, kind: &str) -> Result<()> {
        let model = self.model()?;
        if kind == "generate" {
            return self.recorded["generate"].as_array().unwrap().iter().try_for_each(|c| self.generate(model, c));
        }
        for case in self.recorded["cases"].as_array().unwrap() {
            let (id, rows) = (case["id"].as_str().unwrap(), rows_of(&case["input_ids"]));
            match kind {
                "logits" => {
                    let logits = model.forward(&self.ids(&rows)?)?.full_tensor()?;
                    let kept = case["logits"]["shape"][1].as_u64().unwrap() as usize;
                    let got = numbers(&logits.narrow(1, rows[0].len() - kept, kept)?)?;
                    self.close(id, "logits", &got, &recorded_numbers(&case["logits"]))?;
                }
                "hidden_norms" => {
                    let (_, hidden) = model.forward_hidden(&self.ids(&rows)?)?;
                    let mut got = Vec::new();
                    for layer in hidden {
                        let full = layer.full_tensor()?;
                        for row in 0..rows.len() {
                            got.push(numbers(&full.get(row)?)?.iter().map(|x| x * x).sum::<f64>().sqrt());
                        }
                    }
                    self.close(id, "hidden_norms", &got, &recorded_numbers(&case["hidden_norms"]))?;
                }
                _ => {
                    // Angles that depend on the length can give other tokens without a cache.
                    let uncached = kind == "greedy" && case["greedy_uncached"].is_array();
                    let expected = rows_of(&case[if uncached { "greedy_uncached" } else { "greedy" }]);
                    let got = match kind {
                        "greedy_cached" => generated(self, model, &rows, &Stop::after(expected[0].len()), None)?,
                        _ => self.argmax_of_all(model, &rows, &expected)?,
                    };
                    same_tokens(id, &got, &expected)?;
                }
            }
        }
        Ok(())
    }

    /// The tokens that follow without a cache. One pass over the prompt and the expected tokens gives the same as one pass per
    /// token, since a position does not see later ones; where angles depend on the length, each token has its own pass.
    fn argmax_of_all(
        &self,
        model: &PretrainedModel,
        prompts: &[Vec<u32>],
        expected: &[Vec<u32>],
    ) -> Result<Vec<Vec<u32>>> {
        let config = model.config().json();
        let rope =
            if config["rope_scaling"].is_object() { &config["rope_scaling"] } else { &config["rope_parameters"] };
        let kind = rope["rope_type"].as_str().or(rope["type"].as_str()).unwrap_or("default");
        let (prompt, count) = (prompts[0].len(), expected[0].len());
        let joined = |count: usize| -> Vec<Vec<u32>> {
            prompts.iter().zip(expected).map(|(prompt, next)| [prompt, &next[..count]].concat()).collect()
        };
        let last = |logits: &DTensor, from: usize, count: usize| -> Result<Vec<Vec<u32>>> {
            Ok(logits.full_tensor()?.narrow(1, from, count)?.argmax(2)?.to_vec2::<u32>()?)
        };
        if !["dynamic", "longrope", "su"].contains(&kind) {
            return last(&model.forward(&self.ids(&joined(count - 1))?)?, prompt - 1, count);
        }
        let mut found = vec![Vec::new(); prompts.len()];
        for done in 0..count {
            let logits = model.forward(&self.ids(&joined(done))?)?;
            for (row, next) in found.iter_mut().zip(last(&logits, prompt + done - 1, 1)?) {
                row.extend(next);
            }
        }
        Ok(found)
    }

    fn generate(&self, model: &PretrainedModel, case: &Value) -> Result<()> {
        let stop = Stop {
            tokens: case["max_new_tokens"].as_u64().unwrap() as usize,
            eos: ids_of(&case["eos_token_id"]),
            pad: case["pad_token_id"].as_u64().unwrap_or(0) as u32,
        };
        let padding = case["attention_mask"].as_array().map(|rows| {
            rows.iter().map(|row| ids_of(row).iter().take_while(|seen| **seen == 0).count()).collect::<Vec<_>>()
        });
        let got = generated(self, model, &rows_of(&case["input_ids"]), &stop, padding)?;
        same_tokens(case["id"].as_str().unwrap(), &got, &rows_of(&case["output"]))
    }

    /// Ids and the targets after them.
    fn training_batch(&self) -> Result<[DTensor; 2]> {
        let train = &self.recorded["train"];
        let ids: Vec<Vec<u32>> = rows_of(&train["input_ids"]).iter().map(|row| row[..row.len() - 1].to_vec()).collect();
        let labels: Vec<Vec<i64>> = train["labels"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row.as_array().unwrap()[1..].iter().map(|x| x.as_i64().unwrap()).collect())
            .collect();
        let shape = (labels.len(), labels[0].len());
        let targets = DTensor::from_fn(shape, DType::I64, self.mesh, batch_placements(self.mesh.mesh()), |i| {
            labels[i[0]][i[1]] as f64
        })?;
        Ok([self.ids(&ids)?, targets])
    }

    fn compare_gradients(&self, kind: &str) -> Result<()> {
        let (model, train) = (self.model()?, &self.recorded["train"]);
        let [ids, targets] = self.training_batch()?;
        let loss = model.loss(&ids, &targets)?;
        if kind == "loss" {
            return self.close("loss", "loss", &[f64::from(loss.item::<f32>()?)], &[train["loss"].as_f64().unwrap()]);
        }
        let grads = loss.backward()?;
        let mut squares = BTreeMap::new();
        for (path, param) in model.named_parameters() {
            let full = numbers(&grads.get(&param.get())?.full_tensor()?)?;
            squares.insert(path, full.iter().map(|x| x * x).sum::<f64>());
        }
        let total = squares.values().sum::<f64>().sqrt();
        self.close("total", "grad_norms", &[total], &[train["total_grad_norm"].as_f64().unwrap()])?;
        let names: BTreeMap<String, Vec<String>> =
            model.weight_names().0.into_iter().map(|weight| (weight.name, weight.paths)).collect();
        for (name, expected) in train["grad_norms"].as_object().unwrap() {
            let Some(paths) = names.get(name) else { return Err(Error::other(format!("no weight {name}"))) };
            let got = paths.iter().map(|path| squares[path]).sum::<f64>().sqrt();
            self.close(name, "grad_norms", &[got], &[expected.as_f64().unwrap()])?;
        }
        Ok(())
    }

    fn compare_fine_tuning(&self) -> Result<()> {
        let (model, recorded) = (self.load()?, &self.recorded["train"]["fine_tune"]);
        let number = |name: &str| recorded[name].as_f64().unwrap();
        let betas = [0, 1].map(|i| recorded["betas"][i].as_f64().unwrap());
        let adamw = AdamW {
            betas: (betas[0], betas[1]),
            eps: number("eps"),
            weight_decay: number("weight_decay"),
            ..AdamW::default()
        };
        let mut optimizer =
            ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(adamw).with_lr(number("lr")))?;
        let [ids, targets] = self.training_batch()?;
        let expected: Vec<f64> = recorded["losses"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        let mut got = Vec::new();
        for _ in &expected {
            let loss = model.loss(&ids, &targets)?;
            got.push(f64::from(loss.item::<f32>()?));
            optimizer.step(loss.backward()?)?;
        }
        self.close("losses", "train_losses", &got, &expected)
    }

    fn compare_encoder(&self, kind: &str) -> Result<()> {
        let encoder: Encoder = match self.mesh.axis("tp").is_ok() {
            true => models::load_encoder(self.directory, self.mesh, TensorParallel::new("tp"))?,
            false => models::load_encoder(self.directory, self.mesh, DataParallel::new(["dp"]))?,
        };
        for case in self.recorded["cases"].as_array().unwrap() {
            let id = case["id"].as_str().unwrap();
            let [ids, mask] = ["input_ids", "attention_mask"].map(|name| self.ids(&rows_of(&case[name])));
            let (ids, mask) = (ids?, mask?);
            let types = match case["token_type_ids"].is_null() {
                true => None,
                false => Some(self.ids(&rows_of(&case["token_type_ids"]))?),
            };
            let expected = recorded_numbers(&case[kind]);
            match kind {
                "last_hidden_state" => {
                    let found = encoder.encode(&ids, Some(&mask), types.as_ref())?.last_hidden_state.full_tensor()?;
                    let width = found.dims()[2];
                    // Hidden states of padding mean nothing.
                    let real: Vec<bool> =
                        rows_of(&case["attention_mask"]).concat().iter().map(|seen| *seen == 1).collect();
                    let kept = |all: &[f64]| -> Vec<f64> {
                        all.chunks(width)
                            .zip(&real)
                            .filter(|(_, real)| **real)
                            .flat_map(|(row, _)| row.to_vec())
                            .collect()
                    };
                    self.close(id, kind, &kept(&numbers(&found)?), &kept(&expected))?;
                }
                "pooler_output" if case[kind].is_null() => {}
                "pooler_output" => {
                    let found = encoder.encode(&ids, Some(&mask), types.as_ref())?.pooler_output;
                    let found = found.ok_or_else(|| Error::other("no pooler"))?.full_tensor()?;
                    self.close(id, kind, &numbers(&found)?, &expected)?;
                }
                _ => {
                    let found = encoder.embed(&ids, Some(&mask), types.as_ref(), Pooling::Mean)?;
                    let found = match kind {
                        "cosine" => found.matmul(&found.t()?)?,
                        _ => found,
                    };
                    self.close(id, kind, &numbers(&found.full_tensor()?)?, &expected)?;
                }
            }
        }
        Ok(())
    }
}

/// When generation ends.
struct Stop {
    tokens: usize,
    eos: Vec<u32>,
    pad: u32,
}

impl Stop {
    fn after(tokens: usize) -> Self {
        Stop { tokens, eos: Vec::new(), pad: 0 }
    }
}

/// Greedy tokens with a cache: the prompt in one pass, then token by token.
fn generated(
    on: &Recorded<'_>,
    model: &PretrainedModel,
    prompts: &[Vec<u32>],
    stop: &Stop,
    padding: Option<Vec<usize>>,
) -> Result<Vec<Vec<u32>>> {
    let mut cache = padding.map_or_else(KvCache::new, KvCache::with_left_padding);
    let mut input = prompts.to_vec();
    let mut found = vec![Vec::new(); prompts.len()];
    let mut done: BTreeSet<usize> = BTreeSet::new();
    for _ in 0..stop.tokens {
        let logits = model.forward_cached(&on.ids(&input)?, &mut cache)?.full_tensor()?;
        let next = logits.argmax(1)?.to_vec1::<u32>()?;
        for (row, token) in next.into_iter().enumerate() {
            let token = if done.contains(&row) { stop.pad } else { token };
            if stop.eos.contains(&token) {
                done.insert(row);
            }
            found[row].push(token);
            input[row] = vec![token];
        }
        if done.len() == prompts.len() {
            break;
        }
    }
    Ok(found)
}

fn same_tokens(id: &str, got: &[Vec<u32>], expected: &[Vec<u32>]) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::other(format!("{id}: tokens {got:?}, expected {expected:?}")))
}

fn rows_of(rows: &Value) -> Vec<Vec<u32>> {
    rows.as_array().expect("rows").iter().map(ids_of).collect()
}

fn ids_of(ids: &Value) -> Vec<u32> {
    ids.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn recorded_numbers(tensor: &Value) -> Vec<f64> {
    tensor["data"].as_array().into_iter().flatten().map(|x| x.as_f64().expect("a number")).collect()
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?)
}
