//! What each rank would read and hold, without loading.

use std::path::Path;

use shardwise::checkpoint::RankLoad;
use shardwise::error::ErrorKind;
use shardwise::models::{LoadOptions, dry_load_model};
use shardwise::plan::{DataParallel, ShardingPlanner, TensorParallel};
use shardwise::prelude::*;

use super::job::GenerateJob;
use super::source::{SourceKind, StoredForm};
use crate::ckpt::LoadRow;
use crate::output::RowPrinter;

pub(super) fn print(job: &GenerateJob, json: bool) -> Result<()> {
    let SourceKind::Pretrained { path, .. } = &job.source.kind else {
        let found = "a model of `shardwise train`";
        let fix = "use `shardwise ckpt dry-load` for its checkpoint";
        return Err(ErrorKind::Unsupported.error("dry run", found, "a model directory or GGUF file", fix));
    };
    let kept = job.source.stored == StoredForm::KeptQuantized;
    print_loads(&loads(path, &job.mesh, job.source.dtype, kept)?, json)
}

/// What each rank of a mesh would read and hold.
pub(crate) fn loads(path: &Path, mesh: &Mesh, dtype: DType, keep_quantized: bool) -> Result<Vec<RankLoad>> {
    let options = LoadOptions { dtype, keep_quantized, ..LoadOptions::default() };
    match (mesh.axis("tp").is_ok(), mesh.axis("dp").is_ok()) {
        (true, true) => dry_load_model(path, mesh, TensorParallel::new("tp").and(DataParallel::new(["dp"])), &options),
        (true, false) => dry_load_model(path, mesh, TensorParallel::new("tp"), &options),
        _ => dry_load_model(path, mesh, DataParallel::new(["dp"]), &options),
    }
}

/// Prints a row per rank.
pub(crate) fn print_loads(loads: &[RankLoad], json: bool) -> Result<()> {
    let mut rows = RowPrinter::new(json, loads.len() as u64);
    Ok(loads.iter().try_for_each(|load| rows.print(&LoadRow(load.clone())))?)
}
