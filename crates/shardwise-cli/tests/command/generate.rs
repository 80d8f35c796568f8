//! `shardwise generate` and `shardwise embed` with model directories, as a user runs them.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::program::{Place, json, shardwise, succeeds};
use shardwise_test_suites::public_models::public_model;

/// A model directory of the test data.
fn model(name: &str) -> String {
    format!("{}/../shardwise/tests/conformance/data/models/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn recorded(name: &str) -> Value {
    json(&std::fs::read_to_string(format!("{}/cases.json", model(name))).unwrap())
}

/// The objects that a command prints.
fn objects(arguments: &[&str]) -> Vec<Value> {
    succeeds(arguments).lines().map(json).collect()
}

/// Runs the command with text on standard input.
fn with_input(arguments: &[&str], input: &str) -> String {
    let mut child = Command::new(env!("CARGO_BIN_EXE_shardwise"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn greedy_tokens_are_the_recorded_ones_on_every_mesh() {
    for (name, meshes) in [("llama_gqa", &["tp=1", "tp=3", "dp=2,tp=2"][..]), ("gpt2", &["tp=2"])] {
        let cases = recorded(name);
        let case = &cases["cases"][0];
        let prompt = case["text"].as_str().unwrap();
        for mesh in meshes {
            let arguments = ["generate", &model(name), "--prompt", prompt, "--max-tokens", "24", "--mesh", mesh];
            let found = json(&succeeds(&[&arguments[..], &["--json"]].concat()));
            assert_eq!(found["tokens"], case["greedy"][0], "{name} on {mesh}");
            assert_eq!((&found["prompt"], &found["stop"]), (&case["text"], &Value::from("length")));
            assert_eq!(found["prompt_tokens"].as_u64(), Some(case["input_ids"][0].as_array().unwrap().len() as u64));
            let ranks: usize =
                mesh.split(',').map(|axis| axis.split('=').next_back().unwrap().parse::<usize>().unwrap()).product();
            let peaks: Vec<u64> = serde_json::from_value(found["peak_memory_bytes"].clone()).unwrap();
            assert!(peaks.len() == ranks && peaks.iter().all(|&peak| peak > 10_000), "{peaks:?}");
            assert!(
                found["tokens_per_s"].as_f64().unwrap() > 0.0
                    && found["time_to_first_token_ms"].as_f64().unwrap() > 0.0
            );
            // The streamed text is the same, with the prompt in front.
            let text = succeeds(&arguments);
            assert_eq!(text, format!("{prompt}{}\n", found["text"].as_str().unwrap()), "{name} on {mesh}");
        }
    }
}

#[test]
fn prompts_of_a_file_give_what_they_give_alone() {
    let place = Place::new("prompts");
    let texts = ["The number of heads is nine.", "hello", "two words and more of them"];
    let file = place.file("prompts.txt", texts.join("\n") + "\n\n");
    let directory = model("llama_gqa");
    let options = ["--max-tokens", "10", "--temperature", "0.9", "--top-k", "30", "--seed", "3", "--json"];
    let rows = objects(&[&["generate", &directory, "--batch", &file, "--mesh", "dp=2"], &options[..]].concat());
    assert_eq!(rows.len(), 3);
    for (row, text) in rows.iter().zip(texts) {
        let alone = objects(&[&["generate", &directory, "--prompt", text], &options[..]].concat());
        assert_eq!((&row["tokens"], &row["text"]), (&alone[0]["tokens"], &alone[0]["text"]), "{text}");
    }
    let halves = objects(&[&["generate", &directory, "--batch", &file, "--batch-size", "2"], &options[..]].concat());
    let tokens = |rows: &[Value]| rows.iter().map(|row| row["tokens"].clone()).collect::<Vec<_>>();
    assert_eq!(tokens(&halves), tokens(&rows));
    assert_eq!((&halves[0]["rows"], &halves[2]["rows"]), (&Value::from(2), &Value::from(1)));
    // conversations and texts in one file, and a text on standard input
    let file = place.file(
        "mixed.jsonl",
        "{\"prompt\": \"hello\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"What is a mesh?\"}]}\n",
    );
    let greedy = ["--max-tokens", "10", "--json"];
    let rows = objects(&[&["generate", &directory, "--batch", &file], &greedy[..]].concat());
    let chat = objects(&[&["generate", &directory, "--chat", "--prompt", "What is a mesh?"], &greedy[..]].concat());
    assert_eq!((&rows[1]["tokens"], &rows[1]["prompt"]), (&chat[0]["tokens"], &chat[0]["prompt"]));
    let piped = with_input(&[&["generate", &directory, "--prompt", "-"], &greedy[..]].concat(), "hello\n");
    assert_eq!(json(&piped)["tokens"], rows[0]["tokens"]);
    // text of several prompts, with an empty line between them
    let text = succeeds(&["generate", &directory, "--batch", &place.file("two.txt", "hello\nx"), "--max-tokens", "3"]);
    assert!(text.starts_with("hello") && text.contains("\n\nx"), "{text:?}");
}

#[test]
fn a_conversation_goes_on_line_by_line() {
    let directory = model("llama_gqa");
    let arguments =
        ["generate", &directory, "--chat", "--system", "Be brief.", "--max-tokens", "6", "--mesh", "tp=2", "--json"];
    let turns: Vec<Value> = with_input(&arguments, "How many heads?\n\nAnd key heads?\n").lines().map(json).collect();
    assert_eq!(turns.len(), 2);
    assert_eq!(turns[0]["prompt_tokens"], turns[0]["computed_tokens"]);
    let number = |turn: &Value, name: &str| turn[name].as_u64().unwrap();
    assert!(number(&turns[1], "prompt_tokens") > number(&turns[0], "prompt_tokens") + 6);
    let spoken = with_input(&arguments[..9], "How many heads?\nAnd key heads?\n");
    let texts = turns.iter().map(|turn| format!("{}\n", turn["text"].as_str().unwrap())).collect::<String>();
    assert_eq!(spoken, texts);
}

#[test]
fn a_dry_run_prints_what_each_rank_would_hold() {
    let rows = objects(&["generate", &model("llama_gqa"), "--mesh", "tp=3", "--dry", "--json"]);
    assert_eq!(rows.len(), 3);
    let read: u64 = rows.iter().map(|row| row["read_bytes"].as_u64().unwrap()).sum();
    let file = std::fs::metadata(model("llama_gqa") + "/model.safetensors").unwrap().len();
    // Norms are read by every rank.
    assert!(read > file - 10_000 && read < file + 10_000, "{read} of {file}");
    assert!(succeeds(&["generate", &model("llama_gqa"), "--dry"]).starts_with(" rank"));
    assert_eq!(objects(&["embed", &model("bert"), "--dry", "--mesh", "tp=2", "--json"]).len(), 2);
}

#[test]
fn embeddings_are_the_recorded_ones() {
    let place = Place::new("embed");
    let cases = recorded("bert");
    // The case without second texts.
    let case = cases["cases"].as_array().unwrap().iter().find(|case| case["text_pair"].is_null()).unwrap();
    let texts: Vec<String> = serde_json::from_value(case["text"].clone()).unwrap();
    let (width, data) = (case["embedding"]["shape"][1].as_u64().unwrap() as usize, &case["embedding"]["data"]);
    let expected: Vec<f64> = serde_json::from_value(data.clone()).unwrap();
    let file = place.file("sentences.txt", texts.join("\n"));
    let close =
        |found: &[f64]| found.len() == expected.len() && found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4);
    for mesh in ["dp=1", "tp=2", "dp=2,tp=2"] {
        let rows = objects(&["embed", &model("bert"), &file, "--normalize", "--mesh", mesh, "--batch-size", "3"]);
        let found: Vec<f64> =
            rows.iter().flat_map(|row| serde_json::from_value::<Vec<f64>>(row["embedding"].clone()).unwrap()).collect();
        assert!(close(&found), "{mesh}");
        assert!(rows.iter().zip(&texts).all(|(row, text)| row["text"] == **text));
    }
    let out = place.at("vectors.npy");
    let said = succeeds(&["embed", &model("bert"), &file, "--normalize", "--format", "npy", "--out", &out]);
    assert_eq!(said, "");
    let bytes = std::fs::read(&out).unwrap();
    let (header, elements) = bytes.split_at(bytes.len() - expected.len() * 4);
    let shape = format!("'shape': ({}, {width})", texts.len());
    assert!(header.starts_with(b"\x93NUMPY") && String::from_utf8_lossy(header).contains(&shape));
    let found: Vec<f64> = elements.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect();
    assert!(close(&found));
    // Without --normalize the lengths differ from 1; the first token gives another vector.
    let plain = objects(&["embed", &model("bert"), &file])[0]["embedding"].clone();
    let first = objects(&["embed", &model("bert"), &file, "--pooling", "cls"])[0]["embedding"].clone();
    let length = |row: &Value| row.as_array().unwrap().iter().map(|x| x.as_f64().unwrap().powi(2)).sum::<f64>().sqrt();
    assert!((length(&plain) - 1.0).abs() > 0.01 && plain != first);
}

/// Options that narrow sampling sample, although the model is decoded greedily by default.
#[test]
fn narrowing_options_sample() {
    let tokens = |seed: &str, more: &[&str]| {
        let arguments =
            ["generate", &model("llama_gqa"), "--prompt", "a b", "--max-tokens", "12", "--json", "--seed", seed];
        json(&succeeds(&[&arguments[..], more].concat()))["tokens"].clone()
    };
    assert_eq!(tokens("1", &[]), tokens("2", &[]));
    for more in [&["--top-k", "20"], &["--top-p", "0.99"], &["--min-p", "0.001"]] {
        assert_ne!(tokens("1", more), tokens("2", more), "{more:?}");
    }
    let greedy = tokens("1", &[]);
    assert_eq!(tokens("1", &["--top-k", "20", "--temperature", "0"]), greedy);
}

/// Row i of the result is line i of the file, empty lines included.
#[test]
fn every_line_has_an_embedding() {
    let place = Place::new("lines");
    let file = place.file("lines.txt", "first\n\nthird\n");
    let rows = objects(&["embed", &model("bert"), &file]);
    assert_eq!(rows.iter().map(|row| row["text"].as_str().unwrap()).collect::<Vec<_>>(), ["first", "", "third"]);
}

#[test]
fn bad_inputs_are_reported_once_and_clearly() {
    let place = Place::new("bad-prompts");
    let (llama, gpt2, bert) = (model("llama_gqa"), model("gpt2"), model("bert"));
    let long = "word ".repeat(600);
    let (empty, wrong) =
        (place.file("empty.txt", "\n \n"), place.file("wrong.jsonl", "{\"prompt\": \"a\"}\n{\"x\": 1}\n"));
    let broken = place.at("broken");
    std::fs::create_dir_all(&broken).unwrap();
    std::fs::write(format!("{broken}/config.json"), std::fs::read(format!("{llama}/config.json")).unwrap()).unwrap();
    std::fs::write(format!("{broken}/tokenizer.json"), "{").unwrap();
    for (arguments, parts) in [
        (&["generate", &llama][..], &["invalid prompt", "--prompt", "--batch", "--chat"][..]),
        (&["generate", &llama, "--prompt", ""], &["invalid prompt", "no tokens"]),
        (&["generate", "no/such/model", "--prompt", "a"], &["invalid model", "no/such/model"]),
        (&["generate", &llama, "--prompt", &long], &["invalid prompt", "at most 256", "shorten"]),
        (&["generate", &llama, "--batch", &empty], &["invalid batch", "empty.txt", "no prompts"]),
        (&["generate", &llama, "--batch", &wrong], &["invalid batch", "line 2"]),
        (&["generate", &llama, "--batch", "no.txt"], &["invalid file", "no.txt"]),
        (&["generate", &bert, "--prompt", "a"], &["invalid model", "encoder", "shardwise embed"]),
        (&["generate", &gpt2, "--chat"], &["invalid conversation", "chat template"]),
        (&["generate", &llama, "--prompt", "a", "--top-p", "3"], &["invalid top-p"]),
        (&["generate", &llama, "--prompt", "a", "--mesh", "xp=2"], &["invalid mesh", "xp"]),
        (&["generate", &broken, "--prompt", "a"], &["invalid tokenizer"]),
        (&["embed", &llama, &empty], &["invalid model", "shardwise generate"]),
        (&["embed", &bert, &empty], &["invalid sentences", "no sentences"]),
    ] {
        let output = shardwise(arguments);
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}: {message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{arguments:?}: {message}");
        assert_eq!((message.matches("error: ").count(), message.lines().count()), (1, 1), "{message}");
    }
}

#[test]
fn quantized_weights_stay_so_on_request() {
    let refused = shardwise(&["generate", &model("llama_gqa"), "--quantized", "--prompt", "x"]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && error.contains("without quantized weights"), "{error}");

    let Some(path) = public_model("smollm2") else { return };
    let (path, cases) = (path.to_str().unwrap(), recorded("smollm2"));
    let case = cases["cases"].as_array().unwrap().iter().find(|case| case["messages"].is_null()).unwrap();
    let arguments = ["generate", path, "--prompt", case["text"].as_str().unwrap(), "--max-tokens", "12"];
    let found = json(&succeeds(&[&arguments[..], &["--quantized", "--mesh", "tp=2", "--json"]].concat()));
    assert_eq!(found["tokens"].as_array().unwrap()[..], case["greedy"].as_array().unwrap()[..12]);
    assert_eq!(found["quantized"], true);
    let said = |extra: &[&str]| {
        let output = shardwise(&[&arguments[..], extra].concat());
        String::from_utf8(output.stderr).unwrap()
    };
    let (kept, expanded) = (said(&["--quantized"]), said(&[]));
    assert!(kept.contains("211 of 272 weights stay quantized"), "{kept}");
    assert!(expanded.contains("dequantized to f32"), "{expanded}");
    // 98 MB in the file, 538 MB as f32.
    let held = |extra: &[&str]| -> u64 {
        let rows = objects(&[&["generate", path, "--dry", "--json", "--mesh", "tp=3"], extra].concat());
        rows.iter().map(|row| row["tensor_bytes"].as_u64().unwrap()).sum()
    };
    assert!(held(&[]) > 538_000_000 && held(&["--quantized"]) < 100_000_000);
}
