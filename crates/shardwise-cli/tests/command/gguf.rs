//! `shardwise ckpt` on GGUF files, and the tokenizers in them.
//!
//! `tests/data/gguf/tokenizers` of the library was written by `tests/scripts/gguf_tokenizers.py`. The tests of SmolLM2 fetch
//! it with `scripts/fetch-models`, or are skipped with a message.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use shardwise::checkpoint;
use shardwise::checkpoint::gguf::open_as_hf;
use shardwise_test_suites::public_models::public_model;
use shardwise_test_suites::scratch::Scratch;
use tokenizers::Tokenizer;

fn library_tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../shardwise/tests")
}

fn data(name: &str) -> PathBuf {
    library_tests().join("data/gguf").join(name)
}

fn ckpt(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shardwise")).arg("ckpt").args(arguments).output().unwrap()
}

/// Standard output of a command that must succeed.
fn printed(arguments: &[&str]) -> String {
    let output = ckpt(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn read_json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn tokenizers_give_the_tokens_of_the_originals() {
    let cases = read_json(&data("tokenizers/cases.json"));
    for (name, cases) in cases.as_object().unwrap() {
        let view = open_as_hf(data(&format!("tokenizers/{name}.gguf"))).unwrap();
        let tokenizer = Tokenizer::from_bytes(view.tokenizer_json.as_deref().unwrap()).unwrap();
        for case in cases.as_array().unwrap() {
            let given = case["text"].as_str().unwrap();
            let found = tokenizer.encode(given, true).unwrap();
            assert_eq!(found.get_ids(), ids(&case["ids"]), "{name}: {given:?} {:?}", found.get_tokens());
            assert_eq!(tokenizer.decode(found.get_ids(), true).unwrap(), case["decoded"], "{name}: {given:?}");
        }
    }
    let view = |name: &str| open_as_hf(data(&format!("tokenizers/{name}.gguf"))).unwrap();
    assert_eq!(view("llama_rope3").tokenizer_config["bos_token"], "<|begin_of_text|>");
    assert_eq!(view("llama_rope3").tokenizer_config["add_bos_token"], true);
    assert!(view("qwen2").tokenizer_config["chat_template"].as_str().unwrap().contains("You are a small model"));
    assert_eq!(view("llama_gqa").config["eos_token_id"], 2);
    assert_eq!(view("mistral").tokenizer_config["unk_token"], "<unk>");
}

/// Digits are split one by one, which transformers' own reader of GGUF files does not do.
#[test]
fn the_pre_tokenizer_of_the_file_counts() {
    let view = open_as_hf(data("tokenizers/llama_gqa.gguf")).unwrap();
    let tokenizer = Tokenizer::from_bytes(view.tokenizer_json.as_deref().unwrap()).unwrap();
    let found = tokenizer.encode("a   1234", false).unwrap();
    assert!(found.get_tokens().ends_with(&["1", "2", "3", "4"].map(str::to_string)), "{:?}", found.get_tokens());
}

#[test]
fn commands_show_the_types_of_blocks() {
    let path = data("blocks.gguf");
    let shown = printed(&["inspect", text(&path)]);
    assert!(shown.contains("gguf: 16 tensors") && shown.contains("Q4_K"), "{shown}");
    let line = shown.lines().find(|line| line.starts_with("Q4_1 ")).unwrap();
    assert!(line.contains("Q4_1  [2, 512]") && line.contains("640 B"), "{line}: 32 blocks of 20 bytes");
    let seen: Value = serde_json::from_str(&printed(&["inspect", text(&path), "--json"])).unwrap();
    assert_eq!((&seen["tensors"]["Q8_0"]["dtype"], &seen["tensors"]["Q8_0"]["bytes"]), (&json!("Q8_0"), &json!(1088)));
    assert_eq!(seen["values"]["general.architecture"], "llama");
    assert!(printed(&["verify", text(&path)]).contains("NOT verified: the format has no checksums"));
    assert_eq!(printed(&["diff", text(&path), text(&path), "--json"]), "");
    let plain = data("blocks_f32.gguf");
    let differences = String::from_utf8(ckpt(&["diff", text(&path), text(&plain), "--atol", "1e-5"]).stdout).unwrap();
    assert!(!differences.lines().any(|line| line.starts_with('Q')), "{differences}");
    // The lists of a vocabulary stay on one line.
    let shown = printed(&["inspect", text(&data("tokenizers/qwen2.gguf"))]);
    let tokens = shown.lines().find(|line| line.trim_start().starts_with("tokens ")).unwrap();
    assert!(tokens.ends_with("of 400 entries") && tokens.chars().count() < 300, "{tokens}");
}

#[test]
fn a_file_that_is_no_model_of_a_known_family_is_not_converted_to_hugging_face() {
    let scratch = Scratch::new("gguf-cli");
    let output = ckpt(&["convert", text(&data("blocks.gguf")), text(&scratch.0.join("hf")), "--to", "hf"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("head_count"), "{error}");
    assert!(!scratch.0.join("hf").exists());
}

/// CRC-32 of all elements as f32, tensors in the order of their names, as transformers reads the GGUF file.
const SMOLLM2_CRC: u32 = 0xdb0a_7496;

#[test]
fn smollm2_becomes_the_directory_that_transformers_loads() {
    let Some(path) = public_model("smollm2") else { return };
    let scratch = Scratch::new("smollm2");
    let directory = scratch.0.join("hf");
    let said = printed(&["convert", text(&path), text(&directory), "--to", "hf"]);
    assert!(said.starts_with("272 tensors, 538060032 bytes"), "{said}");
    let catalog = checkpoint::open(&directory).unwrap();
    let mut crc = crc32fast::Hasher::new();
    for name in catalog.tensors.keys() {
        crc.update(&catalog.read(name).unwrap());
    }
    assert_eq!(crc.finalize(), SMOLLM2_CRC);

    let cases = read_json(&data("smollm2.json"));
    let tokenizer = Tokenizer::from_file(directory.join("tokenizer.json")).unwrap();
    for case in cases["cases"].as_array().unwrap() {
        let found = tokenizer.encode(case["text"].as_str().unwrap(), true).unwrap();
        assert_eq!(found.get_ids(), ids(&case["input_ids"][0]));
        assert_eq!(tokenizer.decode(&ids(&case["greedy"]), true).unwrap(), case["greedy_text"]);
    }

    // With transformers in the Python of SHARDWISE_PYTHON, the logits too.
    let python = std::env::var("SHARDWISE_PYTHON").unwrap_or_else(|_| "python3".to_string());
    let script = library_tests().join("scripts/hf_logits.py");
    let output = Command::new(&python).arg(script).arg(&directory).arg(data("smollm2.json")).output();
    match output {
        Ok(output) if output.status.success() => println!("{}", String::from_utf8_lossy(&output.stdout).trim()),
        Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => println!("skipped: {python} does not start ({error})"),
    }
}
