//! Measuring the links of a world: collectives of small and of large tensors, timed on all ranks.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};

use super::trace::operator;
use super::{Group, World};
use crate::error::Result;
use crate::mesh::{Link, Network};
use crate::placement::ReduceOp;

/// Calls before the timed ones, in which engines set up their groups and ranks come into step.
const WARM_UP: usize = 3;

/// Timed calls; odd, so that the median is one of them.
const SMALL_CALLS: usize = 31;
const LARGE_CALLS: usize = 9;

/// Bytes per rank of a small tensor: latency alone.
const SMALL: usize = 8;

/// Bytes that a rank has after a large call: beyond caches and beyond messages that engines send eagerly, yet some
/// milliseconds.
const LARGE: usize = 8 << 20;

/// The least that a rank contributes to a large call, on however many ranks.
const LEAST_PIECE: usize = 64 << 10;

impl World {
    /// Measures the links between the ranks: inside the hosts, and across them if there are several.
    ///
    /// Collective over the world; it takes some tens of milliseconds on one host. All ranks get the same numbers, those of
    /// the slowest rank, each the median of several calls. The first call measures, later ones return what it found. Hosts
    /// are those of [`network`](Self::network), and a link that no two ranks have is the one stated there. A dry world
    /// returns its network as it was configured.
    ///
    /// The result is used by [`with_network`](Self::with_network).
    pub fn measure_links(&self) -> Result<Network> {
        if self.is_dry() || self.size() == 1 {
            return Ok(self.network().clone());
        }
        self.measured(|| operator("measure_links", || self.measure()))
    }

    fn measure(&self) -> Result<Network> {
        let stated = self.network();
        let hosts = stated.groups(self.size())?;
        let inside = self.slowest(&hosts)?;
        // The k-th ranks of all hosts are a group: that is what a mesh axis across hosts looks like, and as in a program
        // all these groups communicate at once.
        let most = hosts.iter().map(Vec::len).max().unwrap_or(0);
        let row = |k: usize| hosts.iter().filter_map(|ranks| ranks.get(k).copied()).collect();
        let across = self.slowest(&(0..most).map(row).collect::<Vec<_>>())?;
        let (inside, across) = (inside.unwrap_or(stated.inside()), across.or(inside.filter(|_| hosts.len() == 1)));
        stated.with_links(inside, across.unwrap_or(stated.across()))
    }

    /// The slowest link of any rank within its group of these disjoint ones, `None` if no group has two ranks. The same on
    /// every rank of the world.
    fn slowest(&self, groups: &[Vec<usize>]) -> Result<Option<Link>> {
        let mine = groups.iter().find(|ranks| ranks.len() > 1 && ranks.contains(&self.global_rank()));
        // Without a group a rank waits in the reduction below, with numbers that are slower than nothing.
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

/// The link of a group of at least two ranks as this rank sees it: the numbers with which the cost model of planners gives
/// the times that gathers take.
fn link_of(group: &Group) -> Result<Link> {
    let ranks = group.size();
    let small = gather_us(group, SMALL, SMALL_CALLS)?;
    let piece = (LARGE / ranks).max(LEAST_PIECE);
    let large = gather_us(group, piece, LARGE_CALLS)?;
    let rounds = f64::from(usize::BITS - (ranks - 1).leading_zeros());
    // On a busy machine a small call may take longer than a large one; at least half of that one is its bytes.
    let moving = (large - small).max(large / 2.0);
    Ok(Link { latency_us: small / rounds, gb_per_s: (piece * (ranks - 1)) as f64 / moving / 1e3 })
}

/// The median time of a gather of so many bytes per rank, in microseconds.
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
