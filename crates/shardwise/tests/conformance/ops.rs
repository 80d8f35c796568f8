//! Operators on distributed inputs: the value of every output, and the bytes communicated.

use std::io::Write;
use std::sync::{Arc, Mutex};

use serde::Deserialize;
use serde_json::Value;
use shardwise::prelude::*;
use shardwise_test_suites::torch_ops::apply;
use shardwise_test_suites::vectors::{RecordedPlacement, RecordedTensor, close};

#[derive(Deserialize)]
struct Case {
    op: String,
    mesh_shape: Vec<usize>,
    inputs: Vec<Input>,
    attrs: Value,
    expected: Vec<RecordedTensor>,
    rtol: f64,
    atol: f64,
}

#[derive(Deserialize)]
struct Input {
    global: RecordedTensor,
    placements: Vec<RecordedPlacement>,
    locals: Option<Vec<RecordedTensor>>,
}

/// Bytes that all ranks sent, ours and recorded, where the recorded run communicated and gave the right answer.
static SENT: Mutex<Vec<Sent>> = Mutex::new(Vec::new());

struct Sent {
    case: String,
    ours: usize,
    recorded: usize,
}

pub(crate) fn check(value: &Value) -> std::result::Result<(), String> {
    let case = Arc::new(Case::deserialize(value).map_err(|e| e.to_string())?);
    let ranks = case.mesh_shape.iter().product();
    let program = Arc::clone(&case);
    let world = ThreadWorld::new(ranks).map_err(|e| e.to_string())?;
    let sent = world.run(move |world| run(&program, &world)).map_err(|e| e.to_string())?;
    let recorded = value["torch_comm"]["bytes_sent_total"].as_u64().unwrap_or(0) as usize;
    if recorded > 0 && value["torch_error"].is_null() && value["torch_wrong"] != true {
        let inputs: Vec<String> =
            case.inputs.iter().map(|i| format!("{:?}{:?}", i.global.shape, i.placements)).collect();
        let case = format!("{} {} {}", value["id"], inputs.join(" "), case.attrs);
        SENT.lock().unwrap().push(Sent { case, ours: sent.into_iter().sum(), recorded });
    }
    Ok(())
}

/// Prints where more was sent than in the recorded run, and fails if that is so in more than one case of twenty.
pub(crate) fn compare_bytes() {
    let sent = SENT.lock().unwrap();
    let more: Vec<&Sent> = sent.iter().filter(|s| s.ours > s.recorded).collect();
    let sum = |f: fn(&Sent) -> usize| sent.iter().map(f).sum::<usize>();
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "bytes at most the recorded ones: {}/{} cases that communicated; in all {} against {}",
        sent.len() - more.len(),
        sent.len(),
        sum(|s| s.ours),
        sum(|s| s.recorded),
    )
    .expect("standard output");
    for s in &more {
        writeln!(out, "  {} sent {}, recorded {}", s.case, s.ours, s.recorded).expect("standard output");
    }
    assert!(more.len() * 20 <= sent.len(), "{} of {} cases sent more than recorded", more.len(), sent.len());
}

/// Runs the operator, compares its outputs, and returns the bytes that this rank sent for it.
fn run(case: &Case, world: &World) -> Result<usize> {
    let mesh = world.mesh(case.mesh_shape.clone())?;
    let mut inputs = Vec::new();
    for input in &case.inputs {
        let placements: Vec<Placement> = input.placements.iter().map(RecordedPlacement::to_placement).collect();
        inputs.push(match &input.locals {
            Some(locals) => {
                let local = locals[world.rank()].to_tensor();
                DTensor::from_local_with_shape(&local, &mesh, placements, input.global.shape.as_slice())?
            }
            None => DTensor::distribute_tensor(&input.global.to_tensor(), &mesh, placements, None)?,
        });
    }
    world.trace().clear();
    let outputs = apply(&case.op, &inputs, &case.attrs)?;
    let sent = world.trace().records().iter().map(|r| r.bytes).sum();
    if outputs.len() != case.expected.len() {
        return Err(Error::other(format!("{} outputs, expected {}", outputs.len(), case.expected.len())));
    }
    for (output, expected) in outputs.iter().zip(&case.expected) {
        close(&output.full_tensor()?, &expected.to_tensor(), case.rtol, case.atol)?;
    }
    Ok(sent)
}
