//! `shardwise train --init` and `ckpt merge-lora` as a user runs them.

use serde_json::{Value, json as object};

use crate::program::{Place, json, lines, shardwise, succeeds};

/// A model directory of the test data.
fn model(name: &str) -> String {
    format!("{}/../shardwise/tests/conformance/data/models/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn fails(arguments: &[&str], parts: &[&str]) {
    let output = shardwise(arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{arguments:?}");
    assert!(parts.iter().all(|part| message.contains(part)), "{arguments:?}: {message}");
}

const SHORT: [&str; 8] = ["--length", "16", "--batch", "4", "--eval-every", "0", "--sample-tokens", "4"];

/// Trains on the built-in book and returns the summary and the losses.
fn train(place: &Place, out: &str, more: &[&str]) -> (Value, Vec<f64>) {
    let (out, log) = (place.at(out), place.at(&format!("{out}.jsonl")));
    let arguments = [&["train", "--json", "--out", &out, "--log", &log], &SHORT[..], more].concat();
    let summary = json(&succeeds(&arguments));
    let losses = lines(&log).iter().filter_map(|line| line["loss"].as_f64()).collect();
    (summary, losses)
}

/// Greedy tokens of a model.
fn tokens(model: &str) -> Value {
    let arguments = ["generate", model, "--prompt", "Once upon", "--max-tokens", "8", "--temperature", "0", "--json"];
    json(&succeeds(&arguments))["tokens"].clone()
}

fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        // Sums in f32 in another order, over a few steps.
        assert!((found - expected).abs() < 2e-3 * expected.abs().max(1.0), "{found}, expected {expected}");
    }
}

#[test]
fn adapters_are_trained_resumed_saved_and_merged() {
    let place = Place::new("lora");
    let base = model("llama_gqa");
    let start = ["--init", &base, "--lora", "rank=2,targets=q_proj+v_proj", "--lr", "0.01", "--mesh"];
    let export = place.at("exported");
    let (summary, whole) =
        train(&place, "one", &[&start[..], &["tp=1", "--steps", "6", "--export-hf", &export]].concat());
    assert!(whole[5] < whole[0], "the adapters learn: {whole:?}");
    // On three ranks, interrupted, and continued on four.
    let (_, first) = train(&place, "two", &[&start[..], &["tp=3", "--steps", "3", "--warmup", "0"]].concat());
    assert!((first[0] - whole[0]).abs() < 1e-3, "{first:?} {whole:?}");
    let (_, uninterrupted) = train(&place, "three", &[&start[..], &["tp=2", "--steps", "6", "--warmup", "0"]].concat());
    let (stopped, _) =
        train(&place, "four", &[&start[..], &["tp=2", "--steps", "6", "--warmup", "0", "--save-every", "3"]].concat());
    let third = format!("{}/checkpoints/step-00000003", stopped["model"].as_str().unwrap());
    let resume = ["--resume", &third, "--mesh", "dp=2,tp=2", "--plan", "fsdp+tp"];
    let (resumed, losses) = train(&place, "five", &resume);
    close(&losses, &uninterrupted[3..]);
    assert!(resumed["adapter"].as_str().unwrap().ends_with("five/adapter"));

    // The adapter, merged by the command, is the model that was exported.
    let (adapter, merged) = (summary["adapter"].as_str().unwrap(), place.at("merged"));
    let said = succeeds(&["ckpt", "merge-lora", &base, adapter, &merged, "--ranks", "2"]);
    assert!(said.contains("layers into"), "{said}");
    succeeds(&["ckpt", "diff", &merged, &export, "--atol", "1e-5"]);
    let of_base = tokens(&base);
    assert_eq!(tokens(&merged), tokens(&export));
    assert_eq!(tokens(summary["model"].as_str().unwrap()), tokens(&export), "the checkpoint with its adapters");
    assert_ne!(tokens(&export), of_base, "training has changed the model");
}

#[test]
fn conversations_are_trained_on_their_answers() {
    let place = Place::new("chats");
    let chats = place.at("chats.jsonl");
    let chat = |i: usize| {
        let answer = format!("{} plus one is {}.", i, i + 1);
        object!({"messages": [{"role": "user", "content": format!("Add one to {i}!")},
            {"role": "assistant", "content": answer}]})
    };
    let text: Vec<String> = (0..20).map(|i| chat(i).to_string()).collect();
    std::fs::write(&chats, text.join("\n")).unwrap();
    let base = model("qwen2");
    let more = ["--init", &base, "--data", &chats, "--length", "64", "--lr", "0.01", "--steps", "8", "--mesh", "dp=2"];
    let (summary, losses) = train(&place, "packed", &[&more[..], &["--plan", "fsdp"]].concat());
    assert!(losses[7] < losses[0], "{losses:?}");
    assert!(summary["held_out_loss"].as_f64().unwrap().is_finite());
    let (_, one_each) = train(&place, "unpacked", &[&more[..], &["--packing", "false"]].concat());
    assert!(one_each[7] < one_each[0] && one_each != losses);
    let answered =
        succeeds(&["generate", summary["model"].as_str().unwrap(), "--prompt", "Hello", "--max-tokens", "3"]);
    assert!(answered.starts_with("Hello"), "{answered}");
    // The template of the model that it began with is that of the trained one; the answer does not repeat the question.
    let chat = ["--chat", "--prompt", "Add one to 3!", "--max-tokens", "4", "--json"];
    let found = json(&succeeds(&[&["generate", summary["model"].as_str().unwrap()], &chat[..]].concat()));
    let plain = json(&succeeds(&[&["generate", summary["model"].as_str().unwrap()], &chat[1..]].concat()));
    assert!(found["prompt_tokens"].as_u64() > plain["prompt_tokens"].as_u64(), "{found} and {plain}");
}

#[test]
fn wrong_options_are_refused_before_anything_is_written() {
    let place = Place::new("wrong");
    let (base, out) = (model("llama_gqa"), place.at("out"));
    let train = |more: &[&str], parts: &[&str]| {
        fails(&[&["train", "--out", &out, "--mesh", "tp=2"], &SHORT[..], more].concat(), parts);
        assert!(!std::path::Path::new(&out).exists());
    };
    train(&["--init", &base, "--layers", "2"], &["sizes of a model together with --init"]);
    train(&["--init", "nowhere"], &["nowhere"]);
    train(&["--init", &base, "--length", "1000000"], &["1000000", "positions of the model"]);
    train(&["--lora", "rank=2"], &["--lora", "--init"]);
    train(&["--init", &base, "--lora", "size=2"], &["size=2"]);
    train(&["--init", &model("bert")], &["encoder"]);
    let chats = place.at("bad.jsonl");
    std::fs::write(&chats, "{\"text\": \"fine\"}\n{\"messages\": 3}\n").unwrap();
    train(&["--init", &base, "--data", &chats], &["bad.jsonl", "line 2"]);
    fails(&["ckpt", "merge-lora", &base, "nowhere", &out], &["nowhere", "adapter_config.json"]);
    train(&["--batch-size", "4000000000"], &["batch-size", "at most"]);
    train(&["--layers", "1000000000"], &["layers", "4096"]);
}

/// A model that somebody has stays as it is unless they say otherwise.
#[test]
fn models_are_not_overwritten() {
    let place = Place::new("kept");
    let base = place.at("base");
    std::fs::create_dir(&base).unwrap();
    for file in std::fs::read_dir(model("llama_gqa")).unwrap().map(|file| file.unwrap().path()) {
        std::fs::copy(&file, std::path::Path::new(&base).join(file.file_name().unwrap())).unwrap();
    }
    let config = std::path::Path::new(&base).join("config.json");
    let before = std::fs::read(&config).unwrap();
    let steps = ["--steps", "1", "--mesh", "tp=1"];
    let start = [&["train", "--init", &base], &SHORT[..], &steps].concat();
    fails(&[&start[..], &["--out", &base]].concat(), &["config.json", "choose another --out"]);
    fails(&[&["train", "--out", &base], &SHORT[..], &steps].concat(), &["config.json", "choose another --out"]);
    let (out, lora) = (place.at("out"), place.at("lora"));
    std::fs::remove_file(std::path::Path::new(&base).join("cases.json")).unwrap();
    fails(&[&start[..], &["--out", &out, "--export-hf", &base, "--overwrite"]].concat(), &["the model that is read"]);
    succeeds(&[&start[..], &["--out", &lora, "--lora", "rank=2"]].concat());
    let adapter = format!("{lora}/adapter");
    fails(&["ckpt", "merge-lora", &base, &adapter, &base, "--overwrite"], &["the model that is read"]);
    let merged = place.at("merged");
    succeeds(&["ckpt", "merge-lora", &base, &adapter, &merged]);
    fails(&["ckpt", "merge-lora", &base, &adapter, &merged], &["--overwrite"]);
    succeeds(&["ckpt", "merge-lora", &base, &adapter, &merged, "--overwrite"]);
    assert_eq!(std::fs::read(&config).unwrap(), before);
}
