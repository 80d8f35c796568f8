//! Complex numbers compared with PyTorch's, in every layout. Values recorded from PyTorch 2.15 in complex128.

use std::f64::consts::{FRAC_PI_4, PI, SQRT_2};

use shardwise::ops::{ComplexTensor, FftNorm};
use shardwise::prelude::*;
use shardwise_test_suites::counting::{counted, counted_both_ways};

use crate::pytorch::{list, on};

/// Real and imaginary parts that are multiples of 1 / `divisor`.
fn parts(mesh: &DeviceMesh, shape: &[usize], by: [usize; 2], divisor: f64, placement: &Placement) -> Result<DTensor> {
    DTensor::from_fn(shape, DType::F64, mesh, [placement.clone()], |index| {
        let flat = index.iter().zip(shape).fold(0, |flat, (i, n)| flat * n + i);
        (((flat * by[0] + by[1]) % 23) as f64 - 11.0) / divisor
    })
}

fn assert_near(found: &DTensor, expected: &[f64], what: &str) -> Result<()> {
    let found = list(found)?;
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-8 * b.abs().max(1.0);
    assert!(found.len() == expected.len() && found.iter().zip(expected).all(near), "{what}:\n{found:?}\n{expected:?}");
    Ok(())
}

#[rustfmt::skip]
const PRODUCT: [f64; 24] = [
    0.5859375, 0.390625, 0.390625, 0.234375, 0.015625, 0.5, -1.0546875, -0.0390625, -0.3515625, 0.078125, -0.546875, 0.4375,
    -0.8984375, 0.4296875, -0.1953125, -0.078125, -1.109375, 0.375, 0.15625, -0.8984375, -0.0390625, -0.234375, 0.125, -1.125,
];
#[rustfmt::skip]
const QUOTIENT: [f64; 24] = [
    1.36, -0.48, -4.0, -2.4, -0.756097561, 0.1951219512, -1.36, 1.68, 3.6, -0.8, -0.8536585366, -0.6829268293,
    -0.4, 2.0, 2.0, 0.8, -0.9512195122, -1.56097561, -1.28, -1.36, 0.4, 2.4, 1.756097561, -0.1951219512,
];
#[rustfmt::skip]
const ABS: [f64; 12] = [
    1.007782219, 1.457737974, 0.625, 1.510380747, 1.152443057, 0.875, 1.425219281, 0.6731456009, 1.463087489, 1.305038314, 0.7603453163,
    SQRT_2,
];
#[rustfmt::skip]
const ANGLE: [f64; 12] = [
    -3.017237659, -1.030376827, 2.214297436, -0.4266274931, 1.352127381, PI, -0.9097531579, 1.951302704, -2.79282165, 1.279339532,
    2.976443976, -FRAC_PI_4,
];
#[rustfmt::skip]
const MATMUL: [f64; 40] = [
    1.90625, -1.546875, 1.875, -1.359375, 1.84375, -1.171875, 1.8125, -0.984375, 1.78125, -0.796875,
    -1.0625, 3.40625, -1.09375, 3.25, -1.125, 3.09375, -1.15625, 2.9375, -1.1875, 2.78125,
    -1.875, 2.96875, -1.90625, 3.1875, -1.9375, 3.40625, -1.96875, 3.625, -2.0, 3.84375,
    -1.96875, -2.140625, -2.0, -2.265625, -2.03125, -2.390625, -2.0625, -2.515625, -2.09375, -2.640625,
];
const LOSS: f64 = 73.0402265272271;
#[rustfmt::skip]
const GRADIENTS: [&[f64]; 3] = [
    &[
        1.287168814, -6.226073735, 16.64667525, -13.71742211, -4.140258398, -5.120919706, -0.3375291244, -1.395681249, -8.853586125,
        4.515349797, 1.18419934, -6.104545657, -3.289815809, -12.88094251, 6.840190091, -0.2561336077, -5.852145328, -10.57146648,
        7.949359004, 16.13913231, -17.45332469, 24.23546523, 12.53633818, 13.8047458,
    ],
    &[26.03995031, -14.06904118, 0.2837689151, -123.7769393, -42.90087036, -42.50798563],
    &[
        -5.0473311, 2.078948957, -5.802439771, 2.115364932, -6.536829534, 2.159319223, -7.238429575, 2.218790374, -7.898156549,
        2.300407814, 1.733417011, -3.928567057, 2.179258013, -4.736615111, 2.590568426, -5.598200625, 2.956081292, -6.5011346,
        3.265816031, -7.433485513, 3.981383154, 1.992639998, 4.375956417, 2.378308062, 4.75001452, 2.743049532, 5.101029963,
        3.074985378, 5.427969796, 3.365053218,
    ],
];

#[test]
fn arithmetic_and_gradients_are_those_of_pytorch_in_every_layout() {
    on(3, |world| {
        let mesh = world.mesh([("a", 3)])?;
        let sum = Partial(ReduceOp::Sum);
        let places = [
            [Replicate, Replicate, Replicate],
            [Shard(0), Replicate, Shard(1)],
            [Shard(1), Shard(0), Shard(0)],
            [sum, Replicate, Replicate],
        ];
        for placements in places {
            let what = format!("{placements:?}");
            let [p, q, r] = &placements;
            // A partial leaf is a redistributed one: its terms add up to the numbers.
            let leaf = |shape: &[usize], by, divisor, placement: &Placement| match placement.is_partial() {
                true => parts(&mesh, shape, by, divisor, &Replicate)?.redistribute([placement.clone()]),
                false => parts(&mesh, shape, by, divisor, placement),
            };
            let leaves = [
                leaf(&[4, 3, 2], [7, 3], 8.0, p)?.requires_grad(),
                leaf(&[3, 2], [5, 1], 16.0, q)?.requires_grad(),
                leaf(&[3, 5, 2], [11, 4], 8.0, r)?.requires_grad(),
            ];
            let [a, b, m] = leaves.each_ref().map(|leaf| leaf.view_as_complex());
            let (a, b, m) = (a?, b?, m?);
            assert_eq!((a.shape(), b.ndim(), m.dtype()), ([4, 3].as_slice(), 1, DType::F64));
            assert_near((&a * &b)?.view_as_real(), &PRODUCT, &what)?;
            assert_near((&a / &b)?.view_as_real(), &QUOTIENT, &what)?;
            assert_near(&a.abs()?, &ABS, &what)?;
            assert_near(&a.angle()?, &ANGLE, &what)?;
            assert_near(a.matmul(&m)?.view_as_real(), &MATMUL, &what)?;
            assert_near(b.conj()?.view_as_real(), &[-0.625, 0.3125, 0.0, -0.3125, 0.625, 0.5], &what)?;
            let sum = (&(&a * &b.conj()?)? + &(&a / &b)?)?;
            let z = (&sum - &b)?;
            let weights =
                DTensor::from_fn((4, 5), DType::F64, &mesh, [Replicate], |at| (at[0] * 5 + at[1] + 1) as f64 / 16.0)?;
            let loss = z.matmul(&m)?.abs()?.mul(&weights)?.sum_all()?;
            let loss = loss.add(&z.angle()?.sum_all()?)?.add(&z.real()?.mul(&z.imag()?)?.sum_all()?)?;
            assert_near(&loss, &[LOSS], &what)?;
            let gradients = loss.backward()?;
            for (leaf, expected) in leaves.iter().zip(GRADIENTS) {
                assert_near(gradients.get(leaf)?, expected, &what)?;
            }
        }
        Ok(())
    });
}

#[test]
fn views_and_conjugates_communicate_nothing() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        for placement in [Shard(0), Shard(1), Replicate, Partial(ReduceOp::Sum)] {
            let x = parts(&mesh, &[24, 13, 2], [7, 3], 8.0, &Shard(0))?.redistribute([placement.clone()])?;
            let ((z, conj), calls) = counted(&world, || {
                let z = x.view_as_complex()?;
                let conj = z.conj()?.conj()?;
                Ok((z.transpose(0, -1)?.transpose(0, 1)?, conj))
            })?;
            assert_eq!(calls, [""; 0], "{placement}");
            assert_eq!((z.shape(), z.placements()), ([24, 13].as_slice(), [placement].as_slice()));
            assert_eq!(list(z.view_as_real())?, list(&x)?);
            assert_eq!(list(conj.view_as_real())?, list(&x)?);
        }
        // Parts that are on different ranks are brought together first.
        let apart = parts(&mesh, &[5, 2], [7, 3], 8.0, &Shard(1))?;
        let z = apart.view_as_complex()?;
        assert_eq!((z.placements(), list(z.view_as_real())?), ([Replicate].as_slice(), list(&apart)?));
        let (re, im) = (z.real()?, z.imag()?);
        assert_eq!(list(ComplexTensor::new(&re, &im)?.view_as_real())?, list(&apart)?);
        assert_near(ComplexTensor::polar(&z.abs()?, &z.angle()?)?.view_as_real(), &list(&apart)?, "polar")?;
        assert_near(&z.mul_real(&z.abs()?)?.neg()?.abs()?, &list(&z.abs()?.square()?)?, "mul_real")?;
        for (bad, part) in [
            (DTensor::ones((4, 3), DType::F64, &mesh, [Shard(0)])?.view_as_complex().map(drop), "[..., 2]"),
            (DTensor::ones((4, 2), DType::I64, &mesh, [Shard(0)])?.view_as_complex().map(drop), "floating-point"),
            (z.redistribute([Shard(1)]).map(drop), "dimension"),
            (z.transpose(0, 1).map(drop), "dimensions below 1"),
            (z.matmul(&z).map(drop), "matrices"),
        ] {
            let message = bad.unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
        Ok(())
    });
}

#[test]
fn complex_numbers_are_redistributed_in_one_collective_forward_and_backward() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        for (n, from, to, forward, backward) in [
            (12, Shard(0), Replicate, vec!["all_gather"], vec![]),
            (13, Shard(-1), Replicate, vec!["all_gather"], vec![]),
            (13, Replicate, Shard(-1), vec![], vec!["all_gather"]),
            (14, Partial(ReduceOp::Sum), Replicate, vec!["all_reduce"], vec![]),
        ] {
            let numbers = parts(&mesh, &[n, 3, 2], [7, 3], 8.0, &Replicate)?.view_as_complex()?;
            let leaf = numbers.redistribute([from.clone()])?.view_as_real().requires_grad();
            let moved = || Ok(leaf.view_as_complex()?.redistribute([to.clone()])?.view_as_real().clone());
            let (y, gradients, calls) = counted_both_ways(&world, moved)?;
            assert_eq!(calls, [forward, backward], "{from} to {to}");
            assert_eq!(list(&y)?, list(numbers.view_as_real())?);
            assert_eq!(list(gradients.get(&leaf)?)?, vec![1.0; n * 6]);
            let whole = leaf.view_as_complex()?.detach().full_tensor()?;
            assert_eq!(whole.dims(), [n, 3, 2]);
        }
        // The gradient of the absolute value is that of PyTorch at 0, too.
        let z = DTensor::from_fn((2, 2), DType::F64, &mesh, [Replicate], |at| [0.0, 0.0, 3.0, 4.0][at[0] * 2 + at[1]])?
            .requires_grad();
        let gradients = z.view_as_complex()?.abs()?.sum_all()?.backward()?;
        assert_near(gradients.get(&z)?, &[0.0, 0.0, 0.6, 0.8], "at 0")?;
        // Squares of these overflow f32.
        let large = DTensor::full(1e30, (3, 2), DType::F32, &mesh, [Shard(0)])?.view_as_complex()?;
        assert_eq!(list((&large / &large)?.view_as_real())?, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
        Ok(())
    });
}

/// Gradients of a complex and of a real signal.
#[rustfmt::skip]
const SIGNAL_GRADIENTS: [&[f64]; 2] = [
    &[
        -88.029867935756, 6.87704670818, 46.781855757697, -73.688516441335, 4.747606558814, 17.858356486662, 94.131122361363, -4.120089757388,
        14.187680104989, 45.825997903803, -87.777529937895, -5.734203293541, 103.050920418431, -153.424445923515, -27.21104887886, 59.078751454435,
        -204.261772762618, -50.689375134753, 26.759819789438, 136.71662545764, -63.709977769342, -29.527985888893, 135.55118153606, -119.163233342448,
        -39.709794603692, 96.876211437719, -84.279268422091, -79.814331588776, 70.902115158041, 186.311146007618, -49.404153034642, 29.544136249562,
        108.900879596019, -128.700348595948, 5.757454178129, 102.241731353349, -50.966879636372, -13.196775403037, 17.611811210299, -87.592906043865,
        -9.135254103119, 22.068785996876, 63.315849140009, -32.240068693063, -9.11548607081, 58.852771526636, -44.703264406648, -7.353118041356,
    ],
    &[
        -22.815841761409, -16.739094623176, 6.468527223283, 9.599411423522, 22.671381083938, -11.525272946953, -11.278190191982, -16.909805494027,
        16.395395469773, -35.869608254718, -11.235093677913, -13.895798276329, 11.135888728026, 23.673068125725, -29.017705943878, -5.875771272188,
        -5.253425856692, 27.184116029788, 29.695498674437, -6.867720366165, -13.788680284508, 17.239094623176, 19.307907361547, -23.466938046421,
    ],
];

#[test]
fn fourier_transforms_are_those_of_pytorch_in_every_layout() {
    on(3, |world| {
        let mesh = world.mesh([("a", 3)])?;
        for placement in [Replicate, Shard(0), Shard(1), Partial(ReduceOp::Sum)] {
            let leaf = |shape: &[usize], by| -> Result<DTensor> {
                let whole = parts(&mesh, shape, by, 8.0, &Replicate)?;
                Ok(whole.redistribute([placement.clone()])?.requires_grad())
            };
            let (pairs, x) = (leaf(&[4, 6, 2], [7, 3])?, leaf(&[4, 6], [5, 1])?);
            let z = pairs.view_as_complex()?;
            let (usual, ortho, forward) = (FftNorm::Backward, FftNorm::Ortho, FftNorm::Forward);
            let real = |z: ComplexTensor| z.view_as_real().clone();
            let all = || -> Result<[DTensor; 7]> {
                Ok([
                    real(z.fft_fft(None, -1, usual)?),
                    real(z.fft_fft(Some(5), 0, ortho)?),
                    real(z.fft_ifft(Some(3), 1, usual)?),
                    z.fft_irfft(None, -1, usual)?,
                    z.fft_irfft(Some(5), 0, forward)?,
                    real(x.fft_rfft(None, -1, usual)?),
                    real(x.fft_rfft(Some(7), 0, forward)?),
                ])
            };
            let (found, calls) = counted(&world, all)?;
            // partial sums pass, and along a sharded dimension partial sums are the result
            assert!(calls.is_empty(), "{placement}: {calls:?}");
            // shapes, and the sums of the elements times 1, 2, 3, ...
            let expected: [(&[usize], f64); 7] = [
                (&[4, 6, 2], -292.08141571295795),
                (&[5, 6, 2], 7.601023393744782),
                (&[4, 3, 2], -26.694764047840344),
                (&[4, 10], -40.23824764164577),
                (&[5, 6], 20.563020765139896),
                (&[4, 4, 2], 131.40209644090976),
                (&[4, 6, 2], 13.326341781006459),
            ];
            let mut loss: Option<DTensor> = None;
            for (i, (y, (shape, sum))) in found.iter().zip(expected).enumerate() {
                assert_eq!(y.shape(), shape, "{i} of {placement}");
                let weighted: f64 = list(y)?.iter().enumerate().map(|(at, value)| (at + 1) as f64 * value).sum();
                assert!((weighted - sum).abs() < 1e-9, "{i} of {placement}: {weighted}, not {sum}");
                let weights = DTensor::from_fn(shape, DType::F64, &mesh, [Replicate], |index| {
                    (index.iter().zip(shape).fold(0, |flat, (i, n)| flat * n + i) % 5 + 1) as f64
                })?;
                let part = y.square()?.mul(&weights)?.sum_all()?;
                loss = Some(loss.map_or(Ok(part.clone()), |loss| loss.add(&part))?);
            }
            let loss = loss.expect("seven results");
            assert_near(&loss, &[1604.2117683543067], "loss")?;
            let gradients = loss.backward()?;
            for (leaf, expected) in [&pairs, &x].into_iter().zip(SIGNAL_GRADIENTS) {
                assert_near(gradients.get(leaf)?, expected, "gradient")?;
            }
        }
        // a transform that is sharded on another dimension keeps its shard
        let z = parts(&mesh, &[4, 6, 2], [7, 3], 8.0, &Shard(0))?.view_as_complex()?;
        assert_eq!(z.fft_fft(None, 1, FftNorm::Backward)?.placements(), [Shard(0)]);
        for (result, part) in [
            (z.fft_fft(Some(0), 1, FftNorm::Backward).map(drop), "0 points"),
            (z.fft_ifft(None, 2, FftNorm::Backward).map(drop), "from -2 to 1"),
            (z.real()?.fft_rfft(None, -3, FftNorm::Backward).map(drop), "fft_rfft"),
        ] {
            let error = result.expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        }
        Ok(())
    });
}

#[test]
fn rotations_by_complex_numbers_communicate_nothing() {
    on(4, |world| {
        let mesh = world.mesh([("tp", 4)])?;
        // batch, sequence, heads, pairs of a head
        let shape = [2, 3, 8, 4];
        let angle = |at: &[usize]| (at[0] + 1) as f64 * 0.3 / (at[2] + 1) as f64;
        let angles = DTensor::from_fn((3, 1, 2), DType::F64, &mesh, [Replicate], angle)?;
        let turns = ComplexTensor::polar(&angles.ones_like()?, &angles)?;
        for placement in [Replicate, Shard(0), Shard(2)] {
            let x = parts(&mesh, &shape, [7, 3], 8.0, &placement)?.requires_grad();
            let (y, grads, calls) = counted_both_ways(&world, || {
                let z = x.reshape(&[2, 3, 8, 2, 2])?.view_as_complex()?;
                (&z * &turns)?.view_as_real().reshape(&[2, 3, 8, 4])
            })?;
            assert!(calls.concat().is_empty(), "{placement}: {calls:?}");
            assert_eq!(y.placements(), std::slice::from_ref(&placement));
            let (before, after, gradient) = (list(&x)?, list(&y)?, list(grads.get(&x)?)?);
            for pair in 0..before.len() / 2 {
                let (sin, cos) = angle(&[pair / 16 % 3, 0, pair % 2]).sin_cos();
                let (a, b) = (before[2 * pair], before[2 * pair + 1]);
                let expected = [a * cos - b * sin, b * cos + a * sin, cos + sin, cos - sin];
                let found = [after[2 * pair], after[2 * pair + 1], gradient[2 * pair], gradient[2 * pair + 1]];
                assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?} {expected:?}");
            }
        }
        Ok(())
    });
}
