//! Why a kernel cannot run.

use std::fmt;
use std::sync::Arc;

/// A result of a kernel.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a kernel cannot run.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// An argument cannot be used.
    #[error("{0}")]
    Invalid(Box<Invalid>),

    /// Candle refused.
    #[error("{0}")]
    Candle(Arc<candle_core::Error>),
}

/// A value that cannot be used: what it is, what was found, what was needed, what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// What kind of value is wrong, such as `mesh` or `shard dimension`.
    pub what: &'static str,
    /// What was found.
    pub found: String,
    /// What was needed.
    pub needed: String,
    /// What to do about it.
    pub fix: String,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid {}: found {}, needed {}; {}", self.what, self.found, self.needed, self.fix)
    }
}

impl Error {
    /// The error for an argument that cannot be used.
    pub fn invalid(
        what: &'static str,
        found: impl fmt::Display,
        needed: impl fmt::Display,
        fix: impl fmt::Display,
    ) -> Self {
        let [found, needed, fix] = [found.to_string(), needed.to_string(), fix.to_string()];
        Error::Invalid(Box::new(Invalid { what, found, needed, fix }))
    }
}

impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Self {
        Error::Candle(Arc::new(e))
    }
}
