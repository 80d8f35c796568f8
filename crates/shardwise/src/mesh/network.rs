//! The network of a world: which ranks share a host, and the links within a host and between hosts.

use std::fmt;
use std::sync::Arc;

use super::{Link, Mesh};
use crate::error::{ErrorKind, Result};

/// The hosts of the ranks of a world, and latency and bandwidth within a host and between hosts.
///
/// Meshes take the links of their axes from it, and planners estimate the time of collectives from these. An engine states
/// the network of its world; a program can set another one ([`World::with_network`](crate::World::with_network)) or
/// measure it ([`World::measure_links`](crate::World::measure_links)). A network with more than these two levels is
/// described per mesh axis instead, with [`DeviceMesh::with_links`](crate::DeviceMesh::with_links).
///
/// ```
/// # use shardwise::Mesh;
/// # use shardwise::mesh::{Link, Network};
/// let cable = Link { latency_us: 30.0, gb_per_s: 1.0 };
/// let network = Network::of_hosts([0, 0, 1, 1], Link::THREADS, cable)?;
/// // ranks 0, 1 and 2, 3 share a host: `tp` is within a host, `dp` between hosts
/// assert_eq!(network.links(&Mesh::new([("dp", 2), ("tp", 2)])?)?, [cable, Link::THREADS]);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// The host of every rank; `None` if all ranks share one.
    hosts: Option<Arc<[usize]>>,
    inside: Link,
    across: Link,
}

impl Network {
    /// Ranks that are threads of one process, see [`Link::THREADS`].
    pub const THREADS: Network = Network { hosts: None, inside: Link::THREADS, across: Link::THREADS };

    /// Creates a network of any number of ranks on one host.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a number of the link is negative or not finite, or its bandwidth zero.
    pub fn one_host(link: Link) -> Result<Self> {
        let link = link.checked()?;
        Ok(Network { hosts: None, inside: link, across: link })
    }

    /// Creates a network of several hosts: `hosts` has the number of each rank's host, in any numbering; `inside` is the
    /// link within a host, `across` the link between hosts.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a number of a link is negative or not finite, or a bandwidth zero.
    pub fn of_hosts(hosts: impl Into<Arc<[usize]>>, inside: Link, across: Link) -> Result<Self> {
        Ok(Network { hosts: Some(hosts.into()), inside: inside.checked()?, across: across.checked()? })
    }

    /// Returns the same hosts with other links.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a number of a link is negative or not finite, or a bandwidth zero.
    pub fn with_links(&self, inside: Link, across: Link) -> Result<Self> {
        Ok(Network { hosts: self.hosts.clone(), inside: inside.checked()?, across: across.checked()? })
    }

    /// The link between ranks of one host.
    pub fn intra_host(&self) -> Link {
        self.inside
    }

    /// The link between ranks of different hosts.
    pub fn inter_host(&self) -> Link {
        self.across
    }

    /// The number of a rank's host.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the network has no such rank.
    pub fn host_of(&self, rank: usize) -> Result<usize> {
        let Some(hosts) = &self.hosts else { return Ok(0) };
        hosts.get(rank).copied().ok_or_else(|| {
            ErrorKind::Mesh.error(
                "network",
                format!("the hosts of {} rank(s), for a world with rank {rank}", hosts.len()),
                "the host of every rank of the world",
                "list one host per rank",
            )
        })
    }

    /// One link per axis of a mesh: the link between hosts if any two neighbours along the axis are on different hosts,
    /// else the link within a host. The same on every rank.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the network does not have all ranks of the mesh.
    pub fn links(&self, mesh: &Mesh) -> Result<Vec<Link>> {
        if self.hosts.is_none() {
            return Ok(vec![self.inside; mesh.ndim()]);
        }
        let hosts = mesh.ranks().iter().map(|&rank| self.host_of(rank)).collect::<Result<Vec<_>>>()?;
        let mut stride = hosts.len();
        let crosses = mesh.shape().iter().map(|&size| {
            stride /= size;
            // Neighbours along the axis are `stride` apart in row-major order.
            let first = |position: &usize| position / stride % size + 1 < size;
            (0..hosts.len()).filter(first).any(|position| hosts[position] != hosts[position + stride])
        });
        Ok(crosses.map(|crosses| if crosses { self.across } else { self.inside }).collect())
    }

    /// The ranks `0..size` grouped by host, ascending.
    pub(crate) fn groups(&self, size: usize) -> Result<Vec<Vec<usize>>> {
        let mut groups: Vec<(usize, Vec<usize>)> = Vec::new();
        for rank in 0..size {
            let host = self.host_of(rank)?;
            match groups.iter_mut().find(|(other, _)| *other == host) {
                Some((_, ranks)) => ranks.push(rank),
                None => groups.push((host, vec![rank])),
            }
        }
        Ok(groups.into_iter().map(|(_, ranks)| ranks).collect())
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.hosts {
            None => write!(f, "{} between all ranks", self.inside),
            Some(hosts) => {
                write!(f, "{} inside a host, {} across; hosts of the ranks: {hosts:?}", self.inside, self.across)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: Link = Link { latency_us: 20.0, gb_per_s: 1.0 };

    fn crossing(hosts: &[usize], mesh: &str) -> Vec<bool> {
        let network = Network::of_hosts(hosts, Link::THREADS, SLOW).unwrap();
        let links = network.links(&mesh.parse().unwrap()).unwrap();
        links.into_iter().map(|link| link == SLOW).collect()
    }

    #[test]
    fn an_axis_goes_across_hosts_if_some_neighbours_along_it_do() {
        assert_eq!(crossing(&[0, 0, 1, 1], "dp=2,tp=2"), [true, false]);
        assert_eq!(crossing(&[0, 1, 0, 1], "dp=2,tp=2"), [false, true]);
        assert_eq!(crossing(&[7, 7, 7, 7], "dp=2,tp=2"), [false, false]);
        assert_eq!(crossing(&[0, 0, 0, 1], "dp=2,tp=2"), [true, true]);
        assert_eq!(crossing(&[0, 0, 1, 1, 2, 2, 3, 3], "a=2,b=2,c=2"), [true, true, false]);
        // the hosts are those of the ranks of the mesh, in its order
        assert_eq!(crossing(&[0, 0, 1, 1], "dp=2,tp=2@0,2,1,3"), [false, true]);
        assert_eq!(crossing(&[0, 0, 1, 1], "tp=2@2,3"), [false]);
        assert_eq!(crossing(&[0, 1], "a=1,b=2,c=1"), [false, true, false]);
    }

    #[test]
    fn ranks_without_a_host_and_impossible_links_are_refused() {
        let network = Network::of_hosts([0, 1], Link::THREADS, SLOW).unwrap();
        let message = network.links(&"dp=3".parse().unwrap()).unwrap_err().to_string();
        assert!(message.contains("hosts of 2 rank(s), for a world with rank 2"), "{message}");
        let never = Link { latency_us: 1.0, gb_per_s: 0.0 };
        assert!(Network::one_host(never).is_err() && Network::of_hosts([0], SLOW, never).is_err());
        assert!(network.with_links(SLOW, never).is_err());
    }
}
