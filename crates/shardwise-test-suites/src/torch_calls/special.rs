//! Special functions of `torch.special`, and the older names of them.

use shardwise::prelude::*;

use super::arguments::Arguments;
use super::calls::calls;

calls! {
    "digamma(input)" => |a| a.tensor("input")?.digamma();
    "erfinv(input)" => |a| a.tensor("input")?.erfinv();
    "i0(input)" => |a| a.tensor("input")?.i0();
    "igamma(input, other)" => |a| a.tensor("input")?.igamma(&a.tensor("other")?);
    "igammac(input, other)" => |a| a.tensor("input")?.igammac(&a.tensor("other")?);
    "lgamma(input)" => |a| a.tensor("input")?.lgamma();
    "mvlgamma(input, p)" => |a| a.tensor("input")?.mvlgamma(a.size("p")?);
    "polygamma(input, n)" => |a| a.tensor("input")?.polygamma(a.size("n")? as u32);
    "sinc(input)" => |a| a.tensor("input")?.sinc();
    "special.airy_ai(input)" => |a| a.tensor("input")?.special_airy_ai();
    "special.bessel_j0(input)" => |a| a.tensor("input")?.special_bessel_j0();
    "special.bessel_j1(input)" => |a| a.tensor("input")?.special_bessel_j1();
    "special.bessel_y0(input)" => |a| a.tensor("input")?.special_bessel_y0();
    "special.bessel_y1(input)" => |a| a.tensor("input")?.special_bessel_y1();
    "special.chebyshev_polynomial_t(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_chebyshev_polynomial_t(a.operand("n")?.operand());
    "special.chebyshev_polynomial_u(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_chebyshev_polynomial_u(a.operand("n")?.operand());
    "special.chebyshev_polynomial_v(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_chebyshev_polynomial_v(a.operand("n")?.operand());
    "special.chebyshev_polynomial_w(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_chebyshev_polynomial_w(a.operand("n")?.operand());
    "special.entr(input)" => |a| a.tensor("input")?.special_entr();
    "special.erfcx(input)" => |a| a.tensor("input")?.special_erfcx();
    "special.hermite_polynomial_h(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_hermite_polynomial_h(a.operand("n")?.operand());
    "special.hermite_polynomial_he(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_hermite_polynomial_he(a.operand("n")?.operand());
    "special.i0e(input)" => |a| a.tensor("input")?.special_i0e();
    "special.i1(input)" => |a| a.tensor("input")?.special_i1();
    "special.i1e(input)" => |a| a.tensor("input")?.special_i1e();
    "special.laguerre_polynomial_l(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_laguerre_polynomial_l(a.operand("n")?.operand());
    "special.legendre_polynomial_p(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_legendre_polynomial_p(a.operand("n")?.operand());
    "special.log_ndtr(input)" => |a| a.tensor("input")?.special_log_ndtr();
    "special.modified_bessel_i0(input)" => |a| a.tensor("input")?.i0();
    "special.modified_bessel_i1(input)" => |a| a.tensor("input")?.special_i1();
    "special.modified_bessel_k0(input)" => |a| a.tensor("input")?.special_modified_bessel_k0();
    "special.modified_bessel_k1(input)" => |a| a.tensor("input")?.special_modified_bessel_k1();
    "special.ndtr(input)" => |a| a.tensor("input")?.special_ndtr();
    "special.ndtri(input)" => |a| a.tensor("input")?.special_ndtri();
    "special.polygamma(input, n)" => |a| a.tensor("input")?.polygamma(a.size("n")? as u32);
    "special.scaled_modified_bessel_k0(input)" => |a| a.tensor("input")?.special_scaled_modified_bessel_k0();
    "special.scaled_modified_bessel_k1(input)" => |a| a.tensor("input")?.special_scaled_modified_bessel_k1();
    "special.shifted_chebyshev_polynomial_t(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_shifted_chebyshev_polynomial_t(a.operand("n")?.operand());
    "special.shifted_chebyshev_polynomial_u(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_shifted_chebyshev_polynomial_u(a.operand("n")?.operand());
    "special.shifted_chebyshev_polynomial_v(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_shifted_chebyshev_polynomial_v(a.operand("n")?.operand());
    "special.shifted_chebyshev_polynomial_w(x, n)" => |a| a.as_tensor("x", &beside(a)?)?.special_shifted_chebyshev_polynomial_w(a.operand("n")?.operand());
    "special.spherical_bessel_j0(input)" => |a| a.tensor("input")?.special_spherical_bessel_j0();
    "special.xlog1py(input, other)" => |a| a.as_tensor("input", &other(a)?)?.special_xlog1py(a.operand("other")?.operand());
    "special.zeta(input, other)" => |a| a.as_tensor("input", &other(a)?)?.special_zeta(a.operand("other")?.operand());
}

/// The tensor among the arguments of a polynomial, for the type of a number that goes with it.
fn beside(a: &Arguments<'_>) -> Result<DTensor> {
    if a.is_tensor("x") { a.tensor("x") } else { a.tensor("n") }
}

/// The tensor among two operands.
fn other(a: &Arguments<'_>) -> Result<DTensor> {
    if a.is_tensor("input") { a.tensor("input") } else { a.tensor("other") }
}
