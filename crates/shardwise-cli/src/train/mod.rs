//! `shardwise train`: trains a language model on a text, on any mesh of ranks.

pub(crate) mod checkpoints;
mod curve;
mod data;
mod history;
pub(crate) mod lora;
mod progress;
mod run;
pub(crate) mod model_dir;
mod settings;
pub(crate) mod trainer;

use shardwise::error::ErrorKind;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use clap::Args;
use shardwise::comm::CommReport;
use shardwise::mesh::Network;
use shardwise::prelude::*;

use checkpoints::ResumePoint;
use run::{PreparedRun, RunOutcome, RunSummary, STOP, WORLD, train_on_rank};
use settings::TrainSettings;

use crate::model_target::check_model_target;
use crate::processes;

/// The options of `shardwise train`.
#[derive(Args)]
#[command(
    args_override_self = true,
    after_help = "\
Without options, trains a small GPT on a built-in book on 4 thread ranks. The same seed gives the same losses on every mesh and \
with every plan, up to rounding. A checkpoint is saved at the end, and on Ctrl-C after the current step. --resume continues from \
it with the options of that run; options that are given override them, for example another mesh and plan, or more steps.

Under mpirun or srun each process is a rank; the default mesh for N processes is dp=N. All processes read the options, the text \
and the checkpoints from a shared file system. Each process writes its part of a checkpoint; the first one writes all other \
files. With SHARDWISE_DETERMINISTIC=1 the results are bitwise equal to those of the same mesh on threads. SIGINT to any process \
works like Ctrl-C; Ctrl-C in mpirun depends on mpirun (Open MPI kills the processes at once).

Examples:
  shardwise train
  shardwise train --model llama --mesh dp=2 --plan fsdp --steps 500
  shardwise train --data notes.txt --size medium --mesh tp=2
  shardwise train --config job.toml --lr 0.001 --report
  shardwise train --save-every 50 --keep 2
  shardwise train --resume --mesh tp=2 --steps 600
  shardwise train --model llama --out llama --export-hf llama-hf
  shardwise train --init model/ --data chats.jsonl --mesh dp=2 --plan fsdp
  shardwise train --init model/ --lora rank=8,targets=q_proj+v_proj
  mpirun -n 4 shardwise train --mesh dp=2,tp=2 --plan fsdp+tp
  mpirun -n 2 shardwise train --resume --mesh dp=2 --plan fsdp
  mpirun -n 4 shardwise train --plan auto --log steps.jsonl"
)]
pub(crate) struct TrainOptions {
    /// Read options from a TOML file; options of the command line override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: TrainSettings,
    /// Continue from a checkpoint, on any mesh with any plan: the latest one in a directory, or one checkpoint [default: the
    /// directory of --out]. With the same mesh and plan the losses are bitwise equal to those of an uninterrupted run
    #[arg(long, value_name = "DIR")]
    resume: Option<Option<PathBuf>>,
    /// Delete checkpoints of later steps that an earlier run left in the output directory, and replace a model that --export-hf
    /// finds in its directory
    #[arg(long)]
    overwrite: bool,
    /// Export the trained model for Hugging Face: config.json, and model.safetensors with the names of its family; adapters of
    /// --lora are added to the weights
    #[arg(long, value_name = "DIR")]
    export_hf: Option<PathBuf>,
    /// Print the collectives of the last step
    #[arg(long)]
    report: bool,
    /// Print the summary as a JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: TrainOptions) -> Result<()> {
    let (with_report, json) = (options.report, options.json);
    let network = processes::network()?;
    let prepared = processes::all_ok(prepare(options, network))?;
    // The first Ctrl-C stops after the step; the second one ends all processes at once.
    let handler = || {
        if STOP.swap(true, Relaxed) {
            WORLD.get().inspect(|world| world.abort("it was interrupted a second time"));
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).map_err(Error::other)?;
    let RunOutcome { summary, report } =
        shardwise_mpi::launch(prepared.job.mesh.size(), move |world| train_on_rank(&world, &prepared))?;
    if processes::is_first() {
        print_summary(&summary, with_report.then_some(&report), json)?;
    }
    Ok(())
}

/// Resolves and checks all options before anything is written.
fn prepare(options: TrainOptions, network: Network) -> Result<PreparedRun> {
    let mut settings = options.settings.with_file(options.config.as_deref())?;
    let resumed = match &options.resume {
        Some(path) => Some(ResumePoint::find(path.as_deref().unwrap_or(settings.out()))?),
        None => None,
    };
    if let Some(resumed) = &resumed {
        settings = settings.resuming(resumed.settings.clone());
    }
    let tokens = settings.tokens(resumed.as_ref().and_then(ResumePoint::text_files).transpose()?)?;
    let job = settings.decide(&tokens, network, resumed.as_ref().map(|resumed| &resumed.config))?;
    resumed.iter().try_for_each(|resumed| resumed.check(&job))?;
    model_dir::check_out(&job.out)?;
    // A run that goes on exports again to where it did before.
    let (init, overwrite) = (job.init.as_deref(), options.overwrite || resumed.is_some());
    options.export_hf.iter().try_for_each(|to| check_model_target(to, init, overwrite))?;
    let prompt = match job.prompt.as_deref() {
        Some("") => {
            return Err(ErrorKind::Argument.error(
                "--prompt",
                "an empty text",
                "a text to continue",
                "leave the option out",
            ));
        }
        Some(prompt) => tokens.tokenizer.encode_without_special(prompt)?,
        None => tokens.beginning(16.min(job.config.seq_len())),
    };
    let TrainOptions { overwrite, export_hf, .. } = options;
    Ok(PreparedRun { job, tokens, prompt, resumed, overwrite, export_hf })
}

fn print_summary(summary: &RunSummary, report: Option<&CommReport>, json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        let mut object = serde_json::to_value(summary).map_err(Error::other)?;
        if let Some(report) = report {
            let row = |(operator, call, total): &(&str, &str, shardwise::comm::CommTotal)| {
                let ms = total.duration.as_secs_f64() * 1e3;
                serde_json::json!({
                    "operator": operator, "collective": call, "calls": total.calls, "bytes": total.bytes, "ms": ms
                })
            };
            object["report"] = report.0.iter().map(row).collect();
        }
        return Ok(writeln!(out, "{object}")?);
    }
    if let Some(report) = report {
        writeln!(out, "Collectives of rank 0 in the last step:\n{report}")?;
    }
    let stopped = if summary.stopped { ", interrupted" } else { "" };
    writeln!(out, "steps          {}{stopped}", summary.steps)?;
    writeln!(out, "time           {:.1} s", summary.seconds)?;
    writeln!(out, "speed          {:.0} tokens/s", summary.tokens_per_s)?;
    writeln!(out, "communication  {:.0} % of the time", summary.communication * 100.0)?;
    match summary.loss {
        Some(loss) => writeln!(out, "loss           {loss:.3} (mean of the last steps)")?,
        None => writeln!(out, "loss           none: nothing left to train; raise --steps")?,
    }
    writeln!(out, "held-out loss  {:.3}, perplexity {:.2}", summary.held_out_loss, summary.held_out_loss.exp())?;
    writeln!(out, "unigram loss   {:.3} (predicting by token frequency alone)", summary.unigram_entropy)?;
    writeln!(out, "output         {}", summary.model.display())?;
    writeln!(out, "checkpoint     {}", summary.checkpoint.display())?;
    if let Some(adapter) = &summary.adapter {
        writeln!(out, "adapter        {}", adapter.display())?;
    }
    writeln!(out, "loss curve     {}", summary.curve.display())?;
    writeln!(out, "sample         {:?}", summary.sample)?;
    Ok(())
}
