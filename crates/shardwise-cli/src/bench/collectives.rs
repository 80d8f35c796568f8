//! `shardwise bench collectives`: every collective beside a plain copy of the bytes that one rank must write.

use candle_core::{DType, Device, Tensor};
use clap::Args;
use serde::Serialize;
use shardwise::{ReduceOp, Result, TensorMeta, ThreadWorld, World};

use super::timing::{duration, memcpy_ms, time};
use crate::output::{Row, Rows};

/// What to measure.
#[derive(Args)]
#[command(after_help = "\
Every case is a collective on f32 tensors whose full size is in its name. `memcpy_ms` is the time in which a rank
copies the bytes that it must write (its result) into memory that exists already, all ranks at once, in the same
run: a floor that leaves out what new memory costs.

Examples:
  shardwise bench collectives
  shardwise bench collectives --ranks 2 --mb 64 --json")]
pub(crate) struct Options {
    /// World sizes to measure.
    #[arg(long, value_delimiter = ',', default_value = "2,4,8")]
    ranks: Vec<usize>,
    /// Size of the largest tensors in megabytes.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    mb: u16,
    /// Print JSON lines (also the default when the output is not a terminal).
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy)]
enum Collective {
    Barrier,
    Broadcast,
    AllGather,
    AllReduce,
    ReduceScatter,
    ExchangeDims,
}

const COLLECTIVES: [(Collective, &str); 6] = [
    (Collective::Barrier, "barrier"),
    (Collective::Broadcast, "broadcast"),
    (Collective::AllGather, "all_gather"),
    (Collective::AllReduce, "all_reduce"),
    (Collective::ReduceScatter, "reduce_scatter"),
    (Collective::ExchangeDims, "exchange_dims"),
];

#[derive(Serialize, Clone)]
struct Measured {
    case: String,
    world: usize,
    /// Best time of one call.
    ms: f64,
    /// Median time of one call.
    median_ms: f64,
    /// Bytes of the full tensor per second, in 10^9.
    gbps: f64,
    /// Time of a plain copy of the bytes that one rank must write into memory in use, all ranks copying at once.
    memcpy_ms: f64,
}

impl Row for Measured {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        vec![
            ("case", -26, self.case.clone()),
            ("ranks", 5, self.world.to_string()),
            ("best", 11, duration(self.ms)),
            ("median", 11, duration(self.median_ms)),
            ("GB/s", 8, if self.gbps > 0.0 { format!("{:.2}", self.gbps) } else { "-".into() }),
            ("memcpy", 11, if self.memcpy_ms > 0.0 { duration(self.memcpy_ms) } else { "-".into() }),
        ]
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let sizes = [64, 1 << 20, usize::from(options.mb) << 20];
    let per_world = 1 + (COLLECTIVES.len() - 1) * sizes.len();
    let mut rows = Rows::new(options.json, (options.ranks.len() * per_world) as u64);
    for &ranks in &options.ranks {
        for (collective, name) in COLLECTIVES {
            let sizes = if matches!(collective, Collective::Barrier) { &[0][..] } else { &sizes[..] };
            for &bytes in sizes {
                rows.announce(&format!("{name} on {ranks} ranks"));
                let measured =
                    ThreadWorld::new(ranks)?.run(move |world| measure(&world, collective, bytes))?.swap_remove(0);
                let case = match bytes {
                    0 => name.to_string(),
                    b if b < 1 << 20 => format!("{b}B {name}"),
                    b => format!("{}MB {name}", b >> 20),
                };
                rows.print(&Measured { case, world: ranks, ..measured })?;
            }
        }
    }
    Ok(())
}

/// Columns of the benchmark tensors; their rows are whatever the size asks for.
const COLUMNS: usize = 8;

fn measure(world: &World, collective: Collective, bytes: usize) -> Result<Measured> {
    let (n, me) = (world.size(), world.rank());
    let rows = bytes / 4 / COLUMNS;
    let even = |total: usize| -> Vec<usize> { (0..n).map(|r| total * (r + 1) / n - total * r / n).collect() };
    let (row_sizes, column_sizes) = (even(rows), even(COLUMNS));
    let tensor = |rows: usize| Tensor::full(me as f32, (rows, COLUMNS), &Device::Cpu);
    let whole = TensorMeta::new((rows, COLUMNS), DType::F32);
    let (input, written) = match collective {
        Collective::Barrier => (tensor(0)?, 0),
        Collective::Broadcast | Collective::AllReduce => (tensor(rows)?, bytes),
        Collective::AllGather => (tensor(row_sizes[me])?, bytes),
        Collective::ReduceScatter => (tensor(rows)?, bytes / n),
        Collective::ExchangeDims => (tensor(row_sizes[me])?, bytes / n),
    };
    let call = || -> Result<()> {
        match collective {
            Collective::Barrier => world.barrier(),
            Collective::Broadcast => world.broadcast((me == 0).then_some(&input), &whole, 0).map(drop),
            Collective::AllGather => world.all_gather(&input, 0, &row_sizes).map(drop),
            Collective::AllReduce => world.all_reduce(&input, ReduceOp::Sum).map(drop),
            Collective::ReduceScatter => world.reduce_scatter(&input, ReduceOp::Sum, 0, &row_sizes).map(drop),
            Collective::ExchangeDims => world.exchange_dims(&input, 0, &row_sizes, 1, &column_sizes).map(drop),
        }
    };
    let times = time(world, bytes, call)?;
    let memcpy_ms = if written == 0 { 0.0 } else { memcpy_ms(world, written)? };
    let ms = times[0];
    Ok(Measured {
        case: String::new(),
        world: n,
        ms,
        median_ms: times[times.len() / 2],
        gbps: bytes as f64 / ms / 1e6,
        memcpy_ms,
    })
}
