//! `shardwise bench`.

mod ckpt;
mod case;
mod collectives;
mod dispatch;
#[cfg(feature = "mpi")]
mod raw_mpi;
mod redistribute;
mod timing;
mod train;

use clap::Subcommand;
use shardwise::Result;

#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Checkpoints saved and loaded, beside plain files.
    Ckpt(ckpt::Options),
    /// Collectives of the thread world beside plain copies of the same bytes.
    Collectives(collectives::Options),
    /// Operators on one rank beside the plain operation, and first calls.
    Dispatch(dispatch::Options),
    /// Changes of layout beside plain copies of the same bytes.
    Redistribute(redistribute::Options),
    /// Training steps of a small GPT on one rank and on two.
    Train(train::Options),
}

impl Bench {
    /// Whether it measures what several ranks do.
    pub(crate) fn takes_all(&self) -> bool {
        !matches!(self, Bench::Dispatch(_))
    }

    pub(crate) fn run(self) -> Result<()> {
        match self {
            Bench::Ckpt(options) => ckpt::run(&options),
            Bench::Collectives(options) => collectives::run(&options),
            Bench::Dispatch(options) => dispatch::run(&options),
            Bench::Redistribute(options) => redistribute::run(&options),
            Bench::Train(options) => train::run(&options),
        }
    }
}
