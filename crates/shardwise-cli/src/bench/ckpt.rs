//! `shardwise bench ckpt`: throughput of saving and loading checkpoints.

use shardwise::error::ErrorKind;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::{Device, Tensor};
use clap::Args;
use serde::Serialize;
use shardwise::TensorMeta;
use shardwise::checkpoint::{self, State};
use shardwise::prelude::*;
use shardwise::read_file::{MOST_CONFIG_BYTES, open_file, read_text};

use crate::output::{RowPrinter, TableRow};
use crate::processes;

/// The options of `shardwise bench ckpt`.
#[derive(Args)]
#[command(after_help = "\
Saves 16 f32 matrices that are sharded on dimension 0 over 2 thread ranks (under mpirun, over its processes), loads them in the \
same layout, and loads them sharded on dimension 1. The `floor` cases write the same bytes to one file with fsync, and read \
them. Files are in the page cache when they are read.

Examples:
  shardwise bench ckpt
  shardwise bench ckpt --json --mb 1024 --dir /fast/disk
  mpirun -n 4 shardwise bench ckpt --dir /shared/disk")]
pub(crate) struct BenchCkptOptions {
    /// Total size of the tensors in MB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(16..))]
    mb: u64,
    /// Directory to write to, in a subdirectory that is removed at the end
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    dir: PathBuf,
    /// Repetitions per case; the best time is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Print JSON lines instead of a table
    #[arg(long)]
    json: bool,
}

/// Thread ranks outside an MPI job.
const RANKS: usize = 2;
const TENSORS: usize = 16;

#[derive(Serialize)]
struct CkptTiming {
    case: &'static str,
    /// Seconds.
    s: f64,
    /// Bytes of all tensors per second, in GB.
    gbps: f64,
    /// Peak memory of the process that needs most during the case, in MB.
    maxrss_mb: f64,
}

impl TableRow for CkptTiming {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        vec![
            ("case", -22, self.case.to_string()),
            ("s", 8, format!("{:.3}", self.s)),
            ("GB/s", 7, format!("{:.2}", self.gbps)),
            ("max RSS MB", 11, format!("{:.0}", self.maxrss_mb)),
        ]
    }
}

pub(crate) fn run(options: &BenchCkptOptions) -> Result<()> {
    let ranks = processes::all_ok(processes::world_sizes(None, &[RANKS]))?[0];
    let scratch = Scratch::new(ranks, &options.dir)?;
    // Square matrices whose sides are divisible by the number of ranks: every rank has the same share in both layouts.
    let side = ((options.mb as usize * 1_000_000 / TENSORS / 4) as f64).sqrt() as usize / ranks * ranks;
    let bytes = TENSORS * side * side * 4;
    let mut rows = RowPrinter::new(options.json, 5);
    let mut measure = |case: &'static str, run: &dyn Fn() -> Result<Repetition>| -> Result<()> {
        rows.announce(case);
        let (mut best, mut memory) = (f64::INFINITY, 0f64);
        for _ in 0..options.repeats {
            let once = run()?;
            best = best.min(once.s);
            memory = memory.max(once.peak_mb);
        }
        rows.print(&CkptTiming { case, s: best, gbps: bytes as f64 / best / 1e9, maxrss_mb: memory })?;
        Ok(())
    };
    let path = scratch.0.join("state");
    let build_state = move |world: &World| -> Result<State> {
        let mesh = world.mesh([("all", ranks)])?;
        let one =
            |i: usize| Ok((format!("t{i:02}"), DTensor::full(i as f64, (side, side), DType::F32, &mesh, [Shard(0)])?));
        Ok(State::map((0..TENSORS).map(one).collect::<Result<Vec<_>>>()?))
    };
    measure("save", &|| {
        let path = path.clone();
        shardwise_mpi::launch(ranks, move |world| {
            reset_peak();
            let state = build_state(&world)?;
            timed(&world, || checkpoint::save(&world, &path, &state))
        })
    })?;
    for (case, placement) in [("load same", Shard(0)), ("load reshard S0->S1", Shard(1))] {
        measure(case, &|| {
            let (path, placement) = (path.clone(), placement.clone());
            shardwise_mpi::launch(ranks, move |world| {
                reset_peak();
                let mesh = world.mesh([("all", ranks)])?;
                let place = |_: &str, shape: &[usize]| {
                    Ok((mesh.clone(), Layout::new(mesh.mesh(), shape, [placement.clone()])?))
                };
                timed(&world, || checkpoint::load_placed(&world, &path, |_| true, place).map(drop))
            })
        })?;
    }
    if !processes::is_first() {
        return Ok(());
    }
    let plain = scratch.0.join("plain");
    let block = vec![7u8; 16 << 20];
    let alone = |body: &dyn Fn() -> Result<()>| -> Result<Repetition> {
        reset_peak();
        let start = Instant::now();
        body()?;
        Ok(Repetition { s: start.elapsed().as_secs_f64(), peak_mb: peak_mb() })
    };
    measure("floor: plain write", &|| alone(&|| write_plain(&plain, &block, bytes)))?;
    measure("floor: plain read", &|| alone(&|| read_plain(&plain, bytes)))
}

/// One repetition of a case.
struct Repetition {
    s: f64,
    peak_mb: f64,
}

/// Runs `body` between two barriers. Returns the time of the slowest rank and the peak memory of the process that needs most.
fn timed(world: &World, body: impl FnOnce() -> Result<()>) -> Result<Repetition> {
    world.barrier()?;
    let start = Instant::now();
    body()?;
    world.barrier()?;
    let mine = Tensor::new(&[start.elapsed().as_secs_f64(), peak_mb()], &Device::Cpu)?;
    let most = world.all_reduce(&mine, ReduceOp::Max)?.to_vec1::<f64>()?;
    Ok(Repetition { s: most[0], peak_mb: most[1] })
}

fn write_plain(path: &Path, block: &[u8], bytes: usize) -> Result<()> {
    let mut file = File::create(path)?;
    let mut left = bytes;
    while left > 0 {
        let size = left.min(block.len());
        file.write_all(&block[..size])?;
        left -= size;
    }
    Ok(file.sync_all()?)
}

fn read_plain(path: &Path, bytes: usize) -> Result<()> {
    let mut all = Vec::with_capacity(bytes);
    open_file(path)?.read_to_end(&mut all)?;
    Ok(())
}

/// A directory that all ranks share. The first process removes it on drop.
struct Scratch(PathBuf);

impl Scratch {
    /// Creates a directory in `parent`, named after the process id of the first process. Collective.
    fn new(ranks: usize, parent: &Path) -> Result<Self> {
        let parent = parent.to_path_buf();
        let path = shardwise_mpi::launch(ranks, move |world| {
            let mine = Tensor::new(std::process::id(), &Device::Cpu)?;
            let number = (world.rank() == 0).then_some(&mine);
            let first = world.broadcast(number, &TensorMeta::new((), DType::U32), 0)?.to_scalar::<u32>()?;
            let path = parent.join(format!("shardwise-bench-{first}"));
            world.on_first_rank(|| {
                fs::create_dir_all(&path).map_err(|error| {
                    let found = format!("{}: {error}", path.display());
                    ErrorKind::Argument.error("--dir", found, "a writable directory", "choose another directory")
                })
            })?;
            Ok(path)
        })?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if processes::is_first() {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

/// Peak memory of the process since [`reset_peak`], in MB; 0 where the operating system does not report it.
fn peak_mb() -> f64 {
    let status = read_text("/proc/self/status", MOST_CONFIG_BYTES).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
    kilobytes.unwrap_or(0.0) * 1024.0 / 1e6
}

/// Resets the peak that the operating system records, where it can.
fn reset_peak() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}
