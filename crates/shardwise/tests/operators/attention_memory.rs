//! Attention over a long sequence needs memory for its inputs and outputs, and little more.

use std::time::{Duration, Instant};

use shardwise::ops::{AttentionOptions, BlockMask};
use shardwise::prelude::*;
use shardwise_test_suites::own_process::is_alone;
use shardwise_test_suites::process_memory::process_memory;

const MB: usize = 1 << 20;

/// A sequence of 16 documents: the mask by blocks takes little memory, and less time than the same mask as a tensor.
fn documents_need_no_dense_mask([q, k, v]: [&DTensor; 3], cotangent: &DTensor) -> Result<()> {
    let (heads, length, size) = (q.shape()[1], q.shape()[2], q.shape()[3]);
    std::fs::write("/proc/self/clear_refs", "5")?;
    let before = process_memory().0;
    let ids = (0..length).map(|token| (token * 16 / length) as u32).collect();
    let mask = BlockMask::documents(&[ids])?.and(&BlockMask::causal(length, length))?;
    let run = |options: AttentionOptions<'_>| -> Result<(DTensor, Duration)> {
        let start = Instant::now();
        let result = q.scaled_dot_product_attention(k, v, options)?;
        result.backward_from(cotangent)?;
        Ok((result.detach(), start.elapsed()))
    };
    let (found, fast) = run(AttentionOptions { block_mask: Some(&mask), ..AttentionOptions::default() })?;
    let taken = process_memory().1.saturating_sub(before);
    let outputs = 4 * heads * length * size * 4;
    assert!(taken < outputs + 32 * MB, "{} MB", taken / MB);
    let dense = DTensor::replicate(&mask.to_tensor()?, q.device_mesh())?;
    let (expected, slow) = run(AttentionOptions { mask: Some(&dense), ..AttentionOptions::default() })?;
    println!("{fast:?} by blocks, {slow:?} with a mask of {} MB", dense.elem_count() / MB);
    // 31 of 32 blocks are skipped; a third of the time is far from that, and from what a busy machine changes.
    assert!(fast < slow / 3, "{fast:?} and {slow:?}");
    assert!(found.equal(&expected)?);
    Ok(())
}

#[test]
fn the_scores_of_8192_positions_are_never_in_memory() {
    if !is_alone(module_path!(), "the_scores_of_8192_positions_are_never_in_memory") {
        return;
    }
    // All scores of the two heads would be 512 MB.
    let (heads, length, size) = (2, 8192, 64);
    launch(1, move |world| {
        let mesh = world.mesh([("one", 1)])?;
        let normal = |_| Ok(DTensor::randn((1, heads, length, size), &mesh, [Replicate])?.requires_grad());
        let [q, k, v] = <[DTensor; 3]>::try_from((0..3).map(normal).collect::<Result<Vec<_>>>()?).expect("three");
        let cotangent = q.detach();
        std::fs::write("/proc/self/clear_refs", "5")?;
        let before = process_memory().0;
        let causal = AttentionOptions { causal: true, ..AttentionOptions::default() };
        let result = q.scaled_dot_product_attention(&k, &v, causal)?;
        let gradients = result.backward_from(&cotangent)?;
        let taken = process_memory().1.saturating_sub(before);
        // The result and three gradients.
        let outputs = 4 * heads * length * size * 4;
        assert!(gradients.get(&k)?.full_tensor()?.elem_count() > 0);
        println!("{} MB for outputs of {} MB", taken / MB, outputs / MB);
        assert!(taken < outputs + 32 * MB, "{} MB", taken / MB);
        documents_need_no_dense_mask([&q, &k, &v], &cotangent)
    })
    .unwrap();
}
