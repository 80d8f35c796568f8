//! What is shown and logged while a model is trained.

use std::cell::RefCell;
use std::fs::File;
use std::io::{BufWriter, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use shardwise::Result;

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

/// The bar on the standard error, and the log. The first rank has one.
pub(super) struct Progress {
    bar: ProgressBar,
    log: RefCell<Option<BufWriter<File>>>,
}

impl Progress {
    pub(super) fn new(steps: u64, log: Option<BufWriter<File>>) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} eta {eta}").expect("a valid template");
        bar.set_style(style);
        Progress { bar, log: RefCell::new(log) }
    }

    /// A line of text on the standard error.
    pub(super) fn say(&self, line: &str) {
        self.bar.suspend(|| eprintln!("{line}"));
    }

    pub(super) fn step(&self, step: &Step) -> Result<()> {
        let share = step.communication * 100.0;
        self.bar.set_message(format!("loss {:.3} {:.0} tokens/s comm {share:.0}%", step.loss, step.tokens_per_s));
        self.bar.set_position(step.step);
        self.log(step)
    }

    pub(super) fn evaluation(&self, step: u64, loss: f64) -> Result<()> {
        self.say(&format!("step {step}: held-out loss {loss:.3}"));
        self.log(&serde_json::json!({ "step": step, "held_out_loss": loss }))
    }

    fn log(&self, entry: &impl Serialize) -> Result<()> {
        if let Some(log) = &mut *self.log.borrow_mut() {
            let text = serde_json::to_string(entry).map_err(shardwise::Error::other)?;
            writeln!(log, "{text}")?;
            log.flush()?;
        }
        Ok(())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
