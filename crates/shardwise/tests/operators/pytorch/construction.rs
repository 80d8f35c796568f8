//! Scenarios of PyTorch's `test_dtensor.py`, `test_api.py`, `test_init.py` and `test_utils.py`: tensors from local parts, from a full
//! tensor and from factories, and what every rank then holds.

use candle_core::{Device, Tensor};
use shardwise::prelude::*;
use shardwise_test_suites::counting::counted;

use crate::pytorch::{list, on, rows, tensor};

const SUM: Placement = Partial(ReduceOp::Sum);

/// A matrix whose elements are their positions.
fn table(rows: usize, columns: usize) -> Tensor {
    Tensor::arange(0f64, (rows * columns) as f64, &Device::Cpu).unwrap().reshape((rows, columns)).unwrap()
}

/// A matrix of one number.
fn full(value: usize, rows: usize, columns: usize) -> Tensor {
    Tensor::full(value as f64, (rows, columns), &Device::Cpu).unwrap()
}

#[test]
fn local_parts_have_the_shape_that_their_placements_say() {
    on(8, |world| {
        let (line, mesh) = (world.mesh([("a", 8)])?, world.mesh([("a", 2), ("b", 4)])?);
        let mine = full(world.rank(), 3, 3);
        for (placement, shape) in [(Shard(0), [24, 3]), (Shard(-1), [3, 24]), (Replicate, [3, 3]), (SUM, [3, 3])] {
            let x = DTensor::from_local(&mine, &line, [placement.clone()])?;
            assert_eq!(x.shape(), shape, "{placement}");
            assert_eq!(rows(&x.to_local()?), rows(&mine), "{placement}");
            let stored = if placement == Shard(-1) { Shard(1) } else { placement };
            assert_eq!(x.placements(), [stored]);
        }
        for (placements, shape) in [([Shard(0), Shard(1)], [6, 12]), ([Shard(0), Shard(0)], [24, 3])] {
            let x = DTensor::from_local(&mine, &mesh, placements)?;
            assert_eq!((x.shape(), rows(&x.to_local()?)), (&shape[..], rows(&mine)));
        }
        // 9 rows over 8 ranks: two on four of them, one on the next, none after it
        let count = [2, 2, 2, 2, 1, 0, 0, 0][world.rank()];
        let x = DTensor::from_local_with_shape(&full(1, count, 4), &line, [Shard(0)], (9, 4))?;
        assert_eq!((x.shape(), list(&x)?), (&[9, 4][..], vec![1.0; 36]));
        let error = DTensor::from_local_with_shape(&full(1, count, 4), &line, [Shard(0)], (100, 4));
        assert!(error.unwrap_err().to_string().contains("[100, 4]"));
        // parts of 0 to 7 rows or columns; one that differs where it is not sharded is an error on every rank
        for dim in 0..2 {
            let mut size = [4, 4];
            size[dim] = world.rank();
            let x = DTensor::from_local(&full(1, size[0], size[1]), &line, [Shard(dim as isize)])?;
            let mut whole = [4, 4];
            whole[dim] = 28;
            assert_eq!(x.shape(), whole);
            size[1 - dim] = 3 + usize::from(world.rank() == 5);
            let error = DTensor::from_local(&full(1, size[0], size[1]), &line, [Shard(dim as isize)]);
            assert!(error.unwrap_err().to_string().contains("rank 5"));
        }
        let error = DTensor::from_local(&mine, &mesh, [Shard(0)]).unwrap_err().to_string();
        assert!(error.contains("one per mesh axis"), "{error}");
        // one rank has another element type
        let odd = if world.rank() == 3 { mine.to_dtype(DType::F32)? } else { mine };
        let error = DTensor::from_local(&odd, &line, [Shard(0)]).unwrap_err().to_string();
        assert!(error.contains("element type") && error.contains("rank 3"), "{error}");
        world.barrier()
    });
}

#[test]
fn every_rank_takes_its_part_of_the_source() {
    on(4, |world| {
        let (line, square) = (world.mesh([("a", 4)])?, world.mesh([("a", 2), ("b", 2)])?);
        let (all, rank) = (table(4, 4), world.rank());
        let parts = || -> Result<[DTensor; 2]> {
            let of = |placement| DTensor::distribute_tensor(&all, &line, [placement], None);
            Ok([of(Shard(0))?, of(Shard(1))?])
        };
        let ([by_rows, by_columns], calls) = counted(&world, parts)?;
        assert!(calls.is_empty(), "{calls:?}");
        assert_eq!(rows(&by_rows.to_local()?), [rows(&all)[rank].clone()]);
        assert_eq!(rows(&by_columns.to_local()?), rows(&all.narrow(1, rank, 1)?));
        assert_eq!(rows(&all), rows(&table(4, 4)), "the source is unchanged");
        assert_eq!(rows(&by_columns.full_tensor()?), rows(&all));
        let one = DTensor::distribute_tensor(&table(2, 2), &square, [Shard(0), Shard(1)], None)?;
        assert_eq!(rows(&one.to_local()?), [[rank as f64]]);
        // every rank brings its own data: that of the source rank counts, or each rank's own
        let mine = full(rank, 5, 3);
        for placement in [Shard(0), Shard(1), Replicate, SUM, Partial(ReduceOp::Avg)] {
            let x = DTensor::distribute_tensor(&mine, &line, [placement.clone()], Some(1))?;
            assert_eq!((x.placements(), list(&x)?), (&[placement.clone()][..], vec![1.0; 15]));
            let (own, calls) = counted(&world, || DTensor::distribute_tensor(&mine, &line, [placement.clone()], None))?;
            assert!(calls.is_empty(), "{placement}: {calls:?}");
            if !placement.is_partial() {
                assert!(own.to_local()?.flatten_all()?.to_vec1::<f64>()?.iter().all(|x| *x == rank as f64));
            }
        }
        // too few placements, a reduction that the type does not have, a dimension that the tensor does not have
        let integers = mine.to_dtype(DType::I64)?;
        for (result, part) in [
            (DTensor::distribute_tensor(&mine, &square, [Shard(0)], None), "one per mesh axis"),
            (DTensor::distribute_tensor(&integers, &line, [Partial(ReduceOp::Avg)], None), "avg of i64"),
            (DTensor::distribute_tensor(&mine, &line, [Shard(2)], None), "from -2 to 1"),
        ] {
            let error = result.expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        }
        Ok(())
    });
}

#[test]
fn a_plain_tensor_counts_as_replicated() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let x = tensor(&mesh, &[8, 3], &[Shard(0)])?;
        for plain in [Tensor::new(&[1f64, 2.0, 3.0], &Device::Cpu)?, Tensor::new(&[2f64], &Device::Cpu)?] {
            let (y, calls) = counted(&world, || x.add(&DTensor::replicate(&plain, &mesh)?))?;
            assert_eq!((y.placements(), calls.len()), (&[Shard(0)][..], 0));
            assert_eq!(rows(&y.full_tensor()?), rows(&x.full_tensor()?.broadcast_add(&plain)?));
        }
        Ok(())
    });
}

#[test]
fn factories_fill_even_uneven_and_empty_shapes() {
    on(4, |world| {
        let (line, square) = (world.mesh([("a", 4)])?, world.mesh([("a", 2), ("b", 2)])?);
        for shape in [&[4, 8, 12][..], &[5, 10, 15], &[]] {
            let count: usize = shape.iter().product();
            for dim in 0..=shape.len() as isize {
                let placement = if dim == shape.len() as isize { Replicate } else { Shard(dim) };
                let p = || [placement.clone()];
                for (x, value) in [
                    (DTensor::ones(shape, DType::F32, &line, p())?, 1.0),
                    (DTensor::zeros(shape, DType::F32, &line, p())?, 0.0),
                    (DTensor::full(123.4, shape, DType::F64, &line, p())?, 123.4),
                ] {
                    assert_eq!((x.placements(), list(&x)?), (&p()[..], vec![value; count]));
                    assert_eq!(x.local_shape(), x.layout().local_shape(world.rank()));
                }
                let empty = DTensor::empty(shape, DType::F32, &line, p())?;
                assert_eq!(empty.local_shape(), empty.layout().local_shape(world.rank()));
                // of the same kind as one tensor, another type leaves that alone
                let like = DTensor::ones(shape, DType::F32, &line, p())?;
                for (y, value) in [(like.full_like(42.0)?, 42.0), (like.zeros_like()?, 0.0), (like.ones_like()?, 1.0)] {
                    assert_eq!((y.layout(), list(&y)?), (like.layout(), vec![value; count]));
                }
                assert_eq!(list(&like.empty_like()?)?.len(), count.max(1));
                assert_eq!(list(&like)?, vec![1.0; count]);
            }
        }
        // ones that are partial are one, not four
        let partial = tensor(&line, &[3, 2], &[SUM])?;
        assert_eq!((list(&partial.ones_like()?)?, list(&partial.zeros_like()?)?), (vec![1.0; 6], vec![0.0; 6]));
        // parts of 31 rows
        for (placements, parts) in [
            (vec![Shard(0), Replicate], [[16, 3], [16, 3], [15, 3], [15, 3]]),
            (vec![Shard(0), Shard(1)], [[16, 2], [16, 1], [15, 2], [15, 1]]),
        ] {
            let x = DTensor::zeros((31, 3), DType::F32, &square, placements)?;
            assert_eq!(x.local_shape(), parts[world.rank()]);
        }
        for (rows, parts) in [(32, [8, 8, 8, 8]), (31, [8, 8, 8, 7])] {
            let x = DTensor::zeros((rows, 3), DType::F32, &line, [Shard(0)])?;
            assert_eq!(x.local_shape(), [parts[world.rank()], 3]);
        }
        Ok(())
    });
}

#[test]
fn strided_shards_hold_the_elements_that_pytorch_gives_them() {
    on(4, |world| {
        let (line, square) = (world.mesh([("a", 4)])?, world.mesh([("a", 2), ("b", 2)])?);
        let eight = Tensor::arange(0f64, 8.0, &Device::Cpu)?;
        let local = |x: &DTensor| -> Result<Vec<f64>> { Ok(x.to_local()?.flatten_all()?.to_vec1()?) };
        for (factor, parts) in [
            (1, [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]),
            (2, [[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]),
        ] {
            let x = DTensor::distribute_tensor(&eight, &line, [Placement::strided(0, factor)], None)?;
            assert_eq!(local(&x)?, parts[world.rank()]);
            assert_eq!(list(&x)?, eight.to_vec1::<f64>()?);
        }
        let parts = [[0.0, 1.0], [4.0, 5.0], [2.0, 3.0], [6.0, 7.0]][world.rank()];
        for (dim, shape) in [(0, (8, 1)), (1, (1, 8))] {
            let x = DTensor::distribute_tensor(
                &eight.reshape(shape)?,
                &square,
                [Placement::strided(dim, 2), Shard(dim)],
                None,
            )?;
            assert_eq!(local(&x)?, parts);
            // the same from the parts themselves, which moves nothing
            let mine = x.to_local()?;
            let again =
                || DTensor::from_local_with_shape(&mine, &square, [Placement::strided(dim, 2), Shard(dim)], x.shape());
            let (again, calls) = counted(&world, again)?;
            assert!(calls.is_empty(), "{calls:?}");
            assert_eq!(list(&again)?, eight.to_vec1::<f64>()?);
        }
        for n in [2, 3, 5, 11] {
            let whole = tensor(&square, &[3, n], &[Replicate, Replicate])?;
            let strided = whole.redistribute([Placement::strided(1, 2), Shard(1)])?;
            let held = strided.layout().global_indices(world.rank(), 1);
            let mine: Vec<Vec<f64>> =
                rows(&whole.full_tensor()?).iter().map(|row| held.iter().map(|i| row[*i]).collect()).collect();
            assert_eq!(strided.to_local()?.flatten_all()?.to_vec1::<f64>()?, mine.concat());
            assert_eq!(list(&strided.redistribute([Replicate, Replicate])?)?, list(&whole)?);
        }
        Ok(())
    });
}

#[test]
fn local_and_global_shapes_of_256_ranks_agree() {
    let mesh: Mesh = "a=8,b=8,c=4".parse().unwrap();
    let kinds = [Shard(0), Shard(1), Shard(2), Replicate];
    let shape = [67, 131, 33];
    for (a, b) in kinds.iter().flat_map(|a| kinds.iter().map(move |b| (a, b))) {
        for c in &kinds {
            let layout = Layout::new(&mesh, shape.as_slice(), [a.clone(), b.clone(), c.clone()]).unwrap();
            for (dim, size) in shape.iter().enumerate() {
                // along the axes that shard it the parts of a dimension add up to its size, along other axes they are equal
                let sharded: Vec<usize> =
                    (0..3).filter(|&axis| layout.placements()[axis] == Shard(dim as isize)).collect();
                let first = |rank: &usize| {
                    let coordinate = mesh.coordinate(*rank).unwrap();
                    (0..3).all(|axis| sharded.contains(&axis) || coordinate[axis] == 0)
                };
                let sizes = (0..256).filter(first).map(|rank| layout.local_shape(rank)[dim]);
                assert_eq!(sizes.sum::<usize>(), *size, "dimension {dim} of {layout}");
            }
        }
    }
}
