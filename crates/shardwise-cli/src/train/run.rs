//! A training run, as every rank executes it.

use shardwise::error::ErrorKind;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use candle_core::{Device, Tensor};
use serde::Serialize;
use shardwise::comm::{CommReport, Profile};
use shardwise::data::Batches;
use shardwise::generate::{CachedPredictor, Generation};
use shardwise::models::{export_hf_with_tokenizer, save_adapter};
use shardwise::prelude::*;
use shardwise::report::{RunReport, page};
use shardwise::train::TrainingStep;

use super::checkpoints::{self, ResumePoint, ResumedFrom, Saver, is_same};
use super::data::{BatchShape, TextData, TokenizedText};
use super::history::LossHistory;
use super::model_dir;
use super::output_lock::OutputLock;
use super::progress::Progress;
use super::settings::TrainJob;
use super::step_log::{self, RankLog, StepLog};
use super::tensorboard::EventFile;
use super::trainer::{TrainerConfig, TrainingRun};
use super::view::LiveView;
use crate::report::REPORT_FILE;

/// The summary of a run, as `--json` prints it.
#[derive(Serialize, Clone)]
pub(super) struct RunSummary {
    pub(super) steps: u64,
    /// Whether it was interrupted before the last step.
    pub(super) stopped: bool,
    pub(super) parameters: usize,
    /// Mean over the last tenth of the steps, at most 20: single batches are noisy. None if no step was left to run.
    pub(super) loss: Option<f64>,
    /// On held-out text, or on the first set of `--eval-data`.
    pub(super) held_out_loss: f64,
    /// By name, if there are several sets to evaluate on.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) eval_losses: BTreeMap<String, f64>,
    /// Loss of predicting only by token frequency.
    pub(super) unigram_entropy: f64,
    pub(super) tokens_per_s: f64,
    /// Floating-point operations of all ranks per second, as 6 per trained parameter and token and 4 per frozen one.
    pub(super) flops_per_s: f64,
    /// The same as a fraction of what the cores of this machine reach in registers; none under a launcher, whose hosts may differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) utilization: Option<f64>,
    /// The largest memory of tensors that a rank had.
    pub(super) peak_bytes: usize,
    /// Fraction of the time that rank 0 spent in collectives, waiting included.
    pub(super) communication: f64,
    pub(super) seconds: f64,
    pub(super) sample: String,
    pub(super) model: PathBuf,
    /// The latest one.
    pub(super) checkpoint: PathBuf,
    /// Of a run with `--lora`, in the form of PEFT.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) adapter: Option<PathBuf>,
    pub(super) curve: PathBuf,
    /// The page of `--report FILE`, if a step was profiled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) page: Option<PathBuf>,
    /// The directory of `--tensorboard`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tensorboard: Option<PathBuf>,
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
    pub(super) outputs: RunOutputs,
}

/// What a run shows and writes in addition to its checkpoints.
pub(super) struct RunOutputs {
    /// The page of `--report`.
    pub(super) page: Option<PathBuf>,
    /// Lines in place of the view.
    pub(super) plain: bool,
    /// Whether the axis of the loss curve is logarithmic.
    pub(super) log_curve: bool,
    /// Directory of events.
    pub(super) tensorboard: Option<PathBuf>,
}

/// The results of rank 0.
pub(super) struct RunOutcome {
    pub(super) summary: RunSummary,
    pub(super) report: CommReport,
}

/// Batches per evaluation: enough to compare steps, few enough not to slow down a small run.
const EVAL_BATCHES: usize = 4;

/// Whether the model is built and the outputs are open: what fails before is a mistake in the options.
pub(super) static HAS_BEGUN: AtomicBool = AtomicBool::new(false);

/// Set by Ctrl-C.
pub(super) static STOP: AtomicBool = AtomicBool::new(false);

/// The world, once the ranks run: the Ctrl-C handler aborts it.
pub(super) static WORLD: OnceLock<World> = OnceLock::new();

impl PreparedRun {
    /// The number of steps that are already done in the checkpoint to resume from.
    pub(super) fn first_step(&self) -> u64 {
        self.resumed.as_ref().map_or(0, |resumed| resumed.step)
    }

    /// Creates and locks the output directory. Rank 0 calls it.
    fn lock_output(&self) -> Result<OutputLock> {
        let lock = OutputLock::take(&self.job.out)?;
        self.job.log.as_deref().map_or(Ok(()), step_log::check_log)?;
        checkpoints::create_directory(&self.job.out)?;
        Ok(lock)
    }

    /// Opens the files in the output directory, after `step` steps. Rank 0 calls it.
    fn open_outputs(&self, lock: OutputLock, step: u64, from: Option<&ResumedFrom>, is_over: bool) -> Result<Progress> {
        let job = &self.job;
        let title = format!("{} on {}, {}", job.config.name(), job.mesh, job.plan_name);
        let view = if self.outputs.plain { None } else { LiveView::new(&title, job.steps) };
        if is_over {
            return Ok(Progress::new(job.steps, view, None, None, (None, lock)));
        }
        let skipped = from.map_or(&[][..], |from| &from.skipped);
        checkpoints::clear_later_checkpoints(&job.out, step, skipped, self.overwrite)?;
        let log = match &job.log {
            Some(path) => Some((path.clone(), step_log::open_log(path, from.map(|_| step))?)),
            None => None,
        };
        model_dir::write_info(&job.out, job, &self.tokens.files)?;
        let from = self.resumed.as_ref().and_then(ResumePoint::out);
        let history = LossHistory::begin(&job.out, from, step)?;
        let events = self.outputs.tensorboard.as_deref().map(EventFile::create).transpose()?;
        Ok(Progress::new(job.steps, view, log, events, (Some(history), lock)))
    }
}

/// Trains on this rank. Collective.
pub(super) fn train_on_rank(world: &World, prepared: &PreparedRun) -> Result<RunOutcome> {
    WORLD.get_or_init(|| world.clone());
    let mut run = RankRun::new(world, prepared)?;
    HAS_BEGUN.store(true, Relaxed);
    run.announce();
    run.stops = is_on_any_rank(world, STOP.load(Relaxed))?;
    while run.training.step < prepared.job.steps && !run.stops {
        run.step()?;
    }
    run.finish()
}

/// The run on this rank.
struct RankRun<'a> {
    world: &'a World,
    prepared: &'a PreparedRun,
    training: TrainingRun,
    /// The sets to evaluate on.
    held_out: Vec<(String, Batches<TextData>)>,
    saver: Saver<'a>,
    /// On rank 0.
    progress: Option<Progress>,
    from: Option<ResumedFrom>,
    /// Whether the run continues a finished one: then it changes nothing in the output directory.
    is_over: bool,
    /// Losses of the steps since the start or the resume.
    losses: Vec<f64>,
    /// The collectives of the last step.
    report: Option<CommReport>,
    /// The largest memory of a rank.
    peak_bytes: usize,
    seconds: f64,
    /// Seconds in collectives.
    communicating: f64,
    /// Whether a rank has received Ctrl-C.
    stops: bool,
}

impl<'a> RankRun<'a> {
    /// Builds the model on its mesh and loads the checkpoint to resume from. Collective.
    fn new(world: &'a World, prepared: &'a PreparedRun) -> Result<Self> {
        let PreparedRun { job, tokens, resumed, .. } = prepared;
        // Every process has read these by itself.
        let numbers = [prepared.first_step(), job.steps, job.seed, tokens.fingerprint()];
        world.agree("step, steps, seed and text", &numbers)?;
        let lock = world.on_first_rank(|| prepared.lock_output())?;
        let mesh = world.device_mesh(job.mesh.clone())?;
        let recipe = TrainerConfig {
            config: &job.config,
            // A checkpoint has all weights.
            init: job.init.as_deref().filter(|_| resumed.is_none()),
            lora: job.lora.as_ref(),
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
        let from = resumed.as_ref().map(|resumed| resumed.load(world, &mut run, job)).transpose()?;
        let is_here = |from: &ResumedFrom| is_same(&from.path, &checkpoints::series(&job.out).path(run.step));
        // Rank 0 decides for all: other hosts may see files of a shared disk later.
        let is_over = run.step >= job.steps && world.rank() == 0 && from.as_ref().is_some_and(is_here);
        let is_over = is_on_any_rank(world, is_over)?;
        let open = || lock.map(|lock| prepared.open_outputs(lock, run.step, from.as_ref(), is_over)).transpose();
        let progress = world.on_first_rank(open)?.flatten();
        Ok(RankRun {
            world,
            prepared,
            training: run,
            held_out,
            saver: Saver::new(world, job),
            progress,
            from,
            is_over,
            losses: Vec::new(),
            report: None,
            peak_bytes: 0,
            seconds: 0.0,
            communicating: 0.0,
            stops: false,
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
        let skipped = self.from.iter().flat_map(|from| &from.skipped);
        skipped.for_each(|skipped| self.print_line(&|| skipped.to_string()));
        if step >= steps {
            self.print_line(&|| {
                format!("nothing left to train: the checkpoint is at step {step} of {steps}; raise --steps")
            });
        } else if self.prepared.resumed.is_some() {
            self.print_line(&|| format!("resuming after step {step} of {steps}"));
        }
        if self.from.as_ref().is_some_and(|from| from.other_data) {
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
        let (stepped, profile) = match self.is_profiled() {
            true => {
                let trainer = &mut self.training.trainer;
                let (stepped, profile) = self.world.profile(|| trainer.step_on_all(&batches))?;
                (stepped, Some(profile))
            }
            false => (self.training.trainer.step_on_all(&batches)?, None),
        };
        let seconds = start.elapsed().as_secs_f64();
        self.training.step += 1;
        self.record(stepped, seconds)?;
        if let Some(profile) = profile {
            self.write_page(&profile)?;
        }
        let step = self.training.step;
        let is_due = |every: u64| every > 0 && step.is_multiple_of(every);
        if is_due(job.eval_every) && step < job.steps {
            let losses = self.evaluate()?;
            self.write(&|progress| progress.evaluation(step, &losses))?;
            self.stops |= self.has_converged()?;
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

    /// Whether the next step is the one that `--report` shows: the third one, because the first ones allocate state and fill caches.
    fn is_profiled(&self) -> bool {
        let left = self.job().steps - self.training.step;
        self.prepared.outputs.page.is_some() && (self.losses.len() == 2 || self.losses.len() < 2 && left == 1)
    }

    /// Writes the page of a profiled step. Collective.
    fn write_page(&self, profile: &Profile) -> Result<()> {
        let (job, mesh) = (self.job(), &self.training.mesh);
        let title = format!("{} on {}, {}, step {}", job.config.name(), job.mesh, job.plan_name, self.training.step);
        let report = RunReport::new(&title, mesh, &self.training.trainer.model, profile)?.gather(self.world)?;
        self.world
            .on_first_rank(|| {
                let (Some(report), Some(path)) = (&report, &self.prepared.outputs.page) else { return Ok(()) };
                let stored = serde_json::to_string(report).map_err(Error::other)?;
                model_dir::write(&job.out.join(REPORT_FILE), stored)?;
                // The page may go to a pipe.
                let written = std::fs::write(path, page(std::slice::from_ref(report), &[]));
                written.map_err(|error| checkpoints::cannot_write("report", path, &error))
            })
            .map(drop)
    }

    /// Records and logs the result of a step.
    fn record(&mut self, TrainingStep { loss, grad_norm }: TrainingStep, seconds: f64) -> Result<()> {
        let (job, step) = (self.job(), self.training.step);
        let report = self.world.trace().report();
        let communication: f64 = report.0.iter().map(|(_, _, total)| total.duration.as_secs_f64()).sum();
        let waiting: f64 = report.0.iter().map(|(_, _, total)| total.waiting.as_secs_f64()).sum();
        let ranks = self.exchange_numbers(seconds, waiting)?;
        self.peak_bytes = ranks.iter().map(|rank| rank.peak_bytes).max().unwrap_or(0);
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
                waiting: ranks.iter().map(|rank| rank.waiting).sum::<f64>() / ranks.len() as f64,
                ranks: ranks.clone(),
            })
        })
    }

    /// The numbers of all ranks about a step, and whether one of them has received Ctrl-C. Collective: one small all-gather.
    fn exchange_numbers(&mut self, seconds: f64, waiting: f64) -> Result<Vec<RankLog>> {
        let memory = self.world.memory();
        let stops = f64::from(u8::from(STOP.load(Relaxed)));
        let mine = [stops, seconds * 1e3, waiting / seconds, memory.current() as f64, memory.peak() as f64];
        let mine = Tensor::new(&[mine], &Device::Cpu)?;
        let all: Vec<Vec<f64>> = self.world.all_gather(&mine, 0, &vec![1; self.world.size()])?.to_vec2()?;
        self.stops = all.iter().any(|rank| rank[0] > 0.0);
        let log = |rank: &Vec<f64>| RankLog {
            ms: rank[1],
            waiting: rank[2],
            memory_bytes: rank[3] as usize,
            peak_bytes: rank[4] as usize,
        };
        Ok(all.iter().map(log).collect())
    }

    /// The mean loss on batches of every set to evaluate on, always the same ones.
    fn evaluate(&mut self) -> Result<Vec<(String, f64)>> {
        let mut losses = Vec::new();
        for (name, batches) in &mut self.held_out {
            batches.seek(0);
            let mut sum = 0.0;
            for _ in 0..EVAL_BATCHES {
                sum += self.training.trainer.evaluate(&batches.next_batch()?)?;
            }
            losses.push((name.clone(), sum / EVAL_BATCHES as f64));
        }
        Ok(losses)
    }

    /// Whether the loss on the first set has not improved for as many evaluations as were asked for, before a resume included.
    /// Collective.
    fn has_converged(&self) -> Result<bool> {
        let Some(stopping) = self.job().patience else { return Ok(false) };
        let has_converged = self.progress.as_ref().is_some_and(|progress| progress.has_converged(stopping));
        let has_converged = is_on_any_rank(self.world, has_converged)?;
        if has_converged {
            self.print_line(&|| format!("step {}: the loss has not improved, stopping", self.training.step));
        }
        Ok(has_converged)
    }

    /// The prompt and its continuation by the model.
    fn sample(&self) -> Result<String> {
        let (job, prompt) = (self.job(), &self.prepared.prompt);
        let sampling = model_dir::usual_sampling().tokens(job.sample_tokens).seed(job.seed);
        let (model, tokenizer) = (&self.training.trainer.model, &self.prepared.tokens.tokenizer);
        let predictor = CachedPredictor::new(model)?.forgetful();
        let continuation =
            Generation::new(predictor, tokenizer, std::slice::from_ref(prompt), sampling)?.collect_padded()?;
        tokenizer.decode_with_special(&[&prompt[..], &continuation[0]].concat())
    }

    /// Saves the last checkpoint, evaluates, and exports the model.
    fn finish(mut self) -> Result<RunOutcome> {
        let (job, tokens) = (self.job(), &self.prepared.tokens);
        if !self.is_over {
            self.saver.end(&self.training, job)?;
        }
        let losses = self.evaluate()?;
        let sample = self.sample()?;
        let model = &self.training.trainer.model;
        if let (Some(settings), Some(init), false) = (&job.lora, &job.init, self.is_over) {
            save_adapter(self.world, job.adapter(), model, &settings.lora, &init.to_string_lossy())?;
        }
        let files = model_dir::text_files(job, &tokens.files);
        // With adapters the weights are those of `--init`.
        if job.lora.is_none() && !self.is_over {
            export_hf_with_tokenizer(self.world, model_dir::export_of(&job.out), model, &job.config, &files)?;
        }
        if let Some(path) = &self.prepared.export_hf {
            if let Some(settings) = &job.lora {
                settings.lora.merge(model)?;
            }
            export_hf_with_tokenizer(self.world, path, model, &job.config, &files)?;
        }
        let summary = self.summary(&losses, sample);
        self.write(&|progress| {
            progress.evaluation(summary.steps, &losses)?;
            let title = format!("{} on {}, loss in nats per token", job.config.name(), job.mesh);
            progress.curve(&summary.curve, &title, summary.unigram_entropy, self.prepared.outputs.log_curve)
        })?;
        Ok(RunOutcome { summary, report: self.report.unwrap_or(CommReport(Vec::new())) })
    }

    fn summary(&self, evaluated: &[(String, f64)], sample: String) -> RunSummary {
        let (job, steps, losses) = (self.job(), self.training.step, &self.losses);
        let outputs = &self.prepared.outputs;
        let tail = (losses.len() / 10).clamp(1, 20);
        let seconds = f64::max(self.seconds, 1e-9);
        let tokens_per_s = (losses.len() * job.tokens_per_step()) as f64 / seconds;
        let model = &self.training.trainer.model;
        let trained: usize =
            model.trainable_parameters().iter().map(|(_, param)| param.shape().iter().product::<usize>()).sum();
        let all = model.parameter_count();
        // Forward 2, gradients of activations 2, gradients of weights 2.
        let flops_per_s = tokens_per_s * (6 * trained + 4 * all.saturating_sub(trained)) as f64;
        RunSummary {
            steps,
            stopped: steps < job.steps,
            parameters: all,
            loss: (!losses.is_empty()).then(|| losses.iter().rev().take(tail).sum::<f64>() / tail as f64),
            held_out_loss: evaluated[0].1,
            eval_losses: if evaluated.len() > 1 { evaluated.iter().cloned().collect() } else { BTreeMap::new() },
            unigram_entropy: self.prepared.tokens.unigram_entropy(),
            tokens_per_s,
            flops_per_s,
            utilization: None,
            peak_bytes: self.peak_bytes,
            communication: self.communicating / seconds,
            seconds: self.seconds,
            sample,
            model: job.out.clone(),
            checkpoint: checkpoints::series(&job.out).path(steps),
            adapter: job.lora.as_ref().map(|_| job.adapter()),
            curve: job.out.join("loss.svg"),
            page: outputs.page.clone().filter(|_| !losses.is_empty()),
            tensorboard: outputs.tensorboard.clone(),
        }
    }
}

/// Whether any rank says yes. Collective: all ranks get the same answer.
fn is_on_any_rank(world: &World, mine: bool) -> Result<bool> {
    let mine = Tensor::new(u8::from(mine), &Device::Cpu)?;
    Ok(world.all_reduce(&mine, ReduceOp::Max)?.to_scalar::<u8>()? > 0)
}
