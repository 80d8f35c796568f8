//! `shardwise plan`: memory, communication and time of a training step, without weights and without memory.

pub(crate) mod job;
mod search;

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use shardwise::picture::bytes_text;
use shardwise::plan::StepReport;
use shardwise::{Error, Result};

use job::{PlanJob, PlannedStep};

use crate::report;
use crate::train::settings::PlanChoice;

/// The options of `shardwise plan`.
#[derive(Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
The program of one rank runs without data, so a model of any size on any number of ranks is planned on one machine, in seconds. \
Memory is that of local tensors, as World::memory counts it; time is estimated from operations and from bytes over links.

The exit code is 1 if the step does not fit into --memory (with --search, if nothing fits); the field `fits` of --json is then \
false, and null without --memory.

Examples:
  shardwise plan gpt --mesh dp=4 --plan ddp --dtype f32
  shardwise plan model/ --mesh dp=64,tp=8 --batch 4 --length 8192 --memory 80G
  shardwise plan model/ --mesh dp=2048,tp=8 --html plan.html
  shardwise plan config.json --mesh dp=8 --link dp=100GB/s,5us --flops 400T
  shardwise plan config.json --mesh dp=16,tp=8 --memory 80G --search
  shardwise plan llama --layers 32 --d-model 4096 --heads 32 --mesh tp=8 --json"
)]
pub(crate) struct PlanOptions {
    #[command(flatten)]
    step: PlannedStep,
    /// Rank meshes of as many ranks, with the plans for them, by estimated time; what fits into --memory comes first
    #[arg(long)]
    search: bool,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
    /// Also write a page about the step, see `shardwise report`
    #[arg(long, value_name = "FILE", conflicts_with = "search")]
    html: Option<PathBuf>,
}

/// Plans the step; whether it fits into `--memory`, if that was asked.
pub(crate) fn run(options: &PlanOptions) -> Result<bool> {
    let job = options.step.decide()?;
    if options.search {
        return search::run(&job, options.json);
    }
    if let Some(path) = &options.html {
        report::write_page(path, &job.page_report()?)?;
    }
    let mut report = job.report()?;
    if report.fits() == Some(false) {
        report.advice = advice(&job, &report);
    }
    let text = match options.json {
        true => json(&report)?,
        false => report.to_string(),
    };
    writeln!(std::io::stdout().lock(), "{text}")?;
    Ok(report.fits() != Some(false))
}

/// The report with what follows from it and a script would otherwise have to add up.
fn json(report: &StepReport) -> Result<String> {
    let mut object = serde_json::to_value(report).map_err(Error::other)?;
    object["fits"] = report.fits().into();
    object["peak_bytes"] = report.peak_bytes().into();
    Ok(object.to_string())
}

/// Changes under which the step takes less memory, each tried in a dry run; changes with which it fits come first.
fn advice(job: &PlanJob, report: &StepReport) -> Vec<String> {
    let has = |axis: &str| job.mesh.axis(axis).is_ok();
    let mut changes: Vec<(String, PlanJob)> = Vec::new();
    let sharded = match (has("dp"), has("tp")) {
        (true, true) => Some((PlanChoice::FsdpTp, "fsdp+tp")),
        (true, false) => Some((PlanChoice::Fsdp, "fsdp")),
        _ => None,
    };
    if let Some((plan, name)) = sharded.filter(|(plan, _)| *plan != job.plan) {
        changes.push((format!("--plan {name}"), job.with(job.mesh.clone(), plan, job.batch)));
    }
    if has("tp") && !job.sequence_parallel && !matches!(job.plan, PlanChoice::Auto) {
        changes.push(("--sequence-parallel".into(), job.with_sequence_parallelism()));
    }
    if job.batch > 1 {
        changes.push((format!("--batch {}", job.batch / 2), job.with(job.mesh.clone(), job.plan, job.batch / 2)));
        changes.push(("--batch 1".into(), job.with(job.mesh.clone(), job.plan, 1)));
    }
    let tried = changes.into_iter().filter_map(|(change, job)| Some((change, job.report().ok()?)));
    let mut tried: Vec<(String, StepReport)> =
        tried.filter(|(_, tried)| tried.peak_bytes() < report.peak_bytes()).collect();
    tried.sort_by_key(|(_, tried)| (tried.fits() == Some(false), tried.peak_bytes()));
    tried.dedup_by(|a, b| a.0 == b.0);
    let sentence = |(change, tried): &(String, StepReport)| {
        let end = if tried.fits() == Some(true) { "which fits" } else { "which does not fit yet" };
        format!("{change} takes {}, {end}", bytes_text(tried.peak_bytes()))
    };
    let mut advice: Vec<String> = tried.iter().map(sentence).collect();
    if !tried.iter().any(|(_, tried)| tried.fits() == Some(true)) {
        advice.push("--search tries other meshes of as many ranks".into());
        advice.push("use more ranks, shorter sequences, or checkpoint activations in the model".into());
    }
    advice
}
