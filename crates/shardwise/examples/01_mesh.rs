//! Device meshes: named axes over ranks, and how to slice, flatten and split them. Nothing is communicated.
//!
//! Run with `cargo run --example 01_mesh`.

use shardwise::prelude::*;

fn main() -> Result<()> {
    let mesh = Mesh::new([("dp", 2), ("tp", 4)])?;
    println!("mesh {mesh} has {} ranks", mesh.size());
    for rank in [0, 5] {
        println!("rank {rank} has coordinate {:?}", mesh.coordinate(rank).expect("in the mesh"));
    }
    println!("groups along dp: {:?}", mesh.groups("dp")?);
    println!("the tp submesh of rank 5: {}", mesh.slice(["tp"], 5)?);
    println!("all ranks with the axes swapped: {}", mesh.slice(["tp", "dp"], 5)?);
    println!("dp and tp flattened into one axis: {}", mesh.flatten(["dp", "tp"], "all")?);
    println!("tp split into two axes: {}", mesh.unflatten("tp", [("ep", 2), ("tp2", 2)])?);
    println!("parsed from text: {}", "cuda/dp=2,tp=2@0,2,1,3".parse::<Mesh>()?);
    Ok(())
}
