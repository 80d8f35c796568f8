//! What to train: options from the command line, over those of a file, over defaults.

use shardwise::Error;
use shardwise::error::ErrorKind;
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use shardwise::mesh::Network;
use shardwise::models::{
    DataParallelMode, GptConfig, LlamaConfig, ModelConfig, ParallelismConfig, StepOptions, search_plan,
};
use shardwise::optim::{AdamW, Algorithm, Muon, Optimizer, ParamGroup, Schedule};
use shardwise::plan::{PlanSearch, ShardingPlan};
use shardwise::prelude::*;

use super::data::Tokens;
use crate::processes::{self, Launched};

/// Declares the options, each of which can also be an entry of a TOML file.
macro_rules! settings {
    ($($(#[$about:meta])* $field:ident: $T:ty,)*) => {
        /// What to train. Every option can stand in a TOML file under its long name; the command line wins.
        #[derive(Args, Serialize, Deserialize, Debug, Clone, Default)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        pub(crate) struct Settings {
            $(
                $(#[$about])*
                #[arg(long)]
                #[serde(skip_serializing_if = "Option::is_none")]
                pub(crate) $field: Option<$T>,
            )*
        }

        impl Settings {
            /// These, and those of `others` where nothing is said here.
            pub(super) fn over(self, others: Settings) -> Settings {
                Settings { $($field: self.$field.or(others.$field),)* }
            }
        }
    };
}

settings! {
    /// The model: `gpt` (learned positions, layer norm, GELU) or `llama` (rotary positions, RMS norm, SwiGLU) [gpt]
    model: Family,
    /// Sizes to begin with; options for single sizes change them [small]
    size: Size,
    /// Number of blocks
    layers: usize,
    /// Features
    width: usize,
    /// Heads of attention
    heads: usize,
    /// Key and value heads of llama, each of which serves a group of query heads
    key_heads: usize,
    /// Features inside an MLP
    hidden: usize,
    /// Length of sequences in tokens
    length: usize,
    /// Use the table of tokens as the weight of the head too [false]
    #[arg(num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    tied_head: bool,
    /// Probability of dropping elements while training [0]
    dropout: f64,
    /// Mesh of ranks: `dp` shares the batch, `tp` shares heads and features [dp=2,tp=2; dp=N in a job of N processes]
    mesh: String,
    /// What ranks share [tp on a mesh with an axis tp, else ddp]
    plan: Plan,
    /// Share positions along tp where features are whole [false]
    #[arg(num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    sequence_parallel: bool,
    /// Text to learn from, UTF-8 [a book that comes with the command]
    data: PathBuf,
    /// A tokenizer.json of the tokenizers library [bytes are tokens]
    tokenizer: PathBuf,
    /// Training steps [300]
    steps: u64,
    /// Sequences per batch, over all ranks [16]
    batch: usize,
    /// Batches per step, whose gradients add up [1]
    accumulate: usize,
    /// The optimizer; parameters that it cannot take (muon: all but matrices) get adamw [adamw]
    #[arg(value_parser = PossibleValuesParser::new(Algorithm::names().iter().copied()))]
    optimizer: String,
    /// Learning rate, reached after the warm-up, with cosine decay to a tenth [0.003 for adamw and muon, else the optimizer's]
    lr: f64,
    /// Steps until the full learning rate is reached [a tenth of the steps]
    warmup: u64,
    /// Weight decay [0.01 for adamw, else the optimizer's]
    weight_decay: f64,
    /// Largest norm of all gradients together; 0 for no clipping [1]
    clip: f64,
    /// Type of the parameters [f32]
    dtype: Precision,
    /// Keep an f32 copy of bf16 parameters, in which small changes add up [true]
    #[arg(num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    master: bool,
    /// Seed of weights, batches, dropout and samples: the same for every mesh and plan [0]
    seed: u64,
    /// Measure the loss on held-out text every so many steps; 0 for only at the end [50]
    eval_every: u64,
    /// Write a sample every so many steps; 0 for only at the end [0]
    sample_every: u64,
    /// Tokens of a sample [120]
    sample_tokens: usize,
    /// What samples begin with [the first words of the held-out text]
    prompt: String,
    /// Save a checkpoint every so many steps; 0 for only at the end [0]
    save_every: u64,
    /// Checkpoints to keep, the newest ones [3]
    keep: usize,
    /// Directory for checkpoints and the loss curve [shardwise-out]
    out: PathBuf,
    /// Write a JSON object per step to this file; with --resume they are added to it
    log: PathBuf,
}

/// Which model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Family {
    Gpt,
    Llama,
}

/// Sizes with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Size {
    /// 2 layers, width 64, 4 heads, length 64
    Tiny,
    /// 3 layers, width 96, 4 heads, length 64
    Small,
    /// 4 layers, width 256, 8 heads, length 128
    Medium,
    /// 12 layers, width 768, 12 heads, length 1024
    Large,
}

/// What ranks share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Plan {
    /// The batch, over dp: every rank has all weights
    #[serde(rename = "ddp")]
    Ddp,
    /// The batch and the weights, over dp: weights are gathered where they are used
    #[serde(rename = "fsdp")]
    Fsdp,
    /// Heads and features, over tp; the batch over dp if the mesh has that axis
    #[serde(rename = "tp")]
    Tp,
    /// Heads and features over tp, the batch and the weights over dp
    #[value(name = "fsdp+tp")]
    #[serde(rename = "fsdp+tp")]
    FsdpTp,
    /// The cheapest of many that are tried without data
    #[serde(rename = "auto")]
    Auto,
}

/// Type of parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Precision {
    F32,
    Bf16,
}

/// Everything decided.
pub(crate) struct Job {
    pub(crate) config: ModelConfig,
    pub(crate) mesh: Mesh,
    pub(crate) plan: ShardingPlan,
    /// The plans that were tried, if the plan was searched for.
    pub(crate) search: Option<PlanSearch>,
    pub(crate) dtype: DType,
    /// For the parameters that the optimizer takes, and for all others.
    pub(crate) groups: [ParamGroup; 2],
    pub(crate) schedule: Schedule,
    pub(crate) clip: Option<f64>,
    pub(crate) steps: u64,
    pub(crate) batch: usize,
    pub(crate) accumulate: usize,
    pub(crate) seed: u64,
    pub(crate) eval_every: u64,
    pub(crate) sample_every: u64,
    pub(crate) sample_tokens: usize,
    pub(crate) prompt: Option<String>,
    pub(crate) save_every: u64,
    pub(crate) keep: usize,
    pub(crate) out: PathBuf,
    pub(crate) log: Option<PathBuf>,
    /// The options that a checkpoint tells, so that they need not be given again.
    pub(crate) settings: Settings,
}

impl Job {
    /// Tokens that a step learns from, over all ranks.
    pub(super) fn tokens_per_step(&self) -> usize {
        self.batch * self.accumulate * self.config.seq_len()
    }
}

/// The directory for what comes out.
const OUT: &str = "shardwise-out";

impl Settings {
    /// These, over those of a TOML file.
    pub(crate) fn with_file(self, path: Option<&Path>) -> Result<Settings> {
        let Some(path) = path else { return Ok(self) };
        let fix = "see `shardwise train --help` for the options";
        let text = std::fs::read_to_string(path).map_err(|error| {
            ErrorKind::Argument.error::<Error>("config", format!("{}: {error}", path.display()), "a TOML file", fix)
        })?;
        let found = |error: toml::de::Error| format!("{}: {}", path.display(), error.to_string().trim_end());
        let file = toml::from_str(&text)
            .map_err(|error| ErrorKind::Argument.error::<Error>("config", found(error), "options", fix))?;
        Ok(self.over(file))
    }

    /// These, and those of the run that saved a checkpoint where nothing is said here. A new mesh or plan is taken for all
    /// of how ranks share.
    pub(crate) fn resuming(self, mut saved: Settings) -> Settings {
        if self.mesh.is_some() || self.plan.is_some() {
            (saved.plan, saved.sequence_parallel) = (None, None);
        }
        self.over(saved)
    }

    /// The directory for what comes out.
    pub(crate) fn out(&self) -> &Path {
        self.out.as_deref().unwrap_or(Path::new(OUT))
    }

    /// The text as tokens.
    pub(crate) fn tokens(&self) -> Result<Tokens> {
        Tokens::read(self.data.as_deref(), self.tokenizer.as_deref())
    }

    /// Decides what is left open, and checks that everything fits together.
    pub(crate) fn decide(self, tokens: &Tokens, network: Network) -> Result<Job> {
        let config = self.model_config(tokens.vocabulary());
        let mesh = self.find_mesh()?;
        let (steps, batch, accumulate) =
            (self.steps.unwrap_or(300), self.batch.unwrap_or(16), self.accumulate.unwrap_or(1));
        let at_least_one = |option: &'static str, value: u64| match value {
            0 => Err(ErrorKind::Argument.error::<Error>(option, "0", "at least 1", "correct the option")),
            _ => Ok(()),
        };
        at_least_one("steps", steps)?;
        at_least_one("accumulate", accumulate as u64)?;
        let keep = self.keep.unwrap_or(3);
        at_least_one("keep", keep as u64)?;
        let sharing = mesh.axes().iter().find(|axis| axis.name == "dp").map_or(1, |axis| axis.size);
        if batch < sharing {
            let found = format!("{batch} sequence(s) for {sharing} ranks along `dp`");
            return Err(ErrorKind::Argument.error("batch", found, "at least one for every rank", "use a larger batch"));
        }
        tokens.check(config.seq_len())?;
        let (plan, search) = self.find_plan(&config, &mesh, StepOptions::new(batch, network))?;
        let clip = self.clip.unwrap_or(1.0);
        let numbers = [("lr", self.lr), ("weight-decay", self.weight_decay), ("clip", Some(clip))];
        for (option, value) in numbers.into_iter().filter_map(|(option, value)| Some((option, value?))) {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(ErrorKind::Argument.error(
                    option,
                    value,
                    "a number that is at least 0",
                    "correct the option",
                ));
            }
        }
        let groups = self.groups()?;
        let warmup = self.warmup.unwrap_or(steps / 10);
        // A checkpoint has the seed in its own way, and its reader another place to write to. The mesh is said even if it
        // was not asked for, since what it is then depends on who started the command.
        let settings = Settings { seed: None, out: None, log: None, mesh: Some(mesh.to_string()), ..self.clone() };
        Ok(Job {
            config,
            mesh,
            plan,
            search,
            dtype: if self.dtype == Some(Precision::Bf16) { DType::BF16 } else { DType::F32 },
            groups,
            schedule: Schedule::Cosine { warmup, total: steps, end: 0.1 },
            clip: (clip > 0.0).then_some(clip),
            steps,
            batch,
            accumulate,
            seed: self.seed.unwrap_or(0),
            eval_every: self.eval_every.unwrap_or(50),
            sample_every: self.sample_every.unwrap_or(0),
            sample_tokens: self.sample_tokens.unwrap_or(120),
            save_every: self.save_every.unwrap_or(0),
            keep,
            out: self.out().to_path_buf(),
            prompt: self.prompt,
            log: self.log,
            settings,
        })
    }

    /// The optimizer, and the one for parameters that it cannot take.
    fn groups(&self) -> Result<[ParamGroup; 2]> {
        let adamw = Algorithm::from(AdamW { betas: (0.9, 0.95), ..AdamW::default() });
        let algorithm = match self.optimizer.as_deref().unwrap_or(AdamW::NAME) {
            AdamW::NAME => adamw.clone(),
            // With this scale one learning rate serves matrices and all others.
            Muon::NAME => Algorithm::by_name(Muon::NAME)?.with_setting("adjust_lr_fn", "match_rms_adamw")?,
            other => Algorithm::by_name(other)?,
        };
        let lr = match algorithm.name() {
            AdamW::NAME | Muon::NAME => 3e-3,
            _ => algorithm.default_lr(),
        };
        let group = |algorithm: Algorithm| -> Result<ParamGroup> {
            let algorithm = match self.weight_decay {
                Some(decay) => algorithm.with_setting("weight_decay", decay)?,
                None => algorithm,
            };
            let master = self.master.unwrap_or(true);
            Ok(ParamGroup { master, ..ParamGroup::new(algorithm).with_lr(self.lr.unwrap_or(lr)) })
        };
        Ok([group(algorithm)?, group(adamw)?])
    }

    /// The mesh: of threads, or of the processes that were started.
    fn find_mesh(&self) -> Result<Mesh> {
        let Some(Launched { by, size, .. }) = processes::launched() else {
            let mesh: Mesh = self.mesh.as_deref().unwrap_or("dp=2,tp=2").parse()?;
            ThreadWorld::new(mesh.size())?;
            return Ok(mesh);
        };
        let mesh: Mesh = self.mesh.clone().unwrap_or_else(|| format!("dp={size}")).parse()?;
        if mesh.size() == size {
            return Ok(mesh);
        }
        let ranks = mesh.size();
        let found = format!("{mesh} for {ranks} rank(s) in a job of {size} process(es)");
        let fix = format!("start it with {by} -n {ranks}, or with a mesh of {size} rank(s) such as --mesh dp={size}");
        Err(ErrorKind::Launch.error("mesh", found, "one process per rank", fix))
    }

    /// The plan, and what was tried if it was searched for.
    fn find_plan(
        &self,
        config: &ModelConfig,
        mesh: &Mesh,
        step: StepOptions,
    ) -> Result<(ShardingPlan, Option<PlanSearch>)> {
        let by_mesh = if mesh.axis("tp").is_ok() { Plan::Tp } else { Plan::Ddp };
        let plan = self.plan.unwrap_or(by_mesh);
        let sequence_parallel = self.sequence_parallel.unwrap_or(false);
        if plan == Plan::Auto {
            if sequence_parallel {
                let needed = "a plan that is not searched for";
                return Err(ErrorKind::Argument.error(
                    "plan",
                    "auto with sequence-parallel",
                    needed,
                    "leave one of them out",
                ));
            }
            let search = search_plan(config, mesh, &step)?;
            return Ok((search.plan.clone(), Some(search)));
        }
        let sharded = matches!(plan, Plan::Fsdp | Plan::FsdpTp);
        let parallelism = ParallelismConfig {
            data_parallel: if sharded { DataParallelMode::FullyShard } else { DataParallelMode::Replicate },
            tensor_parallel: matches!(plan, Plan::Tp | Plan::FsdpTp),
            sequence_parallel,
        };
        Ok((parallelism.plan(config, mesh)?, None))
    }

    fn model_config(&self, vocab_size: usize) -> ModelConfig {
        let (layers, width, heads, length) = match self.size.unwrap_or(Size::Small) {
            Size::Tiny => (2, 64, 4, 64),
            Size::Small => (3, 96, 4, 64),
            Size::Medium => (4, 256, 8, 128),
            Size::Large => (12, 768, 12, 1024),
        };
        let (n_layers, d_model) = (self.layers.unwrap_or(layers), self.width.unwrap_or(width));
        let (n_heads, seq_len) = (self.heads.unwrap_or(heads), self.length.unwrap_or(length));
        let (tied_head, dropout) = (self.tied_head.unwrap_or(false), self.dropout.unwrap_or(0.0));
        match self.model.unwrap_or(Family::Gpt) {
            Family::Gpt => ModelConfig::Gpt(GptConfig {
                vocab_size,
                seq_len,
                d_model,
                n_layers,
                n_heads,
                d_ff: self.hidden.unwrap_or(4 * d_model),
                tied_head,
                dropout,
                ..GptConfig::default()
            }),
            Family::Llama => ModelConfig::Llama(LlamaConfig {
                vocab_size,
                seq_len,
                d_model,
                n_layers,
                n_heads,
                n_kv_heads: self.key_heads.unwrap_or(if n_heads.is_multiple_of(2) { n_heads / 2 } else { n_heads }),
                // Three matrices here take what two take elsewhere.
                d_ff: self.hidden.unwrap_or(8 * d_model / 3),
                tied_head,
                dropout,
                ..LlamaConfig::default()
            }),
        }
    }
}
