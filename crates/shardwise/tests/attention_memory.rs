//! Attention over a long sequence needs memory for its inputs and outputs, and little more.

use shardwise::ops::AttentionOptions;
use shardwise::prelude::*;
use shardwise_test_suites::process_memory::process_memory;

const MB: usize = 1 << 20;

/// A single test: other tests in the same process would be measured too.
#[test]
fn the_scores_of_8192_positions_are_never_in_memory() {
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
        let gradients = result.backward_with(&cotangent)?;
        let taken = process_memory().1.saturating_sub(before);
        // The result and three gradients.
        let outputs = 4 * heads * length * size * 4;
        assert!(gradients.get(&k)?.full_tensor()?.elem_count() > 0);
        println!("{} MB for outputs of {} MB", taken / MB, outputs / MB);
        assert!(taken < outputs + 32 * MB, "{} MB", taken / MB);
        Ok(())
    })
    .unwrap();
}
