//! `shardwise embed`: sentence embeddings with an encoder.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Deserialize;
use shardwise::error::ErrorKind;
use shardwise::models::{self, Encoder, Pooling, batch_placements, load_pooling, load_tokenizer};
use shardwise::plan::{DataParallel, ShardingPlanner, TensorParallel};
use shardwise::prelude::*;
use shardwise::text::{EncodedPair, Tokenizer};

use crate::generate::WeightDtype;
use crate::generate::dry::{loads, print_loads};
use crate::generate::run::load_shown;
use crate::generate::source::pretrained_config;
use crate::{lines, processes};

/// The options of `shardwise embed`.
#[derive(Args)]
#[command(after_help = "\
FILE has a sentence per line, or, as a .jsonl file, an object with the field `text` per line. Padding neither counts in the mean nor \
is attended to. Sentences that are longer than the model has positions for are truncated. JSON lines have the fields `text` and \
`embedding`; an npy file has an array of f32 with a row per sentence.

Under mpirun or srun each process is a rank; the default mesh for N processes is dp=N.

Examples:
  shardwise embed all-MiniLM-L6-v2 sentences.txt --normalize
  shardwise embed model sentences.jsonl --format npy --out vectors.npy
  shardwise embed model - --pooling cls --mesh tp=2 < sentences.txt
  shardwise embed model --dry --mesh tp=4")]
pub(crate) struct EmbedOptions {
    /// Directory of an encoder such as BERT, or its GGUF file
    model: PathBuf,
    /// Sentences: a text file with one per line, a .jsonl file with objects that have a `text`, or `-` for standard input
    #[arg(required_unless_present = "dry")]
    file: Option<PathBuf>,
    /// How the tokens of a sentence become one vector [default: what 1_Pooling/config.json or the GGUF file says, or mean]
    #[arg(long)]
    pooling: Option<PoolingChoice>,
    /// Divide every embedding by its length, so that products are cosines
    #[arg(long)]
    normalize: bool,
    /// Output format
    #[arg(long, default_value = "jsonl")]
    format: EmbeddingFormat,
    /// Output file [default: standard output]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Number of sentences that are computed together
    #[arg(long, value_name = "SENTENCES", default_value_t = 32)]
    batch_size: usize,
    /// Device mesh: tensor parallelism over the axis tp, sentences sharded over dp [default: dp=1; under mpirun dp=N]
    #[arg(long)]
    mesh: Option<String>,
    /// Data type of the weights in memory [default: f32]
    #[arg(long)]
    dtype: Option<WeightDtype>,
    /// Print what each rank would read and hold, and load nothing
    #[arg(long)]
    dry: bool,
    /// With --dry, print JSON lines
    #[arg(long, requires = "dry")]
    json: bool,
}

/// How the tokens of a sentence become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PoolingChoice {
    /// The mean of all tokens
    Mean,
    /// The first token
    Cls,
}

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum EmbeddingFormat {
    /// One JSON object per line
    Jsonl,
    /// NumPy's array file
    Npy,
}

/// Largest file of sentences that is read.
const MOST_BYTES: u64 = 1 << 30;

/// The checked inputs of a run.
struct EmbedJob {
    path: PathBuf,
    mesh: Mesh,
    tokenizer: Tokenizer,
    sentences: Vec<String>,
    /// Tokens that the model has positions for.
    most_tokens: usize,
    pooling: Pooling,
    normalize: bool,
    format: EmbeddingFormat,
    out: Option<PathBuf>,
    batch_size: usize,
    dtype: DType,
}

pub(crate) fn run(options: &EmbedOptions) -> Result<()> {
    let job = processes::all_ok(prepare(options))?;
    if options.dry {
        return print_loads(&loads(&job.path, &job.mesh, job.dtype, false)?, options.json);
    }
    shardwise_mpi::launch(job.mesh.size(), move |world| on_rank(&world, &job))
}

fn prepare(options: &EmbedOptions) -> Result<EmbedJob> {
    let config = pretrained_config(&options.model)?;
    if !config.is_encoder() {
        let found = format!("{}, a causal language model ({})", options.model.display(), config.model_type());
        return Err(ErrorKind::Model.error(
            "model",
            found,
            "an encoder such as bert",
            "use `shardwise generate` for it",
        ));
    }
    if options.batch_size == 0 {
        return Err(ErrorKind::Argument.error("batch-size", 0, "at least 1", "correct the option"));
    }
    if options.format == EmbeddingFormat::Npy && options.out.is_none() && std::io::stdout().is_terminal() {
        let needed = "a file or a pipe for binary output";
        return Err(ErrorKind::Argument.error("format", "npy on a terminal", needed, "add --out FILE"));
    }
    let mesh = processes::mesh(options.mesh.as_deref(), "dp=1", "dp")?;
    processes::check_thread_ranks(&mesh)?;
    Ok(EmbedJob {
        mesh,
        tokenizer: load_tokenizer(&options.model)?,
        sentences: match &options.file {
            Some(file) => read_sentences(file)?,
            None => Vec::new(),
        },
        most_tokens: config.max_positions(),
        pooling: match options.pooling {
            Some(PoolingChoice::Mean) => Pooling::Mean,
            Some(PoolingChoice::Cls) => Pooling::Cls,
            None => load_pooling(&options.model)?.unwrap_or(Pooling::Mean),
        },
        normalize: options.normalize,
        format: options.format,
        out: options.out.clone(),
        batch_size: options.batch_size,
        dtype: options.dtype.map_or(DType::F32, WeightDtype::dtype),
        path: options.model.clone(),
    })
}

/// A line of a .jsonl file.
#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct SentenceLine {
    text: String,
}

fn read_sentences(path: &Path) -> Result<Vec<String>> {
    let bad = |found: String, needed: &str| -> Error {
        let found = format!("{}: {found}", path.display());
        ErrorKind::path(path).error("sentences", found, needed, "correct the file, or choose another one")
    };
    let text = match path == Path::new("-") {
        true => processes::read_in_first(|| lines::read(Path::new("-"), MOST_BYTES))?,
        false => lines::read(path, MOST_BYTES)?,
    };
    let is_json = path.extension().is_some_and(|end| end == "jsonl");
    let mut sentences = Vec::new();
    // Rows of the result are the lines of a text, so an empty one counts.
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !is_json || !line.trim().is_empty()) {
        sentences.push(match is_json {
            false => line.to_string(),
            true => {
                let needed = "an object with a `text` per line";
                let parsed = serde_json::from_str::<SentenceLine>(line);
                parsed.map_err(|error| bad(format!("line {}: {error}", number + 1), needed))?.text
            }
        });
    }
    if sentences.iter().all(|sentence| sentence.trim().is_empty()) {
        return Err(bad("no sentences".into(), "at least one line"));
    }
    Ok(sentences)
}

/// Loads the encoder and writes the embeddings. Collective; the first rank writes.
fn on_rank(world: &World, job: &EmbedJob) -> Result<()> {
    let texts = job.sentences.iter().flat_map(|text| text.bytes().chain([0]));
    let hash =
        texts.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    world.agree("sentences", &[job.sentences.len() as u64, hash])?;
    let mesh = world.device_mesh(job.mesh.clone())?;
    let encoder = load_shown(world, |options| {
        options.dtype = job.dtype;
        let loaded = match (job.mesh.axis("tp").is_ok(), job.mesh.axis("dp").is_ok()) {
            (true, true) => {
                let planner = TensorParallel::new("tp").and(DataParallel::new(["dp"]));
                models::load_encoder_with(&job.path, &mesh, planner, options)
            }
            (true, false) => models::load_encoder_with(&job.path, &mesh, TensorParallel::new("tp"), options),
            _ => models::load_encoder_with(&job.path, &mesh, DataParallel::new(["dp"]), options),
        };
        loaded.map(|(encoder, _)| encoder)
    })?;
    encoder.eval();
    let mut writer = world.on_first_rank(|| EmbeddingWriter::open(job, encoder.width()))?;
    for sentences in job.sentences.chunks(job.batch_size) {
        let rows = no_grad(|| embed(job, &encoder, &mesh, sentences))?;
        world.on_first_rank(|| writer.iter_mut().try_for_each(|writer| writer.write(sentences, &rows)))?;
    }
    world.on_first_rank(|| writer.take().map_or(Ok(()), EmbeddingWriter::finish))?;
    Ok(())
}

/// The embeddings of some sentences, on every rank. Collective.
fn embed(job: &EmbedJob, encoder: &Encoder, mesh: &DeviceMesh, sentences: &[String]) -> Result<Vec<Vec<f32>>> {
    let encode = |text: &String| job.tokenizer.encode_pair(text, None, job.most_tokens);
    let encoded = sentences.iter().map(encode).collect::<Result<Vec<EncodedPair>>>()?;
    let length = encoded.iter().map(|row| row.ids.len()).max().unwrap_or(0);
    let pad = i64::from(job.tokenizer.special().pad.unwrap_or(0));
    let ranks = mesh.mesh().axis("dp").map_or(1, |axis| mesh.mesh().shape()[axis]);
    // Few sentences are computed by all ranks of `dp`.
    let placements = if sentences.len() < ranks { vec![Replicate; mesh.ndim()] } else { batch_placements(mesh.mesh()) };
    let placed = |value: &dyn Fn(&EncodedPair, usize) -> i64| -> Result<DTensor> {
        let values = encoded.iter().flat_map(|row| (0..length).map(|i| value(row, i))).collect::<Vec<i64>>();
        let whole = Tensor::from_vec(values, (sentences.len(), length), &Device::Cpu)?;
        DTensor::distribute_tensor(&whole, mesh, placements.clone(), None)
    };
    let ids = placed(&|row, i| row.ids.get(i).map_or(pad, |&id| i64::from(id)))?;
    let mask = placed(&|row, i| i64::from(i < row.ids.len()))?;
    let types = placed(&|row, i| row.types.get(i).map_or(0, |&kind| i64::from(kind)))?;
    let found = match job.normalize {
        true => encoder.embed(&ids, Some(&mask), Some(&types), job.pooling)?,
        false => encoder.pooled(&ids, Some(&mask), Some(&types), job.pooling)?,
    };
    Ok(found.to_dtype(DType::F32)?.full_tensor()?.to_vec2()?)
}

/// Writes embeddings to a file or to standard output. Exists on the first rank only.
struct EmbeddingWriter {
    out: BufWriter<Box<dyn Write + Send>>,
    format: EmbeddingFormat,
    bar: ProgressBar,
}

impl EmbeddingWriter {
    fn open(job: &EmbedJob, width: usize) -> Result<Self> {
        let out: Box<dyn Write + Send> = match &job.out {
            None => Box::new(std::io::stdout()),
            Some(path) => Box::new(File::create(path).map_err(|error| -> Error {
                let (found, fix) = (format!("{}: {error}", path.display()), "choose another path");
                ErrorKind::path(path).error("output file", found, "a writable path", fix)
            })?),
        };
        let bar = ProgressBar::with_draw_target(Some(job.sentences.len() as u64), ProgressDrawTarget::stderr());
        bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {per_sec}").expect("a valid template"));
        let mut writer = EmbeddingWriter { out: BufWriter::new(out), format: job.format, bar };
        if job.format == EmbeddingFormat::Npy {
            writer.out.write_all(&npy_header(job.sentences.len(), width))?;
        }
        Ok(writer)
    }

    fn write(&mut self, sentences: &[String], rows: &[Vec<f32>]) -> Result<()> {
        for (text, embedding) in sentences.iter().zip(rows) {
            match self.format {
                EmbeddingFormat::Jsonl => {
                    let line = serde_json::json!({ "text": text, "embedding": embedding });
                    writeln!(self.out, "{line}")?;
                }
                EmbeddingFormat::Npy => {
                    let bytes = embedding.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
                    self.out.write_all(&bytes)?;
                }
            }
        }
        self.bar.inc(rows.len() as u64);
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        self.bar.finish_and_clear();
        Ok(self.out.flush()?)
    }
}

/// The header of an npy file of version 1.0 with rows of little-endian f32.
fn npy_header(rows: usize, width: usize) -> Vec<u8> {
    let mut text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}");
    // Magic, version and length take 10 bytes; elements begin at a multiple of 64.
    let padding = (10 + text.len() + 1).next_multiple_of(64) - (10 + text.len() + 1);
    text += &" ".repeat(padding);
    text.push('\n');
    [&b"\x93NUMPY\x01\x00"[..], &(text.len() as u16).to_le_bytes(), text.as_bytes()].concat()
}

#[test]
fn npy_headers_end_at_a_multiple_of_64() {
    for (rows, width) in [(1, 1), (1_000_000_000, 384), (12345, 4096)] {
        let header = npy_header(rows, width);
        assert!(header.len().is_multiple_of(64) && header.ends_with(b"\n"), "{rows} {width}");
        assert_eq!(usize::from(u16::from_le_bytes([header[8], header[9]])) + 10, header.len());
    }
}
