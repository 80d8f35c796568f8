//! The contents of a checkpoint as a tree.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde_json::{Value as Json, json};
use shardwise::Result;
use shardwise::checkpoint::{self, Catalog, StoredTensor, Value};
use shardwise::picture::bytes_text;

pub(super) fn run(path: &Path, json: bool) -> Result<()> {
    let catalog = checkpoint::open(path)?;
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", to_json(&catalog))?;
        return Ok(());
    }
    let tree = NameTree::new(&catalog);
    let mut lines = Vec::new();
    tree.lines(0, &mut lines);
    // The longest name decides where the columns begin; 48 keeps them on the screen.
    let width = lines.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0).min(48);
    for (name, rest) in lines {
        writeln!(out, "{}", format!("{name:<width$}  {rest}").trim_end())?;
    }
    let parts: usize = catalog.tensors.values().map(|t| t.chunks.len()).sum();
    let (tensors, values) = (catalog.tensors.len(), catalog.values.len());
    let elements: usize = catalog.tensors.values().map(StoredTensor::elem_count).sum();
    let size = bytes_text(stored_bytes(&catalog) as usize);
    let unreadable = match catalog.unreadable.len() {
        0 => String::new(),
        count => format!("; {count} entries that cannot be read"),
    };
    writeln!(
        out,
        "\n{}: {tensors} tensors in {parts} chunks, {elements} elements, {size}; {values} values{unreadable}",
        catalog.format
    )?;
    Ok(())
}

fn to_json(catalog: &Catalog) -> Json {
    let tensor = |(key, t): (&String, &StoredTensor)| {
        (key.clone(), json!({ "dtype": t.type_name(), "shape": t.shape, "bytes": t.stored_bytes(), "parts": t.chunks }))
    };
    let tensors: serde_json::Map<String, Json> = catalog.tensors.iter().map(tensor).collect();
    json!({
        "format": catalog.format, "version": catalog.version, "save_id": catalog.save_id, "bytes": stored_bytes(catalog),
        "tensors": tensors, "values": catalog.values, "unreadable": catalog.unreadable,
    })
}

/// The entries of a catalog by the components of their names.
#[derive(Default)]
struct NameTree<'a> {
    inner: BTreeMap<Component, NameTree<'a>>,
    tensor: Option<&'a StoredTensor>,
    value: Option<&'a Value>,
    unreadable: Option<&'a String>,
}

/// A component of a name. Numbers sort by value: 2 before 10.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Component {
    Number(usize),
    Name(String),
}

impl<'a> NameTree<'a> {
    fn new(catalog: &'a Catalog) -> Self {
        let mut tree = NameTree::default();
        for (key, tensor) in &catalog.tensors {
            tree.at(key).tensor = Some(tensor);
        }
        for (key, value) in &catalog.values {
            tree.at(key).value = Some(value);
        }
        for (key, reason) in &catalog.unreadable {
            tree.at(key).unreadable = Some(reason);
        }
        tree
    }

    fn at(&mut self, key: &str) -> &mut Self {
        let component = |part: &str| match part.parse() {
            Ok(number) => Component::Number(number),
            Err(_) => Component::Name(part.to_string()),
        };
        // Bounds the recursion of `lines` for names of hostile files; no real name has that many dots.
        key.splitn(128, '.').fold(self, |tree, part| tree.inner.entry(component(part)).or_default())
    }

    fn lines(&self, depth: usize, lines: &mut Vec<(String, String)>) {
        for (component, tree) in &self.inner {
            let name = match component {
                Component::Number(n) => n.to_string(),
                Component::Name(name) => name.clone(),
            };
            let described = match (tree.tensor, tree.value) {
                (Some(tensor), _) => describe(tensor),
                (None, Some(value)) => format!("= {}", shortened(value)),
                (None, None) => tree.unreadable.map_or_else(String::new, |reason| format!("unreadable: {reason}")),
            };
            lines.push((format!("{}{name}", "  ".repeat(depth)), described));
            tree.lines(depth + 1, lines);
        }
    }
}

/// Bytes of all tensors in the files.
fn stored_bytes(catalog: &Catalog) -> u64 {
    catalog.tensors.values().map(StoredTensor::stored_bytes).fold(0, u64::saturating_add)
}

/// Entries of a list and characters of a value that are shown: vocabularies have hundreds of thousands.
const SHOWN_ENTRIES: usize = 16;
const SHOWN_CHARS: usize = 200;

/// A value on one line of bounded length.
fn shortened(value: &Value) -> String {
    if let Value::List(list) | Value::Tuple(list) = value
        && list.len() > SHOWN_ENTRIES
    {
        let first = Value::List(list[..SHOWN_ENTRIES].to_vec()).to_string();
        return format!("{} of {} entries", shortened_text(&first), list.len());
    }
    shortened_text(&value.to_string())
}

fn shortened_text(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_string(),
    }
}

fn describe(tensor: &StoredTensor) -> String {
    let shape = format!("{:?}", tensor.shape);
    let parts = match tensor.chunks.len() {
        1 => String::new(),
        n => format!("  {n} chunks"),
    };
    format!("{:<5} {shape:<18} {:>10}{parts}", tensor.type_name(), bytes_text(tensor.stored_bytes() as usize))
}
