//! Gradients of single operators and of small graphs.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use shardwise::prelude::*;
use shardwise_test_suites::torch_ops::apply;
use shardwise_test_suites::vectors::{RecordedPlacement, RecordedTensor, close};

#[derive(Deserialize)]
struct Case {
    mesh_shape: Vec<usize>,
    inputs: Vec<Input>,
    nodes: Vec<Node>,
    output: String,
    cotangent: RecordedTensor,
    expected_output: RecordedTensor,
    rtol: f64,
    atol: f64,
}

#[derive(Deserialize)]
struct Input {
    name: String,
    global: RecordedTensor,
    placements: Vec<RecordedPlacement>,
    locals: Option<Vec<RecordedTensor>>,
    requires_grad: bool,
    expected_grad: Option<RecordedTensor>,
}

#[derive(Deserialize)]
struct Node {
    op: String,
    inputs: Vec<String>,
    attrs: Value,
    output: Value,
}

pub(crate) fn check(value: &Value) -> std::result::Result<(), String> {
    let case = Arc::new(Case::deserialize(value).map_err(|e| e.to_string())?);
    let world = ThreadWorld::new(case.mesh_shape.iter().product()).map_err(|e| e.to_string())?;
    world.run(move |world| run(&case, &world)).map(drop).map_err(|e| e.to_string())
}

fn run(case: &Case, world: &World) -> Result<()> {
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
    let output = &values[case.output.as_str()];
    close(&output.full_tensor()?, &case.expected_output.to_tensor(), case.rtol, case.atol)?;
    let whole = vec![Replicate; case.mesh_shape.len()];
    let cotangent = DTensor::distribute_tensor(&case.cotangent.to_tensor(), &mesh, whole, None)?;
    let gradients = output.backward_with(&cotangent)?;
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
