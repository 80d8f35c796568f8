//! A training run, as every rank executes it.

use shardwise::error::ErrorKind;
use std::fs::OpenOptions;
use std::io::BufWriter;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use candle_core::{Device, Tensor};
use serde::Serialize;
use shardwise::comm::CommReport;
use shardwise::data::{Batches, TokenSequences};
use shardwise::models::export_hf;
use shardwise::prelude::*;
use shardwise::train::TrainingStep;

use super::checkpoints::{self, Resumed, Saver, unwritable};
use super::data::{BatchShape, Tokens};
use super::history::History;
use super::progress::{Progress, Step};
use super::sample::{Choice, continued};
use super::saved;
use super::settings::Job;
use super::trainer::{Recipe, TrainingRun};

/// What came out.
#[derive(Serialize, Clone)]
pub(super) struct Summary {
    pub(super) steps: u64,
    /// Whether it was interrupted.
    pub(super) stopped: bool,
    pub(super) parameters: usize,
    /// Mean over the last tenth of the steps, at most 20; nothing if there were none left.
    pub(super) loss: Option<f64>,
    /// On held-out text.
    pub(super) held_out_loss: f64,
    /// Of a guess that knows only how frequent tokens are.
    pub(super) unigram_entropy: f64,
    pub(super) tokens_per_s: f64,
    /// Part of the time that the first rank spent in communication, waiting included.
    pub(super) communication: f64,
    pub(super) seconds: f64,
    pub(super) sample: String,
    pub(super) model: PathBuf,
    /// The last one.
    pub(super) checkpoint: PathBuf,
    pub(super) curve: PathBuf,
}

/// Everything a rank knows before it begins.
pub(super) struct Prepared {
    pub(super) job: Job,
    pub(super) tokens: Tokens,
    /// What samples begin with.
    pub(super) prompt: Vec<u32>,
    pub(super) resumed: Option<Resumed>,
    pub(super) overwrite: bool,
    pub(super) export_hf: Option<PathBuf>,
}

/// What the first rank has in the end.
pub(super) struct Outcome {
    pub(super) summary: Summary,
    pub(super) report: CommReport,
}

/// Evaluations use so many batches.
const EVALUATED: usize = 4;

/// Set when the user wants to stop.
pub(super) static STOP: AtomicBool = AtomicBool::new(false);

/// The ranks, once they have begun.
pub(super) static WORLD: OnceLock<World> = OnceLock::new();

impl Prepared {
    /// The step after which the run begins.
    fn first_step(&self) -> u64 {
        self.resumed.as_ref().map_or(0, |resumed| resumed.step)
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
        checkpoints::make_way(&job.out, self.first_step(), self.overwrite)?;
        saved::describe(&job.out, &job.config, &self.tokens.coding)?;
        let from = self.resumed.as_ref().and_then(Resumed::out);
        let history = History::begin(&job.out, from, self.first_step())?;
        Ok(Progress::new(job.steps, log, history))
    }
}

/// The program of every rank.
pub(super) fn work(world: &World, prepared: &Prepared) -> Result<Outcome> {
    WORLD.get_or_init(|| world.clone());
    let mut worker = Worker::new(world, prepared)?;
    worker.announce();
    while worker.run.step < prepared.job.steps && !all_want_to_stop(world)? {
        worker.step()?;
    }
    worker.finish()
}

/// A run on one rank, with what it has seen so far.
struct Worker<'a> {
    world: &'a World,
    prepared: &'a Prepared,
    run: TrainingRun,
    held_out: Batches<TokenSequences>,
    saver: Saver<'a>,
    /// The first rank has one.
    progress: Option<Progress>,
    /// Whether a resumed run draws other data than the one that it goes on from.
    other_data: bool,
    /// Losses of the steps of this run.
    losses: Vec<f64>,
    /// What the last step communicated.
    report: Option<CommReport>,
    seconds: f64,
    /// Of these seconds.
    communicating: f64,
}

impl<'a> Worker<'a> {
    /// Builds the model on its mesh, or restores it.
    fn new(world: &'a World, prepared: &'a Prepared) -> Result<Self> {
        let Prepared { job, tokens, resumed, .. } = prepared;
        // Processes have read them one by one.
        let numbers = [prepared.first_step(), job.steps, job.seed, tokens.fingerprint()];
        world.agree("step, steps, seed and text", &numbers)?;
        let progress = world.on_first_rank(|| prepared.make_room())?;
        let mesh = world.device_mesh(job.mesh.clone())?;
        let recipe = Recipe {
            config: &job.config,
            plan: &job.plan,
            dtype: job.dtype,
            seed: job.seed,
            groups: &job.groups,
            schedule: job.schedule,
            clip: job.clip,
        };
        let shape = BatchShape { sequences: job.batch, length: job.config.seq_len() };
        let (batches, held_out) = (tokens.batches(&mesh, shape, job.seed)?, tokens.held_out(&mesh, shape)?);
        let mut run = TrainingRun { trainer: recipe.build(&mesh)?, mesh, batches, step: 0 };
        let other_data = match resumed {
            Some(resumed) => resumed.load(world, &mut run, job)?,
            None => false,
        };
        Ok(Worker {
            world,
            prepared,
            run,
            held_out,
            saver: Saver::new(world, job),
            progress,
            other_data,
            losses: Vec::new(),
            report: None,
            seconds: 0.0,
            communicating: 0.0,
        })
    }

    fn job(&self) -> &'a Job {
        &self.prepared.job
    }

    /// A line of text, from the first rank.
    fn say(&self, line: &dyn Fn() -> String) {
        self.progress.iter().for_each(|progress| progress.say(&line()));
    }

    /// Something that the first rank writes; if it cannot, the run ends on all ranks.
    fn write(&self, write: &dyn Fn(&Progress) -> Result<()>) -> Result<()> {
        self.world.on_first_rank(|| self.progress.iter().try_for_each(write)).map(drop)
    }

    /// Says what is about to run.
    fn announce(&self) {
        let (job, tokens, step) = (self.job(), &self.prepared.tokens, self.run.step);
        if let Some(search) = &job.search {
            let (best, tried) = (&search.trials[0].name, search.trials.len());
            self.say(&|| format!("plan `{best}`, the cheapest of {tried} that were tried"));
        }
        self.say(&|| {
            format!(
                "{} parameters on {}, {} tokens to learn from; guessing by frequency gives a loss of {:.3}",
                self.run.trainer.model.parameter_count(),
                job.mesh,
                tokens.counts().0,
                tokens.unigram_entropy(),
            )
        });
        let steps = job.steps;
        if step >= steps {
            self.say(&|| {
                format!("nothing left to train: the checkpoint is at step {step} of {steps}; ask for more with --steps")
            });
        } else if self.prepared.resumed.is_some() {
            self.say(&|| format!("goes on after step {step} of {steps}"));
        }
        if self.other_data {
            self.say(&|| "other text or another seed than that of the checkpoint: begins with the first batch".into());
        }
    }

    /// One step, and what is due after it.
    fn step(&mut self) -> Result<()> {
        let job = self.job();
        let batches = (0..job.accumulate).map(|_| self.run.batches.next_batch()).collect::<Result<Vec<_>>>()?;
        self.world.trace().clear();
        let start = Instant::now();
        let stepped = self.run.trainer.step_on_all(&batches)?;
        let seconds = start.elapsed().as_secs_f64();
        self.run.step += 1;
        self.record(stepped, seconds)?;
        let step = self.run.step;
        let is_due = |every: u64| every > 0 && step.is_multiple_of(every);
        if is_due(job.eval_every) && step < job.steps {
            let loss = self.evaluate()?;
            self.write(&|progress| progress.evaluation(step, loss))?;
        }
        if is_due(job.save_every) {
            self.saver.save(&self.run, job)?;
        }
        if is_due(job.sample_every) && step < job.steps {
            let text = self.sample()?;
            self.say(&|| format!("step {step}: {text:?}"));
        }
        Ok(())
    }

    /// Notes and shows what a step reports.
    fn record(&mut self, TrainingStep { loss, grad_norm }: TrainingStep, seconds: f64) -> Result<()> {
        let (job, step) = (self.job(), self.run.step);
        let report = self.world.trace().report();
        let communication: f64 = report.0.iter().map(|(_, _, total)| total.duration.as_secs_f64()).sum();
        self.seconds += seconds;
        self.communicating += communication;
        self.losses.push(loss);
        self.report = Some(report);
        self.write(&|progress| {
            if !loss.is_finite() {
                let found = format!("a loss of {loss} in step {step}");
                let fix = "use a smaller learning rate, clipping, or f32";
                return Err(ErrorKind::Argument.error("training", found, "a finite number", fix));
            }
            progress.step(&Step {
                step,
                loss,
                grad_norm,
                lr: job.schedule.lr(step - 1, job.groups[0].lr),
                ms: seconds * 1e3,
                tokens_per_s: job.tokens_per_step() as f64 / seconds,
                communication: communication / seconds,
            })
        })
    }

    /// The mean loss on the same held-out batches every time.
    fn evaluate(&mut self) -> Result<f64> {
        self.held_out.seek(0);
        let mut sum = 0.0;
        for _ in 0..EVALUATED {
            sum += self.run.trainer.evaluate(&self.held_out.next_batch()?)?;
        }
        Ok(sum / EVALUATED as f64)
    }

    /// The prompt with what the model adds to it.
    fn sample(&self) -> Result<String> {
        let (job, prompt) = (self.job(), &self.prepared.prompt);
        let choice = Choice {
            tokens: job.sample_tokens,
            window: job.config.seq_len(),
            temperature: 0.8,
            top: 50,
            seed: job.seed,
        };
        let added = continued(&*self.run.trainer.model, &self.run.mesh, prompt, choice)?;
        self.prepared.tokens.coding.decode(&[&prompt[..], &added].concat())
    }

    /// Saves, evaluates and exports the model at the end.
    fn finish(mut self) -> Result<Outcome> {
        let (job, tokens) = (self.job(), &self.prepared.tokens);
        self.saver.end(&self.run, job)?;
        let held_out_loss = self.evaluate()?;
        let sample = self.sample()?;
        if let Some(path) = &self.prepared.export_hf {
            export_hf(self.world, path, &self.run.trainer.model, &job.config)?;
            self.world.on_first_rank(|| tokens.coding.write(path))?;
        }
        let summary = self.summary(held_out_loss, sample);
        self.write(&|progress| {
            progress.evaluation(summary.steps, held_out_loss)?;
            let title = format!("{} on {}, loss in nats per token", job.config.name(), job.mesh);
            progress.curve(&summary.curve, &title, summary.unigram_entropy)
        })?;
        Ok(Outcome { summary, report: self.report.unwrap_or(CommReport(Vec::new())) })
    }

    fn summary(&self, held_out_loss: f64, sample: String) -> Summary {
        let (job, steps, losses) = (self.job(), self.run.step, &self.losses);
        let tail = (losses.len() / 10).clamp(1, 20);
        let seconds = f64::max(self.seconds, 1e-9);
        Summary {
            steps,
            stopped: steps < job.steps,
            parameters: self.run.trainer.model.parameter_count(),
            loss: (!losses.is_empty()).then(|| losses.iter().rev().take(tail).sum::<f64>() / tail as f64),
            held_out_loss,
            unigram_entropy: self.prepared.tokens.unigram_entropy(),
            tokens_per_s: (losses.len() * job.tokens_per_step()) as f64 / seconds,
            communication: self.communicating / seconds,
            seconds: self.seconds,
            sample,
            model: job.out.clone(),
            checkpoint: checkpoints::series(&job.out).path(steps),
            curve: job.out.join("loss.svg"),
        }
    }
}

/// Whether any rank has seen that the user wants to stop; the same answer on all of them.
fn all_want_to_stop(world: &World) -> Result<bool> {
    let seen = Tensor::new(u8::from(STOP.load(Relaxed)), &Device::Cpu)?;
    Ok(world.all_reduce(&seen, ReduceOp::Max)?.to_scalar::<u8>()? > 0)
}
