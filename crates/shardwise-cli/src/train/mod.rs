//! `shardwise train`: a language model on a text, over any mesh of ranks.

pub(crate) mod checkpoints;
mod curve;
mod data;
mod history;
mod progress;
mod run;
pub(crate) mod sample;
pub(crate) mod saved;
mod settings;
pub(crate) mod trainer;

use shardwise::error::ErrorKind;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use clap::Args;
use shardwise::comm::CommReport;
use shardwise::mesh::Network;
use shardwise::models::check_export;
use shardwise::prelude::*;

use checkpoints::Resumed;
use run::{Outcome, Prepared, STOP, Summary, WORLD, work};
use settings::Settings;

use crate::processes;

/// What to train and what to show.
#[derive(Args)]
#[command(
    args_override_self = true,
    after_help = "\
Without options it trains a small GPT on a book that comes with the command, on 4 thread ranks. A seed gives the same
training on every mesh and with every plan, up to rounding. Ctrl-C ends it after the step and saves a checkpoint, as every
training does at its end; --resume goes on from there. Options then need not be given again, and those that are given count:
another mesh and plan, more steps.

Under mpirun or srun every process is a rank: the mesh has as many, and is dp=N for N processes unless it is named. All
processes read options, text and checkpoints, from a file system that they share; the first one writes, except for
checkpoints, of which each writes its part. With SHARDWISE_DETERMINISTIC=1 the results are those of the same mesh on
threads, bit by bit. A SIGINT to any of the processes is a Ctrl-C; what mpirun makes of a Ctrl-C of its own, its manual
says (Open MPI ends the processes at once).

Examples:
  shardwise train
  shardwise train --model llama --mesh dp=2 --plan fsdp --steps 500
  shardwise train --data notes.txt --size medium --mesh tp=2 --log steps.jsonl
  shardwise train --config job.toml --lr 0.001 --report
  shardwise train --save-every 50 --keep 2
  shardwise train --resume --mesh tp=2 --steps 600
  shardwise train --model llama --out llama --export-hf llama-hf
  mpirun -n 4 shardwise train --mesh dp=2,tp=2 --plan fsdp+tp
  mpirun -n 2 shardwise train --resume --mesh dp=2 --plan fsdp
  shardwise generate shardwise-out --prompt 'Alice'"
)]
pub(crate) struct Options {
    /// Read options from a TOML file; those given here win.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
    /// Go on from a checkpoint, on any mesh with any plan: the last one of a directory, or the one that is named [that of
    /// --out]. With the same mesh and plan, losses are those of a training without the break, bit by bit.
    #[arg(long, value_name = "DIR")]
    resume: Option<Option<PathBuf>>,
    /// Remove checkpoints of later steps that an earlier training left in the output directory.
    #[arg(long)]
    overwrite: bool,
    /// Write the model at the end as Hugging Face has it: model.safetensors with the names of LlamaForCausalLM or
    /// GPT2LMHeadModel, and config.json.
    #[arg(long, value_name = "DIR")]
    export_hf: Option<PathBuf>,
    /// Print what a step communicates.
    #[arg(long)]
    report: bool,
    /// Print the summary as a JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: Options) -> Result<()> {
    let (shown, json) = (options.report, options.json);
    let network = processes::network()?;
    let prepared = processes::agreed(prepared(options, network))?;
    // A second time ends it at once, and with it the other processes.
    let handler = || {
        if STOP.swap(true, Relaxed) {
            WORLD.get().inspect(|world| world.abort("it was interrupted a second time"));
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).map_err(Error::other)?;
    let Outcome { summary, report } =
        shardwise_mpi::launch(prepared.job.mesh.size(), move |world| work(&world, &prepared))?;
    if processes::is_first() {
        show(&summary, shown.then_some(&report), json)?;
    }
    Ok(())
}

/// Decides and checks everything that can be known without writing anything.
fn prepared(options: Options, network: Network) -> Result<Prepared> {
    let mut settings = options.settings.with_file(options.config.as_deref())?;
    let resumed = match &options.resume {
        Some(path) => Some(Resumed::find(path.as_deref().unwrap_or(settings.out()))?),
        None => None,
    };
    if let Some(resumed) = &resumed {
        settings = settings.resuming(resumed.settings.clone());
    }
    let tokens = settings.tokens()?;
    let job = settings.decide(&tokens, network)?;
    resumed.iter().try_for_each(|resumed| resumed.check(&job))?;
    options.export_hf.iter().try_for_each(check_export)?;
    let prompt = match job.prompt.as_deref() {
        Some("") => {
            return Err(ErrorKind::Argument.error(
                "--prompt",
                "nothing",
                "a text to go on from",
                "leave the option out",
            ));
        }
        Some(prompt) => tokens.coding.encode(prompt)?,
        None => tokens.beginning(16.min(job.config.seq_len())),
    };
    let Options { overwrite, export_hf, .. } = options;
    Ok(Prepared { job, tokens, prompt, resumed, overwrite, export_hf })
}

fn show(summary: &Summary, report: Option<&CommReport>, json: bool) -> Result<()> {
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
        writeln!(out, "What the first rank communicated in the last step:\n{report}")?;
    }
    let stopped = if summary.stopped { ", stopped by the user" } else { "" };
    writeln!(out, "steps          {}{stopped}", summary.steps)?;
    writeln!(out, "time           {:.1} s", summary.seconds)?;
    writeln!(out, "speed          {:.0} tokens/s", summary.tokens_per_s)?;
    writeln!(out, "communication  {:.0} % of the time", summary.communication * 100.0)?;
    match summary.loss {
        Some(loss) => writeln!(out, "loss           {loss:.3} at the end of training")?,
        None => writeln!(out, "loss           none: nothing left to train, ask for more steps with --steps")?,
    }
    writeln!(out, "held-out loss  {:.3}", summary.held_out_loss)?;
    writeln!(out, "guessing       {:.3} by frequency alone", summary.unigram_entropy)?;
    writeln!(out, "model          {}", summary.model.display())?;
    writeln!(out, "checkpoint     {}", summary.checkpoint.display())?;
    writeln!(out, "loss curve     {}", summary.curve.display())?;
    writeln!(out, "sample         {:?}", summary.sample)?;
    Ok(())
}
