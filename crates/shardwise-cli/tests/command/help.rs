//! `--help` of every command at 80 and at 120 columns, compared with the files in `tests/help`.
//!
//! `SHARDWISE_UPDATE_HELP=1 cargo test --workspace --test command help` writes the files anew.

use std::path::{Path, PathBuf};
use std::process::Command;

const WIDTHS: [usize; 2] = [80, 120];

/// The help of a command, such as `["bench", "train"]`, on a terminal of some columns.
fn help(command: &[String], columns: usize) -> String {
    let mut program = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    // The directory for temporary files is a default, and differs between machines.
    program.args(command).arg("--help").env("COLUMNS", columns.to_string()).env("TMPDIR", "/tmp");
    let output = program.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The command with its subcommands, found in their help.
fn with_subcommands(command: &[String]) -> Vec<Vec<String>> {
    let text = help(command, 120);
    let listed = text.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // A longer indentation continues the description of the line above.
    let names = listed.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let names: Vec<String> = names.filter(|name| !name.is_empty() && *name != "help").map(str::to_owned).collect();
    let inner = names.into_iter().flat_map(|name| with_subcommands(&[command, &[name]].concat()));
    [vec![command.to_vec()], inner.collect()].concat()
}

fn golden_file(command: &[String], columns: usize) -> PathBuf {
    let name = [&["shardwise".to_owned()], command].concat().join("-");
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/help").join(columns.to_string()).join(name + ".txt")
}

#[test]
fn help_is_that_of_the_golden_files() {
    let commands = with_subcommands(&[]);
    assert!(commands.len() > 15, "{commands:?}");
    let update = std::env::var_os("SHARDWISE_UPDATE_HELP").is_some();
    for columns in WIDTHS {
        let directory = golden_file(&[], columns).parent().unwrap().to_owned();
        if update {
            let _ = std::fs::remove_dir_all(&directory);
            std::fs::create_dir_all(&directory).unwrap();
        }
        for command in &commands {
            let (file, text) = (golden_file(command, columns), help(command, columns));
            if update {
                std::fs::write(&file, &text).unwrap();
            }
            let expected = std::fs::read_to_string(&file).unwrap_or_default();
            assert!(text == expected, "{} is not:\n{text}\nSHARDWISE_UPDATE_HELP=1 writes the files", file.display());
        }
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), commands.len(), "a file without a command");
    }
}

/// Lines of a text that end although the first word of the next line, which continues them, has room there.
fn broken_twice(text: &str, columns: usize) -> Vec<String> {
    let indentation = |line: &str| line.len() - line.trim_start().len();
    // Examples, lists and tables have lines of their own.
    let is_prose = |line: &str| {
        let words = line.trim_start();
        let own = ["shardwise ", "mpirun ", "- ", "-"].iter().any(|start| words.starts_with(start));
        !words.is_empty() && !own && !words.contains("  ") && words != "Examples:"
    };
    let mut found = Vec::new();
    let lines: Vec<&str> = text.lines().collect();
    for pair in lines.windows(2) {
        let (line, next) = (pair[0], pair[1]);
        if is_prose(line) && is_prose(next) && indentation(line) == indentation(next) {
            let word = next.split_whitespace().next().unwrap();
            if line.chars().count() + 1 + word.chars().count() < columns {
                found.push(format!("{line}\n{next}"));
            }
        }
    }
    found
}

#[test]
fn lines_of_help_fit_and_are_broken_once() {
    for columns in WIDTHS {
        for command in with_subcommands(&[]) {
            let text = help(&command, columns);
            let broken = broken_twice(&text, columns);
            assert!(broken.is_empty(), "{command:?} at {columns} columns:\n{}", broken.join("\n\n"));
            let long = text.lines().find(|line| line.chars().count() > columns);
            assert!(long.is_none(), "{command:?} at {columns} columns: {long:?}");
        }
    }
}

#[test]
fn the_check_finds_lines_that_are_broken_twice() {
    assert_eq!(broken_twice("some words here\nmore\n\nExamples:\n  shardwise a\n  shardwise b", 40).len(), 1);
    assert!(broken_twice("some words here\nmore", 18).is_empty());
    assert!(broken_twice("  a    one thing\n  b    another\n         goes on", 40).is_empty());
}

#[test]
fn every_command_that_does_something_has_examples() {
    for command in with_subcommands(&[]) {
        let text = help(&command, 120);
        let does_something = !text.contains("\nCommands:\n");
        assert!(!does_something || text.contains("\nExamples:\n"), "{command:?}: {text}");
        let examples = help(&command, 80);
        let examples = examples.split_once("Examples:\n").map_or("", |(_, examples)| examples);
        let is_whole = |line: &str| line.starts_with("  shardwise ") || line.starts_with("  mpirun ");
        assert!(examples.lines().all(is_whole), "an example of {command:?} is longer than 80 columns:\n{examples}");
    }
}

#[test]
fn earlier_spellings_of_options_work_with_a_note() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_shardwise")).args(arguments).output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    // Both are recognized, and the model that they ask for is refused.
    let said = run(&["train", "--width=10", "--heads", "3"]);
    assert!(
        said.starts_with("note: --width is now --d-model; the old spelling works until the next release\n"),
        "{said}"
    );
    assert!(said.contains("error: ") && !said.contains("unexpected argument"), "{said}");
    let said = run(&["train", "--d-model", "10", "--heads", "3"]);
    assert!(said.contains("error: ") && !said.contains("note: "), "{said}");
}
