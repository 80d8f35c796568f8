//! The two public models that tests use, fetched once into a cache outside the repository.

use std::path::PathBuf;
use std::process::Command;

/// The path of a public model: the GGUF file of `smollm2`, or the directory of `minilm`. `scripts/fetch-models` fetches and
/// checks it. Prints a message and returns `None` if that cannot be done here, so that a test can skip.
pub fn public_model(name: &str) -> Option<PathBuf> {
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../scripts/fetch-models");
    let output = Command::new(&script).arg(name).output();
    match output {
        Ok(output) if output.status.success() => {
            let path = String::from_utf8_lossy(&output.stdout);
            Some(PathBuf::from(path.trim()))
        }
        Ok(output) => {
            let reason = String::from_utf8_lossy(&output.stderr);
            println!("skipped: scripts/fetch-models cannot fetch {name}: {}", reason.trim());
            None
        }
        Err(error) => {
            println!("skipped: scripts/fetch-models does not start: {error}");
            None
        }
    }
}
