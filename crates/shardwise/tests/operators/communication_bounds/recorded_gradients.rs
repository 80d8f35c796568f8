//! Bytes sent for the recorded gradients, forward and backward: by PyTorch and by this library.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use shardwise::prelude::*;
use shardwise_test_suites::recorded_graph::{GraphInput, GraphNode, distribute_inputs, placements, run_nodes};
use shardwise_test_suites::vectors::{RecordedPlacement, RecordedTensor, directory};

#[derive(Deserialize)]
struct Case {
    id: String,
    graph: String,
    mesh_shape: Vec<usize>,
    inputs: Vec<GraphInput>,
    nodes: Vec<GraphNode>,
    output: String,
    cotangent: RecordedTensor,
    torch_output_placements: Option<Vec<RecordedPlacement>>,
    torch_comm_forward: Option<Comm>,
    torch_comm_backward: Option<Comm>,
    torch_error: Value,
    torch_wrong: Value,
}

#[derive(Deserialize)]
struct Comm {
    bytes_sent_total: usize,
}

/// Bytes that all ranks sent, forward and backward together.
pub(crate) struct Compared {
    pub(crate) case: String,
    pub(crate) ours: usize,
    pub(crate) recorded: usize,
}

/// All cases in which the recorded run gave the right answer.
pub(crate) fn compare() -> Vec<Compared> {
    let text = std::fs::read_to_string(directory().join("grads.jsonl")).expect("recorded gradients");
    let mut all = Vec::new();
    for line in text.lines() {
        let case: Case = serde_json::from_str(line).expect("a recorded gradient");
        let comm = |c: &Option<Comm>| c.as_ref().map(|c| c.bytes_sent_total);
        let recorded = comm(&case.torch_comm_forward).zip(comm(&case.torch_comm_backward));
        let Some((forward, backward)) = recorded.filter(|_| case.torch_error.is_null() && case.torch_wrong != true)
        else {
            continue;
        };
        let inputs: Vec<String> =
            case.inputs.iter().map(|i| format!("{:?}{:?}", i.global.shape, i.placements)).collect();
        let name = format!("{} {} {}", case.id, case.graph, inputs.join(" "));
        let (ranks, case) = (case.mesh_shape.iter().product(), Arc::new(case));
        let sent = ThreadWorld::new(ranks).unwrap().run(move |world| run(&case, &world)).unwrap();
        all.push(Compared { case: name, ours: sent.into_iter().sum(), recorded: forward + backward });
    }
    all
}

/// The bytes that this rank sends.
fn run(case: &Case, world: &World) -> Result<usize> {
    let mesh = world.mesh(case.mesh_shape.clone())?;
    let mut values = distribute_inputs(&case.inputs, &mesh)?;
    // The cotangent is placed as the recorded output was, without partial sums, so that neither has to move it.
    let settled = |p: Placement| if p.is_partial() { Replicate } else { p };
    let of_output = case.torch_output_placements.as_deref().unwrap_or_default();
    let mut wanted: Vec<Placement> = placements(of_output).into_iter().map(settled).collect();
    wanted.resize(mesh.ndim(), Replicate);
    let cotangent = DTensor::distribute_tensor(&case.cotangent.to_tensor(), &mesh, wanted, None)?;
    world.trace().clear();
    run_nodes(&case.nodes, &mut values)?;
    values[case.output.as_str()].backward_from(&cotangent)?;
    Ok(world.trace().records().iter().map(|r| r.bytes).sum())
}
