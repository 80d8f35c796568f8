//! `shardwise train`, `shardwise generate` and `shardwise bench train` as a user runs them.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::program::{Place, TINY, json, lines, shardwise, succeeds};

/// Runs a command that must fail, with all these parts in what it says.
pub(crate) fn fails(arguments: &[&str], parts: &[&str]) {
    let output = shardwise(arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{arguments:?}");
    assert!(parts.iter().all(|part| message.contains(part)), "{arguments:?}: {message}");
}

/// Trains in the place, from the beginning.
fn train(place: &Place, more: &[&str]) -> Value {
    let out = place.at("out");
    json(&succeeds(&[&["train", "--json", "--overwrite", "--out", &out], &TINY[..], more].concat()))
}

#[test]
fn training_learns_and_leaves_a_model_a_curve_and_a_log() {
    let place = Place::new("learns");
    let log = place.at("steps.jsonl");
    let more =
        ["--steps", "120", "--mesh", "dp=2,tp=2", "--plan", "fsdp+tp", "--log", &log, "--report", "--lr", "0.02"];
    let more = [&more[..], &["--d-model", "32", "--batch-size", "16"]].concat();
    let summary = train(&place, &more);
    let number = |name: &str| summary[name].as_f64().unwrap();
    assert_eq!((summary["steps"].as_u64(), summary["stopped"].as_bool()), (Some(120), Some(false)));
    assert!(number("held_out_loss") < number("unigram_entropy"), "{summary}");
    assert!(number("tokens_per_s") > 0.0 && (0.0..1.0).contains(&number("communication")), "{summary}");
    let gathers = |row: &Value| row["collective"] == "all_gather" && row["calls"].as_u64().unwrap() > 1;
    assert!(summary["report"].as_array().unwrap().iter().any(gathers), "{summary}");
    let steps = lines(&log);
    let (trained, tested): (Vec<&Value>, Vec<&Value>) = steps.iter().partition(|line| line["loss"].is_f64());
    assert_eq!((trained.len(), tested.len()), (120, 30));
    assert!(trained.iter().all(|line| line["grad_norm"].is_f64() && line["lr"].as_f64().unwrap() > 0.0));
    assert_eq!(tested[29]["held_out_loss"], summary["held_out_loss"]);
    let curve = std::fs::read_to_string(summary["curve"].as_str().unwrap()).unwrap();
    assert!(curve.starts_with("<svg") && curve.contains("polyline"));

    let out = summary["model"].as_str().unwrap();
    let written = |more: &[&str]| {
        json(&succeeds(&[&["generate", out, "--prompt", "Alice", "--max-tokens", "24", "--json"], more].concat()))
    };
    let text = written(&[])["text"].as_str().unwrap().to_string();
    assert!(!text.is_empty() && written(&[])["text"] == *text, "{text}");
    assert_ne!(written(&["--seed", "1"])["text"], *text);
    // greedy decoding continues the prompt
    let beginning = succeeds(&["generate", out, "--prompt", "A", "--max-tokens", "4", "--temperature", "0"]);
    assert!(beginning.starts_with('A') && beginning.len() > 4, "{beginning}");
}

/// The losses of all steps.
fn losses(place: &Place, more: &[&str]) -> Vec<f64> {
    let log = place.at("steps.jsonl");
    train(place, &[&["--log", &log, "--steps", "5"], more].concat());
    lines(&log).iter().filter_map(|line| line["loss"].as_f64()).collect()
}

#[test]
fn a_seed_gives_the_same_losses_on_every_mesh_with_every_plan() {
    let place = Place::new("meshes");
    for model in [&["--dropout", "0.2", "--accumulate", "2"][..], &["--model", "llama", "--kv-heads", "2"]] {
        let expected = losses(&place, &[model, &["--mesh", "dp=1"]].concat());
        assert_eq!(expected.len(), 5);
        for way in [
            &["--mesh", "dp=2", "--plan", "ddp"][..],
            &["--mesh", "dp=3", "--plan", "fsdp"],
            &["--mesh", "tp=2", "--plan", "tp", "--sequence-parallel"],
            &["--mesh", "dp=2,tp=2", "--plan", "auto"],
        ] {
            let found = losses(&place, &[model, way].concat());
            let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-5 * b;
            assert!(found.len() == 5 && found.iter().zip(&expected).all(close), "{way:?}: {found:?}, not {expected:?}");
        }
        let other = losses(&place, &[model, &["--mesh", "dp=1", "--seed", "1"]].concat());
        assert_ne!(other, expected);
    }
}

#[test]
fn the_command_line_overrides_the_config_file() {
    let place = Place::new("file");
    let config = place.file(
        "job.toml",
        "model = \"llama\"\nsteps = 2\nmesh = \"dp=2\"\nplan = \"fsdp\"\ndtype = \"bf16\"\ntied-head = true\n",
    );
    let summary = train(&place, &["--config", &config, "--steps", "3"]);
    assert_eq!(summary["steps"], 3);
    let saved =
        json(&std::fs::read_to_string(Path::new(summary["model"].as_str().unwrap()).join("config.json")).unwrap());
    assert_eq!((&saved["model"], &saved["tied_head"]), (&"llama".into(), &true.into()));
    assert_eq!((&saved["tokenizer"], &saved["vocab_size"]), (&"bytes".into(), &256.into()));
    let wrong = place.file("wrong.toml", "stepps = 2\n");
    fails(&["train", "--config", &wrong], &["stepps", "wrong.toml"]);
    fails(&["train", "--config", &place.at("none.toml")], &["none.toml", "TOML"]);
}

#[test]
fn a_text_file_with_a_tokenizer_is_learned() {
    let place = Place::new("tokens");
    let text = place.file("text.txt", "one two three zwölf ".repeat(90));
    let words = ["one ", "two ", "three ", "zwölf "];
    let vocabulary: Vec<String> = words.iter().enumerate().map(|(i, word)| format!("\"{word}\": {i}")).collect();
    // a word is a token, with the space after it
    let tokenizer = format!(
        r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {{"type": "Split", "pattern": {{"String": " "}}, "behavior": "MergedWithPrevious", "invert": false}},
        "post_processor": null, "decoder": {{"type": "Fuse"}},
        "model": {{"type": "WordLevel", "vocab": {{{}}}, "unk_token": "one "}}}}"#,
        vocabulary.join(", ")
    );
    let tokenizer = place.file("tokenizer.json", tokenizer);
    let more = ["--data", &text, "--tokenizer", &tokenizer, "--steps", "60", "--mesh", "dp=2", "--lr", "0.02"];
    let summary = train(&place, &more);
    assert!(
        summary["held_out_loss"].as_f64().unwrap() < 0.5 * summary["unigram_entropy"].as_f64().unwrap(),
        "{summary}"
    );
    let out = summary["model"].as_str().unwrap();
    let text = succeeds(&["generate", out, "--prompt", "one two ", "--max-tokens", "4", "--temperature", "0"]);
    assert_eq!(text.trim_end(), "one two three zwölf one two");
}

#[test]
fn mistakes_are_explained_before_anything_runs() {
    let place = Place::new("mistakes");
    let out = place.at("out");
    let train = |more: &[&str], parts: &[&str]| fails(&[&["train", "--out", &out], more].concat(), parts);
    train(&["--data", "no/such/file"], &["no/such/file", "--data"]);
    train(&["--data", &place.file("bytes", [0xff, 0xfe, 0x00])], &["UTF-8"]);
    train(&["--data", &place.file("short", "too short")], &["longer text"]);
    train(&["--tokenizer", &place.file("no.json", "{}")], &["no.json", "tokenizer.json"]);
    train(&["--mesh", "dp=two"], &["dp=two"]);
    train(&["--mesh", "pp=2"], &["axis `pp`"]);
    train(&["--mesh", "dp=100000"], &["100000 ranks"]);
    train(&["--mesh", "dp=2,tp=2", "--plan", "ddp"], &["idle"]);
    train(&["--mesh", "dp=4", "--batch-size", "3"], &["3 sequence(s) for 4 ranks"]);
    train(&["--heads", "5"], &["5 query heads"]);
    train(&["--steps", "0"], &["steps"]);
    train(&["--lr=-1"], &["lr"]);
    train(&["--plan", "pipeline"], &["pipeline", "fsdp+tp"]);
    train(&["--optimizer", "sofia"], &["sofia", "adamw", "muon"]);
    train(&["--config", &place.file("sofia.toml", "optimizer = 'sofia'")], &["sofia", "adamw", "muon"]);
    train(&["--log", &place.at("no/such/log")], &["log"]);
    fails(&["train", "--out", &place.file("taken", ""), "--steps", "1"], &["output directory"]);
    fails(&["generate", &place.at("nothing")], &["no such file", "shardwise train"]);
    fails(&["generate", "--temperature=-1"], &["temperature"]);
    let help = succeeds(&["train", "--help"]);
    assert!(help.contains("Examples:") && help.contains("--sequence-parallel") && help.contains("--resume"), "{help}");
}

/// As one of some processes that a launcher says it has started.
#[cfg(not(feature = "mpi"))]
fn started(rank: &str, size: &str, arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    command.args(arguments).env("PMI_RANK", rank).env("PMI_SIZE", size).output().unwrap()
}

#[cfg(not(feature = "mpi"))]
#[test]
fn one_of_several_processes_without_mpi_does_not_train_as_if_it_were_alone() {
    let place = Place::new("without");
    let out = place.at("out");
    let train = [&["train", "--out", &out, "--steps", "2"], &TINY[..]].concat();
    let refused = ["0", "1"].map(|rank| started(rank, "4", &train));
    assert!(refused.iter().all(|output| !output.status.success()), "{refused:?}");
    let [message, other] = refused.map(|output| String::from_utf8(output.stderr).unwrap());
    assert!(message.contains("one of 4") && message.contains("build it with the feature `mpi`"), "{message}");
    assert!(message.starts_with("error: ") && other.is_empty(), "{other}");
    assert!(!Path::new(&out).exists());
    // commands of one rank run on the first process, and a job of one process needs no MPI
    assert!(!started("0", "4", &["ops", "--json"]).stdout.is_empty());
    assert!(started("1", "4", &["ops", "--json"]).stdout.is_empty());
    let alone = started("0", "1", &train);
    assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
}

#[cfg(unix)]
#[test]
fn ctrl_c_and_sigterm_stop_after_the_step_and_save_a_checkpoint() {
    stops_after_the_step("-INT");
    stops_after_the_step("-TERM");
}

#[cfg(unix)]
fn stops_after_the_step(signal: &str) {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    let place = Place::new(&format!("interrupt{signal}"));
    let out = place.at("out");
    let endless = ["--steps", "1000000", "--mesh", "dp=2", "--eval-every", "1"];
    let mut child = Command::new(env!("CARGO_BIN_EXE_shardwise"))
        .args([&["train", "--json", "--out", &out], &TINY[..TINY.len() - 2], &endless].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It prints a line after the first step.
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines();
    let first = said.by_ref().map(|line| line.unwrap()).find(|line| line.contains("step 1:"));
    assert!(first.is_some());
    let interrupted = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    said.for_each(drop);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let summary = json(&String::from_utf8(output.stdout).unwrap());
    let steps = summary["steps"].as_u64().unwrap();
    assert!(summary["stopped"] == true && (1..1_000_000).contains(&steps), "{summary}");
    assert!(!succeeds(&["generate", &out, "--max-tokens", "3"]).is_empty());
    // the checkpoint resumes
    let more = (steps + 3).to_string();
    let resumed =
        json(&succeeds(&["train", "--json", "--resume", "--out", &out, "--steps", &more, "--eval-every", "0"]));
    assert_eq!((&resumed["steps"], &resumed["stopped"]), (&(steps + 3).into(), &false.into()));
}

#[test]
fn bench_train_gets_the_same_losses_in_every_mode() {
    let text = succeeds(&["bench", "train", "--steps", "1", "--json"]);
    let rows: Vec<Value> = text.lines().map(json).collect();
    let modes: Vec<(&str, u64)> =
        rows.iter().map(|row| (row["mode"].as_str().unwrap(), row["world"].as_u64().unwrap())).collect();
    assert_eq!(modes, [("single", 1), ("ddp", 2), ("tp", 2), ("fsdp", 2)]);
    let loss = |row: &Value| row["loss"].as_f64().unwrap();
    for row in &rows {
        let (best, median) = (row["best_ms"].as_f64().unwrap(), row["median_ms"].as_f64().unwrap());
        assert!(0.0 < best && best <= median && row["tokens_per_s"].as_f64().unwrap() > 0.0, "{row}");
        assert!((loss(row) - loss(&rows[0])).abs() < 1e-4, "{text}");
    }
}
