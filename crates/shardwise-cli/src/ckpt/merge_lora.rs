//! `shardwise ckpt merge-lora`: a model directory whose weights include an adapter.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use shardwise::launch_scoped;
use shardwise::models::{self, export_hf_with_tokenizer, load_adapter, load_text_files};
use shardwise::nn::Module;
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;
use shardwise::text::TextFiles;

use crate::model_target::check_model_target;

#[derive(Args)]
pub(super) struct MergeLoraOptions {
    /// Model directory in Hugging Face's form, or a GGUF file
    base: PathBuf,
    /// Directory with adapter_config.json and adapter_model.safetensors
    adapter: PathBuf,
    /// Directory to write
    to: PathBuf,
    /// Thread ranks over which the model is sharded while it is merged
    #[arg(long, default_value_t = 1)]
    ranks: usize,
    /// Data type to write [default: that of the model]
    #[arg(long)]
    dtype: Option<StoredDtype>,
    /// Replace the model that is in the directory already
    #[arg(long)]
    overwrite: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// Data type of the weights that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StoredDtype {
    F32,
    Bf16,
    F16,
}

impl StoredDtype {
    /// The type that a `config.json` names; f32 if it names none.
    fn of(config: &Value) -> Self {
        match [&config["dtype"], &config["torch_dtype"]].into_iter().find_map(Value::as_str) {
            Some("bfloat16") => StoredDtype::Bf16,
            Some("float16") => StoredDtype::F16,
            _ => StoredDtype::F32,
        }
    }

    fn dtype(self) -> DType {
        match self {
            StoredDtype::F32 => DType::F32,
            StoredDtype::Bf16 => DType::BF16,
            StoredDtype::F16 => DType::F16,
        }
    }
}

pub(super) fn run(options: &MergeLoraOptions) -> Result<()> {
    check_model_target(&options.to, Some(&options.base), options.overwrite)?;
    let has_text = options.base.is_file() || options.base.join(TextFiles::NAMES[0]).exists();
    let files = if has_text { load_text_files(&options.base)? } else { TextFiles::default() };
    let layers = launch_scoped(options.ranks, |world| {
        let mesh = world.mesh([("tp", options.ranks)])?;
        // In f32, and rounded once.
        let model = models::load(&options.base, &mesh, TensorParallel::new("tp"))?;
        let lora = load_adapter(&world, &options.adapter, &model)?;
        let merged = lora.merge(&model)?;
        let config = model.config();
        model.to_dtype(options.dtype.unwrap_or(StoredDtype::of(config.json())).dtype())?;
        export_hf_with_tokenizer(&world, &options.to, &model, config, &files)?;
        Ok(merged.len())
    })?;
    let mut out = std::io::stdout().lock();
    match options.json {
        true => writeln!(out, "{}", json!({ "layers": layers, "directory": options.to }))?,
        false => writeln!(out, "merged the adapters of {layers} layers into {}", options.to.display())?,
    }
    Ok(())
}
