//! Local shape, global offset and global indices of every rank.

use serde::Deserialize;
use serde_json::Value;
use shardwise::{Layout, Mesh, Placement};
use shardwise_test_suites::vectors::RecordedPlacement;

#[derive(Deserialize)]
struct Case {
    global_shape: Vec<usize>,
    mesh_shape: Vec<usize>,
    placements: Vec<RecordedPlacement>,
    placements_normalized: Vec<RecordedPlacement>,
    ranks: Option<Vec<Rank>>,
    torch_error: Option<String>,
}

#[derive(Deserialize)]
struct Rank {
    rank: usize,
    coord: Vec<usize>,
    local_shape: Vec<usize>,
    global_offset: Vec<usize>,
    indices: Option<Vec<Vec<usize>>>,
}

pub(crate) fn check(case: &Value) -> Result<(), String> {
    let case = Case::deserialize(case).map_err(|e| e.to_string())?;
    let mesh = Mesh::new(case.mesh_shape).map_err(|e| e.to_string())?;
    let placements: Vec<Placement> = case.placements.iter().map(RecordedPlacement::to_placement).collect();
    let layout = Layout::new(&mesh, case.global_shape.as_slice(), placements.clone());
    if let Some(error) = case.torch_error {
        return match layout {
            Err(_) => Ok(()),
            Ok(layout) => Err(format!("expected an error like {error}, got {layout}")),
        };
    }
    let layout = layout.map_err(|e| e.to_string())?;
    for (written, expected) in placements.iter().zip(&case.placements_normalized) {
        let normalized = written.normalized(case.global_shape.len()).map_err(|e| e.to_string())?;
        same("normalized placement", 0, &normalized, &expected.to_placement())?;
    }
    for expected in case.ranks.ok_or("no ranks in the case")? {
        let rank = expected.rank;
        same("coordinate", rank, &mesh.coordinate(rank), &Some(expected.coord))?;
        same("local shape", rank, &layout.local_shape(rank), &expected.local_shape)?;
        same("global offset", rank, &layout.global_offset(rank), &expected.global_offset)?;
        let indices: Vec<Vec<usize>> =
            (0..case.global_shape.len()).map(|dim| layout.global_indices(rank, dim)).collect();
        match expected.indices {
            Some(expected) => same("indices", rank, &indices, &expected)?,
            // Without strided shards a rank holds one run in every dimension.
            None => {
                let run =
                    |dim: usize| (expected.global_offset[dim]..).take(expected.local_shape[dim]).collect::<Vec<_>>();
                same("indices", rank, &indices, &(0..case.global_shape.len()).map(run).collect())?;
            }
        }
    }
    Ok(())
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, rank: usize, got: &T, expected: &T) -> Result<(), String> {
    if got == expected { Ok(()) } else { Err(format!("{what} of rank {rank}: got {got:?}, expected {expected:?}")) }
}
