//! Training of two small language models, compared step by step with a recorded run on one device, in every kind of layout.

use std::sync::Arc;

use shardwise::models::{Spread, Weights};
use shardwise::prelude::*;
use shardwise_test_suites::recorded_training::Recorded;
use shardwise_test_suites::vectors;

/// Meshes with the spread that is tried on them.
fn layouts() -> Vec<(&'static str, Spread)> {
    let spread = |weights, tensor_parallel, sequence_parallel| Spread { weights, tensor_parallel, sequence_parallel };
    let (replicated, sharded) = (Weights::Replicated, Weights::Sharded);
    vec![
        ("dp=1", spread(replicated, false, false)),
        ("dp=4", spread(replicated, false, false)),
        ("dp=4", spread(sharded, false, false)),
        ("dp=3", spread(sharded, false, false)),
        ("tp=2", spread(replicated, true, false)),
        ("tp=4", spread(replicated, true, false)),
        ("dp=2,tp=2", spread(replicated, true, false)),
        ("dp=2,tp=2", spread(sharded, true, false)),
        ("tp=2", spread(replicated, true, true)),
        ("dp=2,tp=2", spread(sharded, true, true)),
    ]
}

pub(crate) fn check() {
    let (mut cases, mut failures) = (0, Vec::new());
    for recorded in Recorded::all(&vectors::directory().join("train")) {
        let recorded = Arc::new(recorded);
        for (mesh, spread) in layouts() {
            let axes: Mesh = mesh.parse().unwrap();
            let Some(plan) = recorded.plan(&axes, &spread) else { continue };
            cases += 1;
            let (size, followed) = (axes.size(), Arc::clone(&recorded));
            let run = move |world: World| followed.follow(&world.device_mesh(axes.clone())?, &plan);
            if let Err(error) = ThreadWorld::new(size).unwrap().run(run) {
                failures.push(format!("{} on {mesh}, {spread:?}: {error}", recorded.name));
            }
        }
    }
    vectors::conclude("train", cases, &failures);
}
