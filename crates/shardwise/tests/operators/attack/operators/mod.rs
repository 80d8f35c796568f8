//! The operators under test: per operator how a call is drawn and run. `scripts/attack_oracle.py` makes the same
//! calls with PyTorch.

mod lookup;
mod pointwise;
mod product;
mod reduce;
mod shape;

use serde_json::Value;
use shardwise::error::ErrorKind;
use shardwise::prelude::*;

use crate::attack::draw::Draw;
use crate::attack::numbers::Input;

pub(crate) struct Operator {
    /// The name of the method of [`DTensor`].
    pub(crate) name: &'static str,
    pub(crate) draw: fn(&mut Draw) -> Drawn,
    pub(crate) apply: fn(&[DTensor], &Attrs<'_>) -> Result<Vec<DTensor>>,
}

/// Inputs and arguments of a call.
pub(crate) type Drawn = (Vec<Input>, Value);

/// Compared by vectors that are recorded from PyTorch's operator database.
const OPINFO: &str = "conformance opinfo compares values and gradients with PyTorch";

/// Operators of the library that this suite does not cover, and why.
pub(crate) const LEFT_OUT: &[(&str, &str)] = &[
    (
        "dropout",
        "its elements are drawn from another generator than PyTorch's; tests/communication/random_draws.rs compares them",
    ),
    ("masked_select", "its shape depends on elements; tests/operators/indexing.rs compares it"),
    ("nonzero", "its shape depends on elements; tests/operators/indexing.rs compares it"),
    ("expert_mlp", "PyTorch has no such operator; the recorded models of tests/conformance/models.rs have its values"),
    ("batch_statistics", "mean and var, which are attacked, of every channel"),
    (
        "add_layer_norm",
        "add and layer_norm, which are attacked, in one pass; tests/operators/residual_norm.rs compares it with both",
    ),
    (
        "grouped_mm",
        "matmul, which is attacked, of every group; tests/operators/pytorch/grouped.rs compares it with both and with PyTorch",
    ),
    (
        "add_rms_norm",
        "add and rms_norm, which are attacked, in one pass; tests/operators/residual_norm.rs compares it with both",
    ),
    ("conv3d", "tests/operators/convolutions.rs compares it with PyTorch for every placement"),
    ("conv_transpose1d", "tests/operators/convolutions.rs compares it with PyTorch for every placement"),
    ("conv_transpose2d", "tests/operators/convolutions.rs compares it with PyTorch for every placement"),
    ("conv_transpose3d", "tests/operators/convolutions.rs compares it with PyTorch for every placement"),
    ("cholesky_inverse", OPINFO),
    ("cholesky_solve", OPINFO),
    ("digamma", OPINFO),
    ("erfinv", OPINFO),
    ("i0", OPINFO),
    ("lgamma", OPINFO),
    ("linalg_cholesky", OPINFO),
    ("linalg_cholesky_ex", OPINFO),
    ("linalg_cond", OPINFO),
    ("linalg_cross", OPINFO),
    ("linalg_det", OPINFO),
    ("linalg_eigh", OPINFO),
    ("linalg_eigvalsh", OPINFO),
    ("linalg_householder_product", OPINFO),
    ("linalg_inv", OPINFO),
    ("linalg_inv_ex", OPINFO),
    ("linalg_ldl_factor", OPINFO),
    ("linalg_ldl_solve", OPINFO),
    ("linalg_lstsq", OPINFO),
    ("linalg_lu", OPINFO),
    ("linalg_lu_factor", OPINFO),
    ("linalg_lu_factor_ex", OPINFO),
    ("linalg_lu_solve", OPINFO),
    ("linalg_matrix_norm", OPINFO),
    ("linalg_matrix_power", OPINFO),
    ("linalg_matrix_rank", OPINFO),
    ("linalg_matrix_sqrth", OPINFO),
    ("linalg_multi_dot", OPINFO),
    ("linalg_norm", OPINFO),
    ("linalg_pinv", OPINFO),
    ("linalg_polar", OPINFO),
    ("linalg_qr", OPINFO),
    ("linalg_slogdet", OPINFO),
    ("linalg_solve", OPINFO),
    ("linalg_solve_ex", OPINFO),
    ("linalg_solve_triangular", OPINFO),
    ("linalg_svd", OPINFO),
    ("linalg_svdvals", OPINFO),
    ("linalg_tensorinv", OPINFO),
    ("linalg_tensorsolve", OPINFO),
    ("linalg_vander", OPINFO),
    ("linalg_vecdot", OPINFO),
    ("linalg_vector_norm", OPINFO),
    ("logdet", OPINFO),
    ("lu_unpack", OPINFO),
    ("matrix_exp", OPINFO),
    ("ormqr", OPINFO),
    ("sinc", OPINFO),
    ("special_airy_ai", OPINFO),
    ("special_bessel_j0", OPINFO),
    ("special_bessel_j1", OPINFO),
    ("special_bessel_y0", OPINFO),
    ("special_bessel_y1", OPINFO),
    ("special_entr", OPINFO),
    ("special_erfcx", OPINFO),
    ("special_i0e", OPINFO),
    ("special_i1", OPINFO),
    ("special_i1e", OPINFO),
    ("special_log_ndtr", OPINFO),
    ("special_modified_bessel_k0", OPINFO),
    ("special_modified_bessel_k1", OPINFO),
    ("special_ndtr", OPINFO),
    ("special_ndtri", OPINFO),
    ("special_scaled_modified_bessel_k0", OPINFO),
    ("special_scaled_modified_bessel_k1", OPINFO),
    ("special_spherical_bessel_j0", OPINFO),
    ("acos", OPINFO),
    ("acosh", OPINFO),
    ("atanh", OPINFO),
    ("angle", OPINFO),
    ("deg2rad", OPINFO),
    ("rad2deg", OPINFO),
    ("frexp_exponent", OPINFO),
    ("bitwise_not", OPINFO),
    ("isposinf", OPINFO),
    ("isneginf", OPINFO),
    ("fmax", OPINFO),
    ("fmin", OPINFO),
    ("clamp_min", OPINFO),
    ("clamp_max", OPINFO),
    ("copysign", OPINFO),
    ("nextafter", OPINFO),
    ("logaddexp", OPINFO),
    ("logaddexp2", OPINFO),
    ("xlogy", OPINFO),
    ("heaviside", OPINFO),
    ("gcd", OPINFO),
    ("lcm", OPINFO),
    ("bitwise_left_shift", OPINFO),
    ("bitwise_right_shift", OPINFO),
];

/// Composed operators that the table of calls does not call, and where they are compared instead.
pub(crate) const NOT_CALLED: &[(&str, &str)] = &[
    ("bernoulli", "drawn from another generator than PyTorch's; tests/operators/pytorch/dtensor.rs has its scenarios"),
    (
        "multinomial",
        "drawn from another generator than PyTorch's; tests/operators/pytorch/tensors.rs has its scenarios",
    ),
    ("atleast_2d", "the table passes it by name, without a call"),
    ("atleast_3d", "the table passes it by name, without a call"),
    ("linear_activation", "tests/operators/linear_activation.rs compares it with its parts"),
    ("cross_entropy_weighted", "cross_entropy_with calls it"),
    ("cross_entropy_probabilities", "cross_entropy_with calls it"),
];

pub(crate) fn all() -> Vec<&'static Operator> {
    let tables = [pointwise::TABLE, reduce::TABLE, shape::TABLE, lookup::TABLE, product::TABLE];
    tables.iter().flat_map(|table| table.iter()).flat_map(|table| table.iter()).collect()
}

/// The arguments of a call by name.
pub(crate) struct Attrs<'a>(pub(crate) &'a Value);

impl Attrs<'_> {
    pub(crate) fn number(&self, key: &str) -> f64 {
        match &self.0[key] {
            // JSON has no infinities
            Value::String(text) => text.parse().expect("a number"),
            other => other.as_f64().expect("a number"),
        }
    }

    pub(crate) fn maybe_number(&self, key: &str) -> Option<f64> {
        self.0[key].as_f64()
    }

    pub(crate) fn flag(&self, key: &str) -> bool {
        self.0[key].as_bool().unwrap_or(false)
    }

    pub(crate) fn text(&self, key: &str) -> &str {
        self.0[key].as_str().unwrap_or_default()
    }

    pub(crate) fn dim(&self, key: &str) -> isize {
        self.0[key].as_i64().expect("an integer") as isize
    }

    pub(crate) fn maybe_dim(&self, key: &str) -> Option<isize> {
        self.0[key].as_i64().map(|d| d as isize)
    }

    pub(crate) fn dims(&self, key: &str) -> Vec<isize> {
        self.0[key].as_array().expect("a list").iter().filter_map(Value::as_i64).map(|d| d as isize).collect()
    }

    /// A count; negative ones cannot be expressed in a call, and are rejected as its type would reject them.
    pub(crate) fn count(&self, key: &str) -> Result<usize> {
        count(self.dim(key))
    }

    pub(crate) fn counts(&self, key: &str) -> Result<Vec<usize>> {
        self.dims(key).into_iter().map(count).collect()
    }

    pub(crate) fn dtype(&self, key: &str) -> Result<DType> {
        self.text(key).parse().map_err(|_| Error::other(format!("type {}", self.text(key))))
    }
}

fn count(n: isize) -> Result<usize> {
    let refused = |_| ErrorKind::Argument.error("argument", n, "a number that usize holds", "count from 0");
    usize::try_from(n).map_err(refused)
}

/// One output.
fn one(output: DTensor) -> Vec<DTensor> {
    vec![output]
}

/// Two outputs.
fn two((a, b): (DTensor, DTensor)) -> Vec<DTensor> {
    vec![a, b]
}
