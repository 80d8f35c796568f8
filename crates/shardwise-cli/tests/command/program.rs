//! Runs the command in a temporary directory.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

/// A temporary directory for a test, removed on drop.
pub(crate) struct Place(PathBuf);

impl Place {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("shardwise-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Place(path)
    }

    pub(crate) fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    }

    pub(crate) fn at(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn shardwise(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shardwise")).args(arguments).output().expect("the command starts")
}

pub(crate) fn succeeds(arguments: &[&str]) -> String {
    let output = shardwise(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

pub(crate) fn lines(path: &str) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(json).collect()
}

/// The options of a model that trains in no time.
pub(crate) const TINY: [&str; 14] = [
    "--layers",
    "1",
    "--d-model",
    "16",
    "--heads",
    "2",
    "--seq-len",
    "16",
    "--batch-size",
    "8",
    "--sample-tokens",
    "8",
    "--eval-every",
    "4",
];
