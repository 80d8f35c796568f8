//! Which file of a crate uses which: paths that begin with `crate`, `super` or `self`, also over several lines, followed
//! through re-exports to the file that defines the item.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The path of a module, such as `["comm", "group"]`.
pub(crate) type ModulePath = Vec<String>;

/// The files of a crate with what each of them imports.
pub(crate) struct Crate {
    code: BTreeMap<ModulePath, String>,
    /// By file: what its `use` declarations make known, by name.
    known: BTreeMap<ModulePath, BTreeMap<String, Vec<String>>>,
}

impl Crate {
    /// The files under a source directory.
    pub(crate) fn read(src: &Path) -> Self {
        let texts = super::rust_files(src).into_iter().map(|file| {
            let path = file.strip_prefix(src).unwrap().with_extension("");
            let mut module: ModulePath = path.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            if module.last().is_some_and(|last| last == "mod" || last == "lib") {
                module.pop();
            }
            (module, std::fs::read_to_string(file).unwrap())
        });
        Crate::new(texts)
    }

    pub(crate) fn new(texts: impl IntoIterator<Item = (ModulePath, String)>) -> Self {
        let code: BTreeMap<_, _> = texts.into_iter().map(|(module, text)| (module, code_of(&text))).collect();
        let known = code.iter().map(|(module, text)| (module.clone(), declared(text))).collect();
        Crate { code, known }
    }

    /// Import cycles between files, direct or indirect. A folder's `mod.rs` and the files in the folder
    /// are one unit: imports between them are not edges.
    pub(crate) fn cycles(&self) -> Vec<Vec<String>> {
        let edges: BTreeMap<&ModulePath, BTreeSet<ModulePath>> =
            self.code.iter().map(|(module, text)| (module, self.used(module, text))).collect();
        let reachable = |from: &ModulePath| {
            let mut seen = BTreeSet::new();
            let mut open: Vec<&ModulePath> = edges[from].iter().collect();
            while let Some(module) = open.pop() {
                if seen.insert(module.clone()) {
                    open.extend(&edges[module]);
                }
            }
            seen
        };
        let reachable: BTreeMap<&ModulePath, BTreeSet<ModulePath>> =
            edges.keys().map(|module| (*module, reachable(module))).collect();
        let mut cycles: Vec<Vec<String>> = Vec::new();
        for (module, reached) in &reachable {
            let circle: Vec<String> =
                reached.iter().filter(|other| reachable[other].contains(*module)).map(|m| m.join("::")).collect();
            if !circle.is_empty() && !cycles.contains(&circle) {
                cycles.push(circle);
            }
        }
        cycles
    }

    /// Files in folders of a module that use a file in a later one of these folders.
    pub(crate) fn uses_of_later_folders(&self, module: &str, folders: &[&str]) -> Vec<String> {
        let place = |file: &ModulePath| {
            let [first, folder, ..] = file.as_slice() else { return None };
            folders.iter().position(|name| first == module && name == folder)
        };
        let of_file = |(file, text): (&ModulePath, &String)| {
            let own = place(file);
            let later = self.used(file, text).into_iter().filter(move |used| own.is_some() && place(used) > own);
            later.map(|used| format!("{} uses {}", file.join("::"), used.join("::"))).collect::<Vec<_>>()
        };
        self.code.iter().flat_map(of_file).collect()
    }

    fn used(&self, module: &ModulePath, text: &str) -> BTreeSet<ModulePath> {
        let paths = roots(text).into_iter().flat_map(|at| leaves(&text[at..]).0);
        let files = paths.filter_map(|path| self.defining_file(module, &path, 0));
        files.filter(|file| !file.starts_with(module) && !module.starts_with(file)).collect()
    }

    /// The file that defines what a path means in a module; none outside the crate.
    fn defining_file(&self, module: &ModulePath, path: &[String], followed: usize) -> Option<ModulePath> {
        let mut rest = path;
        let mut file = match rest.first()?.as_str() {
            "crate" => ModulePath::new(),
            "self" | "super" => module.clone(),
            name => {
                let child = [module.as_slice(), &[name.to_owned()]].concat();
                self.code.contains_key(&child).then(|| module.clone())?
            }
        };
        while let Some(step @ ("crate" | "self" | "super")) = rest.first().map(String::as_str) {
            if step == "super" {
                file.pop();
            }
            rest = &rest[1..];
        }
        while let Some(name) = rest.first() {
            let child = [file.as_slice(), std::slice::from_ref(name)].concat();
            if !self.code.contains_key(&child) {
                break;
            }
            (file, rest) = (child, &rest[1..]);
        }
        let declared = rest.first().and_then(|name| self.known.get(&file)?.get(name)).filter(|_| followed < 8);
        let behind = declared.and_then(|path| self.defining_file(&file, path, followed + 1));
        behind.or_else(|| self.code.contains_key(&file).then_some(file))
    }
}

/// The text without comments, strings and unit tests.
pub(crate) fn code_of(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    let mut code = String::with_capacity(text.len());
    let mut in_string = false;
    for line in text.lines() {
        let mut chars = line.char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' if in_string => drop(chars.next()),
                '"' if line[..at].ends_with('\'') && line[at + 1..].starts_with('\'') => {}
                '"' => in_string = !in_string,
                _ if in_string => {}
                '/' if line[at..].starts_with("//") => break,
                c => code.push(c),
            }
        }
        code.push('\n');
    }
    code
}

/// Where paths begin that are relative to this crate.
fn roots(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    for root in ["crate::", "super::", "self::"] {
        let inside = |at: usize| text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
        found.extend(text.match_indices(root).map(|(at, _)| at).filter(|&at| !inside(at)));
    }
    found
}

/// What the `use` declarations of a file make known: names with their paths.
fn declared(text: &str) -> BTreeMap<String, Vec<String>> {
    let starts = text.match_indices("use ").filter(|(at, _)| !text[..*at].ends_with(|c: char| c.is_alphanumeric()));
    let mut names = BTreeMap::new();
    for (at, word) in starts {
        let (paths, aliases) = leaves(&text[at + word.len()..]);
        for (mut path, alias) in paths.into_iter().zip(aliases) {
            if path.last().is_some_and(|last| last == "self") {
                path.pop();
            }
            names.extend(alias.or_else(|| path.last().cloned()).map(|name| (name, path)));
        }
    }
    names
}

/// The paths of a tree such as `a::{b, c::{self, d as e}}` at the start of a text, each with its alias.
fn leaves(text: &str) -> (Vec<Vec<String>>, Vec<Option<String>>) {
    let (mut paths, mut aliases) = (Vec::new(), Vec::new());
    // What stands before each open brace.
    let mut outer: Vec<Vec<String>> = Vec::new();
    let mut path: Vec<String> = Vec::new();
    let mut rest = text.trim_start();
    loop {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '*').unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if !word.is_empty() {
            path.push(word.to_owned());
            if let Some(next) = after.strip_prefix("::").filter(|next| next.starts_with(is_path_part)) {
                rest = next;
                continue;
            }
            let alias = after.trim_start().strip_prefix("as ").map(|alias| super::first_word(alias).to_owned());
            rest = match &alias {
                Some(alias) => after.trim_start()["as ".len()..].trim_start().strip_prefix(alias.as_str()).unwrap(),
                None => after,
            };
            paths.push(std::mem::take(&mut path));
            aliases.push(alias);
        }
        rest = rest.trim_start();
        match rest.chars().next() {
            Some('{') => outer.push(std::mem::take(&mut path)),
            Some(',') if !outer.is_empty() => {}
            Some('}') if !outer.is_empty() => drop(outer.pop()),
            _ => return (paths, aliases),
        }
        let Some(prefix) = outer.last() else { return (paths, aliases) };
        path = prefix.clone();
        rest = rest[1..].trim_start();
    }
}

fn is_path_part(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '{' || c == '*'
}
