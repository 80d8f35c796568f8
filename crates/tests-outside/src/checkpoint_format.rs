//! A custom checkpoint format in one file: bytes of boxes in `*.raw`, and all metadata in `raw.json`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shardwise::candle_core::{Device, Tensor};
use shardwise::checkpoint::{
    self, CheckpointFormat, Contents, ConvertOptions, FileRole, FileToWrite, Files, Format, FormatWriter, Key,
    SaveOptions, State, StateLoadOptions, StoredTensor, Value, ValueStorage, WrittenFile,
};
use shardwise::error::ErrorKind;
use shardwise::prelude::*;

struct Raw;

const INDEX: &str = "raw.json";
const MAGIC: &[u8] = b"RAW1";

#[derive(Serialize, Deserialize)]
struct Index {
    tensors: BTreeMap<String, StoredTensor>,
    values: BTreeMap<String, Value>,
    paths: BTreeMap<String, Vec<Key>>,
}

impl CheckpointFormat for Raw {
    fn name(&self) -> &'static str {
        "raw"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["bytes"]
    }

    fn about(&self) -> &'static str {
        "bytes of boxes, and a JSON file that describes them"
    }

    fn detect(&self, files: &Files) -> bool {
        files.size(INDEX).is_some()
    }

    fn open(&self, files: &Files) -> Result<Contents> {
        let index: Index = serde_json::from_slice(&files.read_small(INDEX, 1 << 28)?).map_err(Error::other)?;
        for file in index.tensors.values().flat_map(|tensor| tensor.chunks.iter().map(|chunk| chunk.file.clone())) {
            files.check_before_read(&file.clone(), move |files| {
                let mut magic = [0; 4];
                files.read(&file, 0, &mut magic)?;
                let wrong = || ErrorKind::Argument.error("raw file", format!("{magic:?}"), "RAW1", "copy it again");
                (magic == MAGIC).then_some(()).ok_or_else(wrong)
            });
        }
        Ok(Contents { tensors: index.tensors, values: index.values, paths: index.paths, ..Contents::default() })
    }

    fn owns(&self, name: &str) -> bool {
        name == INDEX || name.ends_with(".raw")
    }

    fn belongs(&self, name: &str) -> bool {
        name == INDEX
    }

    fn writer(&self) -> Option<&dyn FormatWriter> {
        Some(self)
    }
}

impl FormatWriter for Raw {
    fn values(&self) -> ValueStorage {
        ValueStorage::InIndex
    }

    fn file_name(&self, file: FileRole) -> String {
        let (FileRole::Whole { index: number, .. } | FileRole::OfRank { rank: number, .. }) = file;
        format!("{number}.raw")
    }

    fn write_file(&self, out: &mut BufWriter<File>, file: FileToWrite<'_>) -> Result<WrittenFile> {
        out.write_all(MAGIC)?;
        let mut chunks = Vec::new();
        for part in &file.boxes {
            chunks.push((part.key.clone(), part.write(out, file.name, file.progress)?));
        }
        Ok(WrittenFile { name: file.name.to_string(), chunks, note: part_count(file.boxes.len()) })
    }

    fn index(&self, contents: &Contents, files: &[WrittenFile]) -> Result<Option<(String, Vec<u8>)>> {
        let Contents { tensors, values, paths, .. } = contents.clone();
        let stored: usize = tensors.values().map(|tensor| tensor.chunks.len()).sum();
        let noted: u64 = files.iter().filter_map(|file| file.note.as_u64()).sum();
        assert_eq!(stored as u64, noted, "what every rank noted of its files arrives");
        Ok(Some((INDEX.to_string(), serde_json::to_vec(&Index { tensors, values, paths }).map_err(Error::other)?)))
    }
}

fn part_count(count: usize) -> serde_json::Value {
    serde_json::Value::from(count)
}

/// A directory that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("shardwise-outside-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn weight() -> Tensor {
    Tensor::arange(0f32, 35.0, &Device::Cpu).unwrap().reshape((7, 5)).unwrap()
}

/// Saves on two ranks, by rows.
fn save(path: &Path, format: Format, step: i64) -> Result<()> {
    let path = path.to_path_buf();
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let weight = DTensor::distribute_tensor(&weight(), &mesh, [Shard(0)], Some(0))?;
        let bias = DTensor::ones(3, DType::F64, &mesh, [Replicate])?;
        let model = State::map([("weight", weight), ("bias", bias)]);
        let state = State::map([("model", model), ("step", State::from(step))]);
        checkpoint::save_with(&world, &path, &state, &SaveOptions { format, ..SaveOptions::default() })
    })
}

/// Loads on three ranks, by columns; the step.
fn load(path: &Path, values: bool) -> Result<()> {
    let path = path.to_path_buf();
    launch(3, move |world| {
        let mesh = world.mesh([("tp", 3)])?;
        let like = DTensor::zeros((7, 5), DType::F32, &mesh, [Shard(1)])?;
        let mut template = vec![("model", State::map([("weight", like)]))];
        template.extend(values.then(|| ("step", State::from(0))));
        let loaded = checkpoint::load_with(&world, &path, &State::map(template), &StateLoadOptions::default())?;
        let (loaded, report) = (loaded.state, loaded.report);
        assert_eq!(loaded.tensor("model.weight")?.full_tensor()?.to_vec2::<f32>()?, weight().to_vec2::<f32>()?);
        if values {
            assert_eq!(loaded.value("step")?, Value::Int(7));
            assert_eq!(report.unchecked_bytes, 0, "every block has a checksum");
        }
        Ok(())
    })
}

#[test]
fn a_registered_format_is_saved_recognized_loaded_and_converted() {
    let scratch = Scratch::new("format");
    let raw = Format::register(&Raw).unwrap();
    assert_eq!(("raw".parse::<Format>().unwrap(), "BYTES".parse::<Format>().unwrap()), (raw, raw));
    let error = "zarr".parse::<Format>().unwrap_err().to_string();
    assert!(error.contains("raw, native, dcp, hugging-face, gguf, torch"), "{error}");

    let path = scratch.at("raw");
    save(&path, raw, 6).unwrap();
    save(&path, raw, 7).unwrap(); // a checkpoint of the format may be replaced
    let mut names: Vec<String> =
        fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["0.raw", "1.raw", "raw.json"]);
    assert_eq!(checkpoint::open(&path).unwrap().format, raw);
    load(&path, true).unwrap();

    // To safetensors and back, and to every other format that can be written; another test may have registered one that fails.
    let written = |format: &Format| format.is_writable() && format.to_string() != "faulty";
    for format in Format::all().into_iter().filter(written) {
        let (there, back) = (scratch.at(&format!("{format}")), scratch.at(&format!("{format}-back")));
        if format != raw {
            checkpoint::convert(&path, &there, &ConvertOptions::to(format), &|_| {}).unwrap();
        } else {
            save(&there, raw, 7).unwrap();
        }
        checkpoint::convert(&there, &back, &ConvertOptions::to(raw), &|_| {}).unwrap();
        let found = checkpoint::open(&back).unwrap();
        assert_eq!((found.format, found.tensors.len()), (raw, 2));
        let has_values = format != Format::HuggingFace;
        assert_eq!(found.values.len(), usize::from(has_values), "{format}");
        load(&back, has_values).unwrap();
        assert!(checkpoint::verify(&back, &|_| {}).is_intact());
    }
}

#[test]
fn corruption_and_unknown_files_are_found_in_it() {
    let scratch = Scratch::new("damage");
    let raw = Format::register(&Raw).unwrap();
    let path = scratch.at("raw");
    save(&path, raw, 7).unwrap();
    fs::write(path.join("2.raw"), "unused").unwrap();
    assert_eq!(checkpoint::verify(&path, &|_| {}).unknown_files, ["2.raw"]);

    let file = path.join("1.raw");
    let good = fs::read(&file).unwrap();
    for (at, found) in [(0, "raw file"), (good.len() - 1, "checksum")] {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        fs::write(&file, bytes).unwrap();
        let error = load(&path, true).unwrap_err().to_string();
        assert!(error.contains(found), "{error}");
    }
    fs::write(&file, &good[..good.len() - 1]).unwrap();
    assert!(checkpoint::open(&path).unwrap_err().to_string().contains("truncated"));

    fs::write(&file, &good).unwrap();
    fs::write(path.join("notes.txt"), "mine").unwrap();
    assert!(save(&path, raw, 8).unwrap_err().to_string().contains("notes.txt"));
    assert_eq!(checkpoint::open(&path).unwrap().value("step").unwrap(), Value::Int(7));
}
