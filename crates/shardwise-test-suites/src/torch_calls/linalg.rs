//! `torch.linalg` and the older names of its operators.

use serde_json::Value;
use shardwise::ops::{MatrixNorm, ToleranceOptions};
use shardwise::prelude::*;

use super::arguments::{Arguments, OperandArgument, number_of};
use super::calls::{CallOutput, IntoOutputs, calls};

calls! {
    "linalg.cholesky(A, *, upper=False)" => |a| a.tensor("A")?.linalg_cholesky(a.flag("upper"));
    "linalg.cholesky_ex(A, *, upper=False, check_errors=False)" => |a| a.tensor("A")?.linalg_cholesky_ex(a.flag("upper"));
    "linalg.cond(A, p=None)" => |a| a.tensor("A")?.linalg_cond(order(a, "p"));
    "linalg.cross(input, other, *, dim=-1)" => |a| a.tensor("input")?.linalg_cross(&a.tensor("other")?, a.int("dim")?);
    "linalg.det(A)" => |a| a.tensor("A")?.linalg_det();
    "linalg.diagonal(A, *, offset=0, dim1=-2, dim2=-1)" => |a|
        a.tensor("A")?.diagonal_of(a.int("offset")?, [a.int("dim1")?, a.int("dim2")?]);
    "linalg.eigh(A, UPLO='L')" => |a| a.tensor("A")?.linalg_eigh(is_upper(a));
    "linalg.eigvalsh(A, UPLO='L')" => |a| a.tensor("A")?.linalg_eigvalsh(is_upper(a));
    "linalg.householder_product(A, tau)" => |a| a.tensor("A")?.linalg_householder_product(&a.tensor("tau")?);
    "linalg.inv(A)" => |a| a.tensor("A")?.linalg_inv();
    "linalg.inv_ex(A, *, check_errors=False)" => |a| a.tensor("A")?.linalg_inv_ex();
    "linalg.ldl_factor(A, *, hermitian=False)" => |a| a.tensor("A")?.linalg_ldl_factor();
    "linalg.ldl_solve(LD, pivots, B, *, hermitian=False)" => |a|
        a.tensor("LD")?.linalg_ldl_solve(&a.tensor("pivots")?, &a.tensor("B")?);
    "linalg.lstsq(A, B, rcond=None, *, driver=None)" => |a| least_squares(a);
    "linalg.lu(A, *, pivot=True)" => |a| a.tensor("A")?.linalg_lu(a.flag("pivot"));
    "linalg.lu_factor(A, *, pivot=True)" => |a| a.tensor("A")?.linalg_lu_factor(a.flag("pivot"));
    "linalg.lu_factor_ex(A, *, pivot=True, check_errors=False)" => |a| a.tensor("A")?.linalg_lu_factor_ex(a.flag("pivot"));
    "linalg.lu_solve(LU, pivots, B, *, left=True, adjoint=False)" => |a|
        a.tensor("LU")?.linalg_lu_solve(&a.tensor("pivots")?, &a.tensor("B")?, a.flag("left"), a.flag("adjoint"));
    "linalg.matrix_exp(A)" => |a| a.tensor("A")?.matrix_exp();
    "linalg.matrix_norm(A, ord='fro', dim=[-2,-1], keepdim=False, *, dtype=None)" => |a| {
        let x = a.converted(&a.tensor("A")?, "dtype")?;
        x.linalg_matrix_norm(order(a, "ord").unwrap_or_default(), pair(&a.ints("dim"))?, a.flag("keepdim"))
    };
    "linalg.matrix_power(A, n)" => |a| a.tensor("A")?.linalg_matrix_power(a.int("n")? as i64);
    "linalg.matrix_rank(A, tol=None, hermitian=False, *, atol=None, rtol=None)" => |a| {
        let (atol, rtol) = (tolerance(a, if a.has("tol") { "tol" } else { "atol" })?, tolerance(a, "rtol")?);
        // The older argument replaces both.
        let none = OperandArgument::Number(0.0.into());
        let rtol = if a.has("tol") { Some(none) } else { rtol };
        a.tensor("A")?.linalg_matrix_rank(options(&atol, &rtol), a.flag("hermitian"))
    };
    "linalg.matrix_sqrth(A)" => |a| a.tensor("A")?.linalg_matrix_sqrth();
    "linalg.multi_dot(tensors)" => |a| DTensor::linalg_multi_dot(&a.tensors("tensors")?.iter().collect::<Vec<_>>());
    "linalg.norm(A, ord=None, dim=None, keepdim=False, *, dtype=None)" => |a| {
        let dims = a.ints("dim");
        let x = a.converted(&a.tensor("A")?, "dtype")?;
        x.linalg_norm(order(a, "ord"), a.has("dim").then_some(dims.as_slice()), a.flag("keepdim"))
    };
    "linalg.pinv(A, rcond=None, hermitian=False, *, atol=None, rtol=None)" => |a| {
        // This entry of the database has two factors of the matrix as arguments.
        if a.variant() == "singular" {
            let other = a.tensor_of(&a.value("rcond")).expect("the second factor").tensor.transpose(-2, -1)?;
            return Ok(a.tensor("A")?.matmul(&other)?.linalg_pinv(ToleranceOptions::default(), false)?.into_outputs());
        }
        let rtol = tolerance(a, if a.has("rcond") { "rcond" } else { "rtol" })?;
        a.tensor("A")?.linalg_pinv(options(&tolerance(a, "atol")?, &rtol), a.flag("hermitian"))
    };
    "linalg.polar(A)" => |a| a.tensor("A")?.linalg_polar();
    "linalg.qr(A, mode='reduced')" => |a| a.tensor("A")?.linalg_qr(a.text("mode").as_deref() == Some("complete"));
    "linalg.slogdet(A)" => |a| a.tensor("A")?.linalg_slogdet();
    "linalg.solve(A, B, *, left=True)" => |a| a.tensor("A")?.linalg_solve(&a.tensor("B")?, a.flag("left"));
    "linalg.solve_ex(A, B, *, left=True, check_errors=False)" => |a|
        a.tensor("A")?.linalg_solve_ex(&a.tensor("B")?, a.flag("left"));
    "linalg.solve_triangular(A, B, *, upper, left=True, unitriangular=False)" => |a|
        a.tensor("A")?.linalg_solve_triangular(&a.tensor("B")?, a.flag("upper"), a.flag("left"), a.flag("unitriangular"));
    "linalg.svd(A, full_matrices=True, *, driver=None)" => |a| a.tensor("A")?.linalg_svd(a.flag("full_matrices"));
    "linalg.svdvals(A, *, driver=None)" => |a| a.tensor("A")?.linalg_svdvals();
    "linalg.tensorinv(A, ind=2)" => |a| a.tensor("A")?.linalg_tensorinv(a.size("ind")?);
    "linalg.tensorsolve(A, B, dims=None)" => |a| a.tensor("A")?.linalg_tensorsolve(&a.tensor("B")?, &a.ints("dims"));
    "linalg.vander(x, N=None)" => |a| a.tensor("x")?.linalg_vander(a.optional_int("N").map(|n| n as usize));
    "linalg.vecdot(x, y, *, dim=-1)" => |a| a.tensor("x")?.linalg_vecdot(&a.tensor("y")?, a.int("dim")?);
    "linalg.vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None)" => |a| {
        let x = a.converted(&a.tensor("x")?, "dtype")?;
        x.linalg_vector_norm(a.float("ord")?, &a.ints("dim"), a.flag("keepdim"))
    };
    "cholesky_inverse(L, upper=False)" => |a| a.tensor("L")?.cholesky_inverse(a.flag("upper"));
    "cholesky_solve(B, L, upper=False)" => |a| a.tensor("B")?.cholesky_solve(&a.tensor("L")?, a.flag("upper"));
    "logdet(input)" => |a| a.tensor("input")?.logdet();
    "lu(A, pivot=True, get_infos=False)" => |a| {
        let (lu, pivots, info) = a.tensor("A")?.linalg_lu_factor_ex(a.flag("pivot"))?;
        Ok::<_, Error>(if a.flag("get_infos") { vec![lu, pivots, info] } else { vec![lu, pivots] })
    };
    "lu_solve(b, LU_data, LU_pivots)" => |a|
        a.tensor("LU_data")?.linalg_lu_solve(&a.tensor("LU_pivots")?, &a.tensor("b")?, true, false);
    "lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True)" => |a|
        a.tensor("LU_data")?.lu_unpack(&a.tensor("LU_pivots")?);
    "matrix_exp(A)" => |a| a.tensor("A")?.matrix_exp();
    "ormqr(input, tau, other, left=True, transpose=False)" => |a|
        a.tensor("input")?.ormqr(&a.tensor("tau")?, &a.tensor("other")?, a.flag("left"), a.flag("transpose"));
    "pinverse(input, rcond=1e-15)" => |a| {
        let rtol = tolerance(a, "rcond")?;
        a.tensor("input")?.linalg_pinv(options(&None, &rtol), false)
    };
    "svd(input, some=True, compute_uv=True)" => |a| {
        let (u, s, vh) = a.tensor("input")?.linalg_svd(!a.flag("some"))?;
        let (u, vh) = if a.flag("compute_uv") { (u, vh) } else { (u.zeros_like()?, vh.zeros_like()?) };
        Ok::<_, Error>((u, s, vh.transpose(-2, -1)?))
    };
    "triangular_solve(b, A, upper=True, transpose=False, unitriangular=False)" => |a| {
        let triangle = a.tensor("A")?;
        let (of, upper) = if a.flag("transpose") { (triangle.transpose(-2, -1)?, !a.flag("upper")) } else { (triangle.clone(), a.flag("upper")) };
        Ok::<_, Error>((of.linalg_solve_triangular(&a.tensor("b")?, upper, true, a.flag("unitriangular"))?, triangle))
    };
}

/// A norm as PyTorch names it: a number, `"fro"` or `"nuc"`.
pub(super) fn order(a: &Arguments<'_>, name: &str) -> Option<MatrixNorm> {
    match &a.value(name) {
        Value::String(text) if text == "nuc" => Some(MatrixNorm::Nuclear),
        Value::String(_) => Some(MatrixNorm::Frobenius),
        number => number_of(number).map(|n| MatrixNorm::Order(n.to_f64())),
    }
}

fn is_upper(a: &Arguments<'_>) -> bool {
    a.text("UPLO").as_deref() == Some("U")
}

fn pair(dims: &[isize]) -> Result<[isize; 2]> {
    dims.try_into().map_err(|_| Error::other(format!("{dims:?}, where two dimensions are needed")))
}

/// A tolerance, if it is given.
fn tolerance(a: &Arguments<'_>, name: &str) -> Result<Option<OperandArgument>> {
    if a.has(name) { a.operand(name).map(Some) } else { Ok(None) }
}

fn options<'a>(atol: &'a Option<OperandArgument>, rtol: &'a Option<OperandArgument>) -> ToleranceOptions<'a> {
    let operand = |of: &'a Option<OperandArgument>| of.as_ref().map(OperandArgument::operand);
    ToleranceOptions { atol: operand(atol), rtol: operand(rtol) }
}

fn least_squares(a: &Arguments<'_>) -> Result<Vec<CallOutput>> {
    // One entry of the database takes the driver by position and returns the first two results.
    let short = a.variant() == "grad_oriented";
    let found = a.tensor("A")?.linalg_lstsq(&a.tensor("B")?, a.optional_float("rcond"))?;
    let mut all = vec![found.solution, found.residuals, found.rank, found.singular_values];
    all.truncate(if short { 2 } else { 4 });
    Ok(all.into_outputs())
}
