//! Errors of kernels, and the description of a value that cannot be used, which the library shares.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::DType;
use serde::{Deserialize, Serialize};

/// A result of a kernel.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a kernel cannot run.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument cannot be used.
    #[error("{0}")]
    Invalid(Box<Invalid>),

    /// Candle refused.
    #[error("{0}")]
    Candle(Arc<candle_core::Error>),
}

/// What is wrong with a value, for programs that react to it. The sentence for people is in [`Invalid`].
///
/// Where ranks report the mistake of one of them together, all have its kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A number, an option or a combination of them that makes no sense.
    Argument,
    /// A name that nothing has: of an operator, a mesh axis, an optimizer, a format, an entry of a state or checkpoint.
    UnknownName {
        /// The name.
        name: String,
    },
    /// The shape of a tensor does not fit.
    Shape {
        /// The shape, that of the first tensor at fault if there are several.
        found: Vec<usize>,
    },
    /// The element type of a tensor does not fit.
    DType {
        /// The type.
        #[serde(with = "dtype_name")]
        found: DType,
    },
    /// A dimension that the tensor does not have.
    Dimension {
        /// The dimension as the program named it; negative ones count from the end.
        dim: isize,
        /// Number of dimensions of the tensor.
        ndim: usize,
    },
    /// An index outside its dimension.
    Index {
        /// The first such index.
        index: i64,
        /// Size of the dimension.
        size: usize,
    },
    /// A tensor that needs more memory than there is.
    OutOfMemory {
        /// The bytes that it needs on a rank.
        bytes: u64,
        /// The bytes that there are.
        limit: u64,
    },
    /// Tensors that an operator cannot combine, for another reason than one shape or type: different meshes, too few of them.
    Operands,
    /// A mesh, its axes, its links or its groups.
    Mesh,
    /// A rank that the group or mesh does not have.
    Rank {
        /// The rank as the program named it.
        rank: usize,
        /// Number of ranks.
        size: usize,
    },
    /// Placements that do not fit the tensor or the mesh, or a layout other than the one that is needed.
    Layout,
    /// There is no such gradient, or the graph it needs is gone.
    Gradient,
    /// Ranks passed different values where one is needed.
    Disagreement,
    /// Values are asked for where there are none: in a dry run, or on a rank outside the mesh.
    NoData,
    /// A sharding plan or a planner.
    Plan,
    /// A module, its parameters or the configuration of a model.
    Model,
    /// An optimizer, its settings or its parameters.
    Optimizer,
    /// A dataset or its samples.
    Data,
    /// A state that does not fit what it is loaded into.
    State {
        /// Names that are needed and not there.
        missing: Vec<String>,
        /// Names that are there and not needed.
        unexpected: Vec<String>,
    },
    /// A file or directory that cannot be read, written or replaced.
    Path {
        /// Where it is.
        path: PathBuf,
    },
    /// A checkpoint that is damaged, incomplete or not what its name says.
    Damaged,
    /// Something that this library, or this build of it, does not do.
    Unsupported,
    /// The launch of a world: number of ranks, threads, environment.
    Launch,
}

impl ErrorKind {
    /// The error of this kind for a value: what it is, what was found, what was needed, what to do.
    ///
    /// ```
    /// use shardwise_kernels::{Error, ErrorKind};
    ///
    /// let error: Error = ErrorKind::shape(&[2, 3]).error("image", "shape [2, 3]", "3 dimensions", "add the channels");
    /// assert_eq!(error.to_string(), "invalid image: found shape [2, 3], needed 3 dimensions; add the channels");
    /// ```
    pub fn error<E: From<Invalid>>(
        self,
        what: &'static str,
        found: impl fmt::Display,
        needed: impl fmt::Display,
        fix: impl fmt::Display,
    ) -> E {
        let [found, needed, fix] = [found.to_string(), needed.to_string(), fix.to_string()];
        Invalid { kind: self, what, found, needed, fix }.into()
    }

    /// [`ErrorKind::UnknownName`].
    pub fn unknown(name: impl Into<String>) -> Self {
        ErrorKind::UnknownName { name: name.into() }
    }

    /// [`ErrorKind::Shape`].
    pub fn shape(found: &[usize]) -> Self {
        ErrorKind::Shape { found: found.to_vec() }
    }

    /// [`ErrorKind::DType`].
    pub fn dtype(found: DType) -> Self {
        ErrorKind::DType { found }
    }

    /// [`ErrorKind::Path`].
    pub fn path(path: impl Into<PathBuf>) -> Self {
        ErrorKind::Path { path: path.into() }
    }

    /// [`ErrorKind::State`] in which something other than the names does not fit.
    pub fn state() -> Self {
        ErrorKind::State { missing: Vec::new(), unexpected: Vec::new() }
    }
}

/// A value that cannot be used: what it is, what was found, what was needed, what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// What is wrong with it.
    pub kind: ErrorKind,
    /// Which value it is, such as `mesh` or `shard dimension`.
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

impl From<Invalid> for Error {
    fn from(invalid: Invalid) -> Self {
        Error::Invalid(Box::new(invalid))
    }
}

impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Self {
        Error::Candle(Arc::new(e))
    }
}

/// Candle's types have names but no serialised form.
mod dtype_name {
    use candle_core::DType;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(dtype: &DType, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(dtype.as_str())
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<DType, D::Error> {
        String::deserialize(from)?.parse().map_err(|_| D::Error::custom("not an element type"))
    }
}
