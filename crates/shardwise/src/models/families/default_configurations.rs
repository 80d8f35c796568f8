//! The default configurations of transformers are read, and absent fields have the values that it writes.

use serde_json::{Map, Value, json};

use super::{Architecture, FAMILIES, Family};
use crate::models::fields::ConfigFields;

/// By kind of model what transformers 5 writes for a configuration without arguments: `tests/scripts/record_configs.py`.
const RECORDED: &str = include_str!("../../../tests/data/configs/transformers5.json");

#[test]
fn every_family_reads_what_transformers_writes_and_has_its_defaults() {
    let recorded: Map<String, Value> = serde_json::from_str(RECORDED).unwrap();
    assert_eq!(recorded.len(), FAMILIES.len());
    for family in FAMILIES {
        let json = &recorded[family.model_type];
        let fields = ConfigFields::new(json).unwrap();
        let read = (family.read)(&fields).unwrap();
        fields.refuse_unread(&[]).unwrap_or_else(|error| panic!("{}: {error}", family.model_type));
        let bare = json!({"model_type": family.model_type});
        let assumed = (family.read)(&ConfigFields::new(&bare).unwrap()).unwrap();
        assert_eq!(assumed, read, "{}", family.model_type);
    }
}

fn read(json: &Value) -> Architecture {
    let fields = ConfigFields::new(json).unwrap();
    let found = (Family::of(&fields).unwrap().read)(&fields).unwrap();
    fields.refuse_unread(&[]).unwrap();
    found
}

/// Fields that transformers 4 and older wrote for published models, in addition to those of today.
#[test]
fn older_files_are_read_too() {
    let everywhere = json!({
        "_name_or_path": "x/y", "architectures": ["X"], "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
        "is_encoder_decoder": false, "pruned_heads": {}, "torchscript": false, "use_bfloat16": false, "output_past": true,
        "num_beams": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0, "bad_words_ids": null,
        "_num_labels": 2, "id2label": {"0": "A"}, "label2id": {"A": 0}, "task_specific_params": {"t": {"max_length": 50}},
    });
    let multilingual = json!({"directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform"});
    let of_kind = [
        ("bert", multilingual),
        ("xlm-roberta", json!({"position_embedding_type": "absolute"})),
        ("llama", json!({"rope_theta": 10000.0, "rope_scaling": null})),
        ("mistral", json!({"rope_theta": 10000.0})),
        ("mixtral", json!({"rope_theta": 1e6, "num_local_experts": 8})),
        (
            "gemma3_text",
            json!({"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
            "_sliding_window_pattern": 6}),
        ),
        ("phi3", json!({"rope_theta": 10000.0, "rope_scaling": null, "full_attn_mod": 1, "interpolate_factor": 1})),
        ("gpt_neox", json!({"rotary_pct": 0.25, "rotary_emb_base": 10000, "rope_scaling": null})),
        ("gpt2", json!({"n_ctx": 1024})),
        ("qwen3_moe", json!({"num_experts": 128, "rope_theta": 10000.0})),
    ];
    for (kind, fields) in of_kind {
        let mut json = json!({"model_type": kind});
        let bare = read(&json);
        for (name, value) in everywhere.as_object().unwrap().iter().chain(fields.as_object().unwrap()) {
            json[name] = value.clone();
        }
        assert_eq!(read(&json), bare, "{kind}");
    }
}

/// `layer_types` decides which layers of a Gemma 3 are local; without it the pattern does.
#[test]
fn layer_types_win_over_a_pattern() {
    let windows = |mut json: Value| -> Vec<bool> {
        json["model_type"] = json!("gemma3_text");
        json["num_hidden_layers"] = json!(4);
        let Architecture::Decoder(spec) = read(&json) else { panic!("an encoder") };
        spec.layers.iter().map(|layer| layer.window.is_some()).collect()
    };
    let types = json!(["full_attention", "sliding_attention", "full_attention", "full_attention"]);
    assert_eq!(windows(json!({"_sliding_window_pattern": 2, "layer_types": types})), [false, true, false, false]);
    assert_eq!(windows(json!({"_sliding_window_pattern": 2})), [true, false, true, false]);
    assert_eq!(windows(json!({"sliding_window_pattern": 3, "_sliding_window_pattern": 2})), [true, true, false, true]);
}
