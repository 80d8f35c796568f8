//! Errors of kernels: what is wrong with a tensor or a number. The library adds kinds for meshes, ranks, plans and files.

use std::fmt;
use std::sync::Arc;

use candle_core::DType;

/// Result of a kernel.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a kernel.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is invalid.
    #[error("{0}")]
    Invalid(Box<Invalid>),

    /// An error of candle.
    #[error("{0}")]
    Candle(Arc<candle_core::Error>),
}

/// Kind of an invalid argument of a kernel, with fields that a program can match on. The text is in [`Invalid`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ErrorKind {
    /// A number, an option or a combination of options is out of range or contradictory.
    Argument,
    /// No type of blocks has this name.
    UnknownName {
        /// The name as the program or file spelled it.
        name: String,
    },
    /// A tensor has the wrong shape.
    Shape {
        /// The shape that was found; that of the first wrong tensor if there are several.
        found: Vec<usize>,
    },
    /// A tensor has the wrong element type, or one that the kernels do not support.
    DType {
        /// The type that was found.
        found: DType,
    },
    /// A tensor needs more memory than the machine or container has.
    OutOfMemory {
        /// Bytes that it needs.
        bytes: u64,
        /// Bytes that are available.
        limit: u64,
    },
    /// A kernel cannot combine its tensors for a reason other than one shape or type.
    Operands,
    /// The kernels, or this build of them, do not support the request.
    Unsupported,
}

impl ErrorKind {
    /// Builds an error of this kind: which value is invalid, what was found, what was needed, how to fix it.
    ///
    /// ```
    /// use shardwise_kernels::ErrorKind;
    ///
    /// let error = ErrorKind::shape(&[2, 3]).error("image", "shape [2, 3]", "3 dimensions", "add the channels");
    /// assert_eq!(error.to_string(), "invalid image: found shape [2, 3], needed 3 dimensions; add the channels");
    /// ```
    pub fn error(
        self,
        what: &'static str,
        found: impl fmt::Display,
        needed: impl fmt::Display,
        fix: impl fmt::Display,
    ) -> Error {
        let [found, needed, fix] = [found.to_string(), needed.to_string(), fix.to_string()];
        Error::Invalid(Box::new(Invalid { kind: self, what, found, needed, fix }))
    }

    /// Builds an [`ErrorKind::UnknownName`].
    pub fn unknown(name: impl Into<String>) -> Self {
        ErrorKind::UnknownName { name: name.into() }
    }

    /// Builds an [`ErrorKind::Shape`].
    pub fn shape(found: &[usize]) -> Self {
        ErrorKind::Shape { found: found.to_vec() }
    }

    /// Builds an [`ErrorKind::DType`].
    pub fn dtype(found: DType) -> Self {
        ErrorKind::DType { found }
    }
}

/// An invalid argument: which one, what was found, what was needed, how to fix it.
///
/// Its text is `invalid {what}: found {found}, needed {needed}; {fix}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// The kind, for programs that match on it.
    pub kind: ErrorKind,
    /// Which argument it is, such as `operands` or `quantized blocks`.
    pub what: &'static str,
    /// What was found.
    pub found: String,
    /// What would have been valid.
    pub needed: String,
    /// What to do about it, in the imperative.
    pub fix: String,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid {}: found {}, needed {}; {}", self.what, self.found, self.needed, self.fix)
    }
}

impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Self {
        Error::Candle(Arc::new(e))
    }
}
