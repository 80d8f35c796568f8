//! Dumps: what the ranks of a failed run were doing, one JSON file per rank.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::trace::{CommRecord, Trace};
use crate::error::{Error, ErrorKind, Result};
use crate::read_file::read_bytes;

/// The environment variable that names the directory of dumps.
pub const DUMP_DIR_VARIABLE: &str = "SHARDWISE_DUMP_DIR";

/// What a rank was doing when its run failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankDump {
    /// The rank.
    pub rank: usize,
    /// Number of ranks of the world.
    pub size: usize,
    /// The error of the rank; `None` if it returned without one.
    pub error: Option<String>,
    /// Whether this rank failed by itself, before other ranks.
    pub is_first: bool,
    /// The call that it was in.
    pub pending: Option<DumpedCall>,
    /// Its last calls, the latest at the end.
    pub recent: Vec<DumpedCall>,
    /// Messages that it sent and that were not received.
    pub unreceived: Vec<DumpedMessage>,
}

/// A collective, send or receive in a [`RankDump`]. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpedCall {
    /// Name of the call.
    pub call: String,
    /// Global ranks of the group.
    pub group: Vec<usize>,
    /// The mesh axes that the group spans.
    pub axes: Option<String>,
    /// The operator that made the call.
    pub operator: Option<String>,
    /// Path of the module.
    pub module: Option<String>,
    /// Bytes that the rank sent; 0 while the call is pending.
    pub bytes: usize,
    /// Time in the call.
    pub duration: u64,
    /// Time of waiting for other ranks.
    pub waiting: u64,
    /// Source line.
    pub site: String,
}

/// A message in a [`RankDump`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpedMessage {
    /// Global rank of the receiver.
    pub to: usize,
    /// Its tag.
    pub tag: u64,
    /// Type and shape of the tensor.
    pub what: String,
    /// Source line of the send.
    pub site: String,
}

/// How many of the last calls a dump has: some layers of a model.
const RECENT: usize = 64;

/// Largest dump: each call and each message has some hundred bytes.
const MOST_DUMP_BYTES: u64 = 256 << 20;

impl RankDump {
    /// Describes a rank by its trace. For engines.
    pub fn new(rank: usize, size: usize, error: Option<&Error>, trace: Option<&Trace>) -> Self {
        let (recent, pending) = trace.map(|trace| trace.last(RECENT)).unwrap_or_default();
        let nanoseconds = |time: std::time::Duration| time.as_nanos() as u64;
        let call = |record: &CommRecord| DumpedCall {
            call: record.call.to_string(),
            group: record.group.to_vec(),
            axes: record.axes.as_deref().map(String::from),
            operator: record.operator.map(String::from),
            module: record.module.as_deref().map(String::from),
            bytes: record.bytes,
            duration: nanoseconds(record.duration),
            waiting: nanoseconds(record.waiting),
            site: record.site.to_string(),
        };
        let pending = pending.map(|pending| DumpedCall {
            call: pending.call.to_string(),
            group: pending.group.to_vec(),
            axes: None,
            operator: pending.operator.map(String::from),
            module: pending.module.as_deref().map(String::from),
            bytes: 0,
            duration: nanoseconds(pending.since.elapsed()),
            waiting: 0,
            site: pending.site.to_string(),
        });
        RankDump {
            rank,
            size,
            error: error.map(ToString::to_string),
            is_first: error.is_some_and(|error| !error.is_consequence()),
            pending,
            recent: recent.iter().map(call).collect(),
            unreceived: Vec::new(),
        }
    }

    /// Whether a directory for dumps exists or can be created without creating its parent. A failed run writes none otherwise: one
    /// that failed before it created its output leaves nothing behind.
    pub fn has_place(directory: &Path) -> bool {
        directory.parent().is_none_or(|parent| parent.as_os_str().is_empty() || parent.is_dir())
    }

    /// Writes the dump to `rank-N.json` of a directory, which is created if need be.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written.
    pub fn write(&self, directory: &Path) -> Result<PathBuf> {
        std::fs::create_dir_all(directory)?;
        let path = directory.join(format!("rank-{}.json", self.rank));
        std::fs::write(&path, serde_json::to_vec_pretty(self).map_err(Error::other)?)?;
        Ok(path)
    }

    /// Reads the dumps of a directory, in rank order.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are none, or a file is damaged; [`Error::Io`] if it cannot be read.
    pub fn read_all(directory: &Path) -> Result<Vec<RankDump>> {
        let mut dumps = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            if is_dump(&path) {
                let read: std::result::Result<RankDump, _> =
                    serde_json::from_slice(&read_bytes(&path, MOST_DUMP_BYTES)?);
                dumps.push(read.map_err(|error| {
                    let found = format!("{}: {error}", path.display());
                    ErrorKind::path(&path).error::<Error>("dump", found, "the dump of a rank", "delete the file")
                })?);
            }
        }
        if dumps.is_empty() {
            let found = format!("{} without rank-*.json", directory.display());
            let fix = format!(
                "name the directory of {DUMP_DIR_VARIABLE}, `dump` of a training run that failed, or a run of `train --report`"
            );
            return Err(ErrorKind::path(directory).error("dump", found, "the dumps of a failed run", fix));
        }
        dumps.sort_by_key(|dump: &RankDump| dump.rank);
        Ok(dumps)
    }
}

/// Whether a file is named as the dump of a rank.
fn is_dump(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.strip_prefix("rank-")
        .and_then(|rest| rest.strip_suffix(".json"))
        .is_some_and(|rank| rank.parse::<usize>().is_ok())
}

/// Replaces the dumps of a directory. Problems are printed: the error of the run is what its caller has to see.
pub(super) fn write_all(directory: &Path, dumps: &[RankDump]) {
    if !RankDump::has_place(directory) {
        return;
    }
    let earlier = std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in earlier.filter(|path| is_dump(path)) {
        // A file that cannot be deleted is overwritten or reported below.
        let _ = std::fs::remove_file(path);
    }
    if let Some(error) = dumps.iter().find_map(|dump| dump.write(directory).err()) {
        eprintln!("the dump of the failed run could not be written to {}: {error}", directory.display());
    }
}
