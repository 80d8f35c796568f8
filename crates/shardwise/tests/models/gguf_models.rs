//! GGUF files of every family, made by llama.cpp's converter, opened as Hugging Face directories: names, shapes, elements and
//! configurations are those of the directories that they were converted from.
//!
//! `tests/data/gguf/models` was written by `tests/scripts/gguf_models.py`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_core::{Device, Tensor};
use serde_json::{Value as Json, json};
use shardwise::checkpoint::gguf::{HfView, open_as_hf};
use shardwise::checkpoint::{self, Catalog, ConvertOptions, ElementType, Format, convert};
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf/models").join(format!("{name}.gguf"))
}

fn expected() -> BTreeMap<String, Json> {
    let text = std::fs::read_to_string(model("x").with_file_name("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The elements that the script gives a tensor.
fn elements(name: &str, count: usize) -> Vec<f32> {
    let first = u64::from(crc32fast::hash(name.as_bytes()));
    (0..count as u64).map(|i| ((i * 31 + first) % 1009) as f32).map(|n| (n - 504.0) / 256.0).collect()
}

fn read(catalog: &Catalog, name: &str) -> Vec<f32> {
    let stored = catalog.tensor(name).unwrap();
    let dtype = stored.element.dtype().unwrap();
    let bytes = catalog.read(name).unwrap();
    let tensor = Tensor::from_raw_buffer(&bytes, dtype, &[stored.elem_count()], &Device::Cpu).unwrap();
    tensor.to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

#[test]
fn tensors_have_the_names_shapes_and_elements_of_hugging_face() {
    for (name, expected) in expected() {
        let view = open_as_hf(model(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_value(expected["tensors"].clone()).unwrap();
        let found: Vec<&String> = view.catalog.tensors.keys().collect();
        assert_eq!(found, shapes.keys().collect::<Vec<_>>(), "{name}");
        for (tensor, shape) in shapes {
            assert_eq!(view.catalog.tensor(&tensor).unwrap().shape, shape, "{name}: {tensor}");
            let count = shape.iter().product();
            assert_eq!(read(&view.catalog, &tensor), elements(&tensor, count), "{name}: {tensor}");
        }
        assert_eq!((view.tokenizer_json, view.tokenizer_config), (None, Json::Null), "{name} has no tokenizer");
    }
}

/// Keys that say nothing about the model, or say it in another form.
const OTHERWISE: [&str; 6] =
    ["torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "rope_scaling", "original_max_position_embeddings"];

#[test]
fn configurations_are_those_of_hugging_face() {
    for (name, expected) in expected() {
        let (view, expected) = (open_as_hf(model(&name)).unwrap(), &expected["config"]);
        let mut compared = 0;
        for (key, value) in view.config.as_object().unwrap() {
            // Null stands for the default of the family, which a GGUF file has as a number.
            let other = expected.get(key).filter(|other| !other.is_null() && !OTHERWISE.contains(&key.as_str()));
            let Some(other) = other else { continue };
            assert!(same(value, other), "{name}: {key} is {value} instead of {other}");
            compared += 1;
        }
        assert!(compared >= 10, "{name}: {}", view.config);
        // Positions are in another dialect.
        let theirs = &expected["rope_parameters"];
        let theirs = theirs.get("full_attention").unwrap_or(theirs);
        if name != "gpt2" {
            let theta = view.config.get("rope_theta").or(view.config.get("rotary_emb_base")).unwrap();
            assert!(same(theta, &theirs["rope_theta"]), "{name}: {theta} and {theirs}");
            let ours = view.config["rope_scaling"].get("rope_type").unwrap_or(&json!("default")).clone();
            assert_eq!(ours, theirs["rope_type"], "{name}");
        }
        for key in ["factor", "long_factor", "short_factor"] {
            if let Some(value) = theirs.get(key) {
                assert!(same(&view.config["rope_scaling"][key], value), "{name}: {key} {}", view.config);
            }
        }
    }
    let config = |name: &str| open_as_hf(model(name)).unwrap().config;
    assert_eq!(config("gptneox")["rotary_pct"], json!(0.5));
    assert_eq!(config("llama_bias")["tie_word_embeddings"], json!(true));
    assert_eq!(config("qwen2")["rope_scaling"]["original_max_position_embeddings"], json!(16));
    assert_eq!(config("gemma3")["rope_local_base_freq"], json!(10000.0));
}

/// Equal, with 1 and 1.0 being the same number.
fn same(a: &Json, b: &Json) -> bool {
    match (a, b) {
        (Json::Array(a), Json::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Json::Number(a), Json::Number(b)) => a.as_f64() == b.as_f64(),
        (a, b) => a == b,
    }
}

/// A column box of reordered rows, as a rank of a sharded model reads it.
#[test]
fn boxes_of_reordered_and_transposed_tensors_are_those_of_the_whole() {
    for (name, tensor) in [
        ("llama", "model.layers.0.self_attn.q_proj.weight"),
        ("llama", "model.layers.0.self_attn.k_proj.weight"),
        ("gpt2", "transformer.h.0.attn.c_attn.weight"),
        ("gptneox", "gpt_neox.layers.0.attention.query_key_value.weight"),
        ("gemma2", "model.norm.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.2.w2.weight"),
    ] {
        let catalog = open_as_hf(model(name)).unwrap().catalog;
        let stored = catalog.tensor(tensor).unwrap().clone();
        let whole = catalog.read(tensor).unwrap();
        let size = stored.element.size_in_bytes();
        let row = stored.shape.iter().skip(1).product::<usize>();
        for (first, rows, left, columns) in [(3, 7, 0, row), (0, 5, row / 3, row - row / 3), (2, 9, row - 1, 1)] {
            let (mut offsets, mut sizes) = (vec![first], vec![rows]);
            if stored.shape.len() == 2 {
                offsets.push(left);
                sizes.push(columns);
            }
            let found = catalog.read_box(tensor, &shardwise::TensorBox { offsets, sizes }).unwrap();
            let expected: Vec<u8> = (first..first + rows)
                .flat_map(|i| whole[(i * row + left) * size..(i * row + left + columns) * size].to_vec())
                .collect();
            assert_eq!(found, expected, "{name}: {tensor}");
        }
    }
}

#[test]
fn conversion_to_hugging_face_writes_a_directory() {
    let scratch = Scratch::new("gguf-to-hf");
    let directory = scratch.0.join("hf");
    let options = ConvertOptions { element: Some(ElementType::BF16), ..ConvertOptions::to(Format::HuggingFace) };
    let done = convert(model("qwen3"), &directory, &options, &|_| {}).unwrap();
    let (view, written) = (open_as_hf(model("qwen3")).unwrap(), checkpoint::open(&directory).unwrap());
    assert_eq!((done.tensors, written.format), (view.catalog.tensors.len(), Format::HuggingFace));
    assert!(done.left_out.is_empty(), "what a directory cannot hold as values, it has in its files");
    for (name, stored) in &written.tensors {
        assert_eq!(stored.element, ElementType::BF16);
        // Multiples of 1/256 below 2 have 9 bits, one more than bf16.
        for (a, b) in read(&written, name).iter().zip(read(&view.catalog, name)) {
            assert!((a - b).abs() <= b.abs() / 256.0, "{name}: {a} and {b}");
        }
    }
    let config: Json = serde_json::from_str(&std::fs::read_to_string(directory.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["torch_dtype"], "bfloat16");
    assert_eq!(config["num_key_value_heads"], 2);
    assert!(HfView::of(written).unwrap_err().to_string().contains("hugging-face"));
}

/// A model's file with one thing changed that cannot be honoured is refused by name.
#[test]
fn what_is_not_known_is_refused_by_name() {
    let scratch = Scratch::new("gguf-unknown");
    let changed = |name: &str, from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let mut bytes = std::fs::read(model(name)).unwrap();
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect(from);
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        let path = scratch.0.join("changed.gguf");
        std::fs::write(&path, bytes).unwrap();
        open_as_hf(path).map(|_| ()).expect_err(to).to_string()
    };
    for (name, from, to, needed) in [
        ("llama", "blk.0.attn_q.weight", "blk.0.attn_X.weight", "tensor \"blk.0.attn_X.weight\""),
        ("llama", "llama.rope.freq_base", "llama.rope.freq_bosh", "llama.rope.freq_bosh"),
        ("qwen2", "qwen2.rope.scaling.type", "qwen2.rope.scaling.tipo", "yarn"),
        ("phi3", "token_embd.weight", "token_embD.weight", "no tensor \"token_embd.weight\""),
        ("gpt2", "gpt2.block_count", "gpt2.block_counz", "none as gpt2.block_count"),
    ] {
        let error = changed(name, from, to);
        assert!(error.contains(needed) || error.contains("tipo"), "{error} lacks {needed}");
    }
    // The architecture is a string of its own.
    let bytes = std::fs::read(model("llama")).unwrap();
    let at = bytes.windows(9).position(|w| w == b"\x05\0\0\0\0\0\0\0l").unwrap();
    let mut other = bytes;
    other[at + 8..at + 13].copy_from_slice(b"lamma");
    std::fs::write(scratch.0.join("other.gguf"), other).unwrap();
    let error = open_as_hf(scratch.0.join("other.gguf")).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("architecture \"lamma\""), "{error}");
    assert!(matches!(error.kind(), Some(ErrorKind::UnknownName { name }) if name == "lamma"));
}

/// Fewer bytes than the file has, seen as a model: never a panic or a large allocation.
#[test]
fn damaged_metadata_is_only_ever_an_error() {
    let scratch = Scratch::new("gguf-damaged");
    let path = scratch.0.join("damaged.gguf");
    for name in ["llama_rope3", "qwen2moe", "gemma3", "phi3_long", "gptneox"] {
        let bytes = std::fs::read(model(name)).unwrap();
        let header = 2500.min(bytes.len());
        for at in (24..header).step_by(11) {
            for value in [0u8, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] = value;
                std::fs::write(&path, &damaged).unwrap();
                if let Ok(view) = open_as_hf(&path) {
                    view.catalog.tensors.keys().for_each(|key| drop(view.catalog.read(key)));
                }
            }
        }
    }
}
