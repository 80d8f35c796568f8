//! `shardwise ops`: the operators and their sharding rules.

mod pytorch;

use std::io::Write;

use clap::Args;
use serde::Serialize;
use shardwise::error::{ErrorKind, nearest};
use shardwise::ops::{OpEntry, PlacementRule, composed_ops, ops};
use shardwise::{Error, Result};

use crate::output::{RowPrinter, TableRow};

/// The options of `shardwise ops`.
#[derive(Args)]
#[command(after_help = "\
A rule gives the placements of the inputs and of the first output on one mesh axis: R is replicated, S(d) is sharded on \
dimension d, P(sum) is a partial sum. A free rule communicates nothing. The rules are found by running each operator without \
data on two ranks.

The tier is that of PyTorch's operator database: 1 is what models use, 2 factorizations, statistics and special functions, 3 \
the rest. The list shortens all_gather, all_reduce, all_to_all, exchange_dims and reduce_scatter; PyTorch's signatures are in \
JSON and in the rules of one operator.

Examples:
  shardwise ops
  shardwise ops softmax
  shardwise ops --json | jq -r 'select(.differentiable) | .name'")]
pub(crate) struct OpsOptions {
    /// Show the rules of this operator for every combination of placements
    name: Option<String>,
    /// Print JSON lines instead of a table
    #[arg(long)]
    json: bool,
}

/// An operator in the list.
#[derive(Serialize)]
struct OperatorRow {
    name: &'static str,
    /// The tier of PyTorch's operator database, if the operator is in it.
    tier: Option<u8>,
    /// PyTorch's signatures that it serves.
    pytorch: Vec<&'static str>,
    differentiable: bool,
    /// Whether it is composed of other operators, whose rules apply.
    composed: bool,
    /// The rules that communicate nothing.
    free: Vec<String>,
    /// The collectives that other combinations of placements need.
    communicates: Vec<&'static str>,
}

impl TableRow for OperatorRow {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        // A line has 80 columns at most; the full names and the rules that are free are in JSON.
        let short = |call: &&'static str| match *call {
            "exchange_dims" => "exchange",
            "reduce_scatter" => "scatter",
            call => call.trim_start_matches("all_"),
        };
        let short: Vec<&str> = self.communicates.iter().map(short).collect();
        vec![
            ("operator", -28, self.name.to_string()),
            ("tier", -4, self.tier.map_or_else(|| "-".to_string(), |tier| tier.to_string())),
            ("grad", -4, if self.differentiable { "yes" } else { "no" }.to_string()),
            ("may need", -1, short.join(" ")),
        ]
    }
}

/// A rule of one operator.
#[derive(Serialize)]
struct RuleRow {
    inputs: String,
    output: String,
    collectives: Vec<&'static str>,
}

impl TableRow for RuleRow {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        let collectives = if self.collectives.is_empty() { "-".into() } else { self.collectives.join(", ") };
        vec![
            ("inputs", -28, self.inputs.clone()),
            ("output", -12, self.output.clone()),
            ("communicates", -1, collectives),
        ]
    }
}

pub(crate) fn run(options: &OpsOptions) -> Result<()> {
    if let Some(name) = &options.name {
        let op = all().find(|op| op.name == name).ok_or_else(|| unknown(name))?;
        let rules = op.rules()?;
        let mut rows = RowPrinter::new(options.json, rules.len() as u64);
        for rule in rules {
            let (inputs, output) = sides(&rule);
            rows.print(&RuleRow { inputs, output, collectives: rule.collectives })?;
        }
        for signature in pytorch::signatures(op.name).iter().filter(|_| !options.json) {
            writeln!(std::io::stdout().lock(), "PyTorch: {}", signature.text)?;
        }
        return Ok(());
    }
    let mut rows = RowPrinter::new(options.json, all().count() as u64);
    for op in all() {
        rows.announce(op.name);
        rows.print(&operator_row(op)?)?;
    }
    Ok(())
}

/// Operators with a rule of their own, then those composed of them.
fn all() -> impl Iterator<Item = &'static OpEntry> {
    ops().chain(composed_ops())
}

fn operator_row(op: &OpEntry) -> Result<OperatorRow> {
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
    let composed = composed_ops().any(|other| other.name == op.name);
    let signatures = pytorch::signatures(op.name);
    let tier = signatures.iter().map(|signature| signature.tier).filter(|tier| *tier > 0).min();
    let pytorch = signatures.iter().map(|signature| signature.text).collect();
    let differentiable = op.is_differentiable()?;
    Ok(OperatorRow { name: op.name, tier, pytorch, differentiable, composed, free, communicates })
}

/// The placements of the inputs and of the output.
fn sides(rule: &PlacementRule) -> (String, String) {
    let inputs: Vec<String> = rule.inputs.iter().map(ToString::to_string).collect();
    (inputs.join(", "), rule.output.to_string())
}

fn unknown(name: &str) -> Error {
    let fix = format!("did you mean {}? `shardwise ops` lists all", nearest(name, all().map(|op| op.name)));
    ErrorKind::unknown(name).error("operator", format!("{name:?}"), "the name of an operator", fix)
}
