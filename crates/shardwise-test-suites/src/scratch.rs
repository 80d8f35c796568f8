//! A temporary directory for one test.

use std::path::PathBuf;

/// A temporary directory: empty when created, deleted when dropped.
pub struct Scratch(
    /// Its path.
    pub PathBuf,
);

impl Scratch {
    /// Creates an empty directory whose path contains `name` and the process id.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("shardwise-test-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
