//! DCP checkpoints: round trips here and in PyTorch; damaged and malicious files are refused.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::checkpoint::bytes::content::BoxContent;
use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::catalogs::open::open;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::value::{Key, Value, flat_key};
use crate::error::{Error, Result};
use crate::layout::TensorBox;

/// A directory that is removed on drop.
struct DcpScratch(PathBuf);

impl DcpScratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("shardwise-dcp-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        DcpScratch(path)
    }
}

impl Drop for DcpScratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Type, shape, elements, and the boxes that are written as chunks.
type TestTensor = (ElementType, Vec<usize>, Vec<u8>, Vec<TensorBox>);

/// State to write: global tensors as bytes, with their chunks.
#[derive(Default)]
struct TestState {
    tensors: BTreeMap<String, TestTensor>,
    values: BTreeMap<String, Value>,
    paths: BTreeMap<String, Vec<Key>>,
}

impl TestState {
    fn path(&mut self, path: &[Key]) -> String {
        let key = flat_key(path);
        self.paths.insert(key.clone(), path.to_vec());
        key
    }

    fn value(&mut self, path: &[Key], value: Value) {
        let key = self.path(path);
        self.values.insert(key, value);
    }

    /// A tensor of random bytes, split at random positions, some of which leave empty boxes.
    fn tensor(&mut self, path: &[Key], element: ElementType, shape: &[usize], rng: &mut StdRng) {
        let key = self.path(path);
        let mut bytes = vec![0u8; shape.iter().product::<usize>() * element.size_in_bytes()];
        rng.fill(bytes.as_mut_slice());
        if element == ElementType::Bool {
            bytes.iter_mut().for_each(|b| *b &= 1);
        }
        let mut boxes = vec![TensorBox { offsets: vec![0; shape.len()], sizes: shape.to_vec() }];
        for (dim, &length) in shape.iter().enumerate() {
            for _ in 0..rng.random_range(0..3) {
                let at = rng.random_range(0..=length);
                let split = |part: TensorBox| -> Vec<TensorBox> {
                    let (start, size) = (part.offsets[dim], part.sizes[dim]);
                    // Empty boxes only at the end: in the middle one would have the same offsets as the next box.
                    let behind = at == start + size && at != length;
                    if at <= start || at > start + size || behind || part.volume() == 0 {
                        return vec![part];
                    }
                    let (mut low, mut high) = (part.clone(), part);
                    low.sizes[dim] = at - start;
                    (high.offsets[dim], high.sizes[dim]) = (at, start + size - at);
                    vec![low, high]
                };
                boxes = boxes.into_iter().flat_map(split).collect();
            }
        }
        boxes.sort_by(|a, b| a.offsets.cmp(&b.offsets));
        boxes.dedup_by(|a, b| a.offsets == b.offsets && a.volume() == 0 && b.volume() == 0);
        self.tensors.insert(key, (element, shape.to_vec(), bytes, boxes));
    }

    /// Writes the state to `files` files, with the chunks distributed round-robin.
    fn write(&self, directory: &Path, files: usize) -> Result<Vec<ArchiveLocation>> {
        let mut parts: Vec<Vec<(String, TensorBox, BoxContent)>> = (0..files).map(|_| Vec::new()).collect();
        let mut turn = 0;
        for (key, (element, shape, bytes, boxes)) in &self.tensors {
            for part in boxes {
                let tensor = slice(*element, shape, bytes, part)?;
                parts[turn % files].push((key.clone(), part.clone(), BoxContent::Memory { element: *element, tensor }));
                turn += 1;
            }
        }
        let mut places = Vec::new();
        for (rank, tensors) in parts.iter().enumerate() {
            let name = format!("__{rank}_0.distcp");
            let values: Vec<(String, &Value)> = match rank {
                0 => self.values.iter().map(|(key, value)| (key.clone(), value)).collect(),
                _ => Vec::new(),
            };
            let mut bytes = Vec::new();
            places.extend(write_file(&mut bytes, &name, tensors, &values, &|_| {})?);
            std::fs::write(directory.join(name), bytes)?;
        }
        std::fs::write(directory.join(METADATA), metadata_bytes(&self.shapes(), &places, &self.paths, None)?)?;
        Ok(places)
    }

    fn shapes(&self) -> BTreeMap<String, (ElementType, Vec<usize>)> {
        self.tensors.iter().map(|(key, (element, shape, ..))| (key.clone(), (*element, shape.clone()))).collect()
    }
}

/// A box of a tensor that is given as bytes, as a tensor of elements of the same size.
fn slice(element: ElementType, shape: &[usize], bytes: &[u8], part: &TensorBox) -> Result<Tensor> {
    let dtype = match element.size_in_bytes() {
        1 => DType::U8,
        2 => DType::I16,
        4 => DType::I32,
        _ => DType::I64,
    };
    let mut tensor = match bytes.is_empty() {
        true => Tensor::zeros(shape, dtype, &Device::Cpu)?,
        false => Tensor::from_raw_buffer(bytes, dtype, shape, &Device::Cpu)?,
    };
    if part.volume() == 0 {
        return Ok(Tensor::zeros(part.sizes.as_slice(), dtype, &Device::Cpu)?);
    }
    for (dim, (&offset, &size)) in part.offsets.iter().zip(&part.sizes).enumerate() {
        tensor = tensor.narrow(dim, offset, size)?;
    }
    Ok(tensor.contiguous()?)
}

fn name(text: &str) -> Key {
    Key::Name(text.to_string())
}

/// A state with every type of elements, every kind of value, and nesting.
fn sample(seed: u64) -> TestState {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut state = TestState::default();
    for &element in ElementType::ALL {
        let dims = rng.random_range(0..4);
        let shape: Vec<usize> = (0..dims).map(|_| rng.random_range(0..7)).collect();
        state.tensor(&[name("model"), name(element.torch_name())], element, &shape, &mut rng);
    }
    for i in 0..3 {
        state.tensor(&[name("blocks"), Key::Index(i), name("weight")], ElementType::F32, &[5, 3], &mut rng);
    }
    state.tensor(&[name("scalar")], ElementType::F64, &[], &mut rng);
    state.tensor(&[name("empty")], ElementType::BF16, &[0, 4], &mut rng);
    state.value(&[name("none")], Value::None);
    state.value(&[name("flag")], Value::Bool(true));
    state.value(&[name("step")], Value::Int(-7));
    state.value(&[name("deep"), name("big")], Value::Int(i64::MIN));
    state.value(&[name("deep"), name("inf")], Value::Float(f64::INFINITY));
    state.value(
        &[name("groups"), Key::Index(0), name("betas")],
        Value::Tuple(vec![Value::Float(0.9), Value::Float(0.95)]),
    );
    state.value(&[name("groups"), Key::Index(0), name("lr")], Value::Float(1e-3));
    state.value(&[name("naïve \"key\"")], Value::Text("tab\t, naïve, \u{1f600}".into()));
    let map = BTreeMap::from([("a".to_string(), Value::Int(1 << 40)), ("b".to_string(), Value::List(vec![]))]);
    state.value(&[name("mixed")], Value::Tuple(vec![Value::Map(map), Value::List(vec![Value::None, Value::Int(300)])]));
    state
}

fn check(catalog: &Catalog, state: &TestState) {
    assert_eq!(catalog.values, state.values);
    assert_eq!(catalog.paths, state.paths);
    assert!(catalog.tensors.keys().eq(state.tensors.keys()));
    for (key, (element, shape, bytes, boxes)) in &state.tensors {
        let tensor = &catalog.tensors[key];
        assert_eq!((tensor.element, &tensor.shape), (*element, shape));
        assert!(boxes.iter().all(|part| tensor.chunks.iter().any(|chunk| chunk.part == *part)), "{key}");
        assert_eq!(catalog.read(key).unwrap(), *bytes, "{key}");
    }
}

#[test]
fn checkpoints_round_trip() {
    let scratch = DcpScratch::new("back");
    for seed in 0..30 {
        let state = sample(seed);
        let places = state.write(&scratch.0, 1 + seed as usize % 4).unwrap();
        let catalog = open(&scratch.0).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        check(&catalog, &state);
        // The reader finds the locations that the writer returned, checksums included.
        for place in places {
            let Some(mut chunk) = place.chunk else { continue };
            chunk.crc32 = chunk.crc32.filter(|_| chunk.part.volume() > 0);
            assert!(catalog.tensors[&place.key].chunks.contains(&chunk), "seed {seed}: {chunk:?}");
        }
    }
}

#[test]
fn pytorch_reads_our_checkpoints() {
    let scratch = DcpScratch::new("python");
    let python = std::env::var("SHARDWISE_PYTHON").unwrap_or_else(|_| "python3".to_string());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/read_dcp.py");
    for seed in 100..103 {
        let state = sample(seed);
        state.write(&scratch.0, 3).unwrap();
        let output = match Command::new(&python).arg(&script).arg(&scratch.0).output() {
            Ok(output) if output.status.code() != Some(77) => output,
            _ => return println!("skipped: no PyTorch in {python}; name another Python in SHARDWISE_PYTHON"),
        };
        assert!(output.status.success(), "seed {seed}: {}", String::from_utf8_lossy(&output.stderr));
        let loaded: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let tensors = loaded["tensors"].as_object().unwrap();
        assert_eq!(tensors.len(), state.tensors.len());
        for (key, (element, shape, bytes, _)) in &state.tensors {
            let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
            let expected = serde_json::json!({ "dtype": element.torch_name(), "shape": shape, "bytes": hex });
            assert_eq!(tensors[key], expected, "seed {seed}: {key}");
        }
        let values = loaded["values"].as_object().unwrap();
        let values: BTreeMap<String, Value> =
            values.iter().map(|(key, json)| (key.clone(), Value::from_json(json).unwrap())).collect();
        assert_eq!(values, state.values, "seed {seed}");
    }
}

/// A small state in one file.
fn small() -> TestState {
    let mut rng = StdRng::seed_from_u64(5);
    let mut state = TestState::default();
    let key = state.path(&[name("w")]);
    let boxes = [0, 1].map(|row| TensorBox { offsets: vec![row, 0], sizes: vec![1, 3] }).to_vec();
    let bytes = (0..12).map(|_| rng.random()).collect();
    state.tensors.insert(key, (ElementType::I16, vec![2, 3], bytes, boxes));
    state.value(&[name("v")], Value::List(vec![Value::Int(3), Value::Text("x".into())]));
    state
}

#[test]
fn truncated_and_changed_files_are_detected_or_harmless() {
    let scratch = DcpScratch::new("flips");
    let state = small();
    state.write(&scratch.0, 1).unwrap();
    let read = || -> Result<()> {
        let catalog = open(&scratch.0)?;
        for (key, (_, shape, bytes, _)) in &state.tensors {
            let Some(tensor) = catalog.tensors.get(key) else { continue };
            let same = catalog.read(key)? == *bytes && tensor.shape == *shape;
            assert!(same, "{key} changed without notice: {tensor:?}");
        }
        for (key, value) in &catalog.values {
            assert!(state.values.get(key).is_none_or(|known| known == value), "{key} changed to {value}");
        }
        Ok(())
    };
    read().unwrap();
    for file in [METADATA, "__0_0.distcp"] {
        let path = scratch.0.join(file);
        let whole = std::fs::read(&path).unwrap();
        // Changed in place: rewriting the files each time would take minutes.
        let open_file = std::fs::File::options().write(true).open(&path).unwrap();
        for at in 0..whole.len() {
            for mask in [1, 2, 4, 8, 16, 32, 64, 128, 255] {
                open_file.write_all_at(&[whole[at] ^ mask], at as u64).unwrap();
                let _ = read();
            }
            open_file.write_all_at(&whole[at..=at], at as u64).unwrap();
        }
        read().unwrap();
        for length in (0..whole.len()).rev() {
            open_file.set_len(length as u64).unwrap();
            assert!(read().is_err(), "{file} truncated to {length}");
        }
        std::fs::write(&path, &whole).unwrap();
    }
}

/// The same for files that PyTorch wrote. Tensors that share a storage have no checksum each.
#[test]
fn damaged_pytorch_files_are_detected_or_harmless() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data/dcp");
    for (case, file) in [("nested", METADATA), ("torch_save", "model.pt")] {
        let scratch = DcpScratch::new(case);
        for entry in std::fs::read_dir(data.join(case).join("checkpoint")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), scratch.0.join(entry.file_name())).unwrap();
        }
        let damaged = scratch.0.join(file);
        let root = if file == METADATA { &scratch.0 } else { &damaged };
        let whole = open(root).unwrap();
        let read = |at: usize| {
            let Ok(catalog) = open(root) else { return };
            for (key, tensor) in &catalog.tensors {
                let Some(known) = whole.tensors.get(key) else { continue };
                assert!(catalog.read(key).is_err() || tensor.shape == known.shape, "{case}, byte {at}: {key}");
            }
            for (key, value) in &catalog.values {
                assert!(
                    whole.values.get(key).is_none_or(|known| known == value),
                    "{case}, byte {at}: {key} is {value}"
                );
            }
        };
        let bytes = std::fs::read(&damaged).unwrap();
        let open_file = std::fs::File::options().write(true).open(&damaged).unwrap();
        for at in 0..bytes.len() {
            for mask in [1, 0xff] {
                open_file.write_all_at(&[bytes[at] ^ mask], at as u64).unwrap();
                read(at);
            }
            open_file.write_all_at(&bytes[at..=at], at as u64).unwrap();
        }
        for length in (0..bytes.len()).rev() {
            open_file.set_len(length as u64).unwrap();
            assert!(open(root).is_err(), "{case} truncated to {length}");
        }
    }
}

#[test]
fn hostile_checkpoints_execute_nothing_and_read_no_other_files() {
    let scratch = DcpScratch::new("hostile");
    let state = small();
    let refused = |text: &str| {
        let error = open(&scratch.0).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    let places = state.write(&scratch.0, 1).unwrap();
    // File names that lead out of the directory.
    for file in ["../w", "/etc/passwd", "a/../../b", "", "a\\..\\b"] {
        let mut moved = places.clone();
        moved.iter_mut().for_each(|place| place.file = file.to_string());
        std::fs::write(scratch.0.join(METADATA), metadata_bytes(&state.shapes(), &moved, &state.paths, None).unwrap())
            .unwrap();
        refused("may be malicious");
    }
    // Locations beyond the end of the file.
    for (offset, length) in [(0, 1 << 60), (1 << 60, 100), (i64::MAX as u64, i64::MAX as u64), (0, 10)] {
        let mut moved = places.clone();
        moved.iter_mut().for_each(|place| (place.offset, place.length) = (offset, length));
        std::fs::write(scratch.0.join(METADATA), metadata_bytes(&state.shapes(), &moved, &state.paths, None).unwrap())
            .unwrap();
        refused("zip archive");
    }
    // A tensor larger than its chunks.
    let shapes = BTreeMap::from([("w".to_string(), (ElementType::I16, vec![1 << 61, 3]))]);
    std::fs::write(scratch.0.join(METADATA), metadata_bytes(&shapes, &places, &state.paths, None).unwrap()).unwrap();
    refused("memory can address");
    // A chunk of another type.
    let shapes = BTreeMap::from([("w".to_string(), (ElementType::U16, vec![2, 3]))]);
    std::fs::write(scratch.0.join(METADATA), metadata_bytes(&shapes, &places, &state.paths, None).unwrap()).unwrap();
    refused("as .metadata says");
    // A pickle that would run a command, in place of the metadata.
    std::fs::write(scratch.0.join(METADATA), b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R.").unwrap();
    refused("posix.system");
    // The same in a chunk and in a value, with a matching checksum.
    state.write(&scratch.0, 1).unwrap();
    let whole = std::fs::read(scratch.0.join("__0_0.distcp")).unwrap();
    for place in &places {
        let archive = hostile_archive(place.length);
        let mut bytes = whole.clone();
        bytes[place.offset as usize..][..archive.len()].copy_from_slice(&archive);
        let mut places = places.clone();
        places.iter_mut().filter(|p| p.offset == place.offset).for_each(|p| p.length = archive.len() as u64);
        std::fs::write(scratch.0.join(METADATA), metadata_bytes(&state.shapes(), &places, &state.paths, None).unwrap())
            .unwrap();
        std::fs::write(scratch.0.join("__0_0.distcp"), bytes).unwrap();
        match place.chunk {
            Some(_) => refused("os.system"),
            // A value that cannot be read does not hinder the rest.
            None => {
                let unreadable = open(&scratch.0).unwrap().unreadable;
                assert!(unreadable[&place.key].contains("os.system"), "{unreadable:?}");
            }
        }
    }
    // The same in a torch.save file.
    let file = scratch.0.join("model.pt");
    std::fs::write(&file, hostile_archive(u64::MAX)).unwrap();
    let error: Error = open(&file).unwrap_err();
    assert!(error.to_string().contains("os.system"), "{error}");
}

fn hostile_archive(room: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = crate::checkpoint::formats::zip::ZipWriter::new(&mut bytes);
    writer.small("archive/data.pkl", b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.").unwrap();
    writer.finish().unwrap();
    assert!(bytes.len() as u64 <= room);
    bytes
}
