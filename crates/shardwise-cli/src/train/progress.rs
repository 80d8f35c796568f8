//! Progress bar, log and loss history of a run.

use std::cell::RefCell;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use shardwise::Result;

use super::checkpoints::cannot_write;
use super::curve;
use super::history::LossHistory;
use super::model_dir::write;

/// A step in the log.
#[derive(Serialize)]
pub(super) struct StepLog {
    /// Counted from 1.
    pub(super) step: u64,
    pub(super) loss: f64,
    /// Gradient norm before clipping; none without clipping.
    pub(super) grad_norm: Option<f64>,
    pub(super) lr: f64,
    pub(super) ms: f64,
    pub(super) tokens_per_s: f64,
    /// Fraction of the time in collectives.
    pub(super) communication: f64,
}

/// The progress bar on standard error, the log and the loss history. Exists on rank 0 only.
pub(super) struct Progress {
    bar: ProgressBar,
    log: RefCell<Option<(PathBuf, BufWriter<File>)>>,
    history: RefCell<LossHistory>,
}

impl Progress {
    pub(super) fn new(steps: u64, log: Option<(PathBuf, BufWriter<File>)>, history: LossHistory) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} eta {eta}").expect("a valid template");
        bar.set_style(style);
        Progress { bar, log: RefCell::new(log), history: RefCell::new(history) }
    }

    /// Prints a line on standard error.
    pub(super) fn print_line(&self, line: &str) {
        // Training continues if standard error is closed.
        self.bar.suspend(|| drop(writeln!(std::io::stderr(), "{line}")));
    }

    pub(super) fn step(&self, step: &StepLog) -> Result<()> {
        let share = step.communication * 100.0;
        self.bar.set_message(format!("loss {:.3} {:.0} tokens/s comm {share:.0}%", step.loss, step.tokens_per_s));
        self.bar.set_position(step.step);
        self.history.borrow_mut().trained(step.step, step.loss)?;
        self.log(step)
    }

    pub(super) fn evaluation(&self, step: u64, loss: f64) -> Result<()> {
        self.print_line(&format!("step {step}: held-out loss {loss:.3}"));
        self.history.borrow_mut().held_out(step, loss)?;
        self.log(&serde_json::json!({ "step": step, "held_out_loss": loss }))
    }

    /// Draws the losses, including those before a resume.
    pub(super) fn curve(&self, path: &Path, title: &str, unigram_entropy: f64) -> Result<()> {
        let losses = &self.history.borrow().losses;
        write(path, curve::svg(title, &losses.trained, &losses.held_out, unigram_entropy))
    }

    fn log(&self, entry: &impl Serialize) -> Result<()> {
        if let Some((path, log)) = &mut *self.log.borrow_mut() {
            let text = serde_json::to_string(entry).map_err(shardwise::Error::other)?;
            writeln!(log, "{text}").and_then(|()| log.flush()).map_err(|error| cannot_write("log", path, &error))?;
        }
        Ok(())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
