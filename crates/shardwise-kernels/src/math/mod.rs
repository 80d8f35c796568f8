//! Transcendental functions and activations of f32, written without branches so that loops over them become vector
//! instructions.
//!
//! Each is within 2 units in the last place (ulp) of the exact result over the whole range, on every instruction set;
//! `accuracy.rs` measures it. Zeros, infinities and NaN give what the function in f64 gives.
//!
//! `FMA` is whether the loop is compiled for a processor with fused multiply-add; without it, `mul_add` would be a library
//! call. Functions that need it for their accuracy are computed in f64 there. So results with and without it may differ, each
//! within its 2 ulp. Coefficients are minimax fits on the interval that a comment states.
//!
//! Where rare arguments need more work (subnormal numbers, an angle of many turns), a function has a shorter form in
//! [`near`] for ordinary arguments, with the same bits; [`is_near`] says which. A loop checks a block of arguments and takes the
//! shorter form if it can.

mod activation;
mod division;
mod error_function;
mod exponential;
mod hyperbolic;
mod inverse_trigonometric;
mod logarithm;
mod power;
mod trigonometric;
mod wide;

pub use activation::{gelu_tanh, logsigmoid, mish, sigmoid, silu, softplus, softplus_of_multiple};
pub use error_function::{erf, erfc, gelu};
pub use exponential::{exp, exp2, expm1};
pub use hyperbolic::{asinh, cosh, sinh, tanh};
pub use inverse_trigonometric::{asin, atan, atan2};
pub use logarithm::{log, log1p, log2, log10};
pub use power::{hypot, pow};
pub use trigonometric::{cos, sin, tan};

/// Forms of functions for arguments that [`is_near`] accepts, with the bits of the general functions.
pub mod near {
    pub use super::division::fmod_near as fmod;
    pub use super::error_function::gelu_near as gelu;
    pub use super::exponential::exp_near as exp;
    pub use super::logarithm::{log_near as log, log2_near as log2, log10_near as log10};
    pub use super::trigonometric::{cos_near as cos, sin_near as sin, tan_near as tan};
}

/// Whether the form of a function in [`near`] may be used for an argument.
pub mod is_near {
    pub use super::division::is_fmod_near as fmod;
    pub use super::error_function::is_gelu_near as gelu;
    pub use super::exponential::is_exp_near as exp;
    pub use super::logarithm::{is_normal as log, is_normal as log2, is_normal as log10};
    pub use super::trigonometric::{is_few_turns as cos, is_few_turns as sin, is_few_turns as tan};
}

#[inline(always)]
fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn fma_wide<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Evaluates a polynomial by Horner's rule, highest coefficient first.
#[inline(always)]
fn polynomial<const FMA: bool, const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let mut sum = coefficients[0];
    for &c in &coefficients[1..] {
        sum = fma::<FMA>(sum, x, c);
    }
    sum
}

/// Evaluates a polynomial in f64, highest coefficient first.
#[inline(always)]
fn polynomial_wide<const FMA: bool, const N: usize>(x: f64, coefficients: [f64; N]) -> f64 {
    let mut sum = coefficients[0];
    for &c in &coefficients[1..] {
        sum = fma_wide::<FMA>(sum, x, c);
    }
    sum
}

/// `min(x, bound)` that propagates NaN.
#[inline(always)]
fn at_most(x: f32, bound: f32) -> f32 {
    if x > bound { bound } else { x }
}

/// `max(x, bound)` that propagates NaN.
#[inline(always)]
fn at_least(x: f32, bound: f32) -> f32 {
    if x < bound { bound } else { x }
}
