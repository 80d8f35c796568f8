//! Minimal reproductions of the bugs that this suite has found, each with PyTorch's answer.

use candle_core::{Device, Tensor};
use half::f16;
use shardwise::ops::{ConvOptions, Reduction};
use shardwise::prelude::*;

/// Runs on one rank and on two.
fn everywhere(program: impl Fn(&DeviceMesh, Placement) -> Result<()> + Clone + Send + Sync + 'static) {
    for ranks in [1, 2] {
        let program = program.clone();
        let run = move |world: World| {
            let mesh = world.mesh([("a", ranks)])?;
            program(&mesh, Replicate)?;
            program(&mesh, Shard(0))
        };
        launch(ranks, run).unwrap();
    }
}

fn reals(values: &[f64], dtype: DType, mesh: &DeviceMesh, placement: &Placement) -> Result<DTensor> {
    let tensor = Tensor::new(values, &Device::Cpu)?.to_dtype(dtype)?;
    DTensor::distribute_tensor(&tensor, mesh, [placement.clone()], None)
}

#[test]
fn bce_with_logits_is_differentiable_at_zero() {
    everywhere(|mesh, placement| {
        let x = reals(&[0.0, 0.0, 1.0, -1.0], DType::F64, mesh, &placement)?.requires_grad();
        let target = reals(&[0.25, 1.0, 0.0, 0.0], DType::F64, mesh, &placement)?;
        let slope = x.bce_with_logits(&target, Reduction::Sum)?.backward()?.get(&x)?.full_tensor()?;
        // sigmoid(x) - target
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        for (got, wanted) in slope.to_vec1::<f64>()?.iter().zip([0.25, -0.5, sigmoid(1.0), sigmoid(-1.0)]) {
            assert!((got - wanted).abs() < 1e-15, "{got} {wanted}");
        }
        Ok(())
    });
}

#[test]
fn integer_index_add_and_scatter_add_wrap_on_overflow() {
    everywhere(|mesh, placement| {
        let integers = |values: &[i64]| {
            DTensor::distribute_tensor(&Tensor::new(values, &Device::Cpu)?, mesh, [placement.clone()], None)
        };
        let (index, source) = (integers(&[0, 0, 1])?, integers(&[i64::MAX, i64::MAX, i64::MIN])?);
        for sum in
            [integers(&[1, -1])?.index_add(0, &index, &source)?, integers(&[1, -1])?.scatter_add(0, &index, &source)?]
        {
            assert_eq!(sum.full_tensor()?.to_vec1::<i64>()?, [-1, i64::MAX]);
        }
        Ok(())
    });
}

#[test]
fn clamp_with_a_nan_bound_gives_nan() {
    everywhere(|mesh, placement| {
        let x = reals(&[1.0, 2.0, f64::NAN], DType::F32, mesh, &placement)?;
        let (low, high) = (
            reals(&[f64::NAN, 0.0, 0.0], DType::F32, mesh, &placement)?,
            reals(&[3.0, f64::NAN, 3.0], DType::F32, mesh, &placement)?,
        );
        let clamped = x.clamp_tensor(&low, &high)?.full_tensor()?.to_vec1::<f32>()?;
        assert!(clamped.iter().all(|x| x.is_nan()), "{clamped:?}");
        let clamped = x.clamp(Some(f64::NAN), None)?.full_tensor()?.to_vec1::<f32>()?;
        assert!(clamped.iter().all(|x| x.is_nan()), "{clamped:?}");
        Ok(())
    });
}

#[test]
fn the_gradient_of_div_does_not_square_the_divisor() {
    everywhere(|mesh, placement| {
        // the squares of the divisors are 0 and infinite in f16
        let a = reals(&[0.0001220703125, 512.0], DType::F16, mesh, &placement)?;
        let b = reals(&[0.0001220703125, 512.0], DType::F16, mesh, &placement)?.requires_grad();
        let slope = a.div(&b)?.sum_all()?.backward()?.get(&b)?.full_tensor()?.to_vec1::<f16>()?;
        assert_eq!(slope, [f16::from_f64(-8192.0), f16::from_f64(-0.001953125)]);
        let zero = a.zeros_like()?;
        let slope = zero.addcdiv(&a, &b, 1.0)?.sum_all()?.backward()?.get(&b)?.full_tensor()?.to_vec1::<f16>()?;
        assert_eq!(slope, [f16::from_f64(-8192.0), f16::from_f64(-0.001953125)]);
        Ok(())
    });
}

#[test]
fn max_pool_gives_the_gradient_to_the_first_of_equal_elements() {
    everywhere(|mesh, _| {
        let x = reals(&[3.0, 3.0, 1.0, 1.0, 2.0, 2.0], DType::F32, mesh, &Replicate)?.requires_grad();
        for placement in [Replicate, Shard(2)] {
            let line = x.reshape(&[1, 1, 6])?.redistribute([placement])?;
            let slope = line.max_pool1d(2, None, 0)?.sum_all()?.backward()?.get(&x)?.full_tensor()?.to_vec1::<f32>()?;
            assert_eq!(slope, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
        }
        let square = reals(&[1.0; 4], DType::F32, mesh, &Replicate)?.requires_grad();
        let pooled = square.reshape(&[1, 1, 2, 2])?.max_pool2d(2, None, 0)?;
        let slope = pooled.sum_all()?.backward()?.get(&square)?.full_tensor()?.to_vec1::<f32>()?;
        assert_eq!(slope, [1.0, 0.0, 0.0, 0.0]);
        Ok(())
    });
}

#[test]
fn cummax_and_cummin_point_to_the_last_of_several_nans() {
    everywhere(|mesh, placement| {
        let x = reals(&[1.0, f64::NAN, 2.0, f64::NAN, 3.0], DType::F32, mesh, &placement)?;
        for (values, indices) in [x.cummax(0)?, x.cummin(0)?] {
            assert!(values.full_tensor()?.to_vec1::<f32>()?[1..].iter().all(|v| v.is_nan()));
            assert_eq!(indices.full_tensor()?.to_vec1::<i64>()?, [0, 1, 1, 3, 3]);
        }
        Ok(())
    });
}

#[test]
fn hardswish_has_the_gradient_of_its_linear_part_at_the_kinks() {
    everywhere(|mesh, placement| {
        let x = reals(&[-3.0, 3.0, 0.0], DType::F32, mesh, &placement)?.requires_grad();
        let slope = x.hardswish()?.sum_all()?.backward()?.get(&x)?.full_tensor()?.to_vec1::<f32>()?;
        assert_eq!(slope, [0.0, 1.0, 0.5]);
        Ok(())
    });
}

#[test]
fn kl_div_of_an_invalid_target_is_nan() {
    everywhere(|mesh, placement| {
        let x = reals(&[-1.0, -1.0, -1.0, 0.0], DType::F64, mesh, &placement)?;
        let target = reals(&[-0.5, f64::NAN, 0.0, 1.0], DType::F64, mesh, &placement)?;
        let losses = x.kl_div(&target, Reduction::None)?.full_tensor()?.to_vec1::<f64>()?;
        assert!(losses[0].is_nan() && losses[1].is_nan() && losses[2..] == [0.0, 0.0], "{losses:?}");
        Ok(())
    });
}

#[test]
fn losses_with_two_branches_keep_small_gradients_and_those_of_infinite_distances() {
    everywhere(|mesh, placement| {
        let x = reals(&[1e-9, -1e-9, 0.25, -3.0, f64::INFINITY], DType::F32, mesh, &placement)?.requires_grad();
        let target = x.zeros_like()?;
        for loss in [x.smooth_l1_loss(&target, 1.0, Reduction::Sum)?, x.huber_loss(&target, 1.0, Reduction::Sum)?] {
            let slope = loss.backward()?.get(&x)?.full_tensor()?.to_vec1::<f32>()?;
            assert_eq!(slope, [1e-9, -1e-9, 0.25, -1.0, 1.0]);
        }
        Ok(())
    });
}

#[test]
fn the_gradient_of_a_logarithm_divides_by_subnormal_numbers() {
    everywhere(|mesh, placement| {
        let x = reals(&[1e-40, 2.0], DType::F32, mesh, &placement)?.requires_grad();
        let weight = reals(&[0.0, 1.0], DType::F32, mesh, &placement)?;
        let slope = x.log()?.mul(&weight)?.sum_all()?.backward()?.get(&x)?.full_tensor()?.to_vec1::<f32>()?;
        assert_eq!(slope, [0.0, 0.5]);
        Ok(())
    });
}

#[test]
fn interpolation_reaches_its_ends() {
    everywhere(|mesh, placement| {
        let a = reals(&[1e20, 5.0], DType::F32, mesh, &placement)?;
        let b = reals(&[3.0, f64::INFINITY], DType::F32, mesh, &placement)?;
        let weight = reals(&[1.0, 0.25], DType::F32, mesh, &placement)?;
        assert_eq!(a.lerp(&b, &weight)?.full_tensor()?.to_vec1::<f32>()?, [3.0, f32::INFINITY]);
        assert_eq!(a.lerp(&b, 1.0)?.full_tensor()?.to_vec1::<f32>()?[0], 3.0);
        assert!(a.lerp(&b, 0.9)?.full_tensor()?.to_vec1::<f32>()?[1].is_nan());
        Ok(())
    });
}

#[test]
fn nan_is_inserted_after_all_boundaries() {
    everywhere(|mesh, placement| {
        let x = reals(&[f64::NAN, 2.0, -1.0], DType::F32, mesh, &placement)?;
        let boundaries = reals(&[0.0, 2.0, 4.0], DType::F32, mesh, &placement)?;
        assert_eq!(x.bucketize(&boundaries)?.full_tensor()?.to_vec1::<i64>()?, [3, 1, 0]);
        assert_eq!(boundaries.searchsorted(&x, true)?.full_tensor()?.to_vec1::<i64>()?, [3, 2, 0]);
        Ok(())
    });
}

#[test]
fn averages_of_integers_do_not_wrap() {
    everywhere(|mesh, placement| {
        let x = Tensor::new(&[i64::MAX, i64::MAX, i64::MAX - 3, i64::MAX], &Device::Cpu)?;
        let x = DTensor::distribute_tensor(&x, mesh, [placement], None)?;
        assert_eq!(x.mean_all()?.item::<f32>()?, i64::MAX as f32);
        Ok(())
    });
}

#[test]
fn shapes_that_pytorch_refuses_are_refused() {
    everywhere(|mesh, _| {
        let zeros = |shape: &[usize]| DTensor::zeros(shape, DType::F32, mesh, [Replicate]);
        let (a, b) = (zeros(&[3, 1, 2])?, zeros(&[3, 2, 1])?);
        assert!(zeros(&[2, 3, 1, 1])?.baddbmm(&a, &b, 1.0, 1.0).is_err(), "the result would have four dimensions");
        assert!(zeros(&[3, 2, 1])?.baddbmm(&a, &b, 1.0, 1.0).is_err(), "the product would be repeated");
        assert!(zeros(&[4, 5, 6])?.rms_norm(2, Some(&zeros(&[6])?), 1e-5).is_err(), "a weight of one dimension");
        assert!(zeros(&[4, 5, 6])?.layer_norm(2, None, Some(&zeros(&[6])?), 1e-5).is_err(), "a bias of one dimension");
        let index = DTensor::zeros(&[2], DType::I64, mesh, [Replicate])?;
        assert!(zeros(&[2, 1])?.index_put(&[&index], &zeros(&[2])?, true).is_err(), "one row of values for two of one");
        let put = zeros(&[2, 3])?.index_put(&[&index], &zeros(&[3])?.add_scalar(7.0)?, false)?;
        assert_eq!(put.full_tensor()?.to_vec2::<f32>()?, [[7.0; 3], [0.0; 3]]);
        assert_eq!(zeros(&[2, 3])?.diagonal(isize::MIN)?.shape(), [0]);
        Ok(())
    });
}

#[test]
fn given_statistics_in_half_precision_are_used_in_f32() {
    everywhere(|mesh, placement| {
        let column = |values: &[f64], shape: &[isize]| {
            reals(values, DType::BF16, mesh, &Replicate)?.reshape(shape)?.redistribute([placement.clone()])
        };
        let x = column(&[6.0, 1.0], &[2, 1])?;
        let (mean, variance) =
            (reals(&[0.7], DType::BF16, mesh, &Replicate)?, reals(&[0.3], DType::BF16, mesh, &Replicate)?);
        let found = x.batch_norm(Some((&mean, &variance)), None, None, 1e-5)?.full_tensor()?;
        let wide = |t: &DTensor| t.to_dtype(DType::F64);
        let exact =
            wide(&x)?.batch_norm(Some((&wide(&mean)?, &wide(&variance)?)), None, None, 1e-5)?.to_dtype(DType::BF16)?;
        assert_eq!(found.to_vec2::<half::bf16>()?, exact.full_tensor()?.to_vec2::<half::bf16>()?);
        Ok(())
    });
}

#[test]
fn lookups_and_additions_at_indices_keep_the_sign_of_zero() {
    everywhere(|mesh, placement| {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let x = reals(&[-0.0, 0.0, -0.0, -0.0, 1.0, -0.0], dtype, mesh, &placement)?;
            let index = Tensor::new(&[5i64, 0, 1, 2, 4, 3], &Device::Cpu)?;
            let index = DTensor::distribute_tensor(&index, mesh, [Replicate], None)?;
            let signs = |t: &DTensor| -> Result<Vec<bool>> {
                let all = t.full_tensor()?.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
                Ok(all.iter().map(|x| x.is_sign_negative()).collect())
            };
            let expected = [true, true, false, true, false, true];
            assert_eq!(signs(&x.index_select(0, &index)?)?, expected, "index_select {dtype:?}");
            assert_eq!(signs(&x.index(&index)?)?, expected, "index {dtype:?}");
            assert_eq!(signs(&x.gather(0, &index)?)?, expected, "gather {dtype:?}");
            assert_eq!(signs(&x.take(&index)?)?, expected, "take {dtype:?}");
            assert_eq!(signs(&x.unsqueeze(1)?.embedding(&index)?)?, expected, "embedding {dtype:?}");
            let whole = x.redistribute([Partial(ReduceOp::Sum)])?.redistribute([Replicate])?;
            let given = [true, false, true, true, false, true];
            assert_eq!(signs(&whole)?, given, "partial and back {dtype:?}");
            // Elements that nothing is added to, and a negative zero that one is added to.
            let (first, zero) = (index.narrow(0, 0, 1)?, reals(&[-0.0], dtype, mesh, &Replicate)?);
            assert_eq!(signs(&x.index_add(0, &first, &zero)?)?, given, "index_add {dtype:?}");
            assert_eq!(signs(&x.scatter_add(0, &first, &zero)?)?, given, "scatter_add {dtype:?}");
        }
        Ok(())
    });
}

#[test]
fn hardtanh_keeps_the_type_of_integers() {
    everywhere(|mesh, placement| {
        let x = Tensor::new(&[-7i64, -1, 0, 2, 9], &Device::Cpu)?;
        let x = DTensor::distribute_tensor(&x, mesh, [placement], None)?;
        assert_eq!(x.hardtanh(-2.0, 3.0)?.full_tensor()?.to_vec1::<i64>()?, [-2, -1, 0, 2, 3]);
        assert_eq!(x.hardtanh(-1.5, 2.5)?.full_tensor()?.to_vec1::<i64>()?, [-1, -1, 0, 2, 2]);
        assert_eq!(x.relu6()?.full_tensor()?.to_vec1::<i64>()?, [0, 0, 0, 2, 6]);
        Ok(())
    });
}

#[test]
fn products_of_two_floating_point_types_have_the_wider_one() {
    everywhere(|mesh, placement| {
        let ones = |dtype| DTensor::ones((4, 4), dtype, mesh, [placement.clone()]);
        for (other, expected) in [(DType::BF16, DType::F32), (DType::F16, DType::F32), (DType::F64, DType::F64)] {
            let (a, b) = (ones(DType::F32)?, ones(other)?);
            for product in [a.matmul(&b)?, b.matmul(&a)?, a.linear(&b, None)?] {
                assert_eq!(
                    (product.dtype(), product.full_tensor()?.to_dtype(DType::F32)?.to_vec2::<f32>()?),
                    (expected, vec![vec![4.0; 4]; 4])
                );
            }
        }
        assert_eq!(ones(DType::BF16)?.matmul(&ones(DType::F16)?)?.dtype(), DType::F32);
        Ok(())
    });
}

#[test]
fn a_scattered_diagonal_replaces_infinities_and_keeps_the_signs_of_zeros() {
    everywhere(|mesh, placement| {
        let x = reals(&[f64::INFINITY, -0.0, -0.0, f64::NAN], DType::F64, mesh, &Replicate)?;
        let x = x.reshape(&[2, 2])?.redistribute([placement.clone()])?;
        let source = reals(&[1.0, -0.0], DType::F64, mesh, &placement)?;
        let bits = x.diagonal_scatter(&source, 0, [0, 1])?.full_tensor()?.flatten_all()?.to_vec1::<f64>()?;
        let bits: Vec<u64> = bits.iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, [1.0, -0.0, -0.0, -0.0].map(f64::to_bits));
        Ok(())
    });
}

#[test]
fn the_gradient_of_polygamma_exists_at_the_largest_order() {
    everywhere(|mesh, placement| {
        let x = reals(&[1.0, 2.0], DType::F64, mesh, &placement)?.requires_grad();
        x.polygamma(u32::MAX)?.sum_all()?.backward()?.get(&x)?.full_tensor()?;
        Ok(())
    });
}

#[test]
fn damaged_windows_and_histograms_are_refused() {
    everywhere(|mesh, placement| {
        let ones = |shape: &[usize]| DTensor::ones(shape, DType::F64, mesh, [placement.clone()]);
        let x = ones(&[1, 1, 4, 4, 4])?;
        assert!(x.conv3d(&ones(&[1; 6])?, None, ConvOptions::default()).is_err(), "a weight of six dimensions");
        assert!(x.conv3d(&ones(&[1])?, None, ConvOptions::default()).is_err(), "a weight of one dimension");
        assert!(ones(&[3, 0])?.histogramdd(&[], None, false).is_err(), "no dimensions to count in");
        let edges = DTensor::arange(0.0..1000.0, DType::F64, mesh, [Replicate])?;
        assert!(ones(&[3, 8])?.histogramdd(&[&edges; 8], None, false).is_err(), "10^24 bins");
        Ok(())
    });
}

#[test]
fn a_diagonal_keeps_the_sign_of_zero() {
    everywhere(|mesh, placement| {
        let x = reals(&[-0.0, 1.0, f64::INFINITY, -0.0], DType::F32, mesh, &placement)?.reshape(&[2, 2])?;
        let diagonal = x.diagonal(0)?.full_tensor()?.to_vec1::<f32>()?;
        assert!(diagonal.iter().all(|x| *x == 0.0 && x.is_sign_negative()), "{diagonal:?}");
        Ok(())
    });
}

#[test]
fn the_gradient_of_atan2_is_zero_at_the_origin_and_finite_near_it() {
    everywhere(|mesh, placement| {
        // The squares of the last point are 0 in f32.
        let y = reals(&[0.0, 3.0, 3e-30], DType::F32, mesh, &placement)?.requires_grad();
        let x = reals(&[0.0, 4.0, 4e-30], DType::F32, mesh, &placement)?.requires_grad();
        let gradients = y.atan2(&x)?.sum_all()?.backward()?;
        for (leaf, wanted) in [(&y, [0.0, 0.16, 0.16e30]), (&x, [0.0, -0.12, -0.12e30])] {
            let slope = gradients.get(leaf)?.full_tensor()?.to_vec1::<f32>()?;
            for (got, wanted) in slope.iter().zip(wanted) {
                assert!((f64::from(*got) - wanted).abs() <= 1e-6 * f64::abs(wanted), "{got} {wanted}");
            }
        }
        Ok(())
    });
}

#[test]
fn the_gradient_of_clamp_is_zero_on_a_bound() {
    everywhere(|mesh, placement| {
        let slope = |clamped: fn(&DTensor) -> Result<DTensor>| {
            let x = reals(&[-2.0, 0.0, 2.0, f64::NAN], DType::F32, mesh, &placement)?.requires_grad();
            clamped(&x)?.sum_all()?.backward()?.get(&x)?.full_tensor()?.to_vec1::<f32>().map_err(shardwise::Error::from)
        };
        assert_eq!(slope(|x| x.clamp(Some(-2.0), Some(2.0)))?, [0.0, 1.0, 0.0, 0.0]);
        assert_eq!(slope(|x| x.clamp_min(-2.0))?, [0.0, 1.0, 1.0, 0.0]);
        assert_eq!(slope(|x| x.clamp_max(2.0))?, [1.0, 1.0, 0.0, 0.0]);
        Ok(())
    });
}

#[test]
fn parameters_of_another_number_of_channels_are_refused() {
    everywhere(|mesh, _| {
        let of = |shape: &[usize]| DTensor::ones(shape, DType::F32, mesh, [Replicate]);
        let five = of(&[5])?;
        let line = of(&[3, 3, 5])?.conv1d(&of(&[1, 3, 1])?, Some(&five), ConvOptions::default());
        let plane = of(&[2, 3, 4, 4])?.conv2d(&of(&[1, 3, 3, 3])?, Some(&five), ConvOptions::default());
        let normal = of(&[2, 2])?.group_norm(2, Some(&of(&[1])?), None, 1e-5);
        for (result, needed) in [(line, "shape [1]"), (plane, "shape [1]"), (normal, "shape [2]")] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(needed), "{error}");
        }
        Ok(())
    });
}

#[test]
fn variances_name_each_dimension_once_in_every_layout() {
    everywhere(|mesh, placement| {
        let x = reals(&[1.0, 2.0, 3.0, 4.0], DType::F32, mesh, &placement)?.reshape(&[2, 2])?;
        for result in [x.var(&[1, 1], 1.0, false), x.std(&[0, -2], 1.0, false)] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("each once"), "{error}");
        }
        Ok(())
    });
}

#[test]
fn average_pools_of_i64_divide_sums_of_integers_towards_zero() {
    everywhere(|mesh, _| {
        let pooled = |values: &[i64], size: usize| {
            let x = Tensor::new(values, &Device::Cpu)?.reshape((1, 1, values.len()))?;
            let x = DTensor::distribute_tensor(&x, mesh, [Replicate], None)?;
            x.avg_pool1d(size, None, 0)?.full_tensor()?.flatten_all()?.to_vec1::<i64>().map_err(shardwise::Error::from)
        };
        assert_eq!(pooled(&[-5, 0, 7, 8], 2)?, [-2, 7]);
        // No f64 holds these; the sum of the last two wraps, as in PyTorch.
        assert_eq!(pooled(&[(1 << 62) + 1, i64::MIN + 1], 1)?, [(1 << 62) + 1, i64::MIN + 1]);
        assert_eq!(pooled(&[(1 << 60) + 1, 2, i64::MAX, i64::MAX], 2)?, [(1 << 59) + 1, -1]);
        // Ones of every rank, whose halves are 0.
        let ones = Tensor::new(&[[[1i64, 0]]], &Device::Cpu)?;
        let ranks = mesh.mesh().shape()[0] as i64;
        let sum = DTensor::from_local(&ones, mesh, [Partial(ReduceOp::Sum)])?;
        assert_eq!(sum.avg_pool1d(2, None, 0)?.full_tensor()?.flatten_all()?.to_vec1::<i64>()?, [ranks / 2]);
        Ok(())
    });
}

#[test]
fn deviations_of_tiny_and_huge_elements_are_neither_zero_nor_infinite() {
    everywhere(|mesh, placement| {
        for (dtype, scale, error) in [(DType::F32, 1e-30, 1e-6), (DType::F32, 1e30, 1e-6), (DType::BF16, 1e-30, 1e-2)] {
            let x = reals(&[scale, 3.0 * scale], dtype, mesh, &placement)?.requires_grad();
            let deviation = x.std(&[], 0.0, false)?;
            let slope = deviation.backward()?.get(&x)?.full_tensor()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            let found = deviation.to_dtype(DType::F64)?.item::<f64>()?;
            assert!((found / scale - 1.0).abs() < error, "{found} of {scale}");
            assert!((slope[0] + 0.5).abs() < error && (slope[1] - 0.5).abs() < error, "{slope:?} of {scale}");
        }
        Ok(())
    });
}

#[test]
fn norms_of_single_elements_are_absolute_values() {
    everywhere(|mesh, placement| {
        let x = reals(&[-1e30, 1e-30], DType::F32, mesh, &placement)?.unsqueeze(1)?;
        for order in [0.5, 2.0, 3.0, 10.0] {
            assert_eq!(x.norm(order, &[1], false)?.full_tensor()?.to_vec1::<f32>()?, [1e30, 1e-30], "{order}");
            assert_eq!(x.narrow(0, 0, 1)?.norm(order, &[], false)?.item::<f32>()?, 1e30, "{order}");
        }
        Ok(())
    });
}

#[test]
fn a_weight_without_a_dimension_of_outputs_takes_a_bias_without_dimensions() {
    everywhere(|mesh, _| {
        let ones = |shape: &[usize]| DTensor::ones(shape, DType::F32, mesh, [Replicate]);
        let (x, weight) = (ones(&[2, 3])?, ones(&[3])?);
        assert_eq!(x.linear(&weight, Some(&ones(&[])?))?.full_tensor()?.to_vec1::<f32>()?, [4.0, 4.0]);
        for bias in [ones(&[1])?, ones(&[2])?] {
            let error = x.linear(&weight, Some(&bias)).unwrap_err().to_string();
            assert!(error.contains("without dimensions"), "{error}");
        }
        Ok(())
    });
}

#[test]
fn batch_norm_scales_half_precision_by_one_number() {
    everywhere(|mesh, placement| {
        // Over the deviation alone the element is infinite in f32.
        let x = reals(&[3e38, -3e38], DType::BF16, mesh, &placement)?.unsqueeze(1)?;
        let of = |value: f64| reals(&[value], DType::BF16, mesh, &Replicate);
        let normal = x.batch_norm(Some((&of(0.0)?, &of(0.0625)?)), Some(&of(0.125)?), None, 0.0)?;
        assert_eq!(
            normal.full_tensor()?.to_vec2::<half::bf16>()?,
            x.mul_scalar(0.5)?.full_tensor()?.to_vec2::<half::bf16>()?
        );
        Ok(())
    });
}

#[test]
fn arguments_with_empty_indices_are_checked() {
    everywhere(|mesh, _| {
        let x = DTensor::ones((2, 3), DType::F32, mesh, [Replicate])?;
        let (none, nothing) = (DTensor::zeros((0, 1), DType::I64, mesh, [Replicate])?, x.narrow(0, 0, 0)?);
        for dim in [2, -3, isize::MIN] {
            assert!(x.scatter(dim, &none, &nothing).is_err(), "scatter along {dim}");
            assert!(x.scatter_add(dim, &none, &nothing).is_err(), "scatter_add along {dim}");
            assert!(x.gather(dim, &none).is_err(), "gather along {dim}");
            assert!(x.gather(dim, &none.flatten(0, -1)?).is_err(), "gather of a vector along {dim}");
        }
        assert!(x.put(&none, &x, false).is_err(), "a source for no places");
        assert_eq!(x.put(&none, &nothing, false)?.full_tensor()?.to_vec2::<f32>()?, [[1.0; 3]; 2]);
        Ok(())
    });
}

#[test]
fn the_gradient_of_elu_in_half_precision_is_rounded_once() {
    everywhere(|mesh, placement| {
        // The exponential is a subnormal number of few digits, and 0.
        let x = reals(&[-13.0, -18.0], DType::F16, mesh, &placement)?.requires_grad();
        let slope = x.elu(100.0)?.sum_all()?.backward()?.get(&x)?.full_tensor()?.to_vec1::<f16>()?;
        let exact = [-13f64, -18.0].map(|x| f16::from_f64(100.0 * x.exp()));
        assert_eq!(slope, exact);
        Ok(())
    });
}
