//! `shardwise bench redistribute`: throughput of redistribution, compared with memcpy.

use candle_core::{DType, Device, Tensor};
use clap::Args;
use serde::Serialize;
use shardwise::prelude::*;

use super::timing::{duration, memcpy_ms, time};
use crate::output::{RowPrinter, TableRow};
use crate::processes;

/// The options of `shardwise bench redistribute`.
#[derive(Args)]
#[command(after_help = "\
The tensors are f32 with 1024 columns; sizes are those of the full tensor. `gbps` is the size of the full tensor per second, \
`memcpy_gbps` the throughput of a memcpy of as many bytes into allocated memory, on all ranks at once in the same run.

Examples:
  shardwise bench redistribute
  shardwise bench redistribute --ranks 2 --json
  mpirun -n 4 shardwise bench redistribute")]
pub(crate) struct BenchRedistributeOptions {
    /// World sizes to measure [default: 2,4; under mpirun the number of processes]
    #[arg(long, value_delimiter = ',')]
    ranks: Option<Vec<usize>>,
    /// Sizes of the full tensor in MiB
    #[arg(long, value_delimiter = ',', default_value = "1,16,64", value_parser = clap::value_parser!(u16).range(1..=4096))]
    mb: Vec<u16>,
    /// Print JSON lines instead of a table
    #[arg(long)]
    json: bool,
}

/// The name of a case and its source and target placements.
const CASES: [(&str, &str, &str); 4] =
    [("S0->R", "S(0)", "R"), ("S0->S1", "S(0)", "S(1)"), ("P->R", "P(sum)", "R"), ("P->S0", "P(sum)", "S(0)")];

#[derive(Serialize)]
struct RedistributeTiming {
    case: String,
    world: usize,
    /// Best time of one redistribution.
    ms: f64,
    /// Median time of one redistribution.
    median_ms: f64,
    /// Bytes of the full tensor per second, in 10^9.
    gbps: f64,
    /// The same for a memcpy.
    memcpy_gbps: f64,
}

impl TableRow for RedistributeTiming {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        vec![
            ("case", -16, self.case.clone()),
            ("ranks", 5, self.world.to_string()),
            ("best", 11, duration(self.ms)),
            ("median", 11, duration(self.median_ms)),
            ("GB/s", 8, format!("{:.2}", self.gbps)),
            ("memcpy GB/s", 12, format!("{:.2}", self.memcpy_gbps)),
        ]
    }
}

pub(crate) fn run(options: &BenchRedistributeOptions) -> Result<()> {
    let worlds = processes::all_ok(processes::world_sizes(options.ranks.as_deref(), &[2, 4]))?;
    let mut rows = RowPrinter::new(options.json, (worlds.len() * (options.mb.len() * CASES.len() + 1)) as u64);
    for ranks in worlds {
        rows.announce(&format!("small tensors on {ranks} ranks"));
        rows.print(&measure("small S0->R".into(), ranks, [8, 8], "S(0)", "R")?)?;
        for &mb in &options.mb {
            for (name, from, to) in CASES {
                let case = format!("{mb}MB {name}");
                rows.announce(&format!("{case} on {ranks} ranks"));
                rows.print(&measure(case, ranks, [usize::from(mb) << 8, 1024], from, to)?)?;
            }
        }
    }
    Ok(())
}

fn measure(case: String, ranks: usize, shape: [usize; 2], from: &str, to: &str) -> Result<RedistributeTiming> {
    let (from, to): (Placement, Placement) = (from.parse()?, to.parse()?);
    let bytes = shape[0] * shape[1] * 4;
    let (ms, median_ms, memcpy) = shardwise_mpi::launch(ranks, move |world| {
        let mesh = world.mesh([("ranks", ranks)])?;
        let layout = Layout::new(mesh.mesh(), shape.as_slice(), [from.clone()])?;
        let local = Tensor::ones(layout.local_shape(world.rank()), DType::F32, &Device::Cpu)?;
        let tensor = DTensor::from_local_with_shape(&local, &mesh, [from.clone()], shape.as_slice())?;
        let times = time(&world, bytes, || tensor.redistribute([to.clone()]).map(drop))?;
        Ok((times[0], times[times.len() / 2], memcpy_ms(&world, bytes)?))
    })?;
    let gbps = |ms: f64| bytes as f64 / ms / 1e6;
    Ok(RedistributeTiming { case, world: ranks, ms, median_ms, gbps: gbps(ms), memcpy_gbps: gbps(memcpy) })
}
