//! Checkpoints that PyTorch wrote with entries and metadata out of the ordinary: what cannot be read is listed and does not
//! hinder the rest. `tests/data/dcp` was written by `tests/scripts/record_dcp.py`.

use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::{Device, Tensor};
use shardwise::checkpoint::{self, ConvertOptions, Format, SaveOptions, State, StateLoadOptions, Value};
use shardwise::prelude::*;
use shardwise_test_suites::errors::same_error_on_all_ranks;
use shardwise_test_suites::scratch::Scratch;

fn recorded(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/dcp")).join(name)
}

/// What cannot be read in the recorded state, and a part of the reason.
const UNREADABLE: [(&str, &str); 6] = [
    ("names", "set"),
    ("args", "argparse.Namespace"),
    ("big", "beyond 64 bits"),
    ("number", "complex"),
    ("complex", "type"),
    ("optimizer.state.1.tag", "object"),
];

#[test]
fn one_unreadable_entry_does_not_hinder_the_rest() {
    for name in ["odd", "odd.pt"] {
        let catalog = checkpoint::open(recorded(name)).unwrap();
        for (key, reason) in UNREADABLE {
            let found = catalog.unreadable.get(key).unwrap_or_else(|| panic!("{name}: {key} in {catalog:?}"));
            assert!(found.contains(reason), "{name}: {key}: {found}");
        }
        let read = |key: &str| catalog.read(key).unwrap();
        assert_eq!(read("weight").len(), 24, "{name}");
        assert_eq!(read("optimizer.state.0"), [1f32, 1.0].map(f32::to_le_bytes).concat(), "{name}");
        assert_eq!(catalog.value("step").unwrap(), Value::Int(7));
        assert_eq!(catalog.value("optimizer.lr").unwrap(), Value::Float(0.5));
        assert_eq!(catalog.value("raw").unwrap(), Value::Bytes(vec![0, 1, 0xfe, 0xff]), "{name}");
        assert_eq!(catalog.value("buffer").unwrap(), Value::Bytes(b"abc\xff".to_vec()), "{name}");
        assert_eq!(catalog.value("file").unwrap(), Value::Bytes(b"in memory".to_vec()), "{name}");
        let error = catalog.value("args").unwrap_err().to_string();
        assert!(error.contains("argparse.Namespace") && error.contains("executing"), "{error}");
    }
    let file = checkpoint::open(recorded("odd.pt")).unwrap();
    assert!(file.unreadable["sparse"].contains("_rebuild_sparse_tensor"), "{:?}", file.unreadable);
    assert!(file.unreadable["by_pair"].contains("keys"), "{:?}", file.unreadable);
}

#[test]
fn loading_an_unreadable_entry_is_an_error_with_the_reason_and_other_entries_load() {
    let path = recorded("odd");
    let place = path.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let like = DTensor::zeros((2, 3), DType::F32, &mesh, [Shard(0)])?;
        let loaded =
            checkpoint::load(&world, &place, &State::map([("weight", State::from(like)), ("step", State::from(0))]))?;
        let row = [[0f32, 1.0, 2.0], [3.0, 4.0, 5.0]][world.rank()];
        assert_eq!(loaded.tensor("weight")?.to_local()?.to_vec2::<f32>()?, [row]);
        Ok(())
    })
    .unwrap();
    let place = path.clone();
    let options = StateLoadOptions { allow_partial: true, ..StateLoadOptions::default() };
    let error = same_error_on_all_ranks(2, move |world| {
        checkpoint::load_with(&world, &place, &State::map([("args", 1)]), &options).map(drop)
    });
    assert!(error.contains("argparse.Namespace"), "present and unreadable is not missing: {error}");
    // A conversion leaves them out and says so; bytes are kept.
    let scratch = Scratch::new("unreadable");
    let to = scratch.0.join("native");
    let error = checkpoint::convert(&path, &to, &ConvertOptions::to(Format::Native), &|_| {}).unwrap_err();
    assert_eq!((error.kind(), to.exists()), (Some(&ErrorKind::Damaged), false), "{error}");
    let options = ConvertOptions { skip_unreadable: true, ..ConvertOptions::to(Format::Native) };
    let done = checkpoint::convert(&path, &to, &options, &|_| {}).unwrap();
    assert!(UNREADABLE.iter().all(|(key, _)| done.unreadable.iter().any(|left| left == key)), "{done:?}");
    let converted = checkpoint::open(&to).unwrap();
    assert_eq!(converted.value("raw").unwrap(), Value::Bytes(vec![0, 1, 0xfe, 0xff]));
    assert!(converted.unreadable.is_empty());
}

#[test]
fn metadata_of_older_versions_opens() {
    for name in ["old_metadata", "bare_metadata"] {
        let catalog = checkpoint::open(recorded(name)).unwrap();
        assert_eq!(catalog.tensor("weight").unwrap().shape, [4, 2], "{name}");
        let expected: Vec<u8> = (0..8).flat_map(|i| (i as f32).to_le_bytes()).collect();
        assert_eq!(catalog.read("weight").unwrap(), expected, "{name}");
        assert_eq!(catalog.value("step").unwrap(), Value::Int(3), "{name}");
    }
    assert_eq!(checkpoint::open(recorded("bare_metadata")).unwrap().version, None);
}

#[test]
fn version_and_identifier_of_a_save_are_shown() {
    let recorded = checkpoint::open(recorded("old_metadata")).unwrap();
    assert!(recorded.version.is_some(), "PyTorch stores the version of its format");
    assert!(recorded.save_id.as_ref().is_some_and(|id| id.len() > 8), "and an identifier: {:?}", recorded.save_id);
    let scratch = Scratch::new("save-ids");
    for format in [Format::Native, Format::Dcp] {
        let path = scratch.0.join(format.name());
        let mut ids = Vec::new();
        for _ in 0..2 {
            let place = path.clone();
            let options = SaveOptions { format, ..SaveOptions::default() };
            launch(2, move |world| checkpoint::save_with(&world, &place, &State::map([("step", 1)]), &options))
                .unwrap();
            let catalog = checkpoint::open(&path).unwrap();
            assert!(catalog.version.is_some(), "{format}");
            ids.push(catalog.save_id.expect("every save has one"));
        }
        assert_ne!(ids[0], ids[1], "{format}: two saves of the same state");
    }
}

#[test]
fn overlapping_chunks_are_noticed_when_opened_and_loaded() {
    let path = recorded("overlap");
    let error = checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("\"weight\"") && error.contains("do not fit together"), "{error}");
    let error = same_error_on_all_ranks(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let like = DTensor::zeros((6, 2), DType::F32, &mesh, [Shard(0)])?;
        checkpoint::load(&world, &path, &State::map([("weight", like)])).map(drop)
    });
    assert!(error.contains("\"weight\""), "{error}");
}

#[test]
fn a_transformed_chunk_makes_its_entry_unreadable_only() {
    let catalog = checkpoint::open(recorded("transformed")).unwrap();
    assert!(catalog.unreadable["weight"].contains("transformation"), "{:?}", catalog.unreadable);
    assert_eq!(catalog.value("step").unwrap(), Value::Int(3));
    let found = checkpoint::verify(recorded("transformed"), &|_| {});
    assert!(!found.is_intact() && found.problems[0].contains("\"weight\""), "{:?}", found.problems);
}

/// The recorded matrix is 5 x 7 with a scale per block of 2 x 3: rows and columns of a rank cross borders of blocks.
#[test]
fn matrices_with_block_scales_are_dequantized_in_any_layout() {
    let text = std::fs::read_to_string(recorded("fp8/expected.json")).unwrap();
    let expected: Vec<Vec<f32>> = serde_json::from_str(&text).unwrap();
    let whole = Tensor::new(expected, &Device::Cpu).unwrap();
    launch(4, move |world| {
        let options = StateLoadOptions { block_scales: Some([2, 3]), ..StateLoadOptions::default() };
        let (line, grid) = (world.mesh([("all", 4)])?, world.mesh([("a", 2), ("b", 2)])?);
        let cases = [
            (&line, vec![Shard(0)]),
            (&line, vec![Shard(1)]),
            (&line, vec![Replicate]),
            (&line, vec![Placement::block_cyclic(0, 1)]),
            (&grid, vec![Shard(0), Shard(1)]),
        ];
        for (mesh, placements) in cases {
            let like = DTensor::zeros((5, 7), DType::F32, mesh, placements)?;
            let template = State::map([("proj.weight", like)]);
            let loaded = checkpoint::load_with(&world, recorded("fp8"), &template, &options)?;
            let found = loaded.state.tensor("proj.weight")?.full_tensor()?;
            assert_eq!(found.to_vec2::<f32>()?, whole.to_vec2::<f32>()?);
            assert!(loaded.unexpected_keys.is_empty(), "the scales are used: {:?}", loaded.unexpected_keys);
        }
        let wrong = StateLoadOptions { block_scales: Some([2, 2]), ..options };
        let template = State::map([("proj.weight", DTensor::zeros((5, 7), DType::F32, &line, [Shard(0)])?)]);
        let error = checkpoint::load_with(&world, recorded("fp8"), &template, &wrong).err().unwrap().to_string();
        assert!(error.contains("block scales") && error.contains("[2, 2]"), "{error}");
        Ok(())
    })
    .unwrap();
}

/// Nested state of every kind of leaf, written as `torch.save` files.
fn nested(mesh: &DeviceMesh) -> Result<State> {
    let weight = DTensor::arange(0.0..12.0, DType::F32, mesh, [Shard(0)])?.reshape(&[4, 3])?;
    let half = DTensor::ones(3, DType::BF16, mesh, [Replicate])?;
    let layers = State::list([State::map([("weight", weight)]), State::map([("weight", half)])]);
    Ok(State::map([
        ("layers", layers),
        ("step", State::from(5)),
        ("name", State::from("run \u{e9}")),
        ("raw", State::from(&b"\x00\xff"[..])),
        ("betas", State::Value(Value::Tuple(vec![0.9.into(), 0.95.into()]))),
        ("empty", State::from(DTensor::zeros((0, 3), DType::I64, mesh, [Replicate])?)),
    ]))
}

#[test]
fn a_checkpoint_becomes_a_torch_save_file() {
    let scratch = Scratch::new("torch-save");
    let (from, to) = (scratch.0.join("native"), scratch.0.join("torch"));
    let place = from.clone();
    launch(2, move |world| checkpoint::save(&world, &place, &nested(&world.mesh([("dp", 2)])?)?)).unwrap();
    checkpoint::convert(&from, &to, &ConvertOptions::to(Format::Torch), &|_| {}).unwrap();
    let file = to.join("pytorch_model.bin");
    for path in [&to, &file] {
        let (saved, read) = (checkpoint::open(&from).unwrap(), checkpoint::open(path).unwrap());
        assert_eq!(read.format, Format::Torch);
        let differences = checkpoint::diff(&saved, &read, checkpoint::DiffOptions::default()).unwrap();
        assert!(differences.is_empty(), "{differences:?}");
        assert!(checkpoint::verify(path, &|_| {}).is_intact());
    }
    // Several files with an index.
    let several = scratch.0.join("several");
    let split = ConvertOptions { max_file_bytes: 1, ..ConvertOptions::to(Format::Torch) };
    assert!(checkpoint::convert(&from, &several, &split, &|_| {}).unwrap().files > 1);
    let (saved, read) = (checkpoint::open(&from).unwrap(), checkpoint::open(&several).unwrap());
    assert!(checkpoint::diff(&saved, &read, checkpoint::DiffOptions::default()).unwrap().is_empty());
    let program = "\
import sys, torch
state = torch.load(sys.argv[1], weights_only=True)
assert list(state) == ['betas', 'empty', 'layers', 'name', 'raw', 'step'], state
assert state['layers'][0]['weight'].equal(torch.arange(12.0).reshape(4, 3))
assert state['layers'][1]['weight'].equal(torch.ones(3, dtype=torch.bfloat16))
assert state['step'] == 5 and state['name'] == 'run \\u00e9' and state['raw'] == b'\\x00\\xff'
assert state['betas'] == (0.9, 0.95) and state['empty'].shape == (0, 3)
";
    run_python(program, &file);
}

/// Runs a program of PyTorch on a file, if there is a PyTorch.
fn run_python(program: &str, file: &Path) {
    let python = std::env::var("SHARDWISE_PYTHON").unwrap_or_else(|_| "python3".to_string());
    let has_torch = Command::new(&python).args(["-c", "import torch"]).output();
    if !has_torch.is_ok_and(|output| output.status.success()) {
        return println!("skipped: no PyTorch in {python}; name another Python in SHARDWISE_PYTHON");
    }
    let output = Command::new(&python).args(["-c", program]).arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_torch_save_file_loads_into_sharded_tensors_and_parts_are_not_saved_as_one() {
    let scratch = Scratch::new("torch-load");
    let path = scratch.0.join("torch");
    let place = path.clone();
    let torch = SaveOptions { format: Format::Torch, ..SaveOptions::default() };
    let one = torch.clone();
    launch(1, move |world| checkpoint::save_with(&world, &place, &nested(&world.mesh([("dp", 1)])?)?, &one)).unwrap();
    let place = path.join("pytorch_model.bin");
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let like = DTensor::zeros((4, 3), DType::F32, &mesh, [Shard(1)])?;
        let template = State::map([("layers", State::list([State::map([("weight", like)])]))]);
        let loaded = checkpoint::load(&world, &place, &template)?;
        let columns = [vec![0f32, 1.0], vec![2.0]];
        assert_eq!(loaded.tensor("layers.0.weight")?.to_local()?.to_vec2::<f32>()?[0], columns[world.rank()]);
        Ok(())
    })
    .unwrap();
    let error = same_error_on_all_ranks(2, move |world| {
        checkpoint::save_with(&world, &path, &nested(&world.mesh([("dp", 2)])?)?, &torch)
    });
    assert!(error.contains("whole tensors") && error.contains("layers.0.weight"), "{error}");
}

#[test]
fn tensors_go_to_chosen_files_with_an_index() {
    let scratch = Scratch::new("chosen-files");
    let (from, to) = (scratch.0.join("native"), scratch.0.join("hf"));
    let place = from.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let tensor = |placement| DTensor::ones((4, 4), DType::F32, &mesh, [placement]);
        checkpoint::save(&world, &place, &State::map([("rows", tensor(Shard(0))?), ("columns", tensor(Shard(1))?)]))
    })
    .unwrap();
    let file_of = std::sync::Arc::new(|key: &str| if key == "rows" { 1 } else { 4 });
    let options = ConvertOptions { file_of: Some(file_of), ..ConvertOptions::to(Format::HuggingFace) };
    checkpoint::convert(&from, &to, &options, &|_| {}).unwrap();
    let index = std::fs::read_to_string(to.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], 128);
    assert_eq!(index["weight_map"]["rows"], "model-00001-of-00002.safetensors");
    assert_eq!(index["weight_map"]["columns"], "model-00002-of-00002.safetensors");
    let (saved, read) = (checkpoint::open(&from).unwrap(), checkpoint::open(&to).unwrap());
    assert!(checkpoint::diff(&saved, &read, checkpoint::DiffOptions::default()).unwrap().is_empty());
}
