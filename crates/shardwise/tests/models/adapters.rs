//! Adapters of the PEFT library: its files give its logits on every mesh, and what is saved is what was loaded.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use shardwise::models::{self, PretrainedModel, load_adapter, lora_targets, save_adapter};
use shardwise::nn::{Forward, Lora, Module, lora_adapters};
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path)
}

fn base(name: &str, mesh: &DeviceMesh) -> Result<PretrainedModel> {
    models::load(data("conformance/data/models").join(name), mesh, TensorParallel::new("tp"))
}

struct Recorded {
    ids: Vec<Vec<u32>>,
    logits: Vec<Vec<f64>>,
}

fn recorded(name: &str) -> Recorded {
    let text = fs::read_to_string(data("data/adapters").join(name).join("cases.json")).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let ids = serde_json::from_value(json["input_ids"].clone()).unwrap();
    Recorded { ids, logits: serde_json::from_value(json["logits"].clone()).unwrap() }
}

/// Logits of the last position of every row.
fn logits(model: &PretrainedModel, mesh: &DeviceMesh, ids: &[Vec<u32>]) -> Result<Vec<Vec<f64>>> {
    let (rows, length) = (ids.len(), ids[0].len());
    let ids = DTensor::from_fn((rows, length), DType::U32, mesh, [Replicate], |i| f64::from(ids[i[0]][i[1]]))?;
    let last = model.forward(&ids)?.narrow(1, length - 1, 1)?.detach().full_tensor()?;
    Ok(last.squeeze(1)?.to_dtype(DType::F64)?.to_vec2()?)
}

/// The tolerance of the recorded logits of the directories, absolute and relative.
const TOLERANCE: f64 = 5e-4;

fn check(found: &[Vec<f64>], expected: &[Vec<f64>], what: &str) {
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        let allowed = TOLERANCE * (1.0 + expected.abs());
        assert!((found - expected).abs() <= allowed, "{what}: {found}, PEFT has {expected}");
    }
}

#[test]
fn adapters_of_peft_give_its_logits_on_every_mesh() {
    for name in ["llama_gqa", "gpt2"] {
        for ranks in [1, 2, 3, 5] {
            let scratch = Scratch::new("adapters");
            let saved = scratch.0.clone();
            launch(ranks, move |world| {
                let mesh = world.mesh([("tp", ranks)])?;
                let Recorded { ids, logits: expected } = recorded(name);
                let model = base(name, &mesh)?;
                let plain = logits(&model, &mesh, &ids)?;
                assert!((plain[0][0] - expected[0][0]).abs() > 0.01, "the adapter changes the logits");
                let lora = load_adapter(&world, data("data/adapters").join(name), &model)?;
                let what = format!("{name} on {ranks}");
                check(&logits(&model, &mesh, &ids)?, &expected, &what);
                assert_eq!(model.trainable_parameters().len(), 2 * lora_adapters(&model).len());
                save_adapter(&world, &saved, &model, &lora, name)?;
                let again = base(name, &mesh)?;
                let loaded = load_adapter(&world, &saved, &again)?;
                check(&logits(&again, &mesh, &ids)?, &expected, &format!("{what}, saved and loaded"));
                loaded.merge(&again)?;
                check(&logits(&again, &mesh, &ids)?, &expected, &format!("{what}, merged"));
                assert!(lora_adapters(&again).is_empty());
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn settings_are_those_that_peft_reads() {
    let scratch = Scratch::new("adapter-settings");
    let path = scratch.0.clone();
    let saved = path.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let model = base("gpt2", &mesh)?;
        let lora = Lora { rank: 2, alpha: 5.0, dropout: 0.1 };
        let targets = lora_targets(&model, &["attn.c_attn", "mlp.c_fc"])?;
        lora.apply(&model, |path| targets.contains(path))?;
        save_adapter(&world, &saved, &model, &lora, "gpt2")
    })
    .unwrap();
    let text = fs::read_to_string(path.join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(config["target_modules"], json!(["c_attn", "c_fc"]));
    assert_eq!((&config["fan_in_fan_out"], &config["r"], &config["lora_alpha"]), (&json!(true), &json!(2), &json!(5)));
    // Three projections of rank 2 in one tensor, at the same scale.
    assert_eq!(config["rank_pattern"]["transformer.h.0.attn.c_attn"], json!(6));
    assert_eq!(config["alpha_pattern"]["transformer.h.0.attn.c_attn"], json!(15));
    assert_eq!(config["rank_pattern"]["transformer.h.0.mlp.c_fc"], Value::Null);
    let found = shardwise::checkpoint::open(path.join("adapter_model.safetensors")).unwrap();
    let shape =
        |name: &str| found.tensor(&format!("base_model.model.transformer.h.0.{name}.weight")).unwrap().shape.clone();
    assert_eq!((shape("attn.c_attn.lora_A"), shape("attn.c_attn.lora_B")), (vec![6, 48], vec![144, 6]));
}

#[test]
fn targets_are_found_by_both_names() {
    launch(1, |world| {
        let mesh = world.mesh([("tp", 1)])?;
        let model = base("llama_gqa", &mesh)?;
        let of_files = lora_targets(&model, &["q_proj", "self_attn.v_proj"])?;
        assert_eq!(of_files, lora_targets(&model, &["query", "attention.value"])?);
        assert!(of_files.contains("blocks.0.attention.query"), "{of_files:?}");
        let layers = of_files.len() / 2;
        assert_eq!(lora_targets(&model, &["all-linear"])?.len(), 7 * layers);
        let error = lora_targets(&model, &["q_prj"]).unwrap_err().to_string();
        assert!(error.contains("`q_prj`") && error.contains("did you mean `q_proj`"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn what_is_not_supported_is_named_and_changes_nothing() {
    let scratch = Scratch::new("bad-adapters");
    let path = scratch.0.clone();
    let text = fs::read_to_string(data("data/adapters/gpt2/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let cases: Vec<(Value, &str)> = vec![
        (json!({"use_dora": true}), "`use_dora`: true"),
        (json!({"modules_to_save": ["lm_head"]}), "`modules_to_save`"),
        (json!({"bias": "all"}), "bias \"all\""),
        (json!({"peft_type": "IA3"}), "IA3"),
        (json!({"r": 3}), "A of shape [2, 48]"),
        (json!({"r": 0}), "r: 0"),
        (json!({"rank_pattern": {"h\\.[0-1].*": 3}}), "without patterns"),
    ];
    for (change, expected) in cases {
        let mut changed = config.clone();
        changed.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        fs::write(path.join("adapter_config.json"), changed.to_string()).unwrap();
        fs::copy(data("data/adapters/gpt2/adapter_model.safetensors"), path.join("adapter_model.safetensors")).unwrap();
        let path = path.clone();
        launch(2, move |world| {
            let mesh = world.mesh([("tp", 2)])?;
            let model = base("gpt2", &mesh)?;
            let before = model.trainable_parameters().len();
            let error = load_adapter(&world, &path, &model).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} should have {expected}");
            assert_eq!(model.trainable_parameters().len(), before);
            assert!(lora_adapters(&model).is_empty());
            Ok(())
        })
        .unwrap();
    }
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let model = base("gpt2", &mesh)?;
        let error = load_adapter(&world, data("data/adapters/llama_gqa"), &model).unwrap_err().to_string();
        assert!(error.contains("model.layers.0"), "{error}");
        assert!(load_adapter(&world, data("data/adapters/nothing"), &model).is_err());
        Ok(())
    })
    .unwrap();
}
