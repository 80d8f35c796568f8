//! The lock of a step's communication: the multiset of its collectives as a text file that tests compare with.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use super::trace::{CommRecord, record_on_rank};
use crate::error::{Error, ErrorKind, Result};
use crate::rank_context::Phase;
use crate::read_file::{MOST_CONFIG_BYTES, read_text};

/// The environment variable that makes [`CommLock::check_file`] write the file instead of comparing with it.
pub const UPDATE_LOCK: &str = "SHARDWISE_UPDATE_LOCK";

/// First lines of a lockfile.
const HEADER: &str = "\
# Communication of one rank: phase, module, operator, mesh axes, collective, bytes sent per call, number of calls.
# Numbers in paths are written as *. SHARDWISE_UPDATE_LOCK=1 writes the file anew.
";

/// The collectives of a step as a multiset, in a stable text form of one line per kind.
///
/// Calls that differ in nothing but numbers in the path of their module, as those of equal blocks, share a line.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CommLock(BTreeMap<String, usize>);

/// What a [`CommLock`] knows of one call.
#[derive(Debug, Clone, Copy)]
pub struct LockedCall<'a> {
    /// The part of the step.
    pub phase: Phase,
    /// Path of the module, if any.
    pub module: Option<&'a str>,
    /// The operator, if any.
    pub operator: Option<&'a str>,
    /// Mesh axes, if the group is one of a mesh.
    pub axes: Option<&'a str>,
    /// Name of the collective.
    pub call: &'a str,
    /// Bytes that the rank sends.
    pub bytes: usize,
}

impl<'a> From<&'a CommRecord> for LockedCall<'a> {
    fn from(record: &'a CommRecord) -> Self {
        LockedCall {
            phase: record.phase,
            module: record.module.as_deref(),
            operator: record.operator,
            axes: record.axes.as_deref(),
            call: record.call,
            bytes: record.bytes,
        }
    }
}

impl<'a> FromIterator<LockedCall<'a>> for CommLock {
    fn from_iter<I: IntoIterator<Item = LockedCall<'a>>>(calls: I) -> Self {
        let mut lines = BTreeMap::new();
        for LockedCall { phase, module, operator, axes, call, bytes } in calls {
            let module = module.map_or("-".to_string(), folded);
            let (operator, axes) = (operator.unwrap_or("-"), axes.unwrap_or("-"));
            *lines.entry(format!("{phase} {module} {operator} {axes} {call} {bytes}B")).or_default() += 1;
        }
        CommLock(lines)
    }
}

/// A path in which numbers are replaced by `*`.
fn folded(path: &str) -> String {
    let part = |part: &str| if part.parse::<usize>().is_ok() { "*".to_string() } else { part.to_string() };
    path.split('.').map(part).collect::<Vec<_>>().join(".")
}

impl fmt::Display for CommLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HEADER)?;
        self.0.iter().try_for_each(|(line, count)| writeln!(f, "{line} x{count}"))
    }
}

impl FromStr for CommLock {
    type Err = Error;

    /// Reads what `Display` writes. Empty lines and lines that begin with `#` are skipped.
    fn from_str(text: &str) -> Result<Self> {
        let mut lines = BTreeMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let read = line.rsplit_once(" x").and_then(|(call, count)| Some((call, count.parse::<usize>().ok()?)));
            let Some((call, count)) = read.filter(|(call, _)| call.split(' ').count() == 6) else {
                let needed = "phase, module, operator, axes, collective, bytes and xCOUNT";
                // A file of another kind may be one long line.
                let found = match line.char_indices().nth(80) {
                    Some((end, _)) => format!("`{}...`", &line[..end]),
                    None => format!("`{line}`"),
                };
                let fix = "name a lockfile, or write it anew";
                return Err(ErrorKind::Argument.error("lock of communication", found, needed, fix));
            };
            *lines.entry(call.to_string()).or_default() += count;
        }
        Ok(CommLock(lines))
    }
}

impl CommLock {
    /// The lines in which this lock differs from an earlier one: `-` before lines of the earlier one, `+` before new ones.
    pub fn changes_since(&self, earlier: &CommLock) -> Vec<String> {
        let mut calls: Vec<&String> = earlier.0.keys().chain(self.0.keys()).collect();
        calls.sort();
        calls.dedup();
        let mut changes = Vec::new();
        for call in calls {
            let (before, after) = (earlier.0.get(call), self.0.get(call));
            if before != after {
                changes.extend(before.map(|count| format!("- {call} x{count}")));
                changes.extend(after.map(|count| format!("+ {call} x{count}")));
            }
        }
        changes
    }

    /// Compares with a lockfile, or writes it if the environment variable [`UPDATE_LOCK`] is set to anything but 0. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the changed lines if the communication is another, and if there is no such file;
    /// [`Error::Io`] if the file cannot be written.
    pub fn check_file(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        if std::env::var_os(UPDATE_LOCK).is_some_and(|value| value != "0") {
            return self.write_file(path);
        }
        let text = read_text(path, MOST_CONFIG_BYTES).map_err(|error| {
            let needed = "a file with the expected communication";
            let fix = "run once with SHARDWISE_UPDATE_LOCK=1 to write it, and read it before you commit it";
            ErrorKind::path(path).error::<Error>(
                "lock of communication",
                format!("{error}: {}", path.display()),
                needed,
                fix,
            )
        })?;
        let changes = self.changes_since(&text.parse()?);
        if changes.is_empty() {
            return Ok(());
        }
        Err(Self::changed_error(path, &changes, "run with SHARDWISE_UPDATE_LOCK=1"))
    }

    /// The error for [changes](Self::changes_since) since a lockfile; `rewrite` says how to write the file anew.
    pub fn changed_error(path: &Path, changes: &[String], rewrite: &str) -> Error {
        let found = format!("other communication than in {}", path.display());
        // The lines come last: there may be many of them.
        let fix = format!(
            "remove what was added, or {rewrite} if the change is meant (- is in the file, + is what was found):\n  {}",
            changes.join("\n  ")
        );
        ErrorKind::path(path).error("communication", found, "that of the lockfile", fix)
    }

    /// Writes a lockfile. Local.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written.
    pub fn write_file(&self, path: impl AsRef<Path>) -> Result<()> {
        Ok(std::fs::write(path, self.to_string())?)
    }
}

/// Runs `body` and fails if it communicates something else than a lockfile says; `comm::lock!(path, body)` is the same with a path
/// relative to the package of the caller.
///
/// The file has one line per kind of collective, so that a review shows what a change does to the communication. It is written
/// with the environment variable [`UPDATE_LOCK`], never by itself. The first rank of the world compares: ranks run one program, and
/// what it sends with even shards all ranks send. So does the rank of a dry run. Other ranks run `body`.
///
/// ```no_run
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let x = DTensor::ones((4, 4), DType::F32, &mesh, [Shard(0)])?;
///     shardwise::comm::lock!("tests/step.lock", || x.sum_all()?.item::<f32>())?;
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// Those of `body` and of [`CommLock::check_file`].
pub fn check_communication<R>(path: impl AsRef<Path>, body: impl FnOnce() -> Result<R>) -> Result<R> {
    let (result, records, decides) = record_on_rank(body);
    let value = result?;
    if decides {
        records.iter().map(LockedCall::from).collect::<CommLock>().check_file(path)?;
    }
    Ok(value)
}

/// [`check_communication`] with a path relative to the package of the caller.
#[doc(hidden)]
#[macro_export]
macro_rules! __lock_communication {
    ($path:expr, $body:expr $(,)?) => {
        $crate::comm::check_communication(::std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join($path), $body)
    };
}

#[doc(inline)]
pub use __lock_communication as lock;

#[cfg(test)]
mod tests {
    use super::*;

    fn call(module: &str, bytes: usize) -> LockedCall<'_> {
        let module = Some(module);
        LockedCall { phase: Phase::Backward, module, operator: None, axes: Some("dp"), call: "all_gather", bytes }
    }

    #[test]
    fn equal_blocks_share_a_line_and_the_text_is_read_back() {
        let lock: CommLock = [call("blocks.0.up", 8), call("blocks.1.up", 8), call("head", 8)].into_iter().collect();
        let text = lock.to_string();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(lines, ["backward blocks.*.up - dp all_gather 8B x2", "backward head - dp all_gather 8B x1"]);
        assert_eq!(text.parse::<CommLock>().unwrap(), lock);
        assert!("all_gather x2".parse::<CommLock>().is_err());
    }

    #[test]
    fn a_change_is_a_pair_of_lines() {
        let before: CommLock = [call("head", 8)].into_iter().collect();
        let after: CommLock = [call("head", 8), call("head", 8), call("tail", 4)].into_iter().collect();
        let changes = after.changes_since(&before);
        assert_eq!(
            changes,
            [
                "- backward head - dp all_gather 8B x1",
                "+ backward head - dp all_gather 8B x2",
                "+ backward tail - dp all_gather 4B x1"
            ]
        );
        assert!(before.changes_since(&before).is_empty());
    }
}
