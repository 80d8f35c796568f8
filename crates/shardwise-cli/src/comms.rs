//! `shardwise comms`: the communication of a training step as a lockfile.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use shardwise::comm::CommLock;
use shardwise::error::ErrorKind;
use shardwise::read_file::{MOST_CONFIG_BYTES, read_text};
use shardwise::{Error, Result};

use crate::plan::job::PlannedStep;

pub(crate) const AFTER_HELP: &str = "\
A step runs without data and without memory for the model. Its collectives become lines of text: phase, \
module, operator, mesh axes, collective, bytes and calls. In tests, comm::lock! does the same.

Examples:
  shardwise comms lock gpt --mesh dp=2,tp=2 --file step.lock
  shardwise comms check gpt --mesh dp=2,tp=2 --file step.lock";

/// The subcommands of `shardwise comms`.
#[derive(Subcommand)]
pub(crate) enum Comms {
    /// Write the collectives of a training step to a lockfile
    #[command(after_help = "\
Examples:
  shardwise comms lock gpt --mesh dp=2,tp=2 --file step.lock
  shardwise comms lock model/ --mesh dp=8 --plan fsdp --file step.lock")]
    Lock(LockOptions),
    /// Compare the collectives of a training step with a lockfile; fails if they differ
    #[command(after_help = "\
Examples:
  shardwise comms check gpt --mesh dp=2,tp=2 --file step.lock")]
    Check(LockOptions),
}

/// The options of `shardwise comms lock` and `check`.
#[derive(Args)]
pub(crate) struct LockOptions {
    #[command(flatten)]
    step: PlannedStep,
    /// The lockfile
    #[arg(long, value_name = "FILE", default_value = "step.lock")]
    file: PathBuf,
}

pub(crate) fn run(comms: &Comms) -> Result<()> {
    match comms {
        Comms::Lock(options) => {
            let lock = options.step.decide()?.report()?.lock();
            lock.write_file(&options.file).map_err(|error| {
                let found = format!("{error}: {}", options.file.display());
                let fix = "name another file";
                ErrorKind::path(&options.file).error::<Error>("--file", found, "a file that can be written", fix)
            })?;
            Ok(writeln!(std::io::stdout().lock(), "the communication is written to {}", options.file.display())?)
        }
        Comms::Check(options) => {
            let lock = options.step.decide()?.report()?.lock();
            check(&lock, options)?;
            Ok(writeln!(std::io::stdout().lock(), "the communication is that of {}", options.file.display())?)
        }
    }
}

/// As [`CommLock::check_file`], without the environment variable: `lock` writes.
fn check(lock: &CommLock, options: &LockOptions) -> Result<()> {
    let path = &options.file;
    let text = read_text(path, MOST_CONFIG_BYTES).map_err(|error| {
        let found = format!("{error}: {}", path.display());
        let fix = "write it with `shardwise comms lock`";
        ErrorKind::path(path).error::<Error>("--file", found, "a lockfile", fix)
    })?;
    let changes = lock.changes_since(&text.parse()?);
    if changes.is_empty() {
        return Ok(());
    }
    Err(CommLock::changed_error(path, &changes, "write the file anew with `shardwise comms lock`"))
}
