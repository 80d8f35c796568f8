//! Files in place of which there is a pipe, a device without an end, or gigabytes that are not there; and claims that would take a
//! plan for ever.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::program::{Place, TINY, succeeds};

/// Runs the command with a limited address space and time. Calls fail before they read or compute; the machine may be busy.
fn ended(arguments: &[&str]) -> Output {
    // 8 GB of addresses: the stacks of threads and the kernels' pools are in it, a file of 3 GB twice is not.
    let script = "ulimit -v 8000000; exec timeout 30 \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_shardwise")]).args(arguments).stdin(Stdio::null());
    let output = command.output().expect("the command starts");
    assert_ne!(output.status.code(), Some(124), "{arguments:?} does not end");
    output
}

#[test]
fn commands_refuse_what_is_no_file_or_too_large() {
    let place = Place::new("hostile-files");
    let pipe = place.at("pipe.json");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let sparse = place.at("sparse.json");
    std::fs::File::create(&sparse).unwrap().set_len(3 << 30).unwrap();
    let device = place.at("zero.json");
    std::os::unix::fs::symlink("/dev/zero", &device).unwrap();
    for file in [&pipe, &sparse, &device] {
        let out = place.at("out");
        for arguments in [
            vec!["plan", file, "--mesh", "tp=2"],
            vec!["comms", "check", "gpt", "--mesh", "dp=2", "--file", file],
            vec!["report", file],
            vec!["train", "--config", file, "--out", &out],
            vec!["train", "--data", file, "--out", &out, "--steps", "1"],
            vec!["train", "--tokenizer", file, "--out", &out, "--steps", "1"],
            vec!["ckpt", "inspect", file],
        ] {
            let output = ended(&arguments);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && output.status.code().is_some(), "{arguments:?}: {said}");
            assert!(said.starts_with("error") && said.contains(file.as_str()), "{arguments:?}: {said}");
        }
    }
}

#[test]
fn a_plan_of_two_billion_heads_ends() {
    let place = Place::new("many-heads");
    let heads: u64 = 1 << 31;
    for (key_heads, mesh) in [(heads, "tp=2"), (heads, "dp=2"), (heads, "tp=3"), (1, "tp=2"), (heads / 2, "dp=2,tp=2")]
    {
        let config = serde_json::json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": 2,
            "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-6
        });
        let file = place.file("config.json", config.to_string());
        let output = ended(&["plan", &file, "--mesh", mesh]);
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(output.status.success() || said.starts_with("error"), "{mesh}, {key_heads}: {said}");
    }
}

/// Puts what is not a file, or cannot be read, into the place of a file.
fn put(what: &str, path: &str) {
    let _ = std::fs::remove_file(path);
    match what {
        "a pipe" => assert!(Command::new("mkfifo").arg(path).status().expect("mkfifo").success()),
        "3 GB" => std::fs::File::create(path).unwrap().set_len(3 << 30).unwrap(),
        "a device" => std::os::unix::fs::symlink("/dev/zero", path).unwrap(),
        "a directory" => std::fs::create_dir(path).unwrap(),
        // Root may read files without permission; nothing is mapped at address 0.
        "unreadable" => std::os::unix::fs::symlink("/proc/self/mem", path).unwrap(),
        _ => unreachable!("{what}"),
    }
}

const HOSTILE: [&str; 5] = ["a pipe", "3 GB", "a device", "a directory", "unreadable"];

/// Copies a directory.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).unwrap()),
        }
    }
}

#[test]
fn a_resumed_run_refuses_hostile_files_in_its_directory() {
    let place = Place::new("hostile-resume");
    let out = place.at("out");
    let log = format!("{out}/log.jsonl");
    let (train, steps) = (["train", "--out", &out, "--log", &log], ["--steps", "4", "--save-every", "2"]);
    succeeds(&[&train[..], &TINY, &steps].concat());
    let kept = place.at("kept");
    copy(Path::new(&out), Path::new(&kept));
    let steps: [&str; 2] = ["checkpoints/step-00000002", "checkpoints/step-00000004"];
    let in_both = |file: &str| steps.map(|step| format!("{step}/{file}")).to_vec();
    let mut seen = 0;
    for (files, whats) in [
        (vec!["config.json".to_string()], &HOSTILE[..]),
        (vec!["losses.jsonl".to_string()], &HOSTILE),
        // A log may be a pipe that another program reads, or a device.
        (vec!["log.jsonl".to_string()], &["3 GB", "a directory", "unreadable"]),
        (in_both("manifest.json"), &HOSTILE),
        (in_both("part-00000.safetensors"), &HOSTILE),
    ] {
        for what in whats {
            std::fs::remove_dir_all(&out).unwrap();
            copy(Path::new(&kept), Path::new(&out));
            for file in &files {
                put(what, &format!("{out}/{file}"));
            }
            let output = ended(&["train", "--out", &out, "--log", &log, "--resume", "--steps", "6"]);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && output.status.code().is_some(), "{files:?}, {what}: {said}");
            let last = said.lines().rfind(|line| line.starts_with("error")).unwrap_or_default();
            let name = files[0].rsplit('/').next().unwrap();
            assert!(last.contains(name) || last.contains("checkpoint"), "{files:?}, {what}: {said}");
            seen += 1;
        }
    }
    assert_eq!(seen, 4 * HOSTILE.len() + 3);
}

#[test]
fn a_log_whose_line_has_no_end_is_an_error() {
    let place = Place::new("endless-line");
    let (out, log) = (place.at("out"), place.at("log.jsonl"));
    succeeds(&[&["train", "--out", &out, "--log", &log, "--steps", "2"], &TINY[..]].concat());
    std::fs::File::options().write(true).open(&log).unwrap().set_len(3 << 30).unwrap();
    let output = ended(&["train", "--out", &out, "--log", &log, "--resume", "--steps", "4"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(&log) && said.contains("16777216 bytes in one line"), "{said}");
}

#[test]
fn prompts_and_sentences_are_read_from_files_only() {
    let place = Place::new("hostile-lines");
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shardwise/tests/conformance/data/models");
    let (llama, bert) = (models.join("llama_gqa").display().to_string(), models.join("bert").display().to_string());
    for what in HOSTILE {
        let file = place.at("lines");
        put(what, &file);
        for arguments in [["generate", &llama, "--batch", &file].to_vec(), vec!["embed", &bert, &file]] {
            let output = ended(&arguments);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && output.status.code().is_some(), "{arguments:?}, {what}: {said}");
            assert!(said.starts_with("error") && said.contains(&file), "{arguments:?}, {what}: {said}");
        }
        if what == "a directory" {
            std::fs::remove_dir(&file).unwrap();
        }
    }
}
