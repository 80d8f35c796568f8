//! The numbers of a step that are logged and shown, and the file of the log.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use shardwise::Result;
use shardwise::read_file::open_file;

use super::checkpoints::cannot_write;

/// A step in the log.
#[derive(Serialize, Clone)]
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
    /// Mean over the ranks of the fraction of the time that they waited for other ranks.
    pub(super) waiting: f64,
    pub(super) ranks: Vec<RankLog>,
}

/// A rank in the log of a step.
#[derive(Serialize, Clone)]
pub(super) struct RankLog {
    pub(super) ms: f64,
    /// Fraction of the time of waiting for other ranks.
    pub(super) waiting: f64,
    pub(super) memory_bytes: usize,
    /// The most since the run began.
    pub(super) peak_bytes: usize,
}

/// Checks that the log can be written, before a model is built for a run that could not be logged. Changes nothing.
pub(super) fn check_log(path: &Path) -> Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let checked = match fs::metadata(path) {
        // A pipe or a device is opened once: closing it again would be the end for its reader.
        Ok(found) if !found.is_file() && !found.is_dir() => Ok(()),
        Ok(_) => File::options().append(true).open(path).map(drop),
        Err(_) => fs::read_dir(directory).map(drop),
    };
    checked.map_err(|error| cannot_write("log", path, &error))
}

/// Opens the log: emptied for a new run; for one that is resumed after step `last` without the lines of later steps, which it
/// repeats.
pub(super) fn open_log(path: &Path, last: Option<u64>) -> Result<BufWriter<File>> {
    let opened = match last {
        None => File::create(path),
        Some(last) => drop_later_lines(path, last).and_then(|()| File::options().create(true).append(true).open(path)),
    };
    Ok(BufWriter::new(opened.map_err(|error| cannot_write("log", path, &error))?))
}

/// Removes the lines of steps after `last` from a log, and a line that a crash has truncated.
fn drop_later_lines(path: &Path, last: u64) -> io::Result<()> {
    // A link to a log stays one. A log that does not exist has no lines, and those of a pipe or a device cannot be removed.
    let Ok(path) = path.canonicalize() else { return Ok(()) };
    if !path.is_file() {
        return Ok(());
    }
    // Where the lines to remove begin, and whether lines to keep come after them.
    let (mut cut, mut is_followed, mut offset) = (None, false, 0);
    for_each_line(&path, |line| {
        match keeps(line, last) {
            true => is_followed |= cut.is_some(),
            false => cut = cut.or(Some(offset)),
        }
        offset += line.len() as u64;
        Ok(())
    })?;
    match cut {
        None => end_last_line(&path),
        Some(cut) if !is_followed => File::options().write(true).open(&path)?.set_len(cut),
        // Logs of earlier versions repeat steps, so that lines to keep come after lines to remove.
        Some(_) => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let unfinished = path.with_file_name(format!(".{name}.unfinished"));
            let mut kept = BufWriter::new(File::create(&unfinished)?);
            for_each_line(&path, |line| if keeps(line, last) { kept.write_all(line) } else { Ok(()) })?;
            kept.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
            fs::rename(&unfinished, &path)?;
            end_last_line(&path)
        }
    }
}

/// Longest line of a log: a rank has about 150 bytes of it.
const MOST_LINE_BYTES: u64 = 16 << 20;

fn for_each_line(path: &Path, mut body: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut lines = BufReader::new(open_file(path)?);
    let mut line = Vec::new();
    while (&mut lines).take(MOST_LINE_BYTES + 1).read_until(b'\n', &mut line)? > 0 {
        if line.len() as u64 > MOST_LINE_BYTES {
            let found = format!("more than {MOST_LINE_BYTES} bytes in one line, unlike a log");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, found));
        }
        body(&line)?;
        line.clear();
    }
    Ok(())
}

/// Whether a line of a log stays when a run is resumed after step `last`. Lines without a step are not the command's own.
fn keeps(line: &[u8], last: u64) -> bool {
    #[derive(Deserialize)]
    struct LoggedStep {
        step: u64,
    }
    match serde_json::from_slice::<LoggedStep>(line) {
        Ok(LoggedStep { step }) => step <= last,
        Err(_) => line.ends_with(b"\n"),
    }
}

/// Ends the last line of a file, so that the next one does not continue it.
fn end_last_line(path: &Path) -> io::Result<()> {
    let mut file = open_file(path)?;
    let mut end = [b'\n'];
    if file.seek(io::SeekFrom::End(0))? > 0 {
        file.seek(io::SeekFrom::End(-1))?;
        file.read_exact(&mut end)?;
    }
    if end == [b'\n'] { Ok(()) } else { File::options().append(true).open(path)?.write_all(b"\n") }
}
