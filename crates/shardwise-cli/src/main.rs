//! The `shardwise` command.

/// Tensors come and go in sizes that the usual allocator hands back to the system each time; this one keeps them, which
/// saves most page faults.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod bench;
mod ops;
mod output;

use clap::{Parser, Subcommand};

/// Distributed tensors for Rust: benchmarks and tools.
#[derive(Parser)]
#[command(name = "shardwise", version, arg_required_else_help = true, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  shardwise bench collectives                     a table for 2, 4 and 8 thread ranks
  shardwise bench collectives --ranks 2 --json    one JSON object per line
  shardwise bench redistribute                    changes of layout on 2 and 4 thread ranks
  shardwise bench dispatch                        operators beside the plain tensor operation
  shardwise ops                                   all operators and how they are spread
  shardwise ops matmul                            what matmul does with every placement";

#[derive(Subcommand)]
enum Command {
    /// Measure how fast things are on this machine.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// List the operators: how they are spread over ranks, what they communicate, whether they have a gradient.
    Ops(ops::Options),
}

fn main() -> std::process::ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(bench) => bench.run(),
        Command::Ops(options) => ops::run(&options),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
