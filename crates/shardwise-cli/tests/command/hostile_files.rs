//! Files in place of which there is a pipe, a device without an end, or gigabytes that are not there; and claims that would take a
//! plan for ever.

use std::process::{Command, Output, Stdio};

use crate::program::Place;

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
