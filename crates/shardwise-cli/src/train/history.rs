//! The losses of a run by step, in a file of its output directory, from which a resumed run continues its curve.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shardwise::read_file::read_bytes;
use shardwise::{Error, Result};

use super::checkpoints::cannot_write;
use super::model_dir::write;

/// File name in the output directory.
const HISTORY_FILE: &str = "losses.jsonl";

/// Losses as (number of steps, loss).
#[derive(Default)]
pub(super) struct LossRecord {
    pub(super) trained: Vec<(u64, f64)>,
    pub(super) held_out: Vec<(u64, f64)>,
}

/// A line of the file, with one of the two losses. Non-finite losses are left out, because JSON cannot represent them.
#[derive(Serialize, Deserialize)]
struct HistoryLine {
    step: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    loss: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    held_out_loss: Option<f64>,
}

/// Largest file of losses: those of ten million steps.
const MOST_HISTORY_BYTES: u64 = 512 << 20;

impl LossRecord {
    /// Reads the losses up to a step; none if there is no file, as in directories of earlier versions.
    fn read(out: &Path, last: u64) -> Result<LossRecord> {
        let path = out.join(HISTORY_FILE);
        let bytes = match read_bytes(&path, MOST_HISTORY_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            read => read.map_err(|error| cannot_read(&path, &error))?,
        };
        let text = String::from_utf8_lossy(&bytes);
        let mut losses = LossRecord::default();
        // A line truncated by a crash belongs to a step after the latest checkpoint, so it can be ignored.
        for line in
            text.lines().filter_map(|line| serde_json::from_str::<HistoryLine>(line).ok()).filter(|l| l.step <= last)
        {
            losses.trained.extend(line.loss.map(|loss| (line.step, loss)));
            losses.held_out.extend(line.held_out_loss.map(|loss| (line.step, loss)));
        }
        Ok(losses)
    }
}

fn cannot_read(path: &Path, error: &std::io::Error) -> Error {
    let found = format!("{}: {error}", path.display());
    let (needed, fix) = ("the losses of the run that is resumed, or no file", "remove the file to resume without them");
    shardwise::ErrorKind::path(path).error("output file", found, needed, fix)
}

/// The losses so far, and the file that they are appended to.
pub(super) struct LossHistory {
    pub(super) losses: LossRecord,
    path: PathBuf,
    file: BufWriter<File>,
}

impl LossHistory {
    /// Starts the history of a run, with that of the run it resumes from up to the step of the checkpoint.
    pub(super) fn begin(out: &Path, from: Option<&Path>, last: u64) -> Result<LossHistory> {
        let losses = from.map_or_else(|| Ok(LossRecord::default()), |from| LossRecord::read(from, last))?;
        let path = out.join(HISTORY_FILE);
        let mut lines: Vec<HistoryLine> = Vec::new();
        lines.extend(losses.trained.iter().map(|&(step, loss)| HistoryLine {
            step,
            loss: Some(loss),
            held_out_loss: None,
        }));
        lines.extend(losses.held_out.iter().map(|&(step, l)| HistoryLine { step, loss: None, held_out_loss: Some(l) }));
        lines.sort_by_key(|line| line.step);
        let text: Result<String> = lines.iter().map(|line| Ok(json(line)? + "\n")).collect();
        write(&path, text?)?;
        let file =
            File::options().append(true).open(&path).map_err(|error| cannot_write("output file", &path, &error))?;
        Ok(LossHistory { losses, path, file: BufWriter::new(file) })
    }

    pub(super) fn trained(&mut self, step: u64, loss: f64) -> Result<()> {
        self.losses.trained.push((step, loss));
        self.add(&HistoryLine { step, loss: Some(loss), held_out_loss: None })
    }

    pub(super) fn held_out(&mut self, step: u64, loss: f64) -> Result<()> {
        // Resuming a finished run evaluates the same step again.
        self.losses.held_out.retain(|&(other, _)| other != step);
        self.losses.held_out.push((step, loss));
        self.add(&HistoryLine { step, loss: None, held_out_loss: Some(loss) })
    }

    fn add(&mut self, line: &HistoryLine) -> Result<()> {
        if line.loss.or(line.held_out_loss).is_some_and(|loss| !loss.is_finite()) {
            return Ok(());
        }
        let text = json(line)?;
        let written = writeln!(self.file, "{text}").and_then(|()| self.file.flush());
        written.map_err(|error| cannot_write("output file", &self.path, &error))
    }
}

fn json(line: &HistoryLine) -> Result<String> {
    serde_json::to_string(line).map_err(Error::other)
}
