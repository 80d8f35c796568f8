//! Loading model directories: each rank reads the bytes of its own shards.

use std::collections::BTreeMap;
use std::panic::Location;
use std::path::{Path, PathBuf};

use candle_core::DType;

use super::encoder::Encoder;
use super::load_options::LoadOptions;
use super::model::ModelSpec;
use super::pretrained::{PretrainedConfig, PretrainedModel};
use super::source::gguf_file;
use super::stored_weights::StoredWeights;
use crate::checkpoint::{Catalog, Format, LoadReport, RankLoad, gguf, load_consistent, open};
use crate::comm::{DeviceMesh, DryWorld, all_ok};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::layout::Layout;
use crate::mesh::Mesh;
use crate::nn::{Builder, Module};
use crate::ops::{BlockType, QuantizedTensor};
use crate::param::Param;
use crate::plan::{ShardingPlan, ShardingPlanner, shard_module};
use crate::tensor::DTensor;

/// Loads a causal language model from a directory in Hugging Face's form or from a GGUF file, sharded as a planner decides.
///
/// Quantized weights of a GGUF file are dequantized; [`LoadOptions::keep_quantized`] keeps them as they are.
///
/// The directory has a `config.json` of a known family and its weights: `model.safetensors` or `pytorch_model.bin`, or several
/// files with `model.safetensors.index.json` or `pytorch_model.bin.index.json`. Nothing in them is executed.
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
///     let ids = DTensor::from_fn((1, 4), DType::U32, &mesh, [Replicate], |i| i[1] as f64)?;
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
        let plan = planner.plan(module, mesh)?.without_merged();
        let params = module.named_parameters();
        let layout = |(path, param): &(String, Param)| Ok((path.clone(), plan.layout_of(path, &param.layout())?));
        let layouts = params.iter().map(layout).collect::<Result<BTreeMap<String, Layout>>>()?;
        let names = config.stored_names_of(&params.iter().cloned().collect(), &catalog);
        let shapes = shapes_of(module);
        let found = StoredWeights::find(&catalog, &config, &names, &shapes, options)?;
        let found = if stay_quantized(options) { found.keep_quantized(module) } else { found };
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
        // Files have the shapes of the model: dimensions are merged when the weights are there.
        let (merging, plan) = (plan, &plan.without_merged());
        let builder = plan.builder(mesh).dtype(options.dtype).zeros();
        let built = build(&builder).and_then(|module| builder.check(&module).map(|()| module));
        let module = all_ok(mesh.world(), built, site)?;
        shard_module(&module, mesh, plan)?;
        let params: BTreeMap<String, Param> = module.named_parameters().into_iter().collect();
        let shapes = shapes_of(&module);
        let read = |catalog: &Catalog| -> Result<Vec<(Param, DTensor, Option<BlockType>)>> {
            let catalog = &as_hf(catalog.clone())?;
            let names = self.config.stored_names_of(&params, catalog);
            let found = StoredWeights::find(catalog, &self.config, &names, &shapes, options)?;
            let found = if stay_quantized(options) { found.keep_quantized(&module) } else { found };
            let layouts = params.iter().map(|(path, param)| (path.clone(), param.layout())).collect();
            let rank = mesh.world().rank();
            let total = found.rank_load(rank, &layouts, options.dtype)?.read_bytes as u64;
            let mut done = 0;
            let mut loaded = Vec::new();
            for (path, param) in &params {
                let layout = found.layout_in_memory(path, &layouts[path])?;
                let (local, bytes) = found.read(path, &layout, rank, options.dtype)?;
                done += bytes;
                loaded.push((param.clone(), DTensor::from_parts(mesh, layout, local), found.block_type(path)));
                if let Some(progress) = &options.progress {
                    progress(done, total);
                }
            }
            Ok(loaded)
        };
        let (loaded, report) = load_consistent(mesh.world(), &self.weights, site, &read)?;
        for (param, value, block_type) in loaded {
            match block_type {
                Some(block_type) => param.set_quantized(&QuantizedTensor::new(&value, block_type)?)?,
                None => param.set(&value)?,
            }
        }
        merging.merge_parameters(&module)?;
        Ok((module, report))
    }
}

/// Whether weights that are quantized in files are so in memory. Blocks are expanded to f32 where they are used.
fn stay_quantized(options: &LoadOptions) -> bool {
    options.keep_quantized && options.dtype == DType::F32
}

/// The catalog with the names and shapes of Hugging Face, which a GGUF file has not.
fn as_hf(catalog: Catalog) -> Result<Catalog> {
    if catalog.format == Format::Gguf { Ok(gguf::HfView::of(catalog)?.catalog) } else { Ok(catalog) }
}

/// The file or directory with the weights of a model directory.
fn weights_in(path: &Path) -> Result<PathBuf> {
    let names =
        ["model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"];
    let found = names.into_iter().find(|name| path.join(name).exists());
    // With an index, the files of the directory are the checkpoint.
    let weights = found.map(|name| if name.ends_with(".json") { path.to_path_buf() } else { path.join(name) });
    weights.ok_or_else(|| {
        let found = format!("no weights in {}", path.display());
        let needed = "model.safetensors or pytorch_model.bin, or the index of either with its files";
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
