//! Meshes: ranks with named axes, looked at from several sides. Nothing is communicated.
//!
//! Run with `cargo run --example 01_mesh`.

use shardwise::prelude::*;

fn main() -> Result<()> {
    let mesh = Mesh::new([("dp", 2), ("tp", 4)])?;
    println!("mesh {mesh} has {} ranks", mesh.size());
    for rank in [0, 5] {
        println!("rank {rank} is at {:?}", mesh.coordinate(rank).expect("in the mesh"));
    }
    println!("groups along dp: {:?}", mesh.groups("dp")?);
    println!("rank 5 and its tp group: {}", mesh.slice(["tp"], 5)?);
    println!("the same axes in the other order, through rank 5: {}", mesh.slice(["tp", "dp"], 5)?);
    println!("as one axis: {}", mesh.flatten(["dp", "tp"], "all")?);
    println!("tp split in two: {}", mesh.unflatten("tp", [("ep", 2), ("tp2", 2)])?);
    println!("read from text: {}", "cuda/dp=2,tp=2@0,2,1,3".parse::<Mesh>()?);
    Ok(())
}
