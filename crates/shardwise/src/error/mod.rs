//! The error type of the crate. Every message says what was found, what was needed and what to do about it.

mod kind;

pub use kind::{ErrorKind, Invalid};

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A result whose error is [`Error`] unless another type is named.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A call site: a line of the user's program, captured with `#[track_caller]`.
pub type Site = &'static Location<'static>;

/// The error of every fallible function in this crate.
///
/// Errors of collectives are the same on every rank of the group, so an error is cheap to clone. [`kind`](Error::kind)
/// gives the typed reason of an invalid value, whichever rank found it. `Debug` prints the same text as `Display`, so that
/// `fn main() -> Result<()>`, `unwrap` and `expect` show the message rather than the fields.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value that the caller passed, or that was loaded, is invalid.
    #[error("{0}")]
    Invalid(Box<Invalid>),

    /// One rank called a collective with invalid arguments. Every rank of the group gets this error.
    #[error("{call} was rejected: {source}")]
    Rejected {
        /// The rejected call, with its rank and source line.
        call: Box<RankCall>,
        /// What is wrong with the arguments.
        source: Box<Error>,
    },

    /// Two ranks of a group made different calls, or the same call on values that do not match. Every rank of the group
    /// gets this error.
    #[error("ranks disagree: {first}, but {second}; {advice}")]
    Mismatch {
        /// The call of one of the two ranks.
        first: Box<RankCall>,
        /// The call of the other rank.
        second: Box<RankCall>,
        /// How to fix the program.
        advice: &'static str,
    },

    /// Ranks wait for each other in a cycle, because they make calls in different orders.
    #[error("{}; each waits for the next and the last for the first, so make these calls in one order on all ranks",
        .cycle.iter().map(ToString::to_string).collect::<Vec<_>>().join(", while "))]
    Deadlock {
        /// The calls of the ranks in the cycle: each waits for the next, the last for the first.
        cycle: Vec<RankCall>,
    },

    /// An operator would have redistributed a tensor inside [`ExplicitRedistribution::error`], where only explicit
    /// communication is allowed.
    ///
    /// [`ExplicitRedistribution::error`]: crate::ExplicitRedistribution::error
    #[error(
        "operator {operator} redistributes{moves}, which was not asked for ({call}); redistribute its inputs first, \
             or leave the scope that allows explicit communication only"
    )]
    Implicit {
        /// Name of the operator.
        operator: &'static str,
        /// The layouts before and after, as part of the message; empty if the operator fetches parts of tensors instead.
        moves: String,
        /// The first collective that the redistribution would have made.
        call: Box<RankCall>,
    },

    /// Another rank failed, so this rank's collective can never complete.
    #[error("{call} was abandoned because rank {rank} {reason}; fix rank {rank}, this rank only waited for it")]
    PeerFailed {
        /// The rank that failed.
        rank: usize,
        /// How it failed, as part of the message.
        reason: Arc<str>,
        /// The call of this rank that was abandoned.
        call: Box<RankCall>,
    },

    /// Another rank returned from its program while this rank waits for it.
    #[error(
        "{call} waits for rank {rank}, which has already returned from the program; \
         every rank of a group must make the same calls in the same order"
    )]
    PeerLeft {
        /// The rank that has returned.
        rank: usize,
        /// The call of this rank that waits.
        call: Box<RankCall>,
    },

    /// A rank did not join a call before the deadline of the launch.
    #[error(
        "{call} waited {waited:?} for rank(s) {missing:?}, which did not join{}; \
         check what they were doing, or raise the deadline of the launch",
        in_other_calls(other_calls)
    )]
    Timeout {
        /// The call of the rank that waited.
        call: Box<RankCall>,
        /// How long it waited.
        waited: Duration,
        /// The ranks that did not join.
        missing: Vec<usize>,
        /// Other calls in which missing ranks are blocked, as far as known; none with MPI.
        other_calls: Vec<RankCall>,
    },

    /// A message was sent with [`send`](crate::Group::send) and never received.
    #[error(
        "rank {from} sent {what} to rank {to} at {site}, and rank {to} never received it; add the recv or drop the send"
    )]
    Unreceived {
        /// The rank that sent it.
        from: usize,
        /// The rank that did not receive it.
        to: usize,
        /// Type and shape of the tensor.
        what: String,
        /// The source line of the send.
        site: String,
    },

    /// A rank did not return from its program before the deadline after another rank had failed; its thread was abandoned.
    #[error(
        "rank {rank} did not return within {waited:?} after another rank had failed, so its thread was abandoned; \
         look for a loop that makes no collective call"
    )]
    Stuck {
        /// The rank whose thread still runs.
        rank: usize,
        /// How long the launch waited for it.
        waited: Duration,
    },

    /// The program of one rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank that panicked.
        rank: usize,
        /// The panic message.
        message: String,
    },

    /// The program of one rank returned an error.
    #[error("rank {rank} failed: {source}")]
    Rank {
        /// The rank that failed.
        rank: usize,
        /// The error that its program returned.
        source: Box<Error>,
    },

    /// One rank failed in local work that ends with a check on all ranks, such as [`Group::all_ok`](crate::Group::all_ok)
    /// or a load of a checkpoint. Every rank gets this error.
    #[error("on rank {rank}: {message}")]
    OnRank {
        /// The rank that failed.
        rank: usize,
        /// The kind of its error, if the error was an invalid value.
        kind: Option<Box<ErrorKind>>,
        /// The text of its error.
        message: Arc<str>,
    },

    /// An error inside the `forward` of a module.
    #[error("`{path}` (called at {site}): {source}")]
    InModule {
        /// Dotted path of the innermost module.
        path: Arc<str>,
        /// The source line that called the outermost module.
        site: Site,
        /// The error.
        source: Box<Error>,
    },

    /// An error of candle, which holds the local tensors.
    #[error("local tensor operation failed: {0}")]
    Candle(Arc<candle_core::Error>),

    /// An I/O error.
    #[error("I/O error: {0}")]
    Io(Arc<std::io::Error>),

    /// Any error of the user's program, see [`Error::other`].
    #[error("{0}")]
    Other(Arc<dyn std::error::Error + Send + Sync>),
}

/// The calls in which missing ranks are blocked, as the end of a message.
fn in_other_calls(calls: &[RankCall]) -> String {
    calls.iter().map(|call| format!(" ({call})")).collect()
}

/// A collective, send or receive as one rank called it: the rank, the call and its source line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankCall {
    /// Global rank of the caller.
    pub rank: usize,
    /// The call with its arguments, such as `all_reduce(sum) of f32 [4, 8]`.
    pub call: String,
    /// Global ranks of the group that the call belongs to.
    pub group: Vec<usize>,
    /// The source line of the call, as `file:line:column`; a text because it may come from another process.
    pub site: String,
}

impl fmt::Display for RankCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} called {} in group {:?} at {}", self.rank, self.call, self.group, self.site)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Wraps an error of the user's program, so that a rank's program can return it.
    ///
    /// ```
    /// # use shardwise::Error;
    /// let parsed: Result<i32, Error> = "x".parse().map_err(|e: std::num::ParseIntError| Error::other(e));
    /// assert!(parsed.unwrap_err().to_string().contains("invalid digit"));
    /// ```
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Other(Arc::from(error.into()))
    }

    /// Wraps the error in [`Error::Rank`], unless it already names the ranks at fault.
    pub fn of_rank(self, rank: usize) -> Self {
        match self {
            Error::Invalid(_) | Error::InModule { .. } | Error::Candle(_) | Error::Io(_) | Error::Other(_) => {
                Error::Rank { rank, source: Box::new(self) }
            }
            named => named,
        }
    }

    /// Wraps the error in [`Error::InModule`], unless it already names a module or the calls of ranks.
    #[cold]
    pub(crate) fn in_module(self, path: Arc<str>, site: Site) -> Self {
        match self {
            Error::Invalid(_) | Error::Implicit { .. } | Error::Candle(_) | Error::Io(_) | Error::Other(_) => {
                Error::InModule { path, site, source: Box::new(self) }
            }
            named => named,
        }
    }

    /// The kind of an invalid value, whichever rank or module found it; `None` for other errors, such as a rank that failed.
    ///
    /// ```
    /// use shardwise::prelude::*;
    /// use shardwise::error::ErrorKind;
    ///
    /// let refused = launch(2, |world| world.mesh([("dp", 2)])?.axis("tp").map(drop)).unwrap_err();
    /// assert_eq!(refused.kind(), Some(&ErrorKind::UnknownName { name: "tp".into() }));
    /// ```
    pub fn kind(&self) -> Option<&ErrorKind> {
        match self {
            Error::Invalid(invalid) => Some(&invalid.kind),
            Error::OnRank { kind, .. } => kind.as_deref(),
            Error::Rank { source, .. } | Error::InModule { source, .. } | Error::Rejected { source, .. } => {
                source.kind()
            }
            _ => None,
        }
    }

    /// What was found, for an error that quotes this one: the text of an invalid value without what was needed and what to do,
    /// which the quoting error says in its own words. The whole text of any other error.
    ///
    /// ```
    /// let error = shardwise::Mesh::new([0]).unwrap_err();
    /// assert!(error.to_string().contains(&format!("found {}, needed", error.found())));
    /// ```
    pub fn found(&self) -> String {
        match self {
            Error::Invalid(invalid) => invalid.found.clone(),
            other => other.to_string(),
        }
    }

    /// Serializes kind and text for other ranks; the inverse is [`from_report`](Self::from_report).
    pub(crate) fn to_report(&self) -> String {
        let report = ErrorReport { kind: self.kind().cloned(), message: self.to_string() };
        serde_json::to_string(&report).expect("kinds and texts have a JSON form")
    }

    /// The [`Error::OnRank`] of a serialized error.
    pub(crate) fn from_report(rank: usize, report: &str) -> Self {
        // A report that cannot be parsed becomes the message: it is the only text there is.
        let unread = |_| ErrorReport { kind: None, message: report.to_string() };
        let ErrorReport { kind, message } = serde_json::from_str(report).unwrap_or_else(unread);
        Error::OnRank { rank, kind: kind.map(Box::new), message: message.into() }
    }

    /// Whether this error only follows from the failure of another rank.
    pub(crate) fn is_consequence(&self) -> bool {
        matches!(self, Error::PeerFailed { .. } | Error::PeerLeft { .. } | Error::Stuck { .. })
    }
}

/// The serialized form of an error that is sent to other ranks.
#[derive(Serialize, Deserialize)]
struct ErrorReport {
    kind: Option<ErrorKind>,
    message: String,
}

impl From<Invalid> for Error {
    fn from(invalid: Invalid) -> Self {
        Error::Invalid(Box::new(invalid))
    }
}

impl From<shardwise_kernels::Error> for Error {
    fn from(e: shardwise_kernels::Error) -> Self {
        match e {
            shardwise_kernels::Error::Invalid(invalid) => Invalid::from(*invalid).into(),
            shardwise_kernels::Error::Candle(e) => Error::Candle(e),
            other => Error::other(other),
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Self {
        Error::Candle(Arc::new(e))
    }
}

impl From<std::io::Error> for Error {
    fn from(e: std::io::Error) -> Self {
        Error::Io(Arc::new(e))
    }
}

/// Most items that a message lists: more would hide what it says.
const LISTED: usize = 10;

/// The first items, separated by commas, and how many more there are.
pub(crate) fn listed(items: impl IntoIterator<Item = impl fmt::Display>) -> String {
    let mut items = items.into_iter();
    let shown: Vec<String> = items.by_ref().take(LISTED).map(|item| item.to_string()).collect();
    match items.count() {
        0 => shown.join(", "),
        more => format!("{}, and {more} more", shown.join(", ")),
    }
}

/// The up to three known names nearest to an unknown one by edit distance, for the advice of an error.
pub fn nearest(name: &str, among: impl IntoIterator<Item = impl Into<String>>) -> String {
    let mut all: Vec<(usize, String)> =
        among.into_iter().map(Into::into).map(|n| (strsim::levenshtein(name, &n), n)).collect();
    all.sort();
    all.dedup();
    all.truncate(3);
    all.iter().map(|(_, name)| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_small_enough_to_return_by_value() {
        assert!(std::mem::size_of::<Error>() <= 80, "{}", std::mem::size_of::<Error>());
    }

    #[test]
    fn debug_reads_like_display() {
        let inner: Error = ErrorKind::Mesh.error("mesh", "6 ranks", "at most 4", "use a smaller mesh");
        let error = inner.of_rank(1);
        let text = "rank 1 failed: invalid mesh: found 6 ranks, needed at most 4; use a smaller mesh";
        assert_eq!(format!("{error:?}"), text);
        assert_eq!(format!("{error:#?}"), text);
    }

    #[test]
    fn ten_items_are_listed_and_the_rest_counted() {
        assert_eq!(listed([0; 0]), "");
        assert_eq!(listed(0..10), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9");
        assert_eq!(listed(0..400), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, and 390 more");
    }

    #[test]
    fn the_nearest_names_come_first() {
        assert_eq!(nearest("matmull", ["matmul", "mul", "softmax", "mm", "matmul"]), "`matmul`, `mul`, `mm`");
    }

    #[test]
    fn a_peer_failure_names_both_ranks_and_the_call_site() {
        let e = Error::PeerFailed {
            rank: 3,
            reason: "panicked: boom".into(),
            call: Box::new(RankCall {
                rank: 1,
                call: "barrier".into(),
                group: vec![1, 3],
                site: Location::caller().to_string(),
            }),
        };
        let text = e.to_string();
        for part in ["rank 1", "rank 3", "barrier", "error/mod.rs", "boom"] {
            assert!(text.contains(part), "{part} missing in {text}");
        }
    }
}
