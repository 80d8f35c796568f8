//! Factorizations against the identities that define them, over shapes, batches and ranks.

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

const SHAPES: &[(usize, usize)] = &[(1, 1), (2, 2), (5, 5), (7, 4), (4, 7), (33, 33), (40, 3), (3, 40), (1, 6), (6, 1)];

fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn product(a: &Tensor, b: &Tensor) -> Tensor {
    a.contiguous().unwrap().matmul(&b.contiguous().unwrap()).unwrap()
}

fn transpose(a: &Tensor) -> Tensor {
    a.transpose(a.rank() - 2, a.rank() - 1).unwrap()
}

fn values(a: &Tensor) -> Vec<f64> {
    a.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

#[track_caller]
fn assert_close(a: &Tensor, b: &Tensor, tolerance: f64) {
    assert_eq!(a.dims(), b.dims());
    let scale = values(b).iter().fold(1.0, |scale: f64, x| scale.max(x.abs()));
    let worst = values(a).iter().zip(values(b)).fold(0.0, |worst: f64, (a, b)| worst.max((a - b).abs()));
    assert!(worst <= tolerance * scale, "differs by {worst}, {scale}");
}

fn identity(n: usize, batch: usize) -> Tensor {
    let eye = Tensor::eye(n, DType::F64, &Device::Cpu).unwrap();
    eye.unsqueeze(0).unwrap().repeat((batch, 1, 1)).unwrap()
}

fn symmetric(n: usize, seed: u64) -> Tensor {
    let a = random(&[3, n, n], seed);
    (&a + transpose(&a)).unwrap()
}

/// Runs a check on the matrices in f64 and in f32, with the rounding unit of the type.
fn in_both_types(a: &Tensor, check: impl Fn(&Tensor, f64)) {
    check(a, f64::EPSILON);
    check(&a.to_dtype(DType::F32).unwrap(), f64::from(f32::EPSILON));
}

fn wide(a: &Tensor) -> Tensor {
    a.to_dtype(DType::F64).unwrap()
}

#[test]
fn lu_gives_the_matrix_back_and_solves() {
    for (seed, &(m, n)) in SHAPES.iter().enumerate() {
        in_both_types(&random(&[3, m, n], seed as u64), |a, eps| {
            let factors = lu_factor(a, true).unwrap();
            let (lu, k) = (wide(&factors.lu), m.min(n));
            let strict = Tensor::tril2(m, DType::F64, &Device::Cpu).unwrap();
            let strict = (strict - Tensor::eye(m, DType::F64, &Device::Cpu).unwrap()).unwrap().narrow(1, 0, k).unwrap();
            let lower = lu.narrow(2, 0, k).unwrap().broadcast_mul(&strict).unwrap();
            let lower = (lower + identity(m, 3).narrow(2, 0, k).unwrap()).unwrap();
            let mask = Tensor::triu2(n, DType::F64, &Device::Cpu).unwrap().narrow(0, 0, k).unwrap();
            let upper = lu.narrow(1, 0, k).unwrap().broadcast_mul(&mask).unwrap();
            let p = permutation(&factors.pivots, m, DType::F64).unwrap();
            assert_close(&product(&p, &product(&lower, &upper)), &wide(a), 20.0 * eps * m as f64);
            assert_eq!(values(&factors.info), [0.0; 3]);
            if m != n {
                return;
            }
            for left in [true, false] {
                let b = random(&if left { [2, 1, n, 4] } else { [2, 1, 4, n] }, 7).to_dtype(a.dtype()).unwrap();
                for adjoint in [true, false] {
                    let x = wide(&lu_solve(&factors.lu, &factors.pivots, &b, left, adjoint).unwrap());
                    assert_eq!(&x.dims()[..2], [2, 3]);
                    let of = if adjoint { transpose(&wide(a)) } else { wide(a) };
                    for i in 0..2 {
                        let x = x.get(i).unwrap();
                        let back = if left { product(&of, &x) } else { product(&x, &of) };
                        let expected = wide(&b.get(i).unwrap()).broadcast_as(back.dims()).unwrap();
                        let size = values(&x).iter().fold(1.0, |m: f64, x| m.max(x.abs()));
                        assert_close(&back, &expected, 50.0 * eps * n as f64 * size);
                    }
                }
            }
            let (inverse, _) = inverse(a).unwrap();
            let size = values(&inverse).iter().fold(1.0, |m: f64, x| m.max(x.abs()));
            assert_close(&product(&wide(a), &wide(&inverse)), &identity(n, 3), 50.0 * eps * n as f64 * size);
        });
    }
    let singular = Tensor::new(&[[1f64, 2.0], [2.0, 4.0]], &Device::Cpu).unwrap();
    assert_eq!(values(&lu_factor(&singular, true).unwrap().info), [2.0]);
}

#[test]
fn triangles_are_solved_on_either_side() {
    for upper in [true, false] {
        for unit in [true, false] {
            for transposed in [true, false] {
                for left in [true, false] {
                    let a = (random(&[2, 5, 5], 3) + (identity(5, 2) * 4.0).unwrap()).unwrap();
                    let b = random(&if left { [2, 5, 3] } else { [2, 3, 5] }, 4);
                    let x = solve_triangular(&a, &b, Triangle { upper, unit, transposed }, left).unwrap();
                    let mask = if upper { Tensor::triu2 } else { Tensor::tril2 };
                    let mut of = a.broadcast_mul(&mask(5, DType::F64, &Device::Cpu).unwrap()).unwrap();
                    if unit {
                        let eye = identity(5, 2);
                        of = ((&of - (&of * &eye).unwrap()).unwrap() + eye).unwrap();
                    }
                    let of = if transposed { transpose(&of) } else { of };
                    let back = if left { product(&of, &x) } else { product(&x, &of) };
                    assert_close(&back, &b, 1e-13);
                }
            }
        }
    }
}

#[test]
fn cholesky_gives_the_matrix_back_or_the_failing_minor() {
    for n in [1, 2, 5, 40] {
        let a = random(&[3, n, n], n as u64);
        let spd = (product(&a, &transpose(&a)) + identity(n, 3)).unwrap();
        for upper in [false, true] {
            let (factor, info) = cholesky(&spd, upper).unwrap();
            let back =
                if upper { product(&transpose(&factor), &factor) } else { product(&factor, &transpose(&factor)) };
            assert_close(&back, &spd, 1e-14 * n as f64);
            assert_eq!(values(&info), [0.0; 3]);
        }
    }
    let bad = Tensor::new(&[[1f64, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 1.0]], &Device::Cpu).unwrap();
    assert_eq!(values(&cholesky(&bad, false).unwrap().1), [2.0]);
}

#[test]
fn symmetric_factors_solve() {
    for n in [1, 2, 3, 5, 8, 21] {
        for seed in 0..6 {
            let a = symmetric(n, seed);
            let (ld, pivots, info) = ldl_factor(&a).unwrap();
            assert_eq!(values(&info), [0.0; 3]);
            let b = random(&[n, 2], 9);
            let x = ldl_solve(&ld, &pivots, &b).unwrap();
            let size = values(&x).iter().fold(1.0, |m: f64, x| m.max(x.abs()));
            assert_close(&product(&a, &x), &b.broadcast_as((3, n, 2)).unwrap(), 1e-13 * size * n as f64);
        }
    }
}

#[test]
fn qr_has_orthonormal_columns() {
    for (seed, &(m, n)) in SHAPES.iter().enumerate() {
        for full in [true, false] {
            in_both_types(&random(&[3, m, n], seed as u64), |a, eps| {
                let (q, r) = qr(a, full).unwrap();
                let (q, r) = (wide(&q), wide(&r));
                let k = if full { m } else { m.min(n) };
                assert_close(&product(&q, &r), &wide(a), 20.0 * eps * m as f64);
                assert_close(&product(&transpose(&q), &q), &identity(k, 3), 20.0 * eps * m as f64);
                let lower = Tensor::tril2(k.max(n), DType::F64, &Device::Cpu).unwrap();
                let lower = (lower - Tensor::eye(k.max(n), DType::F64, &Device::Cpu).unwrap()).unwrap();
                let below = r.broadcast_mul(&lower.narrow(0, 0, k).unwrap().narrow(1, 0, n).unwrap()).unwrap();
                assert_eq!(values(&below.abs().unwrap().sum_all().unwrap()), [0.0]);
            });
        }
    }
}

#[test]
fn eigenvectors_diagonalize() {
    for n in [1, 2, 3, 10, 45] {
        let sizes = [1.0, 1e150, 1e-150];
        for size in sizes {
            let a = (symmetric(n, 5) * size).unwrap();
            let (w, v) = eigh(&a, false).unwrap();
            let scaled = v.broadcast_mul(&(w.unsqueeze(1).unwrap() / size).unwrap()).unwrap();
            assert_close(&product(&scaled, &transpose(&v)), &(&a / size).unwrap(), 2e-15 * (n as f64 + 10.0));
            assert_close(&product(&transpose(&v), &v), &identity(n, 3), 2e-15 * (n as f64 + 10.0));
            for row in w.to_vec2::<f64>().unwrap() {
                assert!(row.is_sorted(), "{row:?}");
            }
            let (other, _) = eigh(&a, true).unwrap();
            assert_close(&(other / size).unwrap(), &(w / size).unwrap(), 1e-13);
        }
    }
    // Equal eigenvalues, and none but zeros.
    for a in [identity(6, 1), (identity(4, 1) * 0.0).unwrap()] {
        let (w, v) = eigh(&a, false).unwrap();
        let expected = values(&a)[0];
        assert!(values(&w).iter().all(|&x| x == expected));
        assert_close(&product(&transpose(&v), &v), &identity(a.dims()[1], 1), 1e-15);
    }
}

#[test]
fn singular_vectors_are_orthonormal_and_give_the_matrix_back() {
    let mut cases: Vec<Tensor> =
        SHAPES.iter().enumerate().map(|(seed, &(m, n))| random(&[3, m, n], seed as u64)).collect();
    // Matrices without full rank, and of extreme sizes.
    cases.push(product(&random(&[2, 9, 2], 1), &random(&[2, 2, 6], 2)));
    cases.push((random(&[1, 4, 4], 1) * 0.0).unwrap());
    cases.push((random(&[1, 5, 3], 1) * 1e200).unwrap());
    cases.push((random(&[1, 3, 5], 1) * 1e-200).unwrap());
    for a in &cases {
        let (m, n) = (a.dims()[1], a.dims()[2]);
        let size = values(a).iter().fold(0.0, |m: f64, x| m.max(x.abs())).max(f64::MIN_POSITIVE);
        for full in [true, false] {
            let (u, s, vh) = svd(a, full).unwrap();
            let k = m.min(n);
            let (short_u, short_v) = (u.narrow(2, 0, k).unwrap(), vh.narrow(1, 0, k).unwrap());
            let scaled = short_u.broadcast_mul(&(s.unsqueeze(1).unwrap() / size).unwrap()).unwrap();
            assert_close(&product(&scaled, &short_v), &(a / size).unwrap(), 1e-14 * m.max(n) as f64);
            let batch = a.dims()[0];
            assert_close(&product(&transpose(&u), &u), &identity(u.dims()[2], batch), 1e-14 * m as f64);
            assert_close(&product(&vh, &transpose(&vh)), &identity(vh.dims()[1], batch), 1e-14 * n as f64);
            assert!(s.to_vec2::<f64>().unwrap().iter().all(|s| s.is_sorted_by(|a, b| a >= b)));
        }
    }
    let nan = (random(&[1, 3, 2], 1) * f64::NAN).unwrap();
    assert!(values(&svd(&nan, true).unwrap().1).iter().all(|s| s.is_nan()));
}

#[test]
fn pseudo_inverses_ranks_and_least_squares() {
    let scalar = |x: f64| Tensor::new(x, &Device::Cpu).unwrap();
    let tolerance = Tolerance { absolute: scalar(0.0), relative: scalar(1e-12) };
    let low = product(&random(&[2, 7, 3], 1), &random(&[2, 3, 5], 2));
    for a in [low.clone(), random(&[2, 6, 4], 3), random(&[2, 4, 6], 3)] {
        let inverse = pseudo_inverse(&a, &tolerance, false).unwrap();
        assert_close(&product(&product(&a, &inverse), &a), &a, 1e-13);
        assert_close(&product(&product(&inverse, &a), &inverse), &inverse, 1e-12);
        let b = random(&[2, a.dims()[1], 3], 8);
        let (x, _, _) = least_squares(&a, &b, 1e-12).unwrap();
        assert_close(&x, &product(&inverse, &b), 1e-12);
    }
    assert_eq!(values(&matrix_rank(&low, &tolerance, false).unwrap()), [3.0, 3.0]);
    let a = symmetric(5, 2);
    let inverse = pseudo_inverse(&a, &tolerance, true).unwrap();
    assert_close(&product(&a, &inverse), &identity(5, 3), 1e-12);
    let large = Tolerance { absolute: scalar(1e3), relative: scalar(0.0) };
    assert_eq!(values(&matrix_rank(&a, &large, true).unwrap()), [0.0; 3]);
}

#[test]
fn exponentials_of_multiples_multiply() {
    for n in [1, 3, 8] {
        let a = (random(&[2, n, n], 6) * 9.0).unwrap();
        let half = matrix_exp(&(&a * 0.5).unwrap()).unwrap();
        assert_close(&product(&half, &half), &matrix_exp(&a).unwrap(), 1e-12);
        let inverse = matrix_exp(&(&a * -1.0).unwrap()).unwrap();
        let size = values(&half).iter().chain(&values(&inverse)).fold(1.0, |m: f64, x| m.max(x.abs()));
        assert_close(&product(&matrix_exp(&a).unwrap(), &inverse), &identity(n, 2), 1e-13 * size * size);
    }
    // A nilpotent matrix has the first two terms alone.
    let a = Tensor::new(&[[0f64, 3.0], [0.0, 0.0]], &Device::Cpu).unwrap();
    assert_eq!(values(&matrix_exp(&a).unwrap()), [1.0, 3.0, 0.0, 1.0]);
}

#[test]
fn gradients_of_reflections_are_differences() {
    let (a, tau, g) = (random(&[1, 5, 3], 1), random(&[1, 2], 2), random(&[1, 5, 3], 3));
    let loss = |a: &Tensor, tau: &Tensor| {
        let q = householder_product(a, tau).unwrap();
        values(&(q * &g).unwrap()).iter().sum::<f64>()
    };
    let (of_a, of_tau) = householder_product_backward(&a, &tau, &g).unwrap();
    let moved = |t: &Tensor, i: usize, by: f64| {
        let mut all = values(t);
        all[i] += by;
        Tensor::from_vec(all, t.dims(), &Device::Cpu).unwrap()
    };
    const STEP: f64 = 1e-6;
    for (i, expected) in values(&of_a).into_iter().enumerate() {
        let found = (loss(&moved(&a, i, STEP), &tau) - loss(&moved(&a, i, -STEP), &tau)) / (2.0 * STEP);
        assert!((found - expected).abs() < 1e-8, "a {i}: {found} {expected}");
    }
    for (i, expected) in values(&of_tau).into_iter().enumerate() {
        let found = (loss(&a, &moved(&tau, i, STEP)) - loss(&a, &moved(&tau, i, -STEP))) / (2.0 * STEP);
        assert!((found - expected).abs() < 1e-8, "tau {i}: {found} {expected}");
    }
}

#[test]
fn polar_factors_are_orthonormal_and_semidefinite() {
    for (seed, &(m, n)) in SHAPES.iter().enumerate().filter(|(_, (m, n))| m >= n) {
        in_both_types(&random(&[3, m, n], seed as u64), |a, eps| {
            let found = polar(a).unwrap();
            let (u, h, vectors) = (wide(&found.u), wide(&found.h), wide(&found.vectors));
            let tolerance = 50.0 * eps * m as f64;
            assert_close(&product(&u, &h), &wide(a), tolerance);
            assert_close(&product(&transpose(&u), &u), &identity(n, 3), tolerance);
            assert_close(&transpose(&h).contiguous().unwrap(), &h, tolerance);
            assert!(values(&found.values).iter().all(|&x| x >= 0.0));
            let scaled = vectors.broadcast_mul(&wide(&found.values).unsqueeze(1).unwrap()).unwrap();
            assert_close(&product(&h, &vectors), &scaled, tolerance);
        });
    }
    // a quarter turn of a stretched plane
    let found = polar(&Tensor::new(&[[0f64, -3.0], [2.0, 0.0]], &Device::Cpu).unwrap()).unwrap();
    assert_close(&found.u, &Tensor::new(&[[0f64, -1.0], [1.0, 0.0]], &Device::Cpu).unwrap(), 1e-15);
    assert_close(&found.h, &Tensor::new(&[[2f64, 0.0], [0.0, 3.0]], &Device::Cpu).unwrap(), 1e-15);
}

#[test]
fn the_square_of_a_symmetric_root_is_the_matrix() {
    for n in [1, 2, 5, 20] {
        let b = random(&[3, n, n], n as u64);
        in_both_types(&product(&b, &transpose(&b)), |a, eps| {
            let (root, of_root, vectors) = symmetric_sqrt(a).unwrap();
            let (root, vectors) = (wide(&root), wide(&vectors));
            // eigenvalues near zero lose half of their digits in the root, but not in its square
            let tolerance = 100.0 * eps * n as f64;
            assert_close(&product(&root, &root), &wide(a), tolerance);
            assert_close(&transpose(&root).contiguous().unwrap(), &root, tolerance);
            let scaled = vectors.broadcast_mul(&wide(&of_root).unsqueeze(1).unwrap()).unwrap();
            assert_close(&product(&root, &vectors), &scaled, tolerance);
            assert!(values(&of_root).iter().all(|&x| x >= 0.0));
        });
    }
    let (root, _, _) = symmetric_sqrt(&Tensor::new(&[[5f64, 4.0], [4.0, 5.0]], &Device::Cpu).unwrap()).unwrap();
    assert_close(&root, &Tensor::new(&[[2f64, 1.0], [1.0, 2.0]], &Device::Cpu).unwrap(), 1e-15);
    // what is below zero counts as zero
    let (root, _, _) = symmetric_sqrt(&Tensor::new(&[[4f64, 0.0], [0.0, -9.0]], &Device::Cpu).unwrap()).unwrap();
    assert_close(&root, &Tensor::new(&[[2f64, 0.0], [0.0, 0.0]], &Device::Cpu).unwrap(), 1e-15);
}

#[test]
fn determinants_multiply_and_do_not_overflow_as_logarithms() {
    for n in [1, 2, 5, 12] {
        let (a, b) = (random(&[3, n, n], n as u64), random(&[3, n, n], 50 + n as u64));
        let [of_a, of_b, of_product] = [&a, &b, &product(&a, &b)].map(|m| determinant(m).unwrap());
        assert_close(&of_product.value, &(&of_a.value * &of_b.value).unwrap(), 1e-12);
        assert_close(&of_product.sign, &(&of_a.sign * &of_b.sign).unwrap(), 0.0);
        assert_close(&of_product.log_magnitude, &(&of_a.log_magnitude + &of_b.log_magnitude).unwrap(), 1e-11);
    }
    let known = |rows: [[f64; 2]; 2], expected: [f64; 3]| {
        let found = determinant(&Tensor::new(&rows, &Device::Cpu).unwrap()).unwrap();
        let got = [&found.value, &found.sign, &found.log_magnitude].map(|t| values(t)[0]);
        let close = |(a, b): (&f64, &f64)| a == b || (a - b).abs() < 1e-12 * b.abs();
        assert!(got.iter().zip(&expected).all(close), "{rows:?}: {got:?}, not {expected:?}");
    };
    known([[1.0, 2.0], [3.0, 4.0]], [-2.0, -1.0, 2f64.ln()]);
    known([[0.0, 1.0], [1.0, 0.0]], [-1.0, -1.0, 0.0]);
    known([[1.0, 2.0], [2.0, 4.0]], [0.0, 0.0, f64::NEG_INFINITY]);
    known([[1e200, 0.0], [0.0, -1e200]], [f64::NEG_INFINITY, -1.0, 400.0 * 10f64.ln()]);
}
