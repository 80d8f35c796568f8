//! The `config.json` of a model, from the metadata and the shapes of its tensors.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::families::GgufFamily;
use super::metadata::{Metadata, bad};
use super::rope::{RopeFactors, rope_scaling};
use crate::checkpoint::metadata::stored::StoredTensor;
use crate::error::{ErrorKind, Result};

/// Numbers of heads and their size, which tensors are reordered by.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadCounts {
    pub(super) queries: usize,
    pub(super) keys: usize,
}

impl HeadCounts {
    pub(super) fn of(meta: &Metadata<'_>) -> Result<Self> {
        let queries = meta.needed_count(".attention.head_count")?;
        let keys = meta.count(".attention.head_count_kv")?.unwrap_or(queries);
        if queries == 0 || keys == 0 {
            return Err(bad("attention.head_count", "0", "at least one head"));
        }
        Ok(HeadCounts { queries, keys })
    }
}

/// Rotary base of models whose files do not name one.
const ROPE_THETA: f64 = 10_000.0;

/// Builds the configuration. `tensors` are those of the file, by its names.
pub(super) fn config(
    family: GgufFamily,
    meta: &Metadata<'_>,
    tensors: &BTreeMap<String, StoredTensor>,
    factors: &RopeFactors,
) -> Result<Json> {
    let (model_type, class) = family.hf_names();
    let heads = HeadCounts::of(meta)?;
    let size = |name: &str, dim: usize| tensors.get(name).and_then(|tensor| tensor.shape.get(dim)).copied();
    let vocabulary = size("token_embd.weight", 0).ok_or_else(|| no_tensor("token_embd.weight"))?;
    let mut config = Map::new();
    let mut set = |name: &str, value: Json| drop(config.insert(name.to_string(), value));
    set("architectures", json!([class]));
    set("model_type", json!(model_type));
    set("vocab_size", json!(vocabulary));
    set("tie_word_embeddings", json!(!tensors.contains_key("output.weight")));
    set("torch_dtype", json!("float32"));
    set("bos_token_id", token(meta, "bos")?);
    set("pad_token_id", token(meta, "padding")?);
    set("eos_token_id", end_tokens(meta)?);

    let (hidden, layers) = (meta.needed_count(".embedding_length")?, meta.needed_count(".block_count")?);
    if layers > tensors.len() {
        let needed = format!("at most one per tensor, of which there are {}", tensors.len());
        return Err(bad("block_count", &layers.to_string(), &needed));
    }
    let (context, inner) = (meta.needed_count(".context_length")?, meta.count(".feed_forward_length")?);
    let epsilon = match meta.number(".attention.layer_norm_rms_epsilon")? {
        Some(epsilon) => Some(epsilon),
        None => meta.number(".attention.layer_norm_epsilon")?,
    };
    let epsilon = epsilon.ok_or_else(|| bad("attention.layer_norm_rms_epsilon", "none", "a number"))?;
    if family == GgufFamily::Gpt2 {
        // Files of llama.cpp always claim four times the width, which is what null means; the matrices are what counts.
        let inner = size("blk.0.ffn_up.weight", 0).or(inner).filter(|inner| *inner != 4 * hidden);
        let gpt2 = json!({
            "n_embd": hidden, "n_layer": layers, "n_head": heads.queries, "n_positions": context, "n_ctx": context,
            "n_inner": inner, "layer_norm_epsilon": epsilon, "activation_function": "gelu_new",
        });
        config.extend(gpt2.as_object().cloned().unwrap_or_default());
        return Ok(Json::Object(config));
    }
    if family.is_encoder() {
        if meta.flag(".attention.causal")? == Some(true) {
            return Err(unsupported("attention.causal true", "an encoder whose tokens see all tokens"));
        }
        let inner = inner.ok_or_else(|| bad("feed_forward_length", "none", "a count"))?;
        // Of a RoBERTa the table has lost the rows before the first position.
        let positions = size("position_embd.weight", 0).unwrap_or(context);
        let encoder = match family {
            // Its class has the epsilon of BERT and no field for it.
            GgufFamily::DistilBert if epsilon != 1e-12 => {
                let found = format!("attention.layer_norm_epsilon {epsilon} without token types");
                return Err(unsupported(&found, "1e-12, the epsilon of DistilBERT"));
            }
            GgufFamily::DistilBert => json!({
                "dim": hidden, "n_layers": layers, "n_heads": heads.queries, "hidden_dim": inner,
                "max_position_embeddings": positions, "activation": "gelu",
            }),
            _ => json!({
                "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads.queries,
                "intermediate_size": inner, "max_position_embeddings": positions, "layer_norm_eps": epsilon,
                "type_vocab_size": size("token_types.weight", 0), "hidden_act": "gelu",
            }),
        };
        config.extend(encoder.as_object().cloned().unwrap_or_default());
        return Ok(Json::Object(config));
    }
    let head_dim = match (meta.count(".attention.key_length")?, meta.count(".attention.value_length")?) {
        (Some(key), Some(value)) if key != value => {
            let found = format!("attention.key_length {key} and attention.value_length {value}");
            return Err(unsupported(&found, "one size for keys and values"));
        }
        (Some(size), _) | (None, Some(size)) => size,
        (None, None) => hidden / heads.queries,
    };
    let theta = meta.number(".rope.freq_base")?.unwrap_or(ROPE_THETA);
    let rotary = meta.count(".rope.dimension_count")?.unwrap_or(head_dim);
    let scaling = rope_scaling(meta, factors, theta, rotary)?;
    set("hidden_size", json!(hidden));
    set("num_hidden_layers", json!(layers));
    set("num_attention_heads", json!(heads.queries));
    set("max_position_embeddings", json!(context));
    set("intermediate_size", json!(inner.ok_or_else(|| bad("feed_forward_length", "none", "a count"))?));
    set("rope_scaling", scaling);
    if family == GgufFamily::GptNeoX {
        set("layer_norm_eps", json!(epsilon));
        set("rotary_emb_base", json!(theta));
        set("rotary_pct", json!(rotary as f64 / head_dim.max(1) as f64));
        set("use_parallel_residual", json!(meta.flag(".use_parallel_residual")?.unwrap_or(true)));
        set("hidden_act", json!("gelu"));
        set("attention_bias", json!(tensors.contains_key("blk.0.attn_qkv.bias")));
        return Ok(Json::Object(config));
    }
    set("num_key_value_heads", json!(heads.keys));
    set("rms_norm_eps", json!(epsilon));
    set("rope_theta", json!(theta));
    set("head_dim", json!(head_dim));
    set("hidden_act", json!("silu"));
    if rotary != head_dim {
        match family {
            GgufFamily::Phi3 => set("partial_rotary_factor", json!(rotary as f64 / head_dim as f64)),
            _ => {
                let found = format!("rope.dimension_count {rotary} with heads of {head_dim}");
                return Err(unsupported(&found, "positions for whole heads"));
            }
        }
    }
    let has = |name: &str| tensors.contains_key(name);
    let window = meta.count(".attention.sliding_window")?.filter(|window| *window > 0);
    match family {
        GgufFamily::Llama => {
            set("attention_bias", json!(has("blk.0.attn_q.bias")));
            set("mlp_bias", json!(has("blk.0.ffn_up.bias")));
        }
        GgufFamily::Mistral => set("sliding_window", json!(window)),
        GgufFamily::Qwen3 | GgufFamily::Qwen3Moe => set("attention_bias", json!(has("blk.0.attn_q.bias"))),
        GgufFamily::Phi3 => {
            set("sliding_window", json!(window));
            let original = meta.count(".rope.scaling.original_context_length")?;
            set("original_max_position_embeddings", json!(original.unwrap_or(context)));
        }
        GgufFamily::Gemma | GgufFamily::Gemma2 | GgufFamily::Gemma3 => {
            let gemma = gemma(family, meta, heads, window, hidden, layers, head_dim)?;
            config.extend(gemma.as_object().cloned().unwrap_or_default());
        }
        _ => {}
    }
    if matches!(family, GgufFamily::Mixtral | GgufFamily::Qwen2Moe | GgufFamily::Qwen3Moe | GgufFamily::Olmoe) {
        config.extend(experts(family, meta, &size)?);
    }
    Ok(Json::Object(config))
}

/// What the Gemma models have in addition to the common sizes.
fn gemma(
    family: GgufFamily,
    meta: &Metadata<'_>,
    heads: HeadCounts,
    window: Option<usize>,
    hidden: usize,
    layers: usize,
    head_dim: usize,
) -> Result<Json> {
    let mut config = json!({ "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh" });
    if family == GgufFamily::Gemma {
        return Ok(config);
    }
    // The scale of the scores is not in the files: llama.cpp knows the largest models by their number of layers.
    let is_largest = layers == if family == GgufFamily::Gemma2 { 46 } else { 62 };
    let scale = if is_largest { hidden / heads.queries } else { head_dim };
    config["query_pre_attn_scalar"] = json!(scale);
    config["attn_logit_softcapping"] = json!(meta.number(".attn_logit_softcapping")?);
    config["final_logit_softcapping"] = json!(meta.number(".final_logit_softcapping")?);
    config["sliding_window"] = json!(window);
    let pattern = match (window, family) {
        (None, _) => 1,
        (Some(_), GgufFamily::Gemma2) => 2,
        (Some(_), _) => meta.count(".attention.sliding_window_pattern")?.unwrap_or(6),
    };
    if pattern == 0 {
        return Err(bad("attention.sliding_window_pattern", "0", "a count"));
    }
    // The last layer of each period sees everything.
    let kind = |layer: usize| if (layer + 1).is_multiple_of(pattern) { "full_attention" } else { "sliding_attention" };
    config["layer_types"] = json!((0..layers).map(kind).collect::<Vec<_>>());
    if family == GgufFamily::Gemma3 {
        config["sliding_window_pattern"] = json!(pattern);
        config["rope_local_base_freq"] = json!(meta.number(".rope.freq_base_swa")?.unwrap_or(ROPE_THETA));
    }
    Ok(config)
}

/// What mixtures of experts have in addition to the common sizes.
fn experts(
    family: GgufFamily,
    meta: &Metadata<'_>,
    size: &dyn Fn(&str, usize) -> Option<usize>,
) -> Result<Map<String, Json>> {
    let mut config = Map::new();
    let count = meta.needed_count(".expert_count")?;
    let name = if family == GgufFamily::Mixtral { "num_local_experts" } else { "num_experts" };
    config.insert(name.to_string(), json!(count));
    config.insert("num_experts_per_tok".to_string(), json!(meta.needed_count(".expert_used_count")?));
    let inner = meta.count(".expert_feed_forward_length")?.or(size("blk.0.ffn_gate_exps.weight", 1));
    match family {
        GgufFamily::Mixtral => {
            config.insert("sliding_window".to_string(), Json::Null);
        }
        GgufFamily::Olmoe => {
            config.insert("norm_topk_prob".to_string(), json!(false));
        }
        _ => {
            config.insert("moe_intermediate_size".to_string(), json!(inner));
            // llama.cpp divides the weights of the chosen experts by their sum for Qwen 3, and not for Qwen 2.
            config.insert("norm_topk_prob".to_string(), json!(family == GgufFamily::Qwen3Moe));
            config.insert("decoder_sparse_step".to_string(), json!(1));
            config.insert("mlp_only_layers".to_string(), json!([]));
        }
    }
    if family == GgufFamily::Qwen2Moe {
        let shared = meta.count(".expert_shared_feed_forward_length")?.or(size("blk.0.ffn_gate_shexp.weight", 0));
        config.insert("shared_expert_intermediate_size".to_string(), json!(shared));
    }
    Ok(config)
}

/// The number of a special token, null if there is none.
pub(super) fn token(meta: &Metadata<'_>, kind: &str) -> Result<Json> {
    Ok(json!(meta.count(&format!("tokenizer.ggml.{kind}_token_id"))?))
}

/// The tokens that end a generation: one number, or a list if the end of a turn is another token than the end of a text.
pub(super) fn end_tokens(meta: &Metadata<'_>) -> Result<Json> {
    let mut ends = Vec::new();
    for kind in ["eos", "eot", "eom"] {
        let id = meta.count(&format!("tokenizer.ggml.{kind}_token_id"))?;
        ends.extend(id.filter(|id| !ends.contains(id)));
    }
    Ok(match ends.as_slice() {
        [] => Json::Null,
        [end] => json!(end),
        several => json!(several),
    })
}

pub(super) fn no_tensor(name: &str) -> crate::error::Error {
    ErrorKind::Damaged.error(
        "GGUF file",
        format!("no tensor {name:?}"),
        "all tensors of a language model",
        "the file is incomplete, or holds another kind of model",
    )
}

fn unsupported(found: &str, needed: &str) -> crate::error::Error {
    ErrorKind::Unsupported.error("GGUF metadata", found, needed, "use the Hugging Face directory of the model")
}
