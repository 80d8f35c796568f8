//! Distributed tensors: created in a layout, redistributed to another, written to and printed as one tensor.
//!
//! Run with `cargo run --example 06_dtensor`.

use shardwise::prelude::*;
use shardwise::redistribute::explain;

fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        mesh.manual_seed(1);

        // 5 rows on 2 x 2 ranks: shards may be uneven, and random numbers do not depend on the layout.
        let x = DTensor::randn((5, 4), &mesh, [Shard(0), Shard(1)])?;
        let columns = x.redistribute([Shard(1), Replicate])?;
        let mut y = columns.to_dtype(DType::F64)?;
        y.fill_range(&[1..4, 1..3], 0.0)?; // a range that spans shards of several ranks

        // `{y}` prints the local shard. `show` gathers the full tensor: all ranks call it, one prints.
        let text = y.show()?;
        if world.rank() == 0 {
            println!("{text}\n");
            println!("{}\n", explain(&mesh, x.layout(), columns.layout(), DType::F32)?);
            println!("communication of rank 0:\n{}", world.trace().report());
        }
        Ok(())
    })
}
