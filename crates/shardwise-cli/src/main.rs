//! The `shardwise` command.

/// Tensors come and go in sizes that the usual allocator hands back to the system each time; this one keeps them, which
/// saves most page faults.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod bench;
mod ckpt;
mod generate;
mod ops;
mod output;
mod processes;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Distributed tensors for Rust: training, benchmarks and tools.
#[derive(Parser)]
#[command(name = "shardwise", version, arg_required_else_help = true, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  shardwise train                                 a small GPT on a book, on 4 thread ranks
  shardwise train --mesh dp=2,tp=2 --plan fsdp+tp --data FILE
  mpirun -n 4 shardwise train --plan fsdp         on 4 processes, of one or several machines
  shardwise generate shardwise-out --prompt Alice text from what was trained
  shardwise ckpt inspect DIRECTORY                what is in a checkpoint of any format
  shardwise ckpt convert run/ hf/ --to hf         for Hugging Face
  shardwise bench train                           training steps on one rank and on two
  shardwise bench collectives                     a table for 2, 4 and 8 thread ranks
  shardwise bench collectives --ranks 2 --json    one JSON object per line
  shardwise bench redistribute                    changes of layout on 2 and 4 thread ranks
  shardwise bench dispatch                        operators beside the plain tensor operation
  shardwise ops                                   all operators and how they are spread
  shardwise ops matmul                            what matmul does with every placement

Under mpirun or srun (in builds with the feature mpi) training and benchmarks of several ranks have one rank per process;
all else is done by the first process. Output is text, also into a pipe; say --json where a program reads it.";

#[derive(Subcommand)]
enum Command {
    /// Measure how fast things are on this machine.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// List the operators: how they are spread over ranks, what they communicate, whether they have a gradient.
    Ops(ops::Options),
    /// Train a language model on a text, spread over a mesh of ranks: threads, or processes under mpirun.
    Train(Box<train::Options>),
    /// Write text with a trained model.
    Generate(generate::Options),
    /// Look at checkpoints of any format, compare, check and convert them.
    Ckpt(ckpt::Options),
}

impl Command {
    /// Whether it takes all processes that were started; else the first one does it alone.
    fn takes_all(&self) -> bool {
        match self {
            Command::Train(_) => true,
            Command::Bench(bench) => bench.takes_all(),
            Command::Ops(_) | Command::Generate(_) | Command::Ckpt(_) => false,
        }
    }
}

fn main() -> ExitCode {
    let command = match Cli::try_parse() {
        Ok(Cli { command }) => command,
        Err(error) => return processes::answer(&error),
    };
    if !command.takes_all() && !processes::is_first() {
        return ExitCode::SUCCESS;
    }
    let result = match command {
        Command::Bench(bench) => bench.run(),
        Command::Ops(options) => ops::run(&options),
        Command::Train(options) => train::run(*options),
        Command::Generate(options) => generate::run(&options),
        Command::Ckpt(options) => match ckpt::run(&options) {
            Ok(false) => return ExitCode::FAILURE,
            other => other.map(drop),
        },
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read the output has seen enough, as in `shardwise ops | head`.
        Err(error) if processes::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            processes::report(&error);
            ExitCode::FAILURE
        }
    }
}
