//! Export to the directory format of Hugging Face.

use std::collections::BTreeMap;
use std::fs;
use std::panic::Location;
use std::path::Path;

use candle_core::DType;
use serde_json::Value;

use super::model::{Model, ModelSpec};
use super::names::WeightName;
use super::weights::parameter;
use crate::checkpoint::{ConvertOptions, FilesBeside, Format, State, convert_beside, save, unwritable};
use crate::comm::{World, all_ok};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::param::Param;
use crate::tensor::DTensor;
use crate::text::TextFiles;

/// Writes a model in Hugging Face's format: `model.safetensors` (or several files with an index, if it is large) and
/// `config.json`. [`export_hf_with_tokenizer`] writes a tokenizer, too.
///
/// Tensors have the [`weight_names`](Model::weight_names) of the model, which are those of `LlamaForCausalLM` and
/// `GPT2LMHeadModel` for models of this crate; `config.json` has the [`hf_config`](ModelSpec::hf_config) of the sizes.
///
/// Collective: all ranks of the world must call it. No rank ever holds the full model: ranks write their shards, and the
/// first rank merges the files with bounded memory. An earlier export there is replaced when the new one is complete, and
/// stays as it is if this fails.
///
/// Rotary positions of Llama are stored as they are, since both sides pair feature `i` of the first half of a head with
/// feature `i` of the second half. Matrices inside the blocks of GPT-2 are transposed, because its files have inputs first.
///
/// # Errors
/// [`Error::Invalid`] if the directory has other files in it ([`check_export`]); I/O errors of any rank reach all ranks.
///
/// ```
/// use shardwise::checkpoint;
/// use shardwise::models::{LlamaConfig, ModelSpec, export_hf};
/// use shardwise::nn::Builder;
/// use shardwise::prelude::*;
///
/// # let directory = std::env::temp_dir().join(format!("shardwise-export-hf-{}", std::process::id()));
/// # let path = directory.clone();
/// launch(2, move |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let config = LlamaConfig { n_layers: 1, ..LlamaConfig::default() };
///     let model = config.build(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]))?;
///     export_hf(&world, &path, &model, &config)
/// })?;
/// let found = checkpoint::open(&directory)?;
/// assert_eq!(found.tensor("model.layers.0.self_attn.k_proj.weight")?.shape, [48, 96]);
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "save_pretrained")]
#[doc(alias = "HuggingFaceStorageWriter")]
#[track_caller]
pub fn export_hf(
    world: &World,
    path: impl AsRef<Path>,
    model: &dyn Model,
    config: &(impl ModelSpec + ?Sized),
) -> Result<()> {
    write_export(world, path.as_ref(), model, config, &TextFiles::default(), Location::caller())
}

/// Writes a model as [`export_hf`] does, with the files of its tokenizer: the directory has all of them or none.
///
/// Collective: all ranks of the world must call it; the files of the first rank are written. A model that was trained on
/// bytes has [`TextFiles::bytes`].
///
/// # Errors
/// As [`export_hf`].
#[doc(alias = "save_pretrained")]
#[track_caller]
pub fn export_hf_with_tokenizer(
    world: &World,
    path: impl AsRef<Path>,
    model: &dyn Model,
    config: &(impl ModelSpec + ?Sized),
    files: &TextFiles,
) -> Result<()> {
    write_export(world, path.as_ref(), model, config, files, Location::caller())
}

fn write_export(
    world: &World,
    path: &Path,
    model: &dyn Model,
    config: &(impl ModelSpec + ?Sized),
    files: &TextFiles,
    site: Site,
) -> Result<()> {
    all_ok(world, check_export(path), site)?;
    let params: BTreeMap<String, Param> = model.named_parameters().into_iter().collect();
    let dtype = params.values().next().map_or(DType::F32, Param::dtype);
    let names = model.weight_names();
    let weights = names.0.iter().map(|weight| Ok((weight.name.clone(), exported(weight, &params)?)));
    let weights = weights.collect::<Result<BTreeMap<_, _>>>()?;
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let parts = path.with_file_name(format!(".{name}.parts"));
    save(world, &parts, &State::from(weights))?;
    let joined = || -> Result<()> {
        let config = Some(config.hf_config(dtype)).filter(|config| *config != Value::Null);
        let text = config.map(|config| serde_json::to_string_pretty(&config)).transpose().map_err(Error::other)?;
        // The files of an earlier export are there until all of the new one is: a full disk loses nothing.
        let replaced = |name: &str| beside_weights().any(|own| own == name);
        let config = text.map(|text| ("config.json", (text + "\n").into_bytes()));
        let written = config.into_iter().chain(files.contents()).collect();
        let beside = FilesBeside { written, replaced: &replaced };
        let converted = convert_beside(&parts, path, &ConvertOptions::to(Format::HuggingFace), &beside, &|_| {});
        fs::remove_dir_all(&parts).map_err(|error| unwritable(&parts, &error))?;
        converted.map(drop)
    };
    all_ok(world, if world.rank() == 0 { joined() } else { Ok(()) }, site)
}

/// Checks that [`export_hf`] may write to a path: a new directory, an empty one, or an earlier export. Local.
///
/// # Errors
/// [`Error::Invalid`] if other files would be lost, or the path is a file; an I/O error if the directory cannot be read.
pub fn check_export(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let refused = |found: String| {
        let needed = "a new directory, an empty one, or an earlier export";
        Err(ErrorKind::Argument.error("export", found, needed, "name another directory"))
    };
    if path.file_name().is_none() {
        return refused(format!("{}, a directory without a name", path.display()));
    }
    if path.exists() && !path.is_dir() {
        return refused(format!("{}, which is a file", path.display()));
    }
    if !path.exists() {
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !beside_weights().any(|own| own == name) && !Format::HuggingFace.owns(&name) {
            return refused(format!("{} in {}", name, path.display()));
        }
    }
    Ok(())
}

/// Names of the files of an export next to those of the weights.
fn beside_weights() -> impl Iterator<Item = &'static str> {
    std::iter::once("config.json").chain(TextFiles::NAMES)
}

/// A weight in the shape of the file, still sharded.
fn exported(weight: &WeightName, params: &BTreeMap<String, Param>) -> Result<DTensor> {
    let parts: Result<Vec<DTensor>> = weight.paths.iter().map(|path| parameter(params, path)?.separate()).collect();
    let joined = weight.joined(&parts?)?;
    if weight.transposed && joined.ndim() == 2 { joined.t() } else { Ok(joined) }
}
