//! Bytes sent for the recorded gradients, forward and backward: by PyTorch and by this library.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use shardwise::prelude::*;
use shardwise_test_suites::torch_ops::apply;
use shardwise_test_suites::vectors::{RecordedPlacement, RecordedTensor, directory};

#[derive(Deserialize)]
struct Case {
    id: String,
    graph: String,
    mesh_shape: Vec<usize>,
    inputs: Vec<Input>,
    nodes: Vec<Node>,
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

#[derive(Deserialize)]
struct Input {
    name: String,
    global: RecordedTensor,
    placements: Vec<RecordedPlacement>,
    locals: Option<Vec<RecordedTensor>>,
    requires_grad: bool,
}

#[derive(Deserialize)]
struct Node {
    op: String,
    inputs: Vec<String>,
    attrs: Value,
    output: Value,
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
    let placements =
        |forms: &[RecordedPlacement]| forms.iter().map(RecordedPlacement::to_placement).collect::<Vec<_>>();
    let mut values: HashMap<&str, DTensor> = HashMap::new();
    for input in &case.inputs {
        let placed = placements(&input.placements);
        let tensor = match &input.locals {
            Some(locals) => {
                let local = locals[world.rank()].to_tensor();
                DTensor::from_local_with_shape(&local, &mesh, placed, input.global.shape.as_slice())?
            }
            None => DTensor::distribute_tensor(&input.global.to_tensor(), &mesh, placed, None)?,
        };
        values.insert(&input.name, if input.requires_grad { tensor.requires_grad() } else { tensor });
    }
    // The cotangent is placed as the recorded output was, without partial sums, so that neither has to move it.
    let settled = |p: Placement| if p.is_partial() { Replicate } else { p };
    let of_output = case.torch_output_placements.as_deref().unwrap_or_default();
    let mut wanted: Vec<Placement> = placements(of_output).into_iter().map(settled).collect();
    wanted.resize(mesh.ndim(), Replicate);
    let cotangent = DTensor::distribute_tensor(&case.cotangent.to_tensor(), &mesh, wanted, None)?;
    world.trace().clear();
    for node in &case.nodes {
        let inputs: Vec<DTensor> = node.inputs.iter().map(|name| values[name.as_str()].clone()).collect();
        let outputs = match node.op.as_str() {
            "redistribute" => {
                let forms = Vec::<RecordedPlacement>::deserialize(&node.attrs["placements"]).expect("placements");
                vec![inputs[0].redistribute(placements(&forms))?]
            }
            name => apply(name, &inputs, &node.attrs)?,
        };
        let names: Vec<&str> = match &node.output {
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            name => name.as_str().into_iter().collect(),
        };
        values.extend(names.into_iter().zip(outputs));
    }
    values[case.output.as_str()].backward_with(&cotangent)?;
    Ok(world.trace().records().iter().map(|r| r.bytes).sum())
}
