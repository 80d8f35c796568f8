//! Layouts: which rank owns which elements of a tensor, drawn as a grid of rank numbers. Nothing is communicated.
//!
//! Run with `cargo run --example 02_layout`.

use shardwise::prelude::*;

fn main() -> Result<()> {
    let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
    for placements in ["S(0),S(1)", "S(0),R", "S(1),S(1)", "S(0;1,4),S(1;6,2)", "SS(0,2),S(0)"] {
        draw(&Layout::new(&mesh, (5, 8), Placement::parse_list(placements)?)?);
    }
    // Another shard order: tp shards dimension 0 first, dp shards each of the pieces.
    draw(&Layout::with_shard_order(&mesh, (8, 4), [Shard(0), Shard(0)], &[(0, &["tp", "dp"])])?);
    Ok(())
}

/// Prints one cell per element, with the ranks that own it.
fn draw(layout: &Layout) {
    println!("{layout}");
    let (rows, columns) = (layout.shape()[0], layout.shape()[1]);
    let mut owners = vec![String::new(); rows * columns];
    for owned in layout.boxes() {
        for row in (owned.global.offsets[0]..).take(owned.global.sizes[0]) {
            for column in (owned.global.offsets[1]..).take(owned.global.sizes[1]) {
                owners[row * columns + column] += &owned.rank.to_string();
            }
        }
    }
    for row in owners.chunks(columns) {
        println!("  {}", row.iter().map(|cell| format!("{cell:<3}")).collect::<String>());
    }
}
