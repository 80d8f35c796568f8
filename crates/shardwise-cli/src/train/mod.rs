//! `shardwise train`: a language model on a text, over any mesh of thread ranks.

pub(crate) mod checkpoints;
mod curve;
mod data;
mod progress;
pub(crate) mod sample;
pub(crate) mod saved;
mod settings;
pub(crate) mod trainer;

use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use candle_core::{Device, Tensor};
use clap::Args;
use serde::Serialize;
use shardwise::comm::Report;
use shardwise::models::{check_export, export_hf};
use shardwise::prelude::*;

use checkpoints::{Position, Resumed, Saver};
use data::Tokens;
use progress::{Progress, Step};
use sample::{Choice, continued};
use settings::{Job, Settings};
use trainer::Trainer;

/// What to train and what to show.
#[derive(Args)]
#[command(
    args_override_self = true,
    after_help = "\
Without options it trains a small GPT on a book that comes with the command, on 4 thread ranks. A seed gives the same
training on every mesh and with every plan, up to rounding. Ctrl-C ends it after the step and saves a checkpoint, as every
training does at its end; --resume goes on from there. Options then need not be given again, and those that are given count:
another mesh and plan, more steps.

Examples:
  shardwise train
  shardwise train --model llama --mesh dp=2 --plan fsdp --steps 500
  shardwise train --data notes.txt --size medium --mesh tp=2 --log steps.jsonl
  shardwise train --config job.toml --lr 0.001 --report
  shardwise train --save-every 50 --keep 2
  shardwise train --resume --mesh tp=2 --steps 600
  shardwise train --model llama --out llama --export-hf llama-hf
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
    /// Print the summary as a JSON object (also the default when the output is not a terminal).
    #[arg(long)]
    json: bool,
}

/// What came out.
#[derive(Serialize, Clone)]
struct Summary {
    steps: u64,
    /// Whether it was interrupted.
    stopped: bool,
    parameters: usize,
    /// Mean over the last tenth of the steps, at most 20; nothing if there were none left.
    loss: Option<f64>,
    /// On held-out text.
    held_out_loss: f64,
    /// Of a guess that knows only how frequent tokens are.
    unigram_entropy: f64,
    tokens_per_s: f64,
    /// Part of the time that the first rank spent in communication, waiting included.
    communication: f64,
    seconds: f64,
    sample: String,
    model: PathBuf,
    /// The last one.
    checkpoint: PathBuf,
    curve: PathBuf,
}

/// Everything a rank knows before it begins.
struct Plan {
    job: Job,
    tokens: Tokens,
    resumed: Option<Resumed>,
    export_hf: Option<PathBuf>,
}

/// What the first rank has in the end.
struct Outcome {
    summary: Summary,
    report: Report,
}

/// Evaluations use so many batches.
const EVALUATED: usize = 4;

/// Set when the user wants to stop.
static STOP: AtomicBool = AtomicBool::new(false);

pub(crate) fn run(options: Options) -> Result<()> {
    let mut settings = options.settings.with_file(options.config.as_deref())?;
    let resumed = match &options.resume {
        Some(path) => Some(Resumed::find(path.as_deref().unwrap_or(settings.out()))?),
        None => None,
    };
    if let Some(resumed) = &resumed {
        settings = settings.resuming(resumed.settings.clone());
    }
    let tokens = settings.tokens()?;
    let job = settings.decide(&tokens)?;
    resumed.iter().try_for_each(|resumed| resumed.check(&job))?;
    options.export_hf.iter().try_for_each(check_export)?;
    let bad_path = |what: &'static str, path: &std::path::Path, error: std::io::Error| {
        let found = format!("{}: {error}", path.display());
        Error::invalid(what, found, "a place that can be written to", "name another one")
    };
    std::fs::create_dir_all(&job.out).map_err(|error| bad_path("output directory", &job.out, error))?;
    let log = match &job.log {
        Some(path) => {
            let (append, mut open) = (resumed.is_some(), OpenOptions::new());
            let opened = open.create(true).write(true).append(append).truncate(!append).open(path);
            Some(BufWriter::new(opened.map_err(|error| bad_path("log", path, error))?))
        }
        None => None,
    };
    checkpoints::make_way(&job.out, resumed.as_ref().map_or(0, |resumed| resumed.at.step), options.overwrite)?;
    saved::describe(&job.out, &job.config, &tokens.coding)?;
    if let Some(search) = &job.search {
        eprintln!("plan `{}`, the cheapest of {} that were tried", search.tried[0].name, search.tried.len());
    }
    // A second time ends it at once.
    let handler = || {
        if STOP.swap(true, Relaxed) {
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).map_err(Error::other)?;
    let ranks = job.mesh.size();
    let plan = Arc::new(Plan { job, tokens, resumed, export_hf: options.export_hf });
    let progress = Arc::new(Progress::new(plan.job.steps, log));
    let outcome = {
        let (plan, progress) = (Arc::clone(&plan), Arc::clone(&progress));
        launch(ranks, move |world| work(&world, &plan, &progress))
    };
    progress.finish();
    let Outcome { summary, report } = outcome?;
    show(&summary, options.report.then_some(&report), options.json)?;
    Ok(())
}

/// The program of every rank.
fn work(world: &World, plan: &Plan, progress: &Progress) -> Result<Outcome> {
    let Plan { job, tokens, resumed, export_hf: exported } = plan;
    let mesh = world.device_mesh(job.mesh.clone())?;
    let optimizer = (job.group, job.schedule);
    let mut trainer = Trainer::new(&job.config, &job.plan, &mesh, (job.dtype, job.seed), optimizer, job.clip)?;
    let mut at = Position::default();
    if let Some(resumed) = resumed {
        resumed.load(world, &mut trainer, job)?;
        at = resumed.at;
    }
    let mut saver = Saver::new(world, job);
    let length = job.config.seq_len();
    let is_first = world.rank() == 0;
    let parameters = trainer.model.parameter_count();
    let unigram_entropy = tokens.unigram_entropy();
    if is_first {
        progress.say(&format!(
            "{parameters} parameters on {}, {} tokens to learn from; guessing by frequency gives a loss of {unigram_entropy:.3}",
            job.mesh,
            tokens.counts().0,
        ));
        if resumed.is_some() {
            progress.say(&format!("goes on after step {} of {}", at.step, job.steps));
        }
    }
    let held_out = tokens.held_out(EVALUATED, job.batch, length);
    let evaluate = |trainer: &Trainer| -> Result<f64> {
        let losses = held_out.iter().map(|batch| trainer.evaluate(batch)).collect::<Result<Vec<_>>>()?;
        Ok(losses.iter().sum::<f64>() / losses.len() as f64)
    };
    let prompt = match &job.prompt {
        Some(prompt) if prompt.is_empty() => {
            return Err(Error::invalid("--prompt", "nothing", "a text to go on from", "leave the option out"));
        }
        Some(prompt) => tokens.coding.encode(prompt)?,
        None => tokens.beginning(16.min(length)),
    };
    let sample = |trainer: &Trainer| -> Result<String> {
        let choice = Choice { temperature: 0.8, top: 50, seed: job.seed };
        let made = continued(&*trainer.model, &mesh, length, &prompt, job.sample_tokens, choice)?;
        tokens.coding.decode(&[&prompt[..], &made].concat())
    };
    let (mut losses, mut evaluated, mut report) = (Vec::new(), Vec::new(), None);
    let (mut in_steps, mut communicating) = (0.0, 0.0);
    while at.step < job.steps && !all_want_to_stop(world)? {
        let numbers = at.batches..at.batches + job.accumulate as u64;
        let batches: Vec<_> = numbers.map(|i| tokens.batch(job.seed, i, job.batch, length)).collect();
        world.trace().clear();
        let start = Instant::now();
        let stepped = trainer.step(&batches)?;
        let seconds = start.elapsed().as_secs_f64();
        let made = world.trace().report();
        let communication: f64 = made.0.iter().map(|(_, _, total)| total.duration.as_secs_f64()).sum();
        if !stepped.loss.is_finite() {
            let found = format!("a loss of {} in step {}", stepped.loss, at.step);
            let fix = "use a smaller learning rate, clipping, or f32";
            return Err(Error::invalid("training", found, "a finite number", fix));
        }
        let lr = job.schedule.lr(at.step, job.group.lr);
        at = Position { step: at.step + 1, batches: at.batches + job.accumulate as u64 };
        let step = at.step;
        in_steps += seconds;
        communicating += communication;
        losses.push((step, stepped.loss));
        report = Some(made);
        if is_first {
            let count = job.batch * job.accumulate * length;
            progress.step(&Step {
                step,
                loss: stepped.loss,
                grad_norm: stepped.norm,
                lr,
                ms: seconds * 1e3,
                tokens_per_s: count as f64 / seconds,
                communication: communication / seconds,
            })?;
        }
        if is_due(step, job.eval_every) && step < job.steps {
            evaluated.push((step, evaluate(&trainer)?));
            if is_first {
                progress.evaluation(step, evaluated[evaluated.len() - 1].1)?;
            }
        }
        if is_due(step, job.save_every) {
            saver.save(&trainer, job, at)?;
        }
        if is_due(step, job.sample_every) && step < job.steps {
            let text = sample(&trainer)?;
            if is_first {
                progress.say(&format!("step {step}: {text:?}"));
            }
        }
    }
    let step = at.step;
    saver.end(&trainer, job, at)?;
    evaluated.push((step, evaluate(&trainer)?));
    let text = sample(&trainer)?;
    if let Some(path) = exported {
        export_hf(world, path, &*trainer.model, &job.config)?;
        if is_first {
            tokens.coding.write(path)?;
        }
    }
    let tail = (losses.len() / 10).clamp(1, 20);
    let count = (losses.len() * job.batch * job.accumulate * length) as f64;
    let summary = Summary {
        steps: step,
        stopped: step < job.steps,
        parameters,
        loss: (!losses.is_empty())
            .then(|| losses.iter().rev().take(tail).map(|(_, loss)| loss).sum::<f64>() / tail as f64),
        held_out_loss: evaluated[evaluated.len() - 1].1,
        unigram_entropy,
        tokens_per_s: count / f64::max(in_steps, 1e-9),
        communication: communicating / f64::max(in_steps, 1e-9),
        seconds: in_steps,
        sample: text,
        model: job.out.clone(),
        checkpoint: checkpoints::series(&job.out).path(step),
        curve: job.out.join("loss.svg"),
    };
    if is_first {
        progress.evaluation(step, summary.held_out_loss)?;
        let title = format!("{} on {}, loss in nats per token", plan.job.config.name(), job.mesh);
        std::fs::write(&summary.curve, curve::svg(&title, &losses, &evaluated, unigram_entropy))?;
    }
    // Nobody leaves before everything is written.
    world.barrier()?;
    Ok(Outcome { summary, report: report.unwrap_or(Report(Vec::new())) })
}

/// Whether any rank has seen that the user wants to stop; the same answer on all of them.
fn all_want_to_stop(world: &World) -> Result<bool> {
    let seen = Tensor::new(u8::from(STOP.load(Relaxed)), &Device::Cpu)?;
    Ok(world.all_reduce(&seen, ReduceOp::Max)?.to_scalar::<u8>()? > 0)
}

fn is_due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

fn show(summary: &Summary, report: Option<&Report>, json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if json || !std::io::IsTerminal::is_terminal(&out) {
        let mut object = serde_json::to_value(summary).map_err(Error::other)?;
        if let Some(report) = report {
            let row = |(operator, call, total): &(&str, &str, shardwise::comm::Total)| {
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
        None => writeln!(out, "loss           none: no steps were left to take")?,
    }
    writeln!(out, "held-out loss  {:.3}", summary.held_out_loss)?;
    writeln!(out, "guessing       {:.3} by frequency alone", summary.unigram_entropy)?;
    writeln!(out, "model          {}", summary.model.display())?;
    writeln!(out, "checkpoint     {}", summary.checkpoint.display())?;
    writeln!(out, "loss curve     {}", summary.curve.display())?;
    writeln!(out, "sample         {:?}", summary.sample)?;
    Ok(())
}
