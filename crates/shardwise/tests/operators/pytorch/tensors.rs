//! Scenarios of PyTorch's `test_tensor_ops.py`: reads, writes, copies and extremes at indices.

use candle_core::{Device, Tensor};
use shardwise::op::cache_report;
use shardwise::prelude::*;
use shardwise_test_suites::counting::{counted, counted_both_ways};

use crate::pytorch::{assert_close, list, on, replicated, rows, tensor};

const SUM: Placement = Partial(ReduceOp::Sum);

/// Indices along `dim` that are below the size of that dimension.
fn picks(mesh: &DeviceMesh, shape: &[usize], below: usize, placement: Placement) -> Result<DTensor> {
    DTensor::from_fn(shape, DType::I64, mesh, [placement], |i| (i.iter().fold(1, |sum, n| sum * 5 + n) % below) as f64)
}

#[test]
fn gathers_of_every_dimension_follow_the_index_or_are_partial() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let shape = [12, 8, 16];
        let whole = tensor(&mesh, &shape, &[Replicate])?;
        for dim in 0..3usize {
            let (mut at, mut one) = ([12, 8, 16], [12, 8, 16]);
            (at[dim], one[dim]) = (6, 1);
            for (name, input, index, size, result) in [
                ("both replicated", Replicate, Replicate, at, Some(Replicate)),
                ("input sharded on the dimension", Shard(dim as isize), Replicate, one, Some(SUM)),
                ("index sharded on the dimension", Replicate, Shard(dim as isize), at, Some(Shard(dim as isize))),
            ] {
                let what = format!("{name}, dimension {dim}");
                let x = tensor(&mesh, &shape, &[input])?.requires_grad();
                let index = picks(&mesh, &size, shape[dim], index)?;
                let (y, grads, calls) = counted_both_ways(&world, || x.gather(dim as isize, &index))?;
                assert!(calls[0].is_empty(), "{what}: {calls:?}");
                if let Some(placement) = result {
                    assert_eq!(y.placements(), [placement], "{what}");
                }
                let leaf = whole.detach().requires_grad();
                let expected = leaf.gather(dim as isize, &replicated(&index)?)?;
                // a partial result may be read twice
                assert_close(&y, &expected, &what);
                assert_close(&y, &expected, &what);
                assert_close(grads.get(&x)?, expected.sum_all()?.backward()?.get(&leaf)?, &what);
            }
        }
        Ok(())
    });
}

#[test]
fn scatters_of_replicated_tensors_write_what_plain_loops_do() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let x = tensor(&mesh, &[8, 4], &[Replicate])?;
        for dim in [0usize, 1] {
            // a permutation along the dimension: no place is written twice
            let index = DTensor::from_fn((4, 4), DType::I64, &mesh, [Replicate], |i| ((i[0] + i[1]) % 4) as f64)?;
            for source in [tensor(&mesh, &[4, 4], &[Replicate])?, x.narrow(0, 0, 4)?.full_like(4.0)?] {
                let (y, calls) = counted(&world, || x.scatter(dim as isize, &index, &source))?;
                assert!(calls.is_empty(), "{calls:?}");
                let (mut expected, values) = (rows(&x.full_tensor()?), rows(&source.full_tensor()?));
                for (i, row) in values.iter().enumerate() {
                    for (j, value) in row.iter().enumerate() {
                        let at = (i + j) % 4;
                        if dim == 0 {
                            expected[at][j] = *value;
                        } else {
                            expected[i][at] = *value;
                        }
                    }
                }
                assert_eq!(rows(&y.full_tensor()?), expected, "dimension {dim}");
            }
        }
        Ok(())
    });
}

#[test]
fn writes_at_indices_are_right_where_the_indexed_dimension_is_sharded() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let at = |list: &[i64]| DTensor::replicate(&Tensor::new(list, &Device::Cpu)?, &mesh);
        for placement in [Replicate, Shard(0), Shard(1), SUM] {
            let x = tensor(&mesh, &[4, 8], std::slice::from_ref(&placement))?;
            let start = rows(&x.full_tensor()?);
            // the second row is written twice with the same values
            let (index, values) = (at(&[1, 1, 2])?, DTensor::full(3.0, (3, 8), DType::F64, &mesh, [Replicate])?);
            for accumulate in [false, true] {
                let y = x.index_put(&[&index], &values, accumulate)?;
                let mut expected = start.clone();
                for (row, times) in [(1, 2.0), (2, 1.0)] {
                    for value in &mut expected[row] {
                        *value = if accumulate { *value + times * 3.0 } else { 3.0 };
                    }
                }
                assert_eq!(rows(&y.full_tensor()?), expected, "{placement}, accumulate {accumulate}");
            }
        }
        // one element by two indices of no dimension
        let square = world.mesh([("a", 2), ("b", 2)])?;
        let all = ["R", "S(0)", "S(1)"];
        for (a, b) in all.iter().flat_map(|a| all.iter().map(move |b| (a, b))) {
            let x = tensor(&square, &[4, 8], &Placement::parse_list(&format!("{a},{b}"))?)?;
            let number = |n: i64| DTensor::replicate(&Tensor::new(n, &Device::Cpu)?, &square);
            let value = DTensor::full(7.5, (), DType::F64, &square, [Replicate, Replicate])?;
            let y = x.index_put(&[&number(2)?, &number(5)?], &value, false)?;
            let mut expected = rows(&x.full_tensor()?);
            expected[2][5] = 7.5;
            assert_eq!(rows(&y.full_tensor()?), expected, "{a},{b}");
            // a row of no dimension, with values sharded as the row, added or written
            let row = tensor(&square, &[8], &[Shard(0), Replicate])?;
            for accumulate in [false, true] {
                let (y, calls) = counted(&world, || x.index_put(&[&number(1)?], &row, accumulate))?;
                if (*a, *b) == ("S(1)", "R") {
                    assert_eq!((y.placements(), calls.len()), (x.placements(), 0), "{calls:?}");
                }
                let mut expected = rows(&x.full_tensor()?);
                for (found, value) in expected[1].iter_mut().zip(list(&row)?) {
                    *found = if accumulate { *found + value } else { value };
                }
                assert_eq!(rows(&y.full_tensor()?), expected, "{a},{b}");
            }
        }
        Ok(())
    });
}

#[test]
fn copies_conversions_and_parts_keep_layout_and_values() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        for placement in [Replicate, Shard(0)] {
            let x = tensor(&mesh, &[9, 4], &[placement])?.requires_grad();
            let copy = x.clone();
            assert_eq!((copy.layout(), rows(&copy.to_local()?)), (x.layout(), rows(&x.to_local()?)));
            assert!(copy.shares_memory(&x));
            let detached = (&x * 2.0)?.detach();
            assert!(!detached.has_gradient() && (&x * 2.0)?.has_gradient());
            assert_eq!(rows(&detached.to_local()?), rows(&(&x * 2.0)?.to_local()?));
            // there and back; the second time nothing has to be decided
            let there_and_back = || detached.to_dtype(DType::F32)?.to_dtype(DType::BF16);
            let first = there_and_back()?;
            let before = cache_report();
            let second = there_and_back()?;
            assert_eq!(cache_report().misses, before.misses);
            assert_eq!((second.dtype(), second.layout()), (DType::BF16, x.layout()));
            assert!(first.equal(&second)?);
        }
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            let x = tensor(&mesh, &[12, 12], &[Partial(op)])?;
            for (size, dim) in [(2, 0), (3, 0), (4, 0), (2, 1), (3, 1), (4, 1), (5, 1)] {
                let (parts, calls) = counted(&world, || x.split(size, dim))?;
                assert!(calls.is_empty() && parts.iter().all(|p| p.placements() == [Partial(op)]), "{op:?}");
                let together = DTensor::cat(&parts.iter().collect::<Vec<_>>(), dim)?;
                assert_close(&together, &replicated(&x)?, "parts of a partial tensor");
            }
        }
        // the upper half of sharded columns, and its gradient
        let x = tensor(&mesh, &[8, 16], &[Shard(1)])?.requires_grad();
        let (y, grads, calls) = counted_both_ways(&world, || x.i((.., 8..)))?;
        assert!(calls.iter().all(|calls| calls.len() <= 1), "{calls:?}");
        assert_close(&y, &replicated(&x)?.i((.., 8..))?, "slice");
        assert_eq!(list(grads.get(&x)?)?, [[0.0; 8], [1.0; 8]].concat().repeat(8));
        Ok(())
    });
}

#[test]
fn the_first_of_equal_extremes_is_found_in_every_layout() {
    on(4, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        // every value twice in a row and in every row, so that the first of equal ones counts
        let all: Vec<f64> = (0..64).map(|i| ((i % 8) % 4 * 3 + i / 8) as f64).collect();
        let all = Tensor::from_vec(all, (8, 8), &Device::Cpu)?;
        let whole = DTensor::distribute_tensor(&all, &mesh, [Replicate, Replicate], None)?;
        // of 0, 3, 6, 9, 0, 3, 6, 9 plus the row: the largest is at 3, the smallest at 0
        assert_eq!(list(&whole.argmax(Some(1), false)?)?, [3.0; 8]);
        assert_eq!(list(&whole.argmin(Some(1), false)?)?, [0.0; 8]);
        for placements in ["P(sum),S(1)", "P(sum),S(0)", "S(0),S(1)", "R,S(0)", "R,S(1)", "S(1),S(1)"] {
            let x = whole.redistribute(Placement::parse_list(placements)?)?;
            for keepdim in [false, true] {
                for dim in [Some(0), Some(1), None] {
                    let what = format!("{placements} over {dim:?}");
                    assert!(x.argmax(dim, keepdim)?.equal(&whole.argmax(dim, keepdim)?)?, "{what}");
                    assert!(x.argmin(dim, keepdim)?.equal(&whole.argmin(dim, keepdim)?)?, "{what}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn dropout_drops_the_same_elements_on_every_shard_and_scales_the_gradient() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        for p in [0.4, 0.5] {
            mesh.manual_seed(6);
            // no element is zero
            let of = |placement: Placement| tensor(&mesh, &[9, 16], &[placement])? + 10.0;
            let whole = of(Replicate)?;
            let expected = whole.dropout(p, true)?;
            let dropped = list(&expected)?.iter().filter(|x| **x == 0.0).count();
            assert!((20..110).contains(&dropped), "{dropped} of 144");
            for placement in [Shard(0), Shard(1)] {
                let x = of(placement.clone())?.requires_grad();
                mesh.manual_seed(6);
                let (y, grads, calls) = counted_both_ways(&world, || x.dropout(p, true))?;
                assert!(calls.concat().is_empty(), "{placement}: {calls:?}");
                assert_eq!((y.placements(), list(&y)?), (std::slice::from_ref(&placement), list(&expected)?));
                // what is kept is scaled, in the gradient too
                let kept = |y: &f64| if *y == 0.0 { 0.0 } else { 1.0 / (1.0 - p) };
                let scale: Vec<f64> = list(&y)?.iter().map(kept).collect();
                let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12;
                assert!(list(grads.get(&x)?)?.iter().zip(&scale).all(near), "{placement}");
                assert!(list(&x)?.iter().zip(&scale).map(|(x, s)| x * s).zip(&list(&y)?).all(|(a, b)| near((&a, b))));
                assert!(x.dropout(p, false)?.equal(&x)?, "nothing is dropped outside of training");
            }
            // a mask and a scale of the program
            let mask = expected.ne(0.0)?.to_dtype(DType::F64)?;
            let x = of(Shard(1))?.requires_grad();
            let grads = x.mul(&mask)?.mul_scalar(0.3)?.sum_all()?.backward()?;
            assert_close(grads.get(&x)?, &(mask * 0.3)?, "gradient of a given mask");
        }
        // multiples of partial sums, of integers too
        let integers = DTensor::from_local(&Tensor::full(2i64, 3, &Device::Cpu)?, &mesh, [SUM])?;
        let reals = DTensor::from_local(&Tensor::full(2f64, 3, &Device::Cpu)?, &mesh, [SUM])?;
        let (all, calls) = counted(&world, || Ok([(&integers * 2)?, (&reals * 2.0)?, (&reals / 2.0)?]))?;
        assert!(calls.is_empty() && all.iter().all(|y| y.placements() == [SUM]), "{calls:?}");
        for (y, expected) in all.iter().zip([16.0, 16.0, 4.0]) {
            assert_eq!(list(y)?, [expected; 3]);
        }
        assert_eq!(list(&(&integers / 2)?)?, [4.0; 3]);
        Ok(())
    });
}

#[test]
fn indices_are_drawn_by_their_weights_alike_in_every_layout() {
    on(3, |world| {
        let mesh = world.mesh([("a", 3)])?;
        let weights = [0.0, 1.0, 2.0, 0.0, 5.0];
        let rows = 4001;
        let of = |placement: Placement| {
            DTensor::from_fn((rows, 5), DType::F64, &mesh, [Replicate], |i| weights[i[1]] * (1 + i[0] % 7) as f64)?
                .redistribute([placement])
        };
        for replacement in [true, false] {
            mesh.manual_seed(5);
            let expected = of(Replicate)?.multinomial(3, replacement)?;
            assert_eq!((expected.shape(), expected.dtype()), (&[rows, 3][..], DType::I64));
            for placement in [Shard(0), Shard(1), SUM] {
                mesh.manual_seed(5);
                let (drawn, calls) = counted(&world, || of(placement.clone())?.multinomial(3, replacement))?;
                assert!(calls.len() <= 1 && drawn.equal(&expected)?, "{placement}: {calls:?}");
            }
            let all = expected.full_tensor()?.to_vec2::<i64>()?;
            // the first of a row has the probabilities of the weights, within five standard deviations
            for (index, weight) in weights.iter().enumerate() {
                let found = all.iter().filter(|row| row[0] == index as i64).count() as f64;
                let share = weight / 8.0;
                let spread = 5.0 * (rows as f64 * share * (1.0 - share)).sqrt();
                assert!((found - rows as f64 * share).abs() <= spread, "{found} of index {index}");
            }
            for row in &all {
                assert!(row.iter().all(|index| weights[*index as usize] > 0.0), "{row:?}");
                let mut different = row.clone();
                different.sort_unstable();
                different.dedup();
                assert!(replacement || different.len() == 3, "{row:?}");
            }
        }
        let vector = DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?.multinomial(9, true)?;
        assert_eq!(
            (vector.shape(), vector.full_tensor()?.to_vec1::<i64>()?.iter().all(|i| (0..4).contains(i))),
            (&[9][..], true)
        );
        for (wrong, count, part) in [
            (of(Replicate)?, 4, "3 weights above 0 for 4 indices"),
            ((of(Replicate)? - 1.0)?, 1, "a row [-1.0"),
            (of(Replicate)?.zeros_like()?, 1, "0 weights above 0"),
            (of(Replicate)?, 0, "0 indices"),
        ] {
            let error = wrong.multinomial(count, false).expect_err(part).to_string();
            assert!(error.contains(part) && error.contains("multinomial"), "{error}");
        }
        Ok(())
    });
}
