//! Latency and bandwidth along the axes of a mesh, for planners.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::LazyLock;

use crate::error::{Error, ErrorKind, Result};
use crate::intern::{Interned, Interner};

/// Latency and bandwidth between neighbouring ranks, from which planners estimate the time of a collective. Its text form
/// is `1.5us,8GB/s`.
///
/// ```
/// # use shardwise::mesh::Link;
/// let link = Link { latency_us: 30.0, gb_per_s: 1.25 };
/// assert_eq!(link.to_string(), "30us,1.25GB/s");
/// assert_eq!("30us,1.25GB/s".parse::<Link>()?, link);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Link {
    /// Latency of an empty message in microseconds.
    pub latency_us: f64,
    /// Bandwidth of a long message in 10^9 bytes per second.
    pub gb_per_s: f64,
}

impl Link {
    /// Nominal numbers for ranks that are threads of one process. [`World::measure_links`](crate::World::measure_links)
    /// measures those of a machine.
    pub const THREADS: Link = Link { latency_us: 1.0, gb_per_s: 8.0 };

    /// An error unless both numbers are finite, the latency not negative and the bandwidth above zero.
    pub(super) fn checked(self) -> Result<Self> {
        if self.latency_us >= 0.0 && self.latency_us.is_finite() && self.gb_per_s > 0.0 && self.gb_per_s.is_finite() {
            return Ok(self);
        }
        Err(ErrorKind::Mesh.error(
            "link",
            format!("{self:?}"),
            "a finite latency of at least 0 and a finite bandwidth above 0",
            "give microseconds and 10^9 bytes per second",
        ))
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}us,{}GB/s", self.latency_us, self.gb_per_s)
    }
}

impl FromStr for Link {
    type Err = Error;

    /// Parses a latency and a bandwidth, such as `1.5us,8GB/s`.
    fn from_str(text: &str) -> Result<Self> {
        let number = |text: &str, unit: &str| text.trim().strip_suffix(unit)?.trim().parse::<f64>().ok();
        let both =
            text.split_once(',').and_then(|(latency, rate)| Some((number(latency, "us")?, number(rate, "GB/s")?)));
        let (latency_us, gb_per_s) = both.ok_or_else(|| {
            let needed = "microseconds and 10^9 bytes per second";
            ErrorKind::Mesh.error::<Error>("link", format!("`{text}`"), needed, "write for example `30us,1.25GB/s`")
        })?;
        Link { latency_us, gb_per_s }.checked()
    }
}

/// One link per axis of a mesh, interned: comparing and hashing cost a pointer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Links(Interned<LinkList>);

#[derive(Debug)]
struct LinkList(Vec<Link>);

impl LinkList {
    fn bits(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|l| (l.latency_us.to_bits(), l.gb_per_s.to_bits()))
    }
}

impl PartialEq for LinkList {
    fn eq(&self, other: &Self) -> bool {
        self.bits().eq(other.bits())
    }
}

impl Eq for LinkList {}

impl Hash for LinkList {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bits().for_each(|bits| bits.hash(state));
    }
}

static LINKS: LazyLock<Interner<LinkList>> = LazyLock::new(Interner::new);

impl Links {
    /// One link per axis.
    pub(crate) fn new(links: &[Link]) -> Result<Self> {
        let links = links.iter().map(|link| link.checked()).collect::<Result<Vec<_>>>()?;
        Ok(Links(LINKS.intern(LinkList(links))))
    }

    /// The same link on every axis.
    pub(crate) fn uniform(axes: usize, link: Link) -> Self {
        Self::new(&vec![link; axes]).expect("a checked link")
    }

    /// The link of one axis.
    pub(crate) fn of_axis(&self, axis: usize) -> Link {
        self.0.0[axis]
    }

    /// The largest latency and the smallest bandwidth of some axes.
    pub(crate) fn slowest(&self, axes: &[usize]) -> Link {
        let all = axes.iter().map(|&a| self.0.0[a]);
        all.fold(Link { latency_us: 0.0, gb_per_s: f64::MAX }, |a, b| Link {
            latency_us: a.latency_us.max(b.latency_us),
            gb_per_s: a.gb_per_s.min(b.gb_per_s),
        })
    }
}
