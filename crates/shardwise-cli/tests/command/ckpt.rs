//! `shardwise ckpt` on checkpoints that PyTorch, Hugging Face and this library have written.

use serde_json::Value;
use shardwise_test_suites::scratch::Scratch;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn sample(name: &str) -> PathBuf {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shardwise/tests/conformance/data/dcp");
    data.join(name).join("checkpoint")
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

#[test]
fn every_format_is_inspected_and_converted_without_a_difference() {
    let scratch = Scratch::new("formats");
    let source = sample("nested");
    let seen: Value = serde_json::from_str(&printed(&["inspect", text(&source), "--json"])).unwrap();
    assert_eq!(seen["format"], "dcp");
    assert_eq!(seen["tensors"]["model.layer.weight"]["shape"], serde_json::json!([6, 4]));
    assert_eq!(seen["values"]["pair"], serde_json::json!({ "tuple": [4, "five"] }));
    for format in ["native", "dcp"] {
        let to = scratch.0.join(format);
        printed(&["convert", text(&source), text(&to), "--to", format]);
        assert_eq!(printed(&["diff", text(&source), text(&to), "--json"]), "", "{format}");
        let found: Value = serde_json::from_str(&printed(&["verify", text(&to), "--json"])).unwrap();
        assert_eq!((&found["whole"], &found["without_checksum"]), (&Value::Bool(true), &serde_json::json!(0)));
        assert_eq!(found["values"]["step"], 1235);
    }
    // a format without values says what it leaves out
    let hf = scratch.0.join("hf");
    let said = printed(&["convert", text(&source), text(&hf), "--to", "hf", "--rename", r"model\.(.*)=$1"]);
    assert!(said.contains("13 values left out, because hugging-face stores tensors only"), "{said}");
    assert!(said.contains("config.depth") && said.contains("and 5 more (--json"), "{said}");
    assert!(said.lines().skip(1).all(|line| line.chars().count() <= 80), "{said}");
    let report = printed(&["convert", text(&source), text(&hf), "--to", "hf", "--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    let left_out = report["left_out"].as_array().unwrap();
    assert!(left_out.contains(&Value::from("step")), "{report}");
    printed(&["convert", text(&source), text(&hf), "--to", "hf", "--rename", r"model\.(.*)=$1"]);
    let seen: Value = serde_json::from_str(&printed(&["inspect", text(&hf), "--json"])).unwrap();
    assert!(seen["tensors"]["layer.weight"].is_object(), "{seen}");
    assert!(hf.join("model.safetensors").is_file());
    // one file of torch.save
    let torch = sample("torch_save").join("model.pt");
    let seen: Value = serde_json::from_str(&printed(&["inspect", text(&torch), "--json"])).unwrap();
    assert_eq!((&seen["format"], &seen["values"]["step"]), (&Value::from("torch"), &Value::from(7)));
}

#[test]
fn format_names_come_from_the_library() {
    let scratch = Scratch::new("format-names");
    let (source, to) = (sample("nested"), scratch.0.join("to"));
    let help = printed(&["convert", "--help"]);
    assert!(help.contains("hugging-face") && help.contains("(also: hf, safetensors)"), "{help}");
    for unknown in ["zarr", "gguf"] {
        let refused = ckpt(&["convert", text(&source), text(&to), "--to", unknown]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("native, dcp, hugging-face"), "{said}");
    }
    printed(&["convert", text(&source), text(&to), "--format", "hugging-face"]);
    assert!(printed(&["inspect", text(&to)]).contains("hugging-face: "));
}

#[test]
fn a_checkpoint_is_resharded_for_a_mesh_and_dry_loaded() {
    let scratch = Scratch::new("reshard");
    let (source, to) = (sample("hf_plain"), scratch.0.join("resharded"));
    printed(&[
        "reshard",
        text(&source),
        text(&to),
        "--mesh",
        "dp=2,tp=2",
        "--plan",
        "fsdp+tp",
        "--place",
        "extra.*=R,S(0)",
    ]);
    assert_eq!(printed(&["diff", text(&source), text(&to), "--json"]), "");
    let seen: Value = serde_json::from_str(&printed(&["inspect", text(&to), "--json"])).unwrap();
    let parts = |key: &str| seen["tensors"][key]["parts"].as_array().unwrap().len();
    assert_eq!((parts("lm_head.weight"), parts("extra.ids")), (4, 2));
    let lines = printed(&["dry-load", text(&to), "--mesh", "dp=4", "--json"]);
    let loads: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let read: u64 = loads.iter().map(|load| load["read_bytes"].as_u64().unwrap()).sum();
    assert_eq!((loads.len(), read), (4, seen["bytes"].as_u64().unwrap()), "every byte is read by one rank");
    let half = scratch.0.join("half");
    printed(&["convert", text(&source), text(&half), "--dtype", "bf16"]);
    let differs = ckpt(&["diff", text(&source), text(&half), "--json"]);
    assert_eq!(differs.status.code(), Some(1));
    let lines = String::from_utf8(differs.stdout).unwrap();
    assert!(lines.contains("lm_head.weight"), "{lines}");
    assert!(ckpt(&["diff", text(&source), text(&half), "--atol", "0.1"]).status.code() == Some(1), "types differ");
}

#[test]
fn convert_writes_entries_that_are_included_and_not_excluded() {
    let scratch = Scratch::new("selected");
    let (source, to) = (sample("nested"), scratch.0.join("some"));
    printed(&[
        "convert",
        text(&source),
        text(&to),
        "--include",
        r"model\..*",
        "--include",
        "step",
        "--exclude",
        ".*bias",
    ]);
    let seen: Value = serde_json::from_str(&printed(&["inspect", text(&to), "--json"])).unwrap();
    let whole: Value = serde_json::from_str(&printed(&["inspect", text(&source), "--json"])).unwrap();
    let names = |of: &Value, wanted: fn(&str) -> bool| {
        let all = of.as_object().unwrap().keys();
        all.filter(|name| wanted(name)).cloned().collect::<Vec<_>>()
    };
    let wanted = |name: &str| name == "step" || name.starts_with("model.") && !name.ends_with("bias");
    assert_eq!(names(&seen["tensors"], |_| true), names(&whole["tensors"], wanted));
    assert_eq!(names(&seen["values"], |_| true), names(&whole["values"], wanted));
    assert!(!names(&seen["tensors"], |_| true).is_empty());
    for (arguments, said) in [(["--include", "nowhere"], "include more"), (["--exclude", "("], "regular expression")] {
        let output = ckpt(&[&["convert", text(&source), text(&to)], &arguments[..]].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(said), "{arguments:?}: {error}");
    }
}

#[test]
fn damage_and_mistakes_are_reported_with_a_failing_exit_code() {
    let scratch = Scratch::new("damage");
    let good = scratch.0.join("good");
    printed(&["convert", text(&sample("hf_plain")), text(&good)]);
    let file = good.join("part-00000.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let verified = ckpt(&["verify", text(&good), "--json"]);
    assert_eq!(verified.status.code(), Some(1));
    let found: Value = serde_json::from_slice(&verified.stdout).unwrap();
    assert!(found["problems"][0].as_str().unwrap().contains("checksum"), "{found}");
    for (arguments, said) in [
        (vec!["inspect", "/nowhere"], "no such file or directory"),
        (vec!["convert", text(&good), text(&good)], "contains the source"),
        (vec!["convert", text(&good), "x", "--rename", "(=1"], "rename rule"),
        (vec!["convert", text(&good), "x", "--rename", ".*=same"], "both become"),
        (vec!["reshard", text(&good), "x", "--mesh", "dp=2", "--place", "lm_head.weight"], "PATTERN=PLACEMENTS"),
        (vec!["dry-load", text(&good), "--mesh", "dp=2", "--place", "lm_head.weight=S(5)"], "S(5)"),
    ] {
        let output = ckpt(&arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(said), "{arguments:?}: {error}");
    }
}

#[test]
fn unreadable_entries_are_listed_and_an_existing_checkpoint_is_kept_on_request() {
    let scratch = Scratch::new("unreadable");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shardwise/tests/data/dcp/odd");
    let seen = printed(&["inspect", text(&source)]);
    assert!(seen.contains("unreadable: ") && seen.contains("argparse.Namespace"), "{seen}");
    assert!(seen.contains("entries that cannot be read"), "{seen}");
    let seen: Value = serde_json::from_str(&printed(&["inspect", text(&source), "--json"])).unwrap();
    assert!(seen["unreadable"]["names"].is_string() && seen["save_id"].is_string(), "{seen}");
    let to = scratch.0.join("torch");
    // A complex tensor cannot be read; Python objects are left out without a flag.
    let flags = ["--to", "torch", "--keep-existing", "--skip-unreadable"];
    let said = printed(&[&["convert", text(&source), text(&to)], &flags[..]].concat());
    assert!(said.contains("cannot be read") && said.contains("args"), "{said}");
    assert!(to.join("pytorch_model.bin").is_file());
    let refused = ckpt(&[&["convert", text(&source), text(&to)], &flags[..]].concat());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("already"), "{said}");
}

/// Sets a bit of a ZIP header in the archive of `key`, which says that the entry is encrypted.
fn damage_archive(checkpoint: &Path, key: &str) {
    let seen: Value = serde_json::from_str(&printed(&["inspect", text(checkpoint), "--json"])).unwrap();
    let chunk = &seen["tensors"][key]["parts"][0];
    let file = checkpoint.join(chunk["file"].as_str().unwrap());
    let offset = chunk["offset"].as_u64().unwrap() as usize;
    let mut bytes = std::fs::read(&file).unwrap();
    let central = bytes[offset..].windows(4).position(|window| window == b"PK\x01\x02").unwrap() + offset;
    // Byte 8 of a central header has the flags.
    bytes[central + 8] ^= 1;
    std::fs::write(&file, bytes).unwrap();
}

#[test]
fn a_tensor_that_cannot_be_read_is_damage_and_convert_asks() {
    let scratch = Scratch::new("unreadable-tensor");
    for format in ["dcp", "torch"] {
        let (damaged, to) = (scratch.0.join(format), scratch.0.join(format!("{format}-to")));
        printed(&["convert", text(&sample("nested")), text(&damaged), "--to", format]);
        let key = "model.layer.weight";
        damage_archive(&damaged, key);
        let found = ckpt(&["verify", text(&damaged)]);
        let said = String::from_utf8_lossy(&found.stdout).into_owned();
        assert!(found.status.code() == Some(1) && said.contains("NOT intact"), "{format}: {said}");
        let refused = ckpt(&["convert", text(&damaged), text(&to)]);
        assert!(!refused.status.success() && !to.exists(), "{format}: converted without {key}");
        if format == "torch" {
            // One archive has everything: nothing is left to convert.
            continue;
        }
        assert!(said.contains(key), "{said}");
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(error.contains(key) && error.contains("--skip-unreadable"), "{error}");
        let said = printed(&["convert", text(&damaged), text(&to), "--skip-unreadable"]);
        assert!(said.contains("1 entries left out") && said.contains(key), "{said}");
        printed(&["verify", text(&to)]);
        printed(&["convert", text(&damaged), text(&to), "--exclude", r"model\.layer\.weight"]);
        let resharded = ckpt(&["reshard", text(&damaged), text(&to), "--mesh", "dp=2"]);
        assert!(!resharded.status.success(), "reshard left {key} out");
    }
}
