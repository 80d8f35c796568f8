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
use shardwise::generate::{Generation, Sampling, UncachedPredictor};
use shardwise::models::export_hf;
use shardwise::prelude::*;
use shardwise::train::TrainingStep;

use super::checkpoints::{self, ResumePoint, Saver, cannot_write};
use super::data::{BatchShape, TOKENIZER, TokenizedText};
use super::history::LossHistory;
use super::model_dir;
use super::progress::{Progress, StepLog};
use super::settings::TrainJob;
use super::trainer::{TrainerConfig, TrainingRun};

/// The summary of a run, as `--json` prints it.
#[derive(Serialize, Clone)]
pub(super) struct RunSummary {
    pub(super) steps: u64,
    /// Whether it was interrupted before the last step.
    pub(super) stopped: bool,
    pub(super) parameters: usize,
    /// Mean over the last tenth of the steps, at most 20: single batches are noisy. None if no step was left to run.
    pub(super) loss: Option<f64>,
    /// On held-out text.
    pub(super) held_out_loss: f64,
    /// Loss of predicting by token frequency alone.
    pub(super) unigram_entropy: f64,
    pub(super) tokens_per_s: f64,
    /// Fraction of the time that rank 0 spent in collectives, waiting included.
    pub(super) communication: f64,
    pub(super) seconds: f64,
    pub(super) sample: String,
    pub(super) model: PathBuf,
    /// The latest one.
    pub(super) checkpoint: PathBuf,
    pub(super) curve: PathBuf,
}

/// The checked inputs of a run.
pub(super) struct PreparedRun {
    pub(super) job: TrainJob,
    pub(super) tokens: TokenizedText,
    /// The prompt of the samples.
    pub(super) prompt: Vec<u32>,
    pub(super) resumed: Option<ResumePoint>,
    pub(super) overwrite: bool,
    pub(super) export_hf: Option<PathBuf>,
}

/// The results of rank 0.
pub(super) struct RunOutcome {
    pub(super) summary: RunSummary,
    pub(super) report: CommReport,
}

/// Batches per evaluation: enough to compare steps, few enough not to slow down a small run.
const EVAL_BATCHES: usize = 4;

/// Set by Ctrl-C.
pub(super) static STOP: AtomicBool = AtomicBool::new(false);

/// The world, once the ranks run: the Ctrl-C handler aborts it.
pub(super) static WORLD: OnceLock<World> = OnceLock::new();

impl PreparedRun {
    /// The number of steps that are already done.
    fn first_step(&self) -> u64 {
        self.resumed.as_ref().map_or(0, |resumed| resumed.step)
    }

    /// Creates the output directory and opens the files in it. Rank 0 calls it.
    fn open_outputs(&self) -> Result<Progress> {
        let job = &self.job;
        std::fs::create_dir_all(&job.out).map_err(|error| cannot_write("output directory", &job.out, &error))?;
        let log = match &job.log {
            Some(path) => {
                let (append, mut open) = (self.resumed.is_some(), OpenOptions::new());
                let opened = open.create(true).write(true).append(append).truncate(!append).open(path);
                Some((path.clone(), BufWriter::new(opened.map_err(|error| cannot_write("log", path, &error))?)))
            }
            None => None,
        };
        checkpoints::clear_later_checkpoints(&job.out, self.first_step(), self.overwrite)?;
        model_dir::write_info(&job.out, &job.config, &self.tokens.tokenizer)?;
        let from = self.resumed.as_ref().and_then(ResumePoint::out);
        let history = LossHistory::begin(&job.out, from, self.first_step())?;
        Ok(Progress::new(job.steps, log, history))
    }
}

/// Trains on this rank. Collective.
pub(super) fn train_on_rank(world: &World, prepared: &PreparedRun) -> Result<RunOutcome> {
    WORLD.get_or_init(|| world.clone());
    let mut run = RankRun::new(world, prepared)?;
    run.announce();
    while run.training.step < prepared.job.steps && !any_rank_stops(world)? {
        run.step()?;
    }
    run.finish()
}

/// The run on this rank.
struct RankRun<'a> {
    world: &'a World,
    prepared: &'a PreparedRun,
    training: TrainingRun,
    held_out: Batches<TokenSequences>,
    saver: Saver<'a>,
    /// On rank 0.
    progress: Option<Progress>,
    /// Whether the data differ from those of the checkpoint, so that batches start over.
    other_data: bool,
    /// Losses of the steps since the start or the resume.
    losses: Vec<f64>,
    /// The collectives of the last step.
    report: Option<CommReport>,
    seconds: f64,
    /// Seconds in collectives.
    communicating: f64,
}

impl<'a> RankRun<'a> {
    /// Builds the model on its mesh and loads the checkpoint to resume from. Collective.
    fn new(world: &'a World, prepared: &'a PreparedRun) -> Result<Self> {
        let PreparedRun { job, tokens, resumed, .. } = prepared;
        // Every process has read these by itself.
        let numbers = [prepared.first_step(), job.steps, job.seed, tokens.fingerprint()];
        world.agree("step, steps, seed and text", &numbers)?;
        let progress = world.on_first_rank(|| prepared.open_outputs())?;
        let mesh = world.device_mesh(job.mesh.clone())?;
        let recipe = TrainerConfig {
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
        Ok(RankRun {
            world,
            prepared,
            training: run,
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

    fn job(&self) -> &'a TrainJob {
        &self.prepared.job
    }

    /// Prints a line on rank 0.
    fn print_line(&self, line: &dyn Fn() -> String) {
        self.progress.iter().for_each(|progress| progress.print_line(&line()));
    }

    /// Writes to a file on rank 0; a failure is an error on all ranks.
    fn write(&self, write: &dyn Fn(&Progress) -> Result<()>) -> Result<()> {
        self.world.on_first_rank(|| self.progress.iter().try_for_each(write)).map(drop)
    }

    /// Prints what is about to run.
    fn announce(&self) {
        let (job, tokens, step) = (self.job(), &self.prepared.tokens, self.training.step);
        if let Some(search) = &job.search {
            let (best, tried) = (&search.trials[0].name, search.trials.len());
            self.print_line(&|| format!("plan `{best}`, the fastest of {tried} candidates by estimate"));
        }
        self.print_line(&|| {
            format!(
                "{} parameters on {}, {} training tokens; unigram loss {:.3}",
                self.training.trainer.model.parameter_count(),
                job.mesh,
                tokens.counts().0,
                tokens.unigram_entropy(),
            )
        });
        let steps = job.steps;
        if step >= steps {
            self.print_line(&|| {
                format!("nothing left to train: the checkpoint is at step {step} of {steps}; raise --steps")
            });
        } else if self.prepared.resumed.is_some() {
            self.print_line(&|| format!("resuming after step {step} of {steps}"));
        }
        if self.other_data {
            self.print_line(&|| {
                "the text or the seed differs from the checkpoint: starting with the first batch".into()
            });
        }
    }

    /// Runs one step, and the evaluation, checkpoint and sample that are due after it.
    fn step(&mut self) -> Result<()> {
        let job = self.job();
        let batches = (0..job.accumulate).map(|_| self.training.batches.next_batch()).collect::<Result<Vec<_>>>()?;
        self.world.trace().clear();
        let start = Instant::now();
        let stepped = self.training.trainer.step_on_all(&batches)?;
        let seconds = start.elapsed().as_secs_f64();
        self.training.step += 1;
        self.record(stepped, seconds)?;
        let step = self.training.step;
        let is_due = |every: u64| every > 0 && step.is_multiple_of(every);
        if is_due(job.eval_every) && step < job.steps {
            let loss = self.evaluate()?;
            self.write(&|progress| progress.evaluation(step, loss))?;
        }
        if is_due(job.save_every) {
            self.saver.save(&self.training, job)?;
        }
        if is_due(job.sample_every) && step < job.steps {
            let text = self.sample()?;
            self.print_line(&|| format!("step {step}: {text:?}"));
        }
        Ok(())
    }

    /// Records and logs the result of a step.
    fn record(&mut self, TrainingStep { loss, grad_norm }: TrainingStep, seconds: f64) -> Result<()> {
        let (job, step) = (self.job(), self.training.step);
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
            progress.step(&StepLog {
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

    /// The mean loss on held-out batches, always the same ones.
    fn evaluate(&mut self) -> Result<f64> {
        self.held_out.seek(0);
        let mut sum = 0.0;
        for _ in 0..EVAL_BATCHES {
            sum += self.training.trainer.evaluate(&self.held_out.next_batch()?)?;
        }
        Ok(sum / EVAL_BATCHES as f64)
    }

    /// The prompt and its continuation by the model.
    fn sample(&self) -> Result<String> {
        let (job, prompt) = (self.job(), &self.prepared.prompt);
        let sampling = Sampling::new(0.8).top_k(50).tokens(job.sample_tokens).seed(job.seed);
        let (model, tokenizer) = (&*self.training.trainer.model, &self.prepared.tokens.tokenizer);
        let predictor = UncachedPredictor::new(model, job.config.vocab_size(), job.config.seq_len())?;
        let continuation =
            Generation::new(predictor, tokenizer, std::slice::from_ref(prompt), sampling)?.collect_padded()?;
        tokenizer.decode_with_special(&[&prompt[..], &continuation[0]].concat())
    }

    /// Saves the last checkpoint, evaluates, and exports the model.
    fn finish(mut self) -> Result<RunOutcome> {
        let (job, tokens) = (self.job(), &self.prepared.tokens);
        self.saver.end(&self.training, job)?;
        let held_out_loss = self.evaluate()?;
        let sample = self.sample()?;
        if let Some(path) = &self.prepared.export_hf {
            export_hf(self.world, path, &self.training.trainer.model, &job.config)?;
            self.world.on_first_rank(|| tokens.tokenizer.write(path.join(TOKENIZER)))?;
        }
        let summary = self.summary(held_out_loss, sample);
        self.write(&|progress| {
            progress.evaluation(summary.steps, held_out_loss)?;
            let title = format!("{} on {}, loss in nats per token", job.config.name(), job.mesh);
            progress.curve(&summary.curve, &title, summary.unigram_entropy)
        })?;
        Ok(RunOutcome { summary, report: self.report.unwrap_or(CommReport(Vec::new())) })
    }

    fn summary(&self, held_out_loss: f64, sample: String) -> RunSummary {
        let (job, steps, losses) = (self.job(), self.training.step, &self.losses);
        let tail = (losses.len() / 10).clamp(1, 20);
        let seconds = f64::max(self.seconds, 1e-9);
        RunSummary {
            steps,
            stopped: steps < job.steps,
            parameters: self.training.trainer.model.parameter_count(),
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

/// Whether any rank has received Ctrl-C. Collective: all ranks get the same answer.
fn any_rank_stops(world: &World) -> Result<bool> {
    let seen = Tensor::new(u8::from(STOP.load(Relaxed)), &Device::Cpu)?;
    Ok(world.all_reduce(&seen, ReduceOp::Max)?.to_scalar::<u8>()? > 0)
}
