//! How a world behaves: deadlines, checks, determinism.

use shardwise::error::ErrorKind;
use std::time::Duration;

use shardwise::mesh::Link;
use shardwise::{Error, Result};

/// Settings of a launch.
///
/// ```
/// # use std::time::Duration;
/// use shardwise_mpi::Settings;
///
/// let rank = Settings::from_env()?.deadline(Duration::from_secs(20)).launch(2, |world| Ok(world.rank()))?;
/// assert_eq!(rank, 0);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Settings {
    pub(crate) deadline: Duration,
    pub(crate) kernel_threads: Option<usize>,
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "threads are always deterministic"))]
    pub(crate) deterministic: bool,
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "threads always check"))]
    pub(crate) check: bool,
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "threads share memory"))]
    pub(crate) segment: usize,
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "threads share memory"))]
    pub(crate) largest_count: usize,
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "threads have links of their own"))]
    pub(crate) inside: Link,
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "threads are on one host"))]
    pub(crate) across: Link,
}

/// Processes of one host, through shared memory: 64 bytes and 64 MB gathered by 2 processes with Open MPI 4.1, see the
/// benchmarks in README.md.
const INSIDE: Link = Link { latency_us: 2.2, gb_per_s: 4.5 };

/// Hosts on Ethernet of 10 Gbit/s over TCP. Other networks are faster: configure or measure them.
const ACROSS: Link = Link { latency_us: 30.0, gb_per_s: 1.0 };

/// The largest number of elements that MPI's C interface can name.
const LARGEST_COUNT: usize = i32::MAX as usize;

fn wrong(name: &'static str, found: &str, needed: &'static str) -> Error {
    ErrorKind::Launch.error("environment", format!("{name}={found}"), needed, "correct the variable or unset it")
}

fn flag(name: &'static str, value: Option<&str>) -> Result<Option<bool>> {
    match value {
        None => Ok(None),
        Some("0") => Ok(Some(false)),
        Some("1") => Ok(Some(true)),
        Some(other) => Err(wrong(name, other, "0 or 1")),
    }
}

/// What `SHARDWISE_TAKE_TURNS` says: whether processes have to take turns on the cores, if that cannot be seen by counting
/// them, as in containers that share cores.
#[cfg(feature = "mpi")]
pub(crate) fn take_turns() -> Result<Option<bool>> {
    const NAME: &str = "SHARDWISE_TAKE_TURNS";
    flag(NAME, std::env::var(NAME).ok().as_deref())
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            deadline: Duration::from_secs(300),
            kernel_threads: None,
            deterministic: false,
            check: true,
            segment: 1 << 20,
            largest_count: LARGEST_COUNT,
            inside: INSIDE,
            across: ACROSS,
        }
    }
}

impl Settings {
    /// The defaults, with what the environment says: `SHARDWISE_DEADLINE` in seconds, `SHARDWISE_DETERMINISTIC` and
    /// `SHARDWISE_CHECK` as 0 or 1, `SHARDWISE_LINK_INSIDE` and `SHARDWISE_LINK_ACROSS` as links such as `2us,4.5GB/s`.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut settings = Settings::default();
        let flag = |name: &'static str| flag(name, variable(name).as_deref());
        settings.deterministic = flag("SHARDWISE_DETERMINISTIC")?.unwrap_or(settings.deterministic);
        settings.check = flag("SHARDWISE_CHECK")?.unwrap_or(settings.check);
        const DEADLINE: &str = "SHARDWISE_DEADLINE";
        if let Some(text) = variable(DEADLINE) {
            let seconds = text.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
            let seconds = seconds.filter(|s| !s.is_zero());
            settings.deadline = seconds.ok_or_else(|| wrong(DEADLINE, &text, "a number of seconds above 0"))?;
        }
        let link = |name: &'static str, default: Link| match variable(name) {
            Some(text) => text.parse().map_err(|_| wrong(name, &text, "a link such as 30us,1.25GB/s")),
            None => Ok(default),
        };
        settings.inside = link("SHARDWISE_LINK_INSIDE", settings.inside)?;
        settings.across = link("SHARDWISE_LINK_ACROSS", settings.across)?;
        Ok(settings)
    }

    /// How long one call may take, waiting for silent ranks included, before the job ends (300 s by default).
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How many threads the kernels of each rank may use: by default the cores that the launcher bound the process to, or
    /// its share of the machine's.
    pub fn kernel_threads(mut self, threads: usize) -> Self {
        self.kernel_threads = Some(threads.max(1));
        self
    }

    /// Whether reductions take the operands in rank order, which gives the same bits as a world of threads, on any number
    /// of machines (off by default: MPI may then choose its own order). Half-precision types and the maximum and minimum
    /// of real numbers are always reduced in rank order.
    pub fn deterministic(mut self, deterministic: bool) -> Self {
        self.deterministic = deterministic;
        self
    }

    /// Whether all ranks of a group compare what they are about to do at the start of every collective, so that calls that
    /// do not fit together are an error on every rank (on by default). Small calls travel along with the comparison: 64 bytes
    /// take about a tenth of a microsecond more; larger ones take one small all-reduce more. Without it, such calls are
    /// what MPI makes of them: an error on some rank, a job that ends after the deadline, or wrong numbers.
    pub fn check(mut self, check: bool) -> Self {
        self.check = check;
        self
    }

    /// How fast processes of one host and processes of different hosts reach each other, for planners. By default figures of
    /// shared memory, and of Ethernet of 10 Gbit/s. Which processes share a host is asked of MPI.
    /// [`World::measure_links`](shardwise::World::measure_links) finds the figures of a cluster.
    pub fn links(mut self, inside: Link, across: Link) -> Self {
        (self.inside, self.across) = (inside, across);
        self
    }

    /// Reductions of more bytes than this are carried out in segments of about that size (1 MiB by default).
    pub fn segment(mut self, bytes: usize) -> Self {
        self.segment = bytes.max(64);
        self
    }

    /// Collectives of more elements than this are carried out in several calls or as messages between pairs of ranks (by
    /// default what the C interface of MPI can count). Lower it for a library that fails before.
    pub fn largest_count(mut self, elements: usize) -> Self {
        self.largest_count = elements.clamp(1, LARGEST_COUNT);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_set_what_they_name_and_nonsense_is_refused() {
        let with = |name: &'static str, value: &'static str| {
            Settings::from_variables(move |n| (n == name).then(|| value.to_string()))
        };
        assert_eq!(with("SHARDWISE_DEADLINE", "2.5").unwrap().deadline, Duration::from_millis(2500));
        assert!(with("SHARDWISE_DETERMINISTIC", "1").unwrap().deterministic);
        assert!(!with("SHARDWISE_CHECK", "0").unwrap().check);
        let across = with("SHARDWISE_LINK_ACROSS", "2us, 12.5GB/s").unwrap();
        assert_eq!((across.inside, across.across), (INSIDE, Link { latency_us: 2.0, gb_per_s: 12.5 }));
        assert_eq!(with("SHARDWISE_LINK_INSIDE", "1us,6GB/s").unwrap().inside, Link { latency_us: 1.0, gb_per_s: 6.0 });
        for (name, value) in [
            ("SHARDWISE_DEADLINE", "soon"),
            ("SHARDWISE_DEADLINE", "0"),
            ("SHARDWISE_DEADLINE", "-1"),
            ("SHARDWISE_DEADLINE", "1e400"),
            ("SHARDWISE_DETERMINISTIC", "yes"),
            ("SHARDWISE_CHECK", ""),
            ("SHARDWISE_LINK_INSIDE", "2us"),
            ("SHARDWISE_LINK_INSIDE", "fast"),
            ("SHARDWISE_LINK_ACROSS", "2us,0GB/s"),
            ("SHARDWISE_LINK_ACROSS", "-1us,1GB/s"),
        ] {
            let message = with(name, value).unwrap_err().to_string();
            assert!(message.contains(&format!("{name}={value}")), "{message}");
        }
    }
}
