//! Rotary position embedding: one pass over memory, with tables of angles that are computed once.

use std::hash::{Hash, Hasher};
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::fnv::Fnv;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::arguments::scalar::Scalar;
use crate::placement::ReduceOp;
use crate::rank_context::rank_context;
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::attention::{RotaryTable, rotate_pairs};

/// Angles per position of every pair of features, and a factor of the rotated features, for models that scale positions.
#[derive(Debug)]
pub(crate) struct RotaryFrequencies {
    frequencies: Vec<f64>,
    scale: f64,
    /// Of the contents: the same on all ranks.
    hash: u64,
}

impl RotaryFrequencies {
    pub(crate) fn new(frequencies: Vec<f64>, scale: f64) -> Self {
        let mut hash = Fnv::default();
        frequencies.iter().chain([&scale]).for_each(|x| hash.add(&x.to_bits().to_le_bytes()));
        RotaryFrequencies { hash: hash.finish(), frequencies, scale }
    }

    /// Features that are rotated.
    pub(crate) fn size(&self) -> usize {
        2 * self.frequencies.len()
    }
}

impl PartialEq for RotaryFrequencies {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
            || (self.hash, &self.frequencies, self.scale) == (other.hash, &other.frequencies, other.scale)
    }
}

/// The angles of a rotation.
#[derive(Debug, Clone, PartialEq)]
enum Angles {
    /// Feature `i` turns by `base^(-2 i / size)` per position.
    Base(Scalar),
    Frequencies(Arc<RotaryFrequencies>),
}

/// Rotates pairs of features of `[..., length, size]` by angles that grow with the position.
#[derive(Debug, Clone)]
struct Rotary {
    angles: Angles,
    /// Position of the first row.
    first: usize,
    /// Whether pairs turn in the other direction, as in the backward pass.
    inverse: bool,
}

/// Positions compare equal: no layout depends on them, and decisions are cached by what is compared.
impl PartialEq for Rotary {
    fn eq(&self, other: &Self) -> bool {
        self.inverse == other.inverse && self.angles == other.angles
    }
}

impl Eq for Rotary {}

impl Hash for Rotary {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.inverse.hash(state);
        match &self.angles {
            Angles::Base(base) => base.hash(state),
            Angles::Frequencies(frequencies) => frequencies.hash.hash(state),
        }
    }
}

/// Tables of angles that a rank has used last.
#[derive(Default)]
struct RotaryTables(Vec<(RotaryKey, Rc<RotaryTable>)>);

/// What a table of angles depends on.
#[derive(Clone, PartialEq)]
struct RotaryKey {
    angles: Angles,
    first: usize,
    length: usize,
    size: usize,
    dtype: DType,
}

/// Tables of a rank: queries and keys of a few models, or of a few steps of a cache, share them.
const MAX_TABLES: usize = 8;

impl DTensor {
    /// Applies rotary position embedding (RoPE) to `[..., length, size]`.
    ///
    /// Feature `i` of the first half of a head is paired with feature `i` of the second half, and the pair is rotated by
    /// `position * base^(-2 i / size)`. The first row has position `first`. Elementwise along `length`: communicates nothing if
    /// batch, heads or length are sharded. Angles are computed once for a length and shared by later calls.
    ///
    /// # Errors
    /// If `size` is odd or the elements are integers.
    #[doc(alias = "RoPE")]
    #[doc(alias = "apply_rotary_pos_emb")]
    #[track_caller]
    pub fn rotary_embedding(&self, base: f64, first: usize) -> Result<DTensor> {
        let [.., _, size] = *self.shape() else {
            return Err(self.bad_dims("rotary_embedding", &[], "[..., length, size]"));
        };
        if size % 2 == 1 || !self.dtype().is_float() {
            return Err(self.bad_dims("rotary_embedding", &[], "an even number of floating-point features"));
        }
        self.rotated(&Rotary { angles: Angles::Base(Scalar(base)), first, inverse: false })
    }

    /// As [`rotary_embedding`](Self::rotary_embedding), by the angles of a model. Features beyond the ones the model rotates
    /// stay as they are.
    #[track_caller]
    pub(crate) fn rotary_by_frequencies(&self, frequencies: &Arc<RotaryFrequencies>, first: usize) -> Result<DTensor> {
        let (size, rotated) = (self.shape()[self.ndim() - 1], frequencies.size());
        let op = Rotary { angles: Angles::Frequencies(Arc::clone(frequencies)), first, inverse: false };
        if rotated == size {
            return self.rotated(&op);
        }
        let turned = self.narrow(-1, 0, rotated)?.rotated(&op)?;
        DTensor::cat(&[&turned, &self.narrow(-1, rotated, size - rotated)?], -1)
    }

    #[track_caller]
    fn rotated(&self, op: &Rotary) -> Result<DTensor> {
        Ok(dispatch(op, &[self], Location::caller())?.swap_remove(0))
    }
}

impl Op for Rotary {
    fn name(&self) -> &'static str {
        "rotary_embedding"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let ndim = inputs[0].shape.len();
        let all: Vec<Option<usize>> = (0..ndim).map(Some).collect();
        let sharding = (0..ndim).map(|d| if d + 1 == ndim { DimSharding::Never } else { DimSharding::Free });
        let mut signature = Signature::new(sharding, [all.clone()], [all]);
        // A rotation is linear.
        for op in [ReduceOp::Sum, ReduceOp::Avg] {
            signature = signature.allow_partial([Some(op)], op);
        }
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        let [.., length, size] = *context.input_shape(0) else { unreachable!("checked by rotary_embedding") };
        let positions = context.input_indices(0, x.rank() - 2);
        let key = RotaryKey { angles: self.angles.clone(), first: self.first, length, size, dtype: x.dtype() };
        Ok(vec![rotate_pairs(x, &table(key), &positions, self.inverse)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, _, gradients| {
            let back = |g: &DTensor| g.rotated(&Rotary { inverse: !op.inverse, ..op.clone() });
            Ok(vec![gradients[0].as_ref().map(back).transpose()?])
        })
    }
}

/// The table for a call, computed if this rank does not have it.
fn table(key: RotaryKey) -> Rc<RotaryTable> {
    rank_context(|context| {
        context.rotary_tables.with(|RotaryTables(tables)| {
            if let Some(at) = tables.iter().position(|(other, _)| *other == key) {
                // The last used table is the last to be dropped.
                tables[at..].rotate_left(1);
            } else {
                if tables.len() == MAX_TABLES {
                    tables.remove(0);
                }
                let RotaryKey { first, length, size, dtype, .. } = key;
                let table = match &key.angles {
                    Angles::Base(base) => RotaryTable::new(dtype, base.0, size, first, length),
                    Angles::Frequencies(angles) => {
                        RotaryTable::with_frequencies(dtype, &angles.frequencies, angles.scale, first, length)
                    }
                };
                tables.push((key, Rc::new(table)));
            }
            Rc::clone(&tables[tables.len() - 1].1)
        })
    })
}
