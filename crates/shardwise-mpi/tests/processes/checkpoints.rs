//! Checkpoints that go from processes to threads and back.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use shardwise::checkpoint::{self, State, Value};
use shardwise::prelude::*;
use shardwise_mpi::Settings;
use shardwise_test_suites::scratch::Scratch;

use crate::job::Job;
use crate::suites::{on_all, scratch};

const SHAPE: (usize, usize) = (37, 11);

fn numbers(salt: f64) -> Tensor {
    let count = (SHAPE.0 * SHAPE.1) as f64;
    let all = Tensor::arange(0.0, count, &Device::Cpu).unwrap();
    (all * salt).unwrap().sin().unwrap().to_dtype(DType::F32).unwrap().reshape(SHAPE).unwrap()
}

/// Tensors in the layouts of a world, and values next to them.
fn state(world: &World, filled: bool) -> Result<State> {
    let mesh = world.mesh([("all", world.size())])?;
    let spread = |salt: f64, placement: Placement| {
        let whole = if filled { numbers(salt) } else { numbers(0.0) };
        DTensor::distribute_tensor(&whole, &mesh, [placement], None)
    };
    Ok(State::map([
        ("rows", State::from(spread(0.1, Shard(0))?)),
        ("columns", State::from(spread(0.2, Shard(1))?)),
        ("everywhere", State::from(spread(0.3, Replicate)?)),
        ("step", State::from(if filled { 17 } else { 0 })),
    ]))
}

fn save(world: &World, path: &Path) -> Result<()> {
    checkpoint::save(world, path, &state(world, true)?)
}

fn load(world: &World, path: &Path) -> Result<()> {
    let found = checkpoint::load(world, path, &state(world, false)?)?;
    for (name, salt) in [("rows", 0.1), ("columns", 0.2), ("everywhere", 0.3)] {
        let got = found.tensor(name)?.full_tensor()?.to_vec2::<f32>()?;
        assert_eq!(got, numbers(salt).to_vec2::<f32>()?, "{name}");
    }
    assert_eq!(found.value("step")?, Value::Int(17));
    Ok(())
}

/// What the ranks of the saving job do.
pub(crate) fn save_by_processes() {
    on_all(&Settings::default(), |world| save(&world, &scratch().join("saved")));
}

/// What the ranks of the loading job do.
pub(crate) fn load_by_processes() {
    on_all(&Settings::default(), |world| load(&world, &scratch().join("saved")));
}

/// Saved by 4 processes, loaded by 2 threads.
pub(crate) fn from_processes_to_threads() {
    let scratch = Scratch::new("processes-to-threads");
    Job::new("save_by_processes", 4).set("SHARDWISE_SCRATCH", &scratch.0).run().expect_success();
    let path = scratch.0.join("saved");
    shardwise::launch(2, move |world| load(&world, &path)).unwrap();
}

/// Saved by 2 threads, loaded by 4 processes.
pub(crate) fn from_threads_to_processes() {
    let scratch = Scratch::new("threads-to-processes");
    let path = scratch.0.join("saved");
    shardwise::launch(2, move |world| save(&world, &path)).unwrap();
    Job::new("load_by_processes", 4).set("SHARDWISE_SCRATCH", &scratch.0).run().expect_success();
}
