//! Measures latency and bandwidth of a world by timing small and large all-gathers.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};

use super::trace::record_operator;
use super::{Group, World};
use crate::error::Result;
use crate::mesh::{Link, Network};
use crate::placement::ReduceOp;

/// Untimed calls first, in which engines set up their groups and late ranks catch up.
const WARM_UP: usize = 3;

/// Timed calls; odd, so that the median is one of them. Fewer of the large ones, which vary less and take longer.
const SMALL_CALLS: usize = 31;
const LARGE_CALLS: usize = 9;

/// Bytes per rank of a small call, whose time is all latency.
const SMALL: usize = 8;

/// Bytes that a rank has after a large call: more than caches hold and than MPI sends eagerly, yet only a few
/// milliseconds per call.
const LARGE: usize = 8 << 20;

/// The least that a rank contributes to a large call, on however many ranks: less would measure latency again.
const LEAST_PIECE: usize = 64 << 10;

impl World {
    /// Measures latency and bandwidth between the ranks of a host and, if there are several hosts, between hosts.
    ///
    /// Collective over the world; takes some tens of milliseconds on one host. All ranks get the same numbers: those of
    /// the slowest rank, each the median of several calls. Later calls return the result of the first. Which ranks share a
    /// host is taken from [`network`](Self::network), as is a link that no two ranks use. A dry world returns its
    /// configured network.
    ///
    /// Pass the result to [`with_network`](Self::with_network) to plan by it.
    pub fn measure_links(&self) -> Result<Network> {
        if self.is_dry() || self.size() == 1 {
            return Ok(self.network().clone());
        }
        self.measured(|| record_operator("measure_links", || self.measure()))
    }

    fn measure(&self) -> Result<Network> {
        let stated = self.network();
        let hosts = stated.groups(self.size())?;
        let inside = self.slowest(&hosts)?;
        // The k-th ranks of all hosts form a group, as along a mesh axis across hosts; all these groups communicate at
        // once, as in a program.
        let most = hosts.iter().map(Vec::len).max().unwrap_or(0);
        let row = |k: usize| hosts.iter().filter_map(|ranks| ranks.get(k).copied()).collect();
        let across = self.slowest(&(0..most).map(row).collect::<Vec<_>>())?;
        let (inside, across) = (inside.unwrap_or(stated.intra_host()), across.or(inside.filter(|_| hosts.len() == 1)));
        stated.with_links(inside, across.unwrap_or(stated.inter_host()))
    }

    /// The slowest link that any rank measures within its group (the groups are disjoint), `None` if no group has two
    /// ranks. The same on every rank of the world.
    fn slowest(&self, groups: &[Vec<usize>]) -> Result<Option<Link>> {
        let mine = groups.iter().find(|ranks| ranks.len() > 1 && ranks.contains(&self.global_rank()));
        // A rank without a group contributes zeros, which the maximum below ignores.
        let (latency_us, ns_per_byte) = match mine {
            Some(ranks) => {
                let link = link_of(&self.subgroup(ranks)?)?;
                (link.latency_us, 1.0 / link.gb_per_s)
            }
            None => (0.0, 0.0),
        };
        let numbers = Tensor::new(&[latency_us, ns_per_byte], &Device::Cpu)?;
        let all = self.all_reduce(&numbers, ReduceOp::Max)?.to_vec1::<f64>()?;
        Ok((all[1] > 0.0).then(|| Link { latency_us: all[0], gb_per_s: 1.0 / all[1] }))
    }
}

/// The link of a group of at least two ranks as this rank measures it: the numbers with which the planners' cost model
/// (`redistribute::collective_us`) reproduces the measured times.
fn link_of(group: &Group) -> Result<Link> {
    let ranks = group.size();
    let small = gather_us(group, SMALL, SMALL_CALLS)?;
    let piece = (LARGE / ranks).max(LEAST_PIECE);
    let large = gather_us(group, piece, LARGE_CALLS)?;
    let rounds = f64::from(usize::BITS - (ranks - 1).leading_zeros());
    // On a busy machine a small call may take longer than a large one; then half of the large time counts as transfer.
    let moving = (large - small).max(large / 2.0);
    Ok(Link { latency_us: small / rounds, gb_per_s: (piece * (ranks - 1)) as f64 / moving / 1e3 })
}

/// The median time of an all-gather of `bytes` per rank, in microseconds.
fn gather_us(group: &Group, bytes: usize, calls: usize) -> Result<f64> {
    let piece = Tensor::zeros(bytes, DType::U8, &Device::Cpu)?;
    let sizes = vec![bytes; group.size()];
    let mut times = Vec::with_capacity(calls);
    for call in 0..WARM_UP + calls {
        let since = Instant::now();
        group.all_gather(&piece, 0, &sizes)?;
        if call >= WARM_UP {
            times.push(since.elapsed().as_secs_f64() * 1e6);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[calls / 2])
}
