//! Special functions of f64, one family per file. f32 is computed through f64 and rounded once, except for polynomials.
//!
//! Errors are a few units in the last place, relative to the result or, near its zeros, to the largest value nearby. Poles, NaN and
//! infinite arguments give what PyTorch gives.

mod airy;
mod bessel;
mod gamma;
mod modified_bessel;
mod normal;
mod polynomials;
#[cfg(test)]
mod tests;

pub use airy::airy_ai;
pub use bessel::{j0, j1, spherical_j0, y0, y1};
pub use gamma::{digamma, igamma, igammac, lgamma, polygamma, trigamma, trigamma_f32, zeta};
pub use modified_bessel::{i0, i0e, i1, i1e, k0, k0e, k1, k1e};
pub use normal::{entr, erfcx, erfinv, log_ndtr, ndtr, ndtri, sinc, xlog1py};
pub use polynomials::{
    Field, chebyshev_t, chebyshev_u, chebyshev_v, chebyshev_w, hermite_h, hermite_he, laguerre_l, legendre_p,
};
