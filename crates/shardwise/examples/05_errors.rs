//! What happens when ranks make different calls, fail, return early or stop responding: an error on every rank, never a
//! hang.
//!
//! Run with `cargo run --example 05_errors`.

use std::time::Duration;

use shardwise::candle_core::{DType, Device, Tensor};
use shardwise::prelude::*;

fn main() -> Result<()> {
    let world = ThreadWorld::new(3)?.deadline(Duration::from_millis(200));

    show(
        "rank 1 calls another collective",
        &world.run(|world| {
            let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
            if world.rank() == 1 { world.barrier() } else { world.all_reduce(&tensor, ReduceOp::Sum).map(drop) }
        }),
    );
    show(
        "rank 2 returns an error",
        &world.run(|world| if world.rank() == 2 { Err(Error::other("disk full")) } else { world.barrier() }),
    );
    show("rank 0 returns early", &world.run(|world| if world.rank() == 0 { Ok(()) } else { world.barrier() }));
    show(
        "ranks list a subgroup in different orders",
        &world.run(|world| {
            let ranks = if world.rank() == 0 { [0, 1, 2] } else { [2, 1, 0] };
            world.subgroup(&ranks)?.barrier()
        }),
    );
    show(
        "rank 1 does not respond before the deadline",
        &world.run(|world| {
            if world.rank() == 1 {
                std::thread::sleep(Duration::from_millis(400));
            }
            world.barrier()
        }),
    );
    Ok(())
}

fn show(what: &str, result: &Result<Vec<()>>) {
    println!("{what}:\n  {}\n", result.as_ref().expect_err("each of these programs is faulty"));
}
