//! `shardwise train`: a language model on a text, over any mesh of ranks.

pub(crate) mod checkpoints;
mod curve;
mod data;
mod history;
mod progress;
pub(crate) mod sample;
pub(crate) mod saved;
mod settings;
pub(crate) mod trainer;

use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use candle_core::{Device, Tensor};
use clap::Args;
use serde::Serialize;
use shardwise::comm::Report;
use shardwise::models::{check_export, export_hf};
use shardwise::prelude::*;

use checkpoints::unwritable;
use checkpoints::{Position, Resumed, Saver};
use data::Tokens;
use history::History;
use progress::{Progress, Step};
use sample::{Choice, continued};
use settings::{Job, Settings};
use trainer::Trainer;

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
    /// What samples begin with.
    prompt: Vec<u32>,
    resumed: Option<Resumed>,
    overwrite: bool,
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

/// The ranks, once they have begun.
static WORLD: OnceLock<World> = OnceLock::new();

pub(crate) fn run(options: Options) -> Result<()> {
    let (shown, json) = (options.report, options.json);
    let plan = processes::agreed(Plan::new(options))?;
    // A second time ends it at once, and with it the other processes.
    let handler = || {
        if STOP.swap(true, Relaxed) {
            WORLD.get().inspect(|world| world.abort("it was interrupted a second time"));
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).map_err(Error::other)?;
    let Outcome { summary, report } = shardwise_mpi::launch(plan.job.mesh.size(), move |world| work(&world, &plan))?;
    if processes::is_first() {
        show(&summary, shown.then_some(&report), json)?;
    }
    Ok(())
}

impl Plan {
    /// Decides and checks everything that can be known without writing anything.
    fn new(options: Options) -> Result<Self> {
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
        let prompt = match job.prompt.as_deref() {
            Some("") => {
                return Err(Error::invalid("--prompt", "nothing", "a text to go on from", "leave the option out"));
            }
            Some(prompt) => tokens.coding.encode(prompt)?,
            None => tokens.beginning(16.min(job.config.seq_len())),
        };
        let Options { overwrite, export_hf, .. } = options;
        Ok(Plan { job, tokens, prompt, resumed, overwrite, export_hf })
    }

    /// Where the training begins.
    fn begin(&self) -> Position {
        self.resumed.as_ref().map_or_else(Position::default, |resumed| resumed.at)
    }

    /// Prepares the places to write to, which is the business of the first rank.
    fn make_room(&self) -> Result<Progress> {
        let job = &self.job;
        std::fs::create_dir_all(&job.out).map_err(|error| unwritable("output directory", &job.out, &error))?;
        let log = match &job.log {
            Some(path) => {
                let (append, mut open) = (self.resumed.is_some(), OpenOptions::new());
                let opened = open.create(true).write(true).append(append).truncate(!append).open(path);
                Some((path.clone(), BufWriter::new(opened.map_err(|error| unwritable("log", path, &error))?)))
            }
            None => None,
        };
        checkpoints::make_way(&job.out, self.begin().step, self.overwrite)?;
        saved::describe(&job.out, &job.config, &self.tokens.coding)?;
        let from = self.resumed.as_ref().and_then(Resumed::out);
        let history = History::begin(&job.out, from, self.begin().step)?;
        Ok(Progress::new(job.steps, log, history))
    }
}

/// The program of every rank.
fn work(world: &World, plan: &Plan) -> Result<Outcome> {
    let Plan { job, tokens, prompt, resumed, export_hf: exported, .. } = plan;
    WORLD.get_or_init(|| world.clone());
    let mut at = plan.begin();
    // Processes have read them one by one.
    world.agree(
        "step, batches, steps, seed and text",
        &[at.step, at.batches, job.steps, job.seed, tokens.fingerprint()],
    )?;
    let progress = world.first(|| plan.make_room())?;
    // What the first rank cannot write ends the training on all ranks.
    let tell = |write: &dyn Fn(&Progress) -> Result<()>| world.first(|| progress.iter().try_for_each(write)).map(drop);
    let say = |line: &dyn Fn() -> String| progress.iter().for_each(|progress| progress.say(&line()));
    if let Some(search) = &job.search {
        let (best, tried) = (&search.tried[0].name, search.tried.len());
        say(&|| format!("plan `{best}`, the cheapest of {tried} that were tried"));
    }
    let mesh = world.device_mesh(job.mesh.clone())?;
    let optimizer = (job.groups.clone(), job.schedule);
    let mut trainer = Trainer::new(&job.config, &job.plan, &mesh, (job.dtype, job.seed), optimizer, job.clip)?;
    if let Some(resumed) = resumed {
        resumed.load(world, &mut trainer, job)?;
    }
    let mut saver = Saver::new(world, job);
    let length = job.config.seq_len();
    let parameters = trainer.model.parameter_count();
    let unigram_entropy = tokens.unigram_entropy();
    say(&|| {
        format!(
            "{parameters} parameters on {}, {} tokens to learn from; guessing by frequency gives a loss of {unigram_entropy:.3}",
            job.mesh,
            tokens.counts().0,
        )
    });
    let nothing_left = at.step >= job.steps;
    if nothing_left {
        let (step, steps) = (at.step, job.steps);
        say(&|| {
            format!("nothing left to train: the checkpoint is at step {step} of {steps}; ask for more with --steps")
        });
    } else if resumed.is_some() {
        say(&|| format!("goes on after step {} of {}", at.step, job.steps));
    }
    let held_out = tokens.held_out(EVALUATED, job.batch, length);
    let evaluate = |trainer: &Trainer| -> Result<f64> {
        let losses = held_out.iter().map(|batch| trainer.evaluate(batch)).collect::<Result<Vec<_>>>()?;
        Ok(losses.iter().sum::<f64>() / losses.len() as f64)
    };
    let sample = |trainer: &Trainer| -> Result<String> {
        let choice = Choice { temperature: 0.8, top: 50, seed: job.seed };
        let made = continued(&*trainer.model, &mesh, length, prompt, job.sample_tokens, choice)?;
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
        let lr = job.schedule.lr(at.step, job.groups[0].lr);
        at = Position { step: at.step + 1, batches: at.batches + job.accumulate as u64 };
        let step = at.step;
        in_steps += seconds;
        communicating += communication;
        losses.push((step, stepped.loss));
        report = Some(made);
        tell(&|progress| {
            if !stepped.loss.is_finite() {
                let found = format!("a loss of {} in step {step}", stepped.loss);
                let fix = "use a smaller learning rate, clipping, or f32";
                return Err(Error::invalid("training", found, "a finite number", fix));
            }
            let count = job.batch * job.accumulate * length;
            progress.step(&Step {
                step,
                loss: stepped.loss,
                grad_norm: stepped.norm,
                lr,
                ms: seconds * 1e3,
                tokens_per_s: count as f64 / seconds,
                communication: communication / seconds,
            })
        })?;
        if is_due(step, job.eval_every) && step < job.steps {
            let loss = evaluate(&trainer)?;
            evaluated.push((step, loss));
            tell(&|progress| progress.evaluation(step, loss))?;
        }
        if is_due(step, job.save_every) {
            saver.save(&trainer, job, at)?;
        }
        if is_due(step, job.sample_every) && step < job.steps {
            let text = sample(&trainer)?;
            say(&|| format!("step {step}: {text:?}"));
        }
    }
    let step = at.step;
    saver.end(&trainer, job, at)?;
    evaluated.push((step, evaluate(&trainer)?));
    let text = sample(&trainer)?;
    if let Some(path) = exported {
        export_hf(world, path, &*trainer.model, &job.config)?;
        world.first(|| tokens.coding.write(path))?;
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
    tell(&|progress| {
        progress.evaluation(step, summary.held_out_loss)?;
        let title = format!("{} on {}, loss in nats per token", job.config.name(), job.mesh);
        progress.curve(&summary.curve, &title, unigram_entropy)
    })?;
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
    if json {
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
