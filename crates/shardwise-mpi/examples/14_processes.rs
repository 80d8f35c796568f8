//! One program on threads or on MPI processes: 4 threads if started directly; 2 processes if built with `--features
//! mpi` and started by `mpirun -n 2`.
//!
//! Run with `cargo run --example 14_processes`, or
//! `cargo build --workspace --features mpi --example 14_processes && mpirun -n 2 target/debug/examples/14_processes`.

use shardwise::prelude::*;
use shardwise_mpi::{launch, launched};

fn main() -> Result<()> {
    let ranks = launched().map_or(4, |launched| launched.size);
    let sum = launch(ranks, |world| {
        let mesh = world.mesh([("all", world.size())])?;
        let x = DTensor::arange(0.0..10.0, DType::F64, &mesh, [Shard(0)])?;
        println!(
            "rank {} of {} in process {} holds {:?}",
            world.rank(),
            world.size(),
            std::process::id(),
            x.local_shape()
        );
        x.sum_all()?.item::<f64>()
    })?;
    assert_eq!(sum, 45.0);
    // Every process has the result; rank 0 prints it.
    if launched().is_none_or(|launched| launched.rank == 0) {
        println!("sum {sum} on {ranks} ranks");
    }
    Ok(())
}
