//! Masks by blocks: what their parts see, and attention with them against attention with the same mask as a tensor, in every layout.

use shardwise::error::ErrorKind;
use shardwise::ops::{AttentionOptions, BlockMask};
use shardwise::prelude::*;
use shardwise_test_suites::counting::counted;

/// Batches, query heads, key heads, queries, keys and elements of a head: several blocks, and the beginning of another.
const SIZES: [usize; 6] = [2, 4, 2, 135, 200, 4];

/// The document of a token.
fn document(batch: usize, token: usize) -> u32 {
    (token / [37, 90][batch]) as u32
}

fn documents(length: usize) -> BlockMask {
    let row = |batch: usize| (0..length).map(|token| document(batch, token)).collect();
    BlockMask::documents(&[row(0), row(1)]).unwrap()
}

/// Fails unless a mask sees what a predicate says, and skips the blocks of 64 x 64 in which that is nothing.
fn assert_sees(mask: &BlockMask, sees: impl Fn(usize, usize, usize, usize) -> bool, what: &str) {
    let [batches, heads, queries, keys] = mask.sizes();
    let (mut empty, mut blocks) = (0, 0);
    for (batch, head) in (0..batches).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for (q, k) in (0..queries).step_by(64).flat_map(|q| (0..keys).step_by(64).map(move |k| (q, k))) {
            let mut any = false;
            for (q, k) in (q..queries.min(q + 64)).flat_map(|q| (k..keys.min(k + 64)).map(move |k| (q, k))) {
                let expected = sees(batch, head, q, k);
                assert_eq!(mask.sees(batch, head, q, k), expected, "{what}: {batch}, {head}, {q}, {k}");
                any |= expected;
            }
            empty += usize::from(!any);
            blocks += 1;
        }
    }
    assert_eq!(mask.sparsity(), f64::from(empty as u32) / f64::from(blocks), "{what}");
}

#[test]
fn parts_and_combinations_see_what_they_say() {
    assert_sees(&BlockMask::causal(135, 200), |_, _, q, k| k <= q, "causal");
    for (before, after) in [(0, 0), (5, 0), (70, 3), (1000, 1000)] {
        let near = move |_, _, q: usize, k: usize| k + before >= q && k <= q + after;
        assert_sees(&BlockMask::window(200, 135, before, after), near, "window");
    }
    let same = |b: usize, _, q: usize, k: usize| document(b, q) == document(b, k);
    let (mine, causal) = (documents(200), BlockMask::causal(200, 200));
    assert_sees(&mine, same, "documents");
    assert_sees(&mine.and(&causal).unwrap(), |b, h, q, k| same(b, h, q, k) && k <= q, "and");
    let head = BlockMask::from_fn([1, 3, 200, 200], |_, head, _, key| key % 3 == head);
    let all = head.or(&mine.and(&causal).unwrap()).unwrap();
    assert_eq!(all.sizes(), [2, 3, 200, 200]);
    assert_sees(&all, |b, h, q, k| k % 3 == h || same(b, h, q, k) && k <= q, "or");
    assert_eq!(all.to_tensor().unwrap().dims(), [2, 3, 200, 200]);
    // equal however they were built
    let by_predicate = BlockMask::from_fn([2, 1, 200, 200], |b, h, q, k| same(b, h, q, k) && k <= q);
    assert!(by_predicate == mine.and(&causal).unwrap() && by_predicate != mine);
    let error = mine.and(&BlockMask::causal(135, 200)).unwrap_err().to_string();
    assert!(error.contains("[2, 1, 200, 200]") && error.contains("[1, 1, 135, 200]"), "{error}");
    assert!(BlockMask::documents(&[vec![0, 1], vec![0]]).is_err() && BlockMask::documents(&[]).is_err());
}

fn operand(mesh: &DeviceMesh, shape: [usize; 4], phase: f64, placements: &[Placement]) -> Result<DTensor> {
    let value = move |i: &[usize]| (i.iter().fold(phase, |sum, &i| 7.31 * sum + i as f64) * 12.9898).sin();
    Ok(DTensor::from_fn(shape.as_slice(), DType::F64, mesh, placements.to_vec(), value)?.requires_grad())
}

fn operands(mesh: &DeviceMesh, placements: [&[Placement]; 3]) -> Result<[DTensor; 3]> {
    let [batches, heads, key_heads, queries, keys, size] = SIZES;
    let key_shape = [batches, key_heads, keys, size];
    Ok([
        operand(mesh, [batches, heads, queries, size], 0.1, placements[0])?,
        operand(mesh, key_shape, 0.2, placements[1])?,
        operand(mesh, key_shape, 0.3, placements[2])?,
    ])
}

/// The result and the gradients of queries, keys and values.
fn attended(operands: &[DTensor; 3], options: AttentionOptions<'_>) -> Result<Vec<DTensor>> {
    let [q, k, v] = operands;
    let y = q.scaled_dot_product_attention(k, v, options)?;
    let gradients = y.mul(&y.detach().cos()?)?.sum_all()?.backward()?;
    Ok(vec![y.detach(), gradients.get(q)?.clone(), gradients.get(k)?.clone(), gradients.get(v)?.clone()])
}

fn lists(tensors: &[DTensor]) -> Result<Vec<Vec<f64>>> {
    tensors.iter().map(|t| Ok(t.full_tensor()?.flatten_all()?.to_vec1()?)).collect()
}

/// One mask for all, one per batch, one per head, and one that leaves some queries without keys.
fn masks() -> Vec<BlockMask> {
    let [_, heads, _, queries, keys, _] = SIZES;
    let batches = |b: usize, _: usize, q: usize, k: usize| document(b, q) == document(b, k) && k <= q;
    vec![
        BlockMask::causal(queries, keys),
        BlockMask::from_fn([2, 1, queries, keys], batches),
        BlockMask::from_fn([1, heads, queries, keys], |_, h, q, k| {
            (q / 64 + k / 64 + h).is_multiple_of(2) || (q + k) % 11 == h
        }),
        BlockMask::from_fn([2, heads, queries, keys], |b, h, q, k| q % 5 != b && k / 32 != h),
    ]
}

#[test]
fn attention_is_that_with_the_mask_as_a_tensor() {
    let layouts: [[&[Placement]; 3]; 7] = [
        [&[Replicate, Replicate], &[Replicate, Replicate], &[Replicate, Replicate]],
        [&[Shard(0), Shard(1)], &[Shard(0), Shard(1)], &[Shard(0), Shard(1)]],
        [&[Shard(2), Shard(0)], &[Replicate, Shard(0)], &[Replicate, Shard(0)]],
        [&[Shard(2), Shard(2)], &[Replicate, Replicate], &[Replicate, Replicate]],
        // every second block of queries, and sharded keys
        [
            &[Placement::StridedShard { dim: 2, split_factor: 3 }, Replicate],
            &[Replicate, Replicate],
            &[Replicate, Replicate],
        ],
        [&[Replicate, Replicate], &[Shard(2), Replicate], &[Shard(2), Replicate]],
        [&[Shard(1), Replicate], &[Shard(1), Shard(2)], &[Shard(1), Shard(2)]],
    ];
    launch(4, move |world| {
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let whole = operands(&alone, [&[Replicate]; 3])?;
        for (number, mask) in masks().iter().enumerate() {
            for causal in [false, true] {
                let base = AttentionOptions { causal, query_offset: 40, ..AttentionOptions::default() };
                let dense = DTensor::replicate(&mask.to_tensor()?, &alone)?;
                let dense = AttentionOptions { mask: Some(&dense), ..base };
                let expected = lists(&attended(&whole, dense)?)?;
                let options = AttentionOptions { block_mask: Some(mask), ..base };
                // blocks that are skipped would have added zeros
                assert_eq!(lists(&attended(&whole, options)?)?, expected, "mask {number}");
                for placements in layouts {
                    let found = lists(&attended(&operands(&mesh, placements)?, options)?)?;
                    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                        assert!((found - expected).abs() < 1e-10, "mask {number}, {placements:?}: {found}, {expected}");
                    }
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn sharded_batches_heads_and_queries_communicate_nothing() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let mask = &masks()[1];
        let options = AttentionOptions { block_mask: Some(mask), ..AttentionOptions::default() };
        for (queries, keys) in
            [(Shard(0), Shard(0)), (Shard(1), Shard(1)), (Shard(2), Replicate), (Replicate, Replicate)]
        {
            let [of_queries, of_keys] = [&queries, &keys].map(std::slice::from_ref);
            let x = operands(&mesh, [of_queries, of_keys, of_keys])?;
            let (y, calls) = counted(&world, || x[0].scaled_dot_product_attention(&x[1], &x[2], options))?;
            assert!(calls.is_empty() && y.placements() == of_queries, "{queries}: {calls:?}");
            let cotangent = y.detach();
            let (found, calls) = counted(&world, || y.backward_from(&cotangent))?;
            assert!(calls.is_empty(), "{queries}: {calls:?}");
            assert_eq!(found.get(&x[0])?.placements(), of_queries);
            if keys != Replicate {
                assert_eq!(found.get(&x[1])?.placements(), of_keys);
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn second_derivatives_and_masks_with_gradients_know_the_blocks() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let mask = &masks()[3];
        let blocks = AttentionOptions { block_mask: Some(mask), ..AttentionOptions::default() };
        let dense = DTensor::replicate(&mask.to_tensor()?, &mesh)?;
        let dense = AttentionOptions { mask: Some(&dense), ..AttentionOptions::default() };
        let of_slope = |options: AttentionOptions<'_>| -> Result<Vec<Vec<f64>>> {
            let x = operands(&mesh, [&[Shard(1)], &[Shard(1)], &[Shard(1)]])?;
            let y = x[0].scaled_dot_product_attention(&x[1], &x[2], options)?;
            let slope = y.square()?.sum_all()?.backward_graph()?.get(&x[1])?.square()?.sum_all()?;
            let found = slope.backward()?;
            lists(&[found.get(&x[0])?.clone(), found.get(&x[2])?.clone()])
        };
        let (found, expected) = (of_slope(blocks)?, of_slope(dense)?);
        let scale = expected.iter().flatten().fold(1.0, |most: f64, x| most.max(x.abs()));
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() < 1e-12 * scale, "{found}, {expected}");
        }
        // an added mask with a gradient, together with the blocks
        let [.., queries, keys, _] = SIZES;
        let bias = DTensor::zeros((queries, keys), DType::F64, &mesh, [Replicate])?.requires_grad();
        let x = operands(&mesh, [&[Shard(0)], &[Shard(0)], &[Shard(0)]])?;
        let both = AttentionOptions { mask: Some(&bias), ..blocks };
        let found = lists(&[x[0].scaled_dot_product_attention(&x[1], &x[2], both)?])?;
        let expected = lists(&[x[0].scaled_dot_product_attention(&x[1], &x[2], blocks)?])?;
        for (found, expected) in found[0].iter().zip(&expected[0]) {
            assert!((found - expected).abs() < 1e-12, "{found}, {expected}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn masks_of_other_sizes_are_refused() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let [q, k, v] = operands(&mesh, [&[Shard(1)], &[Shard(1)], &[Shard(1)]])?;
        for sizes in [[1, 1, 135, 199], [1, 1, 134, 200], [3, 1, 135, 200], [1, 2, 135, 200]] {
            let mask = BlockMask::from_fn(sizes, |_, _, _, _| true);
            let options = AttentionOptions { block_mask: Some(&mask), ..AttentionOptions::default() };
            let error = q.scaled_dot_product_attention(&k, &v, options).unwrap_err();
            assert!(matches!(error.kind(), Some(ErrorKind::Shape { found }) if *found == sizes), "{error}");
            let text = error.to_string();
            assert!(text.contains("[2, 4, 135, 200] [batches, heads, queries, keys]"), "{text}");
        }
        world.barrier()
    })
    .unwrap();
}
