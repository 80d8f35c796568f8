//! Saving: each rank writes its share of the boxes, and the new checkpoint replaces the old one atomically.

pub(in crate::checkpoint) mod save_options;
pub(in crate::checkpoint) mod save_plan;
pub(in crate::checkpoint) mod planned;
pub(in crate::checkpoint) mod plan_cache;
pub(in crate::checkpoint) mod write;

use std::collections::BTreeMap;
use std::fs;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::checkpoint::bytes::content::BoxToWrite;
use crate::checkpoint::catalogs::directory::{Staging, check_overwrite, unwritable};
use crate::checkpoint::catalogs::format::{FileRole, FormatWriter, ValueStorage, WrittenFile};
use crate::checkpoint::metadata::state::State;
use crate::checkpoint::metadata::value::{Key, Value};
use crate::checkpoint::save::save_options::SaveOptions;
use crate::checkpoint::save::save_plan::{LocalPlan, SavePlan};
use crate::checkpoint::save::write::{boxes_by_file, finish_checkpoint, write_file};
use crate::comm::{World, agree, all_ok, gather_texts};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::read_file::read_text;

/// Saves `state` as a checkpoint directory.
///
/// Collective: every rank of the world must call it with the same path. Each box of a tensor is written once, by one of the ranks
/// that hold it, balanced by bytes; a `Partial` tensor is reduced first. Apart from that ranks exchange only the plan and errors.
/// An existing checkpoint at `path` is replaced atomically: a crash at any moment leaves the old one or the new one.
///
/// Ranks may have entries that other ranks lack, such as experts or pipeline stages on meshes of their own: all of them are in
/// the checkpoint. An entry that several ranks have must be the same on them, and all ranks of a tensor's mesh must have it.
///
/// # Errors
/// The same on all ranks: [`Error::OnRank`] with the error of the first rank that failed; [`ErrorKind::Disagreement`] if
/// ranks save different state or paths; [`ErrorKind::Path`] if the path has files that are not a checkpoint's, or cannot be
/// written; [`ErrorKind::NoData`] in a dry run.
///
/// ```
/// use shardwise::checkpoint::{self, State};
/// use shardwise::prelude::*;
///
/// # let directory = std::env::temp_dir().join(format!("shardwise-save-{}", std::process::id()));
/// # let path = directory.clone();
/// launch(2, move |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let weight = DTensor::arange(0.0..6.0, DType::F32, &mesh, [Shard(0)])?;
///     checkpoint::save(&world, &path, &State::map([("weight", State::from(weight)), ("step", State::from(3))]))?;
///
///     let template = State::map([("weight", DTensor::zeros(6, DType::F32, &mesh, [Replicate])?)]);
///     let loaded = checkpoint::load(&world, &path, &template)?;
///     assert_eq!(loaded.tensor("weight")?.to_local()?.to_vec1::<f32>()?[5], 5.0);
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), Error>(())
/// ```
#[track_caller]
pub fn save(world: &World, path: impl AsRef<Path>, state: &State) -> Result<()> {
    begin(world, path.as_ref(), state, &SaveOptions::default(), Location::caller())?.finish(Location::caller())
}

/// Saves `state` as [`save`] does, with options.
///
/// Collective.
#[track_caller]
pub fn save_with(world: &World, path: impl AsRef<Path>, state: &State, options: &SaveOptions) -> Result<()> {
    begin(world, path.as_ref(), state, options, Location::caller())?.finish(Location::caller())
}

/// Starts a save and returns as soon as the ranks have agreed on a plan; a background thread per rank writes the files.
///
/// Collective, and so is [`AsyncSave::wait`]. Saves the state as it is at the time of the call: `DTensor`s are immutable, so
/// the snapshot costs no copy (plain tensors are copied). Writing threads do not communicate, so training can go on meanwhile.
///
/// # Errors
/// As [`save`]; errors of writing come from [`AsyncSave::wait`].
#[track_caller]
pub fn async_save(world: &World, path: impl AsRef<Path>, state: &State, options: &SaveOptions) -> Result<AsyncSave> {
    begin(world, path.as_ref(), state, options, Location::caller())
}

/// A save in progress, returned by [`async_save`].
///
/// Dropped without [`wait`](Self::wait), the coordinator waits at most 5 more seconds for the files of the other ranks and then gives
/// up; an incomplete save never replaces the old checkpoint.
#[doc(alias = "AsyncSaveResponse")]
#[must_use = "the checkpoint is complete only after `wait`"]
pub struct AsyncSave {
    world: World,
    coordinator: usize,
    writer: Option<JoinHandle<Result<()>>>,
    /// Whether the coordinator's writer should go on waiting for the other ranks: [`AWAITED`], [`ABANDONED`] or [`FAILED`].
    wait: Arc<AtomicU8>,
}

impl AsyncSave {
    /// Whether this rank's writer has finished. Local; other ranks may still be writing.
    pub fn is_finished(&self) -> bool {
        self.writer.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the checkpoint is complete.
    ///
    /// Collective.
    ///
    /// # Errors
    /// If a rank failed, all ranks get its error.
    #[track_caller]
    pub fn wait(self) -> Result<()> {
        self.finish(Location::caller())
    }

    fn finish(mut self, site: Site) -> Result<()> {
        // Join all ranks but the coordinator first, so that it does not wait for the files of a rank that failed.
        let is_coordinator = self.world.rank() == self.coordinator;
        let joined = if is_coordinator { Ok(()) } else { self.join() };
        let other_ranks = all_ok(&self.world, joined, site);
        if other_ranks.is_err() {
            self.wait.store(FAILED, SeqCst);
        }
        let joined = if is_coordinator { self.join() } else { Ok(()) };
        // If another rank failed, that is why the coordinator did: its error is the one to report.
        match other_ranks {
            Ok(()) => all_ok(&self.world, joined, site),
            Err(error) => Err(error),
        }
    }

    fn join(&mut self) -> Result<()> {
        let Some(writer) = self.writer.take() else { return Ok(()) };
        writer.join().unwrap_or_else(|_| Err(Error::other("the thread that writes the checkpoint panicked")))
    }
}

impl Drop for AsyncSave {
    /// Stops waiting for other ranks after a grace period: a rank that unwinds because of an error must not hang here.
    fn drop(&mut self) {
        let _ = self.wait.compare_exchange(AWAITED, ABANDONED, SeqCst, SeqCst);
        let _ = self.join();
    }
}

/// How long a dropped save goes on waiting for other ranks: enough for ranks that finish at about the same time.
const GRACE: Duration = Duration::from_secs(5);

/// Plans the save collectively and starts this rank's writer.
fn begin(world: &World, path: &Path, state: &State, options: &SaveOptions, site: Site) -> Result<AsyncSave> {
    if world.is_dry() {
        return Err(ErrorKind::NoData.error(
            "save",
            "a dry run",
            "a run with data",
            "dry runs know shapes, not values",
        ));
    }
    let coordinator = options.coordinator;
    let mut cached = options.plan_cache.as_ref().map(|cache| cache.take(world)).unwrap_or_default();
    let planned = options.check(world.size()).and_then(|()| {
        let writer = options.format.to_write()?;
        Ok((writer, LocalPlan::new(world, state, writer, &mut cached)?))
    });
    let (writer, local) = all_ok(world, planned, site)?;
    let settings = format!("{} {} {coordinator}", options.format, options.overwrite);
    agree(world, &[("save options", &settings), ("path to save to", &path.to_string_lossy())], site)?;
    let mut planned = local.merged(world, &mut cached, site)?;
    options.plan_cache.iter().for_each(|cache| cache.put(world, std::mem::take(&mut cached)));
    let rank = world.rank();
    // The coordinator creates the staging directory; all ranks write to it.
    let id = unique();
    let staging = match rank == coordinator {
        true => check_overwrite(path, options.overwrite).and_then(|()| Staging::new(path, id)).map(Some),
        false => Ok(None),
    };
    planned.contents.save_id = Some(format!("{id:016x}"));
    let staging = all_ok(world, staging, site)?;
    let chosen =
        gather_texts(world, &staging.as_ref().map_or_else(String::new, |s| s.path().to_string_lossy().into()), site)?;
    let wait = Arc::new(AtomicU8::new(AWAITED));
    let job = RankWriter {
        rank,
        ranks: world.size(),
        writer,
        options: options.clone(),
        staged: PathBuf::from(&chosen[coordinator]),
        target: path.to_path_buf(),
        staging,
        wait: Arc::clone(&wait),
        planned,
    };
    let writer = std::thread::Builder::new().name(format!("save of rank {rank}")).spawn(move || job.run());
    let writer = all_ok(world, writer.map_err(Error::from), site)?;
    Ok(AsyncSave { world: world.clone(), coordinator, writer: Some(writer), wait })
}

/// The program will wait for the save.
const AWAITED: u8 = 0;
/// The save was dropped without waiting.
const ABANDONED: u8 = 1;
/// Another rank failed: its files will never come.
const FAILED: u8 = 2;

/// An id that no other save has.
fn unique() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    now ^ (u64::from(std::process::id()) << 40)
}

/// One rank's writer thread. Ranks report to the coordinator through files in the staging directory and not by collectives, which the
/// program may be using meanwhile.
struct RankWriter {
    rank: usize,
    ranks: usize,
    writer: &'static dyn FormatWriter,
    options: SaveOptions,
    staged: PathBuf,
    target: PathBuf,
    /// Only on the coordinator, which commits it.
    staging: Option<Staging>,
    wait: Arc<AtomicU8>,
    planned: SavePlan,
}

impl RankWriter {
    fn run(self) -> Result<()> {
        let (report, rank) = (self.report_of(self.rank), self.rank);
        let (writer, staged) = (self.writer, self.staged.clone());
        let (boxes, contents) = (self.planned.boxes, self.planned.contents);
        // All ranks have all values; the coordinator writes them.
        let in_files = self.staging.is_some() && writer.values() == ValueStorage::InFiles;
        let values = if in_files { contents.values.clone() } else { BTreeMap::new() };
        let written = write_boxes(writer, &staged, (rank, self.ranks), boxes, (&values, &contents.paths));
        let report_text = match &written {
            Ok(files) => serde_json::to_string(files).map_err(Error::other)?,
            Err(error) => format!("!{}", error.to_report()),
        };
        let Some(staging) = self.staging else {
            // Renamed into place so that the coordinator never sees half a report. On a full disk there may be no room for it: then the
            // error of writing is the one to return.
            let unfinished = report.with_extension("unfinished");
            let reported = fs::write(&unfinished, report_text).and_then(|()| fs::rename(&unfinished, &report));
            written?;
            return reported.map_err(|error| unwritable(&report, &error));
        };
        // Also after an error: the directory must not be removed while other ranks write to it.
        let mut reports = ReportWait::new(self.options.deadline, &self.wait);
        let other_ranks = (0..self.ranks).filter(|&rank| rank != self.rank);
        let reported: Vec<_> = other_ranks.map(|rank| reports.read(&report_path(&staged, rank), rank)).collect();
        let mut all = written?;
        for files in reported {
            all.extend(files?);
        }
        finish_checkpoint(writer, &staged, contents, all)?;
        self.options.before_commit.iter().try_for_each(|hook| hook.run(&staged))?;
        staging.commit()?;
        self.options.after_commit.iter().try_for_each(|hook| hook.run(&self.target))
    }

    fn report_of(&self, rank: usize) -> PathBuf {
        report_path(&self.staged, rank)
    }
}

fn report_path(staged: &Path, rank: usize) -> PathBuf {
    staged.join(format!("written-by-{rank}.json"))
}

/// Writes the files of one rank into the staging directory.
fn write_boxes(
    writer: &dyn FormatWriter,
    staged: &Path,
    (rank, ranks): (usize, usize),
    boxes: Vec<BoxToWrite>,
    (values, paths): (&BTreeMap<String, Value>, &BTreeMap<String, Vec<Key>>),
) -> Result<Vec<WrittenFile>> {
    let files = boxes_by_file(writer, boxes);
    let (count, none) = (files.len(), BTreeMap::new());
    let mut written = Vec::new();
    for (index, boxes) in files.into_iter().enumerate() {
        let values = if index == 0 { values } else { &none };
        if !boxes.is_empty() || !values.is_empty() {
            let name = writer.file_name(FileRole::OfRank { rank, ranks, index, count });
            written.push(write_file(writer, staged, &name, boxes, (values, paths), &|_| {})?);
        }
    }
    Ok(written)
}

/// Waits for the reports of other ranks, for all of them together as long as the options say.
struct ReportWait<'a> {
    start: Instant,
    /// When it was seen that nobody waits for the save.
    left: Option<Instant>,
    deadline: Duration,
    wait: &'a AtomicU8,
}

/// Largest report of a rank: some hundred bytes for each box of a model.
const MOST_REPORT_BYTES: u64 = 1 << 30;

impl<'a> ReportWait<'a> {
    fn new(deadline: Duration, wait: &'a AtomicU8) -> Self {
        ReportWait { start: Instant::now(), left: None, deadline, wait }
    }

    /// Waits for the report of a rank, removes it and returns the files that the rank wrote.
    fn read(&mut self, path: &Path, rank: usize) -> Result<Vec<WrittenFile>> {
        while !path.exists() {
            if self.wait.load(SeqCst) == ABANDONED {
                self.left.get_or_insert_with(Instant::now);
            }
            let is_failed = self.wait.load(SeqCst) == FAILED;
            let is_late = self.start.elapsed() > self.deadline;
            if is_failed || is_late || self.left.is_some_and(|since| since.elapsed() > GRACE) {
                let found = format!("nothing from rank {rank} after {:?}", self.start.elapsed());
                return Err(ErrorKind::path(path).error(
                    "save",
                    found,
                    "the files of all ranks",
                    "check what that rank was doing",
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let text = read_text(path, MOST_REPORT_BYTES)?;
        fs::remove_file(path).map_err(|error| unwritable(path, &error))?;
        match text.strip_prefix('!') {
            Some(report) => Err(Error::from_report(rank, report)),
            None => serde_json::from_str(&text).map_err(Error::other),
        }
    }
}
