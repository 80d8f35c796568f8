//! Tools for checkpoints of any format: look, compare, check, convert, cut anew, and try a load without doing it.

mod convert;
mod inspect;
mod layouts;
mod progress;

use shardwise::Error;
use shardwise::error::ErrorKind;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use regex::Regex;
use serde_json::json;
use shardwise::Result;
use shardwise::checkpoint::{self, ConvertOptions, DiffOptions, ElementType, Format, RankLoad};

use crate::output::{Row, Rows};
use progress::byte_bar;

const EXAMPLES: &str = "Examples:
  shardwise ckpt inspect model/                              what is in it
  shardwise ckpt verify run/step-00000100                    checksums, holes, missing bytes
  shardwise ckpt diff before/ after/ --atol 1e-6             where two of them differ
  shardwise ckpt convert run/ hf/ --to hf --dtype bf16       for Hugging Face, in half the size
  shardwise ckpt convert run/ w/ --include 'model\\..*'        the weights without the optimizer
  shardwise ckpt convert a/ b/ --rename 'model\\.(.*)=$1'     with other names
  shardwise ckpt reshard a/ b/ --mesh dp=2,tp=2 --plan fsdp+tp
  shardwise ckpt dry-load a/ --mesh dp=8 --plan fsdp         what each rank would read and hold";

/// Look at checkpoints, compare, check and convert them.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show tensors, values, shapes, types, parts and sizes as a tree.
    Inspect {
        /// Directory or file of the checkpoint.
        path: PathBuf,
        /// One JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Show where two checkpoints differ; ends with 1 if they do.
    Diff {
        /// The first checkpoint.
        first: PathBuf,
        /// The second checkpoint.
        second: PathBuf,
        /// Relative tolerance.
        #[arg(long, default_value_t = 0.0)]
        rtol: f64,
        /// Absolute tolerance.
        #[arg(long, default_value_t = 0.0)]
        atol: f64,
        /// One JSON object per difference.
        #[arg(long)]
        json: bool,
    },
    /// Read everything and compare it with its checksums; ends with 1 if something is wrong.
    Verify {
        /// Directory or file of the checkpoint.
        path: PathBuf,
        /// One JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Write a checkpoint in another format, type or with other names.
    Convert {
        /// The checkpoint to read.
        from: PathBuf,
        /// The directory to write.
        to: PathBuf,
        #[command(flatten)]
        writing: Writing,
    },
    /// Write a checkpoint cut for a mesh, one file per rank.
    Reshard {
        /// The checkpoint to read.
        from: PathBuf,
        /// The directory to write.
        to: PathBuf,
        #[command(flatten)]
        layouts: layouts::Layouts,
        #[command(flatten)]
        writing: Writing,
    },
    /// Tell from descriptions alone whether a load would succeed, and what every rank would read and hold.
    DryLoad {
        /// Directory or file of the checkpoint.
        path: PathBuf,
        #[command(flatten)]
        layouts: layouts::Layouts,
        /// One JSON object per rank.
        #[arg(long)]
        json: bool,
    },
}

/// How a checkpoint is written.
#[derive(Args)]
struct Writing {
    /// The format to write.
    #[arg(long = "to", alias = "format", value_name = "FORMAT", value_parser = writable_formats(), default_value = "native")]
    format: Format,
    /// Another type for tensors of floating-point numbers, such as bf16.
    #[arg(long)]
    dtype: Option<ElementType>,
    /// A regular expression that a whole name fits: only such tensors and values are written.
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// A regular expression that a whole name fits: such tensors and values are not written, also if they are included.
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
    /// PATTERN=REPLACEMENT: a regular expression that a whole name fits, and what becomes of it ($1 for the first group).
    /// The first rule that fits counts.
    #[arg(long = "rename", value_name = "RULE")]
    rules: Vec<String>,
    /// Size of a file at most, in MB, unless one tensor is larger.
    #[arg(long, default_value_t = 5000)]
    max_file_mb: usize,
    /// Report as one JSON object, with the keys of all values that the format cannot store.
    #[arg(long)]
    json: bool,
}

/// The formats that can be written, with what `--help` says of them.
fn writable_formats() -> impl TypedValueParser<Value = Format> {
    let value = |format: Format| {
        let names: Vec<&str> = format.aliases().to_vec();
        let also = if names.is_empty() { String::new() } else { format!(" (also: {})", names.join(", ")) };
        PossibleValue::new(format.name()).aliases(names).help(format!("{}{also}", format.about()))
    };
    let formats = Format::all().into_iter().filter(|format| format.is_writable());
    PossibleValuesParser::new(formats.map(value)).try_map(|name| name.parse::<Format>())
}

impl Writing {
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
        Ok(ConvertOptions { element, select, rename, max_file_bytes, ..ConvertOptions::to(self.format) })
    }
}

/// A pattern that a whole name has to fit.
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

/// Runs a command; whether all is well.
pub(crate) fn run(options: &Options) -> Result<bool> {
    match &options.command {
        Command::Inspect { path, json } => inspect::run(path, *json).map(|()| true),
        Command::Diff { first, second, rtol, atol, json } => {
            let (first, second) = (checkpoint::open(first)?, checkpoint::open(second)?);
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
                writeln!(out, "the same: {} tensors, {} values", first.tensors.len(), first.values.len())?;
            }
            Ok(found.is_empty())
        }
        Command::Verify { path, json } => verify(path, *json),
        Command::Convert { from, to, writing } => {
            convert::run(from, to, &writing.options()?, writing.json).map(|()| true)
        }
        Command::Reshard { from, to, layouts, writing } => {
            let layouts = layouts.chosen()?;
            let boxes = move |key: &str, shape: &[usize]| Ok(layouts.layout(key, shape)?.primary_boxes().collect());
            let options = ConvertOptions { reshard: Some(Arc::new(boxes)), ..writing.options()? };
            convert::run(from, to, &options, writing.json).map(|()| true)
        }
        Command::DryLoad { path, layouts, json } => {
            let (catalog, layouts) = (checkpoint::open(path)?, layouts.chosen()?);
            let place = |key: &str, shape: &[usize]| Ok(layouts.layout(key, shape)?.placements().to_vec());
            let loads = checkpoint::dry_load(&catalog, &layouts.mesh, place)?;
            let mut rows = Rows::new(*json, loads.len() as u64);
            loads.into_iter().try_for_each(|load| rows.print(&LoadRow(load)))?;
            Ok(true)
        }
    }
}

#[derive(serde::Serialize)]
struct LoadRow(RankLoad);

impl Row for LoadRow {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        let mb = |bytes: usize| format!("{:.1}", bytes as f64 / 1e6);
        vec![
            ("rank", 5, self.0.rank.to_string()),
            ("tensors MB", 12, mb(self.0.tensor_bytes)),
            ("read MB", 12, mb(self.0.read_bytes)),
            ("peak MB", 12, mb(self.0.peak_bytes)),
            ("parts", 7, self.0.chunks.to_string()),
            ("files", 6, self.0.files.to_string()),
        ]
    }
}

fn verify(path: &PathBuf, json: bool) -> Result<bool> {
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
            "strangers": found.unknown_files,
            "values": found.catalog.as_ref().map(|c| &c.values),
        });
        writeln!(out, "{text}")?;
        return Ok(found.is_intact());
    }
    found.problems.iter().try_for_each(|problem| writeln!(out, "problem: {problem}"))?;
    found.unknown_files.iter().try_for_each(|name| writeln!(out, "not part of the checkpoint: {name}"))?;
    let said = if found.is_intact() { "whole" } else { "NOT whole" };
    writeln!(out, "{said}: {} parts verified, {} stored without a checksum", found.verified, found.without_checksum)?;
    if found.without_block_checksums > 0 {
        let (count, fix) = (found.without_block_checksums, "`ckpt convert` adds them");
        writeln!(
            out,
            "{count} parts have no checksums of blocks: a load in another layout does not check them; {fix}"
        )?;
    }
    Ok(found.is_intact())
}
