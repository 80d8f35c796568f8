//! Names of weights in files.

use candle_core::DType;

use crate::param::Param;

/// A tensor of a file, and the parameters that it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightName {
    /// Name in files.
    pub name: String,
    /// Paths of parameters in the model, joined along the first dimension.
    pub paths: Vec<String>,
    /// Whether [`export_hf`](super::export_hf) writes the transposed matrix, as files of GPT-2 have it.
    pub transposed: bool,
}

/// Names of the weights of a model in files.
///
/// ```
/// use shardwise::models::Names;
///
/// let names = Names::new()
///     .add("encoder.embedding.weight", "tokens.weight")
///     .join("encoder.in_proj_weight", ["attention.query.weight", "attention.key.weight", "attention.value.weight"])
///     .transposed("encoder.mlp.weight", ["mlp.up.weight"]);
/// assert_eq!(names.0[1].paths.len(), 3);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names(pub Vec<WeightName>);

impl Names {
    /// No names yet.
    pub fn new() -> Self {
        Names::default()
    }

    /// Every parameter under its own path.
    pub fn of_paths(params: &[(String, Param)]) -> Self {
        params.iter().fold(Names::new(), |names, (path, _)| names.add(path, path))
    }

    /// One parameter under a name.
    pub fn add(self, name: &str, path: &str) -> Self {
        self.join(name, [path])
    }

    /// Several parameters under one name, joined along the first dimension.
    pub fn join<S: Into<String>>(self, name: &str, paths: impl IntoIterator<Item = S>) -> Self {
        self.weight(name, paths, false)
    }

    /// As [`join`](Self::join), of matrices that exported files have transposed.
    pub fn transposed<S: Into<String>>(self, name: &str, paths: impl IntoIterator<Item = S>) -> Self {
        self.weight(name, paths, true)
    }

    fn weight<S: Into<String>>(mut self, name: &str, paths: impl IntoIterator<Item = S>, transposed: bool) -> Self {
        let paths = paths.into_iter().map(Into::into).collect();
        self.0.push(WeightName { name: name.to_string(), paths, transposed });
        self
    }
}

/// The name that PyTorch has for a type of weights.
pub(super) fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        DType::F64 => "float64",
        _ => "float32",
    }
}
