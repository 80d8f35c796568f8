//! `shardwise report`: one HTML page, or a trace for Perfetto, of a run, a plan or a failure.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::Args;
use shardwise::comm::RankDump;
use shardwise::error::ErrorKind;
use shardwise::picture::bytes_text;
use shardwise::prelude::*;
use shardwise::read_file::read_text;
use shardwise::report::{RunReport, page, read_page};

/// The options of `shardwise report`.
#[derive(Args)]
#[command(after_help = "\
The page needs no network. It shows the mesh, the modules with the boxes of every rank, the step as a tree of operators, redistributions \
and collectives with the reasons, a time line and the memory of the ranks, and the bytes between them. \
`shardwise train --report FILE` and `shardwise plan --html FILE` write such pages, too.

Examples:
  shardwise train --report run.html --out run
  shardwise report run --perfetto trace.json
  shardwise report run --compare other/report.json --out both.html
  shardwise report run/dump                 what the ranks were doing")]
pub(crate) struct ReportOptions {
    /// Directory of a training run with --report, its report.json, a page, or the directory of a failed run's dumps
    path: PathBuf,
    /// Another run or plan to compare with
    #[arg(long, value_name = "PATH")]
    compare: Option<PathBuf>,
    /// The page to write
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// Also write a trace for Perfetto (ui.perfetto.dev) or chrome://tracing
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
}

/// File name of a report in the output directory of a run.
pub(crate) const REPORT_FILE: &str = "report.json";

/// Largest report or page: spans of a million operators.
const MOST_REPORT_BYTES: u64 = 256 << 20;

/// Directory of dumps in the output directory of a run.
pub(crate) const DUMP_DIR: &str = "dump";

pub(crate) fn run(options: &ReportOptions) -> Result<()> {
    let (mut runs, mut failures) = read(&options.path)?;
    runs.truncate(1);
    if let Some(other) = &options.compare {
        let (others, dumps) = read(other)?;
        runs.extend(others.into_iter().next());
        failures.extend(dumps);
        tell_apart(&mut runs, [&options.path, other]);
    }
    if let Some(path) = &options.perfetto {
        let Some(run) = runs.first() else {
            let found = format!("{}, dumps of a failed run", options.path.display());
            let fix = "leave the option out";
            return Err(ErrorKind::Argument.error("--perfetto", found, "a profiled step", fix));
        };
        write(path, &run.to_perfetto())?;
    }
    write(&options.out, &page(&runs, &failures))
}

/// Adds the paths to the titles of two runs of the same name, such as runs with other data or another learning rate.
fn tell_apart(runs: &mut [RunReport], paths: [&Path; 2]) {
    if let [first, second] = runs
        && first.title == second.title
    {
        first.title = format!("{} ({})", first.title, paths[0].display());
        second.title = format!("{} ({})", second.title, paths[1].display());
    }
}

/// Writes the page of one run.
pub(crate) fn write_page(path: &Path, run: &RunReport) -> Result<()> {
    write(path, &page(std::slice::from_ref(run), &[]))
}

/// Writes a file and says where on standard error.
fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|error| {
        let found = format!("{}: {error}", path.display());
        ErrorKind::path(path).error::<Error>("report", found, "a file that can be written", "name another file")
    })?;
    Ok(writeln!(std::io::stderr(), "wrote {} ({})", path.display(), bytes_text(text.len()))?)
}

/// When the newest file of a directory was written; a directory that exists for longer does not change with its files.
fn newest_entry(directory: &Path) -> Result<SystemTime> {
    let mut newest = SystemTime::UNIX_EPOCH;
    for entry in std::fs::read_dir(directory)? {
        newest = newest.max(entry?.metadata()?.modified()?);
    }
    Ok(newest)
}

/// The runs and dumps of a path.
fn read(path: &Path) -> Result<(Vec<RunReport>, Vec<RankDump>)> {
    if path.is_dir() {
        let (stored, dumps) = (path.join(REPORT_FILE), path.join(DUMP_DIR));
        return match (stored.is_file(), dumps.is_dir()) {
            // A run that failed after its report was written has both; dumps of an earlier attempt do not concern the report.
            (true, true) if newest_entry(&dumps)? >= stored.metadata()?.modified()? => {
                Ok((read(&stored)?.0, RankDump::read_all(&dumps)?))
            }
            (true, _) => read(&stored),
            (false, true) => Ok((Vec::new(), RankDump::read_all(&dumps)?)),
            (false, false) => Ok((Vec::new(), RankDump::read_all(path)?)),
        };
    }
    let problem = |found: String| {
        let fix = "name a run of `train --report`, its report.json, a page, or a directory of dumps";
        ErrorKind::path(path).error::<Error>("report", found, "a report", fix)
    };
    let text = read_text(path, MOST_REPORT_BYTES).map_err(|error| problem(format!("{}: {error}", path.display())))?;
    if text.trim_start().starts_with('<') {
        return read_page(&text);
    }
    let report: RunReport =
        serde_json::from_str(&text).map_err(|error| problem(format!("{}: {error}", path.display())))?;
    Ok((vec![report], Vec::new()))
}
