//! Training of two small language models, compared step by step with a recorded run on one device, in every kind of layout.

use std::sync::Arc;

use shardwise::models::{DataParallelMode, ParallelismConfig};
use shardwise::prelude::*;
use shardwise_test_suites::recorded_training::Recorded;
use shardwise_test_suites::vectors;

/// Meshes with the parallelism that is tried on them.
fn layouts() -> Vec<(&'static str, ParallelismConfig)> {
    let parallelism = |data_parallel, tensor_parallel, sequence_parallel| ParallelismConfig {
        data_parallel,
        tensor_parallel,
        sequence_parallel,
    };
    let (replicated, sharded) = (DataParallelMode::Replicate, DataParallelMode::FullyShard);
    let mut layouts = vec![
        ("dp=1", parallelism(replicated, false, false)),
        ("dp=4", parallelism(replicated, false, false)),
        ("dp=4", parallelism(sharded, false, false)),
        ("dp=3", parallelism(sharded, false, false)),
        ("dp=2,tp=2", parallelism(replicated, true, false)),
        ("dp=2,tp=2", parallelism(sharded, true, false)),
        ("dp=2,tp=2", parallelism(sharded, true, true)),
        // Ranks without key heads, and with five query heads without those.
        ("dp=2,tp=3", parallelism(sharded, true, true)),
    ];
    for mesh in ["tp=1", "tp=2", "tp=3", "tp=4", "tp=5", "tp=6", "tp=7", "tp=8"] {
        layouts.extend([false, true].map(|sequence| (mesh, parallelism(replicated, true, sequence))));
    }
    layouts
}

pub(crate) fn check() {
    let (mut cases, mut failures) = (0, Vec::new());
    // Cases with tensor parallelism alone of the model with 5 query heads and 1 key head.
    let mut one_key_head = 0;
    for recorded in Recorded::all(&vectors::directory().join("train")) {
        let recorded = Arc::new(recorded);
        for (mesh, parallelism) in layouts() {
            let axes: Mesh = mesh.parse().unwrap();
            cases += 1;
            one_key_head += usize::from(recorded.heads() == (5, 1) && mesh.starts_with("tp="));
            let (size, followed) = (axes.size(), Arc::clone(&recorded));
            let run = move |world: World| {
                let plan = followed.plan(&axes, &parallelism)?;
                followed.follow(&world.device_mesh(axes.clone())?, &plan)
            };
            if let Err(error) = ThreadWorld::new(size).unwrap().run(run) {
                failures.push(format!("{} on {mesh}, {parallelism:?}: {error}", recorded.name));
            }
        }
    }
    vectors::conclude("train", cases, &failures);
    // Other directories may lack the model.
    if std::env::var_os("SHARDWISE_CONFORMANCE_DIR").is_none() {
        assert_eq!(one_key_head, 16, "tp 1 to 8, with and without sequence parallelism");
    }
}
