//! Saving: every rank writes what it owns, and the new checkpoint takes the place of the old one as a whole.

use std::collections::BTreeMap;
use std::fs;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_core::{DType, Tensor};

use super::assign::{Task, assign, tasks};
use super::content::{BoxToWrite, Content};
use super::directory::{Staging, unwritable};
use super::element::ElementType;
use super::format::{FileRole, Format, FormatWriter, ValueStorage, WrittenFile};
use super::state::{Leaf, State};
use super::stored::{Contents, StoredTensor};
use super::value::Value;
use super::write::{in_files, seal, write_file};
use crate::comm::{World, agree, texts, together};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::layout::{OwnedBox, TensorBox, TensorMeta};
use crate::redistribute::block;
use crate::sharded::ShardedTensor;
use crate::tensor::DTensor;
use shardwise_kernels::{bytes_of, contiguous, own_copy, placeholder};

/// How a checkpoint is saved.
#[doc(alias = "FileSystemWriter")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveOptions {
    /// The format.
    pub format: Format,
    /// How long the rank that puts the checkpoint together waits for the files of the others.
    pub deadline: Duration,
}

impl Default for SaveOptions {
    fn default() -> Self {
        SaveOptions { format: Format::Native, deadline: Duration::from_secs(240) }
    }
}

/// Saves state to a directory, which becomes a checkpoint. All ranks of the world make the call.
///
/// Every box of a tensor is written once, by one of the ranks that hold it. If a checkpoint is there already, it is replaced
/// as a whole: a crash at any moment leaves the old one or the new one.
///
/// ```
/// use shardwise::checkpoint::{self, State};
/// use shardwise::prelude::*;
///
/// # let directory = std::env::temp_dir().join(format!("shardwise-save-{}", std::process::id()));
/// # let path = directory.clone();
/// launch(2, move |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let weight = DTensor::arange(0.0, 6.0, 1.0, DType::F32, &mesh, [Shard(0)])?;
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

/// As [`save`], with options.
#[track_caller]
pub fn save_with(world: &World, path: impl AsRef<Path>, state: &State, options: &SaveOptions) -> Result<()> {
    begin(world, path.as_ref(), state, options, Location::caller())?.finish(Location::caller())
}

/// As [`save_with`], but returns as soon as it is clear what will be written; threads do the rest. What is saved is the
/// state as it is now: tensors never change, so a snapshot costs nothing.
#[track_caller]
pub fn async_save(world: &World, path: impl AsRef<Path>, state: &State, options: &SaveOptions) -> Result<AsyncSave> {
    begin(world, path.as_ref(), state, options, Location::caller())
}

/// A save that is under way.
#[doc(alias = "AsyncSaveResponse")]
#[must_use = "the checkpoint is certain only after wait"]
pub struct AsyncSave {
    world: World,
    writer: Option<JoinHandle<Result<()>>>,
    /// Whether the writer of the first rank is to wait for the others.
    wait: Arc<AtomicU8>,
}

impl AsyncSave {
    /// Whether this rank has done its part.
    pub fn is_finished(&self) -> bool {
        self.writer.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the checkpoint is complete. All ranks make the call; if one of them failed, all get its error.
    #[track_caller]
    pub fn wait(self) -> Result<()> {
        self.finish(Location::caller())
    }

    fn finish(mut self, site: Site) -> Result<()> {
        // First all but the first rank, so that it need not wait for the files of one that has failed.
        let is_first = self.world.rank() == 0;
        let mine = if is_first { Ok(()) } else { self.join() };
        let others = together(&self.world, mine, site);
        if others.is_err() {
            self.wait.store(FAILED, SeqCst);
        }
        let mine = if is_first { self.join() } else { Ok(()) };
        // An error of the others explains that of the first rank.
        match others {
            Ok(()) => together(&self.world, mine, site),
            Err(error) => Err(error),
        }
    }

    fn join(&mut self) -> Result<()> {
        let Some(writer) = self.writer.take() else { return Ok(()) };
        writer.join().unwrap_or_else(|_| Err(Error::other("the thread that writes the checkpoint panicked")))
    }
}

impl Drop for AsyncSave {
    /// Without [`wait`](Self::wait) the save goes on only as long as its end is near: a rank that fails must not wait for
    /// others.
    fn drop(&mut self) {
        let _ = self.wait.compare_exchange(AWAITED, ABANDONED, SeqCst, SeqCst);
        let _ = self.join();
    }
}

/// How long a save that nobody waits for goes on waiting for other ranks.
const GRACE: Duration = Duration::from_secs(5);

/// Plans the save on all ranks together, and starts to write.
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
    let (writer, planned) = together(world, planned, site)?;
    let fingerprint = format!("{} {}", options.format, planned.describe());
    agree(world, &[("state to save", &fingerprint), ("path to save to", &path.to_string_lossy())], site)?;
    let me = world.rank();
    // One rank makes the directory, all use it.
    let staging = match me {
        0 => Staging::new(path, unique()).map(Some),
        _ => Ok(None),
    };
    let staging = together(world, staging, site)?;
    let chosen = texts(world, &staging.as_ref().map_or_else(String::new, |s| s.path().to_string_lossy().into()), site)?;
    let wait = Arc::new(AtomicU8::new(AWAITED));
    let job = Job {
        rank: me,
        ranks: world.size(),
        writer,
        deadline: options.deadline,
        staged: PathBuf::from(&chosen[0]),
        staging,
        wait: Arc::clone(&wait),
        planned,
    };
    let writer = std::thread::Builder::new().name(format!("save of rank {me}")).spawn(move || job.run());
    let writer = together(world, writer.map_err(Error::from), site)?;
    Ok(AsyncSave { world: world.clone(), writer: Some(writer), wait })
}

/// Somebody waits for the save.
const AWAITED: u8 = 0;
/// Nobody does any more.
const ABANDONED: u8 = 1;
/// A rank has failed: there is nothing to wait for.
const FAILED: u8 = 2;

/// A number that no other save has.
fn unique() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    now ^ (u64::from(std::process::id()) << 40)
}

/// What is saved, and what this rank writes of it.
struct Planned {
    /// All tensors without their chunks, and all values.
    contents: Contents,
    /// Who writes which box.
    writers: Vec<(String, TensorBox, usize)>,
    /// What this rank writes.
    boxes: Vec<BoxToWrite>,
    /// Checksums of tensors that should be the same on all ranks.
    plain: Vec<(String, u32)>,
}

impl Planned {
    /// The plan in words that are the same on all ranks if the plan is.
    fn describe(&self) -> String {
        let values: Vec<String> = self.contents.values.iter().map(|(key, value)| format!("{key} = {value}")).collect();
        let tensor = |(key, t): (&String, &StoredTensor)| format!("{key}: {} {:?}", t.element, t.shape);
        let tensors: Vec<String> = self.contents.tensors.iter().map(tensor).collect();
        format!("{values:?} {tensors:?} {:?} {:?}", self.writers, self.plain)
    }
}

fn plan(world: &World, state: &State, writer: &dyn FormatWriter) -> Result<Planned> {
    let mut contents = Contents::default();
    let mut all: Vec<Task> = Vec::new();
    let mut sources: BTreeMap<String, Source> = BTreeMap::new();
    let mut plain = Vec::new();
    for (key, (path, leaf)) in state.flatten()? {
        let source = match leaf {
            Leaf::Value(value) => {
                check_value(&key, &value, writer)?;
                contents.values.insert(key.clone(), value);
                contents.paths.insert(key, path);
                continue;
            }
            Leaf::Tensor(tensor) => Source::of_tensor(tensor, world.rank())?,
            Leaf::Sharded(tensor) => Source::of_sharded(tensor, world.rank()),
            Leaf::Plain(tensor) => {
                let source = Source::of_plain(tensor, world)?;
                plain.push((key.clone(), crc32fast::hash(&bytes_of(&source.tensors[0])?)));
                source
            }
        };
        let (element, shape) = (ElementType::of(source.dtype)?, source.shape.clone());
        all.extend(tasks(&key, element.size_in_bytes(), source.stored_boxes()));
        sources.insert(key.clone(), source);
        contents.tensors.insert(key.clone(), StoredTensor { element, shape, chunks: Vec::new() });
        contents.paths.insert(key, path);
    }
    let mut boxes = Vec::new();
    let mut writers = Vec::new();
    for (task, rank) in all.iter().zip(assign(&all)) {
        writers.push((task.key.clone(), task.part.clone(), rank));
        if rank == world.rank() {
            let stored = &contents.tensors[&task.key];
            boxes.push(BoxToWrite {
                key: task.key.clone(),
                part: task.part.clone(),
                is_whole: task.part.sizes == stored.shape,
                content: Content::Memory { element: stored.element, tensor: sources[&task.key].cut(&task.part)? },
            });
        }
    }
    Ok(Planned { contents, writers, boxes, plain })
}

/// An error if a format cannot store a value.
fn check_value(key: &str, value: &Value, writer: &dyn FormatWriter) -> Result<()> {
    if writer.values() != ValueStorage::Nowhere {
        return Ok(());
    }
    let (found, needed) = (format!("value {key:?} = {value}"), "tensors only, which is all that this format has");
    Err(ErrorKind::Unsupported.error("state", found, needed, "save it in another format, or leave it out"))
}

/// A tensor to be saved: who holds which box of it, and the boxes that this rank holds.
struct Source {
    dtype: DType,
    shape: Vec<usize>,
    /// Of all ranks.
    boxes: Vec<OwnedBox>,
    mine: Vec<OwnedBox>,
    /// All boxes of this rank in one tensor, or one tensor each.
    tensors: Vec<Tensor>,
}

impl Source {
    fn of_tensor(tensor: &DTensor, rank: usize) -> Result<Self> {
        let tensor = tensor.reduced(Location::caller())?;
        Ok(Source {
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            boxes: tensor.layout().boxes().collect(),
            mine: tensor.layout().boxes_of(rank),
            tensors: vec![tensor.local().clone()],
        })
    }

    fn of_sharded(tensor: &ShardedTensor, rank: usize) -> Self {
        let ranks = tensor.device_mesh().ranks();
        let boxes = ranks.iter().flat_map(|&r| tensor.metadata().boxes_of(r)).collect();
        let (mut mine, mut tensors) = (Vec::new(), Vec::new());
        for shard in tensor.local_shards().iter().filter(|s| s.metadata().volume() > 0) {
            let local_offsets = vec![0; shard.metadata().offsets.len()];
            mine.push(OwnedBox { rank, global: shard.metadata().as_box(), local_offsets });
            tensors.push(shard.held().clone());
        }
        Source { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), boxes, mine, tensors }
    }

    fn of_plain(tensor: &Tensor, world: &World) -> Result<Self> {
        // A copy, because it may be written to while an asynchronous save goes on.
        let tensor = own_copy(tensor)?;
        let (dtype, shape) = (tensor.dtype(), tensor.dims().to_vec());
        let whole = TensorBox { offsets: vec![0; shape.len()], sizes: shape.clone() };
        let owned = |rank| OwnedBox { rank, global: whole.clone(), local_offsets: whole.offsets.clone() };
        let boxes = if whole.volume() == 0 { Vec::new() } else { (0..world.size()).map(owned).collect() };
        Ok(Source { dtype, shape, boxes, mine: vec![owned(world.rank())], tensors: vec![tensor] })
    }

    /// The boxes to be written. A tensor without elements is stored too, by the first rank.
    fn stored_boxes(&self) -> Vec<OwnedBox> {
        if !self.boxes.is_empty() {
            return self.boxes.clone();
        }
        let global = TensorBox { offsets: vec![0; self.shape.len()], sizes: self.shape.clone() };
        vec![OwnedBox { rank: 0, global, local_offsets: Vec::new() }]
    }

    fn cut(&self, part: &TensorBox) -> Result<Tensor> {
        if part.volume() == 0 {
            return Ok(contiguous(&placeholder(&TensorMeta { shape: part.sizes.clone(), dtype: self.dtype })?)?);
        }
        let at = self.mine.iter().position(|owned| owned.global == *part).expect("tasks are boxes of their holders");
        let tensor = if self.tensors.len() == self.mine.len() { &self.tensors[at] } else { &self.tensors[0] };
        Ok(contiguous(&block(tensor, &self.mine[at].local_offsets, &part.sizes)?)?)
    }
}

/// One rank's work after the plan is made. Ranks find each other's results in the directory, not by communicating: the
/// program goes on with that meanwhile.
struct Job {
    rank: usize,
    ranks: usize,
    writer: &'static dyn FormatWriter,
    deadline: Duration,
    staged: PathBuf,
    /// Of the first rank, which commits it.
    staging: Option<Staging>,
    wait: Arc<AtomicU8>,
    planned: Planned,
}

impl Job {
    fn run(self) -> Result<()> {
        let (report, rank) = (self.report_of(self.rank), self.rank);
        let (writer, staged) = (self.writer, self.staged.clone());
        let (boxes, contents) = (self.planned.boxes, self.planned.contents);
        // Values are the same on all ranks; the first one writes them.
        let in_files = rank == 0 && writer.values() == ValueStorage::InFiles;
        let values = if in_files { contents.values.clone() } else { BTreeMap::new() };
        let mine = write_boxes(writer, &staged, (rank, self.ranks), boxes, &values);
        let said = match &mine {
            Ok(files) => serde_json::to_string(files).map_err(Error::other)?,
            Err(error) => format!("!{}", error.to_report()),
        };
        let Some(staging) = self.staging else {
            // The report appears as a whole. On a full disk there may be no room for it: what went wrong first counts.
            let unfinished = report.with_extension("unfinished");
            let reported = fs::write(&unfinished, said).and_then(|()| fs::rename(&unfinished, &report));
            mine?;
            return reported.map_err(|error| unwritable(&report, &error));
        };
        let mut all = mine?;
        for rank in 1..self.ranks {
            let path = report_path(&staged, rank);
            all.extend(wait_for(&path, rank, self.deadline, &self.wait)?);
            fs::remove_file(&path).map_err(|error| unwritable(&path, &error))?;
        }
        seal(writer, &staged, contents, all)?;
        staging.commit()
    }

    fn report_of(&self, rank: usize) -> PathBuf {
        report_path(&self.staged, rank)
    }
}

fn report_path(staged: &Path, rank: usize) -> PathBuf {
    staged.join(format!("written-by-{rank}.json"))
}

/// Writes the files of one rank.
fn write_boxes(
    writer: &dyn FormatWriter,
    staged: &Path,
    (rank, ranks): (usize, usize),
    boxes: Vec<BoxToWrite>,
    values: &BTreeMap<String, Value>,
) -> Result<Vec<WrittenFile>> {
    let files = in_files(writer, boxes);
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

/// What another rank has written, as soon as it says so.
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
                "look at what that rank was doing",
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
