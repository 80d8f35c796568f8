//! `shardwise bench collectives`: latency and throughput of the collectives, compared with memcpy and with plain MPI.

use candle_core::{DType, Device, Tensor};
use clap::Args;
use serde::Serialize;
use shardwise::error::ErrorKind;
use shardwise::{ReduceOp, Result, TensorMeta, World};
use shardwise_mpi::launch;

use super::case::{COLUMNS, Collective, even};
#[cfg(feature = "mpi")]
use super::raw_mpi::RawMpiCall;
use super::timing::{duration, memcpy_ms, time, time_in_turn};
use crate::output::{RowPrinter, TableRow};
use crate::processes;

/// The options of `shardwise bench collectives`.
#[derive(Args)]
#[command(after_help = "\
Each case is a collective on f32 tensors; its name has the size of the full tensor. `memcpy_ms` is the time of a memcpy of the \
rank's result into allocated memory, on all ranks at once in the same run: a lower bound without the cost of allocation.

Under mpirun the ranks are its processes, and `raw_ms` is the time of the plain MPI call into allocated memory, in alternation \
with ours.

Examples:
  shardwise bench collectives
  shardwise bench collectives --ranks 2 --mb 64 --json
  mpirun -n 2 shardwise bench collectives --only all_reduce --json")]
pub(crate) struct BenchCollectivesOptions {
    /// World sizes to measure [default: 2,4,8; under mpirun the number of processes]
    #[arg(long, value_delimiter = ',')]
    ranks: Option<Vec<usize>>,
    /// Size of the largest tensors in MiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    mb: u16,
    /// Sizes of the tensors in bytes, instead of 64 bytes, 1 MiB and --mb
    #[arg(long, value_delimiter = ',', conflicts_with = "mb", value_parser = clap::value_parser!(u32).range(64..))]
    bytes: Vec<u32>,
    /// Collectives to measure [default: all]
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Print JSON lines instead of a table
    #[arg(long)]
    json: bool,
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
struct CollectiveTiming {
    case: String,
    world: usize,
    /// Best time of one call.
    ms: f64,
    /// Median time of one call.
    median_ms: f64,
    /// Bytes of the full tensor per second, in 10^9.
    gbps: f64,
    /// Time of a memcpy of the rank's result into allocated memory, on all ranks at once.
    memcpy_ms: f64,
    /// Best time of the plain MPI call, under mpirun.
    #[serde(skip_serializing_if = "Option::is_none")]
    raw_ms: Option<f64>,
    /// Median time of the plain MPI call.
    #[serde(skip_serializing_if = "Option::is_none")]
    raw_median_ms: Option<f64>,
}

impl TableRow for CollectiveTiming {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        let raw = self.raw_median_ms.map(|ms| ("raw median", 11, duration(ms)));
        let columns = [
            ("case", -26, self.case.clone()),
            ("ranks", 5, self.world.to_string()),
            ("best", 11, duration(self.ms)),
            ("median", 11, duration(self.median_ms)),
            ("GB/s", 8, if self.gbps > 0.0 { format!("{:.2}", self.gbps) } else { "-".into() }),
            ("memcpy", 11, if self.memcpy_ms > 0.0 { duration(self.memcpy_ms) } else { "-".into() }),
        ];
        columns.into_iter().chain(raw).collect()
    }
}

pub(crate) fn run(options: &BenchCollectivesOptions) -> Result<()> {
    let sizes: Vec<usize> = match options.bytes.as_slice() {
        [] => vec![64, 1 << 20, usize::from(options.mb) << 20],
        given => given.iter().map(|&bytes| bytes as usize).collect(),
    };
    let chosen = processes::all_ok(chosen(&options.only))?;
    let worlds = processes::all_ok(processes::world_sizes(options.ranks.as_deref(), &[2, 4, 8]))?;
    let per_collective =
        |collective: &Collective| if matches!(collective, Collective::Barrier) { 1 } else { sizes.len() };
    let per_world: usize = chosen.iter().map(|(collective, _)| per_collective(collective)).sum();
    let mut rows = RowPrinter::new(options.json, (worlds.len() * per_world) as u64);
    for ranks in worlds {
        for &(collective, name) in &chosen {
            let sizes = if matches!(collective, Collective::Barrier) { &[0][..] } else { &sizes[..] };
            for &bytes in sizes {
                rows.announce(&format!("{name} on {ranks} ranks"));
                let measured = launch(ranks, move |world| measure(&world, collective, bytes))?;
                let case = match bytes {
                    0 => name.to_string(),
                    b if b < 1 << 20 => format!("{b}B {name}"),
                    b => format!("{}MB {name}", b >> 20),
                };
                rows.print(&CollectiveTiming { case, world: ranks, ..measured })?;
            }
        }
    }
    Ok(())
}

/// The collectives with these names; all of them if there are no names.
fn chosen(names: &[String]) -> Result<Vec<(Collective, &'static str)>> {
    let known = COLLECTIVES.map(|(_, name)| name);
    if let Some(unknown) = names.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(ErrorKind::Argument.error("--only", unknown, known.join(", "), "choose from these names"));
    }
    let is_chosen = |name: &str| names.is_empty() || names.iter().any(|chosen| chosen == name);
    Ok(COLLECTIVES.into_iter().filter(|(_, name)| is_chosen(name)).collect())
}

fn measure(world: &World, collective: Collective, bytes: usize) -> Result<CollectiveTiming> {
    let (n, me) = (world.size(), world.rank());
    let rows = bytes / 4 / COLUMNS;
    let (row_sizes, column_sizes) = (even(rows, n), even(COLUMNS, n));
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
    #[cfg(feature = "mpi")]
    let raw = processes::launched().map(|_| RawMpiCall::new(world, collective, bytes));
    #[cfg(feature = "mpi")]
    let raw = raw.as_ref().map(|raw| || raw.call());
    #[cfg(not(feature = "mpi"))]
    let raw = None::<fn() -> Result<()>>;
    let [times, raw] = match &raw {
        Some(raw) => time_in_turn(world, bytes, [&call, raw])?,
        None => [time(world, bytes, call)?, Vec::new()],
    };
    let memcpy_ms = if written == 0 { 0.0 } else { memcpy_ms(world, written)? };
    let ms = times[0];
    Ok(CollectiveTiming {
        case: String::new(),
        world: n,
        ms,
        median_ms: times[times.len() / 2],
        gbps: bytes as f64 / ms / 1e6,
        memcpy_ms,
        raw_ms: raw.first().copied(),
        raw_median_ms: raw.get(raw.len() / 2).copied(),
    })
}
