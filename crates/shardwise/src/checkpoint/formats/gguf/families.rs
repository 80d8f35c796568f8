//! The model families: which architecture of llama.cpp is which model of Hugging Face, and what its tensors are called.

use crate::error::{ErrorKind, Result};

/// A family of models that GGUF files can be opened as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GgufFamily {
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen3,
    Qwen2Moe,
    Qwen3Moe,
    Olmoe,
    Gemma,
    Gemma2,
    Gemma3,
    Phi3,
    Gpt2,
    GptNeoX,
    /// Also RoBERTa, whose files have a table of positions that begins with the first token.
    Bert,
    DistilBert,
}

/// What a file has that distinguishes models of one architecture.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Traits {
    pub(super) experts: bool,
    pub(super) window: bool,
    pub(super) token_types: bool,
}

/// What is done to a stored tensor so that it is the one of Hugging Face.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing.
    Same,
    /// Rows of each query head are reordered from neighbours (2i, 2i + 1) to halves (i, i + n/2).
    QueryRows,
    /// The same for the key heads.
    KeyRows,
    /// Queries, keys and values of all heads become those of each head in turn.
    RowsByHead,
    /// Inputs come first.
    Transposed,
    /// 1 is subtracted.
    MinusOne,
    /// A vector becomes a matrix of one row.
    OneRow,
    /// The first dimension is the expert; `{e}` of the name is its number.
    Experts,
}

/// Names that most decoders have, for tensors outside the layers and inside them.
const DECODER: &[(&str, &str)] =
    &[("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];
const DECODER_LAYER: &[(&str, &str, Change)] = &[
    ("attn_norm", "input_layernorm", Change::Same),
    ("attn_q", "self_attn.q_proj", Change::Same),
    ("attn_k", "self_attn.k_proj", Change::Same),
    ("attn_v", "self_attn.v_proj", Change::Same),
    ("attn_output", "self_attn.o_proj", Change::Same),
    ("ffn_norm", "post_attention_layernorm", Change::Same),
    ("ffn_gate", "mlp.gate_proj", Change::Same),
    ("ffn_up", "mlp.up_proj", Change::Same),
    ("ffn_down", "mlp.down_proj", Change::Same),
];
const LLAMA_LAYER: &[(&str, &str, Change)] =
    &[("attn_q", "self_attn.q_proj", Change::QueryRows), ("attn_k", "self_attn.k_proj", Change::KeyRows)];
const MIXTRAL_LAYER: &[(&str, &str, Change)] = &[
    ("attn_q", "self_attn.q_proj", Change::QueryRows),
    ("attn_k", "self_attn.k_proj", Change::KeyRows),
    ("ffn_gate_inp", "block_sparse_moe.gate", Change::Same),
    ("ffn_gate_exps", "block_sparse_moe.experts.{e}.w1", Change::Experts),
    ("ffn_down_exps", "block_sparse_moe.experts.{e}.w2", Change::Experts),
    ("ffn_up_exps", "block_sparse_moe.experts.{e}.w3", Change::Experts),
];
const HEAD_NORMS: [(&str, &str, Change); 2] =
    [("attn_q_norm", "self_attn.q_norm", Change::Same), ("attn_k_norm", "self_attn.k_norm", Change::Same)];
const EXPERTS: [(&str, &str, Change); 4] = [
    ("ffn_gate_inp", "mlp.gate", Change::Same),
    ("ffn_gate_exps", "mlp.experts.{e}.gate_proj", Change::Experts),
    ("ffn_up_exps", "mlp.experts.{e}.up_proj", Change::Experts),
    ("ffn_down_exps", "mlp.experts.{e}.down_proj", Change::Experts),
];
const QWEN2_MOE_LAYER: &[(&str, &str, Change)] = &[
    EXPERTS[0],
    EXPERTS[1],
    EXPERTS[2],
    EXPERTS[3],
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate", Change::OneRow),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj", Change::Same),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj", Change::Same),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj", Change::Same),
];
const QWEN3_MOE_LAYER: &[(&str, &str, Change)] =
    &[EXPERTS[0], EXPERTS[1], EXPERTS[2], EXPERTS[3], HEAD_NORMS[0], HEAD_NORMS[1]];
const GEMMA2_LAYER: &[(&str, &str, Change)] = &[
    ("ffn_norm", "pre_feedforward_layernorm", Change::Same),
    ("post_attention_norm", "post_attention_layernorm", Change::Same),
    ("post_ffw_norm", "post_feedforward_layernorm", Change::Same),
    HEAD_NORMS[0],
    HEAD_NORMS[1],
];
const PHI3_LAYER: &[(&str, &str, Change)] =
    &[("attn_qkv", "self_attn.qkv_proj", Change::Same), ("ffn_up", "mlp.gate_up_proj", Change::Same)];
const GPT2: &[(&str, &str)] = &[
    ("token_embd", "transformer.wte"),
    ("position_embd", "transformer.wpe"),
    ("output_norm", "transformer.ln_f"),
    ("output", "lm_head"),
];
const GPT2_LAYER: &[(&str, &str, Change)] = &[
    ("attn_norm", "ln_1", Change::Same),
    ("attn_qkv", "attn.c_attn", Change::Transposed),
    ("attn_output", "attn.c_proj", Change::Transposed),
    ("ffn_norm", "ln_2", Change::Same),
    ("ffn_up", "mlp.c_fc", Change::Transposed),
    ("ffn_down", "mlp.c_proj", Change::Transposed),
];
const NEOX: &[(&str, &str)] =
    &[("token_embd", "gpt_neox.embed_in"), ("output_norm", "gpt_neox.final_layer_norm"), ("output", "embed_out")];
const NEOX_LAYER: &[(&str, &str, Change)] = &[
    ("attn_norm", "input_layernorm", Change::Same),
    ("attn_qkv", "attention.query_key_value", Change::RowsByHead),
    ("attn_output", "attention.dense", Change::Same),
    ("ffn_norm", "post_attention_layernorm", Change::Same),
    ("ffn_up", "mlp.dense_h_to_4h", Change::Same),
    ("ffn_down", "mlp.dense_4h_to_h", Change::Same),
];
const BERT: &[(&str, &str)] = &[
    ("token_embd", "embeddings.word_embeddings"),
    ("position_embd", "embeddings.position_embeddings"),
    ("token_types", "embeddings.token_type_embeddings"),
    ("token_embd_norm", "embeddings.LayerNorm"),
];
const BERT_LAYER: &[(&str, &str, Change)] = &[
    ("attn_q", "attention.self.query", Change::Same),
    ("attn_k", "attention.self.key", Change::Same),
    ("attn_v", "attention.self.value", Change::Same),
    ("attn_output", "attention.output.dense", Change::Same),
    ("attn_output_norm", "attention.output.LayerNorm", Change::Same),
    ("ffn_up", "intermediate.dense", Change::Same),
    ("ffn_down", "output.dense", Change::Same),
    ("layer_output_norm", "output.LayerNorm", Change::Same),
];
const DISTILBERT_LAYER: &[(&str, &str, Change)] = &[
    ("attn_q", "attention.q_lin", Change::Same),
    ("attn_k", "attention.k_lin", Change::Same),
    ("attn_v", "attention.v_lin", Change::Same),
    ("attn_output", "attention.out_lin", Change::Same),
    ("attn_output_norm", "sa_layer_norm", Change::Same),
    ("ffn_up", "ffn.lin1", Change::Same),
    ("ffn_down", "ffn.lin2", Change::Same),
    ("layer_output_norm", "output_layer_norm", Change::Same),
];

impl GgufFamily {
    /// The family of an architecture; `traits` distinguish models with several names at Hugging Face.
    pub(super) fn of(architecture: &str, traits: Traits) -> Result<GgufFamily> {
        Ok(match architecture {
            "llama" if traits.experts => GgufFamily::Mixtral,
            "llama" if traits.window => GgufFamily::Mistral,
            "llama" => GgufFamily::Llama,
            "qwen2" => GgufFamily::Qwen2,
            "qwen3" => GgufFamily::Qwen3,
            "qwen2moe" => GgufFamily::Qwen2Moe,
            "qwen3moe" => GgufFamily::Qwen3Moe,
            "olmoe" => GgufFamily::Olmoe,
            "gemma" => GgufFamily::Gemma,
            "gemma2" => GgufFamily::Gemma2,
            "gemma3" => GgufFamily::Gemma3,
            "phi3" => GgufFamily::Phi3,
            "gpt2" => GgufFamily::Gpt2,
            "gptneox" => GgufFamily::GptNeoX,
            "bert" if traits.token_types => GgufFamily::Bert,
            "bert" => GgufFamily::DistilBert,
            other => {
                let known =
                    "llama, qwen2, qwen3, qwen2moe, qwen3moe, olmoe, gemma, gemma2, gemma3, phi3, gpt2, gptneox, bert";
                return Err(ErrorKind::unknown(other).error(
                    "GGUF file",
                    format!("architecture {other:?}"),
                    format!("one of {known}"),
                    "use the Hugging Face directory of the model, or convert with `--to native`, which keeps GGUF's names",
                ));
            }
        })
    }

    /// `model_type` and the name of the class in a `config.json`.
    pub(super) fn hf_names(self) -> (&'static str, &'static str) {
        match self {
            GgufFamily::Llama => ("llama", "LlamaForCausalLM"),
            GgufFamily::Mistral => ("mistral", "MistralForCausalLM"),
            GgufFamily::Mixtral => ("mixtral", "MixtralForCausalLM"),
            GgufFamily::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
            GgufFamily::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
            GgufFamily::Qwen2Moe => ("qwen2_moe", "Qwen2MoeForCausalLM"),
            GgufFamily::Qwen3Moe => ("qwen3_moe", "Qwen3MoeForCausalLM"),
            GgufFamily::Olmoe => ("olmoe", "OlmoeForCausalLM"),
            GgufFamily::Gemma => ("gemma", "GemmaForCausalLM"),
            GgufFamily::Gemma2 => ("gemma2", "Gemma2ForCausalLM"),
            GgufFamily::Gemma3 => ("gemma3_text", "Gemma3ForCausalLM"),
            GgufFamily::Phi3 => ("phi3", "Phi3ForCausalLM"),
            GgufFamily::Gpt2 => ("gpt2", "GPT2LMHeadModel"),
            GgufFamily::GptNeoX => ("gpt_neox", "GPTNeoXForCausalLM"),
            GgufFamily::Bert => ("bert", "BertModel"),
            GgufFamily::DistilBert => ("distilbert", "DistilBertModel"),
        }
    }

    /// Whether it is an encoder, and not a causal language model.
    pub(super) fn is_encoder(self) -> bool {
        matches!(self, GgufFamily::Bert | GgufFamily::DistilBert)
    }

    /// The name of a tensor at Hugging Face and what is done to it; `None` for one that the family does not have.
    pub(super) fn hf_tensor(self, name: &str) -> Option<(String, Change)> {
        let (path, kind) = name.rsplit_once('.')?;
        if !matches!(kind, "weight" | "bias") {
            return None;
        }
        let (outside, layers, prefix): (_, &[&[_]], _) = match self {
            GgufFamily::Llama | GgufFamily::Mistral => (DECODER, &[LLAMA_LAYER, DECODER_LAYER], "model.layers"),
            GgufFamily::Mixtral => (DECODER, &[MIXTRAL_LAYER, DECODER_LAYER], "model.layers"),
            GgufFamily::Qwen2 | GgufFamily::Gemma => (DECODER, &[DECODER_LAYER], "model.layers"),
            GgufFamily::Qwen3 => (DECODER, &[&HEAD_NORMS, DECODER_LAYER], "model.layers"),
            GgufFamily::Qwen2Moe => (DECODER, &[QWEN2_MOE_LAYER, DECODER_LAYER], "model.layers"),
            GgufFamily::Qwen3Moe | GgufFamily::Olmoe => (DECODER, &[QWEN3_MOE_LAYER, DECODER_LAYER], "model.layers"),
            GgufFamily::Gemma2 | GgufFamily::Gemma3 => (DECODER, &[GEMMA2_LAYER, DECODER_LAYER], "model.layers"),
            GgufFamily::Phi3 => (DECODER, &[PHI3_LAYER, DECODER_LAYER], "model.layers"),
            GgufFamily::Gpt2 => (GPT2, &[GPT2_LAYER], "transformer.h"),
            GgufFamily::GptNeoX => (NEOX, &[NEOX_LAYER], "gpt_neox.layers"),
            GgufFamily::Bert => (BERT, &[BERT_LAYER], "encoder.layer"),
            GgufFamily::DistilBert => (BERT, &[DISTILBERT_LAYER], "transformer.layer"),
        };
        let (new, change) = match path.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            None => (outside.iter().find(|(old, _)| *old == path)?.1.to_string(), Change::Same),
            Some((layer, rest)) => {
                let layer: usize = layer.parse().ok()?;
                let &(_, new, change) = layers.iter().flat_map(|table| table.iter()).find(|(old, ..)| *old == rest)?;
                (format!("{prefix}.{layer}.{new}"), change)
            }
        };
        // Matrices of GPT-2 are transposed; its biases are not.
        let change = if change == Change::Transposed && kind == "bias" { Change::Same } else { change };
        let is_gemma = matches!(self, GgufFamily::Gemma | GgufFamily::Gemma2 | GgufFamily::Gemma3);
        let change = if is_gemma && path.ends_with("_norm") { Change::MinusOne } else { change };
        Some((format!("{new}.{kind}"), change))
    }
}
