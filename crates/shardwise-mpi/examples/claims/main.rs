//! Claims that anyone can run: programs of public threads about PyTorch and libraries on it, each with the one-device answer in itself.
//!
//! `cargo run --example claims` runs all on 4 thread ranks and prints a table, `-- NAME...` runs some, `-- --list` lists them, `-- --json`
//! prints JSON. As processes: `cargo build --workspace --features mpi --example claims && mpirun -n 4 target/debug/examples/claims`.
//! `scripts/compare-claims` runs the same cases in PyTorch and writes `docs/claims.md`.

mod programs;

use std::process::ExitCode;

use programs::{CLAIMS, Claim, RANKS};
use serde_json::json;
use shardwise::Error;
use shardwise_mpi::{launch, launched};

fn main() -> ExitCode {
    let (options, names): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|word| word.starts_with("--"));
    let known = |name: &&String| CLAIMS.iter().any(|claim| claim.name == **name);
    let unknown = options.iter().find(|option| !["--list", "--json"].contains(&option.as_str()));
    if let Some(word) = unknown.or_else(|| names.iter().find(|name| !known(name))) {
        eprintln!("unknown argument {word}; needed --json, --list or names of claims, which --list prints");
        return ExitCode::from(2);
    }
    let has = |option: &str| options.iter().any(|given| given == option);
    if has("--list") {
        CLAIMS.iter().for_each(|claim| println!("{:24} {}", claim.name, claim.wrong));
        return ExitCode::SUCCESS;
    }
    let chosen = CLAIMS.iter().filter(|claim| names.is_empty() || names.iter().any(|name| name == claim.name));
    let results: Vec<_> = chosen.map(run).collect();
    // Every process has the results; the first one prints them.
    if launched().is_none_or(|launched| launched.rank == 0) {
        if has("--json") { print_json(&results) } else { print_table(&results) }
    }
    if results.iter().all(|(_, result)| result.is_ok()) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a program on all ranks.
fn run(claim: &'static Claim) -> (&'static Claim, Result<String, Error>) {
    (claim, launch(RANKS, |world| (claim.run)(&world)))
}

fn print_table(results: &[(&Claim, Result<String, Error>)]) {
    for (claim, result) in results {
        let (verdict, seen) = match result {
            Ok(seen) => ("PASS", seen.clone()),
            Err(error) => ("FAIL", error.to_string()),
        };
        println!("{verdict} {:24} {}\n     {:24} {seen}", claim.name, claim.threads.join(", "), "");
    }
    let passed = results.iter().filter(|(_, result)| result.is_ok()).count();
    println!("{passed} of {} claims hold", results.len());
}

fn print_json(results: &[(&Claim, Result<String, Error>)]) {
    let row = |(claim, result): &(&Claim, Result<String, Error>)| {
        let seen = result.as_ref().map_or_else(ToString::to_string, Clone::clone);
        json!({
            "name": claim.name, "threads": claim.threads, "wrong": claim.wrong, "holds": result.is_ok(), "seen": seen,
            "file": claim.file,
        })
    };
    println!("{:#}", serde_json::Value::from(results.iter().map(row).collect::<Vec<_>>()));
}
