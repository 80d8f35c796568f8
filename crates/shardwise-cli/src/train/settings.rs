//! Settings of a training run: from the command line, a TOML file, a checkpoint and defaults, in this order of precedence.

use shardwise::Error;
use shardwise::error::ErrorKind;
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use shardwise::mesh::Network;
use shardwise::models::{
    DataParallelMode, GptConfig, LlamaConfig, ModelConfig, ModelSpec, ParallelismConfig, PretrainedConfig, StepOptions,
    load_text_files, search_plan,
};
use shardwise::optim::{AdamW, Algorithm, Muon, Optimizer, ParamGroup, Schedule};
use shardwise::plan::{PlanSearch, ShardingPlan};
use shardwise::prelude::*;
use shardwise::read_file::{MOST_CONFIG_BYTES, read_text};
use shardwise::text::TextFiles;
use shardwise::train::EarlyStopping;

use super::data::{TokenizedText, tokenizer_file};
use super::lora::LoraSettings;
use super::sources::{DataSource, one_or_several};
use crate::old_options;
use crate::processes;

/// Declares the options; each one is also a key of the TOML file.
macro_rules! settings {
    ($($(#[$about:meta])* $field:ident: $T:ty,)*) => {
        /// The options of a run that a TOML file may also set, under their long names. Checkpoints store them with the serialized
        /// names, which therefore stay as they are; both these and the long names are read.
        #[derive(Args, Serialize, Deserialize, Debug, Clone, Default)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        pub(crate) struct TrainSettings {
            $(
                $(#[$about])*
                #[arg(long)]
                #[serde(skip_serializing_if = "Option::is_none")]
                pub(crate) $field: Option<$T>,
            )*
        }

        impl TrainSettings {
            /// These settings, with those of `defaults` where nothing is set.
            pub(super) fn over(self, defaults: TrainSettings) -> TrainSettings {
                TrainSettings { $($field: self.$field.or(defaults.$field),)* }
            }
        }
    };
}

settings! {
    /// Model architecture: gpt (learned positions, LayerNorm, GELU) or llama (RoPE, RMSNorm, SwiGLU) [default: gpt]
    model: ModelFamily,
    /// Start from the weights of a model, with its sizes and its tokenizer: a directory in Hugging Face's form, or a GGUF file
    #[arg(value_name = "MODEL")]
    init: PathBuf,
    /// Train low-rank adapters and freeze the weights of --init: rank=8,alpha=16,dropout=0,targets=all-linear are the
    /// defaults; targets may be names of layers, as in q_proj+v_proj. Saved for PEFT in the directory adapter of --out
    #[arg(value_name = "SETTINGS", num_args = 0..=1, default_missing_value = "")]
    lora: LoraSettings,
    /// Preset of the model's sizes, which the options below override [default: small]
    size: ModelSize,
    /// Number of transformer blocks
    layers: usize,
    /// Width of the residual stream
    #[arg(value_name = "WIDTH")]
    #[serde(rename = "width", alias = "d-model")]
    d_model: usize,
    /// Number of attention heads
    heads: usize,
    /// Number of key/value heads of llama (grouped-query attention) [default: half of the heads]
    #[arg(value_name = "HEADS")]
    #[serde(rename = "key-heads", alias = "kv-heads")]
    kv_heads: usize,
    /// Width of the MLP [default: 4 * d-model for gpt, 8/3 * d-model for llama]
    #[arg(value_name = "WIDTH")]
    #[serde(rename = "hidden", alias = "d-ff")]
    d_ff: usize,
    /// Sequence length in tokens [default: by --size; with --init 512, or the positions of the model]
    #[arg(value_name = "TOKENS")]
    #[serde(rename = "length", alias = "seq-len")]
    seq_len: usize,
    /// Share the weight of the token embedding with the output head [default: false]
    #[arg(num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    tied_head: bool,
    /// Dropout probability [default: 0]
    #[arg(value_name = "PROBABILITY")]
    dropout: f64,
    /// Device mesh: data parallelism over the axis dp, tensor parallelism over tp [default: dp=2,tp=2; under mpirun dp=N]
    mesh: String,
    /// Parallelism plan [default: tp if the mesh has an axis tp, otherwise ddp]
    plan: PlanChoice,
    /// Shard activations on the sequence dimension over tp where they would be replicated [default: false]
    #[arg(num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    sequence_parallel: bool,
    /// Text file to train on, JSON lines (.jsonl) with a conversation {"messages": [...]}, {"prompt": ..., "completion": ...} or
    /// {"text": ...} each, whose loss is on answers and completions, a file of tokens (.bin, .u16, .u32) of nanoGPT, llm.c or `shardwise
    /// tokenize`, which may be larger than memory, or a directory of such files. Several sources may have weights [default: a built-in
    /// book]
    #[arg(value_name = "PATH[=WEIGHT]")]
    #[serde(default, deserialize_with = "one_or_several")]
    data: Vec<DataSource>,
    /// Evaluate on this file or directory, and train on all of --data; several sets are reported one by one [default: the last
    /// tenth of each source is held out]
    #[arg(value_name = "PATH")]
    eval_data: Vec<PathBuf>,
    /// Put several documents of JSON lines into one sequence [default: true]
    #[arg(num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    packing: bool,
    /// tokenizer.json of the tokenizers library [default: that of --init, otherwise one token per byte]
    #[arg(value_name = "FILE")]
    tokenizer: PathBuf,
    /// Number of training steps [default: 300]
    steps: u64,
    /// Sequences per batch, over all ranks [default: 16]
    #[arg(value_name = "SEQUENCES")]
    #[serde(rename = "batch", alias = "batch-size")]
    batch_size: usize,
    /// Gradient accumulation: batches per optimizer step [default: 1]
    #[arg(value_name = "BATCHES")]
    accumulate: usize,
    /// Optimizer; parameters that it does not support (muon: all but matrices) use adamw [default: adamw]
    #[arg(value_parser = PossibleValuesParser::new(Algorithm::names().iter().copied()))]
    optimizer: String,
    /// Learning-rate schedule after a linear warm-up; all but inverse-sqrt and constant end at a tenth of the peak [default: cosine]
    schedule: ScheduleChoice,
    /// Peak learning rate [default: 0.003 for adamw and muon, with
    /// --init 0.00002 and with --lora 0.0002, otherwise the default of the optimizer]
    lr: f64,
    /// Number of warm-up steps [default: a tenth of the steps]
    #[arg(value_name = "STEPS")]
    warmup: u64,
    /// Weight decay [default: 0.01 for adamw, otherwise the default of the optimizer]
    weight_decay: f64,
    /// Maximum gradient norm; 0 disables clipping [default: 1]
    #[arg(value_name = "NORM")]
    #[serde(rename = "clip", alias = "clip-grad-norm")]
    clip_grad_norm: f64,
    /// Data type of the parameters [default: f32]
    dtype: ParamDtype,
    /// Keep f32 master weights for bf16 parameters [default: true]
    #[arg(num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    #[serde(rename = "master", alias = "master-weights")]
    master_weights: bool,
    /// Seed of initialization, shuffling, dropout and samples; the same on every mesh with every plan [default: 0]
    seed: u64,
    /// Evaluate on held-out text every so many steps; 0 means only at the end [default: 50]
    #[arg(value_name = "STEPS")]
    eval_every: u64,
    /// Stop when the loss on the (first) set to evaluate on has not been lower for so many evaluations [default: never]
    #[arg(value_name = "EVALUATIONS")]
    patience: u64,
    /// Generate a sample every so many steps; 0 means only at the end [default: 0]
    #[arg(value_name = "STEPS")]
    sample_every: u64,
    /// Number of tokens of a sample [default: 120]
    #[arg(value_name = "TOKENS")]
    sample_tokens: usize,
    /// Prompt of the samples [default: the beginning of the held-out text]
    prompt: String,
    /// Save a checkpoint every so many steps; 0 means only at the end [default: 0]
    #[arg(value_name = "STEPS")]
    save_every: u64,
    /// Number of latest checkpoints to keep [default: 3]
    #[arg(value_name = "CHECKPOINTS")]
    keep: usize,
    /// Output directory for checkpoints and the loss curve [default: shardwise-out]
    #[arg(value_name = "DIR")]
    out: PathBuf,
    /// Write a JSON object per step to this file; with --resume, continue it after the step of the checkpoint [default with
    /// --resume: the log of the run]
    #[arg(value_name = "FILE")]
    log: PathBuf,
}

/// Model architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ModelFamily {
    Gpt,
    Llama,
}

/// Preset of the model's sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ModelSize {
    /// 2 layers, d-model 64, 4 heads, seq-len 64
    Tiny,
    /// 3 layers, d-model 96, 4 heads, seq-len 64
    Small,
    /// 4 layers, d-model 256, 8 heads, seq-len 128
    Medium,
    /// 12 layers, d-model 768, 12 heads, seq-len 1024
    Large,
}

/// Parallelism plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum PlanChoice {
    /// Data parallelism over dp with replicated parameters
    #[serde(rename = "ddp")]
    Ddp,
    /// Data parallelism over dp with sharded parameters, gathered before use
    #[serde(rename = "fsdp")]
    Fsdp,
    /// Tensor parallelism over tp, and data parallelism over dp if the mesh has that axis
    #[serde(rename = "tp")]
    Tp,
    /// Tensor parallelism over tp and fsdp over dp
    #[value(name = "fsdp+tp")]
    #[serde(rename = "fsdp+tp")]
    FsdpTp,
    /// The plan with the lowest estimated step time, found by dry runs
    #[serde(rename = "auto")]
    Auto,
}

impl PlanChoice {
    /// The name as on the command line, and whether sequences are sharded, too.
    pub(crate) fn name(self, sequence_parallel: bool) -> String {
        let name = self.to_possible_value().map_or(String::new(), |value| value.get_name().to_string());
        if sequence_parallel { name + " with sequence parallelism" } else { name }
    }
}

/// Learning-rate schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ScheduleChoice {
    /// Half a cosine
    Cosine,
    /// A straight line
    Linear,
    /// Warm-up, stable, decay: the peak, and a straight line in the last fifth of the steps
    Wsd,
    /// The inverse square root of the step
    InverseSqrt,
    /// The peak
    Constant,
}

impl ScheduleChoice {
    fn schedule(self, warmup: u64, total: u64) -> Schedule {
        const END: f64 = 0.1;
        match self {
            ScheduleChoice::Cosine => Schedule::Cosine { warmup, total, end: END },
            ScheduleChoice::Linear => Schedule::Linear { warmup, total, end: END },
            ScheduleChoice::Wsd => Schedule::WarmupStableDecay { warmup, decay: total / 5, total, end: END },
            ScheduleChoice::InverseSqrt => Schedule::InverseSqrt { warmup },
            // A decay that begins after the last step.
            ScheduleChoice::Constant => Schedule::WarmupStableDecay { warmup, decay: 0, total: u64::MAX, end: 1.0 },
        }
    }
}

/// Data type of the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ParamDtype {
    F32,
    Bf16,
}

/// A training job with every setting resolved.
pub(crate) struct TrainJob {
    pub(crate) config: ModelConfig,
    /// The model whose weights the run begins with.
    pub(crate) init: Option<PathBuf>,
    pub(crate) lora: Option<LoraSettings>,
    pub(crate) mesh: Mesh,
    pub(crate) plan: ShardingPlan,
    /// As in `fsdp+tp`.
    pub(crate) plan_name: String,
    /// The candidates of `--plan auto`.
    pub(crate) search: Option<PlanSearch>,
    pub(crate) dtype: DType,
    /// For the parameters that the optimizer supports, and for the remaining ones.
    pub(crate) groups: [ParamGroup; 2],
    pub(crate) schedule: Schedule,
    pub(crate) clip: Option<f64>,
    pub(crate) steps: u64,
    pub(crate) batch: usize,
    pub(crate) accumulate: usize,
    pub(crate) seed: u64,
    pub(crate) eval_every: u64,
    /// Evaluations without a lower loss that end the run.
    pub(crate) patience: Option<EarlyStopping>,
    pub(crate) sample_every: u64,
    pub(crate) sample_tokens: usize,
    pub(crate) prompt: Option<String>,
    pub(crate) save_every: u64,
    pub(crate) keep: usize,
    pub(crate) out: PathBuf,
    pub(crate) log: Option<PathBuf>,
    /// The options that are stored in checkpoints, so that `--resume` need not repeat them.
    pub(crate) settings: TrainSettings,
}

impl TrainJob {
    /// Where the adapters of `--lora` are saved.
    pub(super) fn adapter(&self) -> PathBuf {
        self.out.join("adapter")
    }

    /// Tokens per step, over all ranks.
    pub(super) fn tokens_per_step(&self) -> usize {
        self.batch * self.accumulate * self.config.seq_len()
    }
}

/// Default length of sequences of a model that takes longer ones.
const FINE_TUNING_LENGTH: usize = 512;

/// The default output directory.
const OUT: &str = "shardwise-out";

/// Largest number of tokens in a batch: their ids alone take 4 GB.
const MAX_BATCH_TOKENS: usize = 1 << 30;

impl TrainSettings {
    /// These settings, with those of a TOML file where nothing is set.
    pub(crate) fn with_file(self, path: Option<&Path>) -> Result<TrainSettings> {
        let Some(path) = path else { return Ok(self) };
        let fix = "see `shardwise train --help` for the options";
        let text = read_text(path, MOST_CONFIG_BYTES).map_err(|error| {
            ErrorKind::Argument.error::<Error>("config", format!("{}: {error}", path.display()), "a TOML file", fix)
        })?;
        let found = |error: toml::de::Error| format!("{}: {}", path.display(), error.to_string().trim_end());
        let file = toml::from_str(&text)
            .map_err(|error| ErrorKind::Argument.error::<Error>("config", found(error), "options", fix))?;
        old_options::note_keys(text.parse::<toml::Table>().unwrap_or_default().keys());
        Ok(self.over(file))
    }

    /// These settings, with those of a checkpoint where nothing is set. A new mesh or plan replaces all saved settings of
    /// parallelism.
    pub(crate) fn resuming(self, mut saved: TrainSettings) -> TrainSettings {
        if self.mesh.is_some() || self.plan.is_some() {
            (saved.plan, saved.sequence_parallel) = (None, None);
        }
        self.over(saved)
    }

    /// The output directory.
    pub(crate) fn out(&self) -> &Path {
        self.out.as_deref().unwrap_or(Path::new(OUT))
    }

    /// The text as tokens.
    ///
    /// `saved` has the files of the run to resume: the model that it began with may be gone.
    pub(crate) fn tokens(&self, saved: Option<TextFiles>) -> Result<TokenizedText> {
        let files = match (&self.init, &self.tokenizer) {
            (Some(_), Some(tokenizer)) => {
                let found = format!("{} together with --init", tokenizer.display());
                let needed = "the tokenizer that the model was trained with";
                return Err(ErrorKind::Argument.error("--tokenizer", found, needed, "leave one of the options out"));
            }
            (Some(init), None) => match saved {
                Some(files) => files,
                // What is not a model has no tokenizer either, and that it is not a model is what matters.
                None => PretrainedConfig::read(init).and_then(|_| load_text_files(init))?,
            },
            (None, Some(path)) => tokenizer_file(path)?,
            (None, None) => TextFiles::default(),
        };
        let packed = self.packing.unwrap_or(true);
        let (data, eval_data) = (self.data.as_deref().unwrap_or(&[]), self.eval_data.as_deref().unwrap_or(&[]));
        TokenizedText::read(data, eval_data, files, packed)
    }

    /// Fills in the defaults and checks that the settings are consistent.
    pub(crate) fn decide(
        self,
        tokens: &TokenizedText,
        network: Network,
        saved: Option<&ModelConfig>,
    ) -> Result<TrainJob> {
        let config = match &self.init {
            Some(init) => self.pretrained(init, saved)?,
            None => self.model_config(tokens.vocabulary()),
        };
        if tokens.vocabulary() > config.vocab_size() && tokens.largest() as usize >= config.vocab_size() {
            let found = format!("token {} for a vocabulary of {}", tokens.largest(), config.vocab_size());
            let needed = "tokens of the model's vocabulary";
            return Err(ErrorKind::Data.error("data", found, needed, "use the tokenizer that belongs to the model"));
        }
        if self.lora.is_some() && self.init.is_none() {
            let fix = "name a model with --init";
            return Err(ErrorKind::Argument.error("--lora", "a model without weights", "a trained model", fix));
        }
        let mesh = processes::mesh(self.mesh.as_deref(), "dp=2,tp=2", "dp")?;
        processes::check_thread_ranks(&mesh)?;
        let (steps, batch, accumulate) =
            (self.steps.unwrap_or(300), self.batch_size.unwrap_or(16), self.accumulate.unwrap_or(1));
        let at_least_one = |option: &'static str, value: u64| match value {
            0 => Err(ErrorKind::Argument.error::<Error>(option, "0", "at least 1", "correct the option")),
            _ => Ok(()),
        };
        at_least_one("steps", steps)?;
        at_least_one("accumulate", accumulate as u64)?;
        let keep = self.keep.unwrap_or(3);
        at_least_one("keep", keep as u64)?;
        self.patience.map_or(Ok(()), |patience| at_least_one("patience", patience))?;
        let dp_size = mesh.axes().iter().find(|axis| axis.name == "dp").map_or(1, |axis| axis.size);
        if batch < dp_size {
            let found = format!("{batch} sequence(s) for {dp_size} ranks along `dp`");
            return Err(ErrorKind::Argument.error("batch-size", found, "at least one per rank", "use a larger batch"));
        }
        if batch.saturating_mul(config.seq_len()) > MAX_BATCH_TOKENS {
            let found = format!("{batch} sequences of {} tokens", config.seq_len());
            let needed = format!("at most {MAX_BATCH_TOKENS} tokens in a batch");
            return Err(ErrorKind::Argument.error("batch-size", found, needed, "use a smaller batch"));
        }
        tokens.check(config.seq_len())?;
        let choice = self.plan_choice(&mesh);
        let (plan, search) = self.resolve_plan(choice, &config, &mesh, &StepOptions::new(batch, network))?;
        let plan_name = choice.name(self.sequence_parallel.unwrap_or(false));
        let clip = self.clip_grad_norm.unwrap_or(1.0);
        let numbers = [("lr", self.lr), ("weight-decay", self.weight_decay), ("clip-grad-norm", Some(clip))];
        for (option, value) in numbers.into_iter().filter_map(|(option, value)| Some((option, value?))) {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(ErrorKind::Argument.error(
                    option,
                    value,
                    "a finite number of at least 0",
                    "correct the option",
                ));
            }
        }
        let (groups, out) = (self.groups()?, self.out().to_path_buf());
        let warmup = self.warmup.unwrap_or(steps / 10);
        // A checkpoint stores the seed with its data position, and a resumed run has its own outputs. The mesh is stored even if
        // it is the default, which depends on how many processes were started.
        let settings = TrainSettings { seed: None, out: None, log: None, mesh: Some(mesh.to_string()), ..self.clone() };
        Ok(TrainJob {
            config,
            init: self.init,
            lora: self.lora,
            mesh,
            plan,
            plan_name,
            search,
            dtype: if self.dtype == Some(ParamDtype::Bf16) { DType::BF16 } else { DType::F32 },
            groups,
            schedule: self.schedule.unwrap_or(ScheduleChoice::Cosine).schedule(warmup, steps),
            clip: (clip > 0.0).then_some(clip),
            steps,
            batch,
            accumulate,
            seed: self.seed.unwrap_or(0),
            eval_every: self.eval_every.unwrap_or(50),
            patience: self.patience.map(EarlyStopping::new),
            sample_every: self.sample_every.unwrap_or(0),
            sample_tokens: self.sample_tokens.unwrap_or(120),
            save_every: self.save_every.unwrap_or(0),
            keep,
            out,
            prompt: self.prompt,
            log: self.log,
            settings,
        })
    }

    /// The optimizer, and the one for parameters that it does not support.
    fn groups(&self) -> Result<[ParamGroup; 2]> {
        let adamw = Algorithm::from(AdamW { betas: (0.9, 0.95), ..AdamW::default() });
        let algorithm = match self.optimizer.as_deref().unwrap_or(AdamW::NAME) {
            AdamW::NAME => adamw.clone(),
            // With this scale matrices and the parameters that AdamW updates can share a learning rate.
            Muon::NAME => Algorithm::by_name(Muon::NAME)?.with_setting("adjust_lr_fn", "match_rms_adamw")?,
            other => Algorithm::by_name(other)?,
        };
        let lr = match algorithm.name() {
            // The weights are good already: large steps would forget what they know.
            AdamW::NAME | Muon::NAME if self.lora.is_some() => 2e-4,
            AdamW::NAME | Muon::NAME if self.init.is_some() => 2e-5,
            AdamW::NAME | Muon::NAME => 3e-3,
            _ => algorithm.default_lr(),
        };
        let group = |algorithm: Algorithm| -> Result<ParamGroup> {
            let algorithm = match self.weight_decay {
                Some(decay) => algorithm.with_setting("weight_decay", decay)?,
                None => algorithm,
            };
            let master = self.master_weights.unwrap_or(true);
            Ok(ParamGroup { master, ..ParamGroup::new(algorithm).with_lr(self.lr.unwrap_or(lr)) })
        };
        Ok([group(algorithm)?, group(adamw)?])
    }

    /// The plan that was asked for, or the one that goes with the mesh.
    fn plan_choice(&self, mesh: &Mesh) -> PlanChoice {
        self.plan.unwrap_or(if mesh.axis("tp").is_ok() { PlanChoice::Tp } else { PlanChoice::Ddp })
    }

    /// The plan, and the candidates of `--plan auto`.
    fn resolve_plan(
        &self,
        plan: PlanChoice,
        config: &ModelConfig,
        mesh: &Mesh,
        step: &StepOptions,
    ) -> Result<(ShardingPlan, Option<PlanSearch>)> {
        let sequence_parallel = self.sequence_parallel.unwrap_or(false);
        if plan == PlanChoice::Auto {
            if sequence_parallel {
                let needed = "a plan other than auto";
                return Err(ErrorKind::Argument.error(
                    "plan",
                    "auto with sequence-parallel",
                    needed,
                    "leave one of them out",
                ));
            }
            let search = search_plan(config, mesh, step)?;
            return Ok((search.plan.clone(), Some(search)));
        }
        let sharded = matches!(plan, PlanChoice::Fsdp | PlanChoice::FsdpTp);
        let parallelism = ParallelismConfig {
            data_parallel: if sharded { DataParallelMode::FullyShard } else { DataParallelMode::Replicate },
            tensor_parallel: matches!(plan, PlanChoice::Tp | PlanChoice::FsdpTp),
            sequence_parallel,
        };
        Ok((parallelism.plan(config, mesh)?, None))
    }

    /// The configuration of `--init`, or the one that the run to resume began with.
    fn pretrained(&self, init: &Path, saved: Option<&ModelConfig>) -> Result<ModelConfig> {
        let sizes = [self.layers, self.d_model, self.heads, self.kv_heads, self.d_ff];
        if self.model.is_some() || self.size.is_some() || self.tied_head.is_some() || sizes.iter().any(Option::is_some)
        {
            let found = "an option for the sizes of a model together with --init";
            let needed = "the sizes of the model in its config.json";
            return Err(ErrorKind::Argument.error("--init", found, needed, "leave --model, --size and the sizes out"));
        }
        let config = match saved {
            Some(ModelConfig::Pretrained { config, .. }) => config.clone(),
            _ => PretrainedConfig::read(init)?,
        };
        if config.is_encoder() {
            let found = format!("{}, an encoder ({})", init.display(), config.model_type());
            let fix = "name another model; `shardwise embed` computes embeddings with encoders";
            return Err(ErrorKind::Model.error("--init", found, "a causal language model", fix));
        }
        let seq_len = self.seq_len.unwrap_or(config.max_positions().min(FINE_TUNING_LENGTH));
        let config = ModelConfig::Pretrained { config, seq_len };
        config.check()?;
        Ok(config)
    }

    pub(crate) fn model_config(&self, vocab_size: usize) -> ModelConfig {
        let (layers, width, heads, length) = match self.size.unwrap_or(ModelSize::Small) {
            ModelSize::Tiny => (2, 64, 4, 64),
            ModelSize::Small => (3, 96, 4, 64),
            ModelSize::Medium => (4, 256, 8, 128),
            ModelSize::Large => (12, 768, 12, 1024),
        };
        let (n_layers, d_model) = (self.layers.unwrap_or(layers), self.d_model.unwrap_or(width));
        let (n_heads, seq_len) = (self.heads.unwrap_or(heads), self.seq_len.unwrap_or(length));
        let (tied_head, dropout) = (self.tied_head.unwrap_or(false), self.dropout.unwrap_or(0.0));
        match self.model.unwrap_or(ModelFamily::Gpt) {
            ModelFamily::Gpt => ModelConfig::Gpt(GptConfig {
                vocab_size,
                seq_len,
                d_model,
                n_layers,
                n_heads,
                d_ff: self.d_ff.unwrap_or(4 * d_model),
                tied_head,
                dropout,
                ..GptConfig::default()
            }),
            ModelFamily::Llama => ModelConfig::Llama(LlamaConfig {
                vocab_size,
                seq_len,
                d_model,
                n_layers,
                n_heads,
                n_kv_heads: self.kv_heads.unwrap_or(if n_heads.is_multiple_of(2) { n_heads / 2 } else { n_heads }),
                // SwiGLU has three matrices: as many parameters as two with 4 * d_model.
                d_ff: self.d_ff.unwrap_or(8 * d_model / 3),
                tied_head,
                dropout,
                ..LlamaConfig::default()
            }),
        }
    }
}
