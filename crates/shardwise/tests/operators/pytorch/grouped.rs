//! Scenarios of PyTorch's `test_matrix_ops.py` about grouped products.

use candle_core::{DType, Device, Tensor};
use shardwise::error::ErrorKind;
use shardwise::prelude::*;
use shardwise_test_suites::counting::counted;

use crate::pytorch::{assert_close, list, on, tensor};

const SUM: Placement = Partial(ReduceOp::Sum);

fn ends(mesh: &DeviceMesh, ends: &[i64]) -> Result<DTensor> {
    DTensor::replicate(&Tensor::from_slice(ends, ends.len(), &Device::Cpu)?, mesh)
}

/// A product per group of rows, in operators that are not grouped products; rows after the last group are 0.
fn by_group(x: &DTensor, matrices: &DTensor, ends: &[i64]) -> Result<DTensor> {
    let mut parts = Vec::new();
    let mut start = 0;
    for (group, &end) in ends.iter().enumerate() {
        parts.push(x.narrow(0, start, end as usize - start)?.matmul(&matrices.select(0, group as isize)?)?);
        start = end as usize;
    }
    let rest = x.narrow(0, start, x.shape()[0] - start)?.matmul(&matrices.select(0, 0)?)?.mul_scalar(0.0)?;
    parts.push(rest);
    DTensor::cat(&parts.iter().collect::<Vec<_>>(), 0)
}

/// Two layers of experts: rows, both stacks, ends of the groups.
fn experts(inputs: &[DTensor; 3], product: impl Fn(&DTensor, &DTensor) -> Result<DTensor>) -> Result<DTensor> {
    product(&product(&inputs[0], &inputs[1])?.silu()?, &inputs[2])
}

#[test]
fn grouped_products_of_experts_communicate_nothing_forward_and_once_backward() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let groups = [23, 23, 60];
        let shapes: [&[usize]; 3] = [&[64, 16], &[3, 16, 32], &[3, 32, 16]];
        let inputs = |placements: &[Placement; 3]| -> Result<[DTensor; 3]> {
            let one = |i: usize| -> Result<DTensor> {
                let whole = (tensor(&mesh, shapes[i], &[Replicate])? * 0.1)?;
                Ok(whole.redistribute([placements[i].clone()])?.requires_grad())
            };
            Ok([one(0)?, one(1)?, one(2)?])
        };
        let whole = inputs(&[Replicate, Replicate, Replicate])?;
        let expected = experts(&whole, |x, w| by_group(x, w, &groups))?;
        let wanted = expected.square()?.sum_all()?.backward()?;
        let offsets = ends(&mesh, &groups)?;
        // features of the experts, or rows: then both stacks have gradients that are reduced
        for (placements, out, backward) in
            [([Replicate, Shard(2), Shard(1)], SUM, 1), ([Shard(0), Replicate, Replicate], Shard(0), 2)]
        {
            let what = format!("{placements:?}");
            let x = inputs(&placements)?;
            let product = |x: &DTensor, w: &DTensor| x.grouped_mm(w, Some(&offsets));
            let (y, calls) = counted(&world, || experts(&x, product))?;
            assert!(y.placements() == [out] && calls.is_empty(), "{what}: {} with {calls:?}", y.layout());
            assert_close(&y, &expected, &what);
            let g = expected.detach().mul_scalar(2.0)?;
            let (found, calls) = counted(&world, || y.backward_from(&g)?.in_param_layout())?;
            assert!(calls.len() <= backward, "{what}: {calls:?}");
            for (x, w) in x.iter().zip(&whole) {
                assert_eq!(found.get(x)?.layout(), x.layout(), "{what}");
                assert_close(found.get(x)?, wanted.get(w)?, &what);
            }
        }
        // sharded experts: a rank computes its own, and their gradients
        let [x, w, _] = inputs(&[Replicate, Shard(0), Replicate])?;
        let (y, calls) = counted(&world, || x.grouped_mm(&w, Some(&offsets)))?;
        assert!(y.placements() == [SUM] && calls.is_empty(), "{} with {calls:?}", y.layout());
        let plain = by_group(&whole[0], &whole[1], &groups)?;
        assert_close(&y, &plain, "experts");
        let g = plain.detach();
        let (found, calls) = counted(&world, || y.backward_from(&g))?;
        let wanted = plain.backward_from(&g)?;
        assert!(calls.is_empty() && found.get(&w)?.placements() == [Shard(0)], "{calls:?}");
        assert_close(found.get(&w)?, wanted.get(&whole[1])?, "gradient of experts");
        assert_close(found.get(&x)?, wanted.get(&whole[0])?, "gradient of rows");
        Ok(())
    });
}

/// A product per group in PyTorch, of eighths, which are exact: rows `[5, 3]` in groups of two and a rest, matrices `[2, 3, 2]`.
#[test]
fn groups_of_rows_have_the_values_and_gradients_of_pytorch() {
    const RESULT: [f64; 10] = [0.40625, -0.0625, -0.765625, 0.171875, -0.0625, 0.046875, 0.09375, -0.015625, 0.0, 0.0];
    #[rustfmt::skip]
    const OF_ROWS: [f64; 15] = [
        -0.34375, -0.359375, -0.375, -0.3125, -0.296875, -0.28125, 0.265625, 0.3125, 0.359375, 0.1875, 0.265625, 0.34375,
        0.0, 0.0, 0.0,
    ];
    #[rustfmt::skip]
    const OF_MATRICES: [f64; 12] = [
        0.34375, -0.421875, -0.421875, 0.34375, 0.234375, -0.3125, -0.015625, -0.125, 0.0625, 0.0625, -0.0625, 0.046875,
    ];
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let of = |shape: &[usize], salt: usize, placement: &Placement| {
            let value = |at: &[usize]| {
                let flat = at.iter().zip(shape).fold(0, |flat, (i, n)| flat * n + i);
                ((flat * 7 + salt * 5) % 13) as f64 / 8.0 - 0.75
            };
            DTensor::from_fn(shape, DType::F64, &mesh, [placement.clone()], value)
        };
        for rows in [Replicate, Shard(0), Shard(1), Placement::ragged(0, [3, 2])] {
            for matrices in [Replicate, Shard(0), Shard(1), Shard(2)] {
                let (x, w) = (of(&[5, 3], 1, &rows)?.requires_grad(), of(&[2, 3, 2], 2, &matrices)?.requires_grad());
                let y = x.grouped_mm(&w, Some(&ends(&mesh, &[2, 4])?))?;
                let found = y.backward_from(&of(&[5, 2], 3, &Replicate)?)?;
                let what = format!("{rows}, {matrices}");
                assert_eq!(list(&y)?, RESULT, "{what}");
                assert_eq!(list(found.get(&x)?)?, OF_ROWS, "{what}");
                assert_eq!(list(found.get(&w)?)?, OF_MATRICES, "{what}");
            }
        }
        Ok(())
    });
}

#[test]
fn groups_of_columns_and_of_what_is_summed_over_are_grouped_products_too() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let of = |shape: &[usize], placement: &Placement| tensor(&mesh, shape, std::slice::from_ref(placement));
        let groups = [2, 2, 5];
        for placement in [Replicate, Shard(0), Shard(1), Placement::ragged(0, [1, 2])] {
            // offsets may be sharded, of any type of integers
            let offsets = ends(&mesh, &groups)?.to_dtype(DType::U32)?.redistribute([Shard(0)])?;
            // groups of columns
            let (a, b) = (of(&[3, 4, 6], &placement)?, of(&[6, 7], &Shard(1))?);
            let transposed = by_group(&b.t()?, &a.transpose(1, 2)?, &groups)?.t()?;
            assert_close(&a.grouped_mm(&b, Some(&offsets))?, &transposed, "columns");
            // groups of what is summed over
            let (a, b) = (of(&[3, 6], &placement)?, of(&[6, 4], &Shard(0))?);
            let product =
                |start: usize, end: usize| a.narrow(1, start, end - start)?.matmul(&b.narrow(0, start, end - start)?);
            let stacked = DTensor::stack(&[&product(0, 2)?, &product(2, 2)?, &product(2, 5)?], 0)?;
            assert_close(&a.grouped_mm(&b, Some(&offsets))?, &stacked, "summed");
            // batches of matrices
            let (a, b) = (of(&[3, 2, 6], &placement)?, of(&[3, 6, 4], &Shard(0))?);
            assert_close(&a.grouped_mm(&b, None)?, &a.bmm(&b)?, "batches");
        }
        // half precision is rounded once
        let (a, b) = (of(&[7, 6], &Shard(1))?, of(&[3, 6, 4], &Shard(1))?);
        let halves = [&a, &b].map(|x| x.to_dtype(DType::BF16));
        let [x, w] = halves;
        let (x, w) = (x?, w?);
        let offsets = ends(&mesh, &groups)?;
        let exact = x.to_dtype(DType::F64)?.grouped_mm(&w.to_dtype(DType::F64)?, Some(&offsets))?;
        assert_close(&x.grouped_mm(&w, Some(&offsets))?, &exact.to_dtype(DType::BF16)?, "half precision");
        Ok(())
    });
}

#[test]
fn offsets_that_do_not_fit_are_refused_on_every_rank() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let (x, w) = (tensor(&mesh, &[6, 4], &[Shard(0)])?, tensor(&mesh, &[2, 4, 3], &[Shard(0)])?);
        for (wrong, index) in [([3, 2], 2), ([3, 7], 7), ([-1, 4], -1)] {
            let error = x.grouped_mm(&w, Some(&ends(&mesh, &wrong)?)).unwrap_err();
            assert!(matches!(error.kind(), Some(ErrorKind::Index { index: i, size: 6 }) if *i == index), "{error}");
            let text = error.to_string();
            assert!(text.contains("grouped_mm") && text.contains("do not descend, of at most 6"), "{text}");
        }
        let error = x.grouped_mm(&w, Some(&ends(&mesh, &[1, 2, 3])?)).unwrap_err().to_string();
        assert!(error.contains("[6, 4], [2, 4, 3], [3]") && error.contains("an offset per group"), "{error}");
        let error = x.grouped_mm(&w, None).unwrap_err().to_string();
        assert!(error.contains("offsets none") && error.contains("add the offsets"), "{error}");
        let fractions = DTensor::ones(2, DType::F64, &mesh, [Replicate])?;
        assert!(matches!(x.grouped_mm(&w, Some(&fractions)).unwrap_err().kind(), Some(ErrorKind::DType { .. })));
        world.barrier()
    });
}
