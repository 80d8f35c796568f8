//! Random calls: shapes, dtypes, values, and the mesh and placements to run on. Drawn by a generator defined in this suite,
//! so that a recorded answer stays valid for its seed whatever the version of a crate.

use candle_core::DType;
use serde_json::{Value, json};
use shardwise::prelude::*;
use shardwise_test_suites::values;

use crate::attack::numbers::{Input, mix};

pub(crate) struct Draw {
    seed: u64,
    drawn: u64,
}

pub(crate) const FLOATS: &[DType] =
    &[DType::F64, DType::F32, DType::F32, DType::F16, DType::F16, DType::BF16, DType::BF16];
pub(crate) const INTEGERS: &[DType] = &[DType::I64, DType::I64, DType::I32, DType::U8];

/// Shapes as they occur in models.
const REALISTIC: &[&[usize]] =
    &[&[8, 128, 512], &[16, 4096], &[2, 3, 4096], &[64, 1000], &[16, 33, 65], &[1, 12, 64, 64], &[4096], &[3, 70000]];

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        Draw { seed: mix(0x00A7_7AC4, seed), drawn: 0 }
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.drawn += 1;
        (mix(self.seed, self.drawn) >> 16) as usize % n.max(1)
    }

    /// One time in `n`.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn choose<T: Clone>(&mut self, among: &[T]) -> T {
        among[self.below(among.len())].clone()
    }

    pub(crate) fn seed(&mut self) -> u64 {
        self.below(1 << 40) as u64
    }

    /// The size of a dimension: usually small, now and then 0.
    pub(crate) fn size(&mut self) -> usize {
        if self.one_in(40) { 0 } else { self.choose(&[1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 13]) }
    }

    /// The size of a dimension that has elements.
    pub(crate) fn some(&mut self) -> usize {
        self.size().max(1)
    }

    /// A shape with a number of dimensions; now and then one as in a model.
    pub(crate) fn shape(&mut self, ndim: std::ops::RangeInclusive<usize>) -> Vec<usize> {
        if self.one_in(16) {
            let fitting: Vec<&[usize]> = REALISTIC.iter().copied().filter(|s| ndim.contains(&s.len())).collect();
            if !fitting.is_empty() {
                return self.choose(&fitting).to_vec();
            }
        }
        let n = ndim.start() + self.below(ndim.end() - ndim.start() + 1);
        (0..n).map(|_| self.size()).collect()
    }

    pub(crate) fn float(&mut self) -> DType {
        self.choose(FLOATS)
    }

    /// Any type, floating point more often.
    pub(crate) fn any(&mut self) -> DType {
        if self.one_in(3) { self.choose(INTEGERS) } else { self.float() }
    }

    /// An input with values drawn for its type.
    pub(crate) fn input(&mut self, shape: &[usize], dtype: DType) -> Input {
        let kinds: &[&'static str] = match dtype.is_float() {
            true => &[
                "unit", "unit", "unit", "six", "six", "six", "whole", "whole", "wide", "wide", "tiny", "huge",
                "special",
            ],
            false => &["small", "small", "small", "bits", "extreme"],
        };
        let values = self.choose(kinds);
        self.with(shape, dtype, values)
    }

    pub(crate) fn with(&mut self, shape: &[usize], dtype: DType, values: &'static str) -> Input {
        Input { shape: shape.to_vec(), dtype, values, seed: self.seed(), n: 1, inner: 1, len: 1 }
    }

    /// Indices below `n`.
    pub(crate) fn index(&mut self, shape: &[usize], n: usize) -> Input {
        Input { n: n as i64, ..self.with(shape, DType::I64, "index") }
    }

    /// A dimension, from the front or from the back; dimension 0 of a scalar.
    pub(crate) fn dim(&mut self, ndim: usize) -> isize {
        let dim = self.below(ndim) as isize;
        if self.one_in(2) { dim - ndim.max(1) as isize } else { dim }
    }

    /// Distinct dimensions, perhaps none.
    pub(crate) fn dims(&mut self, ndim: usize) -> Vec<isize> {
        let mut all: Vec<isize> = (0..ndim as isize).filter(|_| self.one_in(2)).collect();
        if self.one_in(2) {
            all.reverse();
        }
        all.iter().map(|&d| if self.one_in(3) { d - ndim as isize } else { d }).collect()
    }

    pub(crate) fn number(&mut self) -> f64 {
        self.choose(&[0.0, 1.0, -1.0, 2.0, 3.0, 0.5, -0.5, 1.5, 0.1, -2.5, 100.0])
    }

    /// A shape that broadcasts to another: dimensions of size one, or missing in front.
    pub(crate) fn broadcasting(&mut self, shape: &[usize]) -> Vec<usize> {
        let from = if self.one_in(4) { self.below(shape.len() + 1) } else { 0 };
        shape[from..].iter().map(|&n| if self.one_in(6) { 1 } else { n }).collect()
    }

    /// Mutates a dimension, a size or a dtype of the call, which usually makes it invalid.
    pub(crate) fn spoil(&mut self, inputs: &mut [Input], attrs: &mut Value) {
        let integers: Vec<String> = attrs.as_object().map_or(Vec::new(), |all| {
            all.iter().filter(|(_, v)| v.is_i64() || v.is_array()).map(|(k, _)| k.clone()).collect()
        });
        match self.below(3) {
            0 if !integers.is_empty() => {
                let key = self.choose(&integers);
                let strange =
                    self.choose(&[-1, 1, 2, 3, 4, -3, -5, 7, 100, -100, 1 << 31, -(1 << 31), i64::MAX, i64::MIN]);
                // Arguments that set the size of the result stay small.
                let sizes = matches!(
                    key.as_str(),
                    "classes"
                        | "repeats"
                        | "size"
                        | "shape"
                        | "sizes"
                        | "border"
                        | "padding"
                        | "kernel"
                        | "stride"
                        | "dilation"
                );
                let strange = if sizes { strange.clamp(-5, 7) } else { strange };
                match &mut attrs[&key] {
                    Value::Array(all) if all.is_empty() => all.push(json!(strange)),
                    Value::Array(all) => {
                        let at = self.below(all.len());
                        if all[at].is_i64() {
                            all[at] = json!(strange);
                        }
                    }
                    number => *number = json!(strange),
                }
            }
            1 if !inputs.is_empty() => {
                let at = self.below(inputs.len());
                let input = &mut inputs[at];
                match self.below(3) {
                    0 if !input.shape.is_empty() => {
                        let dim = self.below(input.shape.len());
                        input.shape[dim] = self.size();
                    }
                    1 if input.shape.len() > 1 => drop(input.shape.remove(0)),
                    _ => input.shape.insert(0, 2),
                }
            }
            // PyTorch's type of a result depends on the number of dimensions where a scalar is involved.
            _ if inputs.iter().all(|i| !i.shape.is_empty()) && !inputs.is_empty() => {
                let at = self.below(inputs.len());
                let dtype = self.any();
                inputs[at] = self.input(&inputs[at].shape.clone(), dtype);
            }
            _ => {}
        }
    }
}

/// The mesh that a call runs on and the placements of its inputs.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    pub(crate) mesh: Vec<usize>,
    pub(crate) placements: Vec<Vec<Placement>>,
}

const MESHES: &[&[usize]] = &[&[2], &[2], &[3], &[4], &[2, 2], &[2, 2], &[1, 3], &[2, 1]];

impl Setting {
    /// A mesh of one rank.
    pub(crate) fn alone(inputs: &[Input]) -> Self {
        Setting { mesh: vec![1], placements: vec![vec![Replicate]; inputs.len()] }
    }

    pub(crate) fn draw(draw: &mut Draw, inputs: &[Input]) -> Result<Self> {
        let axes = draw.choose(MESHES).to_vec();
        let mesh = Mesh::new(axes.iter().zip(["a", "b"]).map(|(&n, name)| (name, n)).collect::<Vec<_>>())?;
        let mut placements = Vec::new();
        for input in inputs {
            let mut placed = vec![Replicate; axes.len()];
            for axis in 0..axes.len() {
                let mut tried = placed.clone();
                tried[axis] = one_placement(draw, &mesh, input, &placed, axis);
                // A placement that is invalid together with that of the other axis becomes replicated.
                if Layout::new(&mesh, input.shape.as_slice(), tried.clone()).is_ok() {
                    placed = tried;
                }
            }
            placements.push(placed);
        }
        Ok(Setting { mesh: axes, placements })
    }
}

fn one_placement(draw: &mut Draw, mesh: &Mesh, input: &Input, placed: &[Placement], axis: usize) -> Placement {
    let ndim = input.shape.len();
    match draw.below(8) {
        1..=3 if ndim > 0 => Shard(draw.below(ndim) as isize),
        4 if ndim > 0 => {
            let dim = draw.below(ndim);
            values::ragged(mesh, &input.shape, placed, dim, axis, draw.below(1000))
        }
        5 if ndim > 0 => Placement::StridedShard { dim: draw.below(ndim) as isize, split_factor: 2 + draw.below(2) },
        6 | 7 if input.is_data() => {
            // Operands of a mean add up to more than the type holds if the mean is near its end.
            let even = mesh.shape()[axis].is_multiple_of(2) && !matches!(input.values, "special" | "huge");
            let reductions: &[ReduceOp] = match input.dtype.is_float() {
                true if even => &[ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min],
                // a third of a number is not exact
                true => &[ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min],
                false => &[ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min, ReduceOp::BitXor],
            };
            Partial(draw.choose(reductions))
        }
        _ => Replicate,
    }
}
