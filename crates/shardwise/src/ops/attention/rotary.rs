//! Rotary position embedding: one pass over memory, with tables of angles that are computed once.

use std::panic::Location;
use std::rc::Rc;

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::scalar::Scalar;
use crate::placement::ReduceOp;
use crate::rank_context::rank_context;
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::attention::{RotaryTable, rotate_pairs};

/// Rotates pairs of features of `[..., length, size]` by angles that grow with the position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Rotary {
    base: Scalar,
    /// Position of the first row.
    first: usize,
    /// Whether pairs turn in the other direction, as in the backward pass.
    inverse: bool,
}

/// Tables of angles that a rank has used last.
#[derive(Default)]
struct RotaryTables(Vec<(RotaryKey, Rc<RotaryTable>)>);

/// What a table of angles depends on.
#[derive(Clone, Copy, PartialEq)]
struct RotaryKey {
    rotary: (Scalar, usize),
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
        self.rotated(Rotary { base: Scalar(base), first, inverse: false })
    }

    #[track_caller]
    fn rotated(&self, op: Rotary) -> Result<DTensor> {
        Ok(dispatch(&op, &[self], Location::caller())?.swap_remove(0))
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
        let key = RotaryKey { rotary: (self.base, self.first), length, size, dtype: x.dtype() };
        Ok(vec![rotate_pairs(x, &table(key), &positions, self.inverse)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, _, gradients| {
            let back = |g: &DTensor| g.rotated(Rotary { inverse: !op.inverse, ..*op });
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
                let (base, first) = (key.rotary.0.0, key.rotary.1);
                tables.push((key, Rc::new(RotaryTable::new(key.dtype, base, key.size, first, key.length))));
            }
            Rc::clone(&tables[tables.len() - 1].1)
        })
    })
}
