//! Errors of the functions in [`math`](crate::math), measured on every instruction set of the machine.
//!
//! Every n-th of the 2^32 arguments is checked, with n from `SHARDWISE_ULP_STRIDE`; 1 checks all, in about an hour and a half.
//! The reference is the function in f64, whose error is below a millionth of an ulp of f32.

use std::f64::consts::FRAC_1_SQRT_2;
use std::mem::MaybeUninit;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::math;
use crate::pointwise::{PointwiseF32, PointwiseFn};
use crate::simd::{InstructionSet, run_on};

/// The bound that the documentation states, in ulp.
const BOUND: f64 = 2.0;

/// A function as a kernel, with its shorter form if it has one.
macro_rules! kernel {
    ($N:literal, |$x:pat_param| $value:expr $(, near $name:ident)?) => {{
        #[derive(Clone, Copy)]
        struct Function;
        impl PointwiseFn<$N> for Function {
            $(
                const HAS_NEAR: bool = true;
                #[inline(always)]
                fn f32_near<const FMA: bool>(self, [x]: [f32; 1]) -> f32 {
                    math::near::$name::<FMA>(x)
                }
                #[inline(always)]
                fn is_near(self, [x]: [f32; 1]) -> bool {
                    math::is_near::$name(x)
                }
            )?
            #[inline(always)]
            fn f32<const FMA: bool>(self, $x: [f32; $N]) -> f32 {
                $value
            }
            fn f64(self, x: [f64; $N]) -> f64 {
                x[0]
            }
            fn i64(self, x: [i64; $N]) -> i64 {
                x[0]
            }
        }
        Function
    }};
}

/// The same function without its shorter form.
#[derive(Clone, Copy)]
struct General<F>(F);

impl<const N: usize, F: PointwiseFn<N>> PointwiseFn<N> for General<F> {
    #[inline(always)]
    fn f32<const FMA: bool>(self, x: [f32; N]) -> f32 {
        self.0.f32::<FMA>(x)
    }
    fn f64(self, x: [f64; N]) -> f64 {
        x[0]
    }
    fn i64(self, x: [i64; N]) -> i64 {
        x[0]
    }
}

/// The error in units in the last place of an f32 of the size of the exact result.
fn error(got: f32, exact: f64) -> f64 {
    let rounded = exact as f32;
    if got.to_bits() == rounded.to_bits() || got.is_nan() && rounded.is_nan() {
        return 0.0;
    }
    // Zeros of the wrong sign, and NaN on one side only.
    if got == 0.0 && exact == 0.0 || got.is_nan() || rounded.is_nan() {
        return f64::INFINITY;
    }
    // An infinity counts as the next number after the largest.
    let number = |x: f32| if x.is_infinite() { f64::from(x.signum()) * 2f64.powi(128) } else { f64::from(x) };
    let exponent = (rounded.abs().clamp(f32::MIN_POSITIVE, f32::MAX).to_bits() >> 23) as i32 - 127;
    let ulp = f64::from_bits(((exponent - 23 + 1023) as u64) << 52);
    (number(got) - exact.clamp(-2f64.powi(128), 2f64.powi(128))).abs() / ulp
}

/// The largest error of a function on one instruction set, and where it is.
#[derive(Clone, Copy)]
struct Largest<const N: usize> {
    error: f64,
    argument: [f32; N],
}

/// Arguments per call of a kernel.
const BLOCK: usize = 1 << 13;

/// Measures a function for arguments that come in blocks; `next` fills a block and returns how many arguments it has.
fn measure<const N: usize, F: PointwiseFn<N>>(
    name: &str,
    f: F,
    exact: impl Fn([f64; N]) -> f64,
    mut next: impl FnMut(&mut [[f32; BLOCK]; N]) -> usize,
) {
    let sets = InstructionSet::available();
    let mut largest = vec![Largest { error: 0.0, argument: [0.0; N] }; sets.len()];
    let mut arguments = [[0f32; BLOCK]; N];
    let run = |set, arguments: &[[f32; BLOCK]; N], count: usize| {
        let mut out = vec![MaybeUninit::new(0f32); count];
        let inputs: [&[f32]; N] = std::array::from_fn(|k| &arguments[k][..count]);
        run_on(set, PointwiseF32 { f, inputs, out: &mut out });
        // SAFETY: every element was initialised above.
        let got: Vec<f32> = out.iter().map(|x| unsafe { x.assume_init() }).collect();
        run_on(set, PointwiseF32 { f: General(f), inputs, out: &mut out });
        for (i, general) in out.iter().enumerate() {
            // SAFETY: as above.
            let general = unsafe { general.assume_init() };
            let same = general.to_bits() == got[i].to_bits() || general.is_nan() && got[i].is_nan();
            assert!(same, "{name}{:?}: {:e} and {general:e} in general", inputs.map(|x| x[i]), got[i]);
        }
        got
    };
    loop {
        let count = next(&mut arguments);
        if count == 0 {
            break;
        }
        let got: Vec<Vec<f32>> = sets.iter().map(|(_, set)| run(*set, &arguments, count)).collect();
        for i in 0..count {
            let argument: [f32; N] = std::array::from_fn(|k| arguments[k][i]);
            let exact = exact(argument.map(f64::from));
            for (largest, got) in largest.iter_mut().zip(&got) {
                let error = error(got[i], exact);
                if error > largest.error {
                    *largest = Largest { error, argument };
                }
            }
            // The sets above the baseline execute the same operations.
            if let [_, avx2, avx512] = &got[..] {
                let same = avx2[i].to_bits() == avx512[i].to_bits() || avx2[i].is_nan() && avx512[i].is_nan();
                assert!(same, "{name}{argument:?}: {:e} with AVX2 and {:e} with AVX-512", avx2[i], avx512[i]);
            }
        }
    }
    for ((set, _), largest) in sets.iter().zip(&largest) {
        println!("{name:<20} {set:<9} {:>7.3} ulp at {:?}", largest.error, largest.argument);
        assert!(largest.error <= BOUND, "{name} with {set}: {} ulp at {:?}", largest.error, largest.argument);
    }
}

#[test]
fn functions_of_one_number_are_within_two_ulp() {
    // 4093 is prime, so that all low bits of the mantissa occur. It takes 5 seconds.
    let stride = std::env::var("SHARDWISE_ULP_STRIDE").map_or(4093, |n| n.parse().expect("a number"));
    macro_rules! check {
        ($name:ident $(near $near:ident)?, $exact:expr) => {{
            let exact: fn(f64) -> f64 = $exact;
            check!(@ stringify!($name), kernel!(1, |[x]| math::$name::<FMA>(x) $(, near $near)?), exact);
        }};
        (@ $name:expr, $kernel:expr, $exact:expr) => {{
            let mut bits = 0u64;
            measure($name, $kernel, |[x]| $exact(x), |[block]: &mut [[f32; BLOCK]; 1]| {
                let mut count = 0;
                while count < BLOCK && bits < 1 << 32 {
                    block[count] = f32::from_bits(bits as u32);
                    count += 1;
                    bits += stride;
                }
                count
            });
        }};
    }
    check!(exp near exp, f64::exp);
    check!(exp2, f64::exp2);
    check!(expm1, f64::exp_m1);
    check!(log near log, f64::ln);
    check!(log2 near log2, f64::log2);
    check!(log10 near log10, f64::log10);
    check!(log1p, f64::ln_1p);
    check!(sin near sin, f64::sin);
    check!(cos near cos, f64::cos);
    check!(tan near tan, f64::tan);
    check!(asin, f64::asin);
    check!(atan, f64::atan);
    check!(sinh, f64::sinh);
    check!(cosh, f64::cosh);
    check!(tanh, f64::tanh);
    check!(asinh, libm::asinh);
    check!(sigmoid, |x| 1.0 / (1.0 + (-x).exp()));
    check!(silu, |x| x / (1.0 + (-x).exp()));
    check!(logsigmoid, |x| x.min(0.0) - (-x.abs()).exp().ln_1p());
    check!(softplus, |x| x.max(0.0) + (-x.abs()).exp().ln_1p());
    check!(gelu_tanh, |x| x / (1.0 + (-1.595_769_121_605_730_8 * (x + 0.044715 * x * x * x)).exp()));
    check!(mish, |x| x * (x.max(0.0) + (-x.abs()).exp().ln_1p()).tanh());
    check!(erf, libm::erf);
    check!(erfc, libm::erfc);
    check!(gelu near gelu, |x| 0.5 * x * libm::erfc(-x * FRAC_1_SQRT_2));
    let softplus = |x: f64| (x.max(0.0) + (-x.abs()).exp().ln_1p()) / 0.7;
    check!(@ "softplus 0.7", kernel!(1, |[x]| math::softplus_of_multiple::<FMA>(x, 0.7)), |x: f64| softplus(0.7 * x));
    check!(@ "pow 1.7", kernel!(1, |[x]| math::pow::<FMA>(x, 1.7)), |x: f64| x.powf(1.7));
    check!(@ "pow -3", kernel!(1, |[x]| math::pow::<FMA>(x, -3.0)), |x: f64| x.powf(-3.0));
}

#[test]
fn functions_of_two_numbers_are_within_two_ulp() {
    let special = [0.0, 1.0, 0.5, 2.0, 3.0, 4.0, 1.5, 1e-45, 1e-38, 1e38, 16_777_217.0, 1e9, f32::INFINITY, f32::NAN];
    let special: Vec<f32> = special.iter().flat_map(|x| [*x, -x]).collect();
    macro_rules! check {
        ($name:expr, $kernel:expr, $exact:expr) => {{
            let mut random = StdRng::seed_from_u64(7);
            let mut blocks = 0;
            measure($name, $kernel, $exact, |[a, b]: &mut [[f32; BLOCK]; 2]| {
                for (i, pair) in a.iter_mut().zip(b).enumerate() {
                    let mut any = || f32::from_bits(random.random());
                    let (x, y) = (any(), any());
                    // Pairs of special numbers first; then any two, and those whose results are neither zero nor infinite.
                    (*pair.0, *pair.1) = match i % 4 {
                        _ if blocks == 0 => (special[i / special.len() % special.len()], special[i % special.len()]),
                        0 => (x, y),
                        1 => (x, random.random_range(-4.0..4.0)),
                        2 => (random.random_range(-3.0..3.0), random.random_range(-60.0..60.0)),
                        _ => (random.random_range(0.9..1.1), random.random_range(-900.0..900.0)),
                    };
                }
                blocks += 1;
                if blocks <= 60 { BLOCK } else { 0 }
            });
        }};
    }
    check!("pow", kernel!(2, |[x, y]| math::pow::<FMA>(x, f64::from(y))), |[x, y]: [f64; 2]| x.powf(y));
    check!("atan2", kernel!(2, |[x, y]| math::atan2::<FMA>(x, y)), |[x, y]: [f64; 2]| x.atan2(y));
    check!("hypot", kernel!(2, |[x, y]| math::hypot::<FMA>(x, y)), |[x, y]: [f64; 2]| x.hypot(y));
}
