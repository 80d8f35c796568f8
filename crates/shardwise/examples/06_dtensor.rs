//! Distributed tensors: made in a layout, moved to others, printed and written as a whole.
//!
//! Run with `cargo run --example 06_dtensor`.

use shardwise::prelude::*;
use shardwise::redistribute::explain;

fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        mesh.manual_seed(1);

        // 5 rows over 2 x 2 ranks: uneven shards are ordinary, and random numbers do not depend on the layout.
        let x = DTensor::randn((5, 4), &mesh, [Shard(0), Shard(1)])?;
        let columns = x.redistribute([Shard(1), Replicate])?;
        let mut y = columns.to_dtype(DType::F64)?;
        y.fill_range(&[1..4, 1..3], 0.0)?; // across the border between ranks

        // `{y}` would show what this rank holds. `show` gives the whole: all ranks call it, one prints.
        let text = y.show()?;
        if world.rank() == 0 {
            println!("{text}\n");
            println!("{}\n", explain(&mesh, x.layout(), columns.layout(), DType::F32)?);
            println!("what rank 0 communicated:\n{}", world.trace().report());
        }
        Ok(())
    })
}
