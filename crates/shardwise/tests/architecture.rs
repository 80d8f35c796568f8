//! Knowledge flows one way: a module may use modules declared above it in `lib.rs`, none below.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

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

#[test]
fn nothing_is_called_utils_common_or_base_and_nothing_is_left_undone() {
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

#[test]
fn files_of_a_module_use_each_other_one_way() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for module in ["checkpoint", "sharded"] {
        let files: BTreeMap<String, PathBuf> = files_of(&src, module)
            .into_iter()
            .filter(|f| !f.ends_with("tests.rs"))
            .map(|f| (path_of(&src, &f), f))
            .collect();
        assert!(files.len() > 10, "{files:?}");
        let text = |file: &PathBuf| std::fs::read_to_string(file).unwrap();
        let uses: BTreeMap<&String, BTreeSet<String>> = files
            .iter()
            .map(|(path, file)| (path, used_files(path, &text(file), &|p| files.contains_key(p))))
            .collect();
        assert!(uses.values().any(|used| used.len() > 3), "imports are found");
        for (path, used) in &uses {
            let back = used.iter().find(|other| uses[other].contains(*path));
            assert_eq!(back, None, "{path} and this file import each other");
        }
    }
}

#[test]
fn imports_through_super_lists_and_children_are_found() {
    let known = |path: &str| ["a", "a::b", "a::c", "a::c::d"].contains(&path);
    let used = |path: &str, text: &str| used_files(path, text, &known).into_iter().collect::<Vec<_>>();
    assert_eq!(used("a::b", "use super::{X, c::{Y, d::Z}};\n"), ["a", "a::c", "a::c::d"]);
    assert_eq!(used("a::c::d", "use super::super::b::B;\nfn f() {}\nuse crate::a::c::C;"), ["a::b", "a::c"]);
    assert_eq!(used("a", "mod b;\npub(super) use b::{\n    X,\n    Y,\n};\nuse std::b;"), ["a::b"]);
}

/// The module path of a file below `src`.
fn path_of(src: &Path, file: &Path) -> String {
    let path = file.strip_prefix(src).unwrap().with_extension("");
    let names: Vec<&str> = path.iter().map(|name| name.to_str().unwrap()).filter(|name| *name != "mod").collect();
    names.join("::")
}

/// The known files that the file at a module path imports from.
fn used_files(own: &str, text: &str, known: &dyn Fn(&str) -> bool) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for item in text.split_inclusive(';').filter_map(|code| code.strip_suffix(';')) {
        // An item of `use` is what stands behind the last line that begins one.
        let begins = |line: &str| line.starts_with("use ") || line.starts_with("pub") && line.contains(" use ");
        let lines: Vec<&str> = item.lines().collect();
        let Some(line) = lines.iter().rposition(|line| begins(line)) else { continue };
        let item = lines[line..].concat();
        for path in spelled_out(item.split_once("use ").unwrap().1) {
            let mut base: Vec<&str> = own.split("::").collect();
            let names: Vec<&str> = path.split("::").map(str::trim).collect();
            let ups = names.iter().take_while(|name| **name == "super").count();
            match names[0] {
                "crate" => base.clear(),
                _ => base.truncate(base.len().saturating_sub(ups)),
            }
            let relative = if names[0] == "crate" { &names[1..] } else { &names[ups..] };
            let full = [&base, relative].concat();
            // Another crate's path names no file below the own one.
            let shortest = if ups > 0 || names[0] == "crate" { 1 } else { base.len() + 1 };
            let file = (shortest..=full.len()).rev().map(|length| full[..length].join("::")).find(|path| known(path));
            found.extend(file.filter(|file| file != own));
        }
    }
    found
}

/// Paths with their lists written out: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn spelled_out(path: &str) -> Vec<String> {
    let Some((prefix, list)) = path.split_once('{') else { return vec![path.trim().to_string()] };
    let list = &list[..list.rfind('}').unwrap()];
    let (mut depth, mut entries) = (0, vec![String::new()]);
    for letter in list.chars() {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        match (letter, depth) {
            (',', 0) => entries.push(String::new()),
            _ => entries.last_mut().unwrap().push(letter),
        }
    }
    let entries = entries.iter().map(|entry| entry.trim()).filter(|entry| !entry.is_empty());
    entries.flat_map(|entry| spelled_out(&format!("{}{entry}", prefix.trim()))).collect()
}
