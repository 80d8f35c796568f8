//! Live view or lines, log, events and loss history of a run.

use std::cell::RefCell;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use shardwise::Result;
use shardwise::train::EarlyStopping;

use super::checkpoints::cannot_write;
use super::curve::Curves;
use super::history::LossHistory;
use super::model_dir::write;
use super::output_lock::OutputLock;
use super::step_log::StepLog;
use super::tensorboard::EventFile;
use super::view::LiveView;

/// The view on standard error, the log, the events and the loss history. Exists on rank 0 only.
pub(super) struct Progress {
    steps: u64,
    /// None if standard error is not a terminal, or lines were asked for.
    view: RefCell<Option<LiveView>>,
    log: RefCell<Option<(PathBuf, BufWriter<File>)>>,
    events: RefCell<Option<EventFile>>,
    /// None if nothing is left to train: then nothing is written.
    history: RefCell<Option<LossHistory>>,
    /// Times of the steps since the start or the resume, of all ranks.
    times: RefCell<Vec<(u64, Vec<f64>)>>,
    _lock: OutputLock,
}

/// How many lines a run prints where it shows no view.
const LINES: u64 = 10;

impl Progress {
    pub(super) fn new(
        steps: u64,
        view: Option<LiveView>,
        log: Option<(PathBuf, BufWriter<File>)>,
        events: Option<EventFile>,
        (history, lock): (Option<LossHistory>, OutputLock),
    ) -> Self {
        let (view, log, events, history) =
            (RefCell::new(view), RefCell::new(log), RefCell::new(events), RefCell::new(history));
        Progress { steps, view, log, events, history, times: RefCell::default(), _lock: lock }
    }

    /// Prints a line on standard error.
    pub(super) fn print_line(&self, line: &str) {
        match &mut *self.view.borrow_mut() {
            Some(view) => view.print_line(line),
            // Training continues if standard error is closed.
            None => drop(writeln!(std::io::stderr(), "{line}")),
        }
    }

    pub(super) fn step(&self, step: &StepLog) -> Result<()> {
        match &mut *self.view.borrow_mut() {
            Some(view) => view.step(step),
            None if step.step.is_multiple_of((self.steps / LINES).max(1)) => {
                let StepLog { step, loss, tokens_per_s, waiting, .. } = step;
                let share = waiting * 100.0;
                let line = format!("step {step}: loss {loss:.3}, {tokens_per_s:.0} tokens/s, waiting {share:.0} %");
                drop(writeln!(std::io::stderr(), "{line}"));
            }
            None => {}
        }
        self.times.borrow_mut().push((step.step, step.ranks.iter().map(|rank| rank.ms).collect()));
        self.history.borrow_mut().as_mut().map_or(Ok(()), |history| history.trained(step.step, step.loss))?;
        let mut scalars = vec![
            ("loss/train".to_string(), step.loss),
            ("lr".to_string(), step.lr),
            ("tokens_per_s".to_string(), step.tokens_per_s),
            ("communication".to_string(), step.communication),
            ("waiting".to_string(), step.waiting),
        ];
        scalars.extend(step.grad_norm.map(|norm| ("grad_norm".to_string(), norm)));
        for (rank, log) in step.ranks.iter().enumerate() {
            scalars.push((format!("step_ms/rank_{rank}"), log.ms));
            scalars.push((format!("memory_bytes/rank_{rank}"), log.memory_bytes as f64));
        }
        self.events(step.step, &scalars)?;
        self.log(step)
    }

    /// Records the losses on the sets to evaluate on, with their names. The first one is in the curve.
    pub(super) fn evaluation(&self, step: u64, losses: &[(String, f64)]) -> Result<()> {
        let first = losses[0].1;
        self.view.borrow_mut().iter_mut().for_each(|view| view.held_out(first));
        let mut entry = serde_json::json!({ "step": step, "held_out_loss": first });
        let mut scalars = vec![("loss/held_out".to_string(), first)];
        if let [_] = losses {
            self.print_line(&format!("step {step}: held-out loss {first:.3}"));
        } else {
            let named = losses.iter().map(|(name, loss)| format!("{name} {loss:.3}")).collect::<Vec<_>>().join(", ");
            self.print_line(&format!("step {step}: held-out losses: {named}"));
            let entries = losses.iter().map(|(name, loss)| (name.clone(), serde_json::json!(loss)));
            entry["eval_losses"] = entries.collect::<serde_json::Map<_, _>>().into();
            scalars.extend(losses.iter().map(|(name, loss)| (format!("loss/eval/{name}"), *loss)));
        }
        self.history.borrow_mut().as_mut().map_or(Ok(()), |history| history.held_out(step, first))?;
        self.events(step, &scalars)?;
        self.log(&entry)
    }

    /// Whether the held-out loss has not improved for long enough to stop.
    pub(super) fn has_converged(&self, stopping: EarlyStopping) -> bool {
        let history = self.history.borrow();
        let losses = history.iter().flat_map(|history| &history.losses.held_out);
        stopping.has_converged(losses.map(|(_, loss)| *loss))
    }

    fn events(&self, step: u64, scalars: &[(String, f64)]) -> Result<()> {
        self.events.borrow_mut().as_mut().map_or(Ok(()), |events| events.scalars(step, scalars))
    }

    /// Draws the losses, including those before a resume.
    pub(super) fn curve(&self, path: &Path, title: &str, unigram: f64, log: bool) -> Result<()> {
        let (history, times) = (self.history.borrow(), &self.times.borrow());
        let Some(LossHistory { losses, .. }) = &*history else { return Ok(()) };
        let curves = Curves { losses: &losses.trained, held_out: &losses.held_out, unigram, times };
        write(path, curves.svg(title, log))
    }

    fn log(&self, entry: &impl Serialize) -> Result<()> {
        if let Some((path, log)) = &mut *self.log.borrow_mut() {
            let text = serde_json::to_string(entry).map_err(shardwise::Error::other)?;
            writeln!(log, "{text}").and_then(|()| log.flush()).map_err(|error| cannot_write("log", path, &error))?;
        }
        Ok(())
    }
}
