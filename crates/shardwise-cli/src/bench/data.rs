//! `shardwise bench data`: throughput of training data from token files, compared with plain reads.

use std::fs;
use std::hint::black_box;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use shardwise::comm::engine::available_cores;
use shardwise::data::{
    Batches, Dataset, Mixture, SampleOrder, TokenFile, TokenFileWriter, TokenSequences, Tokenization,
};
use shardwise::error::ErrorKind;
use shardwise::prelude::*;
use shardwise::read_file::open_file;
use shardwise::text::Tokenizer;

use crate::output::{RowPrinter, TableRow};

/// The options of `shardwise bench data`.
#[derive(Args)]
#[command(after_help = "\
Writes a file of u16 tokens and draws all of its sequences on one rank, in batches of 16, as i64 ids and targets. The `floor` cases read \
the same bytes: from the beginning to the end in pieces of 1 MiB, and one sequence at a time in the shuffled order. Files are in the page \
cache when they are read. `tokenize` writes a file of tokens from a text with one token per byte, on all cores.

Examples:
  shardwise bench data
  shardwise bench data --mb 1024 --dir /fast/disk --json")]
pub(crate) struct BenchDataOptions {
    /// Size of the file in MB
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..))]
    mb: u64,
    /// Tokens per sequence
    #[arg(long, value_name = "TOKENS", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=65536))]
    seq_len: u64,
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

/// Sequences of a batch.
const BATCH: usize = 16;

/// Bytes per token in the file.
const WIDTH: usize = 2;

#[derive(Serialize)]
struct DataTiming {
    case: &'static str,
    /// Seconds.
    s: f64,
    /// Bytes of the file per second, in GB.
    gbps: f64,
    tokens_per_s: f64,
}

impl TableRow for DataTiming {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        vec![
            ("case", -26, self.case.to_string()),
            ("s", 8, format!("{:.3}", self.s)),
            ("GB/s", 7, format!("{:.2}", self.gbps)),
            ("M tokens/s", 11, format!("{:.1}", self.tokens_per_s / 1e6)),
        ]
    }
}

pub(crate) fn run(options: &BenchDataOptions) -> Result<()> {
    let scratch = DataDirectory::new(&options.dir)?;
    let (length, tokens) = (options.seq_len as usize, options.mb as usize * 1_000_000 / WIDTH);
    if tokens <= length {
        let needed = format!("more than {length}, the tokens of a sequence");
        return Err(ErrorKind::Argument.error("--mb", format!("{tokens} tokens"), needed, "use a larger file"));
    }
    let (path, text, written) = (scratch.0.join("tokens.bin"), scratch.0.join("text.txt"), scratch.0.join("text.bin"));
    let mut writer = TokenFileWriter::create(&path, 50_000)?;
    // Any tokens will do, as long as pages are not all alike.
    let piece: Vec<u32> = (0..1 << 16).map(|i: u32| i.wrapping_mul(2_654_435_761) % 50_000).collect();
    (0..tokens).step_by(piece.len()).try_for_each(|at| writer.push(&piece[..piece.len().min(tokens - at)]))?;
    writer.finish()?;
    let mut rows = RowPrinter::new(options.json, 7);
    let mut measure = |case: &'static str, run: &dyn Fn() -> Result<usize>| -> Result<()> {
        rows.announce(case);
        let (mut best, mut count) = (f64::INFINITY, 0);
        for _ in 0..options.repeats {
            let start = Instant::now();
            count = run()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        let gbps = (count * WIDTH) as f64 / best / 1e9;
        Ok(rows.print(&DataTiming { case, s: best, gbps, tokens_per_s: count as f64 / best })?)
    };
    measure("floor: plain read", &|| {
        let (mut file, mut block, mut all) = (open_file(&path)?, vec![0u8; 1 << 20], 0);
        loop {
            match file.read(&mut block)? {
                0 => return Ok(all / WIDTH),
                read => all += black_box(&block[..read]).len(),
            }
        }
    })?;
    let sequences = |part: &TokenFile| TokenSequences::of_file(part.clone(), length);
    let file = TokenFile::open(&path)?.with_vocab_size(50_000);
    let order = SampleOrder::new(sequences(&file)?.len())?.shuffled(1);
    measure("floor: plain reads, shuffled", &|| {
        let (file, mut block) = (open_file(&path)?, vec![0u8; (length + 1) * WIDTH]);
        for position in 0..order.samples() {
            file.read_exact_at(&mut block, order.sample(position) * (length * WIDTH) as u64)?;
            black_box(&block);
        }
        Ok(order.samples() as usize * length)
    })?;
    measure("in order", &|| drawn(sequences(&file)?, None, length))?;
    measure("shuffled", &|| drawn(sequences(&file)?, Some(1), length))?;
    let (a, b) = file.split_at(tokens / 2);
    measure("weighted, shuffled", &|| {
        let mixture = Mixture::weighted([(sequences(&a)?, 0.7), (sequences(&b)?, 0.3)])?;
        drawn(mixture, Some(1), length)
    })?;
    let line = "Alice was beginning to get very tired of sitting by her sister on the bank\n";
    fs::write(&text, line.repeat(tokens / line.len()))?;
    measure("tokenize", &|| {
        let from = vec![text.clone()];
        Ok(Tokenization::start(from, "text", Tokenizer::bytes(), &written, available_cores())?.wait()?.len())
    })
}

/// Draws about one epoch on a mesh of one rank, and returns the number of tokens.
fn drawn<D: Dataset + Clone + Send + Sync + 'static>(dataset: D, seed: Option<u64>, length: usize) -> Result<usize> {
    launch(1, move |world| {
        let batches = Batches::new(dataset.clone(), &world.mesh([("dp", 1)])?)?.batch(BATCH);
        let mut batches = seed.map_or(batches.clone(), |seed| batches.shuffle(seed));
        let count = (dataset.len() / BATCH).max(1);
        (0..count).try_for_each(|_| batches.next_batch().map(|batch| drop(black_box(batch))))?;
        Ok(count * BATCH * length)
    })
}

/// A directory that is removed on drop.
struct DataDirectory(PathBuf);

impl DataDirectory {
    fn new(parent: &std::path::Path) -> Result<Self> {
        let path = parent.join(format!("shardwise-bench-data-{}", std::process::id()));
        fs::create_dir_all(&path).map_err(|error| {
            let found = format!("{}: {error}", path.display());
            ErrorKind::Argument.error::<Error>("--dir", found, "a writable directory", "choose another directory")
        })?;
        Ok(DataDirectory(path))
    }
}

impl Drop for DataDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
