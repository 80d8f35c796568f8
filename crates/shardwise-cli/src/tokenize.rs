//! `shardwise tokenize`: texts of any size to a file of tokens.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use shardwise::comm::engine::available_cores;
use shardwise::data::{Tokenization, data_files};
use shardwise::error::ErrorKind;
use shardwise::models::load_text_files;
use shardwise::text::{TextFiles, Tokenizer};
use shardwise::{Error, Result};

use crate::train::tokenizer_file;

/// The options of `shardwise tokenize`.
#[derive(Args)]
#[command(after_help = "\
Reads plain texts, JSON lines with a field of text and, in builds with the feature `parquet`, Parquet with a column of text, in files or \
directories of such files. A few megabytes are in memory at a time, tokenized on all cores. Every document is followed by the end token of \
the tokenizer, if it has one. The file has the form of llm.c: a header, then u16 or, for vocabularies of more than 65536 tokens, u32. \
`shardwise train --data FILE` reads it as it needs it.

Examples:
  shardwise tokenize texts/ --out texts.bin
  shardwise tokenize web.jsonl --tokenizer tokenizer.json --out web.bin
  shardwise tokenize a.parquet --field content --tokenizer model/ --out a.bin")]
pub(crate) struct TokenizeOptions {
    /// Files and directories of texts, in this order
    #[arg(value_name = "PATH", required = true)]
    data: Vec<PathBuf>,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// tokenizer.json of the tokenizers library, or a model directory [default: one token per byte]
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
    /// The field of JSON lines, or the column of Parquet, that has the text
    #[arg(long, default_value = "text")]
    field: String,
    /// Replace a file that exists
    #[arg(long)]
    overwrite: bool,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

/// How often the progress bar changes.
const TICK: Duration = Duration::from_millis(100);

pub(crate) fn run(options: &TokenizeOptions) -> Result<()> {
    let TokenizeOptions { data, out, .. } = options;
    if out.exists() && !options.overwrite {
        let fix = "name another file with --out, or replace it with --overwrite";
        return Err(ErrorKind::path(out).error("--out", format!("{}, which exists", out.display()), "a new file", fix));
    }
    let files = data.iter().map(data_files).collect::<Result<Vec<_>>>()?.concat();
    let is_tokens = |file: &&PathBuf| file.extension().is_some_and(|end| end == "bin" || end == "u16" || end == "u32");
    if let Some(file) = files.iter().find(is_tokens) {
        let fix = "pass it to `shardwise train --data`";
        return Err(ErrorKind::Data.error("data", format!("{}, which has tokens", file.display()), "texts", fix));
    }
    let tokenizer = tokenizer(options.tokenizer.as_deref())?;
    let start = Instant::now();
    let running = Tokenization::start(files, &options.field, tokenizer, out, available_cores())?;
    let bar = ProgressBar::new(running.progress().total_bytes);
    let style = ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} {msg} {eta}").expect("a valid template");
    bar.set_style(style);
    while !running.is_finished() {
        let progress = running.progress();
        bar.set_position(progress.bytes);
        bar.set_message(format!("{} tokens", progress.tokens));
        std::thread::sleep(TICK);
    }
    bar.finish_and_clear();
    let bytes = running.progress().total_bytes;
    let file = running.wait()?;
    let seconds = start.elapsed().as_secs_f64();
    let mut stdout = std::io::stdout().lock();
    if options.json {
        let object = serde_json::json!({
            "out": out, "tokens": file.len(), "text_bytes": bytes, "seconds": seconds,
            "mb_per_s": bytes as f64 / seconds / 1e6,
        });
        return Ok(writeln!(stdout, "{object}")?);
    }
    let (read, rate) = (HumanBytes(bytes), bytes as f64 / seconds / 1e6);
    let name = out.display();
    Ok(writeln!(stdout, "{} tokens of {read} in {name}, {seconds:.1} s, {rate:.1} MB/s", file.len())?)
}

/// The tokenizer of a file or of a model directory.
fn tokenizer(path: Option<&Path>) -> Result<Tokenizer> {
    let files: TextFiles = match path {
        None => return Ok(Tokenizer::bytes()),
        Some(path) if path.is_dir() => load_text_files(path)?,
        Some(path) => tokenizer_file(path)?,
    };
    if files.tokenizer.is_empty() {
        let found = format!("{}, without a tokenizer", path.unwrap_or(Path::new("")).display());
        return Err(ErrorKind::Data.error::<Error>("--tokenizer", found, "a tokenizer", "name a tokenizer.json"));
    }
    Tokenizer::new(&files)
}
