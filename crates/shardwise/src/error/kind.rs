//! Kinds and texts of invalid arguments.

use std::fmt;
use std::path::PathBuf;

use candle_core::DType;
use serde::{Deserialize, Serialize};

/// Kind of an invalid argument, with fields that a program can match on. The text is in [`Invalid`].
///
/// Where all ranks of a group report the error of one rank, all of them get its kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A number, an option or a combination of options is out of range or contradictory.
    Argument,
    /// No operator, mesh axis, optimizer, file format or entry of a state or checkpoint has this name.
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
        #[serde(with = "dtype_name")]
        found: DType,
    },
    /// The tensor does not have this dimension.
    Dimension {
        /// The dimension as the program passed it; negative ones count from the end.
        dim: isize,
        /// Number of dimensions of the tensor.
        ndim: usize,
    },
    /// An index is out of range.
    Index {
        /// The first such index.
        index: i64,
        /// Size of the dimension.
        size: usize,
    },
    /// A tensor needs more memory than the machine or container has.
    OutOfMemory {
        /// Bytes that it needs on one rank.
        bytes: u64,
        /// Bytes that are available.
        limit: u64,
    },
    /// An operator cannot combine its tensors for a reason other than one shape or type: they are on different meshes, or
    /// there are too few of them.
    Operands,
    /// A mesh, its axes, links or groups are invalid.
    Mesh,
    /// The group or mesh does not have this rank.
    Rank {
        /// The rank as the program passed it.
        rank: usize,
        /// Number of ranks of the group or mesh.
        size: usize,
    },
    /// Placements do not fit the tensor or the mesh, or a tensor has another layout than the one that is needed.
    Layout,
    /// There is no such gradient, or its graph has been freed.
    Gradient,
    /// Ranks passed different values for an argument that must be the same on all of them.
    Disagreement,
    /// Values were requested where there are none: in a dry run, or on a rank outside the mesh.
    NoData,
    /// A sharding plan or the settings of a planner are invalid.
    Plan,
    /// A module, its parameters or the configuration of a model are invalid.
    Model,
    /// An optimizer, its settings or its parameters are invalid.
    Optimizer,
    /// A dataset or its samples are invalid.
    Data,
    /// A state does not fit the module or optimizer that it is loaded into.
    State {
        /// Names that are needed and not in the state; PyTorch's `missing_keys`.
        missing: Vec<String>,
        /// Names in the state that are not needed; PyTorch's `unexpected_keys`.
        unexpected: Vec<String>,
    },
    /// A file or directory cannot be read, written or replaced.
    Path {
        /// The file or directory.
        path: PathBuf,
    },
    /// A checkpoint is corrupt, incomplete or not of the format that its name suggests.
    Damaged,
    /// This library, or this build of it, does not support the request.
    Unsupported,
    /// A world cannot be launched: number of ranks, threads, environment variables.
    Launch,
}

impl ErrorKind {
    /// Builds an error of this kind: which value is invalid, what was found, what was needed, how to fix it.
    ///
    /// ```
    /// use shardwise::{Error, ErrorKind};
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

    /// Builds an [`ErrorKind::Path`].
    pub fn path(path: impl Into<PathBuf>) -> Self {
        ErrorKind::Path { path: path.into() }
    }

    /// Builds an [`ErrorKind::State`] for a state whose names fit, but not its values.
    pub fn state() -> Self {
        ErrorKind::State { missing: Vec::new(), unexpected: Vec::new() }
    }
}

/// An invalid argument: which one, what was found, what was needed, how to fix it.
///
/// Its text is `invalid {what}: found {found}, needed {needed}; {fix}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// The kind, for programs that match on it.
    pub kind: ErrorKind,
    /// Which argument it is, such as `mesh` or `shard dimension`.
    pub what: &'static str,
    /// What was found, with ranks, names and shapes as the user wrote them.
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

impl From<shardwise_kernels::Invalid> for Invalid {
    fn from(invalid: shardwise_kernels::Invalid) -> Self {
        use shardwise_kernels::ErrorKind as Kind;
        let shardwise_kernels::Invalid { kind, what, found, needed, fix } = invalid;
        let kind = match kind {
            Kind::Argument => ErrorKind::Argument,
            Kind::UnknownName { name } => ErrorKind::UnknownName { name },
            Kind::Shape { found } => ErrorKind::Shape { found },
            Kind::DType { found } => ErrorKind::DType { found },
            Kind::OutOfMemory { bytes, limit } => ErrorKind::OutOfMemory { bytes, limit },
            Kind::Operands => ErrorKind::Operands,
            Kind::Unsupported => ErrorKind::Unsupported,
        };
        Invalid { kind, what, found, needed, fix }
    }
}

/// Serde form of `DType`, which candle does not provide: its name.
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
