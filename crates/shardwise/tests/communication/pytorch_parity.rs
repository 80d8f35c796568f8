//! docs/pytorch-parity: every scenario of PyTorch's test suites names a test here that exists, or says why there is none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/pytorch-parity");
const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// Beginnings of the last cell of a row without a test.
const NO_COUNTERPART: &str = "No counterpart:";
const NOT_HERE: &str = "Not here:";

/// Beginning of the last cell of a row whose tests show a part of the scenario only.
const PARTLY: &str = "Partly:";

/// What a table says: rows by kind, and what is wrong with them.
#[derive(Default)]
struct Page {
    tested: usize,
    partly: usize,
    no_counterpart: usize,
    not_here: usize,
    problems: Vec<String>,
}

impl Page {
    /// The sentence with the numbers, which the page has to contain.
    fn summary(&self) -> String {
        let Page { tested, partly, no_counterpart, not_here, .. } = self;
        let all = tested + partly + no_counterpart + not_here;
        format!(
            "{all} scenarios: {tested} with a test, {partly} partly, {no_counterpart} without a counterpart, {not_here} not here."
        )
    }
}

/// Reads the rows of `| scenario | PyTorch's test | our tests | difference |`. `has_test` is asked for file and function.
fn read(text: &str, mut has_test: impl FnMut(&str, &str) -> bool) -> Page {
    let mut page = Page::default();
    let rows = text.lines().enumerate().filter(|(_, line)| line.starts_with("| ") && !line.starts_with("| Scenario "));
    for (number, line) in rows {
        let mut problem = |what: String| page.problems.push(format!("line {}: {what}", number + 1));
        let line = line.trim_start_matches('|').trim_end().strip_suffix('|').unwrap_or(line);
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [scenario, _, tests, difference] = cells[..] else {
            problem(format!("{} cells, needed 4 (scenario, PyTorch, test, difference)", cells.len()));
            continue;
        };
        if scenario.is_empty() {
            problem("no scenario".to_string());
        }
        // Tests that a reason names exist too.
        for (file, function) in difference.split('`').filter_map(|code| code.split_once(".rs::")) {
            if !has_test(&format!("{file}.rs"), function) {
                problem(format!("there is no test `{function}` in {file}.rs"));
            }
        }
        if tests.is_empty() {
            match difference {
                reason if reason.starts_with(NO_COUNTERPART) => page.no_counterpart += 1,
                reason if reason.starts_with(NOT_HERE) => page.not_here += 1,
                _ => problem(format!(
                    "no test; name one, or begin the last cell with `{NO_COUNTERPART}` or `{NOT_HERE}`"
                )),
            }
            continue;
        }
        match difference {
            reason if [NO_COUNTERPART, NOT_HERE].iter().any(|absence| reason.starts_with(absence)) => {
                problem("tests, and a reason for none".to_string());
            }
            PARTLY => problem("partly, without what is missing".to_string()),
            reason if reason.starts_with(PARTLY) => page.partly += 1,
            _ => page.tested += 1,
        }
        for test in tests.split(", ") {
            match test.strip_prefix('`').and_then(|test| test.strip_suffix('`')?.split_once("::")) {
                Some((file, function)) if has_test(file, function) => {}
                Some((file, function)) => problem(format!("there is no test `{function}` in {file}")),
                None => problem(format!("{test} is not of the form `file::function` in backticks")),
            }
        }
    }
    if !text.contains(&page.summary()) {
        page.problems.push(format!("the page does not contain the sentence \"{}\"", page.summary()));
    }
    page
}

/// The functions of a file with the attribute `#[test]`.
fn tests_of(source: &str) -> BTreeSet<String> {
    let mut tests = BTreeSet::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim) {
        let function = line.strip_prefix("pub ").unwrap_or(line).strip_prefix("fn ");
        match function.and_then(|rest| rest.split_once('(')) {
            Some((name, _)) => {
                if std::mem::take(&mut is_test) {
                    tests.insert(name.to_string());
                }
            }
            None => is_test = line == "#[test]" || is_test && (line.starts_with("#[") || line.starts_with("//")),
        }
    }
    tests
}

/// Files are relative to `crates/shardwise`, or begin with `crates/`.
fn path(file: &str) -> PathBuf {
    match file.strip_prefix("crates/") {
        Some(rest) => Path::new(CRATE).join("..").join(rest),
        None => Path::new(CRATE).join(file),
    }
}

#[test]
fn every_row_names_a_test_that_exists_or_a_reason() {
    let mut known: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut has_test = |file: &str, function: &str| {
        let read = || tests_of(&std::fs::read_to_string(path(file)).unwrap_or_default());
        known.entry(file.to_string()).or_insert_with(read).contains(function)
    };
    let readme = std::fs::read_to_string(Path::new(DOCS).join("README.md")).expect("the list of the pages");
    let mut problems = Vec::new();
    let mut pages = 0;
    for entry in std::fs::read_dir(DOCS).expect("docs/pytorch-parity") {
        let file = entry.unwrap().path();
        let text = std::fs::read_to_string(&file).unwrap();
        if file.extension().is_some_and(|extension| extension == "md")
            && text.lines().any(|line| line.starts_with("| Scenario "))
        {
            pages += 1;
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            let page = read(&text, &mut has_test);
            if !readme.contains(&page.summary()) {
                problems.push(format!("README.md does not contain the sentence \"{}\" of {name}", page.summary()));
            }
            problems.extend(page.problems.into_iter().map(|problem| format!("{name}, {problem}")));
        }
    }
    assert!(pages > 0, "no page in {DOCS} has a table of scenarios");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn wrong_rows_are_found() {
    let good = "\
6 scenarios: 2 with a test, 1 partly, 2 without a counterpart, 1 not here.
| Scenario | PyTorch | Test | Difference |
|---|---|---|---|
| a | `test_a` | `tests/a.rs::a` | |
| b | `test_b` | `tests/a.rs::a`, `crates/b/tests/b.rs::b` | ours is faster |
| c | `test_c` | | No counterpart: pickling |
| d | `test_d` | | No counterpart: the compiler |
| e | `test_e` | | Not here: complex numbers |
| f | `test_f` | `tests/a.rs::a` | Partly: on one rank, as in `tests/a.rs::a` |
";
    let has_test =
        |file: &str, function: &str| matches!((file, function), ("tests/a.rs", "a") | ("crates/b/tests/b.rs", "b"));
    assert_eq!(read(good, has_test).problems, Vec::<String>::new());
    for (from, to, problem) in [
        ("| `tests/a.rs::a` |", "| `tests/a.rs::gone` |", "there is no test `gone`"),
        ("| `tests/a.rs::a` |", "| tests/a.rs::a |", "is not of the form"),
        ("| `tests/a.rs::a` | |", "| | |", "no test; name one"),
        ("| No counterpart: pickling |", "| |", "no test; name one"),
        ("| `test_c` |", "|", "3 cells"),
        ("| e | `test_e` | | Not here: complex numbers |\n", "", "does not contain the sentence"),
        ("| Partly: on one rank, as in `tests/a.rs::a` |", "| |", "does not contain the sentence"),
        ("| Partly: on one rank, as in `tests/a.rs::a` |", "| Partly: |", "without what is missing"),
        ("| Partly: on one rank, as in `tests/a.rs::a` |", "| Not here: ranks |", "a reason for none"),
        ("as in `tests/a.rs::a`", "as in `tests/a.rs::gone`", "there is no test `gone`"),
    ] {
        let found = read(&good.replace(from, to), has_test).problems;
        assert!(found.iter().any(|found| found.contains(problem)), "{to}: {found:?}");
    }
}

#[test]
fn tests_are_functions_with_the_attribute() {
    let source = "#[test]\nfn one() {}\nfn helper() {}\n    #[test]\n    #[should_panic]\n    fn two() {}\n// #[test]\nfn three() {}\n";
    assert_eq!(tests_of(source).into_iter().collect::<Vec<_>>(), ["one", "two"]);
}
