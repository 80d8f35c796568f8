//! Small graphs of operators with the inputs that PyTorch had, as the vectors record them.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;
use shardwise::prelude::*;

use crate::torch_ops::apply;
use crate::vectors::{RecordedPlacement, RecordedTensor};

/// An input of a graph, with its gradient where one was recorded.
#[derive(Deserialize)]
pub struct GraphInput {
    /// Name by which calls refer to it.
    pub name: String,
    /// The full tensor.
    pub global: RecordedTensor,
    /// Its placements, one per mesh axis.
    pub placements: Vec<RecordedPlacement>,
    /// The local tensors of all ranks, where they do not follow from the placements.
    pub locals: Option<Vec<RecordedTensor>>,
    /// Whether a gradient is computed for it.
    pub requires_grad: bool,
    /// The full gradient that PyTorch computed on one device.
    pub expected_grad: Option<RecordedTensor>,
}

/// One call of an operator, or a redistribution.
#[derive(Deserialize)]
pub struct GraphNode {
    op: String,
    inputs: Vec<String>,
    attrs: Value,
    output: Value,
}

/// The tensors of a graph by name.
pub type GraphValues = HashMap<String, DTensor>;

/// Converts recorded placements.
pub fn placements(recorded: &[RecordedPlacement]) -> Vec<Placement> {
    recorded.iter().map(RecordedPlacement::to_placement).collect()
}

/// Distributes the inputs of a graph. Collective.
pub fn distribute_inputs(inputs: &[GraphInput], mesh: &DeviceMesh) -> Result<GraphValues> {
    let mut values = GraphValues::new();
    for input in inputs {
        let placed = placements(&input.placements);
        let tensor = match &input.locals {
            Some(locals) => {
                let local = locals[mesh.world().rank()].to_tensor();
                DTensor::from_local_with_shape(&local, mesh, placed, input.global.shape.as_slice())?
            }
            None => DTensor::distribute_tensor(&input.global.to_tensor(), mesh, placed, None)?,
        };
        values.insert(input.name.clone(), if input.requires_grad { tensor.requires_grad() } else { tensor });
    }
    Ok(values)
}

/// Runs the calls of a graph and adds their outputs to its values. Collective.
pub fn run_nodes(nodes: &[GraphNode], values: &mut GraphValues) -> Result<()> {
    for node in nodes {
        let inputs: Vec<DTensor> = node.inputs.iter().map(|name| values[name].clone()).collect();
        let outputs = match node.op.as_str() {
            "redistribute" => {
                let target = Vec::<RecordedPlacement>::deserialize(&node.attrs["placements"]).expect("placements");
                vec![inputs[0].redistribute(placements(&target))?]
            }
            name => apply(name, &inputs, &node.attrs)?,
        };
        let names: Vec<&str> = match &node.output {
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            name => name.as_str().into_iter().collect(),
        };
        values.extend(names.into_iter().map(str::to_string).zip(outputs));
    }
    Ok(())
}
