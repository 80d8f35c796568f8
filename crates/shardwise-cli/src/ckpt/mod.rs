//! `shardwise ckpt`: inspects, compares, verifies, converts and reshards checkpoints of any format.

mod convert;
pub(crate) mod inspect;
mod layouts;
mod merge_lora;
pub(crate) mod progress;

use shardwise::Error;
use shardwise::error::ErrorKind;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use regex::Regex;
use serde_json::json;
use shardwise::Result;
use shardwise::checkpoint::{self, ConvertOptions, DiffOptions, ElementType, Format, RankLoad};

use crate::output::{RowPrinter, TableRow};
use crate::train::checkpoints::{is_run, series};
use progress::byte_bar;

const EXAMPLES: &str = "Examples:
  shardwise ckpt inspect model/
  shardwise ckpt verify run/checkpoints/step-00000100
  shardwise ckpt diff before/ after/ --atol 1e-6
  shardwise ckpt convert model.gguf hf/ --to hf --dtype bf16
  shardwise ckpt convert run/ weights/ --include 'model\\..*'
  shardwise ckpt reshard a/ b/ --mesh dp=2,tp=2 --plan fsdp+tp
  shardwise ckpt dry-load a/ --mesh dp=8 --plan fsdp
  shardwise ckpt merge-lora model/ adapter/ merged/";

const INSPECT_EXAMPLES: &str = "Examples:
  shardwise ckpt inspect shardwise-out/checkpoints/step-00000300
  shardwise ckpt inspect model.safetensors
  shardwise ckpt inspect model.gguf
  shardwise ckpt inspect model.pt --json | jq '.tensors | keys'";

const DIFF_EXAMPLES: &str = "\
Tensors are equal if |a - b| <= atol + rtol * |b| holds for all elements and their types and shapes are the same. The exit \
code is 1 if the checkpoints differ.

Examples:
  shardwise ckpt diff before/ after/
  shardwise ckpt diff run/ other-run/ --rtol 1e-2 --json";

const VERIFY_EXAMPLES: &str = "\
The exit code is 1 if something is missing or damaged, or a tensor is named and cannot be read.

Examples:
  shardwise ckpt verify shardwise-out/checkpoints/step-00000300
  shardwise ckpt verify model/ --json | jq .problems";

const CONVERT_EXAMPLES: &str = "\
The latest checkpoint of a training run is read if the directory of the run is named. A trained model gets a config.json and \
the names that transformers knows from `shardwise train --resume --export-hf`, not from here.

Examples:
  shardwise ckpt convert run/ dcp/ --to dcp --dtype bf16
  shardwise ckpt convert run/ weights/ --include 'model\\..*'
  shardwise ckpt convert a/ b/ --rename 'model\\.(.*)=$1'
  shardwise ckpt convert model.pt dcp/ --to dcp
  shardwise ckpt convert model.gguf hf/ --to hf";

const RESHARD_EXAMPLES: &str = "Examples:
  shardwise ckpt reshard a/ b/ --mesh dp=8
  shardwise ckpt reshard a/ b/ --mesh dp=2,tp=2 --plan fsdp+tp
  shardwise ckpt reshard a/ b/ --mesh tp=4 --place 'layers.*.up.weight=S(0)'";

const DRY_LOAD_EXAMPLES: &str = "Examples:
  shardwise ckpt dry-load a/ --mesh dp=8 --plan fsdp
  shardwise ckpt dry-load a/ --mesh dp=4,tp=2 --plan fsdp+tp --json";

const MERGE_LORA_EXAMPLES: &str = "Examples:
  shardwise ckpt merge-lora model/ adapter/ merged/
  shardwise ckpt merge-lora model/ adapter/ merged/ --ranks 4 --dtype bf16";

/// Inspect, verify, compare, convert and reshard checkpoints
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CkptOptions {
    #[command(subcommand)]
    command: CkptCommand,
}

#[derive(Subcommand)]
enum CkptCommand {
    /// List tensors and values with shapes, types, chunks and sizes
    #[command(after_help = INSPECT_EXAMPLES)]
    Inspect {
        /// Directory or file of the checkpoint
        path: PathBuf,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Compare two checkpoints, tensor by tensor and value by value
    #[command(after_help = DIFF_EXAMPLES)]
    Diff {
        /// First checkpoint
        first: PathBuf,
        /// Second checkpoint
        second: PathBuf,
        /// Relative tolerance
        #[arg(long, default_value_t = 0.0)]
        rtol: f64,
        /// Absolute tolerance
        #[arg(long, default_value_t = 0.0)]
        atol: f64,
        /// Print a JSON object per difference
        #[arg(long)]
        json: bool,
    },
    /// Read a checkpoint completely and compare it with its checksums
    #[command(after_help = VERIFY_EXAMPLES)]
    Verify {
        /// Directory or file of the checkpoint
        path: PathBuf,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Convert a checkpoint to another format or element type, or rename and select its entries
    #[command(after_help = CONVERT_EXAMPLES)]
    Convert {
        /// Checkpoint to read
        from: PathBuf,
        /// Directory to write
        to: PathBuf,
        #[command(flatten)]
        write: WriteOptions,
    },
    /// Write a checkpoint sharded for a mesh, one file per rank
    #[command(after_help = RESHARD_EXAMPLES)]
    Reshard {
        /// Checkpoint to read
        from: PathBuf,
        /// Directory to write
        to: PathBuf,
        #[command(flatten)]
        layouts: layouts::LayoutOptions,
        #[command(flatten)]
        write: WriteOptions,
    },
    /// Check only from the metadata whether a load would succeed, and what each rank would read and allocate
    #[command(after_help = DRY_LOAD_EXAMPLES)]
    DryLoad {
        /// Directory or file of the checkpoint
        path: PathBuf,
        #[command(flatten)]
        layouts: layouts::LayoutOptions,
        /// Print a JSON object per rank
        #[arg(long)]
        json: bool,
    },
    /// Add the low-rank adapters of PEFT or of `train --lora` to the weights of their model
    #[command(after_help = MERGE_LORA_EXAMPLES)]
    MergeLora(merge_lora::MergeLoraOptions),
}

/// The options for writing a checkpoint.
#[derive(Args)]
struct WriteOptions {
    /// Format to write
    #[arg(long = "to", alias = "format", value_name = "FORMAT", value_parser = writable_formats(), default_value = "native")]
    format: Format,
    /// Convert floating-point tensors to this type, for example bf16
    #[arg(long)]
    dtype: Option<ElementType>,
    /// Write only the entries whose full name matches this regular expression. May be repeated
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// Leave out the entries whose full name matches this regular expression; wins over --include. May be repeated
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
    /// Rename entries: PATTERN=REPLACEMENT, where the regular expression PATTERN matches the full name and $1 in REPLACEMENT is
    /// its first group. May be repeated; the first rule that matches applies
    #[arg(long = "rename", value_name = "RULE")]
    rules: Vec<String>,
    /// Fail if the directory to write already has a checkpoint, instead of replacing it
    #[arg(long)]
    keep_existing: bool,
    /// Leave out tensors that are named and cannot be read, and list them, instead of failing
    #[arg(long)]
    skip_unreadable: bool,
    /// Maximum size of a file in MB; a larger tensor gets a file for itself
    #[arg(long, default_value_t = 5000)]
    max_file_mb: usize,
    /// Print a JSON object, which lists all values that the format cannot store
    #[arg(long)]
    json: bool,
}

/// The formats that can be written, with their descriptions for `--help`.
fn writable_formats() -> impl TypedValueParser<Value = Format> {
    let value = |format: Format| {
        let names: Vec<&str> = format.aliases().to_vec();
        let also = if names.is_empty() { String::new() } else { format!(" (also: {})", names.join(", ")) };
        PossibleValue::new(format.name()).aliases(names).help(format!("{}{also}", format.about()))
    };
    let formats = Format::all().into_iter().filter(|format| format.is_writable());
    PossibleValuesParser::new(formats.map(value)).try_map(|name| name.parse::<Format>())
}

impl WriteOptions {
    fn options(&self) -> Result<ConvertOptions> {
        let rules = self.rules.iter().map(|rule| parse_rule(rule)).collect::<Result<Vec<_>>>()?;
        let rename = move |name: &str| {
            let fitting = rules.iter().find(|(pattern, _)| pattern.is_match(name));
            fitting.map_or_else(|| name.to_string(), |(pattern, new)| pattern.replace(name, new).into_owned())
        };
        let patterns = |texts: &[String]| texts.iter().map(|text| whole_name(text)).collect::<Result<Vec<_>>>();
        let (include, exclude) = (patterns(&self.include)?, patterns(&self.exclude)?);
        let fits = |patterns: &[Regex], name: &str| patterns.iter().any(|pattern| pattern.is_match(name));
        let select = move |name: &str| (include.is_empty() || fits(&include, name)) && !fits(&exclude, name);
        let max_file_bytes = self.max_file_mb.saturating_mul(1_000_000);
        let element = self.dtype;
        let (select, rename) = (Arc::new(select), Arc::new(rename));
        let overwrite = !self.keep_existing;
        Ok(ConvertOptions {
            element,
            select,
            rename,
            overwrite,
            skip_unreadable: self.skip_unreadable,
            max_file_bytes,
            ..ConvertOptions::to(self.format)
        })
    }
}

/// Compiles a pattern that has to match a full name.
fn whole_name(pattern: &str) -> Result<Regex> {
    Regex::new(&format!("^(?:{pattern})$")).map_err(|error| {
        ErrorKind::Argument.error("--include or --exclude", error, "a regular expression", "for example 'model\\..*'")
    })
}

fn parse_rule(rule: &str) -> Result<(Regex, String)> {
    let bad = |found: String| {
        ErrorKind::Argument.error::<Error>("rename rule", found, "PATTERN=REPLACEMENT", "for example 'model\\.(.*)=$1'")
    };
    let (pattern, new) = rule.split_once('=').ok_or_else(|| bad(format!("{rule:?} without =")))?;
    let pattern = Regex::new(&format!("^(?:{pattern})$")).map_err(|error| bad(error.to_string()))?;
    Ok((pattern, new.to_string()))
}

/// Runs a subcommand. Returns false if `diff` found differences or `verify` found problems.
pub(crate) fn run(options: &CkptOptions) -> Result<bool> {
    match &options.command {
        CkptCommand::Inspect { path, json } => inspect::run(&of_run(path)?, *json).map(|()| true),
        CkptCommand::Diff { first, second, rtol, atol, json } => {
            let (first, second) = (checkpoint::open(of_run(first)?)?, checkpoint::open(of_run(second)?)?);
            let bar = byte_bar(first.bytes() as u64);
            let options = DiffOptions { rtol: *rtol, atol: *atol, progress: Some(&|bytes| bar.inc(bytes)) };
            let found = checkpoint::diff(&first, &second, options)?;
            bar.finish_and_clear();
            let mut out = std::io::stdout().lock();
            for (key, difference) in &found {
                match *json {
                    true => writeln!(out, "{}", json!({ "key": key, "difference": difference.to_string() }))?,
                    false => writeln!(out, "{key}: {difference}")?,
                }
            }
            if found.is_empty() && !*json {
                writeln!(out, "no differences: {} tensors, {} values", first.tensors.len(), first.values.len())?;
            }
            Ok(found.is_empty())
        }
        CkptCommand::Verify { path, json } => verify(&of_run(path)?, *json),
        CkptCommand::Convert { from, to, write } => {
            convert::run(&of_run(from)?, to, &write.options()?, write.json).map(|()| true)
        }
        CkptCommand::Reshard { from, to, layouts, write } => {
            let layouts = layouts.resolve()?;
            let boxes = move |key: &str, shape: &[usize]| Ok(layouts.layout(key, shape)?.primary_boxes().collect());
            let options = ConvertOptions { reshard: Some(Arc::new(boxes)), ..write.options()? };
            convert::run(&of_run(from)?, to, &options, write.json).map(|()| true)
        }
        CkptCommand::DryLoad { path, layouts, json } => {
            let (catalog, layouts) = (checkpoint::open(of_run(path)?)?, layouts.resolve()?);
            let place = |key: &str, shape: &[usize]| Ok(layouts.layout(key, shape)?.placements().to_vec());
            let loads = checkpoint::dry_load(&catalog, &layouts.mesh, place)?;
            let mut rows = RowPrinter::new(*json, loads.len() as u64);
            loads.into_iter().try_for_each(|load| rows.print(&LoadRow(load)))?;
            Ok(true)
        }
        CkptCommand::MergeLora(options) => merge_lora::run(options).map(|()| true),
    }
}

/// The latest checkpoint of a training run if `path` is the directory of one, else `path`.
fn of_run(path: &Path) -> Result<PathBuf> {
    let latest = if is_run(path) { series(path).latest()? } else { None };
    let Some(latest) = latest else { return Ok(path.to_path_buf()) };
    writeln!(std::io::stderr(), "reading {}", latest.display())?;
    Ok(latest)
}

#[derive(serde::Serialize)]
pub(crate) struct LoadRow(pub(crate) RankLoad);

impl TableRow for LoadRow {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        let mb = |bytes: usize| format!("{:.1}", bytes as f64 / 1e6);
        vec![
            ("rank", 5, self.0.rank.to_string()),
            ("tensors MB", 12, mb(self.0.tensor_bytes)),
            ("read MB", 12, mb(self.0.read_bytes)),
            ("peak MB", 12, mb(self.0.peak_bytes)),
            ("chunks", 7, self.0.chunks.to_string()),
            ("files", 6, self.0.files.to_string()),
        ]
    }
}

fn verify(path: &Path, json: bool) -> Result<bool> {
    let total = checkpoint::open(path).map_or(0, |catalog| catalog.bytes() as u64);
    let bar = byte_bar(total);
    let found = checkpoint::verify(path, &|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let mut out = std::io::stdout().lock();
    if json {
        let text = json!({
            "whole": found.is_intact(),
            "format": found.catalog.as_ref().map(|c| c.format),
            "verified": found.verified,
            "without_checksum": found.without_checksum,
            "without_block_checksums": found.without_block_checksums,
            "problems": found.problems,
            "python_objects": found.python_objects,
            "strangers": found.unknown_files,
            "values": found.catalog.as_ref().map(|c| &c.values),
        });
        writeln!(out, "{text}")?;
        return Ok(found.is_intact());
    }
    found.problems.iter().try_for_each(|problem| writeln!(out, "problem: {problem}"))?;
    found.unknown_files.iter().try_for_each(|name| writeln!(out, "not part of the checkpoint: {name}"))?;
    if !found.python_objects.is_empty() {
        let keys = found.python_objects.join(", ");
        writeln!(out, "Python objects, which no other program reads and `convert` leaves out: {keys}")?;
    }
    let (verified, without) = (found.verified, found.without_checksum);
    match (found.is_intact(), verified) {
        (true, 0) if without > 0 => writeln!(
            out,
            "readable, but NOT verified: the format has no checksums, so only the sizes of {without} chunks were checked"
        )?,
        (intact, _) => {
            let said = if intact { "intact" } else { "NOT intact" };
            writeln!(out, "{said}: {verified} chunks verified, {without} stored without a checksum")?;
        }
    }
    if found.without_block_checksums > 0 {
        let (count, fix) = (found.without_block_checksums, "`ckpt convert` adds them");
        writeln!(
            out,
            "{count} chunks have no block checksums, so a load in another layout does not verify them; {fix}"
        )?;
    }
    Ok(found.is_intact())
}
