//! `train --data` with files of tokens, directories and weights; `tokenize`; evaluation, early stopping, `--resume=auto`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::program::{Place, TINY, json, lines, shardwise, succeeds};
use crate::train::fails;

/// Trains, and returns the losses by step.
fn losses(place: &Place, out: &str, options: &[&str]) -> BTreeMap<u64, f64> {
    let (out, log) = (place.at(out), place.at(&format!("{out}.jsonl")));
    succeeds(&[&["train", "--json", "--out", &out, "--log", &log], options].concat());
    let all = lines(&log);
    all.iter().filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?))).collect()
}

fn words(seed: usize, count: usize) -> String {
    let words = ["tide ", "rabbit ", "queen ", "hatter\n", "cards ", "garden.\n"];
    (0..count).map(|i| words[(i * i * seed + i / 3) % words.len()]).collect()
}

#[test]
fn a_file_of_tokens_trains_as_its_text_does_and_resumes_on_another_mesh() {
    let place = Place::new("tokens");
    let text = place.file("a.txt", words(1, 3000));
    let tokens = place.at("a.bin");
    let made = json(&succeeds(&["tokenize", &text, "--out", &tokens, "--json"]));
    assert_eq!(made["tokens"].as_u64(), Some(fs::metadata(&text).unwrap().len()));
    fails(&["tokenize", &text, "--out", &tokens], &["a.bin", "which exists", "--overwrite"]);
    fails(&["tokenize", &tokens, "--out", &place.at("b.bin")], &["a.bin", "has tokens", "--data"]);
    succeeds(&["tokenize", &text, "--out", &tokens, "--overwrite"]);

    let options = [&TINY[..], &["--mesh", "dp=2", "--steps", "6", "--save-every", "3"]].concat();
    let expected = losses(&place, "text", &[&options[..], &["--data", &text]].concat());
    assert_eq!(losses(&place, "tokens", &[&options[..], &["--data", &tokens]].concat()), expected);

    // Two directories with weights, killed after step 3 and resumed on another mesh.
    for (name, seed) in [("web", 2), ("books", 5)] {
        fs::create_dir(place.at(name)).unwrap();
        for shard in 0..2 {
            let text = place.file("shard.txt", words(seed + shard, 1500));
            succeeds(&["tokenize", &text, "--out", &format!("{}/{shard}.bin", place.at(name))]);
        }
    }
    let (web, books) = (format!("{}=0.7", place.at("web")), format!("{}=0.3", place.at("books")));
    let weighted = [&options[..], &["--data", &web, "--data", &books]].concat();
    let expected = losses(&place, "whole", &weighted);
    let middle = format!("{}/checkpoints/step-00000003", place.at("whole"));
    let rest = losses(&place, "rest", &["--resume", &middle, "--mesh", "dp=1,tp=2"]);
    assert_eq!(rest.keys().copied().collect::<Vec<_>>(), [4, 5, 6]);
    for (step, loss) in rest {
        assert!((loss - expected[&step]).abs() < 2e-5 * loss, "step {step}: {loss}, not {}", expected[&step]);
    }
    // Other weights are other data.
    let other = format!("{}=0.5", place.at("books"));
    let output =
        shardwise(&["train", "--out", &place.at("other"), "--resume", &middle, "--data", &web, "--data", &other]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("starting with the first batch"));

    let wrong = |data: &[&str], parts: &[&str]| {
        let data: Vec<&str> = data.iter().flat_map(|data| ["--data", data]).collect();
        fails(&[&["train", "--out", &place.at("never")], &TINY[..], &data].concat(), parts);
    };
    wrong(&[&web, &place.at("books")], &["a weight above 0 for each source, or for none"]);
    wrong(&[&format!("{}=-1", place.at("web"))], &["a weight above 0"]);
    wrong(&[&place.at("none.bin")], &["none.bin"]);
    fs::create_dir(place.at("empty")).unwrap();
    wrong(&[&place.at("empty")], &["without data"]);
    // Tokens of another tokenizer.
    wrong(&[&place.file("gpt2.bin", [0, 1].repeat(400))], &["token 256", "tokenizer"]);
    assert!(!Path::new(&place.at("never")).join("checkpoints").exists());
}

#[test]
fn several_sets_are_evaluated_and_a_run_that_no_longer_learns_stops() {
    let place = Place::new("eval-sets");
    let (data, same) = (place.file("data.txt", words(1, 3000)), place.file("same.txt", words(1, 900)));
    let other = place.file("other.txt", "0123456789".repeat(300));
    let (out, log) = (place.at("out"), place.at("log.jsonl"));
    let options = ["--data", &data, "--eval-data", &same, "--eval-data", &other, "--mesh", "dp=2", "--steps", "8"];
    let run = [&["train", "--json", "--out", &out, "--log", &log], &TINY[..], &options].concat();
    let summary = json(&succeeds(&run));
    let sets = summary["eval_losses"].as_object().unwrap();
    assert_eq!(sets.keys().collect::<Vec<_>>(), ["other", "same"]);
    // What was never seen is worse, and the first set is the one of the curve.
    assert!(sets["other"].as_f64() > sets["same"].as_f64() && sets["same"] == summary["held_out_loss"], "{summary}");
    let logged = lines(&log);
    let evaluated: Vec<_> = logged.iter().filter(|line| line["eval_losses"]["other"].is_f64()).collect();
    assert_eq!(evaluated.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [4, 8]);

    // Without a learning rate no evaluation is better than the first one.
    let stopped = place.at("stopped");
    let options = ["--mesh", "dp=2", "--steps", "40", "--lr", "0", "--patience", "2", "--data", &data];
    let output = shardwise(&[&["train", "--json", "--out", &stopped], &TINY[..], &options].concat());
    let summary = json(&String::from_utf8(output.stdout).unwrap());
    assert_eq!((summary["steps"].as_u64(), summary["stopped"].as_bool()), (Some(12), Some(true)));
    assert!(String::from_utf8_lossy(&output.stderr).contains("the loss has not improved, stopping"));
}

#[test]
fn resume_auto_begins_or_continues() {
    let place = Place::new("auto");
    let out = place.at("out");
    let run = |steps: &str| {
        let options = ["--mesh", "dp=2", "--steps", steps, "--resume=auto"];
        let output = shardwise(&[&["train", "--json", "--out", &out], &TINY[..], &options].concat());
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{message}");
        (
            json(&String::from_utf8(output.stdout).unwrap())["steps"].as_u64().unwrap(),
            message.contains("resuming after"),
        )
    };
    assert_eq!(run("3"), (3, false));
    assert_eq!(run("5"), (5, true));
    // A damaged checkpoint is not a reason to begin again.
    for step in fs::read_dir(Path::new(&out).join("checkpoints")).unwrap() {
        fs::write(step.unwrap().path().join("manifest.json"), "{").unwrap();
    }
    fails(&["train", "--out", &out, "--resume=auto"], &["checkpoint to resume"]);
}

#[test]
fn bench_data_prints_one_json_object_per_case() {
    let text = succeeds(&["bench", "data", "--json", "--mb", "2", "--seq-len", "128", "--repeats", "1"]);
    let rows: Vec<_> = text.lines().map(json).collect();
    let cases: Vec<&str> = rows.iter().map(|row| row["case"].as_str().unwrap()).collect();
    let expected =
        ["floor: plain read", "floor: plain reads, shuffled", "in order", "shuffled", "weighted, shuffled", "tokenize"];
    assert_eq!(cases, expected);
    assert!(rows.iter().all(|row| row["gbps"].as_f64().unwrap() > 0.0 && row["tokens_per_s"].is_f64()), "{text}");
}
