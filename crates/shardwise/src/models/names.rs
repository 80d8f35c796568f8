//! Names of weights in checkpoint files.

use candle_core::DType;

use crate::param::Param;

/// A tensor of a checkpoint file, and the parameters that it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightName {
    /// Name of the tensor in files.
    pub name: String,
    /// Paths of the parameters, concatenated on dimension 0.
    pub paths: Vec<String>,
    /// Whether [`export_hf`](super::export_hf) transposes the matrix, as files of GPT-2 need.
    pub transposed: bool,
}

/// Maps the names of tensors in checkpoint files to paths of parameters.
///
/// ```
/// use shardwise::models::WeightNames;
///
/// let names = WeightNames::new()
///     .add("encoder.embedding.weight", "tokens.weight")
///     .join("encoder.in_proj_weight", ["attention.query.weight", "attention.key.weight", "attention.value.weight"])
///     .transposed("encoder.mlp.weight", ["mlp.up.weight"]);
/// assert_eq!(names.0[1].paths.len(), 3);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WeightNames(pub Vec<WeightName>);

impl WeightNames {
    /// An empty map.
    pub fn new() -> Self {
        WeightNames::default()
    }

    /// Names every parameter by its path.
    pub fn of_paths(params: &[(String, Param)]) -> Self {
        params.iter().fold(WeightNames::new(), |names, (path, _)| names.add(path, path))
    }

    /// Adds one parameter under a name.
    pub fn add(self, name: &str, path: &str) -> Self {
        self.join(name, [path])
    }

    /// Adds several parameters under one name, concatenated on dimension 0.
    pub fn join<S: Into<String>>(self, name: &str, paths: impl IntoIterator<Item = S>) -> Self {
        self.weight(name, paths, false)
    }

    /// As [`join`](Self::join), for matrices that [`export_hf`](super::export_hf) transposes.
    pub fn transposed<S: Into<String>>(self, name: &str, paths: impl IntoIterator<Item = S>) -> Self {
        self.weight(name, paths, true)
    }

    fn weight<S: Into<String>>(mut self, name: &str, paths: impl IntoIterator<Item = S>, transposed: bool) -> Self {
        let paths = paths.into_iter().map(Into::into).collect();
        self.0.push(WeightName { name: name.to_string(), paths, transposed });
        self
    }
}

/// PyTorch's name of a floating-point type.
pub(super) fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        DType::F64 => "float64",
        _ => "float32",
    }
}
