//! `shardwise train`: trains a language model on a text, on any mesh of ranks.

pub(crate) mod checkpoints;
mod curve;
mod data;
mod sources;
mod history;
pub(crate) mod lora;
mod output_lock;
mod progress;
mod step_log;
mod tensorboard;
mod view;
mod run;
pub(crate) mod model_dir;
pub(crate) mod settings;
pub(crate) mod trainer;

use shardwise::error::ErrorKind;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use clap::Args;
use shardwise::comm::engine::available_cores;
use shardwise::comm::{CommReport, DUMP_DIR_VARIABLE};
use shardwise::mesh::Network;
use shardwise::prelude::*;
use shardwise_mpi::Settings;

use checkpoints::{ResumePoint, is_run, is_same};
pub(crate) use data::tokenizer_file;
use run::{HAS_BEGUN, PreparedRun, RunOutcome, RunOutputs, RunSummary, STOP, WORLD, train_on_rank};
use settings::TrainSettings;

use crate::bench::peak_flops_per_s;
use crate::model_target::check_model_target;
use crate::processes;
use crate::report::DUMP_DIR;

/// The options of `shardwise train`.
#[derive(Args)]
#[command(
    args_override_self = true,
    allow_negative_numbers = true,
    after_help = "\
Without options, trains a small GPT on a built-in book on 4 thread ranks. The same seed gives the same losses on every mesh and \
with every plan, up to rounding. A checkpoint is saved at the end, and on Ctrl-C after the current step. One run at a time writes to an output directory. --resume continues from \
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
  shardwise train --resume=auto --save-every 50
  shardwise train --data web.bin=0.7 --data books/=0.3 --eval-data val.bin
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
    /// directory of --out]; `auto` continues from --out if it has a checkpoint, and begins if not. With the same mesh and plan the
    /// losses are bitwise equal to those of an uninterrupted run
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
    /// Print the collectives of the last step; with a file, profile the third step and write a page about it instead, see
    /// `shardwise report`
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    report: Option<Option<PathBuf>>,
    /// Print lines on a terminal, too, instead of the live view
    #[arg(long)]
    plain: bool,
    /// Draw the loss curve with a logarithmic axis
    #[arg(long)]
    log_curve: bool,
    /// Write losses, learning rate, speed, waiting, and step time and memory of every rank as events for TensorBoard
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
    /// Print the summary as a JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: TrainOptions) -> Result<()> {
    let (with_report, json) = (matches!(options.report, Some(None)), options.json);
    let network = processes::network()?;
    let prepared = processes::all_ok(prepare(options, network))?;
    // The first Ctrl-C, or SIGTERM of a scheduler, stops after the step; the second one ends all processes at once.
    let handler = || {
        if STOP.swap(true, Relaxed) {
            view::restore();
            WORLD.get().inspect(|world| world.abort("it was interrupted a second time"));
            std::process::exit(130);
        }
    };
    on_interrupt(handler)?;
    let mut settings = Settings::from_env()?;
    let dumps = std::env::var_os(DUMP_DIR_VARIABLE).map_or_else(|| prepared.job.out.join(DUMP_DIR), PathBuf::from);
    settings = settings.dump_dir(&dumps);
    let RunOutcome { mut summary, report } = settings
        .launch(prepared.job.mesh.size(), move |world| train_on_rank(&world, &prepared))
        .inspect_err(|error| match HAS_BEGUN.load(Relaxed) || is_missing_rank(error) {
            true => tell_dumps(&dumps),
            // A mistake in the options is not a failure to look into.
            false => drop(std::fs::remove_dir_all(&dumps)),
        })?;
    if processes::is_first() {
        // After the ranks have ended: they would share the cores with the measurement.
        if processes::launched().is_none() {
            summary.utilization = Some(summary.flops_per_s / peak_flops_per_s(available_cores())?);
        }
        print_summary(&summary, with_report.then_some(&report), json)?;
    }
    Ok(())
}

/// Whether an error says that a rank did not come, failed or left: what ranks were doing then explains it.
fn is_missing_rank(error: &Error) -> bool {
    match error {
        Error::Timeout { .. } | Error::PeerFailed { .. } | Error::PeerLeft { .. } => true,
        Error::Rank { source, .. } => is_missing_rank(source),
        _ => false,
    }
}

/// Calls `handler` for SIGINT and SIGTERM. SIGHUP keeps its meaning, which `nohup` may have changed.
fn on_interrupt(handler: impl FnMut() + Send + 'static) -> Result<()> {
    #[cfg(unix)]
    // SAFETY: no handler of this process is replaced, and what was set before is set again below.
    let on_hangup = unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
    ctrlc::set_handler(handler).map_err(Error::other)?;
    #[cfg(unix)]
    // SAFETY: the disposition that the process had before.
    unsafe {
        libc::signal(libc::SIGHUP, on_hangup);
    }
    Ok(())
}

/// The value of --resume that begins if there is nothing to continue.
const AUTO: &str = "auto";

/// Whether a run has saved a checkpoint in its output directory.
fn has_checkpoints(out: &Path) -> Result<bool> {
    Ok(is_run(out) && !checkpoints::series(out).steps()?.is_empty())
}

/// Resolves and checks all options before anything is written.
fn prepare(options: TrainOptions, network: Network) -> Result<PreparedRun> {
    let mut settings = options.settings.with_file(options.config.as_deref())?;
    let resumed = match &options.resume {
        // Damaged checkpoints are an error and not a new beginning.
        Some(Some(path)) if path == Path::new(AUTO) => {
            has_checkpoints(settings.out())?.then(|| ResumePoint::find(settings.out())).transpose()?
        }
        Some(path) => Some(ResumePoint::find(path.as_deref().unwrap_or(settings.out()))?),
        None => None,
    };
    if let Some(resumed) = &resumed {
        settings = settings.resuming(resumed.settings.clone());
        let log = resumed.out().map(model_dir::log_of).transpose()?.flatten().filter(|_| settings.log.is_none());
        if let Some(log) = log {
            settings.log = continued_log(log, resumed, settings.out());
        }
    }
    settings.init = settings.init.map(model_dir::model_of);
    let tokens = settings.tokens(resumed.as_ref().and_then(ResumePoint::text_files).transpose()?)?;
    let job = settings.decide(&tokens, network, resumed.as_ref().map(|resumed| &resumed.config))?;
    resumed.iter().try_for_each(|resumed| resumed.check(&job))?;
    model_dir::check_out(&job.out)?;
    options.report.iter().flatten().try_for_each(|page| check_page(page))?;
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
    let TrainOptions { overwrite, export_hf, report, plain, log_curve, tensorboard, .. } = options;
    let outputs = RunOutputs { page: report.flatten(), plain, log_curve, tensorboard };
    let prepared = PreparedRun { job, tokens, prompt, resumed, overwrite, export_hf, outputs };
    // Before the next check: nobody must be advised to overwrite the checkpoints of a run that is going on.
    if processes::is_first() {
        output_lock::check_unused(&prepared.job.out)?;
    }
    let skipped = prepared.resumed.as_ref().map_or(&[][..], ResumePoint::skipped);
    checkpoints::later_checkpoints(&prepared.job.out, prepared.first_step(), skipped, overwrite)?;
    Ok(prepared)
}

/// The log of the run to resume, if the resumed run continues it; otherwise says why there is no log.
fn continued_log(log: PathBuf, resumed: &ResumePoint, out: &Path) -> Option<PathBuf> {
    let is_same_run = resumed.out().is_some_and(|from| is_same(from, out));
    let why = match log.parent().is_some_and(Path::is_dir) {
        true if is_same_run => return Some(log),
        true => "it belongs to another output directory",
        false => "its directory does not exist any more",
    };
    if processes::is_first() {
        let _ = writeln!(std::io::stderr(), "not logging to {}: {why}; name a file with --log", log.display());
    }
    None
}

/// Checks that the page of `--report` can be created, before a step is trained for it.
fn check_page(page: &Path) -> Result<()> {
    let directory = page.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if directory.is_dir() && !page.is_dir() {
        return Ok(());
    }
    let needed = "a file in a directory that exists";
    Err(ErrorKind::path(page).error("--report", page.display(), needed, "create the directory or name another file"))
}

/// Says where the dumps of a run that has just failed are.
fn tell_dumps(directory: &Path) {
    // A rank that was abandoned may not have ended its view.
    view::restore();
    if processes::is_first() && directory.is_dir() {
        eprintln!("what each rank was doing is in {0}; `shardwise report {0}` shows it", directory.display());
    }
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
    let share = summary.utilization.map(|share| format!(", {:.1} % of the peak of these cores", share * 100.0));
    writeln!(out, "computation    {:.1} GFLOP/s{}", summary.flops_per_s / 1e9, share.unwrap_or_default())?;
    writeln!(out, "communication  {:.0} % of the time", summary.communication * 100.0)?;
    writeln!(out, "memory         {:.1} MB at most, tensors of a rank", summary.peak_bytes as f64 / 1e6)?;
    match summary.loss {
        Some(loss) => writeln!(out, "loss           {loss:.3} (mean of the last steps)")?,
        None => writeln!(out, "loss           none: nothing left to train; raise --steps")?,
    }
    writeln!(out, "held-out loss  {:.3}, perplexity {:.2}", summary.held_out_loss, summary.held_out_loss.exp())?;
    for (name, loss) in &summary.eval_losses {
        writeln!(out, "loss on {name:<7}{loss:.3}, perplexity {:.2}", loss.exp())?;
    }
    writeln!(out, "unigram loss   {:.3} (predicting only by token frequency)", summary.unigram_entropy)?;
    writeln!(out, "output         {}", summary.model.display())?;
    writeln!(out, "checkpoint     {}", summary.checkpoint.display())?;
    if let Some(adapter) = &summary.adapter {
        writeln!(out, "adapter        {}", adapter.display())?;
    }
    writeln!(out, "loss curve     {}", summary.curve.display())?;
    for (name, path) in [("report", &summary.page), ("tensorboard", &summary.tensorboard)] {
        path.iter().try_for_each(|path| writeln!(out, "{name:<15}{}", path.display()))?;
    }
    writeln!(out, "sample         {:?}", summary.sample)?;
    Ok(())
}
