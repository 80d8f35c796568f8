//! Checkpoints written by PyTorch's distributed checkpoint: one directory each, with the tensors, values and chunk offsets
//! that they contain.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use shardwise::checkpoint::{Catalog, Key, Value, open};

/// Checks every directory of `dcp`, prints `conformance dcp: <passed>/<total>` and every difference, and fails if any case
/// failed.
pub(crate) fn run() {
    let directory = std::env::var_os("SHARDWISE_CONFORMANCE_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data"), PathBuf::from)
        .join("dcp");
    let entries = std::fs::read_dir(&directory).unwrap_or_else(|e| panic!("cannot read {}: {e}", directory.display()));
    let cases: BTreeSet<PathBuf> = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    let mut failures = Vec::new();
    for case in &cases {
        let outcome = catch_unwind(AssertUnwindSafe(|| check(case))).unwrap_or_else(|_| Err("panicked".into()));
        if let Err(difference) = outcome {
            failures.push(format!("{}: {difference}", case.file_name().unwrap().display()));
        }
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "conformance dcp: {}/{}", cases.len() - failures.len(), cases.len()).expect("standard output");
    for failure in &failures {
        writeln!(out, "  {failure}").expect("standard output");
    }
    drop(out);
    assert!(!cases.is_empty(), "{} holds no cases", directory.display());
    assert!(failures.is_empty(), "{} of {} cases failed", failures.len(), cases.len());
}

fn check(case: &Path) -> Result<(), String> {
    let json = |name: &str| -> Option<Json> {
        let text = std::fs::read_to_string(case.join(name)).ok()?;
        Some(serde_json::from_str(&text).expect("JSON"))
    };
    let checkpoint = case.join("checkpoint");
    let expected = open(case.join("expected.safetensors")).map_err(|e| e.to_string())?;
    let values = json("expected.json").ok_or("no expected.json")?["values"].clone();
    let ways = match checkpoint.join("model.pt") {
        file if file.is_file() => vec![file],
        _ => vec![checkpoint.clone(), checkpoint.join("sharded")],
    };
    for way in ways.iter().filter(|way| way.exists()) {
        let catalog = open(way).map_err(|e| e.to_string())?;
        check_tensors(&catalog, &expected)?;
        check_values(&catalog, &values)?;
        if let Some(metadata) = json("metadata.json") {
            check_metadata(&catalog, &metadata)?;
        }
    }
    Ok(())
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: &T, expected: &T) -> Result<(), String> {
    match found == expected {
        true => Ok(()),
        false => Err(format!("{what}: found {found:?}, expected {expected:?}")),
    }
}

fn check_tensors(catalog: &Catalog, expected: &Catalog) -> Result<(), String> {
    let keys = |catalog: &Catalog| catalog.tensors.keys().cloned().collect::<Vec<_>>();
    same("tensors", &keys(catalog), &keys(expected))?;
    for (key, tensor) in &catalog.tensors {
        let whole = &expected.tensors[key];
        same(key, &(tensor.element, &tensor.shape), &(whole.element, &whole.shape))?;
        let read = |catalog: &Catalog| catalog.read(key).map_err(|e| e.to_string());
        same(key, &read(catalog)?, &read(expected)?)?;
        for chunk in &tensor.chunks {
            let part = |catalog: &Catalog| catalog.read_box(key, &chunk.part).map_err(|e| e.to_string());
            same(key, &part(catalog)?, &part(expected)?)?;
        }
    }
    Ok(())
}

/// Values, which the vectors have nested or by flat key.
fn check_values(catalog: &Catalog, expected: &Json) -> Result<(), String> {
    let mut flat = BTreeMap::new();
    flatten("", expected, &mut flat);
    let found: BTreeMap<String, Json> = catalog.values.iter().map(|(key, value)| (key.clone(), plain(value))).collect();
    same("values", &found, &flat)
}

fn flatten(prefix: &str, json: &Json, flat: &mut BTreeMap<String, Json>) {
    match json {
        Json::Object(object) if !object.contains_key("tuple") => {
            for (key, value) in object {
                let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&key, value, flat);
            }
        }
        leaf => drop(flat.insert(prefix.to_string(), leaf.clone())),
    }
}

/// A value as the vectors write it.
fn plain(value: &Value) -> Json {
    match value {
        Value::Map(map) => {
            map.iter().map(|(key, value)| (key.clone(), plain(value))).collect::<serde_json::Map<_, _>>().into()
        }
        Value::List(values) => values.iter().map(plain).collect(),
        Value::Tuple(values) => json!({ "tuple": values.iter().map(plain).collect::<Vec<_>>() }),
        other => other.to_json(),
    }
}

fn check_metadata(catalog: &Catalog, metadata: &Json) -> Result<(), String> {
    let items = metadata["items"].as_object().ok_or("no items")?;
    same("items", &items.len(), &(catalog.tensors.len() + catalog.values.len()))?;
    for (key, item) in items {
        if item["type"] == "bytes" {
            same(key, &catalog.values.contains_key(key), &true)?;
            continue;
        }
        let tensor = catalog.tensors.get(key).ok_or(format!("no tensor {key}"))?;
        let chunks: Vec<Json> =
            tensor.chunks.iter().map(|c| json!({ "offsets": c.part.offsets, "sizes": c.part.sizes })).collect();
        let found =
            json!({ "type": "tensor", "dtype": tensor.element.to_string(), "size": tensor.shape, "chunks": chunks });
        same(key, &found, item)?;
    }
    if let Some(paths) = metadata["paths"].as_object() {
        for (key, path) in paths {
            let own = vec![Key::Name(key.clone())];
            let found = json!(catalog.paths.get(key).unwrap_or(&own));
            same(key, &found, path)?;
        }
    }
    for place in metadata["storage"].as_array().ok_or("no storage")? {
        let key = place["key"].as_str().ok_or("no key")?;
        if place["chunk_offset"].is_null() {
            continue;
        }
        let chunks = &catalog.tensors.get(key).ok_or(format!("no tensor {key}"))?.chunks;
        let chunk = chunks.iter().find(|c| json!(c.part.offsets) == place["chunk_offset"]).ok_or("no chunk")?;
        same(key, &place["file"].as_str(), &Some(chunk.file.as_str()))?;
        let number = |name: &str| place[name].as_u64().ok_or(format!("no {name}"));
        let (start, length) = (number("byte_offset")?, number("byte_length")?);
        let end = chunk.offset + chunk.span(catalog.tensors[key].element).ok_or("no end")?;
        same(key, &(start < chunk.offset && end < start + length), &true)?;
    }
    Ok(())
}
