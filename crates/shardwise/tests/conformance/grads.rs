//! Gradients of single operators and of small graphs.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use shardwise::prelude::*;
use shardwise_test_suites::recorded_graph::{GraphInput, GraphNode, distribute_inputs, run_nodes};
use shardwise_test_suites::vectors::{RecordedTensor, close};

#[derive(Deserialize)]
struct Case {
    mesh_shape: Vec<usize>,
    inputs: Vec<GraphInput>,
    nodes: Vec<GraphNode>,
    output: String,
    cotangent: RecordedTensor,
    expected_output: RecordedTensor,
    rtol: f64,
    atol: f64,
}

pub(crate) fn check(value: &Value) -> std::result::Result<(), String> {
    let case = Arc::new(Case::deserialize(value).map_err(|e| e.to_string())?);
    let world = ThreadWorld::new(case.mesh_shape.iter().product()).map_err(|e| e.to_string())?;
    world.run(move |world| run(&case, &world)).map(drop).map_err(|e| e.to_string())
}

fn run(case: &Case, world: &World) -> Result<()> {
    let mesh = world.mesh(case.mesh_shape.clone())?;
    let mut values = distribute_inputs(&case.inputs, &mesh)?;
    run_nodes(&case.nodes, &mut values)?;
    let output = &values[case.output.as_str()];
    close(&output.full_tensor()?, &case.expected_output.to_tensor(), case.rtol, case.atol)?;
    let whole = vec![Replicate; case.mesh_shape.len()];
    let cotangent = DTensor::distribute_tensor(&case.cotangent.to_tensor(), &mesh, whole, None)?;
    let gradients = output.backward_from(&cotangent)?;
    for input in case.inputs.iter().filter(|input| input.requires_grad) {
        let expected = input.expected_grad.as_ref().expect("a gradient for every input that requires one");
        let gradient = match gradients.get(&values[input.name.as_str()]) {
            Ok(gradient) => gradient.full_tensor()?,
            // the output does not depend on it
            Err(_) => expected.to_tensor().zeros_like()?,
        };
        close(&gradient, &expected.to_tensor(), case.rtol, case.atol)
            .map_err(|e| Error::other(format!("gradient of {}: {e}", input.name)))?;
    }
    Ok(())
}
