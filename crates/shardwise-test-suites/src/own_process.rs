//! Tests that need a process of their own: the program of the test starts itself again for one test.

use std::process::Command;

/// Set in a process that was started for one test.
const ALONE: &str = "SHARDWISE_TEST_ALONE";

/// A command that runs one test of this program and nothing else, with its output shown.
///
/// # Panics
/// If the system cannot name this program.
pub fn test_command(module_path: &str, test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the name of this program"));
    command.args(test_arguments(module_path, test));
    command
}

/// The arguments of [`test_command`], for a program that another one starts.
pub fn test_arguments(module_path: &str, test: &str) -> [String; 3] {
    // The path of a module begins with the name of the program, which the names of tests lack.
    let name = module_path.split_once("::").map_or(test.to_string(), |(_, module)| format!("{module}::{test}"));
    ["--exact".into(), name, "--nocapture".into()]
}

/// Whether this process runs one test only. If not, runs `test` in such a process: what it measures, such as the peak memory of
/// the process, would otherwise include the other tests.
///
/// # Panics
/// If the test fails there, with its output.
pub fn is_alone(module_path: &str, test: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let output = test_command(module_path, test).env(ALONE, "1").output().expect("the program starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{test} in a process of its own: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    println!("{text}");
    false
}
