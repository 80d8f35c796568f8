//! Directories that a command writes a model to.

use std::path::Path;

use shardwise::Result;
use shardwise::error::ErrorKind;
use shardwise::models::check_export;

/// Checks that a model may be written to a directory: not over the model that is read, and over another one only if the user says so.
pub(crate) fn check_model_target(to: &Path, source: Option<&Path>, overwrite: bool) -> Result<()> {
    check_export(to)?;
    let refused = |found: String, fix: &str| {
        let needed = "a new directory, or an empty one";
        Err(ErrorKind::path(to).error("export", found, needed, fix))
    };
    let same = source.is_some_and(|source| match (to.canonicalize(), source.canonicalize()) {
        (Ok(to), Ok(source)) => to == source,
        _ => false,
    });
    if same {
        return refused(format!("{}, the model that is read", to.display()), "name another directory");
    }
    let has_files = to.is_dir() && std::fs::read_dir(to)?.next().is_some();
    if has_files && !overwrite {
        let fix = "name another directory, or replace it with --overwrite";
        return refused(format!("{}, which has a model", to.display()), fix);
    }
    Ok(())
}
