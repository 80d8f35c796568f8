//! The one error type. Every message says what was found, what was needed and what to do about it.

use serde::{Deserialize, Serialize};
pub use shardwise_kernels::{ErrorKind, Invalid};
use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

/// Result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A place in the user's program, captured with `#[track_caller]`.
pub type Site = &'static Location<'static>;

/// What went wrong. Cheap to clone, because one failure is often reported on every rank.
///
/// `Debug` reads like `Display`: `fn main() -> Result<()>`, `unwrap` and `expect` print the sentence that was written for
/// the reader, and not the tree of types that carries it.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value handed in by the caller cannot be used.
    #[error("{0}")]
    Invalid(Box<Invalid>),

    /// One rank called a collective with arguments that cannot be used; every rank of the group gets this error.
    #[error("{call} was rejected: {source}")]
    Rejected {
        /// Who called, what, and where.
        call: Box<RankCall>,
        /// Why the call cannot be carried out.
        source: Box<Error>,
    },

    /// Two ranks do not agree on what happens next.
    #[error("ranks disagree: {first}, but {second}; {advice}")]
    Mismatch {
        /// One of the two ranks.
        first: Box<RankCall>,
        /// The other one.
        second: Box<RankCall>,
        /// What to change.
        advice: &'static str,
    },

    /// Ranks wait for each other in a circle.
    #[error("{}; each waits for the next and the last for the first, so make these calls in one order on all ranks",
        .circle.iter().map(ToString::to_string).collect::<Vec<_>>().join(", while "))]
    Deadlock {
        /// The calls of the ranks in the circle; each waits for the next, the last for the first.
        circle: Vec<RankCall>,
    },

    /// Communication that the program did not ask for, where it allows none.
    #[error(
        "operator {operator} redistributes{moves}, which was not asked for ({call}); redistribute its inputs first, \
             or leave the scope that allows explicit communication only"
    )]
    Implicit {
        /// The operator.
        operator: &'static str,
        /// The layouts between which a tensor moves, as part of the sentence; empty where parts of tensors are fetched.
        moves: String,
        /// What it would have communicated.
        call: Box<RankCall>,
    },

    /// Another rank failed, so this rank's collective can never complete.
    #[error("{call} was abandoned because rank {rank} {reason}; fix rank {rank}, this rank only waited for it")]
    PeerFailed {
        /// The rank that failed.
        rank: usize,
        /// How it failed.
        reason: Arc<str>,
        /// What this rank was doing.
        call: Box<RankCall>,
    },

    /// Another rank finished its program while this rank still needs it.
    #[error(
        "{call} waits for rank {rank}, which has already returned from the program; \
         every rank of a group must make the same calls in the same order"
    )]
    PeerLeft {
        /// The rank that is gone.
        rank: usize,
        /// What this rank was doing.
        call: Box<RankCall>,
    },

    /// A rank stayed silent past the deadline.
    #[error(
        "{call} waited {waited:?} for rank(s) {missing:?}, which did not come{}; \
         look at what they were doing, or raise the deadline of the launch",
        in_other_calls(elsewhere)
    )]
    Timeout {
        /// What the waiting rank was doing.
        call: Box<RankCall>,
        /// How long it waited.
        waited: Duration,
        /// The ranks that did not come.
        missing: Vec<usize>,
        /// The calls that some of them are in instead.
        elsewhere: Vec<RankCall>,
    },

    /// A message was sent that nobody received before the program ended.
    #[error(
        "rank {from} sent {what} to rank {to} at {site}, and rank {to} never received it; add the recv or drop the send"
    )]
    Unreceived {
        /// The sender.
        from: usize,
        /// The rank that should have received.
        to: usize,
        /// Description of the message.
        what: String,
        /// Where it was sent.
        site: String,
    },

    /// A rank did not return from its program after another one had failed, and was left behind.
    #[error(
        "rank {rank} did not return within {waited:?} after another rank had failed, and was left behind; \
         look for a loop that makes no collective call"
    )]
    Stuck {
        /// The rank.
        rank: usize,
        /// How long the launch waited for it.
        waited: Duration,
    },

    /// The program of one rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// The panic message.
        message: String,
    },

    /// The program of one rank returned an error.
    #[error("rank {rank} failed: {source}")]
    Rank {
        /// The rank.
        rank: usize,
        /// Its error.
        source: Box<Error>,
    },

    /// A rank could not do its part of something that ranks do together; every rank gets this error.
    #[error("on rank {rank}: {message}")]
    OnRank {
        /// The rank.
        rank: usize,
        /// What is wrong with a value that it was given, if that is its error.
        kind: Option<Box<ErrorKind>>,
        /// The text of its error.
        message: Arc<str>,
    },

    /// Something went wrong inside a module of the model.
    #[error("`{path}` (called at {site}): {source}")]
    InModule {
        /// Dotted path of the innermost module.
        path: Arc<str>,
        /// The line of the user's program that called the module, or the model that it is in.
        site: Site,
        /// What went wrong there.
        source: Box<Error>,
    },

    /// The local tensor library reported an error.
    #[error("local tensor operation failed: {0}")]
    Candle(Arc<candle_core::Error>),

    /// Reading or writing failed.
    #[error("input or output failed: {0}")]
    Io(Arc<std::io::Error>),

    /// An error of the user's own program, passed through unchanged.
    #[error("{0}")]
    Other(Arc<dyn std::error::Error + Send + Sync>),
}

/// What ranks are doing instead of coming, as part of a sentence.
fn in_other_calls(calls: &[RankCall]) -> String {
    calls.iter().map(|call| format!(" ({call})")).collect()
}

/// A collective (or send, or receive) as one rank called it: the rank, the operation, the place in the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankCall {
    /// Global rank of the caller.
    pub rank: usize,
    /// The call with its arguments, such as `all_reduce(sum) of f32 [4, 8]`.
    pub call: String,
    /// Global ranks of the group that the call belongs to.
    pub group: Vec<usize>,
    /// Where the program made the call, as `file:line:column`; text, since it may come from another process.
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
    /// Carries an error of the user's own program through a rank's `Result`.
    ///
    /// ```
    /// # use shardwise::Error;
    /// let parsed: Result<i32, Error> = "x".parse().map_err(|e: std::num::ParseIntError| Error::other(e));
    /// assert!(parsed.unwrap_err().to_string().contains("invalid digit"));
    /// ```
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Other(Arc::from(error.into()))
    }

    /// The error as one of this rank, unless the message already names the ranks at fault.
    pub fn of_rank(self, rank: usize) -> Self {
        match self {
            Error::Invalid(_) | Error::InModule { .. } | Error::Candle(_) | Error::Io(_) | Error::Other(_) => {
                Error::Rank { rank, source: Box::new(self) }
            }
            named => named,
        }
    }

    /// The error as one inside the module at `path`, called at `site`, unless it already names a module or the calls of
    /// ranks.
    #[cold]
    pub(crate) fn in_module(self, path: Arc<str>, site: Site) -> Self {
        match self {
            Error::Invalid(_) | Error::Implicit { .. } | Error::Candle(_) | Error::Io(_) | Error::Other(_) => {
                Error::InModule { path, site, source: Box::new(self) }
            }
            named => named,
        }
    }

    /// What is wrong with a value that the program passed or loaded, whichever rank and module found it; `None` for errors of
    /// another sort, such as a rank that failed.
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

    /// The error in a form that other ranks can read; see [`from_report`](Self::from_report).
    pub(crate) fn to_report(&self) -> String {
        let report = Report { kind: self.kind().cloned(), message: self.to_string() };
        serde_json::to_string(&report).expect("kinds and texts have a JSON form")
    }

    /// The error that another rank reported.
    pub(crate) fn from_report(rank: usize, report: &str) -> Self {
        // A report that cannot be read is still the best text there is.
        let unread = |_| Report { kind: None, message: report.to_string() };
        let Report { kind, message } = serde_json::from_str(report).unwrap_or_else(unread);
        Error::OnRank { rank, kind: kind.map(Box::new), message: message.into() }
    }

    /// Whether this error merely reports that some other rank failed.
    pub(crate) fn is_consequence(&self) -> bool {
        matches!(self, Error::PeerFailed { .. } | Error::PeerLeft { .. } | Error::Stuck { .. })
    }
}

/// An error on its way to another rank.
#[derive(Serialize, Deserialize)]
struct Report {
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
            shardwise_kernels::Error::Invalid(invalid) => Error::Invalid(invalid),
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

/// The names nearest to one that is not among them, for the advice of an error.
pub(crate) fn nearest(name: &str, among: impl IntoIterator<Item = impl Into<String>>) -> String {
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
        for part in ["rank 1", "rank 3", "barrier", "error.rs", "boom"] {
            assert!(text.contains(part), "{part} missing in {text}");
        }
    }
}
