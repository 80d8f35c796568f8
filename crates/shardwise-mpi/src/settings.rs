//! Settings of a launch: deadline, checks, determinism, links.

use shardwise::error::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use shardwise::comm::DUMP_DIR_VARIABLE;
use shardwise::mesh::Link;
use shardwise::{Error, Result};

/// Settings of a launch. On threads only [`deadline`](Self::deadline), [`kernel_threads`](Self::kernel_threads) and
/// [`dump_dir`](Self::dump_dir) apply; all other settings must be the same on all ranks.
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
    pub(crate) dump_dir: Option<PathBuf>,
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

/// Link between processes of one host (shared memory): measured with an all_gather of 64 bytes and of 64 MB by 2 processes
/// with Open MPI 4.1.
const INSIDE: Link = Link { latency_us: 2.2, gb_per_s: 4.5 };

/// Link between hosts: 10 Gbit/s Ethernet over TCP, a slow common case. Configure or measure faster networks.
const ACROSS: Link = Link { latency_us: 30.0, gb_per_s: 1.0 };

/// The largest count that MPI's C interface accepts.
const LARGEST_COUNT: usize = i32::MAX as usize;

fn invalid_variable(name: &'static str, found: &str, needed: &'static str) -> Error {
    ErrorKind::Launch.error("environment", format!("{name}={found}"), needed, "correct the variable or unset it")
}

fn flag(name: &'static str, value: Option<&str>) -> Result<Option<bool>> {
    match value {
        None => Ok(None),
        Some("0") => Ok(Some(false)),
        Some("1") => Ok(Some(true)),
        Some(other) => Err(invalid_variable(name, other, "0 or 1")),
    }
}

/// Reads `SHARDWISE_TAKE_TURNS`: whether there are more processes than cores, where counting does not show it, as in
/// containers that share cores.
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
            dump_dir: None,
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
    /// Reads settings from the environment, with defaults for variables that are not set: `SHARDWISE_DEADLINE` in seconds,
    /// `SHARDWISE_DUMP_DIR` as a directory, `SHARDWISE_DETERMINISTIC` and `SHARDWISE_CHECK` as 0 or 1, `SHARDWISE_LINK_INSIDE` and `SHARDWISE_LINK_ACROSS` as
    /// latency and bandwidth such as `2us,4.5GB/s`.
    ///
    /// # Errors
    /// [`ErrorKind::Launch`] if a variable is invalid.
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
            settings.deadline =
                seconds.ok_or_else(|| invalid_variable(DEADLINE, &text, "a number of seconds above 0"))?;
        }
        let link = |name: &'static str, default: Link| match variable(name) {
            Some(text) => text.parse().map_err(|_| invalid_variable(name, &text, "a link such as 30us,1.25GB/s")),
            None => Ok(default),
        };
        settings.dump_dir = variable(DUMP_DIR_VARIABLE).map(PathBuf::from);
        settings.inside = link("SHARDWISE_LINK_INSIDE", settings.inside)?;
        settings.across = link("SHARDWISE_LINK_ACROSS", settings.across)?;
        Ok(settings)
    }

    /// Sets how long one call may take, including the wait for other ranks, before the job ends (300 s by default).
    #[doc(alias = "timeout")]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets how many threads the kernels of each rank use: by default the cores that the launcher bound the process to, or
    /// its share of the machine's cores. At least 1.
    #[doc(alias = "set_num_threads")]
    pub fn kernel_threads(mut self, threads: usize) -> Self {
        self.kernel_threads = Some(threads.max(1));
        self
    }

    /// Sets the directory to which a launch that fails writes what each rank was doing
    /// ([`RankDump`](shardwise::comm::RankDump)); none by default. It may differ between ranks. Its parent must exist, or no dump
    /// is written.
    pub fn dump_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.dump_dir = Some(directory.into());
        self
    }

    /// Sets whether reductions combine operands in rank order, which gives the same bits as ranks on threads, on any number
    /// of machines (off by default: MPI chooses the order). f16, bf16, and max and min of floats are always reduced in rank
    /// order.
    #[doc(alias = "use_deterministic_algorithms")]
    pub fn deterministic(mut self, deterministic: bool) -> Self {
        self.deterministic = deterministic;
        self
    }

    /// Sets whether the ranks of a group compare their calls at the start of every collective, so that different calls are
    /// an error on every rank (on by default).
    ///
    /// The data of a small call are part of the comparison: an all_reduce of 64 bytes takes about 0.1 us longer; larger calls
    /// take one small all-reduce more. Without the comparison, the outcome of different calls is up to MPI: an error on one
    /// rank, a job that ends after the deadline, or wrong results. PyTorch's `TORCH_DISTRIBUTED_DEBUG=DETAIL` is similar.
    #[doc(alias = "TORCH_DISTRIBUTED_DEBUG")]
    pub fn check(mut self, check: bool) -> Self {
        self.check = check;
        self
    }

    /// Sets latency and bandwidth between processes of one host (`inside`) and of different hosts (`across`), by which
    /// planners estimate costs. The defaults are shared memory and 10 Gbit/s Ethernet.
    ///
    /// MPI reports which processes share a host. [`World::measure_links`](shardwise::World::measure_links) measures the links
    /// of a cluster.
    pub fn links(mut self, inside: Link, across: Link) -> Self {
        (self.inside, self.across) = (inside, across);
        self
    }

    /// Sets the segment size: reductions of more bytes run in segments of about this size. At least 64 bytes, 1 MiB by
    /// default, because Open MPI 4.1 reduces 64 MB at a quarter of the speed that it has for 1 MB.
    pub fn segment(mut self, bytes: usize) -> Self {
        self.segment = bytes.max(64);
        self
    }

    /// Sets the count limit: collectives of more elements are split into several calls, or into messages between pairs of
    /// ranks. By default the largest C `int`; lower it for an MPI library that fails earlier.
    pub fn largest_count(mut self, elements: usize) -> Self {
        self.largest_count = elements.clamp(1, LARGEST_COUNT);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_override_defaults_and_invalid_values_are_errors() {
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
