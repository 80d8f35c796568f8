//! Redistribution: every rank's local tensor, and never more bytes than PyTorch moved.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use serde::Deserialize;
use serde_json::Value;
use shardwise::prelude::*;
use shardwise_test_suites::vectors::{RecordedPlacement, RecordedTensor};

#[derive(Deserialize)]
struct Case {
    mesh_shape: Vec<usize>,
    global: RecordedTensor,
    src: Vec<RecordedPlacement>,
    dst: Vec<RecordedPlacement>,
    input_locals: Vec<RecordedTensor>,
    output_locals: Option<Vec<RecordedTensor>>,
    torch_comm: Option<TorchComm>,
}

#[derive(Deserialize)]
struct TorchComm {
    bytes_sent_total: Option<usize>,
}

pub(crate) fn check(case: &Value) -> std::result::Result<(), String> {
    let case = Arc::new(Case::deserialize(case).map_err(|e| e.to_string())?);
    let ranks = case.mesh_shape.iter().product();
    let program = Arc::clone(&case);
    let sent = ThreadWorld::new(ranks).and_then(|world| world.run(move |world| run(&program, &world)));
    let sent: usize = sent.map_err(|e| e.to_string())?.into_iter().sum();
    match case.torch_comm.as_ref().and_then(|comm| comm.bytes_sent_total) {
        Some(recorded) if case.output_locals.is_some() && sent > recorded => {
            Err(format!("sent {sent} bytes, the recorded run sent {recorded}"))
        }
        _ => Ok(()),
    }
}

/// Redistributes, compares, and returns the bytes that this rank sent.
fn run(case: &Case, world: &World) -> Result<usize> {
    let placements =
        |forms: &[RecordedPlacement]| forms.iter().map(RecordedPlacement::to_placement).collect::<Vec<_>>();
    let mesh = world.mesh(case.mesh_shape.clone())?;
    let local = case.input_locals[world.rank()].to_tensor();
    let source = DTensor::from_local_with_shape(&local, &mesh, placements(&case.src), case.global.shape.as_slice())?;
    world.trace().clear();
    let moved = source.redistribute(placements(&case.dst))?;
    let sent = world.trace().records().iter().map(|r| r.bytes).sum();
    if let Some(expected) = &case.output_locals
        && !moved.layout().is_partial()
    {
        same("local", &moved.to_local()?, &expected[world.rank()].to_tensor())?;
    }
    same("value", &moved.full_tensor()?, &case.global.to_tensor())?;
    Ok(sent)
}

fn same(what: &str, got: &Tensor, expected: &Tensor) -> Result<()> {
    let values = |t: &Tensor| -> Result<Vec<f64>> {
        match t.elem_count() {
            0 => Ok(Vec::new()),
            _ => Ok(t.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?),
        }
    };
    if got.dims() == expected.dims() && values(got)? == values(expected)? {
        return Ok(());
    }
    Err(Error::other(format!("{what}: got {got}, expected {expected}")))
}
