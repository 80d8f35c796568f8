//! `shardwise bench`.

mod collectives;

use clap::Subcommand;
use shardwise::Result;

#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Collectives of the thread world beside plain copies of the same bytes.
    Collectives(collectives::Options),
}

impl Bench {
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Bench::Collectives(options) => collectives::run(&options),
        }
    }
}
