//! What a user does wrong is said in the user's words: short, with the cause, and without names of the source.

use std::fs;
use std::path::Path;

use crate::program::{Place, TINY, shardwise, succeeds};

/// The error of a command that must fail, with all these parts in it and none of the other texts.
fn error_of(arguments: &[&str], parts: &[&str], others: &[&str]) -> String {
    let output = shardwise(arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
    let error = message.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    assert!(parts.iter().all(|part| error.contains(part)), "{arguments:?}: {parts:?} in {message}");
    assert!(!others.iter().any(|other| message.contains(other)), "{arguments:?}: {others:?} in {message}");
    assert_eq!(error.matches("found ").count(), 1, "{arguments:?}: {error}");
    message
}

fn model(name: &str) -> String {
    format!("{}/../shardwise/tests/conformance/data/models/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A copy of a model directory, with one file changed.
fn changed_model(place: &Place, name: &str, file: &str, change: impl FnOnce(&mut serde_json::Value)) -> String {
    let to = place.at(&format!("{name}-changed"));
    let _ = fs::remove_dir_all(&to);
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(model(name)).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file()) {
        fs::copy(entry.path(), Path::new(&to).join(entry.file_name())).unwrap();
    }
    let path = Path::new(&to).join(file);
    let mut json = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(path, json.to_string()).unwrap();
    to
}

#[test]
fn a_model_that_does_not_exist_is_the_error_and_not_its_tokenizer() {
    let place = Place::new("no-model");
    let out = place.at("out");
    for more in [&[][..], &["--lora"]] {
        let train = [&["train", "--out", &out, "--init", "/no/such"], more].concat();
        error_of(&train, &["/no/such", "model directory"], &["tokenizer"]);
    }
    let text = place.file("model.txt", "no model");
    error_of(&["train", "--out", &out, "--init", &text], &["model.txt"], &["tokenizer"]);
    // advice is about the command, not about functions of the library
    error_of(&["train", "--out", &out, "--init", &model("bert")], &["an encoder", "shardwise embed"], &["models::"]);
    assert!(!Path::new(&out).exists());
}

#[test]
#[cfg(unix)]
fn a_link_that_leads_nowhere_is_called_one() {
    let place = Place::new("nowhere");
    let link = place.at("link");
    std::os::unix::fs::symlink(place.at("gone"), &link).unwrap();
    error_of(&["train", "--out", &link, "--steps", "1"], &[&link, "a link that leads nowhere"], &["os error"]);
    let text = place.file("a.txt", "no checkpoint");
    for path in [&text, &place.at("none")] {
        let message =
            error_of(&["train", "--out", &place.at("out"), "--resume", path], &["train without --resume"], &[]);
        assert_eq!(message.matches(&**path).count(), 1, "{message}");
    }
}

/// What commands write into a link is in the directory that it leads to; a link that leads nowhere stays one.
#[test]
#[cfg(unix)]
fn commands_write_through_links_and_refuse_those_that_lead_nowhere() {
    let place = Place::new("links");
    let source = format!("{}/../shardwise/tests/conformance/data/dcp/hf_plain/checkpoint", env!("CARGO_MANIFEST_DIR"));
    let (disk, link, nowhere) = (place.at("disk"), place.at("link"), place.at("nowhere"));
    std::os::unix::fs::symlink(&disk, &link).unwrap();
    std::os::unix::fs::symlink(place.at("gone"), &nowhere).unwrap();
    let out = place.at("out");
    let train = [&["train", "--out", &out, "--overwrite", "--steps", "1", "--export-hf"], &TINY[..]].concat();
    for (command, file) in [
        (vec!["ckpt", "convert", &source], "manifest.json"),
        (vec!["ckpt", "reshard", &source, "--mesh", "dp=2"], "manifest.json"),
        (train, "model.safetensors"),
    ] {
        // The target follows the source of `ckpt`, and the option of `train`.
        let into = |target: &str| {
            let at = if command[0] == "ckpt" { 3 } else { 7 };
            let (before, after) = command.split_at(at);
            shardwise(&[before, &[target], after].concat())
        };
        std::fs::create_dir(&disk).unwrap();
        // The second time it replaces what the first one wrote.
        for _ in 0..2 {
            let output = into(&link);
            assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
            assert!(Path::new(&link).is_symlink() && Path::new(&disk).join(file).is_file(), "{command:?}");
        }
        std::fs::remove_dir_all(&disk).unwrap();
        let output = into(&nowhere);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains("leads nowhere") && said.contains(&nowhere),
            "{command:?}: {said}"
        );
        assert!(Path::new(&nowhere).is_symlink() && !Path::new(&place.at("gone")).exists(), "{command:?}");
    }
}

#[test]
fn a_line_that_is_no_document_is_described_by_its_fields() {
    let place = Place::new("lines");
    let out = place.at("out");
    for (line, part) in [
        (r#"{"foo":1}"#, "an object with only `foo`"),
        ("{}", "an object without fields"),
        (r#"{"prompt":"a"}"#, "an object with only `prompt`"),
        (r#"{"text":1}"#, "expected a string"),
        ("[1]", "not a JSON object"),
        ("3", "not a JSON object"),
    ] {
        let data = place.file("data.jsonl", format!("{{\"text\": \"fine\"}}\n{line}\n"));
        let names = ["untagged", "variant", "DocumentLine", "struct"];
        error_of(&["train", "--out", &out, "--data", &data], &["line 2", part, "`messages`"], &names);
    }
    let batch = place.file("batch.jsonl", "3\n");
    error_of(&["generate", &model("llama_gqa"), "--batch", &batch], &["line 1", "an object"], &["BatchLine", "struct"]);
    let batch = place.file("sentences.jsonl", "3\n");
    error_of(&["embed", &model("bert"), &batch], &["line 1", "an object"], &["SentenceLine", "struct"]);
}

#[test]
fn a_file_that_is_no_checkpoint_is_not_called_a_damaged_archive() {
    let place = Place::new("no-checkpoint");
    let text = place.file("README.md", "# A project\n".repeat(99));
    for command in ["inspect", "verify"] {
        let output = shardwise(&["ckpt", command, &text]);
        let said = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("README.md") && said.contains("known format (native"), "{said}");
        assert!(!output.status.success() && !said.contains("zip archive"), "{said}");
    }
}

#[test]
fn a_file_of_the_index_that_is_absent_is_missing_and_not_damaged() {
    let place = Place::new("absent-shard");
    let hf = place.at("hf");
    fs::create_dir(&hf).unwrap();
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
    fs::write(format!("{hf}/model-00001-of-00003.safetensors"), file).unwrap();
    let named = |i: usize| format!("model-0000{i}-of-00003.safetensors");
    let index = serde_json::json!({ "weight_map": { "a": named(1), "b": named(2), "c": named(3) } });
    fs::write(format!("{hf}/model.safetensors.index.json"), index.to_string()).unwrap();
    let parts = [&named(2)[..], &named(3), "of 3 in the index", "download or copy"];
    error_of(&["ckpt", "inspect", &hf], &parts, &["damaged"]);
}

#[test]
fn quantized_weights_and_models_of_images_get_a_hint_that_helps() {
    let place = Place::new("hints");
    let out = place.at("out");
    let quantized = changed_model(&place, "llama_gqa", "config.json", |config| {
        config["quantization_config"] = serde_json::json!({ "quant_method": "gptq", "bits": 4 });
    });
    let parts = ["quantized with gptq", "`quantization_config`", "GGUF"];
    error_of(&["generate", &quantized, "--prompt", "a"], &parts, &["set it to null"]);
    error_of(&["plan", &quantized, "--mesh", "dp=2"], &parts, &["set it to null"]);
    for (kind, said) in [("gemma3_text", "of kind `gemma3_text`"), ("cohere2", "a text-only model")] {
        let images = changed_model(&place, "llama_gqa", "config.json", |config| {
            *config = serde_json::json!({
                "model_type": "gemma3",
                "text_config": { "model_type": kind },
                "vision_config": { "model_type": "siglip_vision_model" },
            });
        });
        error_of(&["generate", &images, "--prompt", "a"], &["\"gemma3\"", said], &["gemma2`;", "nearest"]);
        error_of(&["train", "--out", &out, "--init", &images], &["\"gemma3\"", said], &["nearest"]);
    }
}

#[test]
fn a_shape_with_a_size_missing_is_refused() {
    for shape in ["8x", "x8", "8xx64", "8,,64", "", "x", "[8x64", "(8,64,,)"] {
        error_of(&["show", shape, "S(0)", "--mesh", "dp=2"], &["write for example `8x64`"], &[]);
    }
    let shown = |shape: &str| succeeds(&["show", shape, "S(0)", "--mesh", "dp=2", "--json"]);
    for (shape, same) in [("[8, 64]", "8x64"), ("(8,)", "8"), (" 8 x 64 ", "8x64"), ("(8,64)", "8x64")] {
        assert_eq!(shown(shape), shown(same));
    }
    assert_eq!(succeeds(&["show", "()", "--json"]), succeeds(&["show", "scalar", "--json"]));
}

#[test]
fn an_operator_that_does_not_exist_gets_the_nearest_names() {
    let message = error_of(&["ops", "softmx"], &["\"softmx\"", "`softmax`", "shardwise ops"], &[]);
    assert!(message.len() < 200, "{message}");
}

#[test]
fn a_tokenizer_that_makes_its_library_panic_is_one_error() {
    let place = Place::new("panic");
    // Its template names a token that it does not list.
    let model = changed_model(&place, "llama_gqa", "tokenizer.json", |tokenizer| {
        let sequence = |id: &str| serde_json::json!({ "Sequence": { "id": id, "type_id": 0 } });
        tokenizer["post_processor"] = serde_json::json!({
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, sequence("A")],
            "pair": [sequence("A"), sequence("B")],
            "special_tokens": {},
        });
    });
    let output = shardwise(&["generate", &model, "--prompt", "a"]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.starts_with("error: invalid text: found a contradiction in the file"), "{message}");
    assert!(message.lines().count() == 1 && !message.contains("panicked"), "{message}");
}

#[test]
fn hundreds_of_entries_that_are_missing_are_counted() {
    let place = Place::new("missing");
    let out = place.at("out");
    let options =
        [&["train", "--out", &out, "--steps", "1", "--mesh", "dp=1", "--layers", "30"][..], &TINY[2..]].concat();
    succeeds(&options);
    let checkpoint = format!("{out}/checkpoints/step-00000001");
    let moved = place.at("moved");
    succeeds(&["ckpt", "convert", &checkpoint, &moved, "--rename", "model\\.blocks\\.(.*)=model.layers.$1"]);
    let message = error_of(&["train", "--out", &place.at("next"), "--resume", &moved], &["and ", " more"], &[]);
    assert!(message.len() < 2000, "{} characters: {message}", message.len());
}
