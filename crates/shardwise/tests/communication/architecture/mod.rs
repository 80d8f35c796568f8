//! Dependencies between modules: a module uses only modules declared above it in `lib.rs`, and there are no import cycles
//! between files.

mod imports;
mod knowledge;
mod modules;
mod placements;
mod prose;
mod type_names;
mod words;

use std::path::{Path, PathBuf};

use imports::Crate;

#[test]
fn no_import_cycles_between_files() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for name in std::fs::read_dir(crates).unwrap() {
        let src = name.unwrap().path().join("src");
        let cycles = Crate::read(&src).cycles();
        assert!(cycles.is_empty(), "{cycles:?} in {}", src.display());
    }
}

#[test]
fn folders_use_only_folders_declared_above_them() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = Crate::read(&src);
    let mut turned = Vec::new();
    for module in ["tensor", "ops", "nn", "checkpoint"] {
        let declared = declared_modules(&std::fs::read_to_string(src.join(module).join("mod.rs")).unwrap());
        let folders: Vec<&str> = declared.iter().map(String::as_str).collect();
        let folders: Vec<&str> = folders.into_iter().filter(|name| src.join(module).join(name).is_dir()).collect();
        assert!(folders.len() > 1, "no folders in {module}");
        let wrong = files.uses_of_later_folders(module, &folders);
        assert!(wrong.is_empty(), "{wrong:#?}");
        turned.extend(files.uses_of_later_folders(module, &folders.into_iter().rev().collect::<Vec<_>>()));
    }
    // In another order much is wrong: the check sees what files use.
    assert!(turned.len() > 100, "{turned:#?}");
}

#[test]
fn the_check_finds_cycles_over_several_lines_and_through_re_exports() {
    let files = |texts: &[(&str, &str)]| {
        let module = |path: &str| path.split("::").filter(|part| !part.is_empty()).map(String::from).collect();
        Crate::new(texts.iter().map(|(path, text)| (module(path), (*text).to_owned()))).cycles()
    };
    let circle = vec![vec!["a::x".to_owned(), "a::y".to_owned()]];
    let house = ("a", "mod x;\nmod y;\npub use x::{One as First, Two};");
    assert_eq!(
        files(&[house, ("a::x", "use super::{\n    y::{self, Other},\n};"), ("a::y", "use super::First;")]),
        circle
    );
    assert_eq!(files(&[house, ("a::x", "fn f() { super::y::g() }"), ("a::y", "use crate::a::{Two};")]), circle);
    let none: Vec<Vec<String>> = Vec::new();
    assert_eq!(
        files(&[house, ("a::x", "// super::y\nconst S: &str = \"super::y\";"), ("a::y", "use super::x;")]),
        none
    );
    assert_eq!(files(&[house, ("a::x", "#[cfg(test)]\nmod tests { use super::y; }"), ("a::y", "use super::x;")]), none);
}

#[test]
fn modules_use_only_modules_declared_above_them() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let order = declared_modules(&std::fs::read_to_string(src.join("lib.rs")).unwrap());
    assert!(order.len() > 5, "{order:?}");
    let mut seen = 0;
    for module in &order {
        for file in files_of(&src, module) {
            seen += 1;
            let text = std::fs::read_to_string(&file).unwrap();
            let problems = violations(&order, module, &text);
            assert!(problems.is_empty(), "{}: {problems:?}", file.display());
        }
    }
    let all = rust_files(&src).len();
    assert_eq!(seen + 1, all, "a file of src/ belongs to no module declared in lib.rs");
}

#[test]
fn the_check_finds_a_violation() {
    let order = ["error", "mesh", "comm"].map(String::from);
    let text =
        "use crate::error::Error;\n// crate::comm in a comment\nfn f() { crate::comm::launch() }\nuse crate::Layout;";
    assert_eq!(
        violations(&order, "mesh", text),
        ["line 3: mesh uses comm, which is below it", "line 4: mesh uses the root re-export Layout"]
    );
    assert!(violations(&order, "comm", "use crate::{error::Error, mesh};").is_empty());
    assert_eq!(violations(&order, "error", "use crate::{error::Error, mesh};").len(), 1);
}

/// Implicit state of a rank is in one place; `comm::host` only marks its thread.
#[test]
fn the_state_of_a_rank_is_in_rank_context() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let with_own = |file: &PathBuf| std::fs::read_to_string(file).unwrap().contains("thread_local!");
    let mut found: Vec<PathBuf> = rust_files(&src).into_iter().filter(with_own).collect();
    found.sort();
    assert_eq!(found, [src.join("comm/host.rs"), src.join("rank_context.rs")]);
}

#[test]
fn no_module_is_named_utils_common_or_base_and_no_todo_is_left() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for file in rust_files(crates) {
        let stem = file.file_stem().unwrap().to_str().unwrap();
        assert!(!["utils", "util", "common", "base", "helpers"].contains(&stem), "{}", file.display());
        let text = std::fs::read_to_string(&file).unwrap();
        for undone in [concat!("todo", "!("), concat!("unimplemented", "!("), concat!("#[", "ignore")] {
            assert!(!text.contains(undone), "{undone} in {}", file.display());
        }
    }
}

/// The index links to every example of every crate, with its command, and to nothing else.
#[test]
fn every_example_is_in_the_index() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let index = std::fs::read_to_string(crates.join("shardwise/examples/README.md")).unwrap();
    let mut examples = Vec::new();
    for name in std::fs::read_dir(crates).unwrap() {
        let Ok(entries) = std::fs::read_dir(name.unwrap().path().join("examples")) else { continue };
        // One file, or a directory with `main.rs`.
        let paths = entries.map(|entry| entry.unwrap().path());
        examples
            .extend(paths.filter(|path| path.extension().is_some_and(|e| e == "rs") || path.join("main.rs").exists()));
    }
    for example in &examples {
        let stem = example.file_stem().unwrap().to_str().unwrap();
        let row = index.lines().find(|line| line.starts_with(&format!("| [{stem}](")));
        let row = row.unwrap_or_else(|| panic!("{} has no row in examples/README.md", example.display()));
        assert!(row.contains(&format!("`cargo run --example {stem}`")), "no command of {stem} in: {row}");
    }
    let rows = index.lines().filter(|line| line.starts_with("| [")).count();
    assert_eq!(rows, examples.len(), "examples/README.md lists an example that does not exist, or one twice");
}

/// Names of the modules that `lib.rs` declares, in order.
fn declared_modules(lib: &str) -> Vec<String> {
    let declared = lib.lines().filter_map(|line| {
        let line = line.trim().trim_start_matches("pub ");
        line.strip_prefix("mod ")?.strip_suffix(';').map(String::from)
    });
    declared.collect()
}

/// Lines of `text`, a file of `module`, that use a module below it, or the root instead of a module.
fn violations(order: &[String], module: &str, text: &str) -> Vec<String> {
    let place = |name: &str| order.iter().position(|m| m == name);
    let own = place(module).expect("a declared module");
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap();
        for (at, _) in code.match_indices("crate::") {
            let rest = &code[at + "crate::".len()..];
            let names: Vec<&str> = match rest.strip_prefix('{') {
                Some(list) => list.split('}').next().unwrap().split(',').map(first_word).collect(),
                None => vec![first_word(rest)],
            };
            for name in names {
                match place(name) {
                    Some(below) if below > own => {
                        found.push(format!("line {}: {module} uses {name}, which is below it", number + 1));
                    }
                    Some(_) => {}
                    None => found.push(format!("line {}: {module} uses the root re-export {name}", number + 1)),
                }
            }
        }
    }
    found
}

fn first_word(text: &str) -> &str {
    text.trim().split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap()
}

/// The files of one module: `name.rs` or everything in `name/`.
fn files_of(src: &Path, module: &str) -> Vec<PathBuf> {
    let mut files = rust_files(&src.join(module));
    files.extend(Some(src.join(format!("{module}.rs"))).filter(|f| f.exists()));
    assert!(!files.is_empty(), "module {module} has no file");
    files
}

fn rust_files(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let paths = entries.map(|e| e.unwrap().path());
    let nested = paths.flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] });
    nested.filter(|path| path.extension().is_some_and(|e| e == "rs")).collect()
}

/// A file that no target declares is never compiled, and its tests pass by never running.
#[test]
fn every_file_of_tests_is_a_module_of_its_target() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let tests = ["shardwise/tests", "shardwise-cli/tests", "shardwise-mpi/tests"].map(|tests| crates.join(tests));
    let entries = |path: &Path| std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let (mut seen, mut lost) = (0, Vec::new());
    for target in tests.iter().flat_map(|tests| entries(tests)) {
        let Ok(main) = std::fs::read_to_string(target.join("main.rs")) else { continue };
        for path in entries(&target) {
            let is_module = path.join("mod.rs").exists() || path.extension().is_some_and(|end| end == "rs");
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            if is_module && name != "main" {
                seen += 1;
                if !main.lines().any(|line| line == format!("mod {name};")) {
                    lost.push(path);
                }
            }
        }
    }
    assert!(seen > 140 && lost.is_empty(), "{seen} files, of which no target declares {lost:?}");
}
