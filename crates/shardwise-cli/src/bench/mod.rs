//! `shardwise bench`: benchmarks of the library on this machine.

mod ckpt;
mod case;
mod collectives;
mod data;
mod decode;
mod dispatch;
mod kernels;
#[cfg(feature = "mpi")]
mod raw_mpi;
mod redistribute;
mod timing;
mod train;

pub(crate) use kernels::peak::{Work, floor_ms, peak_flops_per_s};

use clap::Subcommand;
use shardwise::Result;

#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Throughput of saving and loading checkpoints, compared with plain files
    Ckpt(ckpt::BenchCkptOptions),
    /// Latency and throughput of collectives, compared with memcpy
    Collectives(collectives::BenchCollectivesOptions),
    /// Throughput of training data from token files, compared with plain reads
    Data(data::BenchDataOptions),
    /// Tokens per second of a language model, compared with the memory bandwidth
    Decode(decode::BenchDecodeOptions),
    /// Overhead of operators over plain candle operations, and the cost of first calls
    Dispatch(dispatch::BenchDispatchOptions),
    /// Operators on large tensors of one rank, compared with memcpy and the peak of the processor
    Kernels(kernels::BenchKernelsOptions),
    /// Throughput of redistribution between layouts, compared with memcpy
    Redistribute(redistribute::BenchRedistributeOptions),
    /// Training steps of a small GPT with one rank, DDP, FSDP and tensor parallelism
    Train(train::BenchTrainOptions),
}

impl Bench {
    /// Whether every process of an MPI job takes part.
    pub(crate) fn runs_on_all_processes(&self) -> bool {
        !matches!(self, Bench::Data(_) | Bench::Dispatch(_) | Bench::Kernels(_))
    }

    pub(crate) fn run(self) -> Result<()> {
        match self {
            Bench::Ckpt(options) => ckpt::run(&options),
            Bench::Collectives(options) => collectives::run(&options),
            Bench::Data(options) => data::run(&options),
            Bench::Decode(options) => decode::run(&options),
            Bench::Dispatch(options) => dispatch::run(&options),
            Bench::Kernels(options) => kernels::run(&options),
            Bench::Redistribute(options) => redistribute::run(&options),
            Bench::Train(options) => train::run(&options),
        }
    }
}
