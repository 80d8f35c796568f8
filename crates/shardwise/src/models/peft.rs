//! Low-rank adapters in the files of the PEFT library: `adapter_config.json` and `adapter_model.safetensors`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::panic::Location;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use serde_json::{Value, json};

use super::model::Model;
use super::names::WeightName;
use crate::checkpoint::{MappedBox, open, read_mapped, unwritable};
use crate::comm::{World, all_ok};
use crate::error::{Error, ErrorKind, Result, nearest};
use crate::layout::{TensorBox, TensorMeta};
use crate::nn::{Lora, lora_adapters};
use crate::param::Param;
use crate::placement::Placement;
use crate::read_file::{MOST_CONFIG_BYTES, read_text};
use crate::tensor::{DTensor, no_grad};

/// Name of the settings file.
const CONFIG: &str = "adapter_config.json";
/// Name of the file with the matrices.
const WEIGHTS: &str = "adapter_model.safetensors";
/// What PEFT puts before the name of a module.
const PREFIX: &str = "base_model.model.";

/// Returns the paths of the linear layers that adapters are meant for.
///
/// A target is the end of a module's path in the model (`attention.query`) or of its name in files (`q_proj`), as PEFT's
/// `target_modules`; `all-linear` is every linear layer but the head. Local.
///
/// # Errors
/// [`Error::Invalid`] if a target fits no layer.
#[doc(alias = "target_modules")]
pub fn lora_targets(model: &dyn Model, targets: &[impl AsRef<str>]) -> Result<BTreeSet<String>> {
    let modules = model.named_modules();
    let is_layer =
        |path: &str| modules.iter().any(|(own, kind)| own == path && matches!(*kind, "Linear" | "LoraLinear"));
    // Per layer its path and, where files have one tensor for it, its name there.
    let mut layers: Vec<(String, String)> = Vec::new();
    for weight in model.weight_names().0 {
        let Some(stored) = weight.name.strip_suffix(".weight") else { continue };
        let paths = weight.paths.iter().filter_map(|path| path.strip_suffix(".weight"));
        layers.extend(paths.filter(|path| is_layer(path)).map(|path| (path.to_string(), stored.to_string())));
    }
    let mut chosen = BTreeSet::new();
    for target in targets.iter().map(AsRef::as_ref) {
        let fits = |(path, stored): &&(String, String)| match target {
            "all-linear" => !ends_with(path, "head"),
            _ => ends_with(path, target) || ends_with(stored, target),
        };
        let before = chosen.len();
        chosen.extend(layers.iter().filter(fits).map(|(path, _)| path.clone()));
        if chosen.len() == before && !layers.iter().any(|layer| fits(&layer)) {
            let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_string();
            let known: BTreeSet<String> = layers.iter().map(|(_, stored)| last(stored)).collect();
            let fix = format!("did you mean {}?", nearest(target, known.iter().cloned()));
            let needed = format!(
                "all-linear, or the end of a layer's name such as {}",
                known.into_iter().collect::<Vec<_>>().join(", ")
            );
            return Err(ErrorKind::Model.error(
                "targets of adapters",
                format!("`{target}`, which fits no layer"),
                needed,
                fix,
            ));
        }
    }
    Ok(chosen)
}

/// Whether the last parts of a dotted name are those of `end`.
fn ends_with(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The matrices of one module in files: `A` is `[rank, inputs]`, `B` is `[outputs, rank]`.
struct StoredAdapter {
    module: String,
    a: Tensor,
    b: Tensor,
}

/// Writes the adapters of a model in the form of PEFT, which loads them next to the model that `base` names.
///
/// Layers that files join, such as the query, key and value projections of GPT-2, become one adapter of as many times the rank,
/// with zeros where they do not mix (`rank_pattern`).
///
/// Collective: all ranks of the world must call it. The adapters, which are small, are gathered; the first rank writes.
///
/// # Errors
/// [`Error::Invalid`] if the model has no adapters; I/O errors of the first rank reach all ranks.
#[doc(alias = "save_pretrained")]
#[track_caller]
pub fn save_adapter(world: &World, path: impl AsRef<Path>, model: &dyn Model, lora: &Lora, base: &str) -> Result<()> {
    let (path, site) = (path.as_ref(), Location::caller());
    let adapters = lora_adapters(model);
    let params: BTreeMap<String, Param> = model.named_parameters().into_iter().collect();
    let (mut stored, mut transposed, mut left) = (Vec::new(), false, BTreeSet::new());
    for weight in model.weight_names().0.iter().filter(|weight| weight.slice.is_none()) {
        let Some(module) = weight.name.strip_suffix(".weight") else { continue };
        let layers = weight.paths.iter().map(|path| adapters.get(path.strip_suffix(".weight").unwrap_or(path)));
        let layers: Vec<Option<&(Param, Param)>> = layers.collect();
        if layers.iter().all(Option::is_none) {
            left.insert(module.to_string());
            continue;
        }
        let (a, b) = no_grad(|| joined(weight, &layers, &params))?;
        transposed |= weight.transposed;
        stored.push(StoredAdapter { module: module.to_string(), a: a.full_tensor()?, b: b.full_tensor()? });
    }
    if stored.is_empty() {
        let fix = "call `Lora::apply` first, and save before merging";
        return Err(ErrorKind::Model.error("adapters", "none in this model", "at least one", fix));
    }
    let config = adapter_config(&stored, lora, base, transposed, &left);
    let write = || -> Result<()> {
        fs::create_dir_all(path).map_err(|error| unwritable(path, &error))?;
        let pair = |s: &StoredAdapter| {
            let name = |matrix: &str| format!("{PREFIX}{}.{matrix}.weight", s.module);
            [(name("lora_A"), s.a.clone()), (name("lora_B"), s.b.clone())]
        };
        let tensors: std::collections::HashMap<String, Tensor> = stored.iter().flat_map(pair).collect();
        let text = serde_json::to_string_pretty(&config).map_err(Error::other)?;
        // Renamed when both are complete, so that an interrupted save, or one to a full disk, leaves the earlier files.
        let unfinished = [CONFIG, WEIGHTS].map(|name| path.join(format!(".{name}.unfinished")));
        let written = write_adapter(&unfinished, text, &tensors);
        if written.is_err() {
            unfinished.iter().for_each(|file| drop(fs::remove_file(file)));
        }
        written?;
        for (from, name) in unfinished.iter().zip([CONFIG, WEIGHTS]) {
            fs::rename(from, path.join(name)).map_err(|error| unwritable(&path.join(name), &error))?;
        }
        Ok(())
    };
    all_ok(world, if world.rank() == 0 { write() } else { Ok(()) }, site)
}

/// Writes the settings and the tensors of adapters to these two files.
fn write_adapter(
    [config, weights]: &[PathBuf; 2],
    text: String,
    tensors: &std::collections::HashMap<String, Tensor>,
) -> Result<()> {
    fs::write(config, text + "\n").map_err(|error| unwritable(config, &error))?;
    candle_core::safetensors::save(tensors, weights).map_err(|error| {
        let (found, fix) = (format!("{error}: {}", weights.display()), "free some space, or save to another disk");
        ErrorKind::path(weights).error::<Error>("adapter file", found, "a writable path", fix)
    })?;
    // The library creates files that only their owner can read; models are shared.
    let permissions = fs::metadata(config).map_err(|error| unwritable(config, &error))?.permissions();
    fs::set_permissions(weights, permissions).map_err(|error| unwritable(weights, &error))
}

/// `A` and `B` of a tensor in files, from the adapters of the layers that it holds.
#[track_caller]
fn joined(
    weight: &WeightName,
    layers: &[Option<&(Param, Param)>],
    params: &BTreeMap<String, Param>,
) -> Result<(DTensor, DTensor)> {
    let values = |(a, b): &(Param, Param)| (a.get().detach(), b.get().detach());
    if let [Some(only)] = layers {
        return Ok(values(only));
    }
    let all_a: Vec<DTensor> = layers.iter().flatten().map(|pair| values(pair).0).collect();
    let rank: usize = all_a.iter().map(|a| a.shape()[0]).sum();
    let (mesh, dtype) = (all_a[0].device_mesh().clone(), all_a[0].dtype());
    let zeros = |rows: usize, columns: usize| {
        DTensor::zeros((rows, columns), dtype, &mesh, vec![Placement::Replicate; mesh.ndim()])
    };
    let mut before = 0;
    let mut rows = Vec::new();
    for (layer, path) in layers.iter().zip(&weight.paths) {
        let outputs = params.get(path).map_or(0, |param| param.shape()[0]);
        rows.push(match layer {
            None => zeros(outputs, rank)?,
            Some(pair) => {
                let b = values(pair).1;
                let own = b.shape()[1];
                let wide = [zeros(outputs, before)?, b, zeros(outputs, rank - before - own)?];
                before += own;
                DTensor::cat(&wide.iter().collect::<Vec<_>>(), 1)?
            }
        });
    }
    Ok((DTensor::cat(&all_a.iter().collect::<Vec<_>>(), 0)?, weight.joined(&rows)?))
}

/// The settings as PEFT stores them. `left` has the modules without an adapter.
fn adapter_config(
    stored: &[StoredAdapter],
    lora: &Lora,
    base: &str,
    transposed: bool,
    left: &BTreeSet<String>,
) -> Value {
    let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_string();
    // PEFT adapts every module whose name ends with a target: the last part by itself would reach modules without an adapter.
    let taken: BTreeSet<String> = left.iter().map(|module| last(module)).collect();
    let target =
        |s: &StoredAdapter| Some(last(&s.module)).filter(|end| !taken.contains(end)).unwrap_or(s.module.clone());
    let targets: BTreeSet<String> = stored.iter().map(target).collect();
    let other_ranks = stored.iter().map(|s| (s.module.clone(), s.a.dims()[0])).filter(|(_, rank)| *rank != lora.rank);
    let ranks: BTreeMap<String, usize> = other_ranks.collect();
    let alphas: BTreeMap<&String, Value> =
        ranks.iter().map(|(module, &rank)| (module, number(lora.scale() * rank as f64))).collect();
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": number(lora.alpha),
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": true,
        "use_rslora": false,
        "use_dora": false,
        "modules_to_save": null,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    })
}

/// A number as an integer where it is one: readers may ask for that.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}

/// Puts the adapters of a PEFT directory next to the layers of a model, freezes everything else, and returns their settings.
///
/// An adapter of a tensor that holds several layers, such as the joined projections of GPT-2, becomes one per layer with the same
/// `A`. Adapters of other scales than the first have them multiplied into `B`.
///
/// Collective: all ranks of the world must call it; every rank reads the files.
///
/// # Errors
/// [`Error::Invalid`] with the name of what is not supported (other methods than LoRA, DoRA, trained biases, additional
/// modules), of a module that the model does not have, or of a matrix of another shape; nothing changes then.
#[doc(alias = "PeftModel")]
#[track_caller]
pub fn load_adapter(world: &World, path: impl AsRef<Path>, model: &dyn Model) -> Result<Lora> {
    let (path, site) = (path.as_ref(), Location::caller());
    let (lora, layers) = all_ok(world, read_adapter(path, model), site)?;
    let mut ranks: BTreeMap<usize, BTreeSet<&String>> = BTreeMap::new();
    for (path, (a, _)) in &layers {
        ranks.entry(a.dims()[0]).or_default().insert(path);
    }
    for (rank, paths) in ranks {
        let same_scale = Lora { rank, alpha: lora.scale() * rank as f64, ..lora };
        all_ok(world, same_scale.apply(model, |path| paths.iter().any(|own| *own == path)), site)?;
    }
    for (path, (a, b)) in lora_adapters(model) {
        let Some((new_a, new_b)) = layers.get(&path) else { continue };
        for (param, value) in [(a, new_a), (b, new_b)] {
            let now = param.get();
            let value = value.to_dtype(now.dtype())?;
            param.set(&DTensor::distribute_to_layout(&value, now.device_mesh(), now.layout(), None)?)?;
        }
    }
    Ok(lora)
}

/// Settings, and per path of a layer its matrices.
type AdapterFiles = (Lora, BTreeMap<String, (Tensor, Tensor)>);

/// Reads and checks the files. Local.
fn read_adapter(path: &Path, model: &dyn Model) -> Result<AdapterFiles> {
    let settings = AdapterSettings::read(&path.join(CONFIG))?;
    let lora = settings.lora;
    let catalog = open(path.join(WEIGHTS))?;
    let whole = |key: &str| -> Result<Tensor> {
        let shape = catalog.tensor(key)?.shape.clone();
        let stored = TensorBox { offsets: vec![0; shape.len()], sizes: shape.clone() };
        let offsets = vec![0; shape.len()];
        let mapped = MappedBox { key: key.into(), stored, transposed: false, offsets, sizes: shape.clone() };
        read_mapped(&catalog, TensorMeta { shape, dtype: DType::F32 }, &[mapped])
    };
    let bad = |found: String, needed: String| {
        ErrorKind::Model.error::<Error>("adapter", found, needed, "load the adapter of a model of this kind and size")
    };
    let params: BTreeMap<String, Param> = model.named_parameters().into_iter().collect();
    let names = model.weight_names();
    let mut layers = BTreeMap::new();
    for key in catalog.tensors.keys() {
        let module = key
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.strip_suffix(".lora_A.weight").or_else(|| rest.strip_suffix(".lora_B.weight")));
        let Some(module) = module else {
            let needed = format!("{PREFIX}MODULE.lora_A.weight and {PREFIX}MODULE.lora_B.weight");
            return Err(bad(format!("tensor {key:?}"), needed));
        };
        if key.ends_with("lora_B.weight") && catalog.tensors.contains_key(&format!("{PREFIX}{module}.lora_A.weight")) {
            continue;
        }
        let name = format!("{module}.weight");
        let Some(weight) = names.0.iter().find(|weight| weight.name == name && weight.slice.is_none()) else {
            let known = names.0.iter().map(|weight| weight.name.clone());
            return Err(bad(format!("module `{module}`"), format!("a module of the model: {}", nearest(&name, known))));
        };
        let [a, b] = ["lora_A", "lora_B"].map(|matrix| whole(&format!("{PREFIX}{module}.{matrix}.weight")));
        let (a, b) = (a?, b?);
        let shapes: Vec<Vec<usize>> = weight.paths.iter().map(|path| params[path].shape()).collect();
        let outputs: usize = shapes.iter().map(|shape| shape[0]).sum();
        let rank = settings.rank_of(module);
        let needed = ([rank, shapes[0][1]], [outputs, rank]);
        if (a.dims(), b.dims()) != (&needed.0[..], &needed.1[..]) {
            return Err(bad(
                format!("`{module}` with A of shape {:?} and B of shape {:?}", a.dims(), b.dims()),
                format!("{needed:?}"),
            ));
        }
        let b = (b * (settings.scale_of(module) / lora.scale()))?;
        for (part, path) in weight.paths.iter().enumerate() {
            let all = TensorBox { offsets: vec![0, 0], sizes: vec![shapes[part][0], rank] };
            let mut rows = Vec::new();
            for found in weight.boxes_of(part, &shapes, &all) {
                // Rows of B are those of the weight before it is transposed.
                let dim = usize::from(weight.transposed);
                rows.push(b.narrow(0, found.stored.offsets[dim], found.stored.sizes[dim])?);
            }
            let layer = path.strip_suffix(".weight").unwrap_or(path).to_string();
            layers.insert(layer, (a.clone(), Tensor::cat(&rows, 0)?));
        }
    }
    Ok((lora, layers))
}

/// What `adapter_config.json` says.
struct AdapterSettings {
    lora: Lora,
    root_scale: bool,
    ranks: Vec<(String, f64)>,
    alphas: Vec<(String, f64)>,
}

/// Fields that say nothing about the result of the adapters in the file.
const WITHOUT_EFFECT: &[&str] = &[
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "bias",
    "task_type",
    "base_model_name_or_path",
    "target_modules",
    "fan_in_fan_out",
    "inference_mode",
    "revision",
    "auto_mapping",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
    "exclude_modules",
    "megatron_core",
    "megatron_config",
    "loftq_config",
    "eva_config",
    "corda_config",
    "runtime_config",
    "peft_version",
    "qalora_group_size",
    "ensure_weight_tying",
];

impl AdapterSettings {
    fn read(path: &Path) -> Result<Self> {
        let bad = |found: String, needed: &str| {
            let fix = "use an adapter of PEFT's method LORA";
            ErrorKind::path(path).error::<Error>("adapter", found, needed, fix)
        };
        let text = read_text(path, MOST_CONFIG_BYTES)
            .map_err(|e| bad(format!("{e}: {}", path.display()), "an adapter_config.json"))?;
        let json: Value = serde_json::from_str(&text).map_err(|e| bad(format!("{e} in {}", path.display()), "JSON"))?;
        let fields = json.as_object().ok_or_else(|| bad("no JSON object".into(), "settings of PEFT"))?;
        let is_off = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(items) => items.is_empty(),
            _ => false,
        };
        let unknown = |(name, value): &(&String, &Value)| !WITHOUT_EFFECT.contains(&name.as_str()) && !is_off(value);
        if let Some((name, value)) = fields.iter().find(unknown) {
            return Err(bad(format!("`{name}`: {value}"), "settings that change nothing, or plain LoRA"));
        }
        if json["peft_type"] != "LORA" || !(json["bias"].is_null() || json["bias"] == "none") {
            return Err(bad(format!("peft_type {}, bias {}", json["peft_type"], json["bias"]), "LORA without biases"));
        }
        let rank = json["r"].as_u64().filter(|&r| r > 0).ok_or_else(|| bad(format!("r: {}", json["r"]), "a rank"))?;
        let alpha = json["lora_alpha"]
            .as_f64()
            .ok_or_else(|| bad(format!("lora_alpha: {}", json["lora_alpha"]), "a number"))?;
        let pattern = |name: &str| -> Result<Vec<(String, f64)>> {
            let Some(entries) = json[name].as_object() else { return Ok(Vec::new()) };
            let entry = |(key, value): (&String, &Value)| {
                let plain = key.chars().all(|c| c.is_alphanumeric() || "._".contains(c));
                let number = value.as_f64().filter(|_| plain);
                number
                    .map(|n| (key.clone(), n))
                    .ok_or_else(|| bad(format!("{name}: {key:?}: {value}"), "names without patterns"))
            };
            entries.iter().map(entry).collect()
        };
        let root_scale = json["use_rslora"] == true;
        let scale = if root_scale { alpha / (rank as f64).sqrt() } else { alpha / rank as f64 };
        let dropout = json["lora_dropout"].as_f64().unwrap_or(0.0);
        let lora = Lora { rank: rank as usize, alpha: scale * rank as f64, dropout };
        Ok(AdapterSettings { lora, root_scale, ranks: pattern("rank_pattern")?, alphas: pattern("alpha_pattern")? })
    }

    fn of(patterns: &[(String, f64)], module: &str) -> Option<f64> {
        patterns.iter().find(|(end, _)| ends_with(module, end)).map(|(_, value)| *value)
    }

    fn rank_of(&self, module: &str) -> usize {
        Self::of(&self.ranks, module).map_or(self.lora.rank, |rank| rank as usize)
    }

    fn scale_of(&self, module: &str) -> f64 {
        let rank = self.rank_of(module) as f64;
        let divisor = |rank: f64| if self.root_scale { rank.sqrt() } else { rank };
        let default = self.lora.scale() * divisor(self.lora.rank as f64);
        Self::of(&self.alphas, module).unwrap_or(default) / divisor(rank)
    }
}
