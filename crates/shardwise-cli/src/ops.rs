//! `shardwise ops`: the table of operators.

use clap::Args;
use serde::Serialize;
use shardwise::error::ErrorKind;
use shardwise::ops::{OpEntry, PlacementRule, ops};
use shardwise::{Error, Result};

use crate::output::{Row, Rows};

/// What to list.
#[derive(Args)]
#[command(after_help = "\
Rules speak of one mesh axis: the placements of the inputs, then that of the (first) output. R: every rank holds the whole;
S(d): dimension d is cut; P(sum): a pending sum. A rule that is free communicates nothing. Found by running every operator
without data on two ranks.

Examples:
  shardwise ops
  shardwise ops softmax
  shardwise ops --json | jq -r 'select(.differentiable) | .name'")]
pub(crate) struct Options {
    /// Show what this operator does with every placement.
    name: Option<String>,
    /// Print JSON lines instead of a table.
    #[arg(long)]
    json: bool,
}

/// One operator.
#[derive(Serialize)]
struct Listed {
    name: &'static str,
    differentiable: bool,
    /// Rules that communicate nothing.
    free: Vec<String>,
    /// What the other combinations of placements communicate.
    communicates: Vec<&'static str>,
}

impl Row for Listed {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        vec![
            ("operator", -28, self.name.to_string()),
            ("gradient", -8, if self.differentiable { "yes" } else { "no" }.to_string()),
            ("else communicates", -32, self.communicates.join(", ")),
            ("free", -1, self.free.join("; ")),
        ]
    }
}

/// One rule of an operator.
#[derive(Serialize)]
struct Shown {
    inputs: String,
    output: String,
    collectives: Vec<&'static str>,
}

impl Row for Shown {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        let collectives = if self.collectives.is_empty() { "-".into() } else { self.collectives.join(", ") };
        vec![
            ("inputs", -28, self.inputs.clone()),
            ("output", -12, self.output.clone()),
            ("communicates", -1, collectives),
        ]
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(name) = &options.name {
        let op = ops().find(|op| op.name == name).ok_or_else(|| unknown(name))?;
        let rules = op.rules()?;
        let mut rows = Rows::new(options.json, rules.len() as u64);
        for rule in rules {
            let (inputs, output) = sides(&rule);
            rows.print(&Shown { inputs, output, collectives: rule.collectives })?;
        }
        return Ok(());
    }
    let mut rows = Rows::new(options.json, ops().count() as u64);
    for op in ops() {
        rows.announce(op.name);
        rows.print(&listed(op)?)?;
    }
    Ok(())
}

fn listed(op: &OpEntry) -> Result<Listed> {
    let (mut free, mut communicates) = (Vec::new(), Vec::new());
    for rule in op.rules()? {
        if !rule.collectives.is_empty() {
            communicates.extend(rule.collectives);
        } else if rule.inputs.iter().any(|p| !p.is_replicate()) {
            let (inputs, output) = sides(&rule);
            free.push(format!("{inputs} -> {output}"));
        }
    }
    communicates.sort_unstable();
    communicates.dedup();
    Ok(Listed { name: op.name, differentiable: op.is_differentiable()?, free, communicates })
}

/// The placements of the inputs and of the output.
fn sides(rule: &PlacementRule) -> (String, String) {
    let inputs: Vec<String> = rule.inputs.iter().map(ToString::to_string).collect();
    (inputs.join(", "), rule.output.to_string())
}

fn unknown(name: &str) -> Error {
    let first = name.chars().next();
    let alike: Vec<&str> = ops()
        .map(|op| op.name)
        .filter(|op| !name.is_empty() && (op.contains(name) || name.contains(op) || op.chars().next() == first))
        .collect();
    let needed =
        if alike.is_empty() { "the name of an operator".into() } else { format!("one of {}", alike.join(", ")) };
    ErrorKind::unknown(name).error("operator", format!("{name:?}"), needed, "run `shardwise ops` for the whole list")
}
