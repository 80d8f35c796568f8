//! The model, the mesh and the plan that are planned, from the command line.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::PossibleValuesParser;
use shardwise::Error;
use shardwise::error::ErrorKind;
use shardwise::mesh::{Link, Network};
use shardwise::models::{
    DataParallelMode, ModelConfig, ModelSpec, ParallelismConfig, PretrainedConfig, StepOptions, report_step,
    search_plan,
};
use shardwise::optim::{Algorithm, Muon, Optimizer, ParamGroup};
use shardwise::picture::parse_quantity;
use shardwise::plan::{ShardingPlan, StepReport};
use shardwise::prelude::*;
use shardwise::report::{RunReport, dry_step};

use crate::train::model_dir;
use crate::train::settings::{ModelFamily, ModelSize, ParamDtype, PlanChoice, TrainSettings};

/// The options that say what is planned.
#[derive(Args, Clone)]
pub(crate) struct PlannedStep {
    /// A model directory, a config.json, a GGUF file, or a built-in model: gpt or llama
    model: String,
    /// Mesh of ranks: data parallelism over the axis dp, tensor parallelism over tp
    #[arg(long)]
    mesh: String,
    /// Parallelism plan [default: fsdp+tp, without the part for which the mesh has no axis]
    #[arg(long)]
    plan: Option<PlanChoice>,
    /// Shard activations on the sequence dimension over tp where they would be replicated
    #[arg(long)]
    sequence_parallel: bool,
    /// Sequences of a batch on each rank along dp (--batch-size of train counts all ranks)
    #[arg(long, default_value_t = 1, value_name = "SEQUENCES")]
    batch: usize,
    /// Sequence length in tokens [default: by --size; of a model directory 4096, or its positions]
    #[arg(long, value_name = "TOKENS")]
    length: Option<usize>,
    /// Optimizer, or none [default: adamw]
    #[arg(long, default_value = "adamw", hide_default_value = true, value_parser = optimizer_names())]
    optimizer: String,
    /// Data type of the parameters; bf16 keeps f32 master weights with the optimizer state [default: bf16]
    #[arg(long, default_value = "bf16", hide_default_value = true)]
    dtype: ParamDtype,
    /// Bandwidth and latency along a mesh axis, as in dp=100GB/s,5us; may be repeated [default: those of threads]
    #[arg(long, value_name = "AXIS=LINK")]
    link: Vec<String>,
    /// Floating-point operations of a rank per second, as in 400T [default: 20G, about one core]
    #[arg(long, value_name = "RATE")]
    flops: Option<String>,
    /// Memory of a rank, as in 80G: says whether the step fits and, if not, what would
    #[arg(long, value_name = "BYTES")]
    memory: Option<String>,
    /// Preset of the sizes of a built-in model, which the options below override [default: small]
    #[arg(long)]
    size: Option<ModelSize>,
    /// Number of transformer blocks of a built-in model
    #[arg(long)]
    layers: Option<usize>,
    /// Width of the residual stream of a built-in model
    #[arg(long, value_name = "WIDTH")]
    d_model: Option<usize>,
    /// Number of attention heads of a built-in model
    #[arg(long)]
    heads: Option<usize>,
    /// Number of key/value heads of llama
    #[arg(long, value_name = "HEADS")]
    kv_heads: Option<usize>,
    /// Width of the MLP of a built-in model
    #[arg(long, value_name = "WIDTH")]
    d_ff: Option<usize>,
    /// Size of the vocabulary of a built-in model
    #[arg(long, default_value_t = 256, value_name = "TOKENS")]
    vocab: usize,
}

fn optimizer_names() -> PossibleValuesParser {
    PossibleValuesParser::new(std::iter::once("none").chain(Algorithm::names().iter().copied()))
}

/// Default length of sequences of a model that takes longer ones.
const DEFAULT_LENGTH: usize = 4096;

/// A step with every option resolved.
#[derive(Clone)]
pub(crate) struct PlanJob {
    pub(crate) name: String,
    pub(crate) config: ModelConfig,
    pub(crate) mesh: Mesh,
    pub(crate) plan: PlanChoice,
    pub(crate) sequence_parallel: bool,
    /// Sequences on each rank along dp.
    pub(crate) batch: usize,
    /// Links by the name of the axis.
    links: Vec<(String, Link)>,
    flops: Option<f64>,
    pub(crate) memory: Option<usize>,
    dtype: DType,
    optimizer: Option<ParamGroup>,
}

impl PlannedStep {
    pub(crate) fn decide(&self) -> Result<PlanJob> {
        let mesh: Mesh = self.mesh.parse()?;
        if self.batch == 0 {
            return Err(ErrorKind::Argument.error("--batch", "0", "at least 1", "correct the option"));
        }
        let links = self.link.iter().map(|link| parse_link(link, &mesh)).collect::<Result<_>>()?;
        let quantity = |what: &'static str, text: &Option<String>| {
            text.as_ref().map(|text| parse_quantity(what, text)).transpose()
        };
        let default_plan = match (mesh.axis("dp").is_ok(), mesh.axis("tp").is_ok()) {
            (_, false) => PlanChoice::Fsdp,
            (false, true) => PlanChoice::Tp,
            (true, true) => PlanChoice::FsdpTp,
        };
        let dtype = if self.dtype == ParamDtype::Bf16 { DType::BF16 } else { DType::F32 };
        Ok(PlanJob {
            name: self.model_name(),
            config: self.config()?,
            plan: self.plan.unwrap_or(default_plan),
            sequence_parallel: self.sequence_parallel,
            batch: self.batch,
            links,
            flops: quantity("--flops", &self.flops)?,
            memory: quantity("--memory", &self.memory)?.map(|bytes| bytes as usize),
            dtype,
            optimizer: self.optimizer()?,
            mesh,
        })
    }

    fn optimizer(&self) -> Result<Option<ParamGroup>> {
        let algorithm = match self.optimizer.as_str() {
            "none" => return Ok(None),
            Muon::NAME => Algorithm::by_name(Muon::NAME)?.with_setting("adjust_lr_fn", "match_rms_adamw")?,
            name => Algorithm::by_name(name)?,
        };
        Ok(Some(ParamGroup::new(algorithm).with_master()))
    }

    fn built_in(&self) -> Option<ModelFamily> {
        match self.model.as_str() {
            "gpt" => Some(ModelFamily::Gpt),
            "llama" => Some(ModelFamily::Llama),
            _ => None,
        }
    }

    fn model_name(&self) -> String {
        let path = Path::new(&self.model);
        let path = if path.ends_with("config.json") { path.parent().unwrap_or(path) } else { path };
        // The name of a directory may have a dot, that of a file ends in its type.
        let name = if path.is_file() { path.file_stem() } else { path.file_name() };
        name.map_or_else(|| self.model.clone(), |name| name.to_string_lossy().into_owned())
    }

    fn config(&self) -> Result<ModelConfig> {
        let sizes = [self.layers, self.d_model, self.heads, self.kv_heads, self.d_ff];
        let config = match self.built_in() {
            Some(model) => TrainSettings {
                model: Some(model),
                size: self.size,
                layers: self.layers,
                d_model: self.d_model,
                heads: self.heads,
                kv_heads: self.kv_heads,
                d_ff: self.d_ff,
                seq_len: self.length,
                ..TrainSettings::default()
            }
            .model_config(self.vocab),
            None if self.size.is_some() || sizes.iter().any(Option::is_some) => {
                let found = format!("an option for the sizes of a model together with {}", self.model);
                let fix = "leave --size and the sizes out";
                return Err(ErrorKind::Argument.error("model", found, "the sizes of its config.json", fix));
            }
            None if !Path::new(&self.model).exists() => {
                let found = format!("{}, which is neither a file nor a directory", self.model);
                let needed = "a model directory, a config.json, a GGUF file, gpt or llama";
                return Err(ErrorKind::Argument.error("model", found, needed, "check the path"));
            }
            None => {
                let config = PretrainedConfig::read(model_dir::model_of(PathBuf::from(&self.model)))?;
                let seq_len = self.length.unwrap_or(config.max_positions().min(DEFAULT_LENGTH));
                ModelConfig::Pretrained { config, seq_len }
            }
        };
        config.check()?;
        Ok(config)
    }
}

/// Parses `dp=100GB/s,5us`; bandwidth and latency in either order, and the latency may be left out.
fn parse_link(text: &str, mesh: &Mesh) -> Result<(String, Link)> {
    let bad = || -> Error {
        let fix = "write for example `--link dp=100GB/s,5us`";
        ErrorKind::Argument.error("--link", format!("`{text}`"), "AXIS=BANDWIDTH,LATENCY in GB/s and us", fix)
    };
    let (axis, link) = text.split_once('=').ok_or_else(bad)?;
    mesh.axis(axis)?;
    let mut found = Link { latency_us: 0.0, gb_per_s: 0.0 };
    for part in link.split(',').map(str::trim) {
        if let Some(rate) = part.strip_suffix("/s") {
            // Networks are sold in bits, `Gb` or `Gbit`.
            let bits = rate.strip_suffix("bit").or_else(|| rate.strip_suffix('b'));
            found.gb_per_s = parse_quantity("--link", bits.unwrap_or(rate))? / if bits.is_some() { 8e9 } else { 1e9 };
        } else {
            found.latency_us = part.strip_suffix("us").and_then(|us| us.trim().parse().ok()).ok_or_else(bad)?;
        }
    }
    let fits = found.gb_per_s > 0.0 && found.latency_us >= 0.0 && found.latency_us.is_finite();
    if fits { Ok((axis.to_string(), found)) } else { Err(bad()) }
}

impl PlanJob {
    /// The same step on another mesh, with another plan and batch.
    pub(crate) fn with(&self, mesh: Mesh, plan: PlanChoice, batch: usize) -> Self {
        PlanJob { mesh, plan, batch, ..self.clone() }
    }

    /// The same step with sequence parallelism.
    pub(crate) fn with_sequence_parallelism(&self) -> Self {
        PlanJob { sequence_parallel: true, ..self.clone() }
    }

    /// Name of the plan.
    pub(crate) fn plan_name(&self) -> String {
        self.plan.name(self.sequence_parallel)
    }

    /// Runs the step without data.
    pub(crate) fn report(&self) -> Result<StepReport> {
        let options = self.step_options();
        let plan = self.sharding_plan(&options)?;
        report_step((&self.name, &self.config), (&self.plan_name(), &plan), &self.mesh, &options)
    }

    /// Runs the step without data, for a page about it.
    pub(crate) fn page_report(&self) -> Result<RunReport> {
        let options = self.step_options();
        let title = format!("{} on {}, {}, dry run", self.name, self.mesh, self.plan_name());
        dry_step(&title, &self.config, &self.sharding_plan(&options)?, &self.mesh, &options)
    }

    fn step_options(&self) -> StepOptions {
        let dp = self.mesh.axis("dp").map_or(1, |axis| self.mesh.shape()[axis]);
        let mut options = StepOptions::new(self.batch * dp, Network::THREADS).dtype(self.dtype);
        options.optimizer = self.optimizer.clone();
        if let Some(rate) = self.flops {
            options = options.flops_per_s(rate);
        }
        if let Some(bytes) = self.memory {
            options = options.memory_limit(bytes);
        }
        let link = |name: &str| {
            self.links.iter().rev().find(|(axis, _)| axis == name).map_or(Link::THREADS, |(_, link)| *link)
        };
        options.links(self.mesh.axes().iter().map(|axis| link(&axis.name)).collect::<Vec<_>>())
    }

    fn sharding_plan(&self, options: &StepOptions) -> Result<ShardingPlan> {
        let data_parallel = match self.plan {
            PlanChoice::Auto => return Ok(search_plan(&self.config, &self.mesh, options)?.plan),
            PlanChoice::Fsdp | PlanChoice::FsdpTp => DataParallelMode::FullyShard,
            PlanChoice::Ddp | PlanChoice::Tp => DataParallelMode::Replicate,
        };
        let tensor_parallel = matches!(self.plan, PlanChoice::Tp | PlanChoice::FsdpTp);
        ParallelismConfig { data_parallel, tensor_parallel, sequence_parallel: self.sequence_parallel }
            .plan(&self.config, &self.mesh)
    }
}
