//! Solutions of linear systems, and inverses.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::factor::{dominant, pair_samples, positive, square_samples};
use super::rule::{
    Free, ItemDim, Matrices, Whole, broadcast_batch, check_info, check_pivots, check_same_type, matrices, meta, misfit,
    outputs, signature, square,
};
use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::gradients::derivative::unbroadcast;
use crate::ops::{OpEntry, SampleInput};
use crate::tensor::{DTensor, SaveForBackward, SavedTensors, is_recording};
use shardwise_kernels::linalg::{self, Triangle};

const NOT_SINGULAR: &str = "matrices that are not singular";

impl DTensor {
    /// Returns the inverses of square matrices.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    ///
    /// # Errors
    /// If a matrix is singular: on the ranks that hold it, and the other ranks get it with their next collective; on all ranks if matrices
    /// had to be gathered.
    #[doc(alias = "linalg.inv")]
    #[doc(alias = "inverse")]
    #[track_caller]
    pub fn linalg_inv(&self) -> Result<DTensor> {
        let moved = self.moves_matrices();
        let op = Inverse { name: "linalg_inv", check: !moved };
        let [inverse, info] = outputs(dispatch(&op, &[self], Location::caller())?);
        if moved {
            info.check_info_of_all("linalg_inv", NOT_SINGULAR)?;
        }
        Ok(inverse)
    }

    /// As [`linalg_inv`](Self::linalg_inv), and returns per matrix 0 (i32), or the step of its factorization whose pivot is zero.
    #[doc(alias = "linalg.inv_ex")]
    #[track_caller]
    pub fn linalg_inv_ex(&self) -> Result<(DTensor, DTensor)> {
        let op = Inverse { name: "linalg_inv_ex", check: false };
        let [inverse, info] = outputs(dispatch(&op, &[self], Location::caller())?);
        Ok((inverse, info))
    }

    /// Solves `A X = B` with this tensor as `A`, or `X A = B` unless `left`. `b` holds matrices, or vectors if it has one dimension, or
    /// one dimension less than `A` and its batch dimensions.
    ///
    /// Batch dimensions broadcast and may be sharded, and so may be right-hand sides; matrices are gathered.
    ///
    /// # Errors
    /// If a matrix is singular: on the ranks that hold it, and the other ranks get it with their next collective; on all ranks if matrices
    /// had to be gathered.
    #[doc(alias = "linalg.solve")]
    #[track_caller]
    pub fn linalg_solve(&self, b: &DTensor, left: bool) -> Result<DTensor> {
        let moved = self.moves_matrices();
        let (x, info) = self.solve("linalg_solve", b, left, !moved)?;
        if moved {
            info.check_info_of_all("linalg_solve", NOT_SINGULAR)?;
        }
        Ok(x)
    }

    /// As [`linalg_solve`](Self::linalg_solve), and returns per matrix 0 (i32), or the step of its factorization whose pivot is zero.
    #[doc(alias = "linalg.solve_ex")]
    #[track_caller]
    pub fn linalg_solve_ex(&self, b: &DTensor, left: bool) -> Result<(DTensor, DTensor)> {
        self.solve("linalg_solve_ex", b, left, false)
    }

    #[track_caller]
    fn solve(&self, name: &'static str, b: &DTensor, left: bool, check: bool) -> Result<(DTensor, DTensor)> {
        let site = Location::caller();
        let op = Solve { name, left, check };
        let vectors = b.ndim() == 1
            || b.ndim() + 1 == self.ndim() && b.shape() == &self.shape()[..self.ndim() - 1] && self.ndim() > 1;
        if !vectors {
            let [x, _, _, info] = outputs(dispatch(&op, &[self, b], site)?);
            return Ok((x, info));
        }
        let side = if left { -1 } else { -2 };
        let [x, _, _, info] = outputs(dispatch(&op, &[self, &b.unsqueeze(side)?], site)?);
        Ok((x.squeeze(Some(side))?, info))
    }

    /// Solves `A X = B`, or `X A = B` unless `left`, where this tensor is `A`, of which one triangle is read; with `unitriangular`, its
    /// diagonal is taken to be ones.
    ///
    /// Batch dimensions broadcast and may be sharded, and so may be right-hand sides; matrices are gathered. A zero on the diagonal
    /// gives infinities, as in PyTorch.
    #[doc(alias = "linalg.solve_triangular")]
    #[doc(alias = "triangular_solve")]
    #[track_caller]
    pub fn linalg_solve_triangular(
        &self,
        b: &DTensor,
        upper: bool,
        left: bool,
        unitriangular: bool,
    ) -> Result<DTensor> {
        let triangle = Triangle { upper, unit: unitriangular, transposed: false };
        let op = SolveTriangular { triangle, left };
        Ok(dispatch(&op, &[self, b], Location::caller())?.swap_remove(0))
    }

    /// Solves `A X = B` with the factors of `A` in this tensor, see [`linalg_lu_factor`](Self::linalg_lu_factor); `X A = B` unless `left`, and
    /// with `A^T` if `adjoint`.
    ///
    /// Batch dimensions broadcast and may be sharded, and so may be right-hand sides; matrices are gathered.
    #[doc(alias = "linalg.lu_solve")]
    #[doc(alias = "lu_solve")]
    #[track_caller]
    pub fn linalg_lu_solve(&self, pivots: &DTensor, b: &DTensor, left: bool, adjoint: bool) -> Result<DTensor> {
        let op = LuSolve { left, adjoint };
        Ok(dispatch(&op, &[self, pivots, b], Location::caller())?.swap_remove(0))
    }

    /// Solves `A X = B` with the factors of `A` in this tensor, see [`linalg_ldl_factor`](Self::linalg_ldl_factor). Not differentiable.
    ///
    /// Batch dimensions broadcast and may be sharded, and so may be right-hand sides; matrices are gathered.
    #[doc(alias = "linalg.ldl_solve")]
    #[track_caller]
    pub fn linalg_ldl_solve(&self, pivots: &DTensor, b: &DTensor) -> Result<DTensor> {
        Ok(dispatch(&LdlSolve, &[self, pivots, b], Location::caller())?.swap_remove(0))
    }

    /// Solves `A X = B` for this tensor as `B`, where `factor` is the Cholesky factor of `A`, the upper one if `upper`.
    ///
    /// Batch dimensions broadcast and may be sharded, and so may be right-hand sides; matrices are gathered. The gradient of `factor` is
    /// that of a full matrix, as in PyTorch, although one triangle is read.
    #[track_caller]
    pub fn cholesky_solve(&self, factor: &DTensor, upper: bool) -> Result<DTensor> {
        let op = CholeskySolve { name: "cholesky_solve", upper };
        Ok(dispatch(&op, &[factor, self], Location::caller())?.swap_remove(0))
    }

    /// Returns the inverses of the matrices whose Cholesky factors this tensor holds, the upper ones if `upper`.
    ///
    /// Batch dimensions may be sharded; matrices are gathered. The gradient is as for [`cholesky_solve`](Self::cholesky_solve).
    #[track_caller]
    pub fn cholesky_inverse(&self, upper: bool) -> Result<DTensor> {
        if self.ndim() < 2 {
            return Err(self.bad_dims("cholesky_inverse", &[], "at least two dimensions"));
        }
        let identity = self.identity(self.shape()[self.ndim() - 1])?;
        let op = CholeskySolve { name: "cholesky_inverse", upper };
        Ok(dispatch(&op, &[self, &identity], Location::caller())?.swap_remove(0))
    }

    /// Returns the inverse of this tensor as a map from its last dimensions to its first `ind` ones: of shape
    /// `shape[ind..] + shape[..ind]`.
    ///
    /// Communicates as [`linalg_inv`](Self::linalg_inv) does; the reshapes may gather too.
    #[doc(alias = "linalg.tensorinv")]
    #[track_caller]
    pub fn linalg_tensorinv(&self, ind: usize) -> Result<DTensor> {
        let size = |shape: &[usize]| shape.iter().product::<usize>();
        let (to, from) = self.shape().split_at(ind.min(self.ndim()));
        if ind == 0 || size(to) != size(from) {
            let needed = format!("as many elements in the first {ind} dimensions, at least one, as in the last ones");
            return Err(self.bad_dims("linalg_tensorinv", &[], &needed));
        }
        let flat = self.reshape(&[size(to) as isize, size(from) as isize])?;
        let shape: Vec<isize> = from.iter().chain(to).map(|&n| n as isize).collect();
        flat.linalg_inv()?.reshape(&shape)
    }

    /// Solves `A X = B` where this tensor is a map from its last dimensions to those of `b`. The dimensions `dims` are moved to the end
    /// first.
    ///
    /// Communicates as [`linalg_solve`](Self::linalg_solve) does; the reshapes may gather too.
    #[doc(alias = "linalg.tensorsolve")]
    #[track_caller]
    pub fn linalg_tensorsolve(&self, b: &DTensor, dims: &[isize]) -> Result<DTensor> {
        let mut a = self.clone();
        let mut moved = Vec::new();
        for &dim in dims {
            moved.push(self.resolve_dim("linalg_tensorsolve", dim)?);
        }
        if !moved.is_empty() {
            let rest = (0..self.ndim()).filter(|d| !moved.contains(d));
            let order: Vec<isize> = rest.chain(moved.iter().copied()).map(|d| d as isize).collect();
            a = self.permute(&order)?;
        }
        let unknown = a.shape()[b.ndim().min(a.ndim())..].to_vec();
        let count: usize = unknown.iter().product();
        if count != b.elem_count() || a.elem_count() != count * count {
            let needed =
                format!("dimensions after the first {} with as many elements as b has, {}", b.ndim(), b.elem_count());
            return Err(a.bad_dims("linalg_tensorsolve", &[], &needed));
        }
        let flat = a.reshape(&[b.elem_count() as isize, count as isize])?;
        let x = flat.linalg_solve(&b.reshape(&[count as isize])?, true)?;
        x.reshape(&unknown.iter().map(|&n| n as isize).collect::<Vec<_>>())
    }
}

/// Reads the right-hand sides of a system of `n` equations.
fn right_hand_sides<'a>(name: &str, a: &TensorMeta, b: &'a TensorMeta, n: usize, left: bool) -> Result<Matrices<'a>> {
    check_same_type(name, &[a, b])?;
    let found = matrices(name, b)?;
    let equations = if left { found.rows } else { found.columns };
    if equations == n {
        return Ok(found);
    }
    let needed = format!("right-hand sides of {n} {}", if left { "rows" } else { "columns" });
    Err(misfit(name, &[a, b], &needed))
}

/// The dimensions of right-hand sides: each of them is independent.
fn sides(left: bool) -> [ItemDim; 2] {
    if left { [Whole, Free] } else { [Free, Whole] }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Inverse {
    name: &'static str,
    /// Whether a singular matrix is an error.
    check: bool,
}

impl Op for Inverse {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = square(self.name, &inputs[0])?;
        let whole: (&[usize], &[_]) = (a.batch, &[Whole, Whole]);
        let signature = signature(a.batch, &[whole], &[whole, (a.batch, &[])]);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone(), meta(a.batch, &[], DType::I32)] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (inverse, info) = linalg::inverse(&inputs[0])?;
        if self.check {
            check_info(self.name, &info, NOT_SINGULAR)?;
        }
        Ok(vec![inverse, info])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Outputs, |_, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None]) };
            let transposed = saved.output(0).mt()?;
            Ok(vec![Some(transposed.matmul(g)?.matmul(&transposed)?.neg()?)])
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Solve {
    name: &'static str,
    left: bool,
    /// Whether a singular matrix is an error.
    check: bool,
}

impl Op for Solve {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = square(self.name, &inputs[0])?;
        let b = right_hand_sides(self.name, &inputs[0], &inputs[1], a.rows, self.left)?;
        let batch = broadcast_batch(self.name, &[&inputs[0], &inputs[1]], &[a.batch, b.batch])?;
        let (whole, sides): (&[_], _) = (&[Whole, Whole], sides(self.left));
        let signature = signature(
            &batch,
            &[(a.batch, whole), (b.batch, &sides)],
            &[(&batch, &sides), (a.batch, whole), (a.batch, &[Whole]), (a.batch, &[])],
        );
        let outputs = vec![
            meta(&batch, &[b.rows, b.columns], inputs[0].dtype),
            inputs[0].clone(),
            meta(a.batch, &[a.rows], DType::I32),
            meta(a.batch, &[], DType::I32),
        ];
        Ok(OpPlan { signature, outputs })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, factors) = linalg::solve(&inputs[0], &inputs[1], self.left)?;
        if self.check {
            check_info(self.name, &factors.info, NOT_SINGULAR)?;
        }
        Ok(vec![x, factors.lu, factors.pivots, factors.info])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::All, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None, None]) };
            // The factors are saved, but have no derivative of their own: a recorded pass starts from the matrices.
            let of_b = match is_recording() {
                true => {
                    let adjoint = Solve { name: op.name, left: op.left, check: false };
                    dispatch(&adjoint, &[&saved.input(0).mt()?, g], Location::caller())?.swap_remove(0)
                }
                false => saved.output(1).linalg_lu_solve(&saved.output(2), g, op.left, true)?,
            };
            solution_gradients(saved, 1, &of_b, &saved.output(0), op.left)
        })
    }
}

/// The gradients of `A` (input 0) and `B` from the gradient of `B` before it is reduced to the shape of `B`: `-G_B X^T` and `G_B`.
fn solution_gradients(
    saved: &SavedTensors<'_>,
    b: usize,
    of_b: &DTensor,
    x: &DTensor,
    left: bool,
) -> Result<Vec<Option<DTensor>>> {
    let mut found = vec![None; saved.num_inputs()];
    if saved.needs_input_grad(0) {
        let product = if left { of_b.matmul(&x.mt()?)? } else { x.mt()?.matmul(of_b)? };
        found[0] = Some(unbroadcast(&product.neg()?, saved, 0)?);
    }
    if saved.needs_input_grad(b) {
        found[b] = Some(unbroadcast(of_b, saved, b)?);
    }
    Ok(found)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SolveTriangular {
    triangle: Triangle,
    left: bool,
}

impl Op for SolveTriangular {
    fn name(&self) -> &'static str {
        "linalg_solve_triangular"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = square(self.name(), &inputs[0])?;
        let b = right_hand_sides(self.name(), &inputs[0], &inputs[1], a.rows, self.left)?;
        let batch = broadcast_batch(self.name(), &[&inputs[0], &inputs[1]], &[a.batch, b.batch])?;
        let sides = sides(self.left);
        let signature = signature(&batch, &[(a.batch, &[Whole, Whole]), (b.batch, &sides)], &[(&batch, &sides)]);
        Ok(OpPlan { signature, outputs: vec![meta(&batch, &[b.rows, b.columns], inputs[0].dtype)] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![linalg::solve_triangular(&inputs[0], &inputs[1], self.triangle, self.left)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        const SAVED: SaveForBackward = SaveForBackward::Only { inputs: &[0], outputs: &[0] };
        Gradient::From(SAVED, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None, None]) };
            let triangle = Triangle { transposed: !op.triangle.transposed, ..op.triangle };
            let adjoint = SolveTriangular { triangle, left: op.left };
            let of_b = dispatch(&adjoint, &[&saved.input(0), g], Location::caller())?.swap_remove(0);
            let mut found = solution_gradients(saved, 1, &of_b, &saved.output(0), op.left)?;
            if let Some(of_a) = found[0].take() {
                let of_a = if op.triangle.transposed { of_a.mt()? } else { of_a };
                let inside = isize::from(op.triangle.unit);
                found[0] = Some(if op.triangle.upper { of_a.triu(inside)? } else { of_a.tril(-inside)? });
            }
            Ok(found)
        })
    }
}

/// Two triangular solutions with one factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct CholeskySolve {
    name: &'static str,
    upper: bool,
}

impl Op for CholeskySolve {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = square(self.name, &inputs[0])?;
        let b = right_hand_sides(self.name, &inputs[0], &inputs[1], a.rows, true)?;
        let batch = broadcast_batch(self.name, &[&inputs[0], &inputs[1]], &[a.batch, b.batch])?;
        let inputs_of = [(a.batch, &[Whole, Whole][..]), (b.batch, &[Whole, Free])];
        let signature = signature(&batch, &inputs_of, &[(&batch, &[Whole, Free])]);
        Ok(OpPlan { signature, outputs: vec![meta(&batch, &[b.rows, b.columns], inputs[0].dtype)] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let solve = |b: &Tensor, transposed: bool| {
            let triangle = Triangle { upper: self.upper, unit: false, transposed };
            linalg::solve_triangular(&inputs[0], b, triangle, true)
        };
        // L L^T, or U^T U.
        Ok(vec![solve(&solve(&inputs[1], self.upper)?, !self.upper)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        const SAVED: SaveForBackward = SaveForBackward::Only { inputs: &[0], outputs: &[0] };
        Gradient::From(SAVED, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None, None]) };
            let (factor, x) = (saved.input(0), saved.output(0));
            let of_b = g.cholesky_solve(&factor, op.upper)?;
            let mut found = vec![None, None];
            if saved.needs_input_grad(0) {
                // A is symmetric, and a product with the factor.
                let of_a = of_b.matmul(&x.mt()?)?;
                let both = of_a.add(&of_a.mt()?)?;
                let product = if op.upper { factor.matmul(&both)? } else { both.matmul(&factor)? };
                found[0] = Some(unbroadcast(&product.neg()?, saved, 0)?);
            }
            if saved.needs_input_grad(1) {
                found[1] = Some(unbroadcast(&of_b, saved, 1)?);
            }
            Ok(found)
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LuSolve {
    left: bool,
    adjoint: bool,
}

/// The plan of a solution with factors, pivots and right-hand sides.
fn plan_with_pivots(name: &str, inputs: &[TensorMeta], left: bool) -> Result<OpPlan> {
    let a = square(name, &inputs[0])?;
    check_pivots(name, &inputs[1], a.rows)?;
    let of_pivots = &inputs[1].shape[..inputs[1].shape.len() - 1];
    if of_pivots != a.batch {
        return Err(misfit(name, &[&inputs[0], &inputs[1]], "pivots with the batch dimensions of the factors"));
    }
    let b = right_hand_sides(name, &inputs[0], &inputs[2], a.rows, left)?;
    let batch = broadcast_batch(name, &[&inputs[0], &inputs[2]], &[a.batch, b.batch])?;
    let sides = sides(left);
    let signature =
        signature(&batch, &[(a.batch, &[Whole, Whole]), (a.batch, &[Whole]), (b.batch, &sides)], &[(&batch, &sides)]);
    Ok(OpPlan { signature, outputs: vec![meta(&batch, &[b.rows, b.columns], inputs[0].dtype)] })
}

impl Op for LuSolve {
    fn name(&self) -> &'static str {
        "linalg_lu_solve"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        plan_with_pivots(self.name(), inputs, self.left)
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![linalg::lu_solve(&inputs[0], &inputs[1], &inputs[2], self.left, self.adjoint)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::All, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None, None, None]) };
            let (lu, pivots, x) = (saved.input(0), saved.input(1), saved.output(0));
            let of_b = lu.linalg_lu_solve(&pivots, g, op.left, !op.adjoint)?;
            let mut found = vec![None, None, None];
            if saved.needs_input_grad(2) {
                found[2] = Some(unbroadcast(&of_b, saved, 2)?);
            }
            if saved.needs_input_grad(0) {
                found[0] = Some(unbroadcast(&lu_gradient(op, &lu, &pivots, &of_b, &x)?, saved, 0)?);
            }
            Ok(found)
        })
    }
}

/// Gradient of packed factors: that of `A = P L U`, which is `-G_B X^T` or its transpose, moved to `L` and `U`.
fn lu_gradient(op: &LuSolve, lu: &DTensor, pivots: &DTensor, of_b: &DTensor, x: &DTensor) -> Result<DTensor> {
    let product = if op.left { of_b.matmul(&x.mt()?)? } else { x.mt()?.matmul(of_b)? };
    let of_a = if op.adjoint { product.mt()? } else { product };
    let (p, l, u) = lu.lu_unpack(pivots)?;
    let unpermuted = p.mt()?.matmul(&of_a)?.neg()?;
    let of_l = unpermuted.matmul(&u.mt()?)?;
    let of_u = l.mt()?.matmul(&unpermuted)?;
    of_l.tril(-1)?.add(&of_u.triu(0)?)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LdlSolve;

impl Op for LdlSolve {
    fn name(&self) -> &'static str {
        "linalg_ldl_solve"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        plan_with_pivots(self.name(), inputs, true)
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![linalg::ldl_solve(&inputs[0], &inputs[1], &inputs[2])?])
    }

    /// As in PyTorch.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry { name: "linalg_inv", samples: square_samples, apply: |x| Ok(vec![dominant(&x[0])?.linalg_inv()?]) },
    OpEntry {
        name: "linalg_inv_ex",
        samples: square_samples,
        apply: |x| {
            let (inverse, info) = dominant(&x[0])?.linalg_inv_ex()?;
            Ok(vec![inverse, info])
        },
    },
    OpEntry {
        name: "linalg_solve",
        samples: pair_samples,
        apply: |x| Ok(vec![dominant(&x[0])?.linalg_solve(&x[1], true)?]),
    },
    OpEntry {
        name: "linalg_solve_ex",
        samples: pair_samples,
        apply: |x| {
            let (solution, info) = dominant(&x[0])?.linalg_solve_ex(&x[1], true)?;
            Ok(vec![solution, info])
        },
    },
    OpEntry {
        name: "linalg_solve_triangular",
        samples: pair_samples,
        apply: |x| {
            let a = dominant(&x[0])?;
            let lower = a.linalg_solve_triangular(&x[1], false, true, true)?;
            Ok(vec![lower, a.linalg_solve_triangular(&x[1].transpose(-2, -1)?, true, false, false)?])
        },
    },
    OpEntry {
        name: "linalg_lu_solve",
        samples: pair_samples,
        apply: |x| {
            let (lu, pivots) = dominant(&x[0])?.linalg_lu_factor(true)?;
            let lower = lu.linalg_lu_solve(&pivots, &x[1], true, false)?;
            Ok(vec![lower, lu.linalg_lu_solve(&pivots, &x[1].transpose(-2, -1)?, false, true)?])
        },
    },
    OpEntry {
        name: "linalg_ldl_solve",
        samples: pair_samples,
        apply: |x| {
            let (ld, pivots) = positive(&x[0])?.linalg_ldl_factor()?;
            Ok(vec![ld.linalg_ldl_solve(&pivots, &x[1])?])
        },
    },
    OpEntry {
        name: "cholesky_solve",
        samples: pair_samples,
        apply: |x| {
            let a = dominant(&x[0])?;
            Ok(vec![x[1].cholesky_solve(&a.tril(0)?, false)?, x[1].cholesky_solve(&a.triu(0)?, true)?])
        },
    },
    OpEntry {
        name: "cholesky_inverse",
        samples: square_samples,
        apply: |x| {
            let a = dominant(&x[0])?;
            Ok(vec![a.tril(0)?.cholesky_inverse(false)?, a.triu(0)?.cholesky_inverse(true)?])
        },
    },
    OpEntry {
        name: "linalg_tensorinv",
        samples: || vec![vec![SampleInput::new(&[6, 6], DType::F64)]],
        apply: |x| Ok(vec![dominant(&x[0])?.linalg_tensorinv(1)?]),
    },
    OpEntry {
        name: "linalg_tensorsolve",
        samples: || vec![vec![SampleInput::new(&[6, 6], DType::F64), SampleInput::new(&[6], DType::F64)]],
        apply: |x| {
            let a = dominant(&x[0])?;
            Ok(vec![a.linalg_tensorsolve(&x[1], &[])?, a.linalg_tensorsolve(&x[1], &[0])?])
        },
    },
];
