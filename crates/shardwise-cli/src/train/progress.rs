//! What is shown and logged while a model is trained.

use std::cell::RefCell;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use shardwise::Result;

use super::checkpoints::unwritable;
use super::curve;
use super::history::History;
use super::saved::write;

/// One step, as it is logged.
#[derive(Serialize)]
pub(super) struct Step {
    /// Counted from 1.
    pub(super) step: u64,
    pub(super) loss: f64,
    /// Of all gradients before clipping; nothing if they are not clipped.
    pub(super) grad_norm: Option<f64>,
    pub(super) lr: f64,
    pub(super) ms: f64,
    pub(super) tokens_per_s: f64,
    /// Part of the time in communication.
    pub(super) communication: f64,
}

/// The bar on the standard error, the log and the history. The first rank has one.
pub(super) struct Progress {
    bar: ProgressBar,
    log: RefCell<Option<(PathBuf, BufWriter<File>)>>,
    history: RefCell<History>,
}

impl Progress {
    pub(super) fn new(steps: u64, log: Option<(PathBuf, BufWriter<File>)>, history: History) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} eta {eta}").expect("a valid template");
        bar.set_style(style);
        Progress { bar, log: RefCell::new(log), history: RefCell::new(history) }
    }

    /// A line of text on the standard error.
    pub(super) fn say(&self, line: &str) {
        // Training goes on when nobody listens any more.
        self.bar.suspend(|| drop(writeln!(std::io::stderr(), "{line}")));
    }

    pub(super) fn step(&self, step: &Step) -> Result<()> {
        let share = step.communication * 100.0;
        self.bar.set_message(format!("loss {:.3} {:.0} tokens/s comm {share:.0}%", step.loss, step.tokens_per_s));
        self.bar.set_position(step.step);
        self.history.borrow_mut().trained(step.step, step.loss)?;
        self.log(step)
    }

    pub(super) fn evaluation(&self, step: u64, loss: f64) -> Result<()> {
        self.say(&format!("step {step}: held-out loss {loss:.3}"));
        self.history.borrow_mut().held_out(step, loss)?;
        self.log(&serde_json::json!({ "step": step, "held_out_loss": loss }))
    }

    /// Draws the losses of the run, and of those that it goes on from.
    pub(super) fn curve(&self, path: &Path, title: &str, unigram_entropy: f64) -> Result<()> {
        let losses = &self.history.borrow().losses;
        write(path, curve::svg(title, &losses.trained, &losses.held_out, unigram_entropy))
    }

    fn log(&self, entry: &impl Serialize) -> Result<()> {
        if let Some((path, log)) = &mut *self.log.borrow_mut() {
            let text = serde_json::to_string(entry).map_err(shardwise::Error::other)?;
            writeln!(log, "{text}").and_then(|()| log.flush()).map_err(|error| unwritable("log", path, &error))?;
        }
        Ok(())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
