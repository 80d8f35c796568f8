//! One program on threads or on processes: started by hand it runs on 4 threads, and built with `--features mpi` and started
//! by `mpirun -n 2` on 2 processes, on one machine or several.

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
            x.to_local().dims()
        );
        x.sum_all()?.item::<f64>()
    })?;
    assert_eq!(sum, 45.0);
    // Every process has the result; one of them says it.
    if launched().is_none_or(|launched| launched.rank == 0) {
        println!("sum {sum} on {ranks} ranks");
    }
    Ok(())
}
