//! Scenarios of PyTorch's `test_matrix_ops.py`: products in every placement of their factors, with gradients.

use shardwise::ops::AttentionOptions;
use shardwise::prelude::*;
use shardwise_test_suites::counting::{counted, counted_both_ways};

use crate::pytorch::{assert_close, list, on, replicated, tensor};

const SUM: Placement = Partial(ReduceOp::Sum);

/// Calls `run` with tensors in every combination of placements, one list of placements per tensor.
fn each_combination(
    options: &[&[Placement]],
    run: &mut dyn FnMut(&[Placement]) -> Result<()>,
    so_far: &mut Vec<Placement>,
) -> Result<()> {
    let Some((first, rest)) = options.split_first() else { return run(so_far) };
    for placement in *first {
        so_far.push(placement.clone());
        each_combination(rest, run, so_far)?;
        so_far.pop();
    }
    Ok(())
}

type Product = fn(&[DTensor]) -> Result<DTensor>;

#[test]
fn products_and_their_gradients_are_right_in_every_placement() {
    let matrix = [Replicate, Shard(0), Shard(1)];
    let partial = [Replicate, Shard(0), Shard(1), Shard(2)];
    let cases: [(&str, Product, Vec<&[usize]>, usize); 6] = [
        ("mm", |t| t[0].mm(&t[1]), vec![&[12, 8], &[8, 16]], 0),
        ("matmul", |t| t[0].matmul(&t[1]), vec![&[8, 128], &[128, 128]], 0),
        ("tensordot", |t| t[0].tensordot(&t[1], &[0], &[0]), vec![&[4, 4], &[4, 15]], 0),
        ("addmm", |t| t[0].addmm(&t[1], &t[2], 1.0, 1.0), vec![&[12, 4], &[12, 8], &[8, 4]], 0),
        ("bmm", |t| t[0].bmm(&t[1]), vec![&[4, 8, 4], &[4, 4, 8]], 1),
        ("baddbmm", |t| t[0].baddbmm(&t[1], &t[2], 0.8, 0.5), vec![&[4, 4, 8], &[4, 4, 8], &[4, 8, 8]], 1),
    ];
    on(4, move |world| {
        let mesh = world.mesh([("a", 4)])?;
        for (name, product, shapes, batched) in &cases {
            let leaves = |placements: &[Placement]| -> Result<Vec<DTensor>> {
                let each = shapes.iter().zip(placements);
                each.map(|(shape, p)| Ok((tensor(&mesh, shape, std::slice::from_ref(p))? * 0.25)?.requires_grad()))
                    .collect()
            };
            let whole = leaves(&vec![Replicate; shapes.len()])?;
            let expected = product(&whole)?;
            let wanted = expected.square()?.sum_all()?.backward()?;
            let options: &[Placement] = if *batched > 0 { &partial } else { &matrix };
            let mut run = |placements: &[Placement]| -> Result<()> {
                let what = format!("{name} of {placements:?}");
                let inputs = leaves(placements)?;
                let y = product(&inputs)?;
                assert!(y.detach().allclose(&expected.detach(), 1e-10, 1e-10)?, "{what}");
                let found = y.square()?.sum_all()?.backward()?;
                for (leaf, one) in inputs.iter().zip(&whole) {
                    assert!(found.get(leaf)?.allclose(wanted.get(one)?, 1e-10, 1e-10)?, "gradient of {what}");
                }
                Ok(())
            };
            each_combination(&vec![options; shapes.len()], &mut run, &mut Vec::new())?;
        }
        Ok(())
    });
}

#[test]
fn a_product_of_shards_that_are_summed_over_stays_partial() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let of = |shape: &[usize], placement: Placement| -> Result<DTensor> {
            Ok(tensor(&mesh, shape, &[placement])?.requires_grad())
        };
        let run = |placed: [Placement; 3]| -> Result<[DTensor; 3]> {
            let [c, a, b] = placed;
            Ok([of(&[4], c)?, of(&[12, 8], a)?, of(&[8, 4], b)?])
        };
        let whole = run([Replicate, Replicate, Replicate])?;
        let expected = whole[0].addmm(&whole[1], &whole[2], 1.0, 1.0)?;
        let wanted = expected.sum_all()?.backward()?;
        // the bias, which every rank has, is added once
        for bias in [Replicate, SUM] {
            let leaves = run([bias.clone(), Shard(1), Shard(0)])?;
            let (y, grads, calls) = counted_both_ways(&world, || leaves[0].addmm(&leaves[1], &leaves[2], 1.0, 1.0))?;
            assert_eq!(y.placements(), [SUM], "bias {bias}");
            assert!(calls.concat().is_empty(), "bias {bias}: {calls:?}");
            assert_close(&y, &expected, "addmm");
            for (leaf, one) in leaves.iter().zip(&whole) {
                assert_close(grads.get(leaf)?, wanted.get(one)?, "gradient");
            }
        }
        // transposing keeps it partial, and turns the dimension of a shard
        let product = of(&[12, 8], Shard(1))?.matmul(&of(&[8, 4], Shard(0))?)?;
        let (turned, calls) = counted(&world, || product.t())?;
        assert_eq!((turned.placements(), calls.len()), (&[SUM][..], 0));
        assert_close(&turned, &replicated(&product)?.t()?, "transposed product");
        let x = of(&[12, 8], Shard(0))?;
        let (back, calls) = counted(&world, || {
            let turned = x.t()?;
            assert_eq!((turned.shape(), turned.placements()), (&[8, 12][..], &[Shard(1)][..]));
            turned.t()
        })?;
        assert_eq!((back.placements(), calls.len(), list(&back)?), (&[Shard(0)][..], 0, list(&x)?));
        // a start that is not read does not spread its NaN
        let nan = DTensor::full(f64::NAN, (4, 4, 8), DType::F64, &mesh, [Shard(1)])?;
        let (a, b) = (tensor(&mesh, &[4, 4, 8], &[Shard(2)])?, tensor(&mesh, &[4, 8, 8], &[Shard(1)])?);
        let y = nan.baddbmm(&a, &b, 0.0, 0.5)?;
        assert!(y.allclose(&(replicated(&a)?.bmm(&replicated(&b)?)? * 0.5)?, 1e-12, 1e-12)?);
        Ok(())
    });
}

#[test]
fn products_of_rows_and_columns_are_right_where_ranks_have_none() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        // fewer rows than ranks
        let (x, w) = (tensor(&mesh, &[3, 8], &[Shard(0)])?, tensor(&mesh, &[8, 5], &[Replicate])?);
        let (y, calls) = counted(&world, || x.matmul(&w))?;
        assert_eq!((y.placements(), calls.len()), (&[Shard(0)][..], 0));
        assert_close(&y, &replicated(&x)?.matmul(&w)?, "fewer rows than ranks");
        for shape in [[2, 2], [4, 1], [1, 4]] {
            let mesh = world.mesh([("a", shape[0]), ("b", shape[1])])?;
            let a = tensor(&mesh, &[256, 128], &[Shard(0), Replicate])?;
            let b = tensor(&mesh, &[128, 256], &[Replicate, Shard(1)])?;
            let (y, calls) = counted(&world, || a.matmul(&b))?;
            assert_eq!((y.placements(), calls.len()), (&[Shard(0), Shard(1)][..], 0));
            let expected = a.full_tensor()?.matmul(&b.full_tensor()?)?;
            let whole = DTensor::distribute_tensor(&expected, &mesh, [Replicate, Replicate], None)?;
            assert!(y.allclose(&whole, 1e-10, 1e-10)?, "{shape:?}");
        }
        // one all-reduce of a small factor rather than several steps
        let (c, a, b) =
            (tensor(&mesh, &[8], &[Shard(0)])?, tensor(&mesh, &[50, 6], &[SUM])?, tensor(&mesh, &[6, 8], &[Shard(1)])?);
        let (y, calls) = counted(&world, || c.addmm(&a, &b, 1.0, 1.0))?;
        assert!(calls.len() <= 1, "{calls:?}");
        assert_close(&y, &replicated(&c)?.addmm(&replicated(&a)?, &replicated(&b)?, 1.0, 1.0)?, "addmm");
        Ok(())
    });
}

#[test]
fn attention_of_sharded_batches_and_heads_has_the_gradients_of_one_rank() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let causal = AttentionOptions { causal: true, ..AttentionOptions::default() };
        let leaves = |placement: Placement| -> Result<Vec<DTensor>> {
            let of = |factor: f64| -> Result<DTensor> {
                Ok((tensor(&mesh, &[4, 8, 8, 8], std::slice::from_ref(&placement))? * factor)?.requires_grad())
            };
            [0.3, 0.2, 1.0].into_iter().map(of).collect()
        };
        let run = |t: &[DTensor]| t[0].scaled_dot_product_attention(&t[1], &t[2], causal);
        let whole = leaves(Replicate)?;
        let wanted = run(&whole)?.sum_all()?.backward()?;
        // a causal mask: the first of a sequence sees only itself
        let (first, value) = (run(&whole)?.i((.., .., 0))?, whole[2].i((.., .., 0))?);
        assert!(first.allclose(&value, 1e-12, 1e-12)?);
        for placement in [Replicate, Shard(0), Shard(1)] {
            let inputs = leaves(placement.clone())?;
            let (y, grads, calls) = counted_both_ways(&world, || run(&inputs))?;
            assert!(calls.concat().is_empty(), "{placement}: {calls:?}");
            assert_eq!(y.placements(), std::slice::from_ref(&placement));
            for (leaf, one) in inputs.iter().zip(&whole) {
                assert_eq!(grads.get(leaf)?.placements(), std::slice::from_ref(&placement));
                assert!(grads.get(leaf)?.allclose(wanted.get(one)?, 1e-10, 1e-10)?, "{placement}");
            }
        }
        Ok(())
    });
}
