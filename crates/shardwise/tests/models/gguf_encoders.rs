//! GGUF files of encoders, made by llama.cpp's converter: hidden states, tokens and pooling are those of the directories that they
//! were converted from, also after conversion back to a directory.
//!
//! `tests/data/gguf/encoders` was written by `tests/scripts/gguf_encoders.py`.

use std::path::{Path, PathBuf};

use serde_json::Value;
use shardwise::checkpoint::{ConvertOptions, Format, convert};
use shardwise::models::{Pooling, load_encoder, load_pooling, load_tokenizer};
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path)
}

fn encoder_file(name: &str) -> PathBuf {
    data("data/gguf/encoders").join(format!("{name}.gguf"))
}

/// What transformers computed for the directory of a model.
fn recorded(name: &str) -> Value {
    let path = data("conformance/data/models").join(name).join("cases.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn rows(ids: &Value) -> Vec<Vec<u32>> {
    serde_json::from_value(ids.clone()).unwrap()
}

/// Hidden states of tokens that are not padding are within the tolerance of the recorded ones, on these ranks.
fn compare(path: &Path, name: &'static str, ranks: usize) {
    let (path, recorded) = (path.to_path_buf(), recorded(name));
    launch(ranks, move |world| {
        let mesh = world.mesh([("tp", ranks)])?;
        let encoder = load_encoder(&path, &mesh, TensorParallel::new("tp"))?;
        let of_rows = |rows: Vec<Vec<u32>>| {
            let shape = (rows.len(), rows[0].len());
            DTensor::from_fn(shape, DType::I64, &mesh, [Replicate], |i| f64::from(rows[i[0]][i[1]]))
        };
        for case in recorded["cases"].as_array().unwrap() {
            let mask = rows(&case["attention_mask"]);
            let types = Some(&case["token_type_ids"]).filter(|types| !types.is_null());
            let types = types.map(|types| of_rows(rows(types))).transpose()?;
            let found =
                encoder.encode(&of_rows(rows(&case["input_ids"]))?, Some(&of_rows(mask.clone())?), types.as_ref())?;
            let found = found.last_hidden_state.full_tensor()?.flatten(0, 1)?.to_vec2::<f32>()?;
            let expected: Vec<f32> = serde_json::from_value(case["last_hidden_state"]["data"].clone()).unwrap();
            let real = mask.concat();
            for ((found, expected), _) in
                found.iter().zip(expected.chunks(found[0].len())).zip(real).filter(|(_, real)| *real == 1)
            {
                for (a, b) in found.iter().zip(expected) {
                    assert!((a - b).abs() <= 1e-4 + 1e-4 * b.abs(), "{name} on {ranks} ranks: {a} instead of {b}");
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn hidden_states_are_those_of_transformers() {
    for name in ["bert", "distilbert"] {
        for ranks in 1..=3 {
            compare(&encoder_file(name), name, ranks);
        }
    }
}

/// Ids of single texts with their decoding, and of pairs with their types, of a path with a tokenizer.
fn compare_tokens(path: &Path) {
    let (tokenizer, recorded) = (load_tokenizer(path).unwrap(), recorded("bert"));
    for case in recorded["text_cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), case["decoded"], "{text:?}");
    }
    let pairs = recorded["cases"].as_array().unwrap().iter().find(|case| case["id"] == "pair").unwrap();
    for (i, first) in pairs["text"].as_array().unwrap().iter().enumerate() {
        let second = pairs["text_pair"][i].as_str();
        let found = tokenizer.encode_pair(first.as_str().unwrap(), second, 64).unwrap();
        assert_eq!(found.ids, rows(&pairs["input_ids"])[i]);
        assert_eq!(found.types, rows(&pairs["token_type_ids"])[i]);
    }
}

#[test]
fn the_word_piece_tokenizer_gives_the_tokens_of_the_original() {
    compare_tokens(&encoder_file("bert"));
}

#[test]
fn a_directory_that_was_converted_computes_the_same() {
    let scratch = Scratch::new("gguf-encoder-to-hf");
    for name in ["bert", "distilbert"] {
        let directory = scratch.0.join(name);
        convert(encoder_file(name), &directory, &ConvertOptions::to(Format::HuggingFace), &|_| {}).unwrap();
        compare(&directory, name, 2);
        assert_eq!(load_pooling(&directory).unwrap(), Some(Pooling::Cls));
    }
    compare_tokens(&scratch.0.join("bert"));
}

/// The bytes of the file of an encoder with another number as the kind of its pooling.
fn with_pooling(kind: u32) -> Vec<u8> {
    let mut bytes = std::fs::read(encoder_file("bert")).unwrap();
    let key = b"bert.pooling_type";
    // After the key come the type of the value and the value, 4 bytes each.
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    assert_eq!(bytes[at..at + 4], 2u32.to_le_bytes());
    bytes[at..at + 4].copy_from_slice(&kind.to_le_bytes());
    bytes
}

#[test]
fn pooling_is_that_of_the_file() {
    let scratch = Scratch::new("gguf-pooling");
    let path = scratch.0.join("changed.gguf");
    let read = |kind: u32| {
        std::fs::write(&path, with_pooling(kind)).unwrap();
        load_pooling(&path)
    };
    assert_eq!(read(0).unwrap(), None);
    assert_eq!(read(1).unwrap(), Some(Pooling::Mean));
    assert_eq!(read(2).unwrap(), Some(Pooling::Cls));
    for (kind, name) in [(3, "3 (last token)"), (4, "4 (a classifier that ranks)"), (9, "9")] {
        let error = read(kind).unwrap_err();
        assert!(error.to_string().contains(&format!("bert.pooling_type {name}")), "{error}");
    }
}

/// Both forms of the settings of sentence-transformers.
#[test]
fn pooling_of_a_directory_is_that_of_sentence_transformers() {
    let scratch = Scratch::new("pooling-settings");
    let file = scratch.0.join("1_Pooling/config.json");
    assert_eq!(load_pooling(&scratch.0).unwrap(), None);
    std::fs::create_dir(file.parent().unwrap()).unwrap();
    let read = |text: &str| {
        std::fs::write(&file, text).unwrap();
        load_pooling(&scratch.0)
    };
    let mean =
        r#"{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": false}"#;
    assert_eq!(read(mean).unwrap(), Some(Pooling::Mean));
    assert_eq!(read(r#"{"pooling_mode_cls_token": true}"#).unwrap(), Some(Pooling::Cls));
    assert_eq!(read(r#"{"pooling_mode": "cls"}"#).unwrap(), Some(Pooling::Cls));
    assert_eq!(read("{}").unwrap(), None);
    for (text, named) in [
        (r#"{"pooling_mode_max_tokens": true}"#, "pooling_mode_max_tokens"),
        (r#"{"pooling_mode": "lasttoken"}"#, "lasttoken"),
        ("{", "1_Pooling/config.json"),
    ] {
        let error = read(text).unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
    }
}
