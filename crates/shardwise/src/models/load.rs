//! Loading model directories: each rank reads the bytes of its own shards.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::encoder::Encoder;
use super::model::ModelSpec;
use super::names::{WeightName, WeightNames};
use super::pretrained::{PretrainedConfig, PretrainedModel};
use super::source::gguf_file;
use crate::checkpoint::{Catalog, Format, LoadReport, MappedBox, RankLoad, gguf, load_consistent, open, read_mapped};
use crate::comm::{DeviceMesh, DryWorld, all_ok};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::layout::{Layout, OwnedBox, TensorMeta};
use crate::mesh::Mesh;
use crate::nn::{Builder, Module};
use crate::param::Param;
use crate::plan::{ShardingPlan, ShardingPlanner, shard_module};
use crate::tensor::DTensor;

/// Options of [`load_with`] and [`load_encoder_with`].
///
/// ```
/// use shardwise::models::LoadOptions;
/// use shardwise::prelude::*;
///
/// let options = LoadOptions { dtype: DType::BF16, ..LoadOptions::default() };
/// ```
#[derive(Clone)]
pub struct LoadOptions {
    /// Type of the weights in memory, in which the model computes; f32 by default, whatever the files have.
    #[doc(alias = "torch_dtype")]
    pub dtype: DType,
    /// Unknown fields of `config.json` that are not errors, because they are known to change nothing.
    pub ignored_fields: Vec<String>,
    /// Unknown tensors that are not errors: exact names.
    pub ignored_tensors: Vec<String>,
    /// Called on this rank after every parameter with the bytes that it has read so far, and all that it will read.
    pub progress: Option<ProgressFn>,
}

/// Bytes that a rank has read so far, and all that it will read.
pub type ProgressFn = Arc<dyn Fn(u64, u64) + Send + Sync>;

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions { dtype: DType::F32, ignored_fields: Vec::new(), ignored_tensors: Vec::new(), progress: None }
    }
}

/// Loads a causal language model from a directory in Hugging Face's form or from a GGUF file, sharded as a planner decides.
///
/// Quantized weights of a GGUF file are dequantized.
///
/// The directory has a `config.json` of a known family and its weights: `model.safetensors`, several files with
/// `model.safetensors.index.json`, or `pytorch_model.bin`, from which nothing is executed.
///
/// Collective: all ranks of the world of the mesh must call it. Each rank reads only the bytes of its shards; ranks exchange
/// fingerprints and errors, so that what is wrong on one rank is the error of all.
///
/// # Errors
/// [`Error::OnRank`] with the names of what is wrong: a field of the configuration that is not supported, tensors that are
/// missing, unknown or of another shape than the configuration says, a file that is absent or truncated.
///
/// ```no_run
/// use shardwise::models::{self, KvCache};
/// use shardwise::plan::TensorParallel;
/// use shardwise::prelude::*;
///
/// launch(3, |world| {
///     let mesh = world.mesh([("tp", 3)])?;
///     let model = models::load("path/to/model", &mesh, TensorParallel::new("tp"))?;
///     let ids = DTensor::from_fn(((1, 4), DType::U32), &mesh, [Replicate], |i| i[1] as f64)?;
///     let next = model.forward_cached(&ids, &mut KvCache::new())?.argmax(Some(-1), false)?;
///     println!("{next}");
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "from_pretrained")]
#[track_caller]
pub fn load(
    path: impl AsRef<Path>,
    mesh: &DeviceMesh,
    planner: impl ShardingPlanner + Sync,
) -> Result<PretrainedModel> {
    load_with(path, mesh, planner, &LoadOptions::default()).map(|(model, _)| model)
}

/// Loads as [`load`] does, with options, and also returns how much this rank read. Collective.
#[expect(clippy::needless_pass_by_value, reason = "callers write a planner in place")]
#[track_caller]
pub fn load_with(
    path: impl AsRef<Path>,
    mesh: &DeviceMesh,
    planner: impl ShardingPlanner + Sync,
    options: &LoadOptions,
) -> Result<(PretrainedModel, LoadReport)> {
    let site = Location::caller();
    let source = ModelSource::open(path.as_ref(), mesh, options, site)?;
    let plan = source.plan(mesh, site, &|builder: &Builder| source.config.build(builder), &planner)?;
    let (model, report) = source.load(mesh, &plan, options, site, |builder| source.config.build(builder))?;
    Ok((model.loaded_from(path.as_ref()), report))
}

/// Loads as [`load_with`] does, by a plan that is known already. Collective.
#[track_caller]
pub fn load_planned(
    path: impl AsRef<Path>,
    mesh: &DeviceMesh,
    plan: &ShardingPlan,
    options: &LoadOptions,
) -> Result<(PretrainedModel, LoadReport)> {
    let site = Location::caller();
    let source = ModelSource::open(path.as_ref(), mesh, options, site)?;
    let (model, report) = source.load(mesh, plan, options, site, |builder| source.config.build(builder))?;
    Ok((model.loaded_from(path.as_ref()), report))
}

/// Loads an encoder, such as BERT, as [`load`] loads a language model. Collective.
#[doc(alias = "SentenceTransformer")]
#[track_caller]
pub fn load_encoder(
    path: impl AsRef<Path>,
    mesh: &DeviceMesh,
    planner: impl ShardingPlanner + Sync,
) -> Result<Encoder> {
    load_encoder_with(path, mesh, planner, &LoadOptions::default()).map(|(encoder, _)| encoder)
}

/// Loads as [`load_encoder`] does, with options, and also returns how much this rank read. Collective.
#[expect(clippy::needless_pass_by_value, reason = "callers write a planner in place")]
#[track_caller]
pub fn load_encoder_with(
    path: impl AsRef<Path>,
    mesh: &DeviceMesh,
    planner: impl ShardingPlanner + Sync,
    options: &LoadOptions,
) -> Result<(Encoder, LoadReport)> {
    let site = Location::caller();
    let source = ModelSource::open(path.as_ref(), mesh, options, site)?;
    let plan = source.plan(mesh, site, &|builder: &Builder| source.config.build_encoder(builder), &planner)?;
    source.load(mesh, &plan, options, site, |builder| source.config.build_encoder(builder))
}

/// Predicts what each rank of a mesh would read and hold if it loaded a model directory, of a language model or an encoder.
///
/// Local: reads descriptions only, and needs no ranks.
///
/// # Errors
/// What [`load`] would refuse: a configuration that is not supported, names and shapes that do not fit, a plan that does not.
#[expect(clippy::needless_pass_by_value, reason = "callers write a planner in place")]
pub fn dry_load_model(
    path: impl AsRef<Path>,
    mesh: &Mesh,
    planner: impl ShardingPlanner + Sync,
    options: &LoadOptions,
) -> Result<Vec<RankLoad>> {
    let path = path.as_ref();
    let ModelSource { config, weights, .. } = ModelSource::read(path, options)?;
    let catalog = as_hf(open(weights)?)?;
    let loads = |module: &dyn Module, mesh: &DeviceMesh| -> Result<Vec<RankLoad>> {
        let plan = planner.plan(module, mesh)?;
        let params = module.named_parameters();
        let layout = |(path, param): &(String, Param)| Ok((path.clone(), plan.layout_of(path, &param.layout())?));
        let layouts = params.iter().map(layout).collect::<Result<BTreeMap<String, Layout>>>()?;
        let names = config.stored_names_of(&params.iter().cloned().collect(), &catalog);
        let shapes = shapes_of(module);
        let found = StoredWeights::find(&catalog, &config, &names, &shapes, options)?;
        mesh.mesh().ranks().iter().map(|&rank| found.rank_load(rank, &layouts, options.dtype)).collect()
    };
    in_dry_world(mesh, |mesh| {
        let builder = Builder::new(mesh).zeros();
        match config.is_encoder() {
            true => loads(&config.build_encoder(&builder)?, mesh),
            false => loads(&config.build(&builder)?, mesh),
        }
    })
}

/// A model directory: its configuration, and where its weights are.
struct ModelSource {
    config: PretrainedConfig,
    weights: PathBuf,
}

impl ModelSource {
    /// Reads the configuration on all ranks.
    fn open(path: &Path, mesh: &DeviceMesh, options: &LoadOptions, site: Site) -> Result<Self> {
        all_ok(mesh.world(), Self::read(path, options), site)
    }

    fn read(path: &Path, options: &LoadOptions) -> Result<Self> {
        let config = PretrainedConfig::read_ignoring(path, &options.ignored_fields)?;
        let weights = gguf_file(path).map_or_else(|| weights_in(path), Ok)?;
        let config = if config.is_encoder() { config.with_pooler_of(&open(&weights)?) } else { config };
        Ok(ModelSource { config, weights })
    }

    /// The plan of a planner, which sees the model in a dry run: nothing is allocated.
    fn plan<M: Module>(
        &self,
        mesh: &DeviceMesh,
        site: Site,
        build: &(dyn Fn(&Builder) -> Result<M> + Sync),
        planner: &(impl ShardingPlanner + Sync),
    ) -> Result<ShardingPlan> {
        let plan = in_dry_world(mesh.mesh(), |mesh| planner.plan(&build(&Builder::new(mesh).zeros())?, mesh));
        all_ok(mesh.world(), plan, site)
    }

    fn load<M: Module>(
        &self,
        mesh: &DeviceMesh,
        plan: &ShardingPlan,
        options: &LoadOptions,
        site: Site,
        build: impl FnOnce(&Builder) -> Result<M>,
    ) -> Result<(M, LoadReport)> {
        let builder = plan.builder(mesh).dtype(options.dtype).zeros();
        let built = build(&builder).and_then(|module| builder.check(&module).map(|()| module));
        let module = all_ok(mesh.world(), built, site)?;
        shard_module(&module, mesh, plan)?;
        let params: BTreeMap<String, Param> = module.named_parameters().into_iter().collect();
        let shapes = shapes_of(&module);
        let read = |catalog: &Catalog| -> Result<Vec<(Param, DTensor)>> {
            let catalog = &as_hf(catalog.clone())?;
            let names = self.config.stored_names_of(&params, catalog);
            let found = StoredWeights::find(catalog, &self.config, &names, &shapes, options)?;
            let layouts = params.iter().map(|(path, param)| (path.clone(), param.layout())).collect();
            let rank = mesh.world().rank();
            let total = found.rank_load(rank, &layouts, options.dtype)?.read_bytes as u64;
            let mut done = 0;
            let mut loaded = Vec::new();
            for (path, param) in &params {
                let layout = layouts[path].reduced();
                let (local, bytes) = found.read(catalog, path, &layout, rank, options.dtype)?;
                done += bytes;
                loaded.push((param.clone(), DTensor::from_parts(mesh, layout, local)));
                if let Some(progress) = &options.progress {
                    progress(done, total);
                }
            }
            Ok(loaded)
        };
        let (loaded, report) = load_consistent(mesh.world(), &self.weights, site, &read)?;
        for (param, value) in loaded {
            param.set(&value)?;
        }
        Ok((module, report))
    }
}

/// The catalog with the names and shapes of Hugging Face, which a GGUF file has not.
fn as_hf(catalog: Catalog) -> Result<Catalog> {
    if catalog.format == Format::Gguf { Ok(gguf::HfView::of(catalog)?.catalog) } else { Ok(catalog) }
}

/// The file or directory with the weights of a model directory.
fn weights_in(path: &Path) -> Result<PathBuf> {
    if path.join("model.safetensors.index.json").exists() {
        return Ok(path.to_path_buf());
    }
    let names = ["model.safetensors", "pytorch_model.bin"];
    let found = names.iter().map(|name| path.join(name)).find(|file| file.exists());
    found.ok_or_else(|| {
        let found = format!("no weights in {}", path.display());
        let needed = "model.safetensors, model.safetensors.index.json with its files, or pytorch_model.bin";
        ErrorKind::path(path).error::<Error>("model directory", found, needed, "download the weights again")
    })
}

fn in_dry_world<T: Send>(mesh: &Mesh, body: impl Fn(&DeviceMesh) -> Result<T> + Sync) -> Result<T> {
    let size = mesh.ranks().iter().max().map_or(1, |rank| rank + 1);
    let dry = DryWorld::new(size)?.as_rank(mesh.ranks()[0])?;
    Ok(dry.run(|world| body(&world.device_mesh(mesh.clone())?))?.value)
}

fn shapes_of(module: &dyn Module) -> BTreeMap<String, Vec<usize>> {
    module.named_parameters().into_iter().map(|(path, param)| (path, param.shape())).collect()
}

/// The tensors of a checkpoint that hold the parameters of a model.
struct StoredWeights<'a> {
    catalog: &'a Catalog,
    /// Per path of a parameter the tensors with parts of it: name in the file, entry of the table, position of the path in it.
    parts: BTreeMap<&'a str, Vec<(String, &'a WeightName, usize)>>,
    shapes: &'a BTreeMap<String, Vec<usize>>,
}

impl<'a> StoredWeights<'a> {
    /// Finds all weights; an error names all tensors that are missing, unknown or of another shape.
    fn find(
        catalog: &'a Catalog,
        config: &PretrainedConfig,
        names: &'a WeightNames,
        shapes: &'a BTreeMap<String, Vec<usize>>,
        options: &LoadOptions,
    ) -> Result<Self> {
        let family = config.family();
        let mut parts: BTreeMap<&str, Vec<(String, &WeightName, usize)>> = BTreeMap::new();
        let (mut missing, mut wrong, mut used) = (Vec::new(), Vec::new(), BTreeSet::new());
        for weight in &names.0 {
            let with = format!("{}{}", family.prefix, weight.name);
            let without = weight.name.strip_prefix(family.prefix);
            let spellings = [Some(weight.name.as_str()), without, Some(with.as_str())];
            let Some(key) = spellings.into_iter().flatten().find(|name| catalog.tensors.contains_key(*name)) else {
                missing.push(weight.name.clone());
                continue;
            };
            used.insert(key.to_string());
            let needed = weight.stored_shape(&shapes_at(weight, shapes));
            let found = &catalog.tensors[key].shape;
            if *found != needed {
                wrong.push((key.to_string(), found.clone(), needed));
            }
            for (part, path) in weight.paths.iter().enumerate() {
                parts.entry(path).or_default().push((key.to_string(), weight, part));
            }
        }
        let known = |name: &str| {
            let bare = name.strip_prefix(family.prefix).unwrap_or(name);
            let mut ignored = family.ignored_tensors.iter().copied();
            // A tied head may be stored; the embedding is used.
            used.contains(name)
                || ignored.any(|pattern| matches_text(pattern, name) || matches_text(pattern, bare))
                || options.ignored_tensors.iter().any(|ignored| ignored == name)
                || shapes.get("head.weight").is_none() && matches!(bare, "lm_head.weight" | "embed_out.weight")
        };
        let unexpected: Vec<String> = catalog.tensors.keys().filter(|name| !known(name)).cloned().collect();
        if let Some((name, found, needed)) = wrong.first() {
            let more = if wrong.len() > 1 { format!(", and {} more", wrong.len() - 1) } else { String::new() };
            return Err(ErrorKind::shape(found).error(
                "weights",
                format!("tensor {name:?} of shape {found:?}{more}"),
                format!("{needed:?}, as config.json says"),
                "use the config.json that belongs to these weights",
            ));
        }
        if missing.is_empty() && unexpected.is_empty() {
            return Ok(StoredWeights { catalog, parts, shapes });
        }
        let found = format!(
            "{} missing tensor(s){}, {} unknown tensor(s){}",
            missing.len(),
            listed(&missing),
            unexpected.len(),
            listed(&unexpected)
        );
        let needed = format!("the tensors of a model of kind {}, as config.json says", family.model_type);
        let fix = "use the config.json that belongs to these weights, or `LoadOptions::ignored_tensors`";
        Err(ErrorKind::State { missing, unexpected }.error("weights", found, needed, fix))
    }

    /// The boxes of files that a rank needs for its local part of a parameter.
    fn boxes(&self, path: &str, owned: &OwnedBox) -> Vec<MappedBox> {
        let mut boxes = Vec::new();
        for (key, weight, part) in self.parts.get(path).into_iter().flatten() {
            let shapes = shapes_at(weight, self.shapes);
            for found in weight.boxes_of(*part, &shapes, &owned.global) {
                let from_start = found.offsets.iter().zip(&owned.global.offsets).map(|(a, b)| a - b);
                let offsets = from_start.zip(&owned.local_offsets).map(|(inside, local)| inside + local).collect();
                boxes.push(MappedBox {
                    key: key.clone(),
                    stored: found.stored,
                    transposed: weight.transposed && found.sizes.len() == 2,
                    offsets,
                    sizes: found.sizes,
                });
            }
        }
        boxes
    }

    /// Reads this rank's part of a parameter; also returns how many bytes of files that took.
    fn read(&self, catalog: &Catalog, path: &str, layout: &Layout, rank: usize, dtype: DType) -> Result<(Tensor, u64)> {
        let boxes: Vec<MappedBox> = layout.boxes_of(rank).iter().flat_map(|owned| self.boxes(path, owned)).collect();
        let meta = TensorMeta { shape: layout.local_shape(rank), dtype };
        Ok((read_mapped(catalog, meta, &boxes)?, self.bytes(&boxes) as u64))
    }

    fn bytes(&self, boxes: &[MappedBox]) -> usize {
        let size = |mapped: &MappedBox| self.catalog.tensors[&mapped.key].element.size_in_bytes();
        boxes.iter().map(|mapped| mapped.stored.volume() * size(mapped)).sum()
    }

    /// What a rank would read and hold with these layouts.
    fn rank_load(&self, rank: usize, layouts: &BTreeMap<String, Layout>, dtype: DType) -> Result<RankLoad> {
        let mut load = RankLoad { rank, tensor_bytes: 0, read_bytes: 0, peak_bytes: 0, chunks: 0, files: 0 };
        let mut files = BTreeSet::new();
        for (path, layout) in layouts {
            let layout = layout.reduced();
            load.tensor_bytes += layout.local_shape(rank).iter().product::<usize>() * dtype.size_in_bytes();
            for owned in layout.boxes_of(rank) {
                let boxes = self.boxes(path, &owned);
                load.read_bytes += self.bytes(&boxes);
                for mapped in boxes {
                    for chunk in &self.catalog.tensors[&mapped.key].chunks {
                        if chunk.part.intersect(&mapped.stored).is_some() {
                            load.chunks += 1;
                            files.insert(chunk.file.as_str());
                        }
                    }
                }
            }
        }
        load.files = files.len();
        load.peak_bytes = load.tensor_bytes + crate::checkpoint::MAPPED_BUFFER;
        Ok(load)
    }
}

/// The shapes of the parameters of an entry of the table.
fn shapes_at(weight: &WeightName, shapes: &BTreeMap<String, Vec<usize>>) -> Vec<Vec<usize>> {
    weight.paths.iter().map(|path| shapes[path].clone()).collect()
}

/// The first few of some names, for messages.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 6;
    if names.is_empty() {
        return String::new();
    }
    let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    format!(" ({}{})", shown.join(", "), if names.len() > SHOWN { ", ..." } else { "" })
}

/// Whether a text matches a pattern in which `*` stands for any text.
fn matches_text(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => text.strip_prefix(start).is_some_and(|text| {
            (0..=text.len()).filter(|&i| text.is_char_boundary(i)).any(|i| matches_text(rest, &text[i..]))
        }),
    }
}
