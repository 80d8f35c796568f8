//! Names of weights in checkpoint files, and where the elements of a parameter are in them.

use candle_core::DType;

use crate::error::Result;
use crate::layout::TensorBox;
use crate::param::Param;
use crate::tensor::DTensor;

/// A tensor of a checkpoint file, and the parameters that it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightName {
    /// Name of the tensor in files.
    pub name: String,
    /// Paths of the parameters, joined on dimension 0 as [`rows`](Self::rows) says.
    pub paths: Vec<String>,
    /// Whether files have the matrix transposed, as those of GPT-2 do.
    pub transposed: bool,
    /// The order of the rows of several parameters.
    pub rows: RowOrder,
    /// If files have one tensor per element of dimension 0 of the parameter, such as an expert: which one this is.
    pub slice: Option<usize>,
}

/// How the rows of several parameters follow each other in one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RowOrder {
    /// All rows of the first parameter, then all of the next.
    Concatenated,
    /// For each of so many heads, its rows of the first parameter, then its rows of the next.
    PerHead(usize),
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
        self.weight(name, paths, false, RowOrder::Concatenated, None)
    }

    /// As [`join`](Self::join), for matrices that are transposed in files.
    pub fn transposed<S: Into<String>>(self, name: &str, paths: impl IntoIterator<Item = S>) -> Self {
        self.weight(name, paths, true, RowOrder::Concatenated, None)
    }

    /// Adds several parameters under one name, joined head by head on dimension 0, as the fused projections of GPT-NeoX are.
    pub fn join_per_head<S: Into<String>>(self, name: &str, paths: impl IntoIterator<Item = S>, heads: usize) -> Self {
        self.weight(name, paths, false, RowOrder::PerHead(heads), None)
    }

    /// Adds element `index` of dimension 0 of a parameter under a name of its own, as files have one tensor per expert.
    pub fn slice(self, name: &str, path: &str, index: usize) -> Self {
        self.weight(name, [path], false, RowOrder::Concatenated, Some(index))
    }

    fn weight<S: Into<String>>(
        mut self,
        name: &str,
        paths: impl IntoIterator<Item = S>,
        transposed: bool,
        rows: RowOrder,
        slice: Option<usize>,
    ) -> Self {
        let paths = paths.into_iter().map(Into::into).collect();
        self.0.push(WeightName { name: name.to_string(), paths, transposed, rows, slice });
        self
    }
}

/// The rows of one parameter inside a stored tensor: `count` groups of `block` rows, `stride` apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoredRows {
    pub(super) block: usize,
    pub(super) stride: usize,
    pub(super) offset: usize,
}

/// A box of a parameter and the box of the stored tensor that holds its elements, transposed if the weight is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoredBox {
    pub(super) stored: TensorBox,
    /// Offsets in the parameter.
    pub(super) offsets: Vec<usize>,
    /// Sizes in the parameter.
    pub(super) sizes: Vec<usize>,
}

impl WeightName {
    /// The shape of a part of the stored tensor, from the shape of the whole parameter.
    fn part_shape<'a>(&self, shape: &'a [usize]) -> &'a [usize] {
        if self.slice.is_some() { &shape[1..] } else { shape }
    }

    /// The shape of the stored tensor, from the shapes of the parameters.
    pub(super) fn stored_shape(&self, shapes: &[Vec<usize>]) -> Vec<usize> {
        let rows = shapes.iter().map(|shape| self.part_shape(shape).first().copied().unwrap_or(1)).sum();
        let mut stored = self.part_shape(&shapes[0]).to_vec();
        if let Some(first) = stored.first_mut() {
            *first = rows;
        }
        if self.transposed {
            stored.reverse();
        }
        stored
    }

    /// Where the rows of parameter `part` are, from the shapes of all of them.
    pub(super) fn rows_of(&self, part: usize, shapes: &[Vec<usize>]) -> StoredRows {
        let rows = |i: usize| self.part_shape(&shapes[i]).first().copied().unwrap_or(1);
        let groups = match self.rows {
            RowOrder::Concatenated => 1,
            RowOrder::PerHead(heads) => heads.max(1),
        };
        let all: usize = (0..shapes.len()).map(rows).sum();
        let before: usize = (0..part).map(rows).sum();
        StoredRows { block: rows(part) / groups, stride: all / groups, offset: before / groups }
    }

    /// The boxes of the stored tensor that hold a box of parameter `part`. Empty if the tensor is another slice of it.
    pub(super) fn boxes_of(&self, part: usize, shapes: &[Vec<usize>], wanted: &TensorBox) -> Vec<StoredBox> {
        let (mut offsets, mut sizes) = (wanted.offsets.clone(), wanted.sizes.clone());
        if let Some(index) = self.slice {
            if !(offsets[0]..offsets[0] + sizes[0]).contains(&index) {
                return Vec::new();
            }
            (offsets[0], sizes[0]) = (index, 1);
        }
        let inner = usize::from(self.slice.is_some());
        let Some((&first, &count)) = offsets.get(inner).zip(sizes.get(inner)) else {
            let stored = TensorBox { offsets: offsets[inner..].to_vec(), sizes: sizes[inner..].to_vec() };
            return vec![StoredBox { stored, offsets, sizes }];
        };
        let StoredRows { block, stride, offset } = self.rows_of(part, shapes);
        let mut found = Vec::new();
        let mut row = first;
        while row < first + count {
            let length = (block - row % block).min(first + count - row);
            (offsets[inner], sizes[inner]) = (row, length);
            let mut stored = TensorBox { offsets: offsets[inner..].to_vec(), sizes: sizes[inner..].to_vec() };
            stored.offsets[0] = row / block * stride + offset + row % block;
            if self.transposed {
                stored.offsets.reverse();
                stored.sizes.reverse();
            }
            found.push(StoredBox { stored, offsets: offsets.clone(), sizes: sizes.clone() });
            row += length;
        }
        found
    }

    /// The tensor in the form of files, except that it is not transposed yet, from the values of the parameters.
    #[track_caller]
    pub(super) fn joined(&self, parts: &[DTensor]) -> Result<DTensor> {
        if let Some(index) = self.slice {
            return parts[0].select(0, index as isize);
        }
        match (parts, self.rows) {
            ([one], _) => Ok(one.clone()),
            (several, RowOrder::Concatenated) => DTensor::cat(&several.iter().collect::<Vec<_>>(), 0),
            (several, RowOrder::PerHead(heads)) => {
                let by_head = |part: &DTensor| part.unflatten(0, &[heads as isize, -1]);
                let by_head = several.iter().map(by_head).collect::<Result<Vec<_>>>()?;
                DTensor::cat(&by_head.iter().collect::<Vec<_>>(), 1)?.flatten(0, 1)
            }
        }
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
