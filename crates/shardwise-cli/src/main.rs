//! The `shardwise` command: trains models, measures performance, and inspects and converts checkpoints.

/// Keeps freed tensor buffers for the next tensor. The system allocator returns blocks of these sizes to the operating system
/// each time, and most of the time of small steps then goes into page faults.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

unsafe extern "C" {
    /// Sets an option of mimalloc. The bindings declare it only with more dependencies.
    fn mi_option_set(option: std::ffi::c_int, value: std::ffi::c_long);
}

/// Keeps unused memory for ten seconds instead of ten milliseconds: every step of a training run needs buffers of the same sizes,
/// and zeroing new pages for them took up to a seventh of the samples of a profile.
fn keep_freed_memory() {
    /// The number of `mi_option_purge_delay`, in milliseconds.
    const PURGE_DELAY: std::ffi::c_int = 15;
    // SAFETY: mimalloc is linked; any number is a valid option, and this one may be set at any time.
    unsafe { mi_option_set(PURGE_DELAY, 10_000) };
}

mod bench;
mod ckpt;
mod comms;
mod doctor;
mod embed;
mod generate;
mod lines;
mod manuals;
mod model_target;
mod old_options;
mod ops;
mod output;
mod plan;
mod processes;
mod report;
mod show;
mod tokenize;
mod train;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Distributed tensors for Rust: train models, measure performance, inspect and convert checkpoints.
#[derive(Parser)]
#[command(
    name = "shardwise",
    version,
    arg_required_else_help = true,
    // Longer lines are hard to read.
    max_term_width = 120,
    after_help = AFTER_HELP
)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

/// A paragraph is one line here: clap wraps it to the width of the terminal. Lines of examples are shorter than 80 columns.
const AFTER_HELP: &str = "\
Under mpirun or srun, `train`, `generate`, `embed` and the multi-rank benchmarks run one rank per process (in builds with the feature `mpi`); \
every other command runs only on the first process. Output is text, also in a pipe; pass --json for machine-readable output. Colours \
are left out if NO_COLOR is set.

Exit codes: 0 for success, 1 for an error and for the answer no (`ckpt verify`, `ckpt diff`, `plan`, `doctor`), 2 for a command line that \
does not parse, 130 after a second Ctrl-C.

Examples:
  shardwise train                           train a small GPT on 4 thread ranks
  shardwise train --mesh dp=2,tp=2 --plan fsdp+tp --data FILE
  mpirun -n 4 shardwise train --plan fsdp   one rank per process
  shardwise generate shardwise-out --prompt Alice
  shardwise generate model.gguf --chat      talk to a model
  shardwise tokenize texts/ --out texts.bin
  shardwise embed MODEL sentences.txt       compute sentence embeddings
  shardwise ckpt inspect DIRECTORY          list the contents of a checkpoint
  shardwise ckpt convert model.gguf hf/ --to hf   convert for Hugging Face
  shardwise doctor                          check this machine and this build
  shardwise bench train                     time training steps
  shardwise bench collectives --ranks 2 --json
  shardwise ops matmul                      show the sharding rules of matmul
  shardwise show 8x64 'S(0),R' --mesh dp=2,tp=2
  shardwise plan model/ --mesh dp=64,tp=8 --batch 4 --length 8192 --memory 80G";

#[derive(Subcommand)]
enum CliCommand {
    /// Measure collectives, redistribution, dispatch, checkpoints and training steps
    #[command(subcommand)]
    Bench(bench::Bench),
    /// List the operators with their sharding rules, collectives and gradients
    Ops(ops::OpsOptions),
    /// Draw a mesh, a layout or a redistribution
    Show(show::ShowOptions),
    /// Plan a training step: memory, communication and time of any model on any number of ranks
    Plan(Box<plan::PlanOptions>),
    /// Write the communication of a training step to a lockfile, or compare with one
    #[command(subcommand, after_help = comms::AFTER_HELP)]
    Comms(Box<comms::Comms>),
    /// Train a language model on a mesh of threads, or of processes under mpirun
    Train(Box<train::TrainOptions>),
    /// Generate text with a model directory, a GGUF file or a trained model
    Generate(Box<generate::GenerateOptions>),
    /// Compute sentence embeddings with an encoder
    Embed(embed::EmbedOptions),
    /// Render a report of a run, of a plan or of a failure as one HTML page
    Report(report::ReportOptions),
    /// Inspect, verify, compare, convert and reshard checkpoints
    Ckpt(ckpt::CkptOptions),
    /// Tokenize texts of any size into a file to train on
    Tokenize(tokenize::TokenizeOptions),
    /// Check the machine, the build and the environment, with a self-test
    Doctor(doctor::DoctorOptions),
    /// Print completions for a shell
    Completions(manuals::CompletionsOptions),
    /// Write man pages
    Man(manuals::ManOptions),
}

impl CliCommand {
    /// Whether every process of an MPI job takes part; otherwise only the first process runs the command.
    fn runs_on_all_processes(&self) -> bool {
        match self {
            CliCommand::Train(_) | CliCommand::Generate(_) | CliCommand::Embed(_) => true,
            CliCommand::Bench(bench) => bench.runs_on_all_processes(),
            CliCommand::Ops(_)
            | CliCommand::Show(_)
            | CliCommand::Plan(_)
            | CliCommand::Comms(_)
            | CliCommand::Report(_)
            | CliCommand::Ckpt(_)
            | CliCommand::Tokenize(_)
            | CliCommand::Doctor(_)
            | CliCommand::Completions(_)
            | CliCommand::Man(_) => false,
        }
    }
}

fn main() -> ExitCode {
    keep_freed_memory();
    silence_caught_panics();
    let command = match Cli::try_parse_from(old_options::replaced(std::env::args_os())) {
        Ok(Cli { command }) => command,
        Err(error) => return processes::print_clap_error(&error),
    };
    if !command.runs_on_all_processes() && !processes::is_first() {
        return ExitCode::SUCCESS;
    }
    let result = match command {
        CliCommand::Bench(bench) => bench.run(),
        CliCommand::Ops(options) => ops::run(&options),
        CliCommand::Show(options) => show::run(&options),
        CliCommand::Plan(options) => return exit_code(plan::run(&options)),
        CliCommand::Comms(comms) => comms::run(&comms),
        CliCommand::Train(options) => train::run(*options),
        CliCommand::Generate(options) => generate::run(&options),
        CliCommand::Embed(options) => embed::run(&options),
        CliCommand::Report(options) => report::run(&options),
        CliCommand::Ckpt(options) => return exit_code(ckpt::run(&options)),
        CliCommand::Tokenize(options) => tokenize::run(&options),
        CliCommand::Doctor(options) => return exit_code(doctor::run(&options)),
        CliCommand::Completions(options) => manuals::completions(&options, Cli::command()),
        CliCommand::Man(options) => manuals::pages(&options, Cli::command()),
    };
    exit_code(result.map(|()| true))
}

/// Prints no panics that become errors: the error says what is wrong.
fn silence_caught_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !shardwise::text::catches_panics() {
            usual(panic);
        }
    }));
}

/// The exit code of a command that answers a question, such as whether a checkpoint is intact: 1 for no, and for errors.
fn exit_code(answer: shardwise::Result<bool>) -> ExitCode {
    match answer {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // The reader has closed the pipe, as in `shardwise ops | head`.
        Err(error) if processes::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            processes::report(&error);
            ExitCode::FAILURE
        }
    }
}

#[test]
fn definitions_of_options_are_consistent() {
    <Cli as clap::CommandFactory>::command().debug_assert();
}
