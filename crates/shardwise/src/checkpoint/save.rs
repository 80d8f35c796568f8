//! Saving: each rank writes its share of the boxes, and the new checkpoint replaces the old one atomically.

use std::collections::BTreeMap;
use std::fs;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_core::{DType, Tensor};

use super::assign::{WriteTask, assign_writers, write_tasks};
use super::content::{BoxContent, BoxToWrite};
use super::directory::{Staging, unwritable};
use super::element::ElementType;
use super::format::{FileRole, Format, FormatWriter, ValueStorage, WrittenFile};
use super::state::{State, StateLeaf};
use super::stored::{Contents, StoredTensor};
use super::value::Value;
use super::write::{boxes_by_file, finish_checkpoint, write_file};
use crate::comm::{World, agree, all_ok, gather_texts};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::layout::{OwnedBox, TensorBox, TensorMeta};
use crate::redistribute::block;
use crate::sharded::ShardedTensor;
use crate::tensor::DTensor;
use shardwise_kernels::{bytes_of, contiguous, own_copy, placeholder};

/// Options of a save: format and timeout.
#[doc(alias = "FileSystemWriter")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveOptions {
    /// The file format; [`Format::Native`] by default.
    pub format: Format,
    /// How long rank 0, which completes the checkpoint, waits for the files of the other ranks; 240 s by default, less than
    /// the 300 s of collectives, so that the error names the missing files and is not a timeout of the next collective.
    pub deadline: Duration,
}

impl Default for SaveOptions {
    fn default() -> Self {
        SaveOptions { format: Format::Native, deadline: Duration::from_secs(240) }
    }
}

/// Saves `state` as a checkpoint directory.
///
/// Collective: every rank of the world must call it with the same path and the same structure of state. Each box of a tensor
/// is written once, by one of the ranks that hold it, balanced by bytes; a `Partial` tensor is reduced first. Apart from that
/// ranks exchange only the plan and errors. An existing checkpoint at `path` is replaced atomically: a crash at any moment
/// leaves the old one or the new one.
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
///     assert_eq!(loaded.tensor("weight")?.to_local().to_vec1::<f32>()?[5], 5.0);
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), Error>(())
/// ```
#[track_caller]
pub fn save(world: &World, path: impl AsRef<Path>, state: &State) -> Result<()> {
    begin(world, path.as_ref(), state, &SaveOptions::default(), Location::caller())?.finish(Location::caller())
}

/// Saves `state` as [`save`] does, with a format and a timeout.
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
/// Dropped without [`wait`](Self::wait), rank 0 waits at most 5 more seconds for the files of the other ranks and then gives
/// up; an incomplete save never replaces the old checkpoint.
#[doc(alias = "AsyncSaveResponse")]
#[must_use = "the checkpoint is complete only after `wait`"]
pub struct AsyncSave {
    world: World,
    writer: Option<JoinHandle<Result<()>>>,
    /// Whether rank 0's writer should go on waiting for the other ranks: [`AWAITED`], [`ABANDONED`] or [`FAILED`].
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
        // Join all ranks but rank 0 first, so that rank 0 does not wait for the files of a rank that failed.
        let is_first = self.world.rank() == 0;
        let joined = if is_first { Ok(()) } else { self.join() };
        let other_ranks = all_ok(&self.world, joined, site);
        if other_ranks.is_err() {
            self.wait.store(FAILED, SeqCst);
        }
        let joined = if is_first { self.join() } else { Ok(()) };
        // If another rank failed, that is why rank 0 did: its error is the one to report.
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
    let planned = options.format.to_write().and_then(|writer| Ok((writer, plan(world, state, writer)?)));
    let (writer, planned) = all_ok(world, planned, site)?;
    let fingerprint = format!("{} {}", options.format, planned.describe());
    agree(world, &[("state to save", &fingerprint), ("path to save to", &path.to_string_lossy())], site)?;
    let rank = world.rank();
    // Rank 0 creates the staging directory; all ranks write to it.
    let staging = match rank {
        0 => Staging::new(path, unique()).map(Some),
        _ => Ok(None),
    };
    let staging = all_ok(world, staging, site)?;
    let chosen =
        gather_texts(world, &staging.as_ref().map_or_else(String::new, |s| s.path().to_string_lossy().into()), site)?;
    let wait = Arc::new(AtomicU8::new(AWAITED));
    let job = RankWriter {
        rank,
        ranks: world.size(),
        writer,
        deadline: options.deadline,
        staged: PathBuf::from(&chosen[0]),
        staging,
        wait: Arc::clone(&wait),
        planned,
    };
    let writer = std::thread::Builder::new().name(format!("save of rank {rank}")).spawn(move || job.run());
    let writer = all_ok(world, writer.map_err(Error::from), site)?;
    Ok(AsyncSave { world: world.clone(), writer: Some(writer), wait })
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

/// The plan of a save: all metadata, and the boxes that this rank writes.
struct SavePlan {
    /// All tensors, without chunks, and all values.
    contents: Contents,
    /// Tensor, box and writing rank of every box.
    writers: Vec<(String, TensorBox, usize)>,
    /// The boxes that this rank writes.
    boxes: Vec<BoxToWrite>,
    /// CRC-32 of the plain tensors, which must be the same on all ranks.
    plain: Vec<(String, u32)>,
}

impl SavePlan {
    /// The plan as text, for comparison between ranks.
    fn describe(&self) -> String {
        let values: Vec<String> = self.contents.values.iter().map(|(key, value)| format!("{key} = {value}")).collect();
        let tensor = |(key, t): (&String, &StoredTensor)| format!("{key}: {} {:?}", t.element, t.shape);
        let tensors: Vec<String> = self.contents.tensors.iter().map(tensor).collect();
        format!("{values:?} {tensors:?} {:?} {:?}", self.writers, self.plain)
    }
}

fn plan(world: &World, state: &State, writer: &dyn FormatWriter) -> Result<SavePlan> {
    let mut contents = Contents::default();
    let mut all: Vec<WriteTask> = Vec::new();
    let mut sources: BTreeMap<String, TensorToSave> = BTreeMap::new();
    let mut plain = Vec::new();
    for (key, (path, leaf)) in state.flatten()? {
        let source = match leaf {
            StateLeaf::Value(value) => {
                check_value(&key, &value, writer)?;
                contents.values.insert(key.clone(), value);
                contents.paths.insert(key, path);
                continue;
            }
            StateLeaf::Tensor(tensor) => TensorToSave::of_tensor(tensor, world.rank())?,
            StateLeaf::Sharded(tensor) => TensorToSave::of_sharded(tensor, world.rank()),
            StateLeaf::Plain(tensor) => {
                let source = TensorToSave::of_plain(tensor, world)?;
                plain.push((key.clone(), crc32fast::hash(&bytes_of(&source.tensors[0])?)));
                source
            }
        };
        let (element, shape) = (ElementType::of(source.dtype)?, source.shape.clone());
        all.extend(write_tasks(&key, element.size_in_bytes(), source.stored_boxes()));
        sources.insert(key.clone(), source);
        contents.tensors.insert(key.clone(), StoredTensor { element, shape, chunks: Vec::new() });
        contents.paths.insert(key, path);
    }
    let mut boxes = Vec::new();
    let mut writers = Vec::new();
    for (task, rank) in all.iter().zip(assign_writers(&all)) {
        writers.push((task.key.clone(), task.part.clone(), rank));
        if rank == world.rank() {
            let stored = &contents.tensors[&task.key];
            boxes.push(BoxToWrite {
                key: task.key.clone(),
                part: task.part.clone(),
                is_whole: task.part.sizes == stored.shape,
                content: BoxContent::Memory {
                    element: stored.element,
                    tensor: sources[&task.key].elements(&task.part)?,
                },
            });
        }
    }
    Ok(SavePlan { contents, writers, boxes, plain })
}

/// Refuses a value for a format that cannot store values.
fn check_value(key: &str, value: &Value, writer: &dyn FormatWriter) -> Result<()> {
    if writer.values() != ValueStorage::Nowhere {
        return Ok(());
    }
    let (found, needed) = (format!("value {key:?} = {value}"), "tensors only: the format stores no values");
    Err(ErrorKind::Unsupported.error("state", found, needed, "save it in another format, or leave it out"))
}

/// A tensor to save: which rank holds which box, and the elements that this rank holds.
struct TensorToSave {
    dtype: DType,
    shape: Vec<usize>,
    /// The boxes of all ranks.
    boxes: Vec<OwnedBox>,
    local_boxes: Vec<OwnedBox>,
    /// The elements of this rank's boxes: one tensor with all of them, or one tensor per box.
    tensors: Vec<Tensor>,
}

impl TensorToSave {
    fn of_tensor(tensor: &DTensor, rank: usize) -> Result<Self> {
        let tensor = tensor.reduced(Location::caller())?;
        Ok(TensorToSave {
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            boxes: tensor.layout().boxes().collect(),
            local_boxes: tensor.layout().boxes_of(rank),
            tensors: vec![tensor.local().clone()],
        })
    }

    fn of_sharded(tensor: &ShardedTensor, rank: usize) -> Self {
        let ranks = tensor.device_mesh().ranks();
        let boxes = ranks.iter().flat_map(|&r| tensor.metadata().boxes_of(r)).collect();
        let (mut local_boxes, mut tensors) = (Vec::new(), Vec::new());
        for shard in tensor.local_shards().iter().filter(|s| s.metadata().volume() > 0) {
            let local_offsets = vec![0; shard.metadata().offsets.len()];
            local_boxes.push(OwnedBox { rank, global: shard.metadata().as_box(), local_offsets });
            tensors.push(shard.held().clone());
        }
        TensorToSave { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), boxes, local_boxes, tensors }
    }

    fn of_plain(tensor: &Tensor, world: &World) -> Result<Self> {
        // A copy, because the program may write to it in place while an asynchronous save is running.
        let tensor = own_copy(tensor)?;
        let (dtype, shape) = (tensor.dtype(), tensor.dims().to_vec());
        let whole = TensorBox { offsets: vec![0; shape.len()], sizes: shape.clone() };
        let owned = |rank| OwnedBox { rank, global: whole.clone(), local_offsets: whole.offsets.clone() };
        let boxes = if whole.volume() == 0 { Vec::new() } else { (0..world.size()).map(owned).collect() };
        Ok(TensorToSave { dtype, shape, boxes, local_boxes: vec![owned(world.rank())], tensors: vec![tensor] })
    }

    /// The boxes to write. A tensor without elements is stored too, by rank 0.
    fn stored_boxes(&self) -> Vec<OwnedBox> {
        if !self.boxes.is_empty() {
            return self.boxes.clone();
        }
        let global = TensorBox { offsets: vec![0; self.shape.len()], sizes: self.shape.clone() };
        vec![OwnedBox { rank: 0, global, local_offsets: Vec::new() }]
    }

    /// The elements of one of this rank's boxes.
    fn elements(&self, part: &TensorBox) -> Result<Tensor> {
        if part.volume() == 0 {
            return Ok(contiguous(&placeholder(&TensorMeta { shape: part.sizes.clone(), dtype: self.dtype })?)?);
        }
        let at = self
            .local_boxes
            .iter()
            .position(|owned| owned.global == *part)
            .expect("a task is assigned to a rank that holds its box");
        let tensor = if self.tensors.len() == self.local_boxes.len() { &self.tensors[at] } else { &self.tensors[0] };
        Ok(contiguous(&block(tensor, &self.local_boxes[at].local_offsets, &part.sizes)?)?)
    }
}

/// One rank's writer thread. Ranks report to rank 0 through files in the staging directory and not by collectives, which the
/// program may be using meanwhile.
struct RankWriter {
    rank: usize,
    ranks: usize,
    writer: &'static dyn FormatWriter,
    deadline: Duration,
    staged: PathBuf,
    /// Only on rank 0, which commits it.
    staging: Option<Staging>,
    wait: Arc<AtomicU8>,
    planned: SavePlan,
}

impl RankWriter {
    fn run(self) -> Result<()> {
        let (report, rank) = (self.report_of(self.rank), self.rank);
        let (writer, staged) = (self.writer, self.staged.clone());
        let (boxes, contents) = (self.planned.boxes, self.planned.contents);
        // Values are the same on all ranks; rank 0 writes them.
        let in_files = rank == 0 && writer.values() == ValueStorage::InFiles;
        let values = if in_files { contents.values.clone() } else { BTreeMap::new() };
        let written = write_boxes(writer, &staged, (rank, self.ranks), boxes, &values);
        let report_text = match &written {
            Ok(files) => serde_json::to_string(files).map_err(Error::other)?,
            Err(error) => format!("!{}", error.to_report()),
        };
        let Some(staging) = self.staging else {
            // Renamed into place so that rank 0 never sees half a report. On a full disk there may be no room for it: then the
            // error of writing is the one to return.
            let unfinished = report.with_extension("unfinished");
            let reported = fs::write(&unfinished, report_text).and_then(|()| fs::rename(&unfinished, &report));
            written?;
            return reported.map_err(|error| unwritable(&report, &error));
        };
        let mut all = written?;
        for rank in 1..self.ranks {
            let path = report_path(&staged, rank);
            all.extend(wait_for(&path, rank, self.deadline, &self.wait)?);
            fs::remove_file(&path).map_err(|error| unwritable(&path, &error))?;
        }
        finish_checkpoint(writer, &staged, contents, all)?;
        staging.commit()
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
    values: &BTreeMap<String, Value>,
) -> Result<Vec<WrittenFile>> {
    let files = boxes_by_file(writer, boxes);
    let (count, none) = (files.len(), BTreeMap::new());
    let mut written = Vec::new();
    for (index, boxes) in files.into_iter().enumerate() {
        let values = if index == 0 { values } else { &none };
        if !boxes.is_empty() || !values.is_empty() {
            let name = writer.file_name(FileRole::OfRank { rank, ranks, index, count });
            written.push(write_file(writer, staged, &name, boxes, values, &|_| {})?);
        }
    }
    Ok(written)
}

/// Waits for the report of another rank and returns the files that it wrote.
fn wait_for(path: &Path, rank: usize, deadline: Duration, wait: &AtomicU8) -> Result<Vec<WrittenFile>> {
    let start = Instant::now();
    let mut left = None;
    while !path.exists() {
        if wait.load(SeqCst) == ABANDONED {
            left.get_or_insert_with(Instant::now);
        }
        let is_failed = wait.load(SeqCst) == FAILED;
        if is_failed || start.elapsed() > deadline || left.is_some_and(|since| since.elapsed() > GRACE) {
            let found = format!("nothing from rank {rank} after {:?}", start.elapsed());
            return Err(ErrorKind::path(path).error(
                "save",
                found,
                "the files of all ranks",
                "check what that rank was doing",
            ));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let text = fs::read_to_string(path)?;
    match text.strip_prefix('!') {
        Some(report) => Err(Error::from_report(rank, report)),
        None => serde_json::from_str(&text).map_err(Error::other),
    }
}
