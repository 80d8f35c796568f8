//! Two public models, fetched by `scripts/fetch-models`: recorded tokens of SmolLM2 from its GGUF file, and similarities of
//! MiniLM. Skipped with a message where they cannot be fetched.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Tensor};
use serde_json::Value;
use shardwise::generate::{CachedPredictor, Generation, Sampling};
use shardwise::models::{self, LoadOptions, Pooling, load_tokenizer};
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;
use shardwise::text::{ChatOptions, Message};
use shardwise_test_suites::public_models::public_model;

fn recorded(name: &str) -> Value {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data/models").join(name).join("cases.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Generates both prompts as one batch.
fn greedy_on(
    path: PathBuf,
    ranks: usize,
    keep_quantized: bool,
    prompts: Arc<Vec<Vec<u32>>>,
) -> Vec<(Vec<u32>, String)> {
    launch(ranks, move |world| {
        let mesh = world.mesh([("tp", ranks)])?;
        let options = LoadOptions { keep_quantized, ..LoadOptions::default() };
        let (model, _) = models::load_with(&path, &mesh, TensorParallel::new("tp"), &options)?;
        let sampling = Sampling::greedy().tokens(40);
        let mut generation = Generation::new(CachedPredictor::new(&model)?, model.tokenizer()?, &prompts, sampling)?;
        let mut texts = vec![String::new(); prompts.len()];
        for token in generation.by_ref() {
            let token = token?;
            texts[token.row] += token.text();
        }
        Ok(texts.into_iter().enumerate().map(|(row, text)| (generation.tokens(row).to_vec(), text)).collect())
    })
    .unwrap()
}

#[test]
fn smollm2_gives_the_recorded_tokens_on_1_to_4_ranks() {
    let Some(path) = public_model("smollm2") else { return };
    let cases = recorded("smollm2");
    let tokenizer = load_tokenizer(&path).unwrap();
    let options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
    for case in cases["chat_cases"].as_array().unwrap() {
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        assert_eq!(tokenizer.chat_text(&messages, &options).unwrap(), case["text"].as_str().unwrap());
        assert_eq!(tokenizer.encode_chat(&messages, &options).unwrap(), ids(&case["ids"]));
    }
    let cases = cases["cases"].as_array().unwrap();
    let mut prompts = Vec::new();
    for case in cases {
        let prompt = match serde_json::from_value::<Option<Vec<Message>>>(case["messages"].clone()).unwrap() {
            Some(messages) => tokenizer.encode_chat(&messages, &options).unwrap(),
            None => tokenizer.encode_prompt(case["text"].as_str().unwrap()).unwrap(),
        };
        assert_eq!(prompt, ids(&case["input_ids"][0]));
        prompts.push(prompt);
    }
    let prompts = Arc::new(prompts);
    let dequantized = (1..=4).map(|ranks| (ranks, false));
    for (ranks, keep_quantized) in dequantized.chain((1..=3).map(|ranks| (ranks, true))) {
        let found = greedy_on(path.clone(), ranks, keep_quantized, Arc::clone(&prompts));
        for ((tokens, text), case) in found.iter().zip(cases) {
            let label = format!("{} on {ranks} rank(s), quantized in memory: {keep_quantized}", case["id"]);
            assert_eq!(*tokens, ids(&case["greedy"]), "{label}");
            assert_eq!(text, case["greedy_text"].as_str().unwrap(), "{label}");
        }
    }
}

#[test]
fn minilm_gives_the_recorded_similarities() {
    let Some(path) = public_model("minilm") else { return };
    let cases = recorded("minilm");
    let tokenizer = load_tokenizer(&path).unwrap();
    let sentences: Vec<String> = serde_json::from_value(cases["sentences"].clone()).unwrap();
    let rows: Vec<Vec<u32>> =
        sentences.iter().map(|text| tokenizer.encode_pair(text, None, 512).unwrap().ids).collect();
    // The file asks for padding to 128 tokens, which must not apply.
    assert_eq!(rows, cases["input_ids"].as_array().unwrap().iter().map(ids).collect::<Vec<_>>());
    let expected: Vec<f64> = serde_json::from_value(cases["cosine"]["data"].clone()).unwrap();
    for ranks in [1, 3] {
        let (path, rows) = (path.clone(), rows.clone());
        let found = launch(ranks, move |world| {
            let mesh = world.mesh([("tp", ranks)])?;
            let encoder = models::load_encoder(&path, &mesh, TensorParallel::new("tp"))?;
            encoder.eval();
            let length = rows.iter().map(Vec::len).max().unwrap_or(0);
            let placed = |value: &dyn Fn(&Vec<u32>, usize) -> i64| {
                let values: Vec<i64> = rows.iter().flat_map(|row| (0..length).map(move |i| value(row, i))).collect();
                DTensor::replicate(&Tensor::from_vec(values, (rows.len(), length), &Device::Cpu)?, &mesh)
            };
            let ids = placed(&|row, i| row.get(i).map_or(0, |&id| i64::from(id)))?;
            let mask = placed(&|row, i| i64::from(i < row.len()))?;
            let embedded = no_grad(|| encoder.embed(&ids, Some(&mask), None, Pooling::Mean))?.full_tensor()?;
            Ok(embedded.matmul(&embedded.t()?)?.to_vec2::<f32>()?)
        })
        .unwrap();
        for (found, expected) in found.iter().flatten().zip(&expected) {
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{found}, not {expected}, on {ranks} rank(s)");
        }
    }
}
