//! Resuming from checkpoints, keeping the latest ones, and exports.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

use crate::program::{Place, TINY, json, lines, shardwise, succeeds};
use crate::train::fails;

/// Trains with an output directory and a log of the same name; the summary, and the losses by step.
fn run(place: &Place, name: &str, options: &[&str]) -> (Value, BTreeMap<u64, f64>) {
    let (out, log) = (place.at(name), place.at(&format!("{name}.jsonl")));
    let summary = json(&succeeds(&[&["train", "--json", "--out", &out, "--log", &log], options].concat()));
    let losses = lines(&log);
    let losses = losses.iter().filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?))).collect();
    (summary, losses)
}

fn steps_in(out: &str) -> Vec<String> {
    let entries = std::fs::read_dir(Path::new(out).join("checkpoints")).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_resumed_run_is_bitwise_the_uninterrupted_one() {
    let place = Place::new("resume");
    let gpt = ["--dropout", "0.2", "--accumulate", "2", "--mesh", "dp=2", "--plan", "fsdp"];
    let llama = ["--model", "llama", "--kv-heads", "2", "--dtype", "bf16", "--mesh", "dp=2,tp=2"];
    for (name, options, others) in [
        ("gpt", &gpt[..], &[&["--mesh", "tp=2"][..], &["--mesh", "dp=3", "--plan", "fsdp"], &["--plan", "ddp"]][..]),
        ("llama", &llama, &[]),
        ("muon", &["--optimizer", "muon", "--mesh", "dp=2", "--plan", "fsdp"], &[&["--mesh", "tp=2"]]),
        ("adafactor", &["--optimizer", "adafactor", "--mesh", "dp=2", "--plan", "fsdp"], &[&["--mesh", "tp=2"]]),
    ] {
        let saving = ["--steps", "20", "--save-every", "10", "--seed", "18446744073709551615"];
        let (_, expected) = run(&place, name, &[&TINY, options, &saving].concat());
        assert_eq!(expected.len(), 20);
        let whole = format!("{}/checkpoints", place.at(name));
        let middle = format!("{whole}/step-00000010");
        let (summary, found) = run(&place, &format!("{name}-same"), &["--resume", &middle]);
        let rest: BTreeMap<u64, f64> = expected.clone().split_off(&11);
        // bit by bit, weights and moments too
        assert_eq!(found, rest, "{name}");
        assert_eq!(summary["steps"], 20);
        let end = summary["checkpoint"].as_str().unwrap();
        succeeds(&["ckpt", "diff", &format!("{whole}/step-00000020"), end]);
        for (i, way) in others.iter().enumerate() {
            let (_, found) = run(&place, &format!("{name}-{i}"), &[&["--resume", &middle], *way].concat());
            assert!(found.keys().eq(rest.keys()), "{way:?}");
            let far = found.iter().find(|(step, loss)| (*loss - rest[step]).abs() > 2e-5 * rest[step]);
            assert!(far.is_none(), "{way:?}: {found:?}, not {rest:?}");
        }
    }
}

#[test]
fn checkpoints_of_other_models_and_loss_of_later_checkpoints_are_refused() {
    let place = Place::new("refused");
    let options = [&TINY[..], &["--mesh", "dp=2", "--steps", "7", "--save-every", "2", "--keep", "2"]].concat();
    let out = place.at("out");
    run(&place, "out", &options);
    assert_eq!(steps_in(&out), ["step-00000006", "step-00000007"]);
    let resume = |more: &[&str], parts: &[&str]| {
        fails(&[&["train", "--out", &out, "--resume"], more].concat(), parts);
        assert_eq!(steps_in(&out).len(), 2);
    };
    resume(&["--d-model", "32"], &["step-00000007", "d_model 16", "d_model 32", "leave out"]);
    resume(&["--model", "llama"], &["model \"gpt\"", "model \"llama\""]);
    resume(&[&place.at("nothing")], &["nothing", "--resume"]);
    resume(&[&format!("{out}/checkpoints/step-00000006"), "--steps", "9"], &["up to step 7", "--overwrite"]);
    fails(&["train", "--out", &out], &["up to step 7", "--resume", "--overwrite"]);
    fails(&["train", "--out", &out, "--keep", "0"], &["keep"]);
    fails(&["train", "--out", &place.at("new"), "--export-hf", &out], &["earlier export"]);
    assert!(!Path::new(&place.at("new")).join("checkpoints").exists());
    assert!(!Path::new(&out).join("dump").exists(), "a mistake in the options is not a failed run");

    // the last one counts, and there may be more steps than were planned
    let (summary, losses) = run(&place, "out", &["--resume", "--steps", "9", "--lr", "0.001"]);
    assert_eq!((summary["steps"].as_u64(), losses.len()), (Some(9), 9));
    assert_eq!(steps_in(&out), ["step-00000008", "step-00000009"]);
    // resuming a finished run changes nothing
    let content = || {
        let manifest = std::fs::read(format!("{out}/checkpoints/step-00000009/manifest.json")).unwrap();
        let mut content = serde_json::from_slice::<serde_json::Value>(&manifest).unwrap()["content"].take();
        // every save has its own
        assert!(content.as_object_mut().unwrap().remove("save_id").is_some());
        content
    };
    let before = content();
    let (summary, _) = run(&place, "out", &["--resume"]);
    assert!(summary["loss"].is_null() && summary["held_out_loss"].is_f64(), "{summary}");
    assert_eq!(content(), before);
    let (_, losses) = run(&place, "out", &[&options[..], &["--overwrite", "--steps", "3"]].concat());
    assert_eq!((losses.len(), steps_in(&out)), (3, vec!["step-00000002".to_string(), "step-00000003".to_string()]));
}

/// Flips a bit in the last byte of the first file of tensors, which no metadata shows.
fn damage_tensors(checkpoint: &str) {
    let file = format!("{checkpoint}/part-00000.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 4;
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn a_damaged_newest_checkpoint_is_passed_over() {
    let place = Place::new("passed-over");
    let out = place.at("out");
    let options = [&TINY[..], &["--mesh", "dp=2", "--steps", "6", "--save-every", "2", "--keep", "9"]].concat();
    let (_, expected) = run(&place, "out", &options);
    let checkpoint = |step: u64| format!("{out}/checkpoints/step-{step:08}");
    let resumed = |said: &[&str]| {
        let output = shardwise(&["train", "--json", "--resume", "--out", &out]);
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && said.iter().all(|part| message.contains(part)), "{said:?}: {message}");
        let losses = lines(&format!("{out}/losses.jsonl"));
        let losses = losses.iter().filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?)));
        assert_eq!(losses.collect::<BTreeMap<u64, f64>>(), expected);
        succeeds(&["ckpt", "verify", &checkpoint(6)]);
    };
    // found when the tensors are read, and the run is that from the checkpoint before
    damage_tensors(&checkpoint(6));
    resumed(&["passing over", "step-00000006: ", "checksum", "resuming after step 4 of 6"]);
    // found when the metadata are read; two of them
    std::fs::write(format!("{}/manifest.json", checkpoint(6)), "{}").unwrap();
    damage_tensors(&checkpoint(4));
    resumed(&["step-00000006: ", "step-00000004: ", "resuming after step 2 of 6"]);
    // one that is named is meant
    damage_tensors(&checkpoint(6));
    fails(&["train", "--out", &place.at("other"), "--resume", &checkpoint(6)], &["checksum"]);
    // if none is intact, the error is that of the newest one
    damage_tensors(&checkpoint(2));
    damage_tensors(&checkpoint(4));
    fails(&["train", "--out", &out, "--resume"], &["checksum"]);
    for step in [2, 4, 6] {
        std::fs::write(format!("{}/manifest.json", checkpoint(step)), "{}").unwrap();
    }
    fails(&["train", "--out", &out, "--resume"], &["step-00000006", "train without --resume"]);
    assert_eq!(steps_in(&out), ["step-00000002", "step-00000004", "step-00000006"]);
}

/// The contents of all files in a directory, but for the lock, which names the last process.
fn snapshot(directory: &Path) -> BTreeMap<std::path::PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for path in std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
        match path.is_dir() {
            true => found.extend(snapshot(&path)),
            false => drop(found.insert(path.clone(), std::fs::read(&path).unwrap())),
        }
    }
    found.retain(|path, _| !path.ends_with(".train.lock"));
    found
}

#[test]
fn a_resume_with_nothing_left_to_train_changes_nothing() {
    let place = Place::new("nothing-left");
    let (out, log) = (place.at("out"), place.at("out/log.jsonl"));
    let options = [&TINY[..], &["--mesh", "dp=2", "--steps", "6", "--save-every", "3"]].concat();
    std::fs::create_dir(&out).unwrap();
    succeeds(&[&["train", "--out", &out, "--log", &log], &options[..]].concat());
    let before = snapshot(Path::new(&out));
    // a shorter schedule, another rate and another mesh would be those of the run from here on
    for more in [&[][..], &["--steps", "3"], &["--lr", "0.5", "--mesh", "dp=1", "--plan", "ddp"], &["--overwrite"]] {
        let summary = json(&succeeds(&[&["train", "--json", "--out", &out, "--resume"], more].concat()));
        assert!(summary["loss"].is_null() && summary["held_out_loss"].is_f64(), "{summary}");
        let after = snapshot(Path::new(&out));
        let changed: Vec<_> = after.iter().filter(|(path, bytes)| before.get(*path) != Some(bytes)).collect();
        assert!(after.len() == before.len() && changed.is_empty(), "{more:?}: {:?}", changed[0].0);
    }
    // another directory has nothing yet, so there is something to do
    let other = place.at("other");
    succeeds(&["train", "--out", &other, "--resume", &out]);
    assert_eq!(steps_in(&other), ["step-00000006"]);
}

#[test]
fn the_log_of_a_run_goes_on_with_every_step_once() {
    let place = Place::new("log");
    let (out, log) = (place.at("out"), place.at("log.jsonl"));
    let options = [&TINY[..], &["--mesh", "dp=2", "--steps", "6", "--save-every", "2", "--keep", "9"]].concat();
    succeeds(&[&["train", "--out", &out, "--log", &log], &options[..]].concat());
    let steps = |key: &str| -> Vec<u64> {
        lines(&log).iter().filter(|line| line[key].is_f64()).map(|line| line["step"].as_u64().unwrap()).collect()
    };
    assert_eq!((steps("loss"), steps("held_out_loss")), ((1..=6).collect(), vec![4, 6]));
    // what a crash has truncated is of a later step
    let whole = std::fs::read_to_string(&log).unwrap();
    std::fs::write(&log, whole.clone() + "{\"step\":7,\"lo").unwrap();
    let middle = format!("{out}/checkpoints/step-00000002");
    // without --log, too
    succeeds(&["train", "--out", &out, "--resume", &middle, "--overwrite"]);
    assert_eq!((steps("loss"), steps("held_out_loss")), ((1..=6).collect(), vec![4, 6]));
    succeeds(&["train", "--out", &out, "--resume", "--steps", "8", "--log", &log]);
    assert_eq!((steps("loss"), steps("held_out_loss")), ((1..=8).collect(), vec![4, 6, 8]));
    // logs of earlier versions have steps twice
    std::fs::write(&log, format!("{whole}a line of somebody else\n{whole}")).unwrap();
    succeeds(&["train", "--out", &out, "--resume", &middle, "--overwrite", "--steps", "3"]);
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(text.contains("a line of somebody else\n"), "{text}");
    let kept = text.replace("a line of somebody else\n", "");
    let found: Vec<u64> = kept.lines().map(|line| json(line)["step"].as_u64().unwrap()).collect();
    assert_eq!(found, [1, 2, 1, 2, 3, 3]);
    // the log of another directory is not touched, and the command says so
    let other = shardwise(&["train", "--out", &place.at("other"), "--resume", &out, "--steps", "4"]);
    let said = String::from_utf8(other.stderr).unwrap();
    assert!(other.status.success() && said.contains("not logging to") && said.contains("--log"), "{said}");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), text);
}

#[test]
fn a_resumed_run_continues_with_the_next_sequence_unless_the_data_differ() {
    let place = Place::new("position");
    let options = [&TINY[..], &["--mesh", "dp=2", "--steps", "3", "--accumulate", "2"]].concat();
    let out = place.at("out");
    run(&place, "out", &options);
    let position = |step: u64| {
        let path = format!("{out}/checkpoints/step-{step:08}");
        let number =
            |name: &str| shardwise::checkpoint::open(&path).unwrap().value(name).unwrap().read::<u64>().unwrap();
        assert!(number("data.samples") > 1000);
        number("data.position")
    };
    // 8 sequences per batch, 2 batches per step
    assert_eq!(position(3), 48);
    // batches of another size on another mesh go on after the last sequence
    run(&place, "out", &["--resume", "--steps", "5", "--mesh", "dp=3", "--batch-size", "5"]);
    assert_eq!(position(5), 48 + 2 * 10);
    let resumed = |more: &[&str]| {
        let output = shardwise(&[&["train", "--out", &out, "--resume"], more].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(!resumed(&["--steps", "6"]).contains("first batch"));
    assert_eq!(position(6), 78);
    let said = resumed(&["--steps", "7", "--seed", "9"]);
    assert!(said.contains("the seed differs") && said.contains("first batch"), "{said}");
    assert_eq!(position(7), 10);
}

fn read(path: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

#[test]
fn an_export_has_the_names_shapes_and_values_that_hugging_face_expects() {
    let place = Place::new("export");
    for (model, mesh, plan) in [("llama", "tp=2", "tp"), ("gpt", "dp=3", "fsdp")] {
        let hf = place.at(&format!("{model}-hf"));
        let options = ["--model", model, "--mesh", mesh, "--plan", plan, "--steps", "2", "--export-hf", &hf];
        let (summary, _) = run(&place, model, &[&TINY, &options[..], &["--heads", "4"]].concat());
        // the checkpoint in one file under its own names, to compare with
        let whole = place.at(&format!("{model}-whole"));
        succeeds(&["ckpt", "convert", summary["checkpoint"].as_str().unwrap(), &whole, "--to", "hf"]);
        let (found, own) = (read(&format!("{hf}/model.safetensors")), read(&format!("{whole}/model.safetensors")));
        let config = json(&std::fs::read_to_string(format!("{hf}/config.json")).unwrap());
        let same = |name: &str, ours: &Tensor| {
            let (a, b) = (&found[name], ours);
            assert_eq!((a.dims(), a.dtype()), (b.dims(), DType::F32), "{name}");
            let list = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(list(a), list(b), "{name}");
        };
        if model == "llama" {
            assert_eq!((found.len(), &config["architectures"][0]), (12, &"LlamaForCausalLM".into()));
            assert_eq!((&config["num_key_value_heads"], &config["hidden_size"]), (&2.into(), &16.into()));
            same("model.embed_tokens.weight", &own["model.tokens.weight"]);
            same("model.layers.0.self_attn.k_proj.weight", &own["model.blocks.0.attention.key.weight"]);
            same("model.layers.0.mlp.down_proj.weight", &own["model.blocks.0.mlp.down.weight"]);
            same("lm_head.weight", &own["model.head.weight"]);
            continue;
        }
        assert_eq!((found.len(), &config["architectures"][0]), (17, &"GPT2LMHeadModel".into()));
        assert_eq!((&config["n_embd"], &config["n_inner"]), (&16.into(), &64.into()));
        let part = |kind: &str, end: &str| own[&format!("model.blocks.0.attention.{kind}.{end}")].clone();
        let fused = |end| Tensor::cat(&["query", "key", "value"].map(|kind| part(kind, end)), 0).unwrap();
        same("transformer.h.0.attn.c_attn.weight", &fused("weight").t().unwrap());
        same("transformer.h.0.attn.c_attn.bias", &fused("bias"));
        same("transformer.h.0.mlp.c_fc.weight", &own["model.blocks.0.mlp.up.weight"].t().unwrap());
        same("transformer.wpe.weight", &own["model.positions"]);
        // a tokenizer of bytes, with which the export says what the run says
        let prompt = ["--prompt", "Alice", "--max-tokens", "6", "--temperature", "0", "--json"];
        let text = |from: &str| json(&succeeds(&[&["generate", from], &prompt[..]].concat()))["text"].clone();
        assert_eq!(text(&hf), text(&place.at(model)));
        // an export takes the place of an earlier one; nothing is left to train
        succeeds(&["train", "--out", &place.at(model), "--resume", "--export-hf", &hf]);
        assert_eq!(read(&format!("{hf}/model.safetensors")).len(), 17);
    }
}

/// A model that was trained from scratch is one of the shared decoder: it generates with a cache from prompts of different
/// lengths at once, its directory is a model for `generate`, `--init` and `plan`, and what begins from it goes on from its loss.
#[test]
fn the_output_directory_of_a_run_is_a_model() {
    let place = Place::new("is-a-model");
    for model in ["gpt", "llama"] {
        let out = place.at(model);
        let (summary, _) = run(&place, model, &[&TINY, &["--model", model, "--steps", "3"][..]].concat());
        let export = format!("{out}/model");
        let greedy = ["--temperature", "0", "--max-tokens", "40", "--json"];
        let text = |from: &str, prompt: &str| {
            let options = [&["generate", from, "--prompt", prompt], &greedy[..]].concat();
            json(&succeeds(&options))["text"].as_str().unwrap().to_string()
        };
        // longer than the sequences of the run, which the model forgets as it goes on
        let alone: Vec<String> = ["Alice was", "The", "Down the"].iter().map(|prompt| text(&out, prompt)).collect();
        let prompts = place.at("prompts.txt");
        std::fs::write(&prompts, "Alice was\nThe\nDown the\n").unwrap();
        let short = ["--temperature", "0", "--max-tokens", "5", "--json"];
        let batch = succeeds(&[&["generate", &out, "--batch", &prompts], &short[..]].concat());
        for (line, alone) in batch.lines().zip(&alone) {
            let found = json(line)["text"].as_str().unwrap().to_string();
            assert!(!found.is_empty() && alone.starts_with(&found), "{model}: {found:?} in a batch, {alone:?} alone");
        }
        let first = json(&succeeds(&[&["generate", &export, "--prompt", "The"], &short[..]].concat()))["text"].clone();
        assert!(alone[1].starts_with(first.as_str().unwrap()), "{model}: {first} of the export, {:?}", alone[1]);
        // fine-tuning begins where the run ended
        let (tuned, _) =
            run(&place, &format!("{model}-tuned"), &["--init", &out, "--steps", "1", "--lr", "0", "--seq-len", "8"]);
        let (before, after) = (summary["held_out_loss"].as_f64().unwrap(), tuned["held_out_loss"].as_f64().unwrap());
        assert!((before - after).abs() < 0.05 * before, "{model}: {before} before, {after} after");
        assert!(succeeds(&["plan", &out, "--mesh", "tp=2"]).contains(model.trim_end_matches("gpt")));
    }
}
