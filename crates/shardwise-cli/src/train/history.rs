//! The losses of a run by step, in a file of its output directory: what a resumed training draws its curve from.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shardwise::{Error, Result};

use super::checkpoints::unwritable;
use super::saved::write;

/// Name of the file.
const HISTORY: &str = "losses.jsonl";

/// Losses of steps and of held-out text, each after so many steps.
#[derive(Default)]
pub(super) struct Losses {
    pub(super) trained: Vec<(u64, f64)>,
    pub(super) held_out: Vec<(u64, f64)>,
}

/// A line of the file: one of the two losses. Those that are not finite are left out, because JSON has no such numbers.
#[derive(Serialize, Deserialize)]
struct Line {
    step: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    loss: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    held_out_loss: Option<f64>,
}

impl Losses {
    /// What a run wrote up to a step; nothing where there is no such file, as from runs before there was one.
    fn read(out: &Path, last: u64) -> Losses {
        let text = std::fs::read_to_string(out.join(HISTORY)).unwrap_or_default();
        let mut losses = Losses::default();
        // A line that was cut off by a crash is one of a step after the last checkpoint.
        for line in text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()).filter(|l| l.step <= last) {
            losses.trained.extend(line.loss.map(|loss| (line.step, loss)));
            losses.held_out.extend(line.held_out_loss.map(|loss| (line.step, loss)));
        }
        losses
    }
}

/// The losses so far, and the file that gets them as they come.
pub(super) struct History {
    pub(super) losses: Losses,
    path: PathBuf,
    file: BufWriter<File>,
}

impl History {
    /// Begins the history of a run, with that of the run it goes on from up to the step of its checkpoint.
    pub(super) fn begin(out: &Path, from: Option<&Path>, last: u64) -> Result<History> {
        let losses = from.map_or_else(Losses::default, |from| Losses::read(from, last));
        let path = out.join(HISTORY);
        let mut lines: Vec<Line> = Vec::new();
        lines.extend(losses.trained.iter().map(|&(step, loss)| Line { step, loss: Some(loss), held_out_loss: None }));
        lines.extend(losses.held_out.iter().map(|&(step, l)| Line { step, loss: None, held_out_loss: Some(l) }));
        lines.sort_by_key(|line| line.step);
        let text: Result<String> = lines.iter().map(|line| Ok(json(line)? + "\n")).collect();
        write(&path, text?)?;
        let file =
            File::options().append(true).open(&path).map_err(|error| unwritable("output file", &path, &error))?;
        Ok(History { losses, path, file: BufWriter::new(file) })
    }

    pub(super) fn trained(&mut self, step: u64, loss: f64) -> Result<()> {
        self.losses.trained.push((step, loss));
        self.add(&Line { step, loss: Some(loss), held_out_loss: None })
    }

    pub(super) fn held_out(&mut self, step: u64, loss: f64) -> Result<()> {
        // A run that is looked at again has been there before.
        self.losses.held_out.retain(|&(other, _)| other != step);
        self.losses.held_out.push((step, loss));
        self.add(&Line { step, loss: None, held_out_loss: Some(loss) })
    }

    fn add(&mut self, line: &Line) -> Result<()> {
        if line.loss.or(line.held_out_loss).is_some_and(|loss| !loss.is_finite()) {
            return Ok(());
        }
        let text = json(line)?;
        let written = writeln!(self.file, "{text}").and_then(|()| self.file.flush());
        written.map_err(|error| unwritable("output file", &self.path, &error))
    }
}

fn json(line: &Line) -> Result<String> {
    serde_json::to_string(line).map_err(Error::other)
}
