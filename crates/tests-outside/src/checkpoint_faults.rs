//! Failures injected into every stage of a save and of a load, with every rank as the failing one: all ranks get an error that
//! names it, and the checkpoint that was there stays. The stages are those of a custom format.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use shardwise::ThreadWorld;
use shardwise::candle_core::{Device, Tensor};
use shardwise::checkpoint::{
    self, CheckpointFormat, Contents, FileRole, FileToWrite, Files, Format, FormatWriter, Restore, SaveOptions, State,
    Stateful, Value, ValueStorage, WrittenFile,
};
use shardwise::error::ErrorKind;
use shardwise::prelude::*;

/// Where a failure happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
enum Stage {
    Never,
    /// The state of a rank cannot be described.
    Plan,
    /// A rank cannot write its file.
    Write,
    /// A rank writes its file after the coordinator has stopped waiting for it.
    Late,
    /// The coordinator cannot write the index.
    Finish,
    /// A rank cannot read the metadata.
    Open,
    /// A rank asks for what is not there.
    Match,
    /// A rank cannot read elements.
    Read,
}

static STAGE: AtomicUsize = AtomicUsize::new(0);
static FAILING: AtomicUsize = AtomicUsize::new(0);
/// Whether the late rank may write.
static RELEASED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The rank of this thread: a format does not know which rank reads.
    static RANK: Cell<usize> = const { Cell::new(usize::MAX) };
}

fn fail(stage: Stage, rank: usize) -> Result<()> {
    match STAGE.load(SeqCst) == stage as usize && FAILING.load(SeqCst) == rank {
        true => {
            Err(ErrorKind::Argument.error("fault", format!("{stage:?} on rank {rank}"), "none", "remove the fault"))
        }
        false => Ok(()),
    }
}

/// The native format, with faults.
struct Faulty;

const INDEX: &str = "faulty.json";

impl CheckpointFormat for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn about(&self) -> &'static str {
        "boxes with injected failures"
    }

    fn detect(&self, files: &Files) -> bool {
        files.size(INDEX).is_some()
    }

    fn open(&self, files: &Files) -> Result<Contents> {
        fail(Stage::Open, RANK.get())?;
        let (tensors, values) = serde_json::from_slice(&files.read_small(INDEX, 1 << 20)?).map_err(Error::other)?;
        let contents = Contents { tensors, values, ..Contents::default() };
        for file in contents.tensors.values().flat_map(|tensor| tensor.chunks.iter().map(|chunk| chunk.file.clone())) {
            files.check_before_read(&file, |_| fail(Stage::Read, RANK.get()));
        }
        Ok(contents)
    }

    fn owns(&self, name: &str) -> bool {
        name == INDEX || name.ends_with(".faulty")
    }

    fn writer(&self) -> Option<&dyn FormatWriter> {
        Some(self)
    }
}

impl FormatWriter for Faulty {
    fn values(&self) -> ValueStorage {
        ValueStorage::InIndex
    }

    fn file_name(&self, file: FileRole) -> String {
        let (FileRole::Whole { index: rank, .. } | FileRole::OfRank { rank, .. }) = file;
        format!("{rank}.faulty")
    }

    fn write_file(&self, out: &mut BufWriter<File>, file: FileToWrite<'_>) -> Result<WrittenFile> {
        let rank: usize = file.name.trim_end_matches(".faulty").parse().map_err(Error::other)?;
        fail(Stage::Write, rank)?;
        while fail(Stage::Late, rank).is_err() && !RELEASED.load(SeqCst) {
            std::thread::yield_now();
        }
        let mut chunks = Vec::new();
        for part in &file.boxes {
            chunks.push((part.key.clone(), part.write(out, file.name, file.progress)?));
        }
        Ok(WrittenFile { name: file.name.to_string(), chunks, note: serde_json::Value::Null })
    }

    fn index(&self, contents: &Contents, _: &[WrittenFile]) -> Result<Option<(String, Vec<u8>)>> {
        // Only the coordinator gets here; it is the rank that the test chose.
        fail(Stage::Finish, FAILING.load(SeqCst))?;
        let bytes = serde_json::to_vec(&(&contents.tensors, &contents.values)).map_err(Error::other)?;
        Ok(Some((INDEX.to_string(), bytes)))
    }
}

/// A part of the program with a state of its own, which may fail.
struct Counter {
    count: i64,
    rank: usize,
}

impl Stateful for &mut Counter {
    fn entry(&self) -> &str {
        "counter"
    }

    fn state(&self) -> Result<State> {
        fail(Stage::Match, self.rank)?;
        Ok(State::map([("count", self.count)]))
    }
}

impl Restore for &mut Counter {
    fn restore(&mut self, loaded: &State) -> Result<()> {
        self.count = loaded.value("count")?.read()?;
        Ok(())
    }
}

const RANKS: usize = 4;

fn state(world: &World, step: i64) -> Result<State> {
    let mesh = world.mesh([("all", RANKS)])?;
    let whole = Tensor::arange(0f32, 64.0, &Device::Cpu)?.reshape((8, 8))?;
    let weight = DTensor::distribute_tensor(&(whole + step as f64)?, &mesh, [Shard(0)], None)?;
    let mut state = State::map([("weight", State::from(weight)), ("counter", State::map([("count", step)]))]);
    if fail(Stage::Plan, world.rank()).is_err() {
        // Two paths with one flat key: refused while the rank plans.
        state.extend([("counter.count", State::from(0))]);
    }
    Ok(state)
}

/// Runs a program on all ranks and returns the error of each.
fn errors(program: impl Fn(&World) -> Result<()> + Send + Sync + 'static) -> Vec<Option<String>> {
    let world = ThreadWorld::new(RANKS).unwrap().deadline(Duration::from_secs(20));
    let run = move |world: World| {
        RANK.set(world.rank());
        let result = program(&world).err().map(|error| error.to_string());
        // No rank leaves before all have their result: whoever left early would be the reason of other errors.
        world.barrier()?;
        Ok(result)
    };
    world.run(run).unwrap()
}

/// One test, because the faults are switched on for the whole process.
#[test]
fn a_failure_of_any_rank_in_any_stage_is_the_error_of_all_and_loses_nothing() {
    let format = Format::register(Box::leak(Box::new(Faulty))).unwrap();
    let root = std::env::temp_dir().join(format!("shardwise-outside-faults-{}", std::process::id()));
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root).unwrap();
    let path = root.join("state");
    let save = |step: i64, coordinator: usize, path: PathBuf| {
        errors(move |world| {
            let options = SaveOptions { format, coordinator, ..SaveOptions::default() };
            checkpoint::save_with(world, &path, &state(world, step)?, &options)
        })
    };
    let load = |path: PathBuf| {
        errors(move |world| {
            let mesh = world.mesh([("all", RANKS)])?;
            let like = DTensor::zeros((8, 8), DType::F32, &mesh, [Shard(1)])?;
            let mut counter = Counter { count: -1, rank: world.rank() };
            let loaded = checkpoint::load_into(world, &path, (&mut counter,)).and_then(|_| {
                let template = State::map([("weight", like)]);
                checkpoint::load(world, &path, &template)
            });
            assert!(loaded.is_ok() || counter.count <= 1, "an old count or none");
            loaded.map(drop)
        })
    };
    let all_ok = |found: Vec<Option<String>>| assert!(found.iter().all(Option::is_none), "{found:?}");
    all_ok(save(1, 0, path.clone()));
    let stages = [Stage::Plan, Stage::Write, Stage::Finish, Stage::Open, Stage::Match, Stage::Read];
    for rank in 0..RANKS {
        for stage in stages {
            FAILING.store(rank, SeqCst);
            STAGE.store(stage as usize, SeqCst);
            // The coordinator fails, or another rank does.
            let coordinators = match stage {
                Stage::Finish => vec![rank],
                Stage::Plan | Stage::Write => vec![rank, (rank + 1) % RANKS],
                _ => Vec::new(),
            };
            let mut outcomes: Vec<_> = coordinators.into_iter().map(|c| save(2, c, path.clone())).collect();
            if outcomes.is_empty() {
                outcomes.push(load(path.clone()));
            }
            for found in outcomes {
                for error in &found {
                    let error = error.as_ref().unwrap_or_else(|| panic!("{stage:?} on rank {rank}: {found:?}"));
                    assert!(error.contains(&format!("on rank {rank}")), "{stage:?} on rank {rank}: {error}");
                }
            }
            STAGE.store(Stage::Never as usize, SeqCst);
            all_ok(load(path.clone()));
            let catalog = checkpoint::open(&path).unwrap();
            assert_eq!(catalog.value("counter.count").unwrap(), Value::Int(1), "{stage:?}: the old one stays");
            assert_eq!(fs::read_dir(&root).unwrap().count(), 1, "{stage:?}: nothing is left next to it");
        }
    }
    // The coordinator waits for the files of other ranks as long as the options say: here it stops while rank 1 still writes.
    assert_eq!(SaveOptions::default().deadline, Duration::from_secs(240));
    FAILING.store(1, SeqCst);
    STAGE.store(Stage::Late as usize, SeqCst);
    let place = path.clone();
    let found = errors(move |world| {
        let options = SaveOptions { format, deadline: Duration::from_millis(20), ..SaveOptions::default() };
        let saving = checkpoint::async_save(world, &place, &state(world, 3)?, &options)?;
        if world.rank() == 0 {
            while !saving.is_finished() {
                std::thread::yield_now();
            }
            RELEASED.store(true, SeqCst);
        }
        saving.wait()
    });
    assert!(found.iter().all(|error| error.as_ref().is_some_and(|error| error.contains("rank 1"))), "{found:?}");
    STAGE.store(Stage::Never as usize, SeqCst);
    assert_eq!(checkpoint::open(&path).unwrap().value("counter.count").unwrap(), Value::Int(1), "the old one stays");
    // Only one process.
    for stage in [Stage::Write, Stage::Finish] {
        FAILING.store(0, SeqCst);
        STAGE.store(stage as usize, SeqCst);
        let place = path.clone();
        let options = SaveOptions { format, ..SaveOptions::default() };
        let result =
            launch(1, move |world| checkpoint::save_with(&world, &place, &State::map([("x", 1f64)]), &options));
        // A state without tensors has no file to write.
        assert_eq!(result.is_err(), stage == Stage::Finish);
    }
    STAGE.store(Stage::Never as usize, SeqCst);
    let _ = fs::remove_dir_all(&root);
}
